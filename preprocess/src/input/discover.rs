//! Finds the files that names on the command line refer to.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::io;
use std::os::unix::fs::FileTypeExt as _;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;

use storage::{Key, Location, Object, Storage};

use super::codec::{
    Codec, DOCUMENT_ENDINGS, has_ending, has_records, is_document_name, split_ending,
};
use super::left_out::LeftOut;
use super::stream::decompressed_head;
use super::{
    Input, InputIdentity, InputLocation, PARQUET_FILE, RecordFormat, STDIN, TextRules, WHOLE,
    bad_input, glob, not_a_file,
};
use crate::{Error, Result};

/// White space allowed before the first character that shows the format.
const PEEK_BYTES: u64 = 64 << 10;

/// Limit of the expansion beyond the first gibibyte. Text and JSON expand three to ten times.
const EXPAND_RATIO_MAX: u64 = 256;

/// Decompressed bytes without a limit of the expansion: they are soon written, and short files of
/// one repeated line are no threat.
const EXPAND_FREE_BYTES: u64 = 1 << 30;

/// How inputs are read. Start from [`InputOptions::default`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InputOptions {
    /// The format of the files. Default: by name.
    pub format: Format,
    /// How plain text is split into documents. Default: one per line.
    pub text: TextRules,
    /// Read a file twice if it is named twice, instead of rejecting it. Default: no.
    pub repeats: bool,
    /// Longest decompressed length of an input as a multiple of its stored length, beyond the first
    /// gibibyte. `None`: no limit. Default: 256.
    pub expand_ratio_max: Option<u64>,
}

impl Default for InputOptions {
    fn default() -> Self {
        InputOptions {
            format: Format::Auto,
            text: TextRules::default(),
            repeats: false,
            expand_ratio_max: Some(EXPAND_RATIO_MAX),
        }
    }
}

/// The format of inputs, decompressed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Format {
    /// By name and content: `.txt` is plain text, a `.json` that begins with a bracket is a list of
    /// objects, Parquet and TFRecord are detected by their first bytes, and all else is JSON lines.
    #[default]
    Auto,
    /// One JSON object per line.
    JsonLines,
    /// One JSON list of objects.
    JsonArray,
    /// Plain text, split by [`TextRules`].
    Text,
    /// A column of Parquet files.
    Parquet,
    /// TFRecord files of `tf.Example`, whose features are read as the keys of JSON.
    TfRecord,
}

impl FromStr for Format {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        Ok(match text {
            "auto" => Format::Auto,
            "jsonl" => Format::JsonLines,
            "json" => Format::JsonArray,
            "txt" => Format::Text,
            "parquet" => Format::Parquet,
            "tfrecord" => Format::TfRecord,
            _ => return Err("expected auto, jsonl, json, txt, parquet or tfrecord".to_owned()),
        })
    }
}

/// Expands names to inputs, in the order of the names. A name is a file, a folder (all files below
/// it with the endings above, in byte order), a pattern (in the same order), a pipe, `-` for
/// standard input, or several of these separated by commas. If the whole name exists, it is not
/// parsed as a pattern or a list. `column` is the text column of Parquet.
///
/// # Errors
/// [`Error::BadInput`] for a name that does not exist, has an unknown format, or is repeated;
/// [`Error::Storage`].
pub(crate) fn expand(names: &[String], options: &InputOptions, column: &str) -> Result<Vec<Input>> {
    let text = Arc::new(options.text.clone());
    let mut finder = Finder { options, column, text, stores: HashMap::new(), found: Vec::new() };
    for name in names {
        finder.add(name)?;
    }
    let mut seen = HashSet::new();
    for input in &finder.found {
        let is_stream = !matches!(input.place, InputLocation::Object { .. });
        if !seen.insert(input.unique_path()) && (is_stream || !options.repeats) {
            let found = "the same input twice";
            return Err(match is_stream {
                true => bad_input(&input.name, found, "each stream once"),
                false => bad_input(&input.name, found, "each file once")
                    .with_hint("--allow-repeats reads a file as often as it is named"),
            });
        }
    }
    Ok(finder.found)
}

impl Input {
    /// A path shared by all names of one file, without accessing the disk.
    fn unique_path(&self) -> PathBuf {
        match &self.place {
            InputLocation::Object { store, key } => {
                let name = store.display(key);
                std::path::absolute(&name).unwrap_or_else(|_| name.into())
            }
            InputLocation::Pipe(path) => path.clone(),
            InputLocation::Stdin => "/dev/stdin".into(),
        }
    }
}

#[derive(Debug)]
struct Finder<'a> {
    options: &'a InputOptions,
    #[cfg_attr(not(feature = "parquet"), expect(dead_code, reason = "of Parquet alone"))]
    column: &'a str,
    text: Arc<TextRules>,
    /// By folder: opening a store examines its file system.
    stores: HashMap<String, Arc<dyn Storage>>,
    found: Vec<Input>,
}

/// The result of looking up a name.
enum Look {
    Stream(InputLocation),
    File(Arc<dyn Storage>, Key, Arc<dyn Object>),
    Folder,
    Nothing(Error),
}

impl Finder<'_> {
    fn add(&mut self, name: &str) -> Result<()> {
        let nothing = match self.look_up(name)? {
            Look::Stream(place) => return self.add_stream(name, place),
            Look::File(store, key, object) => {
                // Without the options of a URL, so that the name ends in its file ending.
                let is_url = Location::new(name).is_url();
                let name = if is_url { store.display(&key) } else { name.to_owned() };
                return self.add_file(name, store, key, object.as_ref());
            }
            Look::Folder => return self.add_folder(name),
            Look::Nothing(error) => error,
        };
        if is_s3(name) && has_options(name) {
            return Err(nothing); // a question mark before options is no pattern
        }
        let parts = glob::split_outside_braces(name);
        if parts.len() > 1 {
            return parts.into_iter().filter(|part| !part.is_empty()).try_for_each(|p| self.add(p));
        }
        if glob::is_pattern(name) { self.add_pattern(name) } else { Err(nothing) }
    }

    fn look_up(&mut self, name: &str) -> Result<Look> {
        if name == STDIN {
            return Ok(Look::Stream(InputLocation::Stdin));
        }
        // A named pipe must not be opened for detection: its writer would get a closed pipe.
        if let Ok(meta) = fs::metadata(name)
            && (meta.file_type().is_fifo() || meta.file_type().is_char_device())
        {
            return Ok(Look::Stream(InputLocation::Pipe(name.into())));
        }
        let located = match self.locate(name) {
            // A list or a pattern of objects may be no valid name of one.
            Err(error) if is_s3(name) && !has_options(name) => return Ok(Look::Nothing(error)),
            located => located?,
        };
        let Some((store, key)) = located else { return Ok(Look::Folder) };
        Ok(match store.open(&key) {
            Ok(object) => Look::File(store, key, object),
            Err(error) if is_folder(&error) => Look::Folder,
            // A store without folders has only the objects below them.
            Err(storage::Error::NotFound { .. }) if !store.list_names(&key)?.is_empty() => {
                Look::Folder
            }
            Err(error @ storage::Error::NotFound { .. }) => Look::Nothing(error.into()),
            Err(error) => return Err(not_a_file(name, error)),
        })
    }

    /// `None`: a folder without a name of its own, such as `.`.
    fn locate(&mut self, name: &str) -> Result<Option<(Arc<dyn Storage>, Key)>> {
        let location = Location::new(name);
        if location.is_s3() && location.file_name().is_empty() {
            return Ok(None); // a bucket
        }
        if location.is_url() {
            return Ok(Some(location.locate()?));
        }
        if name.is_empty() {
            return Err(bad_input("''", "an empty name", "a file name"));
        }
        if Path::new(name).file_name().is_none() {
            return Ok(None);
        }
        // For a name that is not a valid key, the store returns the error.
        let Ok(key) = Key::new(location.file_name()) else {
            return Ok(Some(location.locate()?));
        };
        Ok(Some((self.store(&location.parent().to_string())?, key)))
    }

    fn store(&mut self, folder: &str) -> Result<Arc<dyn Storage>> {
        if let Some(store) = self.stores.get(folder) {
            return Ok(Arc::clone(store));
        }
        let store = storage::open_url(folder)?;
        self.stores.insert(folder.to_owned(), Arc::clone(&store));
        Ok(store)
    }

    fn add_folder(&mut self, name: &str) -> Result<()> {
        let store = self.store(name)?;
        let entries = store.list(&Key::root())?;
        let mut taken = 0;
        for entry in &entries {
            let key = entry.key.as_str();
            if key.split('/').any(glob::is_hidden) || !is_document_name(key) {
                continue;
            }
            taken += 1;
            self.add_key(&store, &entry.key, name_below(name, &*store, &entry.key))?;
        }
        log::info!("{name}: {taken} of {} files are inputs", entries.len());
        if taken > 0 {
            return LeftOut::of_folder(name)?.check(name);
        }
        let endings = DOCUMENT_ENDINGS.join(", ");
        let found = match entries.len() {
            0 => "a folder without files".to_owned(),
            count => format!("a folder of {count} files with other names"),
        };
        let expected =
            format!("files that end in {endings}, optionally with .zst, .gz, .bz2 or .xz");
        Err(bad_input(name, found, expected))
    }

    fn add_pattern(&mut self, name: &str) -> Result<()> {
        let before = self.found.len();
        let alternatives = glob::alternatives(name);
        for pattern in alternatives.map_err(|found| bad_input(name, found, "fewer alternatives"))? {
            let (base, rest) = split_base(&pattern);
            let folder = if base.is_empty() { "." } else { base };
            let store = self.store(folder)?;
            let components: Vec<&str> = rest.split('/').filter(|part| !part.is_empty()).collect();
            LeftOut::of_pattern(folder, &components)?.check(name)?;
            for key in glob::find(store.as_ref(), &Key::root(), &components)? {
                match self.add_key(&store, &key, name_below(base, &*store, &key)) {
                    // The last component was no pattern, and need not exist in every folder.
                    Err(Error::Storage(storage::Error::NotFound { .. })) => {}
                    Err(Error::Storage(storage::Error::Io { source, .. }))
                        if source.kind() == io::ErrorKind::NotADirectory => {}
                    outcome => outcome?,
                }
            }
        }
        let count = self.found.len() - before;
        log::info!("{name}: matched {count} files");
        if count == 0 { Err(bad_input(name, "none", "at least one matching file")) } else { Ok(()) }
    }

    /// Adds the file, or the folder of files, that a key refers to.
    fn add_key(&mut self, store: &Arc<dyn Storage>, key: &Key, name: String) -> Result<()> {
        match store.open(key) {
            Ok(object) => self.add_file(name, Arc::clone(store), key.clone(), object.as_ref()),
            Err(error) if is_folder(&error) => self.add_folder(&name),
            Err(error) => Err(not_a_file(&name, error)),
        }
    }

    fn add_file(
        &mut self,
        name: String,
        store: Arc<dyn Storage>,
        key: Key,
        object: &dyn Object,
    ) -> Result<()> {
        let read = InputIdentity::read(object);
        let (identity, head) = read.map_err(|error| not_a_file(&name, error))?;
        let codec = Codec::detect(&name, &head)?;
        let mut input = Input {
            name,
            stored_bytes: Some(identity.bytes),
            identity: Some(identity),
            skipped_crc64: None,
            place: InputLocation::Object { store, key },
            codec,
            shape: RecordFormat::JsonLines,
            part: WHOLE,
            expand_free_bytes: EXPAND_FREE_BYTES,
            expand_ratio_max: self.options.expand_ratio_max,
        };
        input.shape = self.shape(&input, &head)?;
        self.found.push(input);
        Ok(())
    }

    fn add_stream(&mut self, name: &str, place: InputLocation) -> Result<()> {
        let shape = match self.options.format {
            Format::Auto | Format::JsonLines => RecordFormat::JsonLines,
            Format::JsonArray => RecordFormat::JsonArray,
            Format::Text => RecordFormat::Text(Arc::clone(&self.text)),
            Format::TfRecord => RecordFormat::TfRecord,
            Format::Parquet => {
                return Err(bad_input(name, "a stream", PARQUET_FILE));
            }
        };
        self.found.push(Input {
            name: name.to_owned(),
            stored_bytes: None,
            identity: None,
            skipped_crc64: None,
            place,
            codec: Codec::Plain,
            shape,
            part: WHOLE,
            expand_free_bytes: EXPAND_FREE_BYTES,
            expand_ratio_max: self.options.expand_ratio_max,
        });
        Ok(())
    }

    fn shape(&self, input: &Input, head: &[u8]) -> Result<RecordFormat> {
        let stem = split_ending(&input.name).0;
        let is_parquet = input.codec == Codec::Parquet;
        let is_tfrecord = has_records(&input.name, input.codec, head);
        match self.options.format {
            Format::Auto | Format::Parquet if is_parquet => self.rows(input),
            Format::Parquet => Err(bad_input(&input.name, "another format", "Parquet")),
            _ if is_parquet => {
                Err(bad_input(&input.name, "Parquet", "the format of --input-format"))
            }
            Format::TfRecord => Ok(RecordFormat::TfRecord),
            Format::Auto if is_tfrecord => Ok(RecordFormat::TfRecord),
            _ if is_tfrecord => {
                Err(bad_input(&input.name, "TFRecord", "the format of --input-format"))
            }
            Format::JsonArray => Ok(RecordFormat::JsonArray),
            Format::Text => Ok(RecordFormat::Text(Arc::clone(&self.text))),
            Format::Auto if has_ending(stem, ".txt") => {
                if starts_with(input, b"{\"")? {
                    return Err(bad_input(&input.name, "JSON lines", "text (by file name)")
                        .with_hint("set --input-format jsonl, or txt"));
                }
                Ok(RecordFormat::Text(Arc::clone(&self.text)))
            }
            Format::Auto if has_ending(stem, ".json") && starts_with(input, b"[")? => {
                Ok(RecordFormat::JsonArray)
            }
            Format::Auto | Format::JsonLines => Ok(RecordFormat::JsonLines),
        }
    }

    #[cfg(not(feature = "parquet"))]
    #[expect(clippy::unused_self, reason = "the variant with Parquet uses it")]
    fn rows(&self, input: &Input) -> Result<RecordFormat> {
        let hint = "build with the feature parquet, or convert the file to JSON lines";
        Err(bad_input(&input.name, "Parquet", super::codec::READABLE).with_hint(hint))
    }

    #[cfg(feature = "parquet")]
    fn rows(&self, input: &Input) -> Result<RecordFormat> {
        super::parquet::RowReader::open(input, self.column, 0)?;
        Ok(RecordFormat::Rows(self.column.into()))
    }
}

/// Whether a file begins with some bytes, after white space and a byte order mark.
fn starts_with(input: &Input, prefix: &[u8]) -> Result<bool> {
    let head = decompressed_head(input, PEEK_BYTES)?;
    let head = head.strip_prefix(b"\xef\xbb\xbf").unwrap_or(&head);
    Ok(head.trim_ascii_start().starts_with(prefix))
}

fn is_folder(error: &storage::Error) -> bool {
    matches!(error, storage::Error::Io { source, .. }
        if source.kind() == io::ErrorKind::IsADirectory)
}

fn is_s3(name: &str) -> bool {
    Location::new(name).is_s3()
}

/// Whether a question mark starts options for the store, rather than being a pattern.
fn has_options(name: &str) -> bool {
    name.split_once('?').is_some_and(|(_, options)| options.contains('='))
}

/// The folder before the first component that is a pattern, and the rest.
fn split_base(pattern: &str) -> (&str, &str) {
    let first = pattern.find(['*', '?', '[']).unwrap_or(pattern.len());
    match pattern[..first].rfind('/') {
        None => ("", pattern),
        Some(0) => ("/", &pattern[1..]),
        Some(slash) => (&pattern[..slash], &pattern[slash + 1..]),
    }
}

/// The name of an input below a folder as it was typed. Of a URL, it has no options.
fn name_below(folder: &str, store: &dyn Storage, key: &Key) -> String {
    let folder = Location::new(folder);
    if folder.is_url() { store.display(key) } else { folder.join(key.as_str()).to_string() }
}
