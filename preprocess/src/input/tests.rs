//! The documents of files do not depend on the codec, the block size, the shards, and the position
//! at which a run resumes.

mod compressed;
mod folders;
mod lines;

use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};

use flate2::write::{DeflateEncoder, GzEncoder};
use flate2::{Compression, Crc};
use tempfile::TempDir;

use super::*;
use crate::batch::document_batch::{BatchEnd, DocumentBatch};

/// Documents, where each batch continued, and why it ended early.
#[derive(Debug, Default)]
pub(super) struct Cut {
    pub(super) documents: Vec<String>,
    /// After this many documents a run could resume here.
    places: Vec<(usize, Position)>,
    stop: Option<BatchEnd>,
    lines: u64,
}

pub(super) fn cut(chunker: InputChunker) -> Cut {
    let mut chunker = chunker;
    let mut cut = Cut { places: vec![(0, Position::default())], ..Cut::default() };
    let mut batch = DocumentBatch::default();
    let mut seq = 0;
    let mut ends = Position::default();
    loop {
        batch.reset();
        if !chunker.fill(&mut batch) {
            return cut;
        }
        assert_eq!(batch.seq, seq);
        seq += 1;
        let DocumentBatch { shape, bytes, spans, offset, input_idx, next, stop, .. } = &mut batch;
        if let Some(stop) = stop.take() {
            cut.stop = Some(stop);
            return cut;
        }
        if ends.input_idx == *input_idx {
            assert!(*offset >= ends.offset);
        }
        let mut records = Records::new(shape, bytes, spans, *offset);
        for record in records.by_ref() {
            if !record.is_blank {
                cut.documents.push(String::from_utf8_lossy(record.bytes).into_owned());
            }
        }
        cut.lines += records.lines_before();
        assert!(ends < *next, "{ends:?} {next:?}");
        ends = *next;
        cut.places.push((cut.documents.len(), ends));
    }
}

fn find(paths: &[PathBuf], options: &InputOptions) -> Vec<Input> {
    let names: Vec<_> = paths.iter().map(|path| path.display().to_string()).collect();
    expand(&names, options, "text").unwrap()
}

fn write(folder: &TempDir, name: &str, bytes: impl AsRef<[u8]>) -> PathBuf {
    let path = folder.path().join(name);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(&path, bytes).unwrap();
    path
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

/// Members with their length in the header, and an empty one at the end, as bgzip writes them.
fn bgzip(bytes: &[u8], member_bytes: usize) -> Vec<u8> {
    let mut out = Vec::new();
    for part in bytes.chunks(member_bytes).chain([&b""[..]]) {
        let mut encoder = DeflateEncoder::new(Vec::new(), Compression::fast());
        encoder.write_all(part).unwrap();
        let deflated = encoder.finish().unwrap();
        let mut crc = Crc::new();
        crc.update(part);
        out.extend(b"\x1f\x8b\x08\x04\0\0\0\0\0\xff\x06\0BC\x02\0");
        out.extend((deflated.len() as u16 + 25).to_le_bytes());
        out.extend(deflated);
        out.extend(crc.sum().to_le_bytes());
        out.extend((part.len() as u32).to_le_bytes());
    }
    out
}

/// A frame with its checksum, and with its length if `content`.
fn zstd_frame(bytes: &[u8], content: bool) -> Vec<u8> {
    let mut encoder = zstd::Encoder::new(Vec::new(), 1).unwrap();
    encoder.include_checksum(true).unwrap();
    if content {
        encoder.set_pledged_src_size(Some(bytes.len() as u64)).unwrap();
    }
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

fn zstd_frames(bytes: &[u8], frame_bytes: usize, content: bool) -> Vec<u8> {
    let skippable = [&b"\x5e\x2a\x4d\x18\x03\0\0\0"[..], b"abc"].concat();
    let frames = bytes.chunks(frame_bytes).map(|part| zstd_frame(part, content));
    let mut out = skippable.clone();
    out.extend(frames.flatten());
    // An empty frame, and a seek table, which the decoder skips.
    out.extend(zstd_frame(b"", content));
    out.extend(skippable);
    out
}

const LINES: &str = "{\"text\":\"a\"}\n\n{\"text\":\"bb\"}\r\n \n{\"text\":\"ccc\"}\n{}\n{\"n\":7}";

/// The same lines in every codec, each with a file name.
fn codecs(text: &str) -> Vec<(&'static str, Vec<u8>)> {
    let bytes = text.as_bytes();
    let members = bytes.chunks(9).map(gzip).collect::<Vec<_>>();
    vec![
        ("a.jsonl", bytes.to_vec()),
        ("a.jsonl.zst", zstd_frame(bytes, false)),
        ("b.jsonl.zst", zstd_frames(bytes, 7, true)),
        ("c.jsonl.zst", zstd_frames(bytes, 11, false)),
        ("a.jsonl.gz", gzip(bytes)),
        ("b.jsonl.gz", members.concat()),
        ("c.jsonl.gz", bgzip(bytes, 13)),
    ]
}

#[test]
fn codecs_give_equal_documents() {
    let folder = tempfile::tempdir().unwrap();
    for (name, bytes) in codecs(LINES) {
        let path = write(&folder, name, bytes);
        for block_bytes in [1, 2, 5, 64, 1 << 20] {
            let inputs = find(std::slice::from_ref(&path), &InputOptions::default());
            let cut = cut(InputChunker::new(inputs, block_bytes, 1 << 20));
            assert!(cut.stop.is_none(), "{name}: {:?}", cut.stop);
            let expected: Vec<_> =
                LINES.split('\n').filter(|line| !line.trim().is_empty()).collect();
            assert_eq!(cut.documents, expected, "{name}, blocks of {block_bytes}");
            assert_eq!(cut.lines, 7);
        }
    }
}

/// From every position that a batch returned, the documents are those that follow it.
#[track_caller]
fn check_resume(paths: &[PathBuf], options: &InputOptions, block_bytes: usize) -> usize {
    let inputs = find(paths, options);
    let whole = cut(InputChunker::new(inputs.clone(), block_bytes, 1 << 20).ahead(3));
    assert!(whole.stop.is_none(), "{:?}", whole.stop);
    for &(before, place) in &whole.places {
        let chunker =
            InputChunker::new(inputs.clone(), block_bytes, 1 << 20).ahead(2).start_at(place);
        let rest = cut(chunker);
        assert!(rest.stop.is_none(), "{place:?}: {:?}", rest.stop);
        assert_eq!(rest.documents, whole.documents[before..], "from {place:?}");
    }
    whole.places.len()
}

#[test]
fn runs_resume_at_any_position() {
    let folder = tempfile::tempdir().unwrap();
    let mut paths: Vec<_> =
        codecs(LINES).into_iter().map(|(name, bytes)| write(&folder, name, bytes)).collect();
    let array = format!("[{}]\n", "{\"text\": \"]}\\\"\"},\n 7 ,".repeat(5).trim_end_matches(','));
    paths.push(write(&folder, "a.json", &array));
    paths.push(write(&folder, "b.json.gz", bgzip(array.as_bytes(), 17)));
    paths.push(write(&folder, "empty.jsonl", ""));
    paths.push(write(&folder, "a.txt", "one\ntwo\r\n\nthree"));
    paths.push(write(&folder, "b.txt.zst", zstd_frames(b"one\ntwo\r\n\nthree\n", 5, true)));
    for block_bytes in [1, 3, 17, 1000] {
        let places = check_resume(&paths, &InputOptions::default(), block_bytes);
        assert!(places > paths.len() - 1);
        for path in &paths {
            check_resume(std::slice::from_ref(path), &InputOptions::default(), block_bytes);
        }
    }
}

/// Lines of a member with a wrong checksum are read before the error is found, and may have been
/// committed: a run that resumes after them must find the error again.
#[test]
fn resumed_runs_find_an_error_again() {
    let folder = tempfile::tempdir().unwrap();
    let line = "{\"text\":\"abcdefgh\"}\n";
    let mut packed = bgzip(line.repeat(4).as_bytes(), line.len());
    let first_end = bgzip(line.as_bytes(), 100).len() - bgzip(b"", 1).len();
    packed[first_end - 8] ^= 1;
    let mut frames = zstd_frames(line.repeat(4).as_bytes(), line.len(), true);
    let frame_end = 11 + zstd_frame(line.as_bytes(), true).len();
    frames[frame_end - 1] ^= 1;
    for (name, bytes) in [("a.jsonl.gz", packed), ("a.jsonl.zst", frames)] {
        let path = write(&folder, name, bytes);
        for (offset, fails) in [(0, true), (line.len(), true), (2 * line.len(), false)] {
            let inputs = find(std::slice::from_ref(&path), &InputOptions::default());
            let position = Position { input_idx: 0, offset: offset as u64 };
            let cut = cut(InputChunker::new(inputs, 1, 1000).start_at(position));
            assert_eq!(cut.stop.is_some(), fails, "{name} from {offset}: {:?}", cut.stop);
        }
    }
}

#[test]
fn positions_after_the_end_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    for (name, bytes) in codecs(LINES).into_iter().skip(1) {
        let inputs = find(&[write(&folder, name, bytes)], &InputOptions::default());
        let place = Position { input_idx: 0, offset: 1000 };
        let cut = cut(InputChunker::new(inputs, 100, 1 << 20).start_at(place));
        let Some(BatchEnd::Input(error)) = cut.stop else { panic!("{name}: {:?}", cut.stop) };
        assert!(error.to_string().contains("bytes shorter than before"), "{error}");
    }
}

/// All shards in order are the complete inputs, for every number of shards up to more than there
/// are bytes, wherever their bounds are.
#[test]
fn shards_are_a_partition() {
    let folder = tempfile::tempdir().unwrap();
    let paths = [
        write(&folder, "a.jsonl", "1\n22\n\n333\n4"),
        write(&folder, "empty.jsonl", ""),
        write(&folder, "b.jsonl.gz", gzip(b"5\n66\n")),
        write(&folder, "c.txt", "777\r\n\n8\n9999999999\n"),
        write(&folder, "d.json", "[{\"a\":1}, {}]"),
        write(&folder, "e.jsonl", "10"),
        write(&folder, "f.jsonl", "\n\n"),
        write(&folder, "g.jsonl", "11\n12\n"),
    ];
    let inputs = find(&paths, &InputOptions::default());
    let bytes: u64 = inputs.iter().filter_map(|input| input.stored_bytes).sum();
    let whole = cut(InputChunker::new(inputs.clone(), 1000, 1000)).documents;
    assert_eq!(whole.len(), 14);
    for n in 1..=bytes + 3 {
        for block_bytes in [1, 4, 1000] {
            let mut all = Vec::new();
            let mut part_bytes = 0;
            for i in 0..n {
                let mut inputs = inputs.clone();
                share_out(&mut inputs, Share::new(i, n).unwrap()).unwrap();
                part_bytes += inputs.iter().filter_map(Input::part_bytes).sum::<u64>();
                let share = cut(InputChunker::new(inputs.clone(), block_bytes, 1000));
                assert!(share.stop.is_none(), "{:?}", share.stop);
                for &(before, place) in &share.places {
                    let chunker =
                        InputChunker::new(inputs.clone(), block_bytes, 1000).start_at(place);
                    assert_eq!(cut(chunker).documents, share.documents[before..], "{i}/{n}");
                }
                all.extend(share.documents);
            }
            assert_eq!(all, whole, "{n} shards, blocks of {block_bytes}");
            assert_eq!(part_bytes, bytes);
        }
    }
    assert!(Share::new(3, 3).is_err());
    let mut stream = expand(&["-".to_owned()], &InputOptions::default(), "text").unwrap();
    assert!(share_out(&mut stream, Share::new(0, 2).unwrap()).is_err());
}

/// A file that ends within a member or frame is an error, and the documents before the error are
/// those of the complete file.
#[test]
fn truncated_files_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let (first, second) = LINES.as_bytes().split_at(20);
    for (name, parts) in [
        ("a.jsonl.gz", [gzip(first), gzip(second)]),
        ("b.jsonl.gz", [bgzip(first, 100), bgzip(second, 30)]),
        ("a.jsonl.zst", [zstd_frame(first, true), zstd_frame(second, false)]),
        ("b.jsonl.zst", [zstd_frames(first, 100, true), zstd_frame(second, true)]),
    ] {
        let whole = parts.concat();
        let all = cut_bytes(&folder, name, &whole);
        assert_eq!((all.documents.len(), all.stop.is_none()), (5, true), "{name}");
        for len in 8..whole.len() {
            let cut = cut_bytes(&folder, name, &whole[..len]);
            let clean = len == parts[0].len() || is_frame_end(name, &whole, len);
            match &cut.stop {
                None => assert!(clean, "{name}: {len} of {} bytes pass", whole.len()),
                Some(BatchEnd::Input(error)) => {
                    let message = error.to_string();
                    assert!(!clean && message.contains(name), "{message}");
                    assert!(
                        message.contains("of the file") && message.contains("truncated"),
                        "{message}"
                    );
                }
                Some(other) => panic!("{other:?}"),
            }
            let lines = cut.documents.len().saturating_sub(usize::from(clean));
            assert_eq!(cut.documents[..lines], all.documents[..lines], "{name}: {len}");
        }
    }
}

/// Whether a file truncated there has only complete members.
fn is_frame_end(name: &str, whole: &[u8], len: usize) -> bool {
    match name {
        "b.jsonl.gz" => whole[len..].starts_with(b"\x1f\x8b\x08\x04"),
        "b.jsonl.zst" => {
            whole[len..].starts_with(b"\x28\xb5\x2f\xfd")
                || whole[len..].starts_with(b"\x5e\x2a\x4d\x18")
        }
        _ => false,
    }
}

fn cut_bytes(folder: &TempDir, name: &str, bytes: &[u8]) -> Cut {
    let inputs = find(&[write(folder, name, bytes)], &InputOptions::default());
    cut(InputChunker::new(inputs, 64, 1 << 20))
}

/// A byte changed anywhere is an error, or changes nothing: the decoder ignores the time and the
/// system in a gzip header, and a skippable frame may hold anything.
#[test]
fn changed_bytes_are_detected() {
    let folder = tempfile::tempdir().unwrap();
    let expected = cut_bytes(&folder, "expected.jsonl", LINES.as_bytes()).documents;
    for (name, whole) in codecs(LINES).into_iter().skip(1) {
        let mut detected = 0;
        for at in 4..whole.len() {
            let mut changed = whole.clone();
            changed[at] ^= 0x11;
            let cut = cut_bytes(&folder, name, &changed);
            match cut.stop {
                None => assert_eq!(cut.documents, expected, "{name}: byte {at}"),
                Some(_) => detected += 1,
            }
        }
        assert!(detected > whole.len() / 3, "{name}: {detected} of {}", whole.len());
        let tail = cut_bytes(&folder, name, &[&whole[..], b"more than a header has"].concat());
        assert!(matches!(tail.stop, Some(BatchEnd::Input(_))), "{name}: {:?}", tail.stop);
        assert_eq!(tail.documents[..4], expected[..4], "{name}");
    }
}

/// Many files and many frames, on several threads, stay in order.
#[test]
fn files_decompressed_ahead_stay_in_order() {
    let folder = tempfile::tempdir().unwrap();
    let mut expected = Vec::new();
    let mut paths = Vec::new();
    for file in 0..12 {
        let lines: Vec<_> = (0..30_000).map(|n| format!("{{\"{file}\":{n}}}")).collect();
        let text = lines.join("\n");
        let (name, bytes) = match file % 4 {
            0 => (format!("{file}.jsonl.zst"), zstd_frames(text.as_bytes(), 50_000, true)),
            1 => (format!("{file}.jsonl.gz"), gzip(text.as_bytes())),
            2 => (format!("{file}.jsonl"), text.into_bytes()),
            _ => (format!("{file}.jsonl.gz"), bgzip(text.as_bytes(), 20_000)),
        };
        paths.push(write(&folder, &name, bytes));
        expected.extend(lines);
    }
    for threads in [1, 2, 5] {
        let inputs = find(&paths, &InputOptions::default());
        let cut = cut(InputChunker::new(inputs.clone(), 100_000, 1000).ahead(threads));
        assert!(cut.stop.is_none() && cut.documents == expected, "{threads} threads");
        // Dropping one that is not finished does not hang.
        let mut chunker = InputChunker::new(inputs, 1000, 1000).ahead(threads);
        assert!(chunker.fill(&mut DocumentBatch::default()));
    }
}

#[test]
fn decompression_bombs_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let text = "{}\n".repeat(200_000);
    let bombs = [
        ("a.jsonl.zst", zstd_frame(text.as_bytes(), true)),
        ("b.jsonl.zst", zstd_frame(text.as_bytes(), false)),
        ("a.jsonl.gz", gzip(text.as_bytes())),
        ("b.jsonl.gz", bgzip(text.as_bytes(), 60_000)),
    ];
    for (name, bytes) in bombs {
        let path = write(&folder, name, bytes);
        for (ratio_max, free_bytes, passes) in
            [(Some(20), 10_000, false), (None, 10_000, true), (Some(100), 1 << 30, true)]
        {
            let options = InputOptions { expand_ratio_max: ratio_max, ..InputOptions::default() };
            let mut inputs = find(std::slice::from_ref(&path), &options);
            inputs[0].expand_free_bytes = free_bytes;
            let cut = cut(InputChunker::new(inputs, 1000, 1 << 20));
            assert_eq!(cut.stop.is_none(), passes, "{name}");
            if let Some(BatchEnd::Input(error)) = cut.stop {
                assert!(error.to_string().contains("--expand-max"), "{error}");
            }
        }
    }
}

fn text(separator: &str, newline: Option<&str>) -> InputOptions {
    let separator = separator.parse().unwrap();
    let text = TextRules { separator, newline: newline.map(str::to_owned), trim: false };
    InputOptions { format: Format::Text, text, ..InputOptions::default() }
}

#[test]
fn texts_end_at_separators() {
    let folder = tempfile::tempdir().unwrap();
    let check = |separator: &str, bytes: &str, expected: &[&str]| {
        let path = write(&folder, "a.txt", bytes);
        for block_bytes in 1..bytes.len() + 2 {
            let inputs = find(std::slice::from_ref(&path), &text(separator, None));
            let cut = cut(InputChunker::new(inputs, block_bytes, 1000));
            assert_eq!(cut.documents, expected, "{separator:?}, blocks of {block_bytes}");
        }
    };
    check("line", "\u{feff}one\r\ntwo\n\n  \nthree\r\n", &["one", "two", "three"]);
    check("line", "\n\n", &[]);
    check("blank-line", "a\nb\n\nc\n \t\n\n\nd\r\ne\r\n\r\nf", &["a\nb", "c", "d\r\ne", "f"]);
    check("blank-line", "\n\na\n", &["a"]);
    check("blank-line", "a", &["a"]);
    check("<|end|>", "a\nb<|end|>c<|end<|end|><|end|>d", &["a\nb", "c<|end", "d"]);
    check("\\n--\\n", "a\n--\n--\n--\nb", &["a", "--", "b"]);
    check("\\0", "a\0b\0", &["a", "b"]);
    assert!("".parse::<Separator>().is_err() && "\\x".parse::<Separator>().is_err());
}

#[test]
fn newline_markers_are_replaced() {
    let rules = TextRules { newline: Some("<n>".to_owned()), trim: true, ..TextRules::default() };
    let mut scratch = String::new();
    assert_eq!(rules.text(" a<n>b<n> \u{1f}\u{3000}", &mut scratch), "a\nb\n");
    assert_eq!(rules.text("plain", &mut scratch), "plain");
    assert_eq!(TextRules::default().text(" a<n>", &mut scratch), " a<n>");
}

#[test]
fn json_lists_are_split() {
    let folder = tempfile::tempdir().unwrap();
    let read_list = |bytes: &str, block_bytes| {
        let path = write(&folder, "a.json", bytes);
        let options = InputOptions { format: Format::JsonArray, ..InputOptions::default() };
        cut(InputChunker::new(find(&[path], &options), block_bytes, 1000))
    };
    let good = " [ {\"a\":\"\\\\\"} ,\n[1,[2]],\"]\\\"\",\n\n7\n,{\"b\":{\"c\":[]}}] \n";
    let expected = ["{\"a\":\"\\\\\"}", "[1,[2]]", "\"]\\\"\"", "7", "{\"b\":{\"c\":[]}}"];
    for block_bytes in 1..good.len() + 2 {
        let cut = read_list(good, block_bytes);
        assert!(cut.stop.is_none(), "{:?}", cut.stop);
        assert_eq!((cut.documents.as_slice(), cut.lines), (&expected.map(str::to_owned)[..], 5));
        for len in 0..good.trim_end().len() {
            let cut = read_list(&good[..len], block_bytes);
            let Some(BatchEnd::Line { fault, .. }) = cut.stop else { panic!("{len}: {cut:?}") };
            assert!(fault.hint.unwrap().contains("truncated"), "{fault:?}");
        }
    }
    assert!(read_list("[]", 1).stop.is_none());
    for (bad, found, expected) in [
        ("{}", "'{'", "a list"),
        ("[,", "','", "an object or ']'"),
        ("[{} {}", "'{'", "',' or ']'"),
        ("[{},]", "']'", "an object"),
        ("[{}] x", "'x'", "the end of the file after the list"),
        ("[{}}", "'}'", "',' or ']'"),
        ("[{\"a\":\"", "the end of the file", "the end of the element"),
    ] {
        for block_bytes in 1..9 {
            let Some(BatchEnd::Line { fault, .. }) = read_list(bad, block_bytes).stop else {
                panic!("{bad}")
            };
            assert!(fault.found == found && fault.expected.contains(expected), "{bad}: {fault:?}");
        }
    }
    let long = format!("[\"{}\"]", "a".repeat(3000));
    let Some(BatchEnd::Line { fault, .. }) = read_list(&long, 64).stop else { panic!("too long") };
    assert!(fault.expected.contains("at most 1000 B"), "{fault:?}");
}

fn names(folder: &Path, wanted: &[&str]) -> std::result::Result<Vec<String>, String> {
    let at = |name: &&str| name.replace("@", folder.to_str().unwrap());
    let wanted: Vec<_> = wanted.iter().map(at).collect();
    let found =
        expand(&wanted, &InputOptions::default(), "text").map_err(|error| error.to_string())?;
    let below = |input: Input| input.name.replace(&format!("{}/", folder.display()), "");
    Ok(found.into_iter().map(below).collect())
}

#[test]
fn names_are_expanded() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["b.jsonl", "a.jsonl", "c.txt", "x/10.jsonl.gz", "x/9.jsonl", "x/y/z.json", "r.md"]
    {
        let bytes = if name.ends_with(".gz") { gzip(b"{}") } else { b"{}".to_vec() };
        write(&folder, name, bytes);
    }
    write(&folder, ".hidden/a.jsonl", "{}");
    write(&folder, "x/.a.jsonl", "{}");
    write(&folder, "odd,[1].jsonl", "{}");
    let check = |wanted: &[&str], expected: &[&str]| {
        assert_eq!(names(folder.path(), wanted).unwrap(), expected, "{wanted:?}");
    };
    let all = [
        "a.jsonl",
        "b.jsonl",
        "c.txt",
        "odd,[1].jsonl",
        "x/10.jsonl.gz",
        "x/9.jsonl",
        "x/y/z.json",
    ];
    check(&["@"], &all);
    check(&["@/"], &all);
    check(&["@/b.jsonl", "@/a.jsonl"], &["b.jsonl", "a.jsonl"]);
    check(&["@/b.jsonl,@/a.jsonl,"], &["b.jsonl", "a.jsonl"]);
    check(&["@/odd,[1].jsonl"], &["odd,[1].jsonl"]);
    check(&["@/*.jsonl"], &["a.jsonl", "b.jsonl", "odd,[1].jsonl"]);
    check(&["@/?.jsonl"], &["a.jsonl", "b.jsonl"]);
    check(&["@/{b,a}.jsonl"], &["b.jsonl", "a.jsonl"]);
    check(&["@/**/*.jsonl"], &["a.jsonl", "b.jsonl", "odd,[1].jsonl", "x/9.jsonl"]);
    check(&["@/x*"], &["x/10.jsonl.gz", "x/9.jsonl", "x/y/z.json"]);
    check(&["@/*/9.jsonl"], &["x/9.jsonl"]);
    check(&["@/[a-b].jsonl,@/x/y"], &["a.jsonl", "b.jsonl", "x/y/z.json"]);
    let refuse = |wanted: &[&str], expected: &str| {
        let message = names(folder.path(), wanted).unwrap_err();
        assert!(message.contains(expected), "{wanted:?}: {message}");
    };
    refuse(&["@/none.jsonl"], "no such file");
    refuse(&["@/*.none"], "expected at least one matching file");
    refuse(&["@/a.jsonl,@/none.jsonl"], "none.jsonl: no such file");
    check(&["@/.hidden", "@/r*"], &[".hidden/a.jsonl", "r.md"]);
    refuse(&["@/a.jsonl", "@/./a.jsonl"], "the same input twice");
    refuse(&["@/*.jsonl", "@/b.jsonl"], "the same input twice");
    refuse(&["-", "-"], "the same input twice");
    refuse(&[""], "an empty name");
    fs::create_dir(folder.path().join("empty")).unwrap();
    refuse(&["@/empty"], "a folder without files");
    let twice = vec![folder.path().join("a.jsonl").display().to_string(); 2];
    let options = InputOptions { repeats: true, ..InputOptions::default() };
    assert_eq!(expand(&twice, &options, "text").unwrap().len(), 2);
}

#[test]
fn formats_are_detected() {
    let folder = tempfile::tempdir().unwrap();
    let check = |name: &str, bytes: &[u8], expected: &str| {
        let path = write(&folder, name, bytes).display().to_string();
        let message = match expand(&[path], &InputOptions::default(), "text") {
            Ok(found) => format!("{:?}", found[0].shape),
            Err(error) => error.to_string(),
        };
        assert!(message.contains(expected), "{name}: {message}");
    };
    check("a.json", b" \n[{}]", "JsonArray");
    check("a.json.gz", &gzip(b"[{}]"), "JsonArray");
    check("a.json", b"{}\n", "JsonLines");
    check("a.json", b"", "JsonLines");
    check("a.jsonl", b"[{}]", "JsonLines");
    check("a.txt", b"[1] said", "Text");
    check("a.txt", b"{\"text\":\"a\"}", "expected text (by file name), found JSON lines");
    check(
        "a.txt.zst",
        &zstd_frame(b"\n{\"text\":\"a\"}", true),
        "expected text (by file name), found JSON lines",
    );
    check("a.data", b"{}", "JsonLines");
    check("a.jsonl", b"\xff\xfe{\0", "UTF-16");
    check("a.jsonl", b"\xfe\xff\0{", "UTF-16");
    check("a.jsonl", b"\x04\x22\x4d\x18\0", "lz4");
    check("a.jsonl", b"\xfd7zXZ\0\0", "JsonLines");
    check("a.gz", b"{}", "expected gzip data (by file name), found other data");
    check("a.jsonl.zst", b"{}", "expected Zstandard data (by file name), found other data");
    check("a.jsonl.zst", b"", "an empty file");
    check("a.json.gz", &gzip(b"[{}]")[..15], "truncated");
}

/// A pipe is read once, from its first byte, compressed or not.
#[cfg(target_os = "linux")]
#[test]
fn pipes_are_streams() {
    let folder = tempfile::tempdir().unwrap();
    let pipe = folder.path().join("pipe");
    for bytes in [LINES.as_bytes().to_vec(), gzip(LINES.as_bytes()), zstd_frame(b"{}\n", false)] {
        let made = std::process::Command::new("mkfifo").arg(&pipe).status().unwrap();
        assert!(made.success());
        let inputs = find(std::slice::from_ref(&pipe), &InputOptions::default());
        assert_eq!(inputs[0].stored_bytes, None);
        let writer = std::thread::spawn({
            let pipe = pipe.clone();
            move || fs::write(pipe, bytes).unwrap()
        });
        let cut = cut(InputChunker::new(inputs, 10, 1000));
        assert!(cut.stop.is_none() && !cut.documents.is_empty(), "{:?}", cut.stop);
        writer.join().unwrap();
        fs::remove_file(&pipe).unwrap();
    }
    let socket = folder.path().join("socket");
    let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    let message =
        expand(&[socket.display().to_string()], &InputOptions::default(), "text").unwrap_err();
    assert!(message.to_string().contains("socket"), "{message}");
}
