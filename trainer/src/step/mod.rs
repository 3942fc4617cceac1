//! One optimizer step: from micro-batches to updated weights.

mod evaluate;
pub(crate) mod local_tensors;
pub(crate) mod offloaded_state;
pub mod optim;

use ckpt::layout::{Slices, slice_of};
use recipe::Incompatible;
use tch::{Device, Kind, Tensor};

use crate::config::{Config, Dtype, LossScaleConfig, Offload, OptimConfig};
use crate::device::numbers;
use crate::launch::comm::Comm;
use crate::model::input::Input;
use crate::model::{LossWeights, Micro, Model, ParamSpec, Stage, Tp};
use crate::parallel::accumulate::{Contribution, tree_sum};
use crate::parallel::exchange::{Buffer, Gathering};
use crate::parallel::grads::{Grads, Message, tag};
use crate::parallel::norm::{all_sum, block_count, block_sums};
use crate::parallel::pipe::Pipe;
use crate::parallel::schedule_run::{RankNetwork, ScheduleRun};
use crate::parallel::setup::Setup;
use crate::parallel::weights::Weights;
use crate::step::offloaded_state::OffloadedState;
use crate::step::optim::{AdamW, StepSize};
use crate::{Error, Result};
use recipe::scaler::Scaler;
use recipe::schedule::Action;

/// The state that training changes, and the constants that it needs: all of it, or the part of one
/// rank.
#[derive(Debug)]
pub struct Trainer {
    pub(crate) model: Model,
    pub(crate) comm: Comm,
    pub(crate) setup: Setup,
    /// f32, by parameter of the rank, padding included: whole, or this replica's slices, flat.
    params: Vec<Tensor>,
    adamw: AdamW,
    /// The f32 weights and the moments, if they are offloaded; then `params` have the dtype of the
    /// computation.
    pub(crate) offloaded: Option<OffloadedState>,
    /// Full parameters in the dtype of the computation, if `params` are slices and are not gathered
    /// for each use.
    copies: Option<Vec<Tensor>>,
    /// For gathers: of pieces, if weights are gathered for each use, or of runs of parameters.
    buffers: Vec<Buffer>,
    scaler: Option<(Scaler, LossScaleConfig)>,
}

/// Statistics of a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepReport {
    /// Mean loss of its tokens before the update, in nats.
    pub loss: f64,
    /// Norm of its gradient before clipping.
    pub grad_norm: f64,
    /// Whether the update was skipped, because the loss or a gradient was not finite in fp16.
    pub skipped: bool,
}

impl Trainer {
    /// New weights, drawn from the seed, on the only rank, on the CPU.
    ///
    /// # Errors
    /// [`Error::Torch`] if the memory does not suffice.
    pub fn new(config: &Config) -> Result<Self> {
        Self::on_mesh(config, Comm::alone(Device::Cpu))
    }

    /// One rank's part of them. `config` divides as the mesh does.
    ///
    /// # Errors
    /// [`Error::Torch`] if the memory does not suffice, [`Error::Ckpt`] if a parameter cannot be
    /// cut as the config says, [`Error::Bridge`] if another rank is lost.
    pub fn on_mesh(config: &Config, comm: Comm) -> Result<Self> {
        let mut trainer = Self::unloaded(config, comm)?;
        trainer.init_weights(config.run.seed)?;
        Ok(trainer)
    }

    /// Draws the initial weights, if none are loaded.
    pub(crate) fn init_weights(&mut self, seed: u64) -> Result<()> {
        let (rank, ranks) = (self.comm.place().tp, self.comm.mesh.tp);
        for at in 0..self.params.len() {
            let spec = &self.model.params()[self.setup.params[at]];
            let whole = crate::model::initialize(spec, rank, ranks, seed)?;
            self.params[at] = self.setup.own_part(&self.comm, at, whole)?;
        }
        self.loaded()
    }

    /// As [`Trainer::on_mesh`], with zeros: the caller calls [`Trainer::init_weights`], or loads
    /// the weights and then calls [`Trainer::loaded`].
    pub(crate) fn unloaded(config: &Config, comm: Comm) -> Result<Self> {
        check_mesh(config, &comm)?;
        let model = Model::new(&config.model, comm.mesh.tp as u64).seeded(config.run.seed);
        let sequence = config.parallel.sequence_parallel;
        let tp = comm.tp.as_ref().map_or_else(Tp::alone, |group| Tp::of(group, sequence));
        let setup = Setup::new(config, &model, &tp, &comm)?;
        let mut params = Vec::with_capacity(setup.params.len());
        for at in 0..setup.params.len() {
            let spec = &model.params()[setup.params[at]];
            let shape = spec.local_shape(tp.size);
            let whole = Tensor::f_zeros(shape, (Kind::Float, Device::Cpu))?;
            params.push(setup.own_part(&comm, at, whole)?);
        }
        let is_decaying = |param: &usize| model.params()[*param].decays();
        let decaying = setup.params.partition_point(is_decaying);
        assert!(!setup.params[decaying..].iter().any(is_decaying), "those that decay come first");
        let is_here = config.optim.offload == Offload::None;
        let adamw = AdamW::new(if is_here { &params } else { &[] }, decaying)?;
        let buffers = setup.buffers(comm.mesh.dp);
        let scale = &config.precision.loss_scale;
        let is_half = config.precision.dtype == Dtype::Fp16;
        let scaler = is_half.then(|| (Scaler::new(scale), scale.clone()));
        let mut trainer = Trainer {
            model,
            comm,
            setup,
            params,
            adamw,
            offloaded: None,
            copies: None,
            buffers,
            scaler,
        };
        trainer.offload(config)?;
        Ok(trainer)
    }

    /// Names and shapes of the parameters of the whole model.
    #[must_use]
    pub fn specs(&self) -> &[ParamSpec] {
        self.model.params()
    }

    /// The first of the rank's stages.
    #[must_use]
    pub fn stage(&self) -> &Stage {
        &self.setup.pieces[0].stage
    }

    /// The rank's place among the others.
    #[must_use]
    pub fn comm(&self) -> &Comm {
        &self.comm
    }

    /// The weights and both moments that the rank has, each in the order of the parameters: whole
    /// and shaped, padding included, or flat slices. Empty if they are offloaded.
    pub fn state(&self) -> [&[Tensor]; 3] {
        let params = if self.offloaded.is_some() { &[] } else { &self.params[..] };
        [params, &self.adamw.exp_avgs, &self.adamw.exp_avg_sqs]
    }

    /// As [`Trainer::state`], to be filled from a checkpoint. Then call [`Trainer::loaded`].
    pub fn state_mut(&mut self) -> [&mut [Tensor]; 3] {
        let params = if self.offloaded.is_some() { &mut [] } else { &mut self.params[..] };
        [params, &mut self.adamw.exp_avgs, &mut self.adamw.exp_avg_sqs]
    }

    /// Recomputes what is derived from the weights, and moves all of it to the device. All ranks
    /// call it after they have filled their weights, which until then are on the CPU.
    ///
    /// # Errors
    /// [`Error::Torch`], [`Error::Bridge`]; [`Error::Ckpt`] if offloaded weights cannot be read.
    pub fn loaded(&mut self) -> Result<()> {
        if let Some(offloaded) = &mut self.offloaded {
            move_to(Device::Cpu, &mut self.params)?;
            offloaded.weights(&mut self.params)?;
        }
        let AdamW { exp_avgs, exp_avg_sqs, .. } = &mut self.adamw;
        for tensors in [&mut self.params, exp_avgs, exp_avg_sqs] {
            move_to(self.comm.device, tensors)?;
        }
        self.gather()
    }

    /// Gathers the replicas' slices into full parameters, unless each use gathers them.
    fn gather(&mut self) -> Result<()> {
        if !self.setup.rules.sliced || self.setup.gathers {
            return Ok(());
        }
        let _no_grad = tch::no_grad_guard();
        self.comm.activity.set(|| "gathers weights".to_owned());
        let group = self.comm.dp.as_ref().expect("slices are of several replicas");
        let start = |run: usize| {
            let own = self.params[self.setup.runs[run].clone()].iter();
            let own = own.map(|slice| Ok(slice.f_to_kind(self.setup.kind)?));
            let row = self.buffers[run].pack_own(&own.collect::<Result<Vec<Tensor>>>()?)?;
            Gathering::start(group, &row, tag(run, Message::GatherParams))
        };
        let mut copies = Vec::with_capacity(self.params.len());
        let mut next = Some(start(0)?);
        for run in 0..self.setup.runs.len() {
            let now = next.take().expect("it was started");
            // The next gather is in flight while this one is unpacked.
            if run + 1 < self.setup.runs.len() {
                next = Some(start(run + 1)?);
            }
            for whole in self.buffers[run].unpack(&now.finish()?)? {
                copies.push(whole.f_view(self.setup.shapes[copies.len()].as_slice())?);
            }
        }
        self.copies = Some(copies);
        Ok(())
    }

    /// The loss scale of fp16.
    #[must_use]
    pub fn scaler(&self) -> Option<Scaler> {
        self.scaler.as_ref().map(|(scaler, _)| *scaler)
    }

    /// Resumes with the loss scale of a checkpoint; no effect except in fp16.
    pub fn set_scaler(&mut self, scaler: Scaler) {
        if let Some((own, _)) = &mut self.scaler {
            *own = scaler;
        }
    }
}

impl Trainer {
    /// One step over the micro-batches of one global batch that are this replica's, in their order.
    /// All ranks call it, those of a pipeline with the same micro-batches. Every token of the step
    /// weighs the same, whatever micro-batch it is in.
    ///
    /// # Errors
    /// [`Error::NotFinite`] if loss or gradient is not finite: then no rank has changed anything.
    /// [`Error::Torch`] and [`Error::Bridge`] for the rest.
    pub fn step<B: Input>(
        &mut self,
        config: &OptimConfig,
        batches: &[B],
        step: u64,
        lr: f64,
    ) -> Result<StepReport> {
        let scale = self.scaler.as_ref().map_or(1.0, |(scaler, _)| scaler.scale);
        let weights = self.weights_of(batches, scale)?;
        let (losses, grads) = self.passes(batches, weights)?;
        let mut grads = self.join(grads)?;
        let (loss, grad_norm) = self.loss_and_norm(&losses, &grads)?;
        let (loss, grad_norm) = (loss / scale, grad_norm / scale);
        for (what, value) in [("the loss", loss), ("the gradient norm", grad_norm)] {
            if value.is_finite() {
                continue;
            }
            let samples = batches.iter().map(|batch| batch.rows() as u64).sum::<u64>();
            let samples = samples * self.comm.mesh.dp as u64;
            if let Some((scaler, config)) = &mut self.scaler
                && scaler.bad(config, samples)
            {
                return Ok(StepReport { loss, grad_norm, skipped: true });
            }
            return Err(Error::NotFinite {
                step,
                object: format!("{what} ({value})"),
                first_sample: self.first_sample(batches),
                samples,
            });
        }
        let grad_divisor = scale * optim::clip_divisor(grad_norm, config.clip);
        let step = step - self.scaler.as_ref().map_or(0, |(scaler, _)| scaler.skipped_steps);
        self.comm.activity.set(|| "updates weights".to_owned());
        let step = StepSize { step, lr, grad_divisor };
        match &mut self.offloaded {
            Some(offloaded) => offloaded.update(config, &mut self.params, grads, &step)?,
            None => self.adamw.update(config, &mut self.params, &mut grads, &step)?,
        }
        if let Some((scaler, config)) = &mut self.scaler {
            scaler.good(config);
        }
        self.gather()?;
        Ok(StepReport { loss, grad_norm, skipped: false })
    }

    /// Mean loss of a global batch and its gradient, f32, in the order of the parameters that the
    /// rank has.
    ///
    /// # Errors
    /// As [`Trainer::sum`].
    pub fn gradient<B: Input>(&self, batches: &[B]) -> Result<Contribution> {
        let weights = self.weights_of(batches, 1.0)?;
        let (losses, grads) = self.passes(batches, weights)?;
        Ok(Contribution { loss: tree_sum(&numbers(&losses)?), grads: self.join(grads)? })
    }

    /// What some micro-batches of a step contribute to it, every token weighted by `weight`, one
    /// over the tokens of the whole step, which is applied only here. The gradients are of
    /// the uses of parameters, f32, flat.
    ///
    /// # Errors
    /// [`Error::Torch`] and [`Error::Bridge`].
    ///
    /// # Panics
    /// If there is no batch.
    pub fn sum<B: Input>(&self, batches: &[B], weight: f64) -> Result<Contribution> {
        let weights = LossWeights { token: weight, sample: weight };
        let (losses, grads) = self.passes(batches, weights)?;
        Ok(Contribution { loss: tree_sum(&numbers(&losses)?), grads })
    }

    /// The loss of each micro-batch, one f64, and gradients by use of the rank.
    fn passes<B: Input>(
        &self,
        batches: &[B],
        weights: LossWeights,
    ) -> Result<(Vec<Tensor>, Vec<Tensor>)> {
        assert!(!batches.is_empty(), "a step has a micro-batch");
        let micros = batches.iter().map(|batch| batch.micro(weights)?.on(self.comm.device));
        let micros = micros.collect::<Result<Vec<Micro>>>()?;
        let Setup { schedule, shape, .. } = self.setup;
        let actions = |rank| schedule.actions(shape, rank, batches.len());
        let own = actions(self.comm.place().pp);
        let lists = || (0..shape.ranks).map(actions).collect::<Vec<_>>();
        let group = self.comm.dp.as_ref();
        let grads = Grads::new(group, self.setup.rules, &self.setup.buckets);
        let rows: Vec<i64> = batches.iter().map(|batch| batch.rows() as i64).collect();
        let pipe = self.pipe(lists);
        ScheduleRun::new(self.part(), self.weights()?, pipe, grads, (&micros, &rows)).run(&own)
    }

    /// The loss scale over the counted tokens, and over the samples, of the step.
    fn weights_of<B: Input>(&self, batches: &[B], scale: f64) -> Result<LossWeights> {
        let tokens = batches.iter().map(Input::counted_tokens).sum::<f64>();
        let samples = batches.iter().map(|batch| batch.rows() as f64).sum::<f64>();
        let mut counts = vec![tokens, samples];
        self.comm.activity.set(|| "counts the tokens of the step".to_owned());
        all_sum(self.comm.dp.as_ref(), &mut counts)?;
        // A batch without a single token that counts has a loss of 0.
        let [token, sample] = [counts[0], counts[1]].map(|count| scale / count.max(1.0));
        Ok(LossWeights { token, sample })
    }

    /// Combines gradients by use into gradients by parameter of the rank, in their shapes.
    fn join(&self, mut grads: Vec<Tensor>) -> Result<Vec<Tensor>> {
        let _no_grad = tch::no_grad_guard();
        if let Some(tp) = &self.comm.tp {
            for piece in &self.setup.pieces {
                for (at, use_at) in piece.uses.iter().enumerate() {
                    if piece.stage.is_partial(at) {
                        tp.all_reduce(&mut grads[*use_at], bridge::dist::Reduce::Sum)?;
                    }
                }
            }
        }
        let pipeline = self.comm.pp.as_ref();
        let joined = self.setup.uses.join(pipeline, grads, &self.comm.activity)?;
        let shaped = joined.into_iter().zip(&self.params);
        shaped.map(|(grad, param)| Ok(grad.f_view(param.size().as_slice())?)).collect()
    }

    /// The loss of the step and the norm of its gradient, equal on all ranks, from the losses of
    /// this rank's micro-batches and its part of the gradient.
    fn loss_and_norm(&self, losses: &[Tensor], grads: &[Tensor]) -> Result<(f64, f64)> {
        self.comm.activity.set(|| "takes the norm of the gradient".to_owned());
        let Setup { params, uses, rules, .. } = &self.setup;
        let (mesh, place) = (self.comm.mesh, self.comm.place());
        let elements = |at: usize| self.setup.elements(at) as u64; // fits: not negative
        // All sums are started on the device before any result is waited for.
        let sums = grads.iter().enumerate().map(|(at, grad)| block_sums(grad, elements(at)));
        let sums = sums.collect::<Result<Vec<Tensor>>>()?;
        let (losses, blocks) = (numbers(losses)?, numbers(&sums)?);
        // The losses of the step's micro-batches, then the blocks of the parameters.
        let micros = losses.len() * mesh.dp;
        let mut numbers = vec![0.0; micros];
        for (micro, loss) in mesh.share(rules.share, place.dp, micros).into_iter().zip(losses) {
            numbers[micro] = loss;
        }
        let mut blocks = &blocks[..];
        for (at, sums) in sums.iter().enumerate() {
            let own;
            (own, blocks) = blocks.split_at(sums.numel());
            let mine = if rules.sliced { self.own_slice(elements(at)).start } else { 0 };
            let mine = numbers.len() + block_count_before(mine, elements(at));
            numbers.resize(numbers.len() + block_count(elements(at)), 0.0);
            numbers[mine..mine + own.len()].copy_from_slice(own);
        }
        if rules.sliced {
            all_sum(self.comm.dp.as_ref(), &mut numbers)?;
        } else {
            let mut losses = numbers[..micros].to_vec();
            all_sum(self.comm.dp.as_ref(), &mut losses)?;
            numbers[..micros].copy_from_slice(&losses);
        }
        // Each parameter is counted once, by one of the ranks that have it.
        let mut squares = vec![0.0; self.model.params().len() + 1];
        let (losses, mut blocks) = numbers.split_at(micros);
        for (at, param) in params.iter().enumerate() {
            let own;
            (own, blocks) = blocks.split_at(block_count(elements(at)));
            let is_whole =
                self.model.params()[*param].split == ckpt::layout::TensorSplit::Replicate;
            if uses.is_owner(*param, place.pp) && (place.tp == 0 || !is_whole) {
                squares[*param] = own.iter().sum();
            }
        }
        if place.tp == 0 {
            squares[self.model.params().len()] = tree_sum(losses);
        }
        all_sum(self.comm.tp.as_ref(), &mut squares)?;
        all_sum(self.comm.pp.as_ref(), &mut squares)?;
        let loss = squares.pop().expect("the loss is the last");
        Ok((loss, squares.iter().sum::<f64>().sqrt()))
    }

    fn own_slice(&self, elements: u64) -> std::ops::Range<u64> {
        let (replicas, own) = (self.comm.mesh.dp as u64, self.comm.place().dp as u64);
        slice_of(Slices::Blocks, elements, replicas, own)
    }

    /// The first sample of the step, whichever of its micro-batches this replica has.
    fn first_sample<B: Input>(&self, batches: &[B]) -> u64 {
        let (mesh, place) = (self.comm.mesh, self.comm.place());
        let before = mesh.share(self.setup.rules.share, place.dp, batches.len() * mesh.dp)[0];
        let before = before as u64 * batches[0].rows() as u64;
        batches[0].first_sample().saturating_sub(before)
    }

    pub(crate) fn part(&self) -> RankNetwork<'_> {
        let Setup { shape, chunks, pieces, kind, .. } = &self.setup;
        RankNetwork { shape: *shape, chunks, pieces, kind: *kind, activity: &self.comm.activity }
    }

    pub(crate) fn pipe(&self, lists: impl FnOnce() -> Vec<Vec<Action>>) -> Option<Pipe<'_>> {
        let group = self.comm.pp.as_ref()?;
        let what = (self.setup.kind, self.comm.device);
        Some(Pipe::new(group, self.setup.shape, &lists(), what, &self.comm.activity))
    }

    pub(crate) fn weights(&self) -> Result<Weights<'_>> {
        let Setup { pieces, kind, .. } = &self.setup;
        match &self.comm.dp {
            Some(group) if self.setup.gathers => {
                Ok(Weights::gathered(group, pieces, &self.params, &self.buffers, *kind))
            }
            _ => Weights::here(pieces, self.copies.as_ref().unwrap_or(&self.params), *kind),
        }
    }
}

fn move_to(device: Device, tensors: &mut [Tensor]) -> Result<()> {
    for tensor in tensors {
        *tensor = tensor.f_to_device(device)?;
    }
    Ok(())
}

/// Refuses a mesh that is not the config's.
fn check_mesh(config: &Config, comm: &Comm) -> Result<()> {
    let mesh = comm.mesh;
    let own = config.divide(mesh.ranks() as u64);
    let fit = config.parallel.virtual_stages == mesh.virtual_stages as u64;
    let details = match own {
        Ok(own) if fit && (own.tp, own.pp) == (mesh.tp as u64, mesh.pp as u64) => return Ok(()),
        Ok(own) => vec![format!("expected tp {} and pp {}, found {mesh:?}", own.tp, own.pp)],
        Err(refusals) => refusals,
    };
    let operation = format!("cannot divide the run among {} ranks", mesh.ranks());
    let hint = "`trainer plan --ranks N` checks a layout";
    Err(Error::Mismatch(Incompatible { operation, details, hint }))
}

impl Setup {
    /// The part of a full parameter that a rank keeps.
    fn own_part(&self, comm: &Comm, at: usize, whole: Tensor) -> Result<Tensor> {
        if !self.rules.sliced {
            return Ok(whole);
        }
        let elements = self.elements(at) as u64; // fits: not negative
        let replicas = comm.mesh.dp as u64;
        let slice = slice_of(Slices::Blocks, elements, replicas, comm.place().dp as u64);
        let len = (slice.end - slice.start) as i64; // fits: of memory
        let part = whole.f_view([-1])?.f_narrow(0, slice.start as i64, len)?;
        // Copied, because a view would keep all of it.
        let mut own = Tensor::f_empty([len], (Kind::Float, whole.device()))?;
        own.f_copy_(&part)?;
        Ok(own)
    }
}

/// How many blocks of a parameter are before its element number `first`, which starts one.
fn block_count_before(first: u64, elements: u64) -> usize {
    first.div_ceil(ckpt::layout::block_elements(elements)) as usize // fits: of memory
}
