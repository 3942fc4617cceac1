//! `docs/internals/edges.md` has a row for each edge: a place where files, releases, URLs or
//! variables of others come in. A row says what is checked before it is believed, and names tests
//! that feed it the nearest input that must not be believed. The edges are listed from the code, so
//! a new one without a row fails here.

use std::collections::BTreeSet;

use syn::visit::{self, Visit};
use syn::{Expr, ExprCall, ItemConst, ItemEnum, ItemStruct, Lit, LitCStr};

use crate::reference::environment_names;
use crate::tidy::{Source, assert_caught, assert_none, read, sources};

const PAGE: &str = "docs/internals/edges.md";

/// Enums of which each variant is an edge: the file, the enum, and its name on the page.
const ENUMS: [(&str, &str, &str); 7] = [
    ("indexed/src/formats/mod.rs", "Format", "tokens"),
    ("preprocess/src/input/discover.rs", "Format", "input"),
    ("preprocess/src/input/codec.rs", "Codec", "codec"),
    ("recipe/src/import/mod.rs", "ConfigFormat", "recipe"),
    ("recipe/src/import/launch.rs", "Launcher", "launcher"),
    ("ckpt/src/convert/import.rs", "Format", "checkpoint"),
    ("storage/src/base/remote_error.rs", "RemoteErrorKind", "answer"),
];

/// Settings of which each field with the name of a file is an edge: the file and the struct.
const STRUCTS: [(&str, &str); 3] = [
    ("preprocess/src/tokenizer/mod.rs", "TokenizerSpec"),
    ("preprocess/src/objective/sentences.rs", "SentenceSpec"),
    ("preprocess/src/clean/options.rs", "UrlOptions"),
];

/// How fields end that name a file.
const FILE_FIELDS: [&str; 4] = ["file", "dict", "model", "params"];

/// Texts that list the names of edges: the file, how the text starts, and its name on the page.
const LISTS: [(&str, &str, &str); 2] = [
    ("preprocess/src/tokenizer/mod.rs", "gpt2, hf, ", "tokenizer"),
    ("storage/src/s3/location.rs", "endpoint=", "option"),
];

/// Modules of the package that have no framework on their other side.
const OWN_MODULES: [&str; 3] = ["ckpt", "errors", "verbs"];

/// A program of our own, and one that is started for its effect alone.
const OWN_PROGRAMS: [&str; 2] = ["preprocess", "sh"];

/// How variables start that only our own programs set: for themselves, for OpenMP and for NCCL.
const OWN_VARIABLES: [&str; 6] =
    ["FEEDLINE_", "GOMP_", "LOCAL_WORLD_SIZE", "OMP_WAIT_", "TORCH_FR_", "TORCH_NCCL_"];

#[test]
fn every_edge_has_a_row() {
    let all = sources(&["rs", "py", "cpp"]);
    let edges = edges(&all);
    assert!(edges.len() > 120, "the list of edges is broken: {edges:?}");
    let page = read(PAGE);
    assert_none(&without_row(&edges, &page));
    assert_none(&of_nothing(&edges, &page));
    assert_none(&without_test(&page, &all));
}

#[test]
fn an_edge_without_a_row_is_named() {
    let edges = BTreeSet::from(["tokens NanoGpt".to_owned(), "tokens New".to_owned()]);
    let page = "| `tokens NanoGpt` | its header | `a/b.rs::c` |\n";
    assert_caught(&without_row(&edges, page));
    assert_none(&without_row(&edges, &(page.to_owned() + "| `tokens New` | x | `a/b.rs::c` |\n")));
    let fewer = BTreeSet::from(["tokens New".to_owned()]);
    assert_caught(&of_nothing(&fewer, page));
    assert_none(&of_nothing(&edges, page));
    let file = |text: &str| [("a/b.rs".to_owned(), text.to_owned())];
    assert_none(&without_test(page, &file("fn c() {}")));
    assert_caught(&without_test(page, &file("fn d() {}")));
    assert_caught(&without_test("| `tokens NanoGpt` | its header | none |\n", &file("fn c() {}")));
    assert_caught(&without_test("| `tokens NanoGpt` |  | `a/b.rs::c` |\n", &file("fn c() {}")));
    let new = "pub enum Format { Auto, Old, /// Documented.\n New, Other }";
    let found = variants(new, "Format", "tokens");
    assert_eq!(found, ["tokens New", "tokens Old"].map(str::to_owned).into());
    let new = "pub struct Spec { pub kind: String, pub user_dict: Option<String>, file: String }";
    let expected = ["setting Spec.file", "setting Spec.user_dict"].map(str::to_owned);
    assert_eq!(file_fields(new, "Spec"), expected.into());
    let new = "fn go() { process::Command::new(\"lfs\"); read(c\"user.a\"); read(c\"a/b\"); }\n\
               #[cfg(test)]\nmod tests { fn go() { Command::new(\"sleep\"); } }";
    let expected = ["attribute user.a", "program lfs"].map(str::to_owned);
    assert_eq!(called(new), expected.into());
    let list = "const NAMES: &str = \"one, two or \\\n   three\";";
    let expected = ["kind one", "kind three", "kind two"].map(str::to_owned);
    assert_eq!(listed(list, "one, ", "kind"), expected.into());
}

/// All edges of the code.
fn edges(all: &[Source]) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for (file, name, kind) in ENUMS {
        let of_one = variants(&read(file), name, kind);
        assert!(!of_one.is_empty(), "{file} has no enum {name}");
        found.extend(of_one);
    }
    for (file, start, kind) in LISTS {
        let of_one = listed(&read(file), start, kind);
        assert!(!of_one.is_empty(), "{file} has no text that starts with '{start}'");
        found.extend(of_one);
    }
    for (file, name) in STRUCTS {
        let of_one = file_fields(&read(file), name);
        assert!(!of_one.is_empty(), "{file} has no struct {name} with a file");
        found.extend(of_one);
    }
    let is_code = |path: &str| {
        path.contains("/src/") && !path.contains("/testing/") && !path.contains("tests")
    };
    for (_, text) in all.iter().filter(|(path, _)| path.ends_with(".rs") && is_code(path)) {
        found.extend(called(text));
    }
    found.extend(all.iter().filter_map(|(path, _)| {
        let module = path.strip_prefix("python/python/feedline/")?.strip_suffix(".py")?;
        let is_socket = !module.starts_with('_') && !OWN_MODULES.contains(&module);
        is_socket.then(|| format!("socket {module}"))
    }));
    let of_others = |name: &String| !OWN_VARIABLES.iter().any(|start| name.starts_with(start));
    let names = all.iter().flat_map(environment_names).filter(of_others);
    found.extend(names.map(|name| format!("variable {name}")));
    found
}

/// The variants of an enum, without `Auto`, which chooses among them, and `Other`, which is none.
fn variants(text: &str, name: &str, kind: &str) -> BTreeSet<String> {
    struct Variants<'a>(&'a str, Vec<String>);
    impl<'ast> Visit<'ast> for Variants<'_> {
        fn visit_item_enum(&mut self, item: &'ast ItemEnum) {
            if item.ident == self.0 {
                self.1.extend(item.variants.iter().map(|variant| variant.ident.to_string()));
            }
        }
    }
    let mut found = Variants(name, Vec::new());
    found.visit_file(&syn::parse_file(text).unwrap());
    let chosen = found.1.iter().filter(|it| !["Auto", "Other"].contains(&it.as_str()));
    chosen.map(|variant| format!("{kind} {variant}")).collect()
}

/// The fields of a struct that name a file.
fn file_fields(text: &str, name: &str) -> BTreeSet<String> {
    struct Fields<'a>(&'a str, Vec<String>);
    impl<'ast> Visit<'ast> for Fields<'_> {
        fn visit_item_struct(&mut self, item: &'ast ItemStruct) {
            if item.ident == self.0 {
                let names = item.fields.iter().filter_map(|field| field.ident.as_ref());
                self.1.extend(names.map(ToString::to_string));
            }
        }
    }
    let mut found = Fields(name, Vec::new());
    found.visit_file(&syn::parse_file(text).unwrap());
    let is_file = |field: &&String| {
        let last = field.rsplit('_').next().unwrap_or_default();
        FILE_FIELDS.contains(&last)
    };
    let files = found.1.iter().filter(is_file);
    files.map(|field| format!("setting {name}.{field}")).collect()
}

/// Programs that are started by a fixed name, and attributes of files that are read. Code of unit
/// tests, which is last in a file, does not count.
fn called(text: &str) -> BTreeSet<String> {
    struct Calls(BTreeSet<String>);
    impl<'ast> Visit<'ast> for Calls {
        fn visit_expr_call(&mut self, call: &'ast ExprCall) {
            if let Expr::Path(function) = &*call.func
                && let Some(Expr::Lit(literal)) = call.args.first()
                && let Lit::Str(program) = &literal.lit
            {
                let path: Vec<_> =
                    function.path.segments.iter().map(|part| part.ident.to_string()).collect();
                let name = program.value();
                if path.ends_with(&["Command".to_owned(), "new".to_owned()])
                    && !OWN_PROGRAMS.contains(&name.as_str())
                {
                    self.0.insert(format!("program {name}"));
                }
            }
            visit::visit_expr_call(self, call);
        }
        fn visit_lit_cstr(&mut self, text: &'ast LitCStr) {
            let name = text.value().to_string_lossy().into_owned();
            let is_attribute = |char: char| char.is_ascii_lowercase() || char == '.';
            if name.contains('.') && name.chars().all(is_attribute) {
                self.0.insert(format!("attribute {name}"));
            }
        }
    }
    let code = text.split("#[cfg(test)]\nmod tests {").next().unwrap_or_default();
    let mut found = Calls(BTreeSet::new());
    found.visit_file(&syn::parse_file(code).unwrap());
    found.0
}

/// The names in a text such as `a, b or c` or `a=X, b=Y`.
fn listed(text: &str, start: &str, kind: &str) -> BTreeSet<String> {
    struct Texts<'a>(&'a str, Option<String>);
    impl<'ast> Visit<'ast> for Texts<'_> {
        fn visit_lit(&mut self, literal: &'ast Lit) {
            if let Lit::Str(text) = literal
                && text.value().starts_with(self.0)
            {
                self.1.get_or_insert(text.value());
            }
        }
        fn visit_item_const(&mut self, item: &'ast ItemConst) {
            if let Expr::Lit(literal) = &*item.expr {
                self.visit_lit(&literal.lit);
            }
            visit::visit_item_const(self, item);
        }
    }
    let mut found = Texts(start, None);
    found.visit_file(&syn::parse_file(text).unwrap());
    let list = found.1.unwrap_or_default().replace(" or ", ", ");
    let names = list.split(',').map(|name| name.trim().split('=').next().unwrap_or_default());
    names.filter(|name| !name.is_empty()).map(|name| format!("{kind} {name}")).collect()
}

/// The cells of the rows whose first cell names edges.
fn rows(page: &str) -> impl Iterator<Item = Vec<&str>> {
    page.lines()
        .filter(|line| line.starts_with("| `"))
        .map(|line| line.trim_matches('|').split('|').map(str::trim).collect())
}

/// The texts between backticks.
fn quoted(cell: &str) -> impl Iterator<Item = &str> {
    cell.split('`').skip(1).step_by(2)
}

fn without_row(edges: &BTreeSet<String>, page: &str) -> Vec<String> {
    let named: BTreeSet<&str> = rows(page).flat_map(|row| quoted(row[0])).collect();
    let missing = edges.iter().filter(|edge| !named.contains(edge.as_str()));
    missing.map(|edge| format!("{PAGE} has no row for `{edge}`")).collect()
}

fn of_nothing(edges: &BTreeSet<String>, page: &str) -> Vec<String> {
    let named = rows(page).flat_map(|row| quoted(row[0]));
    let gone = named.filter(|edge| !edges.contains(*edge));
    gone.map(|edge| format!("{PAGE}: `{edge}` is not in the code")).collect()
}

/// Rows that say nothing, or name no test or one that does not exist.
fn without_test(page: &str, all: &[Source]) -> Vec<String> {
    let exists = |test: &str| {
        test.split_once("::").is_some_and(|(file, name)| {
            let found = all.iter().find(|(path, _)| path == file);
            found.is_some_and(|(_, text)| {
                ["fn ", "def "].iter().any(|word| text.contains(&format!("{word}{name}(")))
            })
        })
    };
    let mut broken = Vec::new();
    for row in rows(page) {
        let [edge, checks, tests] = row[..] else {
            broken.push(format!("{PAGE}: {row:?} has not three cells"));
            continue;
        };
        if checks.is_empty() || quoted(tests).next().is_none() {
            broken.push(format!("{PAGE}: {edge}: no check or no test"));
        }
        let gone = quoted(tests).filter(|test| !exists(test));
        broken.extend(gone.map(|test| format!("{PAGE}: {edge}: no test {test}")));
    }
    broken
}
