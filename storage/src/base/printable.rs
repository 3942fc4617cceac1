//! Makes external text (file names, contents of inputs) safe for messages: without control
//! characters, which would reach the terminal, and of a bounded length.

/// Longest name or quotation in a message: paths have at most 4096 bytes, and few over 200.
const NAME_BYTES_MAX: usize = 1 << 10;

/// Longest message: room for some tens of refused keys, one per line.
const MESSAGE_BYTES_MAX: usize = 8 << 10;

/// A name or a quotation for a message: control characters are escaped, and the middle of what is
/// longer than 1 KiB is left out.
#[must_use]
pub fn printable(text: &str) -> String {
    escaped(&shortened(text, NAME_BYTES_MAX), is_control)
}

/// A complete message: as [`printable`], but with line breaks and up to 8 KiB.
#[must_use]
pub fn printable_message(text: &str) -> String {
    let text = shortened(text, MESSAGE_BYTES_MAX);
    escaped(&text, |char| is_control(char) && !matches!(char, '\n' | '\t'))
}

/// Characters that move the cursor, change colours, or reverse the writing direction.
fn is_control(char: char) -> bool {
    char.is_control() || matches!(char, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

fn escaped(text: &str, is_escaped: impl Fn(char) -> bool) -> String {
    let mut out = String::with_capacity(text.len());
    for char in text.chars() {
        match is_escaped(char) {
            true => out.extend(char.escape_default()),
            false => out.push(char),
        }
    }
    out
}

/// The first three quarters and the last quarter: the end of a message says what was expected.
fn shortened(text: &str, bytes_max: usize) -> String {
    if text.len() <= bytes_max {
        return text.to_owned();
    }
    let start = text.floor_char_boundary(bytes_max / 4 * 3);
    let end = text.ceil_char_boundary(text.len() - bytes_max / 4);
    format!("{} [... {} bytes ...] {}", &text[..start], end - start, &text[end..])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_are_escaped() {
        for (text, expected) in [
            ("data/a.jsonl", "data/a.jsonl"),
            ("文 é\u{1f600}", "文 é\u{1f600}"),
            ("a\u{1b}[31mb\u{7}", "a\\u{1b}[31mb\\u{7}"),
            ("\u{9b}2J\u{7f}", "\\u{9b}2J\\u{7f}"),
            ("a\nb\tc\r", "a\\nb\\tc\\r"),
            ("\u{202e}txt", "\\u{202e}txt"),
        ] {
            assert_eq!(printable(text), expected);
        }
        assert_eq!(printable_message("a\n\tb\u{1b}\r"), "a\n\tb\\u{1b}\\r");
    }

    #[test]
    fn long_texts_are_shortened_in_the_middle() {
        let name = format!("{}{}", "é".repeat(10_000), "end");
        let shown = printable(&name);
        assert!(shown.len() < NAME_BYTES_MAX + 40, "{} bytes", shown.len());
        assert!(shown.starts_with("ééé") && shown.ends_with("éend"), "{shown}");
        assert!(shown.contains(" bytes ...] "), "{shown}");
        // An escape is up to six times as long as its character.
        assert!(printable(&"\u{1b}".repeat(100_000)).len() <= 6 * NAME_BYTES_MAX + 40);
        assert_eq!(printable_message(&"x".repeat(MESSAGE_BYTES_MAX)).len(), MESSAGE_BYTES_MAX);
    }
}
