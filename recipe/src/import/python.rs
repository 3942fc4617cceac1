//! Configs that are Python files, read as data: assignments of literals, `dict(...)`, names that
//! were assigned above, and `+ - * / **` of numbers. Nothing is executed. The value of a call or an
//! import stays as its text, and is only used if a table of words has it.

use toml::{Table, Value};

const DEPTH_MAX: usize = 32;

/// The names of a file, and the first lines of other statements, which are not executed.
#[derive(Debug, Default)]
pub(super) struct Assignments {
    pub(super) names: Table,
    pub(super) blocks: Vec<(usize, String)>,
}

/// Reads the names of a file. Those of a `CONFIG = dict(...)` are names of the file, as
/// `colossalai.launch(config=CONFIG)` has it. Functions, classes and calls may be around them.
pub(super) fn read(text: &str) -> Result<Assignments, String> {
    let mut found = Assignments::default();
    let mut lines = text.lines().enumerate();
    while let Some((at, line)) = lines.next() {
        let mut statement = without_comment(line).to_owned();
        let is_inside = !found.blocks.is_empty() && statement.starts_with([' ', '\t']);
        if statement.trim().is_empty() || is_inside {
            continue;
        }
        if let Some(quotes) = ["\"\"\"", "'''"].iter().find(|quotes| line.starts_with(**quotes)) {
            // The text of the file.
            if !line[quotes.len()..].contains(quotes) {
                _ = lines.by_ref().find(|(_, line)| line.contains(quotes));
            }
            continue;
        }
        while balance(&statement) > 0 || statement.ends_with('\\') {
            let (_, line) =
                lines.next().ok_or_else(|| format!("line {}: unclosed bracket", at + 1))?;
            statement.truncate(statement.trim_end_matches('\\').len());
            statement.push('\n');
            statement.push_str(without_comment(line));
        }
        found.add(at + 1, &statement).map_err(|problem| format!("line {}: {problem}", at + 1))?;
    }
    if let (true, Some((line, _))) = (found.names.is_empty(), found.blocks.first()) {
        return Err(format!("line {line}: expected 'NAME = value': the file is not executed"));
    }
    if let Some(Value::Table(config)) = found.names.remove("CONFIG") {
        for (name, value) in config {
            if found.names.get(&name).is_some_and(|other| *other != value) {
                return Err(format!("CONFIG has another value of {name} than the file"));
            }
            found.names.insert(name, value);
        }
    }
    Ok(found)
}

/// A literal, or the text itself.
pub(super) fn literal(text: &str) -> Value {
    let mut parser = Parser { rest: text, names: &Table::new(), depth: 0 };
    match parser.sum() {
        Ok(value) if parser.rest.trim().is_empty() => value,
        _ => Value::String(text.to_owned()),
    }
}

impl Assignments {
    /// Adds a complete statement, which starts in this line.
    fn add(&mut self, line: usize, statement: &str) -> Result<(), String> {
        // An imported value stays a name.
        if statement.starts_with("import ") || statement.starts_with("from ") {
            return Ok(());
        }
        let assigned = statement.split_once('=').filter(|(name, value)| {
            is_name(name.trim()) && !statement.starts_with(' ') && !value.starts_with('=')
        });
        let Some((name, value)) = assigned else {
            let first = statement.lines().next().unwrap_or_default().trim_end();
            self.blocks.push((line, first.to_owned()));
            return Ok(());
        };
        let mut parser = Parser { rest: value, names: &self.names, depth: 0 };
        let value = parser.sum()?;
        let rest = parser.rest.trim();
        if !rest.is_empty() {
            return Err(format!("unexpected '{rest}' after the value"));
        }
        self.names.insert(name.trim().to_owned(), value);
        Ok(())
    }
}

struct Parser<'a> {
    rest: &'a str,
    names: &'a Table,
    depth: usize,
}

impl<'a> Parser<'a> {
    fn sum(&mut self) -> Result<Value, String> {
        self.operators(&["+", "-"], Self::product)
    }

    fn product(&mut self) -> Result<Value, String> {
        self.operators(&["*", "//", "/"], Self::power)
    }

    /// As in `2**16`. Several associate to the left, unlike in Python, but configs have none.
    fn power(&mut self) -> Result<Value, String> {
        self.operators(&["**"], Self::one)
    }

    fn operators(
        &mut self,
        all: &[&str],
        next: fn(&mut Self) -> Result<Value, String>,
    ) -> Result<Value, String> {
        let mut left = next(self)?;
        while let Some(operator) = all.iter().find(|operator| self.take(operator)) {
            let right = next(self)?;
            left = compute(operator, &left, &right)
                .ok_or_else(|| format!("{left} {operator} {right} is not a number"))?;
        }
        Ok(left)
    }

    fn one(&mut self) -> Result<Value, String> {
        self.depth += 1;
        if self.depth > DEPTH_MAX {
            return Err("values nested more than 32 deep".to_owned());
        }
        let value = self.value();
        self.depth -= 1;
        value
    }

    fn value(&mut self) -> Result<Value, String> {
        self.rest = self.rest.trim_start();
        let first = self.rest.chars().next().ok_or("missing value")?;
        match first {
            '"' | '\'' => {
                let inner = &self.rest[1..];
                let end = inner.find(first).ok_or("unclosed string")?;
                self.rest = &inner[end + 1..];
                Ok(Value::String(inner[..end].to_owned()))
            }
            '[' | '(' => {
                self.rest = &self.rest[1..];
                let close = if first == '[' { "]" } else { ")" };
                let mut items = Vec::new();
                let mut listed = first == '[';
                while !self.take(close) {
                    items.push(self.sum()?);
                    listed |= self.comma(close)?;
                }
                let alone = !listed && items.len() == 1;
                Ok(if alone { items.remove(0) } else { Value::Array(items) })
            }
            '{' => {
                self.rest = &self.rest[1..];
                self.entries("}", ":")
            }
            _ => self.word(),
        }
    }

    /// A number, a name, `dict(...)`, or the text of another call.
    fn word(&mut self) -> Result<Value, String> {
        let exponent = |at: usize| self.rest[..at].ends_with(['e', 'E']);
        let number = self.rest.starts_with(|c: char| c.is_ascii_digit() || c == '.' || c == '-');
        let inside = |at: usize, c: char| {
            c.is_alphanumeric()
                || c == '_'
                || c == '.'
                || (number && (c == '-' || c == '+') && (at == 0 || exponent(at)))
        };
        let end = self.rest.char_indices().find(|(at, c)| !inside(*at, *c));
        let (text, rest) = self.rest.split_at(end.map_or(self.rest.len(), |(at, _)| at));
        if text.is_empty() {
            return Err(format!(
                "expected a literal, found '{}'",
                rest.chars().next().unwrap_or(' ')
            ));
        }
        self.rest = rest;
        if self.rest.starts_with('(') {
            self.rest = &self.rest[1..];
            if text == "dict" {
                return self.entries(")", "=");
            }
            let mut open = 1;
            let end = self.rest.find(|c| {
                open += i32::from(c == '(') - i32::from(c == ')');
                open == 0
            });
            let end = end.ok_or("unclosed call")?;
            let call = format!("{text}({})", &self.rest[..end]);
            self.rest = &self.rest[end + 1..];
            return Ok(Value::String(call));
        }
        Ok(match text {
            "True" => Value::Boolean(true),
            "False" => Value::Boolean(false),
            "None" => Value::String("null".to_owned()),
            _ => self.names.get(text).cloned().unwrap_or_else(|| super::plain(text)),
        })
    }

    fn entries(&mut self, close: &str, between: &str) -> Result<Value, String> {
        let mut table = Table::new();
        while !self.take(close) {
            let key = if between == ":" {
                self.one()?.as_str().ok_or("expected a string as key")?.to_owned()
            } else {
                // A keyword of `dict`. It may also be a name that was assigned above.
                let end = self.rest.find('=').ok_or("expected name=value in 'dict'")?;
                let (key, rest) = self.rest.split_at(end);
                self.rest = rest;
                key.trim().to_owned()
            };
            if !self.take(between) {
                return Err(format!("expected '{between}' after {key}"));
            }
            let value = self.sum()?;
            table.insert(key, value);
            self.comma(close)?;
        }
        Ok(Value::Table(table))
    }

    /// Whether there is a comma; else the list must end.
    fn comma(&mut self, close: &str) -> Result<bool, String> {
        let comma = self.take(",");
        if comma || self.rest.trim_start().starts_with(close) {
            return Ok(comma);
        }
        Err(format!("expected ',' or '{close}'"))
    }

    fn take(&mut self, token: &str) -> bool {
        let rest = self.rest.trim_start().strip_prefix(token);
        self.rest = rest.unwrap_or(self.rest);
        rest.is_some()
    }
}

fn compute(operator: &str, left: &Value, right: &Value) -> Option<Value> {
    if let (Value::Integer(a), Value::Integer(b)) = (left, right) {
        let whole = match operator {
            "+" => a.checked_add(*b),
            "-" => a.checked_sub(*b),
            "*" => a.checked_mul(*b),
            "**" => u32::try_from(*b).ok().and_then(|b| a.checked_pow(b)),
            "//" => a.checked_div_euclid(*b),
            _ => None,
        };
        if operator != "/" {
            return whole.map(Value::Integer);
        }
    }
    let (a, b) = (super::float(left)?, super::float(right)?);
    Some(Value::Float(match operator {
        "+" => a + b,
        "-" => a - b,
        "*" => a * b,
        "**" => a.powf(b),
        "//" => (a / b).floor(),
        _ => a / b,
    }))
}

/// Number of open brackets.
fn balance(text: &str) -> i32 {
    let mut quote = None;
    text.chars().fold(0, |open, c| {
        match (c, quote) {
            ('"' | '\'', None) => quote = Some(c),
            (_, Some(mark)) if c == mark => quote = None,
            ('(' | '[' | '{', None) => return open + 1,
            (')' | ']' | '}', None) => return open - 1,
            _ => {}
        }
        open
    })
}

fn without_comment(line: &str) -> &str {
    let mut quote = None;
    for (at, c) in line.char_indices() {
        match (c, quote) {
            ('"' | '\'', None) => quote = Some(c),
            (_, Some(mark)) if c == mark => quote = None,
            ('#', None) => return &line[..at],
            _ => {}
        }
    }
    line
}

fn is_name(text: &str) -> bool {
    !text.is_empty() && text.chars().all(|c| c.is_alphanumeric() || c == '_')
}
