use std::fs::{self, OpenOptions};
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use storage::{Error, Result};

use crate::appended::{Appended, detach, sync_folder};
use crate::crc32c::masked_crc32c;
use crate::{EvalRecord, StepRecord};

/// A folder of event files, as TensorBoard reads them.
///
/// A file is a sequence of records: length (u64), masked CRC-32C of the length (u32), bytes, masked
/// CRC-32C of the bytes (u32), all little-endian. The bytes are an `Event` message of protocol
/// buffers. The first has the version of the format, the second the first step of this file:
/// TensorBoard then drops the points that a killed run wrote from that step on. So written files
/// never change, and every start of a run creates a new file.
#[derive(Debug)]
pub struct EventLog(Appended);

impl EventLog {
    /// Creates an event file in a folder, for a run that continues after `step`; 0 for a new run.
    ///
    /// # Errors
    /// [`Error::Io`] and similar errors.
    pub fn open(folder: &Path, step: u64) -> Result<Self> {
        let named = |operation: &'static str| {
            let object = folder.display().to_string();
            move |error| Error::from_io(operation, object, error)
        };
        fs::create_dir_all(folder).map_err(named("create the folder"))?;
        detach_newest(folder).map_err(named("copy the newest event file of"))?;
        let path = folder.join(next_name(folder).map_err(named("list"))?);
        let file = OpenOptions::new().append(true).create_new(true).open(&path);
        let file = file.map_err(named("create an event file in"))?;
        let mut events = EventLog(Appended::new(path, file));
        events.append(&[event(0, |message| message.bytes(FILE_VERSION, b"brain.Event:2"))])?;
        let mut start = Message::default();
        start.integer(STATUS, STATUS_START);
        // TensorBoard drops the points from this step on, which is the next of this run.
        events.append(&[event(step + 1, |message| message.bytes(SESSION_LOG, &start.0))])?;
        sync_folder(folder).map_err(named("sync"))?;
        Ok(events)
    }

    /// Appends the points of a training step.
    ///
    /// # Errors
    /// [`Error::NoSpace`], [`Error::Io`]; [`Error::Poisoned`] after any earlier failure.
    pub fn step(&mut self, record: &StepRecord) -> Result<()> {
        let mut scalars = record.measured().to_vec();
        scalars.push(("tokens_per_s", record.perf.tokens_per_s));
        scalars.push(("mfu_12lct", record.perf.mfu_12lct));
        scalars.extend(record.loss_scale.map(|scale| ("loss_scale", scale)));
        self.scalars(record.step, &scalars)
    }

    /// Appends the point of an evaluation.
    ///
    /// # Errors
    /// As [`EventLog::step`].
    pub fn eval(&mut self, record: &EvalRecord) -> Result<()> {
        self.scalars(record.step, &record.measured())
    }

    /// Makes every point durable.
    ///
    /// # Errors
    /// As [`EventLog::step`].
    pub fn sync(&mut self) -> Result<()> {
        self.0.sync()
    }

    fn scalars(&mut self, step: u64, scalars: &[(&str, f64)]) -> Result<()> {
        let mut summary = Message::default();
        for (tag, value) in scalars {
            let mut point = Message::default();
            point.bytes(TAG, tag.as_bytes());
            // The format has single precision, which is enough for a plot.
            point.float(SIMPLE_VALUE, *value as f32);
            summary.bytes(VALUE, &point.0);
        }
        self.append(&[event(step, |message| message.bytes(SUMMARY, &summary.0))])
    }

    fn append(&mut self, events: &[Message]) -> Result<()> {
        self.0.append(&events.iter().flat_map(|event| framed(&event.0)).collect::<Vec<u8>>())
    }
}

/// TensorBoard reads the files of a folder in the order of their names, which must contain
/// `tfevents`. The number is by convention the time in seconds. It is raised if the clock has not
/// advanced or went back, because the names must ascend.
fn next_name(folder: &Path) -> std::io::Result<String> {
    let mut number = now().as_secs();
    for entry in fs::read_dir(folder)? {
        let name = entry?.file_name();
        let digits = name.to_str().and_then(|name| name.strip_prefix(PREFIX)?.split('.').next());
        if let Some(taken) = digits.and_then(|digits| digits.parse::<u64>().ok()) {
            number = number.max(taken.saturating_add(1));
        }
    }
    Ok(format!("{PREFIX}{number:010}{SUFFIX}"))
}

/// Detaches the newest event file. The start after each older file has detached that one.
fn detach_newest(folder: &Path) -> std::io::Result<()> {
    let mut newest = None;
    for entry in fs::read_dir(folder)? {
        let name = entry?.file_name();
        let is_event_file =
            name.to_str().is_some_and(|name| name.starts_with(PREFIX) && name.ends_with(SUFFIX));
        if is_event_file && newest.as_ref().is_none_or(|newest| *newest < name) {
            newest = Some(name);
        }
    }
    let Some(newest) = newest else { return Ok(()) };
    let path = folder.join(newest);
    detach(&path, fs::metadata(&path)?.len()).map(drop)
}

const PREFIX: &str = "events.out.tfevents.";
const SUFFIX: &str = ".feedline";

fn now() -> std::time::Duration {
    // The time is only for display, so a clock before 1970 is harmless.
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

fn framed(bytes: &[u8]) -> Vec<u8> {
    let len_bytes = (bytes.len() as u64).to_le_bytes();
    let mut record = len_bytes.to_vec();
    record.extend(masked_crc32c(&len_bytes).to_le_bytes());
    record.extend(bytes);
    record.extend(masked_crc32c(bytes).to_le_bytes());
    record
}

// Field numbers of tensorflow/core/util/event.proto and framework/summary.proto.
// Event:
const WALL_TIME: u32 = 1;
const STEP: u32 = 2;
const FILE_VERSION: u32 = 3;
const SUMMARY: u32 = 5;
const SESSION_LOG: u32 = 7;
// SessionLog:
const STATUS: u32 = 1;
const STATUS_START: u64 = 1;
// Summary:
const VALUE: u32 = 1;
// Summary.Value:
const TAG: u32 = 1;
const SIMPLE_VALUE: u32 = 2;

fn event(step: u64, fill: impl FnOnce(&mut Message)) -> Message {
    let mut event = Message::default();
    event.double(WALL_TIME, now().as_secs_f64());
    event.integer(STEP, step);
    fill(&mut event);
    event
}

/// A message of protocol buffers being written: each field is its number and wire type, then its
/// value.
#[derive(Debug, Default)]
struct Message(Vec<u8>);

impl Message {
    fn integer(&mut self, field: u32, value: u64) {
        self.key(field, 0);
        self.varint(value);
    }

    fn double(&mut self, field: u32, value: f64) {
        self.key(field, 1);
        self.0.extend(value.to_le_bytes());
    }

    fn bytes(&mut self, field: u32, value: &[u8]) {
        self.key(field, 2);
        self.varint(value.len() as u64);
        self.0.extend(value);
    }

    fn float(&mut self, field: u32, value: f32) {
        self.key(field, 5);
        self.0.extend(value.to_le_bytes());
    }

    fn key(&mut self, field: u32, wire_type: u32) {
        self.varint(u64::from(field << 3 | wire_type));
    }

    /// Seven bits a byte, the lowest first; the top bit marks that more bytes follow.
    fn varint(&mut self, mut value: u64) {
        while value >= 0x80 {
            // fits: the low seven bits, and the flag.
            self.0.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.0.push(value as u8);
    }
}
