//! Patterns for names, as in a shell: `*`, `?`, `[a-z]`, `[!a-z]` within one component, `**` for
//! any number of folders, `{a,b}` for either. Names that begin with a dot are matched only by
//! patterns that do. Matches are in byte order.

use std::io;

use storage::{Key, Storage};

/// Several braces multiply; more alternatives are probably a mistake.
const ALTERNATIVES_MAX: usize = 1024;

/// Whether a name has wildcards or braces.
pub(super) fn is_pattern(name: &str) -> bool {
    name.contains(['*', '?', '[', '{'])
}

/// Expands braces: one pattern for each choice, in the order in which they are written.
pub(super) fn alternatives(pattern: &str) -> Result<Vec<String>, String> {
    let mut done = Vec::new();
    // The next one last. The first braces of each are expanded until there are none.
    let mut open = vec![pattern.to_owned()];
    while let Some(next) = open.pop() {
        let Some((start, end)) = braces(&next) else {
            done.push(next);
            continue;
        };
        let (before, after) = (&next[..start], &next[end + 1..]);
        let choices = split_outside_braces(&next[start + 1..end]);
        open.extend(choices.iter().rev().map(|choice| format!("{before}{choice}{after}")));
        if open.len() + done.len() > ALTERNATIVES_MAX {
            return Err(format!("more than {ALTERNATIVES_MAX} in its braces"));
        }
    }
    Ok(done)
}

/// The first braces that are closed and have a comma in them.
fn braces(pattern: &str) -> Option<(usize, usize)> {
    for (start, _) in pattern.match_indices('{') {
        let mut depth = 0;
        let close = pattern[start..].char_indices().find(|&(_, char)| {
            depth += i32::from(char == '{') - i32::from(char == '}');
            depth == 0
        });
        if let Some((len, _)) = close
            && split_outside_braces(&pattern[start + 1..start + len]).len() > 1
        {
            return Some((start, start + len));
        }
    }
    None
}

/// Splits at commas outside braces.
pub(super) fn split_outside_braces(text: &str) -> Vec<&str> {
    let mut depth = 0_i32;
    text.split(|char| {
        depth += i32::from(char == '{') - i32::from(char == '}');
        char == ',' && depth <= 0
    })
    .collect()
}

/// The keys that match a pattern, given as its components, below a folder. Those that end in a
/// component without wildcards may not exist.
pub(super) fn find(
    store: &dyn Storage,
    folder: &Key,
    components: &[&str],
) -> storage::Result<Vec<Key>> {
    let Some((first, rest)) = components.split_first() else { return Ok(vec![folder.clone()]) };
    if !is_pattern(first) {
        return find(store, &folder.join(first)?, rest);
    }
    let mut found = Vec::new();
    if *first == "**" {
        let skip = if *folder == Key::root() { 0 } else { folder.as_str().len() + 1 };
        for entry in store.list(folder)? {
            let path: Vec<&str> = entry.key.as_str()[skip..].split('/').collect();
            if matches_path(components, &path) {
                found.push(entry.key);
            }
        }
        return Ok(found);
    }
    let names = match store.list_names(folder) {
        Err(storage::Error::Io { source, .. }) if source.kind() == io::ErrorKind::NotADirectory => {
            return Ok(found);
        }
        names => names?,
    };
    for name in names.iter().filter(|name| matches(first, name)) {
        found.extend(find(store, &folder.join(name)?, rest)?);
    }
    Ok(found)
}

/// Whether the components of a path are those of a pattern, in which `**` is any number of them.
pub(super) fn matches_path(pattern: &[&str], path: &[&str]) -> bool {
    match (pattern.split_first(), path.split_first()) {
        (None, None) => true,
        (Some((&"**", rest)), Some((name, below))) => {
            // At the end of the pattern, `**` matches the file too.
            let here = if rest.is_empty() { below.is_empty() } else { matches_path(rest, path) };
            !is_hidden(name) && (here || matches_path(pattern, below)) || matches_path(rest, path)
        }
        (Some((first, rest)), Some((name, below))) => {
            matches(first, name) && matches_path(rest, below)
        }
        _ => false,
    }
}

/// Whether listings of a folder omit a name.
pub(super) fn is_hidden(name: &str) -> bool {
    name.starts_with('.')
}

/// Whether a name matches a pattern without slashes.
pub(super) fn matches(pattern: &str, name: &str) -> bool {
    if is_hidden(name) && !is_hidden(pattern) {
        return false;
    }
    let pattern: Vec<char> = pattern.chars().collect();
    let name: Vec<char> = name.chars().collect();
    let (mut p, mut n) = (0, 0);
    // Where to continue if the last star must match more.
    let mut star = None;
    loop {
        if pattern.get(p) == Some(&'*') {
            p += 1;
            star = Some((p, n));
        } else if n == name.len() && p == pattern.len() {
            return true;
        } else if n < name.len()
            && let Some(next) = match_one(&pattern[p..], name[n])
        {
            p += next;
            n += 1;
        } else if let Some((after, taken)) = star.filter(|&(_, taken)| taken < name.len()) {
            (p, n) = (after, taken + 1);
            star = Some((after, taken + 1));
        } else {
            return false;
        }
    }
}

/// How much of the pattern matches one character, if it does.
fn match_one(pattern: &[char], char: char) -> Option<usize> {
    match pattern.first()? {
        '?' => Some(1),
        '[' => match_set(pattern, char),
        literal => (*literal == char).then_some(1),
    }
}

/// `[abc]`, `[a-z]`, `[!a-z]`; a bracket that is not closed is a bracket.
fn match_set(pattern: &[char], char: char) -> Option<usize> {
    let negated = matches!(pattern.get(1), Some('!' | '^'));
    let start = 1 + usize::from(negated);
    // A closing bracket in first position is a member of the set.
    let Some(len) = pattern.iter().skip(start + 1).position(|&c| c == ']') else {
        return (char == '[').then_some(1);
    };
    let end = start + 1 + len;
    let mut set = &pattern[start..end];
    let mut is_in = false;
    while let Some((&low, rest)) = set.split_first() {
        let (high, rest) = match rest {
            ['-', high, rest @ ..] => (*high, rest),
            _ => (low, rest),
        };
        is_in |= (low..=high).contains(&char);
        set = rest;
    }
    (is_in != negated).then_some(end + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_match_as_in_a_shell() {
        for (pattern, name, expected) in [
            ("*.jsonl", "a.jsonl", true),
            ("*.jsonl", ".jsonl", false),
            ("*.jsonl", "a.jsonl.gz", false),
            (".*", ".a", true),
            ("*", "", true),
            ("a*b*c", "abbbc", true),
            ("a*b*c", "abbb", false),
            ("a**c", "abc", true),
            ("?", "表", true),
            ("??", "表", false),
            ("part-[0-9][0-9]", "part-07", true),
            ("part-[0-9][0-9]", "part-7", false),
            ("[!a-c]x", "dx", true),
            ("[!a-c]x", "bx", false),
            ("[]]", "]", true),
            ("[a-]", "-", true),
            ("[", "[", true),
            ("[a", "[a", true),
            ("*a", "aaab", false),
        ] {
            assert_eq!(matches(pattern, name), expected, "{pattern} {name}");
        }
    }

    #[test]
    fn stars_do_not_take_exponential_time() {
        let name = "a".repeat(200);
        assert!(!matches(&("*a".repeat(40) + "b"), &name));
    }

    #[test]
    fn paths_match_with_any_number_of_folders() {
        for (pattern, path, expected) in [
            ("**/*.jsonl", "a.jsonl", true),
            ("**/*.jsonl", "x/y/a.jsonl", true),
            ("**/y/*.jsonl", "x/y/a.jsonl", true),
            ("**/z/*.jsonl", "x/y/a.jsonl", false),
            ("**", "x/y/a.jsonl", true),
            ("**", "x/.y/a.jsonl", false),
            ("**/x/**/a", "p/x/a", true),
            ("**/x/**/a", "p/x/q/r/a", true),
            ("**/x/**/a", "p/q/r/a", false),
        ] {
            let pattern: Vec<&str> = pattern.split('/').collect();
            let path: Vec<&str> = path.split('/').collect();
            assert_eq!(matches_path(&pattern, &path), expected, "{pattern:?} {path:?}");
        }
    }

    #[test]
    fn braces_are_alternatives() {
        let check = |pattern: &str, expected: &[&str]| {
            assert_eq!(alternatives(pattern).unwrap(), expected, "{pattern}");
        };
        check("a", &["a"]);
        check("{b,a}.x", &["b.x", "a.x"]);
        check("{a,b}{c,d}", &["ac", "ad", "bc", "bd"]);
        check("x{a,{b,c}d}", &["xa", "xbd", "xcd"]);
        check("{a}{b", &["{a}{b"]);
        check("{,.gz}", &["", ".gz"]);
        assert!(alternatives(&"{a,b}".repeat(30)).is_err());
        assert_eq!(split_outside_braces("a,{b,c},d"), ["a", "{b,c}", "d"]);
    }
}
