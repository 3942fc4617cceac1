//! The corpus that is streamed, and the digest of its samples read one by one.

use std::sync::Arc;
use std::time::Duration;

use indexed::{Builder, Dtype, GptIndex, GptIndexConfig, IndexedDataset, Split};
use loader::batch::{GptAssemble, GptConfig};
use loader::{Batch, GptOrder, Loader, LoaderOptions, SampleOrder};
use sha2::{Digest, Sha256};
use storage::{Key, Storage};

pub const SEQ_LEN: usize = 64;
pub const SAMPLES: u64 = 1200;

pub fn config(seq_len: u64, seed: u32, split: &str, num_samples: Option<u64>) -> GptIndexConfig {
    GptIndexConfig {
        dataset_path: "corpus".to_owned(),
        split: Some(split.to_owned()),
        seq_len,
        seed,
        num_samples,
        add_extra_token: true,
        drop_last_partial_valid: true,
        tokenizer: serde_json::json!({}),
    }
}

/// Each batch as its first sample and its tokens and labels, row after row.
pub fn rows(batch: &Batch, into: &mut Vec<(u64, Vec<i64>)>) {
    for row in 0..batch.rows {
        let place = row * batch.seq_len..(row + 1) * batch.seq_len;
        let text = [&batch.tokens[place.clone()], &batch.labels[place]].concat();
        into.push((batch.first_sample + row as u64, text));
    }
}

pub fn stream(loader: &mut Loader<GptAssemble>) -> Vec<(u64, Vec<i64>)> {
    let mut all = Vec::new();
    while let Some(batch) = loader.next_batch().unwrap() {
        rows(&batch, &mut all);
        loader.recycle(batch);
    }
    all
}

/// The SHA-256 of samples, as `tests/readers/megatron_stream.py` computes it.
pub fn digest_of<'a>(texts: impl Iterator<Item = &'a Vec<i64>>) -> String {
    let mut digest = Sha256::new();
    for text in texts {
        text.iter().for_each(|token| digest.update(token.to_le_bytes()));
    }
    digest.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

pub struct Corpus {
    _folder: tempfile::TempDir,
    pub path: String,
    /// The digest of all samples.
    pub expected_digest: String,
}

impl Corpus {
    /// Documents of 0 to 200 tokens, and the digest of their samples read one by one.
    pub fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().to_str().unwrap().to_owned();
        let store = storage::open_url(&path).unwrap();
        build(&store);
        let (dataset, index) = open(&store);
        let mut all = Vec::new();
        for sample in 0..SAMPLES {
            let mut parts = Vec::new();
            index.parts(&dataset, sample, &mut parts);
            let mut text = Vec::new();
            for part in parts {
                let from = part.token_offset as usize;
                let sequence = dataset.read_sequence(part.sequence).unwrap();
                text.extend(&sequence[from..from + part.token_count as usize]);
            }
            all.push([&text[..SEQ_LEN], &text[1..]].concat());
        }
        Corpus { _folder: folder, path, expected_digest: digest_of(all.iter()) }
    }

    pub fn store(&self) -> Arc<dyn Storage> {
        storage::open_url(&self.path).unwrap()
    }

    pub fn check(&self, what: &str, store: &Arc<dyn Storage>, options: LoaderOptions) {
        let mut loader = start(store, options);
        let found = stream(&mut loader);
        assert!(found.iter().map(|(sample, _)| *sample).eq(0..SAMPLES), "{what}: numbers");
        assert_eq!(digest_of(found.iter().map(|(_, text)| text)), self.expected_digest, "{what}");
        assert_eq!(loader.metrics().samples, SAMPLES, "{what}");
    }
}

pub fn build(store: &Arc<dyn Storage>) {
    let mut builder = Builder::create(store, &Key::new("corpus").unwrap(), Dtype::U16).unwrap();
    let mut state = 11_u64;
    for _ in 0..600 {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        let len = (state >> 33) % 200;
        let tokens: Vec<u32> = (0..len).map(|at| ((state >> 20) + at * 7) as u16 as u32).collect();
        builder.add_sequence(&tokens).unwrap();
        builder.end_document().unwrap();
    }
    builder.finish().unwrap();
}

pub fn open(store: &Arc<dyn Storage>) -> (Arc<IndexedDataset>, Arc<GptIndex>) {
    let dataset = IndexedDataset::open(store, &Key::new("corpus").unwrap()).unwrap();
    let config = config(SEQ_LEN as u64, 5, "1,0,0", Some(SAMPLES));
    let index = GptIndex::build(&dataset, Split::Train, &config).unwrap();
    (Arc::new(dataset), Arc::new(index))
}

pub fn order(store: &Arc<dyn Storage>) -> Arc<dyn SampleOrder> {
    let (dataset, index) = open(store);
    Arc::new(GptOrder::new(dataset, index, SEQ_LEN).unwrap())
}

pub fn start(store: &Arc<dyn Storage>, options: LoaderOptions) -> Loader<GptAssemble> {
    let assemble = GptAssemble::new(GptConfig::new(SEQ_LEN), vec![Dtype::U16]).unwrap();
    Loader::start(order(store), assemble, options).unwrap()
}

pub fn options() -> LoaderOptions {
    let mut options = LoaderOptions::new(4, 0..SAMPLES);
    options.retry_pauses = [Duration::from_millis(1); 3];
    options
}
