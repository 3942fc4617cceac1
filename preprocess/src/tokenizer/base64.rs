//! Decodes base64, in which vocabularies spell the bytes of their tokens.

/// The bytes that a text encodes in RFC 4648's standard alphabet, padded. None if it is invalid.
pub(super) fn decode(text: &str) -> Option<Vec<u8>> {
    let (quads, []) = text.as_bytes().as_chunks::<4>() else { return None };
    let mut bytes = Vec::with_capacity(quads.len() * 3);
    for (i, quad) in quads.iter().enumerate() {
        let padding = quad.iter().rev().take_while(|&&char| char == b'=').count();
        if padding > 2 || padding > 0 && i + 1 < quads.len() {
            return None;
        }
        let mut bits = 0;
        for &char in &quad[..4 - padding] {
            bits = (bits << 6) | value(char)?;
        }
        bits <<= 6 * padding;
        let three = [bits >> 16, bits >> 8, bits].map(|bits| (bits & 0xff) as u8); // fits: masked
        let (kept, left_over) = three.split_at(3 - padding);
        if left_over.iter().any(|&byte| byte != 0) {
            return None;
        }
        bytes.extend_from_slice(kept);
    }
    Some(bytes)
}

fn value(char: u8) -> Option<u32> {
    let value = match char {
        b'A'..=b'Z' => char - b'A',
        b'a'..=b'z' => char - b'a' + 26,
        b'0'..=b'9' => char - b'0' + 52,
        b'+' => 62,
        b'/' => 63,
        _ => return None,
    };
    Some(u32::from(value))
}

#[cfg(test)]
mod tests {
    use super::decode;

    /// The vectors of RFC 4648, and texts that are not canonical.
    #[test]
    fn standard_vectors_are_decoded() {
        let pairs =
            [("", ""), ("Zg==", "f"), ("Zm8=", "fo"), ("Zm9v", "foo"), ("Zm9vYmFy", "foobar")];
        for (text, expected) in pairs {
            assert_eq!(decode(text).as_deref(), Some(expected.as_bytes()), "{text}");
        }
        assert_eq!(decode("+/8="), Some(vec![0xfb, 0xff]));
        for bad in ["Z", "Zg", "Zg=", "Zh==", "Zm9=", "Z===", "====", "Zg==Zg==", "Zm 9", "Zm9\n"] {
            assert_eq!(decode(bad), None, "{bad:?}");
        }
    }
}
