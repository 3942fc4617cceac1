//! Plans, compared with published counts and with arithmetic by hand.

use recipe::config::Config;
use recipe::plan::{PlanInputs, RunPlan};

fn config(sets: &[&str]) -> Config {
    let folder = tempfile::tempdir().expect("make a folder");
    let file = folder.path().join("c.toml");
    let text = "[run]\ndir = 'r'\nbudget = { steps = 800 }\n\
                [model]\nlayers = 4\nhidden = 128\nheads = 4\nvocab = 50257\nseq_len = 64\n\
                [data]\ntrain = 'd'\n[batch]\nglobal = 16\nmicro = 4\n[optim.lr]\npeak = 1e-3\n\
                [checkpoint]\nevery.steps = 100\n";
    std::fs::write(&file, text).expect("write a config");
    let sets: Vec<String> = sets.iter().map(|set| (*set).to_owned()).collect();
    Config::load(file.to_str().expect("a UTF-8 path"), &sets).expect("a good config")
}

/// Hugging Face's `gpt2`, `gpt2-medium`, `gpt2-large` and `gpt2-xl`.
#[test]
fn parameter_counts_equal_the_published_models() {
    for (layers, hidden, heads, published) in [
        (12, 768, 12, 124_439_808),
        (24, 1024, 16, 354_823_168),
        (36, 1280, 20, 774_030_080),
        (48, 1600, 25, 1_557_611_200),
    ] {
        let config = config(&[
            &format!("model.layers={layers}"),
            &format!("model.hidden={hidden}"),
            &format!("model.heads={heads}"),
            "model.seq_len=1024",
        ]);
        let plan = RunPlan::new(&config, &PlanInputs::default());
        assert_eq!(plan.parameters.total, published);
        // In memory the vocabulary of 50,257 has 50,304 rows.
        assert_eq!(plan.stages[0].parameters, published + 47 * hidden);
        assert_eq!(plan.memory_bytes.weights, 4 * (published + 47 * hidden));
    }
}

#[test]
fn components_add_up() {
    let plan = RunPlan::new(&config(&[]), &PlanInputs::default());
    let all = plan.parameters;
    assert_eq!((all.word_embedding, all.head), (50_257 * 128, 0));
    assert_eq!(all.position_embedding, 64 * 128);
    assert_eq!(all.attention, 4 * (128 * 384 + 384 + 128 * 128 + 128));
    assert_eq!(all.feed_forward, 4 * (128 * 512 + 512 + 512 * 128 + 128));
    assert_eq!(all.norms, 9 * 256);
    assert_eq!(
        all.total,
        all.word_embedding + all.position_embedding + all.attention + all.feed_forward + all.norms
    );
}

#[test]
fn memory_is_counted_by_component() {
    let check = |dtype: &str, expected: [u64; 6]| {
        let sets = [&format!("precision.dtype={dtype}"), "checkpoint.async=false"];
        let plan = RunPlan::new(&config(&sets), &PlanInputs::default());
        let all = plan.memory_bytes;
        let found = [
            all.weights,
            all.compute_copy,
            all.moments,
            all.gradients,
            all.activations,
            all.backward,
        ];
        assert_eq!(found, expected, "{dtype}");
        assert_eq!(all.total, expected.iter().sum::<u64>() + all.program);
    };
    // 7,240,448 parameters, of which 6,438,912 are shared with the head; 256 tokens per
    // micro-batch; 8 x 128 + 2 x 512 numbers per layer and token; a head of 256 rows, less than
    // 512. While the last of 4 micro-batches is computed, the sums (0+1) and 2 are held. The head
    // has the logits, their probabilities and two holes of their size, the gradient of the weight,
    // and the packed weight.
    let (n, wte, kept) = (7_240_448, 50_304 * 128, 4 * 256 * 2048);
    let logits = 256 * 50_304;
    check("fp32", [4 * n, 0, 8 * n, 2 * 4 * (n + wte), 4 * kept, logits * 16 + 8 * wte]);
    check("bf16", [4 * n, 2 * n, 8 * n, 2 * 4 * (n + wte), 2 * kept, logits * 18 + 10 * wte]);
    // Two dropout masks of bytes; the attention weights in f32 before and after dropout.
    let (masks, weights) = (4 * 256 * 2 * 128, 4 * 4 * 4 * 64 * 64);
    for (key, expected) in [("dropout", masks + 9 * weights), ("attention_dropout", 9 * weights)] {
        let plan = RunPlan::new(&config(&[&format!("model.{key}=0.1")]), &PlanInputs::default());
        assert_eq!(plan.memory_bytes.activations, 4 * kept + expected, "{key}");
    }
}

#[test]
fn gradients_grow_with_the_depth_of_their_sum() {
    let (n, wte) = (7_240_448, 50_304 * 128);
    for (micro, waiting) in [(16, 0), (8, 1), (4, 2), (2, 3), (1, 4)] {
        let plan =
            RunPlan::new(&config(&[&format!("batch.micro={micro}")]), &PlanInputs::default());
        assert_eq!(plan.memory_bytes.gradients, waiting * 4 * (n + wte), "micro {micro}");
    }
}

/// Four layers of 198,272 parameters on two stages: the first has both embeddings, the last the
/// word embedding again and the last norm.
#[test]
fn each_stage_has_its_own_memory() {
    let plan = |sets: &[&str], world: u64| {
        let known = PlanInputs { world: Some(world), ..PlanInputs::default() };
        RunPlan::new(
            &config(&[&["parallel.pp=2", "checkpoint.async=false"], sets].concat()),
            &known,
        )
    };
    let (wte, wpe, layer) = (50_304 * 128, 64 * 128, 198_272);
    let both = plan(&[], 2);
    let [first, last] = &both.stages[..] else { panic!("{:?}", both.stages) };
    assert_eq!(first.units, std::slice::from_ref(&(0..2)));
    assert_eq!(last.units, std::slice::from_ref(&(2..4)));
    assert_eq!(first.parameters, wte + wpe + 2 * layer);
    assert_eq!(last.parameters, wte + 2 * layer + 256);
    // The first stage is two micro-batches ahead of its backward pass.
    assert_eq!((first.in_flight, last.in_flight), (2, 1));
    assert_eq!(first.memory_bytes.activations, 2 * last.memory_bytes.activations);
    assert_eq!(both.memory_bytes, last.memory_bytes, "the head is the most");
    assert!((both.bubble - 1.0 / 5.0).abs() < 1e-12, "{}", both.bubble);

    // Slices of two replicas; the copy for computation is whole.
    let sliced = plan(&["parallel.zero=1"], 4);
    let memory = sliced.stages[0].memory_bytes;
    assert_eq!(memory.weights, 4 * (wte + wpe + 2 * layer) / 2);
    assert_eq!(memory.moments, 8 * (wte + wpe + 2 * layer) / 2);
    assert_eq!(memory.compute_copy, 4 * (wte + wpe + 2 * layer));

    // Half of every matrix, and of the vocabulary of 50,432 rows.
    let cut = plan(&["parallel.tp=2"], 4);
    let half_layer = (198_272 - 6 * 128) / 2 + 6 * 128;
    assert_eq!(cut.stages[1].parameters, 50_432 / 2 * 128 + 2 * half_layer + 256);

    let again = plan(&["parallel.recompute.mode=full"], 2);
    // Two inputs of each micro-batch, and all activations of one layer while it is recomputed.
    let (input, whole) = (4 * 256 * 128, 4 * 256 * 2048);
    assert_eq!(again.stages[0].memory_bytes.activations, 2 * 2 * input + whole);
    let all = plan(&["parallel.schedule=gpipe"], 2);
    assert_eq!(all.stages[1].in_flight, 4);
}

/// Peak memory of real runs of `demo/gpt.toml` on its corpus, 2 steps each, by getrusage, in MiB,
/// on 2 threads of a Xeon at 2.1 GHz, 2026-11-21. The plan is within a tenth of each. (Tiny models,
/// whose memory is mostly logits, can use one block of logits less.)
#[test]
fn memory_estimates_agree_with_measured_runs() {
    let demo = "[run]\ndir = 'r'\nbudget = { steps = 2 }\n[model]\nlayers = 4\nhidden = 128\n\
                heads = 2\nvocab = 50257\nseq_len = 128\n[data]\ntrain = 'd'\n[batch]\n\
                global = 16\nmicro = 16\n[optim.lr]\npeak = 1e-3\n";
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("demo.toml");
    std::fs::write(&file, demo).unwrap();
    let long = "model.layers=1 model.seq_len=512 batch.global=1 batch.micro=1";
    let sync = "checkpoint.async=false";
    for (sets, measured_mib) in [
        ("", 767.9),
        ("batch.micro=4", 931.9),
        ("batch.global=8 batch.micro=1", 668.9),
        ("precision.dtype=bf16", 820.8),
        (long, 702.2),
        (&format!("{long} model.hidden=32"), 521.5),
        (&format!("{long} model.hidden=32 {sync}"), 482.1),
        (&format!("{long} model.hidden=64"), 580.6),
        (&format!("{long} model.hidden=64 {sync}"), 542.3),
        (&format!("model.layers=12 model.hidden=384 batch.global=4 batch.micro=4 {sync}"), 1264.9),
    ] {
        let sets: Vec<String> = sets.split_whitespace().map(str::to_owned).collect();
        let config = Config::load(file.to_str().unwrap(), &sets).unwrap();
        let all = RunPlan::new(&config, &PlanInputs::default()).memory_bytes;
        let off = all.total as f64 / (measured_mib * 1048576.0) - 1.0;
        assert!(off.abs() < 0.1, "{sets:?}: {:+.1} %, {all:?}", 100.0 * off);
    }
}

/// A plan for thousands of ranks: 1 T parameters, as in the paper on PTD-P.
#[test]
fn a_run_of_thousands_of_ranks_is_planned() {
    let trillion = config(&[
        "model.layers=128",
        "model.hidden=25600",
        "model.heads=160",
        "model.vocab=51200",
        "model.seq_len=2048",
        "batch.global=3072",
        "batch.micro=1",
        "parallel.tp=8",
        "parallel.pp=64",
        "parallel.reduce=ring",
        "parallel.recompute.mode=full",
        "parallel.zero=1",
        "precision.dtype=bf16",
    ]);
    let known = PlanInputs {
        world: Some(3072),
        tokens_per_s: Some(80e3),
        flop_per_s: Some(312e12),
        memory_bytes: Some(80 << 30),
        ..PlanInputs::default()
    };
    let plan = RunPlan::new(&trillion, &known);
    let layout = plan.layout.unwrap();
    assert_eq!((layout.dp, layout.pp, layout.tp, layout.micro_batches), (6, 64, 8, 512));
    assert_eq!(plan.stages.len(), 64);
    assert_eq!(plan.parameters.total, 1_008_038_758_400);
    assert!((plan.bubble - 63.0 / 575.0).abs() < 1e-12);
    let used = plan.efficiency.unwrap();
    let flop = plan.flop.per_token_6n_12lhs as f64;
    assert!((used.mfu_6n_12lhs - 80e3 * flop / (3072.0 * 312e12)).abs() < 1e-12);
    assert!(used.mfu_6n_6lhs < used.mfu_6n_12lhs && used.mfu_6n_6lhs > 0.5);
    // 512 micro-batches: nine sums are held.
    assert!(plan.memory_bytes.gradients > 60 << 30, "{:?}", plan.memory_bytes);
    assert!(plan.refusals[0].contains("a larger batch.micro holds fewer gradient sums"), "{plan}");
    assert!(plan.to_string().contains("and 48 more (--json lists all)"));
}

#[test]
fn a_layout_that_does_not_divide_is_refused_and_still_shown() {
    let known = PlanInputs { world: Some(6), ..PlanInputs::default() };
    let plan = RunPlan::new(&config(&["parallel.tp=4"]), &known);
    assert!(
        plan.refusals[0].contains("expected a multiple of tp 4 x pp 1 = 4 ranks, found 6"),
        "{plan}"
    );
    assert_eq!((plan.layout, plan.stages.len()), (None, 1));
}

#[test]
fn arithmetic_follows_the_named_formulas() {
    let config = config(&[
        "model.layers=12",
        "model.hidden=768",
        "model.heads=12",
        "model.seq_len=1024",
        "model.vocab=50304",
        "run.budget={tokens=10_000_000_000}",
        "batch.global=512",
    ]);
    let plan = RunPlan::new(&config, &PlanInputs::default());
    // GPT-2 124M with nanoGPT's vocabulary: N without positions is 123,689,472.
    assert_eq!(plan.flop.per_token_6n_12lhs, 6 * 123_689_472 + 113_246_208);
    assert_eq!(plan.flop.per_token_6n_6lhs, 6 * 123_689_472 + 56_623_104);
    assert_eq!(plan.flop.per_step, plan.flop.per_token_6n_12lhs * 524_288);
    // 10^10 tokens are 9,765,625 samples, and 19,073 whole steps of 512.
    assert_eq!((plan.run.steps, plan.run.accumulation), (19_073, 128));
    assert_eq!((plan.run.samples, plan.run.tokens), (9_765_376, 19_073 * 524_288));
    assert!((plan.loss_initial_nats - 10.825_839).abs() < 1e-6, "ln(50304)");
}

#[test]
fn time_uses_the_best_known_speed() {
    let config = config(&[]);
    assert_eq!(RunPlan::new(&config, &PlanInputs::default()).time, None);
    // 819,200 tokens in total.
    let known = PlanInputs { tokens_per_s: Some(4096.0), ..PlanInputs::default() };
    let time = RunPlan::new(&config, &known).time.unwrap();
    assert_eq!((time.tokens_per_s, time.run_s), (4096.0, 200.0));
    let known = PlanInputs { flop_per_s: Some(1e11), ..PlanInputs::default() };
    let plan = RunPlan::new(&config, &known);
    let time = plan.time.as_ref().unwrap();
    let expected = plan.flop.per_token_6n_12lhs as f64 * 819_200.0 / 1e11;
    assert!((time.run_s / expected - 1.0).abs() < 1e-12, "{} {expected}", time.run_s);
    assert!(time.basis.contains("100.0 GFLOP/s per rank: a lower bound"), "{}", time.basis);
    for odd in [0.0, f64::NAN] {
        let known = PlanInputs { tokens_per_s: Some(odd), ..PlanInputs::default() };
        assert_eq!(RunPlan::new(&config, &known).time, None);
    }
}

#[test]
fn peak_disk_bytes_include_the_checkpoint_being_written() {
    let saving = |sets: &[&str]| RunPlan::new(&config(sets), &PlanInputs::default()).checkpoint;
    // The vocabulary without its padding.
    let one = 12 * 7_234_432;
    let eight = saving(&[]);
    assert_eq!((eight.checkpoint_bytes, eight.count, eight.disk_bytes_max), (one, 8, 4 * one));
    let uneven = saving(&["checkpoint.every.steps=300", "checkpoint.keep.last=1"]);
    assert_eq!((uneven.count, uneven.disk_bytes_max), (3, 2 * one));
    let only_last = saving(&["checkpoint.every.steps=0"]);
    assert_eq!((only_last.count, only_last.disk_bytes_max), (1, one));
}

#[test]
fn impossible_runs_are_refused_with_the_reason() {
    let check = |sets: &[&str], corpus_tokens: u64, expected: &[&str]| {
        let known = PlanInputs { corpus_tokens: Some(corpus_tokens), ..PlanInputs::default() };
        let refusals = RunPlan::new(&config(sets), &known).refusals;
        assert_eq!(refusals.len(), expected.len(), "{sets:?}: {refusals:?}");
        for (refusal, expected) in refusals.iter().zip(expected) {
            assert!(refusal.contains(expected), "{refusal}");
        }
    };
    check(&[], 1_000_000, &[]);
    check(
        &["data.split=1,1"],
        128,
        &["expected at least 65 tokens in the training split, found 64"],
    );
    check(&["data.split=1,1"], 130, &[]);
    let no_valid = &["eval.every is 400, but data.split '100' has no share for validation"];
    check(&["data.split='100'", "eval.every=400"], 1_000_000, no_valid);
    check(&["data.split='100'", "eval.every=0"], 1_000_000, &[]);
    check(&["data.split='0,1'"], 1_000_000, &["in the training split, found 0"]);
}

#[test]
fn risky_runs_have_warnings() {
    let known = PlanInputs {
        corpus_tokens: Some(100_000),
        planner_memory_bytes: Some(64 << 20),
        ..PlanInputs::default()
    };
    let plan = RunPlan::new(&config(&["checkpoint.every.steps=801"]), &known);
    assert!(plan.refusals.is_empty(), "{:?}", plan.refusals);
    let [memory, epochs, saving] = &plan.warnings[..] else { panic!("{:?}", plan.warnings) };
    assert!(memory.contains("and has 64 MiB (hint: a larger batch.micro"), "{memory}");
    // 819,200 tokens over 94.9 % of 100,000.
    assert!(epochs.contains("reads its corpus 8.6 times"), "{epochs}");
    assert!(saving.contains("saves only at its end"), "{saving}");
    let text = plan.to_string();
    assert!(plan.warnings.iter().all(|warning| text.contains(&format!("warning: {warning}"))));

    // For the ranks themselves it is a refusal.
    let little = PlanInputs { memory_bytes: Some(64 << 20), ..PlanInputs::default() };
    let [refusal] = &RunPlan::new(&config(&[]), &little).refusals[..] else { panic!("one") };
    assert!(refusal.contains("of memory and has 64 MiB"), "{refusal}");

    // For the process of a rank, at least the state must fit.
    let state = RunPlan::new(&config(&[]), &known).memory_bytes.state_bytes();
    let starts = |process_memory_bytes| {
        let known = PlanInputs { process_memory_bytes, ..PlanInputs::default() };
        RunPlan::new(&config(&[]), &known).refusals.is_empty()
    };
    assert!(starts(Some(state)) && !starts(Some(state - 1)));

    let enough = PlanInputs {
        corpus_tokens: Some(1 << 30),
        memory_bytes: Some(1 << 40),
        planner_memory_bytes: None,
        ..known
    };
    assert!(RunPlan::new(&config(&[]), &enough).warnings.is_empty());
    let idle = RunPlan::new(&config(&["precision.loss_scale.init=2"]), &enough).warnings;
    assert_eq!(idle, ["precision.loss_scale has no effect: precision.dtype is not \"fp16\""]);
}

#[test]
fn the_largest_config_is_planned_without_overflow() {
    let config = config(&[
        "model.layers=1024",
        "model.hidden=131072",
        "model.heads=1024",
        "model.ffn=1048576",
        "model.vocab=16777216",
        "model.seq_len=1048576",
        "batch.global=65536",
        "batch.micro=65536",
        "run.budget={steps=1}",
    ]);
    let plan =
        RunPlan::new(&config, &PlanInputs { memory_bytes: Some(1 << 40), ..PlanInputs::default() });
    assert_eq!(plan.memory_bytes.total, u64::MAX);
    assert_eq!(plan.warnings.len(), 1, "{:?}", plan.warnings);
    assert!(plan.refusals.iter().any(|it| it.contains("of memory")), "{:?}", plan.refusals);
}

#[test]
fn the_table_and_the_json_have_the_same_numbers() {
    let known = PlanInputs {
        corpus_tokens: Some(1_000_000),
        memory_bytes: Some(1 << 40),
        tokens_per_s: Some(4096.0),
        ..PlanInputs::default()
    };
    let plan = RunPlan::new(&config(&[]), &known);
    let text = plan.to_string();
    for expected in [
        "gpt: 4 layers, hidden 128, 4 heads of 32, ffn 512, vocabulary 50257 in 50304 rows",
        "total                        7,234,432",
        "ranks                                1  dp 1 x pp 1 x tp 1",
        "tokens                         819,200  1,024 per step",
        "epochs                            0.86",
        "initial loss                    10.825  ln(vocabulary)",
        "time                             3m20s  at 4,096 tokens/s, based on measured speed",
    ] {
        assert!(text.contains(expected), "'{expected}' is not in\n{text}");
    }
    assert!(!text.contains("compute copy"), "fp32 has none:\n{text}");
    let json = serde_json::to_value(&plan).unwrap();
    assert_eq!(json["parameters"]["total"], 7_234_432);
    assert_eq!(json["memory_bytes"]["weights"], 4 * 7_240_448);
    assert_eq!(json["stages"][0]["memory_bytes"], json["memory_bytes"]);
    assert_eq!(json["layout"]["world"], 1);
    assert_eq!(json["checkpoint"]["checkpoint_bytes"], 12 * 7_234_432);
    assert_eq!(json["run"]["tokens_per_step"], 1024);
    assert_eq!(json["time"]["run_s"], 200.0);
    assert_eq!(json["refusals"], serde_json::json!([]));
}

/// 7,240,448 parameters of 12 bytes, read and written by each update.
#[test]
fn each_update_moves_the_offloaded_state() {
    let n = 7_240_448;
    let plan = |sets: &[&str], known: PlanInputs| RunPlan::new(&config(sets), &known);
    assert_eq!(plan(&[], PlanInputs::default()).offload, None);
    let cpu = plan(&["optim.offload=cpu", "checkpoint.async=false"], PlanInputs::default());
    let all = cpu.memory_bytes;
    assert_eq!((all.weights, all.moments, all.compute_copy, all.offload), (0, 0, 4 * n, 12 * n));
    // The total has the state in the host too, as the row says.
    assert!(all.total > 16 * n, "{all:?}");
    let table = cpu.to_string();
    let mut rows = table.lines().filter(|line| line.contains("offloaded"));
    assert!(rows.any(|row| row.contains("in host memory: f32 weights and moments")), "{table}");
    let moved = cpu.offload.unwrap();
    assert_eq!((moved.state_bytes, moved.disk_bytes), (12 * n, 0));
    assert_eq!((moved.read_bytes_per_step, moved.write_bytes_per_step), (12 * n, 12 * n));

    // Half of it each, which is less than the buffers would take; copies in 16 bits are whole, and
    // in slices.
    let sets = ["optim.offload='nvme:/scratch'", "parallel.zero=1", "precision.dtype=bf16"];
    let speeds = PlanInputs { tokens_per_s: Some(1024.0), disk_bytes_per_s: Some(1e8), ..two() };
    let disk = plan(&sets, speeds);
    let all = disk.memory_bytes;
    assert_eq!((all.compute_copy, all.offload, all.staging), (2 * n + n, 6 * n, 0));
    let moved = disk.offload.as_ref().unwrap();
    assert_eq!((moved.state_bytes, moved.disk_bytes), (6 * n, 12 * n));
    // A step of 1,024 tokens takes a second, and the disk 0.87 s.
    assert_eq!(moved.compute_s_per_step, Some(1.0));
    assert!((moved.disk_s_per_step.unwrap() - 12e-8 * n as f64).abs() < 1e-9);
    assert!(disk.warnings.is_empty(), "{disk}");
    assert!(
        disk.to_string().contains("in nvme:/scratch, 0.9 s of disk time, 1.0 s of computation"),
        "{disk}"
    );
    // For a larger state, memory holds the buffers that the engine has for this number of disks.
    let wide = ["model.hidden=2048", "optim.offload='nvme:/a,/b'"];
    let buffers = plan(&wide, PlanInputs::default()).memory_bytes.offload;
    assert_eq!(buffers, ckpt::offload::OffloadOptions::default().memory_bytes(2));
    let slow = plan(&sets, PlanInputs { disk_bytes_per_s: Some(8e7), ..speeds });
    assert!(slow.warnings[0].contains("the disk needs more time for an update"), "{slow}");
}

/// Three of four layers have an input of 4 x 64 x 128 numbers, which a step of four micro-batches
/// moves; with one stage, one micro-batch is spilled at a time.
#[test]
fn each_step_moves_the_spilled_inputs() {
    let (input, sets) = (4 * 64 * 128 * 4, ["parallel.recompute.mode=full"]);
    let plan =
        |more: &[&str], known: PlanInputs| RunPlan::new(&config(&[&sets, more].concat()), &known);
    assert_eq!(plan(&[], PlanInputs::default()).inputs, None);
    let here = plan(&[], PlanInputs::default()).memory_bytes;
    let disk = "parallel.activation_offload='nvme:/scratch'";
    let speeds = PlanInputs { tokens_per_s: Some(1024.0), disk_bytes_per_s: Some(1e6), ..two() };
    let away = plan(&[disk], PlanInputs { world: Some(1), ..speeds });
    let moved = away.inputs.as_ref().unwrap();
    assert_eq!((moved.bytes_per_step, moved.away_bytes), (4 * 3 * input, 3 * input));
    // Less than the size of the buffers.
    assert_eq!((moved.spared_bytes, away.memory_bytes.input_buffers), (0, 3 * input));
    assert_eq!(away.memory_bytes.activations, here.activations - 4 * input);
    assert!(moved.disk_s_per_step.unwrap() > moved.compute_s_per_step.unwrap());
    assert!(away.warnings[0].contains("the disk needs more time for the inputs"), "{away}");
    assert!(away.warnings[1].contains("saves no memory"), "{away}");

    // All micro-batches at once, with longer samples.
    let long = ["parallel.schedule=gpipe", "model.seq_len=8192", "model.layers=13"];
    let away = plan(&[&long[..], &[disk]].concat(), PlanInputs::default());
    let (all, buffers) = (4 * 12 * 128 * input, ckpt::offload::SpillOptions::default());
    let moved = away.inputs.as_ref().unwrap();
    assert_eq!((moved.bytes_per_step, moved.away_bytes), (all, all));
    assert_eq!(moved.spared_bytes, all - buffers.memory_bytes());
    assert!(away.warnings.is_empty(), "{away}");
    assert!(away.to_string().contains("to nvme:/scratch and back, "), "{away}");
    let host = plan(&[&long[..], &["parallel.activation_offload=cpu"]].concat(), two());
    assert_eq!(host.inputs.unwrap().spared_bytes, all / 2);
}

fn two() -> PlanInputs {
    PlanInputs { world: Some(2), ..PlanInputs::default() }
}
