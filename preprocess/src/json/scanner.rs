//! Finds one string in a line of JSON, as Python's `json.loads(line)[key]` does.
//!
//! The whole line is checked, not only the part before the key: a line that was cut short, or two
//! objects on one line, must not pass for a document. As in Python, `NaN` and `Infinity` are
//! numbers, control characters in a string must be escaped, and the last of two equal keys counts,
//! if they are not refused. Half a surrogate pair is refused in the text alone: Python cannot
//! encode it.

use std::ops::Range;

use crate::json::escape::{hex_of, plain_end, resolve};
pub(crate) use crate::json::list::Texts;

/// What is wrong with a line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct LineFault {
    /// Where, in bytes from the start of the line.
    pub(crate) column: usize,
    pub(crate) found: String,
    pub(crate) expected: String,
    pub(crate) hint: Option<&'static str>,
}

/// Finds the text in one line after another, without allocating for each.
#[derive(Debug)]
pub(crate) struct TextFinder {
    key: String,
    /// The text, when escapes in it had to be resolved.
    text: String,
    /// Brackets that are open, from the outermost.
    open: Vec<u8>,
    /// A second text is a fault.
    once: bool,
}

const LAST: &str = "--last-of-duplicate-keys uses the last one, as Python does";

/// Keys that a message lists.
const KEYS_SHOWN_MAX: usize = 8;

/// The value of a key.
#[derive(Debug)]
pub(crate) enum Value<'a> {
    /// A string, escapes resolved.
    Text(&'a str),
    /// A list, of strings if it is valid.
    Texts(Texts<'a>),
}

/// Between the quotes of a string.
#[derive(Clone, Copy, Debug)]
pub(super) struct StringSpan {
    pub(super) start: usize,
    pub(super) end: usize,
    pub(super) escaped: bool,
}

#[derive(Clone, Copy, Debug)]
enum KeyMatch {
    Text(StringSpan),
    /// Something else, from its first byte.
    Other(usize),
}

impl TextFinder {
    pub(crate) fn new(key: &str) -> Self {
        TextFinder { key: key.to_owned(), text: String::new(), open: Vec::new(), once: false }
    }

    /// Sets whether a repeated key is refused. Default: no.
    pub(crate) fn once(self, once: bool) -> Self {
        TextFinder { once, ..self }
    }

    /// The string under the key, escapes resolved.
    pub(crate) fn find<'a>(&'a mut self, line: &'a str) -> Result<&'a str, LineFault> {
        self.find_at(line).map(|(_, text)| text)
    }

    /// As [`TextFinder::find`], with the place between the quotes.
    pub(crate) fn find_at<'a>(
        &'a mut self,
        line: &'a str,
    ) -> Result<(Range<usize>, &'a str), LineFault> {
        match self.find_key(line)? {
            KeyMatch::Text(span) => Ok((span.start..span.end, self.text_of(line, span)?)),
            KeyMatch::Other(at) => Err(self.no_text(line, at)),
        }
    }

    /// The string under the key, or the strings of the list there.
    pub(crate) fn value<'a>(&'a mut self, line: &'a str) -> Result<Value<'a>, LineFault> {
        match self.find_key(line)? {
            KeyMatch::Text(span) => Ok(Value::Text(self.text_of(line, span)?)),
            KeyMatch::Other(at) if line.as_bytes()[at] == b'[' => {
                Ok(Value::Texts(Texts::new(line, at, &self.key, &mut self.text)))
            }
            KeyMatch::Other(at) => Err(self.no_text(line, at)),
        }
    }

    fn find_key(&mut self, line: &str) -> Result<KeyMatch, LineFault> {
        let TextFinder { key, text, open, once } = self;
        let mut scanner = Scanner { line, bytes: line.as_bytes(), at: 0, open, once: *once };
        let found = scanner.object(key, text)?;
        found.ok_or_else(|| scanner.without_key(key))
    }

    fn text_of<'a>(&'a mut self, line: &'a str, span: StringSpan) -> Result<&'a str, LineFault> {
        if !span.escaped {
            return Ok(&line[span.start..span.end]);
        }
        resolve(line, span, &mut self.text)?;
        Ok(&self.text)
    }

    fn no_text(&self, line: &str, at: usize) -> LineFault {
        let found = format!("{} under the key '{}'", kind_of(line.as_bytes()[at]), self.key);
        fault(at, found, "a string")
    }

    /// Frees memory that only an unusually long line needed.
    pub(crate) fn shrink_to(&mut self, bytes: usize) {
        self.text.clear();
        self.text.shrink_to(bytes);
    }
}

#[derive(Debug)]
pub(super) struct Scanner<'a> {
    pub(super) line: &'a str,
    pub(super) bytes: &'a [u8],
    pub(super) at: usize,
    pub(super) open: &'a mut Vec<u8>,
    pub(super) once: bool,
}

impl Scanner<'_> {
    /// The last value under the key in the object that the line must be.
    fn object(&mut self, key: &str, scratch: &mut String) -> Result<Option<KeyMatch>, LineFault> {
        self.skip_space();
        match self.peek() {
            Some(b'{') => self.at += 1,
            Some(0xef) if self.line.starts_with('\u{feff}') => {
                let hint = Some("write the file without a byte order mark");
                let fault = fault(0, "a byte order mark".to_owned(), "an object, '{'");
                return Err(LineFault { hint, ..fault });
            }
            Some(byte) if matches!(byte, b'[' | b'"' | b'-' | b'0'..=b'9') => {
                return Err(fault(self.at, kind_of(byte).to_owned(), "an object, '{'"));
            }
            _ => return Err(self.unexpected("an object, '{'")),
        }
        let mut found = None;
        self.skip_space();
        if self.peek() == Some(b'}') {
            self.at += 1;
        } else {
            loop {
                let name = self.member_name()?;
                let start = self.at;
                let is_text = self.peek() == Some(b'"');
                if self.is_key(name, key, scratch) {
                    if self.once && found.is_some() {
                        let expected = format!("key '{key}' once");
                        let fault = fault(name.start - 1, "it again".to_owned(), &expected);
                        return Err(LineFault { hint: Some(LAST), ..fault });
                    }
                    found = Some(if is_text {
                        KeyMatch::Text(self.string()?)
                    } else {
                        self.skip_value()?;
                        KeyMatch::Other(start)
                    });
                } else {
                    self.skip_value()?;
                }
                self.skip_space();
                match self.peek() {
                    Some(b',') => self.at += 1,
                    Some(b'}') => break self.at += 1,
                    _ => return Err(self.unexpected("',' or '}'")),
                }
                self.skip_space();
            }
        }
        self.skip_space();
        if self.at < self.bytes.len() {
            let fault = self.unexpected("the end of the line after the object");
            return Err(LineFault { hint: Some("write one object per line"), ..fault });
        }
        Ok(found)
    }

    /// A key and its colon, before its value.
    fn member_name(&mut self) -> Result<StringSpan, LineFault> {
        if self.peek() != Some(b'"') {
            return Err(self.unexpected("a key in double quotes"));
        }
        let name = self.string()?;
        self.skip_space();
        self.expect(b':', "':'")?;
        self.skip_space();
        Ok(name)
    }

    fn is_key(&self, name: StringSpan, key: &str, scratch: &mut String) -> bool {
        if !name.escaped {
            return &self.bytes[name.start..name.end] == key.as_bytes();
        }
        // Half a surrogate pair, which `resolve` refuses, cannot be in `key`.
        resolve(self.line, name, scratch).is_ok() && scratch == key
    }

    /// Checks and skips any value. Nesting takes a byte per bracket, and no stack.
    fn skip_value(&mut self) -> Result<(), LineFault> {
        self.open.clear();
        loop {
            match self.peek() {
                Some(b'"') => drop(self.string()?),
                Some(open @ (b'{' | b'[')) => {
                    self.at += 1;
                    self.skip_space();
                    let close = open + 2; // '{' and '}' are two apart, and so are '[' and ']'
                    if self.peek() != Some(close) {
                        self.open.push(close);
                        if open == b'{' {
                            self.member_name()?;
                        }
                        continue;
                    }
                    self.at += 1;
                }
                _ => self.scalar()?,
            }
            if self.close_value()? {
                return Ok(());
            }
        }
    }

    /// After a value: skips closing brackets, up to the next value. True: all are closed.
    fn close_value(&mut self) -> Result<bool, LineFault> {
        loop {
            let Some(&close) = self.open.last() else { return Ok(true) };
            self.skip_space();
            match self.peek() {
                Some(byte) if byte == close => {
                    self.at += 1;
                    self.open.pop();
                }
                Some(b',') => {
                    self.at += 1;
                    self.skip_space();
                    if close == b'}' {
                        self.member_name()?;
                    }
                    return Ok(false);
                }
                _ if close == b'}' => return Err(self.unexpected("',' or '}'")),
                _ => return Err(self.unexpected("',' or ']'")),
            }
        }
    }

    fn scalar(&mut self) -> Result<(), LineFault> {
        let rest = &self.bytes[self.at..];
        for word in ["true", "false", "null", "NaN", "Infinity", "-Infinity"] {
            if rest.starts_with(word.as_bytes()) {
                self.at += word.len();
                return Ok(());
            }
        }
        if self.peek() == Some(b'-') {
            self.at += 1;
        }
        match self.peek() {
            Some(b'0') => self.at += 1,
            Some(b'1'..=b'9') => self.digits("a digit")?,
            _ => return Err(self.unexpected("a value")),
        }
        if self.peek() == Some(b'.') {
            self.at += 1;
            self.digits("a digit after the point")?;
        }
        if let Some(b'e' | b'E') = self.peek() {
            self.at += 1;
            if let Some(b'+' | b'-') = self.peek() {
                self.at += 1;
            }
            self.digits("a digit of the exponent")?;
        }
        Ok(())
    }

    fn digits(&mut self, expected: &str) -> Result<(), LineFault> {
        let count = self.bytes[self.at..].iter().take_while(|byte| byte.is_ascii_digit()).count();
        if count == 0 {
            return Err(self.unexpected(expected));
        }
        self.at += count;
        Ok(())
    }

    /// Checks and skips a string.
    pub(super) fn string(&mut self) -> Result<StringSpan, LineFault> {
        self.at += 1;
        let start = self.at;
        let mut escaped = false;
        loop {
            match self.peek() {
                Some(b'"') => {
                    self.at += 1;
                    return Ok(StringSpan { start, end: self.at - 1, escaped });
                }
                // Another escape often follows, as in Chinese text.
                Some(b'\\') => {
                    escaped = true;
                    self.at += 1;
                    self.escape()?;
                }
                Some(0..0x20) => return Err(self.bare_control()),
                Some(_) => self.at = plain_end(self.bytes, self.at),
                None => return Err(self.unexpected("'\"', which closes the string")),
            }
        }
    }

    /// What follows a backslash.
    #[inline]
    fn escape(&mut self) -> Result<(), LineFault> {
        match self.peek() {
            Some(b'u') => {
                if let Some(digits) = self.bytes[self.at + 1..].first_chunk()
                    && hex_of(*digits).is_some()
                {
                    self.at += 5;
                    return Ok(());
                }
                let digits = self.bytes[self.at + 1..].iter().take(4);
                self.at += 1 + digits.take_while(|byte| byte.is_ascii_hexdigit()).count();
                return Err(self.unexpected("four hexadecimal digits after \\u"));
            }
            Some(b'"' | b'\\' | b'/' | b'b' | b'f' | b'n' | b'r' | b't') => self.at += 1,
            _ => return Err(self.unexpected("one of \" \\ / b f n r t u after a backslash")),
        }
        Ok(())
    }

    fn bare_control(&self) -> LineFault {
        let found = format!("unescaped control character {:#04x} in a string", self.bytes[self.at]);
        fault(self.at, found, "an escape, such as \\n or \\u0000")
    }

    fn expect(&mut self, byte: u8, expected: &str) -> Result<(), LineFault> {
        if self.peek() != Some(byte) {
            return Err(self.unexpected(expected));
        }
        self.at += 1;
        Ok(())
    }

    pub(super) fn skip_space(&mut self) {
        while let Some(b' ' | b'\t' | b'\r' | b'\n') = self.peek() {
            self.at += 1;
        }
    }

    #[inline]
    pub(super) fn peek(&self) -> Option<u8> {
        self.bytes.get(self.at).copied()
    }

    fn unexpected(&self, expected: &str) -> LineFault {
        match self.line.get(self.at..).and_then(|rest| rest.chars().next()) {
            Some(char) => fault(self.at, format!("{char:?}"), expected),
            None => {
                let mut fault = fault(self.at, "the end of the line".to_owned(), expected);
                fault.hint = Some("the line may be truncated");
                fault
            }
        }
    }

    /// The fault of a valid object that lacks the key.
    fn without_key(&mut self, key: &str) -> LineFault {
        let expected = format!("the key '{key}'");
        let names = self.names();
        if names.is_empty() {
            return fault(0, "an object without keys".to_owned(), &expected);
        }
        let more = if names.len() > KEYS_SHOWN_MAX { ", and more" } else { "" };
        let shown: Vec<_> =
            names.iter().take(KEYS_SHOWN_MAX).map(|name| format!("'{name}'")).collect();
        let mut fault = fault(0, format!("only {}{more}", shown.join(", ")), &expected);
        fault.hint = Some("set --json-key to the key that holds the text");
        fault
    }

    /// The keys of a valid object, up to one more than are shown.
    fn names(&mut self) -> Vec<String> {
        let mut names = Vec::new();
        self.at = 0;
        self.skip_space();
        self.at += 1;
        self.skip_space();
        while self.peek() == Some(b'"') && names.len() <= KEYS_SHOWN_MAX {
            let Ok(name) = self.member_name() else { break };
            names.push(self.line[name.start..name.end].to_owned());
            if self.skip_value().is_err() {
                break;
            }
            self.skip_space();
            self.at += 1;
            self.skip_space();
        }
        names
    }
}

/// The kind of a value, by its first byte.
pub(super) fn kind_of(first: u8) -> &'static str {
    match first {
        b'{' => "an object",
        b'[' => "a list",
        b'"' => "a string",
        b't' | b'f' => "a boolean",
        b'n' => "null",
        _ => "a number",
    }
}

pub(super) fn fault(column: usize, found: String, expected: &str) -> LineFault {
    LineFault { column, found, expected: expected.to_owned(), hint: None }
}

#[cfg(test)]
mod tests;
