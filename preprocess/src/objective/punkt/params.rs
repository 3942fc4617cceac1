//! The trained parameters of Punkt for a language, as NLTK's `punkt_tab` stores them.

use std::collections::{HashMap, HashSet};

use storage::Location;

use crate::{Error, Result};

/// Where and in which case a word was seen; the bits are those of the files.
pub(super) mod seen {
    /// In the middle of a sentence, in upper case.
    pub(in super::super) const MIDDLE_UPPER: u8 = 1 << 2;
    /// At the beginning of a sentence, in lower case.
    pub(in super::super) const BEGIN_LOWER: u8 = 1 << 4;
    /// Anywhere, in upper case.
    pub(in super::super) const UPPER: u8 = 1 << 1 | 1 << 2 | 1 << 3;
    /// Anywhere, in lower case.
    pub(in super::super) const LOWER: u8 = 1 << 4 | 1 << 5 | 1 << 6;
}

/// English has 238 KB, the largest of NLTK's languages 1.5 MB.
const FILE_BYTES_MAX: u64 = 64 << 20;

/// Its uncompressed length and one more, so that a longer file would be noticed.
const BUILT_IN_BYTES_MAX: usize = 237_765;

/// The parameters of a language.
#[derive(Debug, Default)]
pub(super) struct Params {
    /// In lower case, without the last period.
    pub(super) abbreviations: HashSet<String>,
    pub(super) starters: HashSet<String>,
    /// Two words with a tab between, the first without its period.
    pub(super) collocations: HashSet<String>,
    pub(super) contexts: HashMap<String, u8>,
}

impl Params {
    /// NLTK's for English.
    pub(super) fn english() -> Result<Self> {
        let packed = include_bytes!("../../../assets/punkt/english.zst");
        let text =
            zstd::bulk::decompress(packed, BUILT_IN_BYTES_MAX).expect("the built-in file is valid");
        let text = String::from_utf8(text).expect("the built-in file is valid");
        let mut tables = text.split("\n\n");
        Params::parse(|file| Ok((file.to_owned(), tables.next().unwrap_or("").to_owned())))
    }

    /// Those of a folder with the four files of `punkt_tab`.
    pub(super) fn from_folder(folder: &str) -> Result<Self> {
        Params::parse(|file| {
            let file = Location::new(folder).join(file).to_string();
            let text = read_text(&file)?;
            Ok((file, text))
        })
    }

    /// `read` gives a table's name for messages, and its text.
    fn parse(mut read: impl FnMut(&str) -> Result<(String, String)>) -> Result<Self> {
        let words = |text: &str| text.lines().map(str::to_owned).collect();
        let abbreviations = words(&read("abbrev_types.txt")?.1);
        let starters = words(&read("sent_starters.txt")?.1);
        let mut collocations = HashSet::new();
        let (file, text) = read("collocations.tab")?;
        for (number, line) in (1..).zip(text.lines()) {
            if line.bytes().filter(|&byte| byte == b'\t').count() != 1 {
                return Err(bad(&file, Some(number), line, "two words separated by a tab"));
            }
            collocations.insert(line.to_owned());
        }
        let mut contexts = HashMap::new();
        let (file, text) = read("ortho_context.tab")?;
        for (number, line) in (1..).zip(text.lines()) {
            let parsed = line.split_once('\t').and_then(|(word, bits)| {
                let bits = bits.parse().ok().filter(|&bits: &u8| bits & !0x7e == 0)?;
                Some((word.to_owned(), bits))
            });
            let expected = "a word, a tab and an even number of at most 126";
            contexts.extend([parsed.ok_or_else(|| bad(&file, Some(number), line, expected))?]);
        }
        Ok(Params { abbreviations, starters, collocations, contexts })
    }
}

fn read_text(file: &str) -> Result<String> {
    let (store, key) = storage::locate(file)?;
    let len_bytes = store.open(&key)?.len_bytes();
    if len_bytes > FILE_BYTES_MAX {
        return Err(bad(file, None, &format!("{len_bytes} bytes"), "at most 64 MiB"));
    }
    String::from_utf8(storage::read_all(store.as_ref(), &key)?).map_err(|e| {
        let at = e.utf8_error().valid_up_to();
        bad(file, None, &format!("invalid UTF-8 at byte {at}"), "UTF-8 text")
    })
}

fn bad(file: &str, line: Option<u64>, found: &str, expected: &str) -> Error {
    let found = match line {
        Some(_) => format!("'{}'", found.chars().take(80).collect::<String>().escape_debug()),
        None => found.to_owned(),
    };
    Error::BadVocab {
        file: file.to_owned(),
        line,
        found,
        expected: expected.to_owned(),
        hint: None,
    }
}
