//! A line of JSON: what we take, `serde_json` takes, with the same text; and the other way round.

#![no_main]

use std::collections::BTreeMap;

use libfuzzer_sys::fuzz_target;
use serde_json::value::RawValue;

fuzz_target!(|line: &str| {
    let ours = preprocess::fuzzing::find_text("text", line);
    let theirs = text_of(line);
    match (&ours, &theirs) {
        (Ok((range, text)), Ok(Some(due))) => {
            assert_eq!(text, due);
            assert!(line[..range.start].ends_with('"') && line[range.end..].starts_with('"'));
        }
        (Err(column), Ok(None)) => assert!(*column <= line.len()),
        (Err(column), Err(_)) => assert!(*column <= line.len()),
        // We take what Python takes: these are numbers, and half a pair may stand in a key.
        (Ok(_), Err(_)) if line.contains("NaN") || line.contains("Infinity") => {}
        (Ok(_), Err(_)) if has_half_pair(line) => {}
        _ => panic!("{ours:?} for {theirs:?}"),
    }
});

/// The last text under the key; None if there is none. Values under other keys are checked and not
/// kept, so that neither large numbers nor half pairs nor depth in them are refused.
fn text_of(line: &str) -> serde_json::Result<Option<String>> {
    let members: BTreeMap<String, &RawValue> = serde_json::from_str(line)?;
    Ok(members.get("text").and_then(|value| serde_json::from_str(value.get()).ok()))
}

fn has_half_pair(line: &str) -> bool {
    let line = line.to_ascii_lowercase();
    ["\\ud8", "\\ud9", "\\uda", "\\udb", "\\udc", "\\udd", "\\ude", "\\udf"]
        .iter()
        .any(|half| line.contains(half))
}
