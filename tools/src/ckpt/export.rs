//! `feedline ckpt export`: the weights of a step, their configuration and their tokenizer, as
//! `transformers` opens them.

use std::sync::Arc;
use std::time::Instant;

use anyhow::{Result, bail, ensure};
use ckpt::Dtype;
use ckpt::convert::{Family, Import, NewRows, export};
use clap::Args;
use recipe::config::ModelConfig;
use serde_json::Value;

use super::convert::{BoundArgs, Converted, dtype, with_bar};
use super::export_config::{check_expressible, keys_of, run_config};
use super::export_tokenizer::{ExportedFiles, RunTokenizer};
use super::{CkptOutput, open_step};
use crate::ui::job::CancellableJob;
use crate::ui::terminal::ProgressLine;

/// Arguments of `feedline ckpt export`.
#[derive(Debug, Args)]
pub struct ExportArgs {
    /// A step-* folder, or a folder of steps for the newest complete one.
    #[arg(value_name = "CKPT")]
    pub name: String,
    /// Folder to write; it must not exist.
    #[arg(value_name = "OUT")]
    pub out: String,
    /// Type of the weights: F32, BF16, F16 or F64 [default: unchanged]
    #[arg(long, value_name = "TYPE", value_parser = dtype)]
    pub dtype: Option<Dtype>,
    /// Rows of the word embedding [default: `model.vocab` of the run's config, without padding]
    ///
    /// Rows above `model.vocab` were never trained. transformers computes logits for them too.
    #[arg(long = "vocab-size", alias = "vocab", value_name = "N")]
    pub vocab: Option<u64>,
    /// Attention heads, for a step without the config of a run.
    #[arg(long, value_name = "N")]
    pub heads: Option<u64>,
    /// Dropout in config.json, for a T5 with different `model.attention_dropout` and
    /// `model.dropout`.
    ///
    /// The T5 of transformers has one probability for both. Dropout has no effect on evaluation.
    #[arg(long, value_name = "P")]
    pub dropout: Option<f64>,
    /// Tokenizer whose files are written: a kind, or a kind and its files, as `hf:tokenizer.json`.
    ///
    /// Default: `data.tokenizer` of the run's config. If that tokenizer cannot be opened, or
    /// transformers has no form for it, the export has no tokenizer, and a message gives the
    /// reason. With this option that is an error.
    #[arg(long, value_name = "KIND[:FILE]")]
    pub tokenizer: Option<String>,
    #[command(flatten)]
    bounds: BoundArgs,
    /// Print JSON, with units in the keys.
    #[arg(long)]
    pub json: bool,
}

/// Hugging Face's default for the maximum size of a file.
const HF_SHARD_BYTES: u64 = 5_000_000_000;

pub(crate) fn run_export(args: &ExportArgs, line: &mut ProgressLine) -> Result<CkptOutput> {
    let work = CancellableJob::at_signals()?;
    work.end(export_by(args, &work, line))
}

fn export_by(
    args: &ExportArgs,
    work: &Arc<CancellableJob>,
    line: &mut ProgressLine,
) -> Result<CkptOutput> {
    let started = Instant::now();
    let bounds = args.bounds.bounds(HF_SHARD_BYTES)?;
    let step = open_step(&args.name)?;
    let (store, folder) = work.locate(&args.out)?;
    let mut import = Import::of_step(step)?;
    import.without_optimizer();
    import.dropped.clear();
    ensure!(!import.made.is_empty(), "cannot export {}: no weights", args.name);
    let family = import.normalize()?;
    if let Some(dtype) = args.dtype {
        import.set_dtype(dtype)?;
    }
    let companions = match family {
        Some(family) => {
            let ExportedFiles { files, warnings } = describe(args, &mut import, family)?;
            warnings.iter().for_each(|warning| line.warn(warning));
            files
        }
        None => {
            refuse_model_options(args)?;
            companions_of(&import)
        }
    };
    let written = with_bar(line, "export", &import.made, |advance| {
        export(&import, &companions, &store, &folder, bounds, advance)
    })?;
    let converted = Converted {
        source: import.source.display().to_owned(),
        out: store.display(&folder),
        step: import.step,
        family: family.map(Family::name),
        tensors: written.tensors,
        files: written.files.len(),
        bytes: written.bytes,
        elapsed_s: started.elapsed().as_secs_f64(),
        left_out: import.dropped,
    };
    CkptOutput::new(args.json, &converted, converted.text("exported"), true)
}

/// Resizes the tensors to the architecture, and returns the files that are written next to them.
fn describe(args: &ExportArgs, import: &mut Import, family: Family) -> Result<ExportedFiles> {
    let mut warnings = Vec::new();
    import.check_complete(family)?;
    let run = run_config(import)?;
    if let Some(run) = &run {
        warnings.extend(check_options(args, &run.model)?);
        check_expressible(&run.model, family, args.dropout)?;
    }
    ensure!(
        args.dropout.is_none_or(|dropout| (0.0..1.0).contains(&dropout)),
        "cannot use --dropout: expected at least 0 and below 1, found {}",
        args.dropout.unwrap_or_default()
    );
    let model = run.as_ref().map(|run| &run.model);
    if let Some(words) = args.vocab.or(model.map(|model| model.vocab)) {
        import.set_vocab(words, &NewRows::Zeros)?;
    }
    let heads = model.map(|model| model.heads).or(args.heads).or(imported_heads(import));
    let mut config = import.config_json(family, heads)?;
    let tokenizer = RunTokenizer::open(args.tokenizer.as_deref(), run.as_ref())?;
    match (&run, config.as_object_mut()) {
        (Some(run), Some(keys)) => {
            keys.extend(keys_of(run, family, tokenizer.document_end(), args.dropout));
        }
        _ => warnings.extend(assumptions(import, family, &config)),
    }
    let mut exported = tokenizer.files(family, &config)?;
    exported.files.push(("config.json".to_owned(), format!("{config:#}\n").into_bytes()));
    let mut companions = companions_of(import);
    companions.retain(|(name, _)| exported.files.iter().all(|(other, _)| other != name));
    exported.files.append(&mut companions);
    exported.warnings.splice(0..0, warnings);
    Ok(exported)
}

/// Refuses options that contradict the run, or warns of their effect.
fn check_options(args: &ExportArgs, model: &ModelConfig) -> Result<Option<String>> {
    if let Some(heads) = args.heads.filter(|&heads| heads != model.heads) {
        bail!("cannot use --heads: expected model.heads = {}, found {heads}", model.heads);
    }
    match args.vocab {
        Some(words) if words < model.vocab => bail!(
            "cannot use --vocab-size: expected at least model.vocab = {}, found {words}",
            model.vocab
        ),
        Some(words) if words > model.vocab => Ok(Some(format!(
            "--vocab-size {words}: transformers computes logits also for the rows from {} on, \
             which were never trained; the loss is higher than that of the run",
            model.vocab
        ))),
        _ => Ok(None),
    }
}

/// Refuses options for `config.json` if the export has none.
fn refuse_model_options(args: &ExportArgs) -> Result<()> {
    let given = [
        ("vocab-size", args.vocab.is_some()),
        ("heads", args.heads.is_some()),
        ("dropout", args.dropout.is_some()),
        ("tokenizer", args.tokenizer.is_some()),
    ];
    if let Some((name, _)) = given.iter().find(|(_, is_given)| *is_given) {
        bail!(
            "cannot use --{name} with {}: expected tensor names of GPT-2, T5 or BERT, found others",
            args.name
        );
    }
    Ok(())
}

/// The heads that the import of another program's checkpoint recorded.
fn imported_heads(import: &Import) -> Option<u64> {
    import.source.step().and_then(|step| step.meta()["imported"]["heads"].as_u64())
}

/// Files that an import stored beside the weights.
fn companions_of(import: &Import) -> Vec<(String, Vec<u8>)> {
    let is_companion = |name: &str| {
        let ends = [".json", ".txt", ".model"].iter().any(|end| name.ends_with(end));
        ends && name != "loader.json"
    };
    import.source.blobs().iter().filter(|(name, _)| is_companion(name)).cloned().collect()
}

/// A warning about assumed settings. Tensor shapes do not determine activations, epsilons and
/// special tokens: without a configuration they are those of the published model.
fn assumptions(import: &Import, family: Family, config: &Value) -> Option<String> {
    if import.source.blobs().iter().any(|(name, _)| name == "config.json") {
        return None;
    }
    let assumed = family.assumed_keys().iter().map(|key| format!("{key} {}", config[*key]));
    Some(format!(
        "{}: the step has no config of a run and no config.json; as in the published {}, \
         config.json has {}",
        import.source.display(),
        family.name(),
        assumed.collect::<Vec<_>>().join(", ")
    ))
}
