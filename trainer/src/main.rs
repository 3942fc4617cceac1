//! The command `trainer`: trains, plans and generates text.

#![forbid(unsafe_code)]

mod cli;

use std::io::{self, Write as _};
use std::process::{Command, ExitCode};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use anyhow::{Context as _, Result};
use clap::{CommandFactory as _, Parser as _};
use log::LevelFilter;
use signal_hook::consts::{SIGINT, SIGTERM, SIGUSR1};
use signal_hook::flag;
use storage::StderrLog;
use trainer::config::Config;
use trainer::exit;
use trainer::launch::World;
use trainer::launch::local::{self, LAUNCHER, Launch};
use trainer::plan::{PlanInputs, RunPlan, machine_memory};
use trainer::{Host, Outcome};

use crate::cli::args::{Cli, ConfigArgs, LaunchArgs, PlanArgs, TrainArgs, Verb};

fn main() -> ExitCode {
    let cli = Cli::parse();
    StderrLog::install(cli.log);
    end_with_launcher();
    let done = match &cli.verb {
        Verb::Train(args) => train(args),
        Verb::Generate(args) => cli::generate(args),
        Verb::Eval(task) => cli::eval(task),
        Verb::Report(args) => cli::report(args),
        Verb::LrSweep(args) => cli::sweep(args),
        Verb::Plan(args) => plan(args),
        Verb::ImportConfig(args) => cli::import_config(args),
        Verb::Launch(args) => launch(args),
        Verb::Completions { shell } => completions(*shell),
        Verb::CkptAgent => ckpt::serve_agent()
            .map(|()| ExitCode::SUCCESS)
            .context("cannot serve as the checkpoint agent"),
    };
    match done {
        Ok(code) => code,
        // The reader of the output has closed it.
        Err(error) if is_closed_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            _ = writeln!(io::stderr(), "error: {}", storage::one_line(&*error));
            let lost = error.downcast_ref().is_some_and(trainer::Error::is_peer_lost);
            ExitCode::from(if lost { exit::PEER_LOST } else { exit::FAILED })
        }
    }
}

fn train(args: &TrainArgs) -> Result<ExitCode> {
    // Before the first big block is allocated.
    if !bridge::runtime::keep_freed_memory() {
        log::info!("memory: glibc returns freed blocks to the system; training is slightly slower");
    }
    let world = World::find(|name| std::env::var(name).ok())?;
    let rank = world.as_ref().map(|world| world.rank);
    if rank.is_some_and(|rank| rank > 0) {
        // Another rank logs the same decisions.
        log::set_max_level(log::max_level().min(LevelFilter::Warn));
    }
    let config = load(&args.config)?;
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [SIGTERM, SIGINT, SIGUSR1] {
        // Runs first, and finds the flag set at the second signal only.
        let at_once = 128 + signal;
        flag::register_conditional_shutdown(signal, at_once, Arc::clone(&stop))
            .and_then(|_| flag::register(signal, Arc::clone(&stop)))
            .context("cannot register signal handlers")?;
    }
    let agent = std::env::current_exe().map(|program| {
        let mut command = Command::new(program);
        // The agent must outlive this rank.
        command.arg("ckpt-agent").env_remove(LAUNCHER);
        command
    });
    let terminal = Box::new(io::stderr());
    let agent = Some(agent.context("cannot find this program")?);
    let host = Host { stop: &stop, terminal, agent, world };
    let done = trainer::train(&config, host);
    // The number of the rank comes first, because a reader sees the errors of many ranks.
    let done = match rank.map(|rank| format!("rank {rank}")) {
        Some(rank) => done.context(rank),
        None => done.map_err(Into::into),
    };
    Ok(match done? {
        Outcome::Done => ExitCode::SUCCESS,
        Outcome::Gaps => ExitCode::from(exit::GAPS),
        Outcome::Saved => ExitCode::from(exit::SAVED),
    })
}

fn launch(args: &LaunchArgs) -> Result<ExitCode> {
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [SIGTERM, SIGINT] {
        flag::register(signal, Arc::clone(&stop)).context("cannot register signal handlers")?;
    }
    let code = local::launch(Launch {
        program: std::env::current_exe().context("cannot find this program")?,
        arguments: args.command.clone(),
        ranks: args.ranks.into(),
        stop: &stop,
        out: Box::new(io::stdout()),
        err: Box::new(io::stderr()),
    })?;
    Ok(ExitCode::from(code))
}

fn plan(args: &PlanArgs) -> Result<ExitCode> {
    let config = load(&args.config)?;
    let mut absent = Vec::new();
    let corpora = if args.no_data {
        None
    } else {
        if_there(feed::with_special(config.clone()), &mut absent)?;
        if_there(feed::open_corpus(&config), &mut absent)?
    };
    let memory_bytes = args.memory.map(|size| size.0);
    let known = PlanInputs {
        corpus_tokens: corpora.map(|corpora| corpora.token_count()),
        memory_bytes,
        planner_memory_bytes: if memory_bytes.is_some() { None } else { machine_memory() },
        process_memory_bytes: None,
        tokens_per_s: args.tokens_per_s,
        flop_per_s: args.tflop_per_s.map(|speed| speed * 1e12),
        world: args.world,
        disk_bytes_per_s: args.disk_per_s.map(|size| size.0 as f64),
    };
    let mut plan = RunPlan::new(&config, &known);
    absent.dedup();
    plan.refusals.append(&mut absent);
    let mut out = io::stdout().lock();
    if args.json {
        writeln!(out, "{}", serde_json::to_string_pretty(&plan)?)?;
    } else {
        write!(out, "{plan}")?;
    }
    Ok(if plan.refusals.is_empty() { ExitCode::SUCCESS } else { ExitCode::from(exit::NO) })
}

fn completions(shell: clap_complete::Shell) -> Result<ExitCode> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "trainer", &mut script);
    io::stdout().write_all(&script)?;
    Ok(ExitCode::SUCCESS)
}

fn load(args: &ConfigArgs) -> Result<Config> {
    Ok(Config::load(&args.config, &args.sets)?)
}

/// Missing data does not prevent the rest of the plan: its error is added to `absent`.
fn if_there<T>(found: feed::Result<T>, absent: &mut Vec<String>) -> Result<Option<T>> {
    match found {
        Ok(found) => Ok(Some(found)),
        Err(error @ feed::Error::Mismatch(_)) => Err(error.into()),
        Err(error) => {
            let error = storage::one_line(&error);
            absent.push(format!("{error} (hint: --no-data plans before the data is there)"));
            Ok(None)
        }
    }
}

/// A rank must not outlive its launcher: its output would have no reader, and the resources that it
/// holds would stay in use.
fn end_with_launcher() {
    let Ok(launcher) = std::env::var(LAUNCHER) else { return };
    let is_registered = bridge::runtime::end_with_parent();
    let is_there = launcher.parse() == Ok(std::os::unix::process::parent_id());
    if !is_registered || !is_there {
        log::warn!("launch: this rank does not end when its launcher, process {launcher}, ends");
    }
}

fn is_closed_pipe(error: &anyhow::Error) -> bool {
    let io_error = |cause: &(dyn std::error::Error + 'static)| {
        cause.downcast_ref::<io::Error>().map(io::Error::kind) == Some(io::ErrorKind::BrokenPipe)
    };
    error.chain().any(io_error)
}

#[cfg(test)]
#[path = "../../tests/include/command_page.rs"]
mod command_page;

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(words: Vec<String>) -> std::result::Result<(), String> {
        Cli::try_parse_from(words).map(drop).map_err(|error| error.to_string())
    }

    #[test]
    fn reference_page() {
        command_page::check_page(Cli::command(), "trainer", &parse);
    }

    #[test]
    fn earlier_spellings_are_accepted() {
        for line in [
            "plan run.toml --world 8",
            "import-config --from hf config.json --world 8",
            "report run --output a.html",
            "report run -o a.html",
            "generate --ckpt run --tokens-min 4",
        ] {
            let words = format!("trainer {line}").split(' ').map(str::to_owned).collect();
            parse(words).unwrap_or_else(|error| panic!("{line}: {error}"));
        }
    }
}
