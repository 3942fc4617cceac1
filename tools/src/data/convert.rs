//! `feedline convert`: converts token files from one format to another.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use indexed::{Dtype, Format, ReadOptions, TokenSource, WriteOptions, Writer};
use serde::Serialize;
use serde_json::{Value, json};
use storage::{ByteSize, Location, rate_text};

use crate::ui::inspect_target::similar_names;
use crate::ui::job::{CancellableJob, CountedBytes};
use crate::ui::output::{Output, TOOL, verified_manifest, write_manifest};
use crate::ui::output_claim::{OutputClaim, Takeover};
use crate::ui::terminal::{FactTable, thousands};

/// Request of `feedline convert`.
#[derive(Clone, Debug)]
pub struct ConvertRequest {
    /// A prefix, a file or a folder.
    pub source: String,
    /// The prefix to write.
    pub out: String,
    /// The format to read; `None` to detect it.
    pub from: Option<Format>,
    /// The format to write.
    pub to: Format,
    /// The type of tokens to write.
    pub dtype: Option<Dtype>,
    /// The type of tokens to read, if the files do not record it.
    pub source_dtype: Option<Dtype>,
    /// The token that ends documents, if no table records their ends.
    pub eod: Option<u32>,
    /// The unfinished output to remove.
    pub takeover: Takeover,
}

/// The output of `feedline convert`; `--json` prints it as it is.
#[derive(Debug, Serialize)]
pub struct Converted {
    /// The source that was read.
    pub source: String,
    /// Its format.
    pub from: &'static str,
    /// The format that was written.
    pub to: &'static str,
    /// The type of its tokens, as numpy names it.
    pub dtype: String,
    /// Documents.
    pub documents: u64,
    /// Documents without a token, which the format cannot represent.
    pub documents_dropped: u64,
    /// Sequences.
    pub sequences: u64,
    /// Tokens.
    pub tokens: u64,
    /// The time that it took.
    pub elapsed_s: f64,
    /// The files.
    pub outputs: Vec<Output>,
}

/// Reads token files of one format and writes another.
///
/// # Errors
/// If the source is damaged, where the error names the location, or the output cannot be written.
/// No output remains. If the process is killed, the next run removes the output and starts from
/// scratch.
pub fn convert(request: &ConvertRequest, work: &Arc<CancellableJob>) -> Result<Converted> {
    let start = Instant::now();
    let (out, out_prefix) = work.locate(&request.out)?;
    // The claim is taken first: unfinished files of a killed run must not be read as the source.
    let output = [(&out, &out_prefix)];
    let _claim = OutputClaim::take(work, "convert", request.to, &output, request.takeover)?;
    let (store, key) = work.locate(&request.source)?;
    let found = Format::detect(&store, &key)?;
    let (format, prefix) = match (request.from, found) {
        (None, None) => {
            let source = Location::new(&request.source);
            let near = similar_names(&source, store.as_ref(), &key).join(", ");
            let near = if near.is_empty() { near } else { format!("there is {near}; ") };
            bail!(
                "cannot convert {}: no token files of a known format (hint: {near}a .bin of bare \
                 tokens beside a manifest needs --from nanogpt)",
                request.source
            )
        }
        (None, Some(found)) => found,
        (Some(format), Some((other, prefix))) if same_files(format, other) => (format, prefix),
        // A requested format is used as it is: its files may have other names here.
        (Some(Format::NanoGpt), _) => {
            let stem = key.name().strip_suffix(".bin").unwrap_or(key.name());
            (Format::NanoGpt, key.parent().join(stem)?)
        }
        (Some(format), _) => (format, key),
    };
    let options =
        ReadOptions { dtype: request.source_dtype, eod: request.eod, ..ReadOptions::default() };
    let source = TokenSource::open(&store, &prefix, format, &options)
        .with_context(|| format!("cannot read {} as {format}", request.source))?;
    let manifest = verified_manifest(store.as_ref(), &prefix, format, work)?;
    let tokenizer = manifest.map_or(Value::Null, |manifest| manifest.meta["tokenizer"].clone());
    let options = WriteOptions { dtype: request.dtype };
    let bytes = Some(source.token_bytes());
    // Some formats to write start with the token count, and some formats to read do not record it.
    work.begin("count", CountedBytes::Read, bytes);
    let mut writer = Writer::create(&out, &out_prefix, request.to, &source, &options)?;
    work.begin("convert", CountedBytes::Read, bytes);
    source.read_into(&mut writer)?;
    let written = writer.finish()?;
    let mut meta = json!({
        "tool": TOOL,
        "format": request.to.name(),
        "dtype": written.dtype.to_string(),
        "documents": written.documents,
        "sequences": written.sequences,
        "tokens": written.tokens,
        "converted": { "source": source.display(), "format": format.name() },
    });
    if !tokenizer.is_null() {
        meta["tokenizer"] = tokenizer;
    }
    let outputs = write_manifest(out.as_ref(), &out_prefix, &written.files, meta)?;
    Ok(Converted {
        source: source.display().to_owned(),
        from: format.name(),
        to: request.to.name(),
        dtype: written.dtype.to_string(),
        documents: written.documents,
        documents_dropped: written.documents_dropped,
        sequences: written.sequences,
        tokens: written.tokens,
        elapsed_s: start.elapsed().as_secs_f64(),
        outputs,
    })
}

/// Whether two formats use the same file names, so that the prefix of one is that of the other.
fn same_files(a: Format, b: Format) -> bool {
    let pair = |format| matches!(format, Format::Mmididx | Format::Tntidx | Format::NanoGpt);
    let npy = |format| matches!(format, Format::Yuan | Format::Dolma);
    a == b || (pair(a) && pair(b)) || (npy(a) && npy(b))
}

impl Converted {
    /// Text for the terminal.
    #[must_use]
    pub fn text(&self) -> String {
        let mut facts = FactTable::default();
        facts.add("documents", thousands(self.documents));
        if self.documents_dropped > 0 {
            let dropped = thousands(self.documents_dropped);
            facts.add("dropped", format!("{dropped} documents without a token"));
        }
        facts.add("sequences", thousands(self.sequences));
        facts.add("tokens", format!("{} of {}", thousands(self.tokens), self.dtype));
        let bytes: u64 = self.outputs.iter().map(|output| output.bytes).sum();
        facts.add(
            "wrote",
            format!(
                "{} at {}",
                ByteSize(bytes),
                rate_text(bytes, Duration::from_secs_f64(self.elapsed_s))
            ),
        );
        for output in &self.outputs {
            facts.add("", &output.name);
        }
        format!("{} ({}) to {}\n{}", self.source, self.from, self.to, facts.text())
    }
}
