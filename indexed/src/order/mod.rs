//! The order of samples: Megatron's indexes and blends, and an order without tables.

pub(crate) mod blend;
pub(crate) mod block_shuffle;
mod feistel;
mod gpt_counts;
pub(crate) mod gpt_index;
mod gpt_verify;
pub(crate) mod mapping;
pub(crate) mod masked_index;
pub(crate) mod sample_index;
pub(crate) mod token_stream;
