use std::str::FromStr;

use memchr::memmem;

use super::lines::{is_blank, last_line_end, last_line_end_known, line_end};

/// What ends a document in a file of plain text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Separator {
    /// The end of its line: `\n`, `\r\n` or `\r`, as in Python's universal newlines.
    #[default]
    Line,
    /// One blank line or several. Lines end as above.
    BlankLine,
    /// These bytes, which are not empty. No other byte is translated.
    Literal(String),
    /// The end of the file.
    File,
}

impl FromStr for Separator {
    type Err = String;

    /// `line`, `blank-line`, `file`, or the separator itself, in which `\n`, `\r`, `\t`, `\0` and
    /// `\\` are escapes as in C.
    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "line" | "\\n" => return Ok(Separator::Line),
            "blank-line" => return Ok(Separator::BlankLine),
            "file" => return Ok(Separator::File),
            "" => return Err("expected a separator of at least one byte".to_owned()),
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
                let found = other.map_or("the end".to_owned(), |char| format!("'{char}'"));
                return Err(format!("expected n, r, t, 0 or \\ after a backslash, found {found}"));
            }
        });
    }
    Ok(out)
}

/// How a file of plain text is read as documents.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TextRules {
    /// What ends a document.
    pub separator: Separator,
    /// The text for a newline within a document: `<n>` in the corpora of CPM-2 and Yuan.
    pub newline: Option<String>,
    /// Remove white space, as Python's `str.strip` defines it, from both ends of a document.
    pub trim: bool,
}

impl TextRules {
    /// The text of a document as it is tokenized. `scratch` is reused between calls.
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
    /// The end of the last document that is known to be complete, its separator included. More
    /// bytes may follow. Those before `searched` were searched by an earlier call.
    pub(super) fn last_end(&self, bytes: &[u8], searched: usize) -> Option<usize> {
        match self {
            Separator::Line => {
                // A `\r` that ended the bytes of the earlier call is searched again.
                let from = searched.saturating_sub(1);
                last_line_end_known(&bytes[from..]).map(|line| from + line.next)
            }
            Separator::BlankLine => last_blank_line(bytes, searched),
            Separator::Literal(literal) => {
                let from = searched.saturating_sub(literal.len() - 1);
                // From the front, as they are split: separators may overlap.
                let found = memmem::find_iter(&bytes[from..], literal.as_bytes()).last();
                found.map(|at| from + at + literal.len())
            }
            Separator::File => None,
        }
    }

    /// The end of the first document in the bytes, and the start of the next. `None`: there is no
    /// separator, and all bytes are the document.
    pub(super) fn split_first(&self, bytes: &[u8]) -> Option<(usize, usize)> {
        match self {
            Separator::Line => line_end(bytes).map(|line| (line.end, line.next)),
            Separator::BlankLine => first_blank_line(bytes),
            Separator::Literal(literal) => {
                memmem::find(bytes, literal.as_bytes()).map(|at| (at, at + literal.len()))
            }
            Separator::File => None,
        }
    }
}

/// The end of the last blank line, if that line and the end of the line before it are there.
fn last_blank_line(bytes: &[u8], searched: usize) -> Option<usize> {
    let mut blank = last_line_end_known(bytes)?;
    loop {
        let before = last_line_end(&bytes[..blank.end])?;
        if is_blank(&bytes[before.next..blank.end]) {
            return Some(blank.next);
        }
        // Blank lines that end earlier were found and removed by an earlier call.
        if before.next < searched {
            return None;
        }
        blank = before;
    }
}

/// The document ends before the end of the line before the first blank line; the next begins after
/// that blank line.
fn first_blank_line(bytes: &[u8]) -> Option<(usize, usize)> {
    let mut line = line_end(bytes)?;
    if is_blank(&bytes[..line.end]) {
        return Some((0, line.next));
    }
    loop {
        let next = line_end(&bytes[line.next..])?.shifted(line.next);
        if is_blank(&bytes[line.next..next.end]) {
            return Some((line.end, next.next));
        }
        line = next;
    }
}
