//! Where the constructs of a word end, and its braces.

/// Maximum of words that one word expands to.
const BRACES_MAX: usize = 4096;

/// Maximum bytes of the words that one word expands to: 256 per word.
const BRACES_BYTES_MAX: usize = 256 * BRACES_MAX;

/// The end of the construct that starts here: a quote, an expansion, an escape, or one character.
pub(super) fn skip(chars: &[char], at: usize, in_double: bool) -> Option<usize> {
    match (chars.get(at)?, chars.get(at + 1)) {
        ('\\', _) => Some((at + 2).min(chars.len())),
        ('\'', _) if !in_double => Some(at + 1 + position(&chars[at + 1..], '\'')? + 1),
        ('"', _) if !in_double => double_end(chars, at),
        ('`', _) => escaped_end(chars, at + 1, '`'),
        ('$', Some('(')) => paren_end(chars, at + 1),
        ('$', Some('{')) => brace_end(chars, at + 1, in_double),
        ('$', Some('[')) => Some(at + 2 + position(&chars[at + 2..], ']')? + 1),
        ('$', Some('\'')) if !in_double => escaped_end(chars, at + 2, '\''),
        _ => Some(at + 1),
    }
}

fn position(chars: &[char], c: char) -> Option<usize> {
    chars.iter().position(|other| *other == c)
}

/// The end after the closing quote.
pub(super) fn escaped_end(chars: &[char], mut at: usize, quote: char) -> Option<usize> {
    loop {
        match *chars.get(at)? {
            '\\' => at += 2,
            c if c == quote => return Some(at + 1),
            _ => at += 1,
        }
    }
}

/// The end of a `"..."`.
pub(super) fn double_end(chars: &[char], start: usize) -> Option<usize> {
    let mut at = start + 1;
    while *chars.get(at)? != '"' {
        at = skip(chars, at, true)?;
    }
    Some(at + 1)
}

/// The end of a `(...)`.
pub(super) fn paren_end(chars: &[char], start: usize) -> Option<usize> {
    let mut at = start + 1;
    loop {
        at = match *chars.get(at)? {
            ')' => return Some(at + 1),
            '(' => paren_end(chars, at)?,
            _ => skip(chars, at, false)?,
        };
    }
}

/// The end of a `{...}`.
pub(super) fn brace_end(chars: &[char], start: usize, in_double: bool) -> Option<usize> {
    let mut at = start + 1;
    while *chars.get(at)? != '}' {
        at = match chars[at] {
            '"' if in_double => double_end(chars, at)?,
            _ => skip(chars, at, in_double)?,
        };
    }
    Some(at + 1)
}

/// `a{b,c}` and `{1..3}`, which bash expands before all else. `None` if the result exceeds the
/// limits.
pub(super) fn braces(word: &str) -> Option<Vec<String>> {
    if !word.contains('{') {
        return Some(vec![word.to_owned()]);
    }
    let mut budget = BRACES_BYTES_MAX;
    expand(&word.chars().collect::<Vec<_>>(), &mut budget, 0)
}

fn expand(chars: &[char], budget: &mut usize, depth: usize) -> Option<Vec<String>> {
    if depth > 16 {
        return None;
    }
    let mut at = 0;
    while at < chars.len() {
        if chars[at] != '{' {
            at = skip(chars, at, false).unwrap_or(chars.len());
            continue;
        }
        let Some((parts, end)) = parts(chars, at) else {
            at += 1;
            continue;
        };
        let parts = parts?;
        let before: String = chars[..at].iter().collect();
        let tails = expand(&chars[end..], budget, depth + 1)?;
        let mut all = Vec::new();
        for part in parts {
            for middle in expand(&part, budget, depth + 1)? {
                for tail in &tails {
                    let text = format!("{before}{middle}{tail}");
                    *budget = budget.checked_sub(text.len().max(256))?;
                    all.push(text);
                }
            }
        }
        return Some(all);
    }
    Some(vec![chars.iter().collect()])
}

/// The alternatives of a brace. `None` if there are too many.
type Parts = Option<Vec<Vec<char>>>;

/// The alternatives of the brace that opens here, and the text after it.
fn parts(chars: &[char], open: usize) -> Option<(Parts, usize)> {
    let (mut parts, mut at, mut from, mut depth) = (Vec::new(), open + 1, open + 1, 0_usize);
    loop {
        match *chars.get(at)? {
            '{' => {
                depth += 1;
                at += 1;
            }
            '}' if depth > 0 => {
                depth -= 1;
                at += 1;
            }
            '}' => break,
            ',' if depth == 0 => {
                parts.push(chars[from..at].to_vec());
                at += 1;
                from = at;
            }
            ' ' | '\t' | '\n' => return None,
            _ => at = skip(chars, at, false)?,
        }
    }
    if parts.is_empty() {
        let inner: String = chars[from..at].iter().collect();
        return Some((sequence(&inner)?, at + 1));
    }
    parts.push(chars[from..at].to_vec());
    Some((Some(parts), at + 1))
}

/// `1..5`, `05..1..2`, `a..e`
fn sequence(text: &str) -> Option<Parts> {
    let parts: Vec<&str> = text.split("..").collect();
    let (from, to, step) = match parts[..] {
        [from, to] => (from, to, 1),
        [from, to, step] => (from, to, step.parse::<i64>().ok()?),
        _ => return None,
    };
    let step = usize::try_from(step.unsigned_abs().max(1)).ok()?;
    let letter = |text: &str| {
        let mut chars = text.chars();
        chars.next().filter(|c| c.is_ascii_alphabetic() && chars.next().is_none())
    };
    if let (Some(from), Some(to)) = (letter(from), letter(to)) {
        let (from, to) = (from as u8, to as u8);
        let all: Vec<u8> =
            if from <= to { (from..=to).collect() } else { (to..=from).rev().collect() };
        let texts = all.into_iter().step_by(step).map(|c| vec![char::from(c)]);
        return Some(Some(texts.collect()));
    }
    let (first, last): (i64, i64) = (from.parse().ok()?, to.parse().ok()?);
    let digits = |text: &str| text.trim_start_matches(['-', '+']).len();
    let is_padded =
        |text: &str| digits(text) > 1 && text.trim_start_matches(['-', '+']).starts_with('0');
    let width = if is_padded(from) || is_padded(to) { from.len().max(to.len()) } else { 0 };
    // `format!` pads to 65,535 characters at most.
    if first.abs_diff(last) > BRACES_MAX as u64 || width > 256 {
        return Some(None);
    }
    let all: Vec<i64> =
        if first <= last { (first..=last).collect() } else { (last..=first).rev().collect() };
    let texts = all.into_iter().step_by(step).map(|n| format!("{n:0width$}").chars().collect());
    Some(Some(texts.collect()))
}
