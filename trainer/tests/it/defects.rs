//! Defects of the systems that users come from, and the tests that prevent them here.
//! Files are below this folder unless they name a crate; tests without a file are in this one.
//!
//! - CPM-1: a resumed pipeline skips as many micro-batches as there were steps.
//!   `parallel/elastic.rs`: `a_run_resumes_in_any_layout`.
//! - CPM-2, Paddle: the saved step is trained again; CPM-2 saves before the first.
//!   `a_run_resumes_bit_identically_from_any_step`.
//! - CPM-2: every load sets the loss scale to 4096; Paddle does not save it. The same, in fp16.
//! - CPM-2: offsets of 16 bits wrap in long documents, lines of five million characters end the
//!   work, no two runs hide the same spans. `preprocess/tests/it/spans.rs`:
//!   `documents_beyond_the_limits_of_the_dtypes_are_refused`,
//!   `long_lines_and_short_documents_are_dropped`, `spans_depend_on_seed_and_document_alone`.
//! - CPM-2: ranks build one index at once. `indexed/tests/it/gpt_cache.rs`:
//!   `two_concurrent_builders_leave_one_cache`.
//! - CPM-2: an index is not named after split and tokenizer.
//!   `an_index_is_named_after_what_it_depends_on`.
//! - CPM-2: the norm counts once what tensor parallel ranks have parts of.
//!   `parallel/layouts.rs`: `tensor_parallel`.
//! - CPM-2: four keys of a model's config are ignored. `recipe/tests/it/config.rs`:
//!   `unknown_keys_are_refused_by_name_with_the_nearest_known_one`.
//! - CPM-1, CPM-2: flags lost behind a bracket of the script, or dropped for an underscore.
//!   `recipe/tests/it/import.rs`: `cpm1_t5_is_a_batch_of_128`,
//!   `flags_of_the_first_megatron_differ_from_current_ones`.
//! - DeepSpeed's examples: keys of ZeRO-3 that are misspelt and ignored. The same:
//!   `unknown_keys_are_refused_with_the_nearest_known_key`.
//! - Megatron of 2019: a resumed run validates on other samples.
//!   `a_run_resumes_bit_identically_from_any_step`.
//! - Megatron of 2019: what is saved is padded for a number of ranks.
//!   `checkpoint_shapes_do_not_depend_on_ranks`.
//! - Megatron of 2019: every new token computes all before it again. `generate.rs`:
//!   `cached_decoding_equals_a_full_pass`.
//! - Paddle: its headline is not what its own logs say. The numbers in README have their commands.
//! - picotron, torchtitan, DeepSpeed: in a pipeline gradients are divided twice, or not at all.
//!   `parallel/layouts.rs`: `gpt_in_fp32`; `model/mod.rs`:
//!   `every_token_of_a_step_weighs_the_same`.
//! - picotron: no clip, no schedule of the rate, no state of the data, and fused AdamW is there but
//!   never chosen. `model/mod.rs`: `norm_and_clip`; `recipe/tests/it/lr.rs`; `defects.rs`:
//!   `a_run_resumes_bit_identically_from_any_step`; `trainer/bridge/tests/it/bridge.rs`:
//!   `adamw_is_the_algorithm`.
//! - Megatron: after a load most ranks draw the random numbers of another.
//!   `parallel/layouts.rs`: `dropout_is_the_same_in_every_layout`; `parallel/elastic.rs`:
//!   `dropout_is_the_same_after_a_kill`.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Command;

use crate::common::{Lab, assert_success, train, trainer};
use ckpt::{Checkpoints, Group};
use storage::Key;
use trainer::config::Config;
use trainer::{Data, open_corpus};

fn names(folder: &Path) -> BTreeSet<String> {
    let entries = fs::read_dir(folder).into_iter().flatten();
    entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

/// Copies the checkpoint of one step of a run to a new run.
fn copy_step(lab: &Lab, from: &str, step: u64, to: &str) {
    let name = format!("step-{step:012}");
    let (from, to) = (lab.path(from).join("ckpt"), lab.path(to).join("ckpt"));
    fs::create_dir_all(&to).unwrap();
    let copied = Command::new("cp").arg("-r").arg(from.join(&name)).arg(&to).status();
    assert!(copied.unwrap().success());
}

/// Every test that the list above names exists.
#[test]
fn listed_tests_exist() {
    let list = include_str!("defects.rs").lines().map_while(|line| line.strip_prefix("//!"));
    let list = list.collect::<Vec<_>>().concat();
    let (mut file, mut tests) = ("defects.rs", 0);
    for defect in list.split(" - ").skip(1) {
        if !defect.contains("The same:") {
            file = "defects.rs";
        }
        for name in defect.split('`').skip(1).step_by(2) {
            if name.ends_with(".rs") {
                file = name;
                continue;
            }
            let folder = if file.contains("tests/it/") { "../" } else { "tests/it/" };
            let path = format!("{}/{folder}{file}", env!("CARGO_MANIFEST_DIR"));
            let text = fs::read_to_string(&path).unwrap();
            assert!(text.contains(&format!("#[test]\nfn {name}()")), "{name} is not in {path}");
            tests += 1;
        }
    }
    assert!(tests >= 20, "{tests} tests");
}

/// From whichever step a run resumes, it computes the same: within an epoch, at the first step of
/// one, right after an evaluation, after steps that fp16 skipped and before the loss scale grows.
#[test]
fn a_run_resumes_bit_identically_from_any_step() {
    let lab = Lab::new();
    let keys = [
        ("run.budget", "{ steps = 14 }"),
        // An epoch is between six and seven steps.
        ("data.split", "'45,55,0'"),
        ("batch.global", "48"),
        ("batch.micro", "16"),
        ("eval.every", "4"),
        ("checkpoint.every.steps", "1"),
        ("checkpoint.keep.last", "20"),
        ("precision.dtype", "'fp16'"),
        ("precision.loss_scale", "{ init = 4194304, window = 3, hysteresis = 2, min = 1 }"),
        ("model.dropout", "0.1"),
    ];
    assert_success(&train(&lab.config("whole", &keys)));
    let expected: BTreeSet<String> = (1..=14).map(|step| format!("step-{step:012}")).collect();
    let mut saved = names(&lab.path("whole/ckpt"));
    saved.retain(|name| name.starts_with("step-"));
    assert_eq!(saved, expected, "each step once, and none before the first");
    let whole = lab.log_lines("whole");
    let scales: Vec<f64> = whole.iter().filter_map(|line| line["loss_scale"].as_f64()).collect();
    let moves = |is: fn(f64, f64) -> bool| scales.windows(2).any(|pair| is(pair[0], pair[1]));
    assert!(moves(|a, b| a > b) && moves(|a, b| a < b), "it falls and grows: {scales:?}");
    for step in [2, 4, 6, 7, 11] {
        let run = format!("from-{step}");
        copy_step(&lab, "whole", step, &run);
        assert_success(&train(&lab.config(&run, &keys)));
        let mut rest = whole.clone();
        rest.retain(|line| line["step"].as_u64() > Some(step));
        assert_eq!(lab.log_lines(&run), rest, "after step {step}");
        assert!(lab.final_tensors(&run) == lab.final_tensors("whole"), "after step {step}");
    }
}

/// Another split, tokenizer, seed, length or number of samples is another file.
#[test]
fn an_index_is_named_after_what_it_depends_on() {
    let lab = Lab::new();
    let folder = lab.path("cache");
    let cache = format!("'{}'", folder.display());
    let golden = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden");
    let tokenizer = format!("'hf:{golden}/eval/tokenizer.json'");
    let mut before = BTreeSet::new();
    for (key, value) in [
        ("eval.every", "8"),
        ("data.split", "'80,20,0'"),
        ("data.tokenizer", &tokenizer),
        ("run.seed", "7"),
        ("model.seq_len", "8"),
        ("run.budget", "{ steps = 480 }"),
    ] {
        let config = lab.config("run", &[("data.cache_dir", &cache), (key, value)]);
        let config = Config::load(config.to_str().unwrap(), &[]).unwrap();
        let build = || Data::new(open_corpus(&config).unwrap(), &config).unwrap();
        build();
        let now = names(&folder);
        assert!(now.len() > before.len() && now.is_superset(&before), "{key}: {now:?}");
        // A second build finds the file.
        build();
        assert_eq!(names(&folder), now, "{key}");
        before = now;
    }
}

/// 600 tokens are 640 rows in the memory of one rank, and 768 in that of two; files have 600.
#[test]
fn checkpoint_shapes_do_not_depend_on_ranks() {
    let lab = Lab::new();
    let keys = [("model.vocab", "600"), ("run.budget", "{ steps = 2 }"), ("eval.every", "0")];
    let shape = |run: &str| {
        let store = storage::open_url(lab.path(run).join("ckpt").to_str().unwrap()).unwrap();
        let newest = Checkpoints::open(store, Key::root()).newest().unwrap().unwrap();
        let shape = |group| newest.tensor("transformer.wte.weight", group).unwrap().shape.clone();
        [Group::Model, Group::ExpAvg, Group::ExpAvgSq].map(shape)
    };
    assert_success(&train(&lab.config("one", &keys)));
    let config = lab.config("two", &[&keys[..], &[("parallel.tp", "2")]].concat());
    let mut launch = trainer("launch", Path::new("-n"));
    assert_success(&launch.args(["2", "--", "train"]).arg(config).output().unwrap());
    assert_eq!(shape("one"), [[600, 64]; 3]);
    assert_eq!(shape("two"), shape("one"));
}
