//! Access to private code for the fuzz targets. Not part of the public interface.

use std::ops::Range;
use std::sync::Arc;

use serde_json::{Value, json};
use storage::{Key, Storage};

use crate::Result;
use crate::json::scanner::{TextFinder, Value as Found};
use crate::tokens::journal::{Journal, ResumeState};

/// The text under a key of a line, and its place between the quotes.
///
/// # Errors
/// The column of the fault.
pub fn find_text(key: &str, line: &str) -> std::result::Result<(Range<usize>, String), usize> {
    let mut finder = TextFinder::new(key);
    let found = finder.find_at(line);
    found.map(|(place, text)| (place, text.to_owned())).map_err(|fault| fault.column)
}

/// The strings of a list under a key of a line; none if something else is there.
///
/// # Errors
/// The column of the fault.
pub fn find_list(key: &str, line: &str) -> Option<std::result::Result<Vec<String>, usize>> {
    let mut finder = TextFinder::new(key);
    let Ok(Found::Texts(mut texts)) = finder.value(line) else { return None };
    let mut all = Vec::new();
    while let Some(text) = texts.next_text() {
        match text {
            Ok(text) => all.push(text.to_owned()),
            Err(fault) => return Some(Err(fault.column)),
        }
    }
    Some(Ok(all))
}

/// Opens the journal of any run and commits its last record again.
///
/// # Errors
/// Those of a run.
pub fn resume_journal(store: &Arc<dyn Storage>, key: &Key) -> Result<Option<Value>> {
    let Some(state) = Journal::resume(store, key, &json!({}))? else { return Ok(None) };
    let ResumeState { mut journal, record: Some(record), .. } = state else { return Ok(None) };
    journal.commit(&record)?;
    Ok(Some(serde_json::to_value(record).expect("our own types, whose keys are text")))
}
