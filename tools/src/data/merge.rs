//! `feedline merge`: concatenates datasets.

use std::cmp::Ordering;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use indexed::{DocumentRange, Format, IndexedDataset, splice};
use serde::Serialize;
use serde_json::{Map, Value, json};
use storage::{ByteSize, FileEntry, Key, Location, Storage, rate_text};

use crate::ui::inspect_target::{PAIR_SUFFIXES, similar_names};
use crate::ui::job::{CancellableJob, CountedBytes};
use crate::ui::output::{
    Output, TOOL, pair_bytes, token_manifest, verify_checksums, write_manifest,
};
use crate::ui::output_claim::{OutputClaim, Takeover};
use crate::ui::step_folder::with_last_component;
use crate::ui::terminal::{FactTable, thousands};

/// Request of `feedline merge`.
#[derive(Clone, Debug)]
pub struct MergeRequest {
    /// Prefixes, and folders whose prefixes are merged.
    pub inputs: Vec<String>,
    /// The prefix to write.
    pub out: String,
    /// The order of the prefixes of a folder.
    pub order: PrefixOrder,
    /// Whether to require a mode for each sequence, as Megatron's flag does.
    pub multimodal: bool,
    /// Whether to merge some shards of a dataset without the others.
    pub partial: bool,
    /// Whether to read the inputs and compare them with their manifests first.
    pub verify: bool,
    /// The unfinished output to remove.
    pub takeover: Takeover,
}

/// The order of the prefixes of a folder.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PrefixOrder {
    /// As Megatron's tool sorts them, so that `_10` comes before `_2`.
    #[default]
    Name,
    /// Digits as numbers: `_2` comes before `_10`.
    Numeric,
}

/// The output of `feedline merge`; `--json` prints it as it is.
#[derive(Debug, Serialize)]
pub struct Merged {
    /// The prefixes, in the order of their documents.
    pub sources: Vec<String>,
    /// Sources without a manifest: their tokenizer is unknown, and they were read completely.
    pub sources_without_manifest: Vec<String>,
    /// Whether all tokens were verified; otherwise their checksums were carried over.
    pub verified: bool,
    /// Documents.
    pub documents: u64,
    /// Sequences.
    pub sequences: u64,
    /// Tokens.
    pub tokens: u64,
    /// The time that it took.
    pub elapsed_s: f64,
    /// The files.
    pub outputs: Vec<Output>,
}

/// One input.
struct MergeInput {
    name: String,
    store: Arc<dyn Storage>,
    prefix: Key,
    /// Metadata and files of its manifest, if it has one.
    manifest: Option<(Value, Vec<FileEntry>)>,
}

/// Merges datasets.
///
/// # Errors
/// If inputs do not fit together or break their format; the error names them, and no output
/// remains. If the process is killed, the next run removes the output and starts from scratch.
pub fn merge(request: &MergeRequest, work: &Arc<CancellableJob>) -> Result<Merged> {
    let start = Instant::now();
    let (out, out_prefix) = work.locate(&request.out)?;
    // The claim is taken first: unfinished files of a killed run must not be read as an input.
    let output = [(&out, &out_prefix)];
    let _claim = OutputClaim::take(work, "merge", Format::Mmididx, &output, request.takeover)?;
    let sources = find(request, work)?;
    same_tokenizer(&sources)?;
    if !request.partial {
        all_shards(&sources)?;
    }
    same_inputs(&sources)?;
    let bytes = sources.iter().map(MergeInput::bytes).sum::<Result<u64>>()?;
    if request.verify {
        work.begin("verify", CountedBytes::Read, Some(bytes));
    }
    let parts = sources.iter().map(|source| source.part(request)).collect::<Result<Vec<_>>>()?;
    work.begin("merge", CountedBytes::Written, Some(bytes));
    let built = splice(&out, &out_prefix, &parts)?;
    let mut meta = common_meta(&sources);
    meta.insert("tool".to_owned(), TOOL.into());
    meta.insert("documents".to_owned(), built.documents.into());
    meta.insert("sequences".to_owned(), built.sequences.into());
    meta.insert("tokens".to_owned(), built.tokens.into());
    let names: Vec<String> = sources.iter().map(|source| source.name.clone()).collect();
    meta.insert("merged".to_owned(), json!(names));
    let files = built.files();
    let outputs = write_manifest(out.as_ref(), &out_prefix, &files, Value::Object(meta))?;
    let without = sources.iter().filter(|source| source.manifest.is_none());
    Ok(Merged {
        sources_without_manifest: without.map(|source| source.name.clone()).collect(),
        verified: request.verify,
        sources: names,
        documents: built.documents,
        sequences: built.sequences,
        tokens: built.tokens,
        elapsed_s: start.elapsed().as_secs_f64(),
        outputs,
    })
}

fn find(request: &MergeRequest, work: &Arc<CancellableJob>) -> Result<Vec<MergeInput>> {
    let mut sources = Vec::new();
    for input in &request.inputs {
        let bare = Location::new(input).without_suffix(&PAIR_SUFFIXES);
        let name = bare.file_name();
        ensure!(!name.is_empty(), "cannot merge {input}: expected a prefix or a folder, found /");
        // A name such as `.` has no last component to use as the key.
        let (store, key) = work.locate(&with_last_component(&bare).to_string())?;
        let is_pair = store.open(&key.with_suffix(".idx")?).is_ok();
        if is_pair {
            sources.push(MergeInput::open(store, key)?);
            continue;
        }
        let folder = work.open_url(&bare.to_string())?;
        let names =
            folder.list_names(&Key::root()).with_context(|| format!("cannot list {input}"))?;
        let with =
            |stem: &str, suffix: &str| names.binary_search(&format!("{stem}{suffix}")).is_ok();
        let stems = names.iter().filter_map(|name| name.strip_suffix(".idx"));
        let mut stems: Vec<&str> = stems.filter(|stem| with(stem, ".bin")).collect();
        match request.order {
            PrefixOrder::Name => stems.sort_unstable(),
            PrefixOrder::Numeric => stems.sort_by(|a, b| numeric(a, b)),
        }
        if stems.is_empty() {
            let near = similar_names(&bare, store.as_ref(), &key).join(", ");
            let hint = if near.is_empty() { near } else { format!(" (hint: there is {near})") };
            bail!(
                "cannot merge {input}: expected a .bin and .idx of that name or a folder with \
                 some, found none{hint}"
            );
        }
        for stem in stems {
            sources.push(MergeInput::open(Arc::clone(&folder), Key::new(stem)?)?);
        }
    }
    if sources.is_empty() {
        bail!("cannot merge: expected prefixes, or folders that hold some, found none");
    }
    Ok(sources)
}

impl MergeInput {
    fn open(store: Arc<dyn Storage>, prefix: Key) -> Result<Self> {
        let name = store.display(&prefix);
        let manifest = token_manifest(store.as_ref(), &prefix)?;
        let manifest = manifest.map(|manifest| (manifest.meta, manifest.files));
        Ok(MergeInput { name, store, prefix, manifest })
    }

    /// Index of the shard, shard count, and bytes of all inputs, if it is a shard.
    fn shard(&self) -> Option<(u64, (u64, Option<u64>))> {
        let (meta, _) = self.manifest.as_ref()?;
        let (index, count) = meta["shard"].as_str()?.split_once('/')?;
        let (index, count) = (index.parse::<u64>().ok()?, count.parse::<u64>().ok()?);
        (count > 0).then(|| (index, (count, meta["shard_of_bytes"].as_u64())))
    }

    /// Its inputs: name, stored bytes, and checksum of both ends. An input is omitted if it was a
    /// stream, or if the version that read it did not record them.
    fn inputs(&self) -> impl Iterator<Item = (&str, (u64, &str))> {
        let inputs = self.manifest.iter().filter_map(|(meta, _)| meta["inputs"].as_array());
        inputs.flatten().filter_map(|input| {
            let identity = &input["identity"];
            let (bytes, ends) = (identity["bytes"].as_u64()?, identity["ends_crc64"].as_str()?);
            Some((input["name"].as_str()?, (bytes, ends)))
        })
    }

    /// Bytes of both files.
    fn bytes(&self) -> Result<u64> {
        pair_bytes(self.store.as_ref(), &self.prefix)
    }

    fn part(&self, request: &MergeRequest) -> Result<DocumentRange> {
        if request.multimodal {
            let has_modes = IndexedDataset::open(&self.store, &self.prefix)?.has_modes();
            ensure!(
                has_modes,
                "cannot merge {} with --multimodal: expected a mode per sequence, found no modes",
                self.name
            );
        }
        let mut bin_crc64 = None;
        if let Some((_, files)) = &self.manifest {
            verify_checksums(self.store.as_ref(), &self.prefix, files)?;
            for suffix in [".bin", ".idx"] {
                let name = format!("{}{suffix}", self.prefix.name());
                let Some(entry) = files.iter().find(|file| file.path == name) else {
                    bail!("cannot merge {}: {name} is not in its manifest", self.name);
                };
                let folder = self.prefix.parent();
                let bytes = self.store.open(&folder.join(&name)?)?.len_bytes();
                ensure!(
                    bytes == entry.bytes,
                    "cannot merge {}: expected {} bytes of {name} by its manifest, found {bytes}",
                    self.name,
                    entry.bytes
                );
                // The index is rewritten, so it is verified. Tokens are copied with their checksum:
                // damaged tokens do not match it in the copy either.
                if request.verify || suffix == ".idx" {
                    entry.verify(self.store.as_ref(), &folder)?;
                }
                if suffix == ".bin" {
                    bin_crc64 = Some(entry.crc64);
                }
            }
        }
        let (store, prefix) = (Arc::clone(&self.store), self.prefix.clone());
        Ok(DocumentRange { store, prefix, documents: None, bin_crc64 })
    }
}

/// Checks that all shards are present and in order, which detects a failed task of an array. Shards
/// belong together only if all inputs had the same number of bytes for each of them.
fn all_shards(sources: &[MergeInput]) -> Result<()> {
    let mut next = 0;
    let mut last: Option<(&MergeInput, (u64, Option<u64>))> = None;
    for source in sources {
        let Some((index, of)) = source.shard() else { continue };
        let (count, bytes) = of;
        ensure!(
            index == next && last.is_none_or(|(_, (of, _))| of == count),
            "cannot merge {}: expected shard {next}, found shard {index} of {count} (hint: run \
             failed tasks of the array again, give the shards in order, or use --partial)",
            source.name
        );
        if let Some((before, (_, expected))) = last.filter(|(_, (_, of))| *of != bytes) {
            bail!(
                "cannot merge {} with {}: expected shards of inputs of {} bytes, found {} (hint: \
                 an input changed between the shards; make them again from one version)",
                before.name,
                source.name,
                expected.unwrap_or_default(),
                bytes.unwrap_or_default()
            );
        }
        if let Some((before, _)) = last {
            same_settings(before, source)?;
        }
        next = (next + 1) % count;
        last = (next != 0).then_some((source, of));
    }
    if let Some((source, (count, _))) = last {
        bail!(
            "cannot merge {}: expected {count} shards, found {next} (hint: run failed tasks of the \
             array again, or use --partial)",
            source.name
        );
    }
    Ok(())
}

/// Checks that shards of one corpus have the same settings, such as `--append-eod`.
fn same_settings(before: &MergeInput, source: &MergeInput) -> Result<()> {
    let meta = |source: &MergeInput| source.manifest.as_ref().map(|(meta, _)| meta.clone());
    let (Some(before_meta), Some(meta)) = (meta(before), meta(source)) else { return Ok(()) };
    for name in ["append_eod", "json_key", "objective", "dtype"] {
        ensure!(
            before_meta[name] == meta[name],
            "cannot merge {} with {}: expected {name} {}, found {} (hint: they are shards of one \
             corpus, made with different settings: make one of them again, or use --partial)",
            before.name,
            source.name,
            before_meta[name],
            meta[name]
        );
    }
    Ok(())
}

/// Checks that shards of one corpus have the same inputs, also with `--partial`, which is for
/// missing shards. Shards in ascending order and of one count are taken to be of one corpus. The
/// version of an input is not compared: nodes may read copies of it.
fn same_inputs(sources: &[MergeInput]) -> Result<()> {
    let mut seen: HashMap<&str, (&MergeInput, (u64, &str))> = HashMap::new();
    let mut last = None;
    for source in sources {
        let Some((index, (count, _))) = source.shard() else { continue };
        if last.is_none_or(|(before, of)| index <= before || of != count) {
            seen.clear();
        }
        last = Some((index, count));
        for (name, found) in source.inputs() {
            let (first, expected) = *seen.entry(name).or_insert((source, found));
            ensure!(
                found == expected,
                "cannot merge {} with {}: expected one version of their input {name}, found {} \
                 bytes with CRC-64 {} of its ends, and {} bytes with {} (hint: the input changed \
                 between the shards: make them again from one version; --partial does not skip \
                 this check)",
                first.name,
                source.name,
                expected.0,
                expected.1,
                found.0,
                found.1
            );
        }
    }
    Ok(())
}

/// Checks that all sources have the same tokenizer: in another one, ids mean different text.
fn same_tokenizer(sources: &[MergeInput]) -> Result<()> {
    let tokenizer_of = |source: &MergeInput| {
        let (meta, _) = source.manifest.as_ref()?;
        let tokenizer = &meta["tokenizer"];
        let facts = json!([tokenizer["name"], tokenizer["fingerprint"], tokenizer["vocab_size"]]);
        (!tokenizer.is_null()).then_some(facts)
    };
    let mut first: Option<(&MergeInput, Value)> = None;
    for source in sources {
        let Some(facts) = tokenizer_of(source) else { continue };
        match &first {
            None => first = Some((source, facts)),
            Some((other, expected)) => ensure!(
                *expected == facts,
                "cannot merge {} with {}: expected tokenizer {expected}, found {facts} (hint: \
                 tokenize one of them again, as their ids mean different text)",
                other.name,
                source.name
            ),
        }
    }
    Ok(())
}

/// Metadata that is equal in all manifests. The lists of inputs are concatenated. The caller adds
/// the counts of the result.
fn common_meta(sources: &[MergeInput]) -> Map<String, Value> {
    let metas: Option<Vec<&Value>> =
        sources.iter().map(|source| source.manifest.as_ref().map(|(meta, _)| meta)).collect();
    let metas = metas.unwrap_or_default();
    let Some(Value::Object(first)) = metas.first() else { return Map::new() };
    let mut common = Map::new();
    for (name, value) in first {
        if name == "inputs" {
            let inputs = metas.iter().filter_map(|meta| meta[name].as_array()).flatten();
            common.insert(name.clone(), inputs.cloned().collect());
        } else if metas.iter().all(|meta| meta[name] == *value) {
            common.insert(name.clone(), value.clone());
        }
    }
    common
}

/// Compares runs of digits as numbers, and all else byte by byte.
fn numeric(a: &str, b: &str) -> Ordering {
    let (mut x, mut y) = (a.as_bytes(), b.as_bytes());
    while let (Some(&p), Some(&q)) = (x.first(), y.first()) {
        let order = if p.is_ascii_digit() && q.is_ascii_digit() {
            let (m, n);
            (m, x) = digits(x);
            (n, y) = digits(y);
            m.len().cmp(&n.len()).then(m.cmp(n))
        } else {
            (x, y) = (&x[1..], &y[1..]);
            p.cmp(&q)
        };
        if order != Ordering::Equal {
            return order;
        }
    }
    x.len().cmp(&y.len()).then(a.cmp(b))
}

/// The leading digits without leading zeros, and the rest.
fn digits(text: &[u8]) -> (&[u8], &[u8]) {
    let end = text.iter().position(|byte| !byte.is_ascii_digit()).unwrap_or(text.len());
    let (digits, rest) = text.split_at(end);
    let zeros = digits.iter().take_while(|&&byte| byte == b'0').count();
    (&digits[zeros..], rest)
}

impl Merged {
    /// Text for the terminal.
    #[must_use]
    pub fn text(&self) -> String {
        let mut facts = FactTable::default();
        facts.add("documents", thousands(self.documents));
        facts.add("sequences", thousands(self.sequences));
        facts.add("tokens", thousands(self.tokens));
        let bytes: u64 = self.outputs.iter().map(|output| output.bytes).sum();
        let rate = rate_text(bytes, Duration::from_secs_f64(self.elapsed_s));
        facts.add("wrote", format!("{} at {rate}", ByteSize(bytes)));
        for output in &self.outputs {
            facts.add("", &output.name);
        }
        if !self.verified {
            let how = "not verified for tokens that the kernel copied (--verify reads all)";
            facts.add("checksums", how);
        }
        for name in &self.sources_without_manifest {
            facts.add("no manifest", format!("{name}: tokenizer unknown"));
        }
        format!("merged {} datasets\n{}", self.sources.len(), facts.text())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digits_are_numbers() {
        let mut names = vec!["p_10_a", "p_2_b", "p_2_a", "p_1", "p_02_a", "p", "q_1", "p_100"];
        names.sort_by(|a, b| numeric(a, b));
        assert_eq!(names, ["p", "p_1", "p_02_a", "p_2_a", "p_2_b", "p_10_a", "p_100", "q_1"]);
    }
}
