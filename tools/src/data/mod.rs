//! Commands for token files.

pub mod check;
pub mod clean;
pub mod convert;
pub mod foreign;
pub mod index;
pub mod inspect;
pub mod materialize;
mod materialize_resume;
pub mod merge;
pub mod repair;
pub mod samples;
mod samples_show;
pub mod split;
pub mod tokenizer;
