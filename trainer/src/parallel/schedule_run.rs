//! Executes a schedule on one rank.

use std::collections::HashMap;

use tch::{Kind, Tensor};

use super::grads::Grads;
use super::pipe::Pipe;
use super::weights::Weights;
use crate::Result;
use crate::launch::comm::RankActivity;
use crate::model::{self, Micro, Stage};
use recipe::schedule::{Action, Pass, Pipeline};

/// Backward passes that are prepared ahead: the current one, and the next.
const AHEAD: usize = 2;

/// One of a rank's stages of the pipeline.
#[derive(Clone, Debug)]
pub struct PipelineChunk {
    /// Places among the rank's pieces, in the order of computing.
    pub pieces: Vec<usize>,
    /// The next stage, whose `carried` has the shapes of its inputs; `None` for the last.
    pub next: Option<Stage>,
}

/// A run of units that is computed at once: a chunk, or one unit if weights are gathered per use.
#[derive(Clone, Debug)]
pub struct UnitRange {
    /// The units.
    pub stage: Stage,
    /// Places of the stage's uses among the rank's uses.
    pub uses: Vec<usize>,
    /// Places of the stage's parameters among the rank's parameters.
    pub params: Vec<usize>,
    /// The bucket of each of its units.
    pub buckets: Vec<usize>,
}

/// The part of the network that a rank has, and its activity.
#[derive(Clone, Copy, Debug)]
pub struct RankNetwork<'a> {
    /// The ranks of the pipeline.
    pub shape: Pipeline,
    /// This rank's stages.
    pub chunks: &'a [PipelineChunk],
    /// What they are made of.
    pub pieces: &'a [UnitRange],
    /// The dtype of the computation.
    pub kind: Kind,
    /// For the watchdog and the trace.
    pub activity: &'a RankActivity,
}

impl RankNetwork<'_> {
    /// The shapes of what an action takes from the one before it.
    pub(crate) fn shapes(&self, action: &Action, rows: i64) -> Vec<Vec<i64>> {
        let chunk = &self.chunks[action.chunk];
        match (action.pass, &chunk.next) {
            (Pass::Forward, _) => self.pieces[chunk.pieces[0]].stage.carried(rows),
            (Pass::Backward, Some(next)) => next.carried(rows),
            (Pass::Backward, None) => Vec::new(),
        }
    }

    /// The outs of one micro-batch of a chunk, without a backward pass.
    pub(crate) fn infer(
        &self,
        chunk: usize,
        weights: &mut Weights<'_>,
        micro: &Micro,
        carried: Vec<Tensor>,
    ) -> Result<Vec<Tensor>> {
        let mut outs = carried;
        for &piece in &self.chunks[chunk].pieces {
            let leaves = weights.leaves(piece, self.following(chunk, piece))?;
            outs = self.pieces[piece].stage.infer(&leaves, micro, outs)?;
        }
        Ok(outs)
    }

    fn following(&self, chunk: usize, piece: usize) -> Option<usize> {
        let last = *self.chunks[chunk].pieces.last()?;
        (piece < last).then_some(piece + 1)
    }

    fn preceding(&self, chunk: usize, piece: usize) -> Option<usize> {
        let first = *self.chunks[chunk].pieces.first()?;
        (piece > first).then(|| piece - 1)
    }
}

/// The passes of one step on one rank.
#[derive(Debug)]
pub struct ScheduleRun<'a> {
    parts: RankNetwork<'a>,
    weights: Weights<'a>,
    pipe: Option<Pipe<'a>>,
    grads: Grads<'a>,
    micros: &'a [Micro],
    rows: &'a [i64],
    /// Forward passes that wait for their backward pass, by micro-batch and chunk.
    kept: HashMap<(usize, usize), Vec<model::Pass>>,
    /// Of each micro-batch, one f64; 0 except on the last stage.
    losses: Vec<Tensor>,
}

impl<'a> ScheduleRun<'a> {
    /// Before the first action. `rows` are those of each micro-batch.
    #[must_use]
    pub fn new(
        parts: RankNetwork<'a>,
        weights: Weights<'a>,
        pipe: Option<Pipe<'a>>,
        grads: Grads<'a>,
        (micros, rows): (&'a [Micro], &'a [i64]),
    ) -> Self {
        let kept = HashMap::new();
        let losses = micros.iter().map(|_| Tensor::from(0.0)).collect();
        ScheduleRun { parts, weights, pipe, grads, micros, rows, kept, losses }
    }

    /// Executes the actions. Returns the losses of this replica's micro-batches, 0 except on the
    /// last stage, and gradients by use of the rank, summed over all replicas.
    ///
    /// # Errors
    /// [`crate::Error::Bridge`], [`crate::Error::Torch`].
    pub fn run(mut self, actions: &[Action]) -> Result<(Vec<Tensor>, Vec<Tensor>)> {
        for (at, action) in actions.iter().enumerate() {
            let mut input = None;
            if let Some(pipe) = &mut self.pipe {
                let (parts, rows) = (self.parts, self.rows);
                pipe.post_recvs(&actions[at..], |action| parts.shapes(action, rows[action.micro]))?;
                input = pipe.take(action)?;
            }
            self.parts.activity.set(|| action.to_string());
            self.prefetch(&actions[at..]);
            match action.pass {
                Pass::Forward => self.forward(action, input.unwrap_or_default())?,
                Pass::Backward => self.backward(action, input.unwrap_or_default())?,
            }
        }
        self.parts.activity.set(|| "sums gradients over replicas".to_owned());
        let grads = self.grads.finish()?;
        if let Some(pipe) = self.pipe {
            pipe.finish()?;
        }
        Ok((self.losses, grads))
    }

    /// Prefetches the offloaded inputs of the next backward passes of these actions.
    fn prefetch(&self, actions: &[Action]) {
        let back = actions.iter().filter(|action| action.pass == Pass::Backward).take(AHEAD);
        let kept = back.filter_map(|action| self.kept.get(&(action.micro, action.chunk)));
        kept.for_each(|passes| passes.iter().rev().for_each(model::Pass::prefetch));
    }

    fn forward(&mut self, action: &Action, carried: Vec<Tensor>) -> Result<()> {
        let parts = self.parts;
        let micro = &self.micros[action.micro];
        let mut passes = Vec::<model::Pass>::new();
        let mut carried = carried;
        for &piece in &parts.chunks[action.chunk].pieces {
            // They are the inputs of this piece, which may be offloaded.
            passes.last_mut().map_or(Ok(()), model::Pass::forget_outs)?;
            let leaves = self.weights.leaves(piece, parts.following(action.chunk, piece))?;
            let pass = parts.pieces[piece].stage.forward(&leaves, micro, carried)?;
            carried = pass.outs().iter().map(Tensor::shallow_clone).collect();
            passes.push(pass);
        }
        if let Some(pipe) = &mut self.pipe {
            pipe.send(action, &carried)?;
        }
        if let (Some(_), Some(pass)) = (&parts.chunks[action.chunk].next, passes.last_mut()) {
            pass.forget_outs()?;
        }
        self.kept.insert((action.micro, action.chunk), passes);
        Ok(())
    }

    fn backward(&mut self, action: &Action, received: Vec<Tensor>) -> Result<()> {
        let parts = self.parts;
        let chunk = &parts.chunks[action.chunk];
        let micro = &self.micros[action.micro];
        let is_last = action.micro + 1 == self.micros.len();
        let passes = self.kept.remove(&(action.micro, action.chunk)).expect("ran forward");
        let (mut outs, mut head) = (received, Vec::new());
        for (&piece, pass) in chunk.pieces.iter().zip(passes).rev() {
            let UnitRange { stage, uses, buckets, .. } = &parts.pieces[piece];
            let leaves = self.weights.leaves(piece, parts.preceding(action.chunk, piece))?;
            if chunk.next.is_none() && Some(&piece) == chunk.pieces.last() {
                let at_head = stage.loss_and_grad(&leaves, micro, pass.outs())?;
                self.losses[action.micro] = at_head.loss;
                (outs, head) = (at_head.outs, at_head.uses);
            }
            let first = stage.units().start;
            let grads = &mut self.grads;
            let mut done = |unit: usize| {
                let mut of_unit = Vec::new();
                for (at, leaf) in leaves.iter().enumerate() {
                    if stage.model().uses()[stage.uses()[at]].unit != unit {
                        continue;
                    }
                    let of_head = head.iter().position(|(of, _)| *of == at);
                    let grad = match (of_head, bridge::take_grad(leaf)?) {
                        (Some(of), _) => head.swap_remove(of).1,
                        (None, Some(grad)) => grad.f_to_kind(Kind::Float)?,
                        (None, None) => leaf.f_zeros_like()?.f_to_kind(Kind::Float)?,
                    };
                    of_unit.push((uses[at], grad));
                }
                grads.put(buckets[unit - first], of_unit, is_last)
            };
            outs = stage.backward(&leaves, micro, pass, outs, &mut done)?;
        }
        match &mut self.pipe {
            Some(pipe) => pipe.send(action, &outs),
            None => Ok(()),
        }
    }
}
