//! `--simulate`: the verbs that measure, over a model of a store.

use std::sync::Arc;

use anyhow::{Context as _, Result};
use clap::Args;
use storage::simulate::{Simulation, StoreModel};

/// Whether, and what.
#[derive(Clone, Debug, Args)]
pub struct Simulate {
    /// Simulate another store: lustre, ceph, s3, nfs or the file of a model.
    ///
    /// Values of the model may follow, as lustre,servers.stripes=8. Results then follow from the
    /// figures of the model, and every output is marked as simulated. The target should be fast,
    /// such as /dev/shm.
    #[arg(long, value_name = "MODEL[,KEY=VALUE]...", help_heading = "Simulation")]
    pub simulate: Option<String>,
    /// Seed that chooses which requests of a simulated store are slow, stall or fail.
    #[arg(long, value_name = "N", default_value_t = 1, requires = "simulate")]
    #[arg(help_heading = "Simulation")]
    pub simulate_seed: u64,
}

/// A model is a page; what is larger is some other file.
const FILE_BYTES_MAX: u64 = 1 << 20;

impl Simulate {
    /// The cluster that is asked for, if one is.
    ///
    /// # Errors
    /// If there is no such model, or a value of it is none.
    pub fn start(&self) -> Result<Option<Arc<Simulation>>> {
        let Some(asked) = &self.simulate else { return Ok(None) };
        Ok(Some(Simulation::new(model(asked)?, self.simulate_seed)))
    }
}

/// `NAME[,KEY=VALUE]...`. A comma within brackets is of its value.
fn model(asked: &str) -> Result<StoreModel> {
    let mut depth = 0_u32;
    let mut words = asked.split(|letter: char| {
        match letter {
            '[' | '{' => depth += 1,
            ']' | '}' => depth = depth.saturating_sub(1),
            _ => {}
        }
        letter == ',' && depth == 0
    });
    let name = words.next().unwrap_or_default();
    let overrides: Vec<&str> = words.collect();
    let text = match StoreModel::built_in(name) {
        Some(text) => text.to_owned(),
        None => read(name).with_context(|| {
            format!("--simulate {name}: due {}, or a file", StoreModel::NAMES.join(", "))
        })?,
    };
    StoreModel::parse(&text, &overrides).with_context(|| format!("--simulate {name}"))
}

fn read(name: &str) -> Result<String> {
    let (store, key) = storage::locate(name)?;
    let text = storage::read_small(&*store, &key, FILE_BYTES_MAX)?;
    String::from_utf8(text).context("it is no text")
}
