//! Tables and progress on a terminal.

use std::fmt::{Display, Write as _};
use std::io::{self, IsTerminal as _, Write as _};
use std::time::{Duration, Instant};

use storage::{ByteSize, rate_text};

/// Rows of a label and a value, aligned.
#[derive(Debug, Default)]
pub struct FactTable(Vec<(String, String)>);

impl FactTable {
    /// Adds a row.
    pub fn add(&mut self, label: &str, value: impl Display) {
        self.0.push((label.to_owned(), value.to_string()));
    }

    /// The rows as text, each line indented by two.
    #[must_use]
    pub fn text(&self) -> String {
        let width = self.0.iter().map(|(label, _)| label.len()).max().unwrap_or(0);
        let mut out = String::new();
        for (label, value) in &self.0 {
            writeln!(out, "  {label:<width$}  {value}").expect("a string takes all");
        }
        out
    }
}

/// A table with a header; the first column is aligned left, the others right.
#[must_use]
pub fn table(header: &[&str], rows: &[Vec<String>]) -> String {
    let mut widths: Vec<usize> = header.iter().map(|cell| cell.len()).collect();
    for row in rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let mut out = String::new();
    let header = header.iter().map(|cell| (*cell).to_owned()).collect();
    for row in std::iter::once(&header).chain(rows) {
        let mut line = String::from(" ");
        for (nth, (cell, &width)) in row.iter().zip(&widths).enumerate() {
            let pad = " ".repeat(width - cell.chars().count().min(width));
            line += &if nth == 0 { format!(" {cell}{pad}") } else { format!("  {pad}{cell}") };
        }
        out += line.trim_end();
        out.push('\n');
    }
    out
}

/// A line on standard error that shows the progress of a run, if that is a terminal.
#[derive(Debug)]
pub struct ProgressLine {
    is_terminal: bool,
    is_open: bool,
}

impl ProgressLine {
    /// A line that is not shown yet.
    #[must_use]
    pub fn new() -> Self {
        ProgressLine { is_terminal: io::stderr().is_terminal(), is_open: false }
    }

    /// A line that is never shown.
    #[must_use]
    pub fn silent() -> Self {
        ProgressLine { is_terminal: false, is_open: false }
    }

    /// Whether anything is shown.
    #[must_use]
    pub fn is_terminal(&self) -> bool {
        self.is_terminal
    }

    /// Prints a warning that later progress does not overwrite, on a terminal or not.
    pub fn warn(&mut self, what: &str) {
        self.clear();
        // A warning that cannot be printed must not end the run.
        let _ = writeln!(io::stderr(), "warning: {what}");
    }

    /// Replaces the text of the line.
    pub fn show(&mut self, what: &str) {
        if self.is_terminal {
            self.is_open = true;
            // Progress that cannot be shown must not end the run.
            let _ = write!(io::stderr(), "\r\x1b[K{what}");
        }
    }

    /// Erases the line.
    pub fn clear(&mut self) {
        if self.is_open {
            // As above.
            let _ = write!(io::stderr(), "\r\x1b[K");
        }
    }
}

impl Default for ProgressLine {
    fn default() -> Self {
        Self::new()
    }
}

/// Progress of work over bytes, as a bar with its rate and the remaining time.
#[derive(Debug)]
pub struct Bar<'a> {
    line: &'a mut ProgressLine,
    gauge: Gauge,
}

impl<'a> Bar<'a> {
    /// A bar for `total_bytes` of work.
    #[must_use]
    pub fn new(line: &'a mut ProgressLine, what: impl Into<String>, total_bytes: u64) -> Self {
        Bar { line, gauge: Gauge::new(what, Some(total_bytes)) }
    }

    /// Shows that `done_bytes` bytes are done in total.
    pub fn at(&mut self, done_bytes: u64) {
        self.gauge.at(self.line, done_bytes);
    }
}

/// A [`Bar`] that does not own its line.
#[derive(Debug)]
pub struct Gauge {
    title: String,
    /// `None` if unknown: then only the bytes that are done are shown.
    total_bytes: Option<u64>,
    started: Instant,
    shown: Option<Instant>,
}

/// Interval of updates: a person reads no faster, and a remote terminal is slow.
const BAR_EVERY: Duration = Duration::from_millis(100);

impl Gauge {
    /// A gauge of work that starts now.
    #[must_use]
    pub fn new(what: impl Into<String>, total_bytes: Option<u64>) -> Self {
        Gauge { title: what.into(), total_bytes, started: Instant::now(), shown: None }
    }

    /// Shows that `done_bytes` bytes are done in total.
    pub fn at(&mut self, line: &mut ProgressLine, done_bytes: u64) {
        if self.shown.is_some_and(|shown| shown.elapsed() < BAR_EVERY) {
            return;
        }
        self.shown = Some(Instant::now());
        line.show(&gauge_text(&self.title, done_bytes, self.total_bytes, self.started.elapsed()));
    }
}

fn gauge_text(what: &str, done: u64, total: Option<u64>, elapsed: Duration) -> String {
    const CELLS: usize = 24;
    let Some(total) = total else {
        let (size, seconds) = (ByteSize(done), elapsed.as_secs());
        return format!("{what}: {size}, {}, {seconds} s", rate_text(done, elapsed));
    };
    // Bytes that are read twice, and those of tables, are not in the total.
    let done = done.min(total);
    let share = done as f64 / total.max(1) as f64;
    let filled = ((share * CELLS as f64) as usize).min(CELLS);
    let bar = "#".repeat(filled) + &"-".repeat(CELLS - filled);
    let left = elapsed.mul_f64(((1.0 - share) / share.max(1e-9)).clamp(0.0, 1e6)).as_secs();
    let (done, total) = (ByteSize(done), ByteSize(total));
    format!("{what} [{bar}] {done} of {total}, {}, {left} s left", rate_text(done.0, elapsed))
}

/// A count with a comma between the thousands.
#[must_use]
pub fn thousands(count: u64) -> String {
    let digits = count.to_string();
    let mut out = String::new();
    for (nth, digit) in digits.chars().enumerate() {
        if nth > 0 && (digits.len() - nth).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thousands_are_separated() {
        for (count, text) in [(0, "0"), (999, "999"), (1000, "1,000"), (1_234_567, "1,234,567")] {
            assert_eq!(thousands(count), text);
        }
    }

    #[test]
    fn bars_fill_up() {
        let text = gauge_text("verify", 1 << 20, Some(4 << 20), Duration::from_secs(1));
        assert_eq!(text, "verify [######------------------] 1 MiB of 4 MiB, 1.0 MB/s, 3 s left");
        let empty = gauge_text("verify", 0, Some(0), Duration::ZERO);
        assert!(empty.contains("0 B of 0 B"), "{empty}");
        let over = gauge_text("check", 5 << 20, Some(4 << 20), Duration::from_secs(1));
        assert!(over.contains("4 MiB of 4 MiB") && over.ends_with(", 0 s left"), "{over}");
        let open = gauge_text("order", 1 << 20, None, Duration::from_secs(2));
        assert_eq!(open, "order: 1 MiB, 0.5 MB/s, 2 s");
    }

    #[test]
    fn tables_align() {
        let rows =
            vec![vec!["a".to_owned(), "10".to_owned()], vec!["表".to_owned(), "7".to_owned()]];
        assert_eq!(table(&["name", "n"], &rows), "  name   n\n  a     10\n  表      7\n");
    }
}
