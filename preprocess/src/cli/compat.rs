//! The command lines of other programs: Megatron's, CPM-2's, Yuan's, Paddle's and GPT-NeoX's.
//!
//! A flag with the same meaning as a flag of this program is an alias. The others are in
//! [`crate::cli::foreign`]: ignored with a note that gives the reason, or refused with the reason.

use std::ffi::OsString;

use crate::cli::foreign::{FOREIGN, FlagMapping, Values};

/// A command line with the flags of this program, and notes for the user.
#[derive(Debug, Default)]
pub(crate) struct Translated {
    pub(crate) arguments: Vec<OsString>,
    /// How flags of other programs were handled.
    pub(crate) notes: Vec<String>,
}

/// Programs that have one tokenizer name it by the folder of its vocabulary alone: CPM-2's
/// `preprocess_data_enc_dec.py` and Yuan's `preprocess_data_cn.py`.
const PROGRAMS: [(&str, &[&str], &str); 2] = [
    (
        "--tokenizer-path",
        &["--tokenizer", "encdec", "--objective", "cpm2", "--cpm-compat"],
        "read as CPM-2's, with --tokenizer encdec --objective cpm2 --cpm-compat",
    ),
    (
        "--vocab-path",
        &[
            "--tokenizer",
            "yuan",
            "--dtype",
            "int32",
            "--txt-newline",
            "<n>",
            "--txt-trim",
            "--append-eod",
        ],
        "read as Yuan's, with --tokenizer yuan --dtype int32 --txt-newline '<n>' --txt-trim \
         --append-eod; all inputs become one dataset, and no line is skipped for its length",
    ),
];

/// Programs that read inputs differently from Megatron and from this program: the options that read
/// inputs as they do, and a note for the user.
const READERS: [(ForeignReader, &[FlagValue], &str); 2] = [
    (
        ForeignReader::NeoX,
        &[("--lists", "joined"), ("--empty-docs", "skip"), ("--txt-separator", "file")],
        "inputs are read as by GPT-NeoX's program, with --lists joined --empty-docs skip \
         --txt-separator file",
    ),
    (
        ForeignReader::Paddle,
        &[("--empty-docs", "skip")],
        "documents without tokens are skipped as by Paddle's program, with --empty-docs skip",
    ),
];

/// A flag and its value.
type FlagValue = (&'static str, &'static str);

/// The program whose way of reading inputs is reproduced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ForeignReader {
    NeoX,
    Paddle,
}

impl ForeignReader {
    /// Detected by flags that only one program has, and by tokenizer names that only GPT-NeoX has.
    fn of(arguments: &[OsString]) -> Option<ForeignReader> {
        let flags: Vec<(String, &str)> = arguments
            .iter()
            .zip(arguments.iter().skip(1).map(Some).chain([None]))
            .filter_map(|(word, next)| {
                let word = word.to_str().filter(|word| word.starts_with("--"))?;
                let (name, value) = word.split_once('=').unwrap_or_else(|| {
                    (word, next.and_then(|next| next.to_str()).unwrap_or_default())
                });
                Some((name.replace('_', "-"), value))
            })
            .collect();
        let has = |name: &str| flags.iter().any(|(flag, _)| flag == name);
        let names = ["HFTokenizer", "HFGPT2Tokenizer", "SPMTokenizer", "TiktokenTokenizer"];
        let is_neox = |(flag, value): &(String, &str)| {
            flag == "--tokenizer-type" && names.contains(value) && has("--input")
        };
        if has("--jsonl-keys") || has("--num-docs") || flags.iter().any(is_neox) {
            return Some(ForeignReader::NeoX);
        }
        has("--input-path").then_some(ForeignReader::Paddle)
    }
}

/// Translates the names of tokenizers in Paddle and GPT-NeoX.
pub(crate) fn tokenizer_kind(name: &str) -> &str {
    match name {
        "GPTTokenizer" => "gpt2",
        "BertTokenizer" | "ErnieTokenizer" | "ElectraTokenizer" => "wordpiece",
        "GPTChineseTokenizer" => "cpm1",
        "HFTokenizer" | "PretrainedFromHF" => "hf",
        "SPMTokenizer" => "sentencepiece",
        "TiktokenTokenizer" => "tiktoken",
        other => other,
    }
}

/// Removes the flags of other programs, and writes `--like_this` as `--like-this`.
///
/// # Errors
/// The flag that cannot be translated, and the reason.
pub(crate) fn translate(
    arguments: impl IntoIterator<Item = OsString>,
) -> Result<Translated, String> {
    let arguments: Vec<OsString> = arguments.into_iter().collect();
    let reader = ForeignReader::of(&arguments);
    let mut out = Translated::default();
    let mut rest = arguments.into_iter().peekable();
    let is_flag = |argument: &OsString| {
        argument.to_str().is_some_and(|text| text.starts_with("--") && text.len() > 2)
    };
    out.arguments.extend(rest.next());
    // As `feedline completions SHELL`; no other word can be first here.
    if rest.next_if(|word| word == "completions").is_some() {
        out.arguments.push("--completions".into());
    }
    while let Some(argument) = rest.next() {
        let Some(text) = argument.to_str().filter(|_| is_flag(&argument)) else {
            out.arguments.push(argument);
            continue;
        };
        let (name, value) = match text.split_once('=') {
            Some((name, value)) => (name.replace('_', "-"), Some(value)),
            None => (text.replace('_', "-"), None),
        };
        let Some((_, values, verdict)) = FOREIGN.iter().find(|(foreign, ..)| *foreign == name)
        else {
            out.arguments.push(match value {
                Some(value) => format!("{name}={value}").into(),
                None => name.into(),
            });
            continue;
        };
        match verdict {
            FlagMapping::Refused(reason) => return Err(format!("cannot use {name}: {reason}")),
            FlagMapping::Implied(reason) => out.notes.push(format!("{name}: ignored; {reason}")),
        }
        let most = match values {
            _ if value.is_some() => 0,
            Values::Zero => 0,
            Values::One => 1,
            Values::Many => usize::MAX,
        };
        for _ in 0..most {
            if rest.next_if(|next| !is_flag(next)).is_none() {
                break;
            }
        }
    }
    let has = |out: &Translated, name: &str| {
        let is_it = |word: &str| word.split('=').next() == Some(name);
        out.arguments.iter().any(|word| word.to_str().is_some_and(is_it))
    };
    for (flag, implied, note) in PROGRAMS {
        let tokenizers = ["--tokenizer", "--tokenizer-type", "--tokenizer-name"];
        if has(&out, flag) && !tokenizers.iter().any(|name| has(&out, name)) {
            out.arguments.extend(implied.iter().map(OsString::from));
            out.notes.push(format!("{flag} without --tokenizer: {note}"));
        }
    }
    for (_, options, note) in READERS.iter().filter(|(of, ..)| Some(*of) == reader) {
        for (flag, value) in *options {
            if !has(&out, flag) {
                out.arguments.extend([OsString::from(flag), OsString::from(value)]);
            }
        }
        out.notes.push((*note).to_owned());
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn translated(line: &str) -> Result<(String, usize), String> {
        let arguments = line.split(' ').map(OsString::from);
        let Translated { arguments, notes } = translate(arguments)?;
        let words: Vec<_> = arguments.iter().map(|word| word.to_str().unwrap()).collect();
        Ok((words.join(" "), notes.len()))
    }

    #[test]
    fn foreign_flags_are_translated_or_refused() {
        let megatron = "preprocess --input a.jsonl --partitions 4 --keep-sequential-samples \
                        --workers-to-check 16 32 --output-prefix b --use-gigatoken";
        let expected = "preprocess --input a.jsonl --output-prefix b";
        assert_eq!(translated(megatron), Ok((expected.to_owned(), 4)));
        let trials = "preprocess --find-optimal-num-workers --performance-dir out/perf --workers 2";
        assert_eq!(translated(trials), Ok(("preprocess --workers 2".to_owned(), 2)));
        let yuan = "preprocess --vocab_path src";
        let expected = "preprocess --vocab-path src --tokenizer yuan --dtype int32 \
                        --txt-newline <n> --txt-trim --append-eod";
        assert_eq!(translated(yuan), Ok((expected.to_owned(), 1)));
        let cpm = "preprocess --tokenizer_path bpe_cn --dataset_impl mmap --noisy_density=0.15";
        let expected = "preprocess --tokenizer-path bpe_cn --noisy-density=0.15 --tokenizer encdec \
                        --objective cpm2 --cpm-compat";
        assert_eq!(translated(cpm), Ok((expected.to_owned(), 2)));
        let neox = "preprocess --input a.jsonl --tokenizer-type=HFTokenizer --dataset-impl mmap";
        let expected = "preprocess --input a.jsonl --tokenizer-type=HFTokenizer --lists joined \
                        --empty-docs skip --txt-separator file";
        assert_eq!(translated(neox), Ok((expected.to_owned(), 2)));
        let neox = "preprocess --input a --jsonl-keys text --empty-docs=sequence --lists sequences";
        let expected = format!("{neox} --txt-separator file");
        assert_eq!(translated(neox), Ok((expected, 1)));
        let paddle = "preprocess --input_path a --model_name gpt2-en --data_format JSON";
        let expected = "preprocess --input-path a --empty-docs skip";
        assert_eq!(translated(paddle), Ok((expected.to_owned(), 3)));
        // Flags of this program, and tokenizer names that several programs have, are read as
        // Megatron's.
        for ours in [
            "preprocess --json-in a --tokenizer-type HFTokenizer",
            "preprocess --input a --tokenizer-type GPT2BPETokenizer",
        ] {
            assert_eq!(translated(ours), Ok((ours.to_owned(), 0)));
        }
        assert!(translated("preprocess --ftfy").unwrap_err().contains("--ftfy: texts"));
        // Values that look like flags of other programs are values.
        assert_eq!(translated("preprocess - a_b"), Ok(("preprocess - a_b".to_owned(), 0)));
    }
}
