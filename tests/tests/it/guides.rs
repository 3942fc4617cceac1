//! The pages of `docs/guides` and README.md: their commands run unchanged, and their sentences are
//! short.
//!
//! Every block of commands has a comment above it, which is invisible on the page:
//!
//! ```text
//! <!-- run -->                  this test runs the block
//! <!-- not run: REASON -->      it cannot run in a test
//! <!-- output -->               lines that the block before it prints; `...` is any text
//! ```
//!
//! The blocks of a page run in order, in one shell that exits at the first failed command. Each
//! page has its own folder with `demo` and `recipe` of the checkout, in which the blocks of
//! `docs/guides/README.md` run first: they make `my.jsonl` and the dataset of `demo/try.toml`. The
//! programs are those that Cargo has built with this test.

use std::fmt::Write as _;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The start of every page.
const SETUP: &str = "docs/guides/README.md";
/// Maximum columns of a line of a page, except tables.
const COLUMNS_MAX: usize = 120;
const LINES_MAX: usize = 150;
const WORDS_MAX: usize = 30;
/// Far more than a page takes on busy cores.
const PAGE_SECONDS_MAX: &str = "150";

/// A test for each page with commands to run, and a list of these pages.
macro_rules! pages {
    ($($name:ident: $page:literal),* $(,)?) => {
        $(#[test]
        fn $name() {
            run_page($page);
        })*

        const PAGES: &[&str] = &[$($page),*];
    };
}

pages! {
    readme_runs: "README.md",
    benchmark_runs: "docs/guides/benchmark.md",
    checkpoints_runs: "docs/guides/checkpoints.md",
    clean_runs: "docs/guides/clean.md",
    machines_runs: "docs/guides/machines.md",
    offload_runs: "docs/guides/offload.md",
    storage_runs: "docs/guides/storage.md",
    tokenize_runs: "docs/guides/tokenize.md",
    train_runs: "docs/guides/train.md",
    coming_from_runs: "docs/guides/coming-from/README.md",
    colossal_ai_runs: "docs/guides/coming-from/colossal-ai.md",
    cpm_runs: "docs/guides/coming-from/cpm.md",
    datatrove_runs: "docs/guides/coming-from/datatrove.md",
    deepspeed_runs: "docs/guides/coming-from/deepspeed.md",
    gpt_neox_runs: "docs/guides/coming-from/gpt-neox.md",
    hugging_face_runs: "docs/guides/coming-from/hugging-face.md",
    megatron_runs: "docs/guides/coming-from/megatron.md",
    nanogpt_runs: "docs/guides/coming-from/nanogpt.md",
    paddle_runs: "docs/guides/coming-from/paddle.md",
    yuan_runs: "docs/guides/coming-from/yuan.md",
}

#[test]
fn every_block_is_marked() {
    let mut broken = Vec::new();
    for (page, text) in all_pages() {
        match blocks(&text) {
            Err(problem) => broken.push(format!("{page}:{problem}")),
            Ok(blocks) => {
                let is_run = blocks.iter().any(|block| block.mark == BlockMark::Run);
                if is_run && page != SETUP && !PAGES.contains(&page.as_str()) {
                    broken.push(format!("{page}: has commands to run, and is not in PAGES"));
                }
            }
        }
    }
    assert!(broken.is_empty(), "{}", broken.join("\n"));
    for canary in [
        "```sh\nls\n```\n",
        "<!-- not run: -->\n```sh\nls\n```\n",
        "<!-- run -->\n\nA sentence.\n\n```sh\nls\n```\n",
        "- In a list:\n  ```sh\n  ls\n  ```\n",
        "```\nls\n```\n",
        "```python\nimport feedline\n```\n",
        "<!-- run -->\n```sh\nls\n",
        "<!-- output -->\n```text\na\n```\n",
    ] {
        assert!(blocks(canary).is_err(), "{canary}");
    }
}

#[test]
fn pages_are_short() {
    let mut broken = Vec::new();
    for (page, text) in all_pages() {
        broken.extend(too_long(&text).into_iter().map(|problem| format!("{page}:{problem}")));
    }
    assert!(broken.is_empty(), "{}", broken.join("\n"));
    let sentence = |words: usize| format!("# T\n\n{}word.\n", "word\n".repeat(words - 1));
    assert!(too_long(&sentence(WORDS_MAX)).is_empty());
    let in_code = format!("```sh\n{}\n```\n", "a ".repeat(WORDS_MAX + 10));
    assert!(too_long(&in_code).is_empty());
    for canary in [sentence(WORDS_MAX + 1), "a.\n".repeat(LINES_MAX + 1), "a".repeat(121)] {
        assert_eq!(too_long(&canary).len(), 1, "{canary}");
    }
}

#[test]
fn links_lead_to_files() {
    let mut broken = Vec::new();
    for (page, text) in all_pages() {
        let folder = tests::root().join(&page);
        for link in links(&text) {
            if !folder.parent().unwrap().join(link).exists() {
                broken.push(format!("{page}: {link}"));
            }
        }
    }
    assert!(broken.is_empty(), "links to files that are absent:\n{}", broken.join("\n"));
    assert_eq!(links("[a](b.md#c), [d](https://e) and [f](#g)"), ["b.md"]);
}

/// An excerpt is compared with the output, line by line.
#[test]
fn excerpts_are_compared() {
    let printed = "documents   400\nread 3 MB in 0.2 s\nwhole\n";
    assert_eq!(missing_line("documents 400\nread ... in ... s\n", printed), None);
    assert_eq!(missing_line("read ...\n", printed), None);
    assert_eq!(missing_line("whole\ndocuments 400\n", printed), Some("documents 400"));
    assert_eq!(missing_line("documents 40\n", printed), Some("documents 40"));
}

#[derive(Debug, PartialEq)]
enum BlockMark {
    Run,
    NotRun,
    Output,
    /// A block without commands, such as a config.
    Shown,
}

#[derive(Debug)]
struct GuideBlock {
    mark: BlockMark,
    /// Line number of its first line in the page.
    line: usize,
    text: String,
}

/// The fenced blocks of a page.
fn blocks(page: &str) -> Result<Vec<GuideBlock>, String> {
    let mut found: Vec<GuideBlock> = Vec::new();
    let mut comment = None;
    let mut lines = page.lines().enumerate();
    while let Some((index, line)) = lines.next() {
        let Some(language) = line.trim_start().strip_prefix("```") else {
            if !line.trim().is_empty() {
                comment = line.strip_prefix("<!-- ").and_then(|rest| rest.strip_suffix(" -->"));
            }
            continue;
        };
        let place = |problem: &str| format!("{}: {problem}", index + 1);
        if line.starts_with(' ') {
            return Err(place("the block is indented"));
        }
        let mark = mark(language, comment.take()).map_err(|problem| place(&problem))?;
        if mark == BlockMark::Output
            && !found.last().is_some_and(|last| last.mark == BlockMark::Run)
        {
            return Err(place("output of no commands that run"));
        }
        let mut text = String::new();
        loop {
            match lines.next() {
                Some((_, "```")) => break,
                Some((_, line)) => text += &format!("{line}\n"),
                None => return Err(place("the block has no end")),
            }
        }
        found.push(GuideBlock { mark, line: index + 2, text });
    }
    Ok(found)
}

fn mark(language: &str, comment: Option<&str>) -> Result<BlockMark, String> {
    let has_reason = |reason: &str| !reason.trim().is_empty();
    match (language, comment) {
        ("sh", Some("run")) => Ok(BlockMark::Run),
        ("sh", Some(text)) if text.strip_prefix("not run: ").is_some_and(has_reason) => {
            Ok(BlockMark::NotRun)
        }
        ("sh", _) => Err("expected <!-- run --> or <!-- not run: REASON --> above it".to_owned()),
        // `python/tests/test_docs.py` does.
        ("python", Some("run by make test-python")) => Ok(BlockMark::Shown),
        ("python", _) => Err("expected <!-- run by make test-python --> above it".to_owned()),
        ("text", Some("output")) => Ok(BlockMark::Output),
        ("text" | "toml" | "json", _) => Ok(BlockMark::Shown),
        (other, _) => Err(format!("expected sh, python, text, toml or json, found '{other}'")),
    }
}

/// The folder of the programs that Cargo built with this test.
fn programs() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    // target/debug/deps/it-0123456789abcdef
    let folder = test.parent().and_then(Path::parent).unwrap().to_owned();
    for name in ["preprocess", "feedline", "trainer"] {
        assert!(
            folder.join(name).is_file(),
            "cannot run the guides: {} is absent (hint: cargo build --locked -p preprocess \
             -p tools -p trainer)",
            folder.join(name).display()
        );
    }
    folder
}

/// Runs the commands of a page, and compares their output with its excerpts.
fn run_page(page: &str) {
    let read = |page: &str| fs::read_to_string(tests::root().join(page)).unwrap();
    let setup = blocks(&read(SETUP)).unwrap();
    let all = blocks(&read(page)).unwrap();
    assert!(all.iter().any(|block| block.mark == BlockMark::Run), "{page} has nothing to run");

    let mut script = "set -euo pipefail\nexec 2>&1\n".to_owned();
    let of_setup = setup.iter().filter(|block| block.mark == BlockMark::Run);
    of_setup.for_each(|block| script += &block.text);
    for block in all.iter().filter(|block| block.mark == BlockMark::Run) {
        write!(script, "echo '{}'\n{}", header(page, block), block.text).unwrap();
    }
    let printed = run_script(page, &script);

    let mut differences = String::new();
    let mut last = "";
    for block in &all {
        match block.mark {
            BlockMark::Run => {
                let (_, rest) = printed.split_once(&format!("{}\n", header(page, block))).unwrap();
                last = rest.split("== of ").next().unwrap();
            }
            BlockMark::Output => {
                if let Some(line) = missing_line(&block.text, last) {
                    writeln!(
                        differences,
                        "{page}:{}: not printed: {line}\nprinted:{last}",
                        block.line
                    )
                    .unwrap();
                }
            }
            BlockMark::NotRun | BlockMark::Shown => {}
        }
    }
    assert!(differences.is_empty(), "{differences}");
}

/// The header before the output of a block.
fn header(page: &str, block: &GuideBlock) -> String {
    format!("== of {page}:{}", block.line)
}

/// Runs a script in a new folder with the files that the pages expect.
fn run_script(page: &str, script: &str) -> String {
    let programs = programs();
    let folder = tempfile::tempdir().unwrap();
    for name in ["demo", "recipe"] {
        symlink(tests::root().join(name), folder.path().join(name)).unwrap();
    }
    let path = std::env::var("PATH").unwrap();
    let mut command = Command::new("timeout");
    command.args([PAGE_SECONDS_MAX, "bash", "-c", script]).current_dir(folder.path());
    command.env("PATH", format!("{}:{path}", programs.display()));
    command.env("OMP_NUM_THREADS", "1").env("XDG_CACHE_HOME", folder.path().join(".cache"));
    for (name, _) in std::env::vars_os() {
        let of_others = ["RANK", "WORLD_SIZE", "SLURM_", "AWS_", "FEEDLINE_"];
        let name = name.to_string_lossy().into_owned();
        if of_others.iter().any(|start| name.starts_with(start)) {
            command.env_remove(name);
        }
    }
    let output = command.output().unwrap();
    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{page}: {}, after\n{printed}", output.status);
    printed
}

/// The first line of an excerpt that is missing in the output after those before it. Several spaces
/// count as one, and `...` is any text.
fn missing_line<'a>(excerpt: &'a str, printed: &str) -> Option<&'a str> {
    let squeeze = |line: &str| line.split_whitespace().collect::<Vec<_>>().join(" ");
    let printed: Vec<String> = printed.lines().map(squeeze).collect();
    let mut rest = printed.iter();
    let is_printed = |line: &&str| {
        let line = squeeze(line);
        rest.any(|printed| is_like(printed, &line))
    };
    let mut is_printed = is_printed;
    excerpt.lines().filter(|line| *line != "...").find(|line| !is_printed(line))
}

/// Whether a line matches a line of an excerpt, in which `...` is any text.
fn is_like(line: &str, pattern: &str) -> bool {
    let parts: Vec<&str> = pattern.split("...").collect();
    let (first, last) = (parts[0], parts[parts.len() - 1]);
    if parts.len() == 1 {
        return line == pattern;
    }
    let Some(mut rest) = line.strip_prefix(first) else { return false };
    for part in &parts[1..parts.len() - 1] {
        let Some((_, after)) = rest.split_once(part) else { return false };
        rest = after;
    }
    rest.ends_with(last)
}

/// README.md, and the pages below `docs/guides`, with their paths.
fn all_pages() -> Vec<(String, String)> {
    let root = tests::root();
    let mut pages = vec![root.join("README.md"), root.join("docs/guarantees.md")];
    let mut folders = vec![root.join("docs/guides")];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() { folders.push(path) } else { pages.push(path) }
        }
    }
    pages.sort();
    let name = |path: &Path| path.strip_prefix(&root).unwrap().to_str().unwrap().to_owned();
    pages.iter().map(|path| (name(path), fs::read_to_string(path).unwrap())).collect()
}

/// The lines and sentences that exceed the limits of a page.
fn too_long(page: &str) -> Vec<String> {
    let mut broken = Vec::new();
    let lines = page.lines().count();
    if lines > LINES_MAX {
        broken.push(format!(" {lines} lines, at most {LINES_MAX}"));
    }
    let (mut is_code, mut paragraph, mut first) = (false, String::new(), 1);
    for (index, line) in page.lines().chain([""]).enumerate() {
        let is_table = line.starts_with('|');
        if line.chars().count() > COLUMNS_MAX && !is_table {
            broken.push(format!("{}: over {COLUMNS_MAX} columns", index + 1));
        }
        let is_fence = line.starts_with("```");
        let text = line.trim_start();
        let is_item = text.starts_with("- ") || text.starts_with('#') || text.starts_with("<!--");
        if is_code || is_fence || is_table || is_item || text.is_empty() {
            broken.extend(long_sentences(&paragraph, first));
            paragraph.clear();
            first = index + 1;
        }
        is_code ^= is_fence;
        if !is_code && !is_fence {
            // A cell of a table is a sentence.
            let cells = if is_table { text.replace(" | ", ". ") } else { text.to_owned() };
            paragraph += &format!("{cells} ");
        }
    }
    broken
}

/// Inline code counts as one word.
fn long_sentences(paragraph: &str, line: usize) -> Vec<String> {
    let mut text = String::new();
    for (index, part) in paragraph.split('`').enumerate() {
        text += if index % 2 == 0 { part } else { "code" };
    }
    let ends = |char: char| matches!(char, '.' | '!' | '?');
    let mut broken = Vec::new();
    let mut words = 0;
    for word in text.split_whitespace() {
        words += 1;
        if word.trim_end_matches(['*', ')', '"']).ends_with(ends) {
            broken.extend((words > WORDS_MAX).then_some(words));
            words = 0;
        }
    }
    broken.extend((words > WORDS_MAX).then_some(words));
    broken.iter().map(|words| format!("{line}: a sentence of {words} words")).collect()
}

/// The link targets of a page that are files.
fn links(page: &str) -> Vec<&str> {
    let targets = page.split("](").skip(1).filter_map(|rest| rest.split(')').next());
    let files = targets.map(|target| target.split('#').next().unwrap_or_default());
    files.filter(|file| !file.is_empty() && !file.contains("://")).collect()
}
