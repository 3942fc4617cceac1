//! `feedline bench --config` replays the bytes that the run itself would read.

use std::collections::HashMap;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;

use feed::{AnyBatch, Data, open_corpus};
use indexed::{Builder, Dtype};
use loader::{DataFile, PieceRef, SampleOrder};
use recipe::config::Config;
use recipe::mesh::{DeviceMesh, MeshRank};
use serde_json::Value;
use storage::{Key, RangeRead};
use tools::bench::workload::replay::WrappedOrder;

/// Ids of the vocabulary; the last thirty are sentinels.
const VOCAB: u32 = 500;
const SENTINELS: std::ops::Range<i64> = 470..500;

/// One token file of documents of sentences.
fn write(folder: &Path, name: &str, documents: &[Vec<Vec<u32>>]) {
    let store = storage::open_url(folder.to_str().unwrap()).unwrap();
    let mut builder = Builder::create(&store, &Key::new(name).unwrap(), Dtype::U16).unwrap();
    for document in documents {
        document.iter().for_each(|sentence| builder.add_sequence(sentence).unwrap());
        builder.end_document().unwrap();
    }
    builder.finish().unwrap();
}

/// Text that differs in every sentence.
fn sentences(folder: &Path, name: &str) {
    let token = |document: u32, nth: u32, i: u32| 20 + (document * 131 + nth * 17 + i * 7) % 440;
    let sentence = |document, nth| -> Vec<u32> {
        (0..3 + (document + nth) % 9).map(|i| token(document, nth, i)).collect()
    };
    let document = |nth| (0..2 + nth % 5).map(|of| sentence(nth, of)).collect();
    write(folder, name, &(0..200).map(document).collect::<Vec<_>>());
}

/// CPM-2's three files: contexts with a marker for each span, the spans after their markers, and
/// start and length of each span.
fn triple(folder: &Path) {
    let mut parts = [Vec::new(), Vec::new(), Vec::new()];
    for document in 0..100_u32 {
        let (mut context, mut target, mut offsets) = (Vec::new(), Vec::new(), Vec::new());
        let spans = 2 + document % 6;
        for nth in 0..spans {
            context.extend((0..=(document + nth) % 8).map(|i| 20 + (document * 31 + i) % 440));
            context.push(VOCAB + nth);
            let start = target.len() as u32;
            target.push(VOCAB + nth);
            target.extend((0..=nth % 4).map(|i| 20 + (document + i) % 440));
            target.extend((nth + 1 == spans).then_some(7));
            offsets.extend([start, target.len() as u32 - start]);
        }
        for (part, tokens) in parts.iter_mut().zip([context, target, offsets]) {
            part.push(vec![tokens]);
        }
    }
    for (end, documents) in ["context", "target", "target_offset"].iter().zip(&parts) {
        write(folder, &format!("triple_{end}"), documents);
    }
}

/// The config of a run over a corpus of the folder, and its name.
fn config(folder: &Path, train: &str, keys: &str) -> (Config, String) {
    let text = format!(
        "run = {{ dir = 'elsewhere', budget = {{ steps = 12 }} }}
         model.layers = 2
         model.hidden = 32
         model.heads = 2
         model.vocab = {VOCAB}
         data.train = {train}
         data.split = '90,10,0'
         data.tokenizer = 'null:{VOCAB}'
         data.cache_dir = '{}'
         data.special.cls = 1
         data.special.sep = 2
         data.special.mask = 3
         data.special.pad = 0
         data.special.bos = 4
         data.special.eos = 5
         data.special.eod = 7
         data.special.sentinels = [{}, {}]
         batch = {{ global = 8, micro = 2 }}
         optim.lr.peak = 0.001
         eval.every = 0
         {keys}",
        folder.join("cache").display(),
        SENTINELS.start,
        SENTINELS.end - 1
    );
    let file = folder.join("run.toml");
    fs::write(&file, text).unwrap();
    let name = file.to_str().unwrap().to_owned();
    (Config::load(&name, &[]).unwrap(), name)
}

/// The tokens of pieces in the files.
fn tokens_of(order: &dyn SampleOrder, pieces: &[PieceRef]) -> Vec<i64> {
    let mut all = Vec::new();
    for piece in pieces {
        let DataFile { store, key, .. } = &order.sources()[piece.file as usize];
        let mut bytes = vec![0; piece.len_bytes as usize];
        let read = RangeRead { offset: piece.offset_bytes, buf: &mut bytes };
        store.open(key).unwrap().read_many(&mut [read]).unwrap();
        all.extend(bytes.chunks(2).map(|two| i64::from(u16::from_le_bytes([two[0], two[1]]))));
    }
    all
}

/// Restores masked tokens: the text of each row of a batch, and whether it was truncated.
fn texts_of(batch: &AnyBatch) -> Vec<(Vec<i64>, bool)> {
    let whole = |texts: Vec<Vec<i64>>| texts.into_iter().map(|text| (text, false)).collect();
    match batch {
        AnyBatch::Lm(b) => {
            let rows = b.tokens.chunks(b.seq_len).zip(b.labels.chunks(b.seq_len));
            whole(rows.map(|(row, labels)| [row, &labels[labels.len() - 1..]].concat()).collect())
        }
        AnyBatch::Masked(b) => {
            let row = |row: usize| {
                let at = row * b.seq_len..(row + 1) * b.seq_len;
                let there = at.filter(|at| b.padding_mask[*at] == 1);
                let original =
                    |at| if b.loss_mask[at] == 1.0 { b.labels[at] } else { b.tokens[at] };
                // Without CLS and SEP, whose ids are below those of the text.
                (there.map(original).filter(|token| *token >= 20).collect(), b.truncated[row])
            };
            (0..b.rows).map(row).collect()
        }
        AnyBatch::Spans(b) => {
            let row = |row: usize| {
                let mut hidden: HashMap<i64, Vec<i64>> = HashMap::new();
                let mut of = 0;
                for at in row * b.decoder_len..(row + 1) * b.decoder_len {
                    let (token, counts) = (b.labels[at], b.loss_mask[at] == 1.0);
                    if counts && SENTINELS.contains(&token) {
                        of = token;
                    } else if counts && token >= 20 {
                        hidden.entry(of).or_default().push(token);
                    }
                }
                let given = row * b.encoder_len..(row + 1) * b.encoder_len;
                let given = given.filter(|at| b.encoder_mask[*at] == 1);
                let text = given.flat_map(|at| {
                    let token = b.encoder_tokens[at];
                    hidden.get(&token).cloned().unwrap_or_else(|| vec![token])
                });
                (text.collect(), b.truncated[row])
            };
            (0..b.rows).map(row).collect()
        }
        AnyBatch::Triple(b) => {
            let row = |row: &[i64]| {
                let mark = |token: &i64| if SENTINELS.contains(token) { -1 } else { *token };
                row.iter().map(mark).collect()
            };
            whole(b.encoder_tokens.chunks(b.encoder_len).map(row).collect())
        }
    }
}

/// Reads all samples of a run as its trainer does, and compares them with the tokens at the
/// positions of the order.
fn check(config: &Config) {
    let order = feed::order_of(config).unwrap();
    let data = Data::new(open_corpus(config).unwrap(), config).unwrap();
    let mut batches =
        data.train_batches(config, MeshRank { mesh: DeviceMesh::ALONE, rank: 0 }, 0).unwrap();
    let (mut read, mut samples) = (Vec::new(), 0);
    loop {
        batches.fill(4, &mut read).unwrap();
        if read.is_empty() {
            break;
        }
        for batch in &read {
            for (text, is_cut) in texts_of(batch) {
                let mut pieces = Vec::new();
                order.pieces(samples, &mut pieces).unwrap();
                let is_triple = matches!(batch, AnyBatch::Triple(_));
                if is_triple {
                    // The encoder gets the context, the first of the three files of a document.
                    pieces.retain(|piece| piece.file % 3 == 0);
                }
                let mut stored = tokens_of(&*order, &pieces);
                if is_triple {
                    let mark = |token: &mut i64| *token = if *token >= 500 { -1 } else { *token };
                    stored.iter_mut().for_each(mark);
                }
                let is_there = stored.windows(text.len().max(1)).any(|part| part == text);
                assert!(
                    is_there && (is_cut || text == stored),
                    "{samples}: {text:?} of {stored:?}"
                );
                samples += 1;
            }
        }
    }
    assert_eq!(samples, config.samples_total());
}

const T5: &str = "model.family = 't5'\nmodel.seq_len = 48\nmodel.dec_len = 32";
const BERT: &str = "model.family = 'bert'\nmodel.seq_len = 48\ndata.sentence_order = false";
const CPM2: &str =
    "model.family = 't5'\nmodel.seq_len = 24\nmodel.dec_len = 24\ndata.objective = 'encdec'";

#[test]
fn order_matches_the_batches_of_a_run() {
    let folder = tempfile::tempdir().unwrap();
    sentences(folder.path(), "one");
    sentences(folder.path(), "two");
    triple(folder.path());
    let at = |name: &str| folder.path().join(name).display().to_string();
    let one = format!("'{}'", at("one"));
    let blend =
        format!("[{{ path = '{}', weight = 3.0 }}, {{ path = '{}' }}]", at("one"), at("two"));
    for (train, keys) in [
        (&one, "model.seq_len = 32"),
        (&blend, "model.seq_len = 32"),
        (&one, T5),
        (&blend, T5),
        (&one, BERT),
        (&format!("'{}'", at("triple")), CPM2),
    ] {
        check(&config(folder.path(), train, keys).0);
    }
}

/// A model's own order through the command, which writes nothing beside the corpus.
#[test]
fn t5_and_bert_are_replayed() {
    let (folder, target) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    sentences(folder.path(), "one");
    for keys in [T5, BERT] {
        let train = format!("'{}'", folder.path().join("one").display());
        let (_, name) = config(folder.path(), &train, keys);
        let mut command = Command::new(env!("CARGO_BIN_EXE_feedline"));
        command.args([
            "bench",
            target.path().to_str().unwrap(),
            "--json",
            "--no-fio",
            "--rounds=1",
        ]);
        command.args(["--patterns=replay", "--duration=50ms", "--bytes=16MiB", "--config", &name]);
        let output = command.stdin(Stdio::null()).output().unwrap();
        let err = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(0), "{err}");
        let report: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert!(
            report["method"]["order"].as_str().unwrap().ends_with("/one"),
            "{}",
            report["method"]
        );
        let ops = report["targets"][0]["patterns"][0]["ops"].as_u64().unwrap();
        assert!(ops > 0, "{report}");
        assert!(!folder.path().join("cache").exists(), "an index was kept");
        assert!(fs::read_dir(target.path()).unwrap().next().is_none());
    }
}

#[test]
fn shorter_file_keeps_adjacent_pieces_together() {
    let folder = tempfile::tempdir().unwrap();
    sentences(folder.path(), "one");
    let train = format!("'{}'", folder.path().join("one").display());
    let (config, _) = config(folder.path(), &train, T5);
    let order = feed::order_of(&config).unwrap();
    let source = order.sources()[0].clone();
    let pieces = |order: &dyn SampleOrder, sample| {
        let mut pieces = Vec::new();
        order.pieces(sample, &mut pieces).unwrap();
        pieces
    };
    let whole = WrappedOrder::new(Arc::clone(&order), source.clone());
    // A third of it.
    let short = DataFile { len_bytes: source.len_bytes / 3, ..source };
    let folded = WrappedOrder::new(Arc::clone(&order), short.clone());
    let (mut kept, mut all) = (0, 0);
    for sample in 0..order.sample_count() {
        let expected = pieces(&*order, sample);
        assert_eq!(pieces(&whole, sample), expected);
        let found = pieces(&folded, sample);
        assert_eq!(found.len(), expected.len());
        for (found, expected) in found.iter().zip(&expected) {
            assert_eq!(found.len_bytes, expected.len_bytes);
            assert!(found.offset_bytes + found.len_bytes <= short.len_bytes, "{found:?}");
        }
        let follow = found
            .windows(2)
            .filter(|two| two[1].offset_bytes == two[0].offset_bytes + two[0].len_bytes);
        kept += follow.count();
        all += found.len() - 1;
    }
    // Except for the samples that cross the wrap-around.
    assert!(kept * 20 >= all * 19, "{kept} of {all} neighbours");
}
