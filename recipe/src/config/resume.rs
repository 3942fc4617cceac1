//! The keys that a resumed run must share with its checkpoint.

use std::collections::BTreeMap;

use toml::{Table, Value};

use super::{Budget, Config};

/// The effect of a changed key on a resumed run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ResumeEffect {
    /// The state does not fit, or the order of the samples changes: the run cannot be resumed.
    OtherRun,
    /// The run continues, but with other bits than an uninterrupted run.
    OtherBits,
}

/// A key that differs between two configs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    /// Its full name, as `model.hidden`.
    pub key: String,
    /// The value in the checkpoint, as TOML.
    pub there: String,
    /// The value in this run, as TOML.
    pub here: String,
    /// The effect of the difference.
    pub effect: ResumeEffect,
}

/// The effect of a changed key, or of any changed key in a section (`section.`). The first matching
/// row counts. Keys without a row may differ: folders, logs, saving, evaluation, prefetching and
/// the layout, except for tensor parallelism, which divides sums. The budget must be equal: the
/// number of samples determines how many epochs are shuffled together.
const EFFECTS: [(&str, Option<ResumeEffect>); 29] = [
    ("model.init.", None),
    ("model.dropout", Some(ResumeEffect::OtherBits)),
    ("model.attention_dropout", Some(ResumeEffect::OtherBits)),
    ("model.", Some(ResumeEffect::OtherRun)),
    ("data.train", Some(ResumeEffect::OtherRun)),
    ("data.split", Some(ResumeEffect::OtherRun)),
    ("data.tokenizer", Some(ResumeEffect::OtherRun)),
    ("data.objective", Some(ResumeEffect::OtherRun)),
    ("data.short_seq_prob", Some(ResumeEffect::OtherRun)),
    ("data.sentence_order", Some(ResumeEffect::OtherRun)),
    ("data.special.", Some(ResumeEffect::OtherRun)),
    ("data.mask_prob", Some(ResumeEffect::OtherBits)),
    ("data.mask_ngram_max", Some(ResumeEffect::OtherBits)),
    ("data.mask_lengths", Some(ResumeEffect::OtherBits)),
    ("data.mask_full_words", Some(ResumeEffect::OtherBits)),
    ("data.mask_eod_loss", Some(ResumeEffect::OtherBits)),
    ("data.reset_at_document", Some(ResumeEffect::OtherBits)),
    ("run.seed", Some(ResumeEffect::OtherRun)),
    ("run.budget.", Some(ResumeEffect::OtherRun)),
    ("run.threads", Some(ResumeEffect::OtherBits)),
    ("run.device", Some(ResumeEffect::OtherBits)),
    ("batch.micro", Some(ResumeEffect::OtherBits)),
    ("batch.", Some(ResumeEffect::OtherRun)),
    ("parallel.tp", Some(ResumeEffect::OtherBits)),
    ("parallel.sequence_parallel", Some(ResumeEffect::OtherBits)),
    ("parallel.reduce", Some(ResumeEffect::OtherBits)),
    ("precision.", Some(ResumeEffect::OtherBits)),
    ("optim.offload", None),
    ("optim.", Some(ResumeEffect::OtherBits)),
];

impl Config {
    /// The differences between this config and that of a checkpoint, sorted by key. Of the corpora
    /// only the number and the weights are compared, because the files may have moved; their bytes
    /// are compared elsewhere.
    #[must_use]
    pub fn differences(&self, saved: &Config) -> Vec<Difference> {
        let (there, here) = (saved.flat(), self.flat());
        let mut keys: Vec<&String> = there.keys().chain(here.keys()).collect();
        keys.sort_unstable();
        keys.dedup();
        let mut found = Vec::new();
        for key in keys {
            let text = |flat: &BTreeMap<String, Value>| {
                flat.get(key).map_or_else(|| "absent".to_owned(), Value::to_string)
            };
            let (there, here) = (text(&there), text(&here));
            let effect = EFFECTS.iter().find(|(name, _)| covers(name, key));
            if let Some(effect) = effect.and_then(|(_, effect)| *effect).filter(|_| there != here) {
                found.push(Difference { key: key.clone(), there, here, effect });
            }
        }
        found
    }

    /// Every key with its value. Lengths are in samples, so that equal lengths compare equal.
    fn flat(&self) -> BTreeMap<String, Value> {
        let mut config = self.resolved();
        config.run.budget = Budget::Samples(self.samples_total());
        // The file may have moved.
        config.data.tokenizer = kind_of(&config.data.tokenizer).to_owned();
        let alone = config.data.train.len() == 1;
        for corpus in &mut config.data.train {
            corpus.path.clear();
            // The weight of a single corpus has no effect.
            corpus.weight = if alone { 1.0 } else { corpus.weight };
        }
        let table: Table = toml::from_str(&config.to_toml()).expect("what was just written");
        let mut flat = BTreeMap::new();
        flatten("", table, &mut flat);
        flat
    }
}

fn kind_of(tokenizer: &str) -> &str {
    tokenizer.split(':').next().unwrap_or_default()
}

fn covers(shared: &str, key: &str) -> bool {
    if shared.ends_with('.') { key.starts_with(shared) } else { key == shared }
}

fn flatten(prefix: &str, table: Table, into: &mut BTreeMap<String, Value>) {
    for (key, value) in table {
        match value {
            Value::Table(inner) => flatten(&format!("{prefix}{key}."), inner, into),
            other => _ = into.insert(format!("{prefix}{key}"), other),
        }
    }
}
