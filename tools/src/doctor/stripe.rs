//! `feedline stripe`: the striping layout of files on Lustre.

use std::path::{Path, PathBuf};

use anyhow::{Result, ensure};
use clap::{Args, Subcommand, ValueEnum};
use serde::Serialize;
use storage::ByteSize;
use storage::fs::lustre::{LayoutComponent, Purpose, Recommendation, Striping, target_count};

/// Subcommands of `feedline stripe`.
#[derive(Debug, Subcommand)]
pub enum StripeVerb {
    /// Print the layout of a file, or the default layout of a folder.
    ///
    /// Exit code 0: printed. 2: the path is not on Lustre, or cannot be read.
    #[command(after_help = "\
Examples:
  feedline stripe get /lustre/corpus
  feedline stripe get /lustre/corpus/wiki_text_document.bin --json")]
    Get(GetArgs),
    /// Set the default layout of a folder, or create an empty file with a layout.
    ///
    /// The layout is read back and compared, because some sites ignore layouts that programs other
    /// than `lfs` set. Files that are already in the folder keep their layout.
    ///
    /// Exit code 0: set. 1: Lustre chose another layout. 2: it cannot be set.
    #[command(after_help = "\
Examples:
  feedline stripe set /lustre/run/ckpt --count 4 --size 4MiB
  feedline stripe set /lustre/corpus --part 1GiB:4:4MiB --part end:all:4MiB")]
    Set(SetArgs),
    /// Print the layout that suits a file, the reason, and the command that sets it.
    ///
    /// Exit code 0.
    #[command(after_help = "\
Examples:
  feedline stripe recommend --bytes 2TB --for data --nodes 64
  feedline stripe recommend --bytes 4GiB --for checkpoint --nodes 512 --targets 96")]
    Recommend(RecommendArgs),
}

/// Arguments of `feedline stripe get`.
#[derive(Debug, Args)]
pub struct GetArgs {
    /// File or folder.
    pub path: PathBuf,
    /// Print JSON, with units in the keys.
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `feedline stripe set`.
#[derive(Debug, Args)]
pub struct SetArgs {
    /// A folder, or a file that does not exist yet.
    pub path: PathBuf,
    /// Stripe count: a number, `all`, or 0 for the default of the file system.
    #[arg(long, value_name = "N|all", value_parser = count, default_value = "0")]
    pub count: u16,
    /// Stripe size, a multiple of 64KiB [default: that of the file system]
    #[arg(long, value_name = "SIZE")]
    pub size: Option<ByteSize>,
    /// Pool of targets [default: any]
    #[arg(long, value_name = "NAME", default_value = "", hide_default_value = true)]
    pub pool: String,
    /// A component of a progressive layout, in place of --count and --size.
    ///
    /// `1GiB:4:4MiB` means 4 stripes of 4 MiB up to 1 GiB of the file; the last component ends at
    /// `end`. Given several times, in order.
    #[arg(
        long,
        value_name = "END:COUNT:SIZE",
        value_parser = part,
        conflicts_with_all = ["count", "size"]
    )]
    pub part: Vec<(u64, u16, u32)>,
    /// Print JSON, with units in the keys.
    #[arg(long)]
    pub json: bool,
}

/// Use of a file.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum For {
    /// .idx files, manifests and other small files.
    Index,
    /// Token files, which all nodes read in small requests.
    Data,
    /// Checkpoint files with one writer each.
    Checkpoint,
    /// A file that all processes write to.
    Shared,
}

/// Arguments of `feedline stripe recommend`.
#[derive(Debug, Args)]
pub struct RecommendArgs {
    /// Size of the file.
    #[arg(long, value_name = "SIZE")]
    pub bytes: ByteSize,
    /// Use of the file.
    #[arg(long = "for", value_enum)]
    pub purpose: For,
    /// Nodes that read the file, or processes that write it.
    #[arg(long, value_name = "N", default_value_t = 1)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..))]
    pub nodes: u32,
    /// Targets of the file system [default: as this Lustre client reports]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub targets: Option<u32>,
    /// Print JSON, with units in the keys.
    #[arg(long)]
    pub json: bool,
}

fn count(text: &str) -> Result<u16, String> {
    match text {
        "all" => Ok(LayoutComponent::ALL),
        _ => text.parse().map_err(|_| "expected a number of targets, or all".to_owned()),
    }
}

fn part(text: &str) -> Result<(u64, u16, u32), String> {
    let expected = || "expected END:COUNT:SIZE, such as 1GiB:4:4MiB or end:all:4MiB".to_owned();
    let [end, stripes, size] =
        <[&str; 3]>::try_from(text.split(':').collect::<Vec<_>>()).map_err(|_| expected())?;
    let end = if end == "end" { u64::MAX } else { end.parse::<ByteSize>()?.0 };
    let size = u32::try_from(size.parse::<ByteSize>()?.0).map_err(|_| expected())?;
    Ok((end, count(stripes)?, size))
}

/// The output of `feedline stripe`; `--json` prints it as it is.
#[derive(Debug, Serialize)]
pub struct Answer {
    /// The file or folder.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
    /// The components of the layout; none for the default of the file system.
    pub parts: Vec<ComponentReport>,
    /// The reason for the layout, or the fault.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
    /// The command that sets the layout.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub set: Option<String>,
    /// Whether the layout is as requested.
    pub ok: bool,
    #[serde(skip)]
    text: String,
}

/// A component of a layout.
#[derive(Debug, Serialize)]
pub struct ComponentReport {
    start_bytes: u64,
    /// Absent for the end of the file.
    end_bytes: Option<u64>,
    /// Absent for the default of the file system.
    stripe_bytes: Option<u32>,
    /// Absent for the default of the file system; -1 for all.
    stripe_count: Option<i32>,
    pool: String,
    on_mdt: bool,
    targets: Vec<u32>,
}

impl ComponentReport {
    fn of(part: &LayoutComponent) -> Self {
        ComponentReport {
            start_bytes: part.start,
            end_bytes: Some(part.end).filter(|end| *end != u64::MAX),
            stripe_bytes: Some(part.stripe_bytes).filter(|bytes| *bytes > 0),
            stripe_count: match part.stripe_count {
                0 => None,
                LayoutComponent::ALL => Some(-1),
                count => Some(count.into()),
            },
            pool: part.pool.clone(),
            on_mdt: part.on_mdt,
            targets: part.targets.clone(),
        }
    }
}

impl StripeVerb {
    /// Whether to print JSON.
    #[must_use]
    pub fn json(&self) -> bool {
        match self {
            StripeVerb::Get(args) => args.json,
            StripeVerb::Set(args) => args.json,
            StripeVerb::Recommend(args) => args.json,
        }
    }
}

impl Answer {
    fn of(path: &Path, striping: Option<&Striping>) -> Self {
        let name = path.display().to_string();
        let fact =
            striping.map_or("default layout of the file system".to_owned(), ToString::to_string);
        let targets = striping.into_iter().flat_map(|s| &s.parts).flat_map(|part| &part.targets);
        let targets: Vec<String> = targets.map(|target| format!("OST{target:04x}")).collect();
        let on =
            if targets.is_empty() { String::new() } else { format!(" ({})", targets.join(" ")) };
        Answer {
            path: Some(name.clone()),
            parts: striping.iter().flat_map(|s| &s.parts).map(ComponentReport::of).collect(),
            why: None,
            set: None,
            ok: true,
            text: format!("{name}: {fact}{on}\n"),
        }
    }

    /// Text for the terminal.
    #[must_use]
    pub fn text(&self) -> &str {
        &self.text
    }
}

/// Runs a command.
///
/// # Errors
/// If the path is not on Lustre, or Lustre refuses the layout.
pub fn stripe(verb: &StripeVerb) -> Result<Answer> {
    match verb {
        StripeVerb::Get(args) => Ok(Answer::of(&args.path, Striping::of(&args.path)?.as_ref())),
        StripeVerb::Set(args) => set(args),
        StripeVerb::Recommend(args) => Ok(recommend(args)),
    }
}

fn set(args: &SetArgs) -> Result<Answer> {
    let requested = args.requested()?;
    let actual = requested.set(&args.path)?;
    let mut answer = Answer::of(&args.path, actual.as_ref());
    if !actual.is_some_and(|actual| actual.grants(&requested)) {
        let why = format!(
            "cannot set the layout: expected {requested} (hint: allow other programs than lfs by \
             llite.*.enable_setstripe_gid, or set fewer targets)"
        );
        answer.text += &format!("{why}\n");
        (answer.ok, answer.why) = (false, Some(why));
    }
    Ok(answer)
}

impl SetArgs {
    fn requested(&self) -> Result<Striping> {
        let given = !self.part.is_empty() || self.count > 0 || self.size.is_some();
        ensure!(
            given || !self.pool.is_empty(),
            "cannot set a layout: expected --count, --size, --pool or --part, found none"
        );
        let size = self.size.map_or(0, |size| size.0);
        let whole = (u64::MAX, self.count, u32::try_from(size)?);
        let mut parts = Vec::new();
        let mut start = 0;
        let components = if self.part.is_empty() { &[whole][..] } else { &self.part };
        for &(end, stripe_count, stripe_bytes) in components {
            let pool = self.pool.clone();
            let whole = LayoutComponent::whole(stripe_count, stripe_bytes);
            parts.push(LayoutComponent { start, end, pool, ..whole });
            start = end;
        }
        Ok(Striping { parts })
    }
}

fn recommend(args: &RecommendArgs) -> Answer {
    let purpose = match args.purpose {
        For::Index => Purpose::Index,
        For::Data => Purpose::Data,
        For::Checkpoint => Purpose::Checkpoint,
        For::Shared => Purpose::Shared,
    };
    let targets = args.targets.or_else(target_count);
    let Recommendation { stripe_count, stripe_bytes, reason } =
        Recommendation::new(purpose, args.bytes.0, args.nodes, targets);
    let part = LayoutComponent::whole(stripe_count, stripe_bytes);
    let count = if stripe_count == LayoutComponent::ALL {
        "all".to_owned()
    } else {
        stripe_count.to_string()
    };
    let size = ByteSize(stripe_bytes.into()).to_string().replace(' ', "");
    let set = format!("feedline stripe set FOLDER --count {count} --size {size}");
    Answer {
        path: None,
        text: format!("{part}: {reason}\n{set}\n"),
        parts: vec![ComponentReport::of(&part)],
        why: Some(reason),
        set: Some(set),
        ok: true,
    }
}
