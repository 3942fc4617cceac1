//! Evaluation and generation with a trained model agree with other tools.
//!
//! The model and its tokenizer are those that `reference/eval.py` made with transformers; the
//! expected values are from transformers, and from Megatron's formulas in Python.

use crate::common;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use crate::common::{assert_success, text};
use indexed::{Builder, Dtype, IndexedDataset, Split};
use serde_json::Value;
use storage::Key;
use trainer::config::Config;
use trainer::eval::{
    CorpusTask, EvalOptions, ScoredRow, Window, Windows, corpus, judge, lambada, wikitext,
};
use trainer::generate::{GenerateOptions, Sampling, Trained};

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/eval").join(name)
}

fn expected() -> Value {
    serde_json::from_str(&fs::read_to_string(golden("expected.json")).unwrap()).unwrap()
}

/// A folder with the model, imported as a checkpoint, and a config.
fn imported() -> tempfile::TempDir {
    let model = "layers = 2, hidden = 16, heads = 2, vocab = 401, seq_len = 32";
    let tokenizer = format!("hf:{}", golden("tokenizer.json").display());
    common::imported(&golden(""), model, &tokenizer)
}

fn trained(folder: &Path) -> Trained {
    let config = Config::load(folder.join("model.toml").to_str().unwrap(), &[]).unwrap();
    Trained::open(folder.join("ckpt").to_str().unwrap(), Some(config)).unwrap()
}

fn assert_close(found: f64, reference: &Value) {
    let reference = reference.as_f64().unwrap();
    assert!(
        (found - reference).abs() <= 1e-5 * reference.abs(),
        "found {found}, reference {reference}"
    );
}

const EACH: EvalOptions = EvalOptions { batch: 3, stride: None };

#[test]
fn wikitext_matches_megatron() {
    let (folder, expected) = (imported(), expected());
    let trained = trained(folder.path());
    let tokenizer = trainer::open_tokenizer(&trained.config().data.tokenizer).unwrap();
    let text = fs::read_to_string(golden("wikitext.txt")).unwrap();
    let detokenized = trainer::eval::detokenize_wikitext(&text);
    assert_eq!(detokenized, expected["detokenized"].as_str().unwrap());
    let reference = &expected["wikitext"];
    // For any batch, and for any overlap of windows.
    for (batch, stride) in [(1, 8), (5, 8), (100, 8), (4, 32)] {
        let options = EvalOptions { batch, stride: Some(stride) };
        let mut reported = Vec::new();
        let progress = &mut |done, total| {
            reported.push((done, total));
            Ok(())
        };
        let report = wikitext(&trained, &*tokenizer, &text, options, progress).unwrap();
        assert_eq!(report.words, reference["words"].as_u64().unwrap());
        assert_eq!(report.tokens, reference["tokens"].as_u64().unwrap());
        assert_close(report.token_ratio, &reference["token_ratio"]);
        let reference = &reference[format!("stride_{stride}")];
        assert_close(report.loss_per_token, &reference["loss"]);
        assert_close(report.perplexity_per_token, &reference["perplexity"]);
        assert_close(report.perplexity_per_word_adjusted, &reference["adjusted"]);
        assert_eq!(reported.last(), Some(&(report.tokens + 1, report.tokens + 1)));
    }
    let progress = &mut |_, _| Ok(());
    for (text, stride, message) in [
        ("word", None, "expected 2 words and 2 tokens, found 1 and"),
        ("a b c", Some(33), "found 33"),
    ] {
        let options = EvalOptions { batch: 1, stride };
        let error =
            wikitext(&trained, &*tokenizer, text, options, progress).unwrap_err().to_string();
        assert!(error.contains(message), "{error}");
    }
}

#[test]
fn lambada_counts_words_and_tokens() {
    let (folder, reference) = (imported(), &expected()["lambada"]);
    let trained = trained(folder.path());
    let tokenizer = trainer::open_tokenizer(&trained.config().data.tokenizer).unwrap();
    let lines = fs::read_to_string(golden("lambada.jsonl")).unwrap();
    let progress = &mut |_, _| Ok(());
    for batch in [1, 7, 64] {
        let options = EvalOptions { batch, stride: None };
        let report = lambada(&trained, &*tokenizer, &lines, options, progress).unwrap();
        assert_eq!(report.examples, reference["examples"].as_u64().unwrap());
        assert_eq!(report.last_word_correct, reference["last_word"].as_u64().unwrap());
        assert_eq!(report.last_token_correct, reference["last_token"].as_u64().unwrap());
        assert_close(report.last_word_perplexity, &reference["word_perplexity"]);
        assert!(
            report.last_word_correct < report.last_token_correct,
            "otherwise the test shows nothing"
        );
        assert_eq!(report.cut, report.examples, "every passage is longer than the model");
    }
    for (lines, message) in [
        ("", "expected a line of JSON, found none"),
        ("{\"text\": \"a b\"}\n{}", "line 2:"),
        ("no", "line 1:"),
    ] {
        let error = lambada(&trained, &*tokenizer, lines, EACH, progress).unwrap_err().to_string();
        assert!(error.contains(message), "{error}");
    }
}

#[test]
fn a_corpus_is_scored_by_its_split() {
    let (folder, expected) = (imported(), expected());
    let trained = trained(folder.path());
    let store = storage::open_url(folder.path().to_str().unwrap()).unwrap();
    let prefix = Key::new("corpus").unwrap();
    let mut builder = Builder::create(&store, &prefix, Dtype::U16).unwrap();
    for document in expected["corpus"]["documents"].as_array().unwrap() {
        let tokens =
            document.as_array().unwrap().iter().map(|token| token.as_u64().unwrap() as u32);
        builder.add_sequence(&tokens.collect::<Vec<u32>>()).unwrap();
        builder.end_document().unwrap();
    }
    builder.finish().unwrap();
    let dataset = IndexedDataset::open(&store, &prefix).unwrap();
    let mut task = CorpusTask { split: "50,50".into(), which: Split::Valid, tokens_max: None };
    let score = |task: &CorpusTask| corpus(&trained, &dataset, task, EACH, &mut |_, _| Ok(()));
    let report = score(&task).unwrap();
    assert_eq!((report.sequences, report.window_tokens), (5, 32));
    assert_eq!(report.tokens, expected["corpus"]["tokens"].as_u64().unwrap());
    assert_close(report.loss_per_token, &expected["corpus"]["loss"]);
    assert_close(report.bits_per_token * 2.0_f64.ln(), &expected["corpus"]["loss"]);
    task.tokens_max = Some(40);
    assert_eq!(score(&task).unwrap().tokens, 39);
    task.which = Split::Test;
    assert!(score(&task).unwrap_err().to_string().contains("cannot evaluate test split"));
}

#[test]
fn every_token_counts_once() {
    for (tokens, len, stride) in
        [(2, 1, 1), (9, 4, 4), (10, 4, 4), (31, 8, 3), (5, 8, 8), (40, 8, 1)]
    {
        let mut next = 1;
        for Window { begin, counts_from, end } in Windows::new(tokens, len, stride) {
            assert_eq!(counts_from, next, "{tokens} by {stride} in {len}");
            assert!(begin < counts_from && counts_from < end && end - begin <= len + 1);
            assert!(begin == 0 || counts_from - begin > len - stride, "too short a past");
            next = end;
        }
        assert_eq!(next, tokens);
    }
    assert_eq!(Windows::new(1, 4, 2).count(), 0);
}

/// Rows of different lengths in one batch have the same scores as each alone.
#[test]
fn padding_changes_nothing() {
    let folder = imported();
    let trained = trained(folder.path());
    let row = |len: u32, counts_from| ScoredRow {
        tokens: (0..len).map(|i| i * 37 % 401).collect(),
        counts_from,
    };
    let rows = [row(33, 1), row(2, 1), row(17, 16)];
    let together = judge(&trained, &rows).unwrap();
    assert_eq!(together.iter().map(Vec::len).collect::<Vec<_>>(), [32, 1, 1]);
    for (row, together) in rows.iter().zip(&together) {
        let alone = judge(&trained, std::slice::from_ref(row)).unwrap();
        for (alone, together) in alone[0].iter().zip(together) {
            assert!((alone.loss - together.loss).abs() < 1e-5);
        }
    }
    let strange = ScoredRow { tokens: vec![1, 401], counts_from: 1 };
    assert!(judge(&trained, &[strange]).unwrap_err().to_string().contains("found token 401"));
}

#[test]
fn greedy_text_matches_transformers() {
    let (folder, expected) = (imported(), expected());
    let trained = trained(folder.path());
    let tokenizer = trainer::open_tokenizer(&trained.config().data.tokenizer).unwrap();
    assert_eq!(tokenizer.eod(), Some(0));
    for case in expected["greedy"].as_array().unwrap() {
        let count = |key: &str| case[key].as_u64().unwrap() as usize;
        let mut prompt = Vec::new();
        tokenizer.encode(case["prompt"].as_str().unwrap(), &mut prompt);
        let options = GenerateOptions {
            samples: 2,
            tokens_min: count("tokens_min"),
            tokens_max: count("tokens_max"),
            sampling: Sampling { temperature: 0.0, top_k: 0, top_p: 1.0 },
            seed: 1,
            stop: tokenizer.eod(),
            start: 0,
        };
        let mut texts = [Vec::new(), Vec::new()];
        let emit = &mut |sample: usize, token| {
            texts[sample].push(token);
            Ok(())
        };
        trained.write(&prompt, &options, emit).unwrap();
        for text in texts {
            assert_eq!(serde_json::json!(text), case["tokens"], "after {}", case["prompt"]);
        }
    }
}

#[test]
fn candidates_match_transformers() {
    let filtered = &expected()["filtered"];
    let logits: Vec<f32> = serde_json::from_value(filtered["logits"].clone()).unwrap();
    for case in filtered["cases"].as_array().unwrap() {
        let sampling = Sampling {
            temperature: case["temperature"].as_f64().unwrap(),
            top_k: case["top_k"].as_u64().unwrap() as usize,
            top_p: case["top_p"].as_f64().unwrap(),
        };
        let mut found = sampling.candidates(&logits, None);
        found.sort_unstable_by_key(|candidate| candidate.0);
        let kept: Vec<u32> = found.iter().map(|candidate| candidate.0).collect();
        assert_eq!(serde_json::json!(kept), case["kept"], "{sampling:?}");
        for ((_, found), reference) in found.iter().zip(case["probs"].as_array().unwrap()) {
            assert_close(*found, reference);
        }
    }
}

fn eval(folder: &Path, args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_trainer"));
    command.arg("eval").args(args).arg("--ckpt").arg(folder.join("ckpt"));
    command.env("OMP_NUM_THREADS", "1").output().unwrap()
}

#[test]
fn the_command_prints_what_it_measured() {
    let (folder, expected) = (imported(), expected());
    let (file, lines) = (golden("wikitext.txt"), golden("lambada.jsonl"));
    let config = folder.path().join("model.toml");
    let config = ["--config", config.to_str().unwrap()];
    let wikitext = ["wikitext", file.to_str().unwrap(), "--stride", "8", "--json"];
    let output = eval(folder.path(), &[&wikitext[..], &config].concat());
    assert_success(&output);
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let keys: Vec<&String> = report.as_object().unwrap().keys().collect();
    let expected_keys = [
        "task",
        "step",
        "words",
        "tokens",
        "window_tokens",
        "stride_tokens",
        "loss_per_token",
        "perplexity_per_token",
        "token_ratio",
        "perplexity_per_word_adjusted",
    ];
    assert_eq!(keys, expected_keys);
    let adjusted = report["perplexity_per_word_adjusted"].as_f64().unwrap();
    assert_close(adjusted, &expected["wikitext"]["stride_8"]["adjusted"]);
    assert!(!text(&output.stderr).contains("heading"), "{}", text(&output.stderr));
    // Any text is scored, but not taken for WikiText.
    let other = folder.path().join("other.txt");
    fs::write(&other, "The harbour = a port.\n= It was built in 1,812. =\n").unwrap();
    let other = ["wikitext", other.to_str().unwrap()];
    let output = eval(folder.path(), &[&other[..], &config].concat());
    assert_success(&output);
    assert!(text(&output.stderr).contains("no line is a heading"), "{}", text(&output.stderr));
    let output =
        eval(folder.path(), &[&["lambada", lines.to_str().unwrap()], &config[..]].concat());
    assert_success(&output);
    assert!(text(&output.stdout).contains("last word correct"), "{}", text(&output.stdout));
    // An imported checkpoint has no config of its own.
    let output = eval(folder.path(), &["lambada", lines.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output.stderr).contains("config"), "{}", text(&output.stderr));
}
