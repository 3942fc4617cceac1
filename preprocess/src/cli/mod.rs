//! The program `preprocess`: its command line, progress and summary.
//!
//! It is part of the library because two files run it: the binary, and the native module of the
//! Python package.

mod args;
mod compat;
mod foreign;
mod input;
mod progress;
mod summary;

use std::ffi::OsString;
use std::io::{self, Write as _};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use anyhow::{Context as _, Result};
use clap::{CommandFactory as _, Parser as _};
use log::LevelFilter;
use signal_hook::consts::{SIGINT, SIGTERM};
use storage::{ByteSize, Location, StderrLog, printable_message};

use crate::cli::args::Cli;
use crate::cli::compat::translate;
use crate::cli::progress::Reporter;
use crate::{Error, estimate, open_gpt2, run_until};

/// `EX_TEMPFAIL` of `sysexits.h`: a temporary failure, after which batch systems requeue the job.
const EXIT_STOPPED: u8 = 75;

/// Runs the program with its command line, of which the first word is its name. Returns the exit
/// code.
///
/// It prints, handles SIGINT and SIGTERM, and sets the logger of the process if there is none.
#[must_use]
pub fn run(command_line: impl IntoIterator<Item = OsString>) -> u8 {
    let translated = match translate(command_line) {
        Ok(translated) => translated,
        Err(reason) => {
            let _ = writeln!(io::stderr(), "error: {}", printable_message(&reason));
            return 2;
        }
    };
    for note in &translated.notes {
        let _ = writeln!(io::stderr(), "note: {}", printable_message(note));
    }
    let cli = match Cli::try_parse_from(translated.arguments) {
        Ok(cli) => cli,
        Err(help_or_error) => {
            // A closed pipe does not change the exit code, which is 0 or 2.
            let _ = help_or_error.print();
            return if help_or_error.use_stderr() { 2 } else { 0 };
        }
    };
    match run_command(&cli) {
        Ok(()) => 0,
        // The reader of stdout has closed the pipe.
        Err(error) if is_closed_pipe(&error) => 0,
        Err(error) => match error.downcast_ref() {
            // A requeued job whose outputs are complete succeeds.
            Some(Error::Complete { .. }) => {
                let _ = writeln!(io::stderr(), "{}", storage::one_line(&*error));
                0
            }
            Some(Error::Stopped) => {
                let _ = writeln!(io::stderr(), "{}", storage::one_line(&*error));
                EXIT_STOPPED
            }
            _ => {
                let _ = writeln!(io::stderr(), "error: {}", storage::one_line(&*error));
                2
            }
        },
    }
}

fn run_command(cli: &Cli) -> Result<()> {
    if let Some(shell) = cli.completions {
        // It panics if it cannot write, for example to a closed pipe.
        let mut script = Vec::new();
        clap_complete::generate(shell, &mut Cli::command(), "preprocess", &mut script);
        return Ok(io::stdout().write_all(&script)?);
    }
    if let Some(folder) = &cli.export_vocab {
        return export_vocab(cli, folder);
    }
    let level = if cli.quiet { LevelFilter::Off } else { LevelFilter::Warn };
    StderrLog::install(cli.log.unwrap_or(level));
    if cli.dry_run {
        return dry_run(cli);
    }
    // With --resume, the run and its report may be complete already, so an error is returned later.
    let mut report_to = cli.report.as_deref().map(|file| free_name(&Location::new(file)));
    if !cli.resume {
        report_to = report_to.map(|place| place.map(Ok)).transpose()?;
    }
    let mut reporter = Reporter::new(cli.log_interval, cli.quiet);
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [SIGTERM, SIGINT] {
        // A second signal has its default effect: it ends the process.
        signal_hook::flag::register_conditional_default(signal, Arc::clone(&stop))?;
        signal_hook::flag::register(signal, Arc::clone(&stop))?;
    }
    let result = run_until(&cli.options(), &stop, &mut |progress| reporter.show(progress));
    reporter.clear();
    let report = result?;
    if let Some((store, key)) = report_to.transpose()? {
        let json = serde_json::to_string_pretty(&report).context("cannot serialize the report")?;
        storage::write_all(store.as_ref(), &key, format!("{json}\n").as_bytes())
            .context("cannot save the report (the token files are complete)")?;
    }
    if !cli.quiet {
        summary::print(&report)?;
    }
    Ok(())
}

fn dry_run(cli: &Cli) -> Result<()> {
    let estimate = estimate(&cli.options())?;
    let mut out = io::stdout().lock();
    let json = serde_json::to_string_pretty(&estimate).context("cannot serialize the estimate")?;
    writeln!(out, "{json}")?;
    Ok(())
}

/// The store and key of a file, which must not exist yet.
fn free_name(file: &Location) -> Result<(Arc<dyn storage::Storage>, storage::Key)> {
    let (store, key) = file.locate()?;
    match store.open(&key) {
        Err(storage::Error::NotFound { .. }) => Ok((store, key)),
        Err(error) => Err(error.into()),
        Ok(_) => Err(storage::Error::Exists { object: store.display(&key) }.into()),
    }
}

fn export_vocab(cli: &Cli, folder: &str) -> Result<()> {
    let tokenizer = open_gpt2(&cli.options().tokenizer)?;
    let files = [("vocab.json", tokenizer.vocab_json()), ("merges.txt", tokenizer.merges_txt())];
    let folder = Location::new(folder);
    let places = files.map(|(name, text)| Ok((free_name(&folder.join(name))?, text)));
    let places = places.into_iter().collect::<Result<Vec<_>>>()?;
    let mut out = io::stdout().lock();
    for ((store, key), text) in places {
        let entry = storage::write_all(store.as_ref(), &key, text.as_bytes())?;
        writeln!(out, "{}  {}", store.display(&key), ByteSize(entry.bytes))?;
    }
    Ok(())
}

fn is_closed_pipe(error: &anyhow::Error) -> bool {
    let kind = error.downcast_ref::<io::Error>().map(io::Error::kind);
    kind == Some(io::ErrorKind::BrokenPipe)
}
