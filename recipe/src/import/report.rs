use std::collections::BTreeSet;
use std::fmt;

use toml::{Table, Value};

use super::{Imported, KeyStatus, get, shown};

/// Sections of the config, in the order of the documentation.
const SECTIONS: [&str; 10] = [
    "run",
    "model",
    "data",
    "batch",
    "parallel",
    "precision",
    "optim",
    "checkpoint",
    "eval",
    "log",
];

impl Imported {
    /// The config as TOML, without the fates.
    #[must_use]
    pub fn to_toml(&self) -> String {
        let sections = SECTIONS.iter().filter_map(|name| {
            let section = self
                .config
                .get(*name)
                .filter(|value| value.as_table().is_none_or(|table| !table.is_empty()))?;
            let alone = Table::from_iter([((*name).to_owned(), section.clone())]);
            toml::to_string(&alone).ok()
        });
        sections.collect::<Vec<_>>().join("\n")
    }
}

impl Imported {
    /// The refused and missing keys, in one line.
    #[must_use]
    pub fn problems(&self) -> Option<String> {
        let refused = self.fates.iter().filter(|key| key.fate == KeyStatus::Refused);
        let mut names: Vec<_> = refused.map(|key| storage::printable(&key.key)).collect();
        let mut seen = BTreeSet::new();
        names.retain(|name| seen.insert(name.clone()));
        let keys = |count: usize| if count == 1 { "key" } else { "keys" };
        let mut parts = Vec::new();
        if !names.is_empty() {
            let (count, names) = (names.len(), names.join(", "));
            parts.push(format!("cannot follow {count} {}: {names}", keys(count)));
        }
        if !self.missing.is_empty() {
            let (count, names) = (self.missing.len(), self.missing.join(", "));
            parts.push(format!("{count} required {} missing: {names}", keys(count)));
        }
        let all = parts.join("; ");
        (!parts.is_empty()).then(|| format!("{all} (hint: the reasons are in the output)"))
    }
}

impl fmt::Display for Imported {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.to_toml())?;
        if !self.missing.is_empty() {
            writeln!(f, "\n# required keys that no file sets: {}", self.missing.join(", "))?;
        }
        for (fate, title) in [
            (KeyStatus::Refused, "refused"),
            (KeyStatus::Mapped, "mapped"),
            (KeyStatus::Default, "default of the other system"),
            (KeyStatus::Implied, "implied"),
        ] {
            let keys: Vec<_> = self.fates.iter().filter(|key| key.fate == fate).collect();
            if keys.is_empty() {
                continue;
            }
            writeln!(f, "\n# {title}")?;
            for key in keys {
                let sign = if key.value.is_empty() { "" } else { " = " };
                let left = format!("{}: {}{sign}{}", key.file, key.key, key.value);
                writeln!(f, "#   {:<60} {}", left.trim_end(), self.right(key.fate, &key.text))?;
            }
        }
        for (at, note) in self.notes.iter().enumerate() {
            let gap = if at == 0 { "\n# notes\n" } else { "" };
            writeln!(f, "{gap}#   {note}")?;
        }
        Ok(())
    }
}

impl Imported {
    /// The fate of a key: the config key with its value, or the reason.
    fn right(&self, fate: KeyStatus, text: &str) -> String {
        let mapped = matches!(fate, KeyStatus::Mapped | KeyStatus::Default);
        match get(&self.config, text).filter(|_| mapped) {
            Some(Value::Table(table)) => format!("{text} = {}", inline(table)),
            Some(value) => format!("{text} = {value}"),
            None => text.to_owned(),
        }
    }
}

fn inline(table: &Table) -> String {
    let pairs = table.iter().map(|(key, value)| format!("{key} = {}", shown(value)));
    format!("{{ {} }}", pairs.collect::<Vec<_>>().join(", "))
}
