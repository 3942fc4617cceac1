//! The characters that jieba looks words up in: `[\u4E00-\u9FD5a-zA-Z0-9+#&._%-]`. A run of them is
//! a block; the text between blocks is cut into its characters.

/// The code of the first Han character. ASCII characters are their own codes.
pub(super) const HAN: u16 = 128;

const HAN_FIRST: u32 = 0x4e00;
const HAN_LAST: u32 = 0x9fd5;

/// How many Han characters have codes.
pub(super) const HAN_COUNT: usize = (HAN_LAST - HAN_FIRST) as usize + 1;

/// By byte: it is a character of blocks.
const ASCII: [bool; 256] = {
    let mut of = [false; 256];
    let mut byte = 0_u8;
    while byte < 128 {
        of[byte as usize] = byte.is_ascii_alphanumeric()
            || matches!(byte, b'+' | b'#' | b'&' | b'.' | b'_' | b'%' | b'-');
        byte += 1;
    }
    of
};

/// The character that begins at a byte, if it belongs to a block.
#[inline]
pub(super) fn code_at(bytes: &[u8], at: usize) -> Option<u16> {
    match bytes[at..] {
        [byte, ..] if byte < 128 => ASCII[usize::from(byte)].then_some(u16::from(byte)),
        [a @ 0xe4..=0xe9, b, c, ..] => {
            let low = |byte: u8| u32::from(byte & 0x3f);
            han((u32::from(a & 0x0f) << 12) | (low(b) << 6) | low(c))
        }
        _ => None,
    }
}

#[inline]
pub(super) fn is_ascii_of_block(byte: u8) -> bool {
    ASCII[usize::from(byte)]
}

pub(super) fn code_of(char: char) -> Option<u16> {
    code_at(char.encode_utf8(&mut [0; 4]).as_bytes(), 0)
}

#[inline]
fn han(code: u32) -> Option<u16> {
    let of_block = (HAN_FIRST..=HAN_LAST).contains(&code);
    of_block.then(|| (code - HAN_FIRST) as u16 + HAN) // fits: below 20,950
}

/// In UTF-8.
#[inline]
pub(super) fn len_bytes(code: u16) -> usize {
    if code < HAN { 1 } else { 3 }
}
