//! Samples of random datasets, compared with their definition: slices of one long stream of tokens.

use std::sync::Arc;

use crate::common::{Dice, key, temp_store};
use indexed::{Builder, Dtype, GptIndex, GptIndexConfig, IndexedDataset, Split, SplitMatrix};
use serde_json::Value;
use storage::Storage;

/// A dataset whose tokens are all different, with many empty sequences.
fn dataset(rng: &mut Dice, store: &Arc<dyn Storage>) -> IndexedDataset {
    let mut builder = Builder::create(store, &key("a"), Dtype::I32).unwrap();
    let mut next = 0;
    let len_end = [2, 5, 30, 200][rng.below(4) as usize];
    for _ in 0..rng.below(60) {
        for _ in 0..rng.below(4) {
            let len = rng.below(len_end) as u32;
            builder.add_sequence(&(next..next + len).collect::<Vec<_>>()).unwrap();
            next += len;
        }
        builder.end_document().unwrap();
    }
    builder.finish().unwrap();
    IndexedDataset::open(store, &key("a")).unwrap()
}

fn config(rng: &mut Dice) -> GptIndexConfig {
    GptIndexConfig {
        dataset_path: "a".to_owned(),
        split: Some(["1", "949,50,1", "3,2,1", "1,1,0"][rng.below(4) as usize].to_owned()),
        seq_len: 1 + rng.below(40),
        seed: rng.below(1 << 32) as u32,
        num_samples: (rng.below(3) > 0).then(|| rng.below(300)),
        add_extra_token: rng.below(2) == 0,
        drop_last_partial_valid: rng.below(2) == 0,
        tokenizer: Value::Null,
    }
}

#[test]
fn samples_are_slices_of_the_stream() {
    let (mut rng, mut samples) = (Dice(20_260_101), 0);
    for round in 0..100 {
        let (_guard, store) = temp_store();
        let dataset = dataset(&mut rng, &store);
        let config = config(&mut rng);
        for which in Split::ALL {
            println!("round {round} of seed 20260101: {which} {config:?}");
            samples += check(&dataset, which, &config);
        }
    }
    assert!(samples > 5_000, "{samples} samples were looked at");
}

fn check(dataset: &IndexedDataset, which: Split, config: &GptIndexConfig) -> u64 {
    let Ok(index) = GptIndex::build(dataset, which, config) else {
        // Only a part without tokens has no index.
        let matrix = SplitMatrix::parse(config.split.as_deref().unwrap()).unwrap();
        let range = matrix.range(which, dataset.sequence_count()).unwrap_or(0..0);
        assert_eq!(range.map(|seq| dataset.sequence_len(seq)).sum::<u32>(), 0);
        return 0;
    };
    let order = Vec::from(index.document_index());
    check_order(dataset, which, config, &order);
    let stream: Vec<i64> =
        order.iter().flat_map(|&seq| dataset.read_sequence(seq as u64).unwrap()).collect();

    let extra = usize::from(config.add_extra_token);
    let keep = which == Split::Valid && !config.drop_last_partial_valid;
    let (len, available) = (config.seq_len as usize, stream.len().saturating_sub(extra));
    let count = if keep { available.div_ceil(len) } else { available / len };
    assert_eq!(index.sample_count(), count as u64);
    assert!(count as u64 >= config.num_samples.unwrap_or(0));

    let (mut seen, mut parts) = (vec![false; count], Vec::new());
    for place in 0..count {
        let sample = index.shuffle_index().at(place as u64) as usize;
        assert!(!std::mem::replace(&mut seen[sample], true), "sample {sample} comes twice");
        index.parts(dataset, place as u64, &mut parts);
        assert!(parts.iter().all(|part| part.token_count > 0));
        let tokens: Vec<i64> = parts
            .iter()
            .flat_map(|part| {
                let (from, count) = (part.token_offset as usize, part.token_count as usize);
                dataset.read_sequence(part.sequence).unwrap()[from..from + count].to_vec()
            })
            .collect();
        let start = sample * len;
        let end = (start + len + extra).min(stream.len());
        assert_eq!(tokens, stream[start..end], "sample {sample}");
    }
    count as u64
}

/// Every sequence of the part occurs once per epoch.
fn check_order(dataset: &IndexedDataset, which: Split, config: &GptIndexConfig, order: &[i64]) {
    let matrix = SplitMatrix::parse(config.split.as_deref().unwrap()).unwrap();
    let range = matrix.range(which, dataset.sequence_count()).unwrap();
    let epochs = order.len().checked_div((range.end - range.start) as usize).unwrap_or(0);
    let mut sorted = order.to_vec();
    sorted.sort_unstable();
    let expected = range.flat_map(|seq| std::iter::repeat_n(seq as i64, epochs));
    assert!(expected.eq(sorted));
}
