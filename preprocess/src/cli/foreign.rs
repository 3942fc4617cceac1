//! The flags of other programs that have no equivalent here.

/// How such a flag is handled.
#[derive(Clone, Copy, Debug)]
pub(super) enum FlagMapping {
    /// Ignored: its effect is the default, or it has none here.
    Implied(&'static str),
    /// Refused: it would change the output in a way that is not supported.
    Refused(&'static str),
}

/// How many values follow a flag.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Values {
    Zero,
    One,
    Many,
}

use FlagMapping::{Implied, Refused};
use Values::{Many, One, Zero};

const ORDER: &str = "output is in input order for any number of workers";
const THREADS: &str = "one process uses all cores; --workers limits them";
const TRIALS: &str = "it is a setting of --find-optimal-num-workers";
const PARTITIONS: &str = "inputs are read without partition files, and --shard divides them";
const PADDED: &str = "ids do not depend on it, and the vocabulary determines their type";
const GROUP: &str = "no process group is needed; --shard divides the work";
const CLASS: &str = "it names a Python class (hint: use --tokenizer and its files)";
const TEMPLATE: &str = "conversations are not supported (hint: apply the chat template first)";
const LABELS: &str = "labels are not written, so a prompt cannot be masked in the loss";
const MMAP: &str = "output is always mmap; feedline convert reads the older lazy and cached, but \
                    cannot write them";
const PADDLE: &str = "output is always Megatron's mmap; feedline convert --to paddle turns it into \
                      PaddleNLP's, and lazy is not supported";
const WHITE_SPACE: &str = "the model file determines whether white space is collapsed";
const CUT: &str =
    "all documents are written in order (hint: select lines first with head -n or shuf)";

/// In the order of the programs that have them.
pub(super) const FOREIGN: &[(&str, Values, FlagMapping)] = &[
    // Megatron's.
    ("--partitions", One, Implied(PARTITIONS)),
    ("--keep-sequential-samples", Zero, Implied(ORDER)),
    ("--find-optimal-num-workers", Zero, Implied("the default is one worker per core")),
    ("--workers-to-check", Many, Implied(THREADS)),
    ("--max-documents", One, Implied(TRIALS)),
    ("--performance-dir", One, Implied(TRIALS)),
    ("--use-gigatoken", Zero, Implied("all tokenizers are compiled code")),
    ("--padded-vocab-size", One, Implied(PADDED)),
    ("--pad-vocab-size", Zero, Implied(PADDED)),
    ("--no-pad-vocab-size", Zero, Implied(PADDED)),
    ("--disable-pad-vocab-size", Zero, Implied(PADDED)),
    ("--make-vocab-size-divisible-by", One, Implied(PADDED)),
    ("--tensor-model-parallel-size", One, Implied(PADDED)),
    ("--rank", One, Implied(GROUP)),
    ("--tokenizer-hf-use-fast", Zero, Implied("all tokenizers are fast")),
    ("--tokenizer-hf-include-special-tokens", Zero, Implied("it is the default")),
    ("--null-tokenizer-pad-id", One, Implied("nothing is padded")),
    ("--chat-template", One, Refused(TEMPLATE)),
    ("--tokenizer-prompt-format", One, Refused(TEMPLATE)),
    ("--sft-tokenizer-prompt-format", One, Refused(TEMPLATE)),
    ("--force-system-message", Zero, Refused(TEMPLATE)),
    ("--image-tag-type", One, Refused("images are not supported")),
    ("--tokenizer-metadata", One, Refused(CLASS)),
    ("--metadata-path", One, Refused(CLASS)),
    (
        "--tokenizer-sentencepiece-legacy",
        Zero,
        Refused("special tokens in a text are encoded as plain text, also in legacy mode"),
    ),
    ("--tokenizer-sentencepiece-ignore-extra-whitespaces", Zero, Implied(WHITE_SPACE)),
    ("--no-tokenizer-sentencepiece-ignore-extra-whitespaces", Zero, Refused(WHITE_SPACE)),
    ("--disable-tokenizer-sentencepiece-ignore-extra-whitespaces", Zero, Refused(WHITE_SPACE)),
    ("--dataset-impl", One, Implied(MMAP)),
    // Paddle's.
    ("--data-impl", One, Implied(PADDLE)),
    ("--data-format", One, Implied("the input format is detected")),
    ("--model-name", One, Implied("only the tokenizer affects the output")),
    (
        "--cn-whole-word-segment",
        Zero,
        Refused("the BERT index finds word boundaries at training time"),
    ),
    (
        "--cn-seg-func",
        One,
        Implied("it is a setting of --cn-whole-word-segment; --tokenizer jieba segments words"),
    ),
    ("--cn-splited", Zero, Refused("segmented texts are not joined (hint: join the words first)")),
    ("--cn-split-dimer", One, Implied("it is a setting of --cn-splited")),
    (
        "--max-repeated-len",
        One,
        Refused("texts are not changed (hint: feedline clean drops repetitive documents)"),
    ),
    ("--max-doc-num", One, Refused(CUT)),
    // GPT-NeoX's, and those of its two programs for prompts and conversations.
    ("--num-docs", One, Implied("it only affects a progress bar")),
    ("--ftfy", Zero, Refused("texts are not changed (hint: run ftfy first)")),
    ("--mask-before-token", One, Refused(LABELS)),
    ("--no-mask", Zero, Refused(TEMPLATE)),
    ("--for-rm", Zero, Refused(LABELS)),
    ("--generation-role", One, Refused(TEMPLATE)),
    ("--only-last", Zero, Refused(LABELS)),
    // BigScience's.
    ("--pad-vocab-size-to", One, Implied(PADDED)),
    ("--world-size", One, Implied(GROUP)),
    ("--torch-backend", One, Implied(GROUP)),
    ("--columns", One, Refused("inputs are files (hint: set --json-key to the key of the text)")),
    ("--split", One, Refused("inputs are files (hint: name the files of the split)")),
    ("--count", One, Refused(CUT)),
    ("--shuffle", Zero, Refused(CUT)),
    ("--merge", One, Implied("one process writes one pair of files")),
    ("--scratch", One, Implied("unfinished files are stored beside the outputs")),
];

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use clap::CommandFactory as _;

    use super::FOREIGN;
    use crate::cli::args::Cli;

    /// All flags of the programs, from their sources or their help.
    const PROGRAMS: &[(&str, &str)] = &[
        (
            "Megatron's preprocess_data.py and preprocess_data_fast.py",
            "input json-keys split-sentences keep-newlines append-eod lang output-prefix workers \
             find-optimal-num-workers workers-to-check max-documents performance-dir partitions \
             log-interval keep-sequential-samples",
        ),
        (
            "Megatron's tokenizers, from 2023 to 2026",
            "vocab-size padded-vocab-size no-pad-vocab-size disable-pad-vocab-size vocab-file \
             merge-file vocab-extra-ids tokenizer-type tokenizer-model tokenizer-metadata \
             metadata-path tokenizer-special-tokens special-tokens tiktoken-special-tokens \
             tiktoken-pattern tiktoken-num-special-tokens tokenizer-sentencepiece-legacy \
             no-tokenizer-sentencepiece-ignore-extra-whitespaces \
             disable-tokenizer-sentencepiece-ignore-extra-whitespaces tokenizer-hf-use-fast \
             tokenizer-hf-no-use-fast tokenizer-hf-include-special-tokens \
             tokenizer-hf-no-include-special-tokens trust-remote-code legacy-tokenizer \
             null-tokenizer-eod-id null-tokenizer-pad-id chat-template use-gigatoken \
             sft-tokenizer-prompt-format tokenizer-prompt-format image-tag-type \
             force-system-message dataset-impl",
        ),
        (
            "CPM-2's preprocess_data_enc_dec.py",
            "input tokenizer_path output_path output_prefix dataset_impl workers log_interval \
             noisy_density mean_noise_span_length",
        ),
        (
            "Yuan's preprocess_data_cn.py",
            "input vocab_path output_path output_prefix dataset_impl workers log_interval \
             sentence_splitter mean_noise_span_length",
        ),
        (
            "Paddle's preprocess_data.py and create_pretraining_data.py",
            "model_name tokenizer_name input_path output_prefix data_format json_key \
             split_sentences data_impl chinese cn_whole_word_segment cn_seg_func cn_splited \
             cn_split_dimer append_eos log_interval workers max_repeated_len max_doc_num",
        ),
        (
            "GPT-NeoX's preprocess_data.py, _with_mask.py and _with_chat_template.py",
            "input jsonl-keys num-docs tokenizer-type tokenizer-path vocab-file merge-file \
             append-eod ftfy output-prefix dataset-impl workers log-interval mask-before-token \
             no-mask for-rm generation-role only-last",
        ),
        (
            "BigScience's preprocess_data.py, _many_cores.py and _dist.py",
            "input json-keys split-sentences keep-newlines tokenizer-name-or-path append-eod \
             make-vocab-size-divisible-by pad-vocab-size-to lang output-prefix dataset-impl \
             workers log-interval split columns count shuffle seed torch-backend merge scratch",
        ),
    ];

    #[test]
    fn every_flag_of_the_programs_is_known() {
        let command = Cli::command();
        let ours = command.get_arguments().flat_map(|argument| {
            let aliases = argument.get_all_aliases().unwrap_or_default();
            aliases.into_iter().chain(argument.get_long()).map(|name| format!("--{name}"))
        });
        let ours: BTreeSet<String> = ours.collect();
        for (program, flags) in PROGRAMS {
            for flag in flags.split_whitespace() {
                let flag = format!("--{}", flag.replace('_', "-"));
                let foreign = FOREIGN.iter().any(|(name, ..)| *name == flag);
                assert!(foreign || ours.contains(&flag), "{program}: {flag}");
            }
        }
    }

    /// `translate` would remove a flag of this program before its parser reads it.
    #[test]
    fn foreign_flags_are_unique_and_not_ours() {
        let command = Cli::command();
        let mut seen = BTreeSet::new();
        for (name, ..) in FOREIGN {
            assert!(seen.insert(name), "{name} twice");
            let long = name.trim_start_matches("--");
            let ours = command.get_arguments().any(|argument| {
                let aliases = argument.get_all_aliases().unwrap_or_default();
                argument.get_long() == Some(long) || aliases.contains(&long)
            });
            assert!(!ours, "{name} is ours");
        }
    }
}
