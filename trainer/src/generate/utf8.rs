/// Decodes a stream of bytes: a character that is not complete yet is held back.
#[derive(Debug, Default)]
pub struct Utf8Stream {
    held: Vec<u8>,
}

impl Utf8Stream {
    /// Takes bytes and returns the text that they complete. Bytes that are no part of a character
    /// become U+FFFD.
    pub fn push(&mut self, bytes: &[u8]) -> String {
        self.held.extend_from_slice(bytes);
        let mut text = String::new();
        loop {
            match std::str::from_utf8(&self.held) {
                Ok(all) => {
                    text.push_str(all);
                    self.held.clear();
                    return text;
                }
                Err(error) => {
                    let valid = error.valid_up_to();
                    text.push_str(&String::from_utf8_lossy(&self.held[..valid]));
                    let Some(bad) = error.error_len() else {
                        self.held.drain(..valid);
                        return text;
                    };
                    text.push(char::REPLACEMENT_CHARACTER);
                    self.held.drain(..valid + bad);
                }
            }
        }
    }

    /// The end: what is held back will never be complete.
    #[must_use]
    pub fn finish(self) -> String {
        String::from_utf8_lossy(&self.held).into_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn incomplete_characters_are_held_back() {
        let mut stream = Utf8Stream::default();
        let poem = "床前明月光".as_bytes();
        assert_eq!(stream.push(&poem[..4]), "床");
        assert_eq!(stream.push(&poem[4..5]), "");
        assert_eq!(stream.push(&poem[5..]), "前明月光");
        assert_eq!(stream.push(b"a\xffb\xe5"), "a\u{fffd}b");
        assert_eq!(stream.push(b"c"), "\u{fffd}c");
        assert_eq!(stream.push(b"\xe5\xba"), "");
        assert_eq!(stream.finish(), "\u{fffd}");
    }
}
