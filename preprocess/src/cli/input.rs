use clap::Args;
use preprocess::{Format, InputOptions, Separator, TextRules};

/// How inputs are read.
#[derive(Args, Debug)]
pub(crate) struct InputArgs {
    /// What the inputs are: jsonl, json (one list of objects), txt or parquet; auto goes by their
    /// names and first bytes
    #[arg(long, value_name = "FORMAT", default_value = "auto")]
    input_format: Format,

    /// What ends a document of plain text: line, blank-line, file, or these bytes, with \n and \t
    /// as in C
    #[arg(long, value_name = "TEXT", default_value = "line")]
    txt_separator: Separator,

    /// What stands for a newline in a document of plain text, such as <n> [default: <n> for cpm2]
    #[arg(long, value_name = "TEXT")]
    txt_newline: Option<String>,

    /// Take white space from both ends of documents of plain text
    #[arg(long)]
    txt_trim: bool,

    /// Take an input that is named twice twice
    #[arg(long)]
    allow_repeats: bool,

    /// Refuse compressed inputs that are more than so many times longer than they are stored, from
    /// 1GiB on; 0 refuses none, and may fill a disk
    #[arg(long, value_name = "RATIO", default_value_t = 256)]
    expand_max: u64,
}

impl InputArgs {
    /// `newline` stands for one in plain text unless another is given.
    pub(crate) fn options(&self, newline: Option<&str>) -> InputOptions {
        let newline = self.txt_newline.as_deref().or(newline);
        InputOptions {
            format: self.input_format,
            text: TextRules {
                separator: self.txt_separator.clone(),
                newline: newline.filter(|text| !text.is_empty()).map(str::to_owned),
                trim: self.txt_trim,
            },
            repeats: self.allow_repeats,
            expand_ratio_max: Some(self.expand_max).filter(|&ratio| ratio > 0),
        }
    }
}
