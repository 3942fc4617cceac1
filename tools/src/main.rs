//! The command `feedline`.

use std::io::{self, Write as _};
use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};
use tools::cmd::{check, clean, inspect};
use tools::target::Target;

/// Looks into token files and checkpoints, and says whether they are whole.
#[derive(Debug, Parser)]
#[command(version, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// Tells what is in token files, a checkpoint or a folder of checkpoints.
    ///
    /// Exit 0: told. 2: it cannot be opened.
    Inspect(Subject),
    /// Reads everything and compares it with every checksum and rule of its format.
    ///
    /// Exit 0: whole. 1: damaged, and the output says where. 2: it cannot be found.
    Check(Subject),
    /// Copies JSON lines without those that are bad, short, foreign, or there already.
    ///
    /// Lines are kept byte for byte and in order, whatever the number of workers. The first bad
    /// line ends the run, and nothing is left under the names of the outputs. Exit 0: done. 2: it
    /// could not.
    Clean(Box<clean::CleanArgs>),
}

#[derive(Debug, clap::Args)]
struct Subject {
    /// Prefix of a .bin and .idx, a step-* folder, or the folder that holds such.
    #[arg(value_name = "PREFIX|CKPT")]
    name: String,
    /// Prints JSON, with units in the keys.
    #[arg(long)]
    json: bool,
}

fn main() -> ExitCode {
    match run(&Cli::parse().verb) {
        Ok(code) => code,
        // Whoever reads our output has seen enough.
        Err(error) if is_closed_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            // Where stderr is closed there is nobody left to tell.
            _ = writeln!(io::stderr(), "feedline: {error:#}");
            ExitCode::from(2)
        }
    }
}

fn run(verb: &Verb) -> Result<ExitCode> {
    let mut out = io::stdout().lock();
    match verb {
        Verb::Inspect(subject) => {
            let found = inspect::inspect(&Target::find(&subject.name)?)?;
            if subject.json {
                writeln!(out, "{}", serde_json::to_string_pretty(&found)?)?;
            } else {
                write!(out, "{}", found.text())?;
            }
            Ok(ExitCode::SUCCESS)
        }
        Verb::Clean(args) => clean::run(args, &mut out).map(|()| ExitCode::SUCCESS),
        Verb::Check(subject) => {
            let verdict = check::check(&Target::find(&subject.name)?)?;
            if subject.json {
                writeln!(out, "{}", serde_json::to_string_pretty(&verdict)?)?;
            } else {
                write!(out, "{}", verdict.text())?;
            }
            Ok(if verdict.ok() { ExitCode::SUCCESS } else { ExitCode::from(1) })
        }
    }
}

fn is_closed_pipe(error: &anyhow::Error) -> bool {
    let kind = error.downcast_ref::<io::Error>().map(io::Error::kind);
    kind == Some(io::ErrorKind::BrokenPipe)
}
