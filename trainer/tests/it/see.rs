//! What a run reports: a trace, its utilization, a spike of its loss, and a range test.

use std::fs;
use std::process::Command;

use crate::common::{Lab, alone, assert_success, text, train, trainer};
use logbook::report::{RunRecord, html};
use serde_json::Value;

#[test]
fn a_run_writes_a_trace_and_its_utilization() {
    let lab = Lab::new();
    let keys = [
        ("run.budget", "{ steps = 6 }"),
        ("log.timers", "'trace'"),
        ("log.peak_flop_per_s", "1e9"),
        ("eval.every", "3"),
    ];
    assert_success(&train(&lab.config("run", &keys)));
    let trace = fs::read(lab.path("run/trace/rank-00000.json")).unwrap();
    let trace: Value = serde_json::from_slice(&trace).unwrap();
    let events = &trace["traceEvents"].as_array().unwrap()[1..];
    let count = |name: &str, step: u64| {
        let is_it = |e: &&Value| e["name"] == name && e["args"]["step"] == step;
        events.iter().filter(is_it).count()
    };
    for step in 1..=6 {
        assert_eq!(count("waits for data", step), 1, "step {step}");
    }
    assert_eq!((count("evaluates", 3), count("evaluates", 4)), (1, 0));
    assert_eq!((count("saves", 4), count("saves", 6)), (1, 1));
    // Consecutive events: three micro-batches forward and backward, and the rest of a step.
    assert!(events.iter().filter(|event| event["args"]["step"] == 5).count() >= 8);
    let end = |event: &Value| event["ts"].as_f64().unwrap() + event["dur"].as_f64().unwrap();
    assert!(events.windows(2).all(|two| end(&two[0]) <= two[1]["ts"].as_f64().unwrap() + 1.0));

    let log = fs::read_to_string(lab.path("run/log.jsonl")).unwrap();
    let line: Value = serde_json::from_str(log.lines().next().unwrap()).unwrap();
    let perf = |key: &str| line["perf"][key].as_f64().unwrap();
    // 500 words of 64, two layers of 12 x 64 x 64 + 13 x 64, and the last norm; 16 tokens.
    let products = 6 * (500 * 64 + 2 * (12 * 64 * 64 + 13 * 64) + 2 * 64);
    let attention = 6 * 2 * 64 * 16;
    for (key, flop) in [("mfu_12lct", products + 2 * attention), ("mfu_6lct", products + attention)]
    {
        let expected = f64::from(flop) * perf("tokens_per_s") / 1e9;
        assert!(
            (perf(key) - expected).abs() < 1e-6 * expected,
            "{key} is {}, expected {expected}",
            perf(key)
        );
    }
    assert_eq!(line["perf"]["ranks"], 1);
}

/// Without timers a log line has the speed of a step, and no breakdown of its time.
#[test]
fn timers_may_be_off() {
    let lab = Lab::new();
    let keys = [("run.budget", "{ steps = 1 }"), ("log.timers", "'off'")];
    assert_success(&train(&lab.config("run", &keys)));
    let log = fs::read_to_string(lab.path("run/log.jsonl")).unwrap();
    let line: Value = serde_json::from_str(log.lines().next().unwrap()).unwrap();
    let keys: Vec<&String> = line["perf"].as_object().unwrap().keys().collect();
    assert_eq!(keys, ["tokens_per_s", "step_ms", "elapsed_s", "ranks", "mfu_12lct", "mfu_6lct"]);
}

#[test]
fn a_loss_spike_names_its_samples() {
    let lab = Lab::new();
    // No rise over the last step is allowed: with a small batch the loss soon rises.
    let spike =
        [("run.spike.rise", "0"), ("run.spike.window", "1"), ("run.spike.action", "'stop'")];
    let output = train(&lab.config("run", &spike));
    assert_eq!(output.status.code(), Some(2));
    let stderr = text(&output.stderr);
    let lines = lab.log_lines("run");
    let loss = |line: &Value| line["loss"].as_f64();
    let steps: Vec<&Value> = lines.iter().filter(|line| loss(line).is_some()).collect();
    let [.., before, last] = &steps[..] else { panic!("two steps are expected: {stderr}") };
    assert!(loss(last) > loss(before), "{stderr}");
    let step = last["step"].as_u64().unwrap();
    let expected = format!(
        "loss spike at step {step}: loss {:.4} after a mean of {:.4}, at samples {} to {} of the \
         training",
        loss(last).unwrap(),
        loss(before).unwrap(),
        12 * (step - 1),
        12 * step - 1
    );
    assert!(stderr.contains(&expected), "{stderr} is without '{expected}'");
    let hint =
        format!("`feedline samples RUN.toml --show --first {} --samples 12`", 12 * (step - 1));
    assert!(stderr.contains(&hint), "{stderr} is without '{hint}'");
    // With another action the run resumes from before the spike.
    let output = train(&lab.config("run", &[("run.spike.rise", "0"), ("run.spike.window", "1")]));
    assert_success(&output);
    assert!(
        text(&output.stderr).contains("warning: loss spike at step"),
        "{}",
        text(&output.stderr)
    );
}

#[test]
fn a_sweep_finds_the_rates_that_learn() {
    let lab = Lab::new();
    let config = lab.config("run", &[]);
    let mut command = trainer("lr-sweep", &config);
    command.args(["--from", "1e-5", "--to", "100", "--steps", "60"]);
    let output = command.output().unwrap();
    assert_success(&output);
    let stdout = text(&output.stdout);
    let after = |label: &str| -> f64 {
        let rest = stdout.split(label).nth(1).unwrap_or_else(|| panic!("{stdout}"));
        rest.split([';', '\n']).next().unwrap().parse().unwrap()
    };
    let (fastest, least) = (after("falls fastest at "), after("lowest loss at "));
    assert!(1e-4 < fastest && fastest <= least && least < 10.0, "{stdout}");
    let page = fs::read_to_string(lab.path("run/lr-sweep/report.html")).unwrap();
    assert!(page.contains("<b>Range test</b>"));
    let saved = fs::read_dir(lab.path("run/lr-sweep/ckpt")).map_or(0, |folder| {
        folder
            .filter(|e| e.as_ref().unwrap().file_name().to_str().unwrap().starts_with("step-"))
            .count()
    });
    assert_eq!(saved, 0, "a sweep saves nothing");
    // Rates grow by the same factor.
    let lines = lab.log_lines("run/lr-sweep");
    let rates: Vec<f64> = lines.iter().map(|line| line["lr"].as_f64().unwrap()).collect();
    let factor = 1e7_f64.powf(1.0 / 60.0);
    assert_eq!(rates[0], 1e-5);
    assert!(rates.windows(2).all(|two| (two[1] / two[0] / factor - 1.0).abs() < 1e-9));
    let refused = trainer("lr-sweep", &config).args(["--from", "2", "--to", "1"]).output().unwrap();
    assert_eq!(refused.status.code(), Some(2));
}

#[test]
fn report_writes_the_page() {
    let lab = Lab::new();
    let line = "{\"step\":1,\"tokens\":64,\"loss\":2.5,\"perf\":{\"elapsed_s\":1.0}}\n";
    fs::create_dir(lab.path("run")).unwrap();
    fs::write(lab.path("run/log.jsonl"), line).unwrap();
    let run = lab.path("run");
    assert_success(&trainer("report", &run).output().unwrap());
    let record = RunRecord::read(run.to_str().unwrap()).unwrap();
    let page = fs::read_to_string(run.join("report.html")).unwrap();
    assert_eq!(page, html(&[record]));
    let nine = trainer("report", &run).args([&run; 8]).output().unwrap();
    assert_eq!(nine.status.code(), Some(2));
    let absent = trainer("report", &lab.path("nowhere")).output().unwrap();
    assert_eq!(absent.status.code(), Some(2));
    // Files are limited to one block: the page that exists stays, and no other file is left.
    let script = "trap '' XFSZ; ulimit -f 1; exec \"$0\" report \"$1\"";
    let mut limited = Command::new("sh");
    limited.args(["-c", script]).arg(env!("CARGO_BIN_EXE_trainer")).arg(&run);
    let limited = alone(&mut limited).output().unwrap();
    assert_eq!(limited.status.code(), Some(2), "{}", text(&limited.stderr));
    assert!(text(&limited.stderr).contains("report.html"), "{}", text(&limited.stderr));
    assert_eq!(fs::read_to_string(run.join("report.html")).unwrap(), page);
    assert_eq!(fs::read_dir(&run).unwrap().count(), 2, "the log and the page");
}
