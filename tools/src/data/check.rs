//! `feedline check`: whether token files or checkpoints are intact.

use std::fmt::Write as _;
use std::sync::Arc;

use anyhow::{Result, bail, ensure};
use ckpt::Checkpoint;
use indexed::{
    BlockChecksums, Census, CensusReport, Format, IndexedDataset, ReadOptions, TokenSource,
};
use serde::Serialize;
use serde_json::{Value, json};
use storage::{ByteSize, FileEntry, Key, Storage};

use crate::ckpt::verify::{NONE_LEFT, SKIPPED, StepOutcome, each_step, outcome_of};
use crate::ui::inspect_target::InspectTarget;
use crate::ui::job::{CancellableJob, CountedBytes};
use crate::ui::output::{FormatHints, Output, TOOL, token_manifest, write_manifest_only};
use crate::ui::terminal::thousands;

/// The output of `feedline check`. `--json` prints it as it is.
#[derive(Debug, Serialize)]
pub struct CheckVerdict {
    /// One entry for the token files, or one for each checkpoint.
    pub checked: Vec<Finding>,
    /// Steps that were deleted before they were checked, as retention deletes old ones, or that are
    /// not committed yet.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub skipped: Vec<u64>,
    /// The files that `--add-checksums` has written.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub added: Vec<Output>,
}

/// Result of checking one dataset or checkpoint.
#[derive(Debug, Serialize)]
pub struct Finding {
    /// Name of the dataset or checkpoint.
    pub what: String,
    /// Whether it is intact.
    pub ok: bool,
    /// Bytes that were read.
    pub read_bytes: u64,
    /// Its contents, or the fault and its location.
    pub finding: String,
    /// The tokens that end documents, if their id is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub eod: Option<Eod>,
}

/// The tokens that end documents.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Eod {
    /// Their id.
    pub id: u32,
    /// How often it occurs.
    pub tokens: u64,
    /// Documents whose last token it is.
    pub documents_ended: u64,
    /// All documents.
    pub documents: u64,
}

/// Reads everything and compares it with all checksums and with the rules of its format.
///
/// # Errors
/// If the target cannot be listed, or is not of the kind that its name promises. Damage is in the
/// verdict.
pub fn check(
    target: &InspectTarget,
    hints: &FormatHints,
    work: &CancellableJob,
) -> Result<CheckVerdict> {
    let mut skipped = Vec::new();
    let checked = match target {
        InspectTarget::Tokens { store, prefix } => {
            let result = tokens((store, prefix), Format::Mmididx, hints, work);
            vec![finding(store.display(prefix), refused(result)?)]
        }
        InspectTarget::Foreign { store, prefix, format } => {
            let result = tokens((store, prefix), *format, hints, work);
            vec![finding(format!("{} ({format})", store.display(prefix)), refused(result)?)]
        }
        InspectTarget::Checkpoint { .. } | InspectTarget::Checkpoints { .. } => {
            let mut checked = Vec::new();
            each_step(target, |steps, step, opened| {
                let outcome = opened.and_then(|open| verify_step(&open, work));
                let what = format!("{} step {step}", target.display());
                match outcome_of(steps, step, outcome)? {
                    StepOutcome::Intact((read_bytes, text)) => {
                        checked.push(finding(what, Ok((read_bytes, text, None))));
                    }
                    StepOutcome::Damaged(fault) => {
                        checked.push(finding(what, Err(anyhow::anyhow!(fault))));
                    }
                    StepOutcome::Skipped => skipped.push(step),
                }
                Ok(())
            })?;
            ensure!(!checked.is_empty(), "cannot check {}: {NONE_LEFT}", target.display());
            checked
        }
    };
    Ok(CheckVerdict { checked, skipped, added: Vec::new() })
}

/// Writes the block checksums of an intact pair, and its manifest if it has none.
///
/// # Errors
/// If it is not a pair of `.bin` and `.idx`, has checksums, or a file cannot be written.
pub fn add_checksums(target: &InspectTarget) -> Result<Vec<Output>> {
    let InspectTarget::Tokens { store, prefix } = target else {
        bail!("cannot add checksums: expected a .bin and .idx (hint: feedline convert makes them)");
    };
    let manifest = token_manifest(&**store, prefix)?;
    let key = prefix.with_suffix(".crc")?;
    let files = match BlockChecksums::open(&**store, prefix)? {
        None => indexed::write_checksums(store, prefix)?,
        Some(_) if manifest.is_some() => {
            bail!("cannot add checksums: {} exists", store.display(&key));
        }
        // The file is from a run that was killed before it wrote the manifest, or from another
        // program.
        Some(_) => {
            let [bin, idx] = indexed::sums_of(store, prefix)?;
            let bytes = storage::read_all(&**store, &key)?;
            let (path, crc64) = (key.name().to_owned(), storage::crc64(&bytes));
            [bin, idx, FileEntry { path, bytes: bytes.len() as u64, crc64 }]
        }
    };
    if let Some(manifest) = manifest {
        let is_other = |file: &&FileEntry| {
            let known = manifest.files.iter().find(|known| known.path == file.path);
            known.is_some_and(|known| known != *file)
        };
        if let Some(file) = files.iter().find(is_other) {
            store.delete(&key)?;
            bail!("cannot add checksums: {} changed after it was checked", file.path);
        }
        return Ok(vec![Output::new(store.display(&key), &files[2])]);
    }
    let dataset = IndexedDataset::open_ready(store, prefix)?;
    let meta = json!({
        "tool": TOOL,
        "dtype": dataset.dtype().to_string(),
        "documents": dataset.document_count(),
        "sequences": dataset.sequence_count(),
        "tokens": dataset.token_count(),
    });
    Ok(write_manifest_only(&**store, prefix, &files, meta)?.split_off(2))
}

impl CheckVerdict {
    /// Whether everything is intact.
    #[must_use]
    pub fn ok(&self) -> bool {
        self.checked.iter().all(|finding| finding.ok)
    }

    /// Text for the terminal.
    #[must_use]
    pub fn text(&self) -> String {
        let line = |finding: &Finding| {
            let word = if finding.ok { "complete" } else { "DAMAGED " };
            format!("{word}  {}: {}\n", finding.what, finding.finding)
        };
        let added = self.added.iter().map(|output| format!("added     {}\n", output.name));
        let skipped = self.skipped.iter();
        let skipped = skipped.map(|step| format!("skipped   step {step}: {SKIPPED}\n"));
        self.checked.iter().map(line).chain(skipped).chain(added).collect()
    }
}

/// Tokens that were checked: bytes, contents, and the tokens that end documents.
type Checked = Result<(u64, String, Option<Eod>)>;

/// Returns the refusal of files that are no tokens, or of unknown type, as an error: nothing was
/// checked, so nothing is damaged.
fn refused(result: Checked) -> Result<Checked> {
    match result {
        Err(error) if is_refusal(&error) => Err(error),
        result => Ok(result),
    }
}

fn is_refusal(error: &anyhow::Error) -> bool {
    use indexed::Error as E;
    let error = error.downcast_ref();
    matches!(error, Some(E::OtherKind { .. } | E::NotTokens { .. } | E::BadSetting { .. }))
}

fn finding(what: String, result: Checked) -> Finding {
    match result {
        Ok((read_bytes, finding, eod)) => Finding { what, ok: true, read_bytes, finding, eod },
        Err(error) => {
            Finding { what, ok: false, read_bytes: 0, finding: format!("{error:#}"), eod: None }
        }
    }
}

/// Verifies a step; returns the bytes that were read, and its contents.
fn verify_step(open: &Checkpoint, work: &CancellableJob) -> ckpt::Result<(u64, String)> {
    work.begin(format!("check step {}", open.step()), CountedBytes::Read, Some(open.size().1));
    let report = open.verify()?;
    let size = ByteSize(report.bytes);
    let holds = format!("{} files, {size}, {} tensors", report.files, report.tensors);
    Ok((report.bytes, holds + ", all checksums agree"))
}

/// Checks the rules of the format, then the lengths and checksums of the manifest, then the ids
/// against the vocabulary.
fn tokens(
    (store, prefix): (&Arc<dyn Storage>, &Key),
    format: Format,
    hints: &FormatHints,
    work: &CancellableJob,
) -> Result<(u64, String, Option<Eod>)> {
    let manifest = token_manifest(&**store, prefix)?;
    let meta = manifest.as_ref().map_or(Value::Null, |manifest| manifest.meta.clone());
    let tokenizer = &meta["tokenizer"];
    let eod = hints.eod.or_else(|| tokenizer["eod_id"].as_u64()?.try_into().ok());
    let options = ReadOptions { dtype: hints.dtype, eod: hints.eod, ..ReadOptions::default() };
    let source = TokenSource::open(store, prefix, format, &options)?;
    let listed = manifest.iter().flat_map(|manifest| &manifest.files).map(|file| file.bytes);
    let total = listed.fold(0, u64::saturating_add).max(source.token_bytes());
    work.begin("check", CountedBytes::Read, Some(total));
    let report = Census::take(&source, eod)?;
    let mut bytes = source.token_bytes();
    let mut text = format!(
        "{} documents, {} tokens of {}",
        thousands(report.documents),
        thousands(report.tokens),
        source.dtype()
    );
    let mut compared = 0;
    for file in manifest.iter().flat_map(|manifest| &manifest.files) {
        compared += 1;
        if file.path != format!("{}.bin", prefix.name()) || format != Format::Mmididx {
            file.verify(&**store, &prefix.parent())?;
            bytes += file.bytes;
            continue;
        }
        ensure!(
            (source.token_bytes(), report.tokens_crc64) == (file.bytes, file.crc64),
            "cannot verify {}: expected {} bytes with CRC-64 {:016x} by the manifest, found {} \
             bytes with {:016x}",
            file.path,
            file.bytes,
            file.crc64,
            source.token_bytes(),
            report.tokens_crc64
        );
    }
    if format == Format::Mmididx
        && let Some(checksums) = BlockChecksums::open(&**store, prefix)?
    {
        checksums.verify_self()?;
    }
    let vocab_size = hints.vocab_size.or_else(|| tokenizer["vocab_size"].as_u64());
    check_vocab(&source, &report, &meta, vocab_size)?;
    let _ = write!(text, ", {}", ByteSize(bytes));
    text += match (&manifest, compared) {
        (None, _) => "; no manifest, so no checksums compared",
        (Some(_), 0) => bail!("cannot verify checksums: the manifest lists no files"),
        (Some(_), _) => ", all checksums agree",
    };
    let eod = eod.map(|id| Eod {
        id,
        tokens: report.eod_tokens,
        documents_ended: report.documents_ended,
        documents: report.documents,
    });
    if let Some(Eod { id, tokens, documents_ended, .. }) = &eod {
        let (ended, tokens) = (thousands(*documents_ended), thousands(*tokens));
        let _ =
            write!(text, "; {ended} documents end with token {id}, which occurs {tokens} times");
    }
    Ok((bytes, text, eod))
}

/// Checks that all ids are in the vocabulary, and that those that mark spans start where it ends.
fn check_vocab(
    source: &TokenSource,
    report: &CensusReport,
    meta: &Value,
    vocab_size: Option<u64>,
) -> Result<()> {
    let Some(vocab_size) = vocab_size else { return Ok(()) };
    if let Some(first) = source.cpm2_vocab_size()? {
        ensure!(
            first == i64::try_from(vocab_size)?,
            "cannot check {}: expected markers from {vocab_size}, the size of the vocabulary, \
             found markers from {first}",
            source.display()
        );
    }
    // A part of a triple has markers in it, or offsets and no ids.
    let is_part =
        ["context", "target", "target_offset"].map(Value::from).contains(&meta["objective"]);
    if let (Some((least, most)), false) = (report.token_range, is_part) {
        ensure!(
            least >= 0 && most.unsigned_abs() < vocab_size,
            "cannot check {}: expected ids from 0 to {}, found {least} to {most}",
            source.display(),
            vocab_size.saturating_sub(1)
        );
    }
    Ok(())
}
