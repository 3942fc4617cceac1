//! The rule that no code makes or cuts a location as text: the end of a URL is the value of its
//! last option. [`storage::Location`] adds names to the path of a location.

use crate::tidy::{Source, assert_caught, assert_none, sources};

/// Calls that cut a path or a URL.
const CUTS: [&str; 17] = [
    "trim_end_matches('/')",
    "strip_suffix('/')",
    "ends_with('/')",
    "rsplit_once('/')",
    "rsplit('/')",
    "rfind('/')",
    "split_once('?')",
    "split('?')",
    "find('?')",
    "contains(\"://\")",
    "split_once(\"://\")",
    "find(\"://\")",
    "trim_end_matches(\".bin\")",
    "trim_end_matches(\".idx\")",
    "starts_with(\"s3://\")",
    "strip_prefix(\"s3://\")",
    "strip_prefix(\"file:\")",
];

/// Names of variables and fields that hold locations.
const NAMES: [&str; 10] =
    ["corpus", "dir", "folder", "model", "out", "place", "prefix", "run", "source", "url"];

/// Code that cuts or makes other texts: the file or folder, a piece of the line, and what it is.
const OTHERS: [(&str, &str, &str); 17] = [
    ("storage/src/", "", "the type, and the stores"),
    ("recipe/src/import/", "", "texts of other programs"),
    ("recipe/src/model/t5.rs", "", "names of parameters"),
    ("recipe/src/config/load.rs", "{prefix}.{key}", "keys of a config"),
    ("preprocess/src/clean/filter/urls.rs", "", "addresses of web pages"),
    ("preprocess/src/input/discover.rs", "options.contains('=')", "a question mark in a pattern"),
    ("preprocess/src/input/discover.rs", "pattern[..first]", "a pattern"),
    ("preprocess/src/input/codec.rs", "stem.rsplit('/')", "the name of an input, without options"),
    ("preprocess/src/tokenizer/worded.rs", "place.file_name()", "one component"),
    ("ckpt/src/drain/copy.rs", "file.path", "a name in a manifest"),
    ("ckpt/src/save/commit_target.rs", "place.data.name()", "a key"),
    ("indexed/src/mmididx/builder.rs", "self.store.display", "the name of a key in a message"),
    ("tools/src/bench/mod.rs", "target::FOLDER", "the temporary folder of this machine"),
    ("tools/src/bench/workload/metadata.rs", "place.key", "a key"),
    ("tools/src/ckpt/export_config.rs", "import.source", "the name of a store in a message"),
    ("tools/src/data/check.rs", "prefix.name()", "a name in a manifest"),
    ("tools/src/ui/output.rs", "prefix.name()", "a name in a manifest"),
];

#[test]
fn locations_are_not_made_or_cut_as_text() {
    assert_none(&as_text(&sources(&["rs"])));
    for canary in [
        "let below = format!(\"{url}/cache\");",
        "let below = format!(\"{}/ckpt\", self.run.dir);",
        "let (out, key) = locate(&format!(\"{}_{which}\", request.out))?;",
        "format!(\"{prefix}.idx\")",
        "let (folder, last) = name.rsplit_once('/')?;",
        "let path = Path::new(url);",
        "let path = Path::new(&config.run.dir).join(\"trace\");",
        "let place = place.trim_end_matches('/');",
        "if dir.contains(\"://\") {",
        "let bare = url.split('?').next();",
        "let name = request.source.trim_end_matches(\".bin\");",
    ] {
        assert_caught(&as_text(&[("a/src/b.rs".to_owned(), format!("    {canary}\n"))]));
    }
    let fine = "let below = Location::new(url).join(\"cache\"); // not url.split('?')\n\
                let name = format!(\"{layer}.weight\");\n#[cfg(test)]\nlet a = Path::new(url);\n";
    assert_none(&as_text(&[("a/src/b.rs".to_owned(), fine.to_owned())]));
}

fn as_text(rust: &[Source]) -> Vec<String> {
    let mut broken = Vec::new();
    for (path, text) in rust.iter().filter(|(path, _)| is_code(path)) {
        let code = text.lines().take_while(|line| *line != "#[cfg(test)]");
        for (number, line) in code.enumerate() {
            let line = line.trim_start();
            let is_other = |(file, piece, _): &(&str, &str, &str)| {
                path.starts_with(file) && line.contains(piece)
            };
            if line.starts_with("//") || OTHERS.iter().any(is_other) {
                continue;
            }
            let line = line.split(" // ").next().unwrap_or(line);
            let cuts = CUTS.iter().filter(|cut| line.contains(&format!(".{cut}")));
            for found in cuts.copied().chain(made(line)) {
                broken.push(format!("{path}:{}: {found}; use storage::Location", number + 1));
            }
        }
    }
    broken
}

/// Whether a file is of a crate, and not of its tests.
fn is_code(path: &str) -> bool {
    let is_test = path.ends_with("tests.rs") || path.contains("/tests/");
    path.contains("/src/") && !is_test
}

/// A text or a path that is made of a location.
fn made(line: &str) -> Option<&'static str> {
    let names = |text: &str| {
        let mut words = text.split(|c: char| !c.is_alphanumeric() && c != '_');
        words.any(|word| NAMES.contains(&word))
    };
    let argument = |call: &str| {
        let (_, rest) = line.split_once(call)?;
        Some(rest.split(')').next().unwrap_or(rest))
    };
    if let Some((_, rest)) = line.split_once("format!(\"{")
        && let Some((name, rest)) = rest.split_once('}')
        && rest.starts_with(['/', '_', '.'])
        && names(if name.is_empty() { rest.split_once('"').map_or("", |it| it.1) } else { name })
    {
        return Some("format!");
    }
    let mut paths = ["Path::new(", "PathBuf::from("].iter().filter_map(|call| argument(call));
    paths.any(names).then_some("Path::new")
}
