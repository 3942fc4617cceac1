//! Documents on their way, and what is counted of them.

pub(crate) mod document_batch;
pub(crate) mod encoded;
pub(crate) mod report;
