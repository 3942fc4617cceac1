use std::fs::{self, File, OpenOptions};
use std::io::{BufRead, BufReader, ErrorKind, Read};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use storage::{Error, Result};

use crate::appended::{Appended, detach, sync_folder};
use crate::{EvalRecord, StepRecord};

/// A line has some 300 bytes. A longer line is invalid, and is read in pieces.
const LINE_BYTES_MAX: u64 = 1 << 16;

/// A log of one JSON object a line, in the order of the steps. Numbers are written so that they
/// read back to the same bits. JSON has no NaN: such a value is `null`, and `non_finite` has
/// the original:
///
/// ```text
/// {"step":7,"samples":112,"tokens":7168,"loss":null,"lr":0.001,"grad_norm":0.5,"perf":{..},
///  "non_finite":{"loss":"NaN"}}
/// ```
#[derive(Debug)]
pub struct JsonLog(Appended);

impl JsonLog {
    /// Opens a log as of the end of `step`, and cuts everything that a killed run wrote after it:
    /// lines of later steps, and an incomplete last line. The log becomes a new file of the same
    /// name, so that a frozen process that still has the old file open adds nothing to it. Creates
    /// a missing log and its folder.
    ///
    /// # Errors
    /// [`Error::Corrupt`] if a line to keep cannot be read; [`Error::Io`] and similar errors.
    pub fn open(path: &Path, step: u64) -> Result<Self> {
        let named = |operation: &'static str| {
            let object = path.display().to_string();
            move |error| Error::from_io(operation, object, error)
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
            rename_old_log(path).map_err(named("rename"))?;
        }
        let mut options = OpenOptions::new();
        let file = options.read(true).append(true).create(true).open(path);
        let file = file.map_err(named("open"))?;
        let (kept_bytes, cut_bytes) = kept_and_cut_bytes(path, &file, step)?;
        let file = detach(path, kept_bytes).map_err(named("copy"))?;
        if cut_bytes > 0 {
            log::info!("{}: removed {cut_bytes} bytes after step {step}", path.display());
        }
        sync_folder(folder).map_err(named("sync the folder of"))?;
        Ok(JsonLog(Appended::new(path.to_owned(), file)))
    }

    /// Appends a training step. It survives a kill of the process; a crash of the machine may lose
    /// it before [`JsonLog::sync`].
    ///
    /// # Errors
    /// [`Error::NoSpace`], [`Error::Io`]; [`Error::Poisoned`] after any earlier failure.
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
        let non_finite = measured.iter().filter(|(_, value)| !value.is_finite());
        let line = LogLine { record, non_finite: non_finite.map(text).collect() };
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

/// The part of a line that a resume reads.
#[derive(Deserialize)]
struct Numbered {
    step: u64,
}

/// Bytes to keep, and bytes to cut. Steps ascend, so the cut part is a tail: it starts at the first
/// line of a later step, or at the first incomplete or invalid line. After a crash of the machine
/// the tail may have any content, but no line of a step with a checkpoint, because those lines were
/// synced before the checkpoint.
fn kept_and_cut_bytes(path: &Path, file: &File, step: u64) -> Result<(u64, u64)> {
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

/// Renames the existing log for a run that starts from scratch, to the first free name of
/// `log.jsonl.1`, `log.jsonl.2`, ...: it may be of a run whose checkpoints are elsewhere.
fn rename_old_log(path: &Path) -> std::io::Result<()> {
    if !fs::metadata(path).is_ok_and(|metadata| metadata.len() > 0) {
        return Ok(());
    }
    let names = (1..=OLD_LOGS_MAX).map(|number| {
        let mut name = path.as_os_str().to_owned();
        name.push(format!(".{number}"));
        PathBuf::from(name)
    });
    for name in names {
        // A hard link fails if the name exists; a rename would replace it.
        match fs::hard_link(path, &name) {
            Ok(()) => {
                log::info!("{}: older log renamed to {}", path.display(), name.display());
                return fs::remove_file(path);
            }
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error),
        }
    }
    let reason = format!("{OLD_LOGS_MAX} older logs exist");
    Err(std::io::Error::new(ErrorKind::AlreadyExists, reason))
}

/// More starts from scratch in one folder are a mistake of the caller.
const OLD_LOGS_MAX: u32 = 1000;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Perf;

    /// `/dev/full` refuses every write as a full disk does.
    #[test]
    fn failed_log_stays_failed() {
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
