//! Interprets statements in the order in which bash runs them. Nothing is executed: commands that
//! start a program are recorded.

use std::collections::HashMap;
use std::rc::Rc;

use super::test::Truth;
use super::tree::{AndOr, CaseArm, Command, CommandKind, Link, List, Pipeline, Redirect, parse};
use super::vars::{Variable, Variables};
use super::{Outcome, is_unknown, marker};

/// Maximum depth of functions, `eval` and `$(...)`.
const CALLS_MAX: usize = 48;

/// Maximum of simple commands on all paths through a script.
const STEPS_MAX: usize = 200_000;

/// Maximum bytes of all generated texts, about a second of work.
const BYTES_MAX: usize = 1 << 28;

/// Maximum of recorded unknown conditions: many more than interpreted paths.
const QUESTIONS_MAX: usize = 1000;

/// The error of a command that bash aborts, up to the next line of the script: a division by 0, or
/// a value for a read-only variable.
pub(super) const ABANDONED: &str = "abandoned";

/// Remaining budgets.
#[derive(Clone, Debug)]
pub(super) struct Limits {
    steps: usize,
    bytes: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Limits { steps: STEPS_MAX, bytes: BYTES_MAX }
    }
}

impl Limits {
    pub(super) fn spend(&mut self, bytes: usize) -> Outcome<()> {
        let left = self.bytes.checked_sub(bytes);
        self.bytes = left.ok_or_else(|| format!("the script makes more than {BYTES_MAX} bytes"))?;
        Ok(())
    }

    pub(super) fn step(&mut self) -> Outcome<()> {
        let left = self.steps.checked_sub(1);
        self.steps =
            left.ok_or_else(|| format!("the script runs more than {STEPS_MAX} commands"))?;
        Ok(())
    }
}

/// How a command ended.
#[derive(Clone, Debug)]
pub(super) enum Status {
    Known(i64),
    /// The most likely result, and the command.
    Unknown {
        guess: bool,
        text: String,
    },
}

/// Where the statements continue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Flow {
    Next,
    Break(usize),
    Continue(usize),
    Return,
    Exit,
}

/// An unknown condition, and its answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Question {
    pub(super) line: usize,
    pub(super) text: String,
    pub(super) answer: bool,
}

/// A command that starts a program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Started {
    pub(super) line: usize,
    pub(super) words: Vec<String>,
}

/// The input of a command, which may be unknown, and whether its output is redirected.
pub(super) type Opened = (Option<Option<String>>, bool);

/// The output of a command substitution.
#[derive(Clone, Debug, Default)]
pub(super) struct Output {
    pub(super) text: String,
    pub(super) is_unknown: bool,
}

/// The state of an interpreted script.
#[derive(Debug)]
pub(super) struct Shell {
    pub(super) variables: Variables,
    pub(super) functions: HashMap<String, Rc<Command>>,
    pub(super) arguments: Vec<String>,
    /// Whether these are all arguments. Those of the script are from outside, unless they were
    /// given.
    pub(super) has_all_arguments: bool,
    pub(super) status: Status,
    pub(super) limits: Limits,
    /// Depth of open expansions.
    pub(super) depth: usize,
    calls: usize,
    pub(super) loops: usize,
    /// Depth of open conditions, in which `set -e` does not end a script.
    conditions: usize,
    pub(super) ends_on_error: bool,
    pub(super) exports_all: bool,
    pub(super) is_batch_job: bool,
    pub(super) line: usize,
    /// The output, if something reads it.
    pub(super) output: Option<Output>,
    /// The input, if it is known.
    pub(super) input: Option<String>,
    /// The status of the last `$(...)` of the command.
    pub(super) substituted: Option<Status>,
    /// The first word of the command, as written.
    pub(super) written: String,
    /// The words before `bash -c`.
    pub(super) launcher: Vec<String>,
    pub(super) locals: Vec<Vec<(String, Option<Variable>)>>,
    pub(super) notes: Vec<String>,
    pub(super) started: Vec<Started>,
    /// Statements that start with a flag.
    pub(super) cut: Vec<Started>,
    pub(super) questions: Vec<Question>,
    /// Answers to the first questions; the others are guessed.
    answers: Vec<bool>,
}

impl Shell {
    pub(super) fn new(variables: Variables, limits: Limits, answers: Vec<bool>) -> Self {
        Shell {
            variables,
            functions: HashMap::new(),
            arguments: Vec::new(),
            has_all_arguments: false,
            status: Status::Known(0),
            limits,
            depth: 0,
            calls: 0,
            loops: 0,
            conditions: 0,
            ends_on_error: false,
            exports_all: false,
            is_batch_job: false,
            line: 1,
            output: None,
            input: None,
            substituted: None,
            written: String::new(),
            launcher: Vec::new(),
            locals: Vec::new(),
            notes: Vec::new(),
            started: Vec::new(),
            cut: Vec::new(),
            questions: Vec::new(),
            answers,
        }
    }

    /// Adds a note for the user, with the line number.
    pub(super) fn note(&mut self, text: &str) {
        let text = format!("line {}: {text}", self.line);
        if !self.notes.contains(&text) && self.notes.len() < 1000 {
            self.notes.push(text);
        }
    }

    /// Runs a script. An aborted command ends its line.
    pub(super) fn run_script(&mut self, list: &List) -> Outcome<()> {
        let mut abandoned = None;
        for item in list.iter() {
            if abandoned == Some(item.unit) {
                continue;
            }
            match self.and_or(item) {
                Ok(Flow::Next) => {}
                Ok(_) => break,
                Err(cause) if cause == ABANDONED => {
                    abandoned = Some(item.unit);
                    self.status = Status::Known(1);
                    (self.depth, self.calls, self.loops, self.conditions) = (0, 0, 0, 0);
                }
                Err(cause) => return Err(cause),
            }
        }
        Ok(())
    }

    pub(super) fn run(&mut self, list: &List) -> Outcome<Flow> {
        for item in list {
            let flow = self.and_or(item)?;
            if flow != Flow::Next {
                return Ok(flow);
            }
        }
        Ok(Flow::Next)
    }

    fn and_or(&mut self, item: &AndOr) -> Outcome<Flow> {
        if item.in_background {
            let alone = AndOr { in_background: false, ..item.clone() };
            self.apart(|shell| shell.and_or(&alone))?;
            self.status = Status::Known(0);
            return Ok(Flow::Next);
        }
        self.conditions += usize::from(!item.rest.is_empty());
        let mut flow = self.pipeline(&item.first)?;
        self.conditions -= usize::from(!item.rest.is_empty());
        for (at, (link, next)) in item.rest.iter().enumerate() {
            if flow != Flow::Next {
                return Ok(flow);
            }
            let rest = || item.rest[at..].iter().map(|(_, pipeline)| pipeline);
            let holds = if rest().all(is_inert_pipeline) { self.guess() } else { self.decide() };
            if holds == (*link == Link::And) {
                let is_last = at + 1 == item.rest.len();
                self.conditions += usize::from(!is_last);
                flow = self.pipeline(next)?;
                self.conditions -= usize::from(!is_last);
            }
        }
        Ok(flow)
    }

    fn guess(&self) -> bool {
        match &self.status {
            Status::Known(code) => *code == 0,
            Status::Unknown { guess, .. } => *guess,
        }
    }

    /// Whether the last command succeeded. An unknown result is a question.
    fn decide(&mut self) -> bool {
        let (guess, text) = match &self.status {
            Status::Known(code) => return *code == 0,
            Status::Unknown { guess, text } => (*guess, text.clone()),
        };
        let line = self.line;
        let same = |asked: &&Question| asked.line == line && asked.text == text;
        if let Some(asked) = self.questions.iter().find(same) {
            return asked.answer;
        }
        if self.questions.len() == QUESTIONS_MAX {
            return guess;
        }
        let answer = self.answers.get(self.questions.len()).copied().unwrap_or(guess);
        self.questions.push(Question { line, text, answer });
        answer
    }

    pub(super) fn condition(&mut self, list: &List) -> Outcome<Flow> {
        self.conditions += 1;
        let flow = self.run(list)?;
        self.conditions -= 1;
        Ok(flow)
    }

    fn pipeline(&mut self, pipeline: &Pipeline) -> Outcome<Flow> {
        self.conditions += usize::from(pipeline.is_negated);
        let flow = match &pipeline.commands[..] {
            // `!` alone fails.
            [] => {
                self.status = Status::Known(0);
                Flow::Next
            }
            [command] => self.command(command)?,
            commands => self.pipe(commands)?,
        };
        self.conditions -= usize::from(pipeline.is_negated);
        if pipeline.is_negated {
            self.status = match self.status.clone() {
                Status::Known(code) => Status::Known(i64::from(code == 0)),
                Status::Unknown { guess, text } => {
                    Status::Unknown { guess: !guess, text: format!("! {text}") }
                }
            };
        }
        // If the failure of a command is ignored, the statements around it do not fail either.
        let counts = match &pipeline.commands[..] {
            [command] => matches!(
                command.kind,
                CommandKind::Simple { .. }
                    | CommandKind::Subshell(_)
                    | CommandKind::Math(_)
                    | CommandKind::Test(_)
            ),
            _ => true,
        };
        let is_strict = self.ends_on_error && self.conditions == 0 && !pipeline.is_negated;
        let fails = is_strict && counts && flow == Flow::Next && !self.guess();
        let ends = fails && !self.decide();
        Ok(if ends { Flow::Exit } else { flow })
    }

    /// Each command of a pipe is a subshell, and reads the output of the one before it.
    fn pipe(&mut self, commands: &[Command]) -> Outcome<Flow> {
        let outer = self.input.take();
        let last = commands.len() - 1;
        for (at, command) in commands.iter().enumerate() {
            if at == last {
                self.apart(|shell| shell.command(command))?;
                break;
            }
            let kept = self.output.replace(Output::default());
            let ended = self.apart(|shell| shell.command(command));
            let output = std::mem::replace(&mut self.output, kept).unwrap_or_default();
            ended?;
            self.input = (!output.is_unknown).then_some(output.text);
        }
        self.input = outer;
        Ok(Flow::Next)
    }

    /// Runs in a subshell.
    pub(super) fn apart(&mut self, run: impl FnOnce(&mut Self) -> Outcome<Flow>) -> Outcome<()> {
        self.calls += 1;
        if self.calls > CALLS_MAX {
            return Err(format!("line {}: calls nested more than {CALLS_MAX} deep", self.line));
        }
        let arguments: usize = self.arguments.iter().map(|it| 32 + it.len()).sum();
        let functions = 64 * self.functions.len();
        self.limits.spend(self.variables.bytes() + arguments + functions + 1024)?;
        let variables = self.variables.clone();
        let functions = self.functions.clone();
        let arguments = (self.arguments.clone(), self.has_all_arguments);
        let flags = (self.ends_on_error, self.exports_all, self.loops, self.depth);
        let (calls, conditions) = (self.calls, self.conditions);
        match run(self) {
            Ok(_) => {}
            Err(cause) if cause == ABANDONED => self.status = Status::Known(1),
            Err(cause) => return Err(cause),
        }
        let defaulted = std::mem::take(&mut self.variables.defaulted);
        self.variables = variables;
        self.variables.defaulted = defaulted;
        self.functions = functions;
        (self.arguments, self.has_all_arguments) = arguments;
        (self.ends_on_error, self.exports_all, self.loops, self.depth) = flags;
        (self.calls, self.conditions) = (calls - 1, conditions);
        Ok(())
    }

    /// The output of a `$(...)`, or a marker.
    pub(super) fn capture(&mut self, text: &str) -> Outcome<String> {
        self.limits.spend(64 * text.len())?;
        let Ok(list) = parse(text, self.line) else { return Ok(marker(text)) };
        let kept = self.output.replace(Output::default());
        let line = self.line;
        let depth = std::mem::take(&mut self.depth);
        self.apart(|shell| {
            // Its flag is not inherited.
            shell.ends_on_error = false;
            shell.run(&list)
        })?;
        (self.line, self.depth) = (line, depth);
        self.substituted = Some(self.status.clone());
        let output = std::mem::replace(&mut self.output, kept).unwrap_or_default();
        if output.is_unknown {
            return Ok(marker(text));
        }
        Ok(output.text.trim_end_matches('\n').to_owned())
    }

    /// Statements in a text, of `eval` or `bash -c`.
    pub(super) fn run_text(&mut self, text: &str) -> Outcome<Flow> {
        self.limits.spend(64 * text.len())?;
        let list = match parse(text, self.line) {
            Ok(list) => list,
            Err(_) if is_unknown(text) => {
                self.note("a command is made of what is not known");
                self.status = Status::Unknown { guess: true, text: "eval".to_owned() };
                return Ok(Flow::Next);
            }
            Err(cause) => return Err(cause),
        };
        self.called(|shell| shell.run(&list))
    }

    pub(super) fn called(&mut self, run: impl FnOnce(&mut Self) -> Outcome<Flow>) -> Outcome<Flow> {
        self.calls += 1;
        if self.calls > CALLS_MAX {
            return Err(format!("line {}: calls nested more than {CALLS_MAX} deep", self.line));
        }
        let flow = run(self)?;
        self.calls -= 1;
        Ok(flow)
    }

    /// A function of the script.
    pub(super) fn call(&mut self, body: &Rc<Command>, arguments: Vec<String>) -> Outcome<Flow> {
        let outer = (std::mem::replace(&mut self.arguments, arguments), self.has_all_arguments);
        self.has_all_arguments = true;
        let loops = std::mem::take(&mut self.loops);
        self.locals.push(Vec::new());
        let body = Rc::clone(body);
        let flow = self.called(|shell| shell.command(&body));
        for (name, old) in self.locals.pop().unwrap_or_default().into_iter().rev() {
            self.variables.restore(&name, old);
        }
        (self.arguments, self.has_all_arguments) = outer;
        self.loops = loops;
        Ok(if flow? == Flow::Exit { Flow::Exit } else { Flow::Next })
    }

    fn command(&mut self, command: &Command) -> Outcome<Flow> {
        self.limits.step()?;
        self.line = command.line;
        if let CommandKind::Simple { before, words } = &command.kind {
            return self.simple(before, words, &command.redirects);
        }
        self.redirected(&command.redirects, |shell| shell.compound(&command.kind))
    }

    /// Runs with redirected input and output.
    pub(super) fn redirected(
        &mut self,
        redirects: &[Redirect],
        run: impl FnOnce(&mut Self) -> Outcome<Flow>,
    ) -> Outcome<Flow> {
        let opened = self.opened(redirects)?;
        self.with_opened(opened, run)
    }

    /// The input, if it is redirected, and whether the output is.
    pub(super) fn opened(&mut self, redirects: &[Redirect]) -> Outcome<Opened> {
        let (mut input, mut is_elsewhere) = (None, false);
        for redirect in redirects {
            match redirect {
                Redirect::Output => is_elsewhere = true,
                Redirect::Errors => {}
                Redirect::Input => input = Some(None),
                Redirect::HereString(word) => input = Some(Some(self.text(&word.text)? + "\n")),
                Redirect::HereDocument { text, expands: true } => {
                    input = Some(Some(self.document(&text.text)?));
                }
                Redirect::HereDocument { text, .. } => {
                    self.limits.spend(text.text.len())?;
                    input = Some(Some(text.text.clone()));
                }
            }
        }
        Ok((input, is_elsewhere))
    }

    pub(super) fn with_opened(
        &mut self,
        (input, is_elsewhere): Opened,
        run: impl FnOnce(&mut Self) -> Outcome<Flow>,
    ) -> Outcome<Flow> {
        let has_input = input.is_some();
        let outer_input = input.map(|input| std::mem::replace(&mut self.input, input));
        let outer_output = is_elsewhere.then(|| self.output.take());
        let flow = run(self);
        if has_input {
            self.input = outer_input.flatten();
        }
        if let Some(output) = outer_output {
            self.output = output;
        }
        flow
    }

    fn compound(&mut self, kind: &CommandKind) -> Outcome<Flow> {
        match kind {
            CommandKind::Simple { .. } => {}
            CommandKind::Group(list) => return self.run(list),
            CommandKind::Subshell(list) => self.apart(|shell| shell.run(list))?,
            CommandKind::If { arms, otherwise } => return self.choice(arms, otherwise),
            CommandKind::For { name, words, body } => {
                let words = match words {
                    None => {
                        let bytes = self.arguments.iter().map(|it| 32 + it.len()).sum();
                        self.limits.spend(bytes)?;
                        self.arguments.clone()
                    }
                    Some(words) => {
                        let mut all = Vec::new();
                        for word in words {
                            all.extend(self.words(&word.text)?);
                        }
                        all
                    }
                };
                return self.for_each(name, &words, body);
            }
            CommandKind::ForMath { start, condition, step, body } => {
                return self.for_math([start, condition, step], body);
            }
            CommandKind::Case { word, arms } => {
                let text = self.text(&word.text)?;
                return self.cases(&text, arms);
            }
            CommandKind::Loop { condition, body, is_until } => {
                return self.looped(condition, body, *is_until);
            }
            CommandKind::Math(text) => {
                let value = self.math(text)?;
                self.status = self.math_status(value, text);
            }
            CommandKind::Test(tree) => {
                let truth = self.test_tree(tree)?;
                self.status = truth.status(|| format!("[[ {} ]]", shown(tree)));
            }
            CommandKind::Function { name, body } => {
                self.functions.insert(name.clone(), Rc::clone(body));
                self.status = Status::Known(0);
            }
        }
        Ok(Flow::Next)
    }

    pub(super) fn math_status(&self, value: Option<i64>, text: &str) -> Status {
        let truth = value.map_or(Truth::Guess(false), |value| Truth::Known(value != 0));
        truth.status(|| format!("(( {} ))", text.trim()))
    }

    fn choice(&mut self, arms: &[(List, List)], otherwise: &List) -> Outcome<Flow> {
        let is_inert = is_inert(otherwise)
            && arms.iter().all(|(condition, body)| is_inert(condition) && is_inert(body));
        for (condition, body) in arms {
            let flow = self.condition(condition)?;
            if flow != Flow::Next {
                return Ok(flow);
            }
            let holds = if is_inert { self.guess() } else { self.decide() };
            if holds {
                return self.run(body);
            }
        }
        self.status = Status::Known(0);
        self.run(otherwise)
    }

    fn cases(&mut self, text: &str, arms: &[CaseArm]) -> Outcome<Flow> {
        self.status = Status::Known(0);
        let mut falls = false;
        for arm in arms {
            let mut holds = std::mem::take(&mut falls);
            for pattern in &arm.patterns {
                if !holds {
                    holds = self.case_holds(text, &pattern.text)?;
                }
            }
            if !holds {
                continue;
            }
            let flow = self.run(&arm.body)?;
            match arm.falls {
                _ if flow != Flow::Next => return Ok(flow),
                None => break,
                Some(Link::And) => falls = true,
                Some(Link::Or) => {}
            }
        }
        Ok(Flow::Next)
    }

    fn case_holds(&mut self, text: &str, pattern: &str) -> Outcome<bool> {
        let written = pattern;
        let pattern = self.pattern(pattern)?;
        if pattern == "*" {
            return Ok(true);
        }
        let chars: Vec<char> = text.chars().collect();
        self.limits.spend(chars.len().saturating_mul(pattern.len()) / 16)?;
        let found = super::pattern::GlobPattern::new(&pattern).and_then(|it| it.matches(&chars));
        match found.filter(|_| !is_unknown(text) && !is_unknown(&pattern)) {
            Some(holds) => Ok(holds),
            None => {
                let text = format!("case {text} in {written})");
                let kept =
                    std::mem::replace(&mut self.status, Status::Unknown { guess: false, text });
                let holds = self.decide();
                self.status = kept;
                Ok(holds)
            }
        }
    }
}

/// Commands without an effect on flags.
const INERT: [&str; 32] = [
    ":",
    "cat",
    "chmod",
    "cp",
    "curl",
    "date",
    "echo",
    "false",
    "git",
    "hostname",
    "kill",
    "ln",
    "ls",
    "mkdir",
    "mv",
    "nvidia-smi",
    "pip",
    "pkill",
    "pwd",
    "rm",
    "rmdir",
    "sleep",
    "tar",
    "tee",
    "touch",
    "true",
    "ulimit",
    "unzip",
    "wait",
    "wget",
    "[",
    "test",
];

fn is_inert(list: &List) -> bool {
    list.iter().all(|item| {
        is_inert_pipeline(&item.first) && item.rest.iter().all(|(_, next)| is_inert_pipeline(next))
    })
}

fn is_inert_pipeline(pipeline: &Pipeline) -> bool {
    let changes = |text: &str| text.contains("=}") || text.contains("((") || text.contains(":=");
    pipeline.commands.iter().all(|command| match &command.kind {
        CommandKind::Simple { before, words } => {
            let texts = words.iter().map(super::builtins::written);
            let first = texts.clone().next().unwrap_or_default();
            before.is_empty() && INERT.contains(&first) && !texts.into_iter().any(changes)
        }
        CommandKind::Test(_) => true,
        _ => false,
    })
}

/// A condition as written.
fn shown(tree: &super::tree::TestTree) -> String {
    use super::tree::TestTree as Of;
    match tree {
        Of::And(left, right) => format!("{} && {}", shown(left), shown(right)),
        Of::Or(left, right) => format!("{} || {}", shown(left), shown(right)),
        Of::Not(inner) => format!("! {}", shown(inner)),
        Of::One(kind, word) => format!("{kind} {}", word.text),
        Of::Two(kind, left, right) => format!("{} {kind} {}", left.text, right.text),
    }
}
