//! A line of JSON: whatever `serde_json` takes is taken here, and holds a text of the same length.

#![no_main]

use libfuzzer_sys::fuzz_target;
use preprocess::clean::{CleanOptions, clean};

/// What `serde_json` finds, if the line is one that it takes.
fn due(line: &[u8]) -> Option<u64> {
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
    let due = due(data);
    (options.filters.chars_min, options.filters.chars_max) = (due, due);
    options.fix_spaces = due.is_none();
    let report = clean(&options, &mut |_| {});
    if due.is_some() {
        // A name of a compressed form at the start is refused before it is read as JSON.
        let report = report.expect("serde_json takes it");
        assert_eq!((report.documents, report.kept), (1, 1));
    }
});
