//! Patterns of the shell: `*`, `?` and `[...]`, against a text.

/// Maximum of comparisons of one match; beyond, the result is unknown.
const STEPS_MAX: usize = 1 << 20;

/// A compiled pattern.
#[derive(Debug)]
pub(super) struct GlobPattern(Vec<Piece>);

#[derive(Debug)]
enum Piece {
    One(char),
    Any,
    Many,
    Class { ranges: Vec<(char, char)>, names: Vec<String>, is_negated: bool },
}

impl GlobPattern {
    /// A `\` makes the next character literal. `None` for `?(...)` and the other extended patterns.
    pub(super) fn new(text: &str) -> Option<Self> {
        let chars: Vec<char> = text.chars().collect();
        let mut pieces = Vec::new();
        let mut at = 0;
        while let Some(&c) = chars.get(at) {
            at += 1;
            match c {
                '\\' => {
                    pieces.push(Piece::One(chars.get(at).copied().unwrap_or('\\')));
                    at += 1;
                }
                '?' | '*' | '+' | '@' | '!' if chars.get(at) == Some(&'(') => return None,
                '*' => pieces.push(Piece::Many),
                '?' => pieces.push(Piece::Any),
                '[' => match class(&chars, at) {
                    Some((piece, after)) => {
                        pieces.push(piece);
                        at = after;
                    }
                    None => pieces.push(Piece::One('[')),
                },
                c => pieces.push(Piece::One(c)),
            }
        }
        Some(GlobPattern(pieces))
    }

    /// Whether it has a `*`, which must be tried at every length.
    pub(super) fn has_star(&self) -> bool {
        self.0.iter().any(|piece| matches!(piece, Piece::Many))
    }

    /// Number of characters and classes.
    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether all of the text matches. `None` if that takes too long.
    pub(super) fn matches(&self, text: &[char]) -> Option<bool> {
        if self.0.len().saturating_mul(text.len()) > STEPS_MAX {
            return None;
        }
        let (mut piece, mut at) = (0, 0);
        let mut back: Option<(usize, usize)> = None;
        while at < text.len() {
            match self.0.get(piece) {
                Some(Piece::Many) => {
                    back = Some((piece + 1, at));
                    piece += 1;
                }
                Some(other) if other.is(text[at]) => {
                    piece += 1;
                    at += 1;
                }
                _ => {
                    let Some((after, from)) = back else { return Some(false) };
                    (piece, at) = (after, from + 1);
                    back = Some((after, from + 1));
                }
            }
        }
        Some(self.0[piece..].iter().all(|piece| matches!(piece, Piece::Many)))
    }
}

impl Piece {
    fn is(&self, c: char) -> bool {
        match self {
            Piece::One(one) => *one == c,
            Piece::Any => true,
            Piece::Many => false,
            Piece::Class { ranges, names, is_negated } => {
                let inside = ranges.iter().any(|(from, to)| (*from..=*to).contains(&c))
                    || names.iter().any(|name| is_of(name, c));
                inside != *is_negated
            }
        }
    }
}

/// `[a-z[:digit:]]` from after its `[`, and the text after its `]`.
fn class(chars: &[char], start: usize) -> Option<(Piece, usize)> {
    let mut at = start;
    let is_negated = matches!(chars.get(at), Some('!' | '^'));
    at += usize::from(is_negated);
    let first = at;
    let (mut ranges, mut names) = (Vec::new(), Vec::new());
    loop {
        let mut c = *chars.get(at)?;
        if c == ']' && at > first {
            return Some((Piece::Class { ranges, names, is_negated }, at + 1));
        }
        if c == '[' && chars.get(at + 1) == Some(&':') {
            let name: String = chars[at + 2..].iter().take_while(|c| c.is_alphabetic()).collect();
            let end = at + 2 + name.len();
            if chars.get(end) == Some(&':') && chars.get(end + 1) == Some(&']') {
                names.push(name);
                at = end + 2;
                continue;
            }
        }
        if c == '\\' {
            at += 1;
            c = *chars.get(at)?;
        }
        at += 1;
        let to = chars.get(at + 1).filter(|to| chars.get(at) == Some(&'-') && **to != ']');
        match to {
            Some(to) => {
                ranges.push((c, *to));
                at += 2;
            }
            None => ranges.push((c, c)),
        }
    }
}

fn is_of(name: &str, c: char) -> bool {
    match name {
        "alnum" => c.is_alphanumeric(),
        "alpha" => c.is_alphabetic(),
        "blank" => c == ' ' || c == '\t',
        "cntrl" => c.is_control(),
        "digit" => c.is_ascii_digit(),
        "lower" => c.is_lowercase(),
        "punct" => c.is_ascii_punctuation(),
        "space" => c.is_whitespace(),
        "upper" => c.is_uppercase(),
        "xdigit" => c.is_ascii_hexdigit(),
        _ => false,
    }
}

/// A regular expression of characters, classes, `*`, `+`, `?`, `^` and `$`.
#[derive(Debug)]
pub(super) struct Regex {
    pieces: Vec<(Piece, char)>,
    at_start: bool,
    at_end: bool,
}

impl Regex {
    /// `None` for groups, alternatives and counts.
    pub(super) fn new(text: &str) -> Option<Self> {
        let chars: Vec<char> = text.chars().collect();
        let at_start = chars.first() == Some(&'^');
        let (mut at, mut pieces, mut at_end) = (usize::from(at_start), Vec::new(), false);
        while let Some(&c) = chars.get(at) {
            at += 1;
            let piece = match c {
                '$' if at == chars.len() => {
                    at_end = true;
                    break;
                }
                '\\' => {
                    at += 1;
                    Piece::One(*chars.get(at - 1)?)
                }
                '[' => {
                    let (piece, after) = class(&chars, at)?;
                    at = after;
                    piece
                }
                '.' => Piece::Any,
                '(' | ')' | '|' | '{' | '*' | '+' | '?' | '^' | '$' => return None,
                c => Piece::One(c),
            };
            let times = chars.get(at).copied().filter(|c| ['*', '+', '?'].contains(c));
            at += usize::from(times.is_some());
            pieces.push((piece, times.unwrap_or('1')));
        }
        Some(Regex { pieces, at_start, at_end })
    }

    /// Whether it is found. `None` if that takes too long.
    pub(super) fn is_in(&self, text: &[char]) -> Option<bool> {
        let steps = text.len().saturating_mul(text.len()).saturating_mul(self.pieces.len());
        if steps > STEPS_MAX {
            return None;
        }
        let starts = if self.at_start { 0..=0 } else { 0..=text.len() };
        // All positions at which the pieces so far can end.
        let mut places: Vec<bool> = (0..=text.len()).map(|at| starts.contains(&at)).collect();
        for (piece, times) in &self.pieces {
            let mut next = vec![false; text.len() + 1];
            for at in 0..=text.len() {
                let is_here = places[at] || (['*', '+'].contains(times) && at > 0 && next[at]);
                if places[at] && ['*', '?'].contains(times) {
                    next[at] = true;
                }
                let goes_on = is_here && text.get(at).is_some_and(|c| piece.is(*c));
                if goes_on {
                    next[at + 1] = true;
                }
            }
            places = next;
        }
        Some(if self.at_end { places[text.len()] } else { places.contains(&true) })
    }
}
