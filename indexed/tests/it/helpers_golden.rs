//! The index helpers of Megatron's C++ module, compared by whole files.

use crate::common::{golden, manifest, numbers, read};
use indexed::{
    BlendIndex, BlendWeights, BlocksConfig, Error, MappingConfig, Npy, SampleRule,
    build_blocks_mapping, build_mapping, build_sample_index,
};
use serde_json::Value;

/// Runs `build` on every entry with this prefix, and compares the file.
fn check(prefix: &str, expected_count: usize, build: impl Fn(&str, &Value) -> Npy) {
    let all = manifest("helpers", "manifest.json");
    let entries = all.as_object().unwrap().iter().filter(|(name, _)| name.starts_with(prefix));
    let mut count = 0;
    for (name, entry) in entries {
        let expected = read(golden("helpers").as_ref(), &format!("{name}.npy"));
        assert!(build(name, entry).file() == expected, "{name}");
        count += 1;
    }
    assert_eq!(count, expected_count, "goldens of {prefix}");
}

fn le(value: &Value) -> Vec<[u8; 4]> {
    numbers::<i32>(value).into_iter().map(i32::to_le_bytes).collect()
}

fn u64_of(entry: &Value, name: &str) -> u64 {
    entry[name].as_u64().unwrap()
}

#[test]
fn sample_indexes() {
    check("sample_idx", 17, |_, entry| {
        let rule = SampleRule {
            seq_len: u64_of(entry, "seq_length"),
            add_extra_token: u64_of(entry, "add_extra_token") == 1,
            keep_last_partial: !entry["drop_last_partial"].as_bool().unwrap(),
        };
        let tokens = u64_of(entry, "num_epochs") * u64_of(entry, "tokens_per_epoch");
        let (lengths, documents) = (le(&entry["sizes"]), le(&entry["document_idx"]));
        match entry["dtype"].as_str().unwrap() {
            "int32" => build_sample_index::<i32>(&lengths, &documents, tokens, &rule).unwrap(),
            _ => build_sample_index::<i64>(&lengths, &documents, tokens, &rule).unwrap(),
        }
    });
}

#[test]
fn sample_counts_in_single_precision_equal_megatrons() {
    for example in manifest("helpers", "manifest.json")["float32_ceil_examples"].as_array().unwrap()
    {
        let [tokens, seq_len, expected, exact] =
            ["tokens", "seq_length", "cpp_num_samples", "exact"].map(|name| u64_of(example, name));
        let rule = SampleRule { seq_len, add_extra_token: true, keep_last_partial: true };
        assert_eq!(rule.sample_count(tokens).unwrap(), expected, "{example}");
        let rule = SampleRule { keep_last_partial: false, ..rule };
        assert_eq!(rule.sample_count(tokens).unwrap(), (tokens - 1) / seq_len, "{example}");
        assert_eq!(exact, (tokens - 1).div_ceil(seq_len), "{example}");
    }
    // 16,777,219 is 16,777,220 in single precision: a sample without tokens.
    let rule = SampleRule { seq_len: 1, add_extra_token: false, keep_last_partial: true };
    let error = rule.sample_count(16_777_219).unwrap_err();
    assert!(matches!(error, Error::TooBig { found: 16_777_220, most: 16_777_219, .. }), "{error}");
}

#[test]
fn mappings() {
    check("mapping", 4, |_, entry| {
        let config = MappingConfig {
            num_epochs: u64_of(entry, "num_epochs"),
            max_num_samples: u64_of(entry, "max_num_samples"),
            max_seq_length: u64_of(entry, "max_seq_length") as u32,
            short_seq_prob: entry["short_seq_prob"].as_f64().unwrap(),
            seed: u64_of(entry, "seed") as u32,
            min_num_sent: u64_of(entry, "min_num_sent") as u32,
        };
        let (documents, sizes) = (le64(&numbers(&entry["docs"])), le32(&numbers(&entry["sizes"])));
        build_mapping::<u32>(&documents, &sizes, &config).unwrap()
    });
}

#[test]
fn blocks_mappings() {
    check("blocks_mapping", 2, |_, entry| {
        let config = BlocksConfig {
            num_epochs: u64_of(entry, "num_epochs"),
            max_num_samples: u64_of(entry, "max_num_samples"),
            max_seq_length: u64_of(entry, "max_seq_length") as u32,
            seed: u64_of(entry, "seed") as u32,
            min_num_sent: if entry["use_one_sent_blocks"].as_bool().unwrap() { 1 } else { 2 },
        };
        let (documents, sizes) = (le64(&numbers(&entry["docs"])), le32(&numbers(&entry["sizes"])));
        let titles = le32(&numbers(&entry["titles_sizes"]));
        build_blocks_mapping::<u32>(&documents, &sizes, &titles, &config).unwrap()
    });
}

/// Documents with a sentence of more than 512 tokens are skipped, but not a single sentence; as in
/// the compiled module of megatron-core 0.16.1.
#[test]
fn documents_with_long_sentences_are_skipped() {
    let config = MappingConfig {
        num_epochs: 1,
        max_num_samples: 10,
        max_seq_length: 64,
        short_seq_prob: 0.0,
        seed: 1,
        min_num_sent: 1,
    };
    let mapping = build_mapping::<u32>(&le64(&[0, 1, 3]), &le32(&[513, 513, 1]), &config).unwrap();
    assert_eq!(Vec::from(&mapping), [0, 1, 64]);
    let mapping = build_mapping::<u32>(&le64(&[0, 1, 3]), &le32(&[512, 512, 1]), &config).unwrap();
    assert_eq!(mapping.shape(), [2, 3]);
    let config = BlocksConfig {
        num_epochs: 1,
        max_num_samples: 10,
        max_seq_length: 64,
        seed: 1,
        min_num_sent: 1,
    };
    let blocks = |sizes: &[u32]| {
        build_blocks_mapping::<u32>(&le64(&[0, 1]), &le32(sizes), &le32(&[4]), &config).unwrap()
    };
    assert_eq!((blocks(&[513]).shape(), blocks(&[512]).shape()), (&[0, 4][..], &[1, 4][..]));
}

/// Without documents every epoch is empty, so two billion epochs end at once.
#[test]
fn a_mapping_without_documents_terminates() {
    let config = MappingConfig {
        num_epochs: (1 << 31) - 2,
        max_num_samples: 10,
        max_seq_length: 64,
        short_seq_prob: 0.1,
        seed: 1,
        min_num_sent: 1,
    };
    assert_eq!(build_mapping::<u32>(&le64(&[0]), &[], &config).unwrap().shape(), [0, 3]);
    assert_eq!(build_mapping::<u64>(&le64(&[0, 0, 0]), &[], &config).unwrap().shape(), [0, 3]);
}

#[test]
fn blends() {
    let array = |name: &str, index: &BlendIndex| {
        let of_samples = name.ends_with("dataset_sample_index");
        let array = if of_samples { index.dataset_sample_index() } else { index.dataset_index() };
        array.file().to_vec()
    };
    let compare = |name: &str, weights: &BlendWeights| {
        let index = BlendIndex::build(weights).unwrap();
        let expected = read(golden("helpers").as_ref(), &format!("{name}.npy"));
        assert!(array(name, &index) == expected, "{name}");
    };
    let mut count = 0;
    for (name, entry) in manifest("helpers", "manifest.json").as_object().unwrap() {
        if name.starts_with("blend") {
            let weights = entry["weights"].as_array().unwrap();
            let weights = weights.iter().map(|weight| weight.as_f64().unwrap()).collect();
            compare(name, &BlendWeights::Weighted { weights, size: u64_of(entry, "size") });
            count += 1;
        } else if name.starts_with("exhaustive") {
            compare(name, &BlendWeights::Exhaustive { sizes: numbers(&entry["sizes"]) });
            count += 1;
        }
    }
    assert_eq!(count, 16, "goldens of blends");
}

#[test]
fn a_blend_skips_empty_datasets() {
    let weights = BlendWeights::Exhaustive { sizes: vec![0, 2, 0, 1] };
    let index = BlendIndex::build(&weights).unwrap();
    let samples: Vec<_> = (0..3).map(|sample| index.sample(sample)).collect();
    assert_eq!(samples, [(1, 0), (3, 0), (1, 1)]);
    assert_eq!(
        BlendIndex::build(&BlendWeights::Exhaustive { sizes: vec![] }).unwrap().sample_count(),
        0
    );
}

fn le32(numbers: &[u32]) -> Vec<[u8; 4]> {
    numbers.iter().map(|number| number.to_le_bytes()).collect()
}

fn le64(numbers: &[u64]) -> Vec<[u8; 8]> {
    numbers.iter().map(|number| number.to_le_bytes()).collect()
}
