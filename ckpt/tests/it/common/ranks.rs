//! A state distributed over the processes of a run.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use ckpt::{
    AsyncSaver, Blob, Checkpoints, HeldRegion, JointSaveOptions, LivenessTimeouts, PlanLimits,
    Region, Result, SavePlan, SaveReport, SaveStart, Span, TensorSpec,
};
use storage::testing::fault_store::FaultStore;
use storage::{Key, Storage};

use super::{SERIAL, State, Tensor};

/// Limits that give several files per writer, and tensors that are cut.
pub const LIMITS: PlanLimits = PlanLimits {
    shard_bytes_max: 3000,
    cut_bytes_min: 500,
    header_bytes_max: 1 << 20,
    align_all: false,
    folders: 1,
};

/// Frequent heartbeats, and a timeout that only expires if a test provokes it.
pub const PATIENCE: LivenessTimeouts =
    LivenessTimeouts { beat: Duration::from_millis(20), silence_max: Duration::from_secs(20) };

/// The checkpoints as one of several writers opens them.
pub fn steps_on(store: Arc<dyn Storage>) -> Checkpoints {
    let steps = Checkpoints::open(store, Key::new("run").unwrap());
    steps.with_options(SERIAL).with_patience(PATIENCE)
}

/// One store for all writers.
pub fn same(store: &FaultStore, writers: usize) -> Vec<Arc<dyn Storage>> {
    (0..writers).map(|_| Arc::new(store.clone()) as Arc<dyn Storage>).collect()
}

/// Checks every image that a power cut may leave, at every operation from `first` on: the newest of
/// steps 1 and 2 is complete, and after the last operation it is step 2.
pub fn check_images(store: &FaultStore, from: usize, images: u64, (old, new): (&State, &State)) {
    let to = store.op_count();
    assert!(to > from + 60, "a save of few operations");
    for (ops, seed) in (from..=to).flat_map(|ops| (0..images).map(move |seed| (ops, seed))) {
        let steps = steps_on(Arc::new(store.crash_at(ops, seed)));
        let newest = steps.newest().unwrap().unwrap();
        let state = [old, new][newest.step() as usize - 1];
        assert_eq!(state.differs_from(&newest).unwrap(), None, "after {ops}, image {seed}");
        assert!(ops < to || newest.step() == 2, "image {seed}: step 2 was durable");
    }
}

/// The regions of each of several writers: some rows of long tensors, all of short ones.
pub struct Ranks {
    pub plan: Arc<SavePlan>,
    /// The bytes of each region of each writer.
    bytes: Vec<Vec<Vec<u8>>>,
    state: State,
}

impl Ranks {
    pub fn new(state: &State, writers: usize, limits: PlanLimits) -> Self {
        let mut held: Vec<Vec<HeldRegion>> = vec![Vec::new(); writers];
        let mut bytes: Vec<Vec<Vec<u8>>> = vec![Vec::new(); writers];
        for (place, tensor) in state.tensors.iter().enumerate() {
            for writer in 0..writers {
                let (region, range) = part(tensor, writer, writers);
                held[writer].push(HeldRegion { tensor: place, region });
                bytes[writer].push(tensor.bytes[range].to_vec());
            }
        }
        let spec = |tensor: &Tensor| {
            let Tensor { name, group, dtype, shape, .. } = tensor.clone();
            TensorSpec { name, group, dtype, shape }
        };
        let specs: Vec<TensorSpec> = state.tensors.iter().map(spec).collect();
        let plan = Arc::new(SavePlan::new(&specs, &held, limits).unwrap());
        Ranks { plan, bytes, state: state.clone() }
    }

    /// The save of one writer. The blobs are distributed over the writers.
    pub fn save(
        &self,
        steps: &Checkpoints,
        step: u64,
        together: &JointSaveOptions<'_>,
    ) -> Result<SaveReport> {
        let (held, blobs, meta) = self.of(together.writer);
        steps.save_together(step, &self.plan, &held, &blobs, meta, together)
    }

    /// The same as an async save.
    pub fn begin(
        &self,
        background: &AsyncSaver,
        step: u64,
        together: &JointSaveOptions<'_>,
    ) -> Result<SaveStart> {
        let (held, blobs, meta) = self.of(together.writer);
        background.save_part(step, &self.plan, &held, &blobs, meta, together)
    }

    fn of(&self, writer: usize) -> (Vec<&[u8]>, Vec<Blob<'_>>, serde_json::Value) {
        let held = self.bytes.get(writer).into_iter().flatten().map(Vec::as_slice).collect();
        let blobs = self.state.blobs.iter().skip(writer).step_by(self.plan.writers());
        let blobs = blobs.map(|(name, bytes)| Blob { name, bytes }).collect();
        (
            held,
            blobs,
            if writer == 0 { self.state.meta.clone() } else { serde_json::json!("unused") },
        )
    }

    /// Overwrites everything, as the next step of a run does.
    pub fn overwrite(&mut self) {
        self.bytes.iter_mut().flatten().for_each(|bytes| bytes.fill(0xdd));
        self.state.blobs.iter_mut().for_each(|(_, bytes)| bytes.fill(0xdd));
    }
}

fn part(tensor: &Tensor, writer: usize, writers: usize) -> (Region, Range<usize>) {
    let rows = tensor.shape.first().copied().unwrap_or(1) as usize;
    if rows < writers {
        return (Region::whole(&tensor.shape), 0..tensor.bytes.len());
    }
    let row_bytes = tensor.bytes.len() / rows;
    let (start, end) = (rows * writer / writers, rows * (writer + 1) / writers);
    let mut region = Region::whole(&tensor.shape);
    region.spans[0] = Span { start: start as u64, len: (end - start) as u64 };
    (region, start * row_bytes..end * row_bytes)
}
