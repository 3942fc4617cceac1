//! Requests in flight, the backends that read them, and the watchdog that reports stuck ones.

pub(crate) mod file_backend;
pub(crate) mod in_flight;
pub(crate) mod open_file;
#[expect(unsafe_code, reason = "the kernel borrows buffers beyond what the compiler sees")]
mod uring_backend;
pub(crate) mod watchdog;
pub(crate) mod worker_pool;
