//! What the command line may say.

use clap::{Args, Parser, Subcommand};
use indexed::{Dtype, Format};
use tools::cmd::{clean, convert};

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
    Check(Subject),
    /// Writes token files of one format as another.
    ///
    /// Memory does not grow with the files. Nothing is overwritten, and a run that fails leaves
    /// nothing. Exit 0: written. 2: it could not be.
    Convert(Convert),
    /// Copies JSON lines without those that are bad, short, foreign, or there already.
    ///
    /// Lines are kept byte for byte and in order, whatever the number of workers. The first bad
    /// line ends the run, and nothing is left under the names of the outputs. Exit 0: done. 2: it
    /// could not.
    Clean(Box<clean::CleanArgs>),
}

#[derive(Debug, Args)]
pub struct Subject {
    /// Prefix of a .bin and .idx or of token files of another format, a step-* folder, or the
    /// folder that holds such.
    #[arg(value_name = "PREFIX|CKPT")]
    pub name: String,
    /// Prints JSON, with units in the keys.
    #[arg(long)]
    pub json: bool,
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
    /// Prints JSON, with units in the keys.
    #[arg(long)]
    pub json: bool,
}

impl Convert {
    pub fn request(&self) -> convert::Request {
        convert::Request {
            source: self.source.clone(),
            out: self.out.clone(),
            from: self.from.0,
            to: self.to,
            dtype: self.dtype,
            source_dtype: self.source_dtype,
            eod: self.eod,
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
        let names: Vec<_> = Format::ALL.iter().map(|format| format.name()).collect();
        format!("due one of {}", names.join(", "))
    })
}

fn dtype(name: &str) -> Result<Dtype, String> {
    Dtype::from_name(name).filter(|dtype| dtype.is_integer()).ok_or_else(|| {
        "due one of uint8, int8, int16, uint16, int32, uint32, int64, uint64".to_owned()
    })
}
