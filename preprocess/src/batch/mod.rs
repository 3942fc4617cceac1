//! Batches of documents between threads, and the counts that become the report.

pub(crate) mod document_batch;
pub(crate) mod encoded;
pub(crate) mod report;
