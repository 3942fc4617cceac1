//! Objectives other than one sequence of ids per document: `spans` masks spans of it, for an
//! encoder and a decoder; `sentences` makes each sentence a sequence.

mod chinese;
mod punkt;
mod sentences;
mod spans;

pub use punkt::{Newlines, Nltk};
pub use sentences::{SentenceSpec, Splitter};
pub use spans::{Dropped, Span, SpanConfig, SpanError, Triple, choose_spans, corrupt, lay_out};
