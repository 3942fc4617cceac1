//! The logs of a run, read back by `serde_json` and by a decoder written here from the descriptions
//! of the formats, so that writer and reader share no code.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use logbook::{
    EvalPerf, EvalRecord, EventLog, JsonLog, Perf, ProgressLog, RunLog, StepRecord, Trace,
};
use recipe::config::Config;
use serde_json::Value;

fn step(step: u64) -> StepRecord {
    StepRecord {
        step,
        samples: step * 16,
        tokens: step * 1024,
        loss: 10.0 / step as f64,
        lr: 1e-3,
        grad_norm: 0.1 + 0.2,
        loss_scale: None,
        perf: Perf {
            tokens_per_s: 5320.6,
            step_ms: 192.5,
            data_wait_ms: Some(0.6),
            ckpt_stall_ms: Some(0.0),
            comm_wait_ms: Some(7.7),
            elapsed_s: 0.1 * step as f64,
            ranks: 2,
            mfu_12lct: 0.4127,
            mfu_6lct: 0.39,
        },
    }
}

fn eval(step: u64) -> EvalRecord {
    EvalRecord {
        step,
        samples: step * 16,
        eval_loss: 2.0,
        eval_tokens: 10_240,
        perf: EvalPerf { tokens_per_s: 20_480.0, eval_ms: 500.0 },
    }
}

fn lines(path: &Path) -> Vec<Value> {
    let text = fs::read_to_string(path).expect("read a log");
    assert!(text.is_empty() || text.ends_with('\n'));
    text.lines().map(|line| serde_json::from_str(line).expect("a line is JSON")).collect()
}

fn steps(path: &Path) -> Vec<u64> {
    lines(path).iter().map(|line| line["step"].as_u64().expect("a step")).collect()
}

#[test]
fn values_round_trip_bit_for_bit() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run/log.jsonl");
    let mut log = JsonLog::open(&path, 0).unwrap();
    let mut record = step(3);
    // Floats whose shortest form is long, and the ends of their range.
    let floats = [0.1 + 0.2, 1.0 / 3.0, 5e-324, f64::MAX, f64::from(0.1_f32), -0.0];
    for float in floats {
        (record.loss, record.grad_norm) = (float, float);
        log.step(&record).unwrap();
    }
    log.eval(&eval(3)).unwrap();
    log.sync().unwrap();
    let lines = lines(&path);
    for (line, float) in lines.iter().zip(floats) {
        assert_eq!(line["loss"].as_f64().unwrap().to_bits(), float.to_bits());
        assert_eq!(line["grad_norm"].as_f64().unwrap().to_bits(), float.to_bits());
    }
    let keys: Vec<&String> = lines[0].as_object().unwrap().keys().collect();
    assert_eq!(keys, ["step", "samples", "tokens", "loss", "lr", "grad_norm", "perf"]);
    let perf: Vec<&String> = lines[0]["perf"].as_object().unwrap().keys().collect();
    let phases = ["data_wait_ms", "ckpt_stall_ms", "comm_wait_ms"];
    let rest = ["elapsed_s", "ranks", "mfu_12lct", "mfu_6lct"];
    assert_eq!(perf, [&["tokens_per_s", "step_ms"], &phases[..], &rest].concat());
    let keys: Vec<&String> = lines[floats.len()].as_object().unwrap().keys().collect();
    assert_eq!(keys, ["step", "samples", "eval_loss", "eval_tokens", "perf"]);
}

#[test]
fn non_finite_values_are_null_and_named() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("log.jsonl");
    let mut log = JsonLog::open(&path, 0).unwrap();
    log.step(&StepRecord { loss: f64::NAN, grad_norm: f64::INFINITY, ..step(1) }).unwrap();
    log.step(&step(2)).unwrap();
    let lines = lines(&path);
    assert_eq!(lines[0]["loss"], Value::Null);
    assert_eq!(lines[0]["non_finite"], serde_json::json!({"loss": "NaN", "grad_norm": "inf"}));
    assert_eq!(lines[1].get("non_finite"), None);
    drop(log);
    JsonLog::open(&path, 2).unwrap();
    assert_eq!(steps(&path), [1, 2], "a null does not make a line unreadable");
}

#[test]
fn resumed_log_equals_an_uninterrupted_one() {
    let folder = tempfile::tempdir().unwrap();
    let whole = folder.path().join("whole.jsonl");
    let mut log = JsonLog::open(&whole, 0).unwrap();
    for n in 1..=9 {
        log.step(&step(n)).unwrap();
        if n % 3 == 0 {
            log.eval(&eval(n)).unwrap();
        }
    }
    let expected = fs::read(&whole).unwrap();
    // Killed after any number of bytes; the newest checkpoint is of the step before the last line.
    for killed_at in (0..=expected.len()).step_by(7) {
        let reached = expected[..killed_at].split_inclusive(|byte| *byte == b'\n');
        let reached = reached.filter(|line| line.ends_with(b"\n"));
        let reached = reached.map(|line| serde_json::from_slice::<Value>(line).unwrap());
        let reached = reached.filter_map(|line| line["step"].as_u64()).max().unwrap_or(0);
        // The checkpoint of a step with an evaluation is after both lines.
        let saved = reached.saturating_sub(1);
        let path = folder.path().join("killed.jsonl");
        fs::write(&path, &expected[..killed_at]).unwrap();
        let mut log = JsonLog::open(&path, saved).unwrap();
        for n in saved + 1..=9 {
            log.step(&step(n)).unwrap();
            if n % 3 == 0 {
                log.eval(&eval(n)).unwrap();
            }
        }
        assert_eq!(fs::read(&path).unwrap(), expected, "killed after {killed_at} bytes");
    }
}

/// A frozen run that continues after its successor has opened the logs.
#[test]
fn lines_of_a_frozen_run_are_not_in_the_log() {
    let folder = tempfile::tempdir().unwrap();
    let (path, events) = (folder.path().join("log.jsonl"), folder.path().join("tb"));
    let open = |done| {
        let log = JsonLog::open(&path, done).unwrap();
        (log, EventLog::open(&events, done).unwrap())
    };
    let (mut frozen, mut frozen_events) = open(0);
    for n in 1..=5 {
        frozen.step(&step(n)).unwrap();
        frozen_events.step(&step(n)).unwrap();
    }
    let (mut log, mut log_events) = open(4);
    frozen.step(&step(6)).unwrap();
    frozen_events.step(&step(6)).unwrap();
    log.step(&step(5)).unwrap();
    log_events.step(&step(5)).unwrap();
    frozen.step(&step(7)).unwrap();
    frozen_events.step(&step(7)).unwrap();
    assert_eq!(steps(&path), [1, 2, 3, 4, 5]);
    let points = |file: &PathBuf| {
        let events = decode(&fs::read(file).unwrap()).into_iter();
        events.filter(|(_, event)| matches!(event, Event::Scalars(_))).count()
    };
    assert_eq!(files(&events).iter().map(points).collect::<Vec<_>>(), [5, 1]);
    let names = fs::read_dir(folder.path()).unwrap().chain(fs::read_dir(&events).unwrap());
    assert_eq!(names.count(), 4, "a copy is left over");
}

#[test]
fn only_a_tail_is_cut() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("log.jsonl");
    let check = |text: &str, step: u64, expected: Result<&[u64], u64>| {
        fs::write(&path, text).unwrap();
        match (JsonLog::open(&path, step), expected) {
            (Ok(_), Ok(expected)) => assert_eq!(steps(&path), expected, "{text:?}"),
            (Err(error), Err(offset)) => {
                let text_of = error.to_string();
                assert!(text_of.contains("found a line to remove"), "{text_of}");
                assert!(text_of.contains("(rename the log to start a new one)"), "{text_of}");
                assert!(text_of.ends_with(&format!(" at byte {offset}")), "{text_of}");
                assert_eq!(fs::read_to_string(&path).unwrap(), text, "the log was changed");
            }
            (found, expected) => panic!("{text:?}: expected {expected:?}, found {found:?}"),
        }
    };
    check("", 5, Ok(&[]));
    check("{\"step\":1}\n{\"step\":2}\n", 5, Ok(&[1, 2]));
    check("{\"step\":1}\n{\"step\":2}\n", 0, Ok(&[]));
    check("{\"step\":1}\n{\"step\":2}\n{\"step\":3}\n", 1, Ok(&[1]));
    check("{\"step\":1}\n{\"st", 5, Ok(&[1]));
    check("{\"step\":1}\n{\"step\":2}", 5, Ok(&[1]));
    check("{\"step\":1}\n\0\0\0\n{\"step\":7}\n\0\0", 5, Ok(&[1]));
    let long = "x".repeat(200_000);
    check(&format!("{{\"step\":1}}\n{long}\n"), 5, Ok(&[1]));
    check("{\"step\":1}\nno log\n{\"step\":2}\n", 5, Err(11));
    check("{\"step\":9}\n{\"step\":2}\n", 5, Err(0));
}

#[test]
fn unusable_log_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let refusal = JsonLog::open(folder.path(), 0).unwrap_err().to_string();
    assert!(refusal.ends_with("expected a regular file"), "{refusal}");
    // Endless: reading it completely would use up the memory.
    let refusal = JsonLog::open(Path::new("/dev/zero"), 0).unwrap_err().to_string();
    assert_eq!(refusal, "cannot open /dev/zero: expected a regular file");
    fs::write(folder.path().join("tb"), "").unwrap();
    let refusal = EventLog::open(&folder.path().join("tb"), 0).unwrap_err().to_string();
    assert!(refusal.contains("/tb"), "{refusal}");
}

/// A terminal that can be read back.
#[derive(Clone, Default)]
struct Terminal(Arc<Mutex<Vec<u8>>>);

impl Write for Terminal {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().expect("no writer panicked").extend(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// A terminal that was closed.
struct Gone;

impl Write for Gone {
    fn write(&mut self, _bytes: &[u8]) -> std::io::Result<usize> {
        Err(std::io::ErrorKind::BrokenPipe.into())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Err(std::io::ErrorKind::BrokenPipe.into())
    }
}

fn config(run: &Path, log: &str) -> Config {
    let text = format!(
        "[run]\ndir = '{}'\nbudget = {{ steps = 4 }}\n[model]\nlayers = 1\nhidden = 8\nheads = 1\n\
         vocab = 10\nseq_len = 64\n[data]\ntrain = 'd'\n[batch]\nglobal = 16\nmicro = 4\n\
         [optim.lr]\npeak = 1e-3\n[log]\n{log}\n",
        run.display()
    );
    Config::from_toml("c.toml", &text).expect("a good config")
}

#[test]
fn run_writes_all_logs_that_its_config_enables() {
    let folder = tempfile::tempdir().unwrap();
    let terminal = Terminal::default();
    let config_all = config(folder.path(), "");
    let mut log = RunLog::open(&config_all, 0, Box::new(terminal.clone())).unwrap();
    log.step(&step(1)).unwrap();
    log.eval(&eval(1)).unwrap();
    log.step(&step(2)).unwrap();
    log.sync().unwrap();
    let shown = String::from_utf8(terminal.0.lock().unwrap().clone()).unwrap();
    let heads: Vec<&str> = shown.lines().map(|line| line.split(" | ").next().unwrap()).collect();
    assert_eq!(heads, ["step 1/4", "step 1/4", "step 2/4"]);
    assert_eq!(steps(&folder.path().join("log.jsonl")), [1, 1, 2]);
    assert_eq!(files(&folder.path().join("tb")).len(), 1);

    drop(log);
    let mut log = RunLog::open(&config_all, 1, Box::new(Gone)).unwrap();
    log.step(&step(2)).expect("a closed terminal does not end a run");
    assert_eq!(steps(&folder.path().join("log.jsonl")), [1, 1, 2]);
    assert_eq!(files(&folder.path().join("tb")).len(), 2);
}

#[test]
fn run_writes_no_disabled_logs() {
    let folder = tempfile::tempdir().unwrap();
    let quiet = config(folder.path(), "jsonl = false\ntensorboard = false");
    let mut log = RunLog::open(&quiet, 0, Box::new(Terminal::default())).unwrap();
    log.step(&step(1)).unwrap();
    log.sync().unwrap();
    assert!(files(folder.path()).is_empty());
}

#[test]
fn progress_lines_have_the_expected_fields() {
    let progress = ProgressLog::new(100, 800);
    let mut record = StepRecord { loss: 5.12341, lr: 3e-4, grad_norm: 1.021, ..step(120) };
    // 20 steps in 2.125 s leave 680 steps in 72.25 s.
    record.perf.elapsed_s = 2.125;
    assert_eq!(
        progress.step(&record),
        "step 120/800 | loss 5.1234 | lr 3.000e-4 | gnorm 1.02 | 5,321 tok/s \
         | mfu(6N+12LCT) 41.3% | data wait 0.3% | comm wait 4.0% | eta 1m12s"
    );
    record.loss_scale = Some(65_536.0);
    assert!(progress.step(&record).contains("| comm wait 4.0% | scale 65536 | eta"));
    record.loss_scale = None;
    record.perf.ckpt_stall_ms = Some(19.25);
    // One rank waits for no other.
    record.perf.ranks = 1;
    assert!(progress.step(&record).contains("| data wait 0.3% | save 10.0% | eta"));
    record = StepRecord { loss: f64::NAN, grad_norm: f64::INFINITY, ..record };
    record.perf = Perf { tokens_per_s: f64::NAN, ..Perf::default() };
    let line = progress.step(&record);
    assert!(line.contains("loss NaN") && line.contains("NaN tok/s"), "{line}");
    assert_eq!(
        progress.eval(&eval(800)),
        "step 800/800 | eval loss 2.0000 | ppl 7.39 | 10,240 tokens in 0.5s"
    );
}

#[test]
fn remaining_time_has_two_units() {
    for (seconds, expected) in [(0, "0s"), (59, "59s"), (61, "1m01s"), (3_599, "59m59s")] {
        check_eta(seconds, expected);
    }
    for (seconds, expected) in [(11_100, "3h05m"), (86_399, "23h59m"), (187_500, "2d04h")] {
        check_eta(seconds, expected);
    }
}

fn check_eta(seconds: u64, expected: &str) {
    let mut record = step(1);
    record.perf.elapsed_s = seconds as f64;
    let line = ProgressLog::new(0, 2).step(&record);
    assert!(line.ends_with(&format!("| eta {expected}")), "{line}");
}

/// Events have the fields that chrome://tracing and Perfetto need, and only the oldest are dropped.
#[test]
fn trace_has_consecutive_events() {
    let folder = tempfile::tempdir().unwrap();
    let trace = Trace::new(&folder.path().join("trace"), 3);
    trace.step(7);
    trace.doing("waits for \"data\"");
    trace.doing("F0");
    trace.clone().doing("");
    trace.doing("saves");
    trace.write().unwrap();
    let path = folder.path().join("trace/rank-00003.json");
    let read = || serde_json::from_slice::<Value>(&fs::read(&path).unwrap()).unwrap();
    let json = read();
    let events = json["traceEvents"].as_array().unwrap();
    assert_eq!(events[0]["args"]["name"], "rank 3");
    // The current activity is not recorded yet.
    let names: Vec<&str> = events.iter().map(|event| event["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["process_name", "waits for \"data\"", "F0"]);
    let number = |event: &Value, key: &str| event[key].as_f64().unwrap();
    for event in &events[1..] {
        assert_eq!(
            (&event["ph"], &event["pid"], &event["tid"]),
            (&"X".into(), &3.into(), &0.into())
        );
        assert_eq!(event["args"]["step"], 7);
        assert!(number(event, "dur") >= 0.0);
    }
    // Each ends where the next starts, to a microsecond: the precision of a float since 1970.
    let end = number(&events[1], "ts") + number(&events[1], "dur");
    assert!((end - number(&events[2], "ts")).abs() <= 1.0, "{events:?}");
    for _ in 0..40_000 {
        trace.doing("x");
    }
    trace.write().unwrap();
    assert_eq!(read()["traceEvents"].as_array().unwrap().len(), 1 + 32_768);
    assert_eq!(
        fs::read_dir(folder.path().join("trace")).unwrap().count(),
        1,
        "no draft is left over"
    );
}

/// One event of a file: step, and the field that it carries.
#[derive(Debug, PartialEq)]
enum Event {
    Version(String),
    Start,
    Scalars(Vec<(String, f32)>),
}

#[test]
fn event_file_decodes_to_the_logged_values() {
    let folder = tempfile::tempdir().unwrap();
    let mut log = EventLog::open(folder.path(), 0).unwrap();
    log.step(&step(300)).unwrap();
    log.eval(&EvalRecord { eval_loss: f64::NAN, ..eval(300) }).unwrap();
    log.sync().unwrap();
    let [file] = &files(folder.path())[..] else { panic!("expected one file") };
    let events = decode(&fs::read(file).unwrap());
    assert_eq!(events[0], (0, Event::Version("brain.Event:2".to_owned())));
    assert_eq!(events[1], (1, Event::Start));
    let scalars = [
        ("loss", 10.0 / 300.0),
        ("lr", 1e-3),
        ("grad_norm", 0.3),
        ("tokens_per_s", 5320.6),
        ("mfu_12lct", 0.4127),
    ];
    let scalars = scalars.map(|(tag, value)| (tag.to_owned(), value as f32)).to_vec();
    assert_eq!(events[2], (300, Event::Scalars(scalars)));
    let (300, Event::Scalars(scalars)) = &events[3] else { panic!("{:?}", events[3]) };
    assert_eq!(scalars[0].0, "eval_loss");
    assert!(scalars[0].1.is_nan());
    assert_eq!(events.len(), 4);
}

#[test]
fn resumed_run_hides_repeated_points() {
    let folder = tempfile::tempdir().unwrap();
    for (start, last) in [(0, 7), (5, 9), (8, 12)] {
        let mut log = EventLog::open(folder.path(), start).unwrap();
        for n in start + 1..=last {
            log.step(&step(n)).unwrap();
        }
    }
    // TensorBoard's rule: a start drops every point from its step on.
    let mut seen = Vec::new();
    for file in files(folder.path()) {
        for (step, event) in decode(&fs::read(file).unwrap()) {
            match event {
                Event::Version(_) => {}
                Event::Start => seen.retain(|point| *point < step),
                Event::Scalars(_) => seen.push(step),
            }
        }
    }
    assert_eq!(seen, (1..=12).collect::<Vec<u64>>());
}

/// The newest file must sort after older ones, even if the clock went back.
#[test]
fn event_files_sort_in_the_order_of_starts() {
    let folder = tempfile::tempdir().unwrap();
    let future = folder.path().join("events.out.tfevents.9000000000.otherhost.77.0");
    fs::write(&future, "").unwrap();
    drop(EventLog::open(folder.path(), 0).unwrap());
    drop(EventLog::open(folder.path(), 3).unwrap());
    let names: Vec<String> = files(folder.path())
        .iter()
        .map(|file| file.file_name().unwrap().to_str().unwrap().to_owned())
        .collect();
    assert_eq!(names[0], "events.out.tfevents.9000000000.otherhost.77.0");
    assert_eq!(names[1], "events.out.tfevents.9000000001.feedline");
    assert_eq!(names[2], "events.out.tfevents.9000000002.feedline");
}

/// The decoder itself must detect corruption, or the tests above would prove nothing.
#[test]
fn decoder_detects_a_flipped_bit() {
    let folder = tempfile::tempdir().unwrap();
    drop(EventLog::open(folder.path(), 0).unwrap());
    let good = fs::read(&files(folder.path())[0]).unwrap();
    decode(&good);
    for place in 0..good.len() {
        let mut bad = good.clone();
        bad[place] ^= 1;
        assert!(std::panic::catch_unwind(|| decode(&bad)).is_err(), "byte {place}");
    }
}

fn files(folder: &Path) -> Vec<PathBuf> {
    let mut files: Vec<PathBuf> =
        fs::read_dir(folder).expect("list").map(|entry| entry.expect("an entry").path()).collect();
    files.sort();
    files
}

/// Records of TFRecord, then messages of protocol buffers.
fn decode(mut bytes: &[u8]) -> Vec<(u64, Event)> {
    let mut events = Vec::new();
    while !bytes.is_empty() {
        let (header, rest) = bytes.split_at(12);
        let len_bytes = u64::from_le_bytes(header[..8].try_into().expect("8 bytes"));
        check_crc(&header[..8], &header[8..]);
        let (data, rest) = rest.split_at(usize::try_from(len_bytes).expect("a small record"));
        let (crc, rest) = rest.split_at(4);
        check_crc(data, crc);
        bytes = rest;

        let (mut step, mut event) = (0, None);
        for (field, value) in fields(data) {
            match (field, value) {
                (1, Field::Fixed(_)) => {}
                (2, Field::Varint(value)) => step = value,
                (3, Field::Bytes(text)) => event = Some(Event::Version(text_of(text))),
                (5, Field::Bytes(summary)) => event = Some(Event::Scalars(scalars(summary))),
                (7, Field::Bytes(session)) => {
                    assert_eq!(fields(session), [(1, Field::Varint(1))]);
                    event = Some(Event::Start);
                }
                other => panic!("unexpected field {other:?}"),
            }
        }
        events.push((step, event.expect("an event of a known kind")));
    }
    events
}

fn scalars(summary: &[u8]) -> Vec<(String, f32)> {
    let value = |(field, value)| match (field, value) {
        (1, Field::Bytes(value)) => match &fields(value)[..] {
            [(1, Field::Bytes(tag)), (2, Field::Fixed(bytes))] => {
                let bytes: [u8; 4] = (*bytes).try_into().expect("a float is 4 bytes");
                (text_of(tag), f32::from_le_bytes(bytes))
            }
            other => panic!("unexpected value {other:?}"),
        },
        other => panic!("unexpected field {other:?}"),
    };
    fields(summary).into_iter().map(value).collect()
}

fn text_of(bytes: &[u8]) -> String {
    std::str::from_utf8(bytes).expect("text is UTF-8").to_owned()
}

#[derive(Debug, PartialEq)]
enum Field<'a> {
    Varint(u64),
    Fixed(&'a [u8]),
    Bytes(&'a [u8]),
}

fn fields(mut bytes: &[u8]) -> Vec<(u64, Field<'_>)> {
    let mut fields = Vec::new();
    while !bytes.is_empty() {
        let key = varint(&mut bytes);
        let len_bytes = match key & 7 {
            0 => {
                fields.push((key >> 3, Field::Varint(varint(&mut bytes))));
                continue;
            }
            1 => 8,
            2 => usize::try_from(varint(&mut bytes)).expect("a short field"),
            5 => 4,
            other => panic!("unknown wire type {other}"),
        };
        let (value, rest) = bytes.split_at(len_bytes);
        bytes = rest;
        fields
            .push((key >> 3, if key & 7 == 2 { Field::Bytes(value) } else { Field::Fixed(value) }));
    }
    fields
}

fn varint(bytes: &mut &[u8]) -> u64 {
    let end = bytes.iter().position(|byte| byte & 0x80 == 0).expect("a varint ends");
    let (varint, rest) = bytes.split_at(end + 1);
    *bytes = rest;
    varint.iter().rev().fold(0, |value, byte| value << 7 | u64::from(byte & 0x7F))
}

/// Bit by bit, from the polynomial in RFC 3720.
fn check_crc(bytes: &[u8], stored: &[u8]) {
    let mut crc = !0_u32;
    for byte in bytes {
        crc ^= u32::from(*byte);
        for _ in 0..8 {
            crc = if crc & 1 == 1 { crc >> 1 ^ 0x82F6_3B78 } else { crc >> 1 };
        }
    }
    crc = !crc;
    let masked = crc.rotate_right(15).wrapping_add(0xA282_EAD8);
    assert_eq!(masked.to_le_bytes(), stored, "checksum of {bytes:?}");
}
