use crate::json::escape::resolve;
use crate::json::scanner::{LineFault, Scanner, fault, kind_of};

/// The strings of a list, one after another.
#[derive(Debug)]
pub(crate) struct Texts<'a> {
    line: &'a str,
    start: usize,
    /// The end of the string returned last.
    at: usize,
    key: &'a str,
    /// A string in which escapes had to be resolved.
    text: &'a mut String,
}

impl<'a> Texts<'a> {
    /// The list that begins at `start` of a valid line.
    pub(super) fn new(line: &'a str, start: usize, key: &'a str, text: &'a mut String) -> Self {
        Texts { line, start, at: start + 1, key, text }
    }

    /// The next string; a fault if the element is something else.
    pub(crate) fn next_text(&mut self) -> Option<Result<&str, LineFault>> {
        let Texts { line, at, key, text, .. } = self;
        let (bytes, open) = (line.as_bytes(), &mut Vec::new());
        let mut scanner = Scanner { line, bytes, at: *at, open, once: false };
        scanner.skip_space();
        if scanner.peek() == Some(b',') {
            scanner.at += 1;
            scanner.skip_space();
        }
        match scanner.peek()? {
            b']' => return None,
            b'"' => {}
            first => {
                let found = format!("{} in the list under the key '{key}'", kind_of(first));
                return Some(Err(fault(scanner.at, found, "a string")));
            }
        }
        let span = match scanner.string() {
            Ok(span) => span,
            Err(fault) => return Some(Err(fault)),
        };
        *at = scanner.at;
        if !span.escaped {
            return Some(Ok(&line[span.start..span.end]));
        }
        Some(resolve(line, span, text).map(|()| text.as_str()))
    }

    /// The fault of a list where one text is expected.
    pub(crate) fn refused(&self, hint: &'static str) -> LineFault {
        let found = format!("a list under the key '{}'", self.key);
        LineFault { hint: Some(hint), ..fault(self.start, found, "a string") }
    }
}
