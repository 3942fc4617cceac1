//! The files that a run writes: a small case checked by hand, and larger ones whose output must not
//! depend on the number of workers.
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::common::{Random, print_seed};
use indexed::IndexedDataset;
use preprocess::objective::SentenceSpec;
use preprocess::{
    EmptyDocuments, Objective, PreprocessOptions, Report, TokenizerSpec, open_tokenizer, run,
};
use storage::{Key, Manifest, Storage};

fn options(inputs: &[&Path], folder: &Path) -> PreprocessOptions {
    let inputs = inputs.iter().map(|path| path.display().to_string()).collect();
    PreprocessOptions::new(inputs, folder.join("out").display().to_string())
}

fn run_preprocess(options: &PreprocessOptions) -> Report {
    run(options, &mut |_| {}).unwrap()
}

fn outputs(folder: &Path) -> [Vec<u8>; 3] {
    ["bin", "idx", "manifest.json"]
        .map(|suffix| std::fs::read(folder.join(format!("out_text_document.{suffix}"))).unwrap())
}

fn line(text: &str) -> String {
    format!("{}\n", serde_json::json!({ "id": text.len(), "text": text, "n": [1, 2] }))
}

fn open(folder: &Path) -> (Arc<dyn Storage>, IndexedDataset) {
    let store = storage::open_url(folder.to_str().unwrap()).unwrap();
    let prefix = Key::new("out_text_document").unwrap();
    let dataset = IndexedDataset::open(&store, &prefix).unwrap();
    (store, dataset)
}

/// "Hello world" is 15496 995 in GPT-2's vocabulary, "!" is 0 and the end token is 50256. An empty
/// text is an entry of the document index and no sequence. The rest is Megatron's layout.
#[test]
fn three_documents_by_hand() {
    let folder = tempfile::tempdir().unwrap();
    let input = folder.path().join("in.jsonl");
    std::fs::write(&input, "{\"text\":\"Hello world\"}\n{\"text\":\"\"}\n\n{\"text\":\"!\"}")
        .unwrap();
    let report = run_preprocess(&PreprocessOptions {
        append_eod: true,
        ..options(&[&input], folder.path())
    });
    let [bin, idx, _] = outputs(folder.path());
    assert_eq!(bin, [0x88, 0x3c, 0xe3, 0x03, 0x50, 0xc4, 0x00, 0x00, 0x50, 0xc4]);
    let mut expected = b"MMIDIDX\0\0".to_vec();
    expected.extend(1_u64.to_le_bytes());
    expected.push(8);
    expected.extend(2_u64.to_le_bytes());
    expected.extend(4_u64.to_le_bytes());
    expected.extend([3_i32, 2].iter().flat_map(|len| len.to_le_bytes()));
    expected.extend([0_i64, 6].iter().flat_map(|pointer| pointer.to_le_bytes()));
    expected.extend([0_i64, 1, 1, 2].iter().flat_map(|document| document.to_le_bytes()));
    assert_eq!(idx, expected);
    assert_eq!((report.documents, report.documents_empty, report.sequences), (3, 1, 2));
    assert_eq!((report.tokens, report.text_bytes, report.blank_lines), (5, 12, 1));
    assert_eq!((report.inputs[0].lines, report.dtype), (4, "uint16"));
}

#[test]
fn output_does_not_depend_on_workers() {
    let mut random = Random::new(print_seed("output_does_not_depend_on_workers", 0x5eed_0010));
    let folder = tempfile::tempdir().unwrap();
    let mut texts = Vec::new();
    let inputs = ["a.jsonl", "b.jsonl.zst", "c.jsonl"].map(|name| {
        let mut json = String::new();
        for _ in 0..700 {
            let kind = random.below(6);
            let bytes = 1 + random.below(3000) as usize;
            let text = match kind {
                0 => String::new(),
                1 => random.soup(bytes / 2),
                2 => random.chinese(bytes / 3),
                // Longer than the small blocks below.
                3 if random.below(20) == 0 => random.english(bytes * 40),
                _ => random.english(bytes),
            };
            json += &line(&text);
            json += ["", "", "", "\n", " \r\n"][random.below(5) as usize];
            texts.push(text);
        }
        let path = folder.path().join(name);
        let bytes = if name.ends_with(".zst") {
            // Two frames, as `cat a.zst b.zst` writes.
            let (a, b) = json.as_bytes().split_at(json.len() / 2);
            [a, b].map(|part| zstd::encode_all(part, 1).unwrap()).concat()
        } else {
            json.trim_end().as_bytes().to_vec()
        };
        std::fs::write(&path, bytes).unwrap();
        path
    });
    let inputs: Vec<&Path> = inputs.iter().map(PathBuf::as_path).collect();
    let mut first = None;
    for (workers, block_bytes) in [(1, None), (2, Some(5000)), (3, Some(64)), (7, Some(100_000))] {
        let out = tempfile::tempdir().unwrap();
        let base = options(&inputs, out.path());
        let report =
            run_preprocess(&PreprocessOptions { workers, block_bytes, append_eod: true, ..base });
        assert_eq!(report.documents, texts.len() as u64);
        let found = outputs(out.path());
        let expected = first.get_or_insert_with(|| found.clone());
        assert!(*expected == found, "{workers} workers with blocks of {block_bytes:?} differ");
        check_against_texts(out.path(), &texts);
    }
}

/// The dataset decodes to the texts, in their order, and its manifest matches.
fn check_against_texts(folder: &Path, texts: &[String]) {
    let (store, dataset) = open(folder);
    let spec = TokenizerSpec { kind: "gpt2".to_owned(), ..Default::default() };
    let tokenizer = open_tokenizer(&spec).unwrap();
    assert_eq!(dataset.document_count(), texts.len() as u64);
    for (document, text) in (0..).zip(texts) {
        let mut ids = Vec::new();
        for sequence in dataset.document(document) {
            let read = dataset.read_sequence(sequence).unwrap();
            ids.extend(read.iter().map(|&id| u32::try_from(id).unwrap()));
        }
        assert_eq!(ids.pop(), (!text.is_empty()).then_some(50256));
        let mut bytes = Vec::new();
        tokenizer.decode(&ids, &mut bytes).unwrap();
        assert_eq!(String::from_utf8(bytes).unwrap(), *text, "document {document}");
    }
    let key = Key::new("out_text_document.manifest.json").unwrap();
    let manifest = Manifest::read(store.as_ref(), &key).unwrap();
    assert_eq!((manifest.format.as_str(), manifest.version), ("feedline-tokens", 1));
    assert_eq!(manifest.verify(store.as_ref(), &Key::root()).unwrap().files, 3);
    assert_eq!(manifest.meta["documents"], texts.len());
    assert_eq!(manifest.meta["tokens"], dataset.token_count());
    assert_eq!(manifest.meta["tokenizer"]["vocab_size"], 50257);
    let inputs = manifest.meta["inputs"].as_array().unwrap();
    assert_eq!(inputs.len(), 3);
    assert!(inputs.iter().all(|input| input["identity"]["bytes"].as_u64() > Some(0)), "{inputs:?}");
}

/// Above 65,499 ids Megatron writes four bytes a token.
#[test]
fn a_large_vocabulary_is_written_as_int32() {
    let folder = tempfile::tempdir().unwrap();
    let built_in = preprocess::Gpt2::built_in().unwrap();
    let mut vocab: serde_json::Value = serde_json::from_str(&built_in.vocab_json()).unwrap();
    let tokens = vocab.as_object_mut().unwrap();
    for id in 50_257..65_500 {
        tokens.insert(format!("<|extra_{id}|>"), id.into());
    }
    let [vocab_file, merge_file, input] =
        ["vocab.json", "merges.txt", "in.jsonl"].map(|name| folder.path().join(name));
    std::fs::write(&vocab_file, vocab.to_string()).unwrap();
    std::fs::write(&merge_file, built_in.merges_txt()).unwrap();
    std::fs::write(&input, line("Hello world")).unwrap();
    let mut options = options(&[&input], folder.path());
    options.tokenizer.vocab_file = Some(vocab_file.display().to_string());
    options.tokenizer.merge_file = Some(merge_file.display().to_string());
    let report = run_preprocess(&options);
    assert_eq!((report.dtype, report.vocab_size), ("int32", 65_500));
    let [bin, idx, _] = outputs(folder.path());
    assert_eq!(bin, [0x88, 0x3c, 0, 0, 0xe3, 0x03, 0, 0]);
    assert_eq!(idx[17], 4, "the code of int32");
}

#[test]
fn inputs_without_documents_make_an_empty_dataset() {
    let folder = tempfile::tempdir().unwrap();
    let [empty, blank] = ["empty.jsonl", "blank.jsonl"].map(|name| folder.path().join(name));
    std::fs::write(&empty, "").unwrap();
    std::fs::write(&blank, "\n \n").unwrap();
    let report = run_preprocess(&options(&[&empty, &blank], folder.path()));
    assert_eq!((report.documents, report.blank_lines, report.tokens), (0, 2, 0));
    assert_eq!(open(folder.path()).1.document_count(), 0);
}

#[test]
fn the_last_progress_covers_all_input() {
    let folder = tempfile::tempdir().unwrap();
    let input = folder.path().join("in.jsonl");
    std::fs::write(&input, line("a few words").repeat(5000)).unwrap();
    let mut last = preprocess::PreprocessProgress::default();
    let mut calls = 0;
    let options =
        PreprocessOptions { block_bytes: Some(9999), ..options(&[&input], folder.path()) };
    run(&options, &mut |progress| {
        assert!(progress.documents > last.documents || calls == 0);
        last = *progress;
        calls += 1;
    })
    .unwrap();
    assert!(calls > 5);
    assert_eq!((last.documents, last.stored_bytes_all), (5000, Some(last.stored_bytes)));
}

/// Each key makes a dataset whose sequences are sentences. An empty text is a document without
/// sequences. The end token follows the last sentence of a document.
#[test]
fn keys_and_sentences_by_hand() {
    let folder = tempfile::tempdir().unwrap();
    let input = folder.path().join("in.jsonl");
    let lines = [
        r#"{"text":"Hello world. Hello world!","title":"!"}"#,
        r#"{"text":"","title":"Hello world"}"#,
    ];
    std::fs::write(&input, lines.join("\n")).unwrap();
    let keys = vec!["text".to_owned(), "title".to_owned()];
    let objective = Objective::Sentences(SentenceSpec::default());
    let options = options(&[&input], folder.path());
    let report =
        run_preprocess(&PreprocessOptions { append_eod: true, keys, objective, ..options });
    assert_eq!((report.documents, report.documents_empty, report.sequences), (2, 1, 4));
    let store = storage::open_url(folder.path().to_str().unwrap()).unwrap();
    let open = |key: &str| {
        let prefix = Key::new(format!("out_{key}_sentence")).unwrap();
        IndexedDataset::open(&store, &prefix).unwrap()
    };
    let (text, title) = (open("text"), open("title"));
    assert_eq!(text.read_sequence(0).unwrap(), [15496, 995, 13]);
    assert_eq!(text.read_sequence(1).unwrap(), [15496, 995, 0, 50256]);
    assert_eq!((text.document(0), text.document(1)), (0..2, 2..2));
    assert_eq!(title.read_sequence(0).unwrap(), [0, 50256]);
    assert_eq!(title.read_sequence(1).unwrap(), [15496, 995, 50256]);
}

/// An empty document as either of Megatron's writers stores it, or skipped.
#[test]
fn empty_documents_follow_the_option() {
    let folder = tempfile::tempdir().unwrap();
    let input = folder.path().join("in.jsonl");
    std::fs::write(&input, "{\"text\":\"!\"}\n{\"text\":\"\"}\n{\"text\":\"!\"}\n").unwrap();
    for (empty_documents, documents, lens) in [
        (EmptyDocuments::Megatron, 3, vec![2, 2]),
        (EmptyDocuments::Sequence, 3, vec![2, 1, 2]),
        (EmptyDocuments::Skip, 2, vec![2, 2]),
    ] {
        let out_prefix = folder.path().join(format!("{documents}-{}/out", lens.len()));
        let base = options(&[&input], folder.path());
        let out_prefix = out_prefix.display().to_string();
        let report = run_preprocess(&PreprocessOptions {
            append_eod: true,
            empty_documents,
            out_prefix,
            ..base
        });
        let folder = folder.path().join(format!("{documents}-{}", lens.len()));
        let (_, dataset) = open(&folder);
        assert_eq!(dataset.document_count(), documents, "{empty_documents:?}");
        let found: Vec<_> =
            (0..dataset.sequence_count()).map(|s| dataset.sequence_len(s)).collect();
        assert_eq!(found, lens, "{empty_documents:?}");
        assert_eq!(report.skipped.empty, 3 - documents);
    }
}

/// A text of many megabytes is encoded in parts by all threads, to the same ids.
#[test]
fn one_long_document_is_one_document() {
    let folder = tempfile::tempdir().unwrap();
    let input = folder.path().join("in.jsonl");
    let text = Random::new(print_seed("one_long_document", 9)).english(5 << 20);
    std::fs::write(&input, line(&text)).unwrap();
    let mut files = Vec::new();
    for workers in [1, 3] {
        let out = folder.path().join(workers.to_string());
        let out_prefix = out.join("out").display().to_string();
        run_preprocess(&PreprocessOptions {
            workers,
            out_prefix,
            ..options(&[&input], folder.path())
        });
        files.push([outputs(&out)[0].clone(), outputs(&out)[1].clone()]);
    }
    assert!(files[0] == files[1], "the ids depend on the number of workers");
    assert_eq!(files[0][1].len(), 34 + 12 + 16);
}
