//! What goes from one stage of a pipeline to the next, and back.
//!
//! A message lies ready or is waited for; nobody waits for a message of his own to be taken. What
//! is received is asked for some actions ahead ([`AHEAD`]), for Gloo sends to those who ask. When a
//! result of another rank's action comes, that rank has been past all its earlier actions, so what
//! they took from us has arrived, and its memory is given back.

use std::collections::HashMap;

use bridge::dist::{Group, Work};
use tch::{Device, Kind, Tensor};

use super::exchange::wait_all;
use crate::Result;
use crate::device::to_host;
use crate::launch::comm::RankActivity;
use recipe::schedule::{Action, Pass, Pipeline};

/// How many of the next actions have their input asked for: the one at hand, and one that is on its
/// way while that is computed, in either direction.
const AHEAD: usize = 3;

/// At most so many tensors go with one action.
const TENSORS_MAX: usize = 4;

/// All tags of a pipeline are smaller. Those of other messages in its group begin here.
pub const TAGS: u32 = 1 << 30;

/// Tells apart the messages from one rank to another: each by the action that takes it, and its
/// place among what that takes.
///
/// # Panics
/// If an action takes so many.
#[must_use]
pub fn tag(shape: Pipeline, taken_by: &Action, index: usize) -> u32 {
    assert!(index < TENSORS_MAX, "a unit carries few tensors");
    let pass = usize::from(taken_by.pass == Pass::Backward);
    let action = (taken_by.micro * shape.chunks + taken_by.chunk) * 2 + pass;
    // fits: it is a remainder. With 64 chunks a tag comes again after 2^21 micro-batches, when the
    // first message is long taken.
    ((action * TENSORS_MAX + index) % TAGS as usize) as u32
}

/// The messages of one rank for one list of actions.
#[derive(Debug)]
pub struct Pipe<'a> {
    group: &'a Group,
    shape: Pipeline,
    kind: Kind,
    /// What computes, from and to which messages are copied where the group cannot reach it.
    device: Device,
    /// Where each rank's actions stand in its list.
    places: Vec<HashMap<Action, usize>>,
    asked: HashMap<Action, (Vec<Tensor>, Vec<Work>)>,
    /// To whom, for which place of his list, and the messages.
    sent: Vec<(usize, usize, Vec<Work>)>,
    activity: &'a RankActivity,
}

impl<'a> Pipe<'a> {
    /// For the lists of all ranks. Tensors on the way are of this kind, and taken to this device.
    #[must_use]
    pub fn new(
        group: &'a Group,
        shape: Pipeline,
        lists: &[Vec<Action>],
        (kind, device): (Kind, Device),
        activity: &'a RankActivity,
    ) -> Self {
        let places = lists.iter().map(|list| list.iter().copied().zip(0..).collect()).collect();
        let (asked, sent) = (HashMap::new(), Vec::new());
        Pipe { group, shape, kind, device, places, asked, sent, activity }
    }

    /// Asks for the inputs of the first of these actions that come from other ranks. `shapes` says
    /// what an action takes.
    ///
    /// # Errors
    /// [`crate::Error::Bridge`], [`crate::Error::Torch`].
    pub fn ask(
        &mut self,
        actions: &[Action],
        shapes: impl Fn(&Action) -> Vec<Vec<i64>>,
    ) -> Result<()> {
        let own = self.group.rank();
        for action in actions.iter().take(AHEAD) {
            let Some((from, _)) = action.after(own, self.shape).filter(|input| input.0 != own)
            else {
                continue;
            };
            if self.asked.contains_key(action) {
                continue;
            }
            let (mut tensors, mut works) = (Vec::new(), Vec::new());
            for (index, shape) in shapes(action).into_iter().enumerate() {
                let mut tensor = Tensor::f_empty(&shape, (self.kind, self.group.device()))?;
                works.push(self.group.recv(&mut tensor, from, tag(self.shape, action, index))?);
                tensors.push(tensor);
            }
            self.asked.insert(*action, (tensors, works));
        }
        Ok(())
    }

    /// The input of an action, which was asked for; `None` if it does not come from another rank.
    ///
    /// # Errors
    /// [`crate::Error::Bridge`] if the other rank is gone.
    pub fn take(&mut self, action: &Action) -> Result<Option<Vec<Tensor>>> {
        let Some((tensors, works)) = self.asked.remove(action) else { return Ok(None) };
        let own = self.group.rank();
        let (from, input) = action.after(own, self.shape).expect("it was asked for");
        self.activity.set(|| format!("waits for {input} of rank {}", self.group.members()[from]));
        wait_all(works)?;
        let place = self.places[from][&input];
        let (taken, sent) =
            self.sent.drain(..).partition(|(to, until, _)| *to == from && *until <= place);
        self.sent = sent;
        let taken: Vec<(usize, usize, Vec<Work>)> = taken;
        for (_, _, works) in taken {
            wait_all(works)?;
        }
        let here = |tensor: Tensor| Ok(tensor.f_to_device_(self.device, self.kind, true, false)?);
        Ok(Some(tensors.into_iter().map(here).collect::<Result<_>>()?))
    }

    /// Sends the result of an action to the rank that takes it, if another takes it.
    ///
    /// # Errors
    /// [`crate::Error::Bridge`].
    pub fn send(&mut self, action: &Action, tensors: &[Tensor]) -> Result<()> {
        let own = self.group.rank();
        let Some((to, next)) = action.before(own, self.shape).filter(|next| next.0 != own) else {
            return Ok(());
        };
        let send = |(index, tensor): (usize, &Tensor)| {
            let tensor = to_host(tensor)?.f_contiguous()?;
            Ok(self.group.send(&tensor, to, tag(self.shape, &next, index))?)
        };
        let works = tensors.iter().enumerate().map(send).collect::<Result<Vec<Work>>>()?;
        self.sent.push((to, self.places[to][&next], works));
        Ok(())
    }

    /// Waits until all that was sent is taken.
    ///
    /// # Errors
    /// [`crate::Error::Bridge`].
    pub fn finish(self) -> Result<()> {
        self.activity.set(|| "waits for its sends".to_owned());
        wait_all(self.sent.into_iter().flat_map(|(_, _, works)| works).collect())
    }
}
