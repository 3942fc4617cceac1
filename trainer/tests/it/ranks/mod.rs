//! Ranks as threads, and the global tensors of their parts.

pub mod runs;

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use bridge::dist::{GroupOptions, Store};
use ckpt::Region;
use tch::{Device, Kind, Tensor};
use trainer::Trainer;
use trainer::launch::comm::Comm;
use trainer::mesh::DeviceMesh;

const PATIENCE: Duration = Duration::from_secs(60);

/// How a run divides.
#[derive(Clone, Copy, Debug)]
pub struct Layout {
    pub dp: usize,
    pub tp: usize,
    pub pp: usize,
    pub virtual_stages: u64,
    pub schedule: &'static str,
    pub zero: u64,
    pub reduce: &'static str,
    pub bucket_mib: u64,
    pub recompute: bool,
    /// Whether inputs of layers are spilled to files.
    pub spills: bool,
    pub sequence: bool,
    pub stages: &'static [u64],
}

impl Layout {
    pub const ALONE: Layout = Layout {
        dp: 1,
        tp: 1,
        pp: 1,
        virtual_stages: 1,
        schedule: "1f1b",
        zero: 0,
        reduce: "tree",
        bucket_mib: 25,
        recompute: false,
        spills: false,
        sequence: false,
        stages: &[],
    };

    pub fn mesh(&self) -> DeviceMesh {
        let virtual_stages = self.virtual_stages as usize;
        DeviceMesh { tp: self.tp, pp: self.pp, dp: self.dp, virtual_stages }
    }

    /// As keys of `[parallel]`.
    pub fn toml(&self) -> String {
        let Layout { tp, pp, virtual_stages, schedule, zero, reduce, bucket_mib, .. } = self;
        let mode = if self.recompute { "full" } else { "none" };
        let disk = concat!("nvme:", env!("CARGO_TARGET_TMPDIR"));
        let place = if self.spills { disk } else { "none" };
        format!(
            "tp = {tp}\npp = {pp}\nvirtual_stages = {virtual_stages}\nschedule = '{schedule}'\n\
             zero = {zero}\nreduce = '{reduce}'\nbucket_mib = {bucket_mib}\n\
             recompute.mode = '{mode}'\nactivation_offload = '{place}'\n\
             layers_per_stage = {:?}\nsequence_parallel = {}\n",
            self.stages, self.sequence
        )
    }
}

/// Held while there are ranks: those of all tests at once would time out on a small machine.
static ONE_MESH: Mutex<()> = Mutex::new(());

/// Runs `body` on every rank of a mesh, a thread each, and returns the results.
pub fn on_ranks<T: Send>(mesh: DeviceMesh, body: impl Fn(Comm) -> T + Sync) -> Vec<T> {
    on_devices(|_| Device::Cpu, mesh, body)
}

/// The same where each rank has a device.
pub fn on_devices<T: Send>(
    device: impl Fn(usize) -> Device + Sync,
    mesh: DeviceMesh,
    body: impl Fn(Comm) -> T + Sync,
) -> Vec<T> {
    let device = |rank: usize| {
        let device = device(rank);
        if let Device::Cuda(index) = device {
            bridge::runtime::use_gpu(index).expect("there is one");
        }
        device
    };
    if mesh.ranks() == 1 {
        return vec![body(Comm::alone(device(0)))];
    }
    let _alone = ONE_MESH.lock().unwrap_or_else(PoisonError::into_inner);
    let server = Store::serve("127.0.0.1", 0, PATIENCE).expect("a free port");
    let port = server.port();
    std::thread::scope(|scope| {
        let start = |rank: usize| {
            let (body, device) = (&body, &device);
            scope.spawn(move || {
                tch::set_num_threads(1);
                let store = Store::connect("127.0.0.1", port, PATIENCE).expect("it is there");
                let options = GroupOptions::local(PATIENCE);
                let device = device(rank);
                body(Comm::connect(&store, mesh, rank, device, &options).expect("all come"))
            })
        };
        let ranks: Vec<_> = (0..mesh.ranks()).map(start).collect();
        ranks.into_iter().map(|rank| rank.join().expect("no rank panics")).collect()
    })
}

pub fn bits(tensor: &Tensor) -> Vec<u32> {
    let flat = tensor.to_kind(Kind::Float).reshape([-1]);
    Vec::<f32>::try_from(flat).expect("f32 on the CPU").into_iter().map(f32::to_bits).collect()
}

/// Parts of global tensors: which tensor, the places of the elements, their bits.
pub type Pieces = Vec<(usize, Vec<usize>, Vec<u32>)>;

/// What one rank holds.
pub fn pieces(trainer: &Trainer) -> Pieces {
    let specs = trainer.layout().specs();
    let mut pieces = Pieces::new();
    for held in trainer.parts() {
        let values = bits(held.tensor);
        for part in held.parts {
            let places = places(&part.region, &specs[part.tensor].shape);
            let at = part.offset as usize;
            let values = values[at..at + places.len()].to_vec();
            pieces.push((part.tensor, places, values));
        }
    }
    pieces
}

/// The elements of a region, row-major, as places in a tensor of that shape.
fn places(region: &Region, shape: &[u64]) -> Vec<usize> {
    let mut places = vec![0];
    for (span, len) in region.spans.iter().zip(shape) {
        let along = |place: usize| {
            (span.start..span.start + span.len).map(move |at| place * *len as usize + at as usize)
        };
        places = places.into_iter().flat_map(along).collect();
    }
    match &region.flat {
        Some(flat) => places[flat.start as usize..flat.end as usize].to_vec(),
        None => places,
    }
}

/// Puts a rank's pieces into the global tensors of these sizes; copies of several ranks must be
/// equal.
pub fn assemble(
    sizes: &[u64],
    pieces: &Pieces,
    into: &mut BTreeMap<usize, Vec<Option<u32>>>,
    what: &str,
) {
    for (tensor, places, values) in pieces {
        let whole = into.entry(*tensor).or_insert_with(|| vec![None; sizes[*tensor] as usize]);
        for (place, value) in places.iter().zip(values) {
            let there = whole[*place].replace(*value);
            assert!(there.is_none_or(|there| there == *value), "{what}: copies of {tensor} differ");
        }
    }
}
