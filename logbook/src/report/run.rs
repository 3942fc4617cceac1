use std::fs::File;
use std::io::{BufRead as _, BufReader, ErrorKind, Read as _};
use std::path::Path;

use ckpt::Checkpoints;
use recipe::config::Config;
use serde::Deserialize;
use storage::{Error, Key, Location, Result};

/// More than a valid line has; [`crate::JsonLog`] has the same bound.
const LINE_BYTES_MAX: u64 = 1 << 16;

/// A run, as read from its folder.
#[derive(Clone, Debug, Default)]
pub struct RunRecord {
    /// Its name: the folder as the caller gave it.
    pub name: String,
    /// Its config, if this version can read it.
    pub config: Option<Config>,
    /// Lines of training steps, in their order.
    pub steps: Vec<LogRow>,
    /// Lines of evaluations.
    pub evals: Vec<LogRow>,
    /// The last step before each restart.
    pub resumes: Vec<u64>,
    /// Lines that could not be read.
    pub damaged: u64,
    /// Steps of which there is a checkpoint, ascending.
    pub checkpoints: Vec<u64>,
}

/// The plotted values of a line of `log.jsonl`; other fields are ignored.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[expect(missing_docs, reason = "the fields are those of the log's records")]
#[serde(default)]
pub struct LogRow {
    pub step: u64,
    pub tokens: u64,
    pub loss: Option<f64>,
    pub lr: Option<f64>,
    pub grad_norm: Option<f64>,
    pub loss_scale: Option<f64>,
    pub eval_loss: Option<f64>,
    pub eval_tokens: Option<u64>,
    pub perf: PerfLine,
}

/// The measured times of a [`LogRow`].
#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[expect(missing_docs, reason = "the fields are those of the log's records")]
#[serde(default)]
pub struct PerfLine {
    pub tokens_per_s: Option<f64>,
    pub step_ms: Option<f64>,
    pub data_wait_ms: Option<f64>,
    pub ckpt_stall_ms: Option<f64>,
    pub comm_wait_ms: Option<f64>,
    pub elapsed_s: Option<f64>,
    pub mfu_12lct: Option<f64>,
    pub mfu_6lct: Option<f64>,
    pub ranks: Option<u64>,
}

impl RunRecord {
    /// Reads the folder of a run: its log, its config, and the names of its checkpoints. Only
    /// the log is required.
    ///
    /// # Errors
    /// [`Error::NotFound`] and similar errors if the log cannot be read.
    pub fn read(folder: &str) -> Result<Self> {
        let location = Location::new(folder);
        let bad =
            |reason: &str| Error::BadUrl { url: location.to_string(), reason: reason.to_owned() };
        let path =
            location.local_path().ok_or_else(|| bad("expected a path, of a run's folder"))?;
        let mut run = RunRecord { name: folder.to_owned(), ..RunRecord::default() };
        run.read_log(&path.join("log.jsonl"))?;
        match Config::load(&path.join("config.toml").display().to_string(), &[]) {
            Ok(config) => run.config = Some(config),
            Err(error) => log::warn!("report has no config: {error}"),
        }
        let below = path.join("ckpt").display().to_string();
        // A moved run has its checkpoints below its folder, whatever its config says.
        let configured = run.config.as_ref().and_then(|config| config.checkpoint.dir.clone());
        let folders = [Some(below), configured].into_iter().flatten();
        run.checkpoints =
            folders.map(|folder| steps(&folder)).find(|s| !s.is_empty()).unwrap_or_default();
        Ok(run)
    }

    fn read_log(&mut self, path: &Path) -> Result<()> {
        let named = |error| Error::from_io("read", path.display().to_string(), error);
        let file = File::open(path).map_err(named)?;
        if !file.metadata().map_err(named)?.is_file() {
            return Err(named(std::io::Error::new(
                ErrorKind::InvalidInput,
                "expected a regular file",
            )));
        }
        let mut reader = BufReader::new(file);
        let mut line = Vec::new();
        while reader.by_ref().take(LINE_BYTES_MAX).read_until(b'\n', &mut line).map_err(named)? > 0
        {
            match serde_json::from_slice::<LogRow>(&line) {
                Ok(line) => self.add(line),
                Err(_) => self.damaged += 1,
            }
            line.clear();
        }
        Ok(())
    }

    fn add(&mut self, line: LogRow) {
        if line.eval_tokens.is_some() {
            return self.evals.push(line);
        }
        // `elapsed_s` starts at 0 in each process.
        if let Some(last) = self.steps.last()
            && line.perf.elapsed_s < last.perf.elapsed_s
        {
            self.resumes.push(last.step);
        }
        self.steps.push(line);
    }

    /// Seconds of training, summed over all processes of the run.
    #[must_use]
    pub fn trained_s(&self) -> f64 {
        let elapsed = |line: &LogRow| line.perf.elapsed_s.unwrap_or(0.0);
        let last = self.steps.last().map_or(0.0, elapsed);
        let ends = self.steps.windows(2).filter(|two| elapsed(&two[1]) < elapsed(&two[0]));
        last + ends.map(|two| elapsed(&two[0])).sum::<f64>()
    }
}

/// The steps of the checkpoints in a folder; none if the folder cannot be read.
fn steps(folder: &str) -> Vec<u64> {
    let found = storage::open_url(folder).map_err(|error| error.to_string()).and_then(|store| {
        Checkpoints::open(store, Key::root()).steps().map_err(|error| error.to_string())
    });
    found.unwrap_or_else(|error| {
        log::warn!("report has no checkpoints of {folder}: {error}");
        Vec::new()
    })
}
