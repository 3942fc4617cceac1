//! Tensors to shards and back: checkpoints that are durable, verified and atomic.
//!
//! A checkpoint is a folder, `step-000012000`, that appears atomically: its files are written and
//! made durable under a hidden name, then the manifest with their lengths and checksums, then the
//! folder is renamed. So a reader needs no `latest` file: the newest folder whose manifest agrees
//! with its files is the newest checkpoint. `FORMAT.md` specifies every byte of it.
//!
//! Names and shapes are those of the whole model; nothing stored depends on how many processes
//! wrote it.
//!
//! ```
//! use ckpt::{Blob, Checkpoints, Dtype, Group, TensorData};
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let folder = tempfile::tempdir()?;
//! # let url = folder.path().to_str().ok_or("path")?;
//! let steps = Checkpoints::open(storage::open_url(url)?, storage::Key::new("run-7")?);
//! let weight = TensorData {
//!     name: "lm_head.weight",
//!     group: Group::Model,
//!     dtype: Dtype::F32,
//!     shape: &[2],
//!     bytes: &[0, 0, 128, 63, 0, 0, 0, 64],
//! };
//! let loader = Blob { name: "loader.json", bytes: b"{\"samples_consumed\": 96}" };
//! steps.save(12, &[weight], &[loader], serde_json::json!({ "loss": 3.5 }))?;
//! steps.retain(3)?;
//!
//! let newest = steps.newest()?.ok_or("nothing saved")?;
//! let mut bytes = [0; 8];
//! newest.read_tensor("lm_head.weight", Group::Model, &mut bytes)?;
//! assert_eq!(bytes[4..], 2_f32.to_le_bytes());
//! # Ok(())
//! # }
//! ```
//!
//! In reading order: [`Checkpoints`] (`steps`) is the folder of steps. A [`Region`] is a part of a
//! tensor; `tile` and `runs` are its geometry. A [`SavePlan`] (`plan`) decides which writer puts
//! which bytes into which file, given the [`layout`] of the ranks. `write` writes the shards and
//! `save` commits them; `format` defines the files, and `liveness` detects dead writers and holds
//! the lease. A [`Checkpoint`] (`read`) reads any regions and verifies them. `retain` deletes old
//! steps and orphans, except steps that a reader has pinned. [`AsyncSaver`] (`background`) copies
//! the state and saves the copy while training continues, in this process or in an [`Agent`];
//! [`Drain`] copies steps to a second store. [`convert`] reads and writes checkpoints of other
//! programs, [`offload`] keeps optimizer state in host memory or on NVMe.

#![forbid(unsafe_code)]

mod agent;
mod background;
mod bands;
mod base;
pub mod bench;
pub mod convert;
mod drain;
mod dtype;
mod format;
pub mod layout;
mod liveness;
mod number;
pub mod offload;
mod plan;
mod read;
mod region;
mod retain;
mod runs;
mod save;
mod spec;
mod steps;
mod tile;
mod write;

pub use agent::{Agent, serve as serve_agent};
pub use background::save_handle::{SaveHandle, SaveProgress};
pub use background::{AsyncSaveOptions, AsyncSaver, Finish, SaveStart, WhenBusy};
pub use bands::{Slabs, bands};
pub use base::error::{Error, Result};
pub use base::save_control::SaveControl;
pub use drain::task::{DrainStatus, DrainTask};
pub use drain::{Drain, DrainOptions, DrainPass, DrainReport, Durability};
pub use dtype::{Dtype, Group};
pub use format::catalog::{Chunk, Packed, StoredBlock, TensorEntry};
pub use format::codec::Codec;
pub use format::tensor_file::{FileTensor, TensorFile};
pub use liveness::heartbeat::LivenessTimeouts;
pub use liveness::lease::Lease;
pub use number::{can_cast, cast, to_f64, to_pair};
pub use plan::{PlanCache, PlanLimits, PlannedChunk, SavePlan, Shard};
pub use read::checkpoint::{Checkpoint, TensorRead};
pub use read::scatter::{ReadReport, RegionRequest};
pub use read::verify::VerifyReport;
pub use region::{Region, Span};
pub use retain::pin::Pin;
pub use retain::retention::{Check, Keep, Retention, RetentionPlan};
pub use retain::sweep::SweepReport;
pub use save::joint::JointSaveOptions;
pub use save::{Blob, SaveReport, TensorData};
pub use spec::{HeldRegion, TensorSpec};
pub use steps::checkpoints::{CheckpointOptions, Checkpoints, step_of};
pub use steps::folder_listing::FolderListing;
pub use steps::peak_rate::PeakRate;
