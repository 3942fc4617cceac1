//! Checks everything that the config of a run names: whether it exists, fits, and suits its use.

use std::collections::BTreeSet;
use std::path::Path;

use anyhow::Result;
use recipe::config::{Config, Objective, Offload};
use recipe::plan::{PlanInputs, RunPlan};
use storage::probe::{MountInfo, ProbeFolder, cached_share};
use storage::{ByteSize, Key, Location};

use super::folder::path_of;
use super::{ANSWERS, DoctorArgs, Finding, Findings, FolderOrigin, Patience, Purpose};
use crate::ui::inspect_target::similar_names;

/// Local file systems.
const LOCAL: [&str; 8] = ["ext4", "xfs", "btrfs", "f2fs", "zfs", "tmpfs", "ramfs", "overlay"];

/// From this share on, a second run over the data reads from this machine's page cache.
const CACHED_SHARE_MIN: f64 = 0.2;

pub(super) fn look(args: &DoctorArgs, patience: &Patience) -> Result<Vec<Finding>> {
    let config = Config::load(&args.target, &args.set)?;
    let mut probe = ConfigProbe { patience, all: Vec::new(), seen: BTreeSet::new() };
    for corpus in &config.data.train {
        probe.all.extend(dataset(&corpus.path, &config, patience));
        let folder = Location::new(&corpus.path).parent().to_string();
        probe.look(&folder, Purpose::Data, FolderOrigin::MustExist);
    }
    probe.all.extend(index_cache(&config.cache_dir(), patience));
    probe.all.extend(tokenizer(&config.data.tokenizer, patience));
    let dir = config.checkpoint_dir();
    probe.look(&dir, Purpose::Checkpoint, FolderOrigin::ByRun);
    probe.all.extend(room(&dir, &config, patience));
    // Logs are always written there.
    probe.look(&config.run.dir, Purpose::Checkpoint, FolderOrigin::ByRun);
    if let Some(drain_to) = &config.checkpoint.drain_to {
        probe.look(drain_to, Purpose::Checkpoint, FolderOrigin::ByRun);
        probe.all.extend(room(drain_to, &config, patience));
    }
    if let Some(cache) = &config.data.local_cache {
        probe.look(&cache.dir, Purpose::Both, FolderOrigin::ByRun);
        probe.all.extend(check_is_local(&cache.dir, "local cache", patience));
    }
    probe.offloaded(&config);
    Ok(probe.all)
}

/// Checks each place once: several missing folders may be below the same existing one.
struct ConfigProbe<'a> {
    patience: &'a Patience,
    all: Vec<Finding>,
    seen: BTreeSet<(Purpose, String)>,
}

impl ConfigProbe<'_> {
    fn look(&mut self, place: &str, purpose: Purpose, made: FolderOrigin) {
        let nearest = match Location::new(place).is_s3() {
            true => place.to_owned(),
            false => nearest(place, self.patience).unwrap_or_else(|| place.to_owned()),
        };
        let is_made = made == FolderOrigin::ByRun;
        let checked = if is_made { nearest.clone() } else { place.to_owned() };
        if self.seen.insert((purpose, checked)) {
            self.all.extend(super::look(place, purpose, made, self.patience));
        } else if is_made && nearest != place {
            let mut found = Findings::of(place);
            found.fine(
                "place",
                format!(
                    "does not exist yet; will be created below {nearest}, which is checked above"
                ),
            );
            self.all.extend(found.all);
        }
    }

    /// Folders of offloaded optimizer state and activations.
    fn offloaded(&mut self, config: &Config) {
        let plan = RunPlan::new(config, &PlanInputs::default());
        let disks = config.optim.offload.folders(0).len() as u64;
        let each = plan.offload.map_or(0, |state| state.disk_bytes.div_ceil(disks.max(1)));
        for place in places(&config.optim.offload) {
            self.look(&place, Purpose::Checkpoint, FolderOrigin::MustExist);
            self.all.extend(check_is_local(&place, "offload", self.patience));
            self.all.extend(states(&place, each, self.patience));
        }
        for place in places(&config.parallel.activation_offload) {
            self.look(&place, Purpose::Checkpoint, FolderOrigin::MustExist);
            self.all.extend(check_is_local(&place, "offload", self.patience));
        }
    }
}

/// Maximum number of ranks of a node whose folders are checked.
const LOCAL_RANKS_MAX: usize = 64;

/// Folders of the first rank of this node, and the existing ones of other ranks.
fn places(offload: &Offload) -> Vec<String> {
    let mut places = offload.folders(0);
    for place in (1..LOCAL_RANKS_MAX).flat_map(|rank| offload.folders(rank)) {
        if !places.contains(&place) && path_of(&place).exists() {
            places.push(place);
        }
    }
    places
}

/// Reports orphaned state in a folder, and whether two generations of another rank fit.
fn states(place: &str, need_bytes: u64, patience: &Patience) -> Vec<Finding> {
    let mut found = Findings::of(place);
    let owned = place.to_owned();
    let result = patience.stage("list offloaded state").run(move || -> ckpt::Result<_> {
        let store = storage::open_url(&owned)?;
        Ok((ckpt::offload::marked(&store)?, store.free_bytes()?))
    });
    let (all, free) = match result {
        Ok(Ok(result)) => result,
        Ok(Err(error)) => {
            found.breaks("states", error.to_string(), "the run does not start", "");
            return found.all;
        }
        Err(error) => {
            found.breaks(ANSWERS, error.to_string(), "the run waits as long", "");
            return found.all;
        }
    };
    let left: Vec<_> = all.iter().filter(|state| !state.is_open).collect();
    let left_bytes: u64 = left.iter().map(|state| state.bytes).sum();
    if let Some(first) = left.first() {
        let (count, bytes) = (left.len(), ByteSize(left_bytes));
        found.note(
            "states",
            format!(
                "orphaned optimizer state of {count} ranks, {bytes}, such as of {}",
                first.owner
            ),
            "it takes space: a run that resumes here reuses its own and removes that of ranks it \
             no longer has; a run that resumes elsewhere does not",
            &format!("run feedline offload ls {place}, then again with --remove RUN"),
        );
    } else {
        found.fine("states", format!("no orphaned optimizer state; {} in use", all.len()));
    }
    let fact = format!("two generations of one rank take {}", ByteSize(need_bytes));
    match free {
        // The orphaned state may belong to this run, which reuses it.
        Some(free) if free.saturating_add(left_bytes) < need_bytes => {
            let fact = format!("{fact}; {} free", ByteSize(free));
            let fix = "set optim.offload to a larger disk, or to several";
            found.breaks("room", fact, "the first update fails", fix);
        }
        Some(free) => found.fine("room", format!("{fact}; {} free", ByteSize(free))),
        None => found.fine("room", format!("{fact}; the store reports no limit")),
    }
    found.all
}

/// The nearest existing folder of a path; `None` if it cannot be found.
fn nearest(place: &str, patience: &Patience) -> Option<String> {
    let path = path_of(place);
    let result = patience.stage("find the mount").run(move || MountInfo::of(&path));
    result.and_then(|facts| facts).ok().map(|facts| facts.nearest)
}

/// Checks whether the sample order can be stored. Otherwise every start of a run builds it.
fn index_cache(dir: &str, patience: &Patience) -> Vec<Finding> {
    if Location::new(dir).is_s3() {
        return super::look(dir, Purpose::Both, FolderOrigin::ByRun, patience);
    }
    let mut found = Findings::of(dir);
    let path = path_of(dir);
    let tried = patience.stage("write a test file").run(move || {
        let facts = MountInfo::of(&path)?;
        ProbeFolder::new(Path::new(&facts.nearest))?.remove()?;
        storage::Result::Ok(facts)
    });
    match tried {
        Ok(Ok(facts)) if facts.is_there => found.fine("index cache", "writable"),
        Ok(Ok(facts)) => {
            let fact = format!("does not exist yet; {} is writable", facts.nearest);
            found.fine("index cache", fact);
        }
        Ok(Err(error)) => found.hurts(
            "index cache",
            format!("not writable: {error}"),
            "every start builds the sample order again: seconds for ten million documents, minutes \
             for a billion",
            "set data.cache_dir to a folder that the run may write to, or run feedline index build \
             first",
        ),
        Err(error) => found.breaks(ANSWERS, error.to_string(), "the run waits as long", ""),
    }
    found.all
}

/// The error of opening a dataset, and a similar prefix that exists.
struct AbsentDataset {
    error: storage::Error,
    near: Option<String>,
}

impl From<storage::Error> for AbsentDataset {
    fn from(error: storage::Error) -> Self {
        AbsentDataset { error, near: None }
    }
}

/// Checks whether the files of a corpus exist, how large they are, and how much of them is cached.
fn dataset(prefix: &str, config: &Config, patience: &Patience) -> Vec<Finding> {
    let mut found = Findings::of(Location::new(prefix).without_options().to_string());
    let ends: &[&str] = match config.objective() {
        Objective::Encdec => &["_context", "_target", "_target_offset"],
        _ => &[""],
    };
    let owned = Location::new(prefix);
    let names: Vec<String> = ends
        .iter()
        .flat_map(|end| [".idx", ".bin"].map(|suffix| format!("{end}{suffix}")))
        .collect();
    let stage = patience.stage("open the dataset");
    let opened = stage.run(move || -> Result<Vec<(u64, Option<f64>)>, AbsentDataset> {
        let (store, key) = owned.locate()?;
        let open = |suffix: &String| {
            let object = store.open(&key.with_suffix(suffix)?)?;
            Ok((object.len_bytes(), cached_share(&*object)))
        };
        let files: storage::Result<_> = names.iter().map(open).collect();
        let near = || similar_names(&owned, &*store, &key).into_iter().next();
        files.map_err(|error| AbsentDataset { error, near: near() })
    });
    match opened {
        Ok(Ok(files)) => {
            let bytes: u64 = files.iter().skip(1).step_by(2).map(|(bytes, _)| bytes).sum();
            found.fine("dataset", format!("{} of tokens", ByteSize(bytes)));
            let cached: f64 =
                files.iter().map(|(bytes, share)| share.unwrap_or(0.0) * *bytes as f64).sum();
            let all: u64 = files.iter().map(|(bytes, _)| bytes).sum();
            let share = cached / all.max(1) as f64;
            let fact = format!("{:.0} % is in this machine's page cache", share * 100.0);
            if share >= CACHED_SHARE_MIN {
                found.note(
                    "cache",
                    fact,
                    "a run reads them from memory; a measurement shows memory, not the store",
                    "measure with feedline bench, which reports what was cached",
                );
            } else if files.iter().any(|(_, share)| share.is_some()) {
                found.fine("cache", fact);
            }
        }
        Ok(Err(AbsentDataset { error, near })) => {
            let fix = match near {
                Some(near) => format!("set data.train = \"{near}\", which exists"),
                None => "set data.train = \"PREFIX\" of a .bin and .idx, as preprocess prints it"
                    .to_owned(),
            };
            found.breaks("dataset", error.to_string(), "the run does not start", &fix);
        }
        Err(error) => {
            found.breaks("dataset", error.to_string(), "the run waits as long and then fails", "");
        }
    }
    found.all
}

/// Checks whether the tokenizer can be opened, as a run opens it: its files, or the folder of its
/// files, must exist and fit together. `gpt2` and `null:30000` have none.
fn tokenizer(spec: &str, patience: &Patience) -> Vec<Finding> {
    let mut found = Findings::of("data.tokenizer");
    let Some((kind, files)) = spec.split_once(':').filter(|(kind, _)| *kind != "null") else {
        return found.all;
    };
    let owned = spec.to_owned();
    let stage = patience.stage(&format!("open the tokenizer {spec}"));
    let cost = "the run does not start, or prints no text";
    let fix = "set data.tokenizer = \"KIND:FILE\"";
    match stage.run(move || feed::open_tokenizer(&owned).map(|tokenizer| tokenizer.vocab_size())) {
        Ok(Ok(ids)) => found.fine(kind, format!("{files}, {ids} tokens")),
        Ok(Err(error)) => found.breaks(kind, error.to_string(), cost, fix),
        Err(error) => found.breaks(kind, error.to_string(), cost, fix),
    }
    found.all
}

/// Checks whether all checkpoints that exist at once fit: the retained ones, and the next.
fn room(dir: &str, config: &Config, patience: &Patience) -> Vec<Finding> {
    let mut found = Findings::of(Location::new(dir).without_options().to_string());
    let plan = RunPlan::new(config, &PlanInputs::default());
    let (one, need) = (plan.checkpoint.checkpoint_bytes, plan.checkpoint.disk_bytes_max);
    let fact = format!(
        "a checkpoint of {} parameters takes {}; up to {} are stored here at once",
        plan.parameters.total,
        ByteSize(one),
        ByteSize(need)
    );
    let owned = dir.to_owned();
    let free = patience.stage("query the free space").run(move || {
        let store = storage::open_url(&owned)?;
        let there = store.list(&Key::root()).map(|all| all.iter().map(|entry| entry.bytes).sum());
        Ok((store.free_bytes()?, there.unwrap_or(0_u64)))
    });
    match free.and_then(|outcome: storage::Result<_>| outcome) {
        // The existing bytes belong to steps that will be deleted.
        Ok((Some(free), there)) if free.saturating_add(there) < need => {
            let fits = free.saturating_add(there) / one.max(1);
            let fact = format!("{fact}; {} free, enough for {fits}", ByteSize(free));
            if fits < 2 {
                let cost = "a save fails, as the old step is kept until the new one is complete";
                let fix = "set checkpoint.dir to a larger disk";
                found.breaks("room", fact, cost, fix);
            } else {
                let fix = format!("set checkpoint.keep.last = {}, or use a larger disk", fits - 1);
                found.breaks("room", fact, "a later save fails", &fix);
            }
        }
        Ok((Some(free), _)) => found.fine("room", format!("{fact}; {} free", ByteSize(free))),
        Ok((None, _)) => {
            found.fine("room", format!("{fact}; the store reports no limit"));
        }
        Err(error) => {
            found.hurts("room", format!("{fact}; {error}"), "the checkpoints may not fit", "");
        }
    }
    found.all
}

/// Checks that a folder is on a local disk: a remote cache is as slow as the data, and an optimizer
/// update waits for the disk of its state.
fn check_is_local(dir: &str, what: &str, patience: &Patience) -> Vec<Finding> {
    let mut found = Findings::of(dir);
    let owned = path_of(dir);
    let result = patience.stage("find the mount").run(move || MountInfo::of(&owned));
    if let Ok(Ok(facts)) = result
        && !LOCAL.contains(&facts.file_system.as_str())
    {
        let (cost, fix) = match what {
            "offload" => (
                "each step waits for the network: 24 bytes per parameter, or all activations \
                 written and read",
                "use nvme:FOLDER on a disk of the node",
            ),
            _ => (
                "every sample is written once and read twice over the network",
                "set data.local_cache.dir to a disk of the node, such as /local or /tmp",
            ),
        };
        found.hurts(
            what,
            format!("on {}, not on a disk of this node", facts.file_system),
            cost,
            fix,
        );
    }
    found.all
}
