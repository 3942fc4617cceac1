//! What a run must share with the one that it goes on with.

use toml::{Table, Value};

use super::{Budget, Config};

/// What another value of a key does to a resumed run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// The state does not fit, or the samples come in another order: not the same run any more.
    OtherRun,
    /// The run goes on, but not in the bits of an uninterrupted one.
    OtherBits,
}

/// A key on which two configs disagree.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    /// Its full name, as `model.hidden`.
    pub key: String,
    /// The value in the checkpoint, as TOML.
    pub there: String,
    /// The value in this run, as TOML.
    pub here: String,
    /// What the difference does.
    pub effect: Effect,
}

/// Keys, and sections ending in a point, that a resumed run must share. The budget is among them:
/// the number of samples decides how many epochs are shuffled together, and with it their order.
/// Keys that are absent here (folders, logs, saving, evaluation, prefetching) may differ freely.
const SHARED: [(&str, Effect); 17] = [
    ("model.family", Effect::OtherRun),
    ("model.layers", Effect::OtherRun),
    ("model.hidden", Effect::OtherRun),
    ("model.heads", Effect::OtherRun),
    ("model.ffn", Effect::OtherRun),
    ("model.activation", Effect::OtherRun),
    ("model.vocab", Effect::OtherRun),
    ("model.seq_len", Effect::OtherRun),
    ("data.split", Effect::OtherRun),
    ("data.tokenizer", Effect::OtherRun),
    ("run.seed", Effect::OtherRun),
    ("run.budget.", Effect::OtherRun),
    ("batch.global", Effect::OtherRun),
    ("batch.micro", Effect::OtherBits),
    ("run.threads", Effect::OtherBits),
    ("precision.", Effect::OtherBits),
    ("optim.", Effect::OtherBits),
];

impl Config {
    /// Where this run and the one that a checkpoint was written by disagree, in order of their
    /// names. The corpus is compared by its bytes elsewhere: it may have moved.
    #[must_use]
    pub fn differences(&self, saved: &Config) -> Vec<Difference> {
        let (there, here) = (saved.flat(), self.flat());
        let mut found = Vec::new();
        for (key, value) in &here {
            let other = there.iter().find(|(name, _)| name == key).map(|(_, value)| value);
            let there = other.map_or_else(|| "absent".to_owned(), Value::to_string);
            let here = value.to_string();
            let effect = SHARED.iter().find(|(name, _)| covers(name, key)).map(|(_, e)| *e);
            if let Some(effect) = effect.filter(|_| there != here) {
                found.push(Difference { key: key.clone(), there, here, effect });
            }
        }
        found
    }

    /// Every key with its value; lengths in samples, so that equal ones compare equal.
    fn flat(&self) -> Vec<(String, Value)> {
        let mut config = self.resolved();
        config.run.budget = Budget::Samples(self.samples_total());
        let table: Table = toml::from_str(&config.to_toml()).expect("what was just written");
        let mut flat = Vec::new();
        flatten("", table, &mut flat);
        flat
    }
}

fn covers(shared: &str, key: &str) -> bool {
    if shared.ends_with('.') { key.starts_with(shared) } else { key == shared }
}

fn flatten(prefix: &str, table: Table, into: &mut Vec<(String, Value)>) {
    for (key, value) in table {
        match value {
            Value::Table(inner) => flatten(&format!("{prefix}{key}."), inner, into),
            other => into.push((format!("{prefix}{key}"), other)),
        }
    }
}
