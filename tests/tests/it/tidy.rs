//! The tidy rules, as tests. Each rule is a function from named texts to violations; each is run on
//! the tree, and on a canary that it must catch.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use syn::Item;
use syn::visit::{self, Visit};

/// A file of the tree: its path below the root, and its text.
pub(crate) type Source = (String, String);

/// The crates of the workspace that each crate may import.
const ARROWS: [(&str, &[&str]); 15] = [
    ("storage", &[]),
    ("indexed", &["storage"]),
    ("preprocess", &["indexed", "storage"]),
    ("preprocess/benches/peers/packages", &["indexed", "preprocess", "storage"]),
    ("loader", &["indexed", "storage"]),
    ("ckpt", &["storage"]),
    ("recipe", &["ckpt", "storage"]),
    ("feed", &["indexed", "loader", "preprocess", "recipe", "storage"]),
    ("logbook", &["ckpt", "recipe", "storage"]),
    ("trainer/bridge", &[]),
    (
        "trainer",
        &[
            "bridge",
            "ckpt",
            "feed",
            "indexed",
            "loader",
            "logbook",
            "preprocess",
            "recipe",
            "storage",
        ],
    ),
    ("tools", &["ckpt", "feed", "indexed", "loader", "logbook", "preprocess", "recipe", "storage"]),
    ("python", &["ckpt", "feed", "indexed", "loader", "preprocess", "recipe", "storage", "tools"]),
    ("tests", &["ckpt", "indexed", "loader", "preprocess", "storage"]),
    ("fuzz", &["ckpt", "indexed", "preprocess", "recipe", "storage"]),
];

/// External crates that several crates may use; every other has one owner.
const SHARED: [&str; 10] = [
    "anyhow",
    "clap",
    "clap_complete",
    "flate2",
    "log",
    "serde",
    "serde_json",
    "signal-hook",
    "toml",
    "zstd",
];

/// External crates of tests and benchmarks, which every crate may use.
const FOR_TESTS: [&str; 1] = ["tempfile"];

/// Files with `unsafe`.
const UNSAFE: [&str; 12] = [
    "storage/src/reader/uring_backend.rs",
    "storage/src/sys/buffer_pool.rs",
    "storage/src/io/uring_batch.rs",
    "storage/src/sys/syscalls.rs",
    "storage/src/sys/mapped.rs",
    "storage/src/ipc/shared_memory.rs",
    "storage/src/ipc/socket.rs",
    "storage/src/sys/nontemporal.rs",
    "storage/src/sys/simd.rs",
    "trainer/bridge/src/",
    "python/src/arrays.rs",
    // A test that counts allocations.
    "loader/tests/allocations.rs",
];

#[test]
fn crates_import_along_the_arrows() {
    assert_none(&arrows(&sources(&["Cargo.toml"])));
    let canary = "[dependencies]\ntrainer.workspace = true\n";
    assert_caught(&arrows(&[("loader/Cargo.toml".into(), canary.into())]));
}

#[test]
fn an_external_crate_has_one_owner() {
    assert_none(&owners(&sources(&["Cargo.toml"])));
    let manifest = "[dependencies]\nmemmap2.workspace = true\n";
    let twice = ["ckpt", "loader"].map(|name| (format!("{name}/Cargo.toml"), manifest.to_owned()));
    assert_caught(&owners(&twice));
}

#[test]
fn every_dependency_says_what_it_saves() {
    assert_none(&reasons(&read("Cargo.toml")));
    assert_caught(&reasons("[workspace.dependencies]\nleft-pad = \"1\"\n"));
}

#[test]
fn unsafe_is_only_in_named_files() {
    let rust = sources(&["rs"]);
    assert_none(&unsafe_elsewhere(&rust));
    let canary = ("ckpt/src/plan/mod.rs".to_owned(), "    unsafe { go() }\n".to_owned());
    assert_caught(&unsafe_elsewhere(&[canary]));
    for (name, _) in ARROWS {
        let file = if name.ends_with("packages") { "main" } else { "lib" };
        let lib = read(&format!("{name}/src/{file}.rs"));
        let walled = lib.contains("#![forbid(unsafe_code)]");
        let has_wall = ["storage", "trainer/bridge", "python"].contains(&name);
        assert!(walled || has_wall, "{name} does not forbid");
    }
}

#[test]
fn async_is_only_in_s3() {
    assert_none(&async_elsewhere(&sources(&["rs"])));
    let canary = ("loader/src/plan/round.rs".to_owned(), "    async fn go() {}\n".to_owned());
    assert_caught(&async_elsewhere(&[canary]));
}

#[test]
fn lines_and_files_are_short() {
    assert_none(&sizes(&sources(&["rs"])));
    assert_caught(&sizes(&[("a.rs".into(), "x".repeat(101))]));
    assert_caught(&sizes(&[("a.rs".into(), "x\n".repeat(801))]));
}

/// Folders that will be divided into several crates, and their limit until then.
const LARGE_FOLDERS: [(&str, usize); 3] =
    [("ckpt/src", 25), ("ckpt/tests/it", 30), ("preprocess/src/tokenizer", 31)];

#[test]
fn folders_are_small() {
    assert_none(&large_folders(&sources(&["rs"])));
    let canary: Vec<_> = (0..21).map(|i| (format!("a/src/{i}.rs"), String::new())).collect();
    assert_none(&large_folders(&canary[1..]));
    assert_caught(&large_folders(&canary));
    let canary: Vec<_> = (0..21).map(|i| (format!("a/src/{i}/mod.rs"), String::new())).collect();
    assert_caught(&large_folders(&canary));
}

#[test]
fn type_names_are_distinct() {
    assert_none(&repeated_types(&sources(&["rs"])));
    let file = |i: usize| (format!("a/src/{i}.rs"), "pub(crate) struct State;\n".to_owned());
    let canary: Vec<_> = (0..4).map(file).collect();
    assert_none(&repeated_types(&canary[1..]));
    assert_caught(&repeated_types(&canary));
}

#[test]
fn the_trainer_is_small() {
    assert_none(&larger(&sources(&["rs"]), "trainer/src/", 7100));
    assert_none(&larger(&sources(&["cpp", "h"]), "trainer/bridge/shim/", 1000));
    let canary = "// no code\n\nfn go() {\n}\n#[cfg(test)]\nmod tests {}\n";
    let canary = [("a/b.rs".to_owned(), canary.to_owned())];
    assert_none(&larger(&canary, "a/", 2));
    assert_caught(&larger(&canary, "a/", 1));
}

#[test]
fn there_are_no_unfinished_marks() {
    let all = sources(&["rs", "toml", "md", "sh", "py", "cpp", "h", "Makefile", "run"]);
    assert_none(&leftovers(&all));
    for canary in [format!("// {}ME", "FIX"), format!("#[{}]", "ignore"), format!("{}!()", "todo")]
    {
        assert_caught(&leftovers(&[("a.rs".into(), canary)]));
    }
}

#[test]
fn speed_is_not_asserted() {
    assert_none(&timed(&sources(&["rs"])));
    let canary = format!("assert!(start.{}() < LIMIT);", "elapsed");
    assert_caught(&timed(&[("a/tests/b.rs".into(), canary)]));
}

#[test]
fn a_document_has_one_title() {
    assert_none(&titles(&sources(&["md"])));
    assert_caught(&titles(&[("A.md".into(), "# One\n\n# Two\n".into())]));
    assert_caught(&titles(&[("A.md".into(), "no title\n".into())]));
}

fn arrows(manifests: &[Source]) -> Vec<String> {
    let mut broken = Vec::new();
    for (path, text) in manifests {
        let Some(name) = path.strip_suffix("/Cargo.toml") else { continue };
        let allowed = ARROWS.iter().find(|(of, _)| *of == name).map(|(_, allowed)| *allowed);
        let Some(allowed) = allowed else {
            broken.push(format!("{path}: a crate without arrows; add it to ARROWS"));
            continue;
        };
        for (table, dependency) in dependencies(text) {
            let is_internal = ARROWS.iter().any(|(of, _)| of.ends_with(&dependency));
            // The crate itself with a feature, for its tests.
            let oneself = table == "dev-dependencies" && name.ends_with(&dependency);
            if is_internal && !oneself && !allowed.contains(&dependency.as_str()) {
                broken.push(format!("{path}: imports {dependency}"));
            }
        }
    }
    broken
}

fn owners(manifests: &[Source]) -> Vec<String> {
    let mut seen = BTreeMap::<String, Vec<&str>>::new();
    for (path, text) in manifests {
        for (table, dependency) in dependencies(text) {
            let is_internal = ARROWS.iter().any(|(of, _)| of.ends_with(&dependency));
            let shared =
                SHARED.contains(&dependency.as_str()) || FOR_TESTS.contains(&dependency.as_str());
            if table == "dependencies" && !is_internal && !shared {
                seen.entry(dependency).or_default().push(path);
            }
        }
    }
    // tch is in the bridge, which wraps its tensors, and in the trainer, which computes.
    seen.remove("tch");
    seen.retain(|_, paths| paths.len() > 1);
    seen.iter()
        .map(|(name, paths)| format!("{name} is a dependency of {}", paths.join(", ")))
        .collect()
}

fn reasons(manifest: &str) -> Vec<String> {
    let mut broken = Vec::new();
    let mut inside = false;
    for line in manifest.lines() {
        if line.starts_with('[') {
            inside = line == "[workspace.dependencies]";
        } else if inside && line.contains('=') && !line.contains("path =") && !line.contains(" # ")
        {
            broken.push(format!("Cargo.toml: no reason: {line}"));
        }
    }
    broken
}

fn unsafe_elsewhere(rust: &[Source]) -> Vec<String> {
    let mut broken = Vec::new();
    for (path, text) in rust {
        if UNSAFE.iter().any(|allowed| path.starts_with(allowed))
            || path == "tests/tests/it/tidy.rs"
        {
            continue;
        }
        for (number, line) in text.lines().enumerate() {
            let code = line.split("//").next().unwrap_or("");
            if code.split(|c: char| !c.is_alphanumeric() && c != '_').any(|word| word == "unsafe") {
                broken.push(format!("{path}:{}: unsafe", number + 1));
            }
        }
    }
    broken
}

fn async_elsewhere(rust: &[Source]) -> Vec<String> {
    let mut broken = Vec::new();
    for (path, text) in rust {
        let allowed =
            ["storage/src/s3/", "storage/src/testing/s3_server/", "tests/tests/it/tidy.rs"];
        if allowed.iter().any(|start| path.starts_with(start)) {
            continue;
        }
        for (number, line) in text.lines().enumerate() {
            let code = line.split("//").next().unwrap_or("");
            let words = ["async fn ", "async {", "async move"];
            // A method may have a name with this prefix.
            let awaits = code.split(".await").skip(1).any(|rest| !rest.starts_with('_'));
            if awaits || words.iter().any(|word| code.contains(word)) {
                broken.push(format!("{path}:{}: async", number + 1));
            }
        }
    }
    broken
}

fn sizes(rust: &[Source]) -> Vec<String> {
    let mut broken = Vec::new();
    for (path, text) in rust {
        if text.lines().count() > 800 {
            broken.push(format!("{path}: {} lines, 800 at most", text.lines().count()));
        }
        for (number, line) in text.lines().enumerate() {
            if line.chars().count() > 100 {
                broken.push(format!("{path}:{}: over 100 columns", number + 1));
            }
        }
    }
    broken
}

/// Folders with more than 20 files and folders of Rust.
fn large_folders(rust: &[Source]) -> Vec<String> {
    let mut entries: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for (path, _) in rust {
        let mut path = path.as_str();
        while let Some((folder, entry)) = path.rsplit_once('/') {
            entries.entry(folder).or_default().insert(entry);
            path = folder;
        }
    }
    let max =
        |folder: &str| LARGE_FOLDERS.iter().find(|(of, _)| *of == folder).map_or(20, |of| of.1);
    entries
        .iter()
        .filter(|(folder, found)| found.len() > max(folder))
        .map(|(folder, found)| {
            format!("{folder}: {} entries, {} at most", found.len(), max(folder))
        })
        .collect()
}

/// Names of more than three structs, enums, traits and unions of `src`, except `Error`.
fn repeated_types(rust: &[Source]) -> Vec<String> {
    let mut files: BTreeMap<String, Vec<&str>> = BTreeMap::new();
    for (path, text) in rust.iter().filter(|(path, _)| path.contains("/src/")) {
        let mut types = Types::default();
        types.visit_file(&syn::parse_file(text).unwrap());
        for name in types.0 {
            files.entry(name).or_default().push(path);
        }
    }
    files
        .iter()
        .filter(|(name, files)| files.len() > 3 && *name != "Error")
        .map(|(name, files)| format!("{name} names {} types: {}", files.len(), files.join(", ")))
        .collect()
}

/// The names of the types that a file defines.
#[derive(Default)]
struct Types(Vec<String>);

impl<'a> Visit<'a> for Types {
    fn visit_item(&mut self, item: &'a Item) {
        match item {
            Item::Struct(item) => self.0.push(item.ident.to_string()),
            Item::Enum(item) => self.0.push(item.ident.to_string()),
            Item::Trait(item) => self.0.push(item.ident.to_string()),
            Item::Union(item) => self.0.push(item.ident.to_string()),
            _ => {}
        }
        visit::visit_item(self, item);
    }
}

/// Whether the files below a folder have more lines of code than `lines_max`: blank lines, comments
/// and unit tests, which are last in a file, do not count.
fn larger(all: &[Source], folder: &str, lines_max: usize) -> Vec<String> {
    let is_code = |line: &&str| !line.trim().is_empty() && !line.trim_start().starts_with("//");
    let code = |text: &str| {
        text.lines().take_while(|line| *line != "#[cfg(test)]").filter(is_code).count()
    };
    let below = all.iter().filter(|(path, _)| path.starts_with(folder));
    let lines: usize = below.map(|(_, text)| code(text)).sum();
    let broken = format!("{folder}: {lines} lines of code, {lines_max} at most");
    if lines > lines_max { vec![broken] } else { Vec::new() }
}

fn leftovers(all: &[Source]) -> Vec<String> {
    let words = ["FIXME", "TODO", "XXX", "#[ignore", "todo!", "unimplemented!", "dbg!("];
    let mut broken = Vec::new();
    for (path, text) in all {
        if ["tests/tests/it/tidy.rs", "STYLE.md"].contains(&path.as_str()) {
            continue;
        }
        for (number, line) in text.lines().enumerate() {
            for word in words.iter().filter(|word| line.contains(*word)) {
                broken.push(format!("{path}:{}: {word}", number + 1));
            }
        }
    }
    broken
}

fn timed(rust: &[Source]) -> Vec<String> {
    let clocks = ["elapsed()", "Duration::", ".as_secs", ".as_millis"];
    let mut broken = Vec::new();
    for (path, text) in rust.iter().filter(|(path, _)| !path.contains("/benches/")) {
        for (number, line) in text.lines().enumerate() {
            let asserted = line.trim_start().starts_with("assert");
            if asserted && clocks.iter().any(|clock| line.contains(clock)) {
                broken.push(format!("{path}:{}: an assertion on time", number + 1));
            }
        }
    }
    broken
}

fn titles(documents: &[Source]) -> Vec<String> {
    let mut broken = Vec::new();
    for (path, text) in documents {
        let mut code = false;
        let mut count = 0;
        for line in text.lines() {
            code ^= line.starts_with("```");
            count += usize::from(!code && line.starts_with("# "));
        }
        // The table of contents of the site has a title for each part.
        if count != 1 && path != "docs/site/SUMMARY.md" {
            broken.push(format!("{path}: {count} titles, expected one"));
        }
    }
    broken
}

/// (table, name) of every dependency that a Cargo.toml declares.
fn dependencies(manifest: &str) -> Vec<(String, String)> {
    let mut table = String::new();
    let mut found = Vec::new();
    for line in manifest.lines() {
        if let Some(name) = line.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
            name.clone_into(&mut table);
        } else if table.ends_with("dependencies") && table != "workspace.dependencies" {
            let name = line.split(['.', '=', ' ']).next().unwrap_or("");
            if !name.is_empty() && !name.starts_with('#') {
                found.push((table.clone(), name.to_owned()));
            }
        }
    }
    found
}

/// All files of the tree with one of these extensions or names.
pub(crate) fn sources(kinds: &[&str]) -> Vec<Source> {
    let mut found = Vec::new();
    walk(&tests::root(), "", kinds, &mut found);
    assert!(!found.is_empty(), "no file of kind {kinds:?}: the walk is broken");
    found
}

fn walk(folder: &Path, below: &str, kinds: &[&str], found: &mut Vec<Source>) {
    let mut entries: Vec<_> = std::fs::read_dir(folder).unwrap().map(Result::unwrap).collect();
    entries.sort_by_key(std::fs::DirEntry::file_name);
    for entry in entries {
        let name = entry.file_name().into_string().unwrap();
        let path = if below.is_empty() { name.clone() } else { format!("{below}/{name}") };
        let made = ["target", "demo-run", "node_modules", "golden", "corpus", "artifacts"];
        let built = made.contains(&name.as_str());
        let hidden = name.starts_with('.') && name != ".ci" && name != ".cargo";
        if entry.file_type().unwrap().is_dir() {
            if !built && !hidden && !name.starts_with("target-") {
                walk(&entry.path(), &path, kinds, found);
            }
        } else if kinds.iter().any(|kind| name == *kind || name.ends_with(&format!(".{kind}")))
            && let Ok(text) = std::fs::read_to_string(entry.path())
        {
            found.push((path, text));
        }
    }
}

pub(crate) fn read(path: &str) -> String {
    std::fs::read_to_string(tests::root().join(path)).unwrap()
}

pub(crate) fn assert_none(broken: &[String]) {
    assert!(broken.is_empty(), "{}", broken.join("\n"));
}

/// A checker that catches nothing would always pass.
pub(crate) fn assert_caught(broken: &[String]) {
    assert!(!broken.is_empty(), "the canary went unseen");
}
