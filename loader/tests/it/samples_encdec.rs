//! Every sample against CPM-2's own dataset and masks: `tests/golden/samples/cpm2.json` has
//! their results for the same documents and seed; `tests/readers/cpm2_samples.py` generated it.

use std::sync::Arc;

use crate::common::{Folded, Random, cases, flag, number};
use indexed::{Builder, Dtype, GptIndex, GptIndexConfig, IndexedDataset, Split};
use loader::batch::{EncDecAssemble, EncDecBatch, EncDecConfig};
use loader::{Assemble, EncDecOrder, Error, PieceRef, Sample, SampleOrder};
use storage::{Key, RangeRead};

/// Ids of the stand-in for a tokenizer in `cpm2_samples.py`.
const VOCAB: u64 = 1000;
const EOD: u32 = 7;
const PAD: i64 = 5;
const SENTINEL: i64 = 810;

/// 150 documents of 2 to 25 visible spans and as many masked ones.
fn triple(folder: &std::path::Path, dtype: Dtype) -> [Arc<IndexedDataset>; 3] {
    let store = storage::open_url(folder.to_str().unwrap()).unwrap();
    let keys = ["context", "target", "target_offset"].map(|key| Key::new(key).unwrap());
    let mut builders = keys.each_ref().map(|key| Builder::create(&store, key, dtype).unwrap());
    let mut random = Random(3);
    for _ in 0..150 {
        let (mut context, mut target, mut offsets) = (Vec::new(), Vec::new(), Vec::new());
        let spans = 2 + random.below(24);
        for nth in 0..spans {
            let marker = (VOCAB + nth) as u32;
            let kept = 1 + random.below(8);
            context.extend((0..kept).map(|_| 20 + random.below(780) as u32));
            context.push(marker);
            let start = target.len() as u32;
            target.push(marker);
            let noise = 1 + random.below(5);
            target.extend((0..noise).map(|_| 20 + random.below(780) as u32));
            target.extend((nth + 1 == spans).then_some(EOD));
            offsets.extend([start, target.len() as u32 - start]);
        }
        for (builder, tokens) in builders.iter_mut().zip([context, target, offsets]) {
            builder.add_sequence(&tokens).unwrap();
            builder.end_document().unwrap();
        }
    }
    builders.into_iter().for_each(|builder| drop(builder.finish().unwrap()));
    keys.map(|key| Arc::new(IndexedDataset::open(&store, &key).unwrap()))
}

fn index(context: &IndexedDataset, encoder_len: usize) -> Arc<GptIndex> {
    let config = GptIndexConfig {
        dataset_path: "context".to_owned(),
        split: Some("100,0,0".to_owned()),
        seq_len: encoder_len as u64 - 1,
        seed: 1234,
        num_samples: None,
        add_extra_token: true,
        drop_last_partial_valid: true,
        tokenizer: serde_json::json!({}),
    };
    Arc::new(GptIndex::build(context, Split::Train, &config).unwrap())
}

fn config(encoder_len: usize, decoder_len: usize, reset: bool) -> EncDecConfig {
    EncDecConfig {
        encoder_len,
        decoder_len,
        vocab_size: VOCAB as i64,
        bos: 1,
        eod: i64::from(EOD),
        pad: PAD,
        sentinels: (SENTINEL..SENTINEL + 190).collect(),
        reset_position_ids: reset,
        reset_attention_mask: reset,
    }
}

/// Reads the pieces of a sample.
fn read(datasets: &[Arc<IndexedDataset>; 3], order: &EncDecOrder, number: u64) -> Raw {
    let mut pieces = Vec::new();
    order.pieces(number, &mut pieces).unwrap();
    let mut bytes = Vec::new();
    for piece in &pieces {
        let mut buf = vec![0; piece.len_bytes as usize];
        let reads = &mut [RangeRead { offset: piece.offset_bytes, buf: &mut buf }];
        datasets[piece.file as usize].bin().read_many(reads).unwrap();
        bytes.extend(buf);
    }
    Raw { number, pieces, bytes }
}

struct Raw {
    number: u64,
    pieces: Vec<PieceRef>,
    bytes: Vec<u8>,
}

impl Raw {
    fn sample<'a>(&'a self, order: &EncDecOrder) -> Sample<'a> {
        let Raw { number, pieces, bytes } = self;
        Sample { number: *number, origin: order.origin(*number), pieces, bytes }
    }
}

#[test]
fn samples_equal_cpm2s() {
    for dtype in [Dtype::U16, Dtype::I32] {
        let folder = tempfile::tempdir().unwrap();
        let datasets = triple(folder.path(), dtype);
        for case in cases("cpm2.json", "encdec") {
            let settings = &case["settings"];
            let encoder_len = number(settings, "encoder_len") as usize;
            let reset = flag(settings, "reset");
            let config = config(encoder_len, number(settings, "decoder_len") as usize, reset);
            let index = index(&datasets[0], encoder_len);
            let order = EncDecOrder::new(datasets.clone(), index, encoder_len).unwrap();
            assert_eq!(order.sample_count(), case["samples"].as_u64().unwrap());
            check(&datasets, &order, config, &case);
        }
    }
}

fn check(
    datasets: &[Arc<IndexedDataset>; 3],
    order: &EncDecOrder,
    config: EncDecConfig,
    case: &serde_json::Value,
) {
    let (encoder_len, decoder_len) = (config.encoder_len, config.decoder_len);
    let mut assemble = EncDecAssemble::new(config, vec![order.part()]).unwrap();
    let (mut batch, mut folded) = (EncDecBatch::default(), Folded::default());
    for number in 0..order.sample_count() {
        assemble.begin(&mut batch, number, 1);
        let raw = read(datasets, order, number);
        assemble.set_row(&mut batch, 0, &raw.sample(order)).unwrap();
        let expected = &case["first"][number as usize];
        if expected.is_object() {
            assert_eq!(serde_json::json!(batch.encoder_tokens), expected["contexts"], "{number}");
            assert_eq!(serde_json::json!(batch.decoder_tokens), expected["targets"], "{number}");
            assert_eq!(serde_json::json!(batch.labels), expected["labels"], "{number}");
        }
        let positions = |ids: &[i64], len: usize| match ids {
            [] => (0..len as i64).collect(),
            ids => ids.to_vec(),
        };
        folded.add("contexts", &batch.encoder_tokens, |value| value);
        folded.add("targets", &batch.decoder_tokens, |value| value);
        folded.add("labels", &batch.labels, |value| value);
        folded.add("ctx_eod_mask", &batch.encoder_eod, i64::from);
        folded.add("loss_mask", &batch.loss_mask, |value| value as i64);
        let encoder_positions = positions(&batch.encoder_position_ids, encoder_len);
        let decoder_positions = positions(&batch.decoder_position_ids, decoder_len);
        folded.add("enc_position_ids", &encoder_positions, |value| value);
        folded.add("dec_position_ids", &decoder_positions, |value| value);
        folded.add("enc_attention_mask", &batch.encoder_mask(0), i64::from);
        folded.add("dec_attention_mask", &batch.decoder_mask(0), i64::from);
        folded.add("cross_attention_mask", &batch.cross_mask(0), i64::from);
    }
    folded.check(case);
}

/// Inputs that CPM-2's program rejects or fails on, far from the cause: another vocabulary than
/// that of the files, an offset that overflowed 16 bits, too few sentinels.
#[test]
fn invalid_samples_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let datasets = triple(folder.path(), Dtype::U16);
    let order = EncDecOrder::new(datasets.clone(), index(&datasets[0], 48), 48).unwrap();
    let raw = read(&datasets, &order, 3);
    let check = |config: EncDecConfig, sample: &Sample<'_>, expected: &str| {
        let mut assemble = EncDecAssemble::new(config, vec![order.part()]).unwrap();
        let mut batch = EncDecBatch::default();
        assemble.begin(&mut batch, 3, 1);
        let error = assemble.set_row(&mut batch, 0, sample).unwrap_err();
        assert!(matches!(error, Error::Sample { sample: 3, .. }), "{error}");
        assert!(error.to_string().contains(expected), "{error}");
    };
    let good = config(48, 128, true);
    let sample = raw.sample(&order);
    check(
        EncDecConfig { vocab_size: 999, ..good.clone() },
        &sample,
        "files made for a vocabulary of ",
    );
    check(
        EncDecConfig { vocab_size: 1001, ..good.clone() },
        &sample,
        "files made for a vocabulary of ",
    );
    check(EncDecConfig { sentinels: vec![810, 811], ..good.clone() }, &sample, "sentinels");
    check(
        EncDecConfig { encoder_len: 47, ..good.clone() },
        &sample,
        "47 tokens of context, found 48",
    );
    let first = i64::from(u16::from_le_bytes([raw.bytes[0], raw.bytes[1]]));
    check(EncDecConfig { eod: first, ..good.clone() }, &sample, "end-of-document token ");
    let mut wrapped = raw.bytes.clone();
    let offsets = (raw.pieces[0].len_bytes + raw.pieces[1].len_bytes) as usize;
    wrapped[offsets..][..raw.pieces[2].len_bytes as usize].fill(0xff);
    check(good.clone(), &Sample { bytes: &wrapped, ..sample }, "16-bit offsets");
    check(good.clone(), &Sample { bytes: &raw.bytes[1..], ..sample }, "bytes in pieces");
    check(good, &Sample { pieces: &raw.pieces[1..], ..sample }, "bytes in pieces");
}

#[test]
fn refuses_three_datasets_of_different_documents() {
    let folders = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let [context, target, offset] = triple(folders[0].path(), Dtype::U16);
    let store = storage::open_url(folders[1].path().to_str().unwrap()).unwrap();
    let key = Key::new("short").unwrap();
    let mut short = Builder::create(&store, &key, Dtype::U16).unwrap();
    short.add_sequence(&[1]).unwrap();
    short.end_document().unwrap();
    short.finish().unwrap();
    let short = Arc::new(IndexedDataset::open(&store, &key).unwrap());
    let index = index(&context, 48);
    for datasets in [[context.clone(), short.clone(), offset], [context, target, short]] {
        let error = EncDecOrder::new(datasets, index.clone(), 48).unwrap_err();
        assert!(matches!(error, Error::Triple { found: 1, expected: 150, .. }), "{error}");
    }
}
