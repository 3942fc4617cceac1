//! JSON, parsed by the rules of Python's `json` module.

mod escape;
mod list;
pub(crate) mod scanner;
