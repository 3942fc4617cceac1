//! The rules for texts of users, as tests: words, the form of messages, the length of sentences.
//! Each rule is a function from named texts to violations, run on the tree and on a canary.

use proc_macro2::{TokenStream, TokenTree};
use syn::visit::{self, Visit};
use syn::{Attribute, Expr, Item, Lit, Meta};

use crate::names::is_test;
use crate::tidy::{Source, assert_caught, assert_none, sources};

/// Words that no message, help text or document may have, one per line.
const REFUSED: &str = include_str!("../../refused_words.txt");

/// Texts of errors that are not failures of an operation, or are parts of a message.
const OTHER_FORMS: [&str; 5] = [
    "interrupted",
    "stopped on request",
    "{object}: outputs are already complete",
    "loss spike at step",
    "end of file",
];

/// The longest sentence of a document.
const SENTENCE_WORDS_MAX: usize = 30;

#[test]
fn no_message_has_a_refused_word() {
    assert_none(&refused_in_messages(&programs()));
    for canary in [
        r#"fn go() { write!(f, "got {found} bytes"); }"#,
        r#"fn go() { format!("3 bytes due"); }"#,
        r#"fn go() { (say("nobody reads it")) }"#,
        "/// What it was told.\n#[derive(Args)]\nstruct Options { }",
        "#[derive(Args)]\nstruct Options { \n/// Bytes that are due.\n#[arg(long)] size: u64 }",
    ] {
        assert_caught(&refused_in_messages(&[("a/src/b.rs".into(), canary.into())]));
    }
    // Names that programs read, comments and tests are not messages.
    let silent = r#"
        /// What it was told.
        fn go() { key("due"); }
        #[cfg(test)]
        mod tests { fn go() { say("3 bytes due"); } }
    "#;
    assert_none(&refused_in_messages(&[("a/src/b.rs".into(), silent.into())]));
}

#[test]
fn no_document_has_a_refused_word() {
    assert_none(&refused_in_documents(&documents()));
    let document = |text: &str| [("A.md".to_owned(), format!("# A\n\n{text}\n"))];
    assert_caught(&refused_in_documents(&document("The rest is due\nlater.")));
    assert_caught(&refused_in_documents(&document("It goes\non.")));
    assert_none(&refused_in_documents(&document("`due` and\n```\nit goes on\n```\nresidue")));
}

#[test]
fn messages_have_the_form() {
    assert_none(&without_form(&programs()));
    for canary in [
        r#"fn go() { bail!("the file {path} is too short") }"#,
        r#"fn go() { anyhow!("read {path}: no such file") }"#,
        r#"fn go() { ensure!(a == b, "{path} differs"); }"#,
        r#"fn go() { open(path).with_context(|| format!("opening {path}"))?; }"#,
        r#"fn go() { bail!("cannot read {path}: it is short; hint: wait") }"#,
        r#"fn go() { bail!("cannot read {path}: it is short.") }"#,
        r#"impl fmt::Display for StoreError {
            fn fmt(&self) { match self { Error::A { path } => write!(f, "read {path}: short") } }
        }"#,
    ] {
        assert_caught(&without_form(&[("a/src/b.rs".into(), canary.into())]));
    }
    let good = r#"
        fn go() {
            ensure!(name == "a b", "cannot read {name}: expected 'a b'");
            read(path).context("cannot read the \"file\"")?;
            Err(anyhow!("{error}"))
        }
        impl fmt::Display for StoreError {
            fn fmt(&self) { match self { A => write!(f, "cannot read {a}"), B => b.fmt(f) } }
        }
    "#;
    assert_none(&without_form(&[("a/src/b.rs".into(), good.into())]));
}

#[test]
fn sentences_are_short() {
    assert_none(&long_sentences(&documents()));
    let words = |count: usize| vec!["word"; count].join(" ");
    let document = |text: String| [("A.md".to_owned(), format!("# A\n\n{text}\n"))];
    assert_none(&long_sentences(&document(format!("{}. {}.", words(30), words(30)))));
    assert_none(&long_sentences(&document(format!("- {}\n- {}", words(30), words(30)))));
    assert_none(&long_sentences(&document(format!("| {} | {} |", words(30), words(30)))));
    assert_caught(&long_sentences(&document(format!("{}.", words(31)))));
    assert_caught(&long_sentences(&document(format!("{}\n{}.", words(16), words(16)))));
    assert_caught(&long_sentences(&document(format!("- {}\n  {}", words(16), words(16)))));
}

#[test]
fn links_lead_to_files() {
    let exists = |path: &str| tests::root().join(path).exists();
    assert_none(&dead_links(&documents(), exists));
    let document = |text: &str| [("docs/A.md".to_owned(), text.to_owned())];
    let exists = |path: &str| ["README.md", "docs/b.md"].contains(&path);
    assert_none(&dead_links(&document("[a](../README.md) [b](b.md#part) [c](https://c)"), exists));
    assert_caught(&dead_links(&document("[a](README.md)"), exists));
}

/// The code of the programs and of their libraries.
fn programs() -> Vec<Source> {
    let is_test = |path: &str| path.ends_with("tests.rs") || path.contains("/tests/");
    let is_program =
        |path: &str| path.contains("src/") && !is_test(path) && !path.contains("/testing/");
    sources(&["rs"]).into_iter().filter(|(path, _)| is_program(path)).collect()
}

/// The documents of the tree.
fn documents() -> Vec<Source> {
    sources(&["md"])
}

fn refused_in_messages(rust: &[Source]) -> Vec<String> {
    let mut broken = Vec::new();
    for (path, text) in rust {
        for message in Messages::of(text).all {
            // A text of one word is a name.
            if message.contains(' ')
                && let Some(word) = refused(&message)
            {
                broken.push(format!("{path}: '{word}' in {message:?}"));
            }
        }
    }
    broken
}

fn refused_in_documents(documents: &[Source]) -> Vec<String> {
    let mut broken = Vec::new();
    for (path, text) in documents {
        for sentence in sentences(text) {
            if let Some(word) = refused(&sentence) {
                broken.push(format!("{path}: '{word}' in {sentence:?}"));
            }
        }
    }
    broken
}

/// The first refused word or phrase of a text. Words in code, in a path or with a hyphen are names.
fn refused(text: &str) -> Option<&'static str> {
    let is_part = |char: char| char.is_alphanumeric() || "_-`'".contains(char);
    let lower = text.to_lowercase();
    REFUSED.lines().filter(|word| !word.is_empty()).find(|word| {
        lower.match_indices(word).any(|(at, _)| {
            let before = lower[..at].chars().next_back();
            let after = lower[at + word.len()..].chars().next();
            !before.is_some_and(is_part) && !after.is_some_and(is_part)
        })
    })
}

fn without_form(rust: &[Source]) -> Vec<String> {
    let mut broken = Vec::new();
    for (path, text) in rust {
        let messages = Messages::of(text);
        for error in &messages.errors {
            // A forwarded error, the cause of another one, or a name.
            let is_forwarded = ["{source}", "{error}", "{0}", "{}"].iter();
            let is_forwarded = is_forwarded.clone().any(|start| error.starts_with(start));
            let is_part = error.starts_with("expected ") || !error.contains(' ');
            let is_other = OTHER_FORMS.iter().any(|start| error.starts_with(start));
            if !is_forwarded && !is_part && !is_other && !error.starts_with("cannot ") {
                broken.push(format!("{path}: does not start with 'cannot': {error:?}"));
            }
            if error.ends_with('.') {
                broken.push(format!("{path}: ends with a full stop: {error:?}"));
            }
        }
        for message in messages.all.iter().filter(|message| message.contains("; hint:")) {
            broken.push(format!("{path}: expected '(hint: ...)': {message:?}"));
        }
    }
    broken
}

/// The texts that a file can print.
#[derive(Default)]
struct Messages {
    /// Every string literal, and the help of command lines.
    all: Vec<String>,
    /// The starts of error texts.
    errors: Vec<String>,
}

impl Messages {
    fn of(text: &str) -> Self {
        let mut messages = Messages::default();
        messages.visit_file(&syn::parse_file(text).unwrap());
        messages
    }

    fn push_help(&mut self, attributes: &[Attribute]) {
        let lines = attributes.iter().filter_map(|attribute| match &attribute.meta {
            Meta::NameValue(pair) if pair.path.is_ident("doc") => text_of(&pair.value),
            _ => None,
        });
        let lines: Vec<String> = lines.collect();
        self.all.push(lines.join(" "));
        for attribute in attributes {
            let is_of_clap = ["arg", "command", "value"];
            if let Meta::List(list) = &attribute.meta
                && is_of_clap.iter().any(|name| list.path.is_ident(name))
            {
                self.all.extend(literals(list.tokens.clone()));
            }
        }
    }
}

impl<'ast> Visit<'ast> for Messages {
    fn visit_item(&mut self, item: &'ast Item) {
        if is_test(item) {
            return;
        }
        let attributes = match item {
            Item::Struct(item) => &item.attrs,
            Item::Enum(item) => &item.attrs,
            _ => &Vec::new(),
        };
        let is_help = attributes.iter().any(|attribute| {
            let derived = ["Parser", "Args", "Subcommand", "ValueEnum"];
            let Meta::List(list) = &attribute.meta else { return false };
            let tokens = list.tokens.to_string();
            list.path.is_ident("derive") && derived.iter().any(|name| tokens.contains(name))
        });
        match item {
            Item::Struct(item) if is_help => {
                self.push_help(&item.attrs);
                item.fields.iter().for_each(|field| self.push_help(&field.attrs));
            }
            Item::Enum(item) if is_help => {
                self.push_help(&item.attrs);
                for variant in &item.variants {
                    self.push_help(&variant.attrs);
                    variant.fields.iter().for_each(|field| self.push_help(&field.attrs));
                }
            }
            _ => {}
        }
        visit::visit_item(self, item);
    }

    fn visit_item_impl(&mut self, item: &'ast syn::ItemImpl) {
        let is_named = |path: &syn::Path, end: &str| {
            path.segments.last().is_some_and(|last| last.ident.to_string().ends_with(end))
        };
        let of_error = match &*item.self_ty {
            syn::Type::Path(path) => is_named(&path.path, "Error"),
            _ => false,
        };
        if of_error && item.trait_.as_ref().is_some_and(|(_, of, _)| is_named(of, "Display")) {
            let mut arms = Arms::default();
            arms.visit_item_impl(item);
            self.errors.append(&mut arms.0);
        }
        visit::visit_item_impl(self, item);
    }

    fn visit_expr_method_call(&mut self, call: &'ast syn::ExprMethodCall) {
        if ["context", "with_context"].iter().any(|name| call.method == name) {
            let mut inner = Messages::default();
            call.args.iter().for_each(|argument| inner.visit_expr(argument));
            self.errors.extend(inner.all.into_iter().next());
        }
        visit::visit_expr_method_call(self, call);
    }

    fn visit_lit_str(&mut self, text: &'ast syn::LitStr) {
        self.all.push(text.value());
    }

    // Attributes are help, which is handled above, or not for users.
    fn visit_attribute(&mut self, _: &'ast Attribute) {}

    fn visit_macro(&mut self, item: &'ast syn::Macro) {
        let name = item.path.segments.last().map(|last| last.ident.to_string());
        match name.as_deref() {
            Some("bail" | "anyhow") => {
                self.errors.extend(literals(item.tokens.clone()).into_iter().next());
            }
            Some("ensure") => self.errors.extend(second_argument(item.tokens.clone())),
            // A message about a bug, not about an error.
            Some(name) if name.starts_with("assert") || name.starts_with("debug_assert") => return,
            Some("unreachable" | "panic") => return,
            _ => {}
        }
        self.all.extend(literals(item.tokens.clone()));
    }
}

/// The first text of each arm of a `match`.
#[derive(Default)]
struct Arms(Vec<String>);

impl<'ast> Visit<'ast> for Arms {
    fn visit_arm(&mut self, arm: &'ast syn::Arm) {
        let mut inner = Messages::default();
        inner.visit_expr(&arm.body);
        self.0.extend(inner.all.into_iter().next());
    }
}

/// The string literals in tokens, at any depth.
fn literals(tokens: TokenStream) -> Vec<String> {
    let mut found = Vec::new();
    for token in tokens {
        match token {
            TokenTree::Group(group) => found.extend(literals(group.stream())),
            TokenTree::Literal(literal) => {
                if let Ok(Lit::Str(text)) = syn::parse_str(&literal.to_string()) {
                    found.push(text.value());
                }
            }
            _ => {}
        }
    }
    found
}

/// The text of `ensure!(condition, "text")`.
fn second_argument(tokens: TokenStream) -> Option<String> {
    let is_comma = |token: &TokenTree| matches!(token, TokenTree::Punct(p) if p.as_char() == ',');
    let rest = tokens.into_iter().skip_while(|token| !is_comma(token)).skip(1);
    literals(rest.take(1).collect()).into_iter().next()
}

fn text_of(expression: &Expr) -> Option<String> {
    match expression {
        Expr::Lit(literal) => match &literal.lit {
            Lit::Str(text) => Some(text.value()),
            _ => None,
        },
        _ => None,
    }
}

fn long_sentences(documents: &[Source]) -> Vec<String> {
    let mut broken = Vec::new();
    for (path, text) in documents {
        for sentence in sentences(text) {
            let is_word = |word: &&str| word.contains(char::is_alphanumeric);
            let count = sentence.split_whitespace().filter(is_word).count();
            if count > SENTENCE_WORDS_MAX {
                broken.push(format!("{path}: {count} words: {sentence}"));
            }
        }
    }
    broken
}

/// Links to files that do not exist, relative to the document or, in the table of contents of the
/// site, to the root.
fn dead_links(documents: &[Source], exists: impl Fn(&str) -> bool) -> Vec<String> {
    let mut broken = Vec::new();
    for (path, text) in documents {
        for rest in text.split("](").skip(1) {
            let link = rest.split([')', '#']).next().unwrap_or("");
            if link.is_empty() || link.contains("://") {
                continue;
            }
            let mut parts: Vec<&str> = path.split('/').collect();
            parts.pop();
            if path == "docs/site/SUMMARY.md" {
                parts.clear();
            }
            for part in link.split('/') {
                match part {
                    ".." => drop(parts.pop()),
                    "." => {}
                    part => parts.push(part),
                }
            }
            if !exists(&parts.join("/")) {
                broken.push(format!("{path}: no file for the link {link}"));
            }
        }
    }
    broken
}

/// The sentences of a document: of its paragraphs, list items, headings and cells of tables. Inline
/// code is one word, `` `code` ``; code blocks are skipped.
fn sentences(markdown: &str) -> Vec<String> {
    let mut blocks = vec![String::new()];
    let mut is_code = false;
    for line in markdown.lines() {
        let line = line.trim();
        let is_fence = line.starts_with("```");
        is_code ^= is_fence;
        if is_code || is_fence || line.is_empty() || line.starts_with("<!--") {
            blocks.push(String::new());
        } else if line.starts_with('|') {
            blocks.extend(without_code(line).split('|').map(str::to_owned));
            blocks.push(String::new());
        } else {
            let is_numbered = line.split_once(". ").is_some_and(|(number, _)| {
                !number.is_empty() && number.chars().all(|char| char.is_ascii_digit())
            });
            if is_numbered || ["- ", "* ", "#"].iter().any(|start| line.starts_with(start)) {
                blocks.push(String::new());
            }
            let block = blocks.last_mut().expect("never empty");
            *block += line;
            block.push(' ');
        }
    }
    blocks.iter().flat_map(|block| split_sentences(&without_code(block))).collect()
}

/// A text with inline code as one word each.
fn without_code(text: &str) -> String {
    let mut plain = String::new();
    for (at, part) in text.split('`').enumerate() {
        plain += if at % 2 == 0 { part } else { "`code`" };
    }
    plain
}

fn split_sentences(text: &str) -> Vec<String> {
    let mut found = vec![String::new()];
    for word in text.split_whitespace() {
        let sentence = found.last_mut().expect("never empty");
        sentence.push_str(word);
        sentence.push(' ');
        let end = word.trim_end_matches([')', '"', '*', ']']);
        if end.ends_with(['.', '!', '?']) {
            found.push(String::new());
        }
    }
    found.retain(|sentence| !sentence.is_empty());
    found
}
