//! A run as a page: one HTML file that needs nothing else, for a browser or a printer.
//!
//! Everything on it is from the run's folder: `log.jsonl`, `config.toml` and the names of the
//! checkpoints. Several runs are drawn over one another and told apart by colour and dashes. What
//! is written by others (names, paths, values of a config) is escaped wherever it stands.
//!
//! In reading order: `run` reads a folder, `page` puts the page together, `chart` draws; `sweep`
//! tells what a range test of the learning rate has shown.

mod chart;
mod page;
mod run;
mod sweep;

pub use page::{BASE_STYLE, RUNS_MAX, escaped, html};
pub use run::{LogRow, PerfLine, RunRecord};
pub use sweep::Sweep;
