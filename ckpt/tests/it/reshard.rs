//! Saved by all ranks of one layout, read by those of another, bit for bit.

use crate::common::{Folder, Random, SMALL};
use crate::model::{Memory, Sizes, contents, elements, memories, random_groups, random_mesh};
use ckpt::layout::{Layout, LocalRegion, Param};
use ckpt::{Checkpoint, CheckpointOptions, Group, PlanLimits, RegionRequest, SavePlan};
use serde_json::json;

const ROUNDS: u64 = 40;

/// A model on a mesh.
struct Run {
    layout: Layout,
    params: Vec<Param>,
    groups: Vec<Group>,
}

impl Run {
    fn random(sizes: &Sizes, groups: &[(Group, ckpt::Dtype)], random: &mut Random) -> Run {
        let mesh = random_mesh(random);
        let params = sizes.params(&mesh, random.below(2) == 0);
        let layout = Layout::new(mesh, params.clone(), groups).unwrap();
        Run { layout, params, groups: groups.iter().map(|(group, _)| *group).collect() }
    }

    fn memories(&self, rank: u64) -> Vec<(Vec<usize>, Memory)> {
        memories(&self.layout, &self.params, &self.groups, rank)
    }

    fn item_bytes(&self, tensor: usize) -> usize {
        self.layout.specs()[tensor].dtype.item_bytes() as usize
    }

    /// Bytes of a rank's memory, with the given tensors' contents. Padding is 0xaa.
    fn bytes(&self, memory: &Memory, tensor: usize, contents: &[Vec<u8>]) -> Vec<u8> {
        let item = self.item_bytes(tensor);
        let value = |place: &Option<(usize, u64)>| match place {
            None => vec![0xaa; item],
            Some((tensor, id)) => contents[*tensor][*id as usize * item..][..item].to_vec(),
        };
        memory.iter().flat_map(value).collect()
    }

    /// The parts of every rank equal those of the reference implementation, and are complete.
    fn check_parts(&self, seed: u64) {
        for rank in 0..self.layout.mesh().ranks() {
            let mut memories = self.memories(rank);
            for LocalRegion { tensor, region, offset: at } in self.layout.parts(rank) {
                let shape = &self.layout.specs()[tensor].shape;
                let (_, memory) = memories.iter_mut().find(|(of, _)| of.contains(&tensor)).unwrap();
                for (place, id) in elements(&region, shape).into_iter().enumerate() {
                    let there = memory[at as usize + place].take();
                    assert_eq!(there, Some((tensor, id)), "seed {seed}, rank {rank}, {region:?}");
                }
            }
            let left = memories.iter().flat_map(|(_, memory)| memory).flatten().count();
            assert_eq!(left, 0, "seed {seed}, rank {rank} of {:?}", self.layout.mesh());
        }
    }

    /// Saves from the memories of all ranks.
    fn save(
        &self,
        folder: &Folder,
        options: CheckpointOptions,
        cut_bytes_min: u64,
        contents: &[Vec<u8>],
    ) -> Checkpoint {
        let steps = folder.steps(options);
        let limits = PlanLimits { cut_bytes_min, ..steps.plan_limits() };
        let plan = SavePlan::new(self.layout.specs(), &self.layout.held(), limits).unwrap();
        let ranks = 0..self.layout.mesh().ranks();
        let bytes: Vec<Vec<Vec<u8>>> = ranks
            .map(|rank| {
                let memories = self.memories(rank);
                let part = |LocalRegion { tensor, region, offset: at }: LocalRegion| {
                    let (_, memory) = memories.iter().find(|(of, _)| of.contains(&tensor)).unwrap();
                    let count = region.elements().unwrap() as usize;
                    let memory = memory[at as usize..][..count].to_vec();
                    self.bytes(&memory, tensor, contents)
                };
                self.layout.parts(rank).into_iter().map(part).collect()
            })
            .collect();
        let held: Vec<Vec<&[u8]>> =
            bytes.iter().map(|held| held.iter().map(Vec::as_slice).collect()).collect();
        steps.save_plan(7, &plan, &held, &[], json!(null)).unwrap();
        steps.open_step(7).unwrap()
    }

    /// Reads into the memories of ranks, in one call, and compares them.
    fn check_read(
        &self,
        checkpoint: &Checkpoint,
        ranks: std::ops::Range<u64>,
        contents: &[Vec<u8>],
        seed: u64,
    ) {
        let mut all: Vec<(Vec<LocalRegion>, Vec<Vec<u8>>)> = ranks
            .clone()
            .map(|rank| {
                let parts = self.layout.parts(rank);
                let bytes = |part: &LocalRegion| {
                    vec![0; part.region.elements().unwrap() as usize * self.item_bytes(part.tensor)]
                };
                let buffers = parts.iter().map(bytes).collect();
                (parts, buffers)
            })
            .collect();
        let mut wants = Vec::new();
        for (parts, buffers) in &mut all {
            for (part, into) in parts.iter().zip(buffers) {
                let spec = &self.layout.specs()[part.tensor];
                let region = part.region.clone();
                wants.push(RegionRequest { name: &spec.name, group: spec.group, region, into });
            }
        }
        checkpoint.read(wants).unwrap();
        for (rank, (parts, buffers)) in ranks.zip(&all) {
            let memories = self.memories(rank);
            for (LocalRegion { tensor, region, offset: at }, buffer) in parts.iter().zip(buffers) {
                let (_, memory) = memories.iter().find(|(of, _)| of.contains(tensor)).unwrap();
                let count = region.elements().unwrap() as usize;
                let memory = memory[*at as usize..][..count].to_vec();
                let expected = self.bytes(&memory, *tensor, contents);
                assert!(
                    expected == *buffer,
                    "seed {seed}, rank {rank}: {:?} {region:?}",
                    self.layout.specs()[*tensor]
                );
            }
        }
    }
}

#[test]
fn parts_match_reference_model() {
    for seed in 0..ROUNDS {
        let mut random = Random(seed);
        let sizes = Sizes::random(&mut random);
        let groups = random_groups(&mut random);
        Run::random(&sizes, &groups, &mut random).check_parts(seed);
    }
}

#[test]
fn any_layout_loads_into_any_other() {
    for seed in 0..ROUNDS {
        let mut random = Random(1000 + seed);
        let sizes = Sizes::random(&mut random);
        let groups = random_groups(&mut random);
        let from = Run::random(&sizes, &groups, &mut random);
        let to = Run::random(&sizes, &groups, &mut random);
        let contents = contents(&from.layout, &mut random);
        let folder = Folder::in_memory();
        let options = CheckpointOptions { shard_bytes_max: 1000 + random.below(100_000), ..SMALL };
        let cut_bytes_min = [64, 1 << 20][random.below(2) as usize];
        let checkpoint = from.save(&folder, options, cut_bytes_min, &contents);
        checkpoint.check_against(to.layout.specs()).unwrap();
        checkpoint.verify().unwrap();
        // The nodes of the second run, one after the other.
        let (mut first, ranks) = (0, to.layout.mesh().ranks());
        while first < ranks {
            let next = (first + 1 + random.below(6)).min(ranks);
            to.check_read(&checkpoint, first..next, &contents, seed);
            first = next;
        }
        // Whole tensors, as read by a process without a mesh.
        for (spec, expected) in to.layout.specs().iter().zip(&contents) {
            let mut bytes = vec![0; expected.len()];
            checkpoint.read_tensor(&spec.name, spec.group, &mut bytes).unwrap();
            assert!(bytes == *expected, "seed {seed}: {spec:?}");
        }
    }
}
