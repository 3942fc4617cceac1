//! What the command line may say.

use clap::{Args, Parser, Subcommand};
use clap_complete::Shell;
use indexed::{Dtype, Format};
use tools::ckpt::CkptVerb;
use tools::data::index::IndexBuild;
use tools::data::materialize::Materialize;
use tools::data::{clean, convert, merge, repair, samples, split};
use tools::doctor::stripe;
use tools::offload::OffloadVerb;
use tools::ui::output::FormatHints;
use tools::ui::output_claim::Takeover;
use tools::{bench, doctor};

/// Looks into token files and checkpoints, says whether they are whole, and converts, merges,
/// splits and repairs token files.
#[derive(Debug, Parser)]
#[command(name = "feedline", version, max_term_width = 100)]
pub struct Cli {
    #[command(subcommand)]
    pub verb: Verb,
}

#[derive(Debug, Subcommand)]
pub enum Verb {
    /// Tells what is in token files, a checkpoint or a folder of checkpoints.
    ///
    /// Exit 0: told. 2: it cannot be opened.
    Inspect(Subject),
    /// Reads everything and compares it with every checksum and rule of its format.
    ///
    /// Exit 0: whole. 1: damaged, and the output says where. 2: it cannot be found.
    Check(CheckArgs),
    /// Writes token files of one format as another.
    ///
    /// Memory does not grow with the files. Nothing is overwritten, and a run that fails, or is
    /// ended by Ctrl-C, leaves nothing. After a kill the same command removes what is left and
    /// starts from scratch. Exit 0: written. 2: it could not be.
    Convert(Convert),
    /// Joins datasets (.bin and .idx) to one, byte for byte as Megatron's merge_datasets.py does.
    ///
    /// Refuses different token types, and different tokenizers where manifests tell them. Memory
    /// does not grow. The .bin of a source with a manifest is copied within the kernel, and not at
    /// all where the file system shares blocks, for the first source and for others that happen to
    /// begin at a block; one without is read. Ctrl-C leaves nothing, and after a kill the same
    /// command removes what is left. Exit 0: merged. 2: it could not be.
    Merge(Merge),
    /// Divides a dataset's documents into one for training, one for validation and one for test.
    ///
    /// Writes P_train, P_valid and P_test. The documents keep their order. A run that fails, or is
    /// ended by Ctrl-C, leaves none of them. After a kill the same command removes what is left and
    /// starts from scratch. Exit 0: written. 2: it could not be.
    Split(SplitArgs),
    /// Writes what can be saved of a damaged dataset under another name.
    ///
    /// A document index that was never written (CPM-2, Yuan) or is broken becomes one document a
    /// sequence; wrong pointers are made anew; of a .bin that was cut off the whole documents stay.
    /// The source is not touched. Ctrl-C leaves nothing, and after a kill the same command removes
    /// what is left. Exit 0: written, or nothing to repair. 2: not even its header can be read.
    Repair(Repair),
    /// Builds or checks the sample orders of a run before it.
    #[command(subcommand)]
    Index(IndexVerb),
    /// Writes the samples of a run in their order as a dataset: one sequence a sample.
    ///
    /// Training then reads one file from front to back. Memory is bounded. What a run had committed
    /// when it failed, or was ended by Ctrl-C, stays, and the same command goes on with it; of one
    /// that had committed nothing nothing does. Exit 0: written. 2: it could not be.
    Materialize(Box<Materialize>),
    /// Reads the samples of a GPT dataset as a training run would, and tells how quickly they came.
    ///
    /// With --hash the sum of all tokens, which is the same on every store, from every restart and
    /// for Megatron's own GPTDataset. With --show it prints what samples of a run were, as
    /// `feedline samples run.toml --show --first 96 --samples 12` after a leap of the loss. Exit 0:
    /// read. 2: a read or the index failed.
    Samples(Box<samples::SamplesArgs>),
    /// Looks after checkpoints: lists, checks, compares, rewrites, imports, exports and deletes
    /// them.
    #[command(subcommand)]
    Ckpt(CkptVerb),
    /// Measures folders, mounts and buckets by what a training run does to them, and says which to
    /// use for data, which for checkpoints, and what to set.
    ///
    /// Targets are measured in turn, in rounds, around the page cache where there is a way. Nothing
    /// stays: also after Ctrl-C. Exit 0: measured. 2: it could not be.
    Bench(Box<bench::BenchArgs>),
    /// Tells what keeping the optimizer's state in host memory or on a disk would cost here.
    #[command(subcommand)]
    Offload(OffloadVerb),
    /// Says what will hurt a training run here, what it costs, and the line that mends it.
    ///
    /// Of a folder: its mount, space, promises and clock, tried in a folder of our own that is gone
    /// afterwards. Of a bucket: what may be done, and which promises of S3 it keeps. Of a config:
    /// every path in it, whether the data is there and the checkpoints fit. What hangs is named
    /// when its time is up. Exit 0: nothing will hurt. 1: something will, and the output says what.
    /// 2: the config cannot be read.
    Doctor(doctor::DoctorArgs),
    /// Reads, sets and recommends how files are spread over the targets of a Lustre.
    #[command(subcommand)]
    Stripe(stripe::StripeVerb),
    /// Prints a script that completes this command's words in a shell.
    Completions {
        /// The shell: bash, zsh, fish, elvish or powershell.
        shell: Shell,
    },
    /// Copies JSON lines without those that are bad, short, foreign, or there already.
    ///
    /// Lines are kept byte for byte and in order, whatever the number of workers. The first bad
    /// line ends the run, and nothing is left under the names of the outputs, nor after Ctrl-C.
    /// Exit 0: done. 2: it could not.
    Clean(Box<clean::CleanArgs>),
}

#[derive(Debug, Subcommand)]
pub enum IndexVerb {
    /// Builds them under Megatron's names, where it and `trainer` find them; or checks those there.
    ///
    /// Needs no torch and no GPU. What is found is checked whole, and rebuilt with a warning if it
    /// is not of this data; what was checked before and has not changed is not read again. After
    /// Ctrl-C the orders that are finished stay. Exit 0: all are there. 2: one cannot be built.
    Build(Box<IndexBuild>),
}

#[derive(Debug, Args)]
pub struct Subject {
    /// Prefix of a .bin and .idx or of token files of another format, a step-* folder, or the
    /// folder that holds such.
    #[arg(value_name = "PREFIX|CKPT")]
    pub name: String,
    /// The size of the vocabulary that token ids must be below. Default: the manifest's, if there
    /// is one.
    #[arg(long, value_name = "IDS")]
    pub vocab_size: Option<u64>,
    /// The id that ends documents: counted, and where no file says where a document ends, it is
    /// there. Default: the manifest's, if there is one.
    #[arg(long, value_name = "ID")]
    pub eod: Option<u32>,
    /// The type of tokens, where the files do not say it. Default: uint16.
    #[arg(long, value_name = "TYPE", value_parser = dtype)]
    pub source_dtype: Option<Dtype>,
    /// Prints JSON, with units in the keys.
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct CheckArgs {
    #[command(flatten)]
    pub subject: Subject,
    /// Writes PREFIX.crc, the checksums by which training verifies what it reads, for a .bin and
    /// .idx that have none and are whole; and a manifest, if there is none.
    #[arg(long)]
    pub add_checksums: bool,
}

impl Subject {
    pub fn wishes(&self) -> FormatHints {
        FormatHints { vocab_size: self.vocab_size, eod: self.eod, dtype: self.source_dtype }
    }
}

/// What becomes of the output of an earlier run that was not finished.
#[derive(Debug, Args)]
pub struct RestartArg {
    /// Also removes the unfinished output of a run on another machine or in another container,
    /// whose process cannot be checked from here: make sure that it is gone. What a killed run of
    /// this machine left is removed without it.
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
    /// What to read: a prefix, one of its files, or a folder of Dolma's parts.
    #[arg(value_name = "SOURCE")]
    pub source: String,
    /// Prefix of what to write.
    #[arg(value_name = "OUT")]
    pub out: String,
    /// The format of SOURCE: mmididx, tntidx, paddle, nanogpt, yuan, datatrove, dolma or cpm2.
    /// Default: found by the names of the files and how they begin.
    #[arg(long, value_name = "FORMAT", value_parser = format_or_auto, default_value = "auto")]
    pub from: FromFormat,
    /// The format of OUT: mmididx, paddle, nanogpt, yuan or datatrove.
    #[arg(long, value_name = "FORMAT", value_parser = format, default_value = "mmididx")]
    pub to: Format,
    /// The type of the tokens in OUT, such as uint16 or int32. An id that does not fit is an error.
    /// Default: as in SOURCE, or the nearest that the format has.
    #[arg(long, value_name = "TYPE", value_parser = dtype)]
    pub dtype: Option<Dtype>,
    /// The type of the tokens in SOURCE, where its files do not say it. Default: uint16.
    #[arg(long, value_name = "TYPE", value_parser = dtype)]
    pub source_dtype: Option<Dtype>,
    /// The id that ends documents, for formats whose files do not say where one ends (nanogpt, and
    /// yuan of one row). Default: none, and all of the file is one document.
    #[arg(long, value_name = "ID")]
    pub eod: Option<u32>,
    #[command(flatten)]
    pub restart: RestartArg,
    /// Prints JSON, with units in the keys.
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
    /// Prefixes in their order, or folders: all prefixes in a folder are merged.
    #[arg(long, required = true, num_args = 1.., value_name = "PREFIX|FOLDER")]
    pub input: Vec<String>,
    /// Prefix of what to write.
    #[arg(long, required = true, value_name = "OUT")]
    pub output_prefix: String,
    /// The order of the prefixes of a folder: name, which puts _10 before _2 as Megatron does, or
    /// numeric.
    #[arg(long, value_enum, default_value = "name")]
    pub order: OrderArg,
    /// Requires a mode for each sequence. Sets that have modes keep them with and without it.
    #[arg(long)]
    pub multimodal: bool,
    /// Merges some shards of a dataset though others are missing. Shards of an input that changed
    /// between them are refused nevertheless.
    #[arg(long)]
    pub partial: bool,
    /// Reads the sources and compares them with their manifests first. Default: their sums are
    /// trusted, and a source that was damaged makes a result that `check` finds damaged.
    #[arg(long)]
    pub verify: bool,
    #[command(flatten)]
    pub restart: RestartArg,
    /// Prints JSON, with units in the keys.
    #[arg(long)]
    pub json: bool,
}

/// As on the command line.
#[derive(Clone, Copy, Debug, clap::ValueEnum)]
pub enum OrderArg {
    Name,
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
    /// Shares of training, validation and test, such as 949,50,1; rounded as Megatron does.
    #[arg(long, value_name = "SHARES")]
    pub split: String,
    /// What the prefixes to write begin with.
    #[arg(long, value_name = "OUT")]
    pub output_prefix: String,
    #[command(flatten)]
    pub restart: RestartArg,
    /// Prints JSON, with units in the keys.
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
    /// Prefix of what to write.
    #[arg(short, long = "output-prefix", value_name = "OUT")]
    pub out: String,
    #[command(flatten)]
    pub restart: RestartArg,
    /// Prints JSON, with units in the keys.
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

/// A format, or none to find it out.
#[derive(Clone, Copy, Debug)]
pub struct FromFormat(pub Option<Format>);

fn format_or_auto(name: &str) -> Result<FromFormat, String> {
    if name == "auto" { Ok(FromFormat(None)) } else { format(name).map(Some).map(FromFormat) }
}

fn format(name: &str) -> Result<Format, String> {
    Format::from_name(name).ok_or_else(|| {
        let names = Format::ALL.map(|format| format.name());
        let (last, others) = names.split_last().expect("there are formats");
        format!("expected {} or {last}", others.join(", "))
    })
}

fn dtype(name: &str) -> Result<Dtype, String> {
    Dtype::from_name(name).filter(|dtype| dtype.is_integer()).ok_or_else(|| {
        "expected uint8, int8, int16, uint16, int32, uint32, int64 or uint64".to_owned()
    })
}
