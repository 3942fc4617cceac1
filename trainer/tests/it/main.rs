//! Training: networks against references, layouts, kills, resumes, evaluation.
//!
//! One binary, because each is linked with all that the crate needs.

#![expect(clippy::unwrap_used, reason = "a test that cannot be set up has failed")]

mod common;
#[path = "common/corpora.rs"]
mod corpora;
mod defects;
mod errors;
mod eval;
#[path = "common/families.rs"]
mod families;
mod full_disk;
mod generate;
mod gpu;
#[path = "common/kills.rs"]
mod kills;
mod launch;
mod local_cache;
mod model;
mod objectives;
mod offloaded;
mod parallel;
#[path = "../../bridge/tests/it/common/ports.rs"]
mod ports;
mod ranks;
mod resume;
#[path = "../../../loader/tests/it/common/mod.rs"]
mod samples;
mod see;
