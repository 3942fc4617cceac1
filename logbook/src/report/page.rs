use std::fmt::Write as _;

use recipe::config::{Config, LrStyle};
use recipe::plan::{PlanInputs, RunPlan};
use recipe::text::{thousands, time_text};

use super::chart::{Chart, Scale};
use super::{LogRow, RunRecord};

/// The style of this page in addition to [`BASE_STYLE`].
const STYLE: &str = include_str!("page.css");

/// The style of all pages, for light and dark screens and for paper: text, tables, lines.
pub const BASE_STYLE: &str = include_str!("base.css");

/// Shows the values under the pointer. The page is complete without it.
const SCRIPT: &str = include_str!("page.js");

/// The maximum number of runs of a page: the style has as many colours.
pub const RUNS_MAX: usize = 8;

/// Extracts a number from a line of the log.
type Of = fn(&LogRow) -> Option<f64>;

/// The title, the unit and the scale of each chart, and the number drawn over the steps.
const CHARTS: [(&str, &str, Scale, Of); 10] = [
    ("Loss", "nats per token; dots: evaluations; dotted lines: resumes", Scale::Linear, |l| l.loss),
    ("Learning rate", "of each update", Scale::FromZero, |l| l.lr),
    ("Gradient norm", "before clipping; log scale", Scale::Log, |l| l.grad_norm),
    ("Throughput", "tokens per second", Scale::FromZero, |l| l.perf.tokens_per_s),
    ("Data wait", "% of step time", Scale::FromZero, |l| share(l.perf.data_wait_ms, l)),
    ("Checkpoint stalls", "% of step time", Scale::FromZero, |l| share(l.perf.ckpt_stall_ms, l)),
    ("Wait for other ranks", "% of step time", Scale::FromZero, |l| share(comm_wait_ms(l), l)),
    ("MFU by 6N + 12LCT", "% of peak FLOP/s", Scale::FromZero, |l| percent(l.perf.mfu_12lct)),
    ("MFU by 6N + 6LCT", "% of peak FLOP/s", Scale::FromZero, |l| percent(l.perf.mfu_6lct)),
    ("Loss scale", "fp16; log scale", Scale::Log, |l| l.loss_scale),
];

fn share(part: Option<f64>, line: &LogRow) -> Option<f64> {
    line.perf.step_ms.filter(|ms| *ms > 0.0).and_then(|ms| percent(Some(part? / ms)))
}

/// `None` for a single rank, which waits for no other.
fn comm_wait_ms(line: &LogRow) -> Option<f64> {
    line.perf.comm_wait_ms.filter(|_| line.perf.ranks > Some(1))
}

fn percent(part: Option<f64>) -> Option<f64> {
    part.map(|part| 100.0 * part)
}

/// The page of some runs, in columns.
#[must_use]
pub fn html(runs: &[RunRecord]) -> String {
    let names: Vec<String> = runs.iter().map(|run| escaped(&run.name)).collect();
    let mut page = format!(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <meta name=\"color-scheme\" content=\"light dark\">\n\
         <title>{}</title>\n<style>\n{BASE_STYLE}{STYLE}</style>\n</head>\n<body>\n<h1>{}</h1>\n",
        names.join(", "),
        if runs.len() == 1 {
            format!("Training run {}", names[0])
        } else {
            "Training runs".to_owned()
        }
    );
    if runs.len() > 1 {
        page.push_str("<ul class=\"legend\">\n");
        for (place, name) in names.iter().enumerate() {
            _ = writeln!(
                page,
                "<li><svg viewBox=\"0 0 28 8\"><polyline class=\"line s{place}\" \
                 points=\"0,4 28,4\"/></svg>{name}</li>"
            );
        }
        page.push_str("</ul>\n");
    }
    table(&mut page, runs, &names);
    page.push_str("<div class=\"charts\">\n");
    for (title, unit, scale, of) in CHARTS {
        charted(&mut page, runs, title, unit, scale, of);
    }
    range_test(&mut page, runs);
    page.push_str("</div>\n");
    for (run, name) in runs.iter().zip(&names) {
        if let Some(config) = &run.config {
            let text = escaped(&config.to_toml());
            _ = writeln!(
                page,
                "<details><summary>Config of {name}, with defaults</summary>\
                 <pre>{text}</pre></details>"
            );
        }
    }
    _ = write!(
        page,
        "<div id=\"tip\" hidden></div>\n<script>\n{SCRIPT}</script>\n</body>\n</html>\n"
    );
    page
}

fn charted(page: &mut String, runs: &[RunRecord], title: &str, unit: &str, scale: Scale, of: Of) {
    let over_steps = |lines: &[LogRow], of: Of| {
        let point = |line: &LogRow| Some((line.step as f64, of(line)?));
        lines.iter().filter_map(point).collect::<Vec<(f64, f64)>>()
    };
    let is_loss = title == "Loss";
    let evals = |run: &RunRecord| over_steps(&run.evals, |line| line.eval_loss);
    let chart = Chart {
        x_name: "step",
        x_scale: Scale::Linear,
        y_scale: scale,
        lines: runs.iter().map(|run| over_steps(&run.steps, of)).collect(),
        dots: if is_loss { runs.iter().map(evals).collect() } else { Vec::new() },
        marks: runs
            .iter()
            .map(|run| run.resumes.iter().map(|step| *step as f64).collect())
            .collect(),
    };
    if let Some(svg) = chart.svg() {
        figure(page, title, unit, &svg);
    }
}

/// Draws the loss at each learning rate, for runs of the range test.
fn range_test(page: &mut String, runs: &[RunRecord]) {
    let points = |run: &RunRecord| {
        let style = run.config.as_ref().map(|config| config.optim.lr.style);
        let points = run.steps.iter().filter_map(|line| Some((line.lr?, line.loss?)));
        points.filter(|_| style == Some(LrStyle::RangeTest)).collect()
    };
    let chart = Chart {
        x_name: "learning rate",
        x_scale: Scale::Log,
        y_scale: Scale::Linear,
        lines: runs.iter().map(points).collect(),
        dots: Vec::new(),
        marks: Vec::new(),
    };
    if let Some(svg) = chart.svg() {
        figure(page, "Range test", "loss at each learning rate", &svg);
    }
}

fn figure(page: &mut String, title: &str, unit: &str, svg: &str) {
    _ = write!(page, "<figure>\n<figcaption><b>{title}</b> {unit}</figcaption>\n{svg}</figure>\n");
}

/// Writes the table, with one column for each run.
fn table(page: &mut String, runs: &[RunRecord], names: &[String]) {
    page.push_str("<div class=\"wide\"><table>\n<tr><th></th>");
    for name in names {
        _ = write!(page, "<th>{name}</th>");
    }
    page.push_str("</tr>\n");
    let columns: Vec<Vec<(&str, String)>> = runs.iter().map(facts).collect();
    for (row, (title, _)) in columns.first().into_iter().flatten().enumerate() {
        _ = write!(page, "<tr><th>{title}</th>");
        for column in &columns {
            _ = write!(page, "<td>{}</td>", escaped(&column[row].1));
        }
        page.push_str("</tr>\n");
    }
    page.push_str("</table></div>\n");
}

/// The rows of a run in the table: the same titles for every run.
fn facts(run: &RunRecord) -> Vec<(&'static str, String)> {
    let config = |of: fn(&Config) -> String| run.config.as_ref().map_or("?".to_owned(), of);
    let mut facts = vec![
        ("Model", config(|c| plan(c).model)),
        ("Parameters", config(|c| thousands(plan(c).parameters.total as f64))),
        ("Layout", layout(run)),
        (
            "Batch",
            config(|c| {
                let (global, micro) = (c.batch.global, c.batch.micro);
                let tokens = thousands(c.tokens_per_step() as f64);
                format!("{global} samples ({tokens} tokens), micro-batches of {micro}")
            }),
        ),
        (
            "FLOP per token, 6N + 12LCT",
            config(|c| format!("{:.2} MFLOP", plan(c).flop.per_token_6n_12lhs as f64 / 1e6)),
        ),
        ("Estimated memory of a rank", config(|c| bytes(plan(c).memory_bytes.total))),
        ("Estimated checkpoint size", config(|c| bytes(plan(c).checkpoint.checkpoint_bytes))),
    ];
    facts.extend(progress(run));
    facts
}

fn progress(run: &RunRecord) -> Vec<(&'static str, String)> {
    let last = run.steps.last().copied().unwrap_or_default();
    let of_total =
        run.config.as_ref().map(|c| format!(" of {}", thousands(c.steps_total() as f64)));
    let losses = || run.steps.iter().filter_map(|line| line.loss);
    let best = losses().fold(f64::INFINITY, f64::min);
    let eval = run.evals.last().and_then(|line| line.eval_loss);
    let eval = eval.map(|loss| format!("{loss:.4}, perplexity {:.2}", loss.exp()));
    let mean = |of: Of| mean_over_time(&run.steps, of);
    let shown = |value: Option<f64>| {
        value.map_or("–".to_owned(), |value| format!("{value:.1} % of the time"))
    };
    let mfu = mean(|l| percent(l.perf.mfu_12lct));
    let mfu = mfu.map_or("–".to_owned(), |mfu| format!("{mfu:.1} % of peak FLOP/s"));
    let saved: Vec<String> = run.checkpoints.iter().map(u64::to_string).collect();
    let resumes: Vec<String> = run.resumes.iter().map(u64::to_string).collect();
    let steps = thousands(last.step as f64) + &of_total.unwrap_or_default();
    let readability = if run.damaged > 0 {
        format!("{} unreadable", run.damaged)
    } else {
        "all readable".to_owned()
    };
    vec![
        ("Steps", format!("{steps}, {} tokens", thousands(last.tokens as f64))),
        ("Last logged loss", last.loss.map_or("–".to_owned(), |loss| format!("{loss:.4}"))),
        (
            "Lowest logged loss",
            if best.is_finite() { format!("{best:.4}") } else { "–".to_owned() },
        ),
        ("Last evaluation", eval.unwrap_or("–".to_owned())),
        ("Steps with non-finite loss or gradient norm", losses_missing(run)),
        ("Tokens per second, median", median(run).map_or("–".to_owned(), thousands)),
        ("MFU by 6N + 12LCT", mfu),
        ("Data wait", shown(mean(|l| share(l.perf.data_wait_ms, l)))),
        ("Checkpoint stalls", shown(mean(|l| share(l.perf.ckpt_stall_ms, l)))),
        ("Wait for other ranks", shown(mean(|l| share(comm_wait_ms(l), l)))),
        ("Training time", duration(run.trained_s())),
        ("Resumed after steps", listed(&resumes)),
        ("Checkpoint steps", listed(&saved)),
        ("Log records", format!("{}, {readability}", run.steps.len() + run.evals.len())),
    ]
}

fn layout(run: &RunRecord) -> String {
    let ranks = run.steps.last().and_then(|line| line.perf.ranks);
    let plural = |ranks| if ranks == 1 { "" } else { "s" };
    let ranks = ranks.map(|ranks| format!("{ranks} rank{}", plural(ranks)));
    let Some(config) = &run.config else { return ranks.unwrap_or("?".to_owned()) };
    let of = &config.parallel;
    let cut = format!(
        "TP {}, PP {}, virtual stages {}, ZeRO {}, {}",
        of.tp,
        of.pp,
        of.virtual_stages,
        of.zero,
        format!("{:?}", config.precision.dtype).to_uppercase()
    );
    [ranks, Some(cut)].into_iter().flatten().collect::<Vec<_>>().join(": ")
}

fn plan(config: &Config) -> RunPlan {
    RunPlan::new(config, &PlanInputs::default())
}

fn losses_missing(run: &RunRecord) -> String {
    let missing = run.steps.iter().filter(|line| line.loss.is_none() || line.grad_norm.is_none());
    listed(&missing.map(|line| line.step.to_string()).collect::<Vec<_>>())
}

/// The mean of `of` over all records, weighted by the time of the steps since the previous record.
fn mean_over_time(steps: &[LogRow], of: Of) -> Option<f64> {
    let (mut sum, mut time) = (0.0, 0.0);
    let mut before = steps.first()?.step.saturating_sub(1);
    for line in steps {
        let count = line.step.saturating_sub(before).max(1);
        before = line.step;
        let (Some(value), Some(step_ms)) = (of(line), line.perf.step_ms) else { continue };
        sum += value * step_ms * count as f64;
        time += step_ms * count as f64;
    }
    (time > 0.0).then(|| sum / time)
}

fn median(run: &RunRecord) -> Option<f64> {
    let mut speeds: Vec<f64> = run.steps.iter().filter_map(|l| l.perf.tokens_per_s).collect();
    speeds.sort_unstable_by(f64::total_cmp);
    speeds.get(speeds.len() / 2).copied()
}

/// A list of items: of many only the first four and the last.
fn listed(items: &[String]) -> String {
    match items {
        [] => "none".to_owned(),
        [first @ .., last] if items.len() > 8 => {
            format!("{}, … {last} ({} in all)", first[..4].join(", "), items.len())
        }
        _ => items.join(", "),
    }
}

fn bytes(count: u64) -> String {
    storage::ByteSize(count).to_string()
}

fn duration(seconds: f64) -> String {
    std::time::Duration::try_from_secs_f64(seconds).map_or("?".to_owned(), time_text)
}

/// Escapes a text for HTML, in an element or in an attribute.
#[must_use]
pub fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            // HTML allows no other control characters; file names do.
            c if c.is_control() && !matches!(c, '\n' | '\t') => {
                out.push(char::REPLACEMENT_CHARACTER);
            }
            c => out.push(c),
        }
    }
    out
}
