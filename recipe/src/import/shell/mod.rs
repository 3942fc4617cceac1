//! Launch scripts: finds the training command, as bash would start it, without running anything.
//!
//! In reading order: `tree` parses the statements, by the grammar of bash. `run` and `loops`
//! interpret them, with the commands of `builtins` and `streams`. `expand` and `param` expand
//! words, with `scan`, `escapes`, `vars`, `math` and `pattern`; `test` has the conditions.
//! `program` finds the training command.
//!
//! Values from outside of the script, or from a program that would have to run, are unknown. Such a
//! value keeps its name, as `${NAME}`, and is refused as a value of the config. For an unknown
//! condition both branches are interpreted, and their differences are listed.

mod builtins;
mod escapes;
mod expand;
mod loops;
mod math;
mod param;
mod pattern;
pub(super) mod program;
mod run;
mod scan;
mod streams;
mod test;
mod tree;
mod vars;

use std::collections::{HashMap, HashSet};

use run::{Limits, Question, Shell, Started, Status};
use tree::{Argument, Assign, AssignValue, CommandKind, List};
use vars::Variables;

/// An error is a sentence that ends the import of a file.
type Outcome<T> = Result<T, String>;

/// Maximum of paths through a script: six independent conditions.
const PATHS_MAX: usize = 64;

/// Stack of the parser and the interpreter, which are recursive: 4,096 expansions of 4 KiB, twice.
const STACK_BYTES: usize = 64 << 20;

/// The result of a script.
#[derive(Debug, Default)]
pub(super) struct Script {
    /// The words of the training command, expanded.
    pub(super) command: Vec<String>,
    pub(super) variables: HashMap<String, String>,
    /// Notes for the user.
    pub(super) notes: Vec<String>,
    /// Reasons why the result is uncertain: subject and reason.
    pub(super) doubts: Vec<(String, String)>,
    /// `#SBATCH` lines: flags and values.
    pub(super) batch: Vec<(String, String)>,
}

/// The training command of a launch script, as bash would start it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ScriptCommand {
    /// Launchers, program and arguments, expanded. Unknown values are `${...}`.
    pub words: Vec<String>,
    /// Reasons why the result is uncertain: subject and reason.
    pub doubts: Vec<(String, String)>,
    /// Notes for the user.
    pub notes: Vec<String>,
}

/// Reads a launch script, or a file of flags. Nothing is executed.
///
/// # Errors
/// A sentence, if the text is not a script or would take too long.
pub fn command_of_script(text: &str) -> Result<ScriptCommand, String> {
    let Script { command: words, doubts, notes, .. } = read(text, &[])?;
    Ok(ScriptCommand { words, doubts, notes })
}

/// `arguments` are those of the script; if empty, they are unknown.
pub(super) fn read(text: &str, arguments: &[String]) -> Outcome<Script> {
    let (text, arguments) = (text.to_owned(), arguments.to_owned());
    let thread = std::thread::Builder::new().stack_size(STACK_BYTES);
    let reading = thread.spawn(move || follow(&text, &arguments));
    let reading = reading.map_err(|error| format!("no thread for the script: {error}"))?;
    reading.join().unwrap_or_else(|_| Err("not a script of bash".to_owned()))
}

fn follow(text: &str, arguments: &[String]) -> Outcome<Script> {
    let mut script = Script::default();
    let is_dos = text.contains("\r\n");
    let mut lines = text.lines().map(str::trim);
    let first = lines.find(|line| !line.is_empty() && !line.starts_with('#'));
    if first.is_some_and(|line| line.starts_with("--")) {
        script.command = flags(&text.replace("\r\n", "\n"))?;
        return Ok(script);
    }
    // To bash a carriage return is a character, so no line is continued.
    let text = text.replace("\\\r\n", "\\ \n").replace("\r\n", "\n");
    if is_dos {
        script.doubts.push((
            "line ends".to_owned(),
            "the file has DOS line ends, with which bash continues no line (hint: sed -i \
             's/\\r$//' FILE)"
                .to_owned(),
        ));
    }
    script.batch = batch(&text);
    let list = tree::parse(&text, 1)?;
    let paths = explore_paths(&list, &script.batch, arguments)?;
    let Some(base) = paths.runs.iter().find(|run| run.command.is_some()) else {
        if let Some(cut) = paths.runs.iter().find_map(|run| run.shell.cut.first()) {
            return Err(format!("line {}: '{}' is not a command", cut.line, cut.words[0]));
        }
        if arguments.is_empty() && ["$1", "${1", "$#", "$@"].iter().any(|it| text.contains(it)) {
            let expected = "expected a command that trains, found none if the script has no";
            return Err(format!("{expected} arguments (hint: give them after --)"));
        }
        return Ok(script);
    };
    let Some(command) = &base.command else { return Ok(script) };
    script.notes.extend(base.shell.notes.iter().cloned());
    script.notes.extend(base.several());
    if let Some(question) = base.shell.questions.iter().find(|it| !paths.is_first_answer(it)) {
        script.notes.push(format!(
            "line {}: '{}' is taken as {}, because otherwise nothing is trained",
            question.line, question.text, question.answer
        ));
    }
    script.doubts.extend(cut_off(&base.shell.cut, &text, is_dos));
    script.doubts.extend(differences(base, &paths.runs));
    if paths.is_cut {
        script.doubts.push((
            "conditions".to_owned(),
            format!("more than {PATHS_MAX} ways through the script cannot be known"),
        ));
    }
    let defaulted = &base.shell.variables.defaulted;
    if !defaulted.is_empty() {
        script.notes.push(format!(
            "not set in the script, so that their defaults are used: {}",
            defaulted.join(", ")
        ));
    }
    script.command = words_of(command, &mut script.doubts);
    script.variables = base.shell.variables.texts();
    Ok(script)
}

/// The words of a file that has only flags.
fn flags(text: &str) -> Outcome<Vec<String>> {
    let list = tree::parse(text, 1)?;
    let mut shell = Shell::new(Variables::default(), Limits::default(), Vec::new());
    let mut all = Vec::new();
    for item in &list {
        for command in &item.first.commands {
            let CommandKind::Simple { before, words } = &command.kind else {
                return Err(format!("line {}: expected flags", command.line));
            };
            if !before.is_empty() {
                return Err(format!("line {}: expected flags", command.line));
            }
            for word in words {
                all.extend(shell.words(builtins::written(word))?);
            }
        }
    }
    Ok(all)
}

/// The command without arguments that are only spaces, which a `\` before a space makes.
fn words_of(command: &Started, doubts: &mut Vec<(String, String)>) -> Vec<String> {
    let is_blank = |word: &&String| !word.is_empty() && word.trim().is_empty();
    if command.words.iter().any(|word| is_blank(&word)) {
        let text = format!(
            "line {}: the program gets an argument of spaces (hint: a space behind the '\\' at the \
             end of a line)",
            command.line
        );
        doubts.push(("' '".to_owned(), text));
    }
    command.words.iter().filter(|word| !is_blank(word)).cloned().collect()
}

/// One path through a script.
struct ScriptRun {
    shell: Shell,
    command: Option<Started>,
}

struct ScriptRuns {
    runs: Vec<ScriptRun>,
    is_cut: bool,
}

impl ScriptRuns {
    /// Whether the most likely path has this answer, or another question.
    fn is_first_answer(&self, question: &Question) -> bool {
        let first = self.runs.first().map(|run| &run.shell.questions[..]).unwrap_or_default();
        let same = first.iter().find(|it| it.line == question.line && it.text == question.text);
        same.is_none_or(|it| it.answer == question.answer)
    }
}

/// All paths, by the answers to unknown conditions; the first is the most likely.
fn explore_paths(
    list: &List,
    batch: &[(String, String)],
    arguments: &[String],
) -> Outcome<ScriptRuns> {
    let mut own = Names::default();
    own.list(list);
    let mut limits = Limits::default();
    let mut open = std::collections::VecDeque::from([Vec::new()]);
    let mut runs: Vec<ScriptRun> = Vec::new();
    while let Some(answers) = open.pop_front() {
        if runs.len() == PATHS_MAX {
            return Ok(ScriptRuns { runs, is_cut: true });
        }
        let from = answers.len();
        let mut shell = Shell::new(start(&own.names, batch), limits.clone(), answers);
        shell.is_batch_job = !batch.is_empty();
        if !arguments.is_empty() {
            shell.set_arguments(arguments);
        }
        shell.run_script(list)?;
        limits = shell.limits.clone();
        // At most these are interpreted, and each has all answers before it.
        let more = (PATHS_MAX + 1).saturating_sub(runs.len() + open.len());
        for at in (from..shell.questions.len()).take(more) {
            let mut answers: Vec<bool> =
                shell.questions[..=at].iter().map(|question| question.answer).collect();
            answers[at] = !answers[at];
            open.push_back(answers);
        }
        let command = choice(&shell.started).cloned();
        runs.push(ScriptRun { shell, command });
    }
    Ok(ScriptRuns { runs, is_cut: false })
}

/// Variables before the first line.
fn start(own: &HashSet<String>, batch: &[(String, String)]) -> Variables {
    let mut variables = Variables::default();
    variables.own.clone_from(own);
    let mut set = |name: &str, value: String| {
        // Fails only for too long values.
        _ = variables.set(name, None, value);
        variables.exported.insert(name.to_owned());
    };
    if let Ok(home) = std::env::var("HOME") {
        set("HOME", home);
    }
    for (flag, value) in batch.iter().filter(|(_, value)| value.parse::<u64>().is_ok()) {
        let names: &[&str] = match flag.as_str() {
            "nodes" => &["SLURM_NNODES", "SLURM_JOB_NUM_NODES"],
            "ntasks" => &["SLURM_NTASKS", "SLURM_NPROCS"],
            "ntasks-per-node" => &["SLURM_NTASKS_PER_NODE"],
            "gpus-per-node" => &["SLURM_GPUS_PER_NODE", "SLURM_GPUS_ON_NODE"],
            "cpus-per-task" => &["SLURM_CPUS_PER_TASK"],
            _ => &[],
        };
        names.iter().for_each(|name| set(name, value.clone()));
    }
    variables
}

/// The `#SBATCH` lines at the head of a script, as flags and values.
fn batch(text: &str) -> Vec<(String, String)> {
    let mut flags = Vec::new();
    for line in text.lines() {
        let Some(rest) = line.strip_prefix("#SBATCH") else {
            // The first command ends them.
            if !line.trim().is_empty() && !line.starts_with('#') {
                break;
            }
            continue;
        };
        let rest = rest.split(" #").next().unwrap_or(rest).trim();
        let (flag, value) = rest.split_once(['=', ' ', '\t']).unwrap_or((rest, ""));
        let (flag, value) = match flag.strip_prefix("--") {
            Some(flag) => (flag, value.trim()),
            None if flag.len() > 2 => (flag.get(1..2).unwrap_or(""), flag.get(2..).unwrap_or("")),
            None => (flag.trim_start_matches('-'), value.trim()),
        };
        let flag = match flag {
            "N" => "nodes",
            "n" => "ntasks",
            "c" => "cpus-per-task",
            "G" => "gpus",
            other => other,
        };
        flags.push((flag.to_owned(), value.trim_matches(['"', '\'']).to_owned()));
    }
    flags
}

/// The last of the commands that most probably train.
fn choice(started: &[Started]) -> Option<&Started> {
    started.iter().max_by_key(|command| command.trains())
}

impl Started {
    fn program(&self) -> Option<&str> {
        program::program_at(&self.words).map(|at| self.words[at].as_str())
    }

    fn trains(&self) -> Option<program::Trains> {
        self.program().map(program::trains)
    }
}

impl ScriptRun {
    /// A note, if there was a choice.
    fn several(&self) -> Option<String> {
        let chosen = self.command.as_ref()?;
        let mut others: Vec<&Started> = Vec::new();
        for other in self.shell.started.iter().filter(|it| it.trains() == chosen.trains()) {
            if !others.iter().any(|it| it.words == other.words) {
                others.push(other);
            }
        }
        let named = |it: &Started| {
            format!("{} in line {}", it.program().map_or("", program::base), it.line)
        };
        let names: Vec<String> = others.iter().take(8).map(|it| named(it)).collect();
        let are = match chosen.trains() {
            Some(program::Trains::Surely) => "train",
            _ => "start a program that may train",
        };
        (others.len() > 1).then(|| {
            format!(
                "{} commands {are} ({}); the last is read: {}",
                others.len(),
                names.join(", "),
                named(chosen)
            )
        })
    }
}

/// Statements that start with a flag: the command before them ended too early.
fn cut_off(cut: &[Started], text: &str, is_dos: bool) -> Vec<(String, String)> {
    let lines: Vec<&str> = text.lines().collect();
    let cause = |line: usize| {
        let before = line.saturating_sub(2);
        let above = lines.get(before).copied().unwrap_or("");
        if is_dos {
            "of the DOS line ends".to_owned()
        } else if above.trim_start().starts_with('#') || above.contains(" #") {
            format!("line {} is or has a comment, which swallows its '\\'", before + 1)
        } else if above.ends_with([' ', '\t']) && above.trim_end().ends_with('\\') {
            format!("line {} has a space behind its '\\'", before + 1)
        } else {
            format!("line {} does not end in '\\'", before + 1)
        }
    };
    let mut all: Vec<(String, String)> = Vec::new();
    for started in cut {
        let words = started.words.iter().map(String::as_str).filter(|it| !it.trim().is_empty());
        let key = words.collect::<Vec<_>>().join(" ");
        let text = format!(
            "line {}: never reaches the program, because {}",
            started.line,
            cause(started.line)
        );
        if all.iter().all(|(other, _)| *other != key) {
            all.push((key, text));
        }
    }
    all
}

/// The differences on the paths with the other answer to an unknown condition.
fn differences(base: &ScriptRun, runs: &[ScriptRun]) -> Vec<(String, String)> {
    let Some(command) = &base.command else { return Vec::new() };
    let flipped = |run: &ScriptRun| -> Vec<Question> {
        let same = |question: &Question| {
            base.shell.questions.iter().any(|it| {
                it.line == question.line && it.text == question.text && it.answer == question.answer
            })
        };
        run.shell.questions.iter().filter(|it| !same(it)).cloned().collect()
    };
    let mut others: Vec<(Vec<Question>, &Started)> = Vec::new();
    for run in runs {
        if let Some(other) = run.command.as_ref().filter(|other| other.words != command.words) {
            others.push((flipped(run), other));
        }
    }
    others.sort_by_key(|(flipped, _)| flipped.len());
    let mut known = HashSet::new();
    let mut all = Vec::new();
    for (questions, other) in others {
        let changes = changes(&command.words, &other.words);
        if changes.iter().all(|change| known.contains(change)) {
            continue;
        }
        known.extend(changes.iter().cloned());
        let line = questions.first().map_or(0, |question| question.line);
        let texts: Vec<&str> = questions.iter().map(|question| question.text.as_str()).collect();
        let answer = questions.first().is_some_and(|question| !question.answer);
        all.push((
            format!("condition in line {line}"),
            format!(
                "'{}' cannot be known and is taken as {answer}; on it depend {}",
                texts.join("' and '"),
                changes.join(", ")
            ),
        ));
    }
    all
}

/// The flags that only one of two commands has, or that have other values.
fn changes(a: &[String], b: &[String]) -> Vec<String> {
    let groups = |words: &[String]| -> Vec<String> {
        let mut groups: Vec<String> = Vec::new();
        for word in words {
            match groups.last_mut() {
                Some(last) if !word.starts_with('-') => {
                    last.push(' ');
                    last.push_str(word);
                }
                _ => groups.push(word.clone()),
            }
        }
        groups
    };
    let (a, b) = (groups(a), groups(b));
    let (in_a, in_b): (HashSet<_>, HashSet<_>) = (a.iter().collect(), b.iter().collect());
    let mut all: Vec<String> = b.iter().filter(|it| !in_a.contains(it)).cloned().collect();
    all.extend(a.iter().filter(|it| !in_b.contains(it)).cloned());
    if all.is_empty() {
        all.push("the order of the flags".to_owned());
    }
    all.truncate(16);
    all
}

/// The variables that a script assigns, except those whose value depends only on themselves.
#[derive(Default)]
struct Names {
    names: HashSet<String>,
}

impl Names {
    fn list(&mut self, list: &List) {
        for item in list {
            let pipelines = std::iter::once(&item.first).chain(item.rest.iter().map(|(_, it)| it));
            for command in pipelines.flat_map(|pipeline| &pipeline.commands) {
                self.command(&command.kind);
            }
        }
    }

    fn command(&mut self, kind: &CommandKind) {
        match kind {
            CommandKind::Simple { before, words } => {
                before.iter().for_each(|assign| self.assign(assign));
                for word in words {
                    if let Argument::Assign(assign, _) = word {
                        self.assign(assign);
                    }
                }
                let texts: Vec<&str> = words.iter().map(builtins::written).collect();
                if let ["read" | "local" | "let" | "mapfile" | "printf" | "readarray", names @ ..] =
                    &texts[..]
                {
                    let names = names.iter().map(|name| name.split('=').next().unwrap_or(name));
                    self.names.extend(names.filter(|it| is_name(it)).map(str::to_owned));
                }
            }
            CommandKind::Group(list) | CommandKind::Subshell(list) => self.list(list),
            CommandKind::If { arms, otherwise } => {
                for (condition, body) in arms {
                    self.list(condition);
                    self.list(body);
                }
                self.list(otherwise);
            }
            CommandKind::For { name, body, .. } => {
                self.names.insert(name.clone());
                self.list(body);
            }
            CommandKind::ForMath { body, .. } => self.list(body),
            CommandKind::Case { arms, .. } => arms.iter().for_each(|arm| self.list(&arm.body)),
            CommandKind::Loop { condition, body, .. } => {
                self.list(condition);
                self.list(body);
            }
            CommandKind::Function { body, .. } => self.command(&body.kind),
            CommandKind::Math(_) | CommandKind::Test(_) => {}
        }
    }

    fn assign(&mut self, assign: &Assign) {
        let is_of_itself = match &assign.value {
            AssignValue::Text(word) => mentions(&word.text, &assign.name),
            AssignValue::Items(_) => false,
        };
        if !is_of_itself {
            self.names.insert(assign.name.clone());
        }
    }
}

/// Whether `$NAME` or `${NAME...}` is in a text, without a default.
fn mentions(text: &str, name: &str) -> bool {
    let plain = format!("${name}");
    let braced = format!("${{{name}");
    let is_plain = text.split(&plain).skip(1).any(|rest| !rest.starts_with(is_name_char));
    let has_default = |rest: &str| rest.starts_with([':', '-', '=', '+']);
    let is_braced = |rest: &str| !rest.starts_with(is_name_char) && !has_default(rest);
    is_plain || text.split(&braced).skip(1).any(is_braced)
}

/// Whether a text is only an unknown argument of the script.
fn is_argument(text: &str) -> bool {
    let name = text.strip_prefix("${").and_then(|rest| rest.strip_suffix('}'));
    name.is_some_and(|name| name.parse::<usize>().is_ok())
}

/// The marker of an unknown value: its name, in one word.
fn marker(name: &str) -> String {
    let name = name.split_whitespace().collect::<Vec<_>>().join("_");
    let name = name.replace("${", "$(").replace('{', "(").replace('}', ")");
    let name = name.replace(['"', '\'', '\\', '`'], "");
    let end = name.char_indices().nth(120).map_or(name.len(), |(at, _)| at);
    format!("${{{}}}", &name[..end])
}

/// The length of the marker at the start of a text.
fn marker_len(text: &str) -> Option<usize> {
    text.strip_prefix("${")?;
    text.find('}').map(|end| end + 1)
}

/// Whether a text has an unknown part.
pub(super) fn is_unknown(text: &str) -> bool {
    text.contains("${")
}

fn is_name(text: &str) -> bool {
    !text.is_empty()
        && text.chars().all(is_name_char)
        && !text.starts_with(|c: char| c.is_ascii_digit())
}

fn is_name_char(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '_'
}
