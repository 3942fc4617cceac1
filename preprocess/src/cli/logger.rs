//! Writes the warnings of the libraries to standard error, one per line.

use std::io::{self, Write as _};

use log::LevelFilter;

/// The logger of the program, for a process that has a logger already and forwards to this one.
pub static WARNINGS: &dyn log::Log = &Stderr;

struct Stderr;

/// Sends warnings to standard error from now on.
pub(crate) fn install() {
    // This fails only if a logger is installed already.
    let _ = log::set_logger(WARNINGS);
    log::set_max_level(LevelFilter::Warn);
}

impl log::Log for Stderr {
    fn enabled(&self, metadata: &log::Metadata<'_>) -> bool {
        metadata.level() <= log::Level::Warn
    }

    fn log(&self, record: &log::Record<'_>) {
        if self.enabled(record.metadata()) {
            let text = storage::printable_message(&record.args().to_string());
            // A closed terminal must not end the run.
            let _ = writeln!(io::stderr(), "warning: {text}");
        }
    }

    fn flush(&self) {}
}
