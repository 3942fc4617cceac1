//! Sums the gradients of backward passes over micro-batches and replicas.
//!
//! Units are grouped in buckets. When the last unit of a bucket is done, its gradients are added
//! along the tree over the micro-batches. After the last micro-batch, or after every one if a rank
//! must not keep a whole gradient, the bucket is sent to the other replicas, while the units before
//! it still compute.

use std::collections::VecDeque;

use bridge::dist::Group;
use tch::{Kind, Tensor};

use super::exchange::{Buffer, Gathering, ReduceOrder, Scattering, Sum};
use crate::Result;
use crate::mesh::MicroBatchShare;
use crate::parallel::accumulate::{TreeSum, add_all};

/// Exchanges in flight at once if every micro-batch has its own: one is sent while the next is
/// computed.
const IN_FLIGHT_MAX: usize = 2;

/// Some units whose gradients are sent together.
#[derive(Clone, Debug)]
pub struct Bucket {
    /// Places among the rank's uses.
    pub uses: Vec<usize>,
    /// Elements of each.
    pub elements: Vec<i64>,
    /// How many units it has.
    pub units: usize,
}

/// How gradients are summed and sent.
#[derive(Clone, Copy, Debug)]
pub struct GradPolicy {
    /// How they are added.
    pub order: ReduceOrder,
    /// Which micro-batches a replica has, and so when it sends its sums.
    pub share: MicroBatchShare,
    /// Whether every replica keeps its slice of the sum only.
    pub sliced: bool,
    /// The dtype in which they are sent.
    pub kind: Kind,
}

/// The gradients of one step on one rank.
#[derive(Debug)]
pub struct Grads<'a> {
    group: Option<&'a Group>,
    rules: GradPolicy,
    buckets: &'a [Bucket],
    buffers: Vec<Buffer>,
    /// For the current micro-batch: gradients by place in the bucket, and the missing units.
    filling: Vec<(Vec<Option<Tensor>>, usize)>,
    sums: Vec<TreeSum<Vec<Tensor>>>,
    in_flight: VecDeque<(usize, Scattering)>,
}

impl<'a> Grads<'a> {
    /// Without gradients yet. Without a group there are no other replicas.
    #[must_use]
    pub fn new(group: Option<&'a Group>, rules: GradPolicy, buckets: &'a [Bucket]) -> Self {
        let replicas = group.map_or(1, Group::size);
        let buffer = |bucket: &Bucket| Buffer::new(bucket.elements.iter().copied(), replicas);
        Grads {
            group,
            rules,
            buckets,
            buffers: buckets.iter().map(buffer).collect(),
            filling: buckets.iter().map(empty).collect(),
            sums: buckets.iter().map(|_| TreeSum::new()).collect(),
            in_flight: VecDeque::new(),
        }
    }

    /// Takes the gradients of one unit of a bucket for one micro-batch: places among the rank's
    /// uses, and f32 tensors. `is_last` if no micro-batch follows.
    ///
    /// # Errors
    /// [`crate::Error::Bridge`], [`crate::Error::Torch`].
    pub fn put(&mut self, bucket: usize, grads: Vec<(usize, Tensor)>, is_last: bool) -> Result<()> {
        let (filling, left) = &mut self.filling[bucket];
        for (use_at, grad) in grads {
            let place = self.buckets[bucket].uses.iter().position(|at| *at == use_at);
            filling[place.expect("a unit's uses are in its bucket")] = Some(grad);
        }
        *left -= 1;
        if *left > 0 {
            return Ok(());
        }
        let (grads, _) = std::mem::replace(&mut self.filling[bucket], empty(&self.buckets[bucket]));
        let grads: Vec<Tensor> = grads.into_iter().map(|grad| grad.expect("all are set")).collect();
        match (self.group, self.rules.share) {
            (Some(_), MicroBatchShare::Stride) => {
                while self.in_flight.len() >= IN_FLIGHT_MAX {
                    self.finish_oldest()?;
                }
                self.send(bucket, &grads)
            }
            (Some(_), MicroBatchShare::Run) if is_last => {
                let sum = self.take_sum(bucket, Some(grads))?;
                self.send(bucket, &sum)
            }
            _ => self.sums[bucket].push(grads, |left, right| add_all(left, right)),
        }
    }

    fn send(&mut self, bucket: usize, grads: &[Tensor]) -> Result<()> {
        let group = self.group.expect("there are other replicas");
        let packed = self.buffers[bucket].pack(grads)?.f_to_kind(self.rules.kind)?;
        let tag = tag(bucket, Message::Scatter);
        let started = Scattering::start(group, &packed, self.rules.order, tag)?;
        self.in_flight.push_back((bucket, started));
        Ok(())
    }

    fn take_sum(&mut self, bucket: usize, last: Option<Vec<Tensor>>) -> Result<Vec<Tensor>> {
        let mut sum = std::mem::take(&mut self.sums[bucket]);
        if let Some(last) = last {
            sum.push(last, |left, right| add_all(left, right))?;
        }
        Ok(sum.finish(|left, right| add_all(left, right))?.expect("a step has a micro-batch"))
    }

    /// With [`MicroBatchShare::Stride`]: adds the row of the oldest exchange to its bucket's sum.
    fn finish_oldest(&mut self) -> Result<()> {
        let Some((bucket, started)) = self.in_flight.pop_front() else { return Ok(()) };
        let own = self.group.map_or(0, Group::rank);
        let row = started.finish()?.own(own)?;
        self.sums[bucket].push(vec![row], |left, right| add_all(left, right))
    }

    /// The sums over all micro-batches of all replicas, by use of the rank, flat: slices of this
    /// replica, or whole.
    ///
    /// # Errors
    /// [`crate::Error::Bridge`], [`crate::Error::Torch`].
    pub fn finish(mut self) -> Result<Vec<Tensor>> {
        let mut all: Vec<(usize, Tensor)> = Vec::new();
        let own = self.group.map_or(0, Group::rank);
        if let (Some(group), MicroBatchShare::Run) = (self.group, self.rules.share) {
            let mut gathering = Vec::new();
            for (bucket, started) in std::mem::take(&mut self.in_flight) {
                let sum = started.finish()?;
                if self.rules.sliced {
                    let slices = self.buffers[bucket].unpack_own(&sum.own(own)?, own)?;
                    all.extend(self.buckets[bucket].uses.iter().copied().zip(slices));
                    continue;
                }
                let rows = match sum {
                    Sum::All(rows) => Rows::Here(rows.f_view([-1])?),
                    Sum::Own(row) => {
                        let tag = tag(bucket, Message::GatherSum);
                        let row = row.f_to_kind(self.rules.kind)?;
                        Rows::InFlight(Gathering::start(group, &row, tag)?)
                    }
                };
                gathering.push((bucket, rows));
            }
            for (bucket, rows) in gathering {
                let rows = match rows {
                    Rows::Here(rows) => rows,
                    Rows::InFlight(gathering) => gathering.finish()?.f_to_kind(Kind::Float)?,
                };
                let tensors = self.buffers[bucket].unpack(&rows)?;
                all.extend(self.buckets[bucket].uses.iter().copied().zip(tensors));
            }
        } else {
            while !self.in_flight.is_empty() {
                self.finish_oldest()?;
            }
            for bucket in 0..self.buckets.len() {
                let mut sum = self.take_sum(bucket, None)?;
                if self.group.is_some() {
                    let row = sum.pop().expect("a bucket has one row");
                    sum = self.buffers[bucket].unpack_own(&row, own)?;
                }
                all.extend(self.buckets[bucket].uses.iter().copied().zip(sum));
            }
        }
        all.sort_by_key(|(use_at, _)| *use_at);
        all.into_iter().map(|(_, grad)| Ok(grad.f_view([-1])?)).collect()
    }
}

enum Rows {
    Here(Tensor),
    InFlight(Gathering),
}

/// The purpose of a message between replicas.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Message {
    Scatter,
    GatherSum,
    GatherParams,
}

/// The tag that distinguishes the messages of a bucket from those of others.
pub(crate) fn tag(bucket: usize, message: Message) -> u32 {
    (bucket * 3 + message as usize) as u32 // fits: fewer buckets than units
}

fn empty(bucket: &Bucket) -> (Vec<Option<Tensor>>, usize) {
    (bucket.uses.iter().map(|_| None).collect(), bucket.units)
}
