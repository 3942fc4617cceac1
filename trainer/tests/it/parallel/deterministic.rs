//! `precision.deterministic`, which is a setting of the process, so it has a test of its own.

use std::sync::atomic::AtomicBool;

use crate::common::Lab;
use bridge::runtime::is_deterministic;
use trainer::config::Config;
use trainer::{Host, Outcome, train};

#[test]
fn deterministic_kernels_follow_the_config() {
    let lab = Lab::new();
    for wanted in ["false", "true"] {
        let keys = [("run.budget", "{ steps = 1 }"), ("precision.deterministic", wanted)];
        let path = lab.config(wanted, &keys);
        let config = Config::load(path.to_str().expect("UTF-8"), &[]).expect("a config");
        let stop = AtomicBool::new(false);
        let terminal = Box::new(std::io::sink());
        let host = Host { stop: &stop, terminal, agent: None, world: None };
        assert_eq!(train(&config, host).expect("it trains"), Outcome::Done);
        assert_eq!(is_deterministic().to_string(), wanted);
    }
}
