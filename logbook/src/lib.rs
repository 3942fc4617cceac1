//! What a training run writes down of itself: one JSON line and one TensorBoard point per logged
//! step, and a line for the person who watches; and the page that is made of it ([`report`]).
//!
//! These files are appended to for as long as the run lives, and cut back when it resumes. They are
//! therefore not objects of a `Storage`, which are written once and never change, and this crate
//! opens files itself.
//!
//! A resumed log must equal that of an uninterrupted run, whatever was lost in between. That rests
//! on an order, kept by the training loop: all lines of a step are written, [`RunLog::sync`] makes
//! them durable, and only then its checkpoint commits. A resume at step `S` cuts every line after
//! `S`, and the run writes them again.
//!
//! In reading order: [`RunLog`] is what the loop holds, `record` what it logs, `jsonl`,
//! `tensorboard` and `progress` where that goes, `crc32c` the checksum of TensorBoard's files;
//! `meter` measures, `spike` watches the loss, and `trace` is what a rank did when.

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
use std::path::Path;

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
    /// Opens the logs that the config asks for below `run.dir`, as they were when `step` had been
    /// done; 0 for a new run. `terminal` takes the human lines: standard error, for a program.
    ///
    /// # Errors
    /// As [`JsonLog::open`] and [`EventLog::open`].
    pub fn open(config: &Config, step: u64, terminal: Box<dyn Write + Send>) -> Result<Self> {
        let folder = Path::new(&config.run.dir);
        let json = config.log.jsonl.then(|| JsonLog::open(&folder.join("log.jsonl"), step));
        let events = config.log.tensorboard.then(|| EventLog::open(&folder.join("tb"), step));
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
    /// [`storage::Error`] if a file cannot be written. A terminal that is gone is no error: the run
    /// outlives the person who watched.
    pub fn step(&mut self, record: &StepRecord) -> Result<()> {
        if let Some(json) = &mut self.json {
            json.step(record)?;
        }
        if let Some(events) = &mut self.events {
            events.step(record)?;
        }
        self.say(&self.progress.step(record));
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
        self.say(&self.progress.eval(record));
        Ok(())
    }

    /// Makes everything logged so far durable. Due before a checkpoint commits.
    ///
    /// # Errors
    /// As [`RunLog::step`].
    pub fn sync(&mut self) -> Result<()> {
        if let Some(json) = &mut self.json {
            json.sync()?;
        }
        self.events.as_mut().map_or(Ok(()), EventLog::sync)
    }

    fn say(&mut self, line: &str) {
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
