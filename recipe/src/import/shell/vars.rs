//! Variables of a script: texts, arrays and maps, exported and read-only.

use std::collections::{BTreeMap, HashMap, HashSet};

/// Maximum length of a text of a script, and of items of an array.
pub(super) const TEXT_BYTES_MAX: usize = 1 << 20;

/// Bash has no such limit; scripts of flags are far below it.
const ITEMS_MAX: usize = 1 << 14;

/// Every character of a text is compared with every one of `IFS`.
const SEPARATORS_BYTES_MAX: usize = 64;

/// The value of a name.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Variable {
    Text(String),
    Items(BTreeMap<usize, String>),
    /// `declare -A`: bash lists its items in an unspecified order.
    Map(BTreeMap<String, String>),
}

/// Variables, and facts about those without a value.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Variables {
    values: HashMap<String, Variable>,
    /// Variables that the script assigns somewhere: without a value they are empty. All others are
    /// from outside.
    pub(super) own: HashSet<String>,
    pub(super) exported: HashSet<String>,
    read_only: HashSet<String>,
    numbers: HashSet<String>,
    /// Variables from outside that were treated as unset, because the script has a default.
    pub(super) defaulted: Vec<String>,
}

impl Variables {
    pub(super) fn get(&self, name: &str) -> Option<&Variable> {
        self.values.get(name)
    }

    /// Whether the script never assigns it.
    pub(super) fn is_outside(&self, name: &str) -> bool {
        !self.values.contains_key(name) && !self.own.contains(name)
    }

    pub(super) fn is_map(&self, name: &str) -> bool {
        matches!(self.values.get(name), Some(Variable::Map(_)))
    }

    /// `$NAME`; a marker for a variable from outside, `None` for an unset one.
    pub(super) fn text(&self, name: &str) -> Option<String> {
        match self.values.get(name) {
            Some(Variable::Text(text)) => Some(text.clone()),
            Some(Variable::Items(items)) => items.get(&0).cloned(),
            Some(Variable::Map(items)) => items.get("0").cloned(),
            None => self.is_outside(name).then(|| super::marker(name)),
        }
    }

    /// `${NAME[index]}`. The index of an array is a number and may count from the end.
    pub(super) fn element(&self, name: &str, index: &str) -> Option<String> {
        match self.values.get(name) {
            Some(Variable::Map(items)) => items.get(index).cloned(),
            Some(Variable::Items(items)) => {
                let at = place(items, index.parse().ok()?)?;
                items.get(&at).cloned()
            }
            Some(Variable::Text(text)) => ["0", "-1"].contains(&index).then(|| text.clone()),
            None => self.is_outside(name).then(|| super::marker(&format!("{name}[{index}]"))),
        }
    }

    /// `"${NAME[@]}"`
    pub(super) fn items(&self, name: &str) -> Vec<String> {
        match self.values.get(name) {
            Some(Variable::Text(text)) => vec![text.clone()],
            Some(Variable::Items(items)) => items.values().cloned().collect(),
            Some(Variable::Map(items)) if items.len() > 1 => vec![super::marker(name)],
            Some(Variable::Map(items)) => items.values().cloned().collect(),
            None if self.is_outside(name) => vec![super::marker(&format!("{name}[@]"))],
            None => Vec::new(),
        }
    }

    /// `"${!NAME[@]}"`
    pub(super) fn keys(&self, name: &str) -> Vec<String> {
        match self.values.get(name) {
            Some(Variable::Text(_)) => vec!["0".to_owned()],
            Some(Variable::Items(items)) => items.keys().map(usize::to_string).collect(),
            Some(Variable::Map(items)) if items.len() > 1 => vec![super::marker(name)],
            Some(Variable::Map(items)) => items.keys().cloned().collect(),
            None if self.is_outside(name) => vec![super::marker(&format!("!{name}[@]"))],
            None => Vec::new(),
        }
    }

    pub(super) fn count(&self, name: &str) -> Option<usize> {
        match self.values.get(name) {
            Some(Variable::Text(_)) => Some(1),
            Some(Variable::Items(items)) => Some(items.len()),
            Some(Variable::Map(items)) => Some(items.len()),
            None => (!self.is_outside(name)).then_some(0),
        }
    }

    pub(super) fn set(
        &mut self,
        name: &str,
        index: Option<&str>,
        text: String,
    ) -> Result<(), String> {
        if self.read_only.contains(name) {
            return Err(format!("{name} is read-only"));
        }
        let most = if name == "IFS" { SEPARATORS_BYTES_MAX } else { TEXT_BYTES_MAX };
        if text.len() > most {
            return Err(format!("'{name}' is longer than {most} bytes"));
        }
        self.own.insert(name.to_owned());
        match (self.values.get_mut(name), index) {
            (Some(Variable::Map(items)), index) => {
                items.insert(index.unwrap_or("0").to_owned(), text);
            }
            (Some(Variable::Items(items)), index) => {
                let index = index.unwrap_or("0").parse().ok();
                let at = index.and_then(|index| place(items, index)).ok_or("index is no number")?;
                items.insert(at, text);
            }
            (None, None) => _ = self.values.insert(name.to_owned(), Variable::Text(text)),
            (Some(Variable::Text(old)), None) => *old = text,
            (old, Some(index)) => {
                let mut items = BTreeMap::new();
                if let Some(Variable::Text(first)) = old {
                    items.insert(0, first.clone());
                }
                let at = index.parse().ok().and_then(|index| place(&items, index));
                items.insert(at.ok_or("index is no number")?, text);
                self.values.insert(name.to_owned(), Variable::Items(items));
            }
        }
        Ok(())
    }

    /// `NAME=(...)`: appends the items, or replaces the array.
    pub(super) fn set_items(
        &mut self,
        name: &str,
        items: Vec<(Option<String>, String)>,
        appends: bool,
    ) -> Result<(), String> {
        if self.read_only.contains(name) {
            return Err(format!("{name} is read-only"));
        }
        let bytes: usize = items.iter().map(|(_, text)| text.len()).sum();
        let old = self.count(name).unwrap_or(0);
        if old + items.len() > ITEMS_MAX || bytes > TEXT_BYTES_MAX {
            return Err(format!(
                "'{name}' is longer than {TEXT_BYTES_MAX} bytes or {ITEMS_MAX} items"
            ));
        }
        self.own.insert(name.to_owned());
        if let Some(Variable::Map(map)) = self.values.get_mut(name) {
            if !appends {
                map.clear();
            }
            let pairs = items.into_iter().filter_map(|(key, text)| Some((key?, text)));
            map.extend(pairs);
            return Ok(());
        }
        let mut all = match self.values.remove(name) {
            Some(Variable::Items(old)) if appends => old,
            Some(Variable::Text(old)) if appends => BTreeMap::from([(0, old)]),
            _ => BTreeMap::new(),
        };
        let mut next = all.last_key_value().map_or(0, |(last, _)| last + 1);
        for (index, text) in items {
            if let Some(index) = index {
                let index = index.parse().ok().and_then(|index| place(&all, index));
                next = index.ok_or("index is no number")?;
            }
            all.insert(next, text);
            next += 1;
        }
        self.values.insert(name.to_owned(), Variable::Items(all));
        Ok(())
    }

    pub(super) fn make_map(&mut self, name: &str) {
        self.own.insert(name.to_owned());
        if !self.is_map(name) {
            self.values.insert(name.to_owned(), Variable::Map(BTreeMap::new()));
        }
    }

    /// `declare -a`
    pub(super) fn make_items(&mut self, name: &str) {
        self.own.insert(name.to_owned());
        if !self.values.contains_key(name) {
            self.values.insert(name.to_owned(), Variable::Items(BTreeMap::new()));
        }
    }

    pub(super) fn make_number(&mut self, name: &str) {
        self.numbers.insert(name.to_owned());
    }

    pub(super) fn make_read_only(&mut self, name: &str) {
        self.read_only.insert(name.to_owned());
    }

    pub(super) fn is_number(&self, name: &str) -> bool {
        self.numbers.contains(name)
    }

    pub(super) fn is_read_only(&self, name: &str) -> bool {
        self.read_only.contains(name)
    }

    pub(super) fn unset(&mut self, name: &str, index: Option<&str>) {
        match (self.values.get_mut(name), index) {
            _ if self.read_only.contains(name) => {}
            (Some(Variable::Items(items)), Some(index)) => {
                if let Some(at) = index.parse().ok().and_then(|index| place(items, index)) {
                    items.remove(&at);
                }
            }
            (Some(Variable::Map(items)), Some(index)) => _ = items.remove(index),
            (_, Some(_)) => {}
            (_, None) => {
                self.values.remove(name);
                self.numbers.remove(name);
                self.exported.remove(name);
                self.own.insert(name.to_owned());
            }
        }
    }

    /// Restores the value before `local` or before one command.
    pub(super) fn restore(&mut self, name: &str, old: Option<Variable>) {
        match old {
            Some(old) => _ = self.values.insert(name.to_owned(), old),
            None => _ = self.values.remove(name),
        }
    }

    /// Marks a variable as unknown: an unknown command may have changed it.
    pub(super) fn forget(&mut self, name: &str) {
        self.own.insert(name.to_owned());
        self.values.insert(name.to_owned(), Variable::Text(super::marker(name)));
    }

    /// Marks the variables that a loop with an unknown number of rounds changes as unknown.
    pub(super) fn forget_changes(&mut self, before: &Variables) {
        let names: HashSet<String> =
            self.values.keys().chain(before.values.keys()).cloned().collect();
        for name in names {
            if self.values.get(&name) != before.values.get(&name) {
                self.forget(&name);
            }
        }
    }

    /// The variables that a started program gets.
    pub(super) fn keep_exported(&mut self) {
        let exported = &self.exported;
        self.values.retain(|name, _| exported.contains(name));
    }

    pub(super) fn bytes(&self) -> usize {
        let texts = self.values.values().map(|variable| match variable {
            Variable::Text(text) => text.len(),
            Variable::Items(items) => items.values().map(|text| 32 + text.len()).sum(),
            Variable::Map(items) => items.values().map(|text| 64 + text.len()).sum(),
        });
        64 * self.values.len() + texts.sum::<usize>()
    }

    /// The variables that are texts, for the lookup of numbers of ranks.
    pub(super) fn texts(&self) -> HashMap<String, String> {
        let texts = self.values.keys().filter_map(|name| Some((name.clone(), self.text(name)?)));
        texts.collect()
    }
}

fn place(items: &BTreeMap<usize, String>, index: i64) -> Option<usize> {
    let end = items.last_key_value().map_or(0, |(last, _)| last + 1);
    let at = if index < 0 { i64::try_from(end).ok()?.checked_add(index)? } else { index };
    usize::try_from(at).ok().filter(|at| *at < usize::MAX / 2)
}
