//! Text of a trained model: the same with and without its cache, and the same for the same seed.

use std::path::Path;

use crate::common::{Lab, assert_success, imported, text, train};
use storage::s3_server::S3Server;
use tch::Tensor;
use trainer::Result;
use trainer::config::Config;
use trainer::generate::{GenerateOptions, Sampling, Trained};
use trainer::model::KvCache;

const GREEDY: Sampling = Sampling { temperature: 0.0, top_k: 0, top_p: 1.0 };

#[test]
fn cached_decoding_equals_a_full_pass() {
    let text = "run = { dir = 'unused', budget = { steps = 1 } }
         model = { layers = 3, hidden = 24, heads = 3, vocab = 97, seq_len = 20 }
         data = { train = 'unused' }
         batch = { global = 1, micro = 1 }
         optim = { lr = { peak = 0.001 } }";
    let config = Config::from_toml("test", text).unwrap();
    let trainer = trainer::Trainer::new(&config).unwrap();
    let stage = trainer.stage();
    let leaves = stage.leaves(trainer.state()[0], tch::Kind::Float).unwrap();
    let tokens: Vec<i64> = (0..20).map(|i| i * 29 % 97).collect();
    let at_once = {
        let tokens = Tensor::from_slice(&tokens).unsqueeze(0);
        stage.next(&leaves, &tokens, &mut KvCache::default()).unwrap()
    };
    let mut cache = KvCache::default();
    // A prompt of seven, then one by one.
    let mut start = 0;
    for end in [7].into_iter().chain(8..=20) {
        let new = Tensor::from_slice(&tokens[start..end]).unsqueeze(0);
        let hidden = stage.next(&leaves, &new, &mut cache).unwrap();
        let expected = at_once.narrow(0, start as i64, (end - start) as i64);
        let error = (hidden - expected).abs().max().double_value(&[]);
        assert!(error < 1e-5, "tokens {start} to {end}: off by {error}");
        start = end;
    }
    assert_eq!(cache.tokens(), 20);
    let logits = stage.logits(&leaves, &at_once).unwrap();
    assert_eq!(logits.size(), [20, 97]);
}

/// The options of a URL are at its end: the names of steps and folders are before them.
#[test]
fn a_checkpoint_in_a_bucket_is_found_by_its_url() {
    let (lab, server) = (Lab::new(), S3Server::start().unwrap());
    let dir = format!("'{}'", server.url("run/ckpt"));
    let keys = [("run.budget", "{ steps = 8 }"), ("checkpoint.dir", dir.as_str())];
    assert_success(&train(&lab.config("run", &keys)));
    for (place, step) in [
        ("run", 8),
        ("run/", 8),
        ("run/ckpt", 8),
        ("run/ckpt/step-000000000004", 4),
        ("run/ckpt/step-000000000008/", 8),
    ] {
        for option in ["", "&depth=9", "&region=us-east-1"] {
            let url = server.url(place) + option;
            let trained = Trained::open(&url, None).unwrap_or_else(|e| panic!("{url}: {e}"));
            assert_eq!(trained.step(), step, "{url}");
        }
    }
    let (url, below) = (server.url("other"), server.url("other/ckpt"));
    let error = Trained::open(&url, None).unwrap_err().to_string();
    let expected =
        format!("cannot find a checkpoint in {url}: no complete step-* there or in {below}");
    assert!(error.contains(&expected), "{error}");
}

#[test]
fn a_checkpoint_generates_the_learned_pattern() {
    let lab = Lab::new();
    assert_success(&train(&lab.config("run", &[("run.budget", "{ steps = 150 }")])));
    let place = lab.path("run").to_str().unwrap().to_owned();
    let trained = Trained::open(&place, None).unwrap();
    assert_eq!(trained.step(), 150);
    let write_all = |prompt: &[u32], options: &GenerateOptions| {
        let mut texts = vec![Vec::new(); options.samples];
        let emit = &mut |sample: usize, token| {
            texts[sample].push(token);
            Ok(())
        };
        trained.write(prompt, options, emit).map(|()| texts)
    };
    let write = |prompt: &[u32], options: &GenerateOptions| -> Result<Vec<u32>> {
        Ok(write_all(prompt, options)?.swap_remove(0))
    };
    // Longer than the model's 16 positions: it continues from the newer half.
    let options = GenerateOptions {
        samples: 1,
        tokens_min: 0,
        tokens_max: 40,
        sampling: GREEDY,
        seed: 1,
        stop: None,
        start: 0,
    };
    let greedy = write(&[0, 13, 26, 39], &options).unwrap();
    assert_eq!(greedy.len(), 40);
    let steps = |t: &[u32]| {
        t.windows(2).filter(|w| matches!((w[1] + 500 - w[0]) % 500, 13 | 26 | 39)).count()
    };
    assert!(steps(&greedy) > 20, "the corpus counts by 13, 26 or 39: {greedy:?}");
    assert_eq!(write(&[0, 13, 26, 39], &options).unwrap(), greedy);

    let wild = Sampling { temperature: 1.5, top_k: 0, top_p: 1.0 };
    let sampled = |seed| write(&[0], &GenerateOptions { sampling: wild, seed, ..options }).unwrap();
    assert_eq!(sampled(3), sampled(3));
    assert_ne!(sampled(3), sampled(4));
    // Samples do not influence one another.
    let three =
        write_all(&[0], &GenerateOptions { samples: 3, sampling: wild, seed: 3, ..options })
            .unwrap();
    assert_eq!(three[0], sampled(3));
    assert!(three[0] != three[1] && three[1] != three[2]);
    let stop = GenerateOptions { stop: Some(greedy[5]), ..options };
    let first = greedy.iter().position(|token| *token == greedy[5]).unwrap();
    assert_eq!(write(&[0, 13, 26, 39], &stop).unwrap(), greedy[..first]);

    let longer = GenerateOptions { tokens_min: first + 3, ..stop };
    let longer = write(&[0, 13, 26, 39], &longer).unwrap();
    assert!(longer.len() >= first + 3 && !longer.contains(&greedy[5]), "{longer:?}");

    let folder = lab.path("run/ckpt/step-000000000148").to_str().unwrap().to_owned();
    assert_eq!(Trained::open(&folder, None).unwrap().step(), 148);
    assert!(write(&[], &options).is_err());
    assert!(write(&[500], &options).unwrap_err().to_string().contains("found token 500"));
    let error = Trained::open(lab.path("").to_str().unwrap(), None).unwrap_err().to_string();
    assert!(error.contains("no complete step-*"), "{error}");
}

/// The model of `reference/t5_generate.py`, which fills the masked spans of a text.
#[test]
fn t5_generation_matches_transformers() {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/t5_generate");
    let model = "family = 't5', layers = 2, hidden = 24, heads = 2, head_dim = 8, ffn = 32,
                 vocab = 61, seq_len = 16, dec_len = 16, relative_buckets = 8, relative_max = 16";
    let folder = imported(&golden, model, "null");
    let config = Config::load(folder.path().join("model.toml").to_str().unwrap(), &[]).unwrap();
    let place = folder.path().join("ckpt").display().to_string();
    let trained = Trained::open(&place, Some(config)).unwrap();
    let cases = std::fs::read_to_string(golden.join("expected.json")).unwrap();
    let cases: Vec<serde_json::Value> = serde_json::from_str(&cases).unwrap();
    assert_eq!(cases.len(), 6);
    for case in cases {
        let count = |key: &str| case[key].as_u64().unwrap() as usize;
        let prompt: Vec<u32> = serde_json::from_value(case["prompt"].clone()).unwrap();
        let options = GenerateOptions {
            samples: 2,
            tokens_min: count("tokens_min"),
            tokens_max: count("tokens_max"),
            sampling: GREEDY,
            seed: 1,
            stop: Some(1),
            start: 0,
        };
        let mut texts = [Vec::new(), Vec::new()];
        let emit = &mut |sample: usize, token| {
            texts[sample].push(token);
            Ok(())
        };
        trained.write(&prompt, &options, emit).unwrap();
        for text in texts {
            assert_eq!(serde_json::json!(text), case["tokens"], "of {prompt:?}");
        }
    }
}

#[test]
fn the_command_prints_text() {
    let lab = Lab::new();
    assert_success(&train(&lab.config("run", &[("run.budget", "{ steps = 4 }")])));
    let generate = |more: &[&str]| {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_trainer"));
        command.arg("generate").arg("--ckpt").arg(lab.path("run")).env("OMP_NUM_THREADS", "1");
        command.args(more).output().unwrap()
    };
    // A prompt of token 0, "!"; the test vocabulary has GPT-2's first 500.
    let output = generate(&["--prompt", "!", "--tokens", "12", "--seed", "7"]);
    assert_success(&output);
    assert!(text(&output.stdout).starts_with('!') && text(&output.stdout).ends_with('\n'));
    let again = generate(&["--prompt", "!", "--tokens", "12", "--seed", "7"]);
    assert_eq!(output.stdout, again.stdout);
    std::fs::write(lab.path("prompts"), "!\n! the\n").unwrap();
    let prompts = lab.path("prompts").display().to_string();
    let output = generate(&["--prompts", &prompts, "--samples", "2", "--tokens", "5", "--json"]);
    assert_success(&output);
    let lines: Vec<serde_json::Value> =
        text(&output.stdout).lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let of = |line: &serde_json::Value| (line["prompt"].clone(), line["sample"].clone());
    let expected =
        [("!", 0), ("!", 1), ("! the", 0), ("! the", 1)].map(|(p, s)| (p.into(), s.into()));
    assert_eq!(lines.iter().map(of).collect::<Vec<_>>(), expected);
    assert!(lines.iter().all(|line| line["tokens"] == 5));
    // The same from standard input, a line at a time.
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_trainer"));
    command.arg("generate").arg("--ckpt").arg(lab.path("run")).env("OMP_NUM_THREADS", "1");
    command.args(["--interactive", "--samples", "2", "--tokens", "5", "--json"]);
    command.stdin(std::fs::File::open(lab.path("prompts")).unwrap());
    assert_eq!(command.output().unwrap().stdout, output.stdout);
    // Its end-of-document token is beyond the test vocabulary.
    let output = generate(&["--tokens", "3"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output.stderr).contains("50256"), "{}", text(&output.stderr));
    assert_eq!(generate(&["--top-p", "1.5"]).status.code(), Some(2));
}
