//! Resolves the escapes of a JSON string.

use wide::u8x16;

use crate::json::scanner::{LineFault, StringSpan, fault};

/// Writes a string to `text` with its escapes resolved. The scanner has checked them.
pub(super) fn resolve(line: &str, span: StringSpan, text: &mut String) -> Result<(), LineFault> {
    text.clear();
    text.reserve(span.end - span.start);
    let bytes = &line.as_bytes()[..span.end];
    let mut at = span.start;
    while at < span.end {
        if bytes[at] != b'\\' {
            let end = plain_end(bytes, at);
            text.push_str(&line[at..end]);
            at = end;
            continue;
        }
        let (char, len) = match bytes[at + 1] {
            b'u' => char_of_escape(&bytes[at..]).map_err(|unit| {
                let found = format!("\\u{unit:04x}, half of a surrogate pair");
                let mut fault = fault(at, found, "a complete surrogate pair");
                fault.hint =
                    Some("the text may have been cut inside a character when it was written");
                fault
            })?,
            b'b' => ('\u{8}', 2),
            b'f' => ('\u{c}', 2),
            b'n' => ('\n', 2),
            b'r' => ('\r', 2),
            b't' => ('\t', 2),
            literal => (char::from(literal), 2),
        };
        text.push(char);
        at += len;
    }
    Ok(())
}

/// The end of the part without escapes: a quote, a backslash or a control character. There is one
/// every few words, too few bytes for the call of a search function to pay off.
#[inline]
pub(super) fn plain_end(bytes: &[u8], mut at: usize) -> usize {
    while let Some(block) = bytes[at..].first_chunk() {
        let block = u8x16::new(*block);
        let control = block.min(u8x16::splat(0x1f)).simd_eq(block);
        let is = |byte| block.simd_eq(u8x16::splat(byte));
        let ends = (is(b'"') | is(b'\\') | control).to_bitmask();
        if ends != 0 {
            return at + ends.trailing_zeros() as usize;
        }
        at += 16;
    }
    let is_plain = |byte: &&u8| !matches!(byte, b'"' | b'\\' | 0..0x20);
    at + bytes[at..].iter().take_while(is_plain).count()
}

/// The character of one `\u` escape, or of two that are a surrogate pair, and their length. The
/// error is a surrogate without its other half.
#[inline]
fn char_of_escape(escape: &[u8]) -> Result<(char, usize), u32> {
    let first = unit(escape).expect("checked when it was scanned");
    if let Some(char) = char::from_u32(first) {
        return Ok((char, 6));
    }
    let second = escape.get(6..).filter(|rest| rest.starts_with(b"\\u")).and_then(unit);
    match second {
        Some(second @ 0xdc00..=0xdfff) if first < 0xdc00 => {
            let code = 0x1_0000 + ((first - 0xd800) << 10) + (second - 0xdc00);
            Ok((char::from_u32(code).expect("below U+110000"), 12))
        }
        _ => Err(first),
    }
}

/// The number after `\u`.
#[inline]
fn unit(escape: &[u8]) -> Option<u32> {
    hex_of(*escape.get(2..)?.first_chunk()?)
}

/// The value of four hexadecimal digits.
#[inline]
pub(super) fn hex_of(digits: [u8; 4]) -> Option<u32> {
    let [a, b, c, d] = digits.map(|digit| u32::from(HEX[usize::from(digit)]));
    // Bytes that are no digits have 16 there, a bit that no digit has.
    (a | b | c | d < 16).then_some((a << 12) | (b << 8) | (c << 4) | d)
}

/// The value of each byte as a hexadecimal digit; 16 if it is none.
const HEX: [u8; 256] = {
    let mut hex = [16; 256];
    let mut digit = 0;
    while digit < 16 {
        hex[b"0123456789abcdef"[digit] as usize] = digit as u8;
        hex[b"0123456789ABCDEF"[digit] as usize] = digit as u8;
        digit += 1;
    }
    hex
};
