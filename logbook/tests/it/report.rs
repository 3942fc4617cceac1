//! The report page: complete, well-formed, with the numbers of the log, and safe against markup in
//! names and configs.

use std::fs;
use std::path::Path;

use logbook::report::{RunRecord, html};

/// Writes the log of a run that was killed and restarted after the steps in `killed_at`.
fn write_run(folder: &Path, steps: u64, killed_at: &[u64], more: &str) {
    fs::create_dir_all(folder).unwrap();
    let mut log = String::new();
    let mut started = 0;
    for step in 1..=steps {
        let loss = 2.0 + 8.0 / step as f64;
        let elapsed = (step - started) as f64 * 0.5;
        log += &format!(
            "{{\"step\":{step},\"samples\":{},\"tokens\":{},\"loss\":{loss},\"lr\":0.001,\
             \"grad_norm\":0.75,\"perf\":{{\"tokens_per_s\":2048.0,\"step_ms\":500.0,\
             \"data_wait_ms\":5.0,\"ckpt_stall_ms\":{},\"elapsed_s\":{elapsed}}}}}\n",
            step * 16,
            step * 1024,
            if step % 10 == 0 { 100.0 } else { 0.0 }
        );
        if step % 20 == 0 {
            log += &format!(
                "{{\"step\":{step},\"samples\":{},\"eval_loss\":2.25,\"eval_tokens\":640,\
                 \"perf\":{{\"tokens_per_s\":4096.0,\"eval_ms\":100.0}}}}\n",
                step * 16
            );
        }
        if killed_at.contains(&step) {
            started = step;
        }
    }
    fs::write(folder.join("log.jsonl"), log + more).unwrap();
}

fn write_config(folder: &Path, corpus: &str) {
    let text = format!(
        "run = {{ dir = 'elsewhere', budget = {{ steps = 100 }} }}
         model = {{ layers = 2, hidden = 64, heads = 2, vocab = 500, seq_len = 64 }}
         data = {{ train = \"{corpus}\" }}
         batch = {{ global = 16, micro = 4 }}
         optim = {{ lr = {{ peak = 0.001 }} }}"
    );
    fs::write(folder.join("config.toml"), text).unwrap();
}

fn page(folders: &[&Path]) -> String {
    let read = |folder: &&Path| RunRecord::read(folder.to_str().unwrap()).unwrap();
    html(&folders.iter().map(read).collect::<Vec<_>>())
}

/// Checks that elements open and close in pairs, that attributes are quoted, and that text has no
/// markup. Returns the names of the elements, in their order.
fn elements(page: &str) -> Vec<String> {
    let (mut open, mut seen) = (Vec::new(), Vec::new());
    let mut rest = page.strip_prefix("<!DOCTYPE html>").expect("a doctype");
    while let Some(at) = rest.find('<') {
        let text = &rest[..at];
        assert!(!text.contains('>') || in_raw(&open), "a stray > in {text:?}");
        for entity in text.split('&').skip(1) {
            let known = ["amp;", "lt;", "gt;", "quot;", "#39;"];
            assert!(
                in_raw(&open) || known.iter().any(|known| entity.starts_with(known)),
                "{text:?}"
            );
        }
        let end = at + rest[at..].find('>').expect("a tag ends");
        let tag = &rest[at + 1..end];
        rest = &rest[end + 1..];
        if let Some(name) = tag.strip_prefix('/') {
            assert_eq!(open.pop().as_deref(), Some(name), "in {seen:?}");
            continue;
        }
        assert_eq!(tag.matches('"').count() % 2, 0, "a quote is open in <{tag}>");
        let name = tag.split([' ', '/', '\n']).next().expect("a name").to_owned();
        assert!(name.chars().all(|c| c.is_ascii_alphanumeric()), "<{tag}>");
        seen.push(name.clone());
        if name == "script" || name == "style" {
            let close = format!("</{name}>");
            rest = &rest[rest.find(&close).expect("raw text ends") + close.len()..];
        } else if !tag.ends_with('/') && name != "meta" {
            open.push(name);
        }
    }
    assert!(open.is_empty(), "{open:?} stay open");
    seen
}

fn in_raw(open: &[String]) -> bool {
    open.last().is_some_and(|name| name == "script" || name == "style")
}

/// The cells of the row with this title.
fn row(page: &str, title: &str) -> Vec<String> {
    let begin = page.find(&format!("<tr><th>{title}</th>")).unwrap_or_else(|| panic!("no {title}"));
    let line = page[begin..].lines().next().unwrap();
    let cells = line.split("<td>").skip(1);
    cells.map(|cell| cell.split("</td>").next().unwrap().to_owned()).collect()
}

#[test]
fn page_has_the_numbers_of_the_log() {
    let folder = tempfile::tempdir().unwrap();
    write_run(folder.path(), 100, &[33, 70], "");
    write_config(folder.path(), "corpus");
    let page = page(&[folder.path()]);
    let elements = elements(&page);
    assert_eq!(elements.iter().filter(|name| *name == "figure").count(), 6);
    assert!(!page.contains("http"), "the page refers to no other resource");
    for (title, expected) in [
        ("Steps", "100 of 100, 102,400 tokens"),
        ("Last logged loss", "2.0800"),
        ("Last evaluation", "2.2500, perplexity 9.49"),
        ("Tokens per second, median", "2,048"),
        ("Data wait", "1.0 % of the time"),
        ("Checkpoint stalls", "2.0 % of the time"),
        ("Resumed after steps", "33, 70"),
        ("Training time", "50s"),
        ("Checkpoint steps", "none"),
        ("Log records", "105, all readable"),
    ] {
        assert_eq!(row(&page, title), [expected], "{title}");
    }
    assert!(row(&page, "Parameters")[0].starts_with("136"), "{:?}", row(&page, "Parameters"));
    assert!(row(&page, "Layout")[0].contains("TP 1, PP 1"));
    // Both restarts, in each of the six charts.
    assert_eq!(page.matches("class=\"mark s0\"").count(), 12);
    assert_eq!(page.matches("class=\"dot s0\"").count(), 5);
}

#[test]
fn runs_are_in_columns() {
    let folder = tempfile::tempdir().unwrap();
    let (a, b) = (folder.path().join("a"), folder.path().join("b"));
    write_run(&a, 100, &[], "");
    write_run(&b, 5000, &[9], "");
    write_config(&a, "corpus");
    let page = page(&[&a, &b]);
    elements(&page);
    assert_eq!(row(&page, "Steps"), ["100 of 100, 102,400 tokens", "5,000, 5,120,000 tokens"]);
    assert_eq!(row(&page, "Model")[1], "?");
    assert_eq!(page.matches("class=\"line s1\"").count(), 6 + 1, "with the legend");
    // Lines of thousands of points are drawn as means, with bands.
    assert!(page.contains("class=\"band s1\"") && !page.contains("class=\"band s0\""));
    let corners = |line: &str| line.split("points=\"").nth(1).unwrap().split(' ').count();
    assert!(
        page.lines().filter(|line| line.contains("polyline")).all(|line| corners(line) <= 1000)
    );
    assert!(page.len() < 500_000, "{} bytes", page.len());
}

#[test]
fn hostile_names_stay_text() {
    let folder = tempfile::tempdir().unwrap();
    let name = "<script>alert('&\"1')<\u{1b}x>";
    let run = folder.path().join(name);
    write_run(&run, 3, &[], "");
    write_config(&run, "</pre><img src=x onerror=alert(2)>");
    let page = page(&[&run, &run]);
    let elements = elements(&page);
    assert_eq!(elements.iter().filter(|name| *name == "script").count(), 1);
    assert!(!elements.iter().any(|name| name == "img"));
    assert!(page.contains("&lt;script&gt;alert(&#39;&amp;&quot;1&#39;)&lt;\u{fffd}x&gt;"));
    assert!(page.contains("&lt;/pre&gt;&lt;img src=x"));
}

#[test]
fn any_log_content_yields_a_page() {
    let folder = tempfile::tempdir().unwrap();
    let long = format!("\"{}\"\n", "x".repeat(200_000));
    for more in [
        "",
        "{\"step\":4,\"loss\":null,\"grad_norm\":null,\"non_finite\":{\"loss\":\"NaN\"}}\n",
        "{\"step\":18446744073709551615,\"loss\":1.7976931348623157e308,\"lr\":-1.0}\n",
        "{\"step\":5,\"loss\":5e-324,\"grad_norm\":5e-324,\"perf\":{\"step_ms\":0.0}}\n",
        "{\"step\":-1}\n[]\nnull\n{\"step\":6,\"lo",
        "\0\0\0\n\u{fffd}\n",
        &long,
    ] {
        write_run(folder.path(), 3, &[], more);
        elements(&page(&[folder.path()]));
        fs::write(folder.path().join("log.jsonl"), more).unwrap();
        elements(&page(&[folder.path()]));
    }
    write_run(folder.path(), 3, &[], "{\"step\":4,\"loss\":null,\"grad_norm\":1.0}\nbroken\n");
    let page = page(&[folder.path()]);
    assert_eq!(row(&page, "Steps with non-finite loss or gradient norm"), ["4"]);
    assert_eq!(row(&page, "Log records"), ["4, 1 unreadable"]);
    assert!(RunRecord::read("/dev").unwrap_err().to_string().contains("/dev/log.jsonl"));
}

/// The checker itself must detect malformed pages.
#[test]
fn malformed_pages_are_detected() {
    for broken in ["<b>", "<b><i></b></i>", "<b a=\"x></b>", "<b>a > b</b>", "<b>&x</b>", "</b>"] {
        let page = format!("<!DOCTYPE html><p>{broken}</p>");
        assert!(std::panic::catch_unwind(|| elements(&page)).is_err(), "{broken}");
    }
}

/// A record of one slow step counts as one step, and one of 99 quick steps as 99.
#[test]
fn means_are_weighted_by_time() {
    let folder = tempfile::tempdir().unwrap();
    let line = |step: u64, step_ms: f64, wait_ms: f64| {
        format!(
            "{{\"step\":{step},\"perf\":{{\"step_ms\":{step_ms},\"data_wait_ms\":{wait_ms}}}}}\n"
        )
    };
    // 100 ms of 200, then 99 times 1 ms of 200: 199 ms of 20 s. The log starts at step 1000.
    let log = line(1000, 200.0, 100.0) + &line(1099, 200.0, 1.0);
    fs::write(folder.path().join("log.jsonl"), log).unwrap();
    assert_eq!(row(&page(&[folder.path()]), "Data wait"), ["1.0 % of the time"]);
}
