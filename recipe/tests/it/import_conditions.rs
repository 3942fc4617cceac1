//! A key is implied only with the values of which that is true.

use recipe::import::KeyStatus;

use crate::import::{fate, read_text};

/// Checks a key of a text; a refusal contains `expected`.
fn check(source: &str, text: &str, key: &str, expected: Option<&str>) {
    let name = match source {
        "paddle" => "run.yaml",
        "colossal" => "run.py",
        "megatron" => "flags.txt",
        _ => "args.json",
    };
    let imported = read_text(source, name, text).unwrap();
    let (status, reason) = fate(&imported, key);
    match expected {
        None => assert_eq!(status, KeyStatus::Implied, "{key} in {text}\n{imported}"),
        Some(expected) => {
            assert_eq!(status, KeyStatus::Refused, "{key} in {text}\n{imported}");
            assert!(reason.contains(expected), "{key} in {text}: {reason}");
        }
    }
}

#[test]
fn the_length_of_a_run_is_not_implied_by_epochs() {
    let key = "num_train_epochs";
    check("hf", r#"{"max_steps": 100, "num_train_epochs": 3}"#, key, None);
    check("hf", r#"{"max_steps": -1, "num_train_epochs": 3}"#, key, Some("expected run.budget"));
    check("hf", r#"{"num_train_epochs": 3}"#, key, Some("expected run.budget"));
    let engine = |steps: &str| format!("Engine:\n  max_steps: {steps}\n  num_train_epochs: 1\n");
    check("paddle", &engine("100"), "Engine.num_train_epochs", None);
    check("paddle", &engine("-1"), "Engine.num_train_epochs", Some("expected run.budget"));
    check("colossal", "NUM_EPOCHS = 60\nBATCH_SIZE = 4\n", "NUM_EPOCHS", Some("run.budget"));
    let mode = |mode: &str| format!("Engine:\n  run_mode: {mode}\n");
    check("paddle", &mode("step"), "Engine.run_mode", None);
    check("paddle", &mode("epoch"), "Engine.run_mode", Some("expected step"));
}

#[test]
fn values_of_evaluations_are_those_of_the_run() {
    check("hf", r#"{"max_eval_samples": 100}"#, "max_eval_samples", Some("eval.iters"));
    check("hf", r#"{"max_eval_samples": null}"#, "max_eval_samples", None);
    let half = |more: &str| format!("{{\"bf16_full_eval\": true{more}}}");
    check("hf", &half(", \"bf16\": true"), "bf16_full_eval", None);
    check("hf", &half(""), "bf16_full_eval", Some("expected precision.dtype = bf16"));
    let often = r#"{"do_eval": true, "eval_strategy": "steps", "eval_steps": 10}"#;
    check("hf", often, "do_eval", None);
    check("hf", r#"{"do_eval": true}"#, "do_eval", Some("with eval.every = 0"));
    check("hf", r#"{"do_eval": false}"#, "do_eval", None);
    let batch = |eval: &str| format!("--batch-size 4 --eval-batch-size {eval}\n");
    check("megatron", &batch("4"), "--eval-batch-size", None);
    check("megatron", &batch("8"), "--eval-batch-size", Some("expected 4: evaluation uses"));
    let len = |eval: &str| format!("--seq-length 64 --eval-seq-length {eval}\n");
    check("megatron", &len("64"), "--eval-seq-length", None);
    check("megatron", &len("32"), "--eval-seq-length", Some("expected 64"));
}

#[test]
fn names_beside_the_used_ones_must_agree() {
    let stages = |count: u8| format!("PIPELINE = 2\nparallel = dict(pipeline={count})\n");
    check("colossal", &stages(2), "PIPELINE", None);
    check("colossal", &stages(4), "PIPELINE", Some("expected 4: parallel.pipeline sets it"));
    let matrices = "TENSOR_PARALLEL = 2\nMODE = '2d'\nparallel = dict(pipeline=2)\n";
    check("colossal", matrices, "TENSOR_PARALLEL", Some("expected 1"));
    check("colossal", matrices, "MODE", Some("expected 1d"));
    let seeds = |seed: &str| {
        format!("Global:\n  seed: 7\nData:\n  Train:\n    dataset:\n      seed: {seed}\n")
    };
    check("paddle", &seeds("7"), "Data.Train.dataset.seed", None);
    check("paddle", &seeds("8"), "Data.Train.dataset.seed", Some("expected 7"));
    let gate = |gate: bool| {
        format!(
            "{{\"model_type\": \"t5\", \"feed_forward_proj\": \"relu\", \"is_gated_act\": {gate}}}"
        )
    };
    check("hf", &gate(true), "is_gated_act", Some("another key sets relu"));
}

#[test]
fn logs_and_traces_are_not_reduced_silently() {
    let profiler = |on: &str| format!("Profiler:\n  enable: {on}\n  scheduler: [1, 5]\n");
    check("paddle", &profiler("False"), "Profiler.scheduler", None);
    check("paddle", &profiler("True"), "Profiler.scheduler", Some("a trace has every step"));
    let step = "--profile-step-start 10\n";
    check("megatron", step, "--profile-step-start", None);
    check("megatron", &format!("--profile {step}"), "--profile-step-start", Some("every step"));
    let report = |to: &str| format!("{{\"report_to\": {to}}}");
    check("hf", &report("[\"tensorboard\"]"), "report_to", None);
    check("hf", &report("\"none\""), "report_to", None);
    let network = Some("nothing is sent over the network");
    check("hf", &report("[\"tensorboard\", \"wandb\"]"), "report_to", network);
}

#[test]
fn batches_and_precisions_of_other_values_are_refused() {
    let sampler = |value: &str| {
        format!("Data:\n  Train:\n    sampler:\n      drop_last: {value}\n      shuffle: {value}\n")
    };
    check("paddle", &sampler("True"), "Data.Train.sampler.drop_last", None);
    check("paddle", &sampler("False"), "Data.Train.sampler.drop_last", Some("expected true"));
    check("paddle", &sampler("True"), "Data.Train.sampler.shuffle", Some("expected false"));
    let black =
        |list: &str| format!("Engine:\n  mix_precision:\n    custom_black_list: [{list}]\n");
    let key = "Engine.mix_precision.custom_black_list";
    check("paddle", &black("reduce_sum, layer_norm"), key, None);
    check("paddle", &black("reduce_sum, matmul_v2"), key, Some("expected reduce_sum or"));
    let elastic = |on: bool| {
        format!("{{\"elasticity\": {{\"enabled\": {on}, \"max_train_batch_size\": 64}}}}")
    };
    check("deepspeed", &elastic(false), "elasticity.enabled", None);
    check("deepspeed", &elastic(false), "elasticity.max_train_batch_size", None);
    check("deepspeed", &elastic(true), "elasticity.enabled", Some("batch.global is set"));
    let scale = |more: &str| format!("--fp16 --dynamic-loss-scale {more}\n");
    check("megatron", &scale(""), "--dynamic-loss-scale", None);
    let fixed = Some("with precision.loss_scale.window = 0");
    check("megatron", &scale("--loss-scale 128"), "--dynamic-loss-scale", fixed);
    let surplus = |share: &str| format!("--lr 1 --mid-level-dataset-surplus {share}\n");
    check("megatron", &surplus("0.005"), "--mid-level-dataset-surplus", None);
    check("megatron", &surplus("0.1"), "--mid-level-dataset-surplus", Some("expected 0.005"));
}
