//! `feedline ckpt diff`: compares two steps.

use std::collections::HashMap;
use std::fmt;

use anyhow::Result;
use ckpt::{Checkpoint, Dtype, Group, Span, TensorEntry, bands, to_f64, to_pair};
use clap::Args;
use serde::Serialize;

use super::{CkptOutput, open_step};
use crate::ui::terminal::{Bar, ProgressLine, table, thousands};

/// Arguments of `feedline ckpt diff`.
#[derive(Debug, Args)]
pub struct DiffArgs {
    /// A step-* folder, or a folder of steps for the newest complete one.
    #[arg(value_name = "A")]
    pub a: String,
    /// The other step.
    #[arg(value_name = "B")]
    pub b: String,
    /// Read every byte of both steps.
    ///
    /// Without this, tensors with the same chunks and equal CRC-64 values in both manifests count
    /// as equal, and only the others are read.
    #[arg(long)]
    pub read: bool,
    /// Print JSON, with units in the keys.
    #[arg(long)]
    pub json: bool,
}

/// The differences of two steps; `--json` prints it as it is.
#[derive(Debug, Serialize)]
pub struct Diff {
    a: String,
    b: String,
    same: bool,
    tensors_equal: usize,
    blobs_equal: usize,
    /// Bytes of each that were read; the others were compared by checksum.
    read_bytes: u64,
    tensors: Vec<TensorDiff>,
    blobs: Vec<BlobDiff>,
}

#[derive(Debug, Serialize)]
struct TensorDiff {
    group: &'static str,
    name: String,
    #[serde(flatten)]
    how: How,
}

/// The difference of a tensor.
#[derive(Debug, Serialize)]
#[serde(tag = "difference", rename_all = "snake_case")]
enum How {
    OnlyInA,
    OnlyInB,
    /// Type or shape.
    Kind {
        a: String,
        b: String,
    },
    Values(Values),
}

/// Elements whose bytes differ. Those of `F4_X2` are its single floats, as in a safetensors header.
#[derive(Debug, Default, Serialize)]
struct Values {
    elements: u64,
    elements_differ: u64,
    /// The largest difference of two numbers; `None` if every pair has one that is not a number.
    max_abs: Option<f64>,
    /// Pairs of which one is not a number or infinite.
    not_finite: u64,
    first_index: Vec<u64>,
    first_a: Option<ElementValue>,
    first_b: Option<ElementValue>,
}

/// The value of an element.
#[derive(Clone, Copy, Debug, Serialize)]
#[serde(untagged)]
enum ElementValue {
    Real(f64),
    /// The real and the imaginary part.
    Complex([f64; 2]),
}

#[derive(Debug, Serialize)]
struct BlobDiff {
    name: String,
    difference: &'static str,
    first_byte: Option<u64>,
}

/// Bytes of each step that are read at a time.
const BAND_BYTES: u64 = 16 << 20;

pub(crate) fn run(args: &DiffArgs, line: &mut ProgressLine) -> Result<CkptOutput> {
    let (a, b) = (open_step(&args.a)?, open_step(&args.b)?);
    let total = a.tensors().iter().map(TensorEntry::bytes).sum();
    let mut bar = Bar::new(line, "compare", total);
    let diff = compare_steps(&a, &b, args.read, &mut |done| bar.at(done))?;
    CkptOutput::new(args.json, &diff, diff.text(), diff.same)
}

/// Compares two steps; with `read`, every byte of both. `progress` receives the number of bytes
/// compared so far.
///
/// # Errors
/// If one of them cannot be read.
pub fn compare_steps(
    a: &Checkpoint,
    b: &Checkpoint,
    read: bool,
    progress: &mut dyn FnMut(u64),
) -> Result<Diff> {
    let mut diff = Diff {
        a: a.display(),
        b: b.display(),
        same: false,
        tensors_equal: 0,
        blobs_equal: 0,
        read_bytes: 0,
        tensors: Vec::new(),
        blobs: Vec::new(),
    };
    let mut done = 0;
    let (of_a, of_b) = (by_name(a), by_name(b));
    for tensor in a.tensors() {
        let how = match of_b.get(&(tensor.group, tensor.name.as_str())) {
            None => Some(How::OnlyInA),
            Some(other) => {
                diff.tensor(a, tensor, b, other, read, &mut |bytes| progress(done + bytes))?
            }
        };
        done += tensor.bytes();
        diff.add(tensor, how);
    }
    for tensor in b.tensors() {
        if !of_a.contains_key(&(tensor.group, tensor.name.as_str())) {
            diff.add(tensor, Some(How::OnlyInB));
        }
    }
    diff.compare_blobs(a, b)?;
    diff.same = diff.tensors.is_empty() && diff.blobs.is_empty();
    Ok(diff)
}

/// All tensors by name: a lookup of a missing name in the step itself would compare it with all
/// others.
fn by_name(step: &Checkpoint) -> HashMap<(Group, &str), &TensorEntry> {
    step.tensors().iter().map(|tensor| ((tensor.group, tensor.name.as_str()), tensor)).collect()
}

impl Diff {
    fn add(&mut self, tensor: &TensorEntry, how: Option<How>) {
        match how {
            None => self.tensors_equal += 1,
            Some(how) => {
                let (group, name) = (tensor.group.name(), tensor.name.clone());
                self.tensors.push(TensorDiff { group, name, how });
            }
        }
    }

    fn tensor(
        &mut self,
        a: &Checkpoint,
        in_a: &TensorEntry,
        b: &Checkpoint,
        in_b: &TensorEntry,
        read: bool,
        progress: &mut dyn FnMut(u64),
    ) -> Result<Option<How>> {
        let kind = |tensor: &TensorEntry| format!("{} {:?}", tensor.dtype, tensor.shape);
        if (in_a.dtype, &in_a.shape) != (in_b.dtype, &in_b.shape) {
            return Ok(Some(How::Kind { a: kind(in_a), b: kind(in_b) }));
        }
        if !read && checksums_agree(in_a, in_b) {
            return Ok(None);
        }
        self.read_bytes += in_a.bytes();
        let values = compare(a, b, in_a, progress)?;
        Ok((values.elements_differ > 0).then_some(How::Values(values)))
    }

    fn compare_blobs(&mut self, a: &Checkpoint, b: &Checkpoint) -> Result<()> {
        let in_b: Vec<&str> = b.blobs().collect();
        for name in a.blobs() {
            let mut add = |difference, first_byte| {
                self.blobs.push(BlobDiff { name: name.to_owned(), difference, first_byte });
            };
            if !in_b.contains(&name) {
                add("only_in_a", None);
                continue;
            }
            let (of_a, of_b) = (a.blob(name)?, b.blob(name)?);
            if of_a == of_b {
                self.blobs_equal += 1;
            } else {
                let same = of_a.iter().zip(&of_b).take_while(|(a, b)| a == b).count();
                add("bytes", Some(same as u64));
            }
        }
        let in_a: Vec<&str> = a.blobs().collect();
        for name in in_b.into_iter().filter(|name| !in_a.contains(name)) {
            let (name, difference) = (name.to_owned(), "only_in_b");
            self.blobs.push(BlobDiff { name, difference, first_byte: None });
        }
        Ok(())
    }
}

/// Whether both manifests have the same chunks of the tensor with the same checksums. Two different
/// contents have the same CRC-64 once in 2^64 times.
fn checksums_agree(a: &TensorEntry, b: &TensorEntry) -> bool {
    let places = |tensor: &TensorEntry| {
        let mut places: Vec<_> = tensor
            .chunks
            .iter()
            .map(|chunk| {
                let spans: Vec<[u64; 2]> = chunk.spans.iter().map(|&s| s.into()).collect();
                (spans, chunk.flat.map(<[u64; 2]>::from), chunk.crc64)
            })
            .collect();
        places.sort_unstable();
        places
    };
    places(a) == places(b)
}

fn compare(
    a: &Checkpoint,
    b: &Checkpoint,
    tensor: &TensorEntry,
    progress: &mut dyn FnMut(u64),
) -> Result<Values> {
    let item_bytes = tensor.dtype.item_bytes();
    let elements = tensor.bytes() / item_bytes * tensor.dtype.header_items();
    let mut values = Values { elements, ..Values::default() };
    let (mut of_a, mut of_b) = (Vec::new(), Vec::new());
    let mut first = 0;
    let (name, group): (&str, Group) = (&tensor.name, tensor.group);
    for band in bands(&tensor.shape, item_bytes, BAND_BYTES) {
        let items: u64 = band.iter().map(|span: &Span| span.len).product();
        // fits: a band is at most 16 MiB
        of_a.resize((items * item_bytes) as usize, 0);
        of_b.resize(of_a.len(), 0);
        a.read_box(name, group, &band, &mut of_a)?;
        b.read_box(name, group, &band, &mut of_b)?;
        if of_a != of_b {
            values.add(tensor, first, &of_a, &of_b);
        }
        first += items;
        progress(first * item_bytes);
    }
    Ok(values)
}

impl Values {
    /// Adds elements that start at `first` of the tensor.
    fn add(&mut self, tensor: &TensorEntry, first: u64, a: &[u8], b: &[u8]) {
        let dtype = tensor.dtype;
        let item_bytes = dtype.item_bytes() as usize; // fits: at most 8
        let pairs = a.chunks_exact(item_bytes).zip(b.chunks_exact(item_bytes));
        for (place, (a, b)) in pairs.enumerate().filter(|(_, (a, b))| a != b) {
            let place = (first + place as u64) * dtype.header_items();
            match (to_pair(dtype, a), to_pair(dtype, b)) {
                (Some(a), Some(b)) if dtype == Dtype::F4X2 => {
                    // Each byte has two elements, which differ in value if they do in bits.
                    for (half, (a, b)) in (0..).zip(a.into_iter().zip(b)) {
                        if a.to_bits() != b.to_bits() {
                            self.add_one(
                                tensor,
                                place + half,
                                ElementValue::Real(a),
                                ElementValue::Real(b),
                            );
                        }
                    }
                }
                (Some(a), Some(b)) => {
                    self.add_one(tensor, place, ElementValue::Complex(a), ElementValue::Complex(b));
                }
                _ => {
                    let [a, b] = [a, b].map(|item| ElementValue::Real(to_f64(dtype, item)));
                    self.add_one(tensor, place, a, b);
                }
            }
        }
    }

    fn add_one(&mut self, tensor: &TensorEntry, place: u64, a: ElementValue, b: ElementValue) {
        if self.elements_differ == 0 {
            let mut shape = tensor.shape.clone();
            if let Some(last) = shape.last_mut() {
                *last *= tensor.dtype.header_items();
            }
            self.first_index = index_of(&shape, place);
            (self.first_a, self.first_b) = (Some(a), Some(b));
        }
        self.elements_differ += 1;
        let gap = a.distance(b);
        if gap.is_finite() {
            self.max_abs = Some(self.max_abs.map_or(gap, |max| max.max(gap)));
        } else {
            self.not_finite += 1;
        }
    }
}

impl ElementValue {
    fn distance(self, other: ElementValue) -> f64 {
        let [[a, b], [c, d]] = [self, other].map(|value| match value {
            ElementValue::Real(value) => [value, 0.0],
            ElementValue::Complex(parts) => parts,
        });
        // Exactly the absolute difference if both are real.
        (a - c).hypot(b - d)
    }
}

impl fmt::Display for ElementValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ElementValue::Real(value) => write!(f, "{value}"),
            ElementValue::Complex([re, im]) => write!(f, "{re}{im:+}i"),
        }
    }
}

fn index_of(shape: &[u64], mut place: u64) -> Vec<u64> {
    let mut index = vec![0; shape.len()];
    for (at, &len) in index.iter_mut().zip(shape).rev() {
        (*at, place) = (place % len, place / len);
    }
    index
}

impl Diff {
    fn text(&self) -> String {
        let mut text = format!("{}\n{}\n", self.a, self.b);
        if !self.tensors.is_empty() {
            let rows: Vec<_> = self
                .tensors
                .iter()
                .map(|tensor| vec![tensor.name.clone(), tensor.group.to_owned(), tensor.how.text()])
                .collect();
            text += &table(&["tensor", "group", "difference"], &rows);
        }
        for blob in &self.blobs {
            let at = blob.first_byte.map_or_else(String::new, |at| format!(" from byte {at}"));
            text += &format!("  blob {}: {}{at}\n", blob.name, blob.difference.replace('_', " "));
        }
        text + &format!(
            "{}: {} tensors and {} blobs are equal, {} and {} are not\n",
            if self.same { "same" } else { "DIFFERENT" },
            thousands(self.tensors_equal as u64),
            self.blobs_equal,
            thousands(self.tensors.len() as u64),
            self.blobs.len()
        )
    }
}

impl How {
    fn text(&self) -> String {
        match self {
            How::OnlyInA => "only in the first".to_owned(),
            How::OnlyInB => "only in the second".to_owned(),
            How::Kind { a, b } => format!("{a} and {b}"),
            How::Values(values) => {
                let max = values.max_abs.map_or_else(|| "none".to_owned(), |max| max.to_string());
                let (differ, all) = (thousands(values.elements_differ), thousands(values.elements));
                let mut text = format!(
                    "{differ} of {all} elements, largest difference {max}, first at {:?}",
                    values.first_index
                );
                if let (Some(a), Some(b)) = (values.first_a, values.first_b) {
                    text += &format!(" ({a} and {b})");
                }
                if values.not_finite > 0 {
                    text += &format!(", {} not finite", thousands(values.not_finite));
                }
                text
            }
        }
    }
}
