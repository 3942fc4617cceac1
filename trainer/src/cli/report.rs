use std::io::{self, Write as _};
use std::process::ExitCode;

use anyhow::{Context as _, Result, ensure};
use clap::Args;
use logbook::report::{RUNS_MAX, RunRecord, html};

#[derive(Debug, Args)]
pub(crate) struct ReportArgs {
    /// Folders of runs, which are drawn in the same charts.
    #[arg(required = true, value_name = "RUN")]
    runs: Vec<String>,
    /// File to write [default: report.html in the folder of the first run]
    #[arg(short, long = "out", alias = "output", value_name = "FILE")]
    output: Option<String>,
}

pub(crate) fn report(args: &ReportArgs) -> Result<ExitCode> {
    let count = args.runs.len();
    ensure!(
        count <= RUNS_MAX,
        "cannot draw {count} runs: expected at most {RUNS_MAX} in one report"
    );
    let runs = args.runs.iter().map(|folder| Ok(RunRecord::read(folder)?));
    let page = html(&runs.collect::<Result<Vec<_>>>()?);
    let below = || storage::Location::new(&args.runs[0]).join("report.html").to_string();
    let output = args.output.clone().unwrap_or_else(below);
    write_page(&output, &page)?;
    writeln!(io::stdout(), "wrote {output}, {} KiB", page.len().div_ceil(1024))?;
    Ok(ExitCode::SUCCESS)
}

/// Replaces a page atomically.
pub(super) fn write_page(output: &str, page: &str) -> Result<()> {
    let write = || -> Result<()> {
        if std::fs::metadata(output).is_ok_and(|there| !there.is_file()) {
            return Ok(std::fs::write(output, page)?); // a pipe, for example
        }
        let (store, key) = storage::locate(output)?;
        Ok(store.replace(&key, page.as_bytes())?)
    };
    write().with_context(|| format!("cannot write {output}"))
}
