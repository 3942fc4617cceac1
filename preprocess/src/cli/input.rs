use crate::{Format, InputOptions, Separator, TextRules};
use clap::Args;

/// Options of reading inputs.
#[derive(Args, Debug)]
pub(crate) struct InputArgs {
    /// Format of the inputs: auto, jsonl, json (one list of objects), txt, parquet or
    /// tfrecord
    ///
    /// `auto` detects it by the names and the first bytes.
    #[arg(long, value_name = "FORMAT", default_value = "auto")]
    input_format: Format,

    /// End of a document in plain text: line, blank-line, file, or a text with \n and \t as in C
    #[arg(long, value_name = "TEXT", default_value = "line")]
    txt_separator: Separator,

    // Not a doc comment: the default would be a link in it.
    #[arg(
        long,
        value_name = "TEXT",
        help = "Text that replaces newlines in documents of plain text, such as <n> \
                [default: <n> for cpm2]"
    )]
    txt_newline: Option<String>,

    /// Remove white space at both ends of documents of plain text
    #[arg(long)]
    txt_trim: bool,

    /// Read an input twice if it is named twice
    #[arg(long)]
    allow_repeats: bool,

    /// Refuse compressed inputs that expand to more than 1GiB and by more than this factor
    ///
    /// 0 sets no limit, and a malicious file may then fill the disk.
    #[arg(long, value_name = "RATIO", default_value_t = 256)]
    expand_max: u64,
}

impl InputArgs {
    /// `newline` replaces newlines in plain text unless --txt-newline is set.
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
