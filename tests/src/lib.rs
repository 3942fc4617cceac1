//! Helpers of the tests of the whole project, which are in `tests/`.

#![forbid(unsafe_code)]

use std::path::PathBuf;

/// The root of the checkout.
#[must_use]
pub fn root() -> PathBuf {
    let here = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    here.parent().expect("this crate is a folder of the workspace").to_owned()
}

/// Reports a skipped test, on stderr and to the list that `make test` prints.
#[expect(clippy::print_stderr, reason = "a skipped test must be seen")]
pub fn skip(test: &str, why: &str) {
    use std::io::Write as _;
    eprintln!("SKIPPED {test}: {why}");
    if let Some(list) = std::env::var_os("FEEDLINE_SKIPPED") {
        let list = std::fs::OpenOptions::new().append(true).create(true).open(list);
        if let Ok(mut list) = list {
            // If the list cannot be written, only a line of the final summary is missing.
            let _ = writeln!(list, "{test}: {why}");
        }
    }
}
