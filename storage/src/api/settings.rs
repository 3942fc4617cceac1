//! Parses the URL of a store: `data/corpus`, `file:///lustre/run?engine=pread&direct=off`.

use std::path::PathBuf;

use crate::{Error, Result};

/// A path, and the I/O settings.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Location {
    pub(crate) path: PathBuf,
    pub(crate) settings: IoSettings,
}

/// The I/O settings that the user may fix.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct IoSettings {
    pub(crate) engine: Setting<crate::IoEngine>,
    pub(crate) direct: Setting<bool>,
}

/// One setting.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Setting<T> {
    /// Chosen automatically.
    #[default]
    Auto,
    /// This and nothing else.
    Only(T),
}

/// Parses a URL, or a plain path, which is taken literally, also with a question mark. URLs have no
/// percent escapes: give a path that would need them as a plain path.
pub(crate) fn parse(url: &str) -> Result<Location> {
    let bad = |reason: String| Error::BadUrl { url: url.to_owned(), reason };
    if url.is_empty() {
        return Err(bad("expected a path or a URL".to_owned()));
    }
    let Some(rest) = url.strip_prefix("file:") else {
        return match url.split_once("://") {
            Some((scheme, _)) => Err(bad(format!(
                "expected a path or a URL with file: or s3:, found scheme '{scheme}'"
            ))),
            None if url.starts_with("s3:") => Err(bad(
                "expected s3://BUCKET/PREFIX (hint: a folder of this name is ./s3:)".to_owned(),
            )),
            None => Ok(Location { path: url.into(), settings: IoSettings::default() }),
        };
    };
    let (path, query) = rest.split_once('?').unwrap_or((rest, ""));
    let path = path.strip_prefix("//").unwrap_or(path);
    if path.is_empty() {
        return Err(bad("expected a path after file:".to_owned()));
    }
    let mut settings = IoSettings::default();
    for option in query.split('&').filter(|option| !option.is_empty()) {
        match option {
            "engine=auto" => settings.engine = Setting::Auto,
            "engine=ring" => settings.engine = Setting::Only(crate::IoEngine::Ring),
            "engine=pread" => settings.engine = Setting::Only(crate::IoEngine::Pread),
            "direct=auto" => settings.direct = Setting::Auto,
            "direct=on" => settings.direct = Setting::Only(true),
            "direct=off" => settings.direct = Setting::Only(false),
            _ => {
                let options = "engine=auto|ring|pread or direct=auto|on|off";
                return Err(bad(format!("expected {options}, found option '{option}'")));
            }
        }
    }
    Ok(Location { path: path.into(), settings })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::IoEngine;

    #[test]
    fn paths_and_options() {
        let plain = |path: &str| Location { path: path.into(), settings: IoSettings::default() };
        assert_eq!(parse("a/b?engine=ring").unwrap(), plain("a/b?engine=ring"));
        assert_eq!(parse("file:a/b").unwrap(), plain("a/b"));
        assert_eq!(parse("file:///a/b?").unwrap(), plain("/a/b"));
        let settings =
            IoSettings { engine: Setting::Only(IoEngine::Pread), direct: Setting::Only(false) };
        assert_eq!(parse("file:/a?engine=pread&direct=off").unwrap().settings, settings);
        let settings =
            IoSettings { engine: Setting::Only(IoEngine::Ring), direct: Setting::Only(true) };
        assert_eq!(parse("file:/a?direct=on&engine=ring").unwrap().settings, settings);
        for bad in
            ["", "file:", "file://", "s3:/a", "s3://a/b", "file:/a?engine=fast", "file:/a?depth=4"]
        {
            assert!(parse(bad).is_err(), "{bad:?} was accepted");
        }
    }
}
