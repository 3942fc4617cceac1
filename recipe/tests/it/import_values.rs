//! Booleans, numbers and `"auto"` of other systems, each read as by its program.

use std::fs;

use recipe::import::{ConfigFormat, Imported, KeyStatus, import};

use crate::import::{check, config_value, fate, read_text, refused};

/// Imports files with these names and texts.
pub(crate) fn read_files(source: &str, files: &[(&str, &str)], ranks: Option<u64>) -> Imported {
    let folder = tempfile::tempdir().unwrap();
    let paths = files.iter().map(|(name, text)| {
        let path = folder.path().join(name);
        fs::write(&path, text).unwrap();
        path.display().to_string()
    });
    let paths: Vec<String> = paths.collect();
    import(source.parse::<ConfigFormat>().unwrap(), &paths, ranks).unwrap()
}

const MODEL: &str = "{\"model_type\": \"gpt2\", \"vocab_size\": 500, \"n_layer\": 2, \
                     \"n_embd\": 64, \"n_head\": 2, \"n_positions\": 32}";

fn transformers(flags: &str, json: &str) -> Imported {
    let script = format!(
        "torchrun --nproc_per_node 2 train.py --config_name model.json --max_steps 50 \
         --per_device_train_batch_size 4 --learning_rate 3e-4 --block_size 32 {flags}\n"
    );
    let files = [("run.sh", script.as_str()), ("model.json", MODEL), ("ds.json", json)];
    let count = if json.is_empty() { 2 } else { 3 };
    read_files("hf", &files[..count], None)
}

/// The words of `string_to_bool` of transformers.
#[test]
fn booleans_of_transformers() {
    for (word, dtype) in [("True", "\"bf16\""), ("y", "\"bf16\""), ("1", "\"bf16\"")] {
        check(&transformers(&format!("--bf16 {word}"), ""), &[("precision.dtype", dtype)]);
    }
    for word in ["False", "no", "N", "f", "0"] {
        let run = transformers(&format!("--bf16 {word} --gradient_checkpointing {word}"), "");
        check(&run, &[("precision.dtype", "absent"), ("parallel.recompute.mode", "absent")]);
        assert_eq!(fate(&run, "--bf16"), (KeyStatus::Implied, "off"), "{run}");
    }
    let odd = transformers("--bf16 off", "");
    let expected =
        "precision.dtype: expected yes, true, t, y, 1, no, false, f, n or 0, found 'off'";
    assert_eq!(fate(&odd, "--bf16"), (KeyStatus::Refused, expected));
    assert_eq!(fate(&transformers("--fsdp \"\"", ""), "--fsdp").0, KeyStatus::Implied);
    let args = "{\"output_dir\": \"o\", \"bf16\": \"false\"}";
    assert_eq!(refused(&read_text("hf", "args.json", args).unwrap()), ["bf16"]);
}

/// PyYAML reads `on`, `off`, `yes` and `no` outside quotes as booleans, and PaddleFleetX evaluates
/// texts.
#[test]
fn booleans_of_yaml() {
    let run = |amp: &str, recompute: &str, steps: &str| {
        let text = format!(
            "Global:\n  local_batch_size: 4\n  micro_batch_size: 2\nEngine:\n  \
             max_steps: {steps}\n  mix_precision:\n    \
             enable: {amp}\n    dtype: bfloat16\nModel:\n  \
             name: GPT\n  \
             use_recompute: {recompute}\n  sequence_parallel: No\nDistributed:\n  dp_degree: 1\n  \
             mp_degree: 2\n"
        );
        read_text("paddle", "run.yaml", &text).unwrap()
    };
    let off = run("off", "no", "5e2");
    check(&off, &[("precision.dtype", "absent"), ("parallel.recompute.mode", "absent")]);
    check(&off, &[("parallel.sequence_parallel", "absent"), ("run.budget", "{ steps = 500 }")]);
    let text = "precision.dtype: no effect with the other keys";
    assert_eq!(fate(&off, "Engine.mix_precision.dtype"), (KeyStatus::Implied, text));
    let on = run("ON", "'True'", "0x1F4");
    check(&on, &[("precision.dtype", "\"bf16\""), ("parallel.recompute.mode", "\"full\"")]);
    assert_eq!(fate(&on, "Engine.max_steps").0, KeyStatus::Refused, "{on}");
    let quoted = run("\"off\"", "no", "010");
    assert_eq!(refused(&quoted), ["Engine.mix_precision.enable"], "{quoted}");
    check(&quoted, &[("run.budget", "{ steps = 8 }")]);
    assert_eq!(refused(&run("on", "no", "12.5")), ["Engine.max_steps"]);
}

#[test]
fn flags_are_read_as_by_argparse() {
    let flags = |flags: &str| {
        let base = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 \
                    --max-position-embeddings 32 --vocab-size 500 --data-path d --lr 1e-3 \
                    --micro-batch-size 2 --global-batch-size 8";
        read_text("megatron", "flags.txt", &format!("{base} {flags}\n")).unwrap()
    };
    for (given, key) in [
        ("--lr-warmup-iters 3k", "--lr-warmup-iters"),
        ("--lr-warmup-iters 20.5", "--lr-warmup-iters"),
        ("--lr-warmup-iters", "--lr-warmup-iters"),
        ("--train-iters 1e3", "--train-iters"),
        ("--clip-grad one", "--clip-grad"),
        ("--fp16 False", "--fp16"),
        ("--num-experts 4", "--num-experts"),
    ] {
        let run = flags(given);
        assert!(refused(&run).contains(&key), "{given}:\n{run}");
        assert!(run.problems().unwrap().contains(key), "{given}");
    }
    let read = flags("--train-iters +1_000 --lr-warmup-iters 20 --position-embedding-type none");
    check(&read, &[("run.budget", "{ steps = 1000 }"), ("optim.lr.warmup", "{ steps = 20 }")]);
    check(&read, &[("model.positions", "\"none\"")]);
    assert_eq!(read.problems(), None, "{read}");
    // Megatron refuses these too.
    let twice = flags("--train-iters 9 --lr-warmup-iters 2 --lr-warmup-fraction 0.1");
    assert_eq!(refused(&twice), ["--lr-warmup-fraction"], "{twice}");
    let twice = flags("--train-iters 9 --train-samples 72");
    assert_eq!(refused(&twice), ["--train-iters"], "{twice}");
}

#[test]
fn numbers_and_duplicate_keys_in_deepspeed_json() {
    let json = |text: &str| read_files("deepspeed", &[("ds.json", text)], Some(8));
    let texts = json(
        "{\"train_batch_size\": \"16\", \"train_micro_batch_size_per_gpu\": 2, \"bf16\": \
         {\"enabled\": \"false\"}, \"optimizer\": {\"type\": \"AdamW\", \"params\": {\"lr\": \
         \"1e-4\"}}, \"scheduler\": {\"type\": \"WarmupDecayLR\", \"params\": {\"warmup_max_lr\": \
         1e-4, \"total_num_steps\": \"1000\", \"warmup_num_steps\": 100.0}}}",
    );
    let keys = ["train_batch_size", "optimizer.params.lr", "scheduler.params.total_num_steps"];
    for key in keys.into_iter().chain(["scheduler.params.warmup_num_steps"]) {
        assert_eq!(fate(&texts, key).0, KeyStatus::Refused, "{key} in\n{texts}");
    }
    check(&texts, &[("precision.dtype", "absent")]);
    let twice = "{\"optimizer\": {\"params\": {\"lr\": 1, \"eps\": 2, \"lr\": 3}}}";
    let refusal = read_text("deepspeed", "ds.json", twice).unwrap_err();
    assert!(refusal.contains("duplicate key 'lr' at line 1 column"), "{refusal}");
    let idle = json("{\"fp16\": {\"enabled\": false, \"initial_scale_power\": 20}}");
    let text = "precision.loss_scale.init: no effect with the other keys";
    assert_eq!(fate(&idle, "fp16.initial_scale_power"), (KeyStatus::Implied, text));
    // Unsupported values were read as the supported one.
    let coupled =
        json("{\"optimizer\": {\"type\": \"Adam\", \"params\": {\"adam_w_mode\": false}}}");
    assert!(refused(&coupled).contains(&"optimizer.params.adam_w_mode"), "{coupled}");
}

const AUTO: &str = "{\"fp16\": {\"enabled\": \"auto\", \"loss_scale_window\": 500}, \"bf16\": \
    {\"enabled\": \"auto\"}, \"optimizer\": {\"type\": \"AdamW\", \"params\": {\"lr\": \"auto\", \
    \"betas\": \"auto\", \"eps\": \"auto\", \"weight_decay\": \"auto\"}}, \"scheduler\": \
    {\"type\": \"WarmupDecayLR\", \"params\": {\"warmup_min_lr\": \"auto\", \
    \"warmup_max_lr\": \"auto\", \
    \"warmup_num_steps\": \"auto\", \"total_num_steps\": \"auto\"}}, \"zero_optimization\": \
    {\"stage\": 2, \"reduce_bucket_size\": \"auto\"}, \"gradient_accumulation_steps\": \"auto\", \
    \"gradient_clipping\": \"auto\", \"train_batch_size\": \"auto\", \
    \"train_micro_batch_size_per_gpu\": \"auto\"}";

/// As filled in by `HfTrainerDeepSpeedConfig` of transformers.
#[test]
fn auto_takes_the_training_argument() {
    let run = transformers("--bf16 --warmup_steps 10 --adam_beta2 0.95 --max_grad_norm 0.5", AUTO);
    assert_eq!(refused(&run), [""; 0], "{run}");
    check(
        &run,
        &[
            ("precision.dtype", "\"bf16\""),
            ("parallel.zero", "2"),
            ("batch.global", "8"),
            ("optim.clip", "0.5"),
            ("optim.betas", "[0.9, 0.95]"),
            ("optim.lr.peak", "0.0003"),
            ("optim.lr.style", "\"linear\""),
            ("optim.lr.lag", "\"all\""),
            ("optim.lr.warmup", "{ steps = 10 }"),
            ("optim.lr.warmup_shape", "\"log\""),
            ("optim.lr.decay", "{ steps = 50 }"),
        ],
    );
    let none = transformers("", AUTO);
    check(&none, &[("precision.dtype", "absent"), ("optim.lr.warmup", "{ steps = 2 }")]);
    // Without training arguments they are not filled in.
    let alone = read_files("deepspeed", &[("ds.json", AUTO)], Some(8));
    check(&alone, &[("precision.dtype", "absent")]);
    for key in ["fp16.enabled", "bf16.enabled", "optimizer.params.lr", "train_batch_size"] {
        assert!(fate(&alone, key).1.contains("(hint: use --from hf"), "{key} in\n{alone}");
    }
    // A value of another program, here torchrun.
    let script = "torchrun --nproc_per_node auto pretrain_gpt.py --num-layers 2\n";
    let ranks = read_text("megatron", "run.sh", script).unwrap();
    let text = "the number of ranks is not fixed (hint: --ranks N)";
    assert_eq!(fate(&ranks, "--nproc_per_node"), (KeyStatus::Refused, text));
    let odd = AUTO.replace("\"stage\": 2", "\"stage\": \"auto\"");
    assert!(refused(&transformers("", &odd)).contains(&"zero_optimization.stage"));
}

/// transformers compares the values of both files.
#[test]
fn deepspeeds_keys_agree_with_the_training_arguments() {
    let json = "{\"optimizer\": {\"type\": \"AdamW\", \"params\": {\"lr\": 1e-4, \"weight_decay\": \
                0.1}}, \"bf16\": {\"enabled\": true}, \"zero_optimization\": {\"stage\": 1}}";
    let other = transformers("--weight_decay 0.1", json);
    assert_eq!(refused(&other), ["optimizer.params.lr", "bf16.enabled"], "{other}");
    let text = "expected 0.0003 as in the training arguments (learning_rate), found 0.0001 (hint: \
                \"auto\" takes the argument)";
    let found = other.fates.iter().filter(|key| key.file == "combined");
    assert!(found.into_iter().any(|key| key.text == text), "{other}");
    // DeepSpeed clips, not the trainer.
    assert_eq!(config_value(&other, "optim.clip"), "0.0");
    let same = transformers("--weight_decay 0.1 --learning_rate 1e-4 --bf16", json);
    assert_eq!(refused(&same), [""; 0], "{same}");
}
