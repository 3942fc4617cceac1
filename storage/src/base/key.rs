use std::fmt;

use crate::{Error, Result};

/// The name of an object within a store: components divided by `/`, none of them empty, `.` or
/// `..`, so that a key from a manifest can never point outside its store. The root itself is
/// [`Key::root`].
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key(String);

/// S3 takes keys of 1,024 bytes; a path on Linux may be four times as long.
const KEY_BYTES_MAX: usize = 1024;

impl Key {
    /// Checks a name.
    ///
    /// # Errors
    /// [`Error::BadKey`] if a component is empty, `.`, `..`, or holds a NUL, or all is too long.
    pub fn new(name: impl Into<String>) -> Result<Self> {
        let name = name.into();
        let refuse = |reason: &'static str| Err(Error::BadKey { key: name.clone(), reason });
        if name.len() > KEY_BYTES_MAX {
            return refuse("it is longer than 1024 bytes");
        }
        if name.bytes().any(|byte| byte == 0) {
            return refuse("it contains a NUL byte");
        }
        for component in name.split('/') {
            match component {
                "" => return refuse("it has an empty component"),
                "." | ".." => return refuse("it has a component '.' or '..'"),
                _ => {}
            }
        }
        Ok(Key(name))
    }

    /// The root folder.
    #[must_use]
    pub fn root() -> Self {
        Key(String::new())
    }

    /// `self/name`.
    ///
    /// # Errors
    /// As [`Key::new`].
    pub fn join(&self, name: &str) -> Result<Self> {
        if self.0.is_empty() { Key::new(name) } else { Key::new(format!("{}/{name}", self.0)) }
    }

    /// This key with text after its last component, as `corpus` becomes `corpus.bin`.
    ///
    /// # Errors
    /// As [`Key::new`].
    pub fn with_suffix(&self, suffix: &str) -> Result<Self> {
        Key::new(format!("{}{suffix}", self.0))
    }

    /// The folder that this key is in.
    #[must_use]
    pub fn parent(&self) -> Self {
        self.0.rsplit_once('/').map_or_else(Key::root, |(folder, _)| Key(folder.to_owned()))
    }

    /// The last component; empty for the root.
    #[must_use]
    pub fn name(&self) -> &str {
        self.0.rsplit('/').next().unwrap_or("")
    }

    /// The text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn accepts_and_refuses() {
        for good in ["a", "a/b.bin", "..a", "a b", "表"] {
            assert_eq!(Key::new(good).unwrap().as_str(), good);
        }
        for bad in ["", "/a", "a/", "a//b", "..", "a/../b", "./a", "a\0b"] {
            assert!(Key::new(bad).is_err(), "{bad:?} was accepted");
        }
        assert!(Key::new("x".repeat(1025)).is_err());
    }

    #[test]
    fn joins_and_splits() {
        let key = Key::root().join("run").unwrap().join("step-1").unwrap();
        assert_eq!(
            (key.as_str(), key.name(), key.parent().as_str()),
            ("run/step-1", "step-1", "run")
        );
        assert_eq!(key.parent().parent(), Key::root());
        assert!(key.join("../../etc").is_err());
    }
}
