//! `feedline ckpt doctor`: tests what a store supports for checkpoints, and lists which other files
//! a folder of steps has.

use std::sync::Arc;
use std::time::Instant;

use anyhow::Result;
use clap::Args;
use serde::Serialize;
use storage::{ByteSize, Error, Key, ProcessIdentity, Storage, write_all};

use super::CkptOutput;
use super::leftovers::{Leftover, leftovers};
use crate::ui::output::steps_named;
use crate::ui::step_folder::not_a_step;
use crate::ui::terminal::FactTable;

/// Arguments of `feedline ckpt doctor`.
#[derive(Debug, Args)]
pub struct DoctorArgs {
    /// Folder of steps, existing or planned. A few small files are written to it and removed.
    #[arg(value_name = "FOLDER")]
    pub folder: String,
    /// Print JSON, with units in the keys.
    #[arg(long)]
    pub json: bool,
}

/// The output of `feedline ckpt doctor`; `--json` prints it as it is.
#[derive(Debug, Serialize)]
struct Diagnosis {
    folder: String,
    file_system: String,
    engine: String,
    engine_why: String,
    direct_io: bool,
    align_bytes: u32,
    free_bytes: Option<u64>,
    /// Time to make a file of 4 KiB durable and visible, the median of several.
    commit_ms: Option<f64>,
    /// Time to make a folder visible, the median of several.
    publish_ms: Option<f64>,
    probes: Vec<Probe>,
    steps: usize,
    leftovers: Vec<Leftover>,
}

/// Something that checkpoints rely on.
#[derive(Debug, Serialize)]
struct Probe {
    what: &'static str,
    /// Its label in the text.
    #[serde(skip)]
    label: &'static str,
    ok: bool,
    finding: String,
}

/// Times are the median of this many measurements.
const ROUNDS: usize = 5;

/// Name of each probe in `--json`, and its label in the text.
const ATOMIC_RENAME: (&str, &str) = ("a folder gets its name in one step", "atomic folder rename");
const NO_OVERWRITE: (&str, &str) = ("a file is never overwritten", "files not overwritten");
const NO_REPLACE: (&str, &str) = ("a name that is taken is refused", "existing name refused");
const SPACE_CHECK: (&str, &str) =
    ("a disk too small is found before the first byte", "space check before a save");

pub(crate) fn run(args: &DoctorArgs) -> Result<CkptOutput> {
    let store = not_a_step(&args.folder, "examine")?;
    let scratch = Key::new(format!(".tmp-doctor-{}", ProcessIdentity::new()))?;
    let mut found = Diagnosis::of(&store)?;
    found.probe(&*store, &scratch);
    store.delete_folder(&scratch)?;
    let ok = found.probes.iter().all(|probe| probe.ok);
    CkptOutput::new(args.json, &found, found.text(), ok)
}

impl Diagnosis {
    fn of(store: &Arc<dyn Storage>) -> Result<Self> {
        let profile = store.profile();
        Ok(Diagnosis {
            folder: store.display(&Key::root()),
            file_system: profile.file_system.clone(),
            engine: format!("{:?}", profile.engine).to_lowercase(),
            engine_why: profile.engine_why.clone(),
            direct_io: profile.direct,
            align_bytes: profile.align_bytes,
            free_bytes: store.free_bytes()?,
            commit_ms: None,
            publish_ms: None,
            probes: Vec::new(),
            steps: steps_named(&**store)?.len(),
            leftovers: leftovers(&**store)?,
        })
    }

    fn probe(&mut self, store: &dyn Storage, scratch: &Key) {
        match store.has_atomic_publish(&Key::root()) {
            Ok(true) => self.probe_folders(store, scratch),
            Ok(false) => self.probe_objects(store, scratch),
            Err(error) => {
                self.add(&ATOMIC_RENAME, Err(error), |()| String::new());
            }
        }
        let overwrite = || write_all(store, &scratch.join("done-0/a")?, &[0]).map(drop);
        self.add(&NO_OVERWRITE, exists(overwrite()), |()| "yes".to_owned());
        if let Some(free) = self.free_bytes {
            let wanted = free.saturating_add(1 << 30);
            let outcome = match scratch.join("large").and_then(|key| store.create(&key, wanted)) {
                Err(Error::NoSpace { .. }) => Ok("yes"),
                // Thin volumes and quotas do not report it.
                Ok(_) => Ok("no; a save checks the free space first, and reserves none"),
                Err(error) => Err(error),
            };
            self.add(&SPACE_CHECK, outcome, str::to_owned);
        }
    }

    /// Without an atomic folder rename, a step exists as soon as its last object exists.
    fn probe_objects(&mut self, store: &dyn Storage, scratch: &Key) {
        let mut commits = Vec::new();
        let outcome = (0..ROUNDS).try_for_each(|round| {
            let started = Instant::now();
            write_all(store, &scratch.join(&format!("done-{round}/a"))?, &[0; 4096])?;
            commits.push(millis(started));
            Ok(())
        });
        let finding = |()| "no; a step exists when its commit object does".to_owned();
        self.add(&ATOMIC_RENAME, outcome, finding);
        self.commit_ms = median(commits);
    }

    fn probe_folders(&mut self, store: &dyn Storage, scratch: &Key) {
        let page = [0; 4096];
        let (mut commits, mut publishes) = (Vec::new(), Vec::new());
        let outcome = (0..ROUNDS).try_for_each(|round| {
            let (staged, done) = (format!("staged-{round}/a"), format!("done-{round}"));
            let started = Instant::now();
            write_all(store, &scratch.join(&staged)?, &page)?;
            commits.push(millis(started));
            let started = Instant::now();
            store.publish(&scratch.join(&format!("staged-{round}"))?, &scratch.join(&done)?)?;
            publishes.push(millis(started));
            Ok(())
        });
        self.add(&ATOMIC_RENAME, outcome, |()| "yes".to_owned());
        (self.commit_ms, self.publish_ms) = (median(commits), median(publishes));

        let refused = || {
            write_all(store, &scratch.join("staged/a")?, &page)?;
            store.publish(&scratch.join("staged")?, &scratch.join("done-0")?)
        };
        self.add(&NO_REPLACE, exists(refused()), |()| "yes".to_owned());
    }

    fn add<T>(
        &mut self,
        &(what, label): &(&'static str, &'static str),
        outcome: storage::Result<T>,
        text: impl FnOnce(T) -> String,
    ) {
        let (ok, finding) = match outcome {
            Ok(found) => (true, text(found)),
            Err(error) => (false, storage::one_line(&error)),
        };
        self.probes.push(Probe { what, label, ok, finding });
    }

    fn text(&self) -> String {
        let mut facts = FactTable::default();
        facts.add("file system", &self.file_system);
        facts.add("engine", format!("{}: {}", self.engine, self.engine_why));
        let direct = if self.direct_io { "direct I/O" } else { "buffered I/O" };
        facts.add("large writes", format!("{direct}, aligned to {} bytes", self.align_bytes));
        if let Some(free) = self.free_bytes {
            facts.add("free space", ByteSize(free));
        }
        for (label, ms) in [("file commit", self.commit_ms), ("folder rename", self.publish_ms)] {
            facts.add(label, ms.map_or_else(|| "-".to_owned(), |ms| format!("{ms:.2} ms")));
        }
        for probe in &self.probes {
            facts.add(probe.label, &probe.finding);
        }
        facts.add("steps", self.steps);
        let mut text = format!("{}\n{}", self.folder, facts.text());
        for left in &self.leftovers {
            text += &format!("  {} ({}): {}\n", left.name, ByteSize(left.bytes), left.meaning);
        }
        text
    }
}

/// Succeeds if an operation was refused because the name exists.
fn exists(outcome: storage::Result<()>) -> storage::Result<()> {
    match outcome {
        Err(Error::Exists { .. }) => Ok(()),
        Ok(()) => Err(Error::Unsupported {
            operation: "refuse to overwrite",
            object: "an existing name".to_owned(),
        }),
        Err(error) => Err(error),
    }
}

fn millis(started: Instant) -> f64 {
    started.elapsed().as_secs_f64() * 1e3
}

fn median(mut all: Vec<f64>) -> Option<f64> {
    all.sort_by(f64::total_cmp);
    all.get(all.len() / 2).copied()
}
