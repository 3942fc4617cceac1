//! `feedline doctor`: finds what will slow down or stop a training run, with its effect and its
//! fix.
//!
//! `storage::probe` collects facts; this module derives their effect on a run. `machine` checks
//! this machine, `mount` the mount of a path, `folder` a file system, `bucket` an object store,
//! `config` everything that a run's config names. [`stripe`] is the command `feedline stripe`.

mod bucket;
mod config;
mod folder;
mod machine;
mod mount;
pub mod stripe;

use std::time::Duration;

use anyhow::{Result, bail};
use clap::{Args, ValueEnum};
use serde::Serialize;
use storage::probe::{BucketInfo, HostInfo, MountInfo};
use storage::{Location, Stage, TimeSpan};

use crate::ui::timeout::StopSignal;

/// Arguments of `feedline doctor`.
#[derive(Debug, Args)]
pub struct DoctorArgs {
    /// A folder or file, a URL, or the config of a run: a name that ends in .toml.
    #[arg(value_name = "PATH|URL|CONFIG.toml")]
    pub target: String,
    /// Use of PATH; a config determines the use of each of its paths.
    #[arg(long = "for", value_enum, default_value = "both")]
    pub purpose: Purpose,
    /// Maximum time of each check, from 1s to 1h. With less, a slow store counts as stuck.
    #[arg(long, value_name = "TIME", default_value = "20s", value_parser = seconds)]
    pub timeout: Duration,
    /// Override a key of the config, as with `trainer`. May be given several times.
    #[arg(long, value_name = "KEY=VALUE")]
    pub set: Vec<String>,
    /// Print JSON, with units in the keys.
    #[arg(long)]
    pub json: bool,
}

fn seconds(text: &str) -> Result<Duration, String> {
    let TimeSpan(time) = text.parse()?;
    let is_within = (Duration::from_secs(1)..=Duration::from_secs(3600)).contains(&time);
    if is_within { Ok(time) } else { Err(format!("expected 1s to 1h, found {text}")) }
}

/// Use of a path or URL.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub enum Purpose {
    /// Token files: the path is read, and never written to.
    Data,
    /// Checkpoints: a few small files or objects are written below the path and removed.
    Checkpoint,
    /// Both.
    Both,
}

/// Severity of the finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// No problem.
    Fine,
    /// A fact that does not harm a run.
    Note,
    /// A run will be slower, or lose more than necessary.
    Hurts,
    /// A run will not start, will fail, or can lose saved data.
    Breaks,
}

/// One finding.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// The path or URL that was checked, or `this machine`.
    pub place: String,
    /// Name of the check.
    pub what: String,
    /// Severity of the finding.
    pub severity: Severity,
    /// The fact that was found.
    pub found: String,
    /// Its effect on a run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cost: Option<String>,
    /// Its fix.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fix: Option<String>,
}

/// Findings about one path or URL, or about this machine.
#[derive(Debug, Default)]
pub struct Findings {
    place: String,
    all: Vec<Finding>,
}

impl Findings {
    fn of(place: impl Into<String>) -> Self {
        Findings { place: place.into(), all: Vec::new() }
    }

    fn fine(&mut self, what: &str, found: impl Into<String>) {
        self.push(Severity::Fine, what, found.into(), None);
    }

    fn note(&mut self, what: &str, found: impl Into<String>, cost: &str, fix: &str) {
        self.push(Severity::Note, what, found.into(), Some((cost, fix)));
    }

    fn hurts(&mut self, what: &str, found: impl Into<String>, cost: &str, fix: &str) {
        self.push(Severity::Hurts, what, found.into(), Some((cost, fix)));
    }

    fn breaks(&mut self, what: &str, found: impl Into<String>, cost: &str, fix: &str) {
        self.push(Severity::Breaks, what, found.into(), Some((cost, fix)));
    }

    fn push(&mut self, severity: Severity, what: &str, found: String, more: Option<(&str, &str)>) {
        let non_empty = |text: &str| Some(text.to_owned()).filter(|text| !text.is_empty());
        let (cost, fix) =
            more.map_or((None, None), |(cost, fix)| (non_empty(cost), non_empty(fix)));
        let (place, what) = (self.place.clone(), what.to_owned());
        self.all.push(Finding { place, what, severity, found, cost, fix });
    }
}

/// All findings; `--json` prints it as it is.
#[derive(Debug, Serialize)]
pub struct Diagnosis {
    /// Whether no finding will hurt or break a run.
    pub ok: bool,
    /// In the order of the checks.
    pub findings: Vec<Finding>,
}

/// Checks the target and this machine.
///
/// # Errors
/// If a config cannot be read, or the check is interrupted. Test files are removed first, and the
/// error names those that cannot be removed. Problems of a target are findings, not errors.
pub fn doctor(args: &DoctorArgs) -> Result<Diagnosis> {
    let patience = Patience { limit: args.timeout, stop: StopSignal::at_signals()? };
    let mut all = of_machine(&HostInfo::here());
    if args.target.ends_with(".toml") {
        all.extend(config::look(args, &patience)?);
    } else {
        all.extend(look(&args.target, args.purpose, FolderOrigin::MustExist, &patience));
    }
    if patience.stop.is_set() {
        let hung = all.iter().filter(|finding| finding.what == ANSWERS);
        let hung: String = hung.map(|of| format!("; {}: {}", of.place, of.found)).collect();
        bail!("interrupted{hung}");
    }
    Ok(Diagnosis::new(all))
}

/// Name of the finding about a step that does not return.
const ANSWERS: &str = "answers";

/// Time limit of a step, and the signal that ends it earlier.
#[derive(Clone, Debug)]
struct Patience {
    limit: Duration,
    stop: StopSignal,
}

/// Maximum time until a step ends after a signal: a step on a file system takes milliseconds.
const GRACE: Duration = Duration::from_secs(2);

impl Patience {
    fn stage(&self, what: &str) -> Stage {
        Stage::begin(what, self.limit).warn_after([self.limit; 3]).or_when(&self.stop.0, GRACE)
    }
}

/// Whether the run creates a missing folder, or the folder must exist.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FolderOrigin {
    ByRun,
    MustExist,
}

fn look(place: &str, purpose: Purpose, made: FolderOrigin, patience: &Patience) -> Vec<Finding> {
    if Location::new(place).is_s3() {
        return bucket::look(place, purpose, patience);
    }
    folder::look(place, purpose, made, patience)
}

/// Findings about this machine.
#[must_use]
pub fn of_machine(facts: &HostInfo) -> Vec<Finding> {
    machine::judge(facts)
}

/// Findings about the file system at `place`.
#[must_use]
pub fn of_mount(place: &str, facts: &MountInfo, purpose: Purpose) -> Vec<Finding> {
    let mut found = Findings::of(place);
    mount::judge(facts, purpose, &mut found);
    found.all
}

/// Findings about a bucket.
#[must_use]
pub fn of_bucket(place: &str, facts: &BucketInfo) -> Vec<Finding> {
    let mut found = Findings::of(place);
    bucket::judge(facts, &mut found);
    found.all
}

/// Labels in the text of findings whose name in `--json` is different.
const LABELS: [(&str, &str); 17] = [
    (ANSWERS, "response"),
    ("a durable file", "fsync latency"),
    ("cache", "page cache"),
    ("direct IO", "direct I/O"),
    ("errors", "error handling"),
    ("If-None-Match of parts", "multipart If-None-Match"),
    ("life cycle", "lifecycle rules"),
    ("locks", "file locks"),
    ("new files", "exclusive create"),
    ("new names", "exclusive rename"),
    ("parts", "multipart uploads"),
    ("place", "location"),
    ("removing", "delete access"),
    ("reserved space", "preallocation"),
    ("room", "needed space"),
    ("shared blocks", "reflinks"),
    ("writing", "write access"),
];

fn label(what: &str) -> &str {
    LABELS.iter().find(|(name, _)| *name == what).map_or(what, |(_, label)| label)
}

impl Diagnosis {
    fn new(findings: Vec<Finding>) -> Self {
        let ok = findings.iter().all(|finding| finding.severity < Severity::Hurts);
        Diagnosis { ok, findings }
    }

    /// Text for the terminal: by place, the worst findings first.
    #[must_use]
    pub fn text(&self) -> String {
        let width = self.findings.iter().map(|f| label(&f.what).len()).max().unwrap_or(0);
        let mut text = String::new();
        let mut places: Vec<&str> = Vec::new();
        for finding in &self.findings {
            if !places.contains(&finding.place.as_str()) {
                places.push(&finding.place);
            }
        }
        for place in places {
            text += &format!("{place}\n");
            let mut here: Vec<_> = self.findings.iter().filter(|f| f.place == place).collect();
            here.sort_by_key(|finding| std::cmp::Reverse(finding.severity));
            for Finding { what, severity, found, cost, fix, .. } in here {
                let word = match severity {
                    Severity::Fine => "fine  ",
                    Severity::Note => "note  ",
                    Severity::Hurts => "HURTS ",
                    Severity::Breaks => "BREAKS",
                };
                text += &format!("  {word}  {:<width$}  {found}", label(what));
                let indent = " ".repeat(width + 12);
                let fix = fix.as_ref().map(|fix| format!("fix: {fix}"));
                for line in cost.iter().chain(&fix) {
                    text += &format!(";\n{indent}{line}");
                }
                text += "\n";
            }
        }
        let of = |severity| self.findings.iter().filter(|f| f.severity == severity).count();
        let (breaks, hurts) = (of(Severity::Breaks), of(Severity::Hurts));
        let all = self.findings.len();
        text + &match breaks + hurts {
            0 => format!("{all} checks: no problem found\n"),
            _ => format!("{all} checks: {breaks} will break a run, {hurts} will hurt it\n"),
        }
    }
}
