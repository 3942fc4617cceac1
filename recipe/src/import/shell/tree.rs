//! A script as a tree: converts the parse tree of bash to the statements that are interpreted here.
//!
//! `brush-parser` has the grammar. Its words are kept as written. `expand` reads them when they are
//! used, because the meaning of a quote depends on the context.

use std::rc::Rc;

use brush_parser::ast::{self, CommandPrefixOrSuffixItem as Item, SourceLocation as _};
use brush_parser::{ParserOptions, SourceSpan, Token, TokenizerOptions};

/// A launch script has about a hundred; each can be a stack frame of the tokenizer.
const EXPANSIONS_MAX: usize = 4096;

/// `!`, `&&` and `||` of one `[[ ]]`: each is a stack frame of the parser.
const CONDITIONS_MAX: usize = 256;

/// The grammar tries up to three parses of an unclosed parenthesis: 3^12 is half a million.
const NESTED_MAX: usize = 12;

/// Commands in order.
pub(super) type List = Vec<AndOr>;

/// A word as written, and its line.
#[derive(Clone, Debug, Default)]
pub(super) struct Word {
    pub(super) text: String,
    pub(super) line: usize,
}

/// Pipelines that depend on each other: `first && second || third`.
#[derive(Clone, Debug)]
pub(super) struct AndOr {
    pub(super) first: Pipeline,
    pub(super) rest: Vec<(Link, Pipeline)>,
    pub(super) in_background: bool,
    /// Line in the script: statements of one line are read together.
    pub(super) unit: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Link {
    And,
    Or,
}

#[derive(Clone, Debug)]
pub(super) struct Pipeline {
    pub(super) is_negated: bool,
    pub(super) commands: Vec<Command>,
}

#[derive(Clone, Debug)]
pub(super) struct Command {
    pub(super) kind: CommandKind,
    pub(super) redirects: Vec<Redirect>,
    pub(super) line: usize,
}

#[derive(Clone, Debug)]
pub(super) enum CommandKind {
    Simple { before: Vec<Assign>, words: Vec<Argument> },
    Group(List),
    Subshell(List),
    If { arms: Vec<(List, List)>, otherwise: List },
    For { name: String, words: Option<Vec<Word>>, body: List },
    ForMath { start: String, condition: String, step: String, body: List },
    Case { word: Word, arms: Vec<CaseArm> },
    Loop { condition: List, body: List, is_until: bool },
    Math(String),
    Test(Box<TestTree>),
    Function { name: String, body: Rc<Command> },
}

#[derive(Clone, Debug)]
pub(super) struct CaseArm {
    pub(super) patterns: Vec<Word>,
    pub(super) body: List,
    /// Whether the next arm runs without (`;&`) or with a test (`;;&`).
    pub(super) falls: Option<Link>,
}

/// A word of a command; those of `declare` and similar builtins can be assignments.
#[derive(Clone, Debug)]
pub(super) enum Argument {
    Word(Word),
    Assign(Assign, Word),
}

#[derive(Clone, Debug)]
pub(super) struct Assign {
    pub(super) name: String,
    pub(super) index: Option<String>,
    pub(super) value: AssignValue,
    pub(super) appends: bool,
}

#[derive(Clone, Debug)]
pub(super) enum AssignValue {
    Text(Word),
    Items(Vec<(Option<Word>, Word)>),
}

/// The input of a command, or the redirection of its output.
#[derive(Clone, Debug)]
pub(super) enum Redirect {
    Output,
    /// Redirections of standard error, which are ignored.
    Errors,
    Input,
    HereString(Word),
    HereDocument {
        text: Word,
        expands: bool,
    },
}

/// `[[ ... ]]`
#[derive(Clone, Debug)]
pub(super) enum TestTree {
    And(Box<TestTree>, Box<TestTree>),
    Or(Box<TestTree>, Box<TestTree>),
    Not(Box<TestTree>),
    One(String, Word),
    Two(String, Word, Word),
}

/// Parses a script whose first line has this number.
pub(super) fn parse(text: &str, line: usize) -> Result<List, String> {
    let openings = text.matches(['`', '$']).count();
    if openings > EXPANSIONS_MAX {
        return Err(format!(
            "expected at most {EXPANSIONS_MAX} expansions in a script, found {openings}"
        ));
    }
    // Off, as in bash itself: `!(command)` is a negated subshell.
    let options = TokenizerOptions { enable_extended_globbing: false, ..Default::default() };
    let tokens = brush_parser::uncached_tokenize_str(text, &options).map_err(|error| {
        if error.is_incomplete() {
            format!("line {line}: unclosed quote or parenthesis")
        } else {
            format!("line {line}: {error}")
        }
    })?;
    let tokens = split_double_semicolons(tokens);
    check(&tokens, line)?;
    let options = ParserOptions { enable_extended_globbing: false, ..Default::default() };
    let program = brush_parser::parse_tokens(&tokens, &options).map_err(|error| {
        let at = match &error {
            brush_parser::ParseError::ParsingNear(at) => line + at.line - 1,
            _ => line + text.lines().count().saturating_sub(1),
        };
        format!("line {at}: not a statement of bash")
    })?;
    let builder = TreeBuilder { chars: text.chars().collect(), line };
    let mut all = Vec::new();
    for (unit, list) in program.complete_commands.iter().enumerate() {
        all.extend(builder.list(list)?.into_iter().map(|item| AndOr { unit, ..item }));
    }
    Ok(all)
}

/// `for ((;;))` has two semicolons, which the tokenizer reads as the end of a `case` arm.
fn split_double_semicolons(tokens: Vec<Token>) -> Vec<Token> {
    let mut out: Vec<Token> = Vec::with_capacity(tokens.len());
    let mut depth = 0_usize;
    for token in tokens {
        let is = |at: usize, text: &str| {
            out.len().checked_sub(at).is_some_and(|at| out[at].to_str() == text)
        };
        match &token {
            Token::Operator(text, at) if depth > 0 && text == ";;" => {
                out.push(Token::Operator(";".to_owned(), at.clone()));
                out.push(Token::Operator(";".to_owned(), at.clone()));
                continue;
            }
            Token::Operator(text, _) if text == "(" && depth > 0 => depth += 1,
            Token::Operator(text, _) if text == "(" && is(1, "(") && is(2, "for") => depth = 2,
            Token::Operator(text, _) if text == ")" => depth = depth.saturating_sub(1),
            _ => {}
        }
        out.push(token);
    }
    out
}

/// Refuses text that the parser cannot read in bounded time or would panic on.
fn check(tokens: &[Token], line: usize) -> Result<(), String> {
    let (mut parens, mut blocks) = (0_usize, 0_usize);
    let mut conditions = None;
    for (at, token) in tokens.iter().enumerate() {
        let place = line + token.location().start.line - 1;
        match token {
            Token::Operator(text, _) => match text.as_str() {
                "(" => parens += 1,
                ")" => parens = parens.saturating_sub(1),
                _ => {}
            },
            Token::Word(text, _) => {
                let begins = at.checked_sub(1).is_none_or(|before| begins_command(&tokens[before]));
                match text.as_str() {
                    "if" | "case" | "do" | "{" if begins => blocks += 1,
                    "fi" | "esac" | "done" | "}" if begins => blocks = blocks.saturating_sub(1),
                    _ => {}
                }
                let is_number = text.len() > 9 && text.bytes().all(|c| c.is_ascii_digit());
                let next = tokens.get(at + 1).map_or("", Token::to_str);
                if is_number && next.starts_with(['<', '>']) {
                    return Err(format!("line {place}: {text} is not a file descriptor"));
                }
                check_index(text, place)?;
            }
        }
        conditions = match (conditions, token.to_str()) {
            (_, "]]") => None,
            (None, "[[") => Some(0),
            (Some(count), "!" | "&&" | "||") => Some(count + 1),
            (conditions, _) => conditions,
        };
        if conditions > Some(CONDITIONS_MAX) {
            return Err(format!("line {place}: more than {CONDITIONS_MAX} conditions in '[[ ]]'"));
        }
        if parens + blocks > NESTED_MAX {
            return Err(format!("line {place}: statements nested more than {NESTED_MAX} deep"));
        }
    }
    Ok(())
}

/// Whether a command can start after this.
fn begins_command(token: &Token) -> bool {
    match token {
        Token::Operator(text, _) => !text.contains(['<', '>']),
        Token::Word(text, _) => {
            let words = ["if", "then", "else", "elif", "do", "while", "until", "!", "{", "time"];
            words.contains(&text.as_str()) || ["fi", "done", "esac", "}"].contains(&text.as_str())
        }
    }
}

/// A nested index is parsed once for each possible meaning.
fn check_index(word: &str, line: usize) -> Result<(), String> {
    let Some((name, rest)) = word.split_once('[') else { return Ok(()) };
    if !super::is_name(name) {
        return Ok(());
    }
    let signs = |text: &str| text.matches(['$', '`']).count();
    let index = rest.split(']').next().unwrap_or(rest);
    if signs(index) > 2 || signs(word) > 8 || index.matches('[').count() > 4 {
        return Err(format!("line {line}: an index is nested too deep"));
    }
    Ok(())
}

struct TreeBuilder {
    chars: Vec<char>,
    line: usize,
}

impl TreeBuilder {
    fn at(&self, place: Option<&SourceSpan>) -> usize {
        self.line + place.map_or(1, |place| place.start.line).saturating_sub(1)
    }

    /// A word with its original spaces, which tokens of `${...}` lack.
    fn word(&self, word: &ast::Word) -> Word {
        let line = self.at(word.loc.as_ref());
        let text = word.loc.as_ref().filter(|_| word.value.contains("${"));
        let text = text.and_then(|place| self.written(&word.value, place));
        Word { text: text.unwrap_or_else(|| word.value.clone()), line }
    }

    fn written(&self, value: &str, place: &SourceSpan) -> Option<String> {
        let text: String = self.chars.get(place.start.index..place.end.index)?.iter().collect();
        // A position starts at the `\` of the lines before.
        let text = text.replace("\\\n", "");
        let text = text.trim_matches([' ', '\t', '\n']);
        let bare = |text: &str| text.split([' ', '\t', '\n']).collect::<String>();
        (bare(text) == bare(value)).then(|| text.to_owned())
    }

    fn list(&self, list: &ast::CompoundList) -> Result<List, String> {
        let items = list.0.iter().map(|ast::CompoundListItem(item, end)| {
            let rest = item.additional.iter().map(|next| match next {
                ast::AndOr::And(next) => Ok((Link::And, self.pipeline(next)?)),
                ast::AndOr::Or(next) => Ok((Link::Or, self.pipeline(next)?)),
            });
            Ok(AndOr {
                first: self.pipeline(&item.first)?,
                rest: rest.collect::<Result<_, String>>()?,
                in_background: matches!(end, ast::SeparatorOperator::Async),
                unit: 0,
            })
        });
        items.collect()
    }

    fn pipeline(&self, pipeline: &ast::Pipeline) -> Result<Pipeline, String> {
        let commands = pipeline.seq.iter().map(|command| self.command(command));
        let is_negated = pipeline.bang;
        Ok(Pipeline { is_negated, commands: commands.collect::<Result<_, _>>()? })
    }

    fn command(&self, command: &ast::Command) -> Result<Command, String> {
        let line = self.at(command.location().as_ref());
        let (kind, redirects) = match command {
            ast::Command::Simple(simple) => return self.simple(simple, line),
            ast::Command::Compound(compound, redirects) => {
                (self.compound(compound)?, redirects.as_ref())
            }
            ast::Command::Function(function) => {
                let ast::FunctionBody(body, redirects) = &function.body;
                let body = Rc::new(Command {
                    kind: self.compound(body)?,
                    redirects: self.redirects(redirects.as_ref()),
                    line,
                });
                (CommandKind::Function { name: function.fname.value.clone(), body }, None)
            }
            ast::Command::ExtendedTest(test, redirects) => {
                (CommandKind::Test(Box::new(self.test(&test.expr))), redirects.as_ref())
            }
        };
        Ok(Command { kind, redirects: self.redirects(redirects), line })
    }

    fn simple(&self, simple: &ast::SimpleCommand, line: usize) -> Result<Command, String> {
        let (mut before, mut words, mut redirects) = (Vec::new(), Vec::new(), Vec::new());
        for item in simple.prefix.iter().flat_map(|prefix| &prefix.0) {
            match item {
                Item::IoRedirect(redirect) => redirects.push(self.redirect(redirect)),
                Item::AssignmentWord(assign, word) => before.push(self.assign(assign, word)?),
                Item::Word(_) | Item::ProcessSubstitution(..) => {}
            }
        }
        words.extend(simple.word_or_name.as_ref().map(|name| Argument::Word(self.word(name))));
        for item in simple.suffix.iter().flat_map(|suffix| &suffix.0) {
            match item {
                Item::IoRedirect(redirect) => redirects.push(self.redirect(redirect)),
                Item::Word(word) => words.push(Argument::Word(self.word(word))),
                Item::AssignmentWord(assign, word) => {
                    words.push(Argument::Assign(self.assign(assign, word)?, self.word(word)));
                }
                Item::ProcessSubstitution(..) => {
                    // A path that the shell generates.
                    let text = "${process_substitution}".to_owned();
                    words.push(Argument::Word(Word { text, line }));
                }
            }
        }
        let line = match words.first() {
            Some(Argument::Word(first)) if before.is_empty() => first.line,
            _ => line,
        };
        Ok(Command { kind: CommandKind::Simple { before, words }, redirects, line })
    }

    fn assign(&self, assign: &ast::Assignment, word: &ast::Word) -> Result<Assign, String> {
        let (name, index) = match &assign.name {
            ast::AssignmentName::VariableName(name) => (name.clone(), None),
            ast::AssignmentName::ArrayElementName(name, index) => {
                (name.clone(), Some(index.clone()))
            }
        };
        let line = self.at(Some(&assign.loc));
        let value = match &assign.value {
            ast::AssignmentValue::Scalar(scalar) => {
                let written = self.word(word).text;
                let text = written.split_once('=').map(|(_, value)| value.to_owned());
                let text = text.filter(|_| index.is_none()).unwrap_or_else(|| scalar.value.clone());
                AssignValue::Text(Word { text, line })
            }
            ast::AssignmentValue::Array(items) => {
                let written = self.items(assign, items.len());
                let items = items.iter().enumerate().map(|(at, (index, item))| {
                    let index =
                        index.as_ref().map(|index| Word { text: index.value.clone(), line });
                    let kept =
                        written.as_ref().filter(|_| index.is_none()).map(|it| it[at].clone());
                    (index, Word { text: kept.unwrap_or_else(|| item.value.clone()), line })
                });
                AssignValue::Items(items.collect())
            }
        };
        Ok(Assign { name, index, value, appends: assign.append })
    }

    /// The items of `NAME=(...)` with their original spaces.
    fn items(&self, assign: &ast::Assignment, count: usize) -> Option<Vec<String>> {
        let place = &assign.loc;
        let text: String = self.chars.get(place.start.index..place.end.index)?.iter().collect();
        let (start, end) = (text.find('(')? + 1, text.rfind(')')?);
        let inner = text.get(start..end)?.to_owned();
        if !inner.contains("${") {
            return None;
        }
        let options = TokenizerOptions { enable_extended_globbing: false, ..Default::default() };
        let tokens = brush_parser::uncached_tokenize_str(&inner, &options).ok()?;
        let builder = TreeBuilder { chars: inner.chars().collect(), line: self.line };
        let words = tokens.iter().filter(|token| matches!(token, Token::Word(..)));
        let words: Vec<String> =
            words.map(|token| builder.word(&ast::Word::from(token)).text).collect();
        (words.len() == count).then_some(words)
    }

    fn redirects(&self, redirects: Option<&ast::RedirectList>) -> Vec<Redirect> {
        let all = redirects.iter().flat_map(|list| &list.0);
        all.map(|redirect| self.redirect(redirect)).collect()
    }

    fn redirect(&self, redirect: &ast::IoRedirect) -> Redirect {
        use ast::IoFileRedirectKind as Kind;
        match redirect {
            ast::IoRedirect::HereString(_, word) => Redirect::HereString(self.word(word)),
            ast::IoRedirect::HereDocument(_, document) => {
                let line = self.at(document.doc.loc.as_ref());
                let text = Word { text: document.doc.value.clone(), line };
                Redirect::HereDocument { text, expands: document.requires_expansion }
            }
            ast::IoRedirect::File(Some(2), ..) => Redirect::Errors,
            ast::IoRedirect::File(_, Kind::Read | Kind::ReadAndWrite | Kind::DuplicateInput, _) => {
                Redirect::Input
            }
            ast::IoRedirect::File(..) | ast::IoRedirect::OutputAndError(..) => Redirect::Output,
        }
    }

    fn compound(&self, compound: &ast::CompoundCommand) -> Result<CommandKind, String> {
        use ast::CompoundCommand as Of;
        Ok(match compound {
            Of::Arithmetic(math) => CommandKind::Math(math.expr.value.clone()),
            Of::ArithmeticForClause(looped) => {
                let text = |part: &Option<ast::UnexpandedArithmeticExpr>| {
                    part.as_ref().map(|part| part.value.clone()).unwrap_or_default()
                };
                CommandKind::ForMath {
                    start: text(&looped.initializer),
                    condition: text(&looped.condition),
                    step: text(&looped.updater),
                    body: self.list(&looped.body.list)?,
                }
            }
            Of::BraceGroup(group) => CommandKind::Group(self.list(&group.list)?),
            Of::Subshell(shell) => CommandKind::Subshell(self.list(&shell.list)?),
            Of::ForClause(looped) => {
                let words = looped.values.as_ref();
                // `in` without words is an empty list.
                let is_in = words.is_some() || self.has_in(&looped.loc);
                let words = words.map(|words| words.iter().map(|word| self.word(word)).collect());
                CommandKind::For {
                    name: looped.variable_name.clone(),
                    words: words.or(is_in.then(Vec::new)),
                    body: self.list(&looped.body.list)?,
                }
            }
            Of::CaseClause(choice) => {
                let arms = choice.cases.iter().map(|arm| self.case_arm(arm));
                CommandKind::Case {
                    word: self.word(&choice.value),
                    arms: arms.collect::<Result<_, _>>()?,
                }
            }
            Of::IfClause(choice) => self.choice(choice)?,
            Of::WhileClause(looped) => self.looped(looped, Link::And)?,
            Of::UntilClause(looped) => self.looped(looped, Link::Or)?,
            Of::Coprocess(process) => {
                let line = self.at(Some(&process.loc));
                return Err(format!("line {line}: 'coproc' is not supported"));
            }
        })
    }

    fn has_in(&self, place: &SourceSpan) -> bool {
        let text = self.chars.get(place.start.index..place.end.index).unwrap_or_default();
        let text: String = text.iter().take(200).collect();
        text.split([' ', '\t', '\n', ';']).nth(2) == Some("in")
    }

    fn looped(
        &self,
        looped: &ast::WhileOrUntilClauseCommand,
        kind: Link,
    ) -> Result<CommandKind, String> {
        Ok(CommandKind::Loop {
            condition: self.list(&looped.0)?,
            body: self.list(&looped.1.list)?,
            is_until: kind == Link::Or,
        })
    }

    fn choice(&self, choice: &ast::IfClauseCommand) -> Result<CommandKind, String> {
        let mut arms = vec![(self.list(&choice.condition)?, self.list(&choice.then)?)];
        let mut otherwise = Vec::new();
        for other in choice.elses.iter().flatten() {
            match &other.condition {
                Some(condition) => arms.push((self.list(condition)?, self.list(&other.body)?)),
                None => otherwise = self.list(&other.body)?,
            }
        }
        Ok(CommandKind::If { arms, otherwise })
    }

    fn case_arm(&self, arm: &ast::CaseItem) -> Result<CaseArm, String> {
        use ast::CaseItemPostAction as After;
        Ok(CaseArm {
            patterns: arm.patterns.iter().map(|word| self.word(word)).collect(),
            body: arm.cmd.as_ref().map(|list| self.list(list)).transpose()?.unwrap_or_default(),
            falls: match arm.post_action {
                After::ExitCase => None,
                After::UnconditionallyExecuteNextCaseItem => Some(Link::And),
                After::ContinueEvaluatingCases => Some(Link::Or),
            },
        })
    }

    fn test(&self, test: &ast::ExtendedTestExpr) -> TestTree {
        use ast::ExtendedTestExpr as Of;
        let boxed = |test: &Of| Box::new(self.test(test));
        match test {
            Of::And(left, right) => TestTree::And(boxed(left), boxed(right)),
            Of::Or(left, right) => TestTree::Or(boxed(left), boxed(right)),
            Of::Not(inner) => TestTree::Not(boxed(inner)),
            Of::Parenthesized(inner) => self.test(inner),
            Of::UnaryTest(kind, word) => TestTree::One(kind.to_string(), self.word(word)),
            Of::BinaryTest(kind, left, right) => {
                TestTree::Two(kind.to_string(), self.word(left), self.word(right))
            }
        }
    }
}
