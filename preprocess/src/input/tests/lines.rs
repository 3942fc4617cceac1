//! Lines end as with Python's universal newlines: at `\n`, `\r\n` or a lone `\r`.

use super::*;

/// Every kind of line end, alone and in runs, also at both ends.
const TEXTS: [&str; 7] = [
    "one\ntwo\rthree\r\nfour",
    "\r\rone\r\r\ntwo\n\rthree\r",
    "a\r",
    "\r\n\r",
    "a\r\r\r\nb\r\n\r\nc\r \r\td",
    "no end",
    "\u{feff}one\rtwo\r\n",
];

/// The lines of Python's `open(name, "r", encoding="utf-8")`: its documentation says that `\r\n`
/// and `\r` are translated to `\n`.
fn python_lines(text: &str) -> Vec<String> {
    let text = text.replace("\r\n", "\n").replace('\r', "\n");
    text.split('\n').map(str::to_owned).collect()
}

fn documents(lines: &[String]) -> Vec<String> {
    let mark = |line: &String| line.trim_start_matches('\u{feff}').to_owned();
    lines.iter().map(mark).filter(|line| !line.trim().is_empty()).collect()
}

#[test]
fn text_lines_end_as_in_python() {
    let folder = tempfile::tempdir().unwrap();
    for bytes in TEXTS {
        let lines = python_lines(bytes);
        // Text after the last line end counts as a line, if there is any.
        let count = lines.len() - usize::from(lines.last().is_some_and(String::is_empty));
        for (name, stored) in [("a.txt", bytes.into()), ("a.txt.gz", gzip(bytes.as_bytes()))] {
            let path = write(&folder, name, &stored);
            for block_bytes in 1..bytes.len() + 2 {
                let inputs = find(std::slice::from_ref(&path), &InputOptions::default());
                let cut = cut(InputChunker::new(inputs, block_bytes, 1000));
                assert_eq!(cut.documents, documents(&lines), "{bytes:?}, blocks of {block_bytes}");
                assert_eq!(cut.lines, count as u64, "{bytes:?}, blocks of {block_bytes}");
            }
        }
    }
}

#[test]
fn blank_lines_may_end_with_returns() {
    let folder = tempfile::tempdir().unwrap();
    let check = |bytes: &str, expected: &[&str], lines: u64| {
        let path = write(&folder, "a.txt", bytes);
        for block_bytes in 1..bytes.len() + 2 {
            let inputs = find(std::slice::from_ref(&path), &text("blank-line", None));
            let cut = cut(InputChunker::new(inputs, block_bytes, 1000));
            assert_eq!(cut.documents, expected, "{bytes:?}, blocks of {block_bytes}");
            assert_eq!(cut.lines, lines, "{bytes:?}, blocks of {block_bytes}");
        }
    };
    check("a\rb\r\rc\r", &["a\rb", "c"], 4);
    check("a\r\n\rb\n\r\nc\r\r\n \t\rd", &["a", "b", "c", "d"], 7);
    check("\r\ra\r\r\r", &["a"], 5);
}

/// The shards of a file and the resumed runs have all documents of the file, wherever a bound is:
/// before, after and within `\r\n`.
#[test]
fn shards_and_resumed_runs_split_at_returns() {
    let folder = tempfile::tempdir().unwrap();
    for (nth, bytes) in TEXTS.iter().enumerate() {
        let path = write(&folder, &format!("{nth}.txt"), bytes);
        let inputs = find(std::slice::from_ref(&path), &InputOptions::default());
        let expected = documents(&python_lines(bytes));
        for n in 1..=bytes.len() as u64 + 2 {
            for block_bytes in [1, 2, 3, 1000] {
                let mut all = Vec::new();
                for i in 0..n {
                    let mut inputs = inputs.clone();
                    share_out(&mut inputs, Share::new(i, n).unwrap()).unwrap();
                    let shard = cut(InputChunker::new(inputs.clone(), block_bytes, 1000));
                    for &(before, place) in &shard.places {
                        let resumed = InputChunker::new(inputs.clone(), block_bytes, 1000);
                        let rest = cut(resumed.start_at(place)).documents;
                        assert_eq!(rest, shard.documents[before..], "{bytes:?} {i}/{n} {place:?}");
                    }
                    all.extend(shard.documents);
                }
                assert_eq!(all, expected, "{bytes:?}, {n} shards, blocks of {block_bytes}");
            }
        }
    }
}

#[test]
fn json_lines_end_with_returns() {
    let folder = tempfile::tempdir().unwrap();
    let bytes = "{\"a\":1}\r{\"a\":2}\r\n\r{\"a\":3}\n{\"a\":4}\r";
    for (name, stored) in codecs(bytes) {
        let path = write(&folder, name, stored);
        for block_bytes in 1..bytes.len() + 2 {
            let inputs = find(std::slice::from_ref(&path), &InputOptions::default());
            let cut = cut(InputChunker::new(inputs, block_bytes, 1000));
            // A `\r` before a `\n` is white space of the line.
            let expected = ["{\"a\":1}", "{\"a\":2}\r", "{\"a\":3}", "{\"a\":4}"];
            assert_eq!(
                (cut.documents.as_slice(), cut.lines),
                (&expected.map(str::to_owned)[..], 5)
            );
        }
    }
}
