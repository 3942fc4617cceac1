//! The command line of `trainer`: arguments, and the verbs `eval`, `generate`, `import-config`,
//! `report` and `lr-sweep`.

pub(crate) mod args;
mod eval;
mod generate;
mod import;
mod report;
mod sweep;

use std::io::{self, Write as _};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use clap::Args;
use feed::open_tokenizer;
use preprocess::Tokenizer;
use trainer::config::Config;
use trainer::generate::Trained;

pub(crate) use eval::{EvalTask, eval};
pub(crate) use generate::{GenerateArgs, generate};
pub(crate) use import::{ImportArgs, import_config};
pub(crate) use report::{ReportArgs, report};
pub(crate) use sweep::{SweepArgs, sweep};

/// The trained model and its tokenizer.
#[derive(Debug, Args)]
pub(crate) struct TrainedArgs {
    /// Folder of a run, of its checkpoints, or of one step.
    #[arg(long, value_name = "FOLDER")]
    ckpt: String,
    /// Config of the model, in place of the one in the checkpoint.
    ///
    /// An imported checkpoint has none.
    #[arg(long, value_name = "FILE")]
    config: Option<String>,
    /// Tokenizer: a kind, or a kind and its file, as `hf:tokenizer.json`
    /// [default: that of the run's config]
    #[arg(long, value_name = "KIND[:FILE]")]
    tokenizer: Option<String>,
}

impl TrainedArgs {
    fn open(&self) -> Result<Trained> {
        let config = self.config.as_ref().map(|file| Config::load(file, &[])).transpose()?;
        Ok(Trained::open(&self.ckpt, config)?)
    }

    fn tokenizer(&self, trained: &Trained) -> Result<Arc<dyn Tokenizer>> {
        Ok(open_tokenizer(self.tokenizer.as_ref().unwrap_or(&trained.config().data.tokenizer))?)
    }
}

/// Prints progress on standard error every 10 s.
struct ProgressPrinter {
    started: Instant,
    printed: Instant,
}

impl ProgressPrinter {
    fn new() -> Self {
        ProgressPrinter { started: Instant::now(), printed: Instant::now() }
    }

    fn callback(&mut self, unit: &'static str) -> impl FnMut(u64, u64) -> trainer::Result<()> {
        move |done, total| {
            if self.printed.elapsed() >= Duration::from_secs(10) {
                self.printed = Instant::now();
                let seconds = self.started.elapsed().as_secs();
                _ = writeln!(io::stderr(), "{done} of {total} {unit} in {seconds}s");
            }
            Ok(())
        }
    }
}

/// The content of a text file, by its path or URL.
fn read_text(url: &str) -> Result<String> {
    let (store, key) = storage::locate(url)?;
    let bytes = storage::read_all(store.as_ref(), &key)?;
    String::from_utf8(bytes).with_context(|| format!("cannot read {url}"))
}
