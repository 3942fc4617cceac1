//! Parameters that several stages use.
//!
//! Each use has its own gradient, and those of one parameter are added in the order of the uses,
//! one after the other, by every rank that has the parameter: so its copies stay equal without
//! being sent, and no bit depends on which uses are together on a rank.

use bridge::dist::Group;
use tch::Tensor;

use super::exchange::wait_all;
use super::pipe;
use crate::Result;
use crate::device::to_host;
use crate::launch::comm::RankActivity;
use crate::model::Use;

/// The tag of the gradient of a use, which no other use and no message of a pipeline has.
#[must_use]
pub fn tag(at: usize) -> u32 {
    pipe::TAGS + at as u32 // fits: a model has fewer uses than 2^20
}

/// Where each use of a model is.
#[derive(Clone, Debug)]
pub struct SharedParams {
    /// The model's uses, in their order.
    pub all: Vec<Use>,
    /// The pipeline rank of each.
    pub ranks: Vec<usize>,
    /// Those of this rank, ascending.
    pub own: Vec<usize>,
}

impl SharedParams {
    /// Adds the gradients of this rank's uses, in their order, and those that other ranks have of
    /// the same parameters. Returns one a parameter, in the order of the parameters.
    ///
    /// # Errors
    /// [`crate::Error::Bridge`], [`crate::Error::Torch`].
    pub fn join(
        &self,
        pipeline: Option<&Group>,
        grads: Vec<Tensor>,
        activity: &RankActivity,
    ) -> Result<Vec<Tensor>> {
        let mut params: Vec<usize> = self.own.iter().map(|at| self.all[*at].param).collect();
        params.sort_unstable();
        params.dedup();
        let mut by_use: Vec<Option<Tensor>> = self.all.iter().map(|_| None).collect();
        for (at, grad) in self.own.iter().zip(grads) {
            by_use[*at] = Some(grad);
        }
        if let Some(group) = pipeline {
            activity.set(|| "exchanges gradients of shared parameters".to_owned());
            self.exchange(group, &params, &mut by_use)?;
        }
        let mut joined: Vec<Option<Tensor>> = params.iter().map(|_| None).collect();
        for (it, grad) in self.all.iter().zip(by_use) {
            let (Some(grad), Ok(place)) = (grad, params.binary_search(&it.param)) else {
                continue;
            };
            match &mut joined[place] {
                Some(sum) => _ = sum.f_add_(&grad)?,
                empty => *empty = Some(grad),
            }
        }
        Ok(joined.into_iter().map(|sum| sum.expect("every parameter is used")).collect())
    }

    /// Receives the gradients that other ranks have of these parameters.
    fn exchange(
        &self,
        group: &Group,
        params: &[usize],
        by_use: &mut [Option<Tensor>],
    ) -> Result<()> {
        let own = group.rank();
        let (mut works, mut received) = (Vec::new(), Vec::new());
        let shared =
            self.all.iter().enumerate().filter(|(at, it)| {
                self.ranks[*at] != own && params.binary_search(&it.param).is_ok()
            });
        for (at, it) in shared {
            let mine = self.own.iter().find(|mine| self.all[**mine].param == it.param);
            let mine = by_use[*mine.expect("the parameter is this rank's")].as_ref();
            let mine = mine.expect("every use has a gradient");
            let mut grad = Tensor::f_empty(mine.size(), (mine.kind(), group.device()))?;
            works.push(group.recv(&mut grad, self.ranks[at], tag(at))?);
            received.push((at, grad, mine.device()));
        }
        for at in &self.own {
            let Some(grad) = &by_use[*at] else { continue };
            let grad = to_host(grad)?;
            for to in self.others(self.all[*at].param, own) {
                works.push(group.send(&grad, to, tag(*at))?);
            }
        }
        wait_all(works)?;
        for (at, grad, device) in received {
            by_use[at] = Some(grad.f_to_device(device)?);
        }
        Ok(())
    }

    /// The other ranks that have a parameter.
    fn others(&self, param: usize, own: usize) -> Vec<usize> {
        let uses = self.all.iter().zip(&self.ranks);
        let mut ranks: Vec<usize> =
            uses.filter(|(it, _)| it.param == param).map(|(_, rank)| *rank).collect();
        ranks.sort_unstable();
        ranks.dedup();
        ranks.retain(|rank| *rank != own);
        ranks
    }

    /// Whether a parameter is counted here: by the rank that has its first use.
    #[must_use]
    pub fn is_owner(&self, param: usize, rank: usize) -> bool {
        let first = self.all.iter().position(|it| it.param == param);
        first.is_some_and(|at| self.ranks[at] == rank)
    }
}
