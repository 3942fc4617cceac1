//! Files, their bases and the command line, merged into one table.

use std::path::{Component, Path, PathBuf};

use serde::Deserialize;
use storage::Location;
use toml::{Table, Value};

use super::node::{KeyError, TomlNode};
use super::{Config, ConfigError};

/// A config has a few kilobytes; a much larger file is not a config.
const FILE_BYTES_MAX: u64 = 1 << 20;
/// Four levels (base, size, site, experiment) are common. Symbolic links can hide a cycle.
const EXTENDS_MAX: usize = 16;
/// Tables that hold exactly one of several keys. A later file replaces such a table: after
/// `budget = { samples = .. }` in a base, `budget = { steps = .. }` leaves only the steps.
const WHOLE: [&str; 4] = ["run.budget", "optim.lr.warmup", "optim.lr.decay", "optim.lr.anneal"];

/// One file, or one `--set`.
struct Layer {
    name: String,
    table: Table,
}

impl Config {
    /// Reads a file, the files it extends, and `key=value` overrides from the command line, and
    /// checks every value. The file overrides its bases, and the command line overrides the file.
    ///
    /// # Errors
    /// [`ConfigError`] with the file and the full name of the key.
    pub fn load(file: &str, sets: &[String]) -> Result<Self, ConfigError> {
        let mut layers = Vec::new();
        read_with_bases(&Location::new(file), &mut Vec::new(), &mut layers)?;
        for argument in sets {
            layers.push(set_layer(argument)?);
        }
        merged(file, &layers, |config| {
            config.checked()?;
            config.check_foreign()
        })
    }

    /// Reads a config from the text in a checkpoint and checks every value. Accepts keys without an
    /// effect, which earlier versions accepted. Messages call the text `name`.
    ///
    /// # Errors
    /// As [`Config::load`].
    pub fn from_toml(name: &str, text: &str) -> Result<Self, ConfigError> {
        merged(name, &[parse(name, text)?], Config::checked)
    }

    /// The config as TOML, which [`Config::from_toml`] reads back to an equal one.
    ///
    /// # Panics
    /// Never: every value has a TOML form, and the checked ranges fit it.
    #[must_use]
    pub fn to_toml(&self) -> String {
        toml::to_string(self).expect("checked values have a TOML form")
    }
}

/// Pushes first the bases of a file, then the file.
fn read_with_bases(
    file: &Location,
    chain: &mut Vec<String>,
    layers: &mut Vec<Layer>,
) -> Result<(), ConfigError> {
    let name = match file.local_path() {
        Some(path) if !file.is_url() => tidy(path).display().to_string(),
        _ => file.to_string(),
    };
    let seen = chain.contains(&name);
    chain.push(name.clone());
    let refuse = |problem: &str| {
        Err(ConfigError::Extends { chain: chain.clone(), problem: problem.to_owned() })
    };
    if seen {
        return refuse("'extends' forms a cycle");
    }
    if chain.len() > EXTENDS_MAX {
        return refuse("'extends' is nested more than 16 files deep");
    }
    let mut layer = parse(&name, &read(&name)?)?;
    match layer.table.remove("extends") {
        None => {}
        Some(Value::String(base)) => {
            read_with_bases(&file.beside(&base), chain, layers)?;
        }
        Some(other) => {
            let problem = format!("expected a file name in quotes after 'extends', found {other}");
            return refuse(&problem);
        }
    }
    layers.push(layer);
    Ok(())
}

/// The path without `x/..`, so that one file has one name. Symbolic links are not followed; the
/// depth limit ends a cycle through them.
fn tidy(path: &Path) -> PathBuf {
    let mut tidy = PathBuf::new();
    for part in path.components() {
        let after_name = matches!(tidy.components().next_back(), Some(Component::Normal(_)));
        match part {
            Component::ParentDir if after_name => _ = tidy.pop(),
            Component::CurDir => {}
            _ => tidy.push(part),
        }
    }
    tidy
}

/// The text of a small file.
pub(crate) fn read(file: &str) -> Result<String, ConfigError> {
    let refuse = |source| ConfigError::Read { file: file.to_owned(), source };
    let (store, key) = storage::locate(file).map_err(refuse)?;
    let object = store.open(&key).map_err(refuse)?;
    let corrupt = |offset: u64, found: String, expected: &str| {
        refuse(storage::Error::Corrupt {
            object: object.display(),
            offset,
            found,
            expected: expected.to_owned(),
        })
    };
    if object.len_bytes() > FILE_BYTES_MAX {
        return Err(corrupt(0, format!("{} bytes", object.len_bytes()), "at most 1 MiB"));
    }
    let bytes = storage::read_all(store.as_ref(), &key).map_err(refuse)?;
    String::from_utf8(bytes).map_err(|bad| {
        let offset = bad.utf8_error().valid_up_to() as u64; // fits: at most FILE_BYTES_MAX
        corrupt(offset, "invalid UTF-8".to_owned(), "text")
    })
}

fn parse(name: &str, text: &str) -> Result<Layer, ConfigError> {
    match text.parse() {
        Ok(table) => Ok(Layer { name: name.to_owned(), table }),
        Err(error) => {
            let error: toml::de::Error = error;
            Err(ConfigError::Syntax { file: name.to_owned(), message: error.to_string() })
        }
    }
}

/// Known keys have at most four parts. Much deeper tables would overflow the stack of the parser.
const KEY_PARTS_MAX: usize = 32;

/// `a.b=v` as a table. A value that is not TOML is a string, so `--set run.dir=/tmp/x` needs no
/// quotes.
fn set_layer(argument: &str) -> Result<Layer, ConfigError> {
    let refuse = |problem: &str| {
        Err(ConfigError::Set { argument: argument.to_owned(), problem: problem.to_owned() })
    };
    let Some((key, text)) = argument.split_once('=') else {
        return refuse("expected key=value, such as optim.lr.peak=1e-3");
    };
    let (key, text) = (key.trim(), text.trim());
    if key.split('.').any(|part| part.trim().is_empty()) {
        return refuse("the key has an empty part");
    }
    if key.split('.').count() > KEY_PARTS_MAX {
        return refuse("the key has more than 32 parts");
    }
    if key == "extends" {
        return refuse("only valid in a file");
    }
    let mut value = match format!("value = {text}").parse::<Table>() {
        Ok(mut table) if table.len() == 1 => table.remove("value").expect("the one key it has"),
        _ => Value::String(text.to_owned()),
    };
    let mut parts = key.split('.').rev().map(|part| part.trim().to_owned());
    let first = parts.next_back().expect("split yields at least one part");
    for part in parts {
        value = Value::Table(Table::from_iter([(part, value)]));
    }
    let table = Table::from_iter([(first, value)]);
    Ok(Layer { name: "--set".to_owned(), table })
}

fn merged(
    file: &str,
    layers: &[Layer],
    check: impl Fn(&Config) -> Result<(), KeyError>,
) -> Result<Config, ConfigError> {
    let mut all = Table::new();
    for layer in layers {
        merge(&mut all, layer.table.clone(), "");
    }
    let config = Config::deserialize(TomlNode(Value::Table(all))).and_then(|mut config| {
        config.resolve_corpora()?;
        check(&config).map(|()| config)
    });
    config.map_err(|refusal| {
        let key = refusal.key();
        let owner = layers.iter().rev().find(|layer| holds(&layer.table, &key));
        let file = owner.map_or(file, |layer| &layer.name).to_owned();
        ConfigError::Key { file, key, problem: refusal.problem, hint: refusal.hint }
    })
}

fn merge(into: &mut Table, from: Table, prefix: &str) {
    for (key, value) in from {
        let name = if prefix.is_empty() { key.clone() } else { format!("{prefix}.{key}") };
        match (into.get_mut(&key), value) {
            (Some(Value::Table(old)), Value::Table(new)) if !WHOLE.contains(&name.as_str()) => {
                merge(old, new, &name);
            }
            (_, value) => _ = into.insert(key, value),
        }
    }
}

/// Whether a table has the key, or a value in place of the key's parent table.
fn holds(table: &Table, key: &str) -> bool {
    let (first, rest) = key.split_once('.').map_or((key, None), |(a, b)| (a, Some(b)));
    match (table.get(first), rest) {
        (None, _) => false,
        (Some(Value::Table(inner)), Some(rest)) => holds(inner, rest),
        (Some(_), _) => true,
    }
}

impl From<KeyError> for ConfigError {
    fn from(refusal: KeyError) -> Self {
        let key = refusal.key();
        let (problem, hint) = (refusal.problem, refusal.hint);
        ConfigError::Key { file: "in memory".to_owned(), key, problem, hint }
    }
}
