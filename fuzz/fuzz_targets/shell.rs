//! A launch script: reading it twice gives the same command, and the same import.
//!
//! The reader turns a panic of its thread into an error; under the fuzzer it ends the process.

#![no_main]

use libfuzzer_sys::fuzz_target;
use recipe::import::{ConfigFormat, command_of_script, import_script};

fuzz_target!(|script: &str| {
    assert_eq!(command_of_script(script), command_of_script(script));
    let files = [fuzz::file("run.sh", script.as_bytes())];
    let arguments = ["2".to_owned(), "--lr 1e-3".to_owned()];
    let import = || {
        let imported = import_script(ConfigFormat::Megatron, &files, Some(8), &arguments);
        // As text, in which one NaN equals another.
        format!("{imported:?}")
    };
    assert_eq!(import(), import());
});
