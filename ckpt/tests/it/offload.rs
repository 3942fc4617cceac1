//! A state beside the device: the arithmetic is libtorch's, a disk is as memory, what was stopped
//! goes on, and its files are a checkpoint's that any layout reads.

use crate::common;
use std::path::Path;
use std::sync::Arc;

use crate::common::beside::{GROUPS, Rank, SMALL, contents, layout, meshes, plan_of};
use ckpt::layout::{DeviceMesh, Layout, Param, TensorSplit};
use ckpt::offload::{self, AdamW, Offload, OffloadOptions, PublishMethod, Update, WeightsOut};
use ckpt::{
    Blob, Checkpoints, Drain, DrainOptions, Dtype, Error, Group, JointSaveOptions,
    LivenessTimeouts, Result,
};
use safetensors::SafeTensors;
use serde_json::{Value, json};
use storage::{Key, Storage, Width};

/// A store in a folder of its own.
fn folder() -> (tempfile::TempDir, Arc<dyn Storage>) {
    let folder = tempfile::tempdir().unwrap();
    let store = storage::open_url(folder.path().to_str().unwrap()).unwrap();
    (folder, store)
}

fn steps(store: &Arc<dyn Storage>) -> Checkpoints {
    let options = ckpt::CheckpointOptions {
        block_bytes: SMALL.block_bytes,
        ..ckpt::CheckpointOptions::default()
    };
    Checkpoints::open(Arc::clone(store), Key::new("run").unwrap()).with_options(options)
}

/// One parameter on the only rank.
fn single(elements: u64) -> Layout {
    let (name, split) = ("weight".to_owned(), TensorSplit::Replicate);
    let param = Param { name, shape: vec![elements], split, stages: vec![0] };
    Layout::new(DeviceMesh::default(), vec![param], &GROUPS.map(|group| (group, Dtype::F32)))
        .unwrap()
}

/// The numbers of `reference/adamw.py`, with every width of vectors that is here.
#[test]
fn kernels_are_libtorchs() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/adamw.safetensors");
    let file = std::fs::read(path).unwrap();
    let (_, metadata) = SafeTensors::read_metadata(&file).unwrap();
    let tensors = SafeTensors::deserialize(&file).unwrap();
    let cases: Value =
        serde_json::from_str(&metadata.metadata().as_ref().unwrap()["cases"]).unwrap();
    let widths: Vec<Width> = Width::ALL.into_iter().filter(|width| width.is_here()).collect();
    for (number, case) in cases.as_array().unwrap().iter().enumerate() {
        let layout = single(case["elements"].as_u64().unwrap());
        let tensor = |name: &str| tensors.tensor(&format!("{number}/{name}")).unwrap().data();
        for &width in &widths {
            let plan = offload::plan(&layout).unwrap();
            let options = OffloadOptions { width, ..SMALL };
            let mut state = Offload::in_memory(plan, &layout, 0, options).unwrap();
            state.fill(&[tensor("weights")], 0, Value::Null).unwrap();
            for k in 0..case["updates"].as_u64().unwrap() {
                let number = |name: &str| case[name].as_f64().unwrap();
                let adamw = AdamW {
                    step: k + 1,
                    lr: number("lr"),
                    beta1: number("beta1"),
                    beta2: number("beta2"),
                    eps: number("eps"),
                    grad_divisor: number("divisor"),
                };
                let grad = tensor(&format!("grad.{k}"));
                let weights = WeightsOut { dtype: Dtype::F32, bytes: &mut [] };
                let weight_decay = number("weight_decay");
                let update = Update { grad, grad_dtype: Dtype::F32, weight_decay, weights };
                state.step(&adamw, vec![update], Value::Null).unwrap();
                let names = ["weights", "exp_avg", "exp_avg_sq"];
                for (name, got) in names.into_iter().zip(state.held().unwrap()) {
                    let due = tensor(&format!("{name}.{k}"));
                    let floats = |bytes: &[u8]| -> Vec<f32> {
                        let floats = bytes.as_chunks::<4>().0.iter();
                        floats.map(|bytes| f32::from_le_bytes(*bytes)).collect()
                    };
                    let (got, due) = (floats(got), floats(due));
                    for (at, (got, due)) in got.iter().zip(&due).enumerate() {
                        let same = got.to_bits() == due.to_bits();
                        assert!(same, "{case}, {width:?}: {name}.{k}[{at}] {got:e}, due {due:e}");
                    }
                }
            }
        }
    }
}

/// Arrays that lie alike in their pages may drive each other out of a cache at every element.
#[test]
fn arrays_of_a_parameter_lie_apart_in_their_pages() {
    for elements in [1 << 10, 1 << 20, 3 << 20] {
        let layout = single(elements);
        let plan = offload::plan(&layout).unwrap();
        let mut state = Offload::in_memory(plan, &layout, 0, SMALL).unwrap();
        state.fill(&[&vec![0; 4 * elements as usize]], 0, Value::Null).unwrap();
        let held = state.held().unwrap();
        assert_eq!(held.len(), 3, "{elements} elements");
        let mut places: Vec<usize> =
            held.iter().map(|array| array.as_ptr() as usize % 4096).collect();
        assert!(places.iter().all(|place| place.is_multiple_of(64)), "{places:?}");
        places.sort_unstable();
        let apart = places.windows(2).all(|pair| pair[1] - pair[0] >= 256);
        assert!(apart, "{elements} elements begin at {places:?} of their pages");
    }
}

/// Weights come back rounded to nearest even, whatever the vectors.
#[test]
fn weights_are_rounded() {
    // Every half, its neighbours in singles, the places halfway between two, and what is no number.
    let mut numbers: Vec<f32> = (0..=0xffff_u32).map(|half| f32::from_bits(half << 16)).collect();
    for exponent in 90..150_u32 {
        for mantissa in [0, 1, 0xfff, 0x1000, 0x1001, 0x2000, 0x3000, 0x8000, 0x7f_ffff] {
            numbers.push(f32::from_bits(exponent << 23 | mantissa));
            numbers.push(-f32::from_bits(exponent << 23 | mantissa));
        }
    }
    numbers.extend([65_519.996, 65_520.0, 5.960_464_5e-8, 2.980_232_2e-8, f32::INFINITY]);
    let bytes: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
    let layout = single(numbers.len() as u64);
    for dtype in [Dtype::F32, Dtype::BF16, Dtype::F16] {
        let mut due = Vec::new();
        ckpt::cast(&bytes, Dtype::F32, dtype, &mut due);
        for width in Width::ALL {
            let plan = offload::plan(&layout).unwrap();
            let options = OffloadOptions { width, ..SMALL };
            let mut state = Offload::in_memory(plan, &layout, 0, options).unwrap();
            state.fill(&[&bytes], 0, Value::Null).unwrap();
            let mut got = vec![0xaa; due.len()];
            state.weights(&mut [WeightsOut { dtype, bytes: &mut got }]).unwrap();
            let item = dtype.item_bytes() as usize;
            let pairs = got.chunks(item).zip(due.chunks(item)).zip(&numbers);
            for ((got, due), number) in pairs {
                assert!(got == due, "{number:e} as {dtype} with {width:?}: {got:?}, due {due:?}");
            }
        }
    }
}

/// Runs all ranks of a mesh, and gives what a checkpoint has of them.
fn run(
    mesh: DeviceMesh,
    make: impl Fn(u64) -> Rank,
    store: &Arc<dyn Storage>,
) -> Vec<(String, Vec<u8>)> {
    let mut ranks: Vec<Rank> = (0..mesh.ranks()).map(make).collect();
    for rank in &mut ranks {
        rank.fill().unwrap();
        for step in 1..=4 {
            rank.step(step).unwrap();
            let mut weights: Vec<Vec<u8>> =
                rank.weights.iter().map(|bytes| vec![0; bytes.len()]).collect();
            let mut into: Vec<_> =
                weights.iter_mut().map(|bytes| WeightsOut { dtype: Dtype::F32, bytes }).collect();
            rank.state.weights(&mut into).unwrap();
            assert!(weights == rank.weights, "the weights that a step gave are those it kept");
        }
    }
    save(&mut ranks, mesh, store, 4).unwrap();
    contents(&steps(store).open_step(4).unwrap())
}

/// All ranks save a step, each by itself.
fn save(
    ranks: &mut [Rank],
    mesh: DeviceMesh,
    store: &Arc<dyn Storage>,
    step: u64,
) -> Result<Vec<PublishMethod>> {
    let plan = plan_of(mesh).1;
    let token = format!("try-{step}");
    let save = |(writer, rank): (usize, &mut Rank)| {
        let deadline = std::time::Duration::from_secs(120);
        let together = JointSaveOptions { token: &token, writer, deadline };
        let blobs = [Blob { name: "loader.json", bytes: b"{}" }];
        let blobs = if writer == 0 { &blobs[..] } else { &[] };
        let patience = LivenessTimeouts::default();
        let steps = steps(store).with_patience(patience);
        let meta = json!({ "step": step });
        match rank.state.held() {
            Some(held) if mesh.ranks() == 1 => {
                steps.save_plan(step, &plan, &[held], blobs, meta).map(|_| PublishMethod::Copy)
            }
            Some(held) => steps
                .save_together(step, &plan, &held, blobs, meta, &together)
                .map(|_| PublishMethod::Copy),
            None => {
                let together = (mesh.ranks() > 1).then_some(&together);
                let saved = steps.save_offloaded(step, &mut rank.state, blobs, meta, together);
                saved.map(|(_, way)| way)
            }
        }
    };
    std::thread::scope(|scope| {
        let ranks = ranks.iter_mut().enumerate();
        let threads: Vec<_> = ranks.map(|rank| scope.spawn(move || save(rank))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Layouts, places, threads, vectors: all give the same bits, in checkpoints that verify.
#[test]
fn a_disk_is_as_memory() {
    let (_memory, store) = folder();
    let one = meshes()[0];
    let due = run(one, |rank| Rank::in_memory(one, rank, SMALL), &store);
    for mesh in meshes() {
        let (_temp, store) = folder();
        let options = OffloadOptions { threads: 3, width: Width::Portable, ..SMALL };
        let got = run(mesh, |rank| Rank::in_memory(mesh, rank, options), &store);
        assert!(got == due, "in memory, {mesh:?}");
        let (_temp, store) = folder();
        let disk = |rank| Rank::on_disk(Arc::clone(&store), mesh, rank, SMALL).unwrap();
        let got = run(mesh, disk, &store);
        assert!(got == due, "on a disk, {mesh:?}");
        steps(&store).open_step(4).unwrap().verify().unwrap();
    }
}

/// What is dropped, finished or not, goes on from its last finished update to the same bits.
#[test]
fn what_was_stopped_goes_on() {
    let (_memory, store) = folder();
    let mesh = meshes()[1];
    for rank in 0..2 {
        let mut due = Rank::in_memory(mesh, rank, SMALL);
        due.fill().unwrap();
        for step in 1..=7 {
            due.step(step).unwrap();
        }
        let open = || Rank::on_disk(Arc::clone(&store), mesh, rank, SMALL).unwrap();
        let mut state = open();
        assert!(state.state.generation().is_none());
        assert!(state.step(1).is_err(), "a step of no state");
        state.fill().unwrap();
        for step in 1..=7 {
            state.half_step(step).unwrap();
            drop(state);
            state = open();
            let generation = state.state.generation().unwrap();
            assert_eq!(
                (generation.step, &generation.meta),
                (step - 1, &json!({ "samples": 8 * (step - 1) }))
            );
            state.step(step).unwrap();
            if step % 2 == 0 {
                drop(state);
                state = open();
            }
        }
        let mut weights = due.weights.clone();
        let mut into: Vec<_> =
            weights.iter_mut().map(|bytes| WeightsOut { dtype: Dtype::F32, bytes }).collect();
        state.state.weights(&mut into).unwrap();
        assert!(weights == due.weights);
        let again = Rank::on_disk(Arc::clone(&store), mesh, rank, SMALL);
        let locked = matches!(again, Err(Error::Storage(storage::Error::Locked { .. })));
        assert!(locked, "a second process has it");
    }
}

/// By whichever way files become a checkpoint's, they stay what they are while the state goes on,
/// and every layout, beside the device or not, goes on from them.
#[test]
fn files_become_checkpoints() {
    for (number, mesh) in meshes().into_iter().enumerate() {
        let prefer =
            [PublishMethod::Link, PublishMethod::Clone, PublishMethod::Copy, PublishMethod::Link]
                [number];
        let (_temp, store) = folder();
        let options = OffloadOptions { prefer, ..SMALL };
        let open = |rank| Rank::on_disk(Arc::clone(&store), mesh, rank, options).unwrap();
        let mut ranks: Vec<Rank> = (0..mesh.ranks()).map(open).collect();
        let mut at = Vec::new();
        ranks.iter_mut().for_each(|rank| rank.fill().unwrap());
        for step in 1..=6 {
            for rank in &mut ranks {
                rank.step(step).unwrap();
            }
            if step % 2 == 0 {
                let ways = save(&mut ranks, mesh, &store, step).unwrap();
                assert!(ways.iter().all(|way| *way >= prefer), "{ways:?}, wanted {prefer:?}");
                at.push(contents(&steps(&store).open_step(step).unwrap()));
            }
        }
        for (number, due) in at.iter().enumerate() {
            let saved = steps(&store).open_step(2 * number as u64 + 2).unwrap();
            saved.verify().unwrap();
            assert!(contents(&saved) == *due, "{prefer:?}: step {} has changed", saved.step());
        }
        let (_second, second) = folder();
        let copies = Checkpoints::open(second, Key::new("copies").unwrap());
        let drain = Drain::new(Arc::new(steps(&store)), Arc::new(copies), DrainOptions::default());
        drain.run().unwrap();
        go_on(&store, at.last().unwrap());
    }
}

/// From step 4 every layout comes to what step 6 has.
fn go_on(store: &Arc<dyn Storage>, due: &[(String, Vec<u8>)]) {
    let from = steps(store).open_step(4).unwrap();
    for mesh in meshes() {
        for on_disk in [false, true] {
            let (_temp, other) = folder();
            let make = |rank| match on_disk {
                true => Rank::on_disk(Arc::clone(&other), mesh, rank, SMALL).unwrap(),
                false => Rank::in_memory(mesh, rank, SMALL),
            };
            let mut ranks: Vec<Rank> = (0..mesh.ranks()).map(make).collect();
            for rank in &mut ranks {
                rank.state.load(&from, &GROUPS, Value::Null).unwrap();
                assert_eq!(rank.state.generation().unwrap().step, 4);
                for step in 5..=6 {
                    rank.step(step).unwrap();
                }
            }
            save(&mut ranks, mesh, &other, 6).unwrap();
            let got = contents(&steps(&other).open_step(6).unwrap());
            assert!(got == due, "{mesh:?}, on a disk: {on_disk}");
        }
    }
}

/// What does not belong together is refused by name.
#[test]
fn what_does_not_fit_is_refused() {
    let (_temp, store) = folder();
    let (one, two) = (meshes()[0], meshes()[1]);
    let mut rank = Rank::on_disk(Arc::clone(&store), one, 0, SMALL).unwrap();
    let refused = |outcome: Result<()>, word: &str| {
        let error = outcome.unwrap_err().to_string();
        assert!(error.contains(word), "{error}, due a word of '{word}'");
    };
    refused(rank.state.fill(&[], 0, Value::Null), "expected 6 parameters, found 0");
    rank.fill().unwrap();
    let (name, plan) = ("run", plan_of(two).1);
    refused(Offload::in_memory(plan, &layout(one), 0, SMALL).map(drop), "another layout");
    let adamw = common::beside::adamw(1);
    let update = |grad: &'static [u8], grad_dtype, bytes: &'static mut [u8], dtype| {
        vec![Update { grad, grad_dtype, weight_decay: 0.0, weights: WeightsOut { dtype, bytes } }]
    };
    for (updates, word) in [
        (update(&[0; 8], Dtype::F32, &mut [], Dtype::F32), "embed.weight"),
        (update(&[0; 8], Dtype::F64, &mut [], Dtype::F32), "a gradient in F64"),
        (update(&[0; 12_200], Dtype::F32, Box::leak(Box::new([0; 2])), Dtype::F16), "2 bytes"),
        (update(&[0; 12_200], Dtype::F32, &mut [], Dtype::U8), "weights in U8"),
    ] {
        rank.state.begin(&adamw).unwrap();
        refused(rank.state.update(0, updates), word);
    }
    rank.state.begin(&adamw).unwrap();
    let whole = || update(&[0; 12_200], Dtype::F32, &mut [], Dtype::F32);
    rank.state.update(0, whole()).unwrap();
    refused(rank.state.finish(Value::Null).map(drop), "layers.0.up.weight");
    rank.state.begin(&adamw).unwrap();
    rank.state.update(0, whole()).unwrap();
    refused(rank.state.update(0, whole()), "a second update");
    let other = Checkpoints::open(Arc::clone(&store), Key::new(name).unwrap());
    let saved = other.save_offloaded(1, &mut rank.state, &[], Value::Null, None);
    refused(saved.map(drop), "as in the step, found 4096");
    drop(rank);
    let again = Rank::on_disk(Arc::clone(&store), two, 0, SMALL);
    refused(again.map(drop), "plan");
    let mut memory = Rank::in_memory(one, 0, SMALL);
    let saved = steps(&store).save_offloaded(1, &mut memory.state, &[], Value::Null, None);
    refused(saved.map(drop), "in memory");
    let groups = [(Group::Model, Dtype::BF16), (Group::ExpAvg, Dtype::F32)];
    let halves = Layout::new(one, Vec::new(), &groups).unwrap();
    assert!(offload::plan(&halves).is_ok(), "a model of nothing");
}
