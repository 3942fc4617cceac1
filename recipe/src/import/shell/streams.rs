//! Commands that read and write: `echo`, `printf`, `read`, `cat` and others.

use super::builtins::unknown_status;
use super::program::base;
use super::run::{Flow, Output, Shell, Status};
use super::{Outcome, escapes, is_name, is_unknown, marker};

impl Shell {
    pub(super) fn write(&mut self, text: &str) {
        if let Some(output) = &mut self.output {
            output.text.push_str(text);
        }
    }

    pub(super) fn write_unknown(&mut self, command: &str) {
        if let Some(Output { is_unknown, .. }) = &mut self.output {
            *is_unknown = true;
        }
        self.status = unknown_status(command);
    }

    pub(super) fn echo(&mut self, arguments: &[String]) {
        let is_flag = |it: &&String| {
            it.len() > 1 && it.starts_with('-') && it[1..].chars().all(|c| "neE".contains(c))
        };
        let flags: String = arguments.iter().take_while(is_flag).map(|it| &it[1..]).collect();
        let count = arguments.iter().take_while(is_flag).count();
        let mut text = arguments[count..].join(" ");
        let mut ends = flags.contains('n');
        let last = flags.rfind(['e', 'E']).map(|at| &flags[at..=at]);
        if last == Some("e") {
            let (read, stops) = escapes::echo(&text);
            text = read;
            ends |= stops;
        }
        if !ends {
            text.push('\n');
        }
        self.write(&text);
    }

    pub(super) fn printf(&mut self, arguments: &[String]) -> Outcome<Flow> {
        let (target, arguments) = match arguments {
            [flag, name, rest @ ..] if flag == "-v" => (Some(name.clone()), rest),
            [flag, rest @ ..] if flag == "--" => (None, rest),
            all => (None, all),
        };
        let text = arguments.split_first().and_then(|(format, rest)| formatted(format, rest));
        match (target, text) {
            (Some(name), Some(text)) if is_name(&name) => {
                if let Err(cause) = self.variables.set(&name, None, text) {
                    self.note(&cause);
                }
            }
            (Some(name), _) => self.variables.forget(name.split('[').next().unwrap_or("")),
            (None, Some(text)) => {
                self.limits.spend(text.len())?;
                self.write(&text);
            }
            (None, None) => self.write_unknown("printf"),
        }
        Ok(Flow::Next)
    }

    /// `read -r A B`
    pub(super) fn read_line(&mut self, arguments: &[String]) -> Outcome<()> {
        let (mut names, mut is_array, mut is_raw) = (Vec::new(), false, false);
        let mut rest = arguments.iter();
        let mut is_known = true;
        while let Some(argument) = rest.next() {
            match argument.strip_prefix('-') {
                Some(flags) if names.is_empty() && !flags.is_empty() => {
                    is_array |= flags.contains('a');
                    is_raw |= flags.contains('r');
                    if let Some(last) = flags.chars().last().filter(|c| "dinNptu".contains(*c)) {
                        is_known &= last == 'p' || last == 't';
                        let value = rest.next();
                        // `-d ''` reads all of it.
                        is_known |= last == 'd' && value.is_some_and(String::is_empty);
                        if last == 'd' && value.is_some_and(String::is_empty) {
                            return self.read_all(arguments.last());
                        }
                    }
                }
                _ => names.push(argument.clone()),
            }
        }
        let input = self.input.take().filter(|_| is_known);
        let Some(input) = input else {
            for name in &names {
                self.variables.forget(name);
            }
            self.status = unknown_status("read");
            return Ok(());
        };
        let (line, after) = input.split_once('\n').unwrap_or((&input, ""));
        let ended = input.contains('\n');
        self.input = Some(after.to_owned());
        if line.contains('\\') && !is_raw {
            names.iter().for_each(|name| self.variables.forget(name));
            return Ok(());
        }
        let separators = self.separators();
        let fields = fields(line, &separators);
        if is_array {
            let items = fields.iter().map(|(text, _)| (None, text.clone())).collect();
            let name = names.first().map_or("", String::as_str).to_owned();
            self.variables.set_items(&name, items, false)?;
        } else if names.is_empty() {
            self.variables.set("REPLY", None, line.to_owned())?;
        } else {
            for (at, name) in names.iter().enumerate() {
                let is_last = at + 1 == names.len();
                let field = fields.get(at);
                let text = match field {
                    Some((_, from)) if is_last && fields.len() > names.len() => line[*from..]
                        .trim_end_matches(|c: char| separators.contains(c) && c.is_whitespace()),
                    Some((text, _)) => text,
                    None => "",
                };
                self.variables.set(name, None, text.to_owned())?;
            }
        }
        self.status = Status::Known(i64::from(!ended));
        Ok(())
    }

    /// `read -r -d '' A <<EOF`
    fn read_all(&mut self, name: Option<&String>) -> Outcome<()> {
        let name = name.filter(|name| is_name(name)).map_or("REPLY", String::as_str).to_owned();
        let input = self.input.take();
        match input.filter(|_| self.separators() == " \t\n") {
            Some(text) => {
                let text = text.trim_matches([' ', '\t', '\n']).to_owned();
                self.variables.set(&name, None, text)?;
                self.status = Status::Known(1);
            }
            None => {
                self.variables.forget(&name);
                self.status = unknown_status("read");
            }
        }
        Ok(())
    }

    /// `mapfile -t A`
    pub(super) fn read_lines(&mut self, arguments: &[String]) -> Outcome<()> {
        let strips = arguments.iter().any(|it| it == "-t");
        let known = arguments.iter().filter(|it| it.starts_with('-')).all(|it| it == "-t");
        let name = arguments.last().filter(|it| !it.starts_with('-'));
        let name = name.map_or("MAPFILE", String::as_str).to_owned();
        match self.input.take().filter(|_| known) {
            Some(text) => {
                let lines = text.split_inclusive('\n').map(|line| {
                    let line = if strips { line.strip_suffix('\n').unwrap_or(line) } else { line };
                    (None, line.to_owned())
                });
                self.variables.set_items(&name, lines.collect(), false)?;
            }
            None => {
                self.variables.forget(&name);
                self.status = unknown_status("mapfile");
            }
        }
        Ok(())
    }

    /// `cat` of its input.
    pub(super) fn copy(&mut self, name: &str) {
        match self.input.take() {
            Some(text) => self.write(&text),
            None => self.write_unknown(name),
        }
    }

    pub(super) fn path_tool(&mut self, name: &str, arguments: &[String]) -> Outcome<()> {
        let known = !arguments.iter().any(|it| is_unknown(it) || it.starts_with('-'));
        let path = arguments[0].trim_end_matches('/');
        let text = match (name, arguments.len()) {
            _ if !known => None,
            ("basename", 1) if !path.is_empty() => Some(base(path).to_owned()),
            ("basename", 2) if !path.is_empty() => {
                let name = base(path);
                let short = name.strip_suffix(arguments[1].as_str()).filter(|it| !it.is_empty());
                Some(short.unwrap_or(name).to_owned())
            }
            ("dirname", 1) if !path.is_empty() => Some(match path.rsplit_once('/') {
                Some((folder, _)) if folder.trim_end_matches('/').is_empty() => "/".to_owned(),
                Some((folder, _)) => folder.trim_end_matches('/').to_owned(),
                None => ".".to_owned(),
            }),
            ("seq", 1 | 2) => {
                let numbers: Option<Vec<i64>> =
                    arguments.iter().map(|it| it.parse().ok()).collect();
                numbers.and_then(|it| {
                    let (from, to) = if it.len() == 1 { (1, it[0]) } else { (it[0], it[1]) };
                    let few = to.checked_sub(from)? < 10_000;
                    let lines: Vec<String> =
                        few.then(|| (from..=to).map(|n| n.to_string()).collect())?;
                    Some(lines.join("\n"))
                })
            }
            _ => None,
        };
        match text {
            Some(text) => {
                self.limits.spend(text.len())?;
                self.write(&format!("{text}\n"));
            }
            None => self.write_unknown(name),
        }
        Ok(())
    }
}

/// The fields of a line, and the start of each.
fn fields(line: &str, separators: &str) -> Vec<(String, usize)> {
    let is_space = |c: char| separators.contains(c) && [' ', '\t', '\n'].contains(&c);
    let mut fields = Vec::new();
    let mut from = line.len() - line.trim_start_matches(is_space).len();
    while from < line.len() {
        let rest = &line[from..];
        let len = rest.find(|c| separators.contains(c)).unwrap_or(rest.len());
        fields.push((rest[..len].to_owned(), from));
        let after = &rest[len..];
        let mut next = after.trim_start_matches(is_space);
        if let Some(c) = next.chars().next().filter(|c| separators.contains(*c)) {
            next = next[c.len_utf8()..].trim_start_matches(is_space);
        }
        from = line.len() - next.len();
    }
    fields
}

/// The output of `printf`. `None` for unsupported formats.
fn formatted(format: &str, arguments: &[String]) -> Option<String> {
    if arguments.iter().any(|it| is_unknown(it)) && format.contains(['d', 'i', 'x']) {
        return Some(marker("printf"));
    }
    let format = escapes::format(format);
    let (mut out, mut rest) = (String::new(), arguments);
    loop {
        let mut taken = 0;
        let mut parts = format.split('%');
        out.push_str(parts.next().unwrap_or(""));
        let mut literal = false;
        for part in parts {
            if std::mem::take(&mut literal) {
                out.push_str(part);
                continue;
            }
            if part.is_empty() {
                out.push('%');
                literal = true;
                continue;
            }
            let at = part.find(|c: char| c.is_ascii_alphabetic())?;
            let (spec, kind, text) = (&part[..at], &part[at..=at], &part[at + 1..]);
            let argument = rest.get(taken).map_or("", String::as_str);
            taken += 1;
            out.push_str(&converted(spec, kind, argument)?);
            out.push_str(text);
        }
        if out.len() > super::vars::TEXT_BYTES_MAX {
            return None;
        }
        rest = rest.get(taken..).unwrap_or_default();
        if rest.is_empty() || taken == 0 {
            return Some(out);
        }
    }
}

fn converted(spec: &str, kind: &str, argument: &str) -> Option<String> {
    let zero = spec.starts_with('0');
    let left = spec.starts_with('-');
    let width = spec.trim_start_matches(['0', '-']);
    let width = if width.is_empty() { 0 } else { width.parse().ok().filter(|it| *it < 1000)? };
    let text = match kind {
        "s" => argument.to_owned(),
        "d" | "i" if argument.is_empty() => "0".to_owned(),
        "d" | "i" => argument.parse::<i64>().ok()?.to_string(),
        "x" => format!("{:x}", argument.parse::<i64>().ok()?),
        _ => return None,
    };
    Some(match (kind, zero, left) {
        ("s", true, _) => return None,
        (_, _, true) => format!("{text:<width$}"),
        (_, true, _) if text.starts_with('-') => return None,
        (_, true, _) => format!("{text:0>width$}"),
        _ => format!("{text:>width$}"),
    })
}
