//! `feedline inspect`: prints the contents of token files and checkpoints.

use std::collections::BTreeMap;
use std::sync::Arc;

use anyhow::Result;
use ckpt::{Checkpoint, Group};
use indexed::IndexedDataset;
use preprocess::{TokenizerSpec, open_tokenizer};
use serde::Serialize;
use serde_json::Value;
use storage::{ByteSize, Key, Storage};

use crate::ckpt::ls::faults_now;
use crate::data::foreign::{self, Foreign};
use crate::ui::inspect_target::InspectTarget;
use crate::ui::job::CancellableJob;
use crate::ui::output::{FormatHints, checkpoints, token_manifest};
use crate::ui::terminal::{FactTable, table, thousands};

/// The output of `feedline inspect`; `--json` prints it as it is.
#[derive(Debug, Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Inspection {
    /// A pair of token files.
    Tokens(Box<Tokens>),
    /// Token files of another program.
    ForeignTokens(Box<Foreign>),
    /// One checkpoint.
    Checkpoint(StepSummary),
    /// A folder of checkpoints.
    Checkpoints {
        /// The folder.
        folder: String,
        /// The newest complete step, from which a run would resume.
        newest: Option<StepSummary>,
        /// Every step that has a folder, the oldest first.
        steps: Vec<StepLine>,
    },
}

/// A pair of token files.
#[derive(Debug, Serialize)]
pub struct Tokens {
    /// Their prefix.
    pub prefix: String,
    /// The type of a token on disk, as numpy names it.
    pub dtype: String,
    /// Documents.
    pub documents: u64,
    /// Sequences: as many as documents, or more if they were split into sentences.
    pub sequences: u64,
    /// Tokens.
    pub tokens: u64,
    /// Tokens of the shortest, the middle and the longest sequence.
    pub sequence_tokens_min_median_max: Option<[u32; 3]>,
    /// Sequences without a token.
    pub sequences_empty: u64,
    /// Bytes of the `.bin`.
    pub bin_bytes: u64,
    /// Whether the sequences have modes, as multimodal sets do.
    pub modes: bool,
    /// The first ids of the first sequence.
    pub first_ids: Vec<i64>,
    /// Their text, if the manifest names a tokenizer that needs no files.
    pub first_text: Option<String>,
    /// Metadata of their manifest, if there is one.
    pub manifest: Option<Value>,
}

/// One checkpoint.
#[derive(Debug, Serialize)]
pub struct StepSummary {
    /// Its folder.
    pub folder: String,
    /// The training step after which it was saved.
    pub step: u64,
    /// Files, without the manifest.
    pub files: usize,
    /// Their bytes.
    pub bytes: u64,
    /// By group, in the order of the files.
    pub groups: Vec<GroupLine>,
    /// Blobs by name.
    pub blobs: Vec<String>,
    /// Metadata that the run recorded.
    pub meta: Value,
}

/// The tensors of one group.
#[derive(Debug, Serialize)]
pub struct GroupLine {
    /// Its name.
    pub group: &'static str,
    /// Tensors.
    pub tensors: usize,
    /// Elements of all of them.
    pub elements: u64,
    /// Bytes of all of them.
    pub bytes: u64,
    /// The types that occur.
    pub dtypes: Vec<&'static str>,
}

/// One step in a listing.
#[derive(Debug, Serialize)]
pub struct StepLine {
    /// The step.
    pub step: u64,
    /// Bytes of its files, if it is complete.
    pub bytes: Option<u64>,
    /// Its fault, if it is not complete.
    pub fault: Option<String>,
}

/// Ids shown of the first sequence: about a line of text.
const FIRST_IDS: usize = 24;

/// Inspects a target. Sizes and counts are read, contents are not checked.
///
/// # Errors
/// If it cannot be opened; the error names the fault and its location.
pub fn inspect(
    target: &InspectTarget,
    hints: &FormatHints,
    work: &CancellableJob,
) -> Result<Inspection> {
    match target {
        InspectTarget::Foreign { store, prefix, format } => {
            let found = foreign::inspect((store, prefix), *format, hints, work)?;
            Ok(Inspection::ForeignTokens(Box::new(found)))
        }
        InspectTarget::Tokens { store, prefix } => {
            Ok(Inspection::Tokens(Box::new(tokens(store, prefix)?)))
        }
        InspectTarget::Checkpoint { store, step } => {
            Ok(Inspection::Checkpoint(step_of(&checkpoints(store).open_step(*step)?)))
        }
        InspectTarget::Checkpoints { store } => folder(store),
    }
}

fn tokens(store: &Arc<dyn Storage>, prefix: &Key) -> Result<Tokens> {
    let dataset = IndexedDataset::open_tokens(store, prefix)?;
    let manifest = token_manifest(&**store, prefix)?.map(|manifest| manifest.meta);
    let count = dataset.sequence_count();
    let mut lens: Vec<u32> = (0..count).map(|seq| dataset.sequence_len(seq)).collect();
    lens.sort_unstable();
    let ends = |lens: &[u32]| Some([*lens.first()?, lens[lens.len() / 2], *lens.last()?]);
    let first = (0..count).find(|&seq| dataset.sequence_len(seq) > 0);
    let is_integer = dataset.dtype().is_integer();
    let mut first_ids = match first {
        Some(seq) if is_integer => dataset.read_sequence(seq)?,
        _ => Vec::new(),
    };
    first_ids.truncate(FIRST_IDS);
    Ok(Tokens {
        prefix: dataset.display(),
        dtype: format!("{:?}", dataset.dtype()).to_lowercase(),
        documents: dataset.document_count(),
        sequences: count,
        tokens: dataset.token_count(),
        sequence_tokens_min_median_max: ends(&lens),
        sequences_empty: lens.iter().take_while(|&&len| len == 0).count() as u64,
        bin_bytes: dataset.bin().len_bytes(),
        modes: dataset.has_modes(),
        first_text: manifest.as_ref().and_then(|meta| text_of(meta, &first_ids)),
        first_ids,
        manifest,
    })
}

/// The text of ids, if the manifest names a tokenizer that is built in and they are among its ids.
fn text_of(meta: &Value, ids: &[i64]) -> Option<String> {
    let kind = meta["tokenizer"]["name"].as_str()?.to_owned();
    let tokenizer = open_tokenizer(&TokenizerSpec { kind, ..TokenizerSpec::default() });
    let tokenizer = tokenizer.ok()?;
    if meta["tokenizer"]["vocab_size"].as_u64()? != u64::from(tokenizer.vocab_size()) {
        return None;
    }
    let ids: Vec<u32> = ids.iter().map(|&id| u32::try_from(id).ok()).collect::<Option<_>>()?;
    let mut bytes = Vec::new();
    tokenizer.decode(&ids, &mut bytes).ok()?;
    // A character may be cut by the last id shown.
    Some(String::from_utf8_lossy(&bytes).trim_end_matches('\u{fffd}').to_owned())
}

fn folder(store: &Arc<dyn Storage>) -> Result<Inspection> {
    let checkpoints = checkpoints(store);
    let (mut steps, mut faults, mut newest) = (Vec::new(), Vec::new(), None);
    let there = checkpoints.list_folder()?;
    for &step in there.steps() {
        match checkpoints.open_listed(&there, step) {
            Ok(checkpoint) => {
                let bytes = Some(checkpoint.size().1);
                newest = Some(checkpoint);
                steps.push(StepLine { step, bytes, fault: None });
            }
            Err(error) => faults.push((step, error)),
        }
    }
    let faults = faults_now(&checkpoints, store, faults)?;
    let line = |(step, fault)| StepLine { step, bytes: None, fault: Some(fault) };
    steps.extend(faults.into_iter().map(line));
    steps.sort_by_key(|line| line.step);
    let folder = store.display(&Key::root());
    Ok(Inspection::Checkpoints { folder, newest: newest.as_ref().map(step_of), steps })
}

pub(crate) fn step_of(checkpoint: &Checkpoint) -> StepSummary {
    let mut groups: BTreeMap<Group, GroupLine> = BTreeMap::new();
    for tensor in checkpoint.tensors() {
        let line = groups.entry(tensor.group).or_insert_with(|| GroupLine {
            group: tensor.group.name(),
            tensors: 0,
            elements: 0,
            bytes: 0,
            dtypes: Vec::new(),
        });
        line.tensors += 1;
        line.bytes += tensor.bytes();
        line.elements += tensor.shape.iter().product::<u64>();
        if !line.dtypes.contains(&tensor.dtype.name()) {
            line.dtypes.push(tensor.dtype.name());
        }
    }
    let (files, bytes) = checkpoint.size();
    StepSummary {
        folder: checkpoint.display(),
        step: checkpoint.step(),
        files,
        bytes,
        groups: groups.into_values().collect(),
        blobs: checkpoint.blobs().map(str::to_owned).collect(),
        meta: checkpoint.meta().clone(),
    }
}

impl Inspection {
    /// Text for the terminal.
    #[must_use]
    pub fn text(&self) -> String {
        match self {
            Inspection::Tokens(tokens) => tokens.text(),
            Inspection::ForeignTokens(tokens) => tokens.text(),
            Inspection::Checkpoint(step) => step.text(),
            Inspection::Checkpoints { folder, newest, steps } => {
                let rows: Vec<_> = steps.iter().map(StepLine::row).collect();
                let mut text = format!("checkpoints in {folder}\n");
                text += &table(&["step", "size", "state"], &rows);
                match newest {
                    Some(step) => text + "\n" + &step.text(),
                    None => text + "\n  no complete step; a run would start from scratch\n",
                }
            }
        }
    }
}

impl StepLine {
    fn row(&self) -> Vec<String> {
        let size = self.bytes.map_or_else(|| "-".to_owned(), |bytes| ByteSize(bytes).to_string());
        let state = self.fault.clone().unwrap_or_else(|| "complete".to_owned());
        vec![self.step.to_string(), size, state]
    }
}

impl Tokens {
    fn text(&self) -> String {
        let mut facts = FactTable::default();
        facts.add("documents", thousands(self.documents));
        facts.add("sequences", thousands(self.sequences));
        facts.add("tokens", thousands(self.tokens));
        if let Some([min, median, max]) = self.sequence_tokens_min_median_max {
            let [min, median, max] = [min, median, max].map(|n| thousands(n.into()));
            let spread = format!("{min} / {median} / {max}");
            facts.add("tokens per sequence", format!("{spread} (shortest / median / longest)"));
        }
        if self.sequences_empty > 0 {
            facts.add("empty sequences", thousands(self.sequences_empty));
        }
        facts.add("type on disk", type_name(&self.dtype));
        facts.add("size of .bin", ByteSize(self.bin_bytes));
        if self.modes {
            facts.add("modes", "yes (multimodal)");
        }
        match &self.manifest {
            Some(meta) => {
                let tokenizer = &meta["tokenizer"];
                let name = tokenizer["name"].as_str().unwrap_or("unknown");
                facts.add("tokenizer", format!("{name}, vocabulary {}", tokenizer["vocab_size"]));
            }
            None => facts.add("manifest", "none (written by another tool)"),
        }
        if !self.first_ids.is_empty() {
            facts.add("first ids", format!("{:?}", self.first_ids));
        }
        if let Some(text) = &self.first_text {
            facts.add("first text", format!("{text:?}"));
        }
        format!("token files {}\n{}", self.prefix, facts.text())
    }
}

/// The name that numpy and the other verbs use for a type whose JSON name is `u16`, say.
fn type_name(short: &str) -> String {
    let bits = short.trim_start_matches(char::is_alphabetic);
    let kind = match short.strip_suffix(bits) {
        Some("u") => "uint",
        Some("i") => "int",
        Some("f") => "float",
        _ => return short.to_owned(),
    };
    format!("{kind}{bits}")
}

impl StepSummary {
    pub(crate) fn text(&self) -> String {
        let rows: Vec<_> = self
            .groups
            .iter()
            .map(|line| {
                vec![
                    line.group.to_owned(),
                    line.tensors.to_string(),
                    thousands(line.elements),
                    ByteSize(line.bytes).to_string(),
                    line.dtypes.join(", "),
                ]
            })
            .collect();
        let mut text = format!("checkpoint {}\n", self.folder);
        text += &table(&["group", "tensors", "elements", "size", "type"], &rows);
        let mut facts = FactTable::default();
        facts.add("files", format!("{}, {}", self.files, ByteSize(self.bytes)));
        facts.add("blobs", self.blobs.join(", "));
        for (key, value) in self.meta.as_object().into_iter().flatten() {
            facts.add(key, value);
        }
        text + "\n" + &facts.text()
    }
}
