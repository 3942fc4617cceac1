/// What one micro-batch of language-model training consumes. All three arrays have the shape
/// `[rows, seq_len]`, row-major; position 0 is the oldest token of its row.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Batch {
    /// The sample in row 0, as a position in the shuffled order. Rows are consecutive samples.
    pub first_sample: u64,
    /// Samples in the batch: the micro-batch size, or fewer in the last batch of a run.
    pub rows: usize,
    /// Tokens a row.
    pub seq_len: usize,
    /// Input token ids; 0 where a short sample was padded.
    pub tokens: Vec<i64>,
    /// The token that follows each input token; 0 where a short sample was padded.
    pub labels: Vec<i64>,
    /// 1 where the label counts in the loss, 0 where it is padding.
    pub loss_mask: Vec<f32>,
}

impl Batch {
    /// Makes room for a shape, keeping what was allocated.
    pub(crate) fn reset(&mut self, first_sample: u64, rows: usize, seq_len: usize) {
        self.first_sample = first_sample;
        self.rows = rows;
        self.seq_len = seq_len;
        let elements = rows * seq_len;
        self.tokens.resize(elements, 0);
        self.labels.resize(elements, 0);
        self.loss_mask.resize(elements, 0.0);
    }

    /// Sets one row from the `text` of its sample: inputs are all tokens but the last, labels all
    /// but the first (Megatron's `add_extra_token_to_sequence`). What `text` lacks is padding.
    pub(crate) fn set_row(&mut self, row: usize, text: &[i64]) {
        let place = row * self.seq_len..(row + 1) * self.seq_len;
        let due = text.len().saturating_sub(1);
        assert!(due <= self.seq_len, "the caller checks the length of a sample");
        let tokens = &mut self.tokens[place.clone()];
        tokens[..due].copy_from_slice(&text[..due]);
        tokens[due..].fill(0);
        let labels = &mut self.labels[place.clone()];
        labels[..due].copy_from_slice(text.get(1..).unwrap_or(&[]));
        labels[due..].fill(0);
        let mask = &mut self.loss_mask[place];
        mask[..due].fill(1.0);
        mask[due..].fill(0.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_shifted_and_padded() {
        let mut batch = Batch::default();
        batch.reset(7, 3, 3);
        batch.set_row(0, &[1, 2, 3, 4]);
        batch.set_row(1, &[5, 6]);
        batch.set_row(2, &[]);
        assert_eq!(batch.tokens, [1, 2, 3, 5, 0, 0, 0, 0, 0]);
        assert_eq!(batch.labels, [2, 3, 4, 6, 0, 0, 0, 0, 0]);
        assert_eq!(batch.loss_mask, [1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0]);
        batch.reset(0, 1, 3);
        batch.set_row(0, &[9]);
        assert_eq!((&batch.tokens[..], &batch.loss_mask[..]), (&[0, 0, 0][..], &[0.0; 3][..]));
    }
}
