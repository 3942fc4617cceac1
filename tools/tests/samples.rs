//! `feedline samples` as a user runs it.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail by panicking")]

use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;
use storage::simulated::Model;

fn samples(args: &[&str]) -> Output {
    let corpora = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/gpt_cache");
    let mut command = Command::new(env!("CARGO_BIN_EXE_feedline"));
    command.current_dir(corpora).arg("samples").args(args).output().unwrap()
}

fn read(args: &[&str]) -> Value {
    let output = samples(&[args, &["--hash", "--json"]].concat());
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{told}");
    serde_json::from_slice(&output.stdout).unwrap()
}

/// What megatron-core 0.16.1 gave in a DataLoader of PyTorch 2.11 for the same settings:
/// `loader/benches/peers/megatron_loader.py PREFIX --seq-length L --samples N --first F`.
#[test]
fn the_stream_is_that_of_megatrons_dataset() {
    let whole = ["corpus_a", "--seq-length", "16", "--samples", "190"];
    let theirs = "c2988c0606f049df80f5dffeafdf3e3cdc71e8e3c96304cd39d69b198570c46a";
    let manners: [&[&str]; 4] =
        [&[], &["--depth", "1"], &["--micro-batch", "3"], &["--window", "1"]];
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

/// A simulated store gives the same stream, and says what it is, to programs and to people.
#[test]
fn a_simulated_store_gives_the_same_stream() {
    let whole = ["corpus_a", "--seq-length", "16", "--samples", "190"];
    for model in Model::NAMES {
        // The built-in latencies a hundredth as long.
        let quick = format!("{model},latency_us.read=[10, 90],latency_us.meta=[10, 90],stall=[]");
        let read = read(&[&whole[..], &["--simulate", &quick]].concat());
        assert_eq!(read["sha256"], self::read(&whole)["sha256"], "{model}");
        let label = format!("simulated: {model}, not measured");
        assert!(read["simulated"].as_str().unwrap().starts_with(&label), "{read:#}");
        let said = samples(&[&whole[..], &["--simulate", &quick]].concat());
        assert!(String::from_utf8_lossy(&said.stdout).contains(&label));
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
fn what_cannot_be_read_is_told() {
    for (args, due) in [
        (&["no_such_corpus"][..], "no_such_corpus"),
        (&["corpus_a", "--seq-length", "0"], "due 1 to"),
        (&["corpus_a", "--order", "block", "--seq-length", "1000000000"], "sample"),
        (&["corpus_a", "--rank", "2", "--ranks", "2"], "ranks"),
    ] {
        let output = samples(args);
        let told = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{args:?}: {told}");
        assert!(told.contains(due), "{args:?}: {told}");
    }
}
