/// The windows in which a long text is scored, those of Megatron's `--overlapping-eval`: each
/// starts `stride` tokens after the one before. The first counts all that it predicts, the others
/// the last `stride`, so that each token but the first of the text counts once, and is predicted
/// from `len - stride` tokens before it at least.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Windows {
    /// Tokens of the text.
    tokens: u64,
    /// Tokens that the model sees.
    len: u64,
    stride: u64,
    begin: u64,
}

/// One of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    /// The first token that the model sees.
    pub begin: u64,
    /// The first that counts.
    pub counts_from: u64,
    /// After the last that counts; the model sees all before that one.
    pub end: u64,
}

impl Windows {
    /// Over a text of this many tokens.
    ///
    /// # Panics
    /// If a length is 0, or the stride is longer than the window.
    #[must_use]
    pub fn new(tokens: u64, len: u64, stride: u64) -> Self {
        assert!(0 < stride && stride <= len, "a stride of {stride} through windows of {len}");
        Windows { tokens, len, stride, begin: 0 }
    }
}

impl Iterator for Windows {
    type Item = Window;

    fn next(&mut self) -> Option<Window> {
        let begin = self.begin;
        let counts_from = if begin == 0 { 1 } else { begin + self.len + 1 - self.stride };
        if counts_from >= self.tokens {
            return None;
        }
        self.begin += self.stride;
        Some(Window { begin, counts_from, end: self.tokens.min(begin + self.len + 1) })
    }
}
