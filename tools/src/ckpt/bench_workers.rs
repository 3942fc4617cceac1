//! Several processes that save at the same time: each saves its part of a state to a separate
//! folder.

use std::io::{BufRead as _, BufReader, Write as _};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::Instant;

use anyhow::{Context as _, Result, ensure};
use serde::Serialize;

use crate::ckpt::bench::{BenchArgs, median};
use crate::command::Invocation;
use crate::ui::terminal::ProgressLine;
use crate::ui::timeout::StopSignal;

/// Total rate of several processes.
#[derive(Debug, Serialize)]
pub(crate) struct WorkersTotal {
    pub(crate) processes: usize,
    pub(crate) median_bytes_per_s: f64,
    /// Median of the ratios to one process in each round.
    pub(crate) of_one: f64,
}

/// Measures one process and the requested numbers of processes, in turn.
pub(crate) fn all(
    args: &BenchArgs,
    invocation: &Invocation,
    folder: &Path,
    stop: &StopSignal,
    line: &mut ProgressLine,
) -> Result<Vec<WorkersTotal>> {
    let mut counts = vec![1];
    counts.extend(args.processes.iter().copied().filter(|&count| count > 1));
    let mut rates: Vec<Vec<f64>> = vec![Vec::new(); counts.len()];
    for round in 1..=args.rounds {
        for (&count, rates) in counts.iter().zip(&mut rates) {
            line.show(&format!("round {round}: {count} processes"));
            stop.check()?;
            rates.push(together(args, invocation, folder, count)?);
        }
    }
    let of_one = |theirs: &[f64]| {
        let ratios = theirs.iter().zip(&rates[0]).map(|(theirs, one)| theirs / one);
        median(&ratios.collect::<Vec<_>>())
    };
    let totals = counts.iter().zip(&rates).map(|(&processes, theirs)| WorkersTotal {
        processes,
        median_bytes_per_s: median(theirs),
        of_one: of_one(theirs),
    });
    Ok(totals.collect())
}

/// Bytes per second from the common start until the last process has saved.
fn together(args: &BenchArgs, invocation: &Invocation, folder: &Path, count: usize) -> Result<f64> {
    let parts = (0..count).map(|part| {
        let folder = folder.join(format!("part-{part}"));
        WorkerShare::start(args, invocation.restarted()?, &folder, (part, count))
    });
    let mut parts = parts.collect::<Result<Vec<WorkerShare>>>()?;
    for part in &mut parts {
        let found = part.line()?;
        ensure!(
            found == "ready",
            "cannot start a process of the benchmark: expected 'ready', found '{found}'"
        );
    }
    let started = Instant::now();
    for part in &mut parts {
        let stdin =
            part.child.stdin.as_mut().context("cannot start a process: no standard input")?;
        stdin.write_all(b"go\n")?;
    }
    let mut bytes = 0;
    for part in &mut parts {
        let found = part.line()?;
        let count = found.strip_prefix("done ").and_then(|rest| rest.split(' ').next());
        let count: Option<u64> = count.and_then(|count| count.parse().ok());
        bytes += count.with_context(|| {
            format!(
                "cannot read the result of a process: expected 'done BYTES ...', found '{found}'"
            )
        })?;
    }
    let took = started.elapsed();
    Ok(crate::ckpt::bench::rate(bytes, took))
}

struct WorkerShare {
    child: Child,
    stdout: BufReader<ChildStdout>,
}

impl WorkerShare {
    fn start(
        args: &BenchArgs,
        mut command: Command,
        folder: &Path,
        (part, count): (usize, usize),
    ) -> Result<Self> {
        let bytes = args.bytes.0;
        command.args(["ckpt", "bench"]).arg(folder).arg(format!("--part={part}/{count}"));
        command.args([format!("--bytes={bytes}B"), format!("--threads={}", args.threads)]);
        command.arg(format!("--max-shard={}B", args.shard_bytes.0));
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let stdout = child.stdout.take().context("cannot start a process: no standard output")?;
        Ok(WorkerShare { child, stdout: BufReader::new(stdout) })
    }

    fn line(&mut self) -> Result<String> {
        let mut line = String::new();
        self.stdout.read_line(&mut line)?;
        Ok(line.trim_end().to_owned())
    }
}

impl Drop for WorkerShare {
    fn drop(&mut self) {
        // A process that waits for the line on standard input reads end of file and exits.
        drop(self.child.stdin.take());
        let _ = self.child.wait();
    }
}
