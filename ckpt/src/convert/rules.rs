//! Rules that rename, drop, transpose and split tensors, one per line, applied in their order:
//!
//! ```text
//! # comment
//! drop *.attn.masked_bias
//! rename module.* -> {1}
//! transpose *.proj.weight
//! split encoder.*.project.weight axis 0 -> encoder.{1}.q.weight, encoder.{1}.k.weight
//! ```
//!
//! `*` matches any text; `{1}`, `{2}`, ... are the texts that the first, second, ... `*` matched.

use super::import::Import;
use super::made::{DerivedTensor, unfit};
use crate::{Error, Result, Span, region};

/// Rules, read from text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RenameRules(Vec<RenameRule>);

#[derive(Clone, Debug, PartialEq, Eq)]
struct RenameRule {
    pattern: String,
    act: Act,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Act {
    Drop,
    Rename(String),
    Transpose,
    Split(usize, Vec<String>),
}

impl RenameRules {
    /// Reads rules. `what` names them in messages.
    ///
    /// # Errors
    /// [`Error::Unfit`] with the line that is not a rule.
    pub fn parse(what: &str, text: &str) -> Result<Self> {
        let mut rules = Vec::new();
        for (number, line) in (1..).zip(text.lines()) {
            let line = line.split('#').next().unwrap_or_default().trim();
            if line.is_empty() {
                continue;
            }
            let rule = parse_line(line).ok_or_else(|| Error::Unfit {
                object: format!("line {number} of {what}"),
                found: format!("'{line:.200}'"),
                expected: "drop P, rename P -> NAME, transpose P, or split P axis N -> NAME, NAME"
                    .to_owned(),
            })?;
            rules.push(rule);
        }
        Ok(RenameRules(rules))
    }
}

fn parse_line(line: &str) -> Option<RenameRule> {
    let (verb, rest) = line.split_once(char::is_whitespace)?;
    let (left, right) = match rest.split_once("->") {
        Some((left, right)) => (left.trim(), Some(right.trim())),
        None => (rest.trim(), None),
    };
    let mut words = left.split_whitespace();
    let pattern = words.next()?.to_owned();
    let act = match (verb, right, words.next(), words.next()) {
        ("drop", None, None, None) => Act::Drop,
        ("transpose", None, None, None) => Act::Transpose,
        ("rename", Some(name), None, None) if is_word(name) => Act::Rename(name.to_owned()),
        ("split", Some(names), Some("axis"), Some(axis)) => {
            let names: Vec<String> = names.split(',').map(|name| name.trim().to_owned()).collect();
            if names.len() < 2 || !names.iter().all(|name| is_word(name)) {
                return None;
            }
            Act::Split(axis.parse().ok()?, names)
        }
        _ => return None,
    };
    words.next().is_none().then_some(RenameRule { pattern, act })
}

fn is_word(name: &str) -> bool {
    !name.is_empty() && !name.contains(char::is_whitespace)
}

impl Import {
    /// Applies rules to all tensors.
    ///
    /// # Errors
    /// [`Error::Unfit`] for a rule that matches no tensor, or a tensor that it cannot be applied
    /// to.
    pub fn apply(&mut self, rules: &RenameRules) -> Result<()> {
        for rule in &rules.0 {
            let mut applied = false;
            let mut made = Vec::new();
            for tensor in std::mem::take(&mut self.made) {
                let Some(stars) = matched(&rule.pattern, &tensor.name) else {
                    made.push(tensor);
                    continue;
                };
                applied = true;
                match &rule.act {
                    Act::Drop => self.dropped.push(tensor.name),
                    Act::Rename(name) => {
                        let name = filled(name, &stars);
                        made.push(tensor.named(name));
                    }
                    Act::Transpose => made.push(tensor.transpose()?),
                    Act::Split(axis, names) => made.extend(split(&tensor, *axis, names, &stars)?),
                }
            }
            self.made = made;
            if !applied {
                let found = format!("none that matches '{}'", rule.pattern);
                return Err(unfit(self.source.display(), found, "a tensor for every rule"));
            }
        }
        Ok(())
    }
}

fn split(
    tensor: &DerivedTensor,
    axis: usize,
    names: &[String],
    stars: &[&str],
) -> Result<Vec<DerivedTensor>> {
    let count = names.len() as u64;
    let len = tensor.shape.get(axis).copied().filter(|len| len.is_multiple_of(count));
    let Some(len) = len.map(|len| len / count) else {
        let found = format!("shape {:?}", tensor.shape);
        return Err(unfit(&tensor.name, found, &format!("a multiple of {count} on axis {axis}")));
    };
    let part = |(number, name): (u64, &String)| {
        let mut spans = region::whole(&tensor.shape);
        spans[axis] = Span { start: number * len, len };
        tensor.slice(filled(name, stars), &spans)
    };
    Ok((0..).zip(names).map(part).collect())
}

/// The text that each star of a pattern matches; `None` if the name does not match. Each star
/// matches as little as possible, except the last.
pub(crate) fn matched<'a>(pattern: &str, name: &'a str) -> Option<Vec<&'a str>> {
    let mut parts = pattern.split('*');
    let mut rest = name.strip_prefix(parts.next()?)?;
    let mut stars = Vec::new();
    let mut parts = parts.peekable();
    while let Some(part) = parts.next() {
        // The last part must match the end of the name, even if it also occurs before.
        let at = if parts.peek().is_none() {
            rest.ends_with(part).then(|| rest.len() - part.len())?
        } else {
            rest.find(part)?
        };
        stars.push(&rest[..at]);
        rest = &rest[at + part.len()..];
    }
    rest.is_empty().then_some(stars)
}

fn filled(name: &str, stars: &[&str]) -> String {
    let mut name = name.to_owned();
    for (number, star) in (1..).zip(stars) {
        name = name.replace(&format!("{{{number}}}"), star);
    }
    name
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stars_match_text() {
        assert_eq!(matched("a.*.c", "a.b.c"), Some(vec!["b"]));
        assert_eq!(matched("a.*.c", "a.c"), None);
        assert_eq!(matched("*.c", "a.c.c"), Some(vec!["a.c"]));
        assert_eq!(matched("*x*", "axbxc"), Some(vec!["a", "bxc"]));
        assert_eq!(matched("a", "a"), Some(vec![]));
        assert_eq!(matched("a", "ab"), None);
        assert_eq!(matched("*", ""), Some(vec![""]));
        assert_eq!(filled("h.{2}.{1}", &["a", "7"]), "h.7.a");
    }

    #[test]
    fn rules_are_parsed_by_line() {
        let text = "drop a.* # b\n\n#\nrename x -> y\ntranspose *\nsplit p axis 1 -> q, k\n";
        let RenameRules(rules) = RenameRules::parse("r", text).unwrap();
        assert_eq!(rules.len(), 4);
        assert_eq!(rules[3].act, Act::Split(1, vec!["q".to_owned(), "k".to_owned()]));
        let bad = [
            "drop",
            "drop a b",
            "rename a",
            "rename a -> b c",
            "split a -> b, c",
            "keep a",
            "split a axis x -> b, c",
            "split a axis 0 -> b",
            "drop a -> b",
            "split a axis 0 1 -> b, c",
        ];
        for bad in bad {
            assert!(RenameRules::parse("r", bad).is_err(), "{bad} was accepted");
        }
    }
}
