//! Conditions: `[ ]`, `test` and `[[ ]]`, as far as their values are known.

use super::pattern::{GlobPattern, Regex};
use super::tree::{TestTree, Word};
use super::{Outcome, Shell, Status, is_argument, is_unknown, marker_len};

/// The value of a condition. The guess for an unknown one assumes that nothing outside of the
/// script is set and no file exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Truth {
    Known(bool),
    Guess(bool),
}

impl Truth {
    fn not(self) -> Self {
        match self {
            Truth::Known(is) => Truth::Known(!is),
            Truth::Guess(is) => Truth::Guess(!is),
        }
    }

    fn and(self, other: Self) -> Self {
        match (self, other) {
            (Truth::Known(false), _) | (_, Truth::Known(false)) => Truth::Known(false),
            (Truth::Known(true), other) | (other, Truth::Known(true)) => other,
            (Truth::Guess(a), Truth::Guess(b)) => Truth::Guess(a && b),
        }
    }

    fn or(self, other: Self) -> Self {
        self.not().and(other.not()).not()
    }

    /// The exit code of a command that is this condition.
    pub(super) fn status(self, text: impl FnOnce() -> String) -> Status {
        match self {
            Truth::Known(is) => Status::Known(i64::from(!is)),
            Truth::Guess(guess) => Status::Unknown { guess, text: text() },
        }
    }
}

/// Known if all of its operands are.
fn truth(is: bool, operands: &[&str]) -> Truth {
    let unknown = operands.iter().any(|operand| is_unknown(operand));
    if unknown { Truth::Guess(is) } else { Truth::Known(is) }
}

/// A text as if nothing outside of the script were set.
fn bare(text: &str) -> String {
    let mut out = String::new();
    let mut rest = text;
    while let Some(c) = rest.chars().next() {
        let len = marker_len(rest);
        if len.is_none() {
            out.push(c);
        }
        rest = &rest[len.unwrap_or(c.len_utf8())..];
    }
    out
}

impl Shell {
    /// The words between `[` and `]`. An error counts as false in bash.
    pub(super) fn test(&self, words: &[String]) -> Truth {
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        self.test_words(&words).unwrap_or(Truth::Known(false))
    }

    fn test_words(&self, words: &[&str]) -> Option<Truth> {
        match *words {
            [] => Some(Truth::Known(false)),
            [text] | ["(", text, ")"] => self.one("-n", text),
            ["!", text] => Some(self.one("-n", text)?.not()),
            [kind, text] => self.one(kind, text),
            [left, kind, right] if is_binary(kind) => self.two(left, kind, right),
            ["!", a, b] => Some(self.test_words(&[a, b])?.not()),
            ["!", a, b, c] if is_binary(b) => Some(self.test_words(&[a, b, c])?.not()),
            _ => {
                let mut at = 0;
                let truth = self.any(words, &mut at, 0)?;
                (at == words.len()).then_some(truth)
            }
        }
    }

    fn any(&self, words: &[&str], at: &mut usize, depth: usize) -> Option<Truth> {
        let mut truth = self.all(words, at, depth)?;
        while words.get(*at) == Some(&"-o") {
            *at += 1;
            truth = truth.or(self.all(words, at, depth)?);
        }
        Some(truth)
    }

    fn all(&self, words: &[&str], at: &mut usize, depth: usize) -> Option<Truth> {
        let mut truth = self.primary(words, at, depth)?;
        while words.get(*at) == Some(&"-a") {
            *at += 1;
            truth = truth.and(self.primary(words, at, depth)?);
        }
        Some(truth)
    }

    fn primary(&self, words: &[&str], at: &mut usize, depth: usize) -> Option<Truth> {
        if depth > 32 {
            return None;
        }
        let first = *words.get(*at)?;
        if words.get(*at + 1).is_some_and(|kind| is_binary(kind) && !["-a", "-o"].contains(kind)) {
            let right = words.get(*at + 2)?;
            let truth = self.two(first, words[*at + 1], right);
            *at += 3;
            return truth;
        }
        *at += 1;
        match first {
            "!" => Some(self.primary(words, at, depth + 1)?.not()),
            "(" => {
                let truth = self.any(words, at, depth + 1)?;
                *at += 1;
                (words.get(*at - 1) == Some(&")")).then_some(truth)
            }
            kind if is_unary(kind) && words.len() > *at => {
                *at += 1;
                self.one(kind, words[*at - 1])
            }
            text => self.one("-n", text),
        }
    }

    fn one(&self, kind: &str, text: &str) -> Option<Truth> {
        Some(match kind {
            "-n" | "-z" => {
                // Text next to an unknown part is not empty. A script that checks whether it has an
                // argument is interpreted as if it had none.
                let is_empty = match bare(text) {
                    _ if is_argument(text) => Truth::Known(true),
                    bare if bare.is_empty() => truth(true, &[text]),
                    _ => Truth::Known(false),
                };
                if kind == "-z" { is_empty } else { is_empty.not() }
            }
            "-v" => {
                let name = text.split('[').next().unwrap_or(text);
                if self.variables.is_outside(name) {
                    Truth::Guess(false)
                } else {
                    truth(self.variables.text(name).is_some(), &[text])
                }
            }
            kind if is_unary(kind) => Truth::Guess(false),
            _ => return None,
        })
    }

    fn two(&self, left: &str, kind: &str, right: &str) -> Option<Truth> {
        let operands = [left, right];
        let (a, b) = (bare(left), bare(right));
        let number = |text: &str| text.trim().parse::<i64>().ok();
        let compare = |is: fn(i64, i64) -> bool| {
            let known = truth(true, &operands);
            match (number(&a), number(&b)) {
                (Some(a), Some(b)) => truth(is(a, b), &operands),
                _ if known == Truth::Known(true) => Truth::Known(false),
                _ => Truth::Guess(false),
            }
        };
        Some(match kind {
            "=" | "==" => truth(a == b, &operands),
            "!=" => truth(a != b, &operands),
            "<" => truth(a < b, &operands),
            ">" => truth(a > b, &operands),
            "-eq" => compare(|a, b| a == b),
            "-ne" => compare(|a, b| a != b),
            "-lt" => compare(|a, b| a < b),
            "-le" => compare(|a, b| a <= b),
            "-gt" => compare(|a, b| a > b),
            "-ge" => compare(|a, b| a >= b),
            "-nt" | "-ot" | "-ef" => Truth::Guess(false),
            "-a" => self.one("-n", left)?.and(self.one("-n", right)?),
            "-o" => self.one("-n", left)?.or(self.one("-n", right)?),
            _ => return None,
        })
    }

    /// `[[ ... ]]`
    pub(super) fn test_tree(&mut self, tree: &TestTree) -> Outcome<Truth> {
        Ok(match tree {
            TestTree::And(left, right) => {
                let left = self.test_tree(left)?;
                if left == Truth::Known(false) { left } else { left.and(self.test_tree(right)?) }
            }
            TestTree::Or(left, right) => {
                let left = self.test_tree(left)?;
                if left == Truth::Known(true) { left } else { left.or(self.test_tree(right)?) }
            }
            TestTree::Not(inner) => self.test_tree(inner)?.not(),
            TestTree::One(kind, word) => {
                let text = self.text(&word.text)?;
                self.one(kind, &text).unwrap_or(Truth::Guess(false))
            }
            TestTree::Two(kind, left, right) => self.test_two(kind, left, right)?,
        })
    }

    fn test_two(&mut self, kind: &str, left: &Word, right: &Word) -> Outcome<Truth> {
        let left = self.text(&left.text)?;
        if kind.starts_with('-') && !["-nt", "-ot", "-ef"].contains(&kind) {
            let right = self.text(&right.text)?;
            let sides = (self.math(&left)?, self.math(&right)?);
            let (Some(a), Some(b)) = sides else {
                let zero = |side: Option<i64>| side.unwrap_or(0).to_string();
                let guess = self.two(&zero(sides.0), kind, &zero(sides.1));
                return Ok(Truth::Guess(guess == Some(Truth::Known(true))));
            };
            return Ok(self
                .two(&a.to_string(), kind, &b.to_string())
                .unwrap_or(Truth::Guess(false)));
        }
        let chars: Vec<char> = bare(&left).chars().collect();
        let pattern = self.pattern(&right.text)?;
        self.limits.spend(chars.len().saturating_mul(pattern.len()) / 16)?;
        // Both are truncated at unknown parts, and then guessed.
        let found = match kind {
            "=~" => {
                self.variables.forget("BASH_REMATCH");
                Regex::new(&bare(&pattern)).and_then(|regex| regex.is_in(&chars))
            }
            "==" | "=" | "!=" => {
                let found = GlobPattern::new(&bare(&pattern)).and_then(|it| it.matches(&chars));
                found.map(|is| is != (kind == "!="))
            }
            _ => {
                let right = self.text(&right.text)?;
                return Ok(self.two(&left, kind, &right).unwrap_or(Truth::Guess(false)));
            }
        };
        Ok(match found {
            Some(is) => truth(is, &[&left, &pattern]),
            None => Truth::Guess(false),
        })
    }
}

fn is_binary(kind: &str) -> bool {
    let kinds = [
        "=", "==", "!=", "<", ">", "-eq", "-ne", "-lt", "-le", "-gt", "-ge", "-nt", "-ot", "-ef",
        "-a", "-o",
    ];
    kinds.contains(&kind)
}

fn is_unary(kind: &str) -> bool {
    kind.len() == 2 && kind.starts_with('-') && "abcdefghknoprstuvwxzGLNORS".contains(&kind[1..])
}
