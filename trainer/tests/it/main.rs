//! Training: networks against references, layouts, kills, resumes, evaluation.
//!
//! One binary, because each is linked with all that the crate needs.

#![expect(clippy::unwrap_used, reason = "a test that cannot be set up has failed")]

mod common;
#[path = "common/corpora.rs"]
mod corpora;
mod defects;
mod deterministic;
mod dropout;
mod elastic;
mod errors;
mod eval;
#[path = "common/families.rs"]
mod families;
mod full_disk;
mod generate;
mod gpu;
mod inputs;
#[path = "common/kills.rs"]
mod kills;
mod launch;
mod launched;
mod layouts;
mod local_cache;
mod mesh;
mod model;
mod model_documents;
mod model_families;
mod model_tolerance;
mod objectives;
mod offload_threads;
mod offloaded;
#[path = "../../bridge/tests/it/common/ports.rs"]
mod ports;
mod ranks;
mod released;
mod resume;
mod resume_saves;
#[path = "../../../loader/tests/it/common/mod.rs"]
mod samples;
mod see;
mod slices;
mod torchrun;
