//! S3 objects are read as files are.

use std::io::Write as _;

use storage::s3_server::{Fault, FaultRule, S3Server};
use storage::{Key, open_url, write_all};

use super::tests::cut;
use super::*;

fn documents(names: &[String]) -> Vec<String> {
    let inputs = expand(names, &InputOptions::default(), "text").unwrap();
    cut(InputChunker::new(inputs, 1000, 1 << 20)).documents
}

#[test]
fn objects_folders_and_buckets_are_inputs() {
    let server = S3Server::start().unwrap();
    let store = open_url(&server.url("corpus")).unwrap();
    let texts: Vec<_> = (0..2000).map(|i| format!("{{\"text\":\"{i}\"}}\n")).collect();
    let mut zstd = zstd::Encoder::new(Vec::new(), 1).unwrap();
    zstd.write_all(texts[1000..].concat().as_bytes()).unwrap();
    let put = |name: &str, bytes: &[u8]| {
        write_all(&*store, &Key::new(name).unwrap(), bytes).unwrap();
    };
    put("a.jsonl", texts[..1000].concat().as_bytes());
    put("deep/b.jsonl.zst", &zstd.finish().unwrap());
    put("deep/c.bin", b"not ours");
    server.inject(FaultRule::every(5, Fault::Truncate).of("GET"));
    server.inject(FaultRule::every(7, Fault::SlowDown));

    let expected: Vec<_> = texts.iter().map(|text| text.trim_end().to_owned()).collect();
    assert_eq!(documents(&[server.url("corpus/a.jsonl")]), expected[..1000]);
    assert_eq!(documents(&[server.url("corpus/deep/b.jsonl.zst")]), expected[1000..]);
    for folder in ["corpus", "corpus/", ""] {
        assert_eq!(documents(&[server.url(folder)]), expected, "{folder:?}");
    }
    let two = [server.url("corpus/deep"), server.url("corpus/a.jsonl")];
    assert_eq!(documents(&two), [&expected[1000..], &expected[..1000]].concat());
    assert!(server.fault_count() > 0);
}

/// A resumed run reads an object again if its ETag differs.
#[test]
fn the_identity_of_an_object_has_its_etag() {
    let server = S3Server::start().unwrap();
    let store = open_url(&server.url("")).unwrap();
    let key = Key::new("a.jsonl").unwrap();
    let put = |bytes: &[u8]| {
        write_all(&*store, &key, bytes).unwrap();
        Input::check(&server.url("a.jsonl")).unwrap().identity.unwrap()
    };
    let first = put(b"{\"text\":\"a\"}\n");
    assert!(first.is_unchanged_since(&first), "{first:?}");
    store.delete(&key).unwrap();
    let second = put(b"{\"text\":\"b\"}\n");
    assert_eq!(first.bytes, second.bytes);
    assert_ne!(first.version, second.version);
    assert_ne!(first.ends_crc64, second.ends_crc64);
}

#[test]
fn missing_objects_are_errors() {
    let server = S3Server::start().unwrap();
    for (name, word) in [
        (server.url("a.jsonl"), "no such"),
        (server.url_of("other", "a.jsonl"), "no such bucket"),
        (server.url("a.jsonl") + "&fast=on", "option fast: expected endpoint=URL"),
    ] {
        let error = expand(&[name], &InputOptions::default(), "text").unwrap_err();
        assert!(error.to_string().contains(word), "{error}");
    }
}

/// An option of the URL was taken for the ending of a file, or stood in the middle of a name.
#[test]
fn names_of_files_below_a_url_have_no_options() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    std::fs::create_dir(path("deep")).unwrap();
    let text = "{\"text\":\"a\"}\n";
    std::fs::write(path("deep/a.txt"), "a\nb\n").unwrap();
    let packed = zstd::encode_all(text.as_bytes(), 1).unwrap();
    std::fs::write(path("deep/b.jsonl.zst"), packed).unwrap();
    for (name, found, documents) in [
        ("deep", vec!["deep/a.txt", "deep/b.jsonl.zst"], 3),
        ("deep/a.txt", vec!["deep/a.txt"], 2),
        ("deep/b.jsonl.zst", vec!["deep/b.jsonl.zst"], 1),
    ] {
        let url = format!("file:{}?direct=off", path(name));
        let inputs = expand(&[url], &InputOptions::default(), "text").unwrap();
        let names: Vec<_> = inputs.iter().map(|input| input.name.clone()).collect();
        assert_eq!(names, found.into_iter().map(path).collect::<Vec<_>>());
        let cut = cut(InputChunker::new(inputs, 1000, 1 << 20)).documents;
        assert_eq!(cut.len(), documents, "{name}");
    }
}
