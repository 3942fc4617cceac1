//! Reads the files of other systems as keys and values.

use std::collections::BTreeMap;

use storage::Location;
use toml::{Table, Value};

use super::{
    ConfigFormat, KeyReport, KeyStatus, SourceKey, json, launch, plain, python, shell, yaml,
};
use crate::config::{ConfigError, read_text};

/// A base, a size and an experiment are common; more is probably a cycle.
const BASES_MAX: usize = 16;

/// The content of the files.
#[derive(Debug, Default)]
pub(super) struct Input {
    pub(super) given: Vec<SourceKey>,
    /// The keys that give the number of ranks.
    pub(super) launch: Vec<SourceKey>,
    /// The sections of the tables with the keys.
    pub(super) sections: Vec<&'static str>,
    /// Keys of a command line that override those of the files.
    overrides: Vec<SourceKey>,
    /// The arguments of a script.
    arguments: Vec<String>,
    /// The program that a script starts.
    pub(super) program: Option<String>,
    /// The last parts of the paths of the files.
    pub(super) names: Vec<String>,
    /// Those of JSON files, with the section of the tables with their keys.
    pub(super) json: BTreeMap<String, &'static str>,
    /// Blocks of code that are not executed: file, line and first line.
    pub(super) blocks: Vec<(String, usize, String)>,
    pub(super) notes: Vec<String>,
    /// Reasons why the result is uncertain.
    pub(super) doubts: Vec<KeyReport>,
}

pub(super) fn read(
    source: ConfigFormat,
    files: &[String],
    arguments: &[String],
) -> Result<Input, ConfigError> {
    let mut input = Input { arguments: arguments.to_vec(), ..Input::default() };
    for file in files {
        let location = Location::new(file);
        let name = location.file_name();
        input.names.push(name.to_owned());
        input.add(source, file, name).map_err(|error| match error {
            Failure::Read(error) => error,
            Failure::Syntax(message) => ConfigError::Syntax { file: file.clone(), message },
        })?;
    }
    for key in std::mem::take(&mut input.overrides) {
        input.given.retain(|given| given.name != key.name);
        input.given.push(key);
    }
    // The first section with a key wins, and the section of a program precedes those that it
    // shares.
    let order = ["cpm", "cpm2-model", "megatron"];
    input.sections.sort_by_key(|section| order.iter().position(|name| name == section));
    input.sections.dedup();
    Ok(input)
}

enum Failure {
    Read(ConfigError),
    Syntax(String),
}

impl From<String> for Failure {
    fn from(message: String) -> Self {
        Failure::Syntax(message)
    }
}

impl Input {
    fn add(&mut self, source: ConfigFormat, file: &str, name: &str) -> Result<(), Failure> {
        let text = read_text(file).map_err(Failure::Read)?;
        match source {
            ConfigFormat::Paddle | ConfigFormat::Colossal if is_script(name, &text) => {
                self.script(source, file, name, &text)?;
            }
            ConfigFormat::Paddle => {
                self.sections.push("paddle");
                let table = with_bases(file, &text, 0)?;
                self.flatten(name, "", table);
            }
            ConfigFormat::Colossal => {
                self.sections.push("colossal");
                let python::Assignments { names, blocks } = python::read(&text)?;
                self.flatten(name, "", names);
                self.blocks
                    .extend(blocks.into_iter().map(|(line, code)| (name.to_owned(), line, code)));
            }
            _ if text.trim_start().starts_with('{') => {
                let Value::Table(table) = json::read(&text)? else {
                    return Err("expected a JSON object".to_owned().into());
                };
                let sections = json_sections(source, &table);
                self.json.extend(sections.first().map(|section| (name.to_owned(), *section)));
                self.sections.extend(sections);
                self.flatten(name, "", table);
            }
            _ => self.script(source, file, name, &text)?,
        }
        Ok(())
    }

    fn flatten(&mut self, file: &str, prefix: &str, table: Table) {
        for (key, value) in table {
            let key = format!("{prefix}{key}");
            match value {
                Value::Table(inner) if !inner.is_empty() => {
                    self.flatten(file, &format!("{key}."), inner);
                }
                Value::Table(_) => self.push(file, &key, &key, Value::Array(Vec::new())),
                value => self.push(file, &key, &key, value),
            }
        }
    }

    fn push(&mut self, file: &str, key: &str, name: &str, value: Value) {
        let (file, key, name) = (file.to_owned(), key.to_owned(), name.to_owned());
        self.given.push(SourceKey { file, key, name, value });
    }

    fn script(
        &mut self,
        source: ConfigFormat,
        path: &str,
        file: &str,
        text: &str,
    ) -> Result<(), Failure> {
        let script = shell::read(text, &self.arguments)?;
        if script.command.is_empty() {
            return Err("expected JSON, flags, or a script that runs a Python program"
                .to_owned()
                .into());
        }
        self.sections.extend((source == ConfigFormat::Cpm).then_some("cpm"));
        self.sections.push(match source {
            ConfigFormat::Hf => "training",
            ConfigFormat::Paddle => "paddle",
            ConfigFormat::Colossal => "colossal",
            _ => "megatron",
        });
        self.notes.extend(script.notes.iter().map(|note| format!("{file}: {note}")));
        for (key, text) in &script.doubts {
            self.add_uncertainty(file, key, text);
        }
        let program = shell::program::program_at(&script.command);
        let has_config = matches!(source, ConfigFormat::Paddle | ConfigFormat::Colossal);
        // Its name is that of a model only if its flags are those of the model.
        self.program = program.filter(|_| !has_config).map(|at| script.command[at].clone());
        let launcher = &script.command[..program.unwrap_or(0)];
        self.launch.extend(launch::keys(&script, launcher, file, path));
        let arguments = &script.command[program.map_or(0, |at| at + 1)..];
        if source == ConfigFormat::Paddle {
            self.overrides.extend(paddle_arguments(file, arguments));
            return Ok(());
        }
        for (key, name, value) in flags(&self.known(file, arguments)) {
            let name = if source == ConfigFormat::Hf { name.replace('-', "_") } else { name };
            // Of duplicate flags the last counts, as in argparse.
            self.given.retain(|given| given.file != file || given.name != name);
            self.push(file, &key, &name, value);
        }
        Ok(())
    }

    fn add_uncertainty(&mut self, file: &str, key: &str, text: &str) {
        let (file, key, text) = (file.to_owned(), key.to_owned(), text.to_owned());
        let (value, fate) = (String::new(), KeyStatus::Refused);
        self.doubts.push(KeyReport { file, key, value, fate, text });
    }

    /// Arguments, without unknown ones that belong to no flag: an unknown one may be several
    /// arguments, or a flag.
    fn known(&mut self, file: &str, arguments: &[String]) -> Vec<String> {
        let mut known: Vec<String> = Vec::new();
        for argument in arguments {
            let is_flag = |it: &&String| it.starts_with("--");
            let flag = known.iter().rev().find(is_flag).map_or("", String::as_str);
            let is_list = ["data", "rampup", "betas"].iter().any(|part| flag.contains(part));
            let is_next = known.last().is_some_and(|it| it == flag && !it.contains('='));
            let is_value = is_list || is_next;
            let is_alone = argument.starts_with("${") && argument.ends_with('}');
            if is_alone && !is_value && argument.matches('}').count() == 1 {
                self.add_uncertainty(
                    file,
                    argument,
                    "arguments from outside of the script are not known",
                );
            } else {
                known.push(argument.clone());
            }
        }
        known
    }
}

/// Whether a file of a system with other configs is a launch script.
fn is_script(name: &str, text: &str) -> bool {
    let endings = [".sh", ".bash", ".slurm", ".sbatch"];
    let is_shell = |word: &str| ["sh", "bash", "dash", "zsh"].contains(&shell::program::base(word));
    let first = text.lines().next().and_then(|line| line.strip_prefix("#!"));
    endings.iter().any(|ending| name.ends_with(ending))
        || first.is_some_and(|line| line.split_whitespace().any(is_shell))
}

/// The arguments of PaddleFleetX's programs: `-c FILE`, and `-o KEY=VALUE` with keys of the file.
fn paddle_arguments(file: &str, words: &[String]) -> Vec<SourceKey> {
    let mut keys = Vec::new();
    let mut push = |key: &str, name: &str, value: Value| {
        let [file, key, name] = [file, key, name].map(str::to_owned);
        keys.push(SourceKey { file, key, name, value });
    };
    let mut words = words.iter().map(String::as_str).peekable();
    while let Some(word) = words.next() {
        let given = word.split_once('=').filter(|_| word.starts_with("--"));
        let (flag, value) = given.map_or((word, None), |(flag, value)| (flag, Some(value)));
        let value = value.or_else(|| words.next_if(|next| !next.starts_with('-')));
        let value = value.unwrap_or_default();
        match (flag, value.split_once('=')) {
            ("-c" | "--config", _) => push(flag, "config", Value::String(value.to_owned())),
            ("-o" | "--override", Some((key, value))) => push(key, key, python::literal(value)),
            _ => push(flag, flag.trim_start_matches('-'), Value::String(value.to_owned())),
        }
    }
    keys
}

/// `--key value...`, `--key=value` and `--key` alone: the key as written, the key as in the tables,
/// and the value.
fn flags(words: &[String]) -> Vec<(String, String, Value)> {
    let mut flags: Vec<(String, String, Vec<Value>)> = Vec::new();
    for word in words {
        match word.strip_prefix("--") {
            Some(flag) => {
                let (key, value) = flag.split_once('=').map_or((flag, None), |(k, v)| (k, Some(v)));
                let name = key.replace('_', "-").to_ascii_lowercase();
                flags.push((format!("--{key}"), name, value.map(argument).into_iter().collect()));
            }
            None => {
                if let Some((_, _, values)) = flags.last_mut() {
                    values.push(argument(word));
                }
            }
        }
    }
    let one = |mut values: Vec<Value>| match values.len() {
        0 => Value::Boolean(true),
        1 => values.remove(0),
        _ => Value::Array(values),
    };
    flags.into_iter().map(|(key, name, values)| (key, name, one(values))).collect()
}

/// Parses a number or a text. Whether a text is a boolean depends on the program.
fn argument(word: &str) -> Value {
    match plain(word) {
        Value::Boolean(_) => Value::String(word.to_owned()),
        value => value,
    }
}

fn json_sections(source: ConfigFormat, table: &Table) -> Vec<&'static str> {
    if source == ConfigFormat::Cpm && table.contains_key("d_model") {
        return vec!["cpm2-model"];
    }
    if source != ConfigFormat::Hf {
        return vec!["deepspeed"];
    }
    match table.get("model_type").and_then(Value::as_str) {
        Some("gpt2") => vec!["gpt2", "every"],
        Some("llama") => vec!["llama", "every"],
        Some("t5" | "mt5") => vec!["t5", "every"],
        Some("bert") => vec!["bert", "every"],
        Some(_) => vec!["every"],
        None if table.contains_key("zero_optimization") => vec!["deepspeed"],
        None => vec!["training"],
    }
}

/// A YAML file merged over its `_base_`.
fn with_bases(file: &str, text: &str, depth: usize) -> Result<Table, Failure> {
    let mut table = yaml::read(text)?;
    let Some(base) = table.remove("_base_") else { return Ok(table) };
    let base = base.as_str().ok_or("expected a file name after _base_".to_owned())?;
    if depth == BASES_MAX {
        return Err("_base_ is nested more than 16 files deep".to_owned().into());
    }
    let path = Location::new(file).beside(base).to_string();
    let text = read_text(&path).map_err(Failure::Read)?;
    let mut all = with_bases(&path, &text, depth + 1)?;
    merge(&mut all, table);
    Ok(all)
}

fn merge(into: &mut Table, from: Table) {
    for (key, value) in from {
        match (into.get_mut(&key), value) {
            (Some(Value::Table(old)), Value::Table(new)) => merge(old, new),
            (_, value) => _ = into.insert(key, value),
        }
    }
}
