//! A report about runs: one self-contained HTML file, for a browser or a printer.
//!
//! Everything on it is from the run's folder: `log.jsonl`, `config.toml` and the names of the
//! checkpoints. Several runs share each chart and differ by colour and dashes. Text from outside
//! (names, paths, values of a config) is always escaped.
//!
//! In reading order: `run` reads a folder, `page` assembles the page, `chart` draws; `sweep`
//! evaluates a range test of the learning rate.

mod chart;
mod page;
mod run;
mod sweep;

pub use page::{BASE_STYLE, RUNS_MAX, escaped, html};
pub use run::{LogRow, PerfLine, RunRecord};
pub use sweep::Sweep;
