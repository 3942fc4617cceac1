//! `feedline check`: whether it is whole.

use std::sync::Arc;

use anyhow::Result;
use indexed::IndexedDataset;
use serde::Serialize;
use storage::{ByteSize, Key, Storage};

use crate::cmd::{checkpoints, steps_named, token_manifest};
use crate::report::thousands;
use crate::target::Target;

/// What was checked and found. `--json` prints it as it is.
#[derive(Debug, Serialize)]
pub struct Verdict {
    /// One entry for the token files, or one for each checkpoint.
    pub checked: Vec<Finding>,
}

/// What a check of one thing found.
#[derive(Debug, Serialize)]
pub struct Finding {
    /// What was checked.
    pub what: String,
    /// Whether it is whole.
    pub ok: bool,
    /// Bytes that were read.
    pub read_bytes: u64,
    /// What it holds, or what is wrong and where.
    pub finding: String,
}

/// Reads everything and compares it with every checksum and rule there is.
///
/// # Errors
/// Only if what is there cannot be listed. Whatever is wrong with it is in the verdict.
pub fn check(target: &Target) -> Result<Verdict> {
    let checked = match target {
        Target::Tokens { store, prefix } => {
            vec![finding(store.display(prefix), tokens(store, prefix))]
        }
        Target::Checkpoint { store, step } => vec![checkpoint(store, *step)?],
        Target::Checkpoints { store } => steps_named(&**store)?
            .into_iter()
            .map(|step| checkpoint(store, step))
            .collect::<Result<_>>()?,
    };
    Ok(Verdict { checked })
}

impl Verdict {
    /// Whether everything is whole.
    #[must_use]
    pub fn ok(&self) -> bool {
        self.checked.iter().all(|finding| finding.ok)
    }

    /// As a person reads it.
    #[must_use]
    pub fn text(&self) -> String {
        let line = |finding: &Finding| {
            let word = if finding.ok { "whole  " } else { "DAMAGED" };
            format!("{word}  {}: {}\n", finding.what, finding.finding)
        };
        self.checked.iter().map(line).collect()
    }
}

fn finding(what: String, result: Result<(u64, String)>) -> Finding {
    match result {
        Ok((read_bytes, finding)) => Finding { what, ok: true, read_bytes, finding },
        Err(error) => Finding { what, ok: false, read_bytes: 0, finding: format!("{error:#}") },
    }
}

fn checkpoint(store: &Arc<dyn Storage>, step: u64) -> Result<Finding> {
    let verified = checkpoints(store).open_step(step).and_then(|found| found.verify());
    let result = verified.map_err(anyhow::Error::from).map(|report| {
        let size = ByteSize(report.bytes);
        let holds = format!("{} files, {size}, {} tensors", report.files, report.tensors);
        (report.bytes, holds + ", all checksums agree")
    });
    Ok(finding(format!("{} step {step}", store.display(&Key::root())), result))
}

/// The rules of the format, then the manifest's lengths and sums, then the ids against the
/// vocabulary. Each file is read once.
fn tokens(store: &Arc<dyn Storage>, prefix: &Key) -> Result<(u64, String)> {
    let report = IndexedDataset::open(store, prefix)?.check()?;
    let bytes = report.bin_bytes + report.idx_bytes;
    let mut text = format!(
        "{} documents, {} tokens, {}",
        thousands(report.documents),
        thousands(report.tokens),
        ByteSize(bytes)
    );
    let Some(manifest) = token_manifest(&**store, prefix)? else {
        return Ok((bytes, text + "; no manifest, so no checksums to compare with"));
    };
    let sums = [
        (".bin", report.bin_bytes, report.bin_crc64),
        (".idx", report.idx_bytes, report.idx_crc64),
    ];
    for (suffix, got_bytes, got_crc64) in sums {
        let name = format!("{}{suffix}", prefix.name());
        let listed = manifest.files.iter().find(|file| file.path == name);
        let Some(listed) = listed else { anyhow::bail!("{name} is not in the manifest") };
        anyhow::ensure!(
            (got_bytes, got_crc64) == (listed.bytes, listed.crc64),
            "{name}: got {got_bytes} bytes with CRC-64 {got_crc64:016x}, due {} bytes with \
             {:016x} by the manifest",
            listed.bytes,
            listed.crc64
        );
    }
    let vocab_size = manifest.meta["tokenizer"]["vocab_size"].as_u64();
    if let (Some(vocab_size), Some((least, most))) = (vocab_size, report.token_range) {
        anyhow::ensure!(
            least >= 0 && most.unsigned_abs() < vocab_size,
            "{}: ids from {least} to {most}, due 0 to {} by the tokenizer of the manifest",
            store.display(prefix),
            vocab_size.saturating_sub(1)
        );
    }
    text += ", all checksums agree";
    Ok((bytes, text))
}
