//! A line of JSON: `clean` accepts every line that `serde_json` accepts, with a text of the same
//! length.

#![no_main]

use libfuzzer_sys::fuzz_target;
use preprocess::clean::{CleanOptions, clean};

/// The characters of the text that `serde_json` finds, if it accepts the line.
fn text_chars(line: &[u8]) -> Option<u64> {
    if line.contains(&b'\n') {
        return None;
    }
    let value: serde_json::Value = serde_json::from_slice(line).ok()?;
    Some(value.as_object()?.get("text")?.as_str()?.chars().count() as u64)
}

fuzz_target!(|data: &[u8]| {
    let input = fuzz::file("in.jsonl", data);
    fuzz::remove("out.jsonl");
    let out = input.replace("in.jsonl", "out.jsonl");
    let mut options = CleanOptions::new(vec![input], out);
    options.workers = 1;
    let expected = text_chars(data);
    (options.filters.chars_min, options.filters.chars_max) = (expected, expected);
    options.fix_spaces = expected.is_none();
    let report = clean(&options, &mut |_| {});
    if expected.is_some() {
        // Data with the magic number of a compressed format is refused before it is read as JSON.
        let report = report.expect("serde_json accepts it");
        assert_eq!((report.documents, report.kept), (1, 1));
    }
});
