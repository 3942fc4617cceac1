//! `feedline ckpt retain`: fewer steps.

use anyhow::{Result, ensure};
use clap::Args;
use serde::Serialize;

use super::{Answer, open_folder};

/// Which steps stay.
#[derive(Debug, Args)]
pub struct RetainArgs {
    /// The folder that holds the steps.
    #[arg(value_name = "FOLDER")]
    pub folder: String,
    /// The newest complete steps that stay. Minimum: 1.
    #[arg(long, value_name = "COUNT")]
    pub keep_last: usize,
    /// Tells what would be deleted, and deletes nothing.
    #[arg(long)]
    pub dry_run: bool,
    /// Prints JSON, with units in the keys.
    #[arg(long)]
    pub json: bool,
}

/// What went and what stays; `--json` prints it as it is.
#[derive(Debug, Serialize)]
struct Retained {
    deleted: Vec<u64>,
    kept: Vec<u64>,
    dry_run: bool,
}

pub(super) fn run(args: &RetainArgs) -> Result<Answer> {
    ensure!(args.keep_last > 0, "--keep-last: got 0, due at least 1");
    let checkpoints = open_folder(&args.folder)?;
    let mut kept = checkpoints.steps()?;
    let deleted = if args.dry_run {
        kept[..kept.len().saturating_sub(args.keep_last)].to_vec()
    } else {
        checkpoints.retain(args.keep_last)?
    };
    kept.retain(|step| !deleted.contains(step));
    let retained = Retained { deleted, kept, dry_run: args.dry_run };
    Answer::new(args.json, &retained, retained.text(), true)
}

impl Retained {
    fn text(&self) -> String {
        let list = |steps: &[u64]| {
            if steps.is_empty() {
                return "none".to_owned();
            }
            steps.iter().map(u64::to_string).collect::<Vec<_>>().join(", ")
        };
        let verb = if self.dry_run { "would delete" } else { "deleted" };
        format!("{verb} {}\nkept {}\n", list(&self.deleted), list(&self.kept))
    }
}
