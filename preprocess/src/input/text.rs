use std::str::FromStr;

use memchr::{memchr, memchr_iter, memmem, memrchr};

/// What ends a document in a file of plain text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Separator {
    /// The end of its line; a carriage return before it is no part of the document.
    #[default]
    Line,
    /// One blank line or several.
    BlankLine,
    /// These bytes, which are not empty.
    Literal(String),
}

impl FromStr for Separator {
    type Err = String;

    /// `line`, `blank-line`, or the separator itself, in which `\n`, `\r`, `\t`, `\0` and `\\` are
    /// what they are in C.
    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "line" | "\\n" => return Ok(Separator::Line),
            "blank-line" => return Ok(Separator::BlankLine),
            "" => return Err("a separator of at least one byte is due".to_owned()),
            _ => {}
        }
        unescape(text).map(Separator::Literal)
    }
}

fn unescape(text: &str) -> Result<String, String> {
    let mut out = String::with_capacity(text.len());
    let mut chars = text.chars();
    while let Some(char) = chars.next() {
        if char != '\\' {
            out.push(char);
            continue;
        }
        out.push(match chars.next() {
            Some('n') => '\n',
            Some('r') => '\r',
            Some('t') => '\t',
            Some('0') => '\0',
            Some('\\') => '\\',
            other => {
                let got = other.map_or("its end".to_owned(), |char| format!("'{char}'"));
                return Err(format!("'{text}': after a backslash {got}, due n, r, t, 0 or \\"));
            }
        });
    }
    Ok(out)
}

/// How documents stand in a file of plain text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TextRules {
    /// What ends a document.
    pub separator: Separator,
    /// What stands for a newline within a document: `<n>` in the corpora of CPM-2 and Yuan.
    pub newline: Option<String>,
    /// Take white space, as Python's `str.strip` knows it, from both ends of a document.
    pub trim: bool,
}

impl TextRules {
    /// The text of a document as it is tokenized. `scratch` is there to be used again.
    pub(crate) fn text<'a>(&self, record: &'a str, scratch: &'a mut String) -> &'a str {
        let text = if self.trim { record.trim_matches(is_python_space) } else { record };
        let Some(newline) = self.newline.as_deref().filter(|newline| text.contains(newline)) else {
            return text;
        };
        scratch.clear();
        let mut parts = text.split(newline);
        scratch.extend(parts.next());
        for part in parts {
            scratch.push('\n');
            scratch.push_str(part);
        }
        scratch
    }
}

/// The information separators are white space to Python, and not to Unicode.
fn is_python_space(char: char) -> bool {
    char.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&char)
}

impl Separator {
    /// Where the last document that is known to be whole ends, its separator included. Bytes before
    /// `searched` were looked at before.
    pub(super) fn last_end(&self, bytes: &[u8], searched: usize) -> Option<usize> {
        match self {
            Separator::Line => memrchr(b'\n', &bytes[searched..]).map(|at| searched + at + 1),
            Separator::BlankLine => last_blank_line(bytes, searched),
            Separator::Literal(literal) => {
                let from = searched.saturating_sub(literal.len() - 1);
                // From the front, as they are split: separators may overlap.
                let found = memmem::find_iter(&bytes[from..], literal.as_bytes()).last();
                found.map(|at| from + at + literal.len())
            }
        }
    }

    /// The end of the first document in the bytes, and where the one after it begins. None: there
    /// is no separator, all the bytes are the document.
    pub(super) fn split_first(&self, bytes: &[u8]) -> Option<(usize, usize)> {
        match self {
            Separator::Line => memchr(b'\n', bytes).map(|at| (at, at + 1)),
            Separator::BlankLine => first_blank_line(bytes),
            Separator::Literal(literal) => {
                memmem::find(bytes, literal.as_bytes()).map(|at| (at, at + literal.len()))
            }
        }
    }
}

/// Behind the newline of the last blank line, if all of it and of the line before it is there.
fn last_blank_line(bytes: &[u8], searched: usize) -> Option<usize> {
    let mut end = memrchr(b'\n', bytes)?;
    loop {
        let line = memrchr(b'\n', &bytes[..end])?;
        if is_blank(&bytes[line + 1..end]) {
            return Some(end + 1);
        }
        // Blank lines that end earlier were found earlier, and cut off.
        if line < searched {
            return None;
        }
        end = line;
    }
}

/// The document ends with the newline before the first blank line; the next begins with the first
/// line that is not blank.
fn first_blank_line(bytes: &[u8]) -> Option<(usize, usize)> {
    let mut newline = memchr(b'\n', bytes)?;
    if is_blank(&bytes[..newline]) {
        return Some((0, newline + 1));
    }
    loop {
        let start = newline + 1;
        let next = start + memchr(b'\n', &bytes[start..])?;
        if is_blank(&bytes[start..next]) {
            return Some((newline, next + 1));
        }
        newline = next;
    }
}

/// Nothing that could be a document, or a line of JSON.
pub(super) fn is_blank(line: &[u8]) -> bool {
    // Most lines tell by their first byte.
    line.iter().all(|byte| matches!(byte, b' ' | b'\t' | b'\r'))
}

/// A carriage return at the end of a line is the line's, not the document's.
pub(super) fn without_return(line: &[u8]) -> &[u8] {
    line.strip_suffix(b"\r").unwrap_or(line)
}

/// Newlines in some bytes.
pub(super) fn newlines(bytes: &[u8]) -> u64 {
    memchr_iter(b'\n', bytes).count() as u64
}
