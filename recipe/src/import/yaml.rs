//! The part of YAML that configs of training are written in: mappings by indentation, lists of
//! scalars, scalars. Other YAML (anchors, tags, several documents, folded texts) is refused with
//! its line, so that a file is read correctly or not at all. A YAML library would be a dependency
//! for a hundred lines, and the usual one is no longer maintained.

use toml::{Table, Value};

const DEPTH_MAX: usize = 32;

struct Line<'a> {
    number: usize,
    indent: usize,
    text: &'a str,
}

/// Reads a mapping. An empty value is the text `null`.
pub(super) fn read(text: &str) -> Result<Table, String> {
    let mut lines = Vec::new();
    for (at, line) in text.lines().enumerate() {
        let (number, body) = (at + 1, without_comment(line));
        let text = body.trim_start_matches(' ');
        if text.starts_with('\t') {
            return Err(format!("line {number}: tab in the indentation"));
        }
        if !text.trim().is_empty() && text.trim() != "---" {
            lines.push(Line { number, indent: body.len() - text.len(), text: text.trim_end() });
        }
    }
    let mut rest = &lines[..];
    let root = rest.first().map_or(0, |line| line.indent);
    let table = mapping(&mut rest, root, 0)?;
    match rest.first() {
        None => Ok(table),
        Some(line) => Err(format!("line {}: indentation matches no mapping above", line.number)),
    }
}

fn mapping(lines: &mut &[Line<'_>], indent: usize, depth: usize) -> Result<Table, String> {
    let mut table = Table::new();
    while let Some(line) = lines.first().filter(|line| line.indent == indent) {
        let refuse = |problem: &str| Err(format!("line {}: {problem}", line.number));
        if depth > DEPTH_MAX {
            return refuse("mappings nested more than 32 deep");
        }
        let Some((key, value)) = line.text.split_once(':') else {
            return refuse("expected 'key: value'");
        };
        if !(value.is_empty() || value.starts_with(' ')) {
            return refuse("expected a space after ':'");
        }
        *lines = &lines[1..];
        let value = match (value.trim(), lines.first()) {
            ("", Some(next)) if next.text.starts_with("- ") && next.indent >= indent => {
                list(lines)?
            }
            ("", Some(next)) if next.indent > indent => {
                Value::Table(mapping(lines, next.indent, depth + 1)?)
            }
            (text, _) => {
                scalar(text, 0).map_err(|problem| format!("line {}: {problem}", line.number))?
            }
        };
        if table.insert(key.trim().trim_matches(['"', '\'']).to_owned(), value).is_some() {
            return refuse("duplicate key");
        }
    }
    Ok(table)
}

fn list(lines: &mut &[Line<'_>]) -> Result<Value, String> {
    let indent = lines.first().map_or(0, |line| line.indent);
    let mut items = Vec::new();
    while let Some(line) = lines.first().filter(|line| line.indent == indent) {
        let Some(item) = line.text.strip_prefix("- ") else { break };
        if item.contains(": ") || item.ends_with(':') {
            return Err(format!("line {}: lists of mappings are not supported", line.number));
        }
        items.push(scalar(item, 1).map_err(|problem| format!("line {}: {problem}", line.number))?);
        *lines = &lines[1..];
    }
    Ok(Value::Array(items))
}

fn scalar(text: &str, depth: usize) -> Result<Value, String> {
    let text = text.trim();
    if depth > DEPTH_MAX {
        return Err("lists nested more than 32 deep".to_owned());
    }
    if let Some(inner) = text.strip_prefix('[') {
        let inner = inner.strip_suffix(']').ok_or("lists over several lines are not supported")?;
        let items = inner.split(',').filter(|item| !item.trim().is_empty());
        let items = items.map(|item| scalar(item, depth + 1));
        return Ok(Value::Array(items.collect::<Result<_, _>>()?));
    }
    if text.starts_with(['&', '*', '!', '|', '>', '{', '%', '@', '`']) {
        let text = storage::printable(text);
        return Err(format!("expected a mapping, a list or a scalar, found '{text}'"));
    }
    let quoted = |quote: char| text.strip_prefix(quote)?.strip_suffix(quote);
    if let Some(inner) = quoted('"').or_else(|| quoted('\'')) {
        return Ok(literal(inner));
    }
    Ok(match text {
        "" | "~" | "null" | "Null" | "NULL" => Value::String("null".to_owned()),
        _ => boolean(text)
            .map_or_else(|| octal(text).unwrap_or_else(|| literal(text)), Value::Boolean),
    })
}

/// The words that PyYAML takes for booleans, outside quotes.
fn boolean(text: &str) -> Option<bool> {
    let is_of = |words: [&str; 3]| {
        words.iter().any(|word| {
            let mut title = (*word).to_owned();
            title[..1].make_ascii_uppercase();
            text == *word || text == title || text == word.to_ascii_uppercase()
        })
    };
    is_of(["true", "yes", "on"]).then_some(true).or(is_of(["false", "no", "off"]).then_some(false))
}

/// A leading zero makes an octal number in YAML 1.1.
fn octal(text: &str) -> Option<Value> {
    let digits = text.strip_prefix('0')?.replace('_', "");
    i64::from_str_radix(&digits, 8).ok().map(Value::Integer)
}

/// PaddleFleetX applies Python's `literal_eval` to texts: `"True"` and `5e2` are not texts.
fn literal(text: &str) -> Value {
    match text {
        "True" => Value::Boolean(true),
        "False" => Value::Boolean(false),
        "None" => Value::String("null".to_owned()),
        "true" | "false" => Value::String(text.to_owned()),
        _ => super::plain(text),
    }
}

/// The line up to a `#` outside quotes, at the start or after a space.
fn without_comment(line: &str) -> &str {
    let mut quote = None;
    let mut before = ' ';
    for (at, c) in line.char_indices() {
        match (c, quote) {
            ('"' | '\'', None) => quote = Some(c),
            (_, Some(open)) if c == open => quote = None,
            ('#', None) if before == ' ' => return &line[..at],
            _ => {}
        }
        before = c;
    }
    line
}
