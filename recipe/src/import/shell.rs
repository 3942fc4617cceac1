//! Launch scripts, as far as they are assignments, conditions on them, and one command.
//!
//! Nothing is executed. Variables are followed where they are assigned in the script, and `HOME` is
//! that of whoever asks; what comes from elsewhere stays as it is written, and is refused where it
//! would become a value.

use std::collections::HashMap;

/// A script may not expand to more than this.
const EXPANDED_BYTES_MAX: usize = 1 << 20;

/// What a script says.
#[derive(Debug, Default)]
pub(super) struct Script {
    /// The words of the command that trains, expanded.
    pub(super) command: Vec<String>,
    pub(super) variables: HashMap<String, String>,
    /// What a reader should know.
    pub(super) notes: Vec<String>,
}

/// Commands that change nothing about the run, and words that stand before others.
const HARMLESS: [&str; 15] = [
    "set", "cd", "echo", "mkdir", "module", "source", "ulimit", "eval", "exec", "export", "time",
    "nohup", "exit", "tee", ".",
];

#[derive(Clone, Debug, PartialEq)]
enum Token {
    /// A word with its quotes, not yet expanded, and the line it stands in.
    Word(String, usize),
    /// `NAME=(`, `NAME+=(` and the words up to `)`.
    Array {
        name: String,
        words: Vec<String>,
    },
    End,
}

pub(super) fn read(text: &str) -> Result<Script, String> {
    let tokens = tokens(text)?;
    let mut script = Script::default();
    // A file of flags alone is the command.
    if let Some(Token::Word(first, _)) = tokens.iter().find(|token| **token != Token::End)
        && first.starts_with("--")
    {
        let words = tokens.iter().filter_map(|token| match token {
            Token::Word(word, _) => Some(word.as_str()),
            _ => None,
        });
        script.command = script.expand_all(words)?;
        return Ok(script);
    }
    script.variables.extend(std::env::var("HOME").map(|home| ("HOME".to_owned(), home)));
    // To bash a variable without a value is empty; one that no line gives a value comes from
    // elsewhere.
    for token in &tokens {
        let (Token::Word(word, _) | Token::Array { name: word, .. }) = token else { continue };
        let name = word.split('=').next().unwrap_or(word).trim_end_matches('+');
        if is_name(name) && (word.contains('=') || matches!(token, Token::Array { .. })) {
            script.variables.insert(name.to_owned(), String::new());
        }
    }
    // Whether each open `if` is in a branch that runs, and whether one of its branches has.
    let mut open: Vec<(bool, bool)> = Vec::new();
    for statement in tokens.split(|token| *token == Token::End) {
        script.statement(statement, &mut open)?;
    }
    Ok(script)
}

impl Script {
    #[expect(clippy::match_same_arms, reason = "the order of the arms says when each applies")]
    fn statement(&mut self, tokens: &[Token], open: &mut Vec<(bool, bool)>) -> Result<(), String> {
        let runs = open.iter().all(|(here, _)| *here);
        let (first, line, rest) = match tokens {
            [] => return Ok(()),
            [Token::Array { .. }, ..] if runs => return self.simple(tokens, 0),
            [Token::Word(word, line), rest @ ..] => (word.as_str(), *line, rest),
            [Token::Array { .. } | Token::End, ..] => return Ok(()),
        };
        match first {
            "if" => {
                let above = open.iter().all(|(here, _)| *here);
                let holds = above && self.condition(rest, line)?;
                open.push((holds, holds));
            }
            "elif" | "else" => {
                let (_, done) = open.pop().ok_or(format!("line {line}: '{first}' without 'if'"))?;
                let above = open.iter().all(|(here, _)| *here);
                let holds = above && !done && (first == "else" || self.condition(rest, line)?);
                open.push((holds, done || holds));
                if first == "else" {
                    return self.statement(rest, open);
                }
            }
            "then" => return self.statement(rest, open),
            "fi" => drop(open.pop()),
            "for" | "while" | "until" | "case" | "function" | "do" | "done" | "esac" => {
                return Err(format!(
                    "line {line}: '{first}' is not supported (hint: write out the flags)"
                ));
            }
            _ if runs => return self.simple(tokens, line),
            _ => {}
        }
        Ok(())
    }

    /// Assignments, or a command.
    fn simple(&mut self, tokens: &[Token], line: usize) -> Result<(), String> {
        let mut words = Vec::new();
        let mut exported = false;
        for token in tokens {
            if let Token::Array { name, words } = token {
                let words = self.expand_all(words.iter().map(String::as_str))?;
                self.assign(name, &words.join(" "))?;
            }
            let Token::Word(word, _) = token else { continue };
            let (name, value) = word.split_once('=').unwrap_or((word, ""));
            if words.is_empty() && word.contains('=') && is_name(name.trim_end_matches('+')) {
                let value = self.expand(value)?.join(" ");
                self.assign(name, &value)?;
            } else if words.is_empty() && (word == "export" || word == "eval") {
                exported = true;
            } else {
                words.push(word.as_str());
            }
        }
        let Some(first) = words.first() else { return Ok(()) };
        let command = words.iter().copied().take_while(|word| !word.contains('>'));
        let command = self.expand_all(command)?;
        let trains = command.iter().any(|word| word.ends_with(".py") || word.contains("pretrain_"));
        if trains && !["echo", "cd", "source"].contains(first) {
            self.command = command;
        } else if words.get(1) == Some(&"=") {
            self.notes.push(format!(
                "line {line}: '{first} =' is a command, not an assignment: bash allows no spaces \
                 around '=' and ignores this line"
            ));
        } else if !exported && !HARMLESS.contains(first) && first.starts_with(char::is_alphabetic) {
            self.notes
                .push(format!("line {line}: '{first}' is a command; its effect is not examined"));
        }
        Ok(())
    }

    fn assign(&mut self, name: &str, value: &str) -> Result<(), String> {
        let (name, appended) = match name.strip_suffix('+') {
            Some(name) => {
                let old = self.variables.get(name).cloned().unwrap_or_default();
                let gap = if old.is_empty() || value.starts_with(' ') { "" } else { " " };
                (name, format!("{old}{gap}{value}"))
            }
            None => (name, value.to_owned()),
        };
        if appended.len() > EXPANDED_BYTES_MAX {
            return Err(format!("'{name}' is longer than {EXPANDED_BYTES_MAX} bytes"));
        }
        self.variables.insert(name.to_owned(), appended);
        Ok(())
    }

    fn condition(&mut self, tokens: &[Token], line: usize) -> Result<bool, String> {
        let mut words = Vec::new();
        for token in tokens {
            let Token::Word(word, _) = token else { continue };
            if let Some(inner) = word.strip_prefix('[').filter(|inner| !["", "["].contains(inner)) {
                self.notes.push(format!(
                    "line {line}: no space between '[' and '{inner}': bash finds no such command \
                     and takes the other branch, so the program never gets the flags in this one"
                ));
                return Ok(false);
            }
            let text = self.expand(word)?.join(" ");
            // Whoever starts it without arguments, as its repository does, has none of them.
            let number = text.strip_prefix("${").and_then(|rest| rest.strip_suffix('}'));
            let is_argument = number.is_some_and(|of| of.bytes().all(|c| c.is_ascii_digit()));
            words.push(if is_argument { String::new() } else { text });
        }
        words.retain(|word| !["[", "[[", "]", "]]"].contains(&word.as_str()));
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        Ok(match words[..] {
            [a, "=" | "==" | "-eq", b] => a == b,
            [a, "!=" | "-ne", b] => a != b,
            ["-n", a] => !a.is_empty(),
            ["-z", a] | ["!", a] => a.is_empty(),
            _ => {
                let text = words.join(" ");
                self.notes
                    .push(format!("line {line}: the condition '{text}' is assumed to be false"));
                false
            }
        })
    }

    fn expand_all<'a>(&self, words: impl Iterator<Item = &'a str>) -> Result<Vec<String>, String> {
        let mut all = Vec::new();
        for word in words {
            all.extend(self.expand(word)?);
        }
        if all.iter().map(String::len).sum::<usize>() > EXPANDED_BYTES_MAX {
            return Err(format!("a command is longer than {EXPANDED_BYTES_MAX} bytes"));
        }
        Ok(all)
    }

    /// A word without its quotes and with its variables. What was unquoted falls apart at spaces;
    /// so does a whole word in double quotes that is one variable, for `eval` takes it apart.
    fn expand(&self, word: &str) -> Result<Vec<String>, String> {
        let mut text = String::new();
        let (mut rest, mut quote) = (word, None);
        let mut literal = false;
        while let Some(next) = rest.chars().next() {
            let tail = &rest[next.len_utf8()..];
            match (next, quote) {
                ('\'' | '"', None) => (quote, literal) = (Some(next), true),
                ('\'', Some('\'')) | ('"', Some('"')) => quote = None,
                ('\\', None | Some('"')) => {
                    let escaped = tail.chars().next().unwrap_or('\\');
                    text.push(escaped);
                    rest = tail.get(escaped.len_utf8()..).unwrap_or("");
                    continue;
                }
                ('$', None | Some('"')) => {
                    let (value, after) = self.variable(tail)?;
                    text.push_str(&value);
                    rest = after;
                    continue;
                }
                ('`', None | Some('"')) => {
                    let (command, after) = tail.split_once('`').ok_or("unclosed '`'")?;
                    text.push_str(&unset(command));
                    rest = after;
                    continue;
                }
                _ => text.push(next),
            }
            rest = tail;
        }
        if literal && !word.contains('$') {
            return Ok(vec![text]);
        }
        Ok(text.split_whitespace().map(str::to_owned).collect())
    }

    /// The value of what follows a `$`, and what is behind it.
    fn variable<'a>(&self, text: &'a str) -> Result<(String, &'a str), String> {
        if let Some(inner) = text.strip_prefix("((") {
            let end = inner.find("))").ok_or("'$((' without '))'")?;
            let value = self.arithmetic(&inner[..end]);
            let value = value.map_or_else(|| unset(&inner[..end]), |value| value.to_string());
            return Ok((value, &inner[end + 2..]));
        }
        if let Some(inner) = text.strip_prefix('(') {
            let mut open = 1;
            let end = inner.find(|c| {
                open += i32::from(c == '(') - i32::from(c == ')');
                open == 0
            });
            let end = end.ok_or("'$(' without ')'")?;
            return Ok((unset(&inner[..end]), &inner[end + 1..]));
        }
        if let Some(inner) = text.strip_prefix('{') {
            let end = inner.find('}').ok_or("'${' without '}'")?;
            let (name, other) = inner[..end].split_once(":-").unwrap_or((&inner[..end], ""));
            let bare = name.trim_end_matches("[@]").trim_end_matches("[*]");
            let value =
                self.variables.get(bare).filter(|text| other.is_empty() || !text.is_empty());
            let missing = || if other.is_empty() { unset(bare) } else { other.to_owned() };
            return Ok((value.cloned().unwrap_or_else(missing), &inner[end + 1..]));
        }
        let end = text.find(|c: char| !is_name_char(c)).unwrap_or(text.len());
        let end = if end == 0 { text.chars().next().map_or(0, char::len_utf8) } else { end };
        let name = &text[..end];
        let value = self.variables.get(name).cloned().unwrap_or_else(|| unset(name));
        Ok((value, &text[end..]))
    }

    /// Products, quotients, sums and differences of whole numbers, from left to right.
    fn arithmetic(&self, text: &str) -> Option<i64> {
        let mut value: Option<i64> = None;
        let mut operator = '+';
        let mut rest = text.trim();
        while !rest.is_empty() {
            let end = rest.find(['*', '/', '+', '-']).unwrap_or(rest.len());
            let name = rest[..end].trim().trim_start_matches('$').trim_matches(['{', '}']);
            let text = self.variables.get(name).map_or(name, String::as_str);
            let number: i64 = text.trim().parse().ok()?;
            value = match (operator, value) {
                (_, None) => Some(number),
                ('*', Some(left)) => left.checked_mul(number),
                ('/', Some(left)) => left.checked_div(number),
                // A sum after a product would need precedence.
                ('+', Some(left)) => left.checked_add(number),
                (_, Some(left)) => left.checked_sub(number),
            };
            operator = rest[end..].chars().next().unwrap_or('+');
            rest = rest.get(end + 1..).unwrap_or("").trim();
        }
        value
    }
}

/// An unknown variable or what a command says keeps its sign, in one word, so that it is seen; the
/// arguments of the script are none.
fn unset(name: &str) -> String {
    let name = name.split_whitespace().collect::<Vec<_>>().join("_");
    if ["@", "*"].contains(&&*name) { String::new() } else { format!("${{{name}}}") }
}

fn is_name(text: &str) -> bool {
    !text.is_empty()
        && text.chars().all(is_name_char)
        && !text.starts_with(|c: char| c.is_ascii_digit())
}

fn is_name_char(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '_'
}

/// Passes over what stands between `<<EOF` and `EOF`, and gives its lines.
fn skip_document(chars: &mut std::iter::Peekable<std::str::Chars<'_>>) -> usize {
    let mut take_line = || -> Option<String> {
        let line: String = std::iter::from_fn(|| chars.next_if(|c| *c != '\n')).collect();
        chars.next().map(|_| line)
    };
    let Some(head) = take_line() else { return 0 };
    let end = head.split_whitespace().next().unwrap_or("").trim_matches(['-', '"', '\'']);
    let mut lines = 1;
    while let Some(line) = take_line() {
        lines += 1;
        if line.trim() == end {
            break;
        }
    }
    lines
}

/// Takes what stands between two backquotes, and gives its lines.
fn take_command(chars: &mut std::iter::Peekable<std::str::Chars<'_>>, word: &mut String) -> usize {
    word.push('`');
    let begin = word.len();
    word.extend(std::iter::from_fn(|| chars.next_if(|c| *c != '`')));
    let lines = word[begin..].matches('\n').count();
    word.extend(chars.next());
    lines
}

/// Words and the ends of statements. Lines that end in `\` go on.
fn tokens(text: &str) -> Result<Vec<Token>, String> {
    let mut tokens = Vec::new();
    let (mut word, mut line, mut quote) = (String::new(), 1, None::<char>);
    let mut nested = 0_usize;
    let mut array: Option<(String, Vec<String>)> = None;
    let mut chars = text.chars().peekable();
    while let Some(c) = chars.next() {
        let end = c.is_whitespace() || c == ';' || c == '&' || c == '|';
        match (c, quote) {
            ('\\', None | Some('"')) if chars.peek() == Some(&'\n') => {
                chars.next();
                line += 1;
            }
            ('\\', None | Some('"')) => {
                word.push(c);
                word.extend(chars.next());
            }
            ('\'' | '"', None) => {
                word.push(c);
                quote = Some(c);
            }
            (_, Some(open)) => {
                quote = (c != open).then_some(open);
                word.push(c);
            }
            ('(', None) if word.ends_with('=') && array.is_none() => {
                let name = std::mem::take(&mut word);
                array = Some((name.trim_end_matches('=').to_owned(), Vec::new()));
            }
            ('(' | '{', None) if word.ends_with(['$', '(']) || nested > 0 => {
                nested += 1;
                word.push(c);
            }
            (')' | '}', None) if nested > 0 => {
                nested -= 1;
                word.push(c);
            }
            (')', None) if array.is_some() => {
                let (name, mut words) = array.take().expect("just seen");
                words.extend((!word.is_empty()).then(|| std::mem::take(&mut word)));
                tokens.extend([Token::Array { name, words }, Token::End]);
            }
            ('<', None) if word == "<" => {
                word.clear();
                line += skip_document(&mut chars);
                tokens.push(Token::End);
            }
            ('`', None) => line += take_command(&mut chars, &mut word),
            ('#', None) if word.is_empty() => while chars.next_if(|c| *c != '\n').is_some() {},
            _ if end && nested == 0 => {
                let done = (!word.is_empty()).then(|| std::mem::take(&mut word));
                match &mut array {
                    Some((_, words)) => words.extend(done),
                    None => {
                        tokens.extend(done.map(|word| Token::Word(word, line)));
                        tokens.extend((c == '\n' || !c.is_whitespace()).then_some(Token::End));
                    }
                }
            }
            _ => word.push(c),
        }
        line += usize::from(c == '\n');
    }
    if quote.is_some() || nested > 0 || array.is_some() {
        return Err("unclosed quote or parenthesis".to_owned());
    }
    tokens.extend((!word.is_empty()).then_some(Token::Word(word, line)));
    Ok(tokens)
}
