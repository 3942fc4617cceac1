//! The end of the pipeline: documents into files, counts into a report.

use std::sync::Arc;
use std::time::Instant;

use indexed::{Builder, Dtype};
use serde_json::json;
use storage::{FileEntry, Key, Manifest, Storage};

use crate::input::Input;
use crate::parcel::{Parcel, Stop};
use crate::report::Output;
use crate::{BadLine, Error, InputReport, Options, Progress, Report, Result, Tokenizer};

/// What the manifest of a token dataset calls it.
const FORMAT: &str = "feedline-tokens";
const FORMAT_VERSION: u32 = 1;

/// The outputs of a run, being written.
#[derive(Debug)]
pub(crate) struct Commit {
    store: Arc<dyn Storage>,
    prefix: Key,
    manifest: Key,
    builder: Builder,
    dtype: Dtype,
    stored_bytes_all: Option<u64>,
    inputs: Vec<InputReport>,
    documents: u64,
    documents_empty: u64,
    tokens: u64,
    blank_lines: u64,
    text_bytes: u64,
}

impl Commit {
    /// Begins the outputs, none of which may exist.
    pub(crate) fn begin(
        options: &Options,
        tokenizer: &dyn Tokenizer,
        inputs: &[Input],
    ) -> Result<Self> {
        let (store, prefix) = storage::locate(&options.out_prefix)?;
        let prefix = prefix.with_suffix(&format!("_{}_document", options.key))?;
        let manifest = prefix.with_suffix(".manifest.json")?;
        for key in [&prefix.with_suffix(".bin")?, &prefix.with_suffix(".idx")?, &manifest] {
            match store.open(key) {
                Err(storage::Error::NotFound { .. }) => {}
                Err(error) => return Err(error.into()),
                Ok(_) => return Err(storage::Error::Exists { what: store.display(key) }.into()),
            }
        }
        let dtype = Dtype::for_vocab(Some(u64::from(tokenizer.vocab_size())));
        let builder = Builder::create(&store, &prefix, dtype)?;
        let named = |input: &Input| InputReport { name: input.name.clone(), ..Default::default() };
        Ok(Commit {
            store,
            prefix,
            manifest,
            builder,
            dtype,
            stored_bytes_all: inputs.iter().map(|input| input.stored_bytes).sum(),
            inputs: inputs.iter().map(named).collect(),
            documents: 0,
            documents_empty: 0,
            tokens: 0,
            blank_lines: 0,
            text_bytes: 0,
        })
    }

    pub(crate) fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// Writes the documents of the next parcel, or fails as it says.
    pub(crate) fn add(&mut self, parcel: &mut Parcel) -> Result<()> {
        let item_bytes = self.dtype.item_bytes() as usize; // fits: at most 8
        let documents = &parcel.documents;
        let mut rest = documents.bytes.as_slice();
        for &len in &documents.lens {
            let bytes;
            (bytes, rest) = rest.split_at(len as usize * item_bytes);
            if len > 0 {
                self.builder.add_encoded(bytes, &[len])?;
            } else {
                self.documents_empty += 1;
            }
            self.builder.end_document()?;
            self.tokens += u64::from(len);
        }
        assert!(rest.is_empty(), "the lengths are those of the tokens");
        self.documents += documents.lens.len() as u64;
        self.blank_lines += documents.blank_lines;
        self.text_bytes += documents.text_bytes;
        let input = &mut self.inputs[parcel.input_idx];
        input.documents += documents.lens.len() as u64;
        input.lines += documents.lines;
        input.json_bytes += parcel.bytes.len() as u64;
        input.stored_bytes = parcel.stored_bytes;
        match parcel.stop.take() {
            None => Ok(()),
            Some(Stop::Input(error)) => Err(error),
            Some(Stop::Line { offset, fault }) => Err(Error::BadLine(Box::new(BadLine {
                input: input.name.clone(),
                line: input.lines + 1,
                offset: parcel.offset + offset as u64,
                column: fault.column as u64,
                decompressed: parcel.decompressed,
                got: fault.got,
                due: fault.due,
                hint: fault.hint,
            }))),
        }
    }

    pub(crate) fn progress(&self) -> Progress {
        Progress {
            stored_bytes: self.inputs.iter().map(|input| input.stored_bytes).sum(),
            stored_bytes_all: self.stored_bytes_all,
            json_bytes: self.json_bytes(),
            documents: self.documents,
            tokens: self.tokens,
        }
    }

    fn json_bytes(&self) -> u64 {
        self.inputs.iter().map(|input| input.json_bytes).sum()
    }

    /// Makes the outputs durable and visible, the manifest last.
    pub(crate) fn finish(
        self,
        options: &Options,
        tokenizer: &dyn Tokenizer,
        start: Instant,
    ) -> Result<Report> {
        let progress = self.progress();
        let Commit { store, prefix, builder, .. } = self;
        let built = builder.finish()?;
        let files = vec![built.bin, built.idx];
        let manifest = Manifest {
            format: FORMAT.to_owned(),
            version: FORMAT_VERSION,
            files: files.clone(),
            meta: json!({
                "tool": concat!("preprocess ", env!("CARGO_PKG_VERSION")),
                "tokenizer": {
                    "name": tokenizer.name(),
                    "fingerprint": tokenizer.fingerprint(),
                    "vocab_size": tokenizer.vocab_size(),
                    "eod_id": tokenizer.eod(),
                    "identifiers": tokenizer.identifiers(),
                },
                "dtype": dtype_name(self.dtype),
                "json_key": options.key,
                "append_eod": options.append_eod,
                "documents": built.documents,
                "sequences": built.sequences,
                "tokens": built.tokens,
                "inputs": self.inputs,
            }),
        };
        let entry = manifest
            .write(store.as_ref(), &self.manifest)
            .map_err(|error| take_back(store.as_ref(), &prefix, error.into()))?;
        let elapsed_s = start.elapsed().as_secs_f64();
        let folder = prefix.parent();
        let output =
            |entry: &FileEntry| Ok(Output::new(store.display(&folder.join(&entry.path)?), entry));
        Ok(Report {
            tokenizer: tokenizer.name().to_owned(),
            vocab_size: tokenizer.vocab_size(),
            dtype: dtype_name(self.dtype),
            workers: options.workers,
            documents: built.documents,
            documents_empty: self.documents_empty,
            sequences: built.sequences,
            tokens: built.tokens,
            blank_lines: self.blank_lines,
            stored_bytes: progress.stored_bytes,
            json_bytes: progress.json_bytes,
            text_bytes: self.text_bytes,
            elapsed_s,
            json_mb_per_s: ratio(progress.json_bytes as f64 / 1e6, elapsed_s),
            tokens_per_s: ratio(built.tokens as f64, elapsed_s),
            tokens_per_document: ratio(built.tokens as f64, built.documents as f64),
            text_bytes_per_token: ratio(self.text_bytes as f64, built.tokens as f64),
            inputs: self.inputs,
            outputs: files.iter().chain([&entry]).map(output).collect::<Result<_>>()?,
        })
    }
}

/// Without its manifest a dataset is not complete: what stands of it goes again.
fn take_back(store: &dyn Storage, prefix: &Key, error: Error) -> Error {
    for suffix in [".idx", ".bin"] {
        let key = prefix.with_suffix(suffix);
        if let Err(failed) = key.and_then(|key| store.delete(&key)) {
            log::warn!("take back {prefix}{suffix}: {failed}");
            let file = format!("{prefix}{suffix}");
            return Error::LeftBehind { file, source: Box::new(error) };
        }
    }
    error
}

fn dtype_name(dtype: Dtype) -> &'static str {
    if dtype == Dtype::U16 { "uint16" } else { "int32" }
}

/// Zero if there is nothing to divide by.
fn ratio(part: f64, whole: f64) -> f64 {
    if whole == 0.0 { 0.0 } else { part / whole }
}
