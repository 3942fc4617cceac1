//! Which bytes go into which file. Pure: the same tensors and limits give the same files.
//!
//! Tensors fill files in the order in which they are given, so that a layer's neighbours stay
//! neighbours; inside a file they are sorted as safetensors sorts them. Only a tensor that is
//! larger than a whole file is cut, along its first axis.

use std::collections::HashSet;
use std::ops::Range;

use crate::region::{self, Span};
use crate::shard::{self, Entry};
use crate::{Error, Group, Result, TensorData};

/// What a file may hold at most.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// Bytes of tensors. A single row that is larger gets a file of its own.
    pub(crate) data_bytes_max: u64,
    /// Bytes of the header's JSON.
    pub(crate) header_bytes_max: u64,
}

/// A box of one of the tensors given to [`plan`].
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    /// Which of the tensors.
    pub(crate) tensor: usize,
    /// Which piece of it, in row order.
    pub(crate) k: usize,
    /// Its box.
    pub(crate) spans: Vec<Span>,
    /// Its bytes, within the tensor's.
    pub(crate) bytes: Range<usize>,
}

/// One safetensors file.
#[derive(Debug)]
pub(crate) struct Shard {
    /// Its name.
    pub(crate) file: String,
    /// Length prefix, JSON and padding: all that comes before the first tensor.
    pub(crate) header: Vec<u8>,
    /// The tensors, in the order of their bytes.
    pub(crate) pieces: Vec<Piece>,
}

impl Shard {
    /// The length of the file.
    pub(crate) fn bytes(&self) -> u64 {
        let data: u64 = self.pieces.iter().map(|piece| piece.bytes.len() as u64).sum();
        self.header.len() as u64 + data
    }
}

/// Lays the tensors out, group after group.
pub(crate) fn plan(tensors: &[TensorData<'_>], step: u64, limits: Limits) -> Result<Vec<Shard>> {
    check(tensors)?;
    let mut families: Vec<(&'static str, Vec<Vec<Piece>>)> = Vec::new();
    for group in Group::ALL {
        if !families.iter().any(|(family, _)| *family == group.family()) {
            families.push((group.family(), Vec::new()));
        }
        let (_, files) = families.last_mut().expect("pushed above if there was none");
        let members = (0..tensors.len()).filter(|&place| tensors[place].group == group);
        fill(files, tensors, members, limits);
    }
    let mut shards = Vec::new();
    for (family, files) in families {
        let count = files.len();
        for (number, pieces) in (1..).zip(files) {
            let file = format!("{family}-{number:05}-of-{count:05}.safetensors");
            shards.push(seal(file, pieces, tensors, step)?);
        }
    }
    Ok(shards)
}

/// Puts the pieces of each tensor into the last file, or into a new one if they do not fit.
fn fill(
    files: &mut Vec<Vec<Piece>>,
    tensors: &[TensorData<'_>],
    members: impl Iterator<Item = usize>,
    limits: Limits,
) {
    let used = |file: &Vec<Piece>| -> (u64, u64) {
        let header = |piece: &Piece| header_bytes(&tensors[piece.tensor]);
        let data = file.iter().map(|piece| piece.bytes.len() as u64).sum();
        (data, file.iter().map(header).sum())
    };
    let (mut data, mut header) = files.last().map_or((0, 0), used);
    for place in members {
        let tensor = &tensors[place];
        for piece in cut(place, tensor, limits.data_bytes_max) {
            let (more_data, more_header) = (piece.bytes.len() as u64, header_bytes(tensor));
            let fits = data + more_data <= limits.data_bytes_max
                && header + more_header <= limits.header_bytes_max;
            if files.is_empty() || !fits {
                files.push(Vec::new());
                (data, header) = (0, 0);
            }
            files.last_mut().expect("pushed above if there was none").push(piece);
            data += more_data;
            header += more_header;
        }
    }
}

/// A tensor in as few pieces of whole rows as the limit allows.
fn cut(place: usize, tensor: &TensorData<'_>, bytes_max: u64) -> Vec<Piece> {
    let total = tensor.bytes.len();
    let rows = tensor.shape.first().copied().unwrap_or(1);
    if total as u64 <= bytes_max || rows <= 1 {
        let spans = region::whole(tensor.shape);
        return vec![Piece { tensor: place, k: 0, spans, bytes: 0..total }];
    }
    let row_bytes = total as u64 / rows;
    let step = (bytes_max / row_bytes).max(1);
    let mut pieces = Vec::new();
    let mut start = 0;
    while start < rows {
        let len = step.min(rows - start);
        let mut spans = region::whole(tensor.shape);
        spans[0] = Span { start, len };
        // fits: within a slice.
        let bytes = (start * row_bytes) as usize..((start + len) * row_bytes) as usize;
        pieces.push(Piece { tensor: place, k: pieces.len(), spans, bytes });
        start += len;
    }
    pieces
}

/// Sorts the pieces by alignment, then name, and writes the header.
fn seal(
    file: String,
    mut pieces: Vec<Piece>,
    tensors: &[TensorData<'_>],
    step: u64,
) -> Result<Shard> {
    let name = |piece: &Piece| {
        let tensor = &tensors[piece.tensor];
        let is_cut = piece.bytes.len() < tensor.bytes.len();
        tensor.group.entry_name(tensor.name, is_cut.then_some(piece.k))
    };
    pieces.sort_by_cached_key(|piece| {
        let item_bytes = tensors[piece.tensor].dtype.item_bytes();
        (std::cmp::Reverse(item_bytes), name(piece))
    });
    let mut end = 0;
    let entries = pieces.iter().map(|piece| {
        let begin = end;
        end += piece.bytes.len() as u64;
        Entry {
            name: name(piece),
            dtype: tensors[piece.tensor].dtype,
            shape: piece.spans.iter().map(|span| span.len).collect(),
            data_offsets: [begin, end],
        }
    });
    let header = shard::header(step, entries)?;
    Ok(Shard { file, header, pieces })
}

/// The most that an entry takes in the header: a name of which every byte may need an escape, the
/// key words, 20 digits a number.
fn header_bytes(tensor: &TensorData<'_>) -> u64 {
    6 * tensor.name.len() as u64 + 160 + 21 * tensor.shape.len() as u64
}

fn check(tensors: &[TensorData<'_>]) -> Result<()> {
    let mut seen = HashSet::new();
    for tensor in tensors {
        let bad = |why: String| {
            let what = format!("{} '{}'", tensor.group, tensor.name);
            Err(Error::BadInput { what, why })
        };
        match tensor.name {
            "" => return bad("it has no name".to_owned()),
            "__metadata__" => return bad("safetensors keeps this name for itself".to_owned()),
            name if name.len() > NAME_BYTES_MAX => {
                return bad(format!("its name is longer than {NAME_BYTES_MAX} bytes"));
            }
            name if name.contains('#') => {
                return bad("'#' in a name marks the pieces of a cut tensor".to_owned());
            }
            _ => {}
        }
        if tensor.shape.len() > region::RANK_MAX {
            return bad(format!("it has more than {} axes", region::RANK_MAX));
        }
        let due = region::elements(tensor.shape.iter().copied())
            .and_then(|count| count.checked_mul(tensor.dtype.item_bytes()));
        if due != Some(tensor.bytes.len() as u64) {
            let (got, shape, dtype) = (tensor.bytes.len(), tensor.shape, tensor.dtype);
            return bad(format!("got {got} bytes for {dtype} of shape {shape:?}"));
        }
        if !seen.insert((tensor.group, tensor.name)) {
            return bad("it is there twice".to_owned());
        }
    }
    Ok(())
}

/// Longer than any parameter's name, and short enough that a header cannot outgrow its limit.
const NAME_BYTES_MAX: usize = 4096;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Dtype;

    const LIMITS: Limits = Limits { data_bytes_max: 100, header_bytes_max: 1 << 20 };

    /// Files as `name: entry[first byte..last]`, from tensors as (name, group, dtype, shape).
    fn check_plan(given: &[(&str, Group, Dtype, &[u64])], limits: Limits, due: &[&str]) {
        let bytes = [0_u8; 1 << 10];
        let tensors: Vec<TensorData<'_>> = given
            .iter()
            .map(|&(name, group, dtype, shape)| {
                let len = (shape.iter().product::<u64>() * dtype.item_bytes()) as usize;
                TensorData { name, group, dtype, shape, bytes: &bytes[..len] }
            })
            .collect();
        let shards = plan(&tensors, 7, limits).unwrap();
        let text = |shard: &Shard| {
            let piece = |p: &Piece| format!(" {}[{:?}]", tensors[p.tensor].name, p.bytes);
            let pieces: String = shard.pieces.iter().map(piece).collect();
            format!("{}:{pieces}", shard.file)
        };
        assert_eq!(shards.iter().map(text).collect::<Vec<_>>(), due);
    }

    #[test]
    fn fills_files_and_cuts_rows() {
        use Dtype::*;
        use Group::*;
        check_plan(&[], LIMITS, &[]);
        check_plan(
            &[("b", Model, BF16, &[5]), ("a", Model, F32, &[3]), ("c", Model, F32, &[])],
            LIMITS,
            &["model-00001-of-00001.safetensors: a[0..12] c[0..4] b[0..10]"],
        );
        check_plan(
            &[("a", ExpAvg, F32, &[20]), ("a", Model, F32, &[20]), ("a", Master, F32, &[5])],
            LIMITS,
            &[
                "model-00001-of-00001.safetensors: a[0..80]",
                "optim-00001-of-00001.safetensors: a[0..80] a[0..20]",
            ],
        );
        check_plan(
            &[("a", Model, U8, &[60]), ("b", Model, U8, &[7, 30]), ("c", Model, U8, &[10])],
            LIMITS,
            &[
                "model-00001-of-00004.safetensors: a[0..60]",
                "model-00002-of-00004.safetensors: b[0..90]",
                "model-00003-of-00004.safetensors: b[90..180]",
                "model-00004-of-00004.safetensors: b[180..210] c[0..10]",
            ],
        );
        // A row is never cut, however large.
        check_plan(
            &[("a", Model, U8, &[2, 150])],
            LIMITS,
            &[
                "model-00001-of-00002.safetensors: a[0..150]",
                "model-00002-of-00002.safetensors: a[150..300]",
            ],
        );
    }

    #[test]
    fn a_full_header_begins_a_new_file() {
        let limits = Limits { data_bytes_max: 1 << 20, header_bytes_max: 400 };
        check_plan(
            &[
                ("a", Group::Model, Dtype::U8, &[1]),
                ("b", Group::Model, Dtype::U8, &[1]),
                ("c", Group::Model, Dtype::U8, &[1]),
            ],
            limits,
            &[
                "model-00001-of-00002.safetensors: a[0..1] b[0..1]",
                "model-00002-of-00002.safetensors: c[0..1]",
            ],
        );
    }

    #[test]
    fn refuses_what_cannot_be_saved() {
        let good = TensorData {
            name: "w",
            group: Group::Model,
            dtype: Dtype::F32,
            shape: &[2],
            bytes: &[0; 8],
        };
        let long = "x".repeat(NAME_BYTES_MAX + 1);
        for bad in [
            TensorData { name: "", ..good },
            TensorData { name: "__metadata__", ..good },
            TensorData { name: "w#1", ..good },
            TensorData { name: &long, ..good },
            TensorData { shape: &[3], ..good },
            TensorData { shape: &[u64::MAX, 2], ..good },
            TensorData { shape: &[], ..good },
            TensorData { bytes: &[0; 7], ..good },
        ] {
            let got = plan(&[bad], 0, LIMITS);
            assert!(matches!(got, Err(Error::BadInput { .. })), "{bad:?}");
        }
        assert!(matches!(plan(&[good, good], 0, LIMITS), Err(Error::BadInput { .. })));
        assert!(plan(&[good, TensorData { group: Group::Master, ..good }], 0, LIMITS).is_ok());
    }
}
