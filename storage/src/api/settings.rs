//! A folder of a file system and its options: `data/corpus`,
//! `file:///lustre/run?engine=pread&direct=off`.

use std::path::PathBuf;

use crate::{Error, Location, Result};

/// A path, and the I/O settings.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct FileAddress {
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

/// Checks a path or a URL. A path is taken literally, also with a question mark. URLs have no
/// percent escapes: give a path that would need them as a path.
pub(crate) fn parse(location: &Location) -> Result<FileAddress> {
    let bad = |reason: String| Error::BadUrl { url: location.to_string(), reason };
    let typed = if location.is_url() { &location.store } else { &location.path };
    if let Some((scheme, _)) = typed.split_once("://").filter(|(scheme, _)| *scheme != "file") {
        let expected = "expected a path or a URL with file: or s3:";
        return Err(bad(format!("{expected}, found scheme '{scheme}'")));
    }
    if typed.starts_with("s3:") {
        let hint = "(hint: a folder of this name is ./s3:)";
        return Err(bad(format!("expected s3://BUCKET/PREFIX {hint}")));
    }
    if location.path.is_empty() {
        let expected = if location.is_url() { "a path after file:" } else { "a path or a URL" };
        return Err(bad(format!("expected {expected}")));
    }
    let mut settings = IoSettings::default();
    let options = location.options.trim_start_matches('?');
    for option in options.split('&').filter(|option| !option.is_empty()) {
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
    Ok(FileAddress { path: location.path.as_str().into(), settings })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::IoEngine;

    fn parse(text: &str) -> Result<FileAddress> {
        super::parse(&Location::new(text))
    }

    #[test]
    fn paths_and_options() {
        let plain = |path: &str| FileAddress { path: path.into(), settings: IoSettings::default() };
        assert_eq!(parse("a/b?engine=ring").unwrap(), plain("a/b?engine=ring"));
        assert_eq!(parse("file:a/b").unwrap(), plain("a/b"));
        assert_eq!(parse("file:///a/b?").unwrap(), plain("/a/b"));
        let settings =
            IoSettings { engine: Setting::Only(IoEngine::Pread), direct: Setting::Only(false) };
        assert_eq!(parse("file:/a?engine=pread&direct=off").unwrap().settings, settings);
        let settings =
            IoSettings { engine: Setting::Only(IoEngine::Ring), direct: Setting::Only(true) };
        assert_eq!(parse("file:/a?direct=on&engine=ring").unwrap().settings, settings);
        for bad in [
            "",
            "file:",
            "file://",
            "s3:/a",
            "s3://a/b",
            "a/b://c",
            "file:/a?engine=fast",
            "file:/a?depth=4",
        ] {
            assert!(parse(bad).is_err(), "{bad:?} was accepted");
        }
    }
}
