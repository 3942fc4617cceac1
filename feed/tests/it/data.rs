//! The samples of each rank: together those of a single rank, in its order, from one corpus or from
//! several.

use std::ops::Range;

use crate::common::Lab;
use feed::{AnyBatch, Data, NodePeers, open_corpus};
use recipe::config::Config;
use recipe::mesh::{DeviceMesh, MeshRank};
use serde_json::json;
use storage::Manifest;

/// The micro-batches of steps, as one rank of a mesh reads them.
fn read(
    config: &Config,
    mesh: DeviceMesh,
    rank: usize,
    samples: u64,
    steps: Range<u64>,
    job: Option<&str>,
) -> Vec<Vec<AnyBatch>> {
    let mut data = Data::new(open_corpus(config).expect("it is there"), config).expect("an order");
    if let Some(job) = job {
        let ranks = (0..mesh.ranks()).collect();
        data.share(NodePeers { job: job.to_owned(), ranks });
    }
    let mut batches =
        data.train_batches(config, MeshRank { mesh, rank }, samples).expect("enough samples");
    let (mut consumed, mut all) = (samples, Vec::new());
    for _ in steps {
        let global = config.batch.at(consumed);
        let mut step = Vec::new();
        batches.fill(global / config.batch.micro / mesh.dp as u64, &mut step).expect("no damage");
        consumed += global;
        all.push(step);
    }
    all
}

fn load(lab: &Lab, keys: &[(&str, &str)]) -> Config {
    let path = lab.config("run", keys);
    Config::load(path.to_str().expect("UTF-8"), &[]).expect("a good config")
}

const BATCH: [(&str, &str); 2] = [("batch.global", "16"), ("batch.micro", "2")];

fn check(lab: &Lab, keys: &[(&str, &str)], mesh: DeviceMesh, zero: &str, job: Option<&str>) {
    let config = load(lab, keys);
    let expected = read(&config, DeviceMesh::ALONE, 0, 0, 0..12, None);
    // Another number of ranks, from a step within the run.
    let config = load(lab, &[keys, &[("parallel.zero", zero)]].concat());
    let consumed = config.batch.samples_after(4);
    let ranks: Vec<Vec<Vec<AnyBatch>>> = std::thread::scope(|scope| {
        let read = |rank| {
            let config = &config;
            scope.spawn(move || read(config, mesh, rank, consumed, 4..12, job))
        };
        let threads: Vec<_> = (0..mesh.ranks()).map(read).collect();
        threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
    });
    let share = config.share(mesh.dp);
    for (rank, steps) in ranks.iter().enumerate() {
        for (found, expected) in steps.iter().zip(&expected[4..]) {
            let share = mesh.share(share, mesh.place(rank).dp, expected.len());
            let expected: Vec<&AnyBatch> = share.iter().map(|micro| &expected[*micro]).collect();
            assert_eq!(found.iter().collect::<Vec<_>>(), expected, "rank {rank} of {mesh:?}");
        }
    }
}

#[test]
fn replicas_share_the_samples_of_a_single_rank() {
    let lab = Lab::new();
    for (dp, zero) in [(1, "0"), (2, "0"), (4, "1"), (2, "2"), (4, "3")] {
        check(&lab, &BATCH, DeviceMesh { dp, ..DeviceMesh::ALONE }, zero, None);
    }
    check(&lab, &BATCH, DeviceMesh { dp: 2, pp: 2, ..DeviceMesh::ALONE }, "0", None);
}

#[test]
fn growing_batches_are_shared_too() {
    let lab = Lab::new();
    let ramp = [("batch.rampup", "{ start = 4, increment = 4, samples = 60 }")];
    check(
        &lab,
        &[&BATCH[..], &ramp].concat(),
        DeviceMesh { dp: 2, ..DeviceMesh::ALONE },
        "0",
        None,
    );
}

/// Ranks of one node with a node reader: replicas, and a pipeline whose ranks read the same.
#[test]
fn node_reader_reads_the_same() {
    let lab = Lab::new();
    for (number, mesh) in [
        DeviceMesh { dp: 4, ..DeviceMesh::ALONE },
        DeviceMesh { dp: 2, pp: 2, ..DeviceMesh::ALONE },
        DeviceMesh { tp: 2, ..DeviceMesh::ALONE },
    ]
    .into_iter()
    .enumerate()
    {
        let job = format!("data-test-{}-{number}", std::process::id());
        check(&lab, &BATCH, mesh, "0", Some(&job));
    }
}

/// The tests of the loader check the order of a blend; this one checks its weights.
#[test]
fn several_corpora_are_read_by_their_weights() {
    let lab = Lab::new();
    lab.corpus("other", 3);
    let both = format!(
        "[{{ path = '{}', weight = 3.0 }}, {{ path = '{}' }}]",
        lab.path("corpus").display(),
        lab.path("other").display()
    );
    let keys = [&BATCH[..], &[("data.train", &*both)]].concat();
    check(&lab, &keys, DeviceMesh { dp: 2, ..DeviceMesh::ALONE }, "0", None);
    let config = load(&lab, &keys);
    let steps = read(&config, DeviceMesh::ALONE, 0, 0, 0..12, None);
    let all: Vec<Vec<i64>> = steps.into_iter().flatten().flat_map(|batch| rows(&batch)).collect();
    let of_second = all.iter().filter(|row| row.iter().all(|token| *token >= 480)).count();
    assert_eq!((all.len(), of_second), (192, 48), "a quarter");
    let data = Data::new(open_corpus(&config).expect("there"), &config).expect("an order");
    assert_eq!(data.fingerprint().expect("read").as_array().map(Vec::len), Some(2));
}

fn rows(batch: &AnyBatch) -> Vec<Vec<i64>> {
    let AnyBatch::Lm(batch) = batch else { panic!("of running text") };
    batch.tokens.chunks(batch.seq_len).map(<[i64]>::to_vec).collect()
}

/// A nearly right prefix is refused, and the hint has the right one.
#[test]
fn nearly_right_prefix_is_refused_with_a_hint() {
    let lab = Lab::new();
    lab.corpus("tok/mine_text_document", 0);
    for (given, right) in [
        ("tok/mine", "tok/mine_text_document"),
        ("tok", "tok/mine_text_document"),
        ("corpus.bin", "corpus"),
        ("corpus.idx", "corpus"),
    ] {
        let train = format!("'{}'", lab.path(given).display());
        let refused = open_corpus(&load(&lab, &[("data.train", &train)])).unwrap_err().to_string();
        let hint = format!("(hint: there is {})", lab.path(right).display());
        assert!(refused.ends_with(&hint), "{refused}");
    }
}

/// The manifest of a corpus that `preprocess` wrote names its tokenizer.
#[test]
fn tokenizer_that_differs_from_the_corpus_is_reported() {
    let lab = Lab::new();
    let doubts = |tokenizer: &str| {
        let config = load(&lab, &[("data.tokenizer", tokenizer)]);
        let data = Data::new(open_corpus(&config).expect("there"), &config).expect("an order");
        data.doubts().to_vec()
    };
    assert_eq!(doubts("'null:500'"), [""; 0]);
    let expected = "data.tokenizer 'gpt2' has 50,257 tokens, model.vocab is 500; the model can";
    assert!(doubts("'gpt2'")[0].starts_with(expected), "{:?}", doubts("'gpt2'"));
    let made_by = |fingerprint: &str| {
        let tokenizer = json!({
            "name": "encdec", "vocab_size": 26_240, "fingerprint": fingerprint
        });
        let manifest = Manifest {
            format: "feedline-tokens".to_owned(),
            version: 1,
            files: Vec::new(),
            meta: json!({ "tokenizer": tokenizer }),
        };
        _ = std::fs::remove_file(lab.path("corpus.manifest.json"));
        let store = storage::open_url(lab.path("").to_str().expect("UTF-8")).expect("a store");
        let key = storage::Key::new("corpus.manifest.json").expect("a key");
        manifest.write(&*store, &key).expect("room");
    };
    made_by("0000000000000000");
    let found = doubts("'null:500'");
    let expected = "corpus was made with tokenizer \"encdec\" of 26240 tokens, data.tokenizer \
               'null:500' has 500 tokens; special tokens";
    assert!(found.len() == 1 && found[0].contains(expected), "{found:?}");
    let own = feed::open_tokenizer("null:500").expect("known");
    made_by(&own.fingerprint());
    assert_eq!(doubts("'null:500'"), [""; 0]);
}
