//! The tests of the whole, in `tests/`, and what they share.

#![forbid(unsafe_code)]

use std::path::PathBuf;

/// The root of the checkout.
#[must_use]
pub fn root() -> PathBuf {
    let here = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    here.parent().expect("this crate is a folder of the workspace").to_owned()
}

/// Says that a test could not run here, where `make test` collects it and on stderr.
#[expect(clippy::print_stderr, reason = "a skipped test must be seen")]
pub fn skip(test: &str, why: &str) {
    use std::io::Write as _;
    eprintln!("SKIPPED {test}: {why}");
    if let Some(list) = std::env::var_os("FEEDLINE_SKIPPED") {
        let list = std::fs::OpenOptions::new().append(true).create(true).open(list);
        if let Ok(mut list) = list {
            // A list that cannot be written costs a line of the closing summary, no result.
            let _ = writeln!(list, "{test}: {why}");
        }
    }
}
