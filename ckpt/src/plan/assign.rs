//! Determines the regions to be written, and which of their holders writes each.

use std::collections::HashMap;

use super::bad;
use crate::region::{Region, Span, whole};
use crate::spec::{HeldRegion, TensorSpec};
use crate::tile::{TileBox, tile};
use crate::{Error, Result};

/// Pieces of tensors begin at multiples of this where rows are too long to stay uncut.
const CUT_ALIGN_BYTES: u64 = 4096;

/// Part of a tensor that one or several writers hold.
#[derive(Debug)]
pub(crate) struct HeldTensor {
    pub(crate) tensor: usize,
    /// In the normal form.
    pub(crate) region: Region,
    /// Bytes of an element.
    pub(crate) item_bytes: u64,
    /// (writer, holding), each writer once, in ascending order.
    pub(crate) holders: Vec<(u32, u32)>,
}

impl HeldTensor {
    fn bytes(&self) -> u64 {
        self.region.count() * self.item_bytes
    }
}

/// The elements `start..` of a source up to the next split, and their writer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct WriterShare {
    pub(crate) start: u64,
    /// Index in the holders.
    pub(crate) holder: usize,
}

/// All regions to be written: disjoint, covering every tensor, tensor by tensor, in the order of
/// their first elements.
pub(crate) fn sources(specs: &[TensorSpec], held: &[Vec<HeldRegion>]) -> Result<Vec<HeldTensor>> {
    let mut of_tensor: Vec<Vec<(Region, u32, u32)>> = specs.iter().map(|_| Vec::new()).collect();
    for (writer, holdings) in held.iter().enumerate() {
        for (number, HeldRegion { tensor, region }) in holdings.iter().enumerate() {
            let what = || format!("region {number} of writer {writer}");
            let Some(spec) = specs.get(*tensor) else {
                let count = specs.len();
                return bad(what(), format!("expected a tensor below {count}, found {tensor}"));
            };
            if !region.is_within(&spec.shape) {
                let why = format!("{region:?} is not within shape {:?}", spec.shape);
                return bad(format!("{} ({})", spec.label(), what()), why);
            }
            // A writer may hold an empty part of a non-empty tensor, such as rows of padding.
            if region.elements() != Some(0) || spec.bytes() == Some(0) {
                let place = (writer as u32, number as u32); // fits: far fewer than 2^32 in memory
                // An empty tensor has one part, however it is cut.
                let is_empty = spec.bytes() == Some(0);
                let all = || Region { spans: whole(&spec.shape), flat: None };
                let region = if is_empty { all() } else { region.normal() };
                of_tensor[*tensor].push((region, place.0, place.1));
            }
        }
    }
    let mut sources = Vec::new();
    for (tensor, parts) in of_tensor.into_iter().enumerate() {
        sources.extend(merge_replicas(tensor, &specs[tensor], parts)?);
    }
    Ok(sources)
}

/// The distinct regions of one tensor, with all their holders.
fn merge_replicas(
    tensor: usize,
    spec: &TensorSpec,
    mut parts: Vec<(Region, u32, u32)>,
) -> Result<Vec<HeldTensor>> {
    let item_bytes = spec.dtype.item_bytes();
    parts.sort_by(|a, b| a.0.key().cmp(&b.0.key()).then((a.1, a.2).cmp(&(b.1, b.2))));
    let mut sources: Vec<HeldTensor> = Vec::new();
    for (region, writer, holding) in parts {
        match sources.last_mut() {
            Some(last) if last.region == region => {
                if last.holders.last().is_none_or(|(before, _)| *before != writer) {
                    last.holders.push((writer, holding));
                }
            }
            _ => sources.push(HeldTensor {
                tensor,
                region,
                item_bytes,
                holders: vec![(writer, holding)],
            }),
        }
    }
    if is_tiled(spec, &sources) {
        return Ok(sources);
    }
    // The first writers may cover the tensor, and later ones hold it again in other regions.
    let total = spec.bytes().unwrap_or(0);
    let mut firsts: Vec<(u32, usize)> =
        sources.iter().enumerate().map(|(place, source)| (source.holders[0].0, place)).collect();
    firsts.sort_unstable();
    let mut bytes = 0;
    let enough = firsts.iter().position(|&(_, place)| {
        bytes += sources[place].bytes();
        bytes >= total
    });
    let kept: std::collections::HashSet<usize> =
        firsts[..enough.map_or(0, |last| last + 1)].iter().map(|&(_, place)| place).collect();
    let mut place = 0;
    let count = sources.len();
    sources.retain(|_| {
        place += 1;
        kept.contains(&(place - 1))
    });
    if is_tiled(spec, &sources) {
        return Ok(sources);
    }
    let reason = format!(
        "{count} different parts of shape {:?}, held by the writers, overlap or leave gaps",
        spec.shape
    );
    Err(Error::BadInput { object: spec.label(), reason })
}

fn is_tiled(spec: &TensorSpec, sources: &[HeldTensor]) -> bool {
    let flats: Vec<Option<Span>> = sources.iter().map(|source| source.region.flat_span()).collect();
    let parts: Vec<TileBox<'_>> = sources
        .iter()
        .zip(flats)
        .map(|(source, flat)| (source.region.spans.as_slice(), flat))
        .collect();
    tile(&spec.shape, &parts)
}

/// Assigns writers so that all write about as many bytes. Returns the splits of every source, in
/// order; the first is at 0.
///
/// Sources with the same holders are concatenated, and each holder takes one contiguous range of
/// them, so that few are split. Sources with few holders are assigned first: a writer with many
/// such bytes takes less of the sources with more holders.
pub(crate) fn share(
    sources: &[HeldTensor],
    writers: usize,
    cut_bytes_min: u64,
) -> Vec<Vec<WriterShare>> {
    let mut loads = vec![0_u64; writers];
    let mut cuts: Vec<Vec<WriterShare>> =
        vec![vec![WriterShare { start: 0, holder: 0 }]; sources.len()];
    let mut sets: HashMap<Vec<u32>, Vec<usize>> = HashMap::new();
    for (place, source) in sources.iter().enumerate() {
        if let [(writer, _)] = source.holders[..] {
            loads[writer as usize] += source.bytes();
        } else {
            let set = source.holders.iter().map(|(writer, _)| *writer).collect();
            sets.entry(set).or_default().push(place);
        }
    }
    let mut sets: Vec<(Vec<u32>, Vec<usize>)> = sets.into_iter().collect();
    sets.sort_unstable_by(|(a, _), (b, _)| (a.len(), a).cmp(&(b.len(), b)));
    for (set, places) in sets {
        let total = places.iter().map(|&place| sources[place].bytes()).sum();
        let before: Vec<u64> = set.iter().map(|&writer| loads[writer as usize]).collect();
        let shares = level(&before, total);
        let mut stretch = ReplicaStretch { shares: &shares, holder: 0, end: shares[0], at: 0 };
        for place in places {
            cuts[place] = stretch.take(&sources[place], cut_bytes_min, |holder, bytes| {
                loads[set[holder] as usize] += bytes;
            });
        }
    }
    cuts
}

/// Distributes `total` over the loads so that the smallest are raised to one level.
fn level(loads: &[u64], total: u64) -> Vec<u64> {
    let mut order: Vec<usize> = (0..loads.len()).collect();
    order.sort_by_key(|&place| loads[place]);
    // The first `count` of them end at the same level, which is below the next one's load.
    let mut sum = 0_u128;
    let mut count = 0;
    while count < order.len() {
        let next = u128::from(loads[order[count]]);
        if count > 0 && next * count as u128 >= sum + u128::from(total) {
            break;
        }
        sum += next;
        count += 1;
    }
    let all = sum + u128::from(total);
    let (height, rest) = (all / count as u128, all % count as u128);
    let mut shares = vec![0; loads.len()];
    for (number, &place) in order[..count].iter().enumerate() {
        let height = height + u128::from((number as u128) < rest);
        shares[place] = height.saturating_sub(u128::from(loads[place])) as u64; // fits: of `total`
    }
    shares
}

/// Sources end to end, which are divided among the holders in order, by their shares.
struct ReplicaStretch<'a> {
    shares: &'a [u64],
    /// The current holder.
    holder: usize,
    /// The end of its share.
    end: u64,
    at: u64,
}

impl ReplicaStretch<'_> {
    fn take(
        &mut self,
        source: &HeldTensor,
        cut_bytes_min: u64,
        mut give: impl FnMut(usize, u64),
    ) -> Vec<WriterShare> {
        let (mut start, all) = (0, source.bytes());
        let mut cuts = Vec::new();
        loop {
            let left = all - start;
            let room = self.end.saturating_sub(self.at);
            let is_last = self.holder + 1 == self.shares.len();
            let taken = if is_last || left <= room {
                left
            } else {
                cut_after(source, start, room, cut_bytes_min)
            };
            if taken > 0 || left == 0 {
                cuts.push(WriterShare { start: start / source.item_bytes, holder: self.holder });
                give(self.holder, taken);
                self.at += taken;
                start += taken;
            }
            if start == all {
                return cuts;
            }
            self.holder += 1;
            self.end += self.shares[self.holder];
        }
    }
}

/// The number of bytes from `start` on for a writer with `room` left: a multiple of rows, unless
/// those are long. It avoids very small pieces, both for this writer and for the next.
fn cut_after(source: &HeldTensor, start: u64, room: u64, cut_bytes_min: u64) -> u64 {
    let left = source.bytes() - start;
    if left < 2 * cut_bytes_min {
        return if room >= left - room { left } else { 0 };
    }
    if room < cut_bytes_min / 2 {
        return 0;
    }
    if left - room < cut_bytes_min / 2 {
        return left;
    }
    let cut = start + room.clamp(cut_bytes_min, left - cut_bytes_min);
    let row: u64 = source.region.spans.iter().skip(1).map(|span| span.len).product();
    let row_bytes = row * source.item_bytes;
    let unit = if source.region.flat.is_none() && row_bytes <= cut_bytes_min {
        row_bytes
    } else {
        // Element sizes are powers of two and divide it.
        CUT_ALIGN_BYTES
    };
    let rounded = (cut + unit / 2) / unit * unit;
    rounded.clamp(start, source.bytes()) - start
}
