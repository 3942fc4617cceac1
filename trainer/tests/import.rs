//! Runs of others, written after the scripts that they publish, and what becomes of every key.

use std::fs;

use trainer::import::{Imported, Source, import};

/// What the files of a folder beside this test give.
fn read(source: &str, files: &[&str], world: Option<u64>) -> Imported {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/import");
    let files: Vec<String> = files.iter().map(|file| format!("{folder}/{file}")).collect();
    import(source.parse::<Source>().unwrap(), &files, world).unwrap()
}

#[test]
fn show() {
    for (source, files) in [
        ("cpm", &["cpm1_t5.sh", "cpm1_ds_t5.json"][..]),
        ("cpm", &["cpm1_gpt2.sh"]),
        ("cpm", &["cpm2.sh", "cpm2_model.json", "cpm2_ds.json"]),
        ("megatron", &["megatron_175b.sh"]),
        ("deepspeed", &["deepspeed_zero3.json"]),
        ("paddle", &["paddle_1.3b.yaml"]),
        ("colossal", &["colossal_pp1d.py"]),
        ("hf", &["hf_t5.json", "hf_training.json"]),
        ("hf", &["hf_llama.json"]),
    ] {
        println!("=== {source} {files:?}\n{}", read(source, files, None));
    }
    _ = fs::read("x");
}
