//! Padding of gzip files, and the other compressors.

use super::*;

/// Makes a compressed file.
type Packer = fn(&[u8]) -> Vec<u8>;

/// Tapes, block devices and some object stores pad files with zeros to a full block. gzip and
/// Python's gzip module skip them after a member; Python also between members.
#[test]
fn zeros_after_gzip_members_are_skipped() {
    let folder = tempfile::tempdir().unwrap();
    let (first, second) = LINES.as_bytes().split_at(20);
    let expected = cut_bytes(&folder, "expected.jsonl", LINES.as_bytes()).documents;
    let packers: [Packer; 2] = [gzip, |bytes| bgzip(bytes, 13)];
    for pack in packers {
        for zeros in [1, 17, 512, 3 << 20] {
            let padding = vec![0; zeros];
            let between = [&pack(first)[..], &padding, &pack(second)].concat();
            let both = [&between[..], &padding].concat();
            for (name, bytes) in [("a.jsonl.gz", &between), ("b.jsonl.gz", &both)] {
                let path = write(&folder, name, bytes);
                for block_bytes in [1, 64, 1 << 20] {
                    let inputs = find(std::slice::from_ref(&path), &InputOptions::default());
                    let cut = cut(InputChunker::new(inputs, block_bytes, 1 << 20).ahead(2));
                    assert!(cut.stop.is_none(), "{name}, {zeros} zeros: {:?}", cut.stop);
                    assert_eq!(cut.documents, expected, "{name}, {zeros} zeros");
                }
                check_resume(&[path], &InputOptions::default(), 7);
                // What follows the zeros must be a member.
                for garbage in [&b"x"[..], b"\x1f", b"\x1f\x8b\x08", b"{\"text\":\"d\"}\n"] {
                    let bytes = [&both[..], garbage].concat();
                    let cut = cut_bytes(&folder, name, &bytes);
                    assert!(matches!(cut.stop, Some(BatchEnd::Input(_))), "{name}: {garbage:?}");
                }
            }
        }
    }
}

#[test]
fn padded_pipes_are_read_to_their_end() {
    let folder = tempfile::tempdir().unwrap();
    let bytes = [&gzip(b"{}\n")[..], &[0; 300], &gzip(b"[]\n"), &[0; 5]].concat();
    assert_eq!(through_pipe(&folder, bytes).documents, ["{}", "[]"]);
}

fn through_pipe(folder: &TempDir, bytes: Vec<u8>) -> Cut {
    let pipe = folder.path().join("pipe");
    let made = std::process::Command::new("mkfifo").arg(&pipe).status().unwrap();
    assert!(made.success());
    let inputs = find(std::slice::from_ref(&pipe), &InputOptions::default());
    let writer = std::thread::spawn({
        let pipe = pipe.clone();
        move || fs::write(pipe, bytes).unwrap()
    });
    let cut = cut(InputChunker::new(inputs, 10, 1000));
    writer.join().unwrap();
    fs::remove_file(&pipe).unwrap();
    assert!(cut.stop.is_none(), "{:?}", cut.stop);
    cut
}

fn bzip2(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = bzip2::write::BzEncoder::new(Vec::new(), bzip2::Compression::fast());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

fn xz(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = liblzma::write::XzEncoder::new(Vec::new(), 1);
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

/// Files of one stream and of several, with the padding that each format allows.
fn bzip2_and_xz(text: &str) -> Vec<(&'static str, Vec<u8>)> {
    let bytes = text.as_bytes();
    let streams = |pack: Packer, padding: usize| {
        let one = |part| [&pack(part)[..], &vec![0; padding]].concat();
        bytes.chunks(9).map(one).collect::<Vec<_>>().concat()
    };
    vec![
        ("a.jsonl.bz2", bzip2(bytes)),
        ("b.jsonl.bz2", streams(bzip2, 0)),
        ("c.jsonl.bz2", streams(bzip2, 7)),
        ("a.jsonl.xz", xz(bytes)),
        ("b.jsonl.xz", streams(xz, 0)),
        ("c.jsonl.xz", streams(xz, 8)),
        // The content decides, not the name.
        ("d.jsonl", xz(bytes)),
        ("e.jsonl", bzip2(bytes)),
    ]
}

#[test]
fn bzip2_and_xz_are_read() {
    let folder = tempfile::tempdir().unwrap();
    let expected = cut_bytes(&folder, "expected.jsonl", LINES.as_bytes()).documents;
    let mut paths = Vec::new();
    for (name, bytes) in bzip2_and_xz(LINES) {
        assert_eq!(
            through_pipe(&folder, bytes.clone()).documents,
            expected,
            "{name} through a pipe"
        );
        let path = write(&folder, name, bytes);
        for block_bytes in [1, 5, 1 << 20] {
            let inputs = find(std::slice::from_ref(&path), &InputOptions::default());
            let cut = cut(InputChunker::new(inputs, block_bytes, 1 << 20).ahead(2));
            assert!(cut.stop.is_none(), "{name}: {:?}", cut.stop);
            assert_eq!((cut.documents.len(), cut.lines), (5, 7), "{name}");
            assert_eq!(cut.documents, expected, "{name}");
        }
        check_resume(std::slice::from_ref(&path), &InputOptions::default(), 7);
        paths.push(path);
    }
    check_resume(&paths, &InputOptions::default(), 40);
    // Each file is in one shard.
    let inputs = find(&paths, &InputOptions::default());
    let whole = cut(InputChunker::new(inputs.clone(), 1000, 1000)).documents;
    let mut all = Vec::new();
    for i in 0..5 {
        let mut inputs = inputs.clone();
        share_out(&mut inputs, Share::new(i, 5).unwrap()).unwrap();
        all.extend(cut(InputChunker::new(inputs, 1000, 1000)).documents);
    }
    assert_eq!(all, whole);
}

/// A file that ends within a stream, and one with a changed byte, is an error.
#[test]
fn damaged_bzip2_and_xz_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let text = LINES.repeat(3);
    let packers: [(&str, Packer); 2] = [("a.jsonl.bz2", bzip2), ("a.jsonl.xz", xz)];
    for (name, pack) in packers {
        let first = pack(text.as_bytes());
        let whole = [&first[..], &pack(LINES.as_bytes())].concat();
        let all = cut_bytes(&folder, name, &whole);
        assert!(all.stop.is_none(), "{name}: {:?}", all.stop);
        for len in 8..whole.len() {
            let cut = cut_bytes(&folder, name, &whole[..len]);
            assert_eq!(cut.stop.is_none(), len == first.len(), "{name}: {len} bytes");
            if let Some(BatchEnd::Input(error)) = cut.stop {
                let message = error.to_string();
                assert!(
                    message.contains(name) && message.contains("truncated"),
                    "{len}: {message}"
                );
            }
        }
        for at in 8..whole.len() {
            let mut changed = whole.clone();
            changed[at] ^= 0x11;
            let cut = cut_bytes(&folder, name, &changed);
            assert!(cut.stop.is_some() || cut.documents == all.documents, "{name}: byte {at}");
        }
        for tail in [&b"garbage"[..], b"\0\0\0\0\0garbage", LINES.as_bytes()] {
            let cut = cut_bytes(&folder, name, &[&first[..], tail].concat());
            assert!(matches!(cut.stop, Some(BatchEnd::Input(_))), "{name}: {tail:?}");
        }
        let error_of = |bytes: &[u8]| {
            let path = write(&folder, name, bytes).display().to_string();
            expand(&[path], &InputOptions::default(), "text").unwrap_err().to_string()
        };
        assert!(
            error_of(b"{}\n").contains("other data") && error_of(b"").contains("an empty file")
        );
    }
}
