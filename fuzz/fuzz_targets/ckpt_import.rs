//! Checkpoints of other systems, from safetensors to a rank of Megatron-LM: if one is accepted, it
//! is saved as a complete step.

#![no_main]

use ckpt::Checkpoints;
use ckpt::convert::{ConvertLimits, DerivedTensor, Format, Import, NewRows};
use fuzz::{key, store_with};
use libfuzzer_sys::fuzz_target;

/// A small file can have many views, and so a large total.
const BYTES_MAX: u64 = 1 << 20;

/// The data file that the metadata of the seeds refers to.
const BOXES: &[u8] = include_bytes!("../../ckpt/tests/golden/refused/overlap/__0_0.distcp");

fuzz_target!(|file: &[u8]| {
    let alone = fuzz::file("foreign.safetensors", file);
    let folder = alone.trim_end_matches("foreign.safetensors");
    fuzz::file("__0_0.distcp", BOXES);
    fuzz::file(".metadata", file);
    fuzz::file("mp_rank_00/model_optim_rng.pt", file);
    for (url, format) in [
        (alone.as_str(), Format::HuggingFace),
        (&alone, Format::Torch),
        (folder, Format::Dcp),
        (folder, Format::Megatron),
    ] {
        if let Ok(import) = Import::open(url, format) {
            save(import);
        }
    }
});

fn save(mut import: Import) {
    let bytes = import.made.iter().map(DerivedTensor::bytes).fold(0, u64::saturating_add);
    if bytes > BYTES_MAX {
        return;
    }
    if import.normalize().expect("the tensors are there").is_some() {
        let _ = import.set_vocab(7, &NewRows::Mean);
    }
    let steps = Checkpoints::open(store_with(&[]), key("run"));
    let bounds = ConvertLimits { memory_bytes: 1 << 20, threads: 1, ..ConvertLimits::default() };
    if steps.save_made(5, &import, &[], serde_json::Value::Null, bounds, &|_| ()).is_ok() {
        steps.open_step(5).and_then(|step| step.verify()).expect("a step just written");
    }
}
