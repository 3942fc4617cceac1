use std::io::{self, Write as _};
use std::process::ExitCode;

use anyhow::Result;
use clap::Args;
use recipe::import::{ConfigFormat, import_script};
use trainer::exit;

#[derive(Debug, Args)]
pub(crate) struct ImportArgs {
    /// System: megatron, cpm, deepspeed, paddle, colossal or hf.
    #[arg(long, value_name = "SYSTEM")]
    from: ConfigFormat,
    /// Number of ranks that the run used, if no file records it.
    ///
    /// The global batch is computed from it and from the batch of one replica.
    #[arg(long = "ranks", alias = "world", value_name = "N")]
    world: Option<u64>,
    /// Files of one run: a launch script with its JSON, a YAML file, a Python config.
    #[arg(required = true, value_name = "FILE")]
    files: Vec<String>,
    /// Arguments of the launch script: its `$1`, `$2` and so on.
    #[arg(last = true, value_name = "ARG")]
    arguments: Vec<String>,
}

pub(crate) fn import_config(args: &ImportArgs) -> Result<ExitCode> {
    let imported = import_script(args.from, &args.files, args.world, &args.arguments)?;
    write!(io::stdout().lock(), "{imported}")?;
    imported.problems().map(|problems| writeln!(io::stderr(), "{problems}")).transpose()?;
    Ok(if imported.is_whole() { ExitCode::SUCCESS } else { ExitCode::from(exit::NO) })
}
