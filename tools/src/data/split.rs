//! `feedline split`: splits the documents of a dataset into training, validation and test.

use std::sync::Arc;

use anyhow::{Result, ensure};
use indexed::{DocumentRange, Format, IndexedDataset, Split, SplitMatrix, splice};
use serde::Serialize;
use serde_json::{Value, json};
use storage::{Key, Location, Storage};

use crate::ui::inspect_target::PAIR_SUFFIXES;
use crate::ui::job::{CancellableJob, CountedBytes};
use crate::ui::output::{
    Output, TOOL, no_manifest_yet, pair_bytes, verified_manifest, write_manifest,
};
use crate::ui::output_claim::{OutputClaim, Takeover};
use crate::ui::terminal::{table, thousands};

/// Request of `feedline split`.
#[derive(Clone, Debug)]
pub struct SplitRequest {
    /// The prefix to read.
    pub source: String,
    /// The shares, such as `949,50,1`.
    pub split: String,
    /// Common start of the prefixes to write.
    pub out: String,
    /// The unfinished parts to remove.
    pub takeover: Takeover,
}

/// The output of `feedline split`; `--json` prints it as it is.
#[derive(Debug, Serialize)]
pub struct SplitReport {
    /// The dataset that was read.
    pub source: String,
    /// Its documents.
    pub documents: u64,
    /// The parts that have a share, in order.
    pub parts: Vec<SplitOutput>,
}

/// One part.
#[derive(Debug, Serialize)]
pub struct SplitOutput {
    /// `train`, `valid` or `test`.
    pub part: &'static str,
    /// Its first document in the source, and the one after its last.
    pub documents: [u64; 2],
    /// Sequences.
    pub sequences: u64,
    /// Tokens.
    pub tokens: u64,
    /// The files; none if its share has no document.
    pub outputs: Vec<Output>,
}

/// Writes a dataset for each part that has a share, `OUT_train` and so on. Megatron's rounding is
/// applied to documents.
///
/// # Errors
/// If the source is damaged, or an output exists; no part remains then. If the process is killed,
/// the next run removes the parts and starts from scratch.
pub fn split(request: &SplitRequest, work: &Arc<CancellableJob>) -> Result<SplitReport> {
    let shares = SplitMatrix::parse(&request.split)?;
    let name = Location::new(&request.source).without_suffix(&PAIR_SUFFIXES).to_string();
    let (store, prefix) = work.locate(&name)?;
    let documents = IndexedDataset::open(&store, &prefix)?.document_count();
    ensure!(documents > 0, "cannot split {name}: no documents");
    let place = Location::new(&request.out);
    ensure!(
        !place.is_named_as_folder(),
        "cannot write {place}: expected a prefix for file names, such as {}, found a folder",
        place.join(prefix.name())
    );
    let (out, out_prefix) = work.locate(&request.out)?;
    let mut targets = Vec::new();
    for which in Split::ALL {
        let Some(range) = shares.range(which, documents) else { continue };
        let key = out_prefix.with_suffix(&format!("_{which}"))?;
        if range.is_empty() {
            no_manifest_yet(out.as_ref(), &key)?;
        }
        targets.push((which, range, key));
    }
    let written = targets.iter().filter(|(_, range, _)| !range.is_empty());
    let outputs: Vec<_> = written.map(|(_, _, key)| (&out, key)).collect();
    let command = format!("split {} {}", store.display(&prefix), request.split);
    let _claim = OutputClaim::take(work, &command, Format::Mmididx, &outputs, request.takeover)?;
    let manifest = verified_manifest(store.as_ref(), &prefix, Format::Mmididx, work)?;
    work.begin("split", CountedBytes::Written, Some(pair_bytes(store.as_ref(), &prefix)?));
    let mut parts = Vec::new();
    for (nth, (which, range, key)) in targets.iter().enumerate() {
        let (documents, range) = ([range.start, range.end], range.clone());
        if range.is_empty() {
            let part = which.name();
            parts.push(SplitOutput {
                part,
                documents,
                sequences: 0,
                tokens: 0,
                outputs: Vec::new(),
            });
            continue;
        }
        let (store, prefix) = (Arc::clone(&store), prefix.clone());
        let of = DocumentRange { store, prefix, documents: Some(range), bin_crc64: None };
        let mut meta = manifest.as_ref().map_or(json!({}), |manifest| manifest.meta.clone());
        meta["split"] = json!({
            "source": name,
            "shares": request.split,
            "part": which.name(),
            "documents": documents,
        });
        match write_part(which.name(), documents, (&out, key), of, meta) {
            Ok(part) => parts.push(part),
            Err(error) => {
                // The part that failed has removed its own files.
                let before = targets[..nth].iter().filter(|(_, range, _)| !range.is_empty());
                before.for_each(|(_, _, key)| remove(out.as_ref(), key));
                return Err(error);
            }
        }
    }
    Ok(SplitReport { source: name, documents, parts })
}

/// Writes one part; after an error, no file of it remains.
fn write_part(
    part: &'static str,
    documents: [u64; 2],
    (out, key): (&Arc<dyn Storage>, &Key),
    of: DocumentRange,
    mut meta: Value,
) -> Result<SplitOutput> {
    let built = splice(out, key, &[of])?;
    meta["tool"] = TOOL.into();
    meta["documents"] = built.documents.into();
    meta["sequences"] = built.sequences.into();
    meta["tokens"] = built.tokens.into();
    if let Value::Object(meta) = &mut meta {
        // The inputs of the documents of this part are not known.
        meta.remove("inputs");
    }
    let (sequences, tokens) = (built.sequences, built.tokens);
    let outputs = write_manifest(out.as_ref(), key, &built.files(), meta)?;
    Ok(SplitOutput { part, documents, sequences, tokens, outputs })
}

/// Removes a complete part, its manifest first.
fn remove(out: &dyn Storage, key: &Key) {
    for suffix in [".manifest.json", ".idx", ".crc", ".bin"] {
        // The caller reports the error that ended the split.
        if let Err(error) = key.with_suffix(suffix).and_then(|key| out.delete(&key)) {
            log::warn!("{}{suffix}: cannot be deleted: {error}", out.display(key));
        }
    }
}

impl SplitReport {
    /// Text for the terminal.
    #[must_use]
    pub fn text(&self) -> String {
        let row = |part: &SplitOutput| {
            let [start, end] = part.documents;
            let prefix = part.outputs.first().map_or("not written: no documents", |first| {
                first.name.strip_suffix(".bin").unwrap_or(&first.name)
            });
            let counts = [end - start, part.sequences, part.tokens].map(thousands);
            let mut row = vec![part.part.to_owned()];
            row.extend(counts);
            row.push(prefix.to_owned());
            row
        };
        let rows: Vec<_> = self.parts.iter().map(row).collect();
        let header = ["part", "documents", "sequences", "tokens", "prefix"];
        format!("split {}\n{}", self.source, table(&header, &rows))
    }
}
