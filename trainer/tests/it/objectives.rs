//! T5 and BERT from their corpora to their weights: the batches of a step are those of the original
//! programs for the same data, and runs end in the same bits in every layout.

use crate::common::{Lab, assert_success, text, train, trainer};
use crate::corpora::{
    ENCDEC, Golden, MLM, SPANS, Task, VOCAB, golden_bert, golden_cpm2, golden_t5,
};
use crate::kills::{kill_after, run};
use crate::samples::{Folded, cases};
use serde_json::{Value, json};
use trainer::config::{Budget, Config};
use trainer::mesh::{DeviceMesh, MeshRank};
use trainer::model::input::AnyBatch;
use trainer::{Data, NodePeers, Trainer, open_corpus, with_special};

/// Checks every sample of the cases of an objective, one a batch, as a step receives them.
fn check(file: &str, objective: &str, golden: Golden, fold: impl Fn(&AnyBatch, &mut Folded)) {
    let lab = Lab::new();
    for case in cases(file, objective) {
        let mut config = golden(&lab, &case);
        let data = Data::new(open_corpus(&config).unwrap(), &config).unwrap();
        // The order has whole epochs; a run reads what it needs.
        config.run.budget = Budget::Samples(case["samples"].as_u64().unwrap());
        let mut batches = data.train_batches(&config, MeshRank::ALONE, 0).unwrap();
        let (mut folded, mut one) = (Folded::default(), Vec::new());
        for number in 0..case["samples"].as_u64().unwrap() {
            batches.fill(1, &mut one).unwrap();
            fold(&one[0], &mut folded);
            let expected = &case["first"][number as usize];
            if expected.is_object() {
                check_whole(&one[0], expected);
            }
        }
        batches.fill(1, &mut one).unwrap();
        assert!(one.is_empty(), "no more samples than were expected");
        folded.check(&case);
    }
}

/// Some samples are in the file as numbers, to show what is wrong.
fn check_whole(batch: &AnyBatch, expected: &Value) {
    match batch {
        AnyBatch::Lm(_) => panic!("running text"),
        AnyBatch::Spans(batch) => assert_eq!(json!(batch.encoder_tokens), expected["text_enc"]),
        AnyBatch::Triple(batch) => assert_eq!(json!(batch.encoder_tokens), expected["contexts"]),
        AnyBatch::Masked(batch) => assert_eq!(json!(batch.tokens), expected["text"]),
    }
}

#[test]
fn bert_samples_match_megatron() {
    check("megatron.json", "bert", golden_bert, |batch, folded| {
        let AnyBatch::Masked(batch) = batch else { panic!("{batch:?}") };
        folded.add("text", &batch.tokens, |value| value);
        folded.add("types", &batch.types, |value| value);
        folded.add("labels", &batch.labels, |value| value);
        folded.add("is_random", &batch.is_random, i64::from);
        folded.add("padding_mask", &batch.padding_mask, |value| value);
        folded.add("loss_mask", &batch.loss_mask, |value| value as i64);
        folded.add("truncated", &batch.truncated, i64::from);
    });
}

#[test]
fn t5_samples_match_megatron() {
    check("megatron.json", "t5", golden_t5, |batch, folded| {
        let AnyBatch::Spans(batch) = batch else { panic!("{batch:?}") };
        folded.add("text_enc", &batch.encoder_tokens, |value| value);
        folded.add("text_dec", &batch.decoder_tokens, |value| value);
        folded.add("labels", &batch.labels, |value| value);
        folded.add("loss_mask", &batch.loss_mask, |value| value as i64);
        folded.add("truncated", &batch.truncated, i64::from);
        folded.add("enc_mask", &batch.encoder_mask, |value| value);
        folded.add("dec_mask", &batch.decoder_mask, |value| value);
    });
}

#[test]
fn encdec_samples_match_cpm2() {
    check("cpm2.json", "encdec", golden_cpm2, |batch, folded| {
        let AnyBatch::Triple(batch) = batch else { panic!("{batch:?}") };
        let positions = |ids: &[i64], len: usize| match ids {
            [] => (0..len as i64).collect(),
            ids => ids.to_vec(),
        };
        folded.add("contexts", &batch.encoder_tokens, |value| value);
        folded.add("targets", &batch.decoder_tokens, |value| value);
        folded.add("labels", &batch.labels, |value| value);
        folded.add("ctx_eod_mask", &batch.encoder_eod, i64::from);
        folded.add("loss_mask", &batch.loss_mask, |value| value as i64);
        let encoder = positions(&batch.encoder_position_ids, batch.encoder_len);
        let decoder = positions(&batch.decoder_position_ids, batch.decoder_len);
        folded.add("enc_position_ids", &encoder, |value| value);
        folded.add("dec_position_ids", &decoder, |value| value);
        folded.add("enc_attention_mask", &batch.encoder_mask(0), i64::from);
        folded.add("dec_attention_mask", &batch.decoder_mask(0), i64::from);
        folded.add("cross_attention_mask", &batch.cross_mask(0), i64::from);
    });
}

/// The micro-batches of a rank, from the fifth step on.
fn read(config: &Config, mesh: DeviceMesh, rank: usize, job: Option<&str>) -> Vec<AnyBatch> {
    let mut data = Data::new(open_corpus(config).unwrap(), config).unwrap();
    if let Some(job) = job {
        let ranks = (0..mesh.ranks()).collect();
        data.share(NodePeers { job: job.to_owned(), ranks });
    }
    let mut batches =
        data.train_batches(config, MeshRank { mesh, rank }, 4 * config.batch.global).unwrap();
    let mut all = Vec::new();
    for _ in 4..10 {
        let mut step = Vec::new();
        batches.fill(config.batch.micro_batches() / mesh.dp as u64, &mut step).unwrap();
        all.push(step);
    }
    all.concat()
}

/// Two replicas with a reader each, and with one reader for both.
#[test]
fn replicas_share_the_samples_of_one() {
    let lab = Lab::new();
    for (number, task) in [SPANS, ENCDEC, MLM].into_iter().enumerate() {
        let config = task.load(&lab, "run", &[]);
        let micros = config.batch.micro_batches() as usize;
        let expected = read(&config, DeviceMesh::ALONE, 0, None);
        let mesh = DeviceMesh { dp: 2, ..DeviceMesh::ALONE };
        let job = format!("objectives-{}-{number}", std::process::id());
        for job in [None, Some(&*job)] {
            let found: Vec<Vec<AnyBatch>> = std::thread::scope(|scope| {
                let config = &config;
                let start = |rank| scope.spawn(move || read(config, mesh, rank, job));
                let ranks: Vec<_> = (0..2).map(start).collect();
                ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
            });
            for (step, expected) in expected.chunks(micros).enumerate() {
                let half = micros / 2;
                let found = found.iter().flat_map(|rank| &rank[step * half..][..half]);
                assert!(found.eq(expected.iter()), "step {step} of {}, {job:?}", task.name);
            }
        }
    }
}

/// Killed in one layout and resumed in another, a run is bit-identical to one of one process.
#[test]
fn a_run_of_any_objective_resumes_in_any_layout() {
    let lab = Lab::new();
    for task in [SPANS, ENCDEC, MLM] {
        let (whole, killed) = (format!("{}-whole", task.name), format!("{}-killed", task.name));
        let keys = |parallel| [("parallel", parallel), ("eval.every", "0")];
        assert_success(&train(&task.config(&lab, &whole, &keys("{}"))));
        let folder = lab.path(&killed);
        let layouts = [(4, "{ pp = 2, zero = 1 }", 5), (2, "{ zero = 3 }", 13)];
        for (ranks, parallel, line) in layouts {
            let config = task.config(&lab, &killed, &keys(parallel));
            kill_after(ranks, &config, &folder, line, std::time::Duration::from_millis(2));
        }
        let output = run(2, &task.config(&lab, &killed, &keys("{ pp = 2 }")));
        assert_success(&output);
        assert!(text(&output.stderr).contains("resuming from"), "{}", text(&output.stderr));
        lab.assert_same(&killed, &whole);
    }
}

/// The loss falls, on held-out samples too, and the recorded config has the ids that were found.
#[test]
fn the_loss_goes_down() {
    let lab = Lab::new();
    for task in [SPANS, ENCDEC, MLM] {
        let output = train(&task.config(&lab, task.name, &[("run.budget", "{ steps = 64 }")]));
        assert_success(&output);
        let lines = lab.log_lines(task.name);
        let all =
            |key: &str| -> Vec<f64> { lines.iter().filter_map(|l| l[key].as_f64()).collect() };
        let (train, valid) = (all("loss"), all("eval_loss"));
        let order = if task.name == MLM.name { 2_f64.ln() } else { 0.0 };
        let expected = f64::from(VOCAB).ln() + order;
        assert!(
            (train[0] - expected).abs() < 0.3,
            "{}: first {}, expected {expected}",
            task.name,
            train[0]
        );
        assert!(train[63] < train[0] - 1.0, "{}: {train:?}", task.name);
        assert!(valid.len() == 8 && valid[7] < valid[0] - 0.3, "{}: {valid:?}", task.name);
        let recorded = lab.path(task.name).join("config.toml");
        let recorded = Config::load(recorded.to_str().unwrap(), &[]).unwrap();
        for (key, expected) in task.special {
            let mut given = recorded.data.special.given();
            let found = given.find(|(name, _)| name == key).map(|(_, id)| id);
            assert_eq!(found, Some(*expected), "data.special.{key} of {}", task.name);
        }
        // A model with a decoder generates, from the recorded first token to the recorded last.
        if task.name != MLM.name {
            let mut command = trainer("generate", std::path::Path::new("--ckpt"));
            command.arg(lab.path(task.name)).args(["--prompt", "20 21 22 23", "--json"]);
            command.args(["--temperature", "0", "--tokens", "8"]);
            let output = command.output().unwrap();
            assert_success(&output);
            let answer: Value = serde_json::from_slice(&output.stdout).unwrap();
            assert!(answer["tokens"].as_u64().unwrap() > 0, "{answer}");
        }
    }
}

/// Without the order of parts the loss has one term less.
#[test]
fn bert_learns_without_the_order_of_sentences() {
    let lab = Lab::new();
    let keys = [("data.sentence_order", "false"), ("run.budget", "{ steps = 8 }")];
    assert_success(&train(&MLM.config(&lab, "run", &keys)));
    let first = lab.log_lines("run")[0]["loss"].as_f64().unwrap();
    assert!((first - f64::from(VOCAB).ln()).abs() < 0.3, "{first}");
    // The head of the order gets no gradient.
    let moments = lab.final_tensors("run");
    let of_order = moments.iter().filter(|(name, _)| name.contains("ExpAvg cls.seq_relationship"));
    let of_order: Vec<_> = of_order.collect();
    assert_eq!(of_order.len(), 2);
    assert!(of_order.iter().all(|(_, bytes)| bytes.iter().all(|byte| *byte == 0)));
}

/// In very short samples nothing is masked, and a micro-batch may have no others.
#[test]
fn a_micro_batch_without_masked_tokens_trains() {
    let lab = Lab::new();
    let config = MLM.load(&lab, "run", &[]);
    let mut batches = read(&config, DeviceMesh::ALONE, 0, None);
    batches.truncate(2);
    let AnyBatch::Masked(first) = &mut batches[0] else { panic!("of BERT") };
    first.loss_mask.fill(0.0);
    let mut trainer = Trainer::new(&config).unwrap();
    let report = trainer.step(&config.optim, &batches, 1, 0.001).unwrap();
    assert!((report.loss - f64::from(VOCAB).ln() - 2_f64.ln()).abs() < 0.3, "{report:?}");
    assert!(report.grad_norm > 0.0, "{report:?}");
    let AnyBatch::Masked(second) = &mut batches[1] else { panic!("of BERT") };
    second.loss_mask.fill(0.0);
    let report = trainer.step(&config.optim, &batches, 2, 0.001).unwrap();
    assert!((report.loss - 2_f64.ln()).abs() < 0.3, "the order alone: {report:?}");
}

/// A task, keys of its config, and the expected error.
type Case<'a> = (Task, &'a [(&'a str, &'a str)], &'a str);

/// Errors that would occur far from their cause are reported before the run starts.
#[test]
fn invalid_settings_are_refused_with_the_reason() {
    let lab = Lab::new();
    let plain = format!("'{}'", lab.path("corpus").display());
    let triple = {
        ENCDEC.load(&lab, "unused", &[]);
        format!("'{}'", lab.path("triple").display())
    };
    let built_in: &[(&str, &str)] = &[("data.tokenizer", "'gpt2'"), ("model.vocab", "50257")];
    let cases: [Case<'_>; 9] = [
        (ENCDEC, &[("data.train", &plain)], "expected three token files that end in _context"),
        (SPANS, &[("data.train", &triple)], "found three with contexts and targets"),
        (
            MLM,
            &[("data.train", &plain)],
            "a sequence for each sentence, found 300 sequences in 300 documents",
        ),
        (SPANS, &[("data.train", &plain)], "again with `preprocess --split-sentences`"),
        (MLM, built_in, "data.special.mask is not set, and no token below model.vocab = 50257"),
        (SPANS, built_in, "data.special.sentinels is not set"),
        (ENCDEC, built_in, "data.special.pad is not set"),
        (MLM, &[("model.vocab", "150")], "expected at most model.vocab = 150 ids, found 200"),
        (ENCDEC, &[("data.train", "'/nowhere/corpus'")], "/nowhere"),
    ];
    for (task, keys, expected) in cases {
        let config = task.load(&lab, "run", keys);
        let open = || Data::new(open_corpus(&config)?, &config);
        let error = open().unwrap_err().to_string();
        assert!(error.contains(expected), "{} {keys:?}: {error}", task.name);
    }
    // `plan` reports them too, and needs no corpus for the rest.
    let plan = |task: Task, keys: &[(&str, &str)]| {
        let output = trainer("plan", &task.config(&lab, "run", keys)).output().unwrap();
        (output.status.code(), text(&output.stdout) + &text(&output.stderr))
    };
    let (code, printed) = plan(ENCDEC, &[("data.train", &plain)]);
    assert_eq!(code, Some(2), "{printed}");
    assert!(printed.contains("expected three token files that end in"), "{printed}");
    let (code, printed) = plan(MLM, built_in);
    assert!(code == Some(2) && printed.contains("data.special.mask"), "{printed}");
    let nowhere = [("data.train", "'/nowhere/corpus'")];
    let (code, printed) = plan(SPANS, &nowhere);
    assert!(code == Some(1) && printed.contains("/nowhere/corpus"), "{printed}");
    let mut command = trainer("plan", &SPANS.config(&lab, "run", &nowhere));
    let output = command.arg("--no-data").output().unwrap();
    assert_success(&output);
    assert_eq!(plan(ENCDEC, &[]).0, Some(0));
}

/// Too few sentinels for a sample, and a decoder that is too short for it, end a run with the
/// sample and the key.
#[test]
fn samples_that_do_not_fit_end_a_run_with_the_reason() {
    let lab = Lab::new();
    for (task, keys, expected) in [
        (
            SPANS,
            [("data.special.sentinels", "[190, 190]")],
            "expected at most 1 masked spans, found more",
        ),
        (
            ENCDEC,
            [("data.special.sentinels", "[190, 191]")],
            "expected fewer spans than the 2 sentinels",
        ),
        (ENCDEC, [("data.special.eod", "20")], "found end-of-document token 20 in the context"),
    ] {
        let output = train(&task.config(&lab, "run", &keys));
        let stderr = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{stderr}");
        assert!(stderr.contains(expected), "{} {keys:?}: {stderr}", task.name);
    }
}

/// Ids of the config take precedence over those of the tokenizer, and a config that records them
/// needs no tokenizer for them.
#[test]
fn given_ids_take_precedence() {
    let lab = Lab::new();
    let config =
        SPANS.load(&lab, "run", &[("data.special", "{ bos = 7, sentinels = [150, 140] }")]);
    let found = with_special(config).unwrap();
    assert_eq!((found.data.special.bos, found.data.special.eos), (Some(7), Some(5)));
    assert_eq!(found.data.special.sentinel_ids()[..3], [150, 149, 148]);
    let mut again = found.clone();
    again.data.tokenizer = format!("null:{VOCAB}");
    assert_eq!(with_special(again.clone()).unwrap(), again);
}
