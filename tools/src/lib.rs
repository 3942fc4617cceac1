//! The command `feedline`: inspects, checks and converts token files and checkpoints, and measures
//! stores.
//!
//! [`command`] is the program. [`data`] and [`ckpt`] have a module per verb; [`mod@bench`],
//! [`offload`] and [`doctor`] are a folder each. [`ui`] is shared by all of them:
//! [`ui::inspect_target`] detects what an argument names, [`ui::output`] and [`ui::terminal`]
//! print, [`ui::simulate`] replaces a store by a model of one, and [`ui::job`] stops a writing
//! verb at Ctrl-C. A verb returns a value that serializes; `--json` prints that value and the
//! human-readable form is made from it, so the two cannot differ in a number.

#![forbid(unsafe_code)]

pub mod bench;
pub mod ckpt;
pub mod command;
pub mod data;
pub mod doctor;
pub mod offload;
pub mod ui;
