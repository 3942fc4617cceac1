//! The command `feedline`: looks into token files and checkpoints and says whether they are whole.
//!
//! [`ui::inspect_target`] finds out what an argument names, [`ui::output`] holds one module a verb,
//! [`ui::terminal`] prints, [`bench::fio`] is what verbs that measure stand beside,
//! [`ui::simulate`] puts a model of a store in place of one, [`ui::job`] ends what writes at
//! Ctrl-C. A verb returns a value that serializes; `--json` prints that value and the human form is
//! made from it, so the two cannot differ in a number.

#![forbid(unsafe_code)]

pub mod bench;
pub mod ckpt;
pub mod data;
pub mod doctor;
pub mod offload;
pub mod ui;
