//! Outputs: plain or compressed files that become visible when all of them are complete.

use std::io::{self, Write as _};
use std::sync::Arc;

use storage::{FileEntry, Key, Storage, Upload};

use super::dedup::hash::scatter;
use super::{CleanOptions, SplitOptions};
use crate::batch::report::Output;
use crate::{Error, Result};

/// Size of a write.
const WRITE_BYTES: usize = 1 << 20;

/// Three quarters of a fast disk's rate on one core, and within a tenth of the best size.
const ZSTD_LEVEL: i32 = 3;

/// The endings of the three files.
const SPLIT_NAMES: [&str; 3] = ["_train", "_valid", "_test"];

/// One file of lines, being written.
pub(super) struct LineWriter {
    store: Arc<dyn Storage>,
    key: Key,
    /// Bytes that are not written yet.
    pending: Vec<u8>,
    form: LineEncoding,
}

enum LineEncoding {
    Plain(Box<dyn Upload>),
    Zstd(zstd::Encoder<'static, Writer>),
}

impl LineWriter {
    /// Creates a file, compressed if its name says so.
    pub(super) fn create(store: Arc<dyn Storage>, key: Key) -> Result<Self> {
        let upload = store.create(&key, 0)?;
        let form = if key.name().ends_with(".zst") {
            let encoder = zstd::Encoder::new(Writer(upload), ZSTD_LEVEL);
            let with_checksum = encoder.and_then(|mut encoder| {
                encoder.include_checksum(true)?;
                Ok(encoder)
            });
            LineEncoding::Zstd(with_checksum.map_err(|error| failed(&store.display(&key), error))?)
        } else {
            LineEncoding::Plain(upload)
        };
        Ok(LineWriter { store, key, pending: Vec::new(), form })
    }

    /// As [`LineWriter::create`], with a name as on a command line.
    pub(super) fn create_named(name: &str) -> Result<Self> {
        let (store, key) = storage::locate(name)?;
        LineWriter::create(store, key)
    }

    pub(super) fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.pending.extend_from_slice(bytes);
        if self.pending.len() >= WRITE_BYTES { self.flush() } else { Ok(()) }
    }

    /// A line without its newline.
    pub(super) fn write_line(&mut self, line: &[u8]) -> Result<()> {
        self.pending.extend_from_slice(line);
        self.write(b"\n")
    }

    fn flush(&mut self) -> Result<()> {
        match &mut self.form {
            LineEncoding::Plain(upload) => upload.write(&self.pending)?,
            LineEncoding::Zstd(encoder) => encoder
                .write_all(&self.pending)
                .map_err(|error| failed(&self.store.display(&self.key), error))?,
        }
        self.pending.clear();
        self.pending.shrink_to(2 * WRITE_BYTES);
        Ok(())
    }

    fn finish(mut self) -> Result<(Arc<dyn Storage>, Key, FileEntry)> {
        self.flush()?;
        let LineWriter { store, key, form, .. } = self;
        let entry = match form {
            LineEncoding::Plain(upload) => upload.finish()?,
            LineEncoding::Zstd(encoder) => {
                let writer = encoder.finish();
                writer.map_err(|error| failed(&store.display(&key), error))?.0.finish()?
            }
        };
        Ok((store, key, entry))
    }
}

/// Finishes all files. If one fails, the finished ones are removed.
pub(super) fn finish(sinks: Vec<LineWriter>) -> Result<Vec<Output>> {
    let mut done: Vec<(Arc<dyn Storage>, Key, FileEntry)> = Vec::new();
    for sink in sinks {
        match sink.finish() {
            Ok(file) => done.push(file),
            Err(error) => return Err(roll_back(&done, error)),
        }
    }
    Ok(done.iter().map(|(store, key, entry)| Output::new(store.display(key), entry)).collect())
}

fn roll_back(done: &[(Arc<dyn Storage>, Key, FileEntry)], error: Error) -> Error {
    for (store, key, _) in done {
        if let Err(failed) = store.delete(key) {
            log::warn!("{}: not rolled back: {failed}", store.display(key));
            return Error::LeftBehind { file: store.display(key), source: Box::new(error) };
        }
    }
    error
}

/// An upload as a writer for encoders; its errors are wrapped.
struct Writer(Box<dyn Upload>);

impl io::Write for Writer {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.write(bytes).map_err(io::Error::other)?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn failed(object: &str, error: io::Error) -> Error {
    match error.downcast::<storage::Error>() {
        Ok(error) => error.into(),
        Err(error) => storage::Error::from_io("compress", object, error).into(),
    }
}

/// The files of retained documents, and the rule that assigns documents to them.
pub(super) struct KeptOutputs {
    pub(super) sinks: Vec<LineWriter>,
    /// The first draw that is past each file.
    bounds: Vec<u128>,
    seed: u64,
}

impl KeptOutputs {
    pub(super) fn create(options: &CleanOptions) -> Result<Self> {
        let (store, out) = storage::locate(&options.out)?;
        let (stem, ending) = stem_and_ending(out.name());
        let key = |part: &str| out.parent().join(&format!("{stem}{part}{ending}"));
        let Some(split) = &options.split else {
            let sink = LineWriter::create(store, key("")?)?;
            return Ok(KeptOutputs { sinks: vec![sink], bounds: vec![1 << 64], seed: 0 });
        };
        let (mut sinks, mut bounds) = (Vec::new(), Vec::new());
        for (name, bound) in SPLIT_NAMES.into_iter().zip(bounds_of(split)) {
            if bounds.last().copied().unwrap_or(0) < bound {
                sinks.push(LineWriter::create(Arc::clone(&store), key(name)?)?);
                bounds.push(bound);
            }
        }
        Ok(KeptOutputs { sinks, bounds, seed: split.seed })
    }

    /// Assigns a document by the hash of its text. Equal texts go to one file, and a text always
    /// goes to the same one: no validation text gets into the training set when a corpus grows or
    /// its order changes.
    pub(super) fn sink_of(&mut self, hash: u128) -> &mut LineWriter {
        let (low, high) = (hash as u64, (hash >> 64) as u64); // fits: both halves are taken
        let draw = scatter(self.seed ^ low).wrapping_add(high);
        let draw = u128::from(scatter(draw));
        let nth = self.bounds.partition_point(|bound| *bound <= draw);
        &mut self.sinks[nth]
    }
}

/// Where the range of each file ends, of all 2^64 draws. A file of weight 0 has none.
fn bounds_of(split: &SplitOptions) -> [u128; 3] {
    let whole: f64 = split.weights.iter().sum();
    let mut sum = 0.0;
    let mut bounds = split.weights.map(|weight| {
        sum += weight;
        // fits: at most 2^64; rounding shifts a bound by a part in 2^52
        (sum / whole * 2_f64.powi(64)) as u128
    });
    // Whatever the rounding, the last file that has a weight ends at the last draw.
    let last = split.weights.iter().rposition(|weight| *weight > 0.0).unwrap_or(0);
    bounds[last..].fill(1 << 64);
    bounds
}

/// `b.jsonl.zst` is `b` and `.jsonl.zst`; the default ending is `.jsonl`.
fn stem_and_ending(name: &str) -> (&str, String) {
    let is_name = |stem: &&str| !stem.is_empty();
    let plain = name.strip_suffix(".zst").filter(is_name);
    let (plain, zst) = plain.map_or((name, ""), |plain| (plain, ".zst"));
    for ending in [".jsonl", ".json"] {
        if let Some(stem) = plain.strip_suffix(ending).filter(is_name) {
            return (stem, format!("{ending}{zst}"));
        }
    }
    (plain, format!(".jsonl{zst}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endings_are_split_from_names() {
        for (name, stem, ending) in [
            ("b", "b", ".jsonl"),
            ("b.jsonl", "b", ".jsonl"),
            ("b.json", "b", ".json"),
            ("b.jsonl.zst", "b", ".jsonl.zst"),
            ("b.zst", "b", ".jsonl.zst"),
            (".jsonl", ".jsonl", ".jsonl"),
            (".zst", ".zst", ".jsonl"),
            ("b.v2", "b.v2", ".jsonl"),
        ] {
            assert_eq!(stem_and_ending(name), (stem, ending.to_owned()), "{name}");
        }
    }

    #[test]
    fn splits_follow_their_weights() {
        let split = |text: &str| bounds_of(&text.parse().unwrap());
        let all = 1_u128 << 64;
        assert_eq!(split("1,0,0"), [all; 3]);
        assert_eq!(split("0,0,2"), [0, 0, all]);
        assert_eq!(split("1,0,1"), [all / 2, all / 2, all]);
        let thirds = split("1,1,1");
        assert!(thirds[0].abs_diff(all / 3) < 1 << 12 && thirds[1].abs_diff(all / 3 * 2) < 1 << 13);
        assert!("1,2".parse::<SplitOptions>().is_err() && "0,0,0".parse::<SplitOptions>().is_err());
    }
}
