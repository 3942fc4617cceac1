//! TFRecord files. The records are spans of a batch; `example` reads one as a line of JSON.

mod example;

use indexed::{RECORD_FOOTER_BYTES, split_record};

pub(crate) use example::{fault, write_json};

use crate::input::ByteSpan;
use crate::json::scanner::LineFault;

/// Appends the spans of the records that are complete, and returns the end of the last. A fault
/// after some records is reported by the next call, which starts at its record.
pub(crate) fn scan(bytes: &[u8], spans: &mut Vec<ByteSpan>) -> Result<usize, LineFault> {
    let mut at = spans.last().map_or(0, |span| span.end + RECORD_FOOTER_BYTES);
    loop {
        match split_record(&bytes[at..]) {
            Ok(Some(range)) => {
                spans.push(at + range.start..at + range.end);
                at += range.end + RECORD_FOOTER_BYTES;
            }
            Err(fault) if at == 0 => return Err(fault.into()),
            Ok(None) | Err(_) => return Ok(at),
        }
    }
}

/// What is wrong with bytes that end in the middle of a record.
pub(crate) fn truncated(bytes: &[u8]) -> LineFault {
    LineFault {
        column: bytes.len(),
        found: "end of file".to_owned(),
        expected: "a complete record".to_owned(),
        hint: Some("the file may be truncated"),
    }
}

impl From<indexed::RecordFault> for LineFault {
    fn from(fault: indexed::RecordFault) -> Self {
        let indexed::RecordFault { at, found, expected } = fault;
        LineFault { column: at, found, expected, hint: None }
    }
}
