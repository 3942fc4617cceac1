//! Modules that all commands share: output, terminal, and Ctrl-C.

pub mod inspect_target;
pub mod job;
pub mod output;
pub mod output_claim;
mod progress_layer;
pub mod simulate;
pub mod step_folder;
pub mod terminal;
pub mod timeout;
pub(crate) mod unfinished_files;
