//! What the targets share: files in memory, and what every tokenizer must hold to.

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

/// No target makes a file beyond this, whatever an index says.
pub const FILE_BYTES_MAX: u64 = 1 << 14;

/// Several scripts, marks, spaces, a long word, and characters that few vocabularies have.
const SAMPLE: &str = "Hello,  world! It's 1234567.89 <s>[INST] I'll\t\r\n\n 你好，世界。 \u{3000}Ａ１ \
    e\u{301}\u{327}é ﬁ Привет שלום \u{ac00}\u{1100}\u{1161} ไทย 👩‍👩‍👧 \u{10ffff}\0\u{feff}▁▁ </s> \
    aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa ";

/// A key of our own choice.
pub fn key(name: &str) -> Key {
    Key::new(name).expect("a sound key")
}

/// A store with these files and no other.
pub fn store_with(files: &[(&str, &[u8])]) -> Store {
    Arc::new(Memory::new(files))
}

/// The bytes of a file that is there.
pub fn bytes_of(store: &Store, name: &str) -> Vec<u8> {
    storage::read_all(store.as_ref(), &key(name)).expect("a file that was written")
}

/// Tokens that differ from their neighbours.
pub fn some_bytes(len: u64) -> Vec<u8> {
    (0..len).map(|place| (place % 251) as u8).collect()
}

/// Writes a file that is read by its path, in a folder of this process; gives the path.
pub fn file(name: &str, bytes: &[u8]) -> String {
    let path = folder().join(name);
    let above = path.parent().expect("below a folder");
    std::fs::create_dir_all(above).expect("a folder for temporary files");
    std::fs::write(&path, bytes).expect("room for a file");
    path.to_str().expect("a path in UTF-8").to_owned()
}

/// Removes a file, so that a reader that writes can write it again.
pub fn remove(name: &str) {
    let _ = std::fs::remove_file(folder().join(name));
}

/// The folder of this process, in memory where there is such a place.
fn folder() -> &'static PathBuf {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| {
        let shm = PathBuf::from("/dev/shm");
        let above = if shm.is_dir() { shm } else { std::env::temp_dir() };
        above.join(format!("feedline-fuzz-{}", std::process::id()))
    })
}

/// Converts `a` of a format to a pair `b` of Megatron's, which is sound and counts the same. `None`
/// if it is not accepted.
pub fn converted(store: &Store, format: Format) -> Option<(TokenSource, IndexedDataset)> {
    let source = TokenSource::open(store, &key("a"), format, &ReadOptions::default()).ok()?;
    let census = Census::take(&source, None).ok()?;
    let (to, options) = (key("b"), WriteOptions::default());
    let mut writer = Writer::create(store, &to, Format::Mmididx, &source, &options).ok()?;
    // Types that Megatron has not are narrowed, which not every token can be.
    source.read_into(&mut writer).ok()?;
    writer.finish().expect("room in memory");
    let dataset = IndexedDataset::open(store, &to).expect("what we wrote");
    assert_eq!(dataset.sequence_count(), census.sequences);
    assert_eq!(dataset.document_count(), census.documents);
    assert_eq!(dataset.token_count(), census.tokens);
    Some((source, dataset))
}

/// Opens a tokenizer of one file; what is accepted encodes soundly.
pub fn tokenize(kind: &str, name: &str, bytes: &[u8]) {
    let model = Some(file(name, bytes));
    tokenize_by(&TokenizerSpec { kind: kind.to_owned(), model, ..TokenizerSpec::default() }, bytes);
}

/// The same of any files; some of their bytes make up the text.
pub fn tokenize_by(spec: &TokenizerSpec, bytes: &[u8]) {
    match open_tokenizer(spec) {
        Ok(tokenizer) => encodes_soundly(tokenizer.as_ref(), bytes),
        Err(error) => {
            let unknown = error.to_string().starts_with("--tokenizer: ");
            assert!(!unknown, "a target that tests nothing: {error}");
        }
    }
}

/// What a vocabulary may look like is its own affair, but ids lie below its size and stand for
/// bytes, no memory of earlier texts changes them, and neither does a cut where one is allowed.
fn encodes_soundly(tokenizer: &dyn Tokenizer, vocabulary: &[u8]) {
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
