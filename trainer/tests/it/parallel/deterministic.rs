//! `precision.deterministic`, which is a switch of the process: a test of its own for that.

use std::sync::atomic::AtomicBool;

use crate::common::Lab;
use bridge::runtime::is_deterministic;
use trainer::config::Config;
use trainer::{Host, Outcome, train};

#[test]
fn repeatable_kernels_are_asked_for_unless_the_config_says_no() {
    let lab = Lab::new();
    for asked in ["false", "true"] {
        let keys = [("run.budget", "{ steps = 1 }"), ("precision.deterministic", asked)];
        let path = lab.config(asked, &keys);
        let config = Config::load(path.to_str().expect("UTF-8"), &[]).expect("a config");
        let stop = AtomicBool::new(false);
        let terminal = Box::new(std::io::sink());
        let host = Host { stop: &stop, terminal, agent: None, world: None };
        assert_eq!(train(&config, host).expect("it trains"), Outcome::Done);
        assert_eq!(is_deterministic().to_string(), asked);
    }
}
