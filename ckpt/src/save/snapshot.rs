//! A snapshot: the copy of what one writer of a plan saves, which no later update touches. The
//! pieces of its files and its blobs are stored end to end in one arena. It holds only their bytes:
//! of a state that several ranks replicate, each copies its share.

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::base::parallel_io;
use crate::base::save_control::SaveControl;
use crate::plan::{SavePlan, SavePlanInputs};
use crate::write::staging::PieceSource;
use crate::{Blob, Checkpoints, Error, JointSaveOptions, Result, SaveReport};
use storage::copy_past_cache;

/// Alignment of the copies, so that whole cache lines are written.
const ALIGN_BYTES: u64 = 64;

/// Unit of work of a copy thread: large enough for negligible overhead, small enough that all
/// threads finish at about the same time.
const PART_BYTES: usize = 16 << 20;

/// Description of what is to be saved: where the bytes are in an arena, without the bytes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Snapshot {
    pub(crate) step: u64,
    pub(crate) writer: usize,
    /// The joint save that it is part of; `None` if the plan has one writer.
    pub(crate) party: Option<JointSaveInfo>,
    blobs: Vec<Named>,
    pub(crate) meta: serde_json::Value,
    /// Bytes of pieces and blobs.
    pub(crate) bytes: u64,
    /// The same with the alignment gaps.
    pub(crate) arena_bytes: u64,
}

/// [`JointSaveOptions`] without the writer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct JointSaveInfo {
    pub(crate) token: String,
    pub(crate) deadline: Duration,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Named {
    name: String,
    place: ArenaRange,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct ArenaRange {
    offset: u64,
    bytes: u64,
}

impl ArenaRange {
    /// The range after `end`, which is advanced past it.
    fn after(end: &mut u64, bytes: usize) -> Self {
        let offset = end.next_multiple_of(ALIGN_BYTES);
        let bytes = bytes as u64;
        *end = offset + bytes;
        ArenaRange { offset, bytes }
    }

    fn of(self, arena: &[u8]) -> Result<&[u8]> {
        let start = usize::try_from(self.offset).ok();
        let end = self.offset.checked_add(self.bytes).and_then(|end| usize::try_from(end).ok());
        let bytes = start.zip(end).and_then(|(start, end)| arena.get(start..end));
        bytes.ok_or_else(|| {
            let ArenaRange { offset, bytes } = self;
            let found = format!("{bytes} bytes at byte {offset}");
            let reason = format!("expected a range within {} bytes, found {found}", arena.len());
            Error::Agent { reason }
        })
    }
}

impl Snapshot {
    /// Computes the layout. Nothing is copied yet.
    pub(crate) fn new(
        step: u64,
        plan: &SavePlan,
        writer: usize,
        blobs: &[Blob<'_>],
        meta: serde_json::Value,
    ) -> Self {
        let (mut end, mut bytes) = (0, 0);
        for piece in places(plan, writer) {
            end = piece.offset + piece.bytes;
            bytes += piece.bytes;
        }
        let blob = |blob: &Blob<'_>| {
            bytes += blob.bytes.len() as u64;
            Named {
                name: blob.name.to_owned(),
                place: ArenaRange::after(&mut end, blob.bytes.len()),
            }
        };
        let blobs = blobs.iter().map(blob).collect();
        Snapshot { step, writer, party: None, blobs, meta, bytes, arena_bytes: end }
    }

    /// Copies the pieces and blobs on `threads` threads. `blobs` are those passed to
    /// [`Snapshot::new`], `pieces` the bytes of this writer's pieces.
    pub(crate) fn fill(
        &self,
        arena: &mut [u8],
        plan: &SavePlan,
        pieces: &[&[u8]],
        blobs: &[Blob<'_>],
        threads: usize,
    ) -> Result<()> {
        let places = places(plan, self.writer).chain(self.blobs.iter().map(|blob| blob.place));
        let sources = pieces.iter().copied().chain(blobs.iter().map(|blob| blob.bytes));
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
        parallel_io::each(parts, threads, |(into, from), _| {
            copy_past_cache(into, from);
            Ok(())
        })?;
        Ok(())
    }

    /// The orders: all that another process needs to save the contents of the arena.
    pub(crate) fn orders(&self, plan: &SavePlan) -> Vec<u8> {
        let mut text = plan.inputs_json().to_vec();
        serde_json::to_writer(&mut text, self)
            .expect("strings, numbers and lists always serialize, and all keys are strings");
        text
    }

    /// Parses orders, which are untrusted.
    pub(crate) fn of_orders(orders: &[u8]) -> serde_json::Result<(SavePlanInputs, Snapshot)> {
        let mut text = serde_json::Deserializer::from_slice(orders);
        let both = (SavePlanInputs::deserialize(&mut text)?, Snapshot::deserialize(&mut text)?);
        text.end().map(|()| both)
    }

    /// Rejects a plan that this snapshot cannot belong to.
    pub(crate) fn check(&self, plan: &SavePlan) -> Result<()> {
        if self.writer < plan.writers() && (self.party.is_some() || plan.writers() == 1) {
            return Ok(());
        }
        let (writer, writers) = (self.writer, plan.writers());
        let reason = format!("expected a joint save, found writer {writer} of {writers} alone");
        Err(Error::Agent { reason })
    }

    /// The bytes of the writer's pieces in the arena.
    pub(crate) fn pieces<'a>(&self, plan: &SavePlan, arena: &'a [u8]) -> Result<Vec<&'a [u8]>> {
        places(plan, self.writer).map(|place| place.of(arena)).collect()
    }

    /// The blobs in the arena.
    pub(crate) fn blobs<'a>(&'a self, arena: &'a [u8]) -> Result<Vec<Blob<'a>>> {
        let data = |blob: &'a Named| Ok(Blob { name: &blob.name, bytes: blob.place.of(arena)? });
        self.blobs.iter().map(data).collect()
    }

    /// The options of the joint save, if it is one.
    pub(crate) fn together(&self) -> Option<JointSaveOptions<'_>> {
        let JointSaveInfo { token, deadline } = self.party.as_ref()?;
        Some(JointSaveOptions { token, writer: self.writer, deadline: *deadline })
    }

    /// Saves the contents of the arena.
    pub(crate) fn save(
        &self,
        steps: &Checkpoints,
        plan: &SavePlan,
        arena: &[u8],
        control: &SaveControl,
    ) -> Result<SaveReport> {
        let (pieces, blobs) = (self.pieces(plan, arena)?, self.blobs(arena)?);
        let pieces = PieceSource::Memory(&pieces);
        let (step, meta) = (self.step, self.meta.clone());
        match self.together() {
            Some(together) => steps.save_part(step, plan, pieces, &blobs, meta, &together, control),
            None => {
                let started = Instant::now();
                steps.save_pieces(started, step, plan, &[pieces], &blobs, meta, control)
            }
        }
    }
}

/// The arena ranges of a writer's pieces.
fn places(plan: &SavePlan, writer: usize) -> impl Iterator<Item = ArenaRange> {
    let mut end = 0;
    plan.pieces_of(writer).map(move |piece| ArenaRange::after(&mut end, piece.bytes.len()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Dtype, Group, HeldRegion, PlanLimits, Region, Span, TensorSpec};

    /// Two writers: each has all of some tensors and half of the others.
    fn plan(lens: &[u64]) -> SavePlan {
        let spec = |(place, &len): (usize, &u64)| TensorSpec {
            name: format!("t{place}"),
            group: Group::Model,
            dtype: Dtype::U8,
            shape: vec![len],
        };
        let specs: Vec<TensorSpec> = lens.iter().enumerate().map(spec).collect();
        let held = [0, 1].map(|writer| {
            let half = |(tensor, &len): (usize, &u64)| {
                let start = writer * (len / 2);
                let span = Span { start, len: if writer == 0 { len / 2 } else { len - start } };
                let region = if tensor % 2 == 0 {
                    Region::whole(&[len])
                } else {
                    Region::of_box(vec![span])
                };
                HeldRegion { tensor, region }
            };
            lens.iter().enumerate().map(half).collect()
        });
        let limits = PlanLimits { cut_bytes_min: 1000, ..PlanLimits::default() };
        SavePlan::new(&specs, &held, limits).unwrap()
    }

    #[test]
    fn copies_are_disjoint_and_exact() {
        let lens = [0, 1, 63, 64, 65, 30_000, 70_000];
        let plan = plan(&lens);
        let bytes: Vec<u8> = (0..100_000_u32).map(|i| (i % 251) as u8).collect();
        let mut copied = 0;
        for writer in [0, 1] {
            let held: Vec<&[u8]> = (0..lens.len())
                .map(|tensor| {
                    let len = lens[tensor] as usize;
                    let (half, whole) = (len / 2, tensor % 2 == 0);
                    match (whole, writer) {
                        (true, _) => &bytes[tensor..][..len],
                        (false, 0) => &bytes[tensor..][..half],
                        (false, _) => &bytes[tensor + half..][..len - half],
                    }
                })
                .collect();
            let pieces = plan.pieces_held(writer, &held).unwrap();
            let blobs = [Blob { name: "rng", bytes: b"state" }, Blob { name: "none", bytes: b"" }];
            let meta = serde_json::json!({ "loss": 0.5 });
            let mut snapshot = Snapshot::new(7, &plan, writer, &blobs, meta);
            assert!(snapshot.check(&plan).is_err(), "it would be alone");
            snapshot.party =
                Some(JointSaveInfo { token: "a".to_owned(), deadline: Duration::from_secs(9) });
            let mut arena = vec![0xee; snapshot.arena_bytes as usize + 10];
            snapshot.fill(&mut arena, &plan, &pieces, &blobs, 3).unwrap();

            let orders = snapshot.orders(&plan);
            let (inputs, there) = Snapshot::of_orders(&orders).unwrap();
            assert_eq!(there, snapshot);
            assert!(Snapshot::of_orders(&orders[..orders.len() - 1]).is_err());
            let again = crate::plan::PlanCache::default().plan_of(&inputs).unwrap();
            assert_eq!(again.fingerprint(), plan.fingerprint());
            there.check(&again).unwrap();
            assert!(there.pieces(&again, &arena).unwrap() == pieces);
            assert_eq!(there.blobs(&arena).unwrap()[0].bytes, b"state");
            assert!(arena[snapshot.arena_bytes as usize..].iter().all(|&byte| byte == 0xee));
            // A list from elsewhere may say anything.
            assert!(there.pieces(&again, &arena[..1000]).is_err());
            assert!(Snapshot { writer: 2, ..there }.check(&again).is_err());
            copied += snapshot.bytes - 5;
        }
        assert_eq!(copied, 100_193, "what both have is copied by one of them");
        let far = ArenaRange { offset: u64::MAX, bytes: 2 };
        assert!(far.of(&[0; 9]).is_err());
    }
}
