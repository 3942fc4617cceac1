//! `feedline clean`: filters and deduplicates JSON lines, and reports what it dropped.

use std::io::{self, IsTerminal as _, Write as _};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use preprocess::TokenizerSpec;
use preprocess::clean::{
    CleanOptions, CleanProgress, CleanReport, Filters, Measure, NearOptions, Reject, ScriptMin,
    ShingleUnit, SplitOptions, TokensMin, UrlOptions, clean_until,
};
use storage::{ByteSize, Key, Storage};

use crate::ui::terminal::{FactTable, table, thousands};
use crate::ui::timeout::StopSignal;

/// Options of `feedline clean`.
#[derive(Clone, Debug, clap::Args)]
pub struct CleanArgs {
    /// Files of JSON lines, plain or compressed, in order; - is standard input
    #[arg(long, alias = "input", value_name = "FILE", num_args = 1.., required = true)]
    #[arg(help_heading = "Input")]
    json_in: Vec<String>,

    /// The key that holds the text
    #[arg(long, value_name = "KEY", default_value = "text", help_heading = "Input")]
    json_key: String,

    /// Refuse longer lines; a line takes several times its length in memory
    #[arg(long, value_name = "SIZE", default_value = "1GiB", help_heading = "Input")]
    line_max: ByteSize,

    #[command(flatten, next_help_heading = "Duplicates")]
    duplicates: Duplicates,

    #[command(flatten, next_help_heading = "Filters")]
    rules: FilterArgs,

    /// Output: a prefix, or a name that ends in .jsonl, .jsonl.zst or .json
    #[arg(short, long, alias = "output", value_name = "PREFIX", help_heading = "Output")]
    out: String,

    /// Collapse runs of spaces and join broken lines, as Megatron's general_cleaning does
    #[arg(long, help_heading = "Output")]
    fix_spaces: bool,

    /// Divide the output into PREFIX_train, _valid and _test by these weights, such as 949,50,1
    ///
    /// The part follows from a hash of the text, so equal texts are in the same part.
    #[arg(long, value_name = "WEIGHTS", help_heading = "Output")]
    split: Option<SplitOptions>,

    /// Seed of --split
    #[arg(long, value_name = "N", default_value_t = 1234, requires = "split")]
    #[arg(help_heading = "Output")]
    seed: u64,

    /// Write the dropped lines to this file, each with the reason
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    dropped: Option<String>,

    /// Write a detailed summary to this file, as JSON
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    report: Option<String>,

    /// Print the content of --report in place of the summary
    #[arg(long, conflicts_with = "quiet", help_heading = "Output")]
    json: bool,

    /// Print neither progress nor summary
    #[arg(long, help_heading = "Output")]
    quiet: bool,

    /// Threads that filter [default: one per core]
    #[arg(long, alias = "threads", value_name = "N", help_heading = "Process")]
    workers: Option<usize>,
}

#[derive(Clone, Debug, clap::Args)]
struct Duplicates {
    /// Drop a document whose text equals that of an earlier one
    #[arg(long)]
    exact_dedup: bool,

    /// Drop a document that is a near-duplicate of an earlier one
    #[arg(long)]
    near_dedup: bool,

    /// Compare texts in lower case and without white space
    #[arg(long)]
    fold: bool,

    /// Smallest share of common shingles of near-duplicates; a lower one drops more [default: 0.7]
    #[arg(long, value_name = "SHARE", requires = "near_dedup")]
    jaccard: Option<f64>,

    /// Denominator of the share: union (of both), min (the smaller) or max (the larger)
    /// [default: union]
    #[arg(long, value_name = "WHAT", requires = "near_dedup")]
    measure: Option<Measure>,

    /// Characters or words per shingle [default: 5]
    #[arg(long, value_name = "N", requires = "near_dedup")]
    shingle: Option<usize>,

    /// Unit of shingles: char or word [default: char]
    #[arg(long, value_name = "UNIT", requires = "near_dedup")]
    shingle_unit: Option<ShingleUnit>,

    /// Number of bands [default: 20]
    ///
    /// Documents that agree in one band are compared. More bands find more near-duplicates and need
    /// more memory.
    #[arg(long, alias = "num-bands", value_name = "N", requires = "near_dedup")]
    bands: Option<usize>,

    /// MinHash values per band [default: 5]
    ///
    /// Fewer values find more near-duplicates and compare more documents.
    #[arg(long, value_name = "N", requires = "near_dedup")]
    rows: Option<usize>,

    /// Read the inputs twice, with about 20 bytes of memory per document in place of 400
    #[arg(long, requires = "near_dedup")]
    two_passes: bool,

    /// Folder of a temporary file as large as the retained text [default: the system's]
    #[arg(long, value_name = "FOLDER", requires = "near_dedup")]
    scratch: Option<PathBuf>,
}

#[derive(Clone, Debug, clap::Args)]
struct FilterArgs {
    /// Drop texts with fewer characters
    #[arg(long, value_name = "N")]
    min_chars: Option<u64>,

    /// Drop texts with more characters
    #[arg(long, value_name = "N")]
    max_chars: Option<u64>,

    /// Drop texts with fewer tokens
    #[arg(long, value_name = "N")]
    min_tokens: Option<u64>,

    /// Tokenizer that counts tokens for --min-tokens
    #[arg(long, value_name = "KIND", default_value = "gpt2")]
    tokenizer: String,

    /// vocab.json of the tokenizer
    #[arg(long, value_name = "FILE", requires = "min_tokens")]
    vocab_file: Option<String>,

    /// merges.txt of the tokenizer
    #[arg(long, value_name = "FILE", requires = "min_tokens")]
    merge_file: Option<String>,

    /// File of a tokenizer that has a single file
    #[arg(long, value_name = "FILE", requires = "min_tokens")]
    tokenizer_model: Option<String>,

    /// Rule of a Hugging Face folder: that of its tokenizer.json, or of the class that it names
    #[arg(long, value_name = "RULE", value_parser = ["file", "class"], requires = "min_tokens")]
    tokenizer_rule: Option<String>,

    /// Drop texts with a smaller share of letters; white space does not count
    #[arg(long, value_name = "SHARE")]
    min_letters: Option<f64>,

    /// Drop texts with a larger share of U+FFFD, which replaces undecodable characters
    #[arg(long, value_name = "SHARE")]
    max_replacement: Option<f64>,

    /// Drop texts in which one character has a larger share
    #[arg(long, value_name = "SHARE")]
    max_one_char: Option<f64>,

    /// Drop texts with a larger share of repeated lines
    #[arg(long, value_name = "SHARE")]
    max_repeated_lines: Option<f64>,

    /// Drop texts with a smaller share of letters of a script, such as han=0.3
    #[arg(long, value_name = "SCRIPT=SHARE")]
    min_script: Vec<ScriptMin>,

    /// Drop texts that contain these words, in any case
    ///
    /// With a number, such as javascript=256, only texts with fewer characters are dropped.
    #[arg(long, value_name = "WORDS[=CHARS]")]
    reject: Vec<Reject>,

    /// Drop documents whose URL is on the list in this file
    ///
    /// A line is a domain (example.com), a name without a dot (example), a suffix (.jpg) or an
    /// address with a path (example.com/a).
    #[arg(long, value_name = "FILE")]
    blacklist_urls: Option<String>,

    /// The key that holds the URL
    #[arg(long, value_name = "KEY", default_value = "url")]
    url_key: String,
}

/// Cleans, and reports the result on standard output.
///
/// # Errors
/// As [`preprocess::clean::clean`], and for a report that cannot be written.
pub fn run(args: &CleanArgs, out: &mut dyn io::Write) -> Result<()> {
    let report_to = args.report.as_deref().map(free_name).transpose()?;
    let mut reporter = Reporter::new(args.quiet);
    let stop = StopSignal::at_signals()?;
    let on_progress = &mut |progress: &CleanProgress| reporter.show(progress);
    let result = clean_until(&args.options(), &stop.0, on_progress);
    reporter.clear();
    let report = match result {
        Err(preprocess::Error::Stopped) => bail!("interrupted"),
        result => result?,
    };
    let json = serde_json::to_string_pretty(&report).context("cannot serialize the report")? + "\n";
    if let Some((store, key)) = report_to {
        storage::write_all(store.as_ref(), &key, json.as_bytes())
            .context("cannot write the report (the lines are written)")?;
    }
    match (args.json, args.quiet) {
        (true, _) => out.write_all(json.as_bytes())?,
        (false, false) => out.write_all(text(&report).as_bytes())?,
        (false, true) => {}
    }
    Ok(out.flush()?)
}

/// Store and key of a file that must not exist yet.
fn free_name(url: &str) -> Result<(Arc<dyn Storage>, Key)> {
    let (store, key) = storage::locate(url)?;
    match store.open(&key) {
        Err(storage::Error::NotFound { .. }) => Ok((store, key)),
        Err(error) => Err(error.into()),
        Ok(_) => Err(storage::Error::Exists { object: store.display(&key) }.into()),
    }
}

impl CleanArgs {
    fn options(&self) -> CleanOptions {
        let mut options = CleanOptions::new(self.json_in.clone(), &self.out);
        options.key.clone_from(&self.json_key);
        options.filters = self.rules.filters();
        options.exact = self.duplicates.exact_dedup;
        options.near = self.duplicates.near_dedup.then(|| self.duplicates.near());
        options.fold = self.duplicates.fold;
        options.fix_spaces = self.fix_spaces;
        options.split = self.split.clone().map(|split| SplitOptions { seed: self.seed, ..split });
        options.dropped.clone_from(&self.dropped);
        options.workers = self.workers.unwrap_or(options.workers);
        options.line_bytes_max = self.line_max.0;
        options
    }
}

impl Duplicates {
    fn near(&self) -> NearOptions {
        let default = NearOptions::default();
        NearOptions {
            jaccard: self.jaccard.unwrap_or(default.jaccard),
            measure: self.measure.unwrap_or(default.measure),
            unit: self.shingle_unit.unwrap_or(default.unit),
            shingle: self.shingle.unwrap_or(default.shingle),
            bands: self.bands.unwrap_or(default.bands),
            rows: self.rows.unwrap_or(default.rows),
            two_passes: self.two_passes,
            scratch: self.scratch.clone(),
        }
    }
}

impl FilterArgs {
    fn filters(&self) -> Filters {
        let tokenizer = || TokenizerSpec {
            kind: self.tokenizer.clone(),
            vocab_file: self.vocab_file.clone(),
            merge_file: self.merge_file.clone(),
            model: self.tokenizer_model.clone(),
            tokenizer_rule: self.tokenizer_rule.clone(),
            ..TokenizerSpec::default()
        };
        let urls = |file: &String| UrlOptions { file: file.clone(), key: self.url_key.clone() };
        Filters {
            chars_min: self.min_chars,
            chars_max: self.max_chars,
            tokens_min: self.min_tokens.map(|tokens| TokensMin { tokens, tokenizer: tokenizer() }),
            letters_min: self.min_letters,
            replacement_max: self.max_replacement,
            one_char_max: self.max_one_char,
            repeated_lines_max: self.max_repeated_lines,
            scripts_min: self.min_script.clone(),
            rejects: self.reject.clone(),
            urls: self.blacklist_urls.as_ref().map(urls),
        }
    }
}

/// The report as text.
fn text(report: &CleanReport) -> String {
    let mut facts = FactTable::default();
    let share = |part: u64| 100.0 * part as f64 / report.documents.max(1) as f64;
    facts.add("documents", thousands(report.documents));
    facts.add("kept", format!("{} ({:.2} %)", thousands(report.kept), share(report.kept)));
    facts.add("read", format!("{} of JSON", ByteSize(report.json_bytes)));
    let rate = format!("{:.1} MB/s, {} workers", report.json_mb_per_s, report.workers);
    facts.add("time", format!("{:.1} s, {rate}", report.elapsed_s));
    let counts = [
        ("blank lines skipped", report.blank_lines),
        ("lines rewritten", report.rewritten),
        ("documents without a URL", report.without_url),
    ];
    for (label, count) in counts.into_iter().filter(|(_, count)| *count > 0) {
        facts.add(label, thousands(count));
    }
    if let Some(clusters) = &report.clusters {
        let (count, largest) = (thousands(clusters.count), thousands(clusters.largest));
        facts.add("clusters", format!("{count}, the largest of {largest} documents"));
    }
    if let Some(index) = &report.index {
        let (tables, scratch) = (ByteSize(index.table_bytes), ByteSize(index.scratch_bytes));
        facts.add("tables", format!("{tables}, and {scratch} in temporary files"));
    }
    let mut text = facts.text();
    if !report.dropped.is_empty() {
        let row =
            |(cause, dropped): (&preprocess::clean::DropReason, &preprocess::clean::Dropped)| {
                vec![
                    cause.name().to_owned(),
                    thousands(dropped.documents),
                    format!("{:.2}", share(dropped.documents)),
                    ByteSize(dropped.bytes).to_string(),
                ]
            };
        let rows: Vec<_> = report.dropped.iter().map(row).collect();
        text += &table(&["dropped", "documents", "%", "bytes"], &rows);
    }
    for output in &report.outputs {
        text += &format!("{}  {}\n", output.name, ByteSize(output.bytes));
    }
    text
}

/// Reports progress on standard error, on one line if that is a terminal.
struct Reporter {
    interval: Duration,
    terminal: bool,
    quiet: bool,
    start: Instant,
    shown: Instant,
    line_open: bool,
}

impl Reporter {
    fn new(quiet: bool) -> Self {
        let terminal = io::stderr().is_terminal();
        let interval = Duration::from_millis(if terminal { 200 } else { 60_000 });
        let now = Instant::now();
        Reporter { interval, terminal, quiet, start: now, shown: now, line_open: false }
    }

    fn show(&mut self, progress: &CleanProgress) {
        if self.quiet || self.shown.elapsed() < self.interval {
            return;
        }
        self.shown = Instant::now();
        let CleanProgress { pass, passes, stored_bytes, stored_bytes_all, .. } = *progress;
        let part = stored_bytes_all.map(|all| stored_bytes as f64 / all.max(1) as f64);
        let part = part.map_or(String::new(), |part| format!("{:.1} % of ", part * 100.0));
        let of = ByteSize(stored_bytes_all.unwrap_or(stored_bytes));
        let kept = if pass == passes { format!(", {} kept", progress.kept) } else { String::new() };
        let line = format!(
            "pass {pass} of {passes}: {part}{of}, {} documents{kept}, {:.0} s",
            progress.documents,
            self.start.elapsed().as_secs_f64(),
        );
        // Progress that cannot be shown must not end the run.
        let _ = if self.terminal {
            self.line_open = true;
            write!(io::stderr(), "\r\x1b[K{line}")
        } else {
            writeln!(io::stderr(), "{line}")
        };
    }

    fn clear(&self) {
        if self.line_open {
            let _ = write!(io::stderr(), "\r\x1b[K");
        }
    }
}
