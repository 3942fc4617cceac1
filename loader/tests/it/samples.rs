//! Every sample against Megatron's own datasets: `tests/golden/samples/megatron.json` has their
//! samples for the same corpora, settings and seeds; `tests/readers/megatron_samples.py` generated
//! it.

use std::sync::Arc;

use crate::common::{Folded, Random, cases, flag, number};
use indexed::{
    Builder, Dtype, GptIndex, GptIndexConfig, IndexedDataset, MaskedConfig, MaskedIndex,
    MaskedKind, Split,
};
use loader::batch::{
    BertAssemble, BertBatch, BertConfig, GptAssemble, GptConfig, Masking, NgramLengths, T5Assemble,
    T5Batch, T5Config, Vocabulary, pad_id,
};
use loader::{Assemble, Batch, MaskedOrder, PieceRef, Sample, SampleOrder, SampleOrigin};
use serde_json::Value;
use storage::{Key, RangeRead};

/// Ids of the stand-in for a tokenizer in `megatron_samples.py`.
const EOS: i64 = 5;
const EOD: i64 = 7;

struct Corpus {
    dataset: Arc<IndexedDataset>,
    bin: Vec<u8>,
    _folder: tempfile::TempDir,
}

impl Corpus {
    /// 300 documents of up to so many sentences of up to so many tokens, special ones among them.
    fn new(seed: u64, sentences_max: u64, tokens_max: u64, eod: Option<u32>) -> Corpus {
        let folder = tempfile::tempdir().unwrap();
        let store = storage::open_url(folder.path().to_str().unwrap()).unwrap();
        let key = Key::new("corpus").unwrap();
        let mut builder = Builder::create(&store, &key, Dtype::U16).unwrap();
        let mut random = Random(seed);
        for _ in 0..300 {
            for _ in 0..=random.below(sentences_max) {
                let len = random.below(tokens_max);
                let mut tokens: Vec<u32> = (0..len).map(|_| random.below(370) as u32).collect();
                tokens.extend(eod);
                builder.add_sequence(&tokens).unwrap();
            }
            builder.end_document().unwrap();
        }
        builder.finish().unwrap();
        let dataset = Arc::new(IndexedDataset::open(&store, &key).unwrap());
        let mut bin = vec![0; dataset.bin().len_bytes() as usize];
        dataset.bin().read_many(&mut [RangeRead { offset: 0, buf: &mut bin }]).unwrap();
        Corpus { dataset, bin, _folder: folder }
    }
}

fn row<T: Copy>(values: &[T], row: usize, len: usize) -> &[T] {
    &values[row * len..(row + 1) * len]
}

#[test]
fn gpt_samples_equal_megatrons() {
    let corpus = Corpus::new(1, 1, 60, Some(EOD as u32));
    for case in cases("megatron.json", "gpt") {
        let settings = &case["settings"];
        let which = if settings["part"] == "train" { Split::Train } else { Split::Valid };
        let index = GptIndexConfig {
            dataset_path: "corpus".to_owned(),
            split: Some("90,10,0".to_owned()),
            seq_len: 24,
            seed: 1234,
            num_samples: (which == Split::Train).then_some(700),
            add_extra_token: flag(settings, "add_extra_token_to_sequence"),
            drop_last_partial_valid: false,
            tokenizer: serde_json::json!({}),
        };
        let index = GptIndex::build(&corpus.dataset, which, &index).unwrap();
        assert_eq!(index.sample_count(), case["samples"].as_u64().unwrap(), "{settings}");
        let config = GptConfig {
            pad: pad_id(Some(number(settings, "pad")), &[EOS, EOD]),
            eod: Some(EOD),
            eod_mask_loss: flag(settings, "eod_mask_loss"),
            reset_position_ids: flag(settings, "reset_position_ids"),
            reset_attention_mask: flag(settings, "reset_attention_mask"),
            ..GptConfig::new(24)
        };
        check_gpt(&corpus, &index, &config, &case);
    }
}

fn check_gpt(corpus: &Corpus, index: &GptIndex, config: &GptConfig, case: &Value) {
    let mut assemble = GptAssemble::new(config.clone(), vec![Dtype::U16]).unwrap();
    let (mut batch, mut folded) = (Batch::default(), Folded::default());
    let (mut parts, mut pieces, mut bytes) = (Vec::new(), Vec::new(), Vec::new());
    for first in (0..index.sample_count()).step_by(5) {
        let rows = (index.sample_count() - first).min(5) as usize;
        assemble.begin(&mut batch, first, rows);
        for nth in 0..rows {
            let number = first + nth as u64;
            index.parts(&corpus.dataset, number, &mut parts);
            pieces.clear();
            bytes.clear();
            for part in &parts {
                let offset_bytes =
                    corpus.dataset.sequence_offset_bytes(part.sequence) + 2 * part.token_offset;
                let len_bytes = 2 * part.token_count;
                pieces.push(PieceRef { file: 0, offset_bytes, len_bytes });
                bytes.extend(&corpus.bin[offset_bytes as usize..][..len_bytes as usize]);
            }
            let origin = SampleOrigin { dataset: 0, sample: number };
            let sample = Sample { number, origin, pieces: &pieces, bytes: &bytes };
            assemble.set_row(&mut batch, nth, &sample).unwrap();
        }
        for nth in 0..rows {
            let position_ids: Vec<i64> = match &batch.position_ids[..] {
                [] => (0..24).collect(),
                all => row(all, nth, 24).to_vec(),
            };
            let whole = |name: &str| case["first"][first as usize + nth][name].clone();
            if let Value::Array(expected) = whole("tokens") {
                let expected: Vec<i64> =
                    expected.iter().map(|token| token.as_i64().unwrap()).collect();
                assert_eq!(row(&batch.tokens, nth, 24), expected, "tokens, {}", case["settings"]);
            }
            folded.add("tokens", row(&batch.tokens, nth, 24), |value| value);
            folded.add("labels", row(&batch.labels, nth, 24), |value| value);
            folded.add("loss_mask", row(&batch.loss_mask, nth, 24), |value| value as i64);
            folded.add("position_ids", &position_ids, |value| value);
            folded.add("attention_mask", &batch.attention_mask(nth), i64::from);
        }
    }
    folded.check(case);
}

fn masking(settings: &Value) -> Masking {
    let continues = |id: i64| id >= 10 && id % 3 == 0;
    let lengths = match (
        flag(settings, "masking_use_geometric_distribution"),
        flag(settings, "masking_use_longer_ngrams"),
    ) {
        (true, _) => NgramLengths::Geometric,
        (_, true) => NgramLengths::LongerFirst,
        _ => NgramLengths::ShorterFirst,
    };
    Masking {
        probability: settings["masking_probability"].as_f64().unwrap(),
        ngram_max: number(settings, "masking_max_ngram") as usize,
        lengths,
        full_words: flag(settings, "masking_do_full_word"),
        cls: 1,
        sep: 2,
        mask: 3,
        vocabulary: Vocabulary::new((0..400).map(|id| if continues(id) { "##x" } else { "x" })),
    }
}

/// Megatron's order of a corpus.
fn order(corpus: &Corpus, settings: &Value, kind: MaskedKind) -> MaskedOrder {
    let config = MaskedConfig {
        kind,
        dataset_path: "corpus".to_owned(),
        split: Some("100,0,0".to_owned()),
        seq_len: number(settings, "sequence_length") as u64,
        seed: number(settings, "random_seed") as u32,
        num_samples: Some(1500),
        tokenizer: Value::Null,
        masking_probability: settings["masking_probability"].as_f64().unwrap(),
        short_sequence_probability: 0.1,
        masking_max_ngram: number(settings, "masking_max_ngram") as u32,
        masking_do_full_word: flag(settings, "masking_do_full_word"),
        masking_do_permutation: false,
        masking_use_longer_ngrams: flag(settings, "masking_use_longer_ngrams"),
        masking_use_geometric_distribution: flag(settings, "masking_use_geometric_distribution"),
    };
    let index = MaskedIndex::build(&corpus.dataset, Split::Train, &config).unwrap();
    MaskedOrder::new(corpus.dataset.clone(), Arc::new(index)).unwrap()
}

/// Runs `check` for every sample of an order, with its bytes from the file.
fn for_each_sample(corpus: &Corpus, order: &MaskedOrder, mut check: impl FnMut(&Sample<'_>)) {
    let (mut pieces, mut bytes) = (Vec::new(), Vec::new());
    for number in 0..order.sample_count() {
        pieces.clear();
        bytes.clear();
        order.pieces(number, &mut pieces).unwrap();
        for piece in &pieces {
            bytes.extend(&corpus.bin[piece.offset_bytes as usize..][..piece.len_bytes as usize]);
        }
        let origin = order.origin(number);
        check(&Sample { number, origin, pieces: &pieces, bytes: &bytes });
    }
}

#[test]
fn bert_samples_equal_megatrons() {
    let corpus = Corpus::new(2, 8, 30, None);
    for case in cases("megatron.json", "bert") {
        let settings = &case["settings"];
        let seq_len = number(settings, "sequence_length") as usize;
        let two_parts = flag(settings, "classification_head");
        let kind = MaskedKind::Bert { classification_head: two_parts };
        let order = order(&corpus, settings, kind);
        assert_eq!(order.sample_count(), case["samples"].as_u64().unwrap());
        let config = BertConfig {
            seq_len,
            pad: pad_id(Some(number(settings, "pad")), &[EOS, EOD]),
            seed: number(settings, "random_seed") as u32,
            two_parts,
            masking: masking(settings),
        };
        let mut assemble = BertAssemble::new(config, vec![order.part()]).unwrap();
        let (mut batch, mut folded) = (BertBatch::default(), Folded::default());
        for_each_sample(&corpus, &order, |sample| {
            assemble.begin(&mut batch, sample.number, 1);
            assemble.set_row(&mut batch, 0, sample).unwrap();
            if let Value::Array(expected) = &case["first"][sample.number as usize]["text"] {
                let expected: Vec<i64> =
                    expected.iter().map(|token| token.as_i64().unwrap()).collect();
                assert_eq!(batch.tokens, expected, "sample {}, {settings}", sample.number);
            }
            folded.add("text", &batch.tokens, |value| value);
            folded.add("types", &batch.types, |value| value);
            folded.add("labels", &batch.labels, |value| value);
            folded.add("is_random", &batch.is_random, i64::from);
            folded.add("padding_mask", &batch.padding_mask, |value| value);
            folded.add("loss_mask", &batch.loss_mask, |value| value as i64);
            folded.add("truncated", &batch.truncated, i64::from);
        });
        folded.check(&case);
    }
}

#[test]
fn t5_samples_equal_megatrons() {
    let corpus = Corpus::new(2, 8, 30, None);
    for case in cases("megatron.json", "t5") {
        let settings = &case["settings"];
        let sequence_length_decoder = number(settings, "sequence_length_decoder") as u64;
        let order = order(&corpus, settings, MaskedKind::T5 { sequence_length_decoder });
        assert_eq!(order.sample_count(), case["samples"].as_u64().unwrap());
        let config = T5Config {
            encoder_len: number(settings, "sequence_length") as usize,
            decoder_len: number(settings, "sequence_length_decoder") as usize,
            pad: pad_id(Some(number(settings, "pad")), &[EOS, EOD]),
            bos: 4,
            eos: EOS,
            sentinels: (370..400).collect(),
            seed: number(settings, "random_seed") as u32,
            masking: masking(settings),
        };
        let mut assemble = T5Assemble::new(config, vec![order.part()]).unwrap();
        let (mut batch, mut folded) = (T5Batch::default(), Folded::default());
        for_each_sample(&corpus, &order, |sample| {
            assemble.begin(&mut batch, sample.number, 1);
            assemble.set_row(&mut batch, 0, sample).unwrap();
            if let Value::Array(expected) = &case["first"][sample.number as usize]["text_enc"] {
                let expected: Vec<i64> =
                    expected.iter().map(|token| token.as_i64().unwrap()).collect();
                assert_eq!(batch.encoder_tokens, expected, "sample {}, {settings}", sample.number);
            }
            folded.add("text_enc", &batch.encoder_tokens, |value| value);
            folded.add("text_dec", &batch.decoder_tokens, |value| value);
            folded.add("labels", &batch.labels, |value| value);
            folded.add("loss_mask", &batch.loss_mask, |value| value as i64);
            folded.add("truncated", &batch.truncated, i64::from);
            folded.add("enc_mask", &batch.encoder_mask, |value| value);
            folded.add("dec_mask", &batch.decoder_mask, |value| value);
        });
        folded.check(&case);
    }
}
