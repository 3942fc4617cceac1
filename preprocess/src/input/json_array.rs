//! Finds where the elements of a JSON list begin and end, without holding the list. The elements
//! are not checked here; their reader does that.

use memchr::memchr2;

use super::records::{BYTE_ORDER_MARK, ByteSpan};
use crate::json::scanner::LineFault;

/// A scan of a list that is read in pieces. It scans each byte once, except those of an element
/// that continues in the next batch.
#[derive(Clone, Copy, Debug)]
pub(super) struct ArrayScan {
    /// Bytes scanned.
    at: usize,
    state: ScanState,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ScanState {
    /// Nothing has been seen yet.
    Start,
    /// After the bracket that opens the list.
    Opened,
    /// After an element.
    AfterElement,
    /// After a comma.
    AfterComma,
    Element {
        start: usize,
        depth: u32,
        in_string: bool,
    },
    /// After the bracket that closes the list.
    Closed,
}

/// A syntax error and its position.
pub(super) type ArrayFault = (usize, LineFault);

impl ArrayScan {
    /// Starts at the first byte of a file, or after an element.
    pub(super) fn new(offset: u64) -> Self {
        ArrayScan {
            at: 0,
            state: if offset == 0 { ScanState::Start } else { ScanState::AfterElement },
        }
    }

    /// Continues to the end of the bytes, and appends the elements that ended.
    pub(super) fn scan(
        &mut self,
        bytes: &[u8],
        spans: &mut Vec<ByteSpan>,
    ) -> Result<(), ArrayFault> {
        while self.at < bytes.len() {
            if let ScanState::Element { .. } = self.state {
                self.scan_element(bytes, spans);
                continue;
            }
            let byte = bytes[self.at];
            if byte.is_ascii_whitespace() {
                self.at += 1;
                continue;
            }
            if self.state == ScanState::Start && byte == BYTE_ORDER_MARK[0] {
                return self.byte_order_mark(&bytes[self.at..]);
            }
            self.state = match (self.state, byte) {
                (ScanState::Start, b'[') => ScanState::Opened,
                (ScanState::AfterElement, b',') => ScanState::AfterComma,
                (ScanState::Opened | ScanState::AfterElement, b']') => ScanState::Closed,
                (ScanState::Opened | ScanState::AfterComma, _)
                    if !matches!(byte, b',' | b']' | b'}') =>
                {
                    self.state = ScanState::Element { start: self.at, depth: 0, in_string: false };
                    continue;
                }
                _ => return Err((self.at, self.syntax_fault(char_of(bytes, self.at)))),
            };
            self.at += 1;
        }
        Ok(())
    }

    /// The caller removes the bytes up to the end of the last element; the rest is scanned again.
    pub(super) fn cut(&mut self) {
        *self = ArrayScan { at: 0, state: ScanState::AfterElement };
    }

    /// Whether the list has been closed; if not, what is wrong with a file that ends here.
    pub(super) fn end(&self) -> Result<(), ArrayFault> {
        if self.state == ScanState::Closed {
            return Ok(());
        }
        let mut fault = self.syntax_fault("the end of the file".to_owned());
        fault.hint = Some("the file may be truncated");
        Err((self.at, fault))
    }

    /// Scans to the end of the element, or of the bytes.
    fn scan_element(&mut self, bytes: &[u8], spans: &mut Vec<ByteSpan>) {
        let ScanState::Element { start, mut depth, mut in_string } = self.state else { return };
        while self.at < bytes.len() {
            let rest = &bytes[self.at..];
            if in_string {
                let Some(at) = memchr2(b'"', b'\\', rest) else {
                    self.at = bytes.len();
                    break;
                };
                if rest[at] == b'\\' {
                    // The escaped character may be in the next bytes, and is then skipped.
                    self.at += at + 2;
                    continue;
                }
                in_string = false;
                self.at += at + 1;
            } else {
                match rest[0] {
                    b'"' => in_string = true,
                    b'{' | b'[' => depth += 1,
                    b'}' | b']' if depth > 0 => depth -= 1,
                    // The end of a bare number or word.
                    b',' | b']' | b'}' if depth == 0 => {
                        return self.end_element(start, spans);
                    }
                    byte if depth == 0 && byte.is_ascii_whitespace() => {
                        return self.end_element(start, spans);
                    }
                    _ => {
                        self.at += 1;
                        continue;
                    }
                }
                self.at += 1;
            }
            if depth == 0 && !in_string {
                return self.end_element(start, spans);
            }
        }
        self.state = ScanState::Element { start, depth, in_string };
    }

    fn end_element(&mut self, start: usize, spans: &mut Vec<ByteSpan>) {
        spans.push(start..self.at);
        self.state = ScanState::AfterElement;
    }

    /// Refuses a mark before the list, as before the object of a line; more bytes may show one.
    fn byte_order_mark(&self, bytes: &[u8]) -> Result<(), ArrayFault> {
        if bytes.starts_with(BYTE_ORDER_MARK) {
            let mut fault = self.syntax_fault("a byte order mark".to_owned());
            fault.hint = Some("write the file without a byte order mark");
            return Err((self.at, fault));
        }
        match BYTE_ORDER_MARK.starts_with(bytes) {
            true => Ok(()),
            false => Err((self.at, self.syntax_fault(char_of(bytes, 0)))),
        }
    }

    fn syntax_fault(&self, found: String) -> LineFault {
        let expected = match self.state {
            ScanState::Start => "a list, '['",
            ScanState::Opened => "an object or ']'",
            ScanState::AfterElement => "',' or ']'",
            ScanState::AfterComma => "an object",
            ScanState::Element { .. } => "the end of the element, and ']'",
            ScanState::Closed => "the end of the file after the list",
        };
        LineFault { column: 0, found, expected: expected.to_owned(), hint: None }
    }
}

fn char_of(bytes: &[u8], at: usize) -> String {
    let end = bytes.len().min(at + 4);
    match String::from_utf8_lossy(&bytes[at..end]).chars().next() {
        Some(char) if char.is_ascii_graphic() => format!("'{char}'"),
        _ => format!("byte {:#04x}", bytes[at]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The mark is refused by its name, as before JSON lines, however the bytes arrive.
    #[test]
    fn a_byte_order_mark_is_named() {
        let list = b"\xef\xbb\xbf[{}]";
        for first in 1..=list.len() {
            let (mut scan, mut spans) = (ArrayScan::new(0), Vec::new());
            let scanned = scan.scan(&list[..first], &mut spans);
            let (at, fault) = scanned.and_then(|()| scan.scan(list, &mut spans)).unwrap_err();
            assert_eq!((at, fault.found.as_str()), (0, "a byte order mark"), "{first}");
            assert!(fault.hint.is_some_and(|hint| hint.contains("without a byte order mark")));
        }
        for other in [b"\xef\xbb[]".as_slice(), b"\xef\x80\x80", b"\xc3\xa4"] {
            let (at, fault) = ArrayScan::new(0).scan(other, &mut Vec::new()).unwrap_err();
            assert!(at == 0 && fault.found.starts_with("byte 0x"), "{fault:?}");
        }
    }
}
