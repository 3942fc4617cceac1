//! Token files and their order: Megatron's `.bin`/`.idx` and its sample indexes, byte for byte.
//!
//! A dataset is a pair of files: the tokens of all sequences back to back in a `.bin`, and in an
//! `.idx` where each sequence and document starts. [`IndexedDataset`] reads a pair, [`Builder`]
//! writes one. A GPT reads a dataset in an order that the sequence lengths and a seed determine:
//! [`GptIndex`]. A [`BlendIndex`] mixes several datasets. Both are cached in `.npy` files under
//! Megatron's names, so that each program finds the cache of the other.
//!
//! Files are never trusted: [`Error::Malformed`] names the file, the byte, and what was expected
//! and found there. Indexes are pure functions: the same lengths and settings give the same bytes.
//!
//! In reading order: `mmididx` reads and writes the files; `order` has Megatron's indexes and
//! blends, and an order without tables (`token_stream`, `block_shuffle`); `cache` stores indexes
//! and checks that they are current; `checksums` writes and verifies the block checksums of a pair;
//! `formats` reads and writes token files of other programs; `edit` concatenates and repairs
//! datasets.

#![forbid(unsafe_code)]

// An index into a table may exceed 32 bits.
const _: () = assert!(usize::BITS == 64);

mod block_prefetch;
mod cache;
mod checksums;
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
pub use checksums::table::{BlockChecksums, BlockRun};
pub use checksums::writer::{sums_of, write_checksums};
pub use dtype::Dtype;
pub use edit::concat::{DocumentRange, splice};
pub use edit::repair::{Repair, RepairReport};
pub use error::{Error, FormatRule, Result};
pub use formats::{
    BertExample, Census, CensusReport, Example, Format, GzipReader, MemberDecoder, MemberReader,
    MissingDocumentEnds, RECORD_BYTES_MAX, RECORD_FOOTER_BYTES, RECORD_HEADER_BYTES, ReadOptions,
    RecordFault, Sink, TokenSource, WriteOptions, WriteReport, Writer, split_record, starts_record,
};
pub use mmididx::builder::{Builder, BuilderMark, Built};
pub use mmididx::dataset::{CheckReport, IndexedDataset};
pub use mmididx::lengths::Lengths;
pub use mmididx::similar::similar_prefixes;
pub use order::blend::{BlendConfig, BlendIndex, BlendWeights, blend_sizes, normalize_weights};
pub use order::block_shuffle::{BlockEpoch, BlockShuffle};
pub use order::gpt_index::{GptIndex, GptIndexConfig, TokenSpan};
pub use order::mapping::{BlocksConfig, MappingConfig, build_blocks_mapping, build_mapping};
pub use order::masked_index::{MaskedConfig, MaskedIndex, MaskedKind, MaskedSample};
pub use order::sample_index::{SampleRule, build_sample_index};
pub use order::token_stream::TokenStream;
pub use split::{Split, SplitMatrix};
