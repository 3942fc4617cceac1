//! Offloaded state: its arithmetic equals libtorch's, disk and memory give the same results, a
//! stopped run resumes, and its files become a checkpoint that any layout loads.

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

/// A store in a separate folder.
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

/// The results of `reference/adamw.py`, with every vector width of this machine.
#[test]
fn adamw_matches_libtorch_bitwise() {
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
                for (name, found) in names.into_iter().zip(state.held().unwrap()) {
                    let expected = tensor(&format!("{name}.{k}"));
                    let floats = |bytes: &[u8]| -> Vec<f32> {
                        let floats = bytes.as_chunks::<4>().0.iter();
                        floats.map(|bytes| f32::from_le_bytes(*bytes)).collect()
                    };
                    let (found, expected) = (floats(found), floats(expected));
                    for (at, (found, expected)) in found.iter().zip(&expected).enumerate() {
                        let same = found.to_bits() == expected.to_bits();
                        assert!(
                            same,
                            "{case}, {width:?}: {name}.{k}[{at}] {found:e}, expected {expected:e}"
                        );
                    }
                }
            }
        }
    }
}

/// Arrays with the same offset in a page may evict each other from a cache at every element.
#[test]
fn arrays_have_different_page_offsets() {
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

/// Returned weights are rounded to nearest even with every vector width.
#[test]
fn weights_are_rounded_to_nearest_even() {
    // Every f16, its neighbours in f32, values halfway between two, and NaNs.
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
        let mut expected = Vec::new();
        ckpt::cast(&bytes, Dtype::F32, dtype, &mut expected);
        for width in Width::ALL {
            let plan = offload::plan(&layout).unwrap();
            let options = OffloadOptions { width, ..SMALL };
            let mut state = Offload::in_memory(plan, &layout, 0, options).unwrap();
            state.fill(&[&bytes], 0, Value::Null).unwrap();
            let mut found = vec![0xaa; expected.len()];
            state.weights(&mut [WeightsOut { dtype, bytes: &mut found }]).unwrap();
            let item = dtype.item_bytes() as usize;
            let pairs = found.chunks(item).zip(expected.chunks(item)).zip(&numbers);
            for ((found, expected), number) in pairs {
                assert!(
                    found == expected,
                    "{number:e} as {dtype} with {width:?}: {found:?}, expected {expected:?}"
                );
            }
        }
    }
}

/// Runs all ranks of a mesh, and returns the contents of a checkpoint.
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
            assert!(weights == rank.weights, "returned weights equal those of the state");
        }
    }
    save(&mut ranks, mesh, store, 4).unwrap();
    contents(&steps(store).open_step(4).unwrap())
}

/// All ranks save a step jointly.
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

/// All layouts, backings, thread counts and vector widths give bitwise equal checkpoints.
#[test]
fn disk_and_memory_give_same_results() {
    let (_memory, store) = folder();
    let one = meshes()[0];
    let expected = run(one, |rank| Rank::in_memory(one, rank, SMALL), &store);
    for mesh in meshes() {
        let (_temp, store) = folder();
        let options = OffloadOptions { threads: 3, width: Width::Portable, ..SMALL };
        let found = run(mesh, |rank| Rank::in_memory(mesh, rank, options), &store);
        assert!(found == expected, "in memory, {mesh:?}");
        let (_temp, store) = folder();
        let disk = |rank| Rank::on_disk(Arc::clone(&store), mesh, rank, SMALL).unwrap();
        let found = run(mesh, disk, &store);
        assert!(found == expected, "on a disk, {mesh:?}");
        steps(&store).open_step(4).unwrap().verify().unwrap();
    }
}

/// A dropped state resumes from its last finished update, with bitwise equal results.
#[test]
fn stopped_run_resumes() {
    let (_memory, store) = folder();
    let mesh = meshes()[1];
    for rank in 0..2 {
        let mut expected = Rank::in_memory(mesh, rank, SMALL);
        expected.fill().unwrap();
        for step in 1..=7 {
            expected.step(step).unwrap();
        }
        let open = || Rank::on_disk(Arc::clone(&store), mesh, rank, SMALL).unwrap();
        let mut state = open();
        assert!(state.state.generation().is_none());
        assert!(state.step(1).is_err(), "a step without a state");
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
        let mut weights = expected.weights.clone();
        let mut into: Vec<_> =
            weights.iter_mut().map(|bytes| WeightsOut { dtype: Dtype::F32, bytes }).collect();
        state.state.weights(&mut into).unwrap();
        assert!(weights == expected.weights);
        let again = Rank::on_disk(Arc::clone(&store), mesh, rank, SMALL);
        let locked = matches!(again, Err(Error::Storage(storage::Error::Locked { .. })));
        assert!(locked, "the folder is locked");
    }
}

/// With every publish method, the files of a checkpoint do not change while the state continues,
/// and every layout resumes from them, in memory or on a disk.
#[test]
fn state_files_become_checkpoint_files() {
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
        for (number, expected) in at.iter().enumerate() {
            let saved = steps(&store).open_step(2 * number as u64 + 2).unwrap();
            saved.verify().unwrap();
            assert!(contents(&saved) == *expected, "{prefer:?}: step {} has changed", saved.step());
        }
        let (_second, second) = folder();
        let copies = Checkpoints::open(second, Key::new("copies").unwrap());
        let drain = Drain::new(Arc::new(steps(&store)), Arc::new(copies), DrainOptions::default());
        drain.run().unwrap();
        check_resume(&store, at.last().unwrap());
    }
}

/// Every layout resumes from step 4 and reaches the state of step 6.
fn check_resume(store: &Arc<dyn Storage>, expected: &[(String, Vec<u8>)]) {
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
            let found = contents(&steps(&other).open_step(6).unwrap());
            assert!(found == expected, "{mesh:?}, on a disk: {on_disk}");
        }
    }
}

/// Mismatched arguments are rejected with their names.
#[test]
fn invalid_arguments_are_rejected() {
    let (_temp, store) = folder();
    let (one, two) = (meshes()[0], meshes()[1]);
    let mut rank = Rank::on_disk(Arc::clone(&store), one, 0, SMALL).unwrap();
    let refused = |outcome: Result<()>, word: &str| {
        let error = outcome.unwrap_err().to_string();
        assert!(error.contains(word), "{error}, expected a word of '{word}'");
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
    assert!(offload::plan(&halves).is_ok(), "an empty model");
}
