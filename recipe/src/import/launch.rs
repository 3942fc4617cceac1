//! Finds the number of ranks of a run from its launchers, its `#SBATCH` lines and its variables.
//!
//! Launchers start each other: `srun torchrun train.py`. The innermost launcher with a number of
//! ranks counts; the others determine where it runs. Every flag becomes a key, so that none is
//! lost.

use std::collections::HashSet;
use std::path::Path;

use super::shell::program::base;
use super::shell::{Script, is_unknown};
use super::{SourceKey, plain};

/// Flags without a value.
const SWITCHES: [&str; 34] = [
    "allow-run-as-root",
    "bind-to-none",
    "contiguous",
    "cpu",
    "deepspeed-multinode",
    "exclusive",
    "fsdp",
    "gpu",
    "label",
    "main-training-function",
    "module",
    "multi-gpu",
    "no-kill",
    "no-local-rank",
    "no-python",
    "no-ssh",
    "no-ssh-check",
    "nv",
    "oversubscribe",
    "overcommit",
    "privileged",
    "quiet",
    "report-bindings",
    "rm",
    "save-pid",
    "standalone",
    "tag-output",
    "tpu",
    "unbuffered",
    "use-deepspeed",
    "use-env",
    "use-fsdp",
    "use-megatron-lm",
    "verbose",
];

/// Names of variables that count GPUs of a node, or nodes.
const VARIABLES: [(&str, &str); 5] = [
    ("GPUS_PER_NODE", "gpus"),
    ("NUM_GPUS_PER_WORKER", "gpus"),
    ("NNODES", "nodes"),
    ("NUM_NODES", "nodes"),
    ("NUM_WORKERS", "nodes"),
];

/// A hostfile has a line for each node.
const HOSTFILE_BYTES_MAX: u64 = 1 << 20;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Launcher {
    Torchrun,
    Deepspeed,
    Accelerate,
    Paddle,
    Colossal,
    Srun,
    Mpirun,
    /// Containers, `env`, `nohup` and `python` itself.
    Other,
}

/// A launcher, with its flags and their values.
#[derive(Debug)]
struct Launch {
    kind: Launcher,
    name: String,
    flags: Vec<(String, String)>,
}

/// The keys of everything about ranks. `file` is the script, `path` its path.
pub(super) fn keys(script: &Script, words: &[String], file: &str, path: &str) -> Vec<SourceKey> {
    let launches = split(words);
    let mut keys = Keys { file: file.to_owned(), all: Vec::new() };
    let counts = |launch: &&Launch| launch.kind != Launcher::Other;
    let inner = launches.iter().rev().find(counts).map(|it| it.kind);
    let mut is_counted = false;
    for launch in &launches {
        let decides = Some(launch.kind) == inner;
        is_counted |= decides && keys.launch(launch, path);
        if !decides {
            keys.starts_another(launch);
        }
    }
    let by_slurm = matches!(inner, None | Some(Launcher::Srun | Launcher::Mpirun));
    is_counted |= keys.batch(&script.batch, by_slurm && !is_counted, inner.is_some());
    for (name, target) in VARIABLES {
        if let Some(value) = script.variables.get(name) {
            let target = if is_counted { "counted" } else { target };
            keys.push(name.to_owned(), target, value);
        }
    }
    keys.all
}

/// The number of ranks is not missing if the caller gives it.
pub(super) fn take_given(keys: &mut [SourceKey], world: Option<u64>) {
    for key in keys.iter_mut().filter(|key| ["unfixed", "unread"].contains(&key.name.as_str())) {
        if world.is_some() {
            "given".clone_into(&mut key.name);
        }
    }
}

/// The launchers of a command, each with its flags.
fn split(words: &[String]) -> Vec<Launch> {
    let mut launches: Vec<Launch> = Vec::new();
    let mut at = 0;
    while at < words.len() {
        let word = &words[at];
        let module = (word == "-m").then(|| words.get(at + 1)).flatten();
        let next = match base(module.unwrap_or(word)) {
            "torchrun" | "torch.distributed.run" | "torch.distributed.launch" => Launcher::Torchrun,
            "deepspeed" | "deepspeed.launcher.runner" => Launcher::Deepspeed,
            "accelerate" | "accelerate.commands.launch" => Launcher::Accelerate,
            "paddle.distributed.launch" | "fleetrun" => Launcher::Paddle,
            "colossalai" => Launcher::Colossal,
            "srun" => Launcher::Srun,
            "mpirun" | "mpiexec" | "mpiexec.hydra" | "orterun" => Launcher::Mpirun,
            name if !word.starts_with('-') && is_other(name) => Launcher::Other,
            _ => {
                at += flag(words, at, &mut launches);
                continue;
            }
        };
        at += if module.is_some() { 2 } else { 1 };
        let name = module.unwrap_or(word);
        launches.push(Launch { kind: next, name: base(name).to_owned(), flags: Vec::new() });
    }
    launches
}

fn is_other(name: &str) -> bool {
    let names = [
        "env",
        "nohup",
        "time",
        "exec",
        "singularity",
        "apptainer",
        "docker",
        "podman",
        "numactl",
        "taskset",
        "timeout",
        "stdbuf",
        "sudo",
        "nice",
        "setsid",
        "conda",
        "nsys",
        "ncu",
        "xargs",
    ];
    names.contains(&name) || name.starts_with("python")
}

/// Reads a flag of the last launcher and returns its number of words.
fn flag(words: &[String], at: usize, launches: &mut [Launch]) -> usize {
    let Some(launch) = launches.last_mut() else { return 1 };
    let word = &words[at];
    if !word.starts_with('-') || word.len() < 2 {
        return 1;
    }
    let short = !word.starts_with("--") && launch.kind != Launcher::Mpirun;
    if let Some((flag, value)) = word.split_once('=') {
        launch.flags.push((flag.to_owned(), value.to_owned()));
        return 1;
    }
    // `-n4`
    let digits = word.get(2..).unwrap_or("");
    if short && !digits.is_empty() && digits.bytes().all(|c| c.is_ascii_digit()) {
        launch.flags.push((word[..2].to_owned(), digits.to_owned()));
        return 1;
    }
    let name = normal(word);
    let value = words.get(at + 1).filter(|next| {
        !SWITCHES.contains(&name.as_str()) && (!next.starts_with('-') || is_unknown(next))
    });
    launch.flags.push((word.clone(), value.cloned().unwrap_or_default()));
    1 + usize::from(value.is_some())
}

fn normal(flag: &str) -> String {
    flag.trim_start_matches('-').replace('_', "-").to_ascii_lowercase()
}

/// The unit that a flag of a launcher counts: GPUs of a node, nodes, or all ranks.
fn counted(kind: Launcher, flag: &str) -> Option<&'static str> {
    match (kind, normal(flag).as_str()) {
        // `-N` are nodes, `-n` are tasks.
        (Launcher::Srun, "n") => Some(if flag == "-n" { "world" } else { "nodes" }),
        (Launcher::Torchrun | Launcher::Paddle | Launcher::Colossal, "nproc-per-node")
        | (Launcher::Deepspeed, "num-gpus")
        | (Launcher::Srun, "ntasks-per-node") => Some("gpus"),
        (Launcher::Torchrun | Launcher::Paddle, "nnodes")
        | (Launcher::Deepspeed | Launcher::Colossal, "num-nodes")
        | (Launcher::Srun, "nodes") => Some("nodes"),
        (Launcher::Accelerate, "num-processes")
        | (Launcher::Srun, "ntasks")
        | (Launcher::Mpirun, "np" | "n" | "c") => Some("world"),
        _ => None,
    }
}

struct Keys {
    file: String,
    all: Vec<SourceKey>,
}

impl Keys {
    fn push(&mut self, key: String, name: &str, value: &str) {
        let (file, name) = (self.file.clone(), name.to_owned());
        self.all.push(SourceKey { file, key, name, value: plain(value) });
    }

    /// A count, or another value: a range of nodes, all GPUs of a node.
    fn count(&mut self, key: String, name: &str, value: &str) {
        let is_count = value.parse::<u32>().is_ok_and(|count| count > 0) || is_unknown(value);
        // `1:1` is 1.
        let fixed = value.split_once(':').filter(|(least, most)| least == most);
        match fixed {
            Some((count, _)) => self.push(key, name, count),
            None => self.push(key, if is_count { name } else { "unfixed" }, value),
        }
    }

    /// A count, as the items of a list: `0,1,2,3`.
    fn list(&mut self, key: String, name: &str, value: &str) {
        if is_unknown(value) {
            return self.push(key, name, value);
        }
        let count = value.split(',').filter(|item| !item.trim().is_empty()).count();
        self.push(format!("{key} {value}"), name, &count.to_string());
    }

    fn starts_another(&mut self, launch: &Launch) {
        for (flag, value) in &launch.flags {
            let (key, value) = (format!("{} {flag}", launch.name), value.clone());
            self.push(key, "outer", &value);
        }
    }

    /// Applies the flags of the launcher that counts. Returns whether they give a number of ranks.
    fn launch(&mut self, launch: &Launch, path: &str) -> bool {
        let before = self.all.len();
        for (flag, value) in &launch.flags {
            let key = flag.clone();
            if let Some(name) = counted(launch.kind, flag) {
                self.count(key, name, value);
                continue;
            }
            match (launch.kind, normal(flag).as_str()) {
                (Launcher::Deepspeed, "include" | "i") => self.include(key, value, launch, path),
                (Launcher::Deepspeed, "hostfile" | "h") => self.hostfile(key, value, launch, path),
                (Launcher::Paddle, "gpus" | "devices" | "xpus" | "npus") => {
                    self.list(key, "gpus", value);
                }
                (Launcher::Paddle, "ips") | (Launcher::Colossal, "host") => {
                    self.list(key, "nodes", value);
                }
                (Launcher::Colossal, "hostfile") | (Launcher::Accelerate, "config-file") => {
                    self.push(key, "unread", value);
                }
                (Launcher::Colossal, "include" | "exclude") => self.push(key, "unfixed", value),
                (Launcher::Accelerate, "num-machines") => self.push(key, "machines", value),
                (Launcher::Accelerate, "mixed-precision") => self.push(key, "precision", value),
                (Launcher::Accelerate, "gradient-accumulation-steps") => {
                    self.push(key, "accumulation", value);
                }
                _ => self.push(key, "place", value),
            }
        }
        self.settle(before, launch.kind)
    }

    /// Whether the launcher gives a number of ranks. A total overrides its factors.
    fn settle(&mut self, from: usize, kind: Launcher) -> bool {
        let has = |keys: &[SourceKey], name: &str| keys.iter().any(|key| key.name == name);
        if has(&self.all[from..], "world") {
            for key in &mut self.all[from..] {
                if ["nodes", "gpus"].contains(&key.name.as_str()) {
                    key.name = "counted".to_owned();
                }
            }
            return true;
        }
        // One node, unless more are given.
        has(&self.all[from..], "gpus")
            && (kind != Launcher::Srun || has(&self.all[from..], "nodes"))
    }

    /// `node1:0,2@node2:1`: the GPUs of each node.
    fn include(&mut self, key: String, value: &str, launch: &Launch, path: &str) {
        let nodes = value.split('@').map(|node| {
            node.split_once(':')
                .map(|(_, slots)| slots.split(',').filter(|it| !it.is_empty()).count())
        });
        match nodes.collect::<Option<Vec<_>>>() {
            Some(slots) if slots.iter().sum::<usize>() > 0 && !is_unknown(value) => {
                self.world(&key, value, slots.iter().sum());
            }
            // A node without a list of GPUs has the slots of the hostfile.
            _ => {
                let hosts = launch
                    .flags
                    .iter()
                    .find(|(flag, _)| ["hostfile", "h"].contains(&normal(flag).as_str()));
                let hosts = hosts.and_then(|(_, file)| slots(path, file));
                let named: Vec<&str> = value.split('@').collect();
                let of = hosts.map(|hosts| {
                    let inside = hosts.iter().filter(|(host, _)| named.contains(&host.as_str()));
                    inside.map(|(_, slots)| *slots).sum::<usize>()
                });
                match of.filter(|slots| *slots > 0) {
                    Some(slots) => self.world(&key, value, slots),
                    None => self.push(key, "unfixed", value),
                }
            }
        }
    }

    fn world(&mut self, key: &str, value: &str, ranks: usize) {
        let key = format!("{key} {value}");
        self.push(key, "world", &ranks.to_string());
    }

    fn hostfile(&mut self, key: String, value: &str, launch: &Launch, path: &str) {
        let has = |names: &[&str]| {
            launch.flags.iter().any(|(flag, _)| names.contains(&normal(flag).as_str()))
        };
        let slots = slots(path, value);
        match slots {
            _ if has(&["include", "i", "exclude", "e"]) => self.push(key, "place", value),
            Some(slots) if !has(&["num-nodes", "num-gpus"]) => {
                self.world(&key, value, slots.iter().map(|(_, slots)| slots).sum());
            }
            Some(slots) if !has(&["num-nodes"]) => {
                self.push(format!("{key} {value}"), "nodes", &slots.len().to_string());
            }
            Some(_) => self.push(key, "place", value),
            None if has(&["num-nodes"]) && has(&["num-gpus"]) => self.push(key, "place", value),
            None => self.push(key, "unread", value),
        }
    }

    /// `#SBATCH` lines: used if `srun` gives less, or nothing else counts ranks.
    fn batch(&mut self, batch: &[(String, String)], counts: bool, has_launcher: bool) -> bool {
        let get = |name: &str| batch.iter().find(|(flag, _)| flag == name).map(|(_, value)| value);
        let has_total = get("ntasks").is_some();
        let has_tasks = has_total || get("ntasks-per-node").is_some();
        let mut is_counted = false;
        for (flag, value) in batch {
            let key = format!("#SBATCH --{flag}");
            let gpus = flag == "gpus-per-node" || flag == "gres";
            let name = match flag.as_str() {
                _ if !counts => "outer",
                "ntasks" if has_launcher => "world",
                "nodes" if !has_total && has_launcher => "nodes",
                "ntasks-per-node" if !has_total && has_launcher => "gpus",
                // Without a number of tasks, one rank per GPU is assumed.
                _ if gpus && !has_tasks && !has_launcher => "unused",
                _ => "place",
            };
            is_counted |= ["world", "gpus"].contains(&name);
            // A flag of `srun` overrides it.
            let given = self.all.iter().any(|key| key.name == name);
            match name {
                "world" | "nodes" | "gpus" if !given => self.count(key, name, value),
                "world" | "nodes" | "gpus" => self.push(key, "counted", value),
                name => self.push(key, name, value),
            }
        }
        is_counted
    }
}

/// The hosts of a hostfile beside the script, and their slots.
fn slots(script: &str, file: &str) -> Option<Vec<(String, usize)>> {
    if file.is_empty() || is_unknown(file) {
        return None;
    }
    let folder = Path::new(script).parent().unwrap_or(Path::new(""));
    let path = folder.join(file);
    let about = std::fs::metadata(&path).ok().filter(std::fs::Metadata::is_file)?;
    if about.len() > HOSTFILE_BYTES_MAX {
        return None;
    }
    let text = std::fs::read_to_string(&path).ok()?;
    let (mut hosts, mut seen) = (Vec::new(), HashSet::new());
    for line in text.lines() {
        let line = line.split('#').next().unwrap_or("").trim();
        let Some((host, rest)) = line.split_once(char::is_whitespace) else {
            if line.is_empty() {
                continue;
            }
            return None;
        };
        let count = rest.trim().strip_prefix("slots=")?.parse().ok()?;
        // DeepSpeed refuses a host that is named twice.
        if !seen.insert(host) {
            return None;
        }
        hosts.push((host.to_owned(), count));
    }
    (!hosts.is_empty()).then_some(hosts)
}
