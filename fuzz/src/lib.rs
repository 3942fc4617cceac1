//! Common code of the targets: files in memory, and invariants of every tokenizer.

#![forbid(unsafe_code)]

mod memory;
pub mod tree;

use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

use indexed::{Census, Format, IndexedDataset, ReadOptions, TokenSource, WriteOptions, Writer};
use preprocess::{Tokenizer, TokenizerSpec, open_tokenizer};
use storage::Key;

use crate::memory::Memory;

/// A store in memory.
pub type Store = Arc<dyn storage::Storage>;

/// No target makes a larger file, whatever length an index has.
pub const FILE_BYTES_MAX: u64 = 1 << 14;

/// Several scripts, marks, spaces, a long word, and characters that few vocabularies have.
const SAMPLE: &str = "Hello,  world! It's 1234567.89 <s>[INST] I'll\t\r\n\n 你好，世界。 \u{3000}Ａ１ \
    e\u{301}\u{327}é ﬁ Привет שלום \u{ac00}\u{1100}\u{1161} ไทย 👩‍👩‍👧 \u{10ffff}\0\u{feff}▁▁ </s> \
    aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa ";

/// A key with a valid name.
pub fn key(name: &str) -> Key {
    Key::new(name).expect("a valid key")
}

/// A store with these files and no other.
pub fn store_with(files: &[(&str, &[u8])]) -> Store {
    Arc::new(Memory::new(files))
}

/// The bytes of a file that exists.
pub fn bytes_of(store: &Store, name: &str) -> Vec<u8> {
    storage::read_all(store.as_ref(), &key(name)).expect("a file that was written")
}

/// Bytes that differ from their neighbours.
pub fn some_bytes(len: u64) -> Vec<u8> {
    (0..len).map(|place| (place % 251) as u8).collect()
}

/// Writes a file into a folder of this process and returns its path.
pub fn file(name: &str, bytes: &[u8]) -> String {
    let path = folder().join(name);
    let above = path.parent().expect("below a folder");
    std::fs::create_dir_all(above).expect("a folder for temporary files");
    std::fs::write(&path, bytes).expect("room for a file");
    path.to_str().expect("a path in UTF-8").to_owned()
}

/// Removes an output, so that it can be written again.
pub fn remove(name: &str) {
    let _ = std::fs::remove_file(folder().join(name));
}

/// The folder of this process, in `/dev/shm` if that exists.
fn folder() -> &'static PathBuf {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| {
        let shm = PathBuf::from("/dev/shm");
        let above = if shm.is_dir() { shm } else { std::env::temp_dir() };
        above.join(format!("feedline-fuzz-{}", std::process::id()))
    })
}

/// Converts `a` to a valid pair `b` of Megatron with the same counts. Returns `None` if `a` is
/// refused.
pub fn converted(store: &Store, format: Format) -> Option<(TokenSource, IndexedDataset)> {
    let source = TokenSource::open(store, &key("a"), format, &ReadOptions::default()).ok()?;
    let census = Census::take(&source, None).ok()?;
    let (to, options) = (key("b"), WriteOptions::default());
    let mut writer = Writer::create(store, &to, Format::Mmididx, &source, &options).ok()?;
    // Types that Megatron does not have are narrowed, which fails if a token is out of range.
    source.read_into(&mut writer).ok()?;
    writer.finish().expect("room in memory");
    let dataset = IndexedDataset::open(store, &to).expect("a pair just written");
    assert_eq!(dataset.sequence_count(), census.sequences);
    assert_eq!(dataset.document_count(), census.documents);
    assert_eq!(dataset.token_count(), census.tokens);
    Some((source, dataset))
}

/// Opens a tokenizer of one file and checks it if it is accepted.
pub fn tokenize(kind: &str, name: &str, bytes: &[u8]) {
    let model = Some(file(name, bytes));
    tokenize_spec(
        &TokenizerSpec { kind: kind.to_owned(), model, ..TokenizerSpec::default() },
        bytes,
    );
}

/// Opens any tokenizer and checks it if it is accepted; some of the bytes are used as text.
pub fn tokenize_spec(spec: &TokenizerSpec, bytes: &[u8]) {
    match open_tokenizer(spec) {
        Ok(tokenizer) => check_tokenizer(tokenizer.as_ref(), bytes),
        Err(error) => {
            let unknown = error.to_string().starts_with("--tokenizer: ");
            assert!(!unknown, "the target tests nothing: {error}");
        }
    }
}

/// For any vocabulary, ids are below its size and decode to bytes; neither the cache of an encoder
/// nor a cut where `cut_after` allows one changes them.
fn check_tokenizer(tokenizer: &dyn Tokenizer, vocabulary: &[u8]) {
    let last = &vocabulary[vocabulary.len().saturating_sub(200)..];
    let text = format!("{SAMPLE}{}{SAMPLE}", String::from_utf8_lossy(last));
    let encode = |text: &str| {
        let mut ids = Vec::new();
        tokenizer.encode(text, &mut ids);
        ids
    };
    let ids = encode(&text);
    assert!(ids.iter().all(|&id| id < tokenizer.vocab_size()), "{ids:?}");
    tokenizer.decode(&ids, &mut Vec::new()).expect("ids of the vocabulary");
    let mut encoder = tokenizer.encoder();
    for round in 0..2 {
        let mut again = Vec::new();
        encoder.encode(&text, &mut again);
        assert_eq!(again, ids, "round {round}");
    }
    for at in [1, text.len() / 2] {
        let at = text.ceil_char_boundary(at);
        if let Some(cut) = tokenizer.cut_after(&text, at) {
            assert!(cut >= at, "cut at {cut} for {at}");
            let (left, right) = text.split_at(cut);
            assert_eq!([encode(left), encode(right)].concat(), ids, "cut at {cut}");
        }
    }
    if let Some(eod) = tokenizer.eod() {
        assert!(eod < tokenizer.vocab_size());
    }
}
