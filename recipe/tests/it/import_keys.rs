//! Every published key of another system has a fate.

use std::fs;

use recipe::import::{ConfigFormat, KeyStatus, import};

/// Lists of keys that `tests/keys/make.py` writes. Each is tried as a number, a flag and a text.
/// The best of the three counts, and a key that is refused only for its value counts as mapped.
#[test]
fn every_published_key_is_mapped_implied_or_refused() {
    for (list, source, expected) in [
        ("megatron", ConfigFormat::Megatron, [104, 281, 199]),
        ("transformers", ConfigFormat::Hf, [29, 59, 26]),
        ("deepspeed", ConfigFormat::Deepspeed, [30, 120, 36]),
    ] {
        let path = format!("{}/tests/keys/{list}.txt", env!("CARGO_MANIFEST_DIR"));
        let text = fs::read_to_string(path).unwrap();
        let keys: Vec<&str> = text.lines().filter(|line| !line.starts_with('#')).collect();
        let mut counts = [0; 3];
        for key in &keys {
            let fates = ["2", "true", "\"text\""].map(|value| fate_of(source, key, value));
            let best = fates.into_iter().min().unwrap();
            counts[best as usize] += 1;
        }
        assert_eq!(counts.iter().sum::<usize>(), keys.len());
        assert_eq!(counts, expected, "{list}: mapped, implied, refused");
    }
}

/// Each system is given files of the others. A file is refused, or the keys in it that the system
/// does not have.
#[test]
fn files_of_other_systems_are_not_believed() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/import");
    let (yaml, python, model) = ("paddle_1.3b.yaml", "colossal_pp1d.py", "hf_llama.json");
    let (script, zero) = ("megatron_345m.sh", "deepspeed_zero3.json");
    for (source, files) in [
        (ConfigFormat::Megatron, [yaml, python, model, "hf_training.json"]),
        (ConfigFormat::Cpm, [yaml, python, model, "hf_training.json"]),
        (ConfigFormat::Deepspeed, [yaml, python, model, "hf_training.json"]),
        (ConfigFormat::Paddle, [python, script, model, zero]),
        (ConfigFormat::Colossal, [yaml, script, model, zero]),
        (ConfigFormat::Hf, [yaml, python, script, "cpm2_model.json"]),
    ] {
        for name in files {
            let Ok(imported) = import(source, &[format!("{folder}/{name}")], None) else {
                continue;
            };
            let unknown = imported.fates.iter().filter(|it| it.text.starts_with("unknown key"));
            assert!(unknown.count() > 0, "{name} as {source:?}:\n{imported}");
            assert!(!imported.is_whole(), "{name} as {source:?}:\n{imported}");
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Counted {
    Mapped,
    Implied,
    Refused,
}

/// The fate of a key with this value, given as JSON.
fn fate_of(source: ConfigFormat, key: &str, value: &str) -> Counted {
    let (name, text) = match (source, value) {
        (ConfigFormat::Megatron, "true") => ("flags.txt", format!("python train.py --{key}\n")),
        (ConfigFormat::Megatron, _) => ("flags.txt", format!("python train.py --{key} {value}\n")),
        _ => ("args.json", nested(key, value)),
    };
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(name);
    fs::write(&path, text).unwrap();
    let imported = import(source, &[path.display().to_string()], None).unwrap();
    let is_it = |given: &str| given == key || given.strip_prefix("--") == Some(key);
    let found = imported.fates.iter().find(|fate| fate.file == name && is_it(&fate.key));
    let found = found.unwrap_or_else(|| panic!("no fate of {key} in\n{imported}"));
    assert!(!found.text.starts_with("unknown key"), "{key} is not in the tables");
    assert!(!found.text.is_empty(), "{key} has no reason");
    match found.fate {
        KeyStatus::Implied => Counted::Implied,
        KeyStatus::Refused if !found.text.contains(": expected") => Counted::Refused,
        _ => Counted::Mapped,
    }
}

/// A JSON object with one key, dotted.
fn nested(key: &str, value: &str) -> String {
    key.rsplit('.').fold(value.to_owned(), |value, part| format!("{{\"{part}\": {value}}}"))
}
