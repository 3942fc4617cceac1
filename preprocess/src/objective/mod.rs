//! What a document becomes besides one sequence of ids: `spans` of it hidden, for an encoder and
//! a decoder; or `sentences`, each of them a sequence.

mod chinese;
mod punkt;
mod sentences;
mod spans;

pub use punkt::{Newlines, Nltk};
pub use sentences::{SentenceSpec, Splitter};
pub use spans::{Dropped, Span, SpanConfig, SpanError, Triple, choose_spans, corrupt, lay_out};
