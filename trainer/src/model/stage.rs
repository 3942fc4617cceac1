//! A run of units on one rank: a pipeline stage, or all of the model without a pipeline.

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
/// It owns no tensor. Parameters are lists in the order of [`Stage::params`]; a stage computes
/// with leaves, one for each of [`Stage::uses`], that [`Stage::leaves`] makes of them. A
/// micro-batch goes [`forward`](Stage::forward), in the last stage through
/// [`loss_and_grad`](Stage::loss_and_grad), and [`backward`](Stage::backward); then the leaves have
/// its gradients.
#[derive(Clone, Debug)]
pub struct Stage {
    model: Model,
    units: Range<usize>,
    tp: Tp,
    /// Whether a unit is recomputed for its backward pass, by its place in the stage.
    recomputed: Vec<bool>,
    /// Where their inputs are stored until then.
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
    /// The inputs of the next stage, or of the head in the last. They have no graph.
    pub fn outs(&self) -> &[Tensor] {
        &self.outs
    }

    /// Announces that this backward pass is next, after those that were announced before: its
    /// offloaded inputs are read ahead.
    pub fn prefetch(&self) {
        self.segments
            .iter()
            .rev()
            .flat_map(|segment| &segment.inputs)
            .for_each(SavedActivation::prefetch);
    }

    /// Frees the memory of the outs, which are sent: the backward pass needs only their graph.
    ///
    /// # Errors
    /// [`crate::Error::Torch`].
    pub fn forget_outs(&mut self) -> Result<()> {
        self.outs.clear();
        let last = self.segments.last_mut().and_then(|segment| segment.outputs.as_mut());
        for output in last.into_iter().flatten() {
            // An input that is passed through is a leaf, and the backward pass uses it.
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
    /// `None` if they are recomputed.
    outputs: Option<Vec<Tensor>>,
}

impl Stage {
    pub(super) fn new(
        model: &Model,
        units: Range<usize>,
        tp: &Tp,
        recomputes: impl Fn(usize) -> bool,
    ) -> Self {
        assert!(units.start < units.end && units.end <= model.units(), "{units:?} is not a stage");
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

    /// With this store for the inputs of recomputed units, instead of the memory where they are.
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

    /// Places in `Model::uses` of its uses of them, ascending.
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

    /// The initial values of its part of a parameter, as [`initialize`] draws them.
    ///
    /// # Errors
    /// As [`initialize`].
    pub fn initialize(&self, at: usize, seed: u64) -> Result<Tensor> {
        initialize(&self.model.params()[self.params[at]], self.tp.rank, self.tp.size, seed)
    }

    /// The shapes of the inputs from the stage before, for `rows` rows: none for the first.
    #[must_use]
    pub fn carried(&self, rows: i64) -> Vec<Vec<i64>> {
        let tp = if self.tp.sequence { self.tp.size as i64 } else { 1 }; // fits: ranks are few
        let hidden = self.model.config().hidden as i64; // fits: the config bounds it
        let lens = self.model.carried_lens(self.units.start);
        lens.into_iter().map(|len| vec![rows * len / tp, hidden]).collect()
    }

    /// The tensors of the computation: the parameters in this kind, once for each use. If it is the
    /// kind of the parameters, they share the memory of these.
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

    /// Runs the units in their order. `carried` are the inputs from the stage before.
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
            // The graph is made and dropped: without one libtorch uses some other kernels.
            let outputs = (!is_recomputed).then_some(outputs);
            let keep = if *is_recomputed { &self.keep } else { &ActivationStore::Here };
            let inputs = inputs.into_iter().map(|input| keep.put(input)).collect::<Result<_>>()?;
            segments.push(Segment { inputs, outputs });
        }
        Ok(Pass { context, segments, outs })
    }

    /// Runs the units backward, from the gradients of [`Pass::outs`]. Returns the gradients of
    /// `carried`; those of parameters are in the leaves. Calls `done` with each unit that has its
    /// gradients.
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

    /// [`Stage::forward`] without a backward pass.
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

/// Operations of the last stage.
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

    /// Runs the encoder of a whole model on a text, `[rows, len]`. Returns the empty cache of the
    /// decoder; `None` if there is no encoder, and the decoder continues the text itself.
    ///
    /// # Errors
    /// [`crate::Error::Torch`].
    pub fn read(&self, leaves: &[Tensor], text: &Tensor) -> Result<Option<KvCache>> {
        let encoder = self.model.family().decoder().unwrap_or(0);
        if encoder == 0 {
            return Ok(None);
        }
        let mut given = self.run_units(leaves, text, 0..encoder, &mut KvCache::default())?;
        Ok(Some(KvCache::of(given.swap_remove(0))))
    }

    /// The input of the head after `tokens`, `[rows, columns]`, of a whole decoder. The tokens
    /// continue those of the cache and are added to it; it is empty, or there is one column. The
    /// result is `[rows x columns, hidden]`.
    ///
    /// # Errors
    /// [`Error::Torch`], for example if there are more columns than positions; [`Error::Mismatch`]
    /// for a model without a decoder.
    ///
    /// # Panics
    /// If there is an encoder, and the cache is not from [`Stage::read`].
    pub fn next(&self, leaves: &[Tensor], tokens: &Tensor, cache: &mut KvCache) -> Result<Tensor> {
        let begin = self.model.family().decoder().ok_or_else(|| {
            Error::Mismatch(Incompatible::new(
                "cannot generate text",
                "expected a decoder, found an encoder",
                "use a model of family \"gpt\" or \"t5\"",
            ))
        })?;
        let mut outs = self.run_units(leaves, tokens, begin..self.units.end, cache)?;
        cache.tokens += tokens.size()[1];
        Ok(outs.swap_remove(0))
    }

    /// Runs some units on tokens and on the content of the cache.
    fn run_units(
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
