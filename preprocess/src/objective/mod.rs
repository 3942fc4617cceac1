//! What a document becomes besides one sequence of ids: [`spans`] of it hidden, for an encoder and
//! a decoder.

mod spans;

pub use spans::{Dropped, Span, SpanConfig, SpanError, Triple, choose_spans, corrupt, lay_out};
