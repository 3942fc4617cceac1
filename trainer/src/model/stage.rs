//! A run of units on one rank: what a pipeline stage has, and all of the model where there is none.

use std::cell::RefCell;
use std::ops::Range;

use recipe::Incompatible;
use tch::{Kind, Tensor};

use super::layers::StageParams;
use super::network::{Context, UnitContext};
use super::saved_activations::{ActivationStore, SavedActivation};
use super::{HeadGrad, KvCache, Micro, Model, Tp, head, initialize};
use crate::{Error, Result};

/// A run of units on one rank.
///
/// It owns no tensor. Parameters are lists in the order of [`Stage::params`]; what computes are
/// leaves, one for each of [`Stage::uses`], that [`Stage::leaves`] makes of them. A micro-batch
/// goes [`forward`](Stage::forward), in the last stage through
/// [`loss_and_grad`](Stage::loss_and_grad), and [`backward`](Stage::backward); then the leaves have
/// its gradients.
#[derive(Clone, Debug)]
pub struct Stage {
    model: Model,
    units: Range<usize>,
    tp: Tp,
    /// Whether a unit is computed again for its backward pass, by its place in the stage.
    recomputed: Vec<bool>,
    /// Where their inputs are meanwhile.
    keep: ActivationStore,
    params: Vec<usize>,
    uses: Vec<usize>,
    /// Where each use of the model is in `uses`.
    places: Vec<Option<usize>>,
}

/// A micro-batch between its forward and its backward pass.
#[derive(Debug)]
pub struct Pass {
    context: Context,
    segments: Vec<Segment>,
    outs: Vec<Tensor>,
}

impl Pass {
    /// What the next stage is carried, or what the head of the last takes. They have no graph.
    pub fn outs(&self) -> &[Tensor] {
        &self.outs
    }

    /// Tells that the way back is next, after those of which that was told before: inputs that are
    /// elsewhere are brought near.
    pub fn expect(&self) {
        self.segments
            .iter()
            .rev()
            .flat_map(|segment| &segment.inputs)
            .for_each(SavedActivation::expect);
    }

    /// Gives back the memory of the outs, which are sent: the way back needs their graph alone.
    ///
    /// # Errors
    /// [`crate::Error::Torch`].
    pub fn forget_outs(&mut self) -> Result<()> {
        self.outs.clear();
        let last = self.segments.last_mut().and_then(|segment| segment.outputs.as_mut());
        for output in last.into_iter().flatten() {
            // What goes through as it came is a leaf, and used on the way back.
            if !output.f_is_leaf()? {
                let empty =
                    output.f_detach()?.f_new_empty([0_i64], (output.kind(), output.device()))?;
                output.f_set_data(&empty)?;
            }
        }
        Ok(())
    }
}

/// One unit. Each has a graph of its own, so that the order in which gradients are added is the
/// same wherever the model is cut.
#[derive(Debug)]
struct Segment {
    /// Leaves.
    inputs: Vec<SavedActivation>,
    /// Absent if they are computed again.
    outputs: Option<Vec<Tensor>>,
}

impl Stage {
    pub(super) fn new(
        model: &Model,
        units: Range<usize>,
        tp: &Tp,
        recomputes: impl Fn(usize) -> bool,
    ) -> Self {
        assert!(units.start < units.end && units.end <= model.units(), "{units:?} is no stage");
        let mut places = vec![None; model.uses().len()];
        let (mut params, mut uses) = (Vec::new(), Vec::new());
        for (at, it) in model.uses().iter().enumerate() {
            if units.contains(&it.unit) {
                places[at] = Some(uses.len());
                uses.push(at);
                params.push(it.param);
            }
        }
        params.sort_unstable();
        params.dedup();
        let recomputed = units.clone().map(recomputes).collect();
        let (model, tp, keep) = (model.clone(), tp.clone(), ActivationStore::Here);
        Stage { model, units, tp, recomputed, keep, params, uses, places }
    }

    /// With this place for the inputs of units that are computed again, instead of where they are.
    #[must_use]
    pub fn keeping(self, keep: &ActivationStore) -> Self {
        Stage { keep: keep.clone(), ..self }
    }

    /// The model that it is a part of.
    #[must_use]
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// Which units it has.
    #[must_use]
    pub fn units(&self) -> Range<usize> {
        self.units.clone()
    }

    /// Places in `Model::params` of the parameters that it has, ascending.
    #[must_use]
    pub fn params(&self) -> &[usize] {
        &self.params
    }

    /// Places in `Model::uses` of what it does with them, ascending.
    #[must_use]
    pub fn uses(&self) -> &[usize] {
        &self.uses
    }

    /// Whether it computes only a part of the gradient of a use, which is to be summed over the
    /// tensor parallel ranks. `at` is a place in [`Stage::uses`].
    #[must_use]
    pub fn is_partial(&self, at: usize) -> bool {
        self.model.uses()[self.uses[at]].is_partial(self.tp.size, self.tp.sequence)
    }

    /// The shape of its tensor parallel part of a parameter, padding included. `at` is a place in
    /// [`Stage::params`].
    #[must_use]
    pub fn local_shape(&self, at: usize) -> Vec<i64> {
        self.model.params()[self.params[at]].local_shape(self.tp.size)
    }

    /// The first values of its part of a parameter, as [`initialize`] draws them.
    ///
    /// # Errors
    /// As [`initialize`].
    pub fn initialize(&self, at: usize, seed: u64) -> Result<Tensor> {
        initialize(&self.model.params()[self.params[at]], self.tp.rank, self.tp.size, seed)
    }

    /// The shapes of what comes from the stage before, for so many rows: nothing for the first.
    #[must_use]
    pub fn carried(&self, rows: i64) -> Vec<Vec<i64>> {
        let tp = if self.tp.sequence { self.tp.size as i64 } else { 1 }; // fits: ranks are few
        let hidden = self.model.config().hidden as i64; // fits: the config bounds it
        let lens = self.model.carried_lens(self.units.start);
        lens.into_iter().map(|len| vec![rows * len / tp, hidden]).collect()
    }

    /// What computes: the parameters in numbers of this kind, once for each use. Those of the kind
    /// of the parameters share their memory.
    ///
    /// # Errors
    /// [`crate::Error::Torch`].
    pub fn leaves(&self, params: &[Tensor], kind: Kind) -> Result<Vec<Tensor>> {
        let params = params.iter().map(|param| Ok(param.f_detach()?.f_to_kind(kind)?));
        let params = params.collect::<Result<Vec<Tensor>>>()?;
        let leaf = |at: &usize| {
            let param = self.model.uses()[*at].param;
            let place = self.params.binary_search(&param).expect("a stage has what it uses");
            Ok(params[place].f_detach()?.f_set_requires_grad(true)?)
        };
        self.uses.iter().map(leaf).collect()
    }

    /// The units, one after the other. `carried` is what came from the stage before.
    ///
    /// # Errors
    /// [`crate::Error::Torch`], [`crate::Error::Bridge`], [`crate::Error::Ckpt`].
    pub fn forward(&self, leaves: &[Tensor], micro: &Micro, carried: Vec<Tensor>) -> Result<Pass> {
        let dropout = self.model.dropout(micro);
        let context =
            self.context(leaves, micro)?.dropping(dropout, &micro.text, leaves[0].kind())?;
        let mut segments = Vec::with_capacity(self.units.len());
        let mut outs = carried;
        for (unit, is_recomputed) in self.units.clone().zip(&self.recomputed) {
            let leaf = |x: &Tensor| Ok(x.f_detach()?.f_set_requires_grad(true)?);
            let inputs = outs.iter().map(leaf).collect::<Result<Vec<Tensor>>>()?;
            let outputs = self.unit(leaves, unit, micro, &context, &inputs)?;
            outs = outputs.iter().map(|x| Ok(x.f_detach()?)).collect::<Result<_>>()?;
            // The graph is dropped rather than not made: some kernels are others without one.
            let outputs = (!is_recomputed).then_some(outputs);
            let keep = if *is_recomputed { &self.keep } else { &ActivationStore::Here };
            let inputs = inputs.into_iter().map(|input| keep.put(input)).collect::<Result<_>>()?;
            segments.push(Segment { inputs, outputs });
        }
        Ok(Pass { context, segments, outs })
    }

    /// The units backward, from the gradients of [`Pass::outs`]. Gradients of what was carried come
    /// back, those of parameters wait in the leaves. `done` is told of each unit that has its own.
    ///
    /// # Errors
    /// [`crate::Error::Torch`], [`crate::Error::Bridge`], [`crate::Error::Ckpt`], and those of
    /// `done`.
    pub fn backward(
        &self,
        leaves: &[Tensor],
        micro: &Micro,
        pass: Pass,
        outs: Vec<Tensor>,
        done: &mut dyn FnMut(usize) -> Result<()>,
    ) -> Result<Vec<Tensor>> {
        let mut grads = outs;
        for (unit, segment) in self.units.clone().zip(pass.segments).rev() {
            let Segment { inputs, outputs } = segment;
            let inputs =
                inputs.into_iter().map(SavedActivation::take).collect::<Result<Vec<Tensor>>>()?;
            let outputs = match outputs {
                Some(outputs) => outputs,
                None => self.unit(leaves, unit, micro, &pass.context, &inputs)?,
            };
            bridge::backward(&outputs, &grads)?;
            let taken = inputs.iter().map(bridge::take_grad).collect::<bridge::Result<Vec<_>>>()?;
            grads = taken.into_iter().map(|grad| grad.expect("a unit uses its inputs")).collect();
            done(unit)?;
        }
        Ok(grads)
    }

    /// [`Stage::forward`] without a way back.
    ///
    /// # Errors
    /// [`crate::Error::Torch`], [`crate::Error::Bridge`].
    pub fn infer(
        &self,
        leaves: &[Tensor],
        micro: &Micro,
        carried: Vec<Tensor>,
    ) -> Result<Vec<Tensor>> {
        let _no_grad = tch::no_grad_guard();
        let context = self.context(leaves, micro)?;
        let mut outs = carried;
        for unit in self.units.clone() {
            outs = self.unit(leaves, unit, micro, &context, &outs)?;
        }
        Ok(outs)
    }

    fn unit(
        &self,
        leaves: &[Tensor],
        unit: usize,
        micro: &Micro,
        context: &Context,
        inputs: &[Tensor],
    ) -> Result<Vec<Tensor>> {
        let work = UnitContext { leaves: self.bind(leaves), micro, context, cache: None };
        self.model.family().unit(&work, unit, inputs)
    }

    fn context(&self, leaves: &[Tensor], micro: &Micro) -> Result<Context> {
        self.model.family().context(micro, &self.units, 0, leaves[0].kind())
    }

    fn bind<'a>(&'a self, tensors: &'a [Tensor]) -> StageParams<'a> {
        StageParams { tensors, places: &self.places, tp: &self.tp }
    }
}

/// What only the last stage can do.
impl Stage {
    /// The weighted loss of a micro-batch, one f64. `outs` are those of its pass.
    ///
    /// # Errors
    /// [`crate::Error::Torch`], [`crate::Error::Bridge`].
    pub fn loss(&self, leaves: &[Tensor], micro: &Micro, outs: &[Tensor]) -> Result<Tensor> {
        self.model.family().loss(self.bind(leaves), micro, outs)
    }

    /// The weighted loss of a micro-batch, and its gradients.
    ///
    /// # Errors
    /// [`crate::Error::Torch`], [`crate::Error::Bridge`].
    pub fn loss_and_grad(
        &self,
        leaves: &[Tensor],
        micro: &Micro,
        outs: &[Tensor],
    ) -> Result<HeadGrad> {
        self.model.family().loss_and_grad(self.bind(leaves), micro, outs)
    }

    /// Logits of this rank's part of the vocabulary, without padding: `[tokens, vocab]`, f32.
    /// `hidden` is the first of the outs.
    ///
    /// # Errors
    /// [`crate::Error::Torch`].
    pub fn logits(&self, leaves: &[Tensor], hidden: &Tensor) -> Result<Tensor> {
        head::logits(self.model.family().head(), self.bind(leaves), hidden)
    }

    /// An empty cache of what a whole model says to a text, `[rows, len]`, that its encoder reads.
    /// `None` if it has none and goes on from the text itself.
    ///
    /// # Errors
    /// [`crate::Error::Torch`].
    pub fn read(&self, leaves: &[Tensor], text: &Tensor) -> Result<Option<KvCache>> {
        let encoder = self.model.family().decoder().unwrap_or(0);
        if encoder == 0 {
            return Ok(None);
        }
        let mut given = self.pass_by(leaves, text, 0..encoder, &mut KvCache::default())?;
        Ok(Some(KvCache::of(given.swap_remove(0))))
    }

    /// What a whole decoder has for its head after `tokens`, `[rows, columns]`, that go on where
    /// the cache ends and are added to it. Either it is empty or there is one column. The result is
    /// `[rows x columns, hidden]`.
    ///
    /// # Errors
    /// [`Error::Torch`], for example if there are more columns than positions; [`Error::Mismatch`]
    /// for a model without a decoder.
    ///
    /// # Panics
    /// If there is an encoder, and the cache is not of [`Stage::read`].
    pub fn go_on(&self, leaves: &[Tensor], tokens: &Tensor, cache: &mut KvCache) -> Result<Tensor> {
        let begin = self.model.family().decoder().ok_or_else(|| {
            Error::Mismatch(Incompatible::new(
                "cannot generate text",
                "expected a decoder, found an encoder",
                "use a model of family \"gpt\" or \"t5\"",
            ))
        })?;
        let mut outs = self.pass_by(leaves, tokens, begin..self.units.end, cache)?;
        cache.tokens += tokens.size()[1];
        Ok(outs.swap_remove(0))
    }

    /// What some units make of tokens, and of what the cache has.
    fn pass_by(
        &self,
        leaves: &[Tensor],
        tokens: &Tensor,
        units: Range<usize>,
        cache: &mut KvCache,
    ) -> Result<Vec<Tensor>> {
        let _no_grad = tch::no_grad_guard();
        let (network, micro) = (self.model.family(), Micro::prompt(tokens)?);
        let context = network.context(&micro, &units, cache.tokens, leaves[0].kind())?;
        let given = cache.given.iter().map(Tensor::shallow_clone).collect();
        let cache = Some(RefCell::new(cache));
        let work =
            UnitContext { leaves: self.bind(leaves), micro: &micro, context: &context, cache };
        units.into_iter().try_fold(given, |xs: Vec<Tensor>, unit| network.unit(&work, unit, &xs))
    }
}
