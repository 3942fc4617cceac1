//! Saved state is read back unchanged, and stock readers read the same.

use crate::common::{Folder, Random, SMALL, State, Tensor};
use ckpt::{
    CheckpointOptions, Dtype, Error, Group, HeldRegion, PlanLimits, Region, SavePlan, Span,
    TensorRead, TensorSpec,
};
use serde_json::json;

/// Tensors of every element type, with various shapes.
fn zoo() -> State {
    let mut random = Random(11);
    let mut tensors = Vec::new();
    let shapes: [&[u64]; 8] =
        [&[], &[1], &[0], &[3, 0, 5], &[7], &[3, 5], &[2, 3, 4], &[1, 1, 2, 1, 3]];
    for (i, dtype) in Dtype::ALL.into_iter().enumerate() {
        // A header counts the last axis of `F4_X2` in half bytes.
        let first = usize::from(dtype == Dtype::F4X2);
        for (j, shape) in shapes.into_iter().enumerate().skip(first) {
            let group = Group::ALL[(i + j) % Group::ALL.len()];
            let name = format!("zoo.{}.\"{j}\" 表/x", dtype.name());
            tensors.push(Tensor::new(&name, group, dtype, shape, &mut random));
        }
    }
    tensors.push(Tensor::new("large", Group::Model, Dtype::F32, &[100, 41], &mut random));
    tensors.push(Tensor::new("packed", Group::Model, Dtype::F4X2, &[100, 41], &mut random));
    tensors.push(Tensor::new("wide", Group::ExpAvg, Dtype::U8, &[2, 10_000], &mut random));
    State { tensors, blobs: vec![("b".to_owned(), random.bytes(100))], meta: json!(null) }
}

#[test]
fn state_round_trips() {
    let states = [zoo(), State::of_model(1)];
    let nothing = State { tensors: vec![], blobs: vec![], meta: json!({}) };
    for state in states.iter().chain([&nothing]) {
        for options in
            [CheckpointOptions::default(), SMALL, CheckpointOptions { threads: 1, ..SMALL }]
        {
            let folder = Folder::new();
            let report = state.save(&folder.steps(options), 12).unwrap();
            let checkpoint = folder.steps(CheckpointOptions::default()).newest().unwrap().unwrap();
            assert_eq!(checkpoint.step(), 12);
            state.check(&checkpoint);
            let verified = checkpoint.verify().unwrap();
            assert_eq!((verified.files, verified.bytes), (report.files, report.bytes));
            assert_eq!(verified.tensors, state.tensors.len());
            assert_eq!(folder.files(12).len(), report.files + 1, "and the manifest");
            assert_eq!(folder.names(), ["step-000000000012"]);
        }
    }
}

/// The stock reader opens every shard, and reads every tensor, or its pieces, with the same bytes.
#[test]
fn stock_safetensors_reads_every_shard() {
    for (state, options) in
        [(zoo(), CheckpointOptions::default()), (zoo(), SMALL), (State::of_model(2), SMALL)]
    {
        let folder = Folder::new();
        state.save(&folder.steps(options), 3).unwrap();
        let mut pieces: Vec<(String, Vec<usize>, safetensors::Dtype, Vec<u8>)> = Vec::new();
        for (name, bytes) in folder.files(3) {
            if !name.ends_with(".safetensors") {
                continue;
            }
            let header_bytes = u64::from_le_bytes(bytes[..8].try_into().unwrap());
            assert_eq!((8 + header_bytes) % 4096, 0, "{name}");
            let (_, metadata) = safetensors::SafeTensors::read_metadata(&bytes).unwrap();
            assert_eq!(metadata.metadata().as_ref().unwrap()["format"], "pt");
            let stock = safetensors::SafeTensors::deserialize(&bytes).unwrap();
            for (entry, view) in stock.tensors() {
                let begin = view.data().as_ptr() as usize - bytes.as_ptr() as usize;
                let item_bytes = view.dtype().bitsize().div_ceil(8);
                assert_eq!(begin % item_bytes, 0, "{entry} of {name}");
                let shape = view.shape().to_vec();
                pieces.push((entry, shape, view.dtype(), view.data().to_vec()));
            }
        }
        for tensor in &state.tensors {
            let prefix = match tensor.group {
                Group::Model => String::new(),
                group => format!("{group}/"),
            };
            let whole = format!("{prefix}{}", tensor.name);
            let piece = |name: &str| name.strip_prefix(&format!("{whole}#")).map(str::to_owned);
            let mut mine: Vec<_> = pieces
                .iter()
                .filter_map(|(name, shape, dtype, bytes)| {
                    let k = if *name == whole { Some(0) } else { piece(name)?.parse().ok() }?;
                    Some((k, shape, dtype, bytes))
                })
                .collect();
            mine.sort_by_key(|(k, ..)| *k);
            let order: Vec<usize> = mine.iter().map(|(k, ..)| *k).collect();
            assert_eq!(order, (0..mine.len()).collect::<Vec<_>>(), "{whole}");
            // Shapes of `F4` count half bytes: of a row, and so of a piece of one axis.
            let items = tensor.dtype.header_items() as usize;
            let in_last = |shape: &[usize]| if shape.len() == 1 { items } else { 1 };
            let rows: usize = mine
                .iter()
                .map(|(_, shape, ..)| shape.first().unwrap_or(&1) / in_last(shape))
                .sum();
            assert_eq!(rows as u64, *tensor.shape.first().unwrap_or(&1), "{whole}");
            let bytes: Vec<u8> =
                mine.iter().flat_map(|(.., bytes)| bytes.iter().copied()).collect();
            assert!(bytes == tensor.bytes, "{whole}");
            assert_eq!(tensor.dtype.header_name(), mine[0].2.to_string());
        }
    }
}

#[test]
fn weight_index_lists_every_weight() {
    let folder = Folder::new();
    let state = State::of_model(4);
    state.save(&folder.steps(CheckpointOptions { shard_bytes_max: 2100, ..SMALL }), 1).unwrap();
    let files = folder.files(1);
    let find = |name: &str| files.iter().find(|(file, _)| file == name).map(|(_, bytes)| bytes);
    let index = find("model.safetensors.index.json").unwrap();
    let index: serde_json::Value = serde_json::from_slice(index).unwrap();
    let weights: Vec<_> = state.tensors.iter().filter(|t| t.group == Group::Model).collect();
    let total: usize = weights.iter().map(|tensor| tensor.bytes.len()).sum();
    assert_eq!(index["metadata"]["total_size"], total);
    assert_eq!(index["weight_map"].as_object().unwrap().len(), weights.len());
    for tensor in weights {
        let file = index["weight_map"][&tensor.name].as_str().unwrap();
        let stock = safetensors::SafeTensors::deserialize(find(file).unwrap()).unwrap();
        assert!(stock.tensor(&tensor.name).unwrap().data() == tensor.bytes);
    }
    // Other tools cannot load pieces of a weight.
    let folder = Folder::new();
    state.save(&folder.steps(CheckpointOptions { shard_bytes_max: 1000, ..SMALL }), 1).unwrap();
    assert!(folder.files(1).iter().all(|(name, _)| !name.contains("index")));
}

#[test]
fn same_state_gives_same_bytes() {
    let (a, b) = (Folder::new(), Folder::new());
    State::of_model(5).save(&a.steps(SMALL), 9).unwrap();
    State::of_model(5).save(&b.steps(CheckpointOptions { threads: 1, ..SMALL }), 9).unwrap();
    assert!(a.files(9) == b.files(9));
}

/// Reads more files than are open at a time, in one call and in random order.
#[test]
fn many_tensors_are_read_at_once() {
    let mut random = Random(17);
    let mut tensor = |i: u64| {
        let name = format!("t{}", i * 7 % 150);
        Tensor::new(&name, Group::Model, Dtype::U8, &[2000 + i], &mut random)
    };
    let tensors = (0..150).map(&mut tensor).collect();
    let state = State { tensors, blobs: vec![], meta: json!(null) };
    let folder = Folder::new();
    let report = state.save(&folder.steps(SMALL), 0).unwrap();
    assert_eq!(report.files, 151, "each tensor in its own, and the index");
    let checkpoint = folder.steps(SMALL).newest().unwrap().unwrap();
    let mut buffers: Vec<_> = state.tensors.iter().map(|t| vec![0; t.bytes.len()]).collect();
    let reads = state.tensors.iter().zip(&mut buffers).rev();
    let reads = reads.map(|(t, into)| TensorRead { name: &t.name, group: t.group, into });
    checkpoint.read_tensors(reads.collect()).unwrap();
    for (tensor, buffer) in state.tensors.iter().zip(&buffers) {
        assert!(tensor.bytes == *buffer, "{}", tensor.name);
    }
}

/// Compares boxes of a tensor that is cut into files and blocks with slices of its bytes.
#[test]
fn boxes_match_tensor_slices() {
    let seed = 21;
    let mut random = Random(seed);
    let shape = [60_u64, 11, 31];
    let tensor = Tensor::new("t", Group::Master, Dtype::F32, &shape, &mut random);
    let state = State { tensors: vec![tensor.clone()], blobs: vec![], meta: json!(0) };
    for shard_bytes_max in [1 << 30, 30_000] {
        let folder = Folder::new();
        let options = CheckpointOptions { shard_bytes_max, ..SMALL };
        state.save(&folder.steps(options), 0).unwrap();
        let checkpoint = folder.steps(options).open_step(0).unwrap();
        for round in 0..200 {
            let mut span = |len: u64| {
                let start = random.below(len + 1);
                Span { start, len: random.below(len - start + 1) }
            };
            let mut wanted = shape.map(&mut span);
            if round % 3 == 0 {
                // Complete rows, the common case.
                wanted[1] = Span { start: 0, len: shape[1] };
                wanted[2] = Span { start: 0, len: shape[2] };
            }
            let mut expected: Vec<u8> = Vec::new();
            let [a, b, c] = wanted.map(|span| span.start..span.start + span.len);
            for x in a {
                for y in b.clone() {
                    let row = (x * shape[1] + y) * shape[2];
                    let range = (row + c.start) * 4..(row + c.end) * 4;
                    expected.extend(&tensor.bytes[range.start as usize..range.end as usize]);
                }
            }
            let mut found = vec![0; expected.len()];
            checkpoint.read_box("t", Group::Master, &wanted, &mut found).unwrap();
            assert!(found == expected, "seed {seed}, round {round}: {wanted:?}");
        }
    }
}

#[test]
fn invalid_requests_are_rejected() {
    let folder = Folder::new();
    State::of_model(6).save(&folder.steps(SMALL), 100).unwrap();
    let steps = folder.steps(SMALL);
    let checkpoint = steps.newest().unwrap().unwrap();
    let check = |error: Error, expected: &str| {
        let text = error.to_string();
        assert!(text.contains(expected), "expected '{expected}', found '{text}'");
    };
    let mut buf = vec![0; 128];
    let no_tensor = checkpoint.read_tensor("layers.1.mlp.bias", Group::Model, &mut buf);
    check(no_tensor.unwrap_err(), "existing tensors are model 'layers.0.mlp.bias'");
    let wrong_len = checkpoint.read_tensor("norm.weight", Group::Model, &mut buf);
    check(
        wrong_len.unwrap_err(),
        "expected 32 bytes for BF16 of shape [16], found a buffer of 128 bytes",
    );
    let outside = [Span { start: 10, len: 7 }];
    let outside = checkpoint.read_box("norm.weight", Group::Model, &outside, &mut buf);
    check(outside.unwrap_err(), "a box within [16]");
    let max = [Span { start: u64::MAX, len: u64::MAX }];
    assert!(checkpoint.read_box("norm.weight", Group::Model, &max, &mut buf).is_err());
    assert!(checkpoint.read_box("norm.weight", Group::Model, &[], &mut buf).is_err());
    check(checkpoint.blob("rng").unwrap_err(), "loader.json, rng.bin, empty");
    check(
        steps.open_step(99).unwrap_err(),
        "step-000000000099: no such step (hint: existing steps are 100)",
    );
    check(Folder::new().steps(SMALL).open_step(1).unwrap_err(), "there are no steps");
    assert!(Folder::new().steps(SMALL).newest().unwrap().is_none());
}

/// An empty tensor has one part, however the writers cut it.
#[test]
fn empty_tensor_is_saved_however_it_is_cut() {
    let (name, group, dtype, shape) = ("none".to_owned(), Group::Model, Dtype::F32, vec![0, 4]);
    let spec = TensorSpec { name, group, dtype, shape };
    let half = |start| {
        let region = Region::of_box(vec![[0, 0].into(), [start, 2].into()]);
        vec![HeldRegion { tensor: 0, region }]
    };
    let plan = SavePlan::new(&[spec], &[half(0), half(2)], PlanLimits::default()).unwrap();
    let folder = Folder::new();
    let steps = folder.steps(SMALL);
    steps.save_plan(1, &plan, &[vec![&[]], vec![&[]]], &[], json!(null)).unwrap();
    let newest = steps.newest().unwrap().unwrap();
    newest.verify().unwrap();
    newest.read_tensor("none", group, &mut []).unwrap();
    assert_eq!((newest.tensors()[0].shape.as_slice(), newest.tensors().len()), (&[0, 4][..], 1));
}

/// The caller's `meta` is read back, or rejected before a byte is written: a manifest that no JSON
/// reader accepts would lose the step.
#[test]
fn meta_round_trips_or_is_rejected() {
    let folder = Folder::new();
    let steps = folder.steps(SMALL);
    let nested = |depth: usize| (0..depth).fold(json!(1), |value, _| json!([value]));
    let long = |bytes: usize| json!({ "note": "\u{8868}\n".repeat(bytes / 5) });
    for (step, meta) in (1..).zip([nested(100), long(4 << 20)]) {
        let state = State { meta, ..State::small(step) };
        state.save(&steps, step).unwrap();
        state.check(&steps.open_step(step).unwrap());
    }
    for (meta, expected) in [
        (nested(101), "expected at most 100 levels"),
        (json!({ "a": [nested(300)] }), "expected at most 100 levels"),
        (long(65 << 20), "expected at most 67108864 bytes"),
    ] {
        let text = State { meta, ..State::small(3) }.save(&steps, 3).unwrap_err().to_string();
        assert!(text.contains("save the meta of a step: ") && text.contains(expected), "{text}");
    }
    assert_eq!(folder.names(), ["step-000000000001", "step-000000000002"]);
}

#[test]
fn invalid_input_writes_nothing() {
    let folder = Folder::new();
    let good = State::of_model(7);
    let mut twice = good.clone();
    twice.tensors.push(good.tensors[0].clone());
    let mut short = good.clone();
    short.tensors[2].bytes.pop();
    let blob = |name: &str| {
        let mut state = good.clone();
        state.blobs.push((name.to_owned(), vec![1]));
        state
    };
    for state in [twice, short, blob("a/b"), blob(".hidden"), blob(""), blob("rng.bin")] {
        assert!(state.save(&folder.steps(SMALL), 1).is_err());
    }
    for options in [
        CheckpointOptions { threads: 0, ..SMALL },
        CheckpointOptions { block_bytes: 0, ..SMALL },
        CheckpointOptions { block_bytes: 1 << 40, ..SMALL },
        CheckpointOptions { shard_bytes_max: 0, ..SMALL },
    ] {
        let refused = good.save(&folder.steps(options), 1);
        assert!(matches!(refused, Err(Error::BadInput { .. })), "{options:?}");
    }
    assert!(matches!(good.save(&folder.steps(SMALL), 10_u64.pow(12)), Err(Error::BadInput { .. })));
    assert!(!folder.path("").exists());
}
