//! Vocabularies of byte-level BPE: GPT-2's, built in, and those in `vocab.json` and `merges.txt`.
//!
//! Both files spell a token in characters that each represent one byte, so that white space and
//! controls can be printed: 188 bytes represent themselves, the others are U+0100 onwards.

use std::collections::HashMap;
use std::fmt::Write as _;

use super::merge::{ID_LIMIT, Merge, RANK_LIMIT};
use super::read::parse_error;
use crate::{Error, Result};

/// Ends a document in GPT-2's training data, and is no merge's result.
const END_OF_TEXT: &str = "<|endoftext|>";

/// The first line of GPT-2's `merges.txt`.
const VERSION_LINE: &str = "#version: 0.2\n";

/// The vocabularies in use are 1 to 10 MB.
const FILE_BYTES_MAX: u64 = 256 << 20;

/// GPT-2's merges, uncompressed: 50,000 pairs of ids of two bytes each.
const BUILT_IN_BYTES: usize = 200_000;

/// Tokens and merges.
#[derive(Debug)]
pub(super) struct Vocab {
    /// The tokens' bytes, back to back.
    bytes: Vec<u8>,
    /// Where each token ends.
    ends: Vec<usize>,
    /// The id of each byte.
    pub(super) byte_ids: [u32; 256],
    /// In rank order.
    pub(super) merges: Vec<Merge>,
    pub(super) eod: Option<u32>,
}

impl Vocab {
    pub(super) fn size(&self) -> u32 {
        self.ends.len() as u32 // fits: below ID_LIMIT
    }

    /// The bytes of a token.
    pub(super) fn token(&self, id: u32) -> Option<&[u8]> {
        let id = id as usize;
        let end = *self.ends.get(id)?;
        let start = id.checked_sub(1).map_or(0, |before| self.ends[before]);
        Some(&self.bytes[start..end])
    }

    /// From each token as the files spell it to its id.
    pub(super) fn ids(&self) -> HashMap<String, u32> {
        (0..self.size()).map(|id| (self.spell(id), id)).collect()
    }

    pub(super) fn to_json(&self) -> String {
        let mut json = String::from("{");
        for id in 0..self.size() {
            json.push_str(if id == 0 { "\"" } else { ", \"" });
            for spelled in self.spell(id).chars() {
                match spelled {
                    '"' | '\\' => json.extend(['\\', spelled]),
                    ' '..='~' => json.push(spelled),
                    // fits: characters that represent bytes are below U+0144
                    _ => write!(json, "\\u{:04x}", spelled as u32).expect("to a string"),
                }
            }
            write!(json, "\": {id}").expect("to a string");
        }
        json.push('}');
        json
    }

    pub(super) fn to_merges_txt(&self) -> String {
        let mut text = VERSION_LINE.to_owned();
        for merge in &self.merges {
            let (left, right) = (self.spell(merge.left), self.spell(merge.right));
            writeln!(text, "{left} {right}").expect("to a string");
        }
        text
    }

    fn spell(&self, id: u32) -> String {
        let chars = byte_chars();
        let token = self.token(id).unwrap_or_default();
        token.iter().map(|&byte| chars[usize::from(byte)]).collect()
    }

    /// `ids` has a distinct id, below its length, for every token.
    fn new(ids: &HashMap<String, u32>, files: &VocabFiles<'_>) -> Result<Self> {
        let chars = byte_chars();
        let mut byte_ids = [0; 256];
        for (byte, (id, char)) in byte_ids.iter_mut().zip(chars).enumerate() {
            *id = *ids.get(char.encode_utf8(&mut [0; 4]) as &str).ok_or_else(|| {
                files.vocab("none".to_owned(), &format!("token '{char}' for byte {byte:#04x}"))
            })?;
        }
        let merges = merges(ids, &byte_ids, files)?;
        let byte_of: HashMap<char, u8> = chars.into_iter().zip(0..=255).collect();
        let mut spelled = vec![""; ids.len()];
        for (token, &id) in ids {
            spelled[id as usize] = token;
        }
        let (mut bytes, mut ends) = (Vec::new(), Vec::with_capacity(ids.len()));
        for token in spelled {
            match token.chars().map(|char| byte_of.get(&char).copied()).collect() {
                Some(token_bytes) => bytes.append(&mut { token_bytes }),
                // An added token is spelled as it is.
                None => bytes.extend_from_slice(token.as_bytes()),
            }
            ends.push(bytes.len());
        }
        let eod = ids.get(END_OF_TEXT).copied();
        Ok(Vocab { bytes, ends, byte_ids, merges, eod })
    }
}

/// The characters that bytes are spelled with, by byte.
pub(super) fn byte_chars() -> [char; 256] {
    let mut next_free = 0x100;
    std::array::from_fn(|byte| {
        let byte = byte as u32; // fits: below 256
        let code = if is_printable(byte) {
            byte
        } else {
            next_free += 1;
            next_free - 1
        };
        char::from_u32(code).expect("at most U+0143")
    })
}

fn is_printable(byte: u32) -> bool {
    matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff)
}

/// GPT-2's own: the printable bytes, the other bytes, then the result of each merge.
pub(super) fn built_in() -> Vocab {
    let packed = include_bytes!("../../assets/gpt2/merges.bin.zst");
    let pairs = zstd::bulk::decompress(packed, BUILT_IN_BYTES).expect("the built-in file is valid");
    let (first, rest): (Vec<u8>, Vec<u8>) = (0..=255).partition(|&byte| is_printable(byte.into()));
    let mut bytes = [first, rest].concat();
    let mut byte_ids = [0; 256];
    for (&byte, id) in bytes.iter().zip(0..) {
        byte_ids[usize::from(byte)] = id;
    }
    let mut ends: Vec<usize> = (1..=256).collect();
    let mut merges = Vec::with_capacity(pairs.len() / 4);
    for (&[a, b, c, d], merged) in pairs.as_chunks().0.iter().zip(256..) {
        let (left, right) = (u16::from_le_bytes([a, b]), u16::from_le_bytes([c, d]));
        for id in [left, right].map(usize::from) {
            let start = id.checked_sub(1).map_or(0, |before| ends[before]);
            bytes.extend_from_within(start..ends[id]);
        }
        ends.push(bytes.len());
        merges.push(Merge { left: left.into(), right: right.into(), merged });
    }
    let eod = Some(ends.len() as u32); // fits: 50,256
    bytes.extend_from_slice(END_OF_TEXT.as_bytes());
    ends.push(bytes.len());
    Vocab { bytes, ends, byte_ids, merges, eod }
}

/// The vocabulary of a `vocab.json` and a `merges.txt`.
pub(super) fn from_files(vocab_file: &str, merge_file: &str) -> Result<Vocab> {
    let vocab = read_text(vocab_file)?;
    let text = read_text(merge_file)?;
    let files = VocabFiles { vocab: vocab_file, merges: merge_file, text: &text };
    let ids: HashMap<String, u32> = serde_json::from_str(&vocab)
        .map_err(|e| files.vocab(parse_error(e), "a JSON object from token to id"))?;
    if ids.len() >= ID_LIMIT {
        return Err(files.vocab(format!("{} tokens", ids.len()), "at most 2097150 tokens"));
    }
    let mut taken = vec![false; ids.len()];
    for (token, &id) in &ids {
        let place = taken.get_mut(id as usize).filter(|taken| !**taken);
        let expected =
            || format!("each id from 0 to {} once for {} tokens", ids.len() - 1, ids.len());
        *place.ok_or_else(|| files.vocab(format!("id {id} for '{token}'"), &expected()))? = true;
    }
    Vocab::new(&ids, &files)
}

pub(super) fn read_text(file: &str) -> Result<String> {
    let bad = |found: String, expected: &str| Error::BadVocab {
        file: file.to_owned(),
        line: None,
        found,
        expected: expected.to_owned(),
        hint: None,
    };
    let (store, key) = storage::locate(file)?;
    let len_bytes = store.open(&key)?.len_bytes();
    if len_bytes > FILE_BYTES_MAX {
        return Err(bad(format!("{len_bytes} bytes"), "a vocabulary of at most 256 MiB"));
    }
    String::from_utf8(storage::read_all(store.as_ref(), &key)?).map_err(|e| {
        let at = e.utf8_error().valid_up_to();
        bad(format!("invalid UTF-8 at byte {at}"), "UTF-8 text")
    })
}

/// The names of the files, for messages, and the text of the merges.
struct VocabFiles<'a> {
    vocab: &'a str,
    merges: &'a str,
    text: &'a str,
}

impl VocabFiles<'_> {
    fn vocab(&self, found: String, expected: &str) -> Error {
        Error::BadVocab {
            file: self.vocab.to_owned(),
            line: None,
            found,
            expected: expected.to_owned(),
            hint: None,
        }
    }

    fn merges(&self, line: u64, found: String, expected: &str) -> Error {
        let file = self.merges.to_owned();
        Error::BadVocab { file, line: Some(line), found, expected: expected.to_owned(), hint: None }
    }
}

/// The lines that are merges, and their numbers from 1.
fn merge_lines(text: &str) -> impl Iterator<Item = (u64, &str)> {
    let numbered = (1..).zip(text.lines());
    numbered.filter(|(number, line)| {
        let version = *number == 1 && line.starts_with("#version");
        !version && !line.is_empty()
    })
}

/// A merge may use only bytes and results of earlier merges. Otherwise it could apply before one of
/// lower rank has been applied everywhere, and programs differ in that case.
fn merges(
    ids: &HashMap<String, u32>,
    byte_ids: &[u32; 256],
    files: &VocabFiles<'_>,
) -> Result<Vec<Merge>> {
    let mut made = vec![false; ids.len()];
    for &id in byte_ids {
        made[id as usize] = true;
    }
    let mut merges = Vec::new();
    let mut seen = std::collections::HashSet::new();
    for (number, line) in merge_lines(files.text) {
        let bad = |found: String, expected: &str| files.merges(number, found, expected);
        let (left, right) = line
            .split_once(' ')
            .filter(|(left, right)| !left.is_empty() && !right.is_empty() && !right.contains(' '))
            .ok_or_else(|| bad(format!("'{line}'"), "two tokens separated by a space"))?;
        let id = |token: &str| {
            let id = ids.get(token).copied();
            id.ok_or_else(|| bad(format!("'{token}'"), "a token of the vocabulary"))
        };
        let merge =
            Merge { left: id(left)?, right: id(right)?, merged: id(&format!("{left}{right}"))? };
        for (token, id) in [(left, merge.left), (right, merge.right)] {
            if !made[id as usize] {
                return Err(bad(format!("'{token}'"), "a byte, or the token of an earlier merge"));
            }
        }
        if !seen.insert((merge.left, merge.right)) {
            return Err(bad(format!("'{line}' again"), "every merge once"));
        }
        made[merge.merged as usize] = true;
        merges.push(merge);
    }
    if merges.len() > RANK_LIMIT {
        let last = merges.len() as u64;
        return Err(files.merges(last, format!("{last} merges"), "at most 4194304 merges"));
    }
    Ok(merges)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The built-in pairs equal the published text, to its last byte.
    #[test]
    fn built_in_is_the_published_table() {
        let packed = include_bytes!("../../assets/gpt2/merges.txt.zst");
        let text = zstd::bulk::decompress(packed, 1 << 20).unwrap();
        let built_in = built_in();
        assert_eq!(built_in.to_merges_txt().as_bytes(), text);
        assert_eq!((built_in.size(), built_in.eod), (50_257, Some(50_256)));
        assert_eq!(built_in.token(50_256), Some(END_OF_TEXT.as_bytes()));
        let merged = built_in.merges.iter().map(|merge| merge.merged);
        assert!(merged.eq(256..50_256));
    }
}
