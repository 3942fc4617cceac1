//! `feedline ckpt import` and `reshard`: write a checkpoint as a step. `export` has the same limits
//! and report.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use ckpt::convert::{ConvertLimits, DerivedTensor, Family, Format, Import, NewRows, RenameRules};
use ckpt::{Blob, CheckpointOptions, Checkpoints, Codec, Dtype};
use clap::{Args, ValueEnum};
use serde::Serialize;
use serde_json::{Value, json};
use storage::{ByteSize, Key, rate_text};

use super::{CkptOutput, open_step};
use crate::ui::job::CancellableJob;
use crate::ui::step_folder::not_a_step;
use crate::ui::terminal::{Bar, FactTable, ProgressLine, thousands};

/// Limits of a conversion.
#[derive(Debug, Args)]
pub struct BoundArgs {
    /// Maximum size of one file [default: 5GB for export, else 4GiB]
    ///
    /// A larger tensor has a separate file.
    #[arg(long, value_name = "SIZE", help_heading = "Limits")]
    pub max_shard: Option<ByteSize>,
    /// Memory for buffers; at least 1MiB.
    ///
    /// With less, large matrices that are transposed are read more than once.
    #[arg(long, value_name = "SIZE", default_value = "1GiB", help_heading = "Limits")]
    pub memory: ByteSize,
    /// Files written at the same time; at least 1. More need more memory bandwidth.
    #[arg(long, alias = "workers", value_name = "N", default_value_t = 2)]
    #[arg(help_heading = "Limits")]
    pub threads: usize,
}

impl BoundArgs {
    pub(super) fn bounds(&self, max_shard: u64) -> Result<ConvertLimits> {
        ensure!(
            self.memory.0 >= 1 << 20,
            "cannot use --memory {}: expected at least 1MiB",
            self.memory
        );
        ensure!(self.threads > 0, "cannot use --threads 0: expected at least 1");
        let shard_bytes_max = self.max_shard.map_or(max_shard, |size| size.0);
        ensure!(shard_bytes_max > 0, "cannot use --max-shard 0B: expected at least 1B");
        Ok(ConvertLimits { shard_bytes_max, memory_bytes: self.memory.0, threads: self.threads })
    }
}

/// Arguments of `feedline ckpt import`.
#[derive(Debug, Args)]
pub struct ImportArgs {
    /// Checkpoint to import: a folder or a file.
    #[arg(value_name = "SOURCE")]
    pub source: String,
    /// Folder of steps to write to.
    #[arg(value_name = "OUT")]
    pub out: String,
    /// Program that wrote SOURCE.
    #[arg(long, value_enum)]
    pub from: FromArg,
    /// Number of the step to write [default: the step that SOURCE records, else 0]
    #[arg(long, value_name = "N")]
    pub step: Option<u64>,
    /// Keep the tensor names of SOURCE.
    ///
    /// Without this, tensors of GPT-2, T5 and BERT get the names that `transformers` uses in the
    /// model with its head. Buffers and copies are dropped.
    #[arg(long, help_heading = "Tensors")]
    pub keep_names: bool,
    /// File of rules: `rename P -> NAME`, `drop P`, `transpose P`,
    /// `split P axis N -> NAME, NAME`.
    #[arg(long, value_name = "FILE", help_heading = "Tensors")]
    pub rename: Option<String>,
    /// New number of rows of the word embedding and of other tensors with one row per token.
    #[arg(long, value_name = "N", help_heading = "Tensors")]
    pub extend_vocab: Option<u64>,
    /// Initial values of rows that --extend-vocab adds.
    #[arg(long, value_enum, default_value = "mean", help_heading = "Tensors")]
    pub new_rows: NewRowsArg,
    /// Seed of `--new-rows normal`.
    #[arg(long, value_name = "N", default_value_t = 1234, help_heading = "Tensors")]
    pub seed: u64,
    /// Standard deviation of `--new-rows normal`.
    #[arg(long, value_name = "STD", default_value_t = 0.02, help_heading = "Tensors")]
    pub std: f64,
    /// Omit Adam's moments and the master weights.
    #[arg(long, help_heading = "Tensors")]
    pub without_optimizer: bool,
    /// Type of the weights: F32, BF16, F16 or F64 [default: unchanged]
    #[arg(long, value_name = "TYPE", value_parser = dtype, help_heading = "Tensors")]
    pub dtype: Option<Dtype>,
    /// Compress tensors without loss. Only feedline reads such files.
    #[arg(long, help_heading = "Tensors")]
    pub compress: bool,
    #[command(flatten)]
    bounds: BoundArgs,
    /// Print JSON, with units in the keys.
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `feedline ckpt reshard`.
#[derive(Debug, Args)]
pub struct ReshardArgs {
    /// A step-* folder, or a folder of steps for the newest complete one.
    #[arg(value_name = "CKPT")]
    pub name: String,
    /// Folder of steps to write to; not the folder of CKPT.
    #[arg(value_name = "OUT")]
    pub out: String,
    /// Omit Adam's moments and the master weights.
    #[arg(long)]
    pub without_optimizer: bool,
    /// Compress tensors without loss. Only feedline reads such files.
    ///
    /// Without this, a compressed step is decompressed.
    #[arg(long)]
    pub compress: bool,
    #[command(flatten)]
    bounds: BoundArgs,
    /// Print JSON, with units in the keys.
    #[arg(long)]
    pub json: bool,
}

/// Value of an option of `feedline ckpt import`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum FromArg {
    /// A Hugging Face folder with safetensors or pytorch_model.bin, or a safetensors file.
    Hf,
    /// A torch.save file, or a folder with pytorch_model.bin.
    Torch,
    /// A torch.distributed.checkpoint folder.
    Dcp,
    /// Megatron-LM's mp_rank_* folders.
    Megatron,
    /// DeepSpeed's ZeRO files.
    Deepspeed,
}

/// Value of an option of `feedline ckpt import`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum NewRowsArg {
    /// Zeros.
    Zeros,
    /// The mean of the existing rows.
    Mean,
    /// Random, from a normal distribution around zero.
    Normal,
}

/// The output of the three commands; `--json` prints it as it is.
#[derive(Debug, Serialize)]
pub(super) struct Converted {
    pub(super) source: String,
    pub(super) out: String,
    pub(super) step: Option<u64>,
    /// `gpt2`, `t5` or `bert`, if the tensor names are of that family.
    pub(super) family: Option<&'static str>,
    pub(super) tensors: usize,
    pub(super) files: usize,
    pub(super) bytes: u64,
    pub(super) elapsed_s: f64,
    /// Buffers, copies of tied weights, tensors that rules drop, and tensors that the index does
    /// not assign to their file.
    pub(super) left_out: Vec<String>,
}

pub(crate) fn run_import(args: &ImportArgs, line: &mut ProgressLine) -> Result<CkptOutput> {
    let work = CancellableJob::at_signals()?;
    work.end(import_by(args, &work, line))
}

fn import_by(
    args: &ImportArgs,
    work: &Arc<CancellableJob>,
    line: &mut ProgressLine,
) -> Result<CkptOutput> {
    let started = Instant::now();
    let bounds = args.bounds.bounds(ConvertLimits::default().shard_bytes_max)?;
    let format = match args.from {
        FromArg::Hf => Format::HuggingFace,
        FromArg::Torch => Format::Torch,
        FromArg::Dcp => Format::Dcp,
        FromArg::Megatron => Format::Megatron,
        FromArg::Deepspeed => Format::DeepSpeed,
    };
    let rules = match &args.rename {
        Some(file) => {
            let text =
                std::fs::read_to_string(file).with_context(|| format!("cannot read {file}"))?;
            RenameRules::parse(file, &text)?
        }
        None => RenameRules::default(),
    };
    let mut import = Import::open(&args.source, format)?;
    import.apply(&rules)?;
    let family = if args.keep_names { None } else { import.normalize()? };
    if let Some(family) = family {
        import.check_complete(family)?;
    }
    if args.without_optimizer {
        import.without_optimizer();
    }
    if let Some(words) = args.extend_vocab {
        import.set_vocab(words, &new_rows(args))?;
    }
    if let Some(dtype) = args.dtype {
        import.set_dtype(dtype)?;
    }
    let step = args.step.or(import.step).unwrap_or(0);
    let meta = json!({
        "step": step,
        "imported": {
            "source": import.source.display(),
            "format": format!("{:?}", args.from).to_lowercase(),
            "heads": import.heads,
            "tool": crate::ui::output::TOOL,
        },
    });
    let steps = steps_to_write(&args.out, args.compress, work)?;
    write_step(&steps, step, &import, meta, bounds, line).map(|report| {
        let converted = Converted {
            source: import.source.display().to_owned(),
            out: args.out.clone(),
            step: Some(step),
            family: family.map(Family::name),
            tensors: import.made.len(),
            files: report.files,
            bytes: report.bytes,
            elapsed_s: started.elapsed().as_secs_f64(),
            left_out: import.dropped.clone(),
        };
        CkptOutput::new(args.json, &converted, converted.text("imported"), true)
    })?
}

pub(crate) fn run_reshard(args: &ReshardArgs, line: &mut ProgressLine) -> Result<CkptOutput> {
    let work = CancellableJob::at_signals()?;
    work.end(reshard_by(args, &work, line))
}

fn reshard_by(
    args: &ReshardArgs,
    work: &Arc<CancellableJob>,
    line: &mut ProgressLine,
) -> Result<CkptOutput> {
    let started = Instant::now();
    let bounds = args.bounds.bounds(ConvertLimits::default().shard_bytes_max)?;
    let source = open_step(&args.name)?;
    let (step, meta) = (source.step(), source.meta().clone());
    let mut import = Import::of_step(source)?;
    if args.without_optimizer {
        import.without_optimizer();
    }
    let steps = steps_to_write(&args.out, args.compress, work)?;
    let report = write_step(&steps, step, &import, meta, bounds, line)?;
    let converted = Converted {
        source: import.source.display().to_owned(),
        out: args.out.clone(),
        step: Some(step),
        family: Family::of(&import.made).map(Family::name),
        tensors: import.made.len(),
        files: report.files,
        bytes: report.bytes,
        elapsed_s: started.elapsed().as_secs_f64(),
        left_out: import.dropped,
    };
    CkptOutput::new(args.json, &converted, converted.text("wrote"), true)
}

fn steps_to_write(out: &str, compress: bool, work: &Arc<CancellableJob>) -> Result<Checkpoints> {
    let options = CheckpointOptions { codec: codec_if(compress), ..CheckpointOptions::default() };
    let store = work.watch(not_a_step(out, "write a step into")?);
    Ok(Checkpoints::open(store, Key::root()).with_options(options))
}

/// The codec of `--compress`.
pub(crate) fn codec_if(compress: bool) -> Option<Codec> {
    compress.then_some(Codec::Planes)
}

fn write_step(
    steps: &Checkpoints,
    step: u64,
    import: &Import,
    meta: Value,
    bounds: ConvertLimits,
    line: &mut ProgressLine,
) -> Result<ckpt::SaveReport> {
    let blobs: Vec<Blob<'_>> =
        import.source.blobs().iter().map(|(name, bytes)| Blob { name, bytes }).collect();
    with_bar(line, "write", &import.made, |advance| {
        steps.save_made(step, import, &blobs, meta, bounds, advance)
    })
}

/// Shows a bar while something is written.
pub(super) fn with_bar<T>(
    line: &mut ProgressLine,
    what: &str,
    made: &[DerivedTensor],
    work: impl FnOnce(&(dyn Fn(u64) + Sync)) -> ckpt::Result<T>,
) -> Result<T> {
    let total = made.iter().map(DerivedTensor::bytes).fold(0, u64::saturating_add);
    let bar = Mutex::new((Bar::new(line, what, total), 0));
    let advance = |bytes: u64| {
        // After a panic the bar is no longer updated.
        if let Ok(mut held) = bar.lock() {
            let (bar, done) = &mut *held;
            *done += bytes;
            bar.at(*done);
        }
    };
    Ok(work(&advance)?)
}

fn new_rows(args: &ImportArgs) -> NewRows {
    match args.new_rows {
        NewRowsArg::Zeros => NewRows::Zeros,
        NewRowsArg::Mean => NewRows::Mean,
        NewRowsArg::Normal => NewRows::Normal { std: args.std, seed: args.seed },
    }
}

pub(super) fn dtype(name: &str) -> Result<Dtype, String> {
    let all = [Dtype::F32, Dtype::BF16, Dtype::F16, Dtype::F64];
    let found = all.into_iter().find(|dtype| dtype.name().eq_ignore_ascii_case(name));
    found.ok_or_else(|| "expected F32, BF16, F16 or F64".to_owned())
}

impl Converted {
    pub(super) fn text(&self, verb: &str) -> String {
        let mut facts = FactTable::default();
        facts.add("from", &self.source);
        facts.add("to", &self.out);
        if let Some(step) = self.step {
            facts.add("step", step);
        }
        if let Some(family) = self.family {
            facts.add("architecture", family);
        }
        facts.add("tensors", thousands(self.tensors as u64));
        let rate = rate_text(self.bytes, Duration::from_secs_f64(self.elapsed_s));
        facts.add("wrote", format!("{} in {} files at {rate}", ByteSize(self.bytes), self.files));
        if !self.left_out.is_empty() {
            let shown: Vec<&str> = self.left_out.iter().take(4).map(String::as_str).collect();
            let more = if self.left_out.len() > 4 { ", ..." } else { "" };
            let count = self.left_out.len();
            facts.add("left out", format!("{count}: {}{more}", shown.join(", ")));
        }
        format!("{verb}\n{}", facts.text())
    }
}
