//! Commands: assignments, builtins of bash, functions, and started programs.

use super::program::{base, program_at};
use super::run::{ABANDONED, Flow, Shell, Started, Status};
use super::test::Truth;
use super::tree::{Argument, Assign, AssignValue, Redirect};
use super::{Outcome, is_name};

/// Commands without an effect on the run, and words that precede commands.
const HARMLESS: [&str; 30] = [
    "cat",
    "cd",
    "chmod",
    "clear",
    "conda",
    "cp",
    "date",
    "deactivate",
    "df",
    "free",
    "hostname",
    "ln",
    "ls",
    "mkdir",
    "ml",
    "module",
    "mv",
    "nvidia-smi",
    "pip",
    "pwd",
    "rm",
    "scl",
    "sleep",
    "spack",
    "sync",
    "tee",
    "touch",
    "uname",
    "wait",
    "which",
];

/// A launch script has about a hundred flags; each is compared with the others.
const WORDS_MAX: usize = 1 << 14;

/// Shells that read a script from an argument.
const SHELLS: [&str; 5] = ["bash", "sh", "dash", "zsh", "ksh"];

/// The text of an argument.
pub(super) fn written(argument: &Argument) -> &str {
    match argument {
        Argument::Word(word) | Argument::Assign(_, word) => &word.text,
    }
}

impl Shell {
    pub(super) fn simple(
        &mut self,
        before: &[Assign],
        arguments: &[Argument],
        redirects: &[Redirect],
    ) -> Outcome<Flow> {
        self.substituted = None;
        let first = arguments.first().map_or("", written);
        if ["declare", "typeset", "local", "export", "readonly"].contains(&first) {
            let kind = first.to_owned();
            return self.redirected(redirects, |shell| shell.declare(&kind, &arguments[1..]));
        }
        let mut words = Vec::new();
        for argument in arguments {
            // No file has the name of an expression, so that bash matches none.
            if first == "let" {
                words.push(self.text(written(argument))?);
            } else {
                words.extend(self.words(written(argument))?);
            }
        }
        first.clone_into(&mut self.written);
        if words.is_empty() {
            for assign in before {
                if !self.assign(assign)? {
                    return Err(ABANDONED.to_owned());
                }
            }
            let reads = redirects.iter().any(|it| matches!(it, Redirect::Input));
            if let Some(output) = self.output.as_mut().filter(|_| reads) {
                output.is_unknown = true;
            }
            let status = self.substituted.take().unwrap_or(Status::Known(0));
            self.status = if reads { unknown_status("<") } else { status };
            return Ok(Flow::Next);
        }
        // Bash expands what the command reads before it assigns.
        let opened = self.opened(redirects)?;
        let mut old = Vec::new();
        for assign in before {
            let exported = self.variables.exported.contains(&assign.name);
            old.push((assign.name.clone(), self.variables.get(&assign.name).cloned(), exported));
            self.assign(assign)?;
            self.variables.exported.insert(assign.name.clone());
        }
        let line = self.line;
        let flow = self.with_opened(opened, |shell| shell.execute(words));
        for (name, value, exported) in old.into_iter().rev() {
            self.variables.restore(&name, value);
            if !exported {
                self.variables.exported.remove(&name);
            }
        }
        self.line = line;
        flow
    }

    /// Whether the assignment was made: a read-only variable keeps its value.
    fn assign(&mut self, assign: &Assign) -> Outcome<bool> {
        let done = self.assigned(assign)?;
        if self.exports_all {
            self.variables.exported.insert(assign.name.clone());
        }
        if let Err(cause) = done {
            if cause.contains("longer than") {
                return Err(format!("line {}: {cause}", self.line));
            }
            self.note(&cause);
            self.substituted = Some(Status::Known(1));
            return Ok(false);
        }
        Ok(true)
    }

    /// The outer error ends the import, the inner one only the assignment.
    fn assigned(&mut self, assign: &Assign) -> Outcome<Result<(), String>> {
        let name = &assign.name;
        match &assign.value {
            AssignValue::Text(word) => {
                let mut text = self.text(&word.text)?;
                let key = match assign.index.as_deref().map(|index| self.index(name, index)) {
                    None => None,
                    Some(key) => match key? {
                        Some(key) => Some(key),
                        None => {
                            self.variables.forget(name);
                            return Ok(Ok(()));
                        }
                    },
                };
                if self.variables.is_number(name) {
                    let sum = if assign.appends { format!("{name} + ({text})") } else { text };
                    text = self.math_text(&sum)?;
                } else if assign.appends {
                    let old = match &key {
                        Some(key) => self.variables.element(name, key),
                        None => self.variables.text(name),
                    };
                    text = old.unwrap_or_default() + &text;
                }
                self.limits.spend(text.len())?;
                Ok(self.variables.set(name, key.as_deref(), text))
            }
            AssignValue::Items(items) => {
                let mut all = Vec::new();
                for (index, word) in items {
                    match index {
                        Some(index) => {
                            let Some(key) = self.index(name, &index.text)? else {
                                self.variables.forget(name);
                                return Ok(Ok(()));
                            };
                            all.push((Some(key), self.text(&word.text)?));
                        }
                        None => {
                            let words = self.words(&word.text)?;
                            all.extend(words.into_iter().map(|word| (None, word)));
                        }
                    }
                }
                Ok(self.variables.set_items(name, all, assign.appends))
            }
        }
    }

    /// `declare`, `local`, `export`, `readonly`
    fn declare(&mut self, kind: &str, arguments: &[Argument]) -> Outcome<Flow> {
        let mut flags = String::new();
        let mut names = Vec::new();
        for argument in arguments {
            match argument {
                // Braces make several assignments of one.
                Argument::Assign(assign, word)
                    if matches!(assign.value, AssignValue::Text(_))
                        && super::scan::braces(&word.text).is_none_or(|it| it.len() > 1) =>
                {
                    self.variables.forget(&assign.name);
                }
                Argument::Assign(assign, _) => {
                    names.push((assign.name.clone(), Some(assign.clone())));
                }
                Argument::Word(word) => {
                    for text in self.words(&word.text)? {
                        match text.split_once('=') {
                            _ if text.starts_with(['-', '+']) => flags.push_str(&text),
                            Some((name, value)) if is_name(name) => {
                                let value = format!("'{}'", value.replace('\'', "'\\''"));
                                let word = super::tree::Word { text: value, line: word.line };
                                let assign = Assign {
                                    name: name.to_owned(),
                                    index: None,
                                    value: AssignValue::Text(word),
                                    appends: false,
                                };
                                names.push((name.to_owned(), Some(assign)));
                            }
                            _ => names.push((text, None)),
                        }
                    }
                }
            }
        }
        self.status = Status::Known(0);
        if flags.contains('p') || flags.contains(['f', 'F']) {
            self.write_unknown(kind);
            return Ok(Flow::Next);
        }
        if flags.contains('n') && kind != "export" {
            return Err(format!("line {}: '{kind} -n' is not supported", self.line));
        }
        if flags.contains(['u', 'l', 'c']) {
            return Err(format!("line {}: '{kind} {flags}' is not supported", self.line));
        }
        for (name, assign) in names {
            self.declare_one(kind, &flags, &name, assign.as_ref())?;
        }
        Ok(Flow::Next)
    }

    fn declare_one(
        &mut self,
        kind: &str,
        flags: &str,
        name: &str,
        assign: Option<&Assign>,
    ) -> Outcome<()> {
        if !is_name(name) {
            self.note(&format!("'{kind} {name}': not the name of a variable"));
            return Ok(());
        }
        let is_local = !matches!(kind, "export" | "readonly") && !flags.contains('g');
        let has_locals = !self.locals.is_empty();
        if is_local && has_locals {
            self.limits.spend(16 * self.locals.last().map_or(0, Vec::len))?;
            let old = self.variables.get(name).cloned();
            let locals = self.locals.last_mut().filter(|_| has_locals);
            if let Some(locals) = locals.filter(|it| it.iter().all(|(other, _)| other != name)) {
                locals.push((name.to_owned(), old));
                // Unset until it gets a value, whatever the outer variable is.
                if !self.variables.is_read_only(name) {
                    self.variables.own.insert(name.to_owned());
                    self.variables.restore(name, None);
                }
            }
        }
        let turns_off = flags.starts_with('+');
        if flags.contains('A') {
            self.variables.make_map(name);
        } else if flags.contains('a') {
            self.variables.make_items(name);
        }
        if flags.contains('i') && !turns_off {
            self.variables.make_number(name);
        }
        if let Some(assign) = assign {
            self.assign(assign)?;
            if let Some(status) =
                self.substituted.take().filter(|it| matches!(it, Status::Known(1)))
            {
                self.status = status;
            }
        }
        if (kind == "export" && !flags.contains('n')) || (flags.contains('x') && !turns_off) {
            self.variables.exported.insert(name.to_owned());
        }
        if kind == "readonly" || flags.contains('r') {
            self.variables.make_read_only(name);
        }
        Ok(())
    }

    /// Runs a command of expanded words.
    fn execute(&mut self, words: Vec<String>) -> Outcome<Flow> {
        let name = words[0].clone();
        if let Some(body) = self.functions.get(&name).cloned() {
            return self.call(&body, words[1..].to_vec());
        }
        let arguments = &words[1..];
        let before = std::mem::replace(&mut self.status, Status::Known(0));
        match name.as_str() {
            "break" | "continue" if self.loops > 0 => {
                return Ok(self.leaves(&name, arguments.first()));
            }
            ":" | "true" | "trap" | "shopt" | "wait" | "hash" | "ulimit" | "umask" | "enable"
            | "disown" | "alias" | "unalias" | "jobs" | "break" | "continue" => {}
            "false" => self.status = Status::Known(1),
            "echo" => self.echo(arguments),
            "printf" => return self.printf(arguments),
            "[" | "test" => {
                let end = arguments.len() - usize::from(name == "[" && !arguments.is_empty());
                let is_closed = name == "test" || arguments.last().is_some_and(|it| it == "]");
                let truth =
                    if is_closed { self.test(&arguments[..end]) } else { Truth::Known(false) };
                self.status = truth.status(|| words.join(" "));
            }
            "let" => {
                for text in arguments {
                    let value = self.math(text)?;
                    self.status = self.math_status(value, text);
                }
            }
            "unset" => self.unset(arguments)?,
            "set" => self.set_options(arguments),
            "shift" => self.shift(arguments.first()),
            "eval" => return self.run_text(&arguments.join(" ")),
            "exec" if arguments.is_empty() => {}
            "exec" => {
                self.execute(arguments.to_vec())?;
                return Ok(Flow::Exit);
            }
            "command" | "builtin" if arguments.first().is_some_and(|it| !it.starts_with('-')) => {
                return self.execute(arguments.to_vec());
            }
            "exit" => {
                self.status = ended_with(arguments.first(), before);
                return Ok(Flow::Exit);
            }
            "return" => {
                self.status = ended_with(arguments.first(), before);
                // Outside of a function bash ignores it.
                return Ok(if self.locals.is_empty() { Flow::Next } else { Flow::Return });
            }
            "read" => self.read_line(arguments)?,
            "mapfile" | "readarray" => self.read_lines(arguments)?,
            "getopts" if self.arguments.is_empty() => self.status = Status::Known(1),
            "source" | "." => self.source(arguments),
            "cat" | "tee" if arguments.iter().all(|it| it == "-") => self.copy(&name),
            "basename" | "dirname" | "seq" if !arguments.is_empty() => {
                self.path_tool(&name, arguments)?;
            }
            _ => return self.start(words),
        }
        Ok(Flow::Next)
    }

    /// `break 2`, `continue`
    fn leaves(&self, name: &str, levels: Option<&String>) -> Flow {
        let levels = levels.map_or(Some(1), |it| it.parse().ok()).unwrap_or(1);
        let levels = levels.clamp(1, self.loops);
        if name == "break" { Flow::Break(levels) } else { Flow::Continue(levels) }
    }

    /// Sets all positional parameters.
    pub(super) fn set_arguments(&mut self, arguments: &[String]) {
        self.arguments = arguments.to_vec();
        self.has_all_arguments = true;
    }

    fn shift(&mut self, by: Option<&String>) {
        let by = by.map_or(Some(1), |by| by.parse().ok()).unwrap_or(1_usize);
        if by <= self.arguments.len() {
            self.arguments.drain(..by);
        } else {
            self.status = Status::Known(1);
        }
    }

    fn unset(&mut self, arguments: &[String]) -> Outcome<()> {
        let of_functions = arguments.first().is_some_and(|it| it == "-f");
        for name in arguments.iter().filter(|it| !it.starts_with('-')) {
            let (name, index) = match name.strip_suffix(']').and_then(|it| it.split_once('[')) {
                Some((name, index)) => (name, self.index(name, index)?),
                None => (name.as_str(), None),
            };
            if of_functions
                || self.functions.contains_key(name) && self.variables.get(name).is_none()
            {
                self.functions.remove(name);
            } else {
                self.variables.unset(name, index.as_deref());
            }
        }
        Ok(())
    }

    /// `set -e`, `set -- a b`
    fn set_options(&mut self, arguments: &[String]) {
        let mut rest = arguments;
        while let [option, after @ ..] = rest {
            let is_on = option.starts_with('-');
            match option.as_str() {
                "--" => {
                    self.set_arguments(after);
                    return;
                }
                "-o" | "+o" => {
                    let name = after.first().map_or("", String::as_str);
                    match name {
                        "errexit" => self.ends_on_error = is_on,
                        "allexport" => self.exports_all = is_on,
                        _ => {}
                    }
                    rest = after.get(1..).unwrap_or_default();
                    continue;
                }
                option if option.len() > 1 && option.starts_with(['-', '+']) => {
                    if option.contains('e') {
                        self.ends_on_error = is_on;
                    }
                    if option.contains('a') {
                        self.exports_all = is_on;
                    }
                    // `-eo pipefail`
                    rest = if option.contains('o') {
                        after.get(1..).unwrap_or_default()
                    } else {
                        after
                    };
                    continue;
                }
                _ => {
                    self.set_arguments(rest);
                    return;
                }
            }
        }
    }

    fn source(&mut self, arguments: &[String]) {
        let file = arguments.first().map_or("", String::as_str).to_owned();
        self.note(&format!("'{file}' is another script: what it sets is not known"));
        self.write_unknown("source");
    }

    /// A command that is not a builtin.
    fn start(&mut self, words: Vec<String>) -> Outcome<Flow> {
        let name = words[0].clone();
        let line = self.line;
        // Commands are compared with each other.
        self.limits.spend(16 * (self.started.len() + self.cut.len()))?;
        if name.starts_with('-') {
            self.cut.push(Started { line, words });
            self.status = Status::Known(127);
            return Ok(Flow::Next);
        }
        if name.starts_with('[') && name.len() > 1 {
            let inner = self.written.trim_start_matches('[').to_owned();
            self.note(&format!(
                "no space between '[' and '{inner}': bash finds no such command and takes the \
                 other branch, so the program never gets the flags in this one"
            ));
            self.status = Status::Known(127);
            return Ok(Flow::Next);
        }
        if words.get(1).is_some_and(|it| it == "=") {
            self.note(&format!(
                "'{name} =' is a command, not an assignment: bash allows no spaces around '=' and \
                 ignores this line"
            ));
            self.status = Status::Known(127);
            return Ok(Flow::Next);
        }
        if let Some(at) = inner_script(&words) {
            return self.start_shell(&words, at);
        }
        let short: Vec<&str> = words.iter().take(4).map(String::as_str).collect();
        let short = short.join(" ");
        let all: Vec<String> = self.launcher.iter().cloned().chain(words).collect();
        if all.iter().map(String::len).sum::<usize>() > super::vars::TEXT_BYTES_MAX {
            let most = super::vars::TEXT_BYTES_MAX;
            return Err(format!("line {line}: a command is longer than {most} bytes"));
        }
        if all.len() > WORDS_MAX {
            return Err(format!("line {line}: a command has more than {WORDS_MAX} words"));
        }
        self.write_unknown(&short);
        if program_at(&all).is_some() {
            let started = Started { line, words: all };
            if !self.started.contains(&started) || self.started.len() < 2000 {
                self.started.push(started);
            }
        } else if !HARMLESS.contains(&name.as_str()) {
            self.note(&format!("'{name}' is a command; its effect is not examined"));
        }
        Ok(Flow::Next)
    }

    /// `bash -c '...' name arguments`, after a launcher or alone; or a script that it reads.
    fn start_shell(&mut self, words: &[String], at: usize) -> Outcome<Flow> {
        let flags = words[at + 1..].iter().take_while(|it| it.starts_with('-')).count();
        let has_text = words[at + 1..=at + flags].iter().any(|it| is_command_flag(it));
        let (text, arguments) = if has_text {
            let text = words.get(at + 1 + flags).cloned().unwrap_or_default();
            (text, words.get(at + 3 + flags..).unwrap_or_default().to_vec())
        } else {
            match self.input.take().filter(|_| at + 1 + flags == words.len()) {
                Some(text) => (text, Vec::new()),
                None => {
                    let script = words.get(at + 1 + flags).cloned().unwrap_or_default();
                    self.note(&format!("'{script}' is another script: it is not read"));
                    self.write_unknown("bash");
                    return Ok(Flow::Next);
                }
            }
        };
        let outer = std::mem::take(&mut self.launcher);
        self.launcher = outer.iter().cloned().chain(words[..at].iter().cloned()).collect();
        let locals = std::mem::take(&mut self.locals);
        let ended = self.apart(|shell| {
            shell.variables.keep_exported();
            shell.functions.clear();
            shell.set_arguments(&arguments);
            shell.ends_on_error = false;
            shell.loops = 0;
            shell.run_text(&text)
        });
        (self.launcher, self.locals) = (outer, locals);
        ended.map(|()| Flow::Next)
    }
}

/// The code of `exit` and `return`: the argument, or the code of the command before.
fn ended_with(code: Option<&String>, before: Status) -> Status {
    match code.map(|code| code.parse()) {
        None => before,
        Some(Ok(code)) => Status::Known(code),
        Some(Err(_)) => unknown_status("return"),
    }
}

fn is_command_flag(flag: &str) -> bool {
    flag.starts_with('-') && !flag.starts_with("--") && flag.contains('c')
}

/// The index of a shell that reads a script, if all words before it start programs.
fn inner_script(words: &[String]) -> Option<usize> {
    let at = words.iter().position(|word| SHELLS.contains(&base(word)))?;
    if words[..at].iter().any(|word| word.ends_with(".py")) {
        return None;
    }
    let starts = [
        "srun",
        "mpirun",
        "mpiexec",
        "singularity",
        "apptainer",
        "docker",
        "podman",
        "nohup",
        "env",
        "time",
        "exec",
        "setsid",
        "numactl",
        "timeout",
        "sudo",
        "nice",
        "ssh",
        "pdsh",
        "stdbuf",
        "taskset",
        "enroot",
        "shifter",
    ];
    (at == 0 || starts.contains(&base(&words[0]))).then_some(at)
}

pub(super) fn unknown_status(command: &str) -> Status {
    Status::Unknown { guess: true, text: command.to_owned() }
}
