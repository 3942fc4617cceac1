//! Finds the program that a command starts, and whether it trains.

/// Commands that take the name of a program and do not run it.
const FILE_TOOLS: [&str; 36] = [
    "alias", "awk", "basename", "cat", "chmod", "command", "cp", "diff", "dirname", "du", "echo",
    "find", "git", "grep", "head", "kill", "less", "ln", "ls", "md5sum", "mv", "pgrep", "pip",
    "pkill", "rm", "rsync", "scp", "sed", "stat", "tail", "tar", "touch", "vim", "wc", "wget",
    "which",
];

/// Parts of the names of programs that prepare, measure or use a model.
const OTHER_WORK: [&str; 20] = [
    "benchmark",
    "build",
    "check",
    "convert",
    "download",
    "eval",
    "export",
    "generate",
    "infer",
    "install",
    "merge",
    "plot",
    "predict",
    "prepare",
    "preprocess",
    "process_data",
    "report",
    "server",
    "split",
    "test",
];

/// Parts of the names of programs that train.
const TRAINING: [&str; 9] =
    ["train", "finetune", "fine_tune", "gpt", "bert", "t5", "enc_dec", "llama", "ernie"];

/// How likely it is that a program trains.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Trains {
    /// A Python program of any kind.
    Perhaps,
    /// Its name is that of a training program.
    Surely,
}

/// The index of the program in a command: a `.py`, a module after `-m`, or `pretrain_...`.
pub(crate) fn program_at(words: &[String]) -> Option<usize> {
    let first = base(words.first()?);
    if FILE_TOOLS.contains(&first) {
        return None;
    }
    let script = words.iter().position(|word| word.ends_with(".py"));
    let launches = |module: &str| {
        [
            "torch.distributed",
            "accelerate",
            "deepspeed",
            "paddle.distributed",
            "oneflow.distributed",
        ]
        .iter()
        .any(|launcher| module.starts_with(launcher))
    };
    let modules = words.windows(2).enumerate().filter(|(at, pair)| {
        let before = at.checked_sub(1).map_or("", |before| base(&words[before]));
        let is_python = words[..*at].iter().any(|word| base(word).starts_with("python"));
        let is_flag = pair[0] == "-m" || pair[0] == "--module" || pair[0] == "--module_name";
        let is_python = is_python || before == "torchrun" || first == "torchrun";
        is_flag && is_python && !launches(&pair[1]) && !pair[1].starts_with('-')
    });
    let module = modules.map(|(at, _)| at + 1).next();
    let named = || words.iter().position(|word| base(word).starts_with("pretrain_"));
    match (script, module) {
        (Some(script), Some(module)) => Some(script.min(module)),
        (script, module) => script.or(module).or_else(named),
    }
}

/// Whether a program trains, by its name.
pub(crate) fn trains(program: &str) -> Trains {
    let name = base(program).to_ascii_lowercase();
    let name = name.strip_suffix(".py").unwrap_or(&name);
    let name = name.rsplit('.').next().unwrap_or(name);
    let is_named = name.starts_with("pretrain") || name.starts_with("train");
    let is_other = OTHER_WORK.iter().any(|part| name.contains(part));
    let is_training = TRAINING.iter().any(|part| name.contains(part))
        || name.starts_with("run")
        || name == "main";
    if is_named || (is_training && !is_other) { Trains::Surely } else { Trains::Perhaps }
}

/// The last part of a path.
pub(crate) fn base(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or(path)
}
