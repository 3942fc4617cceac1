//! The command `preprocess`: JSON lines to the token files that Megatron reads.

mod cli;
mod progress;

use std::io::{self, Write as _};
use std::process::ExitCode;

use anyhow::{Context as _, Result};
use clap::Parser as _;
use preprocess::{Report, open_gpt2, run};
use storage::ByteSize;

use crate::cli::Cli;
use crate::progress::Reporter;

fn main() -> ExitCode {
    match go(&Cli::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        // Whoever reads our output has seen enough.
        Err(error) if is_closed_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            let _ = writeln!(io::stderr(), "error: {error:#}");
            ExitCode::from(2)
        }
    }
}

fn go(cli: &Cli) -> Result<()> {
    if let Some(folder) = &cli.export_vocab {
        return export_vocab(cli, folder);
    }
    let report_to = cli.report.as_deref().map(free_name).transpose()?;
    let mut reporter = Reporter::new(cli.log_interval, cli.quiet);
    let result = run(&cli.options(), &mut |progress| reporter.show(progress));
    reporter.clear();
    let report = result?;
    if let Some((store, key)) = report_to {
        let json = serde_json::to_string_pretty(&report).context("serialize the report")?;
        storage::write_all(store.as_ref(), &key, format!("{json}\n").as_bytes())
            .context("the token files stand, but the report does not")?;
    }
    if !cli.quiet {
        print_summary(&report)?;
    }
    Ok(())
}

/// The place of a file that does not exist yet.
fn free_name(url: &str) -> Result<(std::sync::Arc<dyn storage::Storage>, storage::Key)> {
    let (store, key) = storage::locate(url)?;
    match store.open(&key) {
        Err(storage::Error::NotFound { .. }) => Ok((store, key)),
        Err(error) => Err(error.into()),
        Ok(_) => Err(storage::Error::Exists { what: store.display(&key) }.into()),
    }
}

fn export_vocab(cli: &Cli, folder: &str) -> Result<()> {
    let tokenizer = open_gpt2(&cli.options().tokenizer)?;
    let files = [("vocab.json", tokenizer.vocab_json()), ("merges.txt", tokenizer.merges_txt())];
    let places = files.map(|(name, text)| Ok((free_name(&format!("{folder}/{name}"))?, text)));
    let places = places.into_iter().collect::<Result<Vec<_>>>()?;
    let mut out = io::stdout().lock();
    for ((store, key), text) in places {
        let entry = storage::write_all(store.as_ref(), &key, text.as_bytes())?;
        writeln!(out, "{}  {}", store.display(&key), ByteSize(entry.bytes))?;
    }
    Ok(())
}

fn print_summary(report: &Report) -> Result<()> {
    let mut out = io::stdout().lock();
    let Report { documents, tokens, elapsed_s, .. } = report;
    writeln!(
        out,
        "{documents} documents, {tokens} tokens: {:.1} tokens/document, {:.2} bytes/token",
        report.tokens_per_document, report.text_bytes_per_token,
    )?;
    writeln!(
        out,
        "{} of JSON in {elapsed_s:.1} s: {:.1} MB/s, {:.2} M tokens/s, {} workers",
        ByteSize(report.json_bytes),
        report.json_mb_per_s,
        report.tokens_per_s / 1e6,
        report.workers,
    )?;
    if report.documents_empty > 0 {
        let empty = report.documents_empty;
        writeln!(out, "{empty} documents are empty: they have no tokens and no end")?;
    }
    if report.blank_lines > 0 {
        writeln!(out, "{} blank lines were skipped", report.blank_lines)?;
    }
    for output in &report.outputs {
        writeln!(out, "{}  {}", output.name, ByteSize(output.bytes))?;
    }
    if *documents == 0 {
        writeln!(io::stderr(), "warning: no documents: the inputs are empty")?;
    }
    Ok(())
}

fn is_closed_pipe(error: &anyhow::Error) -> bool {
    let kind = error.downcast_ref::<io::Error>().map(io::Error::kind);
    kind == Some(io::ErrorKind::BrokenPipe)
}
