//! The command `feedline`: looks into token files and checkpoints and says whether they are whole.
//!
//! [`target`] finds out what an argument names, [`cmd`] holds one module a verb, [`report`] prints,
//! [`fio`] is what verbs that measure stand beside,
//! [`simulate`] puts a model of a store in place of one, [`work`] ends what writes at Ctrl-C.
//! A verb returns a value that serializes; `--json` prints that value and the human form is made
//! from it, so the two cannot differ in a number.

#![forbid(unsafe_code)]

pub mod cmd;
pub mod fio;
pub mod report;
pub mod simulate;
pub mod target;
pub mod work;
