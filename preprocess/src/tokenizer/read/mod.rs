//! Files of vocabularies, read whole, up to a bound.

pub(super) mod sniff;

use crate::{Error, Result};

/// The largest in use are 35 MB; a file of this size is none.
const FILE_BYTES_MAX: u64 = 1 << 30;

/// All of a file.
pub(super) fn read_bytes(file: &str) -> Result<Vec<u8>> {
    let (store, key) = storage::locate(file)?;
    let len_bytes = store.open(&key)?.len_bytes();
    if len_bytes > FILE_BYTES_MAX {
        return Err(bad(file, format!("{len_bytes} bytes"), "a vocabulary of at most 1 GiB"));
    }
    Ok(storage::read_all(store.as_ref(), &key)?)
}

/// All of a file that is text.
pub(super) fn read_text(file: &str) -> Result<String> {
    String::from_utf8(read_bytes(file)?).map_err(|e| {
        let at = e.utf8_error().valid_up_to();
        bad(file, format!("invalid UTF-8 at byte {at}"), "UTF-8 text")
    })
}

/// All of a file that is text, or None where there is no such file.
pub(super) fn read_text_if_any(file: &str) -> Result<Option<String>> {
    match read_text(file) {
        Err(Error::Storage(storage::Error::NotFound { .. })) => Ok(None),
        read => read.map(Some),
    }
}

/// An error of a parser, as what was found.
pub(super) fn parse_error(error: impl std::fmt::Display) -> String {
    format!("a parse error: {error}")
}

/// What is wrong with a file as a whole.
pub(super) fn bad(file: &str, found: impl Into<String>, expected: &str) -> Error {
    Error::BadVocab {
        file: file.to_owned(),
        line: None,
        found: found.into(),
        expected: expected.to_owned(),
        hint: None,
    }
}
