//! Runs `feedline` on token files of every format, as a user does.

use std::path::Path;
use std::process::Command;

use serde_json::Value;
use storage::s3_server::S3Server;

struct CommandOutput {
    code: i32,
    out: String,
    err: String,
}

fn feedline(args: &[&str]) -> CommandOutput {
    let output = Command::new(env!("CARGO_BIN_EXE_feedline")).args(args).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    let code = output.status.code().expect("it exits, no signal ends it");
    CommandOutput { code, out: text(output.stdout), err: text(output.stderr) }
}

/// Output of a command that must succeed, with `--json`.
fn json(args: &[&str]) -> Value {
    let output = feedline(&[args, &["--json"]].concat());
    assert_eq!(output.code, 0, "{args:?}: {}{}", output.out, output.err);
    serde_json::from_str(&output.out).unwrap()
}

fn golden(name: &str) -> String {
    format!("{}/../tests/golden/{name}", env!("CARGO_MANIFEST_DIR"))
}

fn path(folder: &Path, name: &str) -> String {
    folder.join(name).to_str().unwrap().to_owned()
}

fn read(name: &str) -> Vec<u8> {
    std::fs::read(name).unwrap()
}

#[test]
fn formats_are_converted_there_and_back() {
    let folder = tempfile::tempdir().unwrap();
    let pair = path(folder.path(), "pair");
    let report = json(&["convert", &golden("legacy/tntidx_i32"), &pair, "--dtype", "uint16"]);
    assert_eq!((&report["from"], &report["documents"]), (&"tntidx".into(), &2.into()), "{report}");
    assert_eq!(feedline(&["check", &pair]).code, 0, "it has a manifest that agrees");

    let paddle = path(folder.path(), "p");
    json(&["convert", &format!("{pair}.bin"), &paddle, "--to", "paddle"]);
    for suffix in ["_ids.npy", "_idx.npz"] {
        let expected = read(&golden(&format!("legacy/paddle{suffix}")));
        assert_eq!(read(&format!("{paddle}{suffix}")), expected, "{suffix}");
    }
    let back = path(folder.path(), "back");
    json(&["convert", &format!("{paddle}_idx.npz"), &back]);
    for suffix in [".bin", ".idx"] {
        assert_eq!(read(&format!("{back}{suffix}")), read(&format!("{pair}{suffix}")), "{suffix}");
    }
    let again = feedline(&["convert", &paddle, &back]);
    assert_eq!(again.code, 2, "{}", again.out);
    assert!(again.err.contains("already exists"), "{}", again.err);
}

#[test]
fn invalid_conversions_are_refused_without_output() {
    let folder = tempfile::tempdir().unwrap();
    let out = path(folder.path(), "out");
    let context = golden("cpm2/demo_document_context");
    for (args, expected) in [
        (vec!["convert", &context, &out], "feedline repair"),
        (vec!["convert", "/nowhere/x", &out], "/nowhere/x"),
        (
            vec!["convert", &context, &out, "--to", "dolma"],
            "--to: expected a format that can be written",
        ),
        (vec!["convert", &context, &out, "--to", "numpy"], "expected mmididx"),
        (vec!["convert", &context, &out, "--from", "paddle"], "_ids.npz"),
    ] {
        let output = feedline(&args);
        assert_eq!(output.code, 2, "{args:?}: {}", output.out);
        assert!(output.err.contains(expected), "{args:?}: {}", output.err);
    }
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
}

/// Tokenizes a corpus of these lines; returns the prefix.
fn tokens(folder: &Path, name: &str, lines: &[&str]) -> String {
    let jsonl = path(folder, &format!("{name}.jsonl"));
    let text = |text: &&str| serde_json::json!({ "text": text }).to_string();
    std::fs::write(&jsonl, lines.iter().map(text).collect::<Vec<_>>().join("\n")).unwrap();
    let out = path(folder, name);
    let mut options = preprocess::PreprocessOptions::new(vec![jsonl], &out);
    options.append_eod = true;
    preprocess::run(&options, &mut |_| {}).unwrap();
    format!("{out}_text_document")
}

const LINES: [&str; 5] = ["Hello world", "one", "春風又綠江南岸", "two", "the last of them"];

#[test]
fn shards_are_merged_and_split_again() {
    let folder = tempfile::tempdir().unwrap();
    let shards = folder.path().join("shards");
    std::fs::create_dir(&shards).unwrap();
    tokens(&shards, "s_2", &LINES[..2]);
    tokens(&shards, "s_10", &LINES[2..]);
    let whole = tokens(folder.path(), "whole", &LINES);
    let input = shards.to_str().unwrap();
    let merged = path(folder.path(), "merged");
    let args = ["merge", "--input", input, "--out", &merged, "--order", "numeric"];
    let report = json(&[&args[..], &["--verify"]].concat());
    assert_eq!(report["documents"], 5, "{report}");
    for suffix in [".bin", ".idx"] {
        assert_eq!(read(&format!("{merged}{suffix}")), read(&format!("{whole}{suffix}")));
    }
    assert_eq!(feedline(&["check", &merged]).code, 0, "its manifest agrees");
    let report = json(&["inspect", &merged]);
    assert_eq!(report["manifest"]["tokenizer"]["vocab_size"], 50257, "{report}");

    // As Megatron sorts them, the tenth comes first.
    let by_name = path(folder.path(), "by_name");
    json(&["merge", "--input", input, "--out", &by_name]);
    assert_ne!(read(&format!("{by_name}.idx")), read(&format!("{whole}.idx")));

    let part = path(folder.path(), "part");
    let report = json(&["split", &merged, "--split", "3,1,1", "--out", &part]);
    let documents: Vec<_> = [0, 1, 2].iter().map(|&n| &report["parts"][n]["documents"]).collect();
    assert_eq!(documents, [&serde_json::json!([0, 3]), &[3, 4].into(), &[4, 5].into()]);
    let parts = ["train", "valid", "test"].map(|name| format!("{part}_{name}"));
    let again = path(folder.path(), "again");
    let mut args = vec!["merge", "--input"];
    args.extend(parts.iter().map(String::as_str));
    json(&[&args[..], &["--out", &again]].concat());
    for suffix in [".bin", ".idx"] {
        assert_eq!(read(&format!("{again}{suffix}")), read(&format!("{whole}{suffix}")));
    }
}

/// Parts in a bucket are named by their keys: the end of the URL is the value of its last option.
#[test]
fn parts_in_a_bucket_are_named_by_their_keys() {
    let folder = tempfile::tempdir().unwrap();
    let whole = tokens(folder.path(), "whole", &LINES);
    let near = path(folder.path(), "part");
    json(&["split", &whole, "--split", "3,1,1", "--out", &near]);
    let server = S3Server::start().unwrap();
    for (place, option) in [("none", ""), ("depth", "&depth=16"), ("region", "&region=us-east-1")] {
        let out = server.url(&format!("{place}/part")) + option;
        let report = json(&["split", &whole, "--split", "3,1,1", "--out", &out]);
        assert_eq!(report["parts"].as_array().unwrap().len(), 3, "{report}");
        let store = storage::open_url(&server.url(place)).unwrap();
        for part in ["train", "valid", "test"] {
            for suffix in [".bin", ".idx"] {
                let key = storage::Key::new(format!("part_{part}{suffix}")).unwrap();
                let found = storage::read_all(&*store, &key).unwrap();
                assert_eq!(found, read(&format!("{near}_{part}{suffix}")), "{place}: {key}");
            }
        }
        // And they are a source, with a suffix before the options.
        let one = server.url(&format!("{place}/part_train.bin")) + option;
        let report = json(&["split", &one, "--split", "1,0,0", "--out", &(near.clone() + place)]);
        assert_eq!(report["documents"], 3, "{report}");
    }
    let below = path(folder.path(), "parts/");
    let output = feedline(&["split", &whole, "--split", "3,1,1", "--out", &below]);
    let expected = format!("cannot write {below}: expected a prefix for file names, such as ");
    assert!(output.code == 2 && output.err.contains(&expected), "{}", output.err);
    assert!(!Path::new(&below).exists());
}

/// A hint and the name of an expected file are of the key too.
#[test]
fn messages_on_urls_name_other_urls() {
    let server = S3Server::start().unwrap();
    let store = storage::open_url(&server.url("in")).unwrap();
    for suffix in [".bin", ".idx"] {
        let key = storage::Key::new(format!("docs{suffix}")).unwrap();
        let bytes = read(&(golden("idx/docs_i32") + suffix));
        storage::write_all(&*store, &key, &bytes).unwrap();
    }
    let url = |name: &str| server.url(name) + "&depth=16";
    let (absent, near) = (url("in/doc"), url("in/docs"));
    let missing = |suffix: &str| format!("cannot find {absent}: expected {}", url(suffix));
    let near = format!("there is {near}");
    let folder = tempfile::tempdir().unwrap();
    let out = path(folder.path(), "out");
    for (args, expected) in [
        (vec!["inspect", &absent], missing("in/doc.idx")),
        (vec!["inspect", &absent], near.clone()),
        (vec!["merge", "--input", &absent, "--out", &out], near.clone()),
        (vec!["convert", &absent, &out], near),
    ] {
        let output = feedline(&args);
        assert!(output.code == 2 && output.err.contains(&expected), "{args:?}: {}", output.err);
    }
    let secret = "s3://bucket/in/doc?endpoint=http://key:hidden@127.0.0.1:1";
    let output = feedline(&["inspect", secret]);
    assert!(output.code == 2 && output.err.contains("credentials"), "{}", output.err);
    assert!(!output.err.contains("hidden"), "{}", output.err);
}

/// A suffix is removed once: the rest is the name of the pair.
#[test]
fn a_suffix_of_a_source_is_removed_once() {
    let folder = tempfile::tempdir().unwrap();
    for (name, suffix) in
        [("a.bin", ".bin"), ("a.bin", ".idx"), ("a.idx", ".bin"), ("a.idx", ".idx")]
    {
        std::fs::write(
            path(folder.path(), name) + suffix,
            read(&(golden("idx/docs_i32") + suffix)),
        )
        .unwrap();
    }
    for (nth, name) in ["a.bin.bin", "a.bin.idx", "a.idx.bin", "a.idx.idx"].iter().enumerate() {
        let (source, out) = (path(folder.path(), name), path(folder.path(), &format!("out{nth}")));
        let report = json(&["split", &source, "--split", "1,0,0", "--out", &out]);
        let stem = path(folder.path(), &name[..5]);
        assert_eq!(report["source"], stem, "{report}");
        json(&["repair", &source, "--out", &format!("{out}r")]);
        json(&["merge", "--input", &source, "--out", &format!("{out}m")]);
    }
}

#[test]
fn incompatible_datasets_are_not_merged() {
    let folder = tempfile::tempdir().unwrap();
    let [a, b] = ["a", "b"].map(|name| tokens(folder.path(), name, &LINES));
    let out = path(folder.path(), "out");
    let refused = |inputs: &[&str], expected: &str| {
        let args = [&["merge", "--out", &out, "--input"], inputs].concat();
        let output = feedline(&args);
        assert_eq!(output.code, 2, "{}", output.out);
        assert!(output.err.contains(expected), "{}, expected {expected}", output.err);
    };
    refused(&[&a, &golden("idx/docs_i32")], "found int32");
    refused(&[&a, "/nowhere"], "/nowhere");
    refused(&[&a, "--multimodal"], "no modes");
    refused(&[&golden("cpm2/demo_document_context")], "feedline repair");

    // Another tokenizer, according to the manifest only: it is sealed again after the change.
    let manifest = format!("{b}.manifest.json");
    let (store, key) = storage::locate(&manifest).unwrap();
    let mut changed = storage::Manifest::read(store.as_ref(), &key).unwrap();
    changed.meta["tokenizer"]["fingerprint"] = "another".into();
    store.delete(&key).unwrap();
    changed.write(store.as_ref(), &key).unwrap();
    refused(&[&a, &b], "expected tokenizer");

    // A changed byte is found by reading.
    let mut bytes = read(&format!("{a}.bin"));
    bytes[3] ^= 1;
    std::fs::write(format!("{a}.bin"), bytes).unwrap();
    refused(&[&a, "--verify"], "as listed in the manifest");
}

#[test]
fn damage_is_repaired_under_another_name() {
    let folder = tempfile::tempdir().unwrap();
    let out = path(folder.path(), "out");
    let context = golden("cpm2/demo_document_context");
    let report = json(&["repair", &context, "-o", &out]);
    assert_eq!((&report["documents"], &report["bytes_lost"]), (&1.into(), &0.into()), "{report}");
    assert_eq!(feedline(&["check", &out]).code, 0);

    let whole = tokens(folder.path(), "whole", &LINES);
    let report = json(&["repair", &whole, "-o", &path(folder.path(), "same")]);
    assert_eq!(report["faults"], serde_json::json!([]), "{report}");
    let bin = read(&format!("{whole}.bin"));
    std::fs::write(format!("{whole}.bin"), &bin[..bin.len() - 1]).unwrap();
    let cut = path(folder.path(), "cut");
    let report = json(&["repair", &whole, "-o", &cut]);
    assert_eq!(
        (&report["documents"], &report["sequences_lost"]),
        (&4.into(), &1.into()),
        "{report}"
    );
    assert_eq!(feedline(&["check", &cut]).code, 0);
    assert_eq!(feedline(&["repair", &whole, "-o", &cut]).code, 2, "nothing is overwritten");
}

#[test]
fn completions_contain_the_commands() {
    for shell in ["bash", "zsh", "fish"] {
        let output = feedline(&["completions", shell]);
        assert!(output.code == 0 && output.out.contains("merge"), "{shell}: {}", output.err);
    }
}

/// The shards of a job array give the complete dataset if all of them are merged, in order.
#[test]
fn shards_of_an_array_are_merged_together_or_not_at_all() {
    let folder = tempfile::tempdir().unwrap();
    let input = folder.path().join("in.jsonl");
    let lines: Vec<_> = (0..40).map(|n| format!("{{\"text\":\"line {n}\"}}\n")).collect();
    std::fs::write(&input, lines.concat()).unwrap();
    let run = |name: &str, shard| {
        let inputs = vec![input.to_str().unwrap().to_owned()];
        let options = preprocess::PreprocessOptions::new(inputs, path(folder.path(), name));
        preprocess::run(&preprocess::PreprocessOptions { shard, ..options }, &mut |_| {}).unwrap();
    };
    run("whole", None);
    for index in 0..3 {
        run("array/p", Some(preprocess::Shard { index, count: 3 }));
    }
    let array = path(folder.path(), "array");
    let out = path(folder.path(), "out");
    json(&["merge", "--input", &array, "--out", &out]);
    for suffix in [".bin", ".idx"] {
        let whole = path(folder.path(), "whole_text_document");
        assert_eq!(read(&format!("{out}{suffix}")), read(&format!("{whole}{suffix}")));
    }
    let shards = [0, 1, 2].map(|n| format!("{array}/p_{n:05}-of-00003_text_document"));
    let other = path(folder.path(), "other");
    for (some, expected) in [
        (&[0, 2][..], "expected shard 1"),
        (
            &[0, 1],
            "expected 3 shards, found \
                                                                      2",
        ),
        (&[1], "0"),
    ] {
        let mut args = vec!["merge", "--out", &other, "--input"];
        args.extend(some.iter().map(|&n| shards[n].as_str()));
        let output = feedline(&args);
        assert_eq!(output.code, 2, "{}", output.out);
        assert!(
            output.err.contains(expected) && output.err.contains("--partial"),
            "{}",
            output.err
        );
    }
    json(&["merge", "--partial", "--input", &shards[1], "--out", &other]);

    // An input that grew between two tasks has other shard boundaries.
    std::fs::write(&input, [&lines.concat(), "{\"text\":\"more\"}\n"].concat()).unwrap();
    run("grown/p", Some(preprocess::Shard { index: 1, count: 3 }));
    let grown = path(folder.path(), "grown/p_00001-of-00003_text_document");
    let late = path(folder.path(), "late");
    let output = feedline(&["merge", "--out", &late, "--input", &shards[0], &grown, &shards[2]]);
    assert!(output.code == 2 && output.err.contains("an input changed"), "{}", output.err);
}

/// A shard of a changed corpus is not merged with one of the original, even if no boundary moved.
#[test]
fn shards_of_a_changed_input_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let input = path(folder.path(), "in.jsonl");
    let lines: String = (0..40).map(|n| format!("{{\"text\":\"line {n}\"}}\n")).collect();
    let shard = |name: &str, index| {
        let mut options =
            preprocess::PreprocessOptions::new(vec![input.clone()], path(folder.path(), name));
        options.shard = Some(preprocess::Shard { index, count: 2 });
        preprocess::run(&options, &mut |_| {}).unwrap();
        path(folder.path(), &format!("{name}_{index:05}-of-00002_text_document"))
    };
    std::fs::write(&input, &lines).unwrap();
    let first = shard("p", 0);
    std::fs::write(&input, lines.replace("line 3\"", "LINE 3\"")).unwrap();
    let changed = shard("q", 1);
    let made = path(folder.path(), "made");
    for more in [&[][..], &["--partial"]] {
        let args = ["merge", "--out", &made, "--input", &first, &changed];
        let output = feedline(&[&args[..], more].concat());
        assert_eq!(output.code, 2, "{}", output.out);
        for word in [&input, &first, &changed] {
            assert!(output.err.contains(word.as_str()), "{word}: {}", output.err);
        }
    }
    // A copy of the input, as another node may have it, is the same.
    std::fs::write(&input, &lines).unwrap();
    let second = shard("r", 1);
    json(&["merge", "--out", &made, "--input", &first, &second]);
}

#[test]
fn every_format_is_inspected_and_checked() {
    let folder = tempfile::tempdir().unwrap();
    let whole = tokens(folder.path(), "whole", &LINES);
    for format in ["paddle", "nanogpt", "yuan", "datatrove"] {
        let out = path(folder.path(), format);
        json(&["convert", &whole, &out, "--to", format]);
        let file = match format {
            "nanogpt" => format!("{out}.bin"),
            _ => out.clone(),
        };
        // Beside its manifest, a file of bare tokens is a .bin that lost its .idx, so the manifest
        // is removed before it is inspected.
        if format == "nanogpt" {
            assert!(feedline(&["convert", &file, "back"]).err.contains("--from nanogpt"));
            let back = path(folder.path(), "back");
            let from = ["--from", "nanogpt", "--eod", "50256"];
            json(&[&["convert", &file, &back][..], &from].concat());
            let [expected, found] =
                [&whole, &back].map(|at| std::fs::read(format!("{at}.idx")).unwrap());
            assert_eq!(found, expected, "from a file with its suffix, beside its manifest");
            std::fs::remove_file(format!("{out}.manifest.json")).unwrap();
        }
        let report = json(&["inspect", &file, "--eod", "50256"]);
        assert_eq!(
            (&report["kind"], &report["format"]),
            (&"foreign_tokens".into(), &format.into())
        );
        assert_eq!((&report["documents"], &report["documents_ended"]), (&5.into(), &5.into()));
        let report = json(&["check", &file, "--eod", "50256", "--vocab-size", "50257"]);
        assert_eq!(report["checked"][0]["eod"]["documents_ended"], 5, "{report}");
        let output = feedline(&["check", &file, "--vocab-size", "50256"]);
        assert_eq!(output.code, 1, "{}", output.out);
        assert!(output.out.contains("expected ids from 0 to 50255"), "{}", output.out);
    }
    let report = json(&["check", &whole]);
    assert_eq!(report["checked"][0]["eod"]["id"], 50256, "the manifest records it: {report}");
}

#[test]
fn three_files_of_cpm2_are_compared_with_each_other() {
    let folder = tempfile::tempdir().unwrap();
    for part in ["context", "target", "target_offset"] {
        for suffix in ["bin", "idx"] {
            let name = format!("demo_document_{part}.{suffix}");
            std::fs::write(folder.path().join(&name), read(&golden(&format!("cpm2/{name}"))))
                .unwrap();
        }
    }
    let prefix = path(folder.path(), "demo_document");
    assert_eq!(json(&["inspect", &prefix])["cpm2_vocab_size"], 26240);
    assert_eq!(feedline(&["check", &prefix, "--vocab-size", "26240"]).code, 0);
    let output = feedline(&["check", &prefix, "--vocab-size", "30000"]);
    assert!(output.code == 1 && output.out.contains("found markers from 26240"), "{}", output.out);
    let offsets = path(folder.path(), "demo_document_target_offset.bin");
    let mut bytes = read(&offsets);
    bytes[2] += 1;
    std::fs::write(&offsets, bytes).unwrap();
    let output = feedline(&["check", &prefix]);
    assert!(output.code == 1 && output.out.contains("start 3"), "{}", output.out);
}

/// Files that have the name of nanoGPT's, by every verb that opens a file without an index.
#[test]
fn a_bin_of_another_kind_is_refused_by_every_verb() {
    let folder = tempfile::tempdir().unwrap();
    let out = path(folder.path(), "out");
    let wide: Vec<u8> = [50_256_u32, 11, 128_000].iter().flat_map(|id| id.to_le_bytes()).collect();
    for (name, bytes, expected) in [
        ("packed.bin", b"\x1f\x8b\x08\0\0\0\0\0\x02\x03".to_vec(), "gzip"),
        ("pytorch_model.bin", torch_member(), "feedline ckpt import"),
        ("wide.bin", wide.clone(), "--source-dtype uint32"),
        ("raw.npy", wide.clone(), "--source-dtype"),
        ("shuffled.ds", wide, "--source-dtype"),
    ] {
        let file = path(folder.path(), name);
        std::fs::write(&file, bytes).unwrap();
        for args in [vec!["convert", &file, &out], vec!["inspect", &file], vec!["check", &file]] {
            let output = feedline(&args);
            assert_eq!(output.code, 2, "{args:?}: {}", output.out);
            assert!(output.err.contains(expected), "{args:?}: {}", output.err);
        }
    }
    let packed = path(folder.path(), "packed.bin");
    let output = feedline(&["convert", &packed, &out, "--from", "nanogpt"]);
    assert!(output.code == 2 && output.err.contains("gzip"), "{}", output.err);
    let file = path(folder.path(), "wide.bin");
    let report = json(&["convert", &file, &out, "--source-dtype", "uint32"]);
    assert_eq!((&report["tokens"], &report["dtype"]), (&3.into(), &"int32".into()), "{report}");
}

/// The start of a file of `torch.save`.
fn torch_member() -> Vec<u8> {
    let name = b"archive/data.pkl";
    let mut bytes = b"PK\x03\x04".to_vec();
    bytes.resize(26, 0);
    bytes.extend([name.len() as u8, 0, 0, 0]);
    [&bytes[..], name, &[0; 64]].concat()
}

#[test]
fn a_shard_of_llm_c_is_read_by_its_header() {
    let folder = tempfile::tempdir().unwrap();
    let file = path(folder.path(), "shard_000001.bin");
    let mut bytes: Vec<u8> = [20_240_520_u32, 1, 5].iter().flat_map(|n| n.to_le_bytes()).collect();
    bytes.resize(1024, 0);
    bytes.extend([50_256_u16, 11, 12, 50_256, 21].iter().flat_map(|id| id.to_le_bytes()));
    std::fs::write(&file, &bytes).unwrap();
    let report = json(&["inspect", &file, "--eod", "50256"]);
    assert_eq!(report["first_ids"], serde_json::json!([50_256, 11, 12, 50_256, 21]), "{report}");
    let out = path(folder.path(), "out");
    assert_eq!(json(&["convert", &file, &out, "--eod", "50256"])["documents"], 3);
    assert_eq!(read(&format!("{out}.bin")), bytes[1024..]);
    std::fs::write(&file, &bytes[..1030]).unwrap();
    let output = feedline(&["check", &file]);
    assert!(output.code == 1 && output.out.contains("5 tokens of uint16"), "{}", output.out);
}

/// DeepSpeed means uint32 by Megatron's code of float32.
#[test]
fn a_pair_of_deepspeed_is_not_taken_for_floats() {
    let folder = tempfile::tempdir().unwrap();
    let (ds, out) = (path(folder.path(), "ds"), path(folder.path(), "out"));
    let counts = [1_u64, 2].iter().flat_map(|count| count.to_le_bytes());
    let mut idx = [&b"MMIDIDX\0\0"[..], &1_u64.to_le_bytes(), &[7]].concat();
    idx.extend(counts.chain(3_u32.to_le_bytes()));
    idx.extend([0_u64, 0, 1].iter().flat_map(|entry| entry.to_le_bytes()));
    std::fs::write(format!("{ds}.idx"), idx).unwrap();
    let ids: Vec<u8> = [5_u32, 70_000, 7].iter().flat_map(|id| id.to_le_bytes()).collect();
    std::fs::write(format!("{ds}.bin"), &ids).unwrap();
    for args in [vec!["convert", &ds, &out], vec!["inspect", &ds], vec!["check", &ds]] {
        let output = feedline(&args);
        assert_eq!(output.code, 2, "{args:?}: {}", output.out);
        assert!(output.err.contains("DeepSpeed"), "{args:?}: {}", output.err);
    }
    let report = json(&["convert", &ds, &out, "--source-dtype", "uint32"]);
    assert_eq!((&report["tokens"], &report["dtype"]), (&3.into(), &"int32".into()), "{report}");
    assert_eq!(read(&format!("{out}.bin")), ids);
}
