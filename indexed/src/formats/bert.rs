//! Reads examples of BERT's `create_pretraining_data.py` as the text that they were made from.
//!
//! An example is `[CLS] A [SEP] B [SEP]`, padded, in which tokens were masked:
//!
//! ```text
//! input_ids               ids, masked ones replaced
//! input_mask              1 for each of them, then 0
//! segment_ids             0 up to the first [SEP], then 1
//! masked_lm_positions     which of them were masked
//! masked_lm_ids           what they were
//! masked_lm_weights       1 for each of them, then 0
//! next_sentence_labels    1 if B is of another document, chosen at random
//! ```
//!
//! Every masked token is recorded, even if it was left unchanged, so the text is exact. A and B are
//! two sequences of one document, or with label 1 two documents.

use std::sync::Arc;

use storage::{Key, Storage};

use super::boundaries::Boundaries;
use super::example::Example;
use super::pair::start_of;
use super::source::{Sink, TokenRun, TokenSource};
use super::tfrecord::{Compression, RECORD_HEADER_BYTES, RecordFault, RecordReader};
use super::{Format, unsupported};
use crate::mmididx::idx::malformed;
use crate::{Dtype, FormatRule, Result};

/// Part of the name of a TFRecord file.
const NAME: &str = ".tfrecord";

/// One file, or the parts of a file.
#[derive(Debug)]
pub(super) struct BertRecords {
    parts: Vec<(TokenRun, Compression)>,
}

pub(super) fn open(store: &Arc<dyn Storage>, key: &Key) -> Result<TokenSource> {
    let mut parts = Vec::new();
    for key in part_keys(store, key)?.unwrap_or_else(|| vec![key.clone()]) {
        let object = store.open(&key)?;
        let head = start_of(&*object)?;
        let compression = Compression::detect(&head).ok_or_else(|| {
            let found = format!("\"{}\"", head[..head.len().min(12)].escape_ascii());
            let expected = "a length and its masked CRC-32C, or the start of a gzip or zlib file";
            malformed(&object.display(), 0, FormatRule::Record, found, expected)
        })?;
        let bytes = 0..object.len_bytes();
        parts.push((TokenRun { object, bytes }, compression));
    }
    Ok(TokenSource {
        format: Format::TfRecord,
        display: store.display(key),
        dtype: Dtype::I32,
        runs: parts.iter().map(|(run, _)| run.clone()).collect(),
        marks: Boundaries::Bert(BertRecords { parts }),
        has_modes: false,
    })
}

/// Whether a name is that of TFRecord files: a file that starts like one, `NAME` of
/// `NAME-00000-of-00010`, or a folder with names that contain `.tfrecord`.
pub(super) fn is_here(store: &Arc<dyn Storage>, key: &Key, names: &[String]) -> Result<bool> {
    if !names.iter().any(|name| name == key.name()) {
        return Ok(!shards(names, key.name()).is_empty());
    }
    match store.open(key) {
        Ok(object) => {
            let head = start_of(&*object)?;
            let named = key.name().contains(NAME);
            Ok(Compression::detect(&head).is_some_and(|compression| match compression {
                Compression::None => named || !head.is_empty(),
                Compression::Gzip | Compression::Zlib => named,
            }))
        }
        // A folder, or a name that its reader refuses.
        Err(_) => Ok(part_keys(store, key)?.is_some_and(|parts| !parts.is_empty())),
    }
}

/// The parts of `NAME` or of a folder, in the order of their names. `None`: it is a file.
fn part_keys(store: &Arc<dyn Storage>, key: &Key) -> Result<Option<Vec<Key>>> {
    if store.open(key).is_ok() {
        return Ok(None);
    }
    let names = store.list_names(&key.parent())?;
    let parts = shards(&names, key.name());
    if let Some(count) = parts.first().and_then(|name| name.rsplit_once('-')?.1.parse().ok()) {
        let name = |idx: usize| format!("{}-{idx:05}-of-{count:05}", key.name());
        let absent = (0..count).map(name).find(|name| !parts.contains(&name));
        if absent.is_some() || parts.len() != count {
            let expected = format!("{count} parts, {} to {}", name(0), name(count.max(1) - 1));
            let found = match absent {
                Some(absent) => format!("none of the name {absent}"),
                None => format!("{} parts", parts.len()),
            };
            return Err(unsupported("TFRecord parts", found, expected));
        }
        let parent = key.parent();
        let keys = parts.into_iter().map(|name| parent.join(name));
        return Ok(Some(keys.collect::<storage::Result<_>>()?));
    }
    let mut names = store.list_names(key).unwrap_or_default();
    names.retain(|name| name.contains(NAME) && !name.starts_with('.'));
    names.sort_unstable();
    let keys = names.iter().map(|name| key.join(name));
    Ok(Some(keys.collect::<storage::Result<Vec<_>>>()?).filter(|keys| !keys.is_empty()))
}

/// The names `STEM-00000-of-00010`, sorted.
fn shards<'a>(names: &'a [String], stem: &str) -> Vec<&'a String> {
    let is_number = |text: &str| text.len() == 5 && text.bytes().all(|byte| byte.is_ascii_digit());
    let is_part = |name: &&String| {
        let rest = name.strip_prefix(stem).and_then(|rest| rest.strip_prefix('-'));
        let ends = rest.and_then(|rest| rest.split_once("-of-"));
        ends.is_some_and(|(idx, count)| is_number(idx) && is_number(count))
    };
    let mut parts: Vec<_> = names.iter().filter(is_part).collect();
    parts.sort_unstable();
    parts
}

impl BertRecords {
    pub(super) fn read_into(&self, sink: &mut dyn Sink) -> Result<()> {
        let mut bytes = Vec::new();
        for (run, compression) in &self.parts {
            let mut reader = RecordReader::open(&run.object, *compression);
            let mut example = BertExample::default();
            let mut ends = None;
            while let Some(data) = reader.next()? {
                let read = Example::parse(data, RECORD_HEADER_BYTES)
                    .and_then(|features| example.read(&features))
                    .and_then(|()| example.check_ends(*ends.get_or_insert(example.ends())));
                read.map_err(|fault| reader.bad(&fault))?;
                for (idx, ids) in [example.first(), example.second()].into_iter().enumerate() {
                    bytes.clear();
                    Dtype::I32.encode(ids, &mut bytes);
                    sink.tokens(&bytes)?;
                    sink.end_sequence(0)?;
                    if idx == 1 || example.is_random_next {
                        sink.end_document()?;
                    }
                }
            }
        }
        Ok(())
    }
}

/// One example with its masks removed. Its memory is reused.
#[derive(Debug, Default)]
pub struct BertExample {
    /// B is of another document than A.
    pub is_random_next: bool,
    /// `[CLS] A [SEP] B [SEP]`.
    ids: Vec<u32>,
    /// Where B starts.
    second_start: usize,
    ints: [Vec<i64>; 3],
    weights: Vec<f32>,
}

impl BertExample {
    /// Whether an example has the features of BERT.
    #[must_use]
    pub fn is_one(example: &Example<'_>) -> bool {
        example.has("input_ids") && example.has("masked_lm_ids")
    }

    /// The ids of A.
    #[must_use]
    pub fn first(&self) -> &[u32] {
        &self.ids[1..self.second_start - 1]
    }

    /// The ids of B.
    #[must_use]
    pub fn second(&self) -> &[u32] {
        &self.ids[self.second_start..self.ids.len() - 1]
    }

    /// Reads the features of an example and removes the masks.
    ///
    /// # Errors
    /// [`RecordFault`] for a feature that is missing or contradicts another.
    pub fn read(&mut self, example: &Example<'_>) -> std::result::Result<(), RecordFault> {
        self.read_ids(example)?;
        let [positions, masked, label] = &mut self.ints;
        example.ints("masked_lm_positions", positions)?;
        example.ints("masked_lm_ids", masked)?;
        example.floats("masked_lm_weights", &mut self.weights)?;
        equal_lens("masked_lm_ids", masked.len(), "masked_lm_positions", positions.len())?;
        equal_lens("masked_lm_weights", self.weights.len(), "masked_lm_ids", masked.len())?;
        for ((&position, &id), &weight) in positions.iter().zip(&*masked).zip(&self.weights) {
            if weight == 0.0 {
                continue;
            }
            if weight.is_nan() || weight < 0.0 {
                return Err(bad(format!("masked_lm_weights of {weight}"), "0 or 1"));
            }
            let count = self.ids.len();
            let slot = usize::try_from(position).ok().and_then(|at| self.ids.get_mut(at));
            let Some(slot) = slot else {
                let expected = format!("a position below the {count} tokens");
                return Err(bad(format!("{position} in masked_lm_positions"), expected));
            };
            *slot = token_id("masked_lm_ids", id)?;
        }
        example.ints("next_sentence_labels", label)?;
        self.is_random_next = match label[..] {
            [0] => false,
            [1] => true,
            _ => {
                let found = format!("next_sentence_labels {label:?}");
                return Err(bad(found, "one label, 0 or 1"));
            }
        };
        self.check_ends(self.ends())
    }

    fn read_ids(&mut self, example: &Example<'_>) -> std::result::Result<(), RecordFault> {
        let [ids, mask, segments] = &mut self.ints;
        example.ints("input_ids", ids)?;
        example.ints("input_mask", mask)?;
        example.ints("segment_ids", segments)?;
        equal_lens("input_mask", mask.len(), "input_ids", ids.len())?;
        equal_lens("segment_ids", segments.len(), "input_ids", ids.len())?;
        let count = mask.iter().take_while(|&&mask| mask == 1).count();
        if mask[count..].iter().any(|&mask| mask != 0) {
            return Err(bad("other values in input_mask", "1 for each token, then 0"));
        }
        let start = segments[..count].iter().take_while(|&&segment| segment == 0).count();
        if segments[start..count].iter().any(|&segment| segment != 1) {
            return Err(bad("other values in segment_ids", "0 for each token of A, then 1"));
        }
        // [CLS] A [SEP] B [SEP]: neither A nor B is empty.
        if start < 3 || count - start < 2 {
            let found = format!("segments of {start} and {} tokens", count - start);
            return Err(bad(found, "at least 3 and 2 tokens: [CLS] A [SEP] B [SEP]"));
        }
        self.second_start = start;
        self.ids.clear();
        for &id in &ids[..count] {
            self.ids.push(token_id("input_ids", id)?);
        }
        Ok(())
    }

    /// The ids of `[CLS]` and `[SEP]`.
    fn ends(&self) -> [u32; 2] {
        [self.ids[0], self.ids[self.ids.len() - 1]]
    }

    /// All examples must have the ids of the first.
    fn check_ends(&self, [cls, sep]: [u32; 2]) -> std::result::Result<(), RecordFault> {
        let [first, last] = self.ends();
        let found = [first, self.ids[self.second_start - 1], last];
        if found == [cls, sep, sep] && cls != sep {
            return Ok(());
        }
        let expected = format!("[CLS] {cls}, [SEP] {sep} and [SEP] {sep}, two ids");
        Err(bad(format!("ids {found:?} at the ends of A and B"), expected))
    }
}

fn token_id(list: &str, id: i64) -> std::result::Result<u32, RecordFault> {
    let narrow = i32::try_from(id).ok().and_then(|id| u32::try_from(id).ok());
    narrow.ok_or_else(|| bad(format!("id {id} in {list}"), format!("0 to {}", i32::MAX)))
}

fn equal_lens(
    name: &str,
    len: usize,
    other: &str,
    expected: usize,
) -> std::result::Result<(), RecordFault> {
    if len == expected {
        return Ok(());
    }
    Err(bad(format!("{len} values"), format!("{expected} values of {name}, as many as {other}")))
}

fn bad(found: impl Into<String>, expected: impl Into<String>) -> RecordFault {
    RecordFault::new(0, found, expected)
}
