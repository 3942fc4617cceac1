//! Escapes of `$'...'`, of `echo -e` and `printf`, and of backquotes.

/// `$'...'`
pub(super) fn ansi(chars: &[char]) -> String {
    read(chars, Kind::Ansi).0
}

/// `echo -e`; whether a `\c` ends the output.
pub(super) fn echo(text: &str) -> (String, bool) {
    read(&text.chars().collect::<Vec<_>>(), Kind::Echo)
}

/// The format of `printf`.
pub(super) fn format(text: &str) -> String {
    read(&text.chars().collect::<Vec<_>>(), Kind::Format).0
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Ansi,
    Echo,
    Format,
}

fn read(chars: &[char], kind: Kind) -> (String, bool) {
    let mut out = String::new();
    let mut at = 0;
    while let Some(&c) = chars.get(at) {
        at += 1;
        let next = chars.get(at).copied();
        let (true, Some(next)) = (c == '\\', next) else {
            out.push(c);
            continue;
        };
        at += 1;
        let plain = match next {
            'n' => '\n',
            't' => '\t',
            'r' => '\r',
            'a' => '\u{7}',
            'b' => '\u{8}',
            'e' | 'E' => '\u{1b}',
            'f' => '\u{c}',
            'v' => '\u{b}',
            '\\' => '\\',
            '\'' | '"' if kind != Kind::Echo => next,
            'c' if kind == Kind::Echo => return (out, true),
            'x' | '0'..='7' => {
                let (base, most) = if next == 'x' { (16, 2) } else { (8, 3) };
                let is_zero = kind == Kind::Echo && next == '0';
                if kind == Kind::Echo && base == 8 && !is_zero {
                    out.extend(['\\', next]);
                    continue;
                }
                let from = if base == 16 || is_zero { at } else { at - 1 };
                let digits: String =
                    chars[from..].iter().take(most).take_while(|c| c.is_digit(base)).collect();
                at = from + digits.len();
                let code = u32::from_str_radix(&digits, base).unwrap_or(0);
                char::from_u32(code & 0xff).unwrap_or('\u{fffd}')
            }
            other => {
                out.extend(['\\', other]);
                continue;
            }
        };
        out.push(plain);
    }
    (out, false)
}

/// The command between two backquotes, in which `\` quotes a backquote, a `$` and itself.
pub(super) fn backquoted(chars: &[char], is_quoted: bool) -> String {
    let mut out = String::new();
    let mut at = 0;
    while let Some(&c) = chars.get(at) {
        let next = chars.get(at + 1).copied();
        let quotes = matches!(next, Some('`' | '\\' | '$')) || (is_quoted && next == Some('"'));
        if let (true, Some(next)) = (c == '\\' && quotes, next) {
            out.push(next);
            at += 2;
        } else {
            out.push(c);
            at += 1;
        }
    }
    out
}
