//! Token files and their order: Megatron's `.bin`/`.idx` and its sample indexes, byte for byte.
//!
//! A dataset is a pair of files: the tokens of all sequences back to back in a `.bin`, and in an
//! `.idx` where each sequence and document begins. [`IndexedDataset`] reads a pair, [`Builder`]
//! writes one. A GPT reads a dataset in an order that follows from the sequences' lengths and a
//! seed: [`GptIndex`]. Several datasets are mixed by a [`BlendIndex`]. Both are kept in `.npy`
//! files under Megatron's names, so that either program finds what the other has built.
//!
//! What is read is never trusted: [`Error::Malformed`] names the file, the byte, what came and what
//! was due. What is computed is pure: same lengths and settings, same bytes.
//!
//! In reading order: `dtype`, `idx`, `dataset`, `outline`, `builder` are the files; `rng`, `split`,
//! `gpt_plan`, `sample_index`, `gpt_index` the order; `npy`, `python_json`, `cache`, `stamp`,
//! `gpt_verify` how it is kept; `blend`, `mapping` and `masked_index` the other indexes of
//! Megatron; `token_stream` and `block_shuffle` an order of our own, which needs no tables;
//! `lengths` a small form of the `.idx`, from which the order is built.

#![forbid(unsafe_code)]

// A place in a table may be beyond 32 bits.
const _: () = assert!(usize::BITS == 64);

mod block_prefetch;
mod cache;
mod dtype;
mod edit;
mod error;
mod formats;
mod mmididx;
mod order;
pub mod rng;
mod split;

pub use cache::index_cache::default_cache_folder;
pub use cache::npy::{Descr, Element, Npy};
pub use dtype::Dtype;
pub use edit::concat::{DocumentRange, splice};
pub use edit::repair::{Repair, RepairReport};
pub use error::{Error, FormatRule, Result};
pub use formats::{
    Census, CensusReport, Format, MissingDocumentEnds, ReadOptions, Sink, TokenSource,
    WriteOptions, WriteReport, Writer,
};
pub use mmididx::builder::{Builder, BuilderMark, Built};
pub use mmididx::dataset::{CheckReport, IndexedDataset};
pub use mmididx::lengths::Lengths;
pub use order::blend::{BlendConfig, BlendIndex, BlendWeights, blend_sizes, normalize_weights};
pub use order::block_shuffle::{BlockEpoch, BlockShuffle};
pub use order::gpt_index::{GptIndex, GptIndexConfig, TokenSpan};
pub use order::mapping::{BlocksConfig, MappingConfig, build_blocks_mapping, build_mapping};
pub use order::masked_index::{MaskedConfig, MaskedIndex, MaskedKind, MaskedSample};
pub use order::sample_index::{SampleRule, build_sample_index};
pub use order::token_stream::TokenStream;
pub use split::{Split, SplitMatrix};
