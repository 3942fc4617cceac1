use std::io::{self, BufRead as _, Write};
use std::ops::RangeInclusive;
use std::process::ExitCode;

use anyhow::Result;
use clap::Args;
use preprocess::Tokenizer;
use serde_json::json;
use trainer::config::Objective;
use trainer::generate::{GenerateOptions, Sampling, Trained, Utf8Stream};

use super::{TrainedArgs, read_text};

#[derive(Debug, Args)]
pub(crate) struct GenerateArgs {
    /// Text to continue; an empty text is the start of a document.
    #[arg(long, default_value = "", conflicts_with_all = ["prompts", "interactive"])]
    prompt: String,
    /// Continue each line of a file.
    #[arg(long, value_name = "FILE", conflicts_with = "interactive")]
    prompts: Option<String>,
    /// Continue each line of standard input as soon as it arrives.
    #[arg(long)]
    interactive: bool,
    /// Print a JSON object per text, one per line.
    #[arg(long)]
    json: bool,
    /// Texts per prompt.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..))]
    samples: u16,
    /// Maximum number of tokens; the stop token of the model ends a text earlier.
    #[arg(long, default_value_t = 100, value_name = "N", help_heading = "Sampling")]
    tokens: usize,
    /// Minimum number of tokens; the stop token is not sampled earlier.
    #[arg(long = "min-tokens", alias = "tokens-min", default_value_t = 0, value_name = "N")]
    #[arg(help_heading = "Sampling")]
    tokens_min: usize,
    /// Temperature: 0 always takes the most likely token, 1 samples from the model's
    /// probabilities, more makes unlikely tokens more frequent.
    #[arg(long, default_value_t = 0.8, value_parser = |text: &str| number(text, 0.0..=100.0))]
    #[arg(help_heading = "Sampling")]
    temperature: f64,
    /// Sample from this many most likely tokens; 0 from all.
    #[arg(long, default_value_t = 50, value_name = "N", help_heading = "Sampling")]
    top_k: usize,
    /// Sample from the most likely tokens that together have this probability.
    #[arg(long, default_value_t = 1.0, value_parser = |text: &str| number(text, 0.0..=1.0))]
    #[arg(help_heading = "Sampling")]
    top_p: f64,
    /// First decoder token of an encoder-decoder model: 0 for T5, 1 for CPM-2
    /// [default: that of the run]
    #[arg(long, value_name = "ID", help_heading = "Sampling")]
    start_token: Option<u32>,
    /// Seed; the same seed generates the same text.
    #[arg(long, default_value_t = 1, value_name = "N", help_heading = "Sampling")]
    seed: u64,
    #[command(flatten, next_help_heading = "Model")]
    trained: TrainedArgs,
}

pub(crate) fn generate(args: &GenerateArgs) -> Result<ExitCode> {
    let trained = args.trained.open()?;
    let tokenizer = args.trained.tokenizer(&trained)?;
    // As the run recorded them; an imported checkpoint has none.
    let config = trained.config();
    let id = |id: Option<u64>| id.and_then(|id| u32::try_from(id).ok());
    let eos =
        id(config.data.special.eos).filter(|_| config.objective() == Objective::SpanCorruption);
    let start = args.start_token.or(id(config.data.special.bos)).unwrap_or(0);
    let options = GenerateOptions {
        samples: usize::from(args.samples),
        tokens_min: args.tokens_min,
        tokens_max: args.tokens,
        sampling: Sampling { temperature: args.temperature, top_k: args.top_k, top_p: args.top_p },
        seed: args.seed,
        stop: eos.or_else(|| tokenizer.eod()),
        start,
    };
    let mut writer =
        Writer { trained, tokenizer: &*tokenizer, options, json: args.json, prompts: 0 };
    if args.interactive {
        for line in io::stdin().lock().lines() {
            writer.write(&line?)?;
        }
    } else if let Some(file) = &args.prompts {
        read_text(file)?.lines().try_for_each(|line| writer.write(line))?;
    } else {
        writer.write(&args.prompt)?;
    }
    Ok(ExitCode::SUCCESS)
}

struct Writer<'a> {
    trained: Trained,
    tokenizer: &'a dyn Tokenizer,
    options: GenerateOptions,
    json: bool,
    /// Prompts written so far.
    prompts: u64,
}

impl Writer<'_> {
    /// Prints the prompt and the generated text. A single text is printed token by token.
    fn write(&mut self, prompt: &str) -> Result<()> {
        let mut ids = Vec::new();
        self.tokenizer.encode(prompt, &mut ids);
        if ids.is_empty() {
            ids.extend(self.tokenizer.eod());
        }
        let at_once = self.options.samples == 1 && !self.json;
        let mut out = io::stdout().lock();
        let mut print = |text: &str| out.write_all(text.as_bytes()).and_then(|()| out.flush());
        let mut samples: Vec<(Utf8Stream, String, u64)> = Vec::new();
        samples.resize_with(self.options.samples, Default::default);
        if at_once {
            print(prompt)?;
        }
        self.trained.write(&ids, &self.options, &mut |sample, token| {
            let mut bytes = Vec::new();
            self.tokenizer.decode(&[token], &mut bytes)?;
            let (stream, text, tokens) = &mut samples[sample];
            let new = stream.push(&bytes);
            *tokens += 1;
            if at_once {
                let operation = "write to standard output".to_owned();
                return print(&new).map_err(|source| trainer::Error::Run { operation, source });
            }
            text.push_str(&new);
            Ok(())
        })?;
        self.prompts += 1;
        for (number, (stream, mut text, tokens)) in samples.into_iter().enumerate() {
            text.push_str(&stream.finish());
            if self.json {
                let line =
                    json!({ "prompt": prompt, "sample": number, "text": text, "tokens": tokens });
                print(&format!("{line}\n"))?;
            } else if at_once {
                print(&format!("{text}\n"))?;
            } else {
                let of = format!("prompt {}, sample {}", self.prompts, number + 1);
                print(&format!("--- {of} ---\n{prompt}{text}\n"))?;
            }
        }
        Ok(())
    }
}

fn number(text: &str, range: RangeInclusive<f64>) -> Result<f64, String> {
    let refuse = || format!("expected a number from {} to {}", range.start(), range.end());
    text.parse().ok().filter(|number| range.contains(number)).ok_or_else(refuse)
}
