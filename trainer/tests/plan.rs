//! Plans against published counts, and against arithmetic done by hand.

use trainer::config::Config;
use trainer::plan::{Known, Parameters, Plan};

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
fn parameters_are_those_of_the_published_models() {
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
        assert_eq!(Parameters::count(&config.model, config.model.vocab).total, published);
        // In memory the vocabulary of 50,257 has 50,304 rows.
        let plan = Plan::new(&config, &Known::default());
        assert_eq!(plan.parameters.total, published + 47 * hidden);
    }
}

#[test]
fn components_add_up() {
    let plan = Plan::new(&config(&[]), &Known::default());
    let all = plan.parameters;
    assert_eq!(all.word_embedding, 50_304 * 128);
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
    let check = |dtype: &str, due: [u64; 6]| {
        let plan = Plan::new(&config(&[&format!("precision.dtype={dtype}")]), &Known::default());
        let all = plan.memory_bytes;
        let got =
            [all.weights, all.compute_copy, all.gradients, all.moments, all.activations, all.head];
        assert_eq!(got, due, "{dtype}");
        assert_eq!(all.total, due.iter().sum::<u64>());
    };
    // 7,240,448 parameters, of which 6,438,912 are the head too; 256 tokens a micro-batch; 2,048
    // numbers a token and layer; a head of 256 rows, for there are no 512. Of 4 micro-batches the
    // last is summed while (0+1) and 2 wait.
    let (n, wte, kept, logits) = (7_240_448, 50_304 * 128, 4 * 256 * 2048, 256 * 50_304 * 8);
    check("fp32", [4 * n, 0, 3 * 4 * (n + wte), 8 * n, 4 * kept, logits]);
    check("bf16", [4 * n, 2 * n, 3 * 4 * (n + wte) + 2 * n, 8 * n, 2 * kept, logits + 2 * wte]);
}

#[test]
fn gradients_grow_with_the_depth_of_their_sum() {
    let (n, wte) = (7_240_448, 50_304 * 128);
    for (micro, sums) in [(16, 1), (8, 2), (4, 3), (2, 4), (1, 5)] {
        let plan = Plan::new(&config(&[&format!("batch.micro={micro}")]), &Known::default());
        assert_eq!(plan.memory_bytes.gradients, sums * 4 * (n + wte), "micro {micro}");
    }
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
    let plan = Plan::new(&config, &Known::default());
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
fn time_comes_from_the_best_that_is_known() {
    let config = config(&[]);
    assert_eq!(Plan::new(&config, &Known::default()).time, None);
    // 819,200 tokens in all.
    let known = Known { tokens_per_s: Some(4096.0), ..Known::default() };
    let time = Plan::new(&config, &known).time.unwrap();
    assert_eq!((time.tokens_per_s, time.run_s), (4096.0, 200.0));
    let known = Known { flop_per_s: Some(1e11), ..Known::default() };
    let plan = Plan::new(&config, &known);
    let time = plan.time.as_ref().unwrap();
    let due = plan.flop.per_token_6n_12lhs as f64 * 819_200.0 / 1e11;
    assert!((time.run_s / due - 1.0).abs() < 1e-12, "{} {due}", time.run_s);
    assert!(time.basis.contains("100.0 GFLOP/s: a lower bound"), "{}", time.basis);
    for odd in [0.0, f64::NAN] {
        let known = Known { tokens_per_s: Some(odd), ..Known::default() };
        assert_eq!(Plan::new(&config, &known).time, None);
    }
}

#[test]
fn checkpoints_are_counted_with_the_one_being_written() {
    let saving = |sets: &[&str]| Plan::new(&config(sets), &Known::default()).checkpoint;
    let one = 12 * 7_240_448;
    let eight = saving(&[]);
    assert_eq!((eight.checkpoint_bytes, eight.count, eight.disk_bytes_max), (one, 8, 4 * one));
    let uneven = saving(&["checkpoint.every.steps=300", "checkpoint.keep.last=1"]);
    assert_eq!((uneven.count, uneven.disk_bytes_max), (3, 2 * one));
    let only_last = saving(&["checkpoint.every.steps=0"]);
    assert_eq!((only_last.count, only_last.disk_bytes_max), (1, one));
}

#[test]
fn what_cannot_run_is_refused_with_the_reason() {
    let check = |sets: &[&str], corpus_tokens: u64, due: &[&str]| {
        let known = Known { corpus_tokens: Some(corpus_tokens), ..Known::default() };
        let refusals = Plan::new(&config(sets), &known).refusals;
        assert_eq!(refusals.len(), due.len(), "{sets:?}: {refusals:?}");
        for (refusal, due) in refusals.iter().zip(due) {
            assert!(refusal.contains(due), "{refusal}");
        }
    };
    check(&[], 1_000_000, &[]);
    check(&["data.split=1,1"], 128, &["the corpus has 64 tokens, one sample takes 65"]);
    check(&["data.split=1,1"], 130, &[]);
    let no_valid = &["eval.every is 400, and data.split '100' has no share for validation"];
    check(&["data.split='100'", "eval.every=400"], 1_000_000, no_valid);
    check(&["data.split='100'", "eval.every=0"], 1_000_000, &[]);
    check(&["data.split='0,1'"], 1_000_000, &["the corpus has 0 tokens"]);
}

#[test]
fn what_will_hurt_is_a_warning() {
    let known =
        Known { corpus_tokens: Some(100_000), memory_bytes: Some(64 << 20), ..Known::default() };
    let plan = Plan::new(&config(&["checkpoint.every.steps=801"]), &known);
    assert!(plan.refusals.is_empty(), "{:?}", plan.refusals);
    let [memory, epochs, saving] = &plan.warnings[..] else { panic!("{:?}", plan.warnings) };
    assert!(memory.contains("the machine has 64 MiB; hint: a smaller batch.micro"), "{memory}");
    // 819,200 tokens over 94.9 % of 100,000.
    assert!(epochs.contains("reads its corpus 8.6 times"), "{epochs}");
    assert!(saving.contains("saves at its end only"), "{saving}");
    let text = plan.to_string();
    assert!(plan.warnings.iter().all(|warning| text.contains(&format!("warning: {warning}"))));

    let enough = Known { corpus_tokens: Some(1 << 30), memory_bytes: Some(1 << 40), ..known };
    assert!(Plan::new(&config(&[]), &enough).warnings.is_empty());
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
    let plan = Plan::new(&config, &Known { memory_bytes: Some(1 << 40), ..Known::default() });
    assert_eq!(plan.memory_bytes.total, u64::MAX);
    assert_eq!(plan.warnings.len(), 2, "{:?}", plan.warnings);
}

#[test]
fn the_table_and_the_json_have_the_same_numbers() {
    let known = Known {
        corpus_tokens: Some(1_000_000),
        memory_bytes: Some(1 << 40),
        tokens_per_s: Some(4096.0),
        ..Known::default()
    };
    let plan = Plan::new(&config(&[]), &known);
    let text = plan.to_string();
    for due in [
        "gpt: 4 layers, hidden 128, 4 heads of 32, ffn 512, vocabulary 50257 in 50304 rows",
        "total                        7,240,448",
        "tokens                         819,200  1,024 a step",
        "epochs                            0.86",
        "first loss                      10.825  ln(vocabulary)",
        "time                             3m20s  at 4,096 tokens/s, from the measured tokens/s",
    ] {
        assert!(text.contains(due), "'{due}' is not in\n{text}");
    }
    assert!(!text.contains("compute copy"), "fp32 has none:\n{text}");
    let json = serde_json::to_value(&plan).unwrap();
    assert_eq!(json["parameters"]["total"], 7_240_448);
    assert_eq!(json["memory_bytes"]["weights"], 4 * 7_240_448);
    assert_eq!(json["checkpoint"]["checkpoint_bytes"], 12 * 7_240_448);
    assert_eq!(json["run"]["tokens_per_step"], 1024);
    assert_eq!(json["time"]["run_s"], 200.0);
    assert_eq!(json["refusals"], serde_json::json!([]));
}
