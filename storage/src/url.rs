//! How a store is named: `data/corpus`, `file:///lustre/run?engine=pread&direct=off`.

use std::path::PathBuf;

use crate::{Error, Result};

/// A path, and how to go about it.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Location {
    pub(crate) path: PathBuf,
    pub(crate) wishes: Wishes,
}

/// What the user wants, where it is not left to us.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Wishes {
    pub(crate) engine: Wish<crate::Engine>,
    pub(crate) direct: Wish<bool>,
}

/// One wish.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Wish<T> {
    /// Whatever is best.
    #[default]
    Auto,
    /// This and nothing else.
    Only(T),
}

/// Reads a URL, or a plain path, which is taken as it is: a question mark in it is a question mark.
/// There are no percent escapes: a path that would need them is given plain.
pub(crate) fn parse(url: &str) -> Result<Location> {
    let bad = |why: String| Error::BadUrl { url: url.to_owned(), why };
    if url.is_empty() {
        return Err(bad("it is empty".to_owned()));
    }
    let Some(rest) = url.strip_prefix("file:") else {
        return match url.split_once("://") {
            Some((scheme, _)) => {
                let due = "due: file:, or a plain path";
                Err(bad(format!("the scheme '{scheme}' is not known; {due}")))
            }
            None => Ok(Location { path: url.into(), wishes: Wishes::default() }),
        };
    };
    let (path, query) = rest.split_once('?').unwrap_or((rest, ""));
    let path = path.strip_prefix("//").unwrap_or(path);
    if path.is_empty() {
        return Err(bad("it names no path".to_owned()));
    }
    let mut wishes = Wishes::default();
    for option in query.split('&').filter(|option| !option.is_empty()) {
        match option {
            "engine=auto" => wishes.engine = Wish::Auto,
            "engine=ring" => wishes.engine = Wish::Only(crate::Engine::Ring),
            "engine=pread" => wishes.engine = Wish::Only(crate::Engine::Pread),
            "direct=auto" => wishes.direct = Wish::Auto,
            "direct=on" => wishes.direct = Wish::Only(true),
            "direct=off" => wishes.direct = Wish::Only(false),
            _ => {
                let due = "due: engine=auto|ring|pread, direct=auto|on|off";
                return Err(bad(format!("the option '{option}' is not known; {due}")));
            }
        }
    }
    Ok(Location { path: path.into(), wishes })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Engine;

    #[test]
    fn paths_and_options() {
        let plain = |path: &str| Location { path: path.into(), wishes: Wishes::default() };
        assert_eq!(parse("a/b?engine=ring").unwrap(), plain("a/b?engine=ring"));
        assert_eq!(parse("file:a/b").unwrap(), plain("a/b"));
        assert_eq!(parse("file:///a/b?").unwrap(), plain("/a/b"));
        let wishes = Wishes { engine: Wish::Only(Engine::Pread), direct: Wish::Only(false) };
        assert_eq!(parse("file:/a?engine=pread&direct=off").unwrap().wishes, wishes);
        let wishes = Wishes { engine: Wish::Only(Engine::Ring), direct: Wish::Only(true) };
        assert_eq!(parse("file:/a?direct=on&engine=ring").unwrap().wishes, wishes);
        for bad in ["", "file:", "file://", "s3://a/b", "file:/a?engine=fast", "file:/a?depth=4"] {
            assert!(parse(bad).is_err(), "{bad:?} was accepted");
        }
    }
}
