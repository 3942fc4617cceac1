//! A line of JSON: Feedline's reader accepts the same lines as `serde_json`, with the same text.

#![no_main]

use std::collections::BTreeMap;

use libfuzzer_sys::fuzz_target;
use serde_json::value::RawValue;

fuzz_target!(|line: &str| {
    let ours = preprocess::fuzzing::find_text("text", line);
    let theirs = text_of(line);
    match (&ours, &theirs) {
        (Ok((range, text)), Ok(Some(expected))) => {
            assert_eq!(text, expected);
            assert!(line[..range.start].ends_with('"') && line[range.end..].starts_with('"'));
        }
        (Err(column), Ok(None)) => assert!(*column <= line.len()),
        (Err(column), Err(_)) => assert!(*column <= line.len()),
        // As Python does, the reader accepts these numbers, and half of a surrogate pair in a key.
        (Ok(_), Err(_)) if line.contains("NaN") || line.contains("Infinity") => {}
        (Ok(_), Err(_)) if has_half_pair(line) => {}
        _ => panic!("{ours:?} for {theirs:?}"),
    }
    if let (Some(ours), Ok(members)) = (preprocess::fuzzing::find_list("text", line), members(line))
    {
        let theirs = members.get("text").and_then(|value| serde_json::from_str(value.get()).ok());
        assert_eq!(ours.ok(), theirs, "the strings of a list");
    }
});

/// Values are kept raw, so that large numbers, half pairs and deep nesting under other keys are not
/// refused.
fn members(line: &str) -> serde_json::Result<BTreeMap<String, &RawValue>> {
    serde_json::from_str(line)
}

/// The last text under the key; None if there is none.
fn text_of(line: &str) -> serde_json::Result<Option<String>> {
    let value = members(line)?.remove("text");
    Ok(value.and_then(|value| serde_json::from_str(value.get()).ok()))
}

fn has_half_pair(line: &str) -> bool {
    let line = line.to_ascii_lowercase();
    ["\\ud8", "\\ud9", "\\uda", "\\udb", "\\udc", "\\udd", "\\ude", "\\udf"]
        .iter()
        .any(|half| line.contains(half))
}
