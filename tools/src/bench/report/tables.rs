//! The numbers as tables, for a terminal.

use crate::bench::fio::comparison::Peer;
use crate::bench::measure::stats::Estimate;
use crate::bench::patterns::Pattern;
use crate::bench::report::{PatternReport, TargetReport, short};
use crate::ui::terminal::table;

/// A row for each pattern and target.
#[must_use]
pub fn rows(targets: &[TargetReport]) -> String {
    let mut rows = Vec::new();
    for pattern in Pattern::ALL {
        for target in targets {
            rows.extend(target.pattern(pattern).map(|of| row(target, of)));
        }
    }
    let head = [
        "pattern",
        "target",
        "median",
        "95 % interval",
        "unit",
        "p50 ms",
        "p99 ms",
        "max ms",
        "I/O amplification",
        "client cores",
        "cores per GB/s",
        "in kernel",
    ];
    table(&head, &rows)
}

fn row(target: &TargetReport, of: &PatternReport) -> Vec<String> {
    let Estimate { median, low, high } = of.estimate;
    let moved =
        of.moved_per_delivered.map_or_else(|| "-".to_owned(), |moved| format!("{moved:.2}"));
    let flag = of.flag.map(|flag| format!(" {}", flag.name())).unwrap_or_default();
    let over = if of.own.is_over { " OVER" } else { "" };
    vec![
        of.pattern.name().to_owned(),
        target.name.clone(),
        short(median),
        format!("{} to {}", short(low), short(high)),
        of.figure.unit().to_owned(),
        short(of.latency_ms.p50),
        short(of.latency_ms.p99),
        short(of.latency_ms.max),
        moved + &flag,
        format!("{:.2}", of.own.cores),
        of.own.core_s_per_gb.map_or_else(|| "-".to_owned(), |s| format!("{s:.2}{over}")),
        of.own.kernel_core_s_per_gb.map_or_else(|| "-".to_owned(), |s| format!("{s:.2}")),
    ]
}

/// Table of the comparison with fio; empty without one.
#[must_use]
pub fn peers(targets: &[TargetReport]) -> String {
    let cores = |of: Option<f64>| of.map_or_else(|| "-".to_owned(), |s| format!("{s:.2}"));
    let row = |target: &TargetReport, peer: &Peer| {
        vec![
            target.name.clone(),
            peer.what.clone(),
            short(peer.ours_mb_per_s),
            short(peer.fio_mb_per_s),
            format!("{:.3}", peer.ours_by_fio),
            format!("{:.3} to {:.3}", peer.low, peer.high),
            peer.agreement.text().to_owned(),
            cores(peer.ours_core_s_per_gb),
            cores(peer.fio_core_s_per_gb),
        ]
    };
    let pairs = targets.iter().flat_map(|of| of.peers.iter().map(move |peer| (of, peer)));
    let rows: Vec<_> = pairs.map(|(of, peer)| row(of, peer)).collect();
    if rows.is_empty() {
        return String::new();
    }
    let head = [
        "compared with fio",
        "workload",
        "feedline MB/s",
        "fio MB/s",
        "feedline/fio",
        "95 % interval",
        "within 5 %",
        "feedline cores per GB/s",
        "fio cores per GB/s",
    ];
    format!("\n{}", table(&head, &rows))
}
