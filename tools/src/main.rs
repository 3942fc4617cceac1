//! The command `feedline`.

mod args;

use std::io::{self, Write as _};
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::Result;
use args::{CheckArgs, Cli, IndexVerb, Verb};
use clap::{CommandFactory as _, Parser as _};
use serde::Serialize;
use tools::ckpt::CkptOutput;
use tools::data::{
    check, clean, convert, index, inspect, materialize, merge, repair, samples, split, tokenizer,
};
use tools::doctor::stripe;
use tools::ui::inspect_target::InspectTarget;
use tools::ui::job::CancellableJob;
use tools::ui::terminal::ProgressLine;
use tools::{bench, ckpt, doctor, offload};

fn main() -> ExitCode {
    match run(&Cli::parse().verb) {
        Ok(code) => code,
        // The reader of the output has closed the pipe.
        Err(error) if is_closed_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            // A closed stderr does not change the exit code.
            _ = writeln!(io::stderr(), "error: {}", storage::one_line(&*error));
            ExitCode::from(2)
        }
    }
}

fn run(verb: &Verb) -> Result<ExitCode> {
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
        Verb::Ckpt(verb) => return answer(|line| ckpt::run(verb, line)),
        Verb::Offload(verb) => return answer(|line| offload::run(verb, line)),
        Verb::Bench(args) => {
            let mut line = ProgressLine::new();
            let result = bench::run(args, &mut line);
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
    Ok(ExitCode::SUCCESS)
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
fn answer(command: impl FnOnce(&mut ProgressLine) -> Result<CkptOutput>) -> Result<ExitCode> {
    let mut line = ProgressLine::new();
    let answer = command(&mut line);
    line.clear();
    let answer = answer?;
    judge(answer.json, &answer.value, answer.text, answer.ok)
}

/// Prints a value; the exit code is 0 if `ok`, else 1.
fn judge(json: bool, value: &impl Serialize, text: String, ok: bool) -> Result<ExitCode> {
    print_value(json, value, text)?;
    Ok(if ok { ExitCode::SUCCESS } else { ExitCode::from(1) })
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
