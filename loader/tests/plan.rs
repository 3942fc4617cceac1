//! The plan of a fetch: every byte once, in ascending requests, near neighbours together.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail by panicking")]

use std::sync::Arc;

use indexed::{Builder, Dtype, GptIndex, GptIndexConfig, IndexedDataset, Split};
use loader::plan::Plan;
use storage::Key;

fn dataset(folder: &std::path::Path, lens: &[u32]) -> Arc<IndexedDataset> {
    let store = storage::open_url(folder.to_str().unwrap()).unwrap();
    let key = Key::new("corpus").unwrap();
    let mut builder = Builder::create(&store, &key, Dtype::U16).unwrap();
    for &len in lens {
        builder.add_sequence(&vec![7; len as usize]).unwrap();
        builder.end_document().unwrap();
    }
    builder.finish().unwrap();
    Arc::new(IndexedDataset::open(&store, &key).unwrap())
}

fn plan(dataset: &IndexedDataset, seq_len: u64, samples: u64) -> Plan {
    let config = GptIndexConfig {
        dataset_path: "corpus".to_owned(),
        split: Some("100,0,0".to_owned()),
        seq_len,
        seed: 1,
        num_samples: Some(samples),
        add_extra_token: true,
        drop_last_partial_valid: true,
        tokenizer: serde_json::json!({}),
    };
    let index = GptIndex::build(dataset, Split::Train, &config).unwrap();
    let mut plan = Plan::default();
    plan.fill(dataset, &index, 0..samples, seq_len + 1).unwrap();
    plan
}

#[test]
fn extents_ascend_and_hold_every_piece() {
    let folder = tempfile::tempdir().unwrap();
    let lens: Vec<u32> = (0..400).map(|i| 1 + i * 7919 % 30_000).collect();
    let dataset = dataset(folder.path(), &lens);
    let plan = plan(&dataset, 512, 60);
    let mut place = 0;
    for pair in plan.extents.windows(2) {
        let end = pair[0].offset_bytes + pair[0].len_bytes;
        assert!(pair[1].offset_bytes > end, "disjoint, and merged where they touch: {pair:?}");
    }
    for extent in &plan.extents {
        assert_eq!(extent.place_bytes, place, "back to back in the buffer");
        place += extent.len_bytes;
    }
    assert_eq!(plan.buffer_bytes(), place);
    for nth in 0..60 {
        let bytes: u64 = plan.sample(nth).iter().map(|piece| piece.len_bytes).sum();
        assert_eq!(bytes, 513 * 2, "sample {nth}");
        for piece in plan.sample(nth) {
            assert!(piece.place_bytes + piece.len_bytes <= plan.buffer_bytes());
        }
    }
}

#[test]
fn a_corpus_of_one_page_is_one_request() {
    let folder = tempfile::tempdir().unwrap();
    let dataset = dataset(folder.path(), &[40; 50]);
    let plan = plan(&dataset, 16, 100);
    assert_eq!(plan.extents.len(), 1, "{:?}", plan.extents);
    assert!(plan.buffer_bytes() <= 4000, "no byte is read twice: {}", plan.buffer_bytes());
}
