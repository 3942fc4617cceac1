//! The fate of each key of other systems: tables, as text.
//!
//! A line has the key, its default in that system (`-` if it has none), and its fate. A key that
//! ends in `*` covers all keys with that prefix that have no line.
//!
//! | | |
//! |---|---|
//! | `to TARGET [word=value ...]` | the config key gets the value, translated by the words if any |
//! | `as NAME TARGET` | the value is one of several that together set a config key |
//! | `on TARGET=VALUE` | it is a boolean; if it is true, the config key gets this value |
//! | `if TARGET=VALUE` | if it has a value, the config key gets this value |
//! | `is VALUE[\|VALUE ...] reason` | other values are not supported, also as items of a list |
//! | `same TARGET reason` | it is implied if it has the value of the config key |
//! | `when TARGET[=VALUE] reason` | it is implied if the config key has a value, or this value |
//! | `unless TARGET=VALUE reason` | it is implied unless the config key has this value |
//! | `ok reason` | it is implied, whatever its value |
//! | `no reason` | it is not supported, unless it is off |

use std::collections::HashMap;

const TABLES: [&str; 6] = [
    include_str!("keys/megatron.txt"),
    include_str!("keys/cpm.txt"),
    include_str!("keys/deepspeed.txt"),
    include_str!("keys/paddle.txt"),
    include_str!("keys/colossal.txt"),
    include_str!("keys/hf.txt"),
];

/// The fate of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum KeyRule {
    To { target: &'static str, words: &'static str },
    As { name: &'static str, target: &'static str },
    On { target: &'static str, value: &'static str },
    If { target: &'static str, value: &'static str },
    Is { values: &'static str, reason: &'static str },
    Same { target: &'static str, reason: &'static str },
    When { target: &'static str, value: Option<&'static str>, reason: &'static str },
    Unless { target: &'static str, value: &'static str, reason: &'static str },
    Ok(&'static str),
    No(&'static str),
}

impl KeyRule {
    /// The config key, or a part of one.
    pub(super) fn target(self) -> Option<&'static str> {
        match self {
            KeyRule::To { target, .. }
            | KeyRule::As { target, .. }
            | KeyRule::On { target, .. }
            | KeyRule::Same { target, .. }
            | KeyRule::If { target, .. } => Some(target),
            _ => None,
        }
    }

    /// Whether the value is the path of a file with more keys.
    pub(super) fn is_file(self) -> bool {
        matches!(self, KeyRule::As { name: "file" | "model_file", .. })
    }
}

#[derive(Clone, Copy, Debug)]
pub(super) struct KeyRow {
    pub(super) key: &'static str,
    pub(super) default: Option<&'static str>,
    pub(super) rule: KeyRule,
}

/// The rows of some sections; an earlier one wins.
#[derive(Debug)]
pub(super) struct Keys {
    pub(super) rows: Vec<KeyRow>,
    places: HashMap<&'static str, usize>,
    /// Rows of many keys: the text before the `*`.
    prefixes: Vec<(&'static str, usize)>,
}

impl Keys {
    pub(super) fn of(sections: &[&str]) -> Self {
        let (mut rows, mut places, mut prefixes) = (Vec::new(), HashMap::new(), Vec::new());
        for section in sections {
            for row in section_rows(section) {
                if let std::collections::hash_map::Entry::Vacant(place) = places.entry(row.key) {
                    place.insert(rows.len());
                    prefixes.extend(row.key.strip_suffix('*').map(|prefix| (prefix, rows.len())));
                    rows.push(row);
                }
            }
        }
        Keys { rows, places, prefixes }
    }

    /// The row of a key, or of a section above it with one fate.
    pub(super) fn find(&self, key: &str) -> Option<&KeyRow> {
        let whole =
            |place: &usize| matches!(self.rows[*place].rule, KeyRule::Ok(_) | KeyRule::No(_));
        let exact = self.places.get(key);
        let above = || {
            let parents = key.match_indices('.').filter_map(|(at, _)| self.places.get(&key[..at]));
            parents.rev().find(|place| whole(place))
        };
        let many = || self.prefixes.iter().find(|(prefix, _)| key.starts_with(prefix));
        let many = || many().map(|(_, place)| place);
        exact.or_else(many).or_else(above).map(|place| &self.rows[*place])
    }

    pub(super) fn names(&self) -> Vec<&'static str> {
        self.rows.iter().map(|row| row.key).collect()
    }
}

/// The config key for the key `name` of other programs, written with hyphens or underscores, in any
/// section.
pub(crate) fn key_of_other_programs(name: &str) -> Option<&'static str> {
    let plain = |key: &str| key.rsplit('.').next().unwrap_or(key).replace('_', "-");
    let name = plain(&name.to_lowercase());
    let rows = TABLES.iter().flat_map(|table| table.lines()).filter_map(row);
    let target = |row: KeyRow| match row.rule {
        KeyRule::To { target, .. } | KeyRule::As { target, .. } => Some(target),
        _ => None,
    };
    rows.filter(|row| plain(&row.key.to_lowercase()) == name).find_map(target)
}

fn section_rows(section: &str) -> impl Iterator<Item = KeyRow> {
    let lines = TABLES.iter().flat_map(|table| table.lines());
    let head = format!("[{section}]");
    let inside = lines.skip_while(move |line| *line != head).skip(1);
    inside.take_while(|line| !line.starts_with('[')).filter_map(row)
}

fn row(line: &'static str) -> Option<KeyRow> {
    let line = line.split('#').next()?.trim();
    let (key, rest) = word(line)?;
    let (default, rest) = word(rest)?;
    let (verb, rest) = word(rest)?;
    let (first, after) = rest.split_once(' ').unwrap_or((rest, ""));
    let rule = match verb {
        "to" => KeyRule::To { target: first, words: after },
        "as" => KeyRule::As { name: first, target: after },
        "on" | "if" => {
            let (target, value) = first.split_once('=')?;
            if verb == "on" { KeyRule::On { target, value } } else { KeyRule::If { target, value } }
        }
        "is" => KeyRule::Is { values: first, reason: after },
        "same" => KeyRule::Same { target: first, reason: after },
        "when" => {
            let (target, value) = first.split_once('=').unzip();
            KeyRule::When { target: target.unwrap_or(first), value, reason: after }
        }
        "unless" => {
            let (target, value) = first.split_once('=')?;
            KeyRule::Unless { target, value, reason: after }
        }
        "ok" => KeyRule::Ok(rest),
        "no" => KeyRule::No(rest),
        _ => return None,
    };
    Some(KeyRow { key, default: (default != "-").then_some(default), rule })
}

fn word(text: &'static str) -> Option<(&'static str, &'static str)> {
    let (word, rest) = text.split_once(char::is_whitespace)?;
    Some((word, rest.trim_start()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A line that cannot be parsed would be an unknown key.
    #[test]
    fn every_line_of_the_tables_is_a_row() {
        for line in TABLES.iter().flat_map(|table| table.lines()) {
            let text = !line.is_empty() && !line.starts_with(['#', '[']);
            assert!(!text || row(line).is_some(), "{line}");
        }
        assert!(row("key - go somewhere").is_none());
    }
}
