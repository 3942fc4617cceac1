//! Runs of other systems, modelled on published scripts, and the fate of every key.

use std::fs;

use recipe::config::Config;
use recipe::import::{ConfigFormat, Imported, KeyStatus, import};
use toml::Value;

/// Imports files of the folder beside this test.
pub(crate) fn read(source: &str, files: &[&str], world: Option<u64>) -> Imported {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/import");
    let files: Vec<String> = files.iter().map(|file| format!("{folder}/{file}")).collect();
    import(source.parse::<ConfigFormat>().unwrap(), &files, world).unwrap()
}

/// Imports a text as a file of this name.
pub(crate) fn read_text(source: &str, name: &str, text: &str) -> Result<Imported, String> {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join(name);
    fs::write(&file, text).unwrap();
    let files = [file.to_str().unwrap().to_owned()];
    import(source.parse::<ConfigFormat>().unwrap(), &files, None).map_err(|error| error.to_string())
}

/// A config key, as TOML.
pub(crate) fn config_value(imported: &Imported, key: &str) -> String {
    let mut value = &Value::Table(imported.config.clone());
    for part in key.split('.') {
        let Some(inner) = value.get(part) else { return "absent".to_owned() };
        value = inner;
    }
    value.to_string()
}

pub(crate) fn check(imported: &Imported, expected: &[(&str, &str)]) {
    for (key, expected) in expected {
        assert_eq!(config_value(imported, key), *expected, "{key} in\n{imported}");
    }
}

pub(crate) fn fate<'a>(imported: &'a Imported, key: &str) -> (KeyStatus, &'a str) {
    let found = imported.fates.iter().find(|fate| fate.key == key);
    let found = found.unwrap_or_else(|| panic!("no fate of {key} in\n{imported}"));
    (found.fate, &found.text)
}

pub(crate) fn refused(imported: &Imported) -> Vec<&str> {
    let all = imported.fates.iter().filter(|key| key.fate == KeyStatus::Refused);
    all.map(|key| key.key.as_str()).collect()
}

/// Checks that the output is a valid config that divides the ranks of the run.
fn check_runs(imported: &Imported, more: &str, world: u64, micro_batches: u64) {
    let text = format!("{}\n{more}", imported.to_toml());
    let config = Config::from_toml("imported", &text).unwrap_or_else(|error| panic!("{error}"));
    let division = config.divide(world).unwrap_or_else(|refusals| panic!("{refusals:?}"));
    assert_eq!(division.micro_batches, micro_batches);
}

/// 4 samples x 16 passes x 4 GPUs / 2 that share matrices = 128, as in its JSON.
#[test]
fn cpm1_t5_is_a_batch_of_128() {
    let run = read("cpm", &["cpm1_t5.sh", "cpm1_ds_t5.json"], None);
    check(
        &run,
        &[
            ("batch.global", "128"),
            ("batch.micro", "4"),
            ("parallel.tp", "2"),
            ("model.family", "\"t5\""),
            ("model.dec_len", "384"),
            ("model.bias", "false"),
            ("model.dropout", "0.1"),
            ("optim.lr.floor_mode", "\"clamp\""),
            ("optim.lr.warmup", "{ fraction = 0.01 }"),
            ("optim.betas", "[0.9, 0.999]"),
            ("precision.loss_scale.init", "65536"),
            ("data.train", "\"/corpora/t5/baike_document\""),
        ],
    );
    // Nothing in the script sets ${reduce_scatter}.
    let doubts = vec!["condition in line 33"];
    assert_eq!((refused(&run), &run.missing[..]), (doubts, &["model.vocab"][..]));
    assert_eq!(fate(&run, "--vocab-file").0, KeyStatus::Implied);
    assert_eq!(fate(&run, "hidden-dropout"), (KeyStatus::Default, "model.dropout"));
    // `if ["${recompute}" = ...` lacks a space: the flags after it never reach the program.
    assert!(run.fates.iter().all(|key| !key.key.contains("checkpoint-activations")));
    let notes = run.notes.join("\n");
    for expected in [
        "line 36: no space between '[' and '\"${recompute}\"'",
        "line 42: 'chkp =' is a command, not an assignment",
    ] {
        assert!(notes.contains(expected), "'{expected}' is not in\n{notes}");
    }
    // A GPT with an encoder, in which two norms of the decoder are one.
    check(&run, &[("model.positions", "\"learned\""), ("model.norm", "\"layernorm\"")]);
    assert!(notes.contains("the decoder of CPM-1 has one norm"), "{notes}");
    let whole = run.to_toml().replace("[model]", "[model]\nvocab = 30000");
    let config = Config::from_toml("imported", &whole).unwrap();
    assert_eq!(config.divide(4).unwrap().micro_batches, 16);
}

/// 4 x 16 x 4 / 2 / 2 = 64.
#[test]
fn cpm1_gpt2_is_a_batch_of_64() {
    let run = read("cpm", &["cpm1_gpt2.sh"], None);
    check(
        &run,
        &[
            ("batch.global", "64"),
            ("parallel.tp", "2"),
            ("parallel.pp", "2"),
            ("parallel.recompute.mode", "\"full\""),
            ("model.bias", "true"),
            ("optim.lr.floor", "1e-5"),
        ]
        .map(|(key, expected)| (key, if expected == "1e-5" { "0.00001" } else { expected })),
    );
    assert_eq!((refused(&run), &run.missing[..]), (vec![], &["model.vocab"][..]));
    assert!(run.notes.iter().any(|note| note.contains("'checkpoint_activations' is a command")));
    let whole = run.to_toml().replace("[model]", "[model]\nvocab = 30000");
    let config = Config::from_toml("imported", &whole).unwrap();
    assert_eq!(config.divide(4).unwrap().micro_batches, 16);
}

/// 40 nodes of 8 GPUs, four for each matrix, 26 samples on each of 80 replicas.
#[test]
fn cpm2_is_a_batch_of_2080() {
    let run = read("cpm", &["cpm2.sh", "cpm2_model.json", "cpm2_ds.json"], None);
    check(
        &run,
        &[
            ("batch.global", "2080"),
            ("batch.micro", "26"),
            ("parallel.zero", "1"),
            ("parallel.reduce", "\"ring\""),
            ("model.family", "\"t5\""),
            ("model.vocab", "51968"),
            ("model.init.std", "0.001"),
            ("model.dropout", "0.0"),
            ("data.objective", "\"encdec\""),
            ("data.tokenizer", "\"encdec:/home/cpm2/bpe_cn_en\""),
            ("optim.lr.style", "\"inverse-sqrt\""),
            // 0.001 / sqrt(0.05 x 200000)
            ("optim.lr.peak", "0.00001"),
            // --no-load-optim has no effect without --load.
            ("checkpoint.load_parts", "absent"),
        ],
    );
    assert_eq!((refused(&run), run.missing.len()), (vec![], 0), "{run}");
    assert!(fate(&run, "num_decoder_layers").1.contains("CPM-2 ignores it"));
    check_runs(&run, "", 320, 1);
}

/// `AnnealingLR` of CPM-2 counts from the end of the warm-up, over the whole decay.
#[test]
fn cpm2_decays_as_its_program() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/import");
    let script = fs::read_to_string(format!("{folder}/cpm2.sh")).unwrap();
    let line = (|part| 1.0 - part) as fn(f64) -> f64;
    let arc = (|part| 0.5 * (1.0 + (std::f64::consts::PI * part).cos())) as fn(f64) -> f64;
    for (style, height) in [("linear", line), ("cosine", arc)] {
        let home = tempfile::tempdir().unwrap();
        let file = home.path().join("run.sh").display().to_string();
        fs::write(&file, script.replace("style noam", &format!("style {style}"))).unwrap();
        let others = ["cpm2_model.json", "cpm2_ds.json"].map(|name| format!("{folder}/{name}"));
        let run = import(ConfigFormat::Cpm, &[&[file][..], &others].concat(), None).unwrap();
        assert_eq!(refused(&run), [""; 0], "{run}");
        let config = Config::from_toml("imported", &run.to_toml()).unwrap();
        let rate = recipe::lr::LearningRate::new(&config);
        for step in [1, 9_999, 10_000, 10_001, 100_000, 189_999, 195_000, 199_999] {
            let warm = step as f64 / 10_000.0;
            let part = (step as f64 - 10_000.0) / 200_000.0;
            let expected = 1e-3 * if step <= 10_000 { warm } else { height(part) };
            let found = rate.at(step * config.batch.global);
            assert!(
                (found - expected).abs() < 1e-15,
                "{style} at {step}: {found}, expected {expected}"
            );
        }
    }
}

#[test]
fn megatron_175b_is_imported_completely() {
    let run = read("megatron", &["megatron_175b.sh"], None);
    check(
        &run,
        &[
            ("batch.global", "1536"),
            ("batch.rampup", "{ increment = 16, samples = 5859375, start = 16 }"),
            ("parallel.virtual_stages", "2"),
            ("parallel.schedule", "\"interleaved\""),
            ("parallel.sequence_parallel", "true"),
            ("parallel.zero", "1"),
            ("optim.lr.floor_mode", "absent"),
            ("optim.lr.warmup", "{ fraction = 0.001 }"),
            ("model.vocab", "50257"),
            ("checkpoint.load", "\"auto\""),
            ("run.dir", "\"/ckpt/gpt3\""),
        ],
    );
    assert_eq!((refused(&run), run.missing.len()), (vec![], 0), "{run}");
    assert_eq!(run.config["data"]["train"].as_array().unwrap().len(), 2);
    check_runs(&run, "", 128, 1536);
}

/// A threshold that DeepSpeed's examples misspell in two ways, without effect.
#[test]
fn unknown_keys_are_refused_with_the_nearest_known_key() {
    let run = read("deepspeed", &["deepspeed_zero3.json"], None);
    let section = "zero_optimization.stage3_param_";
    let names = ["persitance_threshold", "persitence_threshold"].map(|it| format!("{section}{it}"));
    assert_eq!(refused(&run), names);
    for name in names {
        let expected = "unknown key (hint: did you mean 'stage3_param_persistence_threshold'?)";
        assert_eq!(fate(&run, &name), (KeyStatus::Refused, expected));
    }
    check(
        &run,
        &[
            ("parallel.zero", "3"),
            ("precision.dtype", "\"bf16\""),
            ("optim.lr.style", "\"linear\""),
            ("optim.lr.warmup_shape", "\"log\""),
            ("optim.lr.start", "0.00001"),
            ("optim.lr.floor", "0.00001"),
            ("optim.lr.decay", "{ steps = 1000 }"),
        ],
    );
    assert!(run.missing.contains(&"model.layers"));
    // 64 = 4 x 2 x 8.
    assert_eq!(refused(&read("deepspeed", &["deepspeed_zero3.json"], Some(8))).len(), 2);
    let wrong = read("deepspeed", &["deepspeed_zero3.json"], Some(4));
    let text = fate(&wrong, "batch.global").1;
    assert_eq!(text, "expected micro 4 x accumulation 2 x dp 4 = 32, found 64");
}

#[test]
fn deepspeed_schedules_are_imported() {
    let schedule = |scheduler: &str| {
        let text = format!(
            "{{\"train_micro_batch_size_per_gpu\": 4, {scheduler} \"optimizer\": {{\"type\": \
             \"AdamW\", \"params\": {{\"lr\": 0.002}}}}}}"
        );
        read_text("deepspeed", "ds.json", &text).unwrap()
    };
    let none = schedule("");
    check(&none, &[("optim.lr.style", "\"constant\""), ("optim.lr.peak", "0.002")]);
    check(&none, &[("optim.clip", "0.0"), ("optim.lr.warmup", "{ steps = 0 }")]);
    let cosine = schedule(
        "\"scheduler\": {\"type\": \"WarmupCosineLR\", \"params\": {\"total_num_steps\": 500, \
         \"warmup_num_steps\": 50, \"warmup_type\": \"linear\", \"warmup_min_ratio\": 0.1}},",
    );
    check(&cosine, &[("optim.lr.start", "0.0002"), ("optim.lr.warmup_shape", "\"linear\"")]);
    check(&cosine, &[("optim.lr.warmup", "{ steps = 50 }")]);
    let floor = cosine.config["optim"]["lr"]["floor"].as_float().unwrap();
    assert!((floor - 2e-7).abs() < 1e-18, "{floor}");
    let test = schedule(
        "\"scheduler\": {\"type\": \"LRRangeTest\", \"params\": {\"lr_range_test_min_lr\": 0.001, \
         \"lr_range_test_step_size\": 200, \"lr_range_test_step_rate\": 5}},",
    );
    check(&test, &[("optim.lr.style", "\"range-test\""), ("optim.lr.floor", "0.001")]);
    check(&test, &[("optim.lr.peak", "0.006"), ("optim.lr.decay", "{ steps = 200 }")]);
    let cycle = schedule("\"scheduler\": {\"type\": \"OneCycle\", \"params\": {}},");
    assert!(fate(&cycle, "scheduler.type").1.contains("optim.lr.style: expected WarmupLR or"));
}

/// 4 x 2 replicas, 8 samples each, in micro-batches of 4.
#[test]
fn paddle_reads_its_base() {
    let run = read("paddle", &["paddle_1.3b.yaml"], None);
    check(
        &run,
        &[
            ("batch.global", "64"),
            ("batch.micro", "4"),
            ("parallel.zero", "1"),
            ("precision.dtype", "\"fp16\""),
            ("precision.loss_scale.init", "32768.0"),
            ("optim.lr.peak", "0.00005"),
            ("data.split", "[949, 50, 1]"),
            ("run.seed", "1024"),
        ],
    );
    // A folder of Paddle's files is no corpus here before it is converted.
    let data = "Data.Train.dataset.input_dir";
    assert_eq!((refused(&run), &*run.missing), (vec![data], &["data.train"][..]), "{run}");
    let convert = "`feedline convert ./data/NAME ./data/converted`";
    assert!(fate(&run, data).1.contains(convert), "{run}");
    assert_eq!(config_value(&run, "data.train"), "absent");
    assert_eq!(fate(&run, "Model.recompute_granularity"), (KeyStatus::Implied, "not set"));
    let mut converted = run.clone();
    let of_data = converted.config["data"].as_table_mut().unwrap();
    of_data.insert("train".to_owned(), "data/converted".into());
    check_runs(&converted, "", 8, 2);
}

/// Scripts also start programs of DeepSpeed and Hugging Face, with a JSON file.
#[test]
fn scripts_of_each_system_are_read() {
    let folder = tempfile::tempdir().unwrap();
    let files = |source: &str, script: &str, json: &str| {
        let write = |name: &str, text: &str| {
            let path = folder.path().join(name);
            fs::write(&path, text).unwrap();
            path.to_str().unwrap().to_owned()
        };
        let files = [write("run.sh", script), write("ds.json", json)];
        import(source.parse::<ConfigFormat>().unwrap(), &files, None).unwrap()
    };
    let gpt = "deepspeed --num_nodes 2 --num_gpus 4 pretrain_gpt2.py --num-layers 4 \
               --hidden-size 64 --num-attention-heads 4 --seq-length 32 \
               --max-position-embeddings 32 --batch-size 4 \
               --train-iters 100 --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --vocab-size 500 \
               --lr-decay-iters 100 --warmup 0.01 --data-path d --split 100,0,0 --eval-iters -1 \
               --deepspeed --deepspeed_config $(pwd)/ds.json\n";
    let json = "{\"train_micro_batch_size_per_gpu\": 4, \"gradient_accumulation_steps\": 2, \
                \"zero_optimization\": {\"stage\": 2}, \"optimizer\": {\"type\": \"Adam\", \
                \"params\": {\"lr\": 0.001}}}";
    let run = files("deepspeed", gpt, json);
    check(
        &run,
        &[
            ("batch.global", "64"),
            ("parallel.zero", "2"),
            ("eval", "{ every = 0 }"),
            // The schedule of the program, not that of DeepSpeed.
            ("optim.lr.style", "\"cosine\""),
            ("optim.lr.floor", "0.0001"),
            ("optim.lr.warmup_shape", "absent"),
        ],
    );
    assert_eq!((refused(&run), run.missing.len()), (vec![], 0), "{run}");
    assert!(run.notes.iter().all(|note| !note.contains("add it to the command line")), "{run}");
    // The checks of the config run although keys are missing.
    let offloaded = "{\"train_micro_batch_size_per_gpu\": 4, \"zero_optimization\": {\"stage\": 3, \
                     \"offload_optimizer\": {\"device\": \"cpu\"}}}";
    let alone = read_text("deepspeed", "ds.json", offloaded).unwrap();
    assert!(alone.missing.contains(&"model.layers"));
    let text = fate(&alone, "config").1;
    assert!(text.contains("optim.offload: expected parallel.zero of 0 or 1, found 3"), "{text}");

    let t5 = "torchrun --nproc_per_node 4 run.py --model_name_or_path t5-base --do_train \
              --per_device_train_batch_size 16 --gradient_accumulation_steps 8 --learning_rate \
              0.001 --lr_scheduler_type constant --max_steps 1000 --max_source_length 512 \
              --max_target_length 128 --gradient_checkpointing --save_total_limit 1 --deepspeed \
              ds.json\n";
    let run = files("hf", t5, "{\"zero_optimization\": {\"stage\": 3}}");
    check(
        &run,
        &[
            ("batch.global", "512"),
            ("model.dec_len", "128"),
            ("parallel.zero", "3"),
            ("parallel.recompute.mode", "\"full\""),
            ("checkpoint.keep.last", "1"),
        ],
    );
    assert_eq!(refused(&run), ["--model_name_or_path"], "{run}");
    let odd = gpt.replace("--num-layers 4", "--num-layers 4 --tensor-model-parallel-size 16");
    let odd = files("megatron", &odd, "{}");
    assert_eq!(fate(&odd, "parallel").1, "expected a multiple of tp 16 x pp 1 ranks, found 8");
    // Flags of Yuan's script that Megatron did not have then.
    let flags = "--encoder-attn-mask-type padding --tensorboard-log-interval 1 --num-layers";
    let yuan = files("megatron", &gpt.replace("--num-layers", flags), "{}");
    for key in ["--encoder-attn-mask-type", "--tensorboard-log-interval"] {
        assert_eq!(fate(&yuan, key).0, KeyStatus::Implied, "{key}");
    }
}

/// 8 samples of a replica in four micro-batches.
#[test]
fn colossal_is_read_as_data() {
    let run = read("colossal", &["colossal_pp1d.py"], Some(8));
    check(
        &run,
        &[
            ("batch.global", "16"),
            ("batch.micro", "2"),
            ("parallel.tp", "2"),
            ("parallel.pp", "2"),
            ("model.layers", "12"),
            ("precision.dtype", "\"fp16\""),
            ("optim.clip", "0.0"),
        ],
    );
    let missing = &["run.budget", "data.train"][..];
    assert_eq!((refused(&run), &run.missing[..]), (vec!["NUM_EPOCHS"], missing), "{run}");
    assert_eq!(fate(&run, "TENSOR_SHAPE").0, KeyStatus::Implied);
    // An import may span several lines.
    let text = "from a import (B,\n               GPT2_small_pipeline_hybrid)\nimport d\n\
                SEQ_LEN = 16\nmodel = dict(type=GPT2_small_pipeline_hybrid)\n";
    let expected = [("model.seq_len", "16"), ("model.layers", "12")];
    check(&read_text("colossal", "a.py", text).unwrap(), &expected);
    let whole = run.to_toml().replace("[run]", "[run]\nbudget = { steps = 9 }");
    let whole = format!("{whole}\n[data]\ntrain = 'd'\n");
    let config = Config::from_toml("imported", &whole).unwrap();
    assert_eq!(config.divide(8).unwrap().micro_batches, 4);
}

#[test]
fn hugging_face_model_and_arguments_are_read() {
    let run = read("hf", &["hf_t5.json", "hf_training.json"], Some(4));
    check(
        &run,
        &[
            // 16 x 8 x 4
            ("batch.global", "512"),
            ("model.family", "\"t5\""),
            ("model.activation", "\"geglu-tanh\""),
            ("model.tie_embeddings", "false"),
            ("model.seq_len", "512"),
            ("model.dec_len", "128"),
            ("optim.lr.style", "\"constant\""),
            ("optim.weight_decay", "0.0"),
            ("eval.every", "0"),
        ],
    );
    assert_eq!((refused(&run), &run.missing[..]), (vec!["dataset_name"], &["data.train"][..]));
    let llama = read("hf", &["hf_llama.json"], None);
    check(
        &llama,
        &[
            ("model.norm", "\"rmsnorm\""),
            ("model.positions", "\"rope\""),
            ("model.activation", "\"swiglu\""),
            ("model.bias", "false"),
        ],
    );
    assert_eq!(refused(&llama), ["model.heads"], "4 of 32 keys");
}

#[test]
fn flags_of_the_first_megatron_differ_from_current_ones() {
    let flags = |flags: &str| {
        let base = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 \
                    --max-position-embeddings 32 --train-iters 100 --lr 1e-3 --data-path d \
                    --tokenizer-type GPT2BPETokenizer --lr-decay-style cosine";
        read_text("megatron", "flags.txt", &format!("{base} \\\n  {flags}\n")).unwrap()
    };
    let old = flags("--batch-size 8 --warmup .01 --min-lr 1e-4");
    check(&old, &[("optim.lr.floor_mode", "\"clamp\""), ("batch.global", "8")]);
    check(&old, &[("optim.lr.warmup", "{ fraction = 0.01 }"), ("eval.every", "1000")]);
    let new = flags("--micro-batch-size=8 --global-batch-size 64 --lr-warmup-samples 320");
    check(&new, &[("optim.lr.floor_mode", "absent"), ("batch.global", "64")]);
    check(&new, &[("optim.lr.warmup", "{ samples = 320 }"), ("optim.weight_decay", "0.01")]);
    // With an underscore, duplicate, unknown, of another program, and from outside.
    let odd = flags("--micro_batch_size 2 --micro-batch-size 4 --clip_gard 1.0 --num-experts 8");
    check(&odd, &[("batch.micro", "4")]);
    assert!(fate(&odd, "--clip_gard").1.contains("did you mean 'clip-grad'?"));
    assert_eq!(
        fate(&odd, "--num-experts"),
        (KeyStatus::Refused, "mixture of experts is not supported")
    );
    let outside = flags("--micro-batch-size 2 --save $WHERE");
    assert!(fate(&outside, "--save").1.contains("comes from outside the script"), "{outside}");
    let drops = "--micro-batch-size 2 --global-batch-size 2 --hidden-dropout 0.1";
    let drops = flags(&format!("{drops} --attention-dropout 0"));
    assert_eq!(refused(&drops), [""; 0]);
    check(&drops, &[("model.dropout", "0.1"), ("model.attention_dropout", "0")]);
    check_runs(&drops, "", 1, 1);
    let default = flags("--micro-batch-size 2");
    check(&default, &[("model.dropout", "0.1"), ("model.attention_dropout", "0.1")]);
    let gpt2 = |more: &str| {
        let text = format!("{{\"model_type\": \"gpt2\", \"attn_pdrop\": 0.2, {more}}}");
        read_text("hf", "config.json", &text).unwrap()
    };
    let same = gpt2("\"embd_pdrop\": 0.3, \"resid_pdrop\": 0.3");
    check(&same, &[("model.dropout", "0.3"), ("model.attention_dropout", "0.2")]);
    assert!(!refused(&same).contains(&"model.dropout"), "{same}");
    let other = gpt2("\"embd_pdrop\": 0.1, \"resid_pdrop\": 0.3");
    assert!(refused(&other).contains(&"model.dropout"), "{other}");
}

/// Settings that two programs of a run give separately; and two flags that belong together.
#[test]
fn duplicate_settings_are_merged() {
    // Progress lines of DeepSpeed besides those of the program: CPM-1's JSON has 10, its script 1.
    let run = read("cpm", &["cpm1_t5.sh", "cpm1_ds_t5.json"], None);
    check(&run, &[("log.every", "1")]);
    assert_eq!(
        fate(&run, "steps_per_print"),
        (KeyStatus::Implied, "the log interval of the program is used")
    );
    let alone = read("deepspeed", &["deepspeed_zero3.json"], None);
    check(&alone, &[("log.every", "10")]);
    assert_eq!(fate(&alone, "steps_per_print"), (KeyStatus::Mapped, "log.every"));

    let folder = tempfile::tempdir().unwrap();
    let both = |flag: &str, json: &str| {
        let base = "deepspeed --num_gpus 1 pretrain_gpt2.py --num-layers 4 --hidden-size 64 \
                    --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 \
                    --train-iters 100 --lr 1e-3 --data-path d --deepspeed_config ds.json";
        let write = |name: &str, text: &str| {
            let path = folder.path().join(name);
            fs::write(&path, text).unwrap();
            path.to_str().unwrap().to_owned()
        };
        let files = [write("run.sh", &format!("{base} {flag}\n")), write("ds.json", json)];
        import(ConfigFormat::Deepspeed, &files, None).unwrap()
    };
    let micro = "{\"train_micro_batch_size_per_gpu\": 8, \"gradient_clipping\": 1.0}";
    let other = both("--batch-size 4 --clip-grad 1", micro);
    check(&other, &[("batch.micro", "4")]);
    let expected = "expected equal values, found 8 in JSON and --batch-size 4";
    assert_eq!(fate(&other, "batch.micro"), (KeyStatus::Refused, expected));
    // A whole number is that number.
    assert_eq!(refused(&other), ["batch.micro"], "{other}");
    let same = both("--batch-size 8", micro);
    assert_eq!((refused(&same), same.missing.len()), (vec![], 0), "{same}");
    // The default of its program, which has a known vocabulary.
    check(&same, &[("data.tokenizer", "\"gpt2\""), ("model.vocab", "50257")]);
    assert_eq!(fate(&same, "tokenizer-type").0, KeyStatus::Default);

    let reset = both("--batch-size 8 --reset-position-ids --reset-attention-mask", micro);
    check(&reset, &[("data.reset_at_document", "true")]);
    let half = both("--batch-size 8 --reset-position-ids", micro);
    check(&half, &[("data.reset_at_document", "absent")]);
    assert_eq!(refused(&half), ["data.reset_at_document"]);
}

/// What the programs compute without a flag.
#[test]
fn models_equal_those_of_their_programs() {
    // CPM-1: the exact GELU unless it is fused, and a GPT-2 that uses few of its flags.
    let gpt2 = read("cpm", &["cpm1_gpt2.sh"], None);
    check(&gpt2, &[("model.activation", "\"gelu\""), ("model.bias", "true")]);
    let script =
        fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/import/cpm1_gpt2.sh"));
    let script = script.unwrap().replace("--hidden-bias", "--bias-gelu-fusion");
    let script = script.replace("--ff-hidden-size 1024", "--ff-hidden-size 512");
    let other = read_text("cpm", "run.sh", &script).unwrap();
    check(&other, &[("model.activation", "absent"), ("model.bias", "true")]);
    check(&other, &[("model.ffn", "1024")]);
    let note = "the GPT-2 of CPM-1 ignores --ff-hidden-size: model.ffn is 1024";
    assert!(other.notes.iter().any(|text| text == note), "{other}");

    let flags = |flags: &str| {
        let base = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 \
                    --max-position-embeddings 32 --train-iters 100 --lr 1e-3 --micro-batch-size 2";
        read_text("megatron", "flags.txt", &format!("{base} {flags}\n")).unwrap()
    };
    let gpt = "--tokenizer-type GPT2BPETokenizer --data-path d";
    check(&flags(gpt), &[("model.activation", "absent"), ("model.vocab", "50257")]);
    let exact = flags(&format!("{gpt} --no-bias-gelu-fusion"));
    check(&exact, &[("model.activation", "\"gelu\"")]);
    let turned = flags(&format!("{gpt} --global-batch-size 2 --rotary-base 500000"));
    assert!(
        fate(&turned, "config").1.contains("rope_theta: only valid with positions"),
        "{turned}"
    );
    let own = flags(&format!("{gpt} --vocab-file a/vocab.json --merge-file a/merges.txt"));
    let expected =
        [("data.tokenizer", "\"gpt2:a/vocab.json,a/merges.txt\""), ("model.vocab", "absent")];
    check(&own, &expected);
    // The first Megatron trained on text.
    let first = flags("--tokenizer-type GPT2BPETokenizer --train-data wikipedia --cache-dir cache");
    assert_eq!((refused(&first), &first.missing[..]), (vec!["--train-data"], &["data.train"][..]));

    // Another path than its own is a checkpoint of another program.
    let other = flags(&format!("{gpt} --save a --load b --finetune"));
    assert!(fate(&other, "checkpoint.load").1.contains("`feedline ckpt import b OUT"), "{other}");

    // titans has its own sizes, and dropout except in its pipelines.
    let builder = |name: &str, more: &str| {
        let text = format!("BATCH_SIZE = 1\nSEQ_LEN = 64\n{more}model = dict(type={name})\n");
        read_text("colossal", "config.py", &text).unwrap()
    };
    let large = builder("gpt2_large", "");
    check(&large, &[("model.hidden", "1536"), ("model.heads", "12"), ("model.dropout", "0.1")]);
    check(&large, &[("model.activation", "\"gelu\"")]);
    let pipeline = builder("GPT2_exlarge_pipeline_hybrid", "");
    check(&pipeline, &[("model.heads", "32"), ("model.dropout", "0.0")]);
    let scale = builder("gpt.gpt2_8B", "fp16 = dict(mode=AMP, initial_scale=2**5 * 2)\n");
    check(&scale, &[("precision.loss_scale.init", "64"), ("model.layers", "72")]);
    let nvme = "zero = dict(level=3, dynamic_loss_scale=True, clip_grad=1.0,\n    \
                offload_optimizer_config=dict(device='nvme', nvme_path='/n', pipeline=False),\n    \
                offload_param_config=dict(device='nvme', max_in_cpu=1e9),\n    \
                aio_config=dict(block_size=1048576))\n";
    let nvme = builder("gpt2_small", nvme);
    check(&nvme, &[("optim.offload", "\"nvme:/n\""), ("optim.clip", "1.0")]);
    // Weights on a disk, and ZeRO-3 with an optimizer on a disk.
    assert_eq!(refused(&nvme), ["zero.offload_param_config.device", "config"], "{nvme}");
}

/// Megatron's `examples/bert` and `examples/t5`, shortened, and ERNIE of Paddle.
#[test]
fn masking_settings_are_imported() {
    let script = |program: &str, flags: &str| {
        let base = "--num-layers 12 --hidden-size 768 --num-attention-heads 12 --train-iters 100 \
                    --micro-batch-size 4 --global-batch-size 16 --lr 1e-4 --vocab-size 30522 \
                    --data-path my-bert_text_sentence --tokenizer-type BertWordPieceLowerCase \
                    --vocab-file /data/vocab.txt --attention-dropout 0 --hidden-dropout 0";
        let text = format!("torchrun {program} {base} {flags}\n");
        read_text("megatron", "run.sh", &text).unwrap()
    };
    let bert = script("pretrain_bert.py", "--seq-length 512 --mask-prob 0.2 --short-seq-prob 0.05");
    check(
        &bert,
        &[
            ("model.family", "\"bert\""),
            ("data.tokenizer", "\"BertWordPieceLowerCase:/data/vocab.txt\""),
            ("data.mask_prob", "0.2"),
            ("data.short_seq_prob", "0.05"),
            ("data.sentence_order", "absent"),
        ],
    );
    // All except the position of its norms.
    assert_eq!((refused(&bert), bert.missing.len()), (vec!["model.family"], 0), "{bert}");
    let alone = script("pretrain_bert.py", "--seq-length 512 --bert-no-binary-head");
    check(&alone, &[("data.sentence_order", "false")]);
    assert_eq!(refused(&alone), ["model.family"], "{alone}");
    let t5 = |more: &str| {
        let flags = "--encoder-seq-length 512 --decoder-seq-length 128 --vocab-extra-ids 100";
        script("pretrain_t5.py", &format!("{flags} {more}"))
    };
    let megatrons = [("positions", "\"learned\""), ("norm", "\"layernorm\""), ("bias", "true")];
    let learned = t5("");
    check(&learned, &[("model.family", "\"t5\""), ("model.dec_len", "128")]);
    check(&learned, &[("model.activation", "\"gelu-tanh\""), ("model.tie_embeddings", "true")]);
    check(&learned, &megatrons.map(|(key, expected)| (&*format!("model.{key}").leak(), expected)));
    // The vocabulary file has no sentinels, and the run needs their ids.
    assert_eq!(refused(&learned), ["--vocab-extra-ids"], "{learned}");
    let relative = t5("--position-embedding-type relative --disable-bias-linear --swiglu");
    check(&relative, &[("model.positions", "\"relative-bias\""), ("model.bias", "false")]);
    check(&relative, &[("model.activation", "\"swiglu\""), ("model.norm", "\"layernorm\"")]);
    assert!(relative.notes.iter().any(|note| note.contains("not scaled here")), "{relative}");
    assert_eq!(refused(&relative), ["--vocab-extra-ids"], "{relative}");

    let ernie = "Global:\n  seed: 1024\n  binary_head: True\n  local_batch_size: 8\n  \
                 micro_batch_size: 8\nEngine:\n  max_steps: 500\nModel:\n  module: ErnieModule\n  \
                 name: Ernie\n  vocab_size: 40000\n  hidden_size: 768\n  num_hidden_layers: 12\n  \
                 num_attention_heads: 12\n  intermediate_size: 3072\n  hidden_act: gelu\n  \
                 hidden_dropout_prob: 0.0\n  attention_probs_dropout_prob: 0.0\n  \
                 type_vocab_size: 4\n  pad_token_id: 0\n  use_task_id: False\nData:\n  Train:\n    \
                 dataset:\n      name: ErnieDataset\n      input_dir: ernie_ids\n      \
                 max_seq_length: 512\n      masked_lm_prob: 0.15\n      short_seq_prob: 0.1\n      \
                 favor_longer_ngram: False\n      max_ngrams: 5\nOptimizer:\n  lr:\n    \
                 max_lr: 0.0001\n";
    let paddle = read_text("paddle", "ernie.yaml", ernie).unwrap();
    check(
        &paddle,
        &[
            ("model.family", "\"bert\""),
            ("model.token_types", "4"),
            ("data.objective", "\"mlm\""),
            ("data.mask_ngram_max", "5"),
            ("data.special.pad", "0"),
        ],
    );
    let data = "Data.Train.dataset.input_dir";
    assert_eq!((refused(&paddle), &*paddle.missing), (vec![data], &["data.train"][..]), "{paddle}");
    let tasks = ernie.replace("use_task_id: False", "use_task_id: True");
    let tasks = read_text("paddle", "ernie.yaml", &tasks).unwrap();
    assert_eq!(refused(&tasks), [data, "Model.use_task_id"]);
}

#[test]
fn scripts_are_interpreted_as_by_bash() {
    let script = |text: &str| read_text("megatron", "run.sh", text);
    let run = script(
        "N=${1:-3}\nM=$((2*$N))\nodd='--lr 5'\nif [ -n \"$N\" ] && true; then\n  A=--bf16\nelse\n  \
         A=--fp16\nfi\ncat <<EOF > ds.json\n{ \"a\": \"b'\n}\nEOF\n\
         ARGS=(--num-layers $M # layers\n  --lr 1e-3)\nARGS+=(--seed 7)\n\
         [[ $M == 6 ]] && echo six\nsrun python train.py \"${ARGS[@]}\" $A 2>&1 | tee log\n",
    );
    let run = run.unwrap();
    check(&run, &[("model.layers", "6"), ("optim.lr.peak", "0.001"), ("run.seed", "7")]);
    check(&run, &[("precision.dtype", "\"bf16\"")]);
    // It has no arguments, and the output of commands is unknown.
    let run = script(
        "D=$(dirname $(realpath $0))\nW=`nvidia-smi -L | wc -l`\nif [[ -z $1 ]]; then\n  L=4\n\
         else\n  L=$1\nfi\nsrun python train.py --num-layers $L --data-path $(cat paths.txt) \
         --save $D/ckpt --seed $W --vocab-file $HOME/vocab\n",
    );
    let run = run.unwrap();
    check(&run, &[("model.layers", "4"), ("data.train", "absent"), ("run.seed", "absent")]);
    let mut outside = vec!["--data-path", "--save", "--seed"];
    // The only environment variable that is read.
    outside.extend(std::env::var("HOME").is_err().then_some("--vocab-file"));
    assert_eq!(refused(&run), outside, "{run}");
    assert!(fate(&run, "--save").1.contains("${dirname_$(realpath_$0)}/ckpt comes from"), "{run}");
    for (text, expected) in [
        ("select i in 1 2; do python a.py; done\n", "line 1: not a statement of bash"),
        ("echo 'open\n", "unclosed quote or parenthesis"),
        ("N=1\n", "expected JSON, flags, or a script that runs a Python program"),
        ("else\n", "line 1: not a statement of bash"),
    ] {
        let refusal = script(text).unwrap_err();
        assert!(refusal.contains(expected) && refusal.contains("run.sh"), "{text}: {refusal}");
    }
    // Endless doubling.
    let mut bomb = String::from("A=xxxxxxxxxxxxxxxx\n");
    bomb.push_str(&"A=$A$A\n".repeat(64));
    assert!(script(&bomb).unwrap_err().contains("is longer than 1048576 bytes"));
}

#[test]
fn files_that_cannot_be_read_are_refused_by_their_line() {
    for (source, name, text, expected) in [
        ("deepspeed", "a.json", "{\"a\": }", "expected value at line 1 column 7"),
        ("deepspeed", "a.json", "[1]", "expected JSON"),
        ("hf", "a.json", "model_type: gpt2", "expected JSON"),
        (
            "paddle",
            "a.yaml",
            "Global:\n  - a: 1\n    b: 2\n",
            "line 2: lists of mappings are not supported",
        ),
        ("paddle", "a.yaml", "a:\n    b: 1\n  c: 2\n", "line 3: indentation matches no mapping"),
        (
            "paddle",
            "a.yaml",
            "a: &x 1\n",
            "line 1: expected a mapping, a list or a scalar, found '&x 1'",
        ),
        ("paddle", "a.yaml", "a: 1\na: 2\n", "line 2: duplicate key"),
        ("paddle", "a.yaml", "a:1\n", "line 1: expected a space after ':'"),
        ("paddle", "a.yaml", "\ta: 1\n", "line 1: tab in the indentation"),
        ("paddle", "a.yaml", "_base_: a.yaml\n", "_base_ is nested more than 16 files deep"),
        ("colossal", "a.py", "def f():\n    pass\n", "line 1: expected 'NAME = value'"),
        ("colossal", "a.py", "A = [1, 2\n", "line 1: unclosed bracket"),
        ("colossal", "a.py", "A = dict(x=1 y=2)\n", "expected ',' or ')'"),
        ("colossal", "a.py", "A = 1 // 0\n", "1 // 0 is not a number"),
        ("colossal", "a.py", "A = 3 if x else 4\n", "unexpected 'if x else 4' after the value"),
    ] {
        let refusal = read_text(source, name, text).unwrap_err();
        assert!(refusal.contains(expected) && refusal.contains(name), "{text}: {refusal}");
    }
    let deep = format!("A = {}1{}\n", "[".repeat(100), "]".repeat(100));
    assert!(
        read_text("colossal", "a.py", &deep)
            .unwrap_err()
            .contains("values nested more than 32 deep")
    );
    for depth in [100, 20_000] {
        let deep = format!("a: {}1{}\n", "[".repeat(depth), "]".repeat(depth));
        let refusal = read_text("paddle", "a.yaml", &deep).unwrap_err();
        assert!(refusal.contains("line 1: lists nested more than 32 deep"), "{refusal}");
        let deep = format!("a:\n  - {}1{}\n", "[".repeat(depth), "]".repeat(depth));
        assert!(
            read_text("paddle", "a.yaml", &deep)
                .unwrap_err()
                .contains("lists nested more than 32 deep")
        );
        // Each key of a mapping is a mapping.
        let deep = format!("A = {}1{}\n", "{".repeat(depth), "}".repeat(depth));
        assert!(
            read_text("colossal", "a.py", &deep)
                .unwrap_err()
                .contains("values nested more than 32 deep")
        );
        let deep = format!("{}1{}", "[".repeat(depth), "]".repeat(depth));
        let json = format!("{{\"a\": {deep}}}");
        let depth_max = if depth > 128 { "recursion limit" } else { "" };
        let read = read_text("deepspeed", "a.json", &json);
        assert!(read.map_or_else(|refusal| refusal.contains(depth_max), |_| depth < 128));
    }
    let escapes = read_text("paddle", "a.yaml", "a: &\u{1b}[2J\n").unwrap_err();
    assert!(!escapes.contains('\u{1b}') && escapes.contains("\\u{1b}[2J"), "{escapes}");
    let deep: String = (0..100).map(|depth| format!("{}a:\n", " ".repeat(depth))).collect();
    assert!(
        read_text("paddle", "a.yaml", &deep)
            .unwrap_err()
            .contains("mappings nested more than 32 deep")
    );
}

/// The examples of the guides are in this folder, and the output can be parsed.
#[test]
fn the_output_is_toml_with_the_fates_as_comments() {
    for (source, files) in [
        ("cpm", &["cpm1_gpt2.sh"][..]),
        ("cpm", &["cpm2.sh", "cpm2_model.json", "cpm2_ds.json"]),
        ("megatron", &["megatron_175b.sh"]),
        ("deepspeed", &["deepspeed_zero3.json"]),
        ("paddle", &["paddle_1.3b.yaml"]),
        ("colossal", &["colossal_pp1d.py"]),
        ("hf", &["hf_t5.json", "hf_training.json"]),
    ] {
        let run = read(source, files, None);
        let text = run.to_string();
        let again: toml::Table = text.parse().unwrap_or_else(|error| panic!("{error}\n{text}"));
        assert_eq!(again, run.config, "{source}");
        for key in &run.fates {
            assert!(text.contains(&key.key) && text.contains(&key.text), "{}", key.key);
        }
    }
}
