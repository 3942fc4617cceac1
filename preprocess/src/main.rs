//! The command `preprocess`: JSON lines to the token files that Megatron reads.

use std::process::ExitCode;

fn main() -> ExitCode {
    ExitCode::from(preprocess::cli::run(std::env::args_os()))
}
