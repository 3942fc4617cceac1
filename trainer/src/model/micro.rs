use loader::batch::{Batch, BertBatch, EncDecBatch, SequenceBounds, T5Batch};
use tch::{Device, Kind, Tensor};

use crate::Result;

/// One micro-batch as tensors, of any family.
#[derive(Debug)]
pub struct Micro {
    /// The sample in its first row, as a place in the order of samples.
    pub(super) first_sample: u64,
    pub(super) text: Text,
    /// The input of the decoder.
    pub(super) answer: Option<Text>,
    pub(super) targets: Targets,
}

/// Rows of tokens.
#[derive(Debug)]
pub(super) struct Text {
    /// `[rows, len]`, i64.
    pub(super) ids: Tensor,
    /// Shape as `ids`; `None` if they count from 0.
    pub(super) positions: Option<Tensor>,
    /// Which run a token is in, shape as `ids`: it attends only to its own run. `None` if a row is
    /// one run.
    pub(super) runs: Option<Tensor>,
    /// The kind of each token, shape as `ids`.
    pub(super) types: Option<Tensor>,
}

/// The expected predictions.
#[derive(Debug)]
pub(super) struct Targets {
    /// The tokens that count, counted through all rows; `None` for all.
    pub(super) places: Option<Tensor>,
    /// The expected ids there: `[places]`, i64.
    pub(super) labels: Tensor,
    /// How much each counts: `[places]`, f32.
    pub(super) weights: Tensor,
    /// Whether the second part of each row is a random one, and how much a row counts.
    pub(super) order: Option<(Tensor, f64)>,
}

/// Weights in the loss of a step: one over the count of tokens, or of samples, of the step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LossWeights {
    /// Of a token.
    pub token: f64,
    /// Of a sample, where the loss has a part that is one number a sample (BERT).
    pub sample: f64,
}

impl Micro {
    /// For a decoder.
    ///
    /// # Errors
    /// [`crate::Error::Torch`].
    pub fn gpt(batch: &Batch, weights: LossWeights) -> Result<Self> {
        let mut text = Text::new(&batch.tokens, batch.rows, batch.seq_len)?;
        text.positions = text.shaped(&batch.position_ids)?;
        text.runs = text.bounded(&batch.bounds)?;
        let targets = Targets {
            places: None,
            labels: Tensor::f_from_slice(&batch.labels)?,
            weights: Tensor::f_from_slice(&batch.loss_mask)?.f_mul_scalar(weights.token)?,
            order: None,
        };
        Ok(Micro { first_sample: batch.first_sample, text, answer: None, targets })
    }

    /// For T5, with spans masked as in Megatron.
    ///
    /// # Errors
    /// [`crate::Error::Torch`].
    pub fn t5(batch: &T5Batch, weights: LossWeights) -> Result<Self> {
        let mut text = Text::new(&batch.encoder_tokens, batch.rows, batch.encoder_len)?;
        text.runs = text.padded(&batch.encoder_mask)?;
        // The padding is last, and no counted token attends to it.
        let answer = Text::new(&batch.decoder_tokens, batch.rows, batch.decoder_len)?;
        let targets = Targets::of(&batch.labels, &batch.loss_mask, weights.token)?;
        Ok(Micro { first_sample: batch.first_sample, text, answer: Some(answer), targets })
    }

    /// For CPM-2.
    ///
    /// # Errors
    /// [`crate::Error::Torch`].
    pub fn encdec(batch: &EncDecBatch, weights: LossWeights) -> Result<Self> {
        let mut text = Text::new(&batch.encoder_tokens, batch.rows, batch.encoder_len)?;
        text.runs = text.bounded(&batch.encoder_bounds)?;
        text.positions = text.shaped(&batch.encoder_position_ids)?;
        let mut answer = Text::new(&batch.decoder_tokens, batch.rows, batch.decoder_len)?;
        answer.runs = answer.bounded(&batch.decoder_bounds)?;
        answer.positions = answer.shaped(&batch.decoder_position_ids)?;
        let targets = Targets::of(&batch.labels, &batch.loss_mask, weights.token)?;
        Ok(Micro { first_sample: batch.first_sample, text, answer: Some(answer), targets })
    }

    /// For BERT.
    ///
    /// # Errors
    /// [`crate::Error::Torch`].
    pub fn bert(batch: &BertBatch, weights: LossWeights) -> Result<Self> {
        let mut text = Text::new(&batch.tokens, batch.rows, batch.seq_len)?;
        text.runs = text.padded(&batch.padding_mask)?;
        // The padding has an id of its own there, which need not be a type.
        let types: Vec<i64> = batch.types.iter().map(|of| i64::from(*of == 1)).collect();
        text.types = text.shaped(&types)?;
        let mut targets = Targets::of(&batch.labels, &batch.loss_mask, weights.token)?;
        if batch.two_parts {
            let order: Vec<i64> = batch.is_random.iter().copied().map(i64::from).collect();
            targets.order = Some((Tensor::f_from_slice(&order)?, weights.sample));
        }
        Ok(Micro { first_sample: batch.first_sample, text, answer: None, targets })
    }

    /// Tokens to continue, `[rows, len]`, without targets; as a text and as an answer.
    ///
    /// # Errors
    /// [`crate::Error::Torch`].
    pub fn prompt(ids: &Tensor) -> Result<Self> {
        let plain = || Text { ids: ids.shallow_clone(), positions: None, runs: None, types: None };
        let nothing = || Tensor::f_zeros([0], (Kind::Int64, ids.device()));
        let (labels, weights) = (nothing()?, nothing()?);
        Ok(Micro {
            first_sample: 0,
            text: plain(),
            answer: Some(plain()),
            targets: Targets { places: None, labels, weights, order: None },
        })
    }
}

impl Micro {
    /// The same on a device. A GPU copies it from page-locked memory, while it computes.
    pub(crate) fn on(mut self, device: Device) -> Result<Self> {
        if device == Device::Cpu {
            return Ok(self);
        }
        let Micro { text, answer, targets, .. } = &mut self;
        let Targets { places, labels, weights, order } = targets;
        let texts = std::iter::once(text).chain(answer);
        let tensors = texts.flat_map(|Text { ids, positions, runs, types }| {
            [Some(ids), positions.as_mut(), runs.as_mut(), types.as_mut()].into_iter().flatten()
        });
        let target_tensors =
            [Some(labels), Some(weights), places.as_mut(), order.as_mut().map(|it| &mut it.0)];
        for tensor in tensors.chain(target_tensors.into_iter().flatten()) {
            // The public function warns about its argument on every call.
            let pinned = tensor.f_internal_pin_memory(device)?;
            *tensor = pinned.f_to_device_(device, tensor.kind(), true, false)?;
        }
        Ok(self)
    }

    /// The input of the decoder.
    ///
    /// # Panics
    /// If this is a micro-batch of another family: the config selects the family of the data.
    pub(super) fn answer(&self) -> &Text {
        self.answer.as_ref().expect("a micro-batch of an encoder and a decoder")
    }
}

impl Text {
    fn new(ids: &[i64], rows: usize, len: usize) -> Result<Self> {
        let ids = Tensor::f_from_slice(ids)?.f_view([rows as i64, len as i64])?; // fits: of memory
        Ok(Text { ids, positions: None, runs: None, types: None })
    }

    pub(super) fn rows(&self) -> i64 {
        self.ids.size()[0]
    }

    pub(super) fn len(&self) -> i64 {
        self.ids.size()[1]
    }

    /// One value per token; `None` if there are none.
    fn shaped(&self, values: &[i64]) -> Result<Option<Tensor>> {
        if values.is_empty() {
            return Ok(None);
        }
        Ok(Some(Tensor::f_from_slice(values)?.f_view([self.rows(), self.len()])?))
    }

    /// The runs that start at some bounds.
    fn bounded(&self, bounds: &SequenceBounds) -> Result<Option<Tensor>> {
        if bounds.offsets().is_empty() {
            return Ok(None);
        }
        let (rows, len) = (self.rows() as usize, self.len() as usize); // fits: they were usize
        let runs = (0..rows).flat_map(|row| bounds.runs_of_row(row, len)).map(i64::from);
        self.shaped(&runs.collect::<Vec<i64>>())
    }

    /// The runs of a text that is 1 in `mask`, and of its padding.
    fn padded(&self, mask: &[i64]) -> Result<Option<Tensor>> {
        let runs: Vec<i64> = mask.iter().map(|is_text| i64::from(*is_text != 1)).collect();
        self.shaped(&runs)
    }
}

impl Targets {
    /// The labels that count.
    fn of(labels: &[i64], mask: &[f32], weight: f64) -> Result<Self> {
        let counts = || mask.iter().zip(0..).filter(|(mask, _)| **mask != 0.0);
        let places: Vec<i64> = counts().map(|(_, place)| place).collect();
        let weights: Vec<f32> = counts().map(|(mask, _)| *mask).collect();
        let expected: Vec<i64> = places.iter().map(|place| labels[*place as usize]).collect();
        Ok(Targets {
            places: Some(Tensor::f_from_slice(&places)?),
            labels: Tensor::f_from_slice(&expected)?,
            weights: Tensor::f_from_slice(&weights)?.f_mul_scalar(weight)?,
            order: None,
        })
    }

    /// The counted rows of a tensor with a row for each token.
    pub(super) fn pick(&self, x: &Tensor) -> Result<Tensor> {
        match &self.places {
            Some(places) => Ok(x.f_index_select(0, places)?),
            None => Ok(x.shallow_clone()),
        }
    }
}
