//! The layout of a rank's state: its arrays, their places in files, and the tiles that are read,
//! updated and written at once.

use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::sync::Arc;

use super::parts::{cut, parts};
use crate::format::safetensors::ALIGN_BYTES;
use crate::layout::Layout;
use crate::plan::{PlanLimits, SavePlan, spread};
use crate::{Dtype, Error, Group, HeldRegion, Region, Result, TensorSpec};

/// Weights, running means, running means of squares.
pub(super) const ROLES: usize = 3;

/// Bytes of an f32.
pub(super) const ITEM_BYTES: usize = 4;

/// Prefix of files of arrays that another rank saves: a tied weight of a later stage, or all of the
/// state of a replica. They have no header, since they never become part of a checkpoint.
const KEPT: &str = "kept-";

/// A rank's part of a parameter, or one piece of that: an array of weights, and two of moments with
/// the same layout.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StateParam {
    /// The parameter's name.
    pub name: String,
    /// Index of its weights in [`SavePlan::specs`].
    pub tensor: usize,
    /// Which part of it.
    pub region: Region,
    /// The number of its elements.
    pub elements: usize,
}

/// Where an array begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ArrayStart {
    pub(super) file: usize,
    pub(super) offset: u64,
}

/// One file of the state.
#[derive(Debug)]
pub(super) struct FileForm {
    pub(super) name: String,
    /// Index of its folder.
    pub(super) disk: usize,
    pub(super) header: Vec<u8>,
    pub(super) bytes: u64,
    /// Parameter and role of each array, in the order of their bytes.
    pub(super) arrays: Vec<(usize, usize)>,
    /// Whether it is a file of the plan.
    pub(super) is_saved: bool,
}

/// The layout of a rank's state, without its values.
#[derive(Debug)]
pub(super) struct StateLayout {
    pub(super) plan: Arc<SavePlan>,
    pub(super) rank: usize,
    /// Parameters as the layout has them.
    pub(super) whole: Vec<StateParam>,
    /// The range of `params` that each of these is split into; one for most.
    pub(super) parts: Vec<Range<usize>>,
    /// The parts of all parameters; elsewhere in this module, a parameter is one of these.
    pub(super) params: Vec<StateParam>,
    /// The tensors of each parameter, of the plan's specs.
    pub(super) tensors: Vec<[usize; ROLES]>,
    pub(super) places: Vec<[ArrayStart; ROLES]>,
    pub(super) files: Vec<FileForm>,
    /// The arrays that the plan assigns to this rank, as (parameter, role).
    pub(super) saved: Vec<(usize, usize)>,
}

/// Plans the save of an offloaded state: every part once, by the first rank that has it, in one
/// piece that begins at a page of its file. So a rank's files of the state can become files of a
/// checkpoint.
///
/// # Errors
/// [`Error::BadLayout`] unless every parameter has weights and two moments in f32;
/// [`Error::BadInput`] for more parts than a manifest may have.
pub fn plan(layout: &Layout) -> Result<Arc<SavePlan>> {
    plan_over(layout, 1)
}

/// The same for ranks with their state on several disks each: every parameter is on one of them, or
/// split where a disk has reached its share, so that all have about as many bytes.
///
/// # Errors
/// As [`plan`].
pub fn plan_over(layout: &Layout, disks: usize) -> Result<Arc<SavePlan>> {
    check_groups(layout.specs())?;
    let bad = |_| Error::BadInput {
        object: "an optimizer state on several disks".to_owned(),
        reason: format!("expected at most {} disks, found {disks}", u32::MAX),
    };
    let limits = PlanLimits {
        shard_bytes_max: u64::MAX,
        align_all: true,
        folders: disks.try_into().map_err(bad)?,
        ..PlanLimits::default()
    };
    let specs = layout.specs();
    let held: Vec<Vec<HeldRegion>> =
        held_once(layout).iter().map(|held| cut(specs, held, disks)).collect();
    Ok(Arc::new(SavePlan::new(specs, &held, limits)?))
}

/// The regions of each rank that no earlier rank has.
fn held_once(layout: &Layout) -> Vec<Vec<HeldRegion>> {
    let mut seen = HashSet::new();
    let mut held = layout.held();
    held.iter_mut().for_each(|held| held.retain(|holding| seen.insert(holding.clone())));
    held
}

fn role(group: Group) -> Option<usize> {
    match group {
        Group::Model | Group::Master => Some(0),
        Group::ExpAvg => Some(1),
        Group::ExpAvgSq => Some(2),
        Group::Other => None,
    }
}

fn check_groups(specs: &[TensorSpec]) -> Result<()> {
    let bad =
        |reason: String| Err(Error::BadLayout { object: "the optimizer state".to_owned(), reason });
    if let Some(spec) = specs.iter().find(|spec| spec.dtype != Dtype::F32) {
        return bad(format!("{}: expected {}, found {}", spec.label(), Dtype::F32, spec.dtype));
    }
    let groups: HashSet<Group> = specs.iter().map(|spec| spec.group).collect();
    let mut roles: Vec<_> = groups.iter().filter_map(|group| role(*group)).collect();
    roles.sort_unstable();
    if roles != [0, 1, 2] && !specs.is_empty() {
        let expected = "one group of weights and both moments";
        return bad(format!("expected {expected}, found {groups:?}"));
    }
    Ok(())
}

impl StateLayout {
    /// The layout of one rank.
    pub(super) fn new(plan: Arc<SavePlan>, layout: &Layout, rank: u64) -> Result<Self> {
        check_groups(plan.specs())?;
        let bad = |reason: &str| {
            let object = format!("the state of rank {rank}");
            Err(Error::BadLayout { object, reason: reason.to_owned() })
        };
        if plan.specs() != layout.specs() || plan.writers() as u64 != layout.mesh().ranks() {
            return bad("the plan is for another layout");
        }
        let disks = plan.folders();
        let (whole, tensors) = params(&plan, layout, rank)?;
        let rank = rank as usize; // fits: one of the plan's writers
        let held = held_once(layout).swap_remove(rank);
        let (params, parts) = parts(&whole, &held, disks);
        let of_parts =
            parts.iter().zip(tensors).flat_map(|(parts, tensors)| vec![tensors; parts.len()]);
        let tensors: Vec<_> = of_parts.collect();
        let arrays: HashMap<(usize, Region), (usize, usize)> = tensors
            .iter()
            .enumerate()
            .flat_map(|(param, tensors)| {
                let region = params[param].region.normal();
                let key = move |role: usize| ((tensors[role], region.clone()), (param, role));
                (0..ROLES).map(key)
            })
            .collect();
        let mut places = vec![[None; ROLES]; params.len()];
        let mut files = Vec::new();
        for shard in plan.shards(rank) {
            let mut own = Vec::new();
            for piece in &shard.pieces {
                let key = (piece.tensor, piece.region.clone());
                let Some(&(param, role)) = arrays.get(&key) else {
                    return bad("the plan splits its arrays (hint: use offload::plan)");
                };
                let offset = piece.offset;
                if !offset.is_multiple_of(ALIGN_BYTES) && params[param].elements > 0 {
                    return bad("the plan does not align its arrays (hint: use offload::plan)");
                }
                places[param][role] = Some(ArrayStart { file: files.len(), offset });
                own.push((param, role));
            }
            files.push(FileForm {
                name: shard.file.clone(),
                disk: shard.folder,
                header: shard.header.clone(),
                bytes: shard.bytes(),
                arrays: own,
                is_saved: true,
            });
        }
        files.extend(kept(&params, &mut places, files.len(), disks));
        let place = |place: Option<ArrayStart>| {
            place.expect("arrays that are not in the plan are in the kept files")
        };
        let places = places.into_iter().map(|places| places.map(place)).collect();
        let held = cut(plan.specs(), &held, disks);
        let saved = held.iter().map(|it| arrays[&(it.tensor, it.region.normal())]).collect();
        Ok(StateLayout { plan, rank, whole, parts, params, tensors, places, files, saved })
    }

    /// Bytes of all arrays.
    pub(super) fn state_bytes(&self) -> u64 {
        let elements: usize = self.params.iter().map(|param| param.elements).sum();
        (elements * ITEM_BYTES * ROLES) as u64
    }

    /// The group of a role's tensors.
    pub(super) fn group(&self, param: usize, role: usize) -> Group {
        self.plan.specs()[self.tensors[param][role]].group
    }

    /// Splits some parameters into tiles: a block of one of them, or several that are adjacent in
    /// all files. Disks alternate, so that all of them have work from the first tile to the last.
    pub(super) fn tiles(&self, params: Range<usize>, block_bytes: usize) -> Vec<Tile> {
        let tile_bytes_max = tile_bytes_max(block_bytes);
        let mut disks: Vec<Vec<Tile>> = (0..self.plan.folders()).map(|_| Vec::new()).collect();
        for param in params {
            let tiles = &mut disks[self.files[self.places[param][0].file].disk];
            let bytes = self.params[param].elements * ITEM_BYTES;
            for (block, start) in (0..bytes).step_by(block_bytes).enumerate() {
                let len = block_bytes.min(bytes - start);
                let places = self.places[param].map(|ArrayStart { file, offset }| ArrayStart {
                    file,
                    offset: offset + start as u64,
                });
                let segment = Segment { param, block, start, len, tile_offset: 0 };
                if let Some(tile) = tiles.last_mut()
                    && let Some(at) = tile.room_for(&places, len, tile_bytes_max)
                {
                    tile.segments.push(Segment { tile_offset: at, ..segment });
                    tile.bytes = at + len;
                    continue;
                }
                tiles.push(Tile { segments: vec![segment], bytes: len, places });
            }
        }
        interleave(disks)
    }
}

/// Interleaves the tiles of several disks, so that all disks finish at the same time.
fn interleave(mut disks: Vec<Vec<Tile>>) -> Vec<Tile> {
    if disks.len() == 1 {
        return disks.swap_remove(0);
    }
    let mut all = Vec::new();
    for tiles in disks {
        let total: usize = tiles.iter().map(|tile| tile.bytes).sum();
        let mut done = 0;
        all.extend(tiles.into_iter().map(|tile| {
            done += tile.bytes;
            (done as f64 / total as f64, tile)
        }));
    }
    all.sort_by(|(a, _), (b, _)| a.total_cmp(b));
    all.into_iter().map(|(_, tile)| tile).collect()
}

/// Bytes of one array that are transferred at once: enough for the full rate of any device.
pub(super) const TILE_BYTES: usize = 4 << 20;

/// The most that a tile has of each of its three arrays.
pub(super) fn tile_bytes_max(block_bytes: usize) -> usize {
    block_bytes.max(TILE_BYTES)
}

/// Part of one parameter: a block of its checksums.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Segment {
    pub(super) param: usize,
    pub(super) block: usize,
    /// Its first byte in the array, and its length.
    pub(super) start: usize,
    pub(super) len: usize,
    /// Its offset in the tile, the same in all roles.
    pub(super) tile_offset: usize,
}

/// The unit that is read, updated and written at once.
#[derive(Debug)]
pub(super) struct Tile {
    pub(super) segments: Vec<Segment>,
    /// From its start to the end of its last segment.
    pub(super) bytes: usize,
    pub(super) places: [ArrayStart; ROLES],
}

impl Tile {
    /// The tile offset for a segment at these places, if it is adjacent in all files and fits.
    fn room_for(
        &self,
        places: &[ArrayStart; ROLES],
        len: usize,
        bytes_max: usize,
    ) -> Option<usize> {
        let next = self.bytes.next_multiple_of(ALIGN_BYTES as usize);
        let follows = |(own, other): (&ArrayStart, &ArrayStart)| {
            own.file == other.file && own.offset + next as u64 == other.offset
        };
        let fits = next + len <= bytes_max && self.places.iter().zip(places).all(follows);
        fits.then_some(next)
    }
}

type Params = (Vec<StateParam>, Vec<[usize; ROLES]>);

/// The parameters that a rank has, and their tensors.
fn params(plan: &SavePlan, layout: &Layout, rank: u64) -> Result<Params> {
    let mut params = Vec::new();
    let mut tensors: Vec<[Option<usize>; ROLES]> = Vec::new();
    let mut known = HashMap::new();
    let mut moments = Vec::new();
    for HeldRegion { tensor, region } in layout.holdings(rank) {
        let TensorSpec { name, group, .. } = &plan.specs()[tensor];
        match role(*group) {
            Some(0) => {
                // fits: the array is in memory, or in files of this machine.
                let elements = region.count() as usize;
                known.insert((name.clone(), region.normal()), params.len());
                params.push(StateParam { name: name.clone(), tensor, region, elements });
                tensors.push([Some(tensor), None, None]);
            }
            Some(role) => moments.push((name.clone(), region.normal(), role, tensor)),
            None => {}
        }
    }
    let other = |name: &str| Error::BadLayout {
        object: format!("'{name}' of rank {rank}"),
        reason: "expected the same parts of weights and moments".to_owned(),
    };
    for (name, region, role, tensor) in moments {
        let key = (name, region);
        let param = known.get(&key).ok_or_else(|| other(&key.0))?;
        tensors[*param][role] = Some(tensor);
    }
    let all = |(param, tensors): (&StateParam, [Option<usize>; ROLES])| match tensors {
        [Some(weights), Some(exp_avg), Some(exp_avg_sq)] => Ok([weights, exp_avg, exp_avg_sq]),
        _ => Err(other(&param.name)),
    };
    let tensors = params.iter().zip(tensors).map(all).collect::<Result<_>>()?;
    Ok((params, tensors))
}

/// The files of all arrays that have no place yet: role after role, so that the parameters of a
/// role are adjacent.
fn kept(
    params: &[StateParam],
    places: &mut [[Option<ArrayStart>; ROLES]],
    first: usize,
    disks: usize,
) -> Vec<FileForm> {
    let mut files: Vec<FileForm> = Vec::new();
    for role in std::array::from_fn::<usize, ROLES, _>(|role| role) {
        let rest: Vec<usize> =
            (0..params.len()).filter(|param| places[*param][role].is_none()).collect();
        let bytes: Vec<usize> =
            rest.iter().map(|param| params[*param].elements * ITEM_BYTES).collect();
        for ((param, disk), bytes) in rest.into_iter().zip(spread(&bytes, disks)).zip(&bytes) {
            let of_disk = files.iter().position(|file| file.disk == disk);
            let at = of_disk.unwrap_or(files.len());
            if at == files.len() {
                let name = format!("{KEPT}{disk}.bin");
                let (header, arrays) = (Vec::new(), Vec::new());
                files.push(FileForm { name, disk, header, bytes: 0, arrays, is_saved: false });
            }
            let file = &mut files[at];
            let offset = file.bytes.next_multiple_of(ALIGN_BYTES);
            places[param][role] = Some(ArrayStart { file: first + at, offset });
            file.bytes = offset + *bytes as u64;
            file.arrays.push((param, role));
        }
    }
    // Some file systems do not store empty files.
    files.iter_mut().for_each(|file| file.bytes = file.bytes.max(ALIGN_BYTES));
    files
}
