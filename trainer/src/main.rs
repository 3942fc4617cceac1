//! The command `trainer`: trains, plans and writes text.

#![forbid(unsafe_code)]

mod cli;
mod cmd;
mod stderr;

use std::io::{self, Write as _};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use anyhow::{Context as _, Result};
use clap::Parser as _;
use indexed::IndexedDataset;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;
use trainer::config::Config;
use trainer::plan::{Known, Plan};
use trainer::{Host, Outcome};

use crate::cli::{Cli, ConfigArgs, PlanArgs, TrainArgs, Verb};

/// The answer is no.
const EXIT_NO: u8 = 1;
/// It could not be done.
const EXIT_FAILED: u8 = 2;
/// Saved, submit again: `EX_TEMPFAIL` of sysexits.h, which batch systems can be told to requeue on.
const EXIT_SAVED: u8 = 75;

fn main() -> ExitCode {
    stderr::install();
    let done = match &Cli::parse().verb {
        Verb::Train(args) => train(args),
        Verb::Generate(args) => cmd::generate(args),
        Verb::Eval(args) => cmd::eval(args),
        Verb::Report(args) => cmd::report(args),
        Verb::Plan(args) => plan(args),
    };
    match done {
        Ok(code) => code,
        // Whoever reads our output has seen enough.
        Err(error) if is_closed_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            _ = writeln!(io::stderr(), "error: {}", storage::one_line(&*error));
            ExitCode::from(EXIT_FAILED)
        }
    }
}

fn train(args: &TrainArgs) -> Result<ExitCode> {
    // Before the first big block is allocated.
    if !bridge::runtime::keep_freed_memory() {
        log::info!("memory: glibc gives freed blocks back; training is a little slower");
    }
    let config = load(&args.config)?;
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [SIGTERM, SIGINT] {
        // Runs first, and finds the flag set at the second signal only.
        let at_once = 128 + signal;
        flag::register_conditional_shutdown(signal, at_once, Arc::clone(&stop))
            .and_then(|_| flag::register(signal, Arc::clone(&stop)))
            .context("watch for signals")?;
    }
    let host = Host { stop: &stop, terminal: Box::new(io::stderr()) };
    Ok(match trainer::train(&config, host)? {
        Outcome::Done => ExitCode::SUCCESS,
        Outcome::Saved => ExitCode::from(EXIT_SAVED),
    })
}

fn plan(args: &PlanArgs) -> Result<ExitCode> {
    let config = load(&args.config)?;
    let known = Known {
        corpus_tokens: corpus_tokens(&config),
        memory_bytes: memory_bytes(),
        tokens_per_s: args.tokens_per_s,
        flop_per_s: None,
    };
    let plan = Plan::new(&config, &known);
    let mut out = io::stdout().lock();
    if args.json {
        writeln!(out, "{}", serde_json::to_string_pretty(&plan)?)?;
    } else {
        write!(out, "{plan}")?;
    }
    Ok(if plan.refusals.is_empty() { ExitCode::SUCCESS } else { ExitCode::from(EXIT_NO) })
}

fn load(args: &ConfigArgs) -> Result<Config> {
    Ok(Config::load(&args.config, &args.sets)?)
}

/// `None` if the corpus is not there yet: a run may be planned before it is made.
fn corpus_tokens(config: &Config) -> Option<u64> {
    let (store, prefix) = storage::locate(config.corpus()).ok()?;
    match IndexedDataset::open(&store, &prefix) {
        Ok(dataset) => Some(dataset.token_count()),
        Err(error) => {
            log::warn!("plan without the corpus: {error}");
            None
        }
    }
}

/// Memory of this machine, as the kernel counts it.
fn memory_bytes() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    line.trim().strip_suffix(" kB")?.parse::<u64>().ok()?.checked_mul(1024)
}

fn is_closed_pipe(error: &anyhow::Error) -> bool {
    let io_error = |cause: &(dyn std::error::Error + 'static)| {
        cause.downcast_ref::<io::Error>().map(io::Error::kind) == Some(io::ErrorKind::BrokenPipe)
    };
    error.chain().any(io_error)
}
