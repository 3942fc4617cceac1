use std::fs::{self, File, OpenOptions};
use std::io::{BufRead, BufReader, ErrorKind, Read};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use storage::{Error, Result};

use crate::appended::{Appended, detach, sync_folder};
use crate::{EvalRecord, StepRecord};

/// A line takes some 300 bytes. What is longer is no line of ours, and is not held in memory whole.
const LINE_BYTES_MAX: u64 = 1 << 16;

/// A log of one JSON object a line, in the order of the steps. Numbers are written so that they
/// read back to the same bits. JSON has no NaN: such a value is `null`, and `non_finite` says what
/// it was:
///
/// ```text
/// {"step":7,"samples":112,"tokens":7168,"loss":null,"lr":0.001,"grad_norm":0.5,"perf":{..},
///  "non_finite":{"loss":"NaN"}}
/// ```
#[derive(Debug)]
pub struct JsonLog(Appended);

impl JsonLog {
    /// Opens a log as it was when `step` had been done, which cuts what a killed run wrote after
    /// that: lines of later steps, and a last line that was not finished. The log becomes a new
    /// file of the same name, so that a process that has the old one open, and was only frozen,
    /// adds nothing to it. A log that does not exist is made, and its folder with it.
    ///
    /// # Errors
    /// [`Error::Corrupt`] if a line that should stay cannot be read; [`Error::Io`] and its kin.
    pub fn open(path: &Path, step: u64) -> Result<Self> {
        let named = |doing: &'static str| {
            let what = path.display().to_string();
            move |error| Error::from_io(doing, what, error)
        };
        let folder = path.parent().unwrap_or(Path::new("."));
        fs::create_dir_all(folder).map_err(named("create the folder of"))?;
        if fs::metadata(path).is_ok_and(|metadata| !metadata.is_file()) {
            return Err(named("open")(std::io::Error::new(
                ErrorKind::InvalidInput,
                "expected a regular file",
            )));
        }
        if step == 0 {
            set_aside(path).map_err(named("rename"))?;
        }
        let mut options = OpenOptions::new();
        let file = options.read(true).append(true).create(true).open(path);
        let file = file.map_err(named("open"))?;
        let (kept_bytes, cut_bytes) = kept(path, &file, step)?;
        let file = detach(path, kept_bytes).map_err(named("copy"))?;
        if cut_bytes > 0 {
            log::info!("{}: removed {cut_bytes} bytes after step {step}", path.display());
        }
        sync_folder(folder).map_err(named("sync the folder of"))?;
        Ok(JsonLog(Appended::new(path.to_owned(), file)))
    }

    /// Appends a training step. A kill of the process loses nothing of it; a kill of the machine
    /// may, until [`JsonLog::sync`].
    ///
    /// # Errors
    /// [`Error::NoSpace`], [`Error::Io`]; and then [`Error::Poisoned`] for ever.
    pub fn step(&mut self, record: &StepRecord) -> Result<()> {
        self.append(record, &record.measured())
    }

    /// Appends an evaluation.
    ///
    /// # Errors
    /// As [`JsonLog::step`].
    pub fn eval(&mut self, record: &EvalRecord) -> Result<()> {
        self.append(record, &record.measured())
    }

    /// Makes every line durable.
    ///
    /// # Errors
    /// As [`JsonLog::step`].
    pub fn sync(&mut self) -> Result<()> {
        self.0.sync()
    }

    fn append<T: Serialize>(&mut self, record: &T, measured: &[(&str, f64)]) -> Result<()> {
        let text = |(name, value): &(&str, f64)| ((*name).to_owned(), value.to_string().into());
        let odd = measured.iter().filter(|(_, value)| !value.is_finite());
        let line = LogLine { record, non_finite: odd.map(text).collect() };
        let mut line = serde_json::to_vec(&line).expect("numbers and texts have a JSON form");
        line.push(b'\n');
        self.0.append(&line)
    }
}

#[derive(Serialize)]
struct LogLine<'a, T> {
    #[serde(flatten)]
    record: &'a T,
    #[serde(skip_serializing_if = "Map::is_empty")]
    non_finite: Map<String, Value>,
}

/// The part of a line that a resume looks at.
#[derive(Deserialize)]
struct Numbered {
    step: u64,
}

/// Bytes that stay, and bytes that go. Steps only grow, so what goes is a tail: it begins at the
/// first line of a later step, or at the first that is not whole. After a crash of the machine it
/// may hold anything, but no line of a step that has a checkpoint: those were synced before it.
fn kept(path: &Path, file: &File, step: u64) -> Result<(u64, u64)> {
    let named = |error| Error::from_io("read", path.display().to_string(), error);
    let (mut seen_bytes, mut tail_at) = (0_u64, None);
    let mut reader = BufReader::new(file);
    let mut line = Vec::new();
    while reader.by_ref().take(LINE_BYTES_MAX).read_until(b'\n', &mut line).map_err(named)? > 0 {
        let stays = match serde_json::from_slice::<Numbered>(&line) {
            Ok(numbered) => line.ends_with(b"\n") && numbered.step <= step,
            Err(_) => false,
        };
        match tail_at {
            None if !stays => tail_at = Some(seen_bytes),
            Some(offset) if stays => {
                return Err(Error::Corrupt {
                    object: path.display().to_string(),
                    offset,
                    found: format!("a line to remove before lines up to step {step}"),
                    expected: "ascending steps (rename the log to start a new one)".into(),
                });
            }
            _ => {}
        }
        seen_bytes += line.len() as u64;
        line.clear();
    }
    let kept_bytes = tail_at.unwrap_or(seen_bytes);
    Ok((kept_bytes, seen_bytes - kept_bytes))
}

/// A run that starts from nothing keeps the log that it finds, under the first free of the names
/// `log.jsonl.1`, `log.jsonl.2`, ...: it may be of a run whose checkpoints are elsewhere.
fn set_aside(path: &Path) -> std::io::Result<()> {
    if !fs::metadata(path).is_ok_and(|metadata| metadata.len() > 0) {
        return Ok(());
    }
    let names = (1..=OLD_LOGS_MAX).map(|number| {
        let mut name = path.as_os_str().to_owned();
        name.push(format!(".{number}"));
        PathBuf::from(name)
    });
    for name in names {
        // A hard link is refused where the name is taken; a rename would replace it.
        match fs::hard_link(path, &name) {
            Ok(()) => {
                log::info!("{}: older log renamed to {}", path.display(), name.display());
                return fs::remove_file(path);
            }
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error),
        }
    }
    let why = format!("{OLD_LOGS_MAX} older logs exist");
    Err(std::io::Error::new(ErrorKind::AlreadyExists, why))
}

/// More starts from nothing in one folder are a mistake of whoever starts them.
const OLD_LOGS_MAX: u32 = 1000;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Perf;

    /// `/dev/full` refuses every write as a full disk does.
    #[test]
    fn a_failed_log_stays_failed() {
        let file = OpenOptions::new().append(true).open("/dev/full").unwrap();
        let mut log = JsonLog(Appended::new("run/log.jsonl".into(), file));
        let record = StepRecord {
            step: 1,
            samples: 1,
            tokens: 1,
            loss: 1.0,
            lr: 1.0,
            grad_norm: 1.0,
            loss_scale: None,
            perf: Perf::default(),
        };
        let first = log.step(&record).unwrap_err().to_string();
        assert_eq!(first, "cannot write run/log.jsonl: no space left on device");
        let second = log.step(&record).unwrap_err().to_string();
        assert!(
            second.starts_with("cannot write run/log.jsonl: an earlier write failed: "),
            "{second}"
        );
        assert!(log.sync().is_err());
    }
}
