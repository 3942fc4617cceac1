//! Word expansion: removes quotes, replaces variables and commands, and splits at `IFS`.

use super::math::NoNumber;
use super::param::Value;
use super::run::ABANDONED;
use super::scan::{brace_end, braces, double_end, escaped_end, paren_end};
use super::vars::TEXT_BYTES_MAX;
use super::{Outcome, Shell, is_name_char, is_unknown, marker, marker_len};

/// Maximum depth of nested expansions.
const NESTED_MAX: usize = 64;

/// The context of an expansion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Goal {
    /// Words of a command: split, and matched with names of files.
    Words,
    /// One text, as in an assignment.
    Text,
    /// A pattern, in which quoted characters have a `\`.
    Pattern,
}

/// The quotes around a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Quotes {
    None,
    /// Inside of `"..."`.
    Double,
    /// The text after `:-` inside of `"..."`, where quotes are removed.
    Operand,
    /// A here-document, in which quotes are text.
    Document,
}

/// The words that one word expands to.
#[derive(Debug)]
pub(super) struct Fields {
    goal: Goal,
    separators: String,
    done: Vec<String>,
    text: String,
    /// Whether there is a current word, which may be empty.
    exists: bool,
    /// Whether it has an unquoted `*`, `?` or `[`.
    globs: bool,
}

impl Fields {
    pub(super) fn new(goal: Goal, separators: &str) -> Self {
        let (done, text) = (Vec::new(), String::new());
        let separators = separators.to_owned();
        Fields { goal, separators, done, text, exists: false, globs: false }
    }

    /// Text that is not split and has no patterns.
    fn push_quoted(&mut self, text: &str) {
        if self.goal == Goal::Pattern {
            let mut rest = text;
            while let Some(c) = rest.chars().next() {
                let len = marker_len(rest);
                if len.is_none() && c.is_ascii_punctuation() {
                    self.text.push('\\');
                }
                let len = len.unwrap_or(c.len_utf8());
                self.text.push_str(&rest[..len]);
                rest = &rest[len..];
            }
        } else {
            self.text.push_str(text);
        }
        self.exists = true;
    }

    fn push_bare(&mut self, c: char) {
        self.globs |= ['*', '?', '['].contains(&c);
        self.text.push(c);
        self.exists = true;
    }

    /// The value of an unquoted expansion.
    fn push_split(&mut self, value: &str) {
        if self.goal != Goal::Words {
            self.text.push_str(value);
            self.exists |= !value.is_empty();
            return;
        }
        let mut rest = value;
        let mut after_space = false;
        while let Some(c) = rest.chars().next() {
            if let Some(len) = marker_len(rest) {
                self.text.push_str(&rest[..len]);
                self.exists = true;
                after_space = false;
                rest = &rest[len..];
                continue;
            }
            rest = &rest[c.len_utf8()..];
            let separates = self.separators.contains(c);
            match (separates, [' ', '\t', '\n'].contains(&c)) {
                (true, true) => {
                    after_space |= self.exists;
                    self.finish();
                }
                (true, false) => {
                    self.exists |= !after_space;
                    after_space = false;
                    self.finish();
                }
                (false, _) => {
                    after_space = false;
                    self.push_bare(c);
                }
            }
        }
    }

    fn finish(&mut self) {
        if std::mem::take(&mut self.exists) {
            let text = std::mem::take(&mut self.text);
            let globs = self.globs && self.goal == Goal::Words && looks_up_files(&text);
            self.done.push(if globs { marker(&text) } else { text });
        }
        self.globs = false;
    }

    pub(super) fn push(&mut self, value: Value, is_quoted: bool) {
        match value {
            Value::One(text) if is_quoted => self.push_quoted(&text),
            Value::One(text) => self.push_split(&text),
            Value::Many(items, by_star) => {
                let joins = self.goal != Goal::Words || (by_star && is_quoted);
                if joins {
                    let between = self.separators.chars().next();
                    let between = between.filter(|_| by_star).map_or(" ".into(), String::from);
                    let between = if by_star && self.separators.is_empty() { "" } else { &between };
                    let text = items.join(between);
                    if is_quoted {
                        self.push_quoted(&text);
                    } else {
                        self.push_split(&text);
                    }
                    return;
                }
                for (at, item) in items.iter().enumerate() {
                    if at > 0 {
                        self.finish();
                    }
                    if is_quoted { self.push_quoted(item) } else { self.push_split(item) }
                }
            }
        }
    }

    /// The result in a context of one text.
    pub(super) fn into_text(self) -> String {
        self.text
    }

    fn into_words(mut self) -> Vec<String> {
        self.finish();
        self.done
    }
}

/// Whether bash would match a text with the names of files.
fn looks_up_files(text: &str) -> bool {
    let mut bare = String::new();
    let mut rest = text;
    while let Some(c) = rest.chars().next() {
        let len = marker_len(rest);
        if len.is_none() {
            bare.push(c);
        }
        rest = &rest[len.unwrap_or(c.len_utf8())..];
    }
    let class = bare.split_once('[').is_some_and(|(_, rest)| rest.contains(']'));
    class || bare.contains(['*', '?'])
}

impl Shell {
    /// The words that a word of a command expands to.
    pub(super) fn words(&mut self, word: &str) -> Outcome<Vec<String>> {
        let Some(parts) = braces(word) else { return Ok(vec![marker(word)]) };
        let mut all = Vec::new();
        for part in parts {
            let mut fields = Fields::new(Goal::Words, &self.separators());
            self.expand(&part.chars().collect::<Vec<_>>(), &mut fields, Quotes::None)?;
            all.extend(fields.into_words());
        }
        self.limits.spend(word.len() + all.iter().map(String::len).sum::<usize>() + 1)?;
        Ok(all)
    }

    /// One text, without splitting.
    pub(super) fn text(&mut self, word: &str) -> Outcome<String> {
        self.goal(word, Goal::Text, Quotes::None)
    }

    pub(super) fn pattern(&mut self, word: &str) -> Outcome<String> {
        self.goal(word, Goal::Pattern, Quotes::None)
    }

    /// The text between `<<EOF` and `EOF`, or in `$(( ))`.
    pub(super) fn document(&mut self, text: &str) -> Outcome<String> {
        self.goal(text, Goal::Text, Quotes::Document)
    }

    fn goal(&mut self, word: &str, goal: Goal, quotes: Quotes) -> Outcome<String> {
        let mut fields = Fields::new(goal, &self.separators());
        self.expand(&word.chars().collect::<Vec<_>>(), &mut fields, quotes)?;
        self.limits.spend(word.len() + fields.text.len() + 1)?;
        if fields.text.len() > TEXT_BYTES_MAX {
            return Err(format!("a text is longer than {TEXT_BYTES_MAX} bytes"));
        }
        Ok(fields.text)
    }

    pub(super) fn separators(&self) -> String {
        let set = self.variables.get("IFS").is_some();
        let given = self.variables.text("IFS").filter(|text| set && !is_unknown(text));
        given.unwrap_or_else(|| " \t\n".to_owned())
    }

    /// Appends the expansion of a text.
    pub(super) fn expand(
        &mut self,
        chars: &[char],
        fields: &mut Fields,
        quotes: Quotes,
    ) -> Outcome<()> {
        self.depth += 1;
        if self.depth > NESTED_MAX {
            return Err(format!("expansions nested more than {NESTED_MAX} deep"));
        }
        let mut at = 0;
        while at < chars.len() {
            at = match quotes {
                Quotes::None => self.expand_bare(chars, at, fields)?,
                quotes => self.expand_quoted(chars, at, fields, quotes)?,
            };
            if fields.text.len() > TEXT_BYTES_MAX || fields.done.len() > TEXT_BYTES_MAX / 16 {
                return Err(format!("a word is longer than {TEXT_BYTES_MAX} bytes"));
            }
        }
        self.depth -= 1;
        Ok(())
    }

    fn expand_bare(&mut self, chars: &[char], at: usize, fields: &mut Fields) -> Outcome<usize> {
        let unclosed = || "unclosed quote or parenthesis".to_owned();
        match (chars[at], chars.get(at + 1)) {
            ('\\', Some('\n')) => Ok(at + 2),
            ('\\', Some(next)) => {
                fields.push_quoted(&next.to_string());
                Ok(at + 2)
            }
            ('\'', _) => {
                let end = chars[at + 1..].iter().position(|c| *c == '\'').ok_or_else(unclosed)?;
                let end = at + 1 + end;
                fields.push_quoted(&chars[at + 1..end].iter().collect::<String>());
                Ok(end + 1)
            }
            ('$', Some('\'')) => {
                let end = escaped_end(chars, at + 2, '\'').ok_or_else(unclosed)?;
                fields.push_quoted(&super::escapes::ansi(&chars[at + 2..end - 1]));
                Ok(end)
            }
            ('$', Some('"')) => self.expand_double(chars, at + 1, fields),
            ('"', _) => self.expand_double(chars, at, fields),
            ('$' | '`', _) => self.expand_sign(chars, at, fields, Quotes::None),
            ('~', _) if at == 0 && !fields.exists && fields.done.is_empty() => {
                Ok(self.expand_home(chars, at, fields))
            }
            ('~', _) if fields.goal == Goal::Text && at > 0 && chars[at - 1] == ':' => {
                Ok(self.expand_home(chars, at, fields))
            }
            (c, _) => {
                fields.push_bare(c);
                Ok(at + 1)
            }
        }
    }

    fn expand_home(&mut self, chars: &[char], at: usize, fields: &mut Fields) -> usize {
        let is_end = |c: &char| *c == '/' || (fields.goal == Goal::Text && *c == ':');
        let end = chars[at..].iter().position(is_end).map_or(chars.len(), |end| at + end);
        let name: String = chars[at + 1..end].iter().collect();
        if name.is_empty() {
            let home = self.variables.text("HOME");
            fields.push_quoted(&home.unwrap_or_else(|| marker("HOME")));
            return end;
        }
        if name.chars().all(|c| is_name_char(c) || c == '-' || c == '+') {
            fields.push_quoted(&marker(&format!("~{name}")));
            return end;
        }
        fields.push_bare('~');
        at + 1
    }

    fn expand_double(&mut self, chars: &[char], at: usize, fields: &mut Fields) -> Outcome<usize> {
        let end = double_end(chars, at).ok_or("unclosed quote or parenthesis")?;
        let inner = &chars[at + 1..end - 1];
        // `"$@"` without arguments is no word, but `""` is one.
        fields.exists |= inner.is_empty();
        self.expand(inner, fields, Quotes::Double)?;
        Ok(end)
    }

    fn expand_quoted(
        &mut self,
        chars: &[char],
        at: usize,
        fields: &mut Fields,
        quotes: Quotes,
    ) -> Outcome<usize> {
        match (chars[at], chars.get(at + 1)) {
            ('\\', Some('\n')) => Ok(at + 2),
            ('\\', Some(next @ ('$' | '`' | '\\'))) => {
                fields.push_quoted(&next.to_string());
                Ok(at + 2)
            }
            ('\\', Some('"')) if quotes != Quotes::Document => {
                fields.push_quoted("\"");
                Ok(at + 2)
            }
            ('\\', Some('}')) if quotes == Quotes::Operand => {
                fields.push_quoted("}");
                Ok(at + 2)
            }
            ('"', _) if quotes == Quotes::Operand => Ok(at + 1),
            ('$' | '`', _) => self.expand_sign(chars, at, fields, quotes),
            (c, _) => {
                fields.push_quoted(&c.to_string());
                Ok(at + 1)
            }
        }
    }

    /// An expansion that starts with `$` or a backquote.
    fn expand_sign(
        &mut self,
        chars: &[char],
        at: usize,
        fields: &mut Fields,
        quotes: Quotes,
    ) -> Outcome<usize> {
        let is_quoted = quotes != Quotes::None;
        let unclosed = || "unclosed quote or parenthesis".to_owned();
        let text = |from: usize, to: usize| chars[from..to].iter().collect::<String>();
        if chars[at] == '`' {
            let end = escaped_end(chars, at + 1, '`').ok_or_else(unclosed)?;
            let command = super::escapes::backquoted(&chars[at + 1..end - 1], is_quoted);
            let value = self.capture(&command)?;
            fields.push(Value::One(value), is_quoted);
            return Ok(end);
        }
        match chars.get(at + 1) {
            Some('(') => {
                let end = paren_end(chars, at + 1).ok_or_else(unclosed)?;
                let inner = chars.get(at + 2) == Some(&'(');
                let is_math = inner && paren_end(chars, at + 2) == Some(end - 1);
                let value = if is_math {
                    self.math_text(&text(at + 3, end - 2))?
                } else {
                    self.capture(&text(at + 2, end - 1))?
                };
                fields.push(Value::One(value), is_quoted);
                Ok(end)
            }
            Some('[') => {
                let end = chars[at..].iter().position(|c| *c == ']').ok_or_else(unclosed)? + at;
                let value = self.math_text(&text(at + 2, end))?;
                fields.push(Value::One(value), is_quoted);
                Ok(end + 1)
            }
            Some('{') => {
                let end = brace_end(chars, at + 1, is_quoted).ok_or_else(unclosed)?;
                self.expand_braced(&chars[at + 2..end - 1], fields, is_quoted)?;
                Ok(end)
            }
            Some(c) if is_name_char(*c) && !c.is_ascii_digit() => {
                let len = chars[at + 1..].iter().take_while(|c| is_name_char(**c)).count();
                let name = text(at + 1, at + 1 + len);
                let value = self.variables.text(&name).unwrap_or_default();
                fields.push(Value::One(value), is_quoted);
                Ok(at + 1 + len)
            }
            Some(c) if c.is_ascii_digit() || "@*#?-$!".contains(*c) => {
                let value = self.special(&c.to_string());
                fields.push(value.unwrap_or(Value::One(String::new())), is_quoted);
                Ok(at + 2)
            }
            _ => {
                if is_quoted {
                    fields.push_quoted("$");
                } else {
                    fields.push_bare('$');
                }
                Ok(at + 1)
            }
        }
    }

    /// The number of an arithmetic expression, or a marker.
    pub(super) fn math_text(&mut self, text: &str) -> Outcome<String> {
        let expanded = self.document(text)?;
        let value = self.evaluated(text, &expanded)?;
        Ok(value.map_or_else(|| marker(text), |value| value.to_string()))
    }

    /// Its value, if it is known.
    pub(super) fn math(&mut self, text: &str) -> Outcome<Option<i64>> {
        let expanded = self.document(text)?;
        match self.evaluated(text, &expanded) {
            Err(cause) if cause == ABANDONED => Ok(None),
            value => value,
        }
    }

    /// The value of the expansion of an expression.
    fn evaluated(&mut self, text: &str, expanded: &str) -> Outcome<Option<i64>> {
        let (value, bytes) = super::math::evaluate(&expanded.replace('"', ""), &mut self.variables);
        self.limits.spend(16 * bytes)?;
        match value {
            Ok(value) => Ok(Some(value)),
            Err(NoNumber::Unknown(_)) => Ok(None),
            Err(NoNumber::TooLong) => {
                Err(format!("line {}: an arithmetic expression is too long", self.line))
            }
            Err(NoNumber::Wrong(cause)) => {
                self.note(&format!("'{}' is not arithmetic: {cause}", text.trim()));
                Err(ABANDONED.to_owned())
            }
        }
    }
}
