//! JSON as Python reads it.

mod escape;
mod list;
pub(crate) mod scanner;
