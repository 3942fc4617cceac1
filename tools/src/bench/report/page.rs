//! The report as one self-contained HTML file, for a browser or a printer.
//!
//! Text from outside (names of targets) is always escaped.

use std::fmt::Write as _;

use logbook::report::{BASE_STYLE, escaped};

use crate::bench::chart::{Lines, bars};
use crate::bench::measure::validity::{ClientOverhead, OWN_CORE_S_PER_GB_MAX};
use crate::bench::patterns::{Figure, Pattern};
use crate::bench::report::verdict::beside;
use crate::bench::report::{PatternReport, Report, TargetReport, short};
use crate::ui::terminal::thousands;

/// Styles of this page, in addition to the common ones.
const STYLE: &str = include_str!("page.css");

/// Maximum number of targets of one page: the style has this many colours.
pub const TARGETS_MAX: usize = 8;

/// Renders the page.
#[must_use]
pub fn html(report: &Report) -> String {
    let title = if report.simulated { "Store comparison (simulated)" } else { "Store comparison" };
    let mut page = format!(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <meta name=\"color-scheme\" content=\"light dark\">\n\
         <title>{title}</title>\n<style>\n{BASE_STYLE}{STYLE}</style>\n</head>\n<body>\n\
         <h1>{title}</h1>\n"
    );
    if report.simulated {
        page.push_str(
            "<p class=\"warn\">Simulated: results of models of stores, not of real stores.</p>\n",
        );
    }
    legend(&mut page, &report.targets);
    page.push_str("<ul class=\"verdict\">\n");
    for line in &report.verdict.lines {
        _ = writeln!(page, "<li>{}</li>", escaped(line));
    }
    page.push_str("</ul>\n");
    let need = &report.need;
    _ = writeln!(
        page,
        "<p class=\"about\">Training run: {}. It reads {} samples per second, {} tokens each, \
         and saves checkpoints of {} GB.</p>",
        escaped(&need.name),
        short(need.samples_per_s),
        thousands(need.seq_len),
        short(need.checkpoint_bytes as f64 / 1e9)
    );
    numbers(&mut page, report);
    own(&mut page, report);
    figures(&mut page, report, "Throughput or latency, with 95 % intervals", bar_chart);
    figures(&mut page, report, "Latency of single operations", distribution);
    figures(&mut page, report, "Throughput over time, last round", timeline);
    notes(&mut page, report);
    page.push_str("</body>\n</html>\n");
    page
}

fn legend(page: &mut String, targets: &[TargetReport]) {
    page.push_str("<ul class=\"legend\">\n");
    for (place, target) in targets.iter().enumerate() {
        let model = target.simulated.as_ref().map(|of| format!(" ({of})"));
        _ = writeln!(
            page,
            "<li><svg viewBox=\"0 0 28 8\"><polyline class=\"line s{place}\" \
             points=\"0,4 28,4\"/></svg>{}{}</li>",
            escaped(&target.name),
            escaped(&model.unwrap_or_default())
        );
    }
    page.push_str("</ul>\n");
}

/// One row per pattern, one column per target.
fn numbers(page: &mut String, report: &Report) {
    page.push_str("<div class=\"wide\"><table>\n<tr><th>pattern</th>");
    for target in &report.targets {
        _ = write!(
            page,
            "<th>{} <small>{}</small></th>",
            escaped(&target.name),
            escaped(&target.file_system)
        );
    }
    page.push_str("<th>significant differences</th></tr>\n");
    for pattern in measured(report) {
        _ = write!(page, "<tr><th>{} <small>{}</small></th>", pattern.title(), pattern.name());
        for target in &report.targets {
            let cell = target.pattern(pattern).map_or_else(|| "–".to_owned(), cell);
            _ = write!(page, "<td>{cell}</td>");
        }
        let pairs = report.comparisons.iter().filter(|of| of.pattern == pattern);
        let apart: Vec<String> = pairs
            .filter(|of| of.beside.significant)
            .filter_map(|of| {
                let best = of.better.as_ref()?;
                Some(format!("{best}: {}", beside(pattern, best, of)))
            })
            .collect();
        let apart = if apart.is_empty() { "none".to_owned() } else { apart.join("; ") };
        _ = writeln!(page, "<td>{}</td></tr>", escaped(&apart));
    }
    page.push_str("</table></div>\n");
}

fn cell(of: &PatternReport) -> String {
    let unit = of.figure.unit();
    let what = if of.figure == Figure::P99Ms { "p99 " } else { "" };
    let mut cell = format!("{what}{} {unit}", short(of.estimate.median));
    _ = write!(cell, "<br><small>{} to {}", short(of.estimate.low), short(of.estimate.high));
    if of.figure != Figure::P99Ms {
        let (name, latency) = match of.ops < P99_OPS_MIN {
            true => ("longest", of.latency_ms.max),
            false => ("p99", of.latency_ms.p99),
        };
        _ = write!(cell, "; {name} {} ms", short(latency));
    }
    if let Some(moved) = of.moved_per_delivered {
        _ = write!(cell, "; I/O amplification {moved:.2}");
    }
    cell.push_str("</small>");
    if let Some(flag) = of.flag {
        _ = write!(cell, " <b class=\"warn\">{}</b>", flag.name());
    }
    cell
}

/// CPU time of the benchmark itself: one row per pattern, one column per target.
fn own(page: &mut String, report: &Report) {
    let mut rows = String::new();
    for pattern in measured(report) {
        _ = write!(rows, "<tr><th>{} <small>{}</small></th>", pattern.title(), pattern.name());
        for target in &report.targets {
            let cell = target.pattern(pattern).map_or_else(|| "–".to_owned(), own_cell);
            _ = write!(rows, "<td>{cell}</td>");
        }
        rows.push_str("</tr>\n");
    }
    if rows.is_empty() {
        return;
    }
    page.push_str(
        "<h2>CPU use of the benchmark</h2>\n\
         <div class=\"wide\"><table>\n<tr><th>pattern</th>",
    );
    for target in &report.targets {
        _ = write!(page, "<th>{}</th>", escaped(&target.name));
    }
    _ = write!(
        page,
        "</tr>\n{rows}</table></div>\n<p class=\"about\">Cores per GB/s. OVER: \
         more than {OWN_CORE_S_PER_GB_MAX}, so the CPU limits the result unless cores were idle. \
         Any program pays the part in the kernel for the same requests.</p>\n"
    );
}

fn own_cell(of: &PatternReport) -> String {
    let ClientOverhead { cores, core_s_per_gb, kernel_core_s_per_gb, us_per_op, is_over } = of.own;
    let per_gb = core_s_per_gb.map_or_else(|| "–".to_owned(), |s| format!("{s:.2}"));
    let kernel = kernel_core_s_per_gb.map(|s| format!("{s:.2} in the kernel; "));
    let kernel = kernel.unwrap_or_default();
    let over = if is_over { " <b class=\"warn\">OVER</b>" } else { "" };
    let us = short(us_per_op);
    format!(
        "{per_gb}{over}<br><small>{kernel}{cores:.2} cores busy; {us} µs of CPU per \
         operation</small>"
    )
}

fn measured(report: &Report) -> impl Iterator<Item = Pattern> {
    let has = |pattern: &Pattern| report.targets.iter().any(|of| of.pattern(*pattern).is_some());
    Pattern::ALL.into_iter().filter(has)
}

/// Draws a figure of a pattern: its caption, and the SVG.
type Draw = fn(&[(usize, &PatternReport)]) -> Option<(String, String)>;

fn figures(page: &mut String, report: &Report, title: &str, draw: Draw) {
    let mut drawn = String::new();
    for pattern in measured(report) {
        let targets = report.targets.iter().enumerate();
        let there: Vec<_> =
            targets.filter_map(|(place, of)| Some((place, of.pattern(pattern)?))).collect();
        if let Some((unit, svg)) = draw(&there) {
            let title = pattern.title();
            _ = write!(
                drawn,
                "<figure>\n<figcaption><b>{title}</b> {unit}</figcaption>\n{svg}</figure>\n"
            );
        }
    }
    if !drawn.is_empty() {
        _ = write!(page, "<h2>{title}</h2>\n<div class=\"charts\">\n{drawn}</div>\n");
    }
}

fn bar_chart(of: &[(usize, &PatternReport)]) -> Option<(String, String)> {
    let figure = of.first()?.1.figure;
    let better = if figure.more_is_better() { "higher is better" } else { "lower is better" };
    let values: Vec<_> = of.iter().map(|(place, of)| (*place, of.estimate)).collect();
    let unit = if figure == Figure::P99Ms { "p99, ms" } else { figure.unit() };
    Some((format!("{unit}; {better}"), bars(&values, figure.unit())))
}

/// With fewer operations, the 99th percentile is one of the longest few.
const P99_OPS_MIN: u64 = 100;

/// With fewer operations, no distribution is drawn.
const OPS_MIN: u64 = 20;

fn distribution(of: &[(usize, &PatternReport)]) -> Option<(String, String)> {
    let many = of.iter().filter(|(_, of)| of.ops >= OPS_MIN);
    let lines: Vec<_> = many.map(|(place, of)| (*place, &of.distribution_ms[..])).collect();
    let svg = Lines { x_name: "ms", x_log: true, lines }.svg()?;
    Some(("share of operations at or below a latency; logarithmic time".to_owned(), svg))
}

fn timeline(of: &[(usize, &PatternReport)]) -> Option<(String, String)> {
    let some = of.iter().filter(|(_, of)| of.timeline.len() > 1);
    let lines: Vec<_> = some.map(|(place, of)| (*place, &of.timeline[..])).collect();
    let svg = Lines { x_name: "s", x_log: false, lines }.svg()?;
    Some(("MB/s".to_owned(), svg))
}

fn notes(page: &mut String, report: &Report) {
    page.push_str("<h2>Notes</h2>\n<ul>\n");
    for target in &report.targets {
        let mount = match target.mount_point.as_str() {
            "" => "no mount point".to_owned(),
            point => format!("mounted at {point}"),
        };
        let about = format!(
            "{}: {}, {}, I/O engine {}, {}",
            target.url,
            target.file_system,
            mount,
            target.engine,
            if target.direct { "direct I/O" } else { "buffered I/O" }
        );
        _ = writeln!(page, "<li>{}</li>", escaped(&about));
        for note in &target.notes {
            _ = writeln!(page, "<li>{}</li>", escaped(&format!("{}: {note}", target.name)));
        }
        for peer in &target.peers {
            let text = format!(
                "{}: {}: feedline {} MB/s, fio {} MB/s, feedline/fio {:.3} ({:.3} to {:.3}); \
                 within 5 %: {}",
                target.name,
                peer.what,
                short(peer.ours_mb_per_s),
                short(peer.fio_mb_per_s),
                peer.ours_by_fio,
                peer.low,
                peer.high,
                peer.agreement.text()
            );
            _ = writeln!(page, "<li>{}</li>", escaped(&text));
        }
    }
    let method = &report.method;
    let how = format!(
        "medians of {} rounds after one warm-up round, 95 % bootstrap intervals, targets in turn; \
         processes: {}; {}; sample order: {}",
        method.runs, method.processes, method.machine, method.order
    );
    _ = writeln!(page, "<li>{}</li>", escaped(&how));
    page.push_str("</ul>\n");
}
