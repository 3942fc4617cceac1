//! The loss on held-out data, by all ranks.

use feed::Batches;

use crate::Result;
use crate::device::numbers;
use crate::model::LossWeights;
use crate::model::input::Input;
use crate::parallel::norm::all_sum;
use crate::parallel::pipe::Pipe;
use crate::parallel::weights::Weights;
use crate::step::Trainer;
use recipe::schedule::{Action, Pass};

impl Trainer {
    /// Sum of the losses of all tokens of the batches, in nats, and the count of these tokens, over
    /// all replicas. All ranks call it.
    ///
    /// # Errors
    /// [`Error::Torch`](crate::Error::Torch), [`Error::Bridge`](crate::Error::Bridge), or the error
    /// of reading the batches.
    pub fn evaluate(&self, batches: &mut Batches) -> Result<(f64, f64)> {
        let place = self.comm.place();
        let mut weights = self.weights()?;
        let (mut loss, mut tokens) = (0.0, 0.0);
        let mut some = Vec::new();
        loop {
            batches.fill(self.comm.mesh.pp as u64, &mut some)?;
            if some.is_empty() {
                break;
            }
            some.iter().for_each(|batch| tokens += batch.counted_tokens());
            loss += self.losses(&some, &mut weights)?;
        }
        let mut numbers = vec![0.0; 2 * self.comm.mesh.dp];
        (numbers[2 * place.dp], numbers[2 * place.dp + 1]) = (loss, tokens);
        all_sum(self.comm.dp.as_ref(), &mut numbers)?;
        let [mut loss, mut tokens] = [vec![0.0], vec![0.0]];
        for pair in numbers.chunks_exact(2) {
            (loss[0], tokens[0]) = (loss[0] + pair[0], tokens[0] + pair[1]);
        }
        all_sum(self.comm.pp.as_ref(), &mut loss)?;
        Ok((loss[0], tokens[0]))
    }

    /// The sum of the losses of some micro-batches; 0 except on the last stage.
    fn losses<B: Input>(&self, batches: &[B], weights: &mut Weights<'_>) -> Result<f64> {
        let _no_grad = tch::no_grad_guard();
        let chunks = self.setup.shape.chunks;
        let of = |micro: usize| (0..chunks).map(move |chunk| (micro, chunk));
        let filled = (0..batches.len()).filter(|micro| batches[*micro].rows() > 0);
        let pass = Pass::Forward;
        let actions: Vec<Action> =
            filled.flat_map(of).map(|(micro, chunk)| Action { pass, micro, chunk }).collect();
        let mut pipe = self.pipe(|| vec![actions.clone(); self.setup.shape.ranks]);
        let parts = self.part();
        let mut sum = 0.0;
        for (at, action) in actions.iter().enumerate() {
            let batch = &batches[action.micro];
            let mut input = None;
            if let Some(pipe) = &mut pipe {
                let rows = |action: &Action| batches[action.micro].rows() as i64; // fits: of memory
                pipe.post_recvs(&actions[at..], |action| parts.shapes(action, rows(action)))?;
                input = pipe.take(action)?;
            }
            let micro = batch.micro(LossWeights { token: 1.0, sample: 0.0 })?;
            let micro = micro.on(self.comm.device)?;
            let outs = parts.infer(action.chunk, weights, &micro, input.unwrap_or_default())?;
            if let Some(pipe) = &mut pipe {
                pipe.send(action, &outs)?;
            }
            let chunk = &self.setup.chunks[action.chunk];
            if chunk.next.is_none() {
                let piece = *chunk.pieces.last().expect("a chunk has a piece");
                let leaves = weights.leaves(piece, None)?;
                let loss = self.setup.pieces[piece].stage.loss(&leaves, &micro, &outs)?;
                sum += numbers(&[loss])?[0];
            }
        }
        pipe.map_or(Ok(()), Pipe::finish)?;
        Ok(sum)
    }
}
