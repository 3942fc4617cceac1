//! Cache folders of Megatron's masked datasets, compared by name and byte.

use crate::common;
use crate::common::{failing, golden, key, manifest, numbers};
use indexed::{Error, IndexedDataset, MaskedConfig, MaskedIndex, MaskedKind, Split};
use serde_json::{Value, json};
use storage::Key;

const CASES: [&str; 4] = ["t5_default", "t5_geometric", "bert_nsp", "bert_no_nsp_longer_ngrams"];

fn sentences() -> IndexedDataset {
    IndexedDataset::open(&golden("masked"), &key("sentences")).unwrap()
}

fn config(case: &Value) -> MaskedConfig {
    let case = &case["config"];
    let is = |name: &str| match &case[name] {
        Value::Bool(is) => *is,
        text => text == "True",
    };
    let number = |name: &str| case[name].as_u64().unwrap();
    let kind = if case.get("classification_head").is_some() {
        MaskedKind::Bert { classification_head: is("classification_head") }
    } else {
        MaskedKind::T5 { sequence_length_decoder: number("sequence_length_decoder") }
    };
    MaskedConfig {
        kind,
        dataset_path: "sentences".to_owned(),
        split: Some(case["split"].as_str().unwrap().to_owned()),
        seq_len: number("sequence_length"),
        seed: number("random_seed") as u32,
        num_samples: Some(30),
        tokenizer: json!({ "class": "example.WordPiece" }),
        masking_probability: case["masking_probability"].as_f64().unwrap(),
        short_sequence_probability: case["short_sequence_probability"].as_f64().unwrap(),
        masking_max_ngram: number("masking_max_ngram") as u32,
        masking_do_full_word: is("masking_do_full_word"),
        masking_do_permutation: is("masking_do_permutation"),
        masking_use_longer_ngrams: is("masking_use_longer_ngrams"),
        masking_use_geometric_distribution: is("masking_use_geometric_distribution"),
    }
}

fn cases() -> Value {
    manifest("masked", "manifest.json")["cases"].take()
}

#[test]
fn cache_folders_equal_megatrons() {
    for name in CASES {
        let case = &cases()[name];
        let (_guard, store) = common::temp_store();
        let dataset = sentences();
        for _ in 0..2 {
            let index = MaskedIndex::load_or_build(
                &dataset,
                Split::Train,
                &config(case),
                store.as_ref(),
                &Key::root(),
            )
            .unwrap();
            let rows: Vec<i64> =
                case["sample_index"].as_array().unwrap().iter().flat_map(numbers::<i64>).collect();
            assert_eq!(Vec::from(index.sample_index()), rows, "{name}");
            let first = index.sample(0);
            let found = [first.sentences.start, first.sentences.end, first.target_len.into()];
            assert_eq!(found.map(|number| number as i64), rows[..3], "{name}");
        }
        let folder = golden(&format!("masked/cache_{name}"));
        let mut names = store.list_names(&Key::root()).unwrap();
        names.retain(|name| !name.ends_with("feedline.json"));
        let mut expected = folder.list_names(&Key::root()).unwrap();
        names.sort();
        expected.sort();
        assert_eq!(names, expected, "{name}");
        for file in names {
            assert!(
                common::read(store.as_ref(), &file) == common::read(folder.as_ref(), &file),
                "{name}: {file}"
            );
        }
    }
}

#[test]
fn megatrons_caches_are_used_without_a_rebuild() {
    for name in CASES {
        let (store, calls) = failing(&golden(&format!("masked/cache_{name}")), 0..usize::MAX);
        let config = config(&cases()[name]);
        MaskedIndex::load_or_build(
            &sentences(),
            Split::Train,
            &config,
            store.as_ref(),
            &Key::root(),
        )
        .unwrap();
        let calls = calls.lock().unwrap();
        // Only a seal would be written.
        assert!(calls.iter().all(|call| call.ends_with("feedline.json")), "{name}: {calls:?}");
    }
}

#[test]
fn wrong_rows_are_rebuilt() {
    let config = config(&cases()["t5_default"]);
    let (_guard, store) = common::temp_store();
    let build = || {
        MaskedIndex::load_or_build(
            &sentences(),
            Split::Train,
            &config,
            store.as_ref(),
            &Key::root(),
        )
        .unwrap()
    };
    build();
    let names = store.list_names(&Key::root()).unwrap();
    let array = key(names.iter().find(|name| name.ends_with("sample_index.npy")).unwrap());
    let good = storage::read_all(store.as_ref(), &array).unwrap();
    let damages: [fn(&mut Vec<u8>); 4] = [
        |file| file[128] ^= 1,
        |file| file.copy_within(128..140, 140),
        |file| file.truncate(200),
        |file| file.fill(0),
    ];
    for damage in damages {
        let mut bad = good.clone();
        damage(&mut bad);
        assert!(bad != good);
        store.delete(&array).unwrap();
        storage::write_all(store.as_ref(), &array, &bad).unwrap();
        build();
        assert!(storage::read_all(store.as_ref(), &array).unwrap() == good);
    }
}

#[test]
fn configs_without_samples_are_refused() {
    let good = config(&cases()["bert_nsp"]);
    let refused = |which, config: &MaskedConfig| {
        MaskedIndex::build(&sentences(), which, config).unwrap_err().to_string()
    };
    let check = |found: String, expected: &str| assert!(found.contains(expected), "{found}");
    check(
        refused(Split::Valid, &good),
        "valid part: expected a share above 0 in split '100,0,0', found 0",
    );
    let split = MaskedConfig { split: Some("999,1,0".to_owned()), ..good.clone() };
    check(refused(Split::Valid, &split), "found none");
    check(
        refused(Split::Train, &MaskedConfig { seq_len: 4, ..good.clone() }),
        "seq_len: expected 5 to 2147483647, found 4",
    );
    check(refused(Split::Train, &MaskedConfig { seq_len: 1 << 31, ..good.clone() }), "seq_len");
    let seed = MaskedConfig { seed: i32::MAX as u32, ..good.clone() };
    check(refused(Split::Train, &seed), "seed: expected below 2147483647, found 2147483647");
    for prob in [-0.1, 1.1, f64::NAN, 1e-10] {
        let config = MaskedConfig { short_sequence_probability: prob, ..good.clone() };
        check(refused(Split::Train, &config), "short_sequence_probability");
    }
    let many = MaskedConfig { num_samples: Some(u64::MAX), ..good.clone() };
    let error = MaskedIndex::build(&sentences(), Split::Train, &many).unwrap_err();
    assert!(matches!(error, Error::TooBig { .. }), "{error}");
    // One epoch, which Megatron cannot build, but can read.
    let once = MaskedConfig { num_samples: None, ..good };
    let once = MaskedIndex::build(&sentences(), Split::Train, &once).unwrap().sample_count();
    assert!((1..30).contains(&once), "{once}");
}
