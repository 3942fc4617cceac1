//! A copy of a training state that no later update touches: what is to be saved, laid end to end in
//! one piece of memory, and a list of what lies where.

use serde::{Deserialize, Serialize};

use crate::{Blob, Dtype, Error, Group, Result, TensorData, parallel};
use storage::copy_past_cache;

/// Copies begin at multiples of it, so that whole lines of the cache are written.
const ALIGN_BYTES: u64 = 64;

/// One thread copies so much at a time: enough that taking turns costs nothing, little enough that
/// all threads end together.
const PART_BYTES: usize = 16 << 20;

/// What is to be saved. It says where the bytes lie in an arena, and has none itself.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Snapshot {
    pub(crate) step: u64,
    tensors: Vec<Tensor>,
    blobs: Vec<Named>,
    pub(crate) meta: serde_json::Value,
    /// All bytes, with the gaps between them.
    pub(crate) arena_bytes: u64,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Tensor {
    name: String,
    group: Group,
    dtype: Dtype,
    shape: Vec<u64>,
    place: Place,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Named {
    name: String,
    place: Place,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Place {
    offset: u64,
    bytes: u64,
}

impl Place {
    /// The place after `end`, which moves behind it.
    fn after(end: &mut u64, bytes: usize) -> Self {
        let offset = end.next_multiple_of(ALIGN_BYTES);
        let bytes = bytes as u64;
        *end = offset + bytes;
        Place { offset, bytes }
    }

    fn of(self, arena: &[u8]) -> Result<&[u8]> {
        let start = usize::try_from(self.offset).ok();
        let end = self.offset.checked_add(self.bytes).and_then(|end| usize::try_from(end).ok());
        let bytes = start.zip(end).and_then(|(start, end)| arena.get(start..end));
        bytes.ok_or_else(|| Error::Agent {
            why: format!("{} bytes at {} of {}", self.bytes, self.offset, arena.len()),
        })
    }
}

impl Snapshot {
    /// Lays everything out. Nothing is copied yet.
    pub(crate) fn new(
        step: u64,
        tensors: &[TensorData<'_>],
        blobs: &[Blob<'_>],
        meta: serde_json::Value,
    ) -> Self {
        let mut end = 0;
        let tensor = |tensor: &TensorData<'_>| Tensor {
            name: tensor.name.to_owned(),
            group: tensor.group,
            dtype: tensor.dtype,
            shape: tensor.shape.to_vec(),
            place: Place::after(&mut end, tensor.bytes.len()),
        };
        let tensors = tensors.iter().map(tensor).collect();
        let blob = |blob: &Blob<'_>| Named {
            name: blob.name.to_owned(),
            place: Place::after(&mut end, blob.bytes.len()),
        };
        let blobs = blobs.iter().map(blob).collect();
        Snapshot { step, tensors, blobs, meta, arena_bytes: end }
    }

    /// Bytes of tensors and blobs.
    pub(crate) fn bytes(&self) -> u64 {
        let tensors = self.tensors.iter().map(|tensor| tensor.place.bytes);
        tensors.chain(self.blobs.iter().map(|blob| blob.place.bytes)).sum()
    }

    /// Copies what was laid out, by so many threads. `tensors` and `blobs` are those that
    /// [`Snapshot::new`] was given.
    pub(crate) fn fill(
        &self,
        arena: &mut [u8],
        tensors: &[TensorData<'_>],
        blobs: &[Blob<'_>],
        threads: usize,
    ) -> Result<()> {
        let places = self.tensors.iter().map(|tensor| tensor.place);
        let places = places.chain(self.blobs.iter().map(|blob| blob.place));
        let sources = tensors.iter().map(|tensor| tensor.bytes);
        let sources = sources.chain(blobs.iter().map(|blob| blob.bytes));
        let mut rest = arena;
        let mut begin = 0;
        let mut parts = Vec::new();
        for (place, from) in places.zip(sources) {
            // fits: the arena has room for all places.
            let (_, after) = rest.split_at_mut((place.offset - begin) as usize);
            let (into, after) = after.split_at_mut(from.len());
            (rest, begin) = (after, place.offset + place.bytes);
            parts.extend(into.chunks_mut(PART_BYTES).zip(from.chunks(PART_BYTES)));
        }
        parallel::each(parts, threads, |(into, from), _| {
            copy_past_cache(into, from);
            Ok(())
        })?;
        Ok(())
    }

    /// The tensors, as they lie in the arena.
    pub(crate) fn tensors<'a>(&'a self, arena: &'a [u8]) -> Result<Vec<TensorData<'a>>> {
        let data = |tensor: &'a Tensor| {
            let Tensor { name, group, dtype, shape, place } = tensor;
            let bytes = place.of(arena)?;
            Ok(TensorData { name, group: *group, dtype: *dtype, shape, bytes })
        };
        self.tensors.iter().map(data).collect()
    }

    /// The blobs, as they lie in the arena.
    pub(crate) fn blobs<'a>(&'a self, arena: &'a [u8]) -> Result<Vec<Blob<'a>>> {
        let data = |blob: &'a Named| Ok(Blob { name: &blob.name, bytes: blob.place.of(arena)? });
        self.blobs.iter().map(data).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_are_apart_and_exact() {
        let bytes: Vec<u8> = (0..100_000_u32).map(|i| (i % 251) as u8).collect();
        let shapes: Vec<[u64; 1]> = [0, 1, 63, 64, 65, 30_000, 70_000].map(|len| [len]).to_vec();
        let tensor = |(i, shape): (usize, &'static [u64; 1])| TensorData {
            name: ["a", "b", "c", "d", "e", "f", "g"][i],
            group: Group::Model,
            dtype: Dtype::U8,
            shape,
            bytes: &[],
        };
        let shapes: &'static [[u64; 1]] = shapes.leak();
        let tensors: Vec<TensorData<'_>> = shapes
            .iter()
            .enumerate()
            .map(|(i, shape)| TensorData {
                bytes: &bytes[i..][..shape[0] as usize],
                ..tensor((i, shape))
            })
            .collect();
        let blobs = [Blob { name: "rng", bytes: b"state" }, Blob { name: "none", bytes: b"" }];
        let snapshot = Snapshot::new(7, &tensors, &blobs, serde_json::json!({ "loss": 0.5 }));
        let mut arena = vec![0xee; snapshot.arena_bytes as usize + 10];
        snapshot.fill(&mut arena, &tensors, &blobs, 3).unwrap();
        let text = serde_json::to_string(&snapshot).unwrap();
        let there: Snapshot = serde_json::from_str(&text).unwrap();
        assert_eq!(there, snapshot);
        for (got, due) in there.tensors(&arena).unwrap().iter().zip(&tensors) {
            assert!(got.bytes == due.bytes, "{}", due.name);
            assert_eq!((got.name, got.shape), (due.name, due.shape));
        }
        assert_eq!(there.blobs(&arena).unwrap()[0].bytes, b"state");
        assert_eq!(snapshot.bytes(), 100_198);
        assert!(arena[snapshot.arena_bytes as usize..].iter().all(|&byte| byte == 0xee));
        // A list from elsewhere may say anything.
        assert!(there.tensors(&arena[..50_000]).is_err());
        let far = Place { offset: u64::MAX, bytes: 2 };
        assert!(far.of(&arena).is_err());
    }
}
