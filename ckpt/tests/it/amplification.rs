//! Read amplification: bytes read per requested byte, counted in the store.

use std::sync::Arc;

use crate::common::Folder;
use ckpt::layout::{DeviceMesh, Layout, Param, Slices, TensorSplit, Zero};
use ckpt::{CheckpointOptions, Checkpoints, Dtype, Group, RegionRequest, SavePlan};
use storage::Key;
use storage::testing::fault_store::{ReadFaultLayer, ReadFaults};

/// Two layers of a model whose matrices are some dozens of blocks each, all cut along an axis.
fn layout(mesh: DeviceMesh, axis: usize) -> Layout {
    let mut params = Vec::new();
    let mut push = |name: String, shape: &[u64], split| {
        params.push(Param { name, shape: shape.to_vec(), split, stages: vec![0] });
    };
    for layer in 0..2 {
        push(format!("{layer}.norm"), &[512], TensorSplit::Replicate);
        push(format!("{layer}.up"), &[2048, 512], TensorSplit::Axis(axis));
        push(format!("{layer}.down"), &[512, 2048], TensorSplit::Axis(axis));
    }
    Layout::new(mesh, params, &[(Group::Model, Dtype::BF16), (Group::ExpAvg, Dtype::F32)]).unwrap()
}

/// Bytes read per requested byte, when nodes of `node_ranks` ranks read what one layout wrote.
fn amplification(from: &Layout, to: &Layout, node_ranks: u64, groups: &[Group]) -> f64 {
    let folder = Folder::in_memory();
    let options = CheckpointOptions { block_bytes: 32 << 10, ..CheckpointOptions::default() };
    let plan = SavePlan::new(from.specs(), &from.held(), Default::default()).unwrap();
    let item = |tensor: usize| from.specs()[tensor].dtype.item_bytes();
    let held: Vec<Vec<Vec<u8>>> = (0..from.mesh().ranks())
        .map(|rank| {
            let bytes = |part: ckpt::layout::LocalRegion| {
                vec![0; (part.region.elements().unwrap() * item(part.tensor)) as usize]
            };
            from.parts(rank).into_iter().map(bytes).collect()
        })
        .collect();
    let held: Vec<Vec<&[u8]>> =
        held.iter().map(|held| held.iter().map(Vec::as_slice).collect()).collect();
    folder.steps(options).save_plan(1, &plan, &held, &[], serde_json::Value::Null).unwrap();

    let store = ReadFaultLayer::new(folder.store(), 1, ReadFaults::default());
    let steps = Checkpoints::open(Arc::new(store.clone()), Key::new("run").unwrap());
    let checkpoint = steps.newest().unwrap().unwrap();
    let before = store.read_bytes();
    let mut wanted_bytes = 0;
    for first in (0..to.mesh().ranks()).step_by(node_ranks as usize) {
        let mut parts: Vec<_> = (first..first + node_ranks).flat_map(|r| to.parts(r)).collect();
        parts.retain(|part| groups.contains(&to.specs()[part.tensor].group));
        let mut buffers: Vec<Vec<u8>> = parts
            .iter()
            .map(|part| vec![0; (part.region.elements().unwrap() * item(part.tensor)) as usize])
            .collect();
        let mut seen = std::collections::HashSet::new();
        let mut wants = Vec::new();
        for (part, into) in parts.iter().zip(&mut buffers) {
            let spec = &to.specs()[part.tensor];
            // Data that several ranks of a node hold is counted once.
            if seen.insert((part.tensor, part.region.clone())) {
                wanted_bytes += into.len() as u64;
            }
            let region = part.region.clone();
            wants.push(RegionRequest { name: &spec.name, group: spec.group, region, into });
        }
        checkpoint.read(wants).unwrap();
    }
    (store.read_bytes() - before) as f64 / wanted_bytes as f64
}

fn check(from: &Layout, to: &Layout, node_ranks: u64, groups: &[Group], most: f64) {
    let found = amplification(from, to, node_ranks, groups);
    assert!((1.0..=most).contains(&found), "{:?} to {:?}: {found}", from.mesh(), to.mesh());
}

#[test]
fn read_amplification_is_bounded() {
    let both = [Group::Model, Group::ExpAvg];
    let buffer = Slices::Buffer { align: 1 };
    for axis in [0, 1] {
        let most = [1.02, 1.3][axis];
        let zero =
            DeviceMesh { tp: 4, dp: 2, zero: Zero::One, slices: buffer, ..DeviceMesh::default() };
        let plain = DeviceMesh { tp: 2, dp: 2, ..DeviceMesh::default() };
        let three = DeviceMesh { tp: 8, dp: 3, zero: Zero::Three, ..DeviceMesh::default() };
        let one = DeviceMesh::default();
        for from in [zero, plain, three] {
            for to in [zero, one] {
                // All tensor parallel ranks on one node, as is usual.
                let (from, to) = (layout(from, axis), layout(to, axis));
                check(&from, &to, to.mesh().tp, &both[..1], most);
                check(&from, &to, to.mesh().ranks(), &both, most);
            }
        }
        // Rows of some ranks only: the blocks at both ends are shared with others.
        if axis == 0 {
            let to = DeviceMesh { tp: 8, ..DeviceMesh::default() };
            check(&layout(one, 0), &layout(to, 0), 2, &both, most);
        }
    }
}
