//! Batches of any objective, and what makes them.

use loader::batch::{
    BertAssemble, BertBatch, EncDecAssemble, EncDecBatch, GptAssemble, T5Assemble, T5Batch,
};
use loader::{Assemble, Batch, Sample};

/// Defines the batch and its assembler for each objective.
macro_rules! any {
    ($($(#[$of:meta])* $kind:ident: $assemble:ty => $batch:ty),*) => {
        /// A micro-batch of any objective.
        #[derive(Clone, Debug, PartialEq)]
        pub enum AnyBatch { $($(#[$of])* $kind($batch)),* }

        /// Makes batches of one objective.
        #[derive(Debug)]
        pub enum AnyAssemble { $($(#[$of])* $kind($assemble)),* }

        impl AnyBatch {
            /// The sample in its first row, as a position in the order of samples.
            #[must_use]
            pub fn first_sample(&self) -> u64 {
                match self { $(AnyBatch::$kind(batch) => batch.first_sample),* }
            }

            /// The number of samples.
            #[must_use]
            pub fn rows(&self) -> usize {
                match self { $(AnyBatch::$kind(batch) => batch.rows),* }
            }

            /// The weight of each of its tokens in the loss.
            #[must_use]
            pub fn loss_mask(&self) -> &[f32] {
                match self { $(AnyBatch::$kind(batch) => &batch.loss_mask),* }
            }
        }

        impl Assemble for AnyAssemble {
            type Batch = AnyBatch;

            fn begin(&mut self, batch: &mut AnyBatch, first_sample: u64, rows: usize) {
                match self {
                    $(AnyAssemble::$kind(assemble) => {
                        if !matches!(batch, AnyBatch::$kind(_)) {
                            *batch = AnyBatch::$kind(Default::default());
                        }
                        if let AnyBatch::$kind(batch) = batch {
                            assemble.begin(batch, first_sample, rows);
                        }
                    })*
                }
            }

            fn set_row(
                &mut self,
                batch: &mut AnyBatch,
                row: usize,
                sample: &Sample<'_>,
            ) -> loader::Result<()> {
                match (self, batch) {
                    $((AnyAssemble::$kind(assemble), AnyBatch::$kind(batch)) => {
                        assemble.set_row(batch, row, sample)
                    })*
                    _ => unreachable!("a batch keeps the kind that it was created with"),
                }
            }

            fn finish(&mut self, batch: &mut AnyBatch) -> loader::Result<()> {
                match (self, batch) {
                    $((AnyAssemble::$kind(assemble), AnyBatch::$kind(batch)) => {
                        assemble.finish(batch)
                    })*
                    _ => unreachable!("a batch keeps the kind that it was created with"),
                }
            }
        }
    };
}

any!(
    /// Of running text.
    Lm: GptAssemble => Batch,
    /// Of sentences, spans of which are masked as they are read.
    Spans: T5Assemble => T5Batch,
    /// Of CPM-2's three token files.
    Triple: EncDecAssemble => EncDecBatch,
    /// Of sentences, tokens of which are masked.
    Masked: BertAssemble => BertBatch
);

impl Default for AnyBatch {
    fn default() -> Self {
        AnyBatch::Lm(Batch::default())
    }
}

impl AnyBatch {
    /// All tokens of the model's inputs and labels.
    pub fn tokens(&self) -> impl Iterator<Item = i64> + '_ {
        let (inputs, decoder_inputs, labels, mask) = match self {
            AnyBatch::Lm(b) => (&b.tokens, &[][..], &b.labels, &b.loss_mask),
            AnyBatch::Spans(b) => {
                (&b.encoder_tokens, &b.decoder_tokens[..], &b.labels, &b.loss_mask)
            }
            AnyBatch::Triple(b) => {
                (&b.encoder_tokens, &b.decoder_tokens[..], &b.labels, &b.loss_mask)
            }
            AnyBatch::Masked(b) => (&b.tokens, &[][..], &b.labels, &b.loss_mask),
        };
        // Positions without a label have a negative id.
        let is_label = |(id, counts): &(&i64, &f32)| **id >= 0 || **counts != 0.0;
        let labels = labels.iter().zip(mask).filter(is_label).map(|(id, _)| id);
        inputs.iter().chain(decoder_inputs).chain(labels).copied()
    }
}
