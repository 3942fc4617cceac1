//! The command line of `feedline`: its commands, and the arguments of those that read and write
//! token files.

use crate::ckpt::CkptVerb;
use crate::data::index::IndexBuild;
use crate::data::materialize::Materialize;
use crate::data::{clean, convert, merge, repair, samples, split, tokenizer};
use crate::doctor::stripe;
use crate::offload::OffloadVerb;
use crate::ui::output::FormatHints;
use crate::ui::output_claim::Takeover;
use crate::{bench, doctor};
use clap::{Args, Parser, Subcommand};
use clap_complete::Shell;
use indexed::{Dtype, Format};
use log::LevelFilter;
use storage::StderrLog;

/// Inspect, check and convert token files and checkpoints, and benchmark the stores that hold them.
///
/// Sizes are written as `64MiB` or `3GB`, times as `30s`. A file or folder may be a path or a URL
/// such as `s3://bucket/key`. Results go to standard output, everything else to standard error.
#[derive(Debug, Parser)]
#[command(name = "feedline", version, max_term_width = 100)]
pub struct Cli {
    #[command(subcommand)]
    pub verb: Verb,

    /// Write log lines of this severity and above to standard error: off, error, warn, info or
    /// debug
    #[arg(
        long,
        global = true,
        value_name = "LEVEL",
        default_value = "warn",
        value_parser = StderrLog::level
    )]
    pub log: LevelFilter,
}

#[derive(Debug, Subcommand)]
pub enum Verb {
    /// Print what token files, a checkpoint or a folder of checkpoints contain.
    ///
    /// Exit code 0: printed. 2: the target cannot be opened.
    #[command(after_help = "\
Examples:
  feedline inspect data/wiki_text_document
  feedline inspect s3://bucket/run/ckpt --json")]
    Inspect(Subject),
    /// Read every byte and compare it with its checksums and with the rules of its format.
    ///
    /// Exit code 0: intact. 1: damaged, and the output names the place. 2: not found, or no token
    /// file of a known kind.
    #[command(after_help = "\
Examples:
  feedline check data/wiki_text_document
  feedline check data/wiki_text_document --add-checksums
  feedline check run/ckpt --json")]
    Check(CheckArgs),
    /// Convert token files from one format to another.
    ///
    /// Memory use does not grow with the files. No file is overwritten. A run that fails or is
    /// interrupted by Ctrl-C removes its output; after a kill, the same command removes the
    /// unfinished output and starts from scratch.
    ///
    /// Exit code 0: written. 2: not written.
    #[command(after_help = "\
Examples:
  feedline convert nanogpt/train.bin data/train --from nanogpt --eod 50256
  feedline convert data/wiki_text_document paddle/wiki --to paddle")]
    Convert(Convert),
    /// Concatenate datasets (.bin and .idx), with the same bytes as Megatron's merge_datasets.py.
    ///
    /// Datasets with different token types are refused, as are different tokenizers if manifests
    /// record them. Memory use does not grow with the files. The .bin of a source with a manifest
    /// is copied by the kernel, or shared where the file system supports reflinks; a source without
    /// one is read. After a kill, the same command removes the unfinished output.
    ///
    /// Exit code 0: merged. 2: not merged.
    #[command(after_help = "\
Examples:
  feedline merge --input data/a_text_document data/b_text_document --out data/all
  feedline merge --input shards/ --order numeric --out data/all --verify")]
    Merge(Merge),
    /// Split the documents of a dataset into training, validation and test datasets.
    ///
    /// Writes OUT_train, OUT_valid and OUT_test; documents keep their order. A run that fails or is
    /// interrupted by Ctrl-C removes its output; after a kill, the same command removes the
    /// unfinished output and starts from scratch.
    ///
    /// Exit code 0: written. 2: not written.
    #[command(after_help = "\
Examples:
  feedline split data/wiki_text_document --split 949,50,1 --out data/wiki")]
    Split(SplitArgs),
    /// Write the intact part of a damaged dataset under another name.
    ///
    /// A document index that is missing (CPM-2, Yuan) or damaged is replaced by one document per
    /// sequence. Wrong pointers are recomputed. If the .bin is truncated, its complete documents
    /// are retained. The source is not changed. After a kill, the same command removes the
    /// unfinished output.
    ///
    /// Exit code 0: written, or nothing to repair. 2: the header of the .idx cannot be read.
    #[command(after_help = "\
Examples:
  feedline repair data/wiki_text_document --out data/wiki_repaired")]
    Repair(Repair),
    /// Build or check the sample indexes of a run before it starts.
    #[command(subcommand)]
    Index(IndexVerb),
    /// Write the samples of a run, in their order, as a dataset with one sequence per sample.
    ///
    /// Training then reads one file sequentially. Memory use is bounded by --memory. An interrupted
    /// run keeps the samples that it has committed, and the same command resumes it.
    ///
    /// Exit code 0: written. 2: not written.
    #[command(after_help = "\
Examples:
  feedline materialize data/wiki_text_document --seq-length 2048 --out data/wiki_samples
  feedline materialize data/wiki_text_document --seq-length 2048 --samples 1000000 \\
    --split 969,30,1 --part train --memory 8GiB --out data/wiki_samples")]
    Materialize(Box<Materialize>),
    /// Read the samples of a GPT dataset as a training run does, and report the rate.
    ///
    /// With --hash, also print a SHA-256 of all tokens: it is the same on every store, after every
    /// resume, and for Megatron's own GPTDataset. With --show, print the text of samples of a run
    /// instead, for example those before a loss spike.
    ///
    /// Exit code 0: read. 2: a read or the index failed.
    #[command(after_help = "\
Examples:
  feedline samples data/wiki_text_document --seq-length 2048 --samples 10000
  feedline samples s3://bucket/wiki_text_document --hash --window 1GiB --timeout 2min
  feedline samples run.toml --show --first 96 --samples 12
  feedline samples data/wiki_text_document --simulate lustre,servers.stripes=8")]
    Samples(Box<samples::SamplesArgs>),
    /// List, check, compare, rewrite, import, export and delete checkpoints.
    #[command(subcommand)]
    Ckpt(CkptVerb),
    /// Measure stores with the reads and writes of a training run, and compare them.
    ///
    /// Targets are measured in turn, in rounds, with direct I/O where the store supports it. The
    /// benchmark removes all files that it writes, also after Ctrl-C.
    ///
    /// Exit code 0: measured. 2: not measured.
    #[command(after_help = "\
Examples:
  feedline bench /data /mnt/cephfs --parameters 11b --ranks 64 --html store.html
  feedline bench /data s3://bucket/bench --config run.toml --duration 1s
  feedline bench /dev/shm --simulate lustre --simulate s3 --no-fio
  srun -N 4 feedline bench /lustre/scratch --rendezvous /lustre/scratch --json")]
    Bench(Box<bench::BenchArgs>),
    /// Measure offloaded optimizer state, and list the state that ranks keep on a node.
    #[command(subcommand)]
    Offload(OffloadVerb),
    /// Find what will slow down or stop a training run here, with its effect and its fix.
    ///
    /// For a folder, the command checks the mount, the free space, the file system behavior and the
    /// clock, with tests in a temporary folder. For a bucket, it checks permissions and the
    /// consistency rules of S3. For a config, it checks every path, whether the data exists, and
    /// whether the checkpoints fit. A check that exceeds --timeout is reported by name.
    ///
    /// Exit code 0: nothing found. 1: something found. 2: the config cannot be read.
    #[command(after_help = "\
Examples:
  feedline doctor run.toml --set data.train=data/wiki_text_document
  feedline doctor /lustre/run/ckpt --for checkpoint
  feedline doctor s3://bucket/corpus --for data --timeout 1min")]
    Doctor(doctor::DoctorArgs),
    /// Print, set and recommend the striping layout of files on Lustre.
    #[command(subcommand)]
    Stripe(stripe::StripeVerb),
    /// Print a shell completion script.
    #[command(after_help = "\
Examples:
  feedline completions bash > /etc/bash_completion.d/feedline
  feedline completions zsh > ~/.zfunc/_feedline
  feedline completions fish > ~/.config/fish/completions/feedline.fish")]
    Completions {
        /// The shell.
        shell: Shell,
    },
    /// Filter and deduplicate JSON lines.
    ///
    /// Retained lines keep their bytes and their order for any number of workers. The first line
    /// that cannot be read ends the run. A run that fails or is interrupted by Ctrl-C writes no
    /// output.
    ///
    /// Exit code 0: written. 2: not written.
    #[command(after_help = "\
Examples:
  feedline clean --json-in raw.jsonl --out data/clean --exact-dedup --min-chars 200
  feedline clean --json-in a.jsonl.zst b.jsonl.zst --out data/clean.jsonl.zst --near-dedup \\
    --jaccard 0.8 --two-passes --dropped data/dropped.jsonl
  feedline clean --json-in raw.jsonl --out data/clean --min-tokens 128 --split 949,50,1")]
    Clean(Box<clean::CleanArgs>),
    /// Train a tokenizer.
    #[command(subcommand)]
    Tokenizer(tokenizer::TokenizerVerb),
}

#[derive(Debug, Subcommand)]
pub enum IndexVerb {
    /// Build sample indexes under Megatron's file names, where Megatron and `trainer` find them.
    ///
    /// Needs neither torch nor a GPU. Existing indexes are checked; one that does not belong to
    /// this data is rebuilt with a warning. An index that was checked before and is unchanged is
    /// not read again. After Ctrl-C, finished indexes are retained.
    ///
    /// Exit code 0: all indexes exist. 2: one cannot be built.
    #[command(after_help = "\
Examples:
  feedline index build data/wiki_text_document --seq-length 2048 --samples 1000000,2560,0
  feedline index build 0.7 data/a_text_document 0.3 data/b_text_document --seq-length 2048 \\
    --data-cache-path cache --tokenizer-from description.txt
  feedline index build data/wiki_text_sentence --seq-length 512 --masked bert")]
    Build(Box<IndexBuild>),
}

#[derive(Debug, Args)]
pub struct Subject {
    /// Prefix of a .bin and .idx or of token files of another format; a step-* folder; or a folder
    /// of steps.
    #[arg(value_name = "PREFIX|CKPT")]
    pub name: String,
    /// Size of the vocabulary, which every token id must be below [default: from the manifest]
    #[arg(long, value_name = "N")]
    pub vocab_size: Option<u64>,
    /// Token id that ends documents [default: from the manifest]
    ///
    /// Its occurrences are counted. In formats whose files do not record where documents end, it
    /// marks those ends.
    #[arg(long, value_name = "ID")]
    pub eod: Option<u32>,
    /// Type of the tokens, if the files do not record it [default: uint16 for a .bin]
    ///
    /// Needed for tokens that look wider than 16 bits, and for type code 7 of DeepSpeed (uint32).
    #[arg(long, value_name = "TYPE", value_parser = dtype)]
    pub source_dtype: Option<Dtype>,
    /// Print JSON, with units in the keys.
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct CheckArgs {
    #[command(flatten)]
    pub subject: Subject,
    /// Write PREFIX.crc and a manifest for an intact .bin and .idx that lack them.
    ///
    /// Training compares the blocks that it reads with the checksums in PREFIX.crc.
    #[arg(long)]
    pub add_checksums: bool,
}

impl Subject {
    pub fn hints(&self) -> FormatHints {
        FormatHints { vocab_size: self.vocab_size, eod: self.eod, dtype: self.source_dtype }
    }
}

/// Treatment of the unfinished output of an earlier run.
#[derive(Debug, Args)]
pub struct RestartArg {
    /// Also remove unfinished output of a run on another machine or in another container.
    ///
    /// The command cannot check whether such a run still writes: make sure that it has ended.
    /// Unfinished output of a killed run on this machine is always removed.
    #[arg(long)]
    pub restart: bool,
}

impl RestartArg {
    fn takeover(&self) -> Takeover {
        if self.restart { Takeover::DeadOrUnknown } else { Takeover::Dead }
    }
}

#[derive(Debug, Args)]
pub struct Convert {
    /// Input: a prefix, one of its files, or a folder of Dolma's or TFRecord's parts.
    #[arg(value_name = "SOURCE")]
    pub source: String,
    /// Prefix of the output.
    #[arg(value_name = "OUT")]
    pub out: String,
    /// Format of SOURCE: auto, mmididx, tntidx, paddle, nanogpt, yuan, datatrove, dolma, cpm2 or
    /// tfrecord.
    ///
    /// `auto` detects it by the names of the files and by their first bytes.
    #[arg(long, value_name = "FORMAT", value_parser = format_or_auto, default_value = "auto")]
    pub from: FromFormat,
    /// Format of OUT: mmididx, paddle, nanogpt, yuan or datatrove.
    #[arg(long, value_name = "FORMAT", value_parser = format, default_value = "mmididx")]
    pub to: Format,
    /// Type of the tokens in OUT, such as uint16 or int32 [default: as in SOURCE, or the nearest
    /// type of the format]
    ///
    /// A token id that does not fit is an error.
    #[arg(long, value_name = "TYPE", value_parser = dtype)]
    pub dtype: Option<Dtype>,
    /// Type of the tokens in SOURCE, if its files do not record it [default: uint16 for a .bin]
    ///
    /// Needed for tokens that look wider than 16 bits, and for type code 7 of DeepSpeed (uint32).
    #[arg(long, value_name = "TYPE", value_parser = dtype)]
    pub source_dtype: Option<Dtype>,
    /// Token id that ends documents, if the files of SOURCE do not record document ends.
    ///
    /// Used by nanogpt, by yuan with one row, and by files of datatrove and Dolma without an index.
    /// Without it, the entire file is one document.
    #[arg(long, value_name = "ID")]
    pub eod: Option<u32>,
    #[command(flatten)]
    pub restart: RestartArg,
    /// Print JSON, with units in the keys.
    #[arg(long)]
    pub json: bool,
}

impl Convert {
    pub fn request(&self) -> convert::ConvertRequest {
        convert::ConvertRequest {
            source: self.source.clone(),
            out: self.out.clone(),
            from: self.from.0,
            to: self.to,
            dtype: self.dtype,
            source_dtype: self.source_dtype,
            eod: self.eod,
            takeover: self.restart.takeover(),
        }
    }
}

#[derive(Debug, Args)]
pub struct Merge {
    /// Prefixes in order, or folders whose prefixes are all merged.
    #[arg(long, required = true, num_args = 1.., value_name = "PREFIX|FOLDER")]
    pub input: Vec<String>,
    /// Prefix of the output.
    #[arg(short = 'o', long = "out", alias = "output-prefix", required = true, value_name = "OUT")]
    pub output_prefix: String,
    /// Order of the prefixes of a folder.
    #[arg(long, value_enum, default_value = "name")]
    pub order: OrderArg,
    /// Require a mode for each sequence. Datasets with modes keep them in any case.
    #[arg(long)]
    pub multimodal: bool,
    /// Merge the shards of a dataset although some are missing.
    ///
    /// Shards are refused in any case if an input changed between their runs.
    #[arg(long)]
    pub partial: bool,
    /// Read the sources and compare them with their manifests before merging.
    ///
    /// Without this, the recorded checksums are trusted: a damaged source gives a damaged output,
    /// which `feedline check` then reports.
    #[arg(long)]
    pub verify: bool,
    #[command(flatten)]
    pub restart: RestartArg,
    /// Print JSON, with units in the keys.
    #[arg(long)]
    pub json: bool,
}

/// Value of `--order`.
#[derive(Clone, Copy, Debug, clap::ValueEnum)]
pub enum OrderArg {
    /// By name, as Megatron does: _10 is before _2.
    Name,
    /// By number: _2 is before _10.
    Numeric,
}

impl Merge {
    pub fn request(&self) -> merge::MergeRequest {
        merge::MergeRequest {
            inputs: self.input.clone(),
            out: self.output_prefix.clone(),
            order: match self.order {
                OrderArg::Name => merge::PrefixOrder::Name,
                OrderArg::Numeric => merge::PrefixOrder::Numeric,
            },
            multimodal: self.multimodal,
            partial: self.partial,
            verify: self.verify,
            takeover: self.restart.takeover(),
        }
    }
}

#[derive(Debug, Args)]
pub struct SplitArgs {
    /// Prefix of the dataset to split.
    #[arg(value_name = "PREFIX")]
    pub source: String,
    /// Shares of training, validation and test, such as 949,50,1, rounded as Megatron does.
    #[arg(long, value_name = "SHARES")]
    pub split: String,
    /// Common start of the three output prefixes.
    #[arg(short = 'o', long = "out", alias = "output-prefix", value_name = "OUT")]
    pub output_prefix: String,
    #[command(flatten)]
    pub restart: RestartArg,
    /// Print JSON, with units in the keys.
    #[arg(long)]
    pub json: bool,
}

impl SplitArgs {
    pub fn request(&self) -> split::SplitRequest {
        split::SplitRequest {
            source: self.source.clone(),
            split: self.split.clone(),
            out: self.output_prefix.clone(),
            takeover: self.restart.takeover(),
        }
    }
}

#[derive(Debug, Args)]
pub struct Repair {
    /// Prefix of the damaged dataset.
    #[arg(value_name = "PREFIX")]
    pub source: String,
    /// Prefix of the output.
    #[arg(short, long, alias = "output-prefix", value_name = "OUT")]
    pub out: String,
    #[command(flatten)]
    pub restart: RestartArg,
    /// Print JSON, with units in the keys.
    #[arg(long)]
    pub json: bool,
}

impl Repair {
    pub fn request(&self) -> repair::RepairRequest {
        repair::RepairRequest {
            source: self.source.clone(),
            out: self.out.clone(),
            takeover: self.restart.takeover(),
        }
    }
}

/// A format, or `None` to detect it.
#[derive(Clone, Copy, Debug)]
pub struct FromFormat(pub Option<Format>);

fn format_or_auto(name: &str) -> Result<FromFormat, String> {
    if name == "auto" { Ok(FromFormat(None)) } else { format(name).map(Some).map(FromFormat) }
}

fn format(name: &str) -> Result<Format, String> {
    Format::from_name(name).ok_or_else(|| {
        let names = Format::ALL.map(Format::name);
        let (last, others) = names.split_last().expect("there are formats");
        format!("expected {} or {last}", others.join(", "))
    })
}

fn dtype(name: &str) -> Result<Dtype, String> {
    Dtype::from_name(name).filter(|dtype| dtype.is_integer()).ok_or_else(|| {
        "expected uint8, int8, int16, uint16, int32, uint32, int64 or uint64".to_owned()
    })
}

#[cfg(test)]
#[path = "../../../tests/include/command_page.rs"]
mod command_page;

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    fn parse(words: Vec<String>) -> Result<(), String> {
        Cli::try_parse_from(words).map(drop).map_err(|error| error.to_string())
    }

    #[test]
    fn reference_page() {
        command_page::check_page(Cli::command(), "tools", &parse);
    }

    #[test]
    fn definitions_are_sound() {
        Cli::command().debug_assert();
    }

    /// Scripts that were written for earlier versions keep working.
    #[test]
    fn earlier_spellings_are_accepted() {
        for line in [
            "merge --input a b --output-prefix c",
            "split a --split 9,1,0 --output-prefix c",
            "repair a --output-prefix c",
            "repair a -o c",
            "materialize a --output-prefix c --seq-length 8",
            "clean --input a --output b",
            "samples a --cache c --window 512 --timeout 300",
            "bench a --from run.toml --runs 1 --seconds 0.5 --timeout 60",
            "bench a --model 11b --seq 2048 --meet f --member 0/4",
            "ckpt bench a --shard-bytes 1GiB",
            "ckpt export a b --vocab 50257",
            "ckpt retain a --lengths",
            "ckpt drain a b --lengths",
            "offload bench a --buffer-bytes 256MiB --host-parameters 0",
            "offload left a --remove run",
        ] {
            let words = format!("feedline {line}").split(' ').map(str::to_owned).collect();
            parse(words).unwrap_or_else(|error| panic!("{line}: {error}"));
        }
    }
}
