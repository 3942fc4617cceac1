//! Stores with fault injection, the conformance suite that every store must pass, and an S3 server
//! for tests.

#[cfg(feature = "sim")]
pub mod conformance;
#[cfg(feature = "sim")]
mod crash;
#[cfg(feature = "sim")]
mod fault_filesystem;
#[cfg(feature = "sim")]
pub mod fault_store;
#[cfg(feature = "sim")]
mod hooks;
#[cfg(feature = "sim")]
mod read_faults;
#[cfg(feature = "sim")]
pub mod reader_conformance;
#[cfg(feature = "server")]
pub mod s3_server;
#[cfg(feature = "sim")]
mod tmpfs;
#[cfg(feature = "sim")]
mod tree;
