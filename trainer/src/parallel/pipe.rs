//! The messages between the stages of a pipeline, in both directions.
//!
//! A rank waits for the messages that it needs, and never until another rank has taken its own.
//! Receives are posted some actions ahead ([`AHEAD`]), because Gloo sends only to a posted receive.
//! When the result of another rank's action arrives, that rank has completed all its earlier
//! actions: it has received what they took from this rank, whose memory is then freed.

use std::collections::HashMap;

use bridge::dist::{Group, Work};
use tch::{Device, Kind, Tensor};

use super::exchange::wait_all;
use crate::Result;
use crate::device::to_host;
use crate::launch::comm::RankActivity;
use recipe::schedule::{Action, Pass, Pipeline};

/// For how many of the next actions receives are posted: the current one, and one in each direction
/// that is in flight meanwhile.
const AHEAD: usize = 3;

/// Maximum number of tensors that one action takes.
const TENSORS_MAX: usize = 4;

/// All tags of a pipeline are smaller. Those of other messages in its group start here.
pub const TAGS: u32 = 1 << 30;

/// The tag of a message from one rank to another: by the action that takes it, and its index among
/// the tensors that the action takes.
///
/// # Panics
/// If an action takes too many tensors.
#[must_use]
pub fn tag(shape: Pipeline, taken_by: &Action, index: usize) -> u32 {
    assert!(index < TENSORS_MAX, "a unit carries few tensors");
    let pass = usize::from(taken_by.pass == Pass::Backward);
    let action = (taken_by.micro * shape.chunks + taken_by.chunk) * 2 + pass;
    // fits: it is a remainder. With 64 chunks a tag repeats after 2^21 micro-batches, long
    // after the first message was received.
    ((action * TENSORS_MAX + index) % TAGS as usize) as u32
}

/// The messages of one rank for one list of actions.
#[derive(Debug)]
pub struct Pipe<'a> {
    group: &'a Group,
    shape: Pipeline,
    kind: Kind,
    /// The device of the computation; messages are copied if the group cannot access it.
    device: Device,
    /// The index of each rank's actions in its list.
    places: Vec<HashMap<Action, usize>>,
    posted: HashMap<Action, (Vec<Tensor>, Vec<Work>)>,
    /// The receiving rank, the index in its list, and the messages.
    sent: Vec<(usize, usize, Vec<Work>)>,
    activity: &'a RankActivity,
}

impl<'a> Pipe<'a> {
    /// For the lists of all ranks. Messages are of this kind, and moved to this device.
    #[must_use]
    pub fn new(
        group: &'a Group,
        shape: Pipeline,
        lists: &[Vec<Action>],
        (kind, device): (Kind, Device),
        activity: &'a RankActivity,
    ) -> Self {
        let places = lists.iter().map(|list| list.iter().copied().zip(0..).collect()).collect();
        let (posted, sent) = (HashMap::new(), Vec::new());
        Pipe { group, shape, kind, device, places, posted, sent, activity }
    }

    /// Posts the receives for the inputs of the first of these actions that are from other ranks.
    /// `shapes` gives the shapes of what an action takes.
    ///
    /// # Errors
    /// [`crate::Error::Bridge`], [`crate::Error::Torch`].
    pub fn post_recvs(
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
            if self.posted.contains_key(action) {
                continue;
            }
            let (mut tensors, mut works) = (Vec::new(), Vec::new());
            for (index, shape) in shapes(action).into_iter().enumerate() {
                let mut tensor = Tensor::f_empty(&shape, (self.kind, self.group.device()))?;
                works.push(self.group.recv(&mut tensor, from, tag(self.shape, action, index))?);
                tensors.push(tensor);
            }
            self.posted.insert(*action, (tensors, works));
        }
        Ok(())
    }

    /// The input of an action, whose receives were posted; `None` if it is not from another rank.
    ///
    /// # Errors
    /// [`crate::Error::Bridge`] if the other rank is lost.
    pub fn take(&mut self, action: &Action) -> Result<Option<Vec<Tensor>>> {
        let Some((tensors, works)) = self.posted.remove(action) else { return Ok(None) };
        let own = self.group.rank();
        let (from, input) = action.after(own, self.shape).expect("its receives were posted");
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

    /// Waits until all sent messages are received.
    ///
    /// # Errors
    /// [`crate::Error::Bridge`].
    pub fn finish(self) -> Result<()> {
        self.activity.set(|| "waits for its sends".to_owned());
        wait_all(self.sent.into_iter().flat_map(|(_, _, works)| works).collect())
    }
}
