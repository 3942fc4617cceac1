//! `${...}`: defaults, lengths, parts, replacements and cases of variables.

use super::expand::{Fields, Goal, Quotes};
use super::pattern::GlobPattern;
use super::scan::skip;
use super::{Outcome, Shell, Status, is_name_char, is_unknown, marker, marker_len};

/// Every part of a text is compared with a pattern; the result for a longer text is unknown.
const PARTS_MAX: usize = 1024;

/// Set by bash, by the login or by the scheduler, regardless of the script.
const ALWAYS_SET: [&str; 24] = [
    "BASH",
    "BASH_SOURCE",
    "BASH_VERSION",
    "EPOCHSECONDS",
    "EUID",
    "GROUPS",
    "HOME",
    "HOSTNAME",
    "HOSTTYPE",
    "IFS",
    "LANG",
    "LINENO",
    "LOGNAME",
    "MACHTYPE",
    "OSTYPE",
    "PATH",
    "PPID",
    "PWD",
    "RANDOM",
    "SECONDS",
    "SHELL",
    "SHLVL",
    "UID",
    "USER",
];

/// A text, or several; whether they are from `*`, which joins them in quotes.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Value {
    One(String),
    Many(Vec<String>, bool),
}

impl Value {
    fn is_unknown(&self) -> bool {
        match self {
            Value::One(text) => is_unknown(text),
            Value::Many(items, _) => items.iter().any(|item| is_unknown(item)),
        }
    }

    fn bytes(&self) -> usize {
        match self {
            Value::One(text) => text.len(),
            Value::Many(items, _) => items.iter().map(|item| 32 + item.len()).sum(),
        }
    }

    /// Whether it is empty; `None` if unknown.
    fn is_empty(&self) -> Option<bool> {
        let text = match self {
            Value::One(text) => text.as_str(),
            Value::Many(items, _) if items.len() == 1 => &items[0],
            Value::Many(items, _) => return Some(items.is_empty()),
        };
        let mut rest = text;
        while let Some(len) = marker_len(rest) {
            rest = &rest[len..];
        }
        if rest.is_empty() && !text.is_empty() { None } else { Some(text.is_empty()) }
    }

    fn map(self, mut change: impl FnMut(String) -> Option<String>) -> Option<Self> {
        Some(match self {
            Value::One(text) => Value::One(change(text)?),
            Value::Many(items, by_star) => {
                Value::Many(items.into_iter().map(change).collect::<Option<_>>()?, by_star)
            }
        })
    }
}

impl Shell {
    /// `$@`, `$1`, `$?` and other special parameters.
    pub(super) fn special(&self, name: &str) -> Option<Value> {
        if let Ok(at) = name.parse::<usize>() {
            return match at.checked_sub(1) {
                None => Some(Value::One(marker("0"))),
                Some(at) => {
                    let outside = (!self.has_all_arguments).then(|| marker(name));
                    self.arguments.get(at).cloned().or(outside).map(Value::One)
                }
            };
        }
        Some(match name {
            "@" => Value::Many(self.arguments.clone(), false),
            "*" => Value::Many(self.arguments.clone(), true),
            "#" => Value::One(self.arguments.len().to_string()),
            "?" => Value::One(match &self.status {
                Status::Known(code) => code.to_string(),
                Status::Unknown { .. } => marker("?"),
            }),
            name => Value::One(marker(name)),
        })
    }

    /// The text between `${` and `}`.
    pub(super) fn expand_braced(
        &mut self,
        inner: &[char],
        fields: &mut Fields,
        is_quoted: bool,
    ) -> Outcome<()> {
        let text: String = inner.iter().collect();
        let unknown = |fields: &mut Fields| fields.push(Value::One(marker(&text)), is_quoted);
        if text != "#" && text.starts_with('#') {
            let length = self.length(&inner[1..])?;
            let length = length.map_or_else(|| marker(&text), |length| length.to_string());
            fields.push(Value::One(length), is_quoted);
            return Ok(());
        }
        let is_indirect = text.len() > 1 && text.starts_with('!');
        let inner = if is_indirect { &inner[1..] } else { inner };
        let Some((name, index, end)) = subject(inner) else {
            unknown(fields);
            return Ok(());
        };
        let operator: Vec<char> = inner[end..].to_vec();
        let mut value = self.value(&name, index.as_deref())?;
        let mut target = (name, index);
        if is_indirect {
            match (&target.1.as_deref(), value) {
                (Some(by @ ("@" | "*")), _) => {
                    let keys = self.variables.keys(&target.0);
                    fields.push(Value::Many(keys, *by == "*"), is_quoted);
                    return Ok(());
                }
                (_, Some(Value::One(name))) if super::is_name(&name) => {
                    value = self.value(&name, None)?;
                    target = (name, None);
                }
                _ => {
                    unknown(fields);
                    return Ok(());
                }
            }
        }
        if operator.is_empty() {
            fields.push(value.unwrap_or(Value::One(String::new())), is_quoted);
            return Ok(());
        }
        let (colon, rest) = match operator.split_first() {
            Some((':', rest)) if rest.first().is_some_and(|c| "-=?+".contains(*c)) => (true, rest),
            _ => (false, &operator[..]),
        };
        if rest.first().is_some_and(|c| "-=?+".contains(*c)) {
            return self.with_default(&target, value, (colon, rest), fields, is_quoted);
        }
        let value = value.unwrap_or(Value::One(String::new()));
        let changed = if value.is_unknown() { None } else { self.changed(value, &operator)? };
        match changed {
            Some(value) => fields.push(value, is_quoted),
            None => unknown(fields),
        }
        Ok(())
    }

    /// `${#NAME}`; `None` if unknown.
    fn length(&mut self, inner: &[char]) -> Outcome<Option<usize>> {
        let Some((name, index, _)) = subject(inner).filter(|(.., end)| *end == inner.len()) else {
            return Ok(None);
        };
        if matches!(index.as_deref(), Some("@" | "*")) {
            return Ok(self.variables.count(&name));
        }
        if ["@", "*"].contains(&&*name) {
            return Ok(Some(self.arguments.len()));
        }
        Ok(match self.value(&name, index.as_deref())? {
            Some(Value::One(text)) => (!is_unknown(&text)).then(|| text.chars().count()),
            Some(Value::Many(..)) => None,
            None => Some(0),
        })
    }

    /// The value of a variable; `None` if unset, a marker if it is from outside.
    fn value(&mut self, name: &str, index: Option<&str>) -> Outcome<Option<Value>> {
        let value = self.looked_up(name, index)?;
        self.limits.spend(value.as_ref().map_or(0, Value::bytes))?;
        Ok(value)
    }

    fn looked_up(&mut self, name: &str, index: Option<&str>) -> Outcome<Option<Value>> {
        if !super::is_name(name) {
            return Ok(self.special(name));
        }
        Ok(match index {
            None => self.variables.text(name).map(Value::One),
            Some(by @ ("@" | "*")) => Some(Value::Many(self.variables.items(name), by == "*")),
            Some(index) => match self.index(name, index)? {
                Some(key) => self.variables.element(name, &key).map(Value::One),
                None => Some(Value::One(marker(&format!("{name}[{index}]")))),
            },
        })
    }

    /// An index as a number, or as the key of a map. `None` if unknown.
    pub(super) fn index(&mut self, name: &str, index: &str) -> Outcome<Option<String>> {
        if self.variables.is_map(name) {
            let key = self.text(index)?;
            return Ok((!is_unknown(&key)).then_some(key));
        }
        Ok(self.math(index)?.map(|at| at.to_string()))
    }

    /// Whether a variable without a value counts as unset.
    fn is_default_used(&mut self, name: &str) -> bool {
        let by_scheduler = name.starts_with("SLURM_") && self.is_batch_job;
        if ALWAYS_SET.contains(&name) || by_scheduler {
            return false;
        }
        if !self.variables.defaulted.iter().any(|other| other == name) {
            self.variables.defaulted.push(name.to_owned());
        }
        true
    }

    /// `${A:-B}`, `${A=B}`, `${A?B}`, `${A:+B}`
    fn with_default(
        &mut self,
        (name, index): &(String, Option<String>),
        value: Option<Value>,
        (colon, operator): (bool, &[char]),
        fields: &mut Fields,
        is_quoted: bool,
    ) -> Outcome<()> {
        let is_argument = name.parse().is_ok_and(|at: usize| at > self.arguments.len());
        let is_outside = match super::is_name(name) {
            true => self.variables.is_outside(name),
            false => is_argument && !self.has_all_arguments,
        };
        let is_outside = is_outside && operator[0] != '?';
        self.limits.spend(16 * self.variables.defaulted.len())?;
        let value = value.filter(|_| !(is_outside && self.is_default_used(name)));
        // With a colon, set but empty counts as unset.
        let is_missing = match &value {
            None => Some(true),
            Some(Value::Many(items, _)) if items.is_empty() => Some(true),
            Some(value) if colon => value.is_empty(),
            Some(_) => Some(false),
        };
        let operand = &operator[1..];
        let quotes = if is_quoted { Quotes::Operand } else { Quotes::None };
        match (operator[0], is_missing) {
            ('-', Some(true)) | ('+', Some(false)) => {
                if operand.is_empty() && is_quoted {
                    fields.push(Value::One(String::new()), true);
                }
                self.expand(operand, fields, quotes)?;
            }
            ('=', Some(true)) => {
                let mut inner = Fields::new(Goal::Text, &self.separators());
                self.expand(operand, &mut inner, quotes)?;
                let text = inner.into_text();
                let key = index.as_deref().map(|index| self.index(name, index)).transpose()?;
                if let Err(cause) = self.variables.set(name, key.flatten().as_deref(), text.clone())
                {
                    self.note(&cause);
                }
                fields.push(Value::One(text), is_quoted);
            }
            ('+', Some(true)) => fields.push(Value::One(String::new()), is_quoted),
            ('?', Some(true)) | ('+', None) => {
                let operand: String = operator.iter().collect();
                fields.push(Value::One(marker(&format!("{name}{operand}"))), is_quoted);
            }
            _ => fields.push(value.unwrap_or(Value::One(String::new())), is_quoted),
        }
        Ok(())
    }

    /// The value after a `%`, `#`, `/`, `^`, `,`, `:` or `@`. `None` if unknown.
    fn changed(&mut self, value: Value, operator: &[char]) -> Outcome<Option<Value>> {
        let twice = operator.get(1) == Some(&operator[0]);
        let rest = &operator[if twice { 2 } else { 1 }..];
        let bytes = value.bytes();
        self.limits.spend(bytes)?;
        match operator[0] {
            ':' => self.part(value, &operator[1..]),
            sign @ ('%' | '#') => {
                let pattern: String = rest.iter().collect();
                let Some(pattern) = GlobPattern::new(&self.pattern(&pattern)?) else {
                    return Ok(None);
                };
                let steps = bytes.saturating_mul(bytes.min(PARTS_MAX));
                self.limits.spend(steps.saturating_mul(pattern.len() + 1) / 16)?;
                Ok(value.map(|text| trimmed(&text, &pattern, sign == '%', twice)))
            }
            '/' => self.replaced(value, &operator[1..]),
            sign @ ('^' | ',') if rest.is_empty() => {
                Ok(value.map(|text| Some(cased(&text, sign == '^', twice))))
            }
            '@' => Ok(match operator.get(1) {
                Some('U') => value.map(|text| Some(cased(&text, true, true))),
                Some('u') => value.map(|text| Some(cased(&text, true, false))),
                Some('L') => value.map(|text| Some(cased(&text, false, true))),
                _ => None,
            }),
            _ => Ok(None),
        }
    }

    /// `${A:1:2}`
    fn part(&mut self, value: Value, range: &[char]) -> Outcome<Option<Value>> {
        if range.len() > PARTS_MAX {
            return Ok(None);
        }
        let colon = (0..range.len()).find(|at| {
            // Not the colon of `a ? b : c`, nor one in parentheses.
            let before: String = range[..*at].iter().collect();
            let is_open = before.matches('(').count() > before.matches(')').count();
            range[*at] == ':' && !before.contains('?') && !is_open
        });
        let offset: String = range[..colon.unwrap_or(range.len())].iter().collect();
        let Some(offset) = self.math(&offset)? else { return Ok(None) };
        let length = match colon {
            Some(at) => {
                let text: String = range[at + 1..].iter().collect();
                let Some(length) = self.math(&text)? else { return Ok(None) };
                Some(length)
            }
            None => None,
        };
        Ok(match value {
            Value::One(text) => {
                let chars: Vec<char> = text.chars().collect();
                slice(&chars, offset, length).map(|part| Value::One(part.iter().collect()))
            }
            Value::Many(items, by_star) => {
                slice(&items, offset, length).map(|part| Value::Many(part.to_vec(), by_star))
            }
        })
    }

    /// `${A/x/y}`, `${A//x/y}`, `${A/#x/y}`, `${A/%x/y}`
    fn replaced(&mut self, value: Value, operand: &[char]) -> Outcome<Option<Value>> {
        let kind = operand.first().copied().filter(|c| ['/', '#', '%'].contains(c));
        let operand = &operand[usize::from(kind.is_some())..];
        let mut at = 0;
        while at < operand.len() && operand[at] != '/' {
            at = skip(operand, at, false).unwrap_or(operand.len());
        }
        let pattern: String = operand[..at].iter().collect();
        let with: String = operand.get(at + 1..).unwrap_or_default().iter().collect();
        let Some(pattern) = GlobPattern::new(&self.pattern(&pattern)?) else { return Ok(None) };
        let with = self.text(&with)?;
        // Since bash 5.2 `&` is the matched text; before, it is literal.
        if with.contains('&') || is_unknown(&with) {
            return Ok(None);
        }
        let bytes = value.bytes();
        // Without a `*` only parts with the length of the pattern match.
        let lengths = if pattern.has_star() { bytes.min(PARTS_MAX / 8) } else { 1 };
        let steps = bytes.saturating_mul(lengths).saturating_mul(pattern.len() + 1);
        self.limits.spend(steps / 16)?;
        Ok(value.map(|text| replace(&text, &pattern, &with, kind)))
    }
}

/// Parses `NAME`, `NAME[index]`, `1` or `@` into the name, the index, and the end.
fn subject(inner: &[char]) -> Option<(String, Option<String>, usize)> {
    let first = *inner.first()?;
    let len = if first.is_ascii_digit() {
        inner.iter().take_while(|c| c.is_ascii_digit()).count()
    } else if is_name_char(first) {
        inner.iter().take_while(|c| is_name_char(**c)).count()
    } else {
        usize::from("@*#?-$!".contains(first))
    };
    if len == 0 {
        return None;
    }
    let name: String = inner[..len].iter().collect();
    if inner.get(len) != Some(&'[') || !is_name_char(first) {
        return Some((name, None, len));
    }
    let mut at = len + 1;
    let mut open = 1;
    while open > 0 {
        match *inner.get(at)? {
            '[' => open += 1,
            ']' => open -= 1,
            _ => {}
        }
        at = if inner[at] == '$' { skip(inner, at, false)? } else { at + 1 };
    }
    Some((name, Some(inner[len + 1..at - 1].iter().collect()), at))
}

fn slice<T>(items: &[T], offset: i64, length: Option<i64>) -> Option<&[T]> {
    let count = i64::try_from(items.len()).ok()?;
    let from = if offset < 0 { count.checked_add(offset)? } else { offset };
    if from < 0 || from > count {
        return Some(&[]);
    }
    let to = match length {
        None => count,
        Some(length) if length < 0 => count.checked_add(length)?,
        Some(length) => from.saturating_add(length).min(count),
    };
    items.get(usize::try_from(from).ok()?..usize::try_from(to).ok()?)
}

fn cased(text: &str, is_upper: bool, all: bool) -> String {
    let change = |c: char| -> String {
        if is_upper { c.to_uppercase().collect() } else { c.to_lowercase().collect() }
    };
    let changed = |(at, c): (usize, char)| if all || at == 0 { change(c) } else { c.to_string() };
    text.chars().enumerate().map(changed).collect()
}

/// Removes the shortest or longest matching part at the end or at the start.
fn trimmed(text: &str, pattern: &GlobPattern, at_end: bool, longest: bool) -> Option<String> {
    let chars: Vec<char> = text.chars().collect();
    if chars.len() > PARTS_MAX {
        return None;
    }
    let count = chars.len();
    let mut lens: Vec<usize> = (0..=count).collect();
    if longest {
        lens.reverse();
    }
    for len in lens {
        let part = if at_end { &chars[count - len..] } else { &chars[..len] };
        if pattern.matches(part)? {
            let kept = if at_end { &chars[..count - len] } else { &chars[len..] };
            return Some(kept.iter().collect());
        }
    }
    Some(text.to_owned())
}

fn replace(text: &str, pattern: &GlobPattern, with: &str, kind: Option<char>) -> Option<String> {
    let chars: Vec<char> = text.chars().collect();
    let parts_max = if pattern.has_star() { PARTS_MAX / 8 } else { PARTS_MAX };
    if chars.len() > parts_max {
        return None;
    }
    // Without a `*` it only matches parts of its own length.
    let len_only = (!pattern.has_star()).then_some(pattern.len());
    let mut out = String::new();
    let mut at = 0;
    let mut done = false;
    while at < chars.len() {
        let is_place = !done && (kind != Some('#') || at == 0);
        // At the end, the longest part starts first.
        let len = (1..=chars.len() - at)
            .rev()
            .filter(|len| is_place && (kind != Some('%') || at + len == chars.len()))
            .filter(|len| len_only.is_none_or(|only| *len == only));
        let mut found = None;
        for len in len {
            if pattern.matches(&chars[at..at + len])? {
                found = Some(len);
                break;
            }
        }
        match found {
            Some(len) => {
                out.push_str(with);
                at += len;
                done = kind != Some('/');
            }
            None => {
                out.push(chars[at]);
                at += 1;
            }
        }
    }
    // An empty pattern matches the start or the end, and nothing else.
    let is_empty = pattern.matches(&[])?;
    if !done && is_empty && kind == Some('#') {
        out.insert_str(0, with);
    } else if !done && is_empty && kind == Some('%') {
        out.push_str(with);
    }
    Some(out)
}
