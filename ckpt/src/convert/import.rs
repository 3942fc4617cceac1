//! An opened foreign checkpoint: its tensors, what they are converted to, and its metadata.

use super::made::{DerivedTensor, unfit};
use super::source::{FileExtent, TensorSource};
use super::{dcp, deepspeed, hf, megatron, torch};
use crate::{Error, Group, Result};
use storage::{Key, Storage};

use std::sync::Arc;

/// The format of a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Format {
    /// A folder of Hugging Face with safetensors or `torch.save` files, and an index if there are
    /// several; or one safetensors file.
    HuggingFace,
    /// One file of `torch.save`, or a folder of Hugging Face with `pytorch_model.bin` or an index
    /// of several.
    Torch,
    /// A folder of `torch.distributed.checkpoint`.
    Dcp,
    /// A folder with Megatron-LM's `mp_rank_*`, or its parent.
    Megatron,
    /// A folder with DeepSpeed's `*_model_states.pt` and `*_optim_states.pt`, or its parent.
    DeepSpeed,
}

/// A foreign checkpoint, of which only names and locations have been read.
#[derive(Debug)]
pub struct Import {
    /// Its tensors as stored.
    pub source: TensorSource,
    /// The tensors that they are converted to.
    pub made: Vec<DerivedTensor>,
    /// Skipped names: buffers, copies of tied weights, states that are not needed to resume.
    pub dropped: Vec<String>,
    /// The training step in its metadata.
    pub step: Option<u64>,
    /// The number of attention heads, if it contains it.
    pub heads: Option<u64>,
}

impl Import {
    /// Opens a checkpoint: reads headers, pickles and directories, but no tensors.
    ///
    /// # Errors
    /// [`Error::Corrupt`] for violations of its format, [`Error::Unfit`] for unsupported contents,
    /// or errors of the store.
    pub fn open(url: &str, format: Format) -> Result<Self> {
        let import = match format {
            Format::HuggingFace => hf::open(url),
            Format::Torch => open_torch(url),
            Format::Dcp => dcp::open(url),
            Format::Megatron => megatron::open(url),
            Format::DeepSpeed => deepspeed::open(url),
        }?;
        // A file of safetensors may be empty.
        if import.made.is_empty() && format != Format::HuggingFace {
            let expected = "the tensors of a checkpoint";
            return Err(unfit(import.source.display(), "no tensor".to_owned(), expected));
        }
        Ok(import)
    }

    /// The tensors of a step as they are, and its blobs.
    ///
    /// # Errors
    /// Errors of reading the blobs.
    pub fn of_step(step: crate::Checkpoint) -> Result<Self> {
        let number = step.step();
        let names: Vec<String> = step.blobs().map(str::to_owned).collect();
        let blobs = names.into_iter().map(|name| Ok((name.clone(), step.blob(&name)?)));
        let blobs = blobs.collect::<Result<Vec<_>>>()?;
        let mut source = TensorSource::of_step(step);
        for (name, bytes) in blobs {
            source.add_blob(name, bytes);
        }
        Ok(Import { step: Some(number), ..Import::of(source) })
    }

    pub(crate) fn of(source: TensorSource) -> Self {
        let made =
            (0..source.tensors().len()).map(|place| DerivedTensor::same(&source, place)).collect();
        Import { source, made, dropped: Vec::new(), step: None, heads: None }
    }

    /// Removes the tensors for which the function returns false.
    pub(crate) fn keep(&mut self, is_kept: impl Fn(&DerivedTensor) -> bool) {
        let (kept, dropped) = std::mem::take(&mut self.made).into_iter().partition(is_kept);
        self.made = kept;
        self.dropped.extend(dropped.into_iter().map(|made: DerivedTensor| made.name));
    }

    /// Removes all tensors except the weights.
    pub fn without_optimizer(&mut self) {
        self.keep(|made| made.group == Group::Model);
    }
}

/// Opens a file of `torch.save`, or a folder of Hugging Face with such files.
fn open_torch(url: &str) -> Result<Import> {
    let names = storage::open_url(url).and_then(|store| store.list_names(&Key::root()));
    if names.is_ok_and(|names| !names.is_empty()) {
        return hf::open_pickles(url);
    }
    let (store, key) = storage::locate(url)?;
    hf::check_complete_file(&*store, &key)?;
    let mut source = TensorSource::of_files(&store, store.display(&key));
    let file = torch::TorchFile::open(&mut source, &*store, &key)?;
    let pickle = &file.pickle;
    for (name, tensor) in file.state_dict()? {
        source.add(name, Group::Model, tensor.dtype, tensor.shape, tensor.extents)?;
    }
    let step = ["iteration", "global_step", "global_steps", "step"]
        .iter()
        .find_map(|name| pickle.size(pickle.get(pickle.root, name)?));
    if key.name() == hf::PICKLED_SINGLE {
        // The only weights file of a folder of Hugging Face, which also has the configuration.
        let folder = key.parent();
        let names = store.list_names(&folder)?;
        hf::add_companions(&mut source, &*store, &folder, &names)?;
    }
    let heads = hf::heads_of(&source);
    Ok(Import { step, heads, ..Import::of(source) })
}

/// The file has a name or a number.
const TRACKER_BYTES_MAX: u64 = 4096;

/// The folder that a small text file names, or the given one: `latest` of DeepSpeed, and Megatron's
/// `latest_checkpointed_iteration.txt`.
pub(crate) fn folder_by(
    url: &str,
    tracker: &str,
    folder_of: impl Fn(&str) -> String,
) -> Result<(Arc<dyn Storage>, Key)> {
    let store = storage::open_url(url)?;
    let key = Key::new(tracker)?;
    let text = match storage::read_small(&*store, &key, TRACKER_BYTES_MAX) {
        Ok(text) => text,
        Err(storage::Error::NotFound { .. }) => return Ok((store, Key::root())),
        Err(error) => return Err(error.into()),
    };
    let text = String::from_utf8_lossy(&text);
    let folder = Key::new(folder_of(text.trim()))?;
    if store.list_names(&folder)?.is_empty() {
        return Err(Error::Corrupt {
            object: store.display(&key),
            offset: 0,
            found: format!("'{:.80}'", text.trim()),
            expected: "the name of a folder next to this file".to_owned(),
        });
    }
    Ok((store, folder))
}

/// The extents of bytes `first..first + count` of a tensor with these extents.
pub(crate) fn part_of(extents: &[FileExtent], first: u64, count: u64) -> Vec<FileExtent> {
    let (mut skip, mut left) = (first, count);
    let mut parts = Vec::new();
    for extent in extents {
        let skipped = skip.min(extent.bytes);
        skip -= skipped;
        let now = left.min(extent.bytes - skipped);
        if now > 0 {
            parts.push(FileExtent { offset: extent.offset + skipped, bytes: now, ..*extent });
            left -= now;
        }
    }
    parts
}
