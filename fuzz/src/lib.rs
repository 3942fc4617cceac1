//! What the fuzz targets share: files of hostile bytes, and uses of what readers make of them.
//!
//! A target passes if it returns: an error is what hostile bytes should give, and a panic, an
//! overflow, an allocation beyond reason or an endless loop is what libFuzzer finds.

#![forbid(unsafe_code)]

use std::fs;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

use indexed::{Census, Format, ReadOptions, Source};
use preprocess::{Tokenizer, TokenizerSpec, open_tokenizer};
use storage::{Key, Storage};

/// The folder of this process, in memory where there is such a place.
fn folder() -> &'static PathBuf {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| {
        let shm = PathBuf::from("/dev/shm");
        let above = if shm.is_dir() { shm } else { std::env::temp_dir() };
        let folder = above.join(format!("feedline-fuzz-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        folder
    })
}

/// Writes a file, in the place of the last of this name, and gives its path.
pub fn file(name: &str, bytes: &[u8]) -> String {
    let path = folder().join(name);
    fs::write(&path, bytes).unwrap();
    path.to_str().unwrap().to_owned()
}

/// Removes a file, so that a reader that writes can write it again.
pub fn remove(name: &str) {
    let _ = fs::remove_file(folder().join(name));
}

/// The place of a file of [`file`], without its suffix if it is asked for so.
pub fn place(name: &str) -> (Arc<dyn Storage>, Key) {
    // One request at a time is quicker where a file is a few bytes.
    let url = format!("file:{}?engine=pread", folder().join(name).display());
    storage::locate(&url).unwrap()
}

/// Reads token files whole, as `feedline convert` does.
pub fn read_tokens(prefix: &str, format: Format) {
    let (store, key) = place(prefix);
    if let Ok(source) = Source::open(&store, &key, format, &ReadOptions::default()) {
        let _ = Census::take(&source, None);
    }
}

/// Opens a tokenizer of one file, and encodes with it what is likely to reach its corners.
pub fn tokenize(kind: &str, name: &str, bytes: &[u8]) {
    let model = Some(file(name, bytes));
    let spec = TokenizerSpec { kind: kind.to_owned(), model, ..TokenizerSpec::default() };
    match open_tokenizer(&spec) {
        Ok(tokenizer) => encode(tokenizer.as_ref()),
        Err(error) => {
            let unknown = error.to_string().starts_with("--tokenizer: ");
            assert!(!unknown, "a target that tests nothing: {error}");
        }
    }
}

/// Every id is below the size of the vocabulary, and decodes.
pub fn encode(tokenizer: &dyn Tokenizer) {
    let size = tokenizer.vocab_size();
    let mut encoder = tokenizer.encoder();
    for text in ["", "a", " Hello  world\n", "春眠不覺曉\u{3000}", "\u{0}\u{fffd}\u{1f600}é ▁▁"] {
        let (mut ids, mut bytes) = (Vec::new(), Vec::new());
        encoder.encode(text, &mut ids);
        assert!(ids.iter().all(|id| *id < size), "{ids:?} of {size} from {text:?}");
        let decoded = tokenizer.decode(&ids, &mut bytes);
        assert!(decoded.is_ok(), "{decoded:?} from {text:?}");
    }
}
