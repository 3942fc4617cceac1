//! The persisted and public names: serde fields, keys of handwritten JSON, counters, and flags.
//! `tests/golden/names` lists them, a file for each crate, without the names of types: a renamed
//! type or a moved module changes nothing, a renamed field does.
//!
//! Lines and names may be added; a removed one breaks files or commands of users. `FEEDLINE_BLESS=1
//! cargo test -p tests names::` updates the files; review the diff.

use std::fs;
use std::path::Path;

use syn::punctuated::Punctuated;
use syn::visit::{self, Visit};
use syn::{Attribute, Expr, Field, Fields, Item, ItemEnum, ItemStruct, Lit, Meta, Token, Variant};

use proc_macro2::{Delimiter, TokenStream, TokenTree};

const CRATES: [&str; 11] = [
    "storage",
    "indexed",
    "preprocess",
    "loader",
    "ckpt",
    "recipe",
    "feed",
    "logbook",
    "trainer",
    "trainer/bridge",
    "tools",
];

#[test]
fn persisted_and_public_names_do_not_change() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let is_blessed = std::env::var_os("FEEDLINE_BLESS").is_some();
    let mut differences = String::new();
    for name in CRATES {
        let golden = root.join(format!("tests/golden/names/{}.txt", name.replace('/', "-")));
        let mut found = Names::default();
        for file in rust_files(&root.join(name).join("src")) {
            let text = fs::read_to_string(&file).unwrap();
            found.visit_file(&syn::parse_file(&text).unwrap());
        }
        found.lines.sort();
        let found = found.lines.join("\n") + "\n";
        if is_blessed {
            fs::create_dir_all(golden.parent().unwrap()).unwrap();
            fs::write(&golden, &found).unwrap();
        }
        let expected = fs::read_to_string(&golden).unwrap();
        differences += &difference(name, &expected, &found);
    }
    assert!(differences.is_empty(), "names differ from tests/golden/names:\n{differences}");
}

/// The lines that only one of two sorted texts has.
fn difference(name: &str, expected: &str, found: &str) -> String {
    let only = |sign: char, of: &str, other: &str| {
        let mut other: Vec<&str> = other.lines().collect();
        let mut text = String::new();
        for line in of.lines() {
            match other.iter().position(|candidate| *candidate == line) {
                Some(at) => drop(other.swap_remove(at)),
                None => text += &format!("{name}: {sign} {line}\n"),
            }
        }
        text
    };
    only('-', expected, found) + &only('+', found, expected)
}

/// The files below a folder, except those of tests.
fn rust_files(folder: &Path) -> Vec<std::path::PathBuf> {
    let mut files = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap().to_owned();
        if path.is_dir() {
            files.extend(rust_files(&path));
        } else if name.ends_with(".rs") && !name.ends_with("tests.rs") {
            files.push(path);
        }
    }
    files
}

/// The names in the code: a line for each type, object or group of flags.
#[derive(Default)]
struct Names {
    lines: Vec<String>,
}

impl<'ast> Visit<'ast> for Names {
    fn visit_item(&mut self, item: &'ast Item) {
        if !is_test(item) {
            visit::visit_item(self, item);
        }
    }

    fn visit_item_struct(&mut self, item: &'ast ItemStruct) {
        let container = Serde::of(&item.attrs);
        if derives(&item.attrs, &["Serialize", "Deserialize"]) {
            self.push("serde", container.tag.as_deref(), &fields(&item.fields, &container));
        }
        if derives(&item.attrs, &["Parser", "Args"]) {
            self.push("flags", None, &flags(&item.fields));
        }
    }

    fn visit_item_enum(&mut self, item: &'ast ItemEnum) {
        let container = Serde::of(&item.attrs);
        if derives(&item.attrs, &["Serialize", "Deserialize"]) {
            let variants = item.variants.iter().map(|variant| {
                let name = container.variant(variant);
                match fields(&variant.fields, &Serde::of(&variant.attrs)) {
                    inner if inner.is_empty() => name,
                    inner => format!("{name}({})", inner.join(" ")),
                }
            });
            self.push("serde", container.tag.as_deref(), &variants.collect::<Vec<_>>());
        }
        if derives(&item.attrs, &["Subcommand", "ValueEnum"]) {
            let variants = item.variants.iter().map(|variant| {
                let kebab = cased(&variant.ident.to_string(), "kebab-case");
                let given = |of| argument(&variant.attrs, of, "name").flatten();
                let given = given("command").or_else(|| given("value"));
                let mut name = given.unwrap_or(kebab);
                if let Some(alias) = argument(&variant.attrs, "command", "alias").flatten() {
                    name += &format!("|{alias}");
                }
                match flags(&variant.fields) {
                    inner if inner.is_empty() => name,
                    inner => format!("{name}({})", inner.join(" ")),
                }
            });
            self.push("words", None, &variants.collect::<Vec<_>>());
        }
    }

    fn visit_macro(&mut self, item: &'ast syn::Macro) {
        match item.path.segments.last().map(|last| last.ident.to_string()).as_deref() {
            Some("json") => {
                let mut keys = Vec::new();
                json_keys(item.tokens.clone(), &mut keys);
                self.push("json", None, &keys);
            }
            // Enums of `recipe`, which a macro defines.
            Some("words") => {
                let words = variants_of_words(item.tokens.clone());
                self.push("serde", None, &words);
            }
            _ => {}
        }
    }

    fn visit_impl_item_fn(&mut self, item: &'ast syn::ImplItemFn) {
        if item.sig.ident == "metrics" {
            let mut texts = Texts::default();
            texts.visit_block(&item.block);
            self.push("counters", None, &texts.0);
        }
        if !item.attrs.iter().any(is_for_tests) {
            visit::visit_impl_item_fn(self, item);
        }
    }
}

impl Names {
    fn push(&mut self, kind: &str, tag: Option<&str>, names: &[String]) {
        if !names.is_empty() {
            let tag = tag.map(|tag| format!("{tag}: ")).unwrap_or_default();
            self.lines.push(format!("{kind} {tag}{}", names.join(" ")));
        }
    }
}

/// The string literals of a function.
#[derive(Default)]
struct Texts(Vec<String>);

impl<'ast> Visit<'ast> for Texts {
    fn visit_lit_str(&mut self, text: &'ast syn::LitStr) {
        self.0.push(text.value());
    }

    fn visit_macro(&mut self, item: &'ast syn::Macro) {
        self.of_tokens(item.tokens.clone());
    }
}

impl Texts {
    fn of_tokens(&mut self, tokens: TokenStream) {
        for token in tokens {
            match token {
                TokenTree::Group(group) => self.of_tokens(group.stream()),
                TokenTree::Literal(literal) => {
                    if let Ok(Lit::Str(text)) = syn::parse_str(&literal.to_string()) {
                        self.0.push(text.value());
                    }
                }
                _ => {}
            }
        }
    }
}

/// The serde attributes of a type, a variant or a field.
#[derive(Default)]
struct Serde {
    rename: Option<String>,
    rename_all: Option<String>,
    tag: Option<String>,
    aliases: Vec<String>,
    is_absent: bool,
    is_flat: bool,
}

impl Serde {
    fn of(attributes: &[Attribute]) -> Self {
        let mut serde = Serde::default();
        for (name, value) in attributes.iter().flat_map(|of| settings(of, "serde")) {
            match (name.as_str(), value) {
                ("rename", Some(value)) => serde.rename = Some(value),
                ("rename_all", Some(value)) => serde.rename_all = Some(value),
                ("tag", Some(value)) => serde.tag = Some(value),
                ("alias", Some(value)) => serde.aliases.push(value),
                ("skip", None) => serde.is_absent = true,
                ("flatten", None) => serde.is_flat = true,
                _ => {}
            }
        }
        serde
    }

    fn variant(&self, variant: &Variant) -> String {
        let own = Serde::of(&variant.attrs);
        let name = variant.ident.to_string();
        let style = self.rename_all.as_deref().unwrap_or("");
        own.rename.unwrap_or_else(|| cased(&name, style))
    }
}

/// The names of fields, as serialized.
fn fields(fields: &Fields, container: &Serde) -> Vec<String> {
    let name = |field: &Field| {
        let own = Serde::of(&field.attrs);
        let ident = field.ident.as_ref()?.to_string();
        let ident = ident.trim_start_matches("r#");
        if own.is_absent {
            return None;
        }
        if own.is_flat {
            return Some("...".to_owned());
        }
        let style = container.rename_all.as_deref().unwrap_or("");
        let name = own.rename.unwrap_or_else(|| cased(ident, style));
        Some(own.aliases.iter().fold(name, |name, alias| name + "|" + alias))
    };
    fields.iter().filter_map(name).collect()
}

/// The flags of a clap struct; positional arguments have no name.
fn flags(fields: &Fields) -> Vec<String> {
    let flag = |field: &Field| {
        let ident = field.ident.as_ref()?.to_string();
        let long = argument(&field.attrs, "arg", "long")?;
        let name = long.unwrap_or_else(|| ident.trim_start_matches("r#").replace('_', "-"));
        let mut aliases: Vec<String> =
            argument(&field.attrs, "arg", "alias").flatten().into_iter().collect();
        let list = argument(&field.attrs, "arg", "aliases").flatten().unwrap_or_default();
        aliases.extend(list.split_whitespace().map(str::to_owned));
        Some(aliases.iter().fold(format!("--{name}"), |name, alias| name + "|--" + alias))
    };
    fields.iter().filter_map(flag).collect()
}

/// The setting of an attribute such as `#[arg(long = "text")]`: missing, present, or a text.
fn argument(attributes: &[Attribute], of: &str, name: &str) -> Option<Option<String>> {
    let mut all = attributes.iter().flat_map(|attribute| settings(attribute, of));
    all.find(|(found, _)| found == name).map(|(_, value)| value)
}

/// The settings of an attribute with this name, and their texts; the texts of a list are joined
/// with spaces.
fn settings(attribute: &Attribute, of: &str) -> Vec<(String, Option<String>)> {
    if !attribute.path().is_ident(of) {
        return Vec::new();
    }
    let parse = Punctuated::<Meta, Token![,]>::parse_terminated;
    let all = attribute.parse_args_with(parse).unwrap();
    let setting = |meta: Meta| {
        let name = meta.path().get_ident()?.to_string();
        let value = match meta {
            Meta::NameValue(pair) => match pair.value {
                Expr::Array(list) => {
                    Some(list.elems.iter().filter_map(text_of).collect::<Vec<_>>().join(" "))
                }
                expr => text_of(&expr),
            },
            _ => None,
        };
        Some((name, value))
    };
    all.into_iter().filter_map(setting).collect()
}

fn text_of(expr: &Expr) -> Option<String> {
    match expr {
        Expr::Lit(lit) => match &lit.lit {
            Lit::Str(text) => Some(text.value()),
            _ => None,
        },
        _ => None,
    }
}

fn derives(attributes: &[Attribute], any: &[&str]) -> bool {
    let parse = Punctuated::<syn::Path, Token![,]>::parse_terminated;
    let derived = attributes.iter().filter(|attribute| attribute.path().is_ident("derive"));
    derived.filter_map(|attribute| attribute.parse_args_with(parse).ok()).flatten().any(|path| {
        let last = path.segments.last().map(|last| last.ident.to_string());
        last.is_some_and(|last| any.contains(&last.as_str()))
    })
}

/// Whether an item is compiled only for tests.
pub(crate) fn is_test(item: &Item) -> bool {
    let attributes = match item {
        Item::Mod(item) => &item.attrs,
        Item::Fn(item) => &item.attrs,
        Item::Impl(item) => &item.attrs,
        Item::Struct(item) => &item.attrs,
        Item::Enum(item) => &item.attrs,
        _ => return false,
    };
    attributes.iter().any(is_for_tests)
}

fn is_for_tests(attribute: &Attribute) -> bool {
    let is_cfg = attribute.path().is_ident("cfg");
    is_cfg && attribute.parse_args::<syn::Ident>().is_ok_and(|ident| ident == "test")
}

/// Texts before a colon, at any depth.
fn json_keys(tokens: TokenStream, keys: &mut Vec<String>) {
    let mut tokens = tokens.into_iter().peekable();
    while let Some(token) = tokens.next() {
        match token {
            TokenTree::Group(group) => json_keys(group.stream(), keys),
            TokenTree::Literal(literal) => {
                let is_key =
                    matches!(tokens.peek(), Some(TokenTree::Punct(p)) if p.as_char() == ':');
                if let (true, Ok(Lit::Str(text))) = (is_key, syn::parse_str(&literal.to_string())) {
                    keys.push(text.value());
                }
            }
            _ => {}
        }
    }
}

fn variants_of_words(tokens: TokenStream) -> Vec<String> {
    let braces = tokens.into_iter().filter_map(|token| match token {
        TokenTree::Group(group) if group.delimiter() == Delimiter::Brace => Some(group.stream()),
        _ => None,
    });
    let is_word = |token: &TokenTree| matches!(token, TokenTree::Ident(_));
    braces.flatten().filter(is_word).map(|word| cased(&word.to_string(), "kebab-case")).collect()
}

/// A Rust name in one of the styles of serde.
fn cased(name: &str, style: &str) -> String {
    let separator = match style {
        "lowercase" => return name.to_lowercase(),
        "UPPERCASE" => return name.to_uppercase(),
        "snake_case" | "SCREAMING_SNAKE_CASE" => "_",
        "kebab-case" => "-",
        _ => return name.to_owned(),
    };
    let mut cased = String::new();
    for (at, char) in name.char_indices() {
        if at > 0 && char.is_uppercase() {
            cased += separator;
        }
        cased.extend(if char == '_' {
            separator.chars().next()
        } else {
            char.to_lowercase().next()
        });
    }
    if style == "SCREAMING_SNAKE_CASE" { cased.to_uppercase() } else { cased }
}

#[test]
fn a_renamed_field_is_found_and_a_renamed_type_is_not() {
    let names = |code: &str| {
        let mut names = Names::default();
        names.visit_file(&syn::parse_file(code).unwrap());
        names.lines
    };
    let code = r#"
        #[derive(Serialize)]
        struct Part { offset: u64, #[serde(rename = "crc64", alias = "crc")] sum: u64 }
        #[derive(Clone, Deserialize)]
        #[serde(tag = "kind", rename_all = "snake_case")]
        enum Event { ReadLate { path: String }, Done }
        #[derive(Args)]
        struct Options { #[arg(long)] in_flight: u64, #[arg(long = "dir")] at: String, last: u64,
            #[arg(long, aliases = ["from", "input"])] name: String }
        #[derive(Subcommand)]
        enum Verb { #[command(name = "ls", alias = "left")] Left }
        fn as_json() -> Value { json!({ "rows": 3, "of": { "step": [1] } }) }
        impl S { fn metrics(&self) -> Vec<(String, u64)> { vec![("reads".into(), 1)] } }
        #[cfg(test)]
        mod tests { #[derive(Serialize)] struct Ignored { unseen: u64 } }
    "#;
    let expected = [
        "serde offset crc64|crc",
        "serde kind: read_late(path) done",
        "flags --in-flight --dir --name|--from|--input",
        "words ls|left",
        "json rows of step",
        "counters reads",
    ];
    assert_eq!(names(code), expected);
    assert_eq!(names(&code.replace("Part", "Chunk").replace("Event", "State")), expected);
    assert_ne!(names(&code.replace("offset", "at")), expected);
    assert!(difference("c", "a\nb\n", "a\nc\n") == "c: - b\nc: + c\n");
}
