//! Tensors derived from boxes of others, transposed or not, and from generated rows.
//!
//! A [`DerivedTensor`] is a description. Nothing is read until a band of it is requested, and then
//! only what that band needs, so that a model of any size is converted with a bounded buffer.

use super::fill::RowFill;
use super::source::TensorSource;
use crate::region::{self, Span};
use crate::runs;
use crate::tile;
use crate::{Dtype, Error, Group, Result, bands, number};

/// Bytes read at once of each of two tensors that are compared.
const EQUAL_BYTES: u64 = 16 << 20;

/// A tensor to be derived.
#[derive(Clone, Debug)]
pub struct DerivedTensor {
    /// The parameter's name.
    pub name: String,
    /// The role of the tensor for the parameter.
    pub group: Group,
    /// Its elements.
    pub dtype: Dtype,
    /// Elements along each axis. Row-major.
    pub shape: Vec<u64>,
    /// Its name in rules, which are applied before a known architecture is renamed.
    rule_name: String,
    parts: Vec<DerivedPart>,
}

/// A box of a derived tensor, and its source.
#[derive(Clone, Debug)]
struct DerivedPart {
    into: Vec<Span>,
    from: PartSource,
}

#[derive(Clone, Debug)]
enum PartSource {
    /// The box of the same shape that begins at `start`, with its two axes swapped if transposed.
    Tensor { tensor: usize, start: Vec<u64>, transposed: bool },
    /// Generated values, which are a function of their index in the whole tensor.
    Fill(RowFill),
}

impl DerivedTensor {
    /// A tensor as it is in the source.
    #[must_use]
    pub fn same(source: &TensorSource, tensor: usize) -> Self {
        let of = &source.tensors()[tensor];
        let mut made = DerivedTensor::new(of.name.clone(), of.group, of.dtype, of.shape.clone());
        made.put(vec![0; of.shape.len()], tensor, &region::whole(&of.shape));
        made
    }

    /// A tensor without parts.
    pub(crate) fn new(name: String, group: Group, dtype: Dtype, shape: Vec<u64>) -> Self {
        DerivedTensor { rule_name: name.clone(), name, group, dtype, shape, parts: Vec::new() }
    }

    /// Adds a box of a source's tensor at the index of its first element.
    pub(crate) fn put(&mut self, at: Vec<u64>, tensor: usize, spans: &[Span]) {
        let place = |(start, span): (u64, &Span)| Span { start, len: span.len };
        let into = at.into_iter().zip(spans).map(place).collect();
        let start = spans.iter().map(|span| span.start).collect();
        self.parts.push(DerivedPart {
            into,
            from: PartSource::Tensor { tensor, start, transposed: false },
        });
    }

    /// The same under another name.
    pub(crate) fn named(self, name: String) -> Self {
        DerivedTensor { rule_name: name.clone(), name, ..self }
    }

    /// The same with the two axes of a matrix swapped.
    ///
    /// # Errors
    /// [`Error::Unfit`] if it is not a matrix of whole bytes.
    pub(crate) fn transpose(mut self) -> Result<Self> {
        if self.dtype.header_items() > 1 {
            let found = format!("{}, which packs elements of a row", self.dtype);
            return Err(unfit(&self.name, found, "elements of whole bytes to transpose"));
        }
        let [rows, columns] = self.shape[..] else {
            let found = format!("shape {:?}", self.shape);
            return Err(unfit(&self.name, found, "a matrix to transpose"));
        };
        self.shape = vec![columns, rows];
        for part in &mut self.parts {
            part.into.swap(0, 1);
            match &mut part.from {
                PartSource::Tensor { start, transposed, .. } => {
                    start.swap(0, 1);
                    *transposed = !*transposed;
                }
                PartSource::Fill(_) => {
                    let found = "added rows (hint: transpose before adding rows)".to_owned();
                    return Err(unfit(&self.name, found, "a matrix of the source"));
                }
            }
        }
        Ok(self)
    }

    /// A box of it as a separate tensor.
    pub(crate) fn slice(&self, name: String, spans: &[Span]) -> Self {
        let shape = spans.iter().map(|span| span.len).collect();
        let mut made = DerivedTensor::new(name, self.group, self.dtype, shape);
        for part in &self.parts {
            let Some(shared) = runs::intersect(&part.into, spans) else { continue };
            let into = shared
                .iter()
                .zip(spans)
                .map(|(a, b)| Span { start: a.start - b.start, len: a.len })
                .collect();
            let from = match &part.from {
                PartSource::Tensor { tensor, start, transposed } => {
                    let start = start
                        .iter()
                        .zip(&shared)
                        .zip(&part.into)
                        .map(|((at, a), b)| at + (a.start - b.start))
                        .collect();
                    PartSource::Tensor { tensor: *tensor, start, transposed: *transposed }
                }
                PartSource::Fill(fill) => PartSource::Fill(fill.clone()),
            };
            made.parts.push(DerivedPart { into, from });
        }
        made
    }

    /// The same with more rows, or with fewer.
    pub(crate) fn with_rows(&self, rows: u64, fill: &RowFill) -> Self {
        let old = self.shape.first().copied().unwrap_or(0);
        let mut spans = region::whole(&self.shape);
        spans[0].len = rows.min(old);
        let mut made = self.slice(self.name.clone(), &spans);
        if rows > old {
            made.shape[0] = rows;
            let mut into = region::whole(&made.shape);
            into[0] = Span { start: old, len: rows - old };
            made.parts.push(DerivedPart { into, from: PartSource::Fill(fill.clone()) });
        }
        made
    }

    /// Bytes of the whole tensor. No overflow: the shape is checked first.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.shape.iter().product::<u64>() * self.dtype.item_bytes()
    }

    /// Whether a part is transposed, so that a narrow band of it costs many reads.
    pub(crate) fn is_transposed(&self) -> bool {
        let transposed =
            |part: &DerivedPart| matches!(part.from, PartSource::Tensor { transposed: true, .. });
        self.parts.iter().any(transposed)
    }

    /// Bytes of the widest element type of its sources.
    pub(crate) fn item_bytes_max(&self, source: &TensorSource) -> u64 {
        let item_bytes = |part: &DerivedPart| match &part.from {
            PartSource::Tensor { tensor, .. } => source.tensors()[*tensor].dtype.item_bytes(),
            PartSource::Fill(_) => 0,
        };
        self.parts.iter().map(item_bytes).max().unwrap_or(0)
    }

    /// Rejects a description that cannot be carried out: elements of a type that cannot be read,
    /// or what [`DerivedTensor::check_boxes`] rejects.
    pub(crate) fn check(&self, source: &TensorSource) -> Result<()> {
        for part in &self.parts {
            if let PartSource::Tensor { tensor, .. } = &part.from {
                source.tensors()[*tensor].check_readable(source.display(), &self.rule_name)?;
            }
        }
        self.check_boxes(source)
    }

    /// Rejects a description with gaps, overlapping parts, or an impossible cast.
    pub(crate) fn check_boxes(&self, source: &TensorSource) -> Result<()> {
        let count = region::elements(self.shape.iter().copied());
        if count.and_then(|count| count.checked_mul(self.dtype.item_bytes())).is_none() {
            return Err(unfit(
                &self.name,
                format!("shape {:?}", self.shape),
                "fewer than 2^64 bytes",
            ));
        }
        let within = self.parts.iter().all(|part| region::is_within(&self.shape, &part.into));
        let parts: Vec<tile::TileBox<'_>> = self
            .parts
            .iter()
            .filter(|part| part.into.iter().all(|span| span.len > 0))
            .map(|part| (part.into.as_slice(), None))
            .collect();
        if !within || count != Some(0) && !tile::tile(&self.shape, &parts) {
            let found = format!("{} boxes that leave gaps or overlap", parts.len());
            return Err(unfit(&self.name, found, &format!("boxes that tile {:?}", self.shape)));
        }
        for part in &self.parts {
            if let PartSource::Tensor { tensor, .. } = &part.from {
                let from = source.tensors()[*tensor].dtype;
                if !number::can_cast(from, self.dtype) {
                    let expected = format!("{from} as in the source");
                    return Err(unfit(&self.name, self.dtype.to_string(), &expected));
                }
            }
        }
        Ok(())
    }

    /// Fills `into` with a band of the tensor, row-major. `scratch` is reused between calls.
    pub(crate) fn read(
        &self,
        source: &TensorSource,
        band: &[Span],
        into: &mut [u8],
        scratch: &mut DeriveBuffers,
    ) -> Result<()> {
        for part in &self.parts {
            let shared = runs::intersect(&part.into, band);
            // A scalar's box has no axes, and an empty box has no intersection.
            let Some(shared) = shared.filter(|_| !into.is_empty()) else { continue };
            match &part.from {
                PartSource::Tensor { tensor, start, transposed } => {
                    let start = start
                        .iter()
                        .zip(&shared)
                        .zip(&part.into)
                        .map(|((at, a), b)| at + (a.start - b.start));
                    let spans: Vec<Span> = start
                        .zip(&shared)
                        .map(|(start, span)| Span { start, len: span.len })
                        .collect();
                    self.take(source, *tensor, &spans, *transposed, scratch)?;
                    place(&scratch.made, &shared, band, self.dtype, into);
                }
                PartSource::Fill(fill) => {
                    scratch.made.clear();
                    fill.values(&self.name, &shared, self.dtype, &mut scratch.made);
                    place(&scratch.made, &shared, band, self.dtype, into);
                }
            }
        }
        Ok(())
    }

    /// Whether two tensors have the same elements. Both are read.
    pub(crate) fn is_equal(&self, other: &DerivedTensor, source: &TensorSource) -> Result<bool> {
        if (self.dtype, &self.shape) != (other.dtype, &other.shape) {
            return Ok(false);
        }
        let (mut a, mut b, mut scratch) = (Vec::new(), Vec::new(), DeriveBuffers::default());
        for band in bands(&self.shape, self.dtype.item_bytes(), EQUAL_BYTES) {
            let items: u64 = band.iter().map(|span| span.len).product();
            // fits: at most 16 MiB
            a.resize((items * self.dtype.item_bytes()) as usize, 0);
            b.resize(a.len(), 0);
            self.read(source, &band, &mut a, &mut scratch)?;
            other.read(source, &band, &mut b, &mut scratch)?;
            if a != b {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Reads a box of the source into `scratch.made`, transposed if requested, and cast to the type
    /// of this tensor.
    fn take(
        &self,
        source: &TensorSource,
        tensor: usize,
        spans: &[Span],
        transposed: bool,
        scratch: &mut DeriveBuffers,
    ) -> Result<()> {
        let from = source.tensors()[tensor].dtype;
        let items: u64 = spans.iter().map(|span| span.len).product();
        let bytes = (items * from.item_bytes()) as usize; // fits: a part of a band
        scratch.read.resize(bytes, 0);
        if transposed {
            let there = [spans[1], spans[0]];
            source.read_box(tensor, &there, &mut scratch.read)?;
            scratch.transposed.resize(bytes, 0);
            transpose(&scratch.read, &mut scratch.transposed, &there, from);
            std::mem::swap(&mut scratch.read, &mut scratch.transposed);
        } else {
            source.read_box(tensor, spans, &mut scratch.read)?;
        }
        scratch.made.clear();
        number::cast(&scratch.read, from, self.dtype, &mut scratch.made);
        Ok(())
    }
}

/// Buffers that are reused from band to band.
#[derive(Debug, Default)]
pub(crate) struct DeriveBuffers {
    read: Vec<u8>,
    transposed: Vec<u8>,
    made: Vec<u8>,
}

/// Writes the elements of a box to their places in a band.
fn place(from: &[u8], shared: &[Span], band: &[Span], dtype: Dtype, into: &mut [u8]) {
    let item_bytes = dtype.item_bytes() as usize; // fits: at most 8
    let visit = |run: runs::CopyRun| -> std::result::Result<(), std::convert::Infallible> {
        // fits: within the buffers
        let (at, to) = (run.from as usize * item_bytes, run.to as usize * item_bytes);
        let len = run.len as usize * item_bytes;
        into[to..to + len].copy_from_slice(&from[at..at + len]);
        Ok(())
    };
    let Ok(()) = runs::each_run_of_boxes(shared, band, visit);
}

/// Rows and columns of a square that stays in the L1 cache while it is transposed.
const TILE: usize = 32;

/// Swaps the axes of the matrix in `from`, whose axes have the lengths of `spans`.
fn transpose(from: &[u8], into: &mut [u8], spans: &[Span; 2], dtype: Dtype) {
    // fits: the matrix is in memory
    let [rows, columns] = spans.map(|span| span.len as usize);
    let item = dtype.item_bytes() as usize; // fits: at most 8
    for top in (0..rows).step_by(TILE) {
        for left in (0..columns).step_by(TILE) {
            for column in left..(left + TILE).min(columns) {
                for row in top..(top + TILE).min(rows) {
                    let (at, to) = ((row * columns + column) * item, (column * rows + row) * item);
                    into[to..to + item].copy_from_slice(&from[at..at + item]);
                }
            }
        }
    }
}

pub(crate) fn unfit(what: &str, found: String, expected: &str) -> Error {
    Error::Unfit { object: format!("'{what}'"), found, expected: expected.to_owned() }
}
