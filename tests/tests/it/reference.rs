//! `docs/reference` agrees with the code. The page of config keys is generated from doc comments.
//! The handwritten pages must name every environment variable and every exit code.
//!
//! `FEEDLINE_BLESS=1 cargo nextest run -p tests reference` updates the generated page.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs;

use syn::visit::{self, Visit};
use syn::{Attribute, Expr, Field, ItemStruct, Lit, Meta, Type};

use crate::tidy::{Source, assert_caught, assert_none, read, sources};

const CONFIG_PAGE: &str = "docs/reference/config.md";

const CONFIG_HEAD: &str = "\
# Configuration keys

Generated from the doc comments of `recipe/src/config`; update it with
`FEEDLINE_BLESS=1 cargo nextest run -p tests reference`.

A run is one TOML file. `extends = \"base.toml\"` inherits the keys of another file, and
`--set section.key=value` on the command line overrides both. An unknown key is refused, with the
nearest known key. So is a key that the chosen model does not use. `config.toml` in the folder of a
run and in each checkpoint has all keys with their values. A size is written as `\"64MiB\"`, a time
as `\"30s\"`.
";

#[test]
fn the_page_of_config_keys_is_current() {
    let mut types = Structs::default();
    for (_, text) in sources(&["rs"]).iter().filter(|(p, _)| p.starts_with("recipe/src/config/")) {
        types.visit_file(&syn::parse_file(text).unwrap());
    }
    let found = CONFIG_HEAD.to_owned() + &types.sections("Config", "");
    assert_current(CONFIG_PAGE, &found);
}

#[test]
fn a_changed_doc_comment_changes_the_page() {
    let page = |text: &str| {
        let mut types = Structs::default();
        types.visit_file(&syn::parse_file(text).unwrap());
        types.sections("Config", "")
    };
    let code = r#"
        struct Config { /// Where it is.
            run: RunConfig, /// `"a" | "b"`. Default: 3.
            #[serde(rename = "async")] background: bool }
        struct RunConfig { /// Seed of the order.
            /// Default: 1.
            seed: u64, /// How it stops.
            spike: Option<SpikeConfig> }
        struct SpikeConfig { /// In nats.
            rise: f64 }
    "#;
    let expected = "\n## `async`\n\n`\"a\" | \"b\"`. Default: 3.\n\
        \n## `[run]`\n\nWhere it is.\n\n| key | meaning |\n|---|---|\n\
        | `seed` | Seed of the order. Default: 1. |\n\
        \n### `[run.spike]`\n\nHow it stops.\n\n| key | meaning |\n|---|---|\n\
        | `rise` | In nats. |\n";
    assert_eq!(page(code), expected);
    assert_ne!(page(&code.replace("Default: 1.", "Default: 2.")), expected);
}

#[test]
fn every_environment_variable_is_documented() {
    let code = sources(&["rs", "cpp"]);
    assert_none(&undocumented(&code, &read("docs/reference/environment.md")));
    let canary = r#"fn go() { env::var("FEEDLINE_NEW") }"#;
    assert_caught(&undocumented(&[("a/src/b.rs".into(), canary.into())], "`FEEDLINE_OLD`"));
}

#[test]
fn every_exit_code_is_documented() {
    let page = read("docs/reference/exit-codes.md");
    assert_none(&undocumented_codes(&read("trainer/src/exit.rs"), &page));
    assert_caught(&undocumented_codes("pub const NEW: u8 = 9;", &page));
}

/// Compares a generated page with the committed one, or writes it.
fn assert_current(path: &str, found: &str) {
    let file = tests::root().join(path);
    if std::env::var_os("FEEDLINE_BLESS").is_some() {
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        fs::write(&file, found).unwrap();
    }
    let expected = fs::read_to_string(&file).unwrap_or_default();
    assert!(
        expected == found,
        "{path} is stale; update it with: FEEDLINE_BLESS=1 cargo nextest run -p tests reference"
    );
}

/// The structs of a few files, by name.
#[derive(Default)]
struct Structs(BTreeMap<String, ItemStruct>);

impl<'ast> Visit<'ast> for Structs {
    fn visit_item_struct(&mut self, item: &'ast ItemStruct) {
        self.0.insert(item.ident.to_string(), item.clone());
        visit::visit_item_struct(self, item);
    }
}

impl Structs {
    /// The keys of a struct as a table, then the sections that it contains.
    fn sections(&self, name: &str, prefix: &str) -> String {
        let (mut keys, mut alone, mut inner) = (String::new(), String::new(), String::new());
        for field in &self.0[name].fields {
            let key = key_of(field);
            let meaning = doc_of(&field.attrs);
            if let Some(section) = self.section_of(&field.ty) {
                let path = if prefix.is_empty() { key } else { format!("{prefix}.{key}") };
                let level = "#".repeat(2 + path.matches('.').count());
                let heading = format!("\n{level} `[{path}]`\n\n{meaning}\n");
                inner += &(heading + &self.sections(&section, &path));
            } else if prefix.is_empty() {
                write!(alone, "\n## `{key}`\n\n{meaning}\n").unwrap();
            } else {
                let meaning = meaning.replace('|', "\\|");
                writeln!(keys, "| `{key}` | {meaning} |").unwrap();
            }
        }
        if !keys.is_empty() {
            keys = format!("\n| key | meaning |\n|---|---|\n{keys}");
        }
        keys + &alone + &inner
    }

    /// The struct in a field, also in an `Option`.
    fn section_of(&self, of: &Type) -> Option<String> {
        let Type::Path(path) = of else { return None };
        let last = path.path.segments.last()?;
        if let syn::PathArguments::AngleBracketed(inner) = &last.arguments {
            return inner.args.iter().find_map(|argument| match argument {
                syn::GenericArgument::Type(of) if last.ident == "Option" => self.section_of(of),
                _ => None,
            });
        }
        let name = last.ident.to_string();
        (name.ends_with("Config") && self.0.contains_key(&name)).then_some(name)
    }
}

/// The name of a field in serde.
fn key_of(field: &Field) -> String {
    let renamed = field.attrs.iter().filter(|attribute| attribute.path().is_ident("serde"));
    let mut name = field.ident.as_ref().unwrap().to_string();
    for attribute in renamed {
        // Other settings are ignored.
        let _ = attribute.parse_nested_meta(|meta| {
            if meta.path.is_ident("rename") {
                name = meta.value()?.parse::<syn::LitStr>()?.value();
            } else if meta.input.peek(syn::Token![=]) {
                meta.value()?.parse::<Expr>()?;
            }
            Ok(())
        });
    }
    name
}

fn doc_of(attributes: &[Attribute]) -> String {
    let line = |attribute: &Attribute| match &attribute.meta {
        Meta::NameValue(pair) if pair.path.is_ident("doc") => match &pair.value {
            Expr::Lit(literal) => match &literal.lit {
                Lit::Str(text) => Some(text.value().trim().to_owned()),
                _ => None,
            },
            _ => None,
        },
        _ => None,
    };
    attributes.iter().filter_map(line).collect::<Vec<_>>().join(" ")
}

/// Names of environment variables in the code of programs that are missing on a page.
fn undocumented(code: &[Source], page: &str) -> Vec<String> {
    let mut broken = BTreeSet::new();
    for source in code {
        let missing = environment_names(source);
        for name in missing.filter(|name| !page.contains(&format!("`{name}`"))) {
            let path = &source.0;
            broken.insert(format!("{path}: {name} is not in docs/reference/environment.md"));
        }
    }
    broken.into_iter().collect()
}

/// The environment variables that a file of a program names.
pub(crate) fn environment_names((path, text): &Source) -> impl Iterator<Item = String> {
    let known = ["FEEDLINE_", "SLURM_", "AWS_", "TORCH", "OMP_", "GOMP_", "GLOO_", "MASTER_"];
    let alone =
        ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TMPDIR", "XDG_CACHE_HOME"];
    let is_name = move |text: &&str| {
        let starts = known.iter().any(|start| text.starts_with(start) && text.len() > start.len());
        let upper = |char: char| char.is_ascii_uppercase() || char.is_ascii_digit() || char == '_';
        (starts || alone.contains(text)) && text.chars().all(upper)
    };
    let folders = ["/src/", "/shim/", "python/python/"];
    let is_program = folders.iter().any(|folder| path.contains(folder))
        && !path.starts_with("tests/")
        && !path.contains("/testing/");
    let text = if is_program { text.as_str() } else { "" };
    text.split('"').skip(1).step_by(2).filter(is_name).map(str::to_owned)
}

/// Exit codes without a row on a page.
fn undocumented_codes(code: &str, page: &str) -> Vec<String> {
    let codes = code.lines().filter_map(|line| {
        let (_, value) = line.strip_prefix("pub const ")?.split_once(": u8 = ")?;
        value.strip_suffix(';').map(str::to_owned)
    });
    codes.filter(|code| !page.contains(&format!("| {code} |"))).collect()
}
