//! Entries of a folder, or matches of a pattern, that are not read. A store lists regular
//! files whose names are UTF-8, and does not follow links to folders. So a walk of the folder
//! itself finds the other entries.
//!
//! If one of them is named like a file of documents, the folder is refused. The rest is counted and
//! named in the log.

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::FileTypeExt as _;
use std::path::{Path, PathBuf};

use storage::Location;

use super::codec::{is_document_name, strip_unread};
use super::{bad_input, glob};
use crate::Result;

/// Names in a message; the others are counted.
const NAMES_MAX: usize = 5;

/// Entries below a link that are searched for documents. A folder with more is taken to have some.
const LINKED_ENTRIES_MAX: usize = 100_000;

/// Entries that were not taken, in the order in which they were found.
#[derive(Debug)]
pub(super) struct LeftOut {
    /// The folder, with links resolved. The target of a link into it is read without the link.
    root: PathBuf,
    /// Every entry should be read, whatever its name.
    is_strict: bool,
    /// Those that look like documents, and why they are not read.
    refused: Vec<(String, &'static str)>,
    others: Vec<String>,
}

const NOT_UTF8: &str = "name is not UTF-8";
const DANGLING: &str = "dangling link";
const LINKED_FOLDER: &str = "link to a folder";
const NO_FILE: &str = "pipe, device or socket";
const UNREAD: &str = "unsupported compression";

impl LeftOut {
    /// Walks a folder, if it is on a file system.
    ///
    /// # Errors
    /// Those of the system.
    pub(super) fn of_folder(name: &str) -> Result<LeftOut> {
        LeftOut::collect(name, false, |found, root| found.walk(root, "", &|_: &str| true))
    }

    /// Walks the folder of a pattern, given as its components, for matches of the pattern.
    ///
    /// # Errors
    /// Those of the system.
    pub(super) fn of_pattern(folder: &str, components: &[&str]) -> Result<LeftOut> {
        LeftOut::collect(folder, true, |found, root| found.match_below(root, "", components))
    }

    fn collect(
        name: &str,
        is_strict: bool,
        walk: impl FnOnce(&mut LeftOut, &Path) -> io::Result<()>,
    ) -> Result<LeftOut> {
        let mut found =
            LeftOut { root: PathBuf::new(), is_strict, refused: Vec::new(), others: Vec::new() };
        let folder = Location::new(name);
        let Some(path) = folder.local_path() else { return Ok(found) };
        found.root = fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
        let expected = "a folder that can be listed";
        walk(&mut found, path)
            .map_err(|error| bad_input(name, format!("an error: {error}"), expected))?;
        Ok(found)
    }

    /// Follows a pattern, whose components before `**` may be links to folders.
    fn match_below(&mut self, folder: &Path, below: &str, components: &[&str]) -> io::Result<()> {
        let Some((first, rest)) = components.split_first() else { return Ok(()) };
        if *first == "**" {
            let skip = if below.is_empty() { 0 } else { below.len() + 1 };
            let matches = |path: &str| {
                let path: Vec<&str> = path[skip..].split('/').collect();
                glob::matches_path(components, &path)
            };
            return self.walk(folder, below, &matches);
        }
        for entry in entries(folder)? {
            let name = entry.file_name();
            let shown = name.to_string_lossy();
            if !glob::matches(first, &shown) {
                continue;
            }
            let path = join(below, &shown);
            if name.to_str().is_none() {
                self.refused.push((path, NOT_UTF8));
            } else if !rest.is_empty() && entry.path().is_dir() {
                self.match_below(&entry.path(), &path, rest)?;
            } else if rest.is_empty() && is_dangling(&entry)? {
                self.refused.push((path, DANGLING));
            }
        }
        Ok(())
    }

    /// Visits everything below a folder. Files that `takes` rejects are ignored.
    fn walk(&mut self, folder: &Path, below: &str, takes: &dyn Fn(&str) -> bool) -> io::Result<()> {
        for entry in entries(folder)? {
            let name = entry.file_name();
            let path = join(below, &name.to_string_lossy());
            let kind = entry.file_type()?;
            if kind.is_dir() && name.to_str().is_some() {
                self.walk(&entry.path(), &path, takes)?;
                continue;
            }
            let why = why_left_out(&entry, kind)?;
            let is_folder = kind.is_dir() || why == Some(LINKED_FOLDER);
            if is_folder {
                self.add_folder(&entry.path(), path, why)?;
            } else if takes(&path) {
                self.add_file(path, why);
            }
        }
        Ok(())
    }

    fn add_file(&mut self, path: String, why: Option<&'static str>) {
        match why {
            Some(why) if self.is_strict || is_document_name(&path) => {
                self.refused.push((path, why));
            }
            None if is_document_name(&path) => {}
            None if strip_unread(&path).is_some_and(is_document_name) => {
                self.refused.push((path, UNREAD));
            }
            None if self.is_strict => {}
            _ => self.others.push(path),
        }
    }

    /// A folder that is not entered.
    fn add_folder(&mut self, at: &Path, path: String, why: Option<&'static str>) -> io::Result<()> {
        let is_taken = why == Some(LINKED_FOLDER)
            && fs::canonicalize(at).is_ok_and(|target| target.starts_with(&self.root));
        match !is_taken && has_documents(at)? {
            true => self.refused.push((path, why.unwrap_or(NOT_UTF8))),
            false => self.others.push(path),
        }
        Ok(())
    }

    /// Fails if an entry should be read and cannot be; logs the others.
    ///
    /// # Errors
    /// [`crate::Error::BadInput`].
    pub(super) fn check(mut self, name: &str) -> Result<()> {
        self.refused.sort();
        self.others.sort();
        if self.refused.is_empty() {
            if !self.others.is_empty() {
                let shown = first_of(&self.others, |path| storage::printable(path));
                log::warn!(
                    "{name}: skipped {} entries without documents: {shown}",
                    self.others.len()
                );
            }
            return Ok(());
        }
        let shown =
            first_of(&self.refused, |(path, why)| format!("{} ({why})", storage::printable(path)));
        let found = format!("unreadable entries ({}): {shown}", self.refused.len());
        let hint = "a pattern such as 'FOLDER/*' follows links to folders; rename, move or \
                    remove the others";
        Err(bad_input(name, found, "regular files with UTF-8 names").with_hint(hint))
    }
}

/// Why a store does not list an entry as a file.
fn why_left_out(entry: &fs::DirEntry, kind: fs::FileType) -> io::Result<Option<&'static str>> {
    let kind = match kind.is_symlink() {
        true => match fs::metadata(entry.path()) {
            Ok(meta) => meta.file_type(),
            Err(_) => return Ok(Some(DANGLING)),
        },
        false => kind,
    };
    let is_special =
        kind.is_fifo() || kind.is_socket() || kind.is_char_device() || kind.is_block_device();
    if entry.file_name().to_str().is_none() {
        return Ok(Some(NOT_UTF8));
    }
    if kind.is_dir() {
        return Ok(Some(LINKED_FOLDER));
    }
    Ok(is_special.then_some(NO_FILE))
}

fn is_dangling(entry: &fs::DirEntry) -> io::Result<bool> {
    Ok(entry.file_type()?.is_symlink() && fs::metadata(entry.path()).is_err())
}

/// Whether there are documents below a folder. Links below it are not followed.
fn has_documents(folder: &Path) -> io::Result<bool> {
    let mut folders = vec![folder.to_owned()];
    let mut seen = 0;
    while let Some(folder) = folders.pop() {
        for entry in entries(&folder)? {
            seen += 1;
            if seen > LINKED_ENTRIES_MAX || is_document_name(&entry.file_name().to_string_lossy()) {
                return Ok(true);
            }
            if entry.file_type()?.is_dir() {
                folders.push(entry.path());
            }
        }
    }
    Ok(false)
}

/// The entries of a folder that are not hidden. None if it is no folder, or has just been removed.
fn entries(folder: &Path) -> io::Result<Vec<fs::DirEntry>> {
    let entries = match fs::read_dir(folder) {
        Err(error) if is_missing(&error) => return Ok(Vec::new()),
        entries => entries?,
    };
    let is_shown = |name: &OsStr| !name.as_bytes().starts_with(b".");
    let mut shown = Vec::new();
    for entry in entries {
        let entry = entry?;
        if is_shown(&entry.file_name()) {
            shown.push(entry);
        }
    }
    Ok(shown)
}

fn is_missing(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory)
}

fn join(below: &str, name: &str) -> String {
    if below.is_empty() { name.to_owned() } else { format!("{below}/{name}") }
}

fn first_of<T>(all: &[T], show: impl Fn(&T) -> String) -> String {
    let mut shown: Vec<String> = all.iter().take(NAMES_MAX).map(show).collect();
    if all.len() > NAMES_MAX {
        shown.push(format!("and {} more", all.len() - NAMES_MAX));
    }
    shown.join(", ")
}
