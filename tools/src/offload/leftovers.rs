//! `feedline offload ls`: lists the state that ranks keep in folders, and orphaned state. A run
//! that resumes with fewer ranks removes the orphaned state that its ranks reach; state on a node
//! without ranks remains.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Result, ensure};
use ckpt::offload::{OwnedFolder, marked, sweep};
use clap::Args;
use serde::Serialize;
use storage::{ByteSize, Location, Storage};

use crate::ckpt::CkptOutput;
use crate::ui::terminal::table;

/// Arguments of `feedline offload ls`.
#[derive(Debug, Args)]
pub struct LeftArgs {
    /// Folders of this node, as optim.offload names them.
    #[arg(value_name = "FOLDER", required = true, num_args = 1..)]
    pub folders: Vec<String>,
    /// Remove orphaned state of this run, named as in the column 'of'.
    ///
    /// State that a process uses is not removed. Checkpoints of the run stay intact, also those
    /// that share files with it.
    #[arg(long, value_name = "RUN")]
    pub remove: Option<String>,
    /// Print JSON, with units in the keys.
    #[arg(long)]
    pub json: bool,
}

/// The output of `feedline offload ls`; `--json` prints it as it is.
#[derive(Debug, Serialize)]
struct Found {
    /// All states, including those that were removed.
    states: Vec<OwnedFolder>,
    /// Bytes of the states that no process uses.
    left_bytes: u64,
    removed: Vec<String>,
}

/// Lists states, and removes those of `--remove`.
pub(super) fn run(args: &LeftArgs) -> Result<CkptOutput> {
    let open = |folder: &String| storage::open_url(folder);
    let stores: Vec<Arc<dyn Storage>> = args.folders.iter().map(open).collect::<Result<_, _>>()?;
    for name in args.folders.iter().map(|name| Location::new(name)) {
        let is_folder = name.local_path().is_some_and(Path::is_dir);
        ensure!(is_folder, "cannot list {name}: expected a folder, found none");
    }
    let (mut states, mut removed) = (Vec::new(), Vec::new());
    for store in &stores {
        states.extend(marked(store)?);
        if let Some(run) = &args.remove {
            removed.extend(sweep(store, run, 0)?);
        }
    }
    let left = states.iter().filter(|state| !state.is_open);
    let left_bytes = left.map(|state| state.bytes).sum();
    let found = Found { states, left_bytes, removed };
    CkptOutput::new(args.json, &found, found.text(), true)
}

impl Found {
    fn text(&self) -> String {
        let row = |state: &OwnedFolder| {
            let OwnedFolder { folder, owner, rank, disk, disks, bytes, is_open } = state;
            let now = match is_open {
                true => "in use",
                false if self.removed.contains(folder) => "removed",
                false => "orphaned",
            };
            vec![
                folder.clone(),
                owner.clone(),
                rank.to_string(),
                format!("{} of {disks}", disk + 1),
                ByteSize(*bytes).to_string(),
                now.to_owned(),
            ]
        };
        let rows: Vec<_> = self.states.iter().map(row).collect();
        let head = ["folder", "run", "rank", "disk", "size", "state"];
        let sum = format!("{} orphaned\n", ByteSize(self.left_bytes));
        if rows.is_empty() { "no offloaded state\n".to_owned() } else { table(&head, &rows) + &sum }
    }
}
