//! Blocking batches of reads and writes on one open file.

pub(crate) mod batch;
pub(crate) mod direct;
pub(crate) mod pread;
pub(crate) mod transfer;
#[expect(unsafe_code, reason = "the kernel borrows buffers beyond what the compiler sees")]
pub(crate) mod uring_batch;
