//! Writes the log of the libraries to standard error, one line a record.

use std::io::{self, Write as _};

struct Stderr;

static STDERR: Stderr = Stderr;

/// Sends the log to standard error from here on.
pub(crate) fn install() {
    // Fails only if it was installed before, and then there is nothing to do.
    let _ = log::set_logger(&STDERR);
    log::set_max_level(log::LevelFilter::Info);
}

/// For a rank whose decisions another rank logs.
pub(crate) fn warnings_only() {
    log::set_max_level(log::LevelFilter::Warn);
}

impl log::Log for Stderr {
    fn enabled(&self, metadata: &log::Metadata<'_>) -> bool {
        metadata.level() <= log::Level::Info
    }

    fn log(&self, record: &log::Record<'_>) {
        if !self.enabled(record.metadata()) {
            return;
        }
        let level = match record.level() {
            log::Level::Error => "error: ",
            log::Level::Warn => "warning: ",
            _ => "",
        };
        // One write, so that lines do not mix; a closed terminal is no reason to stop.
        let text = storage::printable_message(&record.args().to_string());
        _ = io::stderr().write_all(format!("{level}{text}\n").as_bytes());
    }

    fn flush(&self) {}
}
