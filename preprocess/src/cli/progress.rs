use std::io::{self, IsTerminal as _, Write as _};
use std::time::{Duration, Instant};

use crate::PreprocessProgress;
use storage::{ByteSize, rate_text};

use crate::cli::args::Interval;

/// Prints progress to standard error: on a terminal one line that is overwritten, else a new line
/// each time.
#[derive(Debug)]
pub(crate) struct Reporter {
    interval: Interval,
    quiet: bool,
    terminal: bool,
    start: Instant,
    shown: Instant,
    documents_shown: u64,
    line_open: bool,
    /// Progress at the start: not zero if the run was resumed.
    first: Option<PreprocessProgress>,
}

impl Reporter {
    pub(crate) fn new(interval: Option<Interval>, quiet: bool) -> Self {
        let terminal = io::stderr().is_terminal();
        let default = Duration::from_millis(if terminal { 200 } else { 60_000 });
        let now = Instant::now();
        Reporter {
            interval: interval.unwrap_or(Interval::Time(default)),
            quiet,
            terminal,
            start: now,
            shown: now,
            documents_shown: 0,
            line_open: false,
            first: None,
        }
    }

    /// Shows progress, if it is time.
    pub(crate) fn show(&mut self, progress: &PreprocessProgress) {
        let first = *self.first.get_or_insert(*progress);
        let is_due = match self.interval {
            Interval::Time(time) => self.shown.elapsed() >= time,
            Interval::Documents(count) => progress.documents - self.documents_shown >= count,
        };
        if self.quiet || !is_due {
            return;
        }
        self.shown = Instant::now();
        self.documents_shown = progress.documents;
        let bar = if self.terminal { bar(progress) } else { String::new() };
        let line = bar + &line(progress, &first, self.start.elapsed());
        // Progress that cannot be shown must not end the run.
        let _ = if self.terminal {
            self.line_open = true;
            write!(io::stderr(), "\r\x1b[K{line}")
        } else {
            writeln!(io::stderr(), "{line}")
        };
    }

    /// Erases the progress line of a terminal.
    pub(crate) fn clear(&mut self) {
        if self.line_open {
            let _ = write!(io::stderr(), "\r\x1b[K");
        }
    }
}

/// Width of the progress bar in characters.
const BAR_WIDTH: u64 = 20;

fn bar(progress: &PreprocessProgress) -> String {
    let Some(all) = progress.stored_bytes_all else { return String::new() };
    // fits: at most the width
    let done = (progress.stored_bytes.min(all) * BAR_WIDTH / all.max(1)) as usize;
    format!("[{}{}] ", "#".repeat(done), "-".repeat(BAR_WIDTH as usize - done))
}

fn line(progress: &PreprocessProgress, first: &PreprocessProgress, elapsed: Duration) -> String {
    let PreprocessProgress { stored_bytes, stored_bytes_all, json_bytes, documents, tokens } =
        *progress;
    let seconds = elapsed.as_secs_f64().max(1e-9);
    let mut line = match stored_bytes_all {
        Some(all) => {
            let part = stored_bytes as f64 / all.max(1) as f64;
            let read = (stored_bytes - first.stored_bytes) as f64;
            let left = seconds * all.saturating_sub(stored_bytes) as f64 / read.max(1.0);
            format!("{:.1} % of {}, {} left, ", part * 100.0, ByteSize(all), time_text(left))
        }
        None => format!("{}, ", ByteSize(stored_bytes)),
    };
    line += &rate_text(json_bytes - first.json_bytes, elapsed);
    let rate = (tokens - first.tokens) as f64 / seconds / 1e6;
    line += &format!(", {rate:.2} M tokens/s, {documents} documents, {tokens} tokens");
    line
}

fn time_text(seconds: f64) -> String {
    let seconds = seconds.min(359_999.0).round() as u64; // fits: bounded by 100 hours
    let (hours, minutes) = (seconds / 3600, seconds / 60 % 60);
    match (hours, minutes) {
        (0, 0) => format!("{seconds} s"),
        (0, _) => format!("{minutes} min {:02} s", seconds % 60),
        _ => format!("{hours} h {minutes:02} min"),
    }
}
