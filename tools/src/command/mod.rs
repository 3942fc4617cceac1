//! The program `feedline`: its command line, and the output and exit code of each verb.
//!
//! It is part of the library because two files run it: the binary, and the native module of the
//! Python package.

mod args;

use std::ffi::OsString;
use std::io::{self, Write as _};
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;

use anyhow::{Context as _, Result};
use args::{CheckArgs, Cli, IndexVerb, Verb};
use clap::{CommandFactory as _, Parser as _};
use serde::Serialize;
use storage::StderrLog;

use crate::ckpt::CkptOutput;
use crate::data::{
    check, clean, convert, index, inspect, materialize, merge, repair, samples, split, tokenizer,
};
use crate::doctor::stripe;
use crate::ui::inspect_target::InspectTarget;
use crate::ui::job::CancellableJob;
use crate::ui::terminal::ProgressLine;
use crate::{bench, ckpt, doctor, offload};

/// How a program was started.
#[derive(Clone, Debug)]
pub struct Invocation {
    /// The command line. The first word is the name of the program.
    pub command_line: Vec<OsString>,
    /// The words that start the program again, before its arguments. Benchmarks with several
    /// processes need them.
    pub restart: Vec<OsString>,
}

impl Invocation {
    /// The command line of this process, which is the program.
    #[must_use]
    pub fn of_this_process() -> Self {
        let restart = std::env::current_exe().map(PathBuf::into_os_string);
        Invocation {
            command_line: std::env::args_os().collect(),
            restart: restart.into_iter().collect(),
        }
    }

    /// A command that starts the program again. It has no arguments yet.
    pub(crate) fn restarted(&self) -> Result<Command> {
        let mut words = self.restart.iter();
        let program = words.next().context(
            "cannot start another process of this program: expected the path of its executable, \
             found none",
        )?;
        let mut command = Command::new(program);
        command.args(words);
        Ok(command)
    }
}

/// Runs the program. Returns its exit code.
///
/// It prints, handles SIGINT and SIGTERM, and sets the logger of the process if there is none.
#[must_use]
pub fn run(invocation: &Invocation) -> u8 {
    let cli = match Cli::try_parse_from(&invocation.command_line) {
        Ok(cli) => cli,
        Err(help_or_error) => {
            // A closed pipe does not change the exit code, which is 0 or 2.
            _ = help_or_error.print();
            return if help_or_error.use_stderr() { 2 } else { 0 };
        }
    };
    StderrLog::install(cli.log);
    match run_verb(&cli.verb, invocation) {
        Ok(code) => code,
        // The reader of the output has closed the pipe.
        Err(error) if is_closed_pipe(&error) => 0,
        Err(error) => {
            // A closed stderr does not change the exit code.
            _ = writeln!(io::stderr(), "error: {}", storage::one_line(&*error));
            2
        }
    }
}

fn run_verb(verb: &Verb, invocation: &Invocation) -> Result<u8> {
    match verb {
        Verb::Inspect(subject) => {
            let work = CancellableJob::of_reading();
            let target = InspectTarget::find(&subject.name)?.watched(&work);
            let found = work.end(inspect::inspect(&target, &subject.hints(), &work))?;
            print_value(subject.json, &found, found.text())?;
        }
        Verb::Clean(args) => clean::run(args, &mut io::stdout().lock())?,
        Verb::Tokenizer(verb) => tokenizer::run(verb, &mut io::stdout().lock())?,
        Verb::Check(CheckArgs { subject, add_checksums }) => {
            let work = CancellableJob::of_reading();
            let target = InspectTarget::find(&subject.name)?.watched(&work);
            let mut verdict = work.end(check::check(&target, &subject.hints(), &work))?;
            if *add_checksums && verdict.ok() {
                verdict.added = work.end(check::add_checksums(&target))?;
            }
            return judge(subject.json, &verdict, verdict.text(), verdict.ok());
        }
        Verb::Convert(args) => {
            let converted = run_writing(|work| convert::convert(&args.request(), work))?;
            print_value(args.json, &converted, converted.text())?;
        }
        Verb::Merge(args) => {
            let merged = run_writing(|work| merge::merge(&args.request(), work))?;
            print_value(args.json, &merged, merged.text())?;
        }
        Verb::Samples(args) => run_samples(args)?,
        Verb::Split(args) => {
            let parts = run_writing(|work| split::split(&args.request(), work))?;
            print_value(args.json, &parts, parts.text())?;
        }
        Verb::Repair(args) => {
            let repaired = run_writing(|work| repair::repair(&args.request(), work))?;
            print_value(args.json, &repaired, repaired.text())?;
        }
        Verb::Index(IndexVerb::Build(args)) => {
            let built = run_writing(|work| index::build(args, work))?;
            print_value(args.json, &built, built.text())?;
        }
        Verb::Materialize(args) => {
            let written = run_writing(|work| materialize::materialize(args, work))?;
            print_value(args.json, &written, written.text())?;
        }
        Verb::Ckpt(verb) => return answer(|line| ckpt::run(verb, invocation, line)),
        Verb::Offload(verb) => return answer(|line| offload::run(verb, line)),
        Verb::Bench(args) => {
            let mut line = ProgressLine::new();
            let result = bench::run(args, invocation, &mut line);
            line.clear();
            if let Some(report) = result? {
                print_value(args.json, &report, report.text())?;
            }
        }
        Verb::Doctor(args) => {
            let found = doctor::doctor(args)?;
            return judge(args.json, &found, found.text(), found.ok);
        }
        Verb::Stripe(verb) => {
            let answer = stripe::stripe(verb)?;
            return judge(verb.json(), &answer, answer.text().to_owned(), answer.ok);
        }
        Verb::Completions { shell } => complete(*shell)?,
    }
    Ok(0)
}

fn run_samples(args: &samples::SamplesArgs) -> Result<()> {
    if args.show {
        let shown = samples::show(args)?;
        return print_value(args.json, &shown, shown.text());
    }
    let read = run_writing(|work| samples::samples(args, work))?;
    print_value(args.json, &read, read.text())
}

/// Runs a command that writes. After Ctrl-C, only files remain that the same command resumes.
fn run_writing<T>(act: impl FnOnce(&Arc<CancellableJob>) -> Result<T>) -> Result<T> {
    let work = CancellableJob::at_signals()?;
    work.end(act(&work))
}

/// Runs a command and prints its output; the exit code is that of its check.
fn answer(command: impl FnOnce(&mut ProgressLine) -> Result<CkptOutput>) -> Result<u8> {
    let mut line = ProgressLine::new();
    let answer = command(&mut line);
    line.clear();
    let answer = answer?;
    judge(answer.json, &answer.value, answer.text, answer.ok)
}

/// Prints a value; the exit code is 0 if `ok`, else 1.
fn judge(json: bool, value: &impl Serialize, text: String, ok: bool) -> Result<u8> {
    print_value(json, value, text)?;
    Ok(if ok { 0 } else { 1 })
}

fn complete(shell: clap_complete::Shell) -> Result<()> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "feedline", &mut script);
    print(&script)
}

/// Prints a value as JSON or as text, with the same numbers.
fn print_value(json: bool, value: &impl Serialize, text: String) -> Result<()> {
    let text = if json { serde_json::to_string_pretty(value)? + "\n" } else { text };
    print(text.as_bytes())
}

/// Prints and flushes, so that an error of a full disk is not lost at exit.
fn print(text: &[u8]) -> Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(text)?;
    Ok(out.flush()?)
}

fn is_closed_pipe(error: &anyhow::Error) -> bool {
    let kind = error.downcast_ref::<io::Error>().map(io::Error::kind);
    kind == Some(io::ErrorKind::BrokenPipe)
}
