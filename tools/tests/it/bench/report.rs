//! Statistics, recommendations and page of the benchmark, from given numbers.

use std::path::Path;
use std::time::Duration;

use tools::bench::demand::Need;
use tools::bench::fio::comparison::{Agreement, Peer};
use tools::bench::measure::counters::CounterSource;
use tools::bench::measure::stats::{Estimate, MARGIN, RatioEstimate};
use tools::bench::measure::validity::{RESIDENT, ValidityFlag};
use tools::bench::patterns::{Pattern, PatternRun};
use tools::bench::random::Random;
use tools::bench::report::page::html;
use tools::bench::report::{Method, PatternReport, Report, TargetReport};
use tools::bench::target::not_mounted;

/// Nearly normal noise of mean 0 and deviation 1: the sum of twelve uniform numbers.
fn noise(random: &mut Random) -> f64 {
    (0..12).map(|_| random.below(1 << 32) as f64 / f64::from(u32::MAX)).sum::<f64>() - 6.0
}

/// In how many of 200 trials two targets differ significantly, if one is `ratio` times as good,
/// each number has `noise_share` of noise, and both have a drift of a fifth.
fn significant_count(ratio: f64, noise_share: f64, rounds: usize) -> usize {
    let mut random = Random::new(7);
    let trials = (0..200).map(|seed| {
        let (mut first, mut second) = (Vec::new(), Vec::new());
        for _ in 0..rounds {
            let drift = 1.0 + 0.2 * noise(&mut random).clamp(-2.0, 2.0);
            first.push(1000.0 * ratio * drift * (1.0 + noise_share * noise(&mut random)));
            second.push(1000.0 * drift * (1.0 + noise_share * noise(&mut random)));
        }
        let beside = RatioEstimate::of(&first, &second, seed).unwrap();
        assert!(!beside.significant || (beside.ratio > 1.0) == (ratio > 1.0) || ratio == 1.0);
        usize::from(beside.significant)
    });
    trials.sum()
}

#[test]
fn ten_percent_is_significant_and_equality_is_not() {
    for noise in [0.005, 0.01, 0.02] {
        let (better, worse, same) = (
            significant_count(1.1, noise, 5),
            significant_count(1.0 / 1.1, noise, 5),
            significant_count(1.0, noise, 5),
        );
        assert!(better >= 190 && worse >= 190, "{better} and {worse} of 200 with {noise}");
        assert!(same <= 2, "{same} of 200 equal ones with {noise}");
    }
    let same = significant_count(1.0, 0.1, 5);
    assert!(same <= 6, "{same} of 200 equal ones with much noise");
    assert_eq!(
        significant_count(1.0 + MARGIN / 2.0, 0.002, 5),
        0,
        "the difference is below MARGIN"
    );
    assert_eq!(significant_count(1.5, 0.001, 4), 0, "four rounds are too few");
}

#[test]
fn intervals_contain_the_median_and_are_deterministic() {
    let mut random = Random::new(11);
    let mut held = 0;
    for seed in 0..400 {
        let values: Vec<f64> = (0..9).map(|_| 50.0 + noise(&mut random)).collect();
        let estimate = Estimate::of(&values, seed);
        assert!(estimate.low <= estimate.median && estimate.median <= estimate.high);
        assert_eq!(estimate, Estimate::of(&values, seed));
        held += usize::from(estimate.low <= 50.0 && 50.0 <= estimate.high);
    }
    assert!(held >= 360, "{held} of 400 intervals of 95 % hold the median");
    assert_eq!(Estimate::of(&[], 1), Estimate::default());
    let one = Estimate::of(&[3.0], 1);
    assert_eq!((one.median, one.low, one.high), (3.0, 3.0, 3.0));
    assert_eq!(RatioEstimate::of(&[1.0, 0.0], &[1.0, 1.0], 1), None, "a value is 0");
    assert_eq!(RatioEstimate::of(&[], &[], 1), None);
}

/// A run of one second with these counts.
fn run(bytes: u64, ops: u64, moved_bytes: u64, ms: u64) -> PatternRun {
    let mut run =
        PatternRun { seconds: 1.0, bytes, ops, moved_bytes, cpu_s: 0.05, ..PatternRun::default() };
    (1..=100).for_each(|nth| run.latency.add(Duration::from_micros(ms * 10 * nth)));
    run.timeline = vec![bytes / 100; 100];
    run
}

/// Six rounds of runs that differ by a thousandth.
fn rounds(bytes: u64, ops: u64, moved_bytes: u64, ms: u64) -> Vec<PatternRun> {
    (0..6).map(|nth| run(bytes + nth * bytes / 1000, ops + nth, moved_bytes, ms)).collect()
}

fn target(
    name: &str,
    file_system: &str,
    patterns: Vec<(Pattern, Vec<PatternRun>)>,
) -> TargetReport {
    let of = |(pattern, runs): (Pattern, Vec<PatternRun>)| {
        PatternReport::of(pattern, &runs, CounterSource::Kernel, 1)
    };
    TargetReport {
        name: name.to_owned(),
        url: name.to_owned(),
        simulated: None,
        file_system: file_system.to_owned(),
        mount_point: "/mnt".to_owned(),
        engine: "ring".to_owned(),
        direct: true,
        witness: CounterSource::Kernel,
        notes: Vec::new(),
        patterns: patterns.into_iter().map(of).collect(),
        peers: Vec::new(),
    }
}

fn method(runs: usize) -> Method {
    Method {
        runs,
        seconds: 1.0,
        data_bytes: 1 << 30,
        checkpoint_bytes: 1 << 29,
        processes: 1,
        writers: 4,
        ranks_started: 64,
        seed: 1,
        order: "random samples".to_owned(),
        machine: "2 cores".to_owned(),
    }
}

fn report(targets: Vec<TargetReport>) -> Report {
    Report::new(Need::of_size("11b", 64, 2048, 4e14).unwrap(), method(5), targets)
}

/// Runs of reads and saves at these rates.
fn both(samples: u64, save_bytes: u64) -> Vec<(Pattern, Vec<PatternRun>)> {
    let moved = samples * 4098;
    vec![
        (Pattern::Samples, rounds(samples * 4098, samples, moved, 2)),
        (Pattern::Save, rounds(save_bytes, 4, save_bytes, 900)),
    ]
}

#[test]
fn a_verdict_is_in_terms_of_training() {
    // 4e14 / (6 x 11e9) x 64 / 2048 = 189.4 samples a second; 14 bytes a parameter.
    let need = Need::of_size("11b", 64, 2048, 4e14).unwrap();
    assert_eq!((need.checkpoint_bytes, need.sample_bytes), (154_000_000_000, 4098));
    assert!((need.samples_per_s - 189.39).abs() < 0.01, "{}", need.samples_per_s);

    let quick = target("/nvme", "ext4", both(587, 2_000_000_000));
    let shared = target("/ceph", "fuse.ceph-fuse", both(1900, 1_000_000_000));
    let report = report(vec![quick, shared]);
    let text = report.text();
    for expected in [
        "/nvme: feeds 3.12 clusters of 64 accelerators",
        "saves a checkpoint of 154 GB in 76.8 s",
        "/ceph: feeds 10.0 clusters",
        "best for data: /ceph (samples: 3.2",
        "best for checkpoints: /nvme (save: 2.00 times as fast as /ceph",
        "set checkpoint.dir on /nvme and checkpoint.drain_to on /ceph",
    ] {
        assert!(text.contains(expected), "no {expected:?} in\n{text}");
    }
    assert_eq!(report.verdict.data, ["/ceph"]);
    assert_eq!(report.verdict.checkpoints, ["/nvme"]);
}

#[test]
fn equal_targets_are_both_named() {
    let report = report(vec![
        target("/a", "xfs", both(1000, 1_000_000_000)),
        target("/b", "xfs", both(1000, 1_000_000_000)),
    ]);
    assert_eq!(report.verdict.data, ["/a", "/b"]);
    assert!(report.text().contains("/a or /b: difference not significant"), "{}", report.text());
    assert!(report.comparisons.iter().all(|of| of.better.is_none()));
}

#[test]
fn cached_results_are_flagged() {
    let bytes = 1_000_000_000;
    let cached = target("/a", "ext4", vec![(Pattern::Stream, rounds(bytes, 900, bytes / 50, 1))]);
    let honest = target("/b", "ext4", vec![(Pattern::Stream, rounds(bytes, 900, bytes, 1))]);
    let wasted = target("/c", "ext4", vec![(Pattern::Stream, rounds(bytes, 900, 4 * bytes, 1))]);
    let report = report(vec![cached, honest, wasted]);
    let flags: Vec<_> = report.targets.iter().map(|of| of.patterns[0].flag).collect();
    assert_eq!(flags, [Some(ValidityFlag::Cached), None, Some(ValidityFlag::Amplified)]);
    let text = report.text();
    assert!(text.contains("/a: stream is CACHED: the device moved 0.02 bytes for each"), "{text}");
    assert!(text.contains("/c: stream is AMPLIFIED: the device moved 3.99 bytes"), "{text}");
    assert!(html(&report).contains("CACHED"));
}

/// Counting requests does not see caches; the share of the file in the page cache decides.
#[test]
fn results_from_the_page_cache_are_flagged() {
    let bytes = 1_000_000_000;
    let of = |share: Option<f64>| {
        let mut runs = rounds(bytes, 900, bytes, 1);
        for run in &mut runs {
            run.more.extend(share.map(|share| (RESIDENT.to_owned(), share)));
        }
        PatternReport::of(Pattern::Stream, &runs, CounterSource::Requests, 1).flag
    };
    assert_eq!(
        [of(None), of(Some(0.02)), of(Some(0.97))],
        [None, None, Some(ValidityFlag::Cached)]
    );
    // The requests of saves and restores are not counted, so that there is no ratio.
    for (share, expected) in [(0.02, None), (0.97, Some(ValidityFlag::Cached))] {
        let mut runs = rounds(bytes, 4, 0, 1);
        runs.iter_mut().for_each(|run| run.more.extend([(RESIDENT.to_owned(), share)]));
        let restore = PatternReport::of(Pattern::Restore, &runs, CounterSource::Requests, 1);
        assert_eq!((restore.moved_per_delivered, restore.flag), (None, expected));
    }
    let memory =
        PatternReport::of(Pattern::Save, &rounds(bytes, 4, 0, 1), CounterSource::Memory, 1);
    assert_eq!(memory.flag, Some(ValidityFlag::Memory));
}

#[test]
fn cpu_time_of_the_benchmark_is_reported() {
    let bytes = 1_000_000_000;
    let of = |cpu_s: f64| {
        let mut runs = rounds(bytes, 900, bytes, 1);
        for run in &mut runs {
            (run.cpu_s, run.kernel_cpu_s) = (cpu_s, cpu_s / 5.0);
        }
        runs
    };
    let report = report(vec![
        target("/lean", "ext4", vec![(Pattern::Stream, of(0.05))]),
        // At a fixed rate, CPU time per byte has no meaning.
        target("/busy", "ext4", vec![(Pattern::Stream, of(0.35)), (Pattern::Rate, of(0.35))]),
    ]);
    let own = |nth: usize, of: usize| report.targets[nth].patterns[of].own;
    assert!((own(0, 0).core_s_per_gb.unwrap() - 0.05).abs() < 0.001 && !own(0, 0).is_over);
    assert!((own(1, 0).us_per_op - 0.35e6 / 900.0).abs() < 2.0 && own(1, 0).is_over);
    assert!(!own(1, 1).is_over);
    let text = report.text();
    let expected = "/busy: more than 0.1 cores per GB/s, the kernel's part included: stream 0.3";
    assert!(text.contains("stream 0.35 (0.07 in the kernel)"), "{text}");
    assert!(text.contains(expected) && !text.contains("/lean: more than"), "{text}");
    assert!(text.contains("0.35 OVER") && !text.contains("0.05 OVER"), "{text}");
    let page = html(&report);
    assert_eq!(page.matches("<b class=\"warn\">OVER</b>").count(), 1, "{page}");
    let json = serde_json::to_value(&report).unwrap();
    assert_eq!(json["targets"][1]["patterns"][0]["own_is_over"], true);
    let of_busy = &json["targets"][1]["patterns"][0];
    let [all, kernel] =
        ["own_core_s_per_gb", "own_kernel_core_s_per_gb"].map(|name| &of_busy[name]);
    let [all, kernel] = [all, kernel].map(|cores| cores.as_f64().unwrap());
    assert!((all - 5.0 * kernel).abs() < 1e-9, "{of_busy}");
}

#[test]
fn agreement_covers_the_whole_interval() {
    for (low, high, expected) in [
        (0.96, 1.04, Agreement::Yes),
        (0.94, 1.0, Agreement::Open),
        (0.99, 1.06, Agreement::Open),
        (0.8, 0.94, Agreement::No),
        (1.06, 1.2, Agreement::No),
        (0.5, 2.0, Agreement::Open),
    ] {
        assert_eq!(Agreement::of(low, high), expected, "{low} to {high}");
    }
}

#[test]
fn few_rounds_and_models_are_reported() {
    let need = Need::of_size("1b", 8, 2048, 4e14).unwrap();
    let mut model = target("/a", "simulated lustre", both(900, 1_000_000_000));
    model.simulated = Some("lustre".to_owned());
    let report = Report::new(need, method(2), vec![model]);
    let text = report.text();
    assert!(text.starts_with("SIMULATED") && text.contains("2 rounds are too few"), "{text}");
    assert!(html(&report).contains("<p class=\"warn\">Simulated"));
    let json = serde_json::to_value(&report).unwrap();
    assert_eq!(json["simulated"], true);
    assert_eq!(json["targets"][0]["simulated"], "lustre");
}

#[test]
fn valid_sizes_are_parsed_and_others_refused() {
    for (size, parameters) in [("350m", 350_000_000), ("1.3B", 1_300_000_000), ("1t", 1 << 40)] {
        let need = Need::of_size(size, 8, 1024, 4e14).unwrap();
        let expected = if size == "1t" { 1_000_000_000_000 } else { parameters };
        assert_eq!(need.parameters, expected, "{size}");
    }
    for size in ["", "b", "11", "-1b", "0m", "xb", "infb", "nanb", "1e9b"] {
        assert!(Need::of_size(size, 8, 1024, 4e14).is_err(), "{size} was accepted");
    }
    assert!(Need::of_size("1b", 0, 1024, 4e14).is_err());
    assert!(Need::of_size("1b", 8, 0, 4e14).is_err());
    assert!(Need::of_size("1b", 8, 1024, f64::NAN).is_err());
}

/// Checks that elements are closed and attributes quoted; returns the number of figures.
fn figures(page: &str) -> usize {
    let mut open: Vec<&str> = Vec::new();
    let (mut rest, mut figures) = (page.strip_prefix("<!DOCTYPE html>").unwrap(), 0);
    while let Some(at) = rest.find('<') {
        let text = &rest[..at];
        assert!(!text.contains('>'), "a stray > in {text:?}");
        for entity in text.split('&').skip(1) {
            let known = ["amp;", "lt;", "gt;", "quot;", "#39;"];
            assert!(known.iter().any(|known| entity.starts_with(known)), "{text:?}");
        }
        let end = at + rest[at..].find('>').expect("a tag ends");
        let tag = &rest[at + 1..end];
        rest = &rest[end + 1..];
        assert_eq!(tag.matches('"').count() % 2, 0, "a quote is open in <{tag}>");
        let name = tag.split([' ', '/', '\n']).next().unwrap();
        if let Some(name) = tag.strip_prefix('/') {
            assert_eq!(open.pop(), Some(name));
        } else if name == "style" {
            rest = &rest[rest.find("</style>").expect("raw text ends") + "</style>".len()..];
        } else if !tag.ends_with('/') && name != "meta" && name != "br" {
            assert!(name.chars().all(|c| c.is_ascii_alphanumeric()), "<{tag}>");
            figures += usize::from(name == "figure");
            open.push(name);
        }
    }
    assert!(open.is_empty(), "{open:?} stay open");
    figures
}

#[test]
fn page_is_complete_and_self_contained() {
    let nasty = "s3://a/<script>alert('x')</script>&\"b";
    let mut first = target(nasty, "s3", both(900, 1_000_000_000));
    first.peers.push(Peer {
        what: "sequential reads".to_owned(),
        ours_mb_per_s: 100.0,
        fio_mb_per_s: 101.0,
        ours_by_fio: 0.99,
        low: 0.97,
        high: 1.01,
        agreement: Agreement::of(0.97, 1.01),
        ours_core_s_per_gb: Some(0.06),
        fio_core_s_per_gb: Some(0.05),
    });
    let report = report(vec![first, target("/b", "ext4", both(1900, 500_000_000))]);
    let page = html(&report);
    // Bars of both patterns, one distribution and two timelines at least.
    assert!(figures(&page) >= 5, "{} figures", figures(&page));
    assert!(!page.contains("http") && !page.contains("<script"), "{page}");
    assert!(page.contains("&lt;script&gt;") && page.contains("class=\"bar s1\""));
    assert!(page.contains("feedline/fio 0.990 (0.970 to 1.010); within 5 %: yes"));
    let empty = html(&self::report(vec![target("/a", "ext4", Vec::new())]));
    assert_eq!(figures(&empty), 0);
}

#[test]
fn unmounted_mount_points_are_detected() {
    let table = "# /dev/old /lustre/old lustre
/dev/vda / ext4 defaults 0 1
10.0.0.2@tcp:/scratch /lustre lustre defaults,_netdev 0 0
none /swap swap sw 0 0
10.0.0.1:/ /lustre/ceph ceph noauto 0 0
";
    let found = |path: &str, mount: &str| not_mounted(table, Path::new(path), mount);
    let lustre = Some(("/lustre".to_owned(), "lustre".to_owned()));
    assert_eq!(found("/lustre/run", "/"), lustre);
    assert_eq!(found("/lustre/run", "/lustre"), None);
    assert_eq!(found("/lustre/run", "/lustre/run"), None, "something nearer is mounted");
    assert_eq!(found("/lustre/ceph/x", "/lustre").unwrap().1, "ceph");
    assert_eq!(found("/lustre2/run", "/"), None);
    assert_eq!(found("/data", "/"), None);
}
