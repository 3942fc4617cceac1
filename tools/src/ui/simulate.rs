//! `--simulate`: measurements of a simulated store.

use std::sync::Arc;

use anyhow::{Context as _, Result};
use clap::Args;
use storage::simulate::{Simulation, StoreModel};

/// Options of the simulation.
#[derive(Clone, Debug, Args)]
pub struct Simulate {
    /// Simulate another store: lustre, ceph, s3, nfs or the file of a model.
    ///
    /// Values of the model may follow, as lustre,servers.stripes=8. Results then depend on the
    /// numbers in the model, and every output is marked as simulated. The target should be fast,
    /// such as /dev/shm.
    #[arg(long, value_name = "MODEL[,KEY=VALUE]...", help_heading = "Simulation")]
    pub simulate: Option<String>,
    /// Seed that chooses which requests of a simulated store are slow, stall or fail.
    #[arg(long, value_name = "N", default_value_t = 1, requires = "simulate")]
    #[arg(help_heading = "Simulation")]
    pub simulate_seed: u64,
}

/// Maximum size of a model file; a model is a page of text.
const FILE_BYTES_MAX: u64 = 1 << 20;

impl Simulate {
    /// Starts the requested simulation, if there is one.
    ///
    /// # Errors
    /// If the model does not exist, or a value is invalid.
    pub fn start(&self) -> Result<Option<Arc<Simulation>>> {
        let Some(spec) = &self.simulate else { return Ok(None) };
        Ok(Some(Simulation::new(model(spec)?, self.simulate_seed)))
    }
}

/// `NAME[,KEY=VALUE]...`. A comma within brackets belongs to the value.
fn model(spec: &str) -> Result<StoreModel> {
    let mut depth = 0_u32;
    let mut words = spec.split(|letter: char| {
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
            format!(
                "cannot use --simulate {name}: expected {} or a file",
                StoreModel::NAMES.join(", ")
            )
        })?,
    };
    StoreModel::parse(&text, &overrides).with_context(|| format!("cannot use --simulate {name}"))
}

fn read(name: &str) -> Result<String> {
    let (store, key) = storage::locate(name)?;
    let text = storage::read_small(&*store, &key, FILE_BYTES_MAX)?;
    String::from_utf8(text).context("expected UTF-8 text")
}
