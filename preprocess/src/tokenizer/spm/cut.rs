//! Finds where a long text may be cut before it is encoded, so that several threads can encode it.

use super::{SentencePiece, SpmEngine};

/// Bytes that are searched for a position.
const SEARCH_BYTES_MAX: usize = 4 << 10;

impl SentencePiece {
    /// A position at or after `at` where the ids of both sides are together those of the whole.
    ///
    /// Only with BPE: the unigram's sums go through the whole text. It is before a lone space
    /// between two ASCII letters or digits, which no rule of the normalizer and no piece crosses.
    /// The normalizer must treat the beginning of the second side as it treats the space: either
    /// leave it as it is, or remove the space and add one.
    pub(super) fn cut_after(&self, text: &str, at: usize) -> Option<usize> {
        let SpmEngine::Bpe(bpe) = &self.engine else { return None };
        let joins = self.joins.as_ref()?;
        let options = &self.normalizer.options;
        let as_it_is = options.add_dummy_prefix == options.remove_extra_whitespaces;
        let escaped = options.escape_whitespaces && !options.whitespace_as_suffix;
        if !(as_it_is && escaped && options.spaces_stand_alone) {
            return None;
        }
        let bytes = text.as_bytes();
        let end = bytes.len().min(at.saturating_add(SEARCH_BYTES_MAX));
        let plain = |byte: u8| byte.is_ascii_alphanumeric() && self.normalizer.is_plain(byte);
        (at.max(1)..end.saturating_sub(1)).find(|&at| {
            let (left, right) = (bytes[at - 1], bytes[at + 1]);
            let lone = bytes[at] == b' ' && plain(left) && plain(right);
            lone && !joins.joined(u32::from(left), u32::from(b' ')) && bpe.is_known(left)
        })
    }
}
