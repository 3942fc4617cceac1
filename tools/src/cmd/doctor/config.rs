//! All that a run's config names: whether it is there, fits, and suits.

use std::collections::BTreeSet;
use std::time::Duration;

use anyhow::Result;
use recipe::config::{Config, Objective};
use recipe::plan::{Known, Plan};
use storage::examine::{MountFacts, cached_share};
use storage::{ByteSize, Key, Stage};

use super::{DoctorArgs, Finding, Findings, Made, Purpose};

/// File systems of the machine itself.
const LOCAL: [&str; 8] = ["ext4", "xfs", "btrfs", "f2fs", "zfs", "tmpfs", "ramfs", "overlay"];

/// From here on a second run over the data is served by this machine's memory.
const CACHED_SHARE_MIN: f64 = 0.2;

pub(super) fn look(args: &DoctorArgs) -> Result<Vec<Finding>> {
    let config = Config::load(&args.target, &args.set)?;
    let mut all = Vec::new();
    let mut folders = BTreeSet::new();
    for corpus in &config.data.train {
        all.extend(dataset(&corpus.path, &config, args.timeout));
        if folders.insert(folder_of(&corpus.path)) {
            let place = folder_of(&corpus.path);
            all.extend(super::look(&place, Purpose::Data, Made::ByNobody, args.timeout));
        }
    }
    all.extend(tokenizer(&config.data.tokenizer, args.timeout));
    let dir = config.checkpoint_dir();
    all.extend(super::look(&dir, Purpose::Checkpoint, Made::ByRun, args.timeout));
    all.extend(room(&dir, &config, args.timeout));
    if let Some(far) = &config.checkpoint.drain_to {
        all.extend(super::look(far, Purpose::Checkpoint, Made::ByRun, args.timeout));
        all.extend(room(far, &config, args.timeout));
    }
    if let Some(near) = &config.data.local_cache {
        all.extend(super::look(&near.dir, Purpose::Both, Made::ByRun, args.timeout));
        all.extend(is_near(&near.dir, args.timeout));
    }
    Ok(all)
}

fn folder_of(prefix: &str) -> String {
    let (path, options) = prefix.split_once('?').map_or((prefix, ""), |(path, more)| (path, more));
    let folder = match path.rsplit_once('/') {
        Some(("", _)) => "/",
        Some((folder, _)) => folder,
        None => ".",
    };
    if options.is_empty() { folder.to_owned() } else { format!("{folder}?{options}") }
}

/// Whether the files of a corpus are there, how large they are, and whether they look cached.
fn dataset(prefix: &str, config: &Config, patience: Duration) -> Vec<Finding> {
    let mut found = Findings::of(prefix.split('?').next().unwrap_or(prefix));
    let ends: &[&str] = match config.objective() {
        Objective::Encdec => &["_context", "_target", "_target_offset"],
        _ => &[""],
    };
    let asked = prefix.to_owned();
    let names: Vec<String> = ends
        .iter()
        .flat_map(|end| [".idx", ".bin"].map(|suffix| format!("{end}{suffix}")))
        .collect();
    let stage = Stage::begin("open the dataset", patience);
    let opened = stage.run(move || -> storage::Result<Vec<(u64, Option<f64>)>> {
        let (store, key) = storage::locate(&asked)?;
        let open = |suffix: &String| {
            let object = store.open(&key.with_suffix(suffix)?)?;
            Ok((object.len_bytes(), cached_share(&*object)))
        };
        names.iter().map(open).collect()
    });
    match opened {
        Ok(Ok(files)) => {
            let bytes: u64 = files.iter().skip(1).step_by(2).map(|(bytes, _)| bytes).sum();
            found.fine("dataset", format!("{} of tokens", ByteSize(bytes)));
            let cached: f64 =
                files.iter().map(|(bytes, share)| share.unwrap_or(0.0) * *bytes as f64).sum();
            let all: u64 = files.iter().map(|(bytes, _)| bytes).sum();
            let share = cached / all.max(1) as f64;
            let told = format!("{:.0} % is in this machine's page cache", share * 100.0);
            if share >= CACHED_SHARE_MIN {
                found.note(
                    "cache",
                    told,
                    "nothing for a run; whatever is measured now is memory and not the store",
                    "feedline bench, which says what was cached",
                );
            } else if files.iter().any(|(_, share)| share.is_some()) {
                found.fine("cache", told);
            }
        }
        Ok(Err(error)) => found.breaks(
            "dataset",
            error.to_string(),
            "the run does not start",
            "data.train = \"PREFIX\" of a .bin and .idx, as `preprocess` names it at its end",
        ),
        Err(error) => {
            found.breaks("dataset", error.to_string(), "the run waits as long, and ends", "");
        }
    }
    found.all
}

/// Whether the files of a tokenizer are there. `gpt2` and `null:30000` have none.
fn tokenizer(spec: &str, patience: Duration) -> Vec<Finding> {
    let mut found = Findings::of("data.tokenizer");
    let Some((kind, files)) = spec.split_once(':').filter(|(kind, _)| *kind != "null") else {
        return found.all;
    };
    for file in files.split(',') {
        let asked = file.to_owned();
        let stage = Stage::begin(format!("open {file}"), patience);
        let opened = stage.run(move || {
            let (store, key) = storage::locate(&asked)?;
            store.open(&key).map(|object| object.len_bytes())
        });
        match opened.and_then(|outcome| outcome) {
            Ok(bytes) => found.fine(kind, format!("{file}, {}", ByteSize(bytes))),
            Err(error) => {
                let cost = "the run starts without text, or not at all";
                found.breaks(kind, error.to_string(), cost, "data.tokenizer = \"KIND:FILE\"");
            }
        }
    }
    found.all
}

/// Whether so many checkpoints fit as lie there at once: those that are kept, and the next.
fn room(dir: &str, config: &Config, patience: Duration) -> Vec<Finding> {
    let mut found = Findings::of(dir.split('?').next().unwrap_or(dir));
    let plan = Plan::new(config, &Known::default());
    let (one, due) = (plan.checkpoint.checkpoint_bytes, plan.checkpoint.disk_bytes_max);
    let told = format!(
        "a checkpoint of {} parameters is {}; up to {} lie here at once",
        plan.parameters.total,
        ByteSize(one),
        ByteSize(due)
    );
    let asked = dir.to_owned();
    let free = Stage::begin("ask for the space that is free", patience).run(move || {
        let store = storage::open_url(&asked)?;
        let there = store.list(&Key::root()).map(|all| all.iter().map(|entry| entry.bytes).sum());
        Ok((store.free_bytes()?, there.unwrap_or(0_u64)))
    });
    match free.and_then(|outcome: storage::Result<_>| outcome) {
        // What lies there already is of the steps that make room.
        Ok((Some(free), there)) if free.saturating_add(there) < due => {
            let fits = free.saturating_add(there) / one.max(1);
            let told = format!("{told}: {} are free, for {fits}", ByteSize(free));
            if fits < 2 {
                let cost = "a save fails, as the old step stays until the new one is complete";
                let fix = "checkpoint.dir on a larger disk";
                found.breaks("room", told, cost, fix);
            } else {
                let fix = format!("checkpoint.keep.last = {}, or a larger disk", fits - 1);
                found.breaks("room", told, "a later save fails", &fix);
            }
        }
        Ok((Some(free), _)) => found.fine("room", format!("{told}: {} are free", ByteSize(free))),
        Ok((None, _)) => {
            found.fine("room", format!("{told}; the store has no limit that it tells"));
        }
        Err(error) => found.hurts("room", format!("{told}: {error}"), "it may not fit", ""),
    }
    found.all
}

/// A cache on a disk that is as far away as the data is none.
fn is_near(dir: &str, patience: Duration) -> Vec<Finding> {
    let mut found = Findings::of(dir);
    let asked = dir.to_owned();
    let looked = Stage::begin("look where it is", patience)
        .run(move || MountFacts::of(std::path::Path::new(&asked)));
    if let Ok(Ok(facts)) = looked
        && !LOCAL.contains(&facts.file_system.as_str())
    {
        found.hurts(
            "local cache",
            format!("on {}, which is not of this node", facts.file_system),
            "every sample is written once and read twice over the network",
            "data.local_cache.dir on a disk of the node, as /local or /tmp",
        );
    }
    found.all
}
