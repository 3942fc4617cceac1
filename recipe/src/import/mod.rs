//! Import of the configs of other systems.
//!
//! A user who moves a run must know the effect of every key. So each key of the input has a fate:
//! it is mapped to a key of this config, it is implied, or it is refused with the reason. Unknown
//! keys are refused by name, with the nearest known key: DeepSpeed ignored them for a long time,
//! and its own examples have such keys. If a key is missing, the default of *its* system is written
//! out.
//!
//! In reading order: `keys` holds the tables, `read` turns files into keys and values with `shell`,
//! `launch`, `json`, `yaml` and `python`, and `kind` checks that a value is what its program
//! expects. `assemble` combines keys that belong together: `batch` the batch identity, `schedule`
//! the learning rate with the `schedulers` of DeepSpeed and transformers, `data` input and output,
//! and `names` tokenizers and models that files only name. `report` formats the result.

mod assemble;
mod batch;
mod data;
mod json;
pub(crate) mod keys;
mod kind;
mod launch;
mod names;
mod python;
mod read;
mod report;
mod schedule;
mod schedulers;
mod shell;
mod yaml;

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::str::FromStr;

use toml::{Table, Value};

use crate::config::{ConfigError, nearest};
use keys::{KeyRow, KeyRule, Keys};
use kind::{Kind, Notation, boolean, is_off};
pub use shell::{ScriptCommand, command_of_script};

/// The system of a config.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConfigFormat {
    /// Megatron-LM's flags, in a launch script or alone.
    Megatron,
    /// The script of CPM-1 or CPM-2, with its JSON files.
    Cpm,
    /// `ds_config.json`.
    Deepspeed,
    /// PaddleFleetX's YAML.
    Paddle,
    /// Colossal-AI's Python file.
    Colossal,
    /// `config.json` of a model, and training arguments as JSON.
    Hf,
}

impl ConfigFormat {
    /// All formats, by name.
    pub const NAMES: [(&str, ConfigFormat); 6] = [
        ("megatron", ConfigFormat::Megatron),
        ("cpm", ConfigFormat::Cpm),
        ("deepspeed", ConfigFormat::Deepspeed),
        ("paddle", ConfigFormat::Paddle),
        ("colossal", ConfigFormat::Colossal),
        ("hf", ConfigFormat::Hf),
    ];
}

impl FromStr for ConfigFormat {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = ConfigFormat::NAMES.iter().find(|(name, _)| *name == text);
        found.map(|(_, source)| *source).ok_or_else(|| {
            format!("expected one of {}", ConfigFormat::NAMES.map(|(name, _)| name).join(", "))
        })
    }
}

/// The fate of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum KeyStatus {
    /// It sets a config key, or a part of one.
    Mapped,
    /// It is missing, and the default of its system differs from the default here.
    Default,
    /// The run behaves this way in any case.
    Implied,
    /// It is not supported.
    Refused,
}

/// A key of the input.
#[derive(Clone, Debug, PartialEq)]
pub struct KeyReport {
    /// The file, or the name of another source.
    pub file: String,
    /// The key, as written there.
    pub key: String,
    /// Its value.
    pub value: String,
    /// Its fate.
    pub fate: KeyStatus,
    /// The config key, or the reason.
    pub text: String,
}

/// An imported run. Displayed as TOML, with the fate of every key in comments.
#[derive(Clone, Debug, PartialEq)]
pub struct Imported {
    /// The config.
    pub config: Table,
    /// The keys of the input, in the order in which they were read.
    pub fates: Vec<KeyReport>,
    /// Config keys that the input lacks and that have no default.
    pub missing: Vec<&'static str>,
    /// Notes for the user.
    pub notes: Vec<String>,
}

impl Imported {
    /// Whether every key was mapped or implied and nothing is missing.
    #[must_use]
    pub fn is_whole(&self) -> bool {
        self.missing.is_empty() && self.fates.iter().all(|key| key.fate != KeyStatus::Refused)
    }
}

/// Reads the files of one run. `world` is the world size, if no file gives it.
///
/// # Errors
/// [`ConfigError`] for a file that cannot be parsed in its format.
pub fn import(
    source: ConfigFormat,
    files: &[String],
    world: Option<u64>,
) -> Result<Imported, ConfigError> {
    import_script(source, files, world, &[])
}

/// As [`import`], with these arguments of the launch script. Without arguments they are unknown.
///
/// # Errors
/// As [`import`].
pub fn import_script(
    source: ConfigFormat,
    files: &[String],
    world: Option<u64>,
    arguments: &[String],
) -> Result<Imported, ConfigError> {
    let mut input = read::read(source, files, arguments)?;
    launch::take_given(&mut input.launch, world);
    let notes = std::mem::take(&mut input.notes);
    let fates = std::mem::take(&mut input.doubts);
    let mut build = Build { notes, fates, ..Build::default() };
    build.unexecuted(&input.blocks);
    build.training = source == ConfigFormat::Hf && input.sections.contains(&"training");
    let own = Keys::of(&input.sections);
    for (keys, given) in [(&Keys::of(&["launch"]), &input.launch), (&own, &input.given)] {
        for given in given {
            let notation = notation_of(source, input.json.get(&given.file).copied());
            build.follow(keys, given, notation);
        }
    }
    build.defaults(&own, &input.given);
    if build.training {
        build.agree(&input.given);
    }
    if let Some(world) = world {
        build.facts.insert("world", Value::Integer(i64::try_from(world).unwrap_or(i64::MAX)));
    }
    build.assemble(source, &input);
    Ok(build.finish())
}

/// `json` is the section of the tables that a JSON file belongs to.
fn notation_of(source: ConfigFormat, json: Option<&str>) -> Notation {
    match source {
        ConfigFormat::Paddle => Notation::Yaml,
        ConfigFormat::Colossal => Notation::Python,
        _ if json == Some("deepspeed") => Notation::Pydantic,
        _ if json.is_some() => Notation::Json,
        ConfigFormat::Hf => Notation::Transformers,
        _ => Notation::Argparse,
    }
}

/// A key, its value and its position.
#[derive(Clone, Debug)]
struct SourceKey {
    file: String,
    key: String,
    /// The key as in the tables.
    name: String,
    value: Value,
}

#[derive(Debug, Default)]
struct Build {
    config: Table,
    /// Values that are combined into config keys, by their names in the tables.
    facts: BTreeMap<&'static str, Value>,
    /// The reports of their keys.
    keys: BTreeMap<&'static str, Vec<usize>>,
    /// The values that were used.
    used: RefCell<BTreeSet<String>>,
    /// The reports and values of keys that are implied by the complete config.
    conditional: Vec<(usize, KeyRule, Value)>,
    /// Whether there are training arguments of transformers.
    training: bool,
    fates: Vec<KeyReport>,
    notes: Vec<String>,
}

impl Build {
    /// Values that code of a Python file sets are unknown.
    fn unexecuted(&mut self, blocks: &[(String, usize, String)]) {
        for (file, line, code) in blocks {
            self.fates.push(KeyReport {
                file: file.clone(),
                key: format!("line {line}"),
                value: code.clone(),
                fate: KeyStatus::Refused,
                text: "code is not executed (hint: set what it sets)".to_owned(),
            });
        }
    }

    fn follow(&mut self, keys: &Keys, given: &SourceKey, notation: Notation) {
        let (fate, text) = match keys.find(&given.name) {
            Some(row) => self.apply(row, &given.value, notation),
            None if given.value == Value::Array(Vec::new()) => {
                (KeyStatus::Implied, "empty".to_owned())
            }
            None => (KeyStatus::Refused, unknown_key(keys, &given.name)),
        };
        let (file, key, value) = (given.file.clone(), given.key.clone(), shown(&given.value));
        self.fates.push(KeyReport { file, key, value, fate, text });
    }

    fn apply(&mut self, row: &KeyRow, value: &Value, notation: Notation) -> (KeyStatus, String) {
        let refused = |text: String| (KeyStatus::Refused, text);
        let implied = |text: &str| (KeyStatus::Implied, text.to_owned());
        if let KeyRule::Ok(reason) = row.rule {
            return implied(reason);
        }
        if let (true, Some(target)) = (value.to_string().contains("${"), row.rule.target())
            && !row.rule.is_file()
        {
            let reason = "comes from outside the script (hint: set it)";
            return refused(format!("{target}: {} {reason}", shown(value)));
        }
        if value.as_str() == Some("auto") && notation == Notation::Pydantic {
            return self.auto(row);
        }
        let is_empty = value.as_array().is_some_and(Vec::is_empty);
        let is_no_text = is_null(value) || is_empty || value.as_str() == Some("");
        if is_no_text && !matches!(row.rule, KeyRule::No(_)) {
            return implied("not set");
        }
        let kind = Kind::of(row.rule);
        let read = kind.read(value, notation);
        let expected = |target: &str, expected: &str| {
            refused(format!("{target}: expected {expected}, found {}", found(value)))
        };
        match row.rule {
            // A file is identified by the last part of its path.
            KeyRule::As { name, target } if row.rule.is_file() => {
                self.facts.insert(name, Value::String(shown(value)));
                (KeyStatus::Mapped, target.to_owned())
            }
            KeyRule::To { target, words } => match read.map(|value| translate(words, &value)) {
                Ok(Ok(value)) => self.put(target, value),
                Ok(Err(words)) => expected(target, &words),
                Err(kind) => expected(target, kind),
            },
            KeyRule::As { name, target } => match read {
                Ok(value) => self.learn(name, target, value),
                Err(kind) => expected(target, kind),
            },
            KeyRule::On { target, value } => match read {
                Ok(Value::Boolean(false)) => implied("off"),
                Ok(_) => self.put(target, plain(value)),
                Err(kind) => expected(target, kind),
            },
            KeyRule::If { target, value } => self.put(target, plain(value)),
            KeyRule::Is { values, .. } if is_among(values, value, notation) => implied("always so"),
            KeyRule::Is { values, reason } => {
                refused(format!("expected {}: {reason}", values.replace('|', " or ")))
            }
            KeyRule::No(_) | KeyRule::When { .. } | KeyRule::Unless { .. }
                if is_off(value, notation) =>
            {
                implied("off")
            }
            KeyRule::Same { reason, .. }
            | KeyRule::When { reason, .. }
            | KeyRule::Unless { reason, .. } => {
                self.conditional.push((self.fates.len(), row.rule, value.clone()));
                implied(reason)
            }
            KeyRule::Ok(reason) => implied(reason),
            KeyRule::No(reason) => refused(reason.to_owned()),
        }
    }

    /// One of several values that are combined into a config key.
    fn learn(&mut self, name: &'static str, target: &str, value: Value) -> (KeyStatus, String) {
        if let Some(other) = self.facts.get(name).filter(|other| !is_same(other, &value)) {
            let text = format!("{target}: another key sets {}", shown(other));
            return (KeyStatus::Refused, text);
        }
        self.facts.insert(name, value);
        // The report is updated too.
        self.keys.entry(name).or_default().push(self.fates.len());
        (KeyStatus::Mapped, target.to_owned())
    }

    fn put(&mut self, target: &str, value: Value) -> (KeyStatus, String) {
        let other = get(&self.config, target).cloned();
        match other.filter(|other| !is_same(other, &value)) {
            Some(other) => {
                (KeyStatus::Refused, format!("{target}: another key sets {}", shown(&other)))
            }
            None => {
                set(&mut self.config, target, value);
                (KeyStatus::Mapped, target.to_owned())
            }
        }
    }

    /// The defaults of missing keys in their system, if their section has any key.
    fn defaults(&mut self, keys: &Keys, given: &[SourceKey]) {
        let sections: Vec<&str> = given.iter().map(|given| section_of(&given.name)).collect();
        for row in &keys.rows {
            let Some(default) = row.default else { continue };
            let known = match row.rule {
                KeyRule::To { target, .. } => get(&self.config, target).is_some(),
                KeyRule::As { name, .. } => self.facts.contains_key(name),
                _ => true,
            };
            let named = given.iter().any(|given| given.name == row.key);
            let section = section_of(row.key);
            let is_inside = |given: &&str| {
                section.is_empty() || given.strip_prefix(section).is_some_and(is_end_of_section)
            };
            if known || named || !sections.iter().any(is_inside) {
                continue;
            }
            let value = match default.strip_prefix('[').and_then(|list| list.strip_suffix(']')) {
                Some(list) => Value::Array(list.split(',').map(plain).collect()),
                None => plain(default),
            };
            let (fate, text) = self.apply(row, &value, Notation::Python);
            let fate = if fate == KeyStatus::Mapped { KeyStatus::Default } else { fate };
            let (file, key) = ("default".to_owned(), row.key.to_owned());
            self.fates.push(KeyReport { file, key, value: shown(&value), fate, text });
        }
    }
}

fn is_end_of_section(rest: &str) -> bool {
    rest.is_empty() || rest.starts_with('.')
}

fn section_of(key: &str) -> &str {
    key.rsplit_once('.').map_or("", |(section, _)| section)
}

fn unknown_key(keys: &Keys, name: &str) -> String {
    // In dotted keys the last part is compared.
    let (section, last) = name.rsplit_once('.').map_or((None, name), |(a, b)| (Some(a), b));
    let beside = keys.names().into_iter().filter(|key| {
        section.is_none_or(|section| section_of(key) == section) || !key.contains('.')
    });
    let names: Vec<&str> =
        beside.map(|key| key.rsplit_once('.').map_or(key, |(_, last)| last)).collect();
    let hint = nearest(last, &names);
    if hint.starts_with("did you mean") {
        format!("unknown key (hint: {hint})")
    } else {
        "unknown key".to_owned()
    }
}

/// Translates by the words of a table, if there are any.
fn translate(words: &'static str, value: &Value) -> Result<Value, String> {
    if words.is_empty() {
        return Ok(value.clone());
    }
    let pairs = || words.split_whitespace().filter_map(|pair| pair.split_once('='));
    let text = shown(value);
    let found = pairs().find(|(word, _)| *word == text).map(|(_, target)| plain(target));
    found.ok_or_else(|| pairs().map(|(word, _)| word).collect::<Vec<_>>().join(" or "))
}

/// Parses a value as a number, a boolean or else a text.
fn plain(text: &str) -> Value {
    let number = text.starts_with(|c: char| c.is_ascii_digit() || c == '-' || c == '.');
    match text {
        "true" => Value::Boolean(true),
        "false" => Value::Boolean(false),
        _ if number => {
            let whole = text.replace('_', "").parse().map(Value::Integer).ok();
            let real = || text.parse().map(Value::Float).ok();
            whole.or_else(real).unwrap_or_else(|| Value::String(text.to_owned()))
        }
        _ => Value::String(text.to_owned()),
    }
}

fn float(value: &Value) -> Option<f64> {
    match value {
        Value::Integer(number) => Some(*number as f64),
        Value::Float(number) => Some(*number),
        _ => None,
    }
}

/// The text of a value without the quotes of TOML.
fn shown(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

/// A value in a message. A flag without a value is true.
fn found(value: &Value) -> String {
    match value {
        Value::String(text) => format!("'{text}'"),
        Value::Boolean(true) => "true, or no value".to_owned(),
        other => other.to_string(),
    }
}

fn is_same(a: &Value, b: &Value) -> bool {
    float(a).zip(float(b)).map_or_else(|| shown(a) == shown(b), |(a, b)| a == b)
}

/// Whether a value, or each item of a list, is among the supported ones.
fn is_among(values: &str, value: &Value, notation: Notation) -> bool {
    let is_one = |item: &Value| values.split('|').any(|only| is_same_as(only, item, notation));
    is_one(value) || value.as_array().is_some_and(|items| items.iter().all(is_one))
}

/// Whether a value is this one.
fn is_same_as(only: &str, value: &Value, notation: Notation) -> bool {
    let only = plain(only);
    match only {
        Value::Boolean(only) => boolean(value, notation) == Ok(only),
        only => is_same(&only, value),
    }
}

/// How programs read an empty value.
fn is_null(value: &Value) -> bool {
    value.as_str() == Some("null")
}

fn get<'a>(table: &'a Table, key: &str) -> Option<&'a Value> {
    match key.split_once('.') {
        None => table.get(key),
        Some((first, rest)) => get(table.get(first)?.as_table()?, rest),
    }
}

fn set(table: &mut Table, key: &str, value: Value) {
    match key.split_once('.') {
        None => _ = table.insert(key.to_owned(), value),
        Some((first, rest)) => {
            let inner = table.entry(first).or_insert_with(|| Value::Table(Table::new()));
            if let Value::Table(inner) = inner {
                set(inner, rest, value);
            }
        }
    }
}
