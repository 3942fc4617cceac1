//! The command `feedline`.

use std::process::ExitCode;

use tools::command::{Invocation, run};

fn main() -> ExitCode {
    ExitCode::from(run(&Invocation::of_this_process()))
}
