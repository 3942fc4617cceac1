//! Locations as they are typed: paths, and URLs with the options of their store.

use std::fmt;
use std::path::Path;
use std::sync::Arc;

use crate::api::settings;
use crate::fs::filesystem::folder_of;
use crate::posix;
#[cfg(feature = "s3")]
use crate::s3;
use crate::{Error, Key, Result, Storage};

/// The location of an object or a folder: a path, or a URL with options behind a question mark.
/// The options belong to the store. A name below or beside a location is therefore added to its
/// path, and not to the end of its text:
///
/// ```
/// use storage::Location;
///
/// let corpus = Location::new("s3://corpora/wiki?endpoint=https://rgw:8443&depth=64");
/// let cache = corpus.join("cache");
/// assert_eq!(cache.to_string(), "s3://corpora/wiki/cache?endpoint=https://rgw:8443&depth=64");
/// // A path has no options.
/// assert_eq!(Location::new("wiki?depth=64").join("cache").to_string(), "wiki?depth=64/cache");
/// ```
///
/// Its text is as it was typed, except that credentials and unknown options are not shown. A URL
/// with either is refused when it is opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Location {
    /// `file:`, `file://`, `s3://bucket`, or nothing for a path.
    pub(crate) store: String,
    pub(crate) path: String,
    /// From the question mark on.
    pub(crate) options: String,
}

/// Scheme of a file's URL, which may be followed by two slashes.
const FILE: &str = "file:";
const S3: &str = "s3://";

/// The options of all stores: their values are shown in messages.
const OPTION_NAMES: [&str; 12] = [
    "engine",
    "direct",
    "endpoint",
    "region",
    "path_style",
    "ca",
    "credentials",
    "profile",
    "depth",
    "stall",
    "tries",
    "hedge",
];

impl Location {
    /// Divides the text of a path or a URL. It is checked when it is opened.
    #[must_use]
    pub fn new(text: &str) -> Self {
        let store_bytes = match text.strip_prefix(FILE) {
            Some(rest) if rest.starts_with("//") => FILE.len() + 2,
            Some(_) => FILE.len(),
            None => authority_bytes(text),
        };
        let (store, rest) = text.split_at(store_bytes);
        let options_start = rest.find('?').filter(|_| store_bytes > 0).unwrap_or(rest.len());
        let (path, options) = rest.split_at(options_start);
        let [store, path, options] = [store, path, options].map(str::to_owned);
        Location { store, path, options }
    }

    /// Opens the store whose root is this folder, as [`open_url`](crate::open_url).
    ///
    /// # Errors
    /// As there.
    pub fn open(&self) -> Result<Arc<dyn Storage>> {
        #[cfg(feature = "s3")]
        if self.is_s3() {
            return s3::open(self);
        }
        posix::store::open(&settings::parse(self)?)
    }

    /// The store of the parent folder, and the key of the last component, as
    /// [`locate`](crate::locate).
    ///
    /// # Errors
    /// As there.
    pub fn locate(&self) -> Result<(Arc<dyn Storage>, Key)> {
        #[cfg(feature = "s3")]
        if self.is_s3() {
            return s3::locate(self);
        }
        let mut address = settings::parse(self)?;
        let bad = |reason: &str| Error::BadUrl { url: self.to_string(), reason: reason.to_owned() };
        let name =
            address.path.file_name().ok_or_else(|| bad("expected a path with a file name"))?;
        let name = name.to_str().ok_or_else(|| bad("expected a file name in UTF-8"))?;
        let key = Key::new(name)?;
        address.path = folder_of(&address.path);
        Ok((posix::store::open(&address)?, key))
    }

    /// Whether this is a URL, and not a path.
    #[must_use]
    pub fn is_url(&self) -> bool {
        !self.store.is_empty()
    }

    /// Whether this is in a bucket.
    #[must_use]
    pub fn is_s3(&self) -> bool {
        self.store.starts_with(S3)
    }

    /// The same without options, as reports name it.
    #[must_use]
    pub fn without_options(&self) -> Self {
        Location { options: String::new(), ..self.clone() }
    }

    /// The path in the file system, of a path or a `file:` URL.
    #[must_use]
    pub fn local_path(&self) -> Option<&Path> {
        let is_local = !self.is_url() || self.store.starts_with(FILE);
        let path = Some(self.path_without_slash()).filter(|path| !path.is_empty());
        is_local.then(|| Path::new(path.unwrap_or(&self.path)))
    }

    /// Whether the path ends in a slash: it cannot be the prefix of the names of files.
    #[must_use]
    pub fn is_named_as_folder(&self) -> bool {
        self.path.ends_with('/')
    }

    /// The last component of the path; empty for a root.
    #[must_use]
    pub fn file_name(&self) -> &str {
        self.path_without_slash().rsplit('/').next().unwrap_or("")
    }

    /// The folder that this location is in. A root is its own parent.
    #[must_use]
    pub fn parent(&self) -> Self {
        let root = if self.authority().is_some() { "" } else { "/" };
        let path = match self.path_without_slash().rsplit_once('/') {
            Some(("", _)) => root,
            Some((folder, _)) => folder,
            None if self.is_below_root() => root,
            None => ".",
        };
        self.with_path(path.to_owned())
    }

    /// A name below this folder.
    #[must_use]
    pub fn join(&self, name: &str) -> Self {
        match self.path_without_slash() {
            "" if !self.is_below_root() => self.with_path(name.to_owned()),
            folder => self.with_path(format!("{folder}/{name}")),
        }
    }

    /// The location that a file at this location calls `name`: an absolute path, a URL, or a name
    /// beside that file.
    #[must_use]
    pub fn beside(&self, name: &str) -> Self {
        let named = Location::new(name);
        if named.is_url() || name.starts_with('/') {
            return named;
        }
        let path = self.path_without_slash();
        match path.strip_suffix(self.file_name()) {
            Some("") if self.is_below_root() => self.join(name),
            folder => self.with_path(format!("{}{name}", folder.unwrap_or_default())),
        }
    }

    /// This location without a slash at the end, and without the first of these suffixes that its
    /// last component has.
    #[must_use]
    pub fn without_suffix(&self, suffixes: &[&str]) -> Self {
        let name = self.file_name();
        let stem = suffixes.iter().find_map(|suffix| name.strip_suffix(suffix));
        let stem = stem.filter(|stem| !stem.is_empty()).unwrap_or(name);
        let path = self.path_without_slash();
        match &path[..path.len() - (name.len() - stem.len())] {
            "" => self.clone(),
            path => self.with_path(path.to_owned()),
        }
    }

    /// This location with text after its last component, as `corpus` becomes `corpus.idx`.
    #[must_use]
    pub fn with_suffix(&self, suffix: &str) -> Self {
        match self.path_without_slash() {
            "" if self.is_below_root() => self.with_path(format!("/{suffix}")),
            path => self.with_path(format!("{path}{suffix}")),
        }
    }

    fn with_path(&self, path: String) -> Self {
        Location { path, ..self.clone() }
    }

    /// Empty for a root.
    fn path_without_slash(&self) -> &str {
        self.path.trim_end_matches('/')
    }

    /// Whether the path starts at a root, and not at the folder of this process.
    fn is_below_root(&self) -> bool {
        self.path.starts_with('/') || self.authority().is_some()
    }

    /// The bucket, or the host of a URL of another scheme.
    fn authority(&self) -> Option<&str> {
        let (scheme, authority) = self.store.split_once("://")?;
        (scheme != "file").then_some(authority)
    }
}

/// Length of `s3://bucket`, or of the scheme and the host of another URL; 0 for a path.
fn authority_bytes(text: &str) -> usize {
    let scheme = text.find("://").filter(|end| !text[..*end].contains(['/', '?']));
    let Some(start) = scheme.map(|end| end + "://".len()) else { return 0 };
    text[start..].find(['/', '?']).map_or(text.len(), |end| start + end)
}

impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.authority().is_some_and(|name| name.contains([':', '@'])) {
            let scheme = self.store.split_once("://").map_or("", |(scheme, _)| scheme);
            return write!(f, "{scheme}://...");
        }
        write!(f, "{}{}", self.store, self.path)?;
        let Some(options) = self.options.strip_prefix('?') else { return Ok(()) };
        for (nth, option) in options.split('&').enumerate() {
            f.write_str(if nth == 0 { "?" } else { "&" })?;
            match option.split_once('=') {
                Some(("endpoint", value)) if value.contains('@') => f.write_str("endpoint=...")?,
                Some((name, _)) if OPTION_NAMES.contains(&name) => f.write_str(option)?,
                Some((name, _)) => write!(f, "{name}=...")?,
                None => f.write_str(option)?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(text: &str, method: impl Fn(&Location) -> Location, expected: &str) {
        assert_eq!(method(&Location::new(text)).to_string(), expected, "{text}");
    }

    #[test]
    fn a_name_is_joined_to_the_path_of_a_url() {
        for (folder, expected) in [
            ("a", "a/x/y"),
            ("a//", "a/x/y"),
            (".", "./x/y"),
            ("", "x/y"),
            ("/", "/x/y"),
            ("a?depth=64", "a?depth=64/x/y"),
            ("a/b?endpoint=http://h", "a/b?endpoint=http://h/x/y"),
            ("file:a?direct=off", "file:a/x/y?direct=off"),
            ("file:///a/?engine=pread&direct=off", "file:///a/x/y?engine=pread&direct=off"),
            ("file:/", "file:/x/y"),
            ("s3://b", "s3://b/x/y"),
            ("s3://b/", "s3://b/x/y"),
            ("s3://b?region=r", "s3://b/x/y?region=r"),
            (
                "s3://b/k/?endpoint=http://h:1/&depth=64",
                "s3://b/k/x/y?endpoint=http://h:1/&depth=64",
            ),
            ("s3://b/k?credentials=/a@b/c", "s3://b/k/x/y?credentials=/a@b/c"),
        ] {
            check(folder, |at| at.join("x/y"), expected);
            check(folder, |at| at.join("x").join("y"), expected);
        }
    }

    #[test]
    fn suffixes_are_those_of_the_last_component() {
        for (name, expected) in [
            ("a", "a.idx"),
            ("a/", "a.idx"),
            ("a.v2?depth=64", "a.v2?depth=64.idx"),
            ("file:a.v2?direct=on", "file:a.v2.idx?direct=on"),
            ("s3://b/k?endpoint=http://h/p", "s3://b/k.idx?endpoint=http://h/p"),
            ("s3://b?region=r", "s3://b/.idx?region=r"),
        ] {
            check(name, |at| at.with_suffix(".idx"), expected);
        }
        for (name, expected) in [
            ("a.bin", "a"),
            ("a.idx/", "a"),
            ("a.bin.bin", "a.bin"),
            ("a.idx.bin", "a.idx"),
            ("x/.bin", "x/.bin"),
            ("a.v2", "a.v2"),
            ("/", "/"),
            ("s3://b.bin", "s3://b.bin"),
            ("s3://b/k.idx?region=r.bin", "s3://b/k?region=r.bin"),
        ] {
            check(name, |at| at.without_suffix(&[".bin", ".idx"]), expected);
        }
    }

    #[test]
    fn parents_and_names_are_those_of_the_path() {
        for (place, parent, name) in [
            ("a", ".", "a"),
            ("a/b/", "a", "b"),
            ("/a", "/", "a"),
            ("/", "/", ""),
            ("a?b/c", "a?b", "c"),
            ("file:/a/b?direct=on", "file:/a?direct=on", "b"),
            ("file:a?direct=on", "file:.?direct=on", "a"),
            ("s3://b/k?endpoint=http://h/p", "s3://b?endpoint=http://h/p", "k"),
            ("s3://b/k/l/", "s3://b/k", "l"),
            ("s3://b?region=r", "s3://b?region=r", ""),
        ] {
            check(place, Location::parent, parent);
            assert_eq!(Location::new(place).file_name(), name, "{place}");
        }
    }

    #[test]
    fn names_in_a_file_are_beside_it() {
        for (file, name, expected) in [
            ("a.toml", "b.toml", "b.toml"),
            ("x/a.toml", "../b.toml", "x/../b.toml"),
            ("/a.toml", "b.toml", "/b.toml"),
            ("x/a.toml", "/b.toml", "/b.toml"),
            ("file:x/a?direct=on", "b", "file:x/b?direct=on"),
            ("s3://b/x/a?region=r", "y/b", "s3://b/x/y/b?region=r"),
            ("s3://b/a?region=r", "b", "s3://b/b?region=r"),
            ("s3://b?region=r", "b", "s3://b/b?region=r"),
            ("s3://b/x/a?region=r", "file:b", "file:b"),
        ] {
            check(file, |at| at.beside(name), expected);
        }
    }

    #[test]
    fn local_paths_are_those_of_file_systems() {
        for (place, path) in [
            ("a/b?engine=ring", Some("a/b?engine=ring")),
            ("file:a?engine=ring", Some("a")),
            ("file:///a/b/?direct=on", Some("/a/b")),
            ("/", Some("/")),
            ("s3://b/k", None),
            ("http://h/k", None),
        ] {
            assert_eq!(Location::new(place).local_path(), path.map(Path::new), "{place}");
        }
    }

    #[test]
    fn urls_are_shown_as_typed_and_credentials_never() {
        for typed in [
            "a?b=c",
            "file:/a/?",
            "file:a?direct=on&",
            "s3://b/k/?ca=/x&&tries=2",
            "s3:/b?secret=x",
        ] {
            check(typed, Clone::clone, typed);
        }
        for (typed, shown) in [
            ("s3://key:secret@b/k?depth=2", "s3://..."),
            ("s3://key:secret/b@b/k", "s3://..."),
            ("https://key:secret@h/k", "https://..."),
            ("s3://b/k?endpoint=http://key:secret@h&depth=2", "s3://b/k?endpoint=...&depth=2"),
            ("s3://b/k?aws_secret_access_key=secret", "s3://b/k?aws_secret_access_key=..."),
        ] {
            check(typed, Clone::clone, shown);
            // Whatever is not shown is refused, so that no location changes when it is shown.
            let error = Location::new(typed).open().expect_err(typed).to_string();
            assert!(!error.contains("secret@") && !error.contains("=secret"), "{error}");
        }
    }
}
