//! Runs `feedline samples` as a user does.

use std::path::Path;
use std::process::{Command, Output};

use indexed::IndexedDataset;
use serde_json::Value;
use storage::simulate::StoreModel;

fn samples(args: &[&str]) -> Output {
    let corpora = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/gpt_cache");
    let mut command = Command::new(env!("CARGO_BIN_EXE_feedline"));
    command.current_dir(corpora).arg("samples").args(args).output().unwrap()
}

fn read(args: &[&str]) -> Value {
    let output = samples(&[args, &["--hash", "--json"]].concat());
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{stderr}");
    serde_json::from_slice(&output.stdout).unwrap()
}

/// The output of megatron-core 0.16.1 in a DataLoader of PyTorch 2.11 for the same settings:
/// `loader/benches/peers/megatron_loader.py PREFIX --seq-length L --samples N --first F`.
#[test]
fn stream_equals_megatrons_dataset() {
    let whole = ["corpus_a", "--seq-length", "16", "--samples", "190"];
    let theirs = "c2988c0606f049df80f5dffeafdf3e3cdc71e8e3c96304cd39d69b198570c46a";
    let manners: [&[&str]; 4] =
        [&[], &["--depth", "1"], &["--micro-batch", "3"], &["--window", "1MiB"]];
    for manner in manners {
        let read = read(&[&whole[..], manner].concat());
        assert_eq!(
            (&read["samples"], &read["sha256"]),
            (&190.into(), &theirs.into()),
            "{manner:?}"
        );
    }
    let from_100 = ["corpus_b", "--seq-length", "7", "--first", "100", "--samples", "300"];
    let theirs = "c4d84d808cd924f16d56fd987c7c51aa863b607db1e4afcbf746a6315ae2f720";
    assert_eq!(read(&from_100)["sha256"], theirs);
}

/// A simulated store gives the same stream, and is labelled as simulated in JSON and text.
#[test]
fn a_simulated_store_gives_the_same_stream() {
    let whole = ["corpus_a", "--seq-length", "16", "--samples", "190"];
    for model in StoreModel::NAMES {
        // The built-in latencies a hundredth as long.
        let quick = format!("{model},latency_us.read=[10, 90],latency_us.meta=[10, 90],stall=[]");
        let read = read(&[&whole[..], &["--simulate", &quick]].concat());
        assert_eq!(read["sha256"], self::read(&whole)["sha256"], "{model}");
        let label = format!("simulated: {model}, not measured");
        assert!(read["simulated"].as_str().unwrap().starts_with(&label), "{read:#}");
        let output = samples(&[&whole[..], &["--simulate", &quick]].concat());
        assert!(String::from_utf8_lossy(&output.stdout).contains(&label));
    }
    assert!(read(&whole).get("simulated").is_none());
}

/// The ranks' samples together are those of one rank.
#[test]
fn every_rank_has_its_share() {
    let counts = [0, 1, 2].map(|rank: u32| {
        let rank = rank.to_string();
        let args = ["corpus_a", "--seq-length", "16", "--samples", "190", "--ranks", "3"];
        read(&[&args[..], &["--rank", &rank]].concat())["samples"].as_u64().unwrap()
    });
    assert_eq!(counts.iter().sum::<u64>(), 190);
}

#[test]
fn invalid_arguments_are_refused() {
    for (args, expected) in [
        (&["no_such_corpus"][..], "no_such_corpus"),
        (&["corpus_a", "--seq-length", "0"], "seq_len: expected 1 to 2147483647, found 0"),
        (&["corpus_a", "--order", "block", "--seq-length", "1000000000"], "sample"),
        (&["corpus_a", "--rank", "2", "--ranks", "2"], "ranks"),
    ] {
        let output = samples(args);
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{args:?}: {stderr}");
        assert!(stderr.contains(expected), "{args:?}: {stderr}");
    }
}

/// A run over the golden corpora, whose tokens are shown as their numbers.
fn run(folder: &Path, train: &str) -> String {
    let text = format!(
        "run = {{ dir = 'r', budget = {{ samples = 96 }} }}
         model = {{ layers = 1, hidden = 8, heads = 1, vocab = 70000, seq_len = 16 }}
         data = {{ train = {train}, tokenizer = 'null:70000', split = '1,0,0' }}
         batch = {{ global = 12, micro = 4 }}
         eval.every = 0
         optim.lr.peak = 1e-3"
    );
    let file = folder.join("run.toml");
    std::fs::write(&file, text).unwrap();
    file.to_str().unwrap().to_owned()
}

/// The samples that a message of the trainer names can be shown, with their position and text.
#[test]
fn samples_of_a_run_are_shown() {
    let folder = tempfile::tempdir().unwrap();
    let config = run(folder.path(), "['corpus_a', 'corpus_b']");
    let config = config.as_str();
    let output = samples(&[config, "--show", "--first", "36", "--samples", "12", "--json"]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let shown: Value = serde_json::from_slice(&output.stdout).unwrap();
    let corpora = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/gpt_cache");
    let store = storage::open_url(corpora.to_str().unwrap()).unwrap();
    let open = |name| IndexedDataset::open(&store, &storage::Key::new(name).unwrap()).unwrap();
    let files = ["corpus_a", "corpus_b"].map(open);
    let number = |value: &Value| value.as_u64().unwrap();
    let mut used = [0, 0];
    for (at, sample) in (36..).zip(shown["samples"].as_array().unwrap()) {
        assert_eq!(sample["sample"], at);
        let parts = sample["parts"].as_array().unwrap();
        let tokens = parts.iter().map(|part| number(&part["tokens"])).sum::<u64>();
        assert_eq!(tokens, 17, "{sample}");
        for part in parts {
            let file = usize::from(part["file"].as_str().unwrap().contains("corpus_b"));
            let first = number(&part["first_token"]) as usize;
            let tokens = files[file].read_sequence(number(&part["sequence"])).unwrap();
            let expected = &tokens[first..first + number(&part["tokens"]) as usize];
            let text = part["text"].as_str().unwrap().split_whitespace();
            let found: Vec<i64> = text.map(|id| id.parse().unwrap()).collect();
            assert_eq!(found, expected, "{part}");
            used[file] += 1;
        }
    }
    assert!(used.iter().all(|count| *count > 0), "of both corpora: {used:?}");
    // Without numbers, the first step.
    let output = samples(&[config, "--show"]);
    let text = String::from_utf8_lossy(&output.stdout);
    let heads = text.lines().filter(|line| line.starts_with("sample ")).count();
    assert_eq!(heads, 12, "{text}");
    assert!(text.starts_with("sample 0, 17 tokens\n  "), "{text}");
    assert!(text.contains("corpus_a, sequence "), "{text}");

    let beyond = samples(&[config, "--show", "--first", "90", "--samples", "12"]);
    assert_eq!(beyond.status.code(), Some(2));
    let text = String::from_utf8_lossy(&beyond.stderr);
    assert!(
        text.contains("cannot show --first 90 --samples 12: expected samples below 96"),
        "{text}"
    );
}
