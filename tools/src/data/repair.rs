//! `feedline repair`: writes the intact part of a damaged pair under another name.

use std::sync::Arc;

use anyhow::{Result, anyhow};
use indexed::{Format, Repair};
use serde::Serialize;
use serde_json::{Value, json};
use storage::Location;

use crate::ui::inspect_target::{PAIR_SUFFIXES, similar_names};
use crate::ui::job::{CancellableJob, CountedBytes};
use crate::ui::output::{Output, TOOL, pair_bytes, token_manifest, write_manifest};
use crate::ui::output_claim::{OutputClaim, Takeover};
use crate::ui::terminal::{FactTable, thousands};

/// Request of `feedline repair`.
#[derive(Clone, Debug)]
pub struct RepairRequest {
    /// The prefix to read.
    pub source: String,
    /// The prefix to write.
    pub out: String,
    /// The unfinished output to remove.
    pub takeover: Takeover,
}

/// The output of `feedline repair`; `--json` prints it as it is.
#[derive(Debug, Serialize)]
pub struct Repaired {
    /// The dataset that was read.
    pub source: String,
    /// Each fault, and how it was repaired; without faults, nothing was written.
    pub faults: Vec<String>,
    /// Documents that were kept.
    pub documents: u64,
    /// Sequences that were kept.
    pub sequences: u64,
    /// Tokens that were kept.
    pub tokens: u64,
    /// Sequences that the header counts and that cannot be recovered.
    pub sequences_lost: u64,
    /// Bytes of the `.bin` that are left out.
    pub bytes_lost: u64,
    /// The files.
    pub outputs: Vec<Output>,
}

/// Examines a pair, and writes its intact part as a new one.
///
/// # Errors
/// If the header cannot be read, or the output exists.
pub fn repair(request: &RepairRequest, work: &Arc<CancellableJob>) -> Result<Repaired> {
    let name = Location::new(&request.source).without_suffix(&PAIR_SUFFIXES);
    let (store, prefix) = work.locate(&name.to_string())?;
    let (out, key) = work.locate(&request.out)?;
    let _claim =
        OutputClaim::take(work, "repair", Format::Mmididx, &[(&out, &key)], request.takeover)?;
    let idx_bytes = match store.open(&prefix.with_suffix(".idx")?) {
        Err(error @ storage::Error::NotFound { .. }) => {
            let near = similar_names(&name, store.as_ref(), &prefix).join(", ");
            let hint = if near.is_empty() { near } else { format!(" (hint: there is {near})") };
            return Err(anyhow!("{error}{hint}"));
        }
        opened => opened?.len_bytes(),
    };
    work.begin("examine", CountedBytes::Read, Some(idx_bytes));
    let repair = Repair::examine(&store, &prefix)?;
    let report = repair.report().clone();
    let mut repaired = Repaired {
        source: store.display(&prefix),
        faults: report.faults,
        documents: 0,
        sequences: 0,
        tokens: 0,
        sequences_lost: report.sequences_lost,
        bytes_lost: report.bytes_lost,
        outputs: Vec::new(),
    };
    if repaired.faults.is_empty() {
        return Ok(repaired);
    }
    work.begin("repair", CountedBytes::Written, Some(pair_bytes(store.as_ref(), &prefix)?));
    let built = repair.write(&out, &key)?;
    // A manifest that does not match its files still names their tokenizer.
    let mut meta = match token_manifest(store.as_ref(), &prefix) {
        Ok(Some(manifest)) => manifest.meta,
        _ => json!({}),
    };
    if let Value::Object(meta) = &mut meta {
        meta.remove("inputs");
    }
    meta["tool"] = TOOL.into();
    meta["documents"] = built.documents.into();
    meta["sequences"] = built.sequences.into();
    meta["tokens"] = built.tokens.into();
    meta["repaired"] = json!({ "source": repaired.source, "faults": repaired.faults });
    (repaired.documents, repaired.sequences) = (built.documents, built.sequences);
    repaired.tokens = built.tokens;
    repaired.outputs = write_manifest(out.as_ref(), &key, &built.files(), meta)?;
    Ok(repaired)
}

impl Repaired {
    /// Text for the terminal.
    #[must_use]
    pub fn text(&self) -> String {
        if self.faults.is_empty() {
            return format!("{}: nothing to repair; nothing written\n", self.source);
        }
        let mut facts = FactTable::default();
        for fault in &self.faults {
            facts.add("found", fault);
        }
        facts.add("kept", format!("{} documents", thousands(self.documents)));
        facts.add("", format!("{} sequences", thousands(self.sequences)));
        facts.add("", format!("{} tokens", thousands(self.tokens)));
        if self.sequences_lost > 0 || self.bytes_lost > 0 {
            let (sequences, bytes) = (thousands(self.sequences_lost), thousands(self.bytes_lost));
            facts.add("lost", format!("{sequences} sequences, {bytes} bytes of the .bin"));
        }
        for output in &self.outputs {
            facts.add("wrote", &output.name);
        }
        format!("{}\n{}", self.source, facts.text())
    }
}
