//! Converts checkpoints of other programs to steps and back, without holding a model in memory.
//!
//! A [`TensorSource`] is tensors that can be read in parts: those of a step, or bytes of foreign
//! files. A [`DerivedTensor`] describes a tensor as boxes of source tensors.
//! [`Checkpoints::save_made`] and [`export`] compute them band by band, within [`ConvertLimits`].
//! Foreign files are indexed, not copied: a pickle is parsed as data and has the location of each
//! tensor in its file.
//!
//! ```no_run
//! use ckpt::Checkpoints;
//! use ckpt::convert::{ConvertLimits, Format, Import, NewRows, RenameRules};
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! // A run that starts from the weights of another.
//! let mut import = Import::open("gpt2-zh/global_step9000", Format::DeepSpeed)?;
//! import.apply(&RenameRules::parse("rules", "rename model.* -> {1}")?)?;
//! if let Some(family) = import.normalize()? {
//!     import.check_complete(family)?;
//! }
//! import.without_optimizer();
//! import.set_vocab(50_304, &NewRows::Mean)?;
//! let steps = Checkpoints::open(storage::open_url("run-8")?, storage::Key::root());
//! let meta = serde_json::json!({ "init_from": import.source.display() });
//! steps.save_made(0, &import, &[], meta, ConvertLimits::default(), &|_| ())?;
//! # Ok(())
//! # }
//! ```
//!
//! In reading order: `source`, `made` and `fill` describe tensors, `write` and `step` write them;
//! `import` opens, `hf`, `torch`, `dcp`, `megatron` and `deepspeed` are the formats, over `zip` and
//! `pickle`; `rules` and `family` change names and sizes; `complete` finds missing parameters.
//!
//! [`Checkpoints::save_made`]: crate::Checkpoints::save_made

mod complete;
mod dcp;
mod deepspeed;
mod family;
mod fill;
mod hf;
mod import;
mod made;
mod megatron;
mod pickle;
mod rules;
mod source;
mod step;
mod torch;
mod write;
mod zip;

pub use family::Family;
pub use fill::NewRows;
pub use hf::{Exported, export};
pub use import::{Format, Import};
pub use made::DerivedTensor;
pub use rules::RenameRules;
pub use source::{SourceTensor, TensorSource};
pub use write::{ConvertLimits, ProgressFn};
