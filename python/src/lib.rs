//! The Python module `feedline._feedline`: data, tokens and checkpoints for other training loops.
//!
//! It wraps libraries and has no logic of its own beside what the border needs: the GIL is released
//! around all that reads, waits or encodes; a wait looks for signals every 50 ms; objects that hold
//! threads know the process that started them; errors become Python's exceptions. What users call
//! is in `python/feedline`, which documents it.
//!
//! In reading order: `dataset` opens samples and reads them by number, `loader` reads them ahead,
//! `arrays` lends the memory of a batch to numpy. `checkpoint` saves and reads steps, `tensor_file`
//! reads and writes single files of tensors. `tokenizer` encodes texts, `verbs` runs what the
//! programs run, `program` the programs themselves. `errors` and `wait` are below all of these.

#![deny(unsafe_code)]
#![expect(clippy::needless_pass_by_value, reason = "arguments from Python are owned")]

mod arrays;
mod checkpoint;
mod dataset;
mod errors;
mod loader;
mod program;
mod tensor_file;
mod tokenizer;
mod verbs;
mod wait;

use pyo3::prelude::*;

/// The compiled half of the package; `feedline` is its public face.
#[pymodule]
mod _feedline {
    #[pymodule_export]
    use super::checkpoint::{
        Checkpoint, Checkpoints, copy_all, file_name, join_url, local_path, process_identity,
        split_step,
    };
    #[pymodule_export]
    use super::dataset::Dataset;
    #[pymodule_export]
    use super::loader::Loader;
    #[pymodule_export]
    use super::program::run_program;
    #[pymodule_export]
    use super::tensor_file::{TensorFile, crc64_all, write_file};
    #[pymodule_export]
    use super::tokenizer::Tokenizer;
    #[pymodule_export]
    use super::verbs::{ckpt_diff, ckpt_ls, ckpt_verify, run_check, run_inspect, run_preprocess};

    use super::*;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", env!("CARGO_PKG_VERSION"))?;
        program::log_to_python(module.py())
    }
}
