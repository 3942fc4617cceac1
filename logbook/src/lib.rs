//! The logs of a training run: one JSON line and one TensorBoard point per logged step, a progress
//! line on the terminal, and an HTML page of the logs ([`report`]).
//!
//! The run appends to these files, and a resume truncates them. They are therefore not objects of a
//! `Storage`, which are written once and never change, and this crate opens files itself.
//!
//! A resumed log must equal that of an uninterrupted run, whatever was lost in between. The
//! training loop ensures this with an order: it writes all lines of a step, [`RunLog::sync`] makes
//! them durable, and only then the checkpoint commits. A resume at step `S` cuts every line after
//! `S`, and the run writes them again.
//!
//! In reading order: [`RunLog`] is the interface of the loop, `record` has the logged values,
//! `jsonl`, `tensorboard` and `progress` the outputs, `crc32c` the checksum of TensorBoard's files;
//! `meter` measures, `spike` detects spikes of the loss, and `trace` records the activity of a
//! rank.

#![forbid(unsafe_code)]

mod appended;
mod crc32c;
mod jsonl;
mod meter;
mod progress;
mod record;
pub mod report;
mod spike;
mod tensorboard;
mod trace;

use std::fmt;
use std::io::Write;

use recipe::config::Config;
use storage::Result;

pub use jsonl::JsonLog;
pub use meter::Meter;
pub use progress::ProgressLog;
pub use record::{EvalPerf, EvalRecord, Perf, StepRecord};
pub use spike::LossSpikeDetector;
pub use tensorboard::EventLog;
pub use trace::Trace;

/// All logs of a run.
pub struct RunLog {
    json: Option<JsonLog>,
    events: Option<EventLog>,
    progress: ProgressLog,
    terminal: Box<dyn Write + Send>,
}

impl RunLog {
    /// Opens the logs that the config enables below `run.dir`, as of the end of `step`; 0 for a new
    /// run. `terminal` receives the progress lines: standard error, for a program.
    ///
    /// # Errors
    /// As [`JsonLog::open`] and [`EventLog::open`].
    pub fn open(config: &Config, step: u64, terminal: Box<dyn Write + Send>) -> Result<Self> {
        let json =
            config.log.jsonl.then(|| JsonLog::open(&config.log_dir().join("log.jsonl"), step));
        let events =
            config.log.tensorboard.then(|| EventLog::open(&config.log_dir().join("tb"), step));
        Ok(RunLog {
            json: json.transpose()?,
            events: events.transpose()?,
            progress: ProgressLog::new(step, config.steps_total()),
            terminal,
        })
    }

    /// Logs a step.
    ///
    /// # Errors
    /// [`storage::Error`] if a file cannot be written. A closed terminal is not an error: the run
    /// continues without it.
    pub fn step(&mut self, record: &StepRecord) -> Result<()> {
        if let Some(json) = &mut self.json {
            json.step(record)?;
        }
        if let Some(events) = &mut self.events {
            events.step(record)?;
        }
        self.print_line(&self.progress.step(record));
        Ok(())
    }

    /// Logs an evaluation.
    ///
    /// # Errors
    /// As [`RunLog::step`].
    pub fn eval(&mut self, record: &EvalRecord) -> Result<()> {
        if let Some(json) = &mut self.json {
            json.eval(record)?;
        }
        if let Some(events) = &mut self.events {
            events.eval(record)?;
        }
        self.print_line(&self.progress.eval(record));
        Ok(())
    }

    /// Makes everything logged so far durable. Must be called before a checkpoint commits.
    ///
    /// # Errors
    /// As [`RunLog::step`].
    pub fn sync(&mut self) -> Result<()> {
        if let Some(json) = &mut self.json {
            json.sync()?;
        }
        self.events.as_mut().map_or(Ok(()), EventLog::sync)
    }

    fn print_line(&mut self, line: &str) {
        // One write, so that lines of several writers do not mix.
        _ = self.terminal.write_all(format!("{line}\n").as_bytes());
    }
}

impl fmt::Debug for RunLog {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let RunLog { json, events, progress, terminal: _ } = self;
        f.debug_struct("RunLog")
            .field("json", json)
            .field("events", events)
            .field("progress", progress)
            .finish_non_exhaustive()
    }
}
