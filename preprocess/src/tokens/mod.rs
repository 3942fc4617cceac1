//! A resumable run from text to token files.

mod cleanup;
pub(crate) mod estimate;
pub(crate) mod journal;
mod long_text;
mod outputs;
mod resume_check;
pub(crate) mod run;
pub(crate) mod worker;
mod writer;
