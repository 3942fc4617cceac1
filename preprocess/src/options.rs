use std::str::FromStr;
use std::time::Duration;

use indexed::Dtype;

use crate::objective::SentenceSpec;
use crate::{InputOptions, TokenizerSpec};

/// Options of a run. Start from [`PreprocessOptions::new`].
#[derive(Clone, Debug, PartialEq)]
pub struct PreprocessOptions {
    /// Files, folders, patterns and pipes, in the order in which their documents are written. `-`
    /// is standard input.
    pub inputs: Vec<String>,
    /// How inputs are read. Default: by name.
    pub input: InputOptions,
    /// Folder and name prefix of the outputs.
    pub out_prefix: String,
    /// The keys that hold texts; each is a dataset of its own. Default: `text`.
    pub keys: Vec<String>,
    /// Default: GPT-2's.
    pub tokenizer: TokenizerSpec,
    /// What a document becomes. Default: [`Objective::Documents`].
    pub objective: Objective,
    /// End every document that has tokens with the tokenizer's end. Default: no.
    pub append_eod: bool,
    /// What a list of texts under a key becomes. Default: [`Lists::Sequences`].
    pub lists: Lists,
    /// What a document without tokens becomes. Default: [`EmptyDocuments::Megatron`].
    pub empty_documents: EmptyDocuments,
    /// The element type of the tokens. None, the default: as Megatron's writer chooses.
    pub dtype: Option<Dtype>,
    /// How a bad line is handled. Default: [`OnBadLine::Fail`].
    pub on_bad_line: OnBadLine,
    /// Of texts under equal keys of one object take the last, as Python does. Default: no, such a
    /// line is bad.
    pub last_of_duplicate_keys: bool,
    /// How an interrupted run of the same outputs is handled. Default: [`ResumePolicy::Refuse`].
    pub interrupted: ResumePolicy,
    /// Process only this shard of the inputs: the outputs of all shards, merged in order, equal
    /// those of one run to the byte. Default: none.
    pub shard: Option<Shard>,
    /// Threads that tokenize, at most 1024. Default: one for every core.
    pub workers: usize,
    /// A longer line is rejected. While it is processed, a line takes three to ten times its length
    /// in memory, and up to forty if it is all one word and the tokenizer a unigram model. Default
    /// and maximum: 1 GiB.
    pub line_bytes_max: u64,
    /// Bytes read and cut at a time. The outputs do not depend on it. Default: from 64 KiB to 256
    /// KiB, by the size of the inputs.
    pub block_bytes: Option<usize>,
    /// Interval between commits: the most work that a kill can lose. Default: 10 s.
    pub commit_every: Duration,
}

/// What a document becomes.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub enum Objective {
    /// A sequence of tokens.
    #[default]
    Documents,
    /// A sequence for each sentence.
    Sentences(SentenceSpec),
    /// CPM-2's three datasets: context with spans hidden, the spans, and where each begins.
    Spans(SpanOptions),
}

/// How spans are hidden.
#[derive(Clone, Debug, PartialEq)]
pub struct SpanOptions {
    /// The share of the tokens that is hidden. Default: 0.15.
    pub density: f64,
    /// The mean length of a span, in tokens. Default: 3.
    pub mean_len: f64,
    /// Default: 233, as in CPM-2.
    pub seed: u64,
    /// Write what CPM-2's own programs read: 16-bit offsets, and an empty document index. A
    /// document that these cannot hold is then refused. Default: no.
    pub cpm_compat: bool,
}

impl Default for SpanOptions {
    fn default() -> Self {
        SpanOptions { density: 0.15, mean_len: 3.0, seed: 233, cpm_compat: false }
    }
}

/// What a document without tokens becomes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EmptyDocuments {
    /// An entry of the document index without a sequence, and without an end: as Megatron's
    /// `preprocess_data.py` has it.
    #[default]
    Megatron,
    /// A sequence of no tokens, or of the end alone: as `preprocess_data_fast.py` has it.
    Sequence,
    /// Nothing; it is counted.
    Skip,
}

/// What a list of texts under a key becomes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Lists {
    /// A document with a sequence for each text, as Megatron has it.
    #[default]
    Sequences,
    /// One text, with a blank line between two of the list, as GPT-NeoX has it.
    Joined,
}

/// How a bad line is handled.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnBadLine {
    /// It ends the run.
    #[default]
    Fail,
    /// It is counted, reported and skipped.
    Skip,
}

/// How an interrupted run of the same outputs is handled.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ResumePolicy {
    /// It is an error.
    #[default]
    Refuse,
    /// Resume it, if there is one.
    Resume,
    /// Discard it.
    Restart,
}

/// A shard of the inputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shard {
    /// Its index, from 0.
    pub index: u32,
    /// The number of shards.
    pub count: u32,
}

const SLURM: &str = "cannot shard by Slurm job array";

impl Shard {
    /// The part of its outputs' names between the prefix and the key.
    pub(crate) fn label(self) -> String {
        format!("_{:05}-of-{:05}", self.index, self.count)
    }

    /// The shard of this task of a Slurm job array. The tasks are those from `SLURM_ARRAY_TASK_MIN`
    /// to `_MAX` in steps of `SLURM_ARRAY_TASK_STEP`.
    ///
    /// # Errors
    /// Which variable is missing or invalid.
    pub fn of_slurm(variable: &dyn Fn(&str) -> Option<String>) -> Result<Self, String> {
        let number = |name: &str| -> Result<u32, String> {
            let text = variable(name).ok_or_else(|| {
                format!("{SLURM}: {name} is not set (hint: submit with sbatch --array=0-15)")
            })?;
            text.parse()
                .map_err(|_| format!("{SLURM}: expected a number in {name}, found '{text}'"))
        };
        let (id, min) = (number("SLURM_ARRAY_TASK_ID")?, number("SLURM_ARRAY_TASK_MIN")?);
        let (max, count) = (number("SLURM_ARRAY_TASK_MAX")?, number("SLURM_ARRAY_TASK_COUNT")?);
        let step = variable("SLURM_ARRAY_TASK_STEP").map_or(Ok(1), |text| {
            text.parse().map_err(|_| {
                format!("{SLURM}: expected a number in SLURM_ARRAY_TASK_STEP, found '{text}'")
            })
        })?;
        let even = step > 0
            && min <= id
            && id <= max
            && (id - min).is_multiple_of(step)
            && (max - min) / step + 1 == count;
        if !even {
            return Err(format!(
                "{SLURM}: expected task ids without gaps, such as --array=0-15, found task {id} \
                 of {count} from {min} to {max} in steps of {step}"
            ));
        }
        Ok(Shard { index: (id - min) / step, count })
    }
}

impl FromStr for Shard {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "slurm" {
            return Shard::of_slurm(&|name| std::env::var(name).ok());
        }
        let parse = || {
            let (index, count) = text.split_once('/')?;
            let shard = Shard { index: index.parse().ok()?, count: count.parse().ok()? };
            (shard.index < shard.count).then_some(shard)
        };
        parse()
            .ok_or_else(|| "expected I/N with I from 0 to N - 1, such as 0/4, or slurm".to_owned())
    }
}

impl PreprocessOptions {
    /// The defaults.
    #[must_use]
    pub fn new(inputs: Vec<String>, out_prefix: impl Into<String>) -> Self {
        PreprocessOptions {
            inputs,
            input: InputOptions::default(),
            out_prefix: out_prefix.into(),
            keys: vec!["text".to_owned()],
            tokenizer: TokenizerSpec { kind: "gpt2".to_owned(), ..TokenizerSpec::default() },
            objective: Objective::default(),
            append_eod: false,
            lists: Lists::default(),
            empty_documents: EmptyDocuments::default(),
            dtype: None,
            on_bad_line: OnBadLine::default(),
            last_of_duplicate_keys: false,
            interrupted: ResumePolicy::default(),
            shard: None,
            workers: std::thread::available_parallelism().map_or(1, usize::from),
            line_bytes_max: 1 << 30,
            block_bytes: None,
            commit_every: Duration::from_secs(10),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shards_are_parsed() {
        assert_eq!("0/4".parse(), Ok(Shard { index: 0, count: 4 }));
        assert_eq!("3/4".parse(), Ok(Shard { index: 3, count: 4 }));
        for bad in ["4/4", "0/0", "1", "a/b", "-1/4", "1/4/5", ""] {
            assert!(bad.parse::<Shard>().is_err(), "{bad}");
        }
        let slurm = |id: &str, min: &str, max: &str, count: &str, step: &str| {
            let all = [("ID", id), ("MIN", min), ("MAX", max), ("COUNT", count), ("STEP", step)];
            Shard::of_slurm(&|name| {
                let found = all.iter().find(|(end, _)| name == format!("SLURM_ARRAY_TASK_{end}"));
                found.map(|(_, value)| (*value).to_owned())
            })
        };
        assert_eq!(slurm("7", "1", "16", "16", "1"), Ok(Shard { index: 6, count: 16 }));
        assert_eq!(slurm("8", "0", "12", "4", "4"), Ok(Shard { index: 2, count: 4 }));
        assert!(slurm("3", "0", "9", "4", "1").is_err(), "an array with gaps");
        assert!(slurm("x", "0", "9", "10", "1").is_err());
        assert!(Shard::of_slurm(&|_| None).unwrap_err().contains("SLURM_ARRAY_TASK_ID"));
    }
}
