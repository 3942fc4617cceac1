use std::io::{self, Write as _};
use std::process::ExitCode;

use anyhow::{Result, bail, ensure};
use clap::Args;
use logbook::report::{RunRecord, Sweep, html};

use crate::cli::args::{ConfigArgs, TrainArgs};
use crate::cli::report::write_page;

/// Rows of the table.
const ROWS_MAX: usize = 24;

#[derive(Debug, Args)]
pub(crate) struct SweepArgs {
    #[command(flatten)]
    config: ConfigArgs,
    /// First learning rate.
    #[arg(long, default_value_t = 1e-6, value_name = "RATE")]
    from: f64,
    /// Last learning rate; the rate grows by the same factor in each step.
    #[arg(long, default_value_t = 1.0, value_name = "RATE")]
    to: f64,
    /// Number of steps. More steps separate the rates better, and take longer.
    #[arg(long, default_value_t = 200, value_parser = clap::value_parser!(u64).range(10..))]
    steps: u64,
}

/// Trains at rising rates in a separate folder, saves nothing, and prints at which rates the loss
/// fell.
pub(crate) fn sweep(args: &SweepArgs) -> Result<ExitCode> {
    let (from, to, steps) = (args.from, args.to, args.steps);
    ensure!(0.0 < from && from < to, "expected 0 < --from < --to, found {from} and {to}");
    let place = storage::Location::new(&crate::load(&args.config)?.run.dir).join("lr-sweep");
    let dir = place.to_string();
    let mut sets = args.config.sets.clone();
    sets.extend([
        format!("run.dir={dir:?}"),
        format!("run.budget={{ steps = {steps} }}"),
        "run.spike.action=ignore".to_owned(),
        "optim.lr.style=range-test".to_owned(),
        "optim.lr.warmup_shape=log".to_owned(),
        "optim.lr.warmup={ steps = 0 }".to_owned(),
        format!("optim.lr.floor={from:?}"),
        format!("optim.lr.peak={to:?}"),
        "optim.lr.start=0.0".to_owned(),
        format!("optim.lr.decay={{ steps = {steps} }}"),
        format!("checkpoint.dir={:?}", place.join("ckpt").to_string()),
        "checkpoint.every.steps=0".to_owned(),
        "checkpoint.every.end=false".to_owned(),
        "eval.every=0".to_owned(),
        "log.every=1".to_owned(),
        "log.jsonl=true".to_owned(),
        "log.tensorboard=false".to_owned(),
    ]);
    let config = ConfigArgs { config: args.config.config.clone(), sets };
    let outcome = crate::train(&TrainArgs { config });
    let is_divergence = |error: &anyhow::Error| {
        matches!(error.downcast_ref(), Some(trainer::Error::NotFinite { .. }))
    };
    match &outcome {
        Err(error) if is_divergence(error) => log::warn!("{}", storage::one_line(&**error)),
        Ok(code) if *code == ExitCode::SUCCESS => {}
        _ => return outcome,
    }
    let run = RunRecord::read(&dir)?;
    let page = place.join("report.html").to_string();
    write_page(&page, &html(std::slice::from_ref(&run)))?;
    let Some(Sweep { points, fastest, least }) = Sweep::of(&run) else {
        bail!("cannot compare rates: the run ended too early (hint: a lower --from)");
    };
    let mut out = io::stdout().lock();
    writeln!(out, "{:>12} {:>10}", "rate", "loss")?;
    for (rate, loss) in points.iter().step_by(points.len().div_ceil(ROWS_MAX)) {
        writeln!(out, "{rate:>12.3e} {loss:>10.4}")?;
    }
    writeln!(out, "loss falls fastest at {fastest:.2e}; lowest loss at {least:.2e}")?;
    writeln!(out, "choose optim.lr.peak between them, well below the second; curve: {page}")?;
    Ok(ExitCode::SUCCESS)
}
