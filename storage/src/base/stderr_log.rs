use std::io::{self, IsTerminal as _, Write as _};

use log::{Level, LevelFilter, Log, Metadata, Record};

use crate::base::printable::printable_message;

/// The log of a program on standard error, one line per record: `warning: ` and `error: ` in front
/// of those, and information as it is.
///
/// Programs install it; libraries never do.
#[derive(Clone, Copy, Debug)]
pub struct StderrLog;

impl StderrLog {
    /// The levels of an option `--log`, the quietest first.
    pub const LEVELS: [&str; 5] = ["off", "error", "warn", "info", "debug"];

    /// Writes records of at least this severity from now on. A logger that the process already has
    /// is kept, and gets the same level.
    pub fn install(level: LevelFilter) {
        // This fails only if a logger is installed already.
        let _ = log::set_logger(&StderrLog);
        log::set_max_level(level);
    }

    /// The level of a name in [`StderrLog::LEVELS`].
    ///
    /// # Errors
    /// A message for other names.
    pub fn level(name: &str) -> Result<LevelFilter, String> {
        let expected = || format!("expected {}, found '{name}'", StderrLog::LEVELS.join(", "));
        let known = StderrLog::LEVELS.contains(&name).then(|| name.parse().ok()).flatten();
        known.ok_or_else(expected)
    }
}

impl Log for StderrLog {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.level() <= log::max_level()
    }

    fn log(&self, record: &Record<'_>) {
        if !self.enabled(record.metadata()) {
            return;
        }
        let level = match record.level() {
            Level::Error => "error: ",
            Level::Warn => "warning: ",
            Level::Info => "",
            Level::Debug | Level::Trace => "debug: ",
        };
        let text = printable_message(&record.args().to_string());
        let mut stderr = io::stderr().lock();
        // A line of progress may stand there.
        let clear = if stderr.is_terminal() { "\r\x1b[2K" } else { "" };
        // One write, so that lines do not mix. A closed terminal must not end the run.
        _ = stderr.write_all(format!("{clear}{level}{text}\n").as_bytes());
    }

    fn flush(&self) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels_have_names() {
        assert_eq!(StderrLog::level("off"), Ok(LevelFilter::Off));
        assert_eq!(StderrLog::level("info"), Ok(LevelFilter::Info));
        for unknown in ["", "trace", "WARN", "3"] {
            let error = StderrLog::level(unknown).unwrap_err();
            let expected = format!("expected off, error, warn, info, debug, found '{unknown}'");
            assert_eq!(error, expected);
        }
    }
}
