//! Sums and gathers over replicas, whose bits do not depend on how many there are.
//!
//! A bucket is a list of tensors that are sent together. Its [`Buffer`] cuts them by
//! [`Slices::Blocks`] and stores them replica by replica: row `r` has replica `r`'s slice of each.
//! To sum, each replica sends every other its row, and adds the received rows in the order of a
//! fixed tree over the replicas ([`TreeSum`]). This takes the bytes of a ring, in one round, and
//! the additions are those of one process that has all micro-batches. To gather, each replica sends
//! its row to all. Between GPUs both are one collective, because NCCL has no message tags.

use bridge::dist::{Group, Reduce, Work};
use ckpt::layout::{Slices, slice_of};
use tch::{Device, Kind, Tensor};

use crate::Result;
use crate::parallel::accumulate::TreeSum;

/// The layout of a bucket's tensors in its buffer.
#[derive(Clone, Debug)]
pub struct Buffer {
    slices: Vec<Slice>,
    replicas: usize,
    /// Elements of a row, padding included.
    row: i64,
}

/// The slices of one tensor in all rows.
#[derive(Clone, Copy, Debug)]
struct Slice {
    elements: i64,
    /// Elements of a row's slice; those of the last rows may be shorter, and are padded.
    each: i64,
    /// Where the slice starts in a row.
    offset: i64,
}

impl Slice {
    /// The slice of one replica: its first element, and how many.
    fn of(&self, replica: usize) -> (i64, i64) {
        let first = (self.each * replica as i64).min(self.elements); // fits: replicas are few
        (first, self.each.min(self.elements - first))
    }
}

impl Buffer {
    /// For tensors with these numbers of elements.
    #[must_use]
    pub fn new(elements: impl IntoIterator<Item = i64>, replicas: usize) -> Self {
        let mut row = 0;
        let slices = elements.into_iter().map(|elements| {
            let count = elements as u64; // fits: a tensor's size
            let first = slice_of(Slices::Blocks, count, replicas as u64, 0);
            let slice = Slice { elements, each: first.end as i64, offset: row };
            row += slice.each;
            slice
        });
        let slices = slices.collect();
        Buffer { slices, replicas, row }
    }

    /// All rows of these tensors.
    ///
    /// # Errors
    /// [`crate::Error::Torch`].
    pub fn pack(&self, tensors: &[Tensor]) -> Result<Tensor> {
        let flat = tensors.iter().map(|tensor| Ok(tensor.f_reshape([-1])?));
        let flat = flat.collect::<Result<Vec<Tensor>>>()?;
        let mut pieces = Vec::with_capacity(self.replicas * flat.len());
        for replica in 0..self.replicas {
            for (slice, tensor) in self.slices.iter().zip(&flat) {
                let (first, len) = slice.of(replica);
                pieces.push(tensor.f_narrow(0, first, len)?);
                if len < slice.each {
                    pieces.push(tensor.f_new_zeros([slice.each - len], like(tensor))?);
                }
            }
        }
        Ok(Tensor::f_cat(&pieces, 0)?)
    }

    /// The row of a replica, made from its slices of the tensors.
    ///
    /// # Errors
    /// [`crate::Error::Torch`].
    pub fn pack_own(&self, slices: &[Tensor]) -> Result<Tensor> {
        let mut pieces = Vec::with_capacity(slices.len());
        for (slice, own) in self.slices.iter().zip(slices) {
            pieces.push(own.shallow_clone());
            let missing = slice.each - own.numel() as i64; // fits: a tensor's size
            if missing > 0 {
                pieces.push(own.f_new_zeros([missing], like(own))?);
            }
        }
        Ok(Tensor::f_cat(&pieces, 0)?)
    }

    /// The slices in a replica's row, as views of it.
    ///
    /// # Errors
    /// [`crate::Error::Torch`].
    pub fn unpack_own(&self, row: &Tensor, replica: usize) -> Result<Vec<Tensor>> {
        let view = |slice: &Slice| Ok(row.f_narrow(0, slice.offset, slice.of(replica).1)?);
        self.slices.iter().map(view).collect()
    }

    /// The tensors in all rows, flat.
    ///
    /// # Errors
    /// [`crate::Error::Torch`].
    pub fn unpack(&self, rows: &Tensor) -> Result<Vec<Tensor>> {
        let tensor = |slice: &Slice| {
            let piece = |replica: usize| {
                let at = replica as i64 * self.row + slice.offset; // fits: a place in memory
                Ok(rows.f_narrow(0, at, slice.of(replica).1)?)
            };
            let pieces = (0..self.replicas).map(piece).collect::<Result<Vec<Tensor>>>()?;
            Ok(Tensor::f_cat(&pieces, 0)?)
        };
        self.slices.iter().map(tensor).collect()
    }
}

fn like(tensor: &Tensor) -> (Kind, Device) {
    (tensor.kind(), tensor.device())
}

/// The order in which gradients are added.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReduceOrder {
    /// Along the tree.
    Tree,
    /// The order of the library: the same on every rank, but different for every number of ranks.
    Any,
}

/// An exchange of rows to sum them, in flight.
#[derive(Debug)]
pub struct Scattering {
    own: usize,
    /// The tensors of this replica, a row a replica.
    packed: Tensor,
    /// The received rows, in the same layout; `None` if the library sums in place.
    received: Option<Tensor>,
    works: Vec<Work>,
}

/// The result of an exchange.
#[derive(Debug)]
pub enum Sum {
    /// This replica's row.
    Own(Tensor),
    /// All rows.
    All(Tensor),
}

impl Scattering {
    /// Sends every replica its row of `packed`. Others in flight have another `tag`.
    ///
    /// # Errors
    /// [`crate::Error::Bridge`], [`crate::Error::Torch`].
    pub fn start(group: &Group, packed: &Tensor, order: ReduceOrder, tag: u32) -> Result<Self> {
        let (own, replicas) = (group.rank(), group.size());
        let mut packed = packed.f_view([replicas as i64, -1])?; // fits: replicas are few
        let mut works = Vec::with_capacity(2 * replicas);
        if order == ReduceOrder::Any {
            works.push(group.all_reduce_start(&mut packed, Reduce::Sum)?);
            return Ok(Scattering { own, packed, received: None, works });
        }
        if group.device().is_cuda() {
            return Self::at_once(group, packed);
        }
        let received = packed.f_empty_like()?;
        for other in others(own, replicas) {
            works.push(group.recv(&mut row(&received, other)?, other, tag)?);
        }
        for other in others(own, replicas) {
            works.push(group.send(&row(&packed, other)?, other, tag)?);
        }
        Ok(Scattering { own, packed, received: Some(received), works })
    }

    /// As [`Scattering::start`] along the tree, as one collective.
    ///
    /// # Errors
    /// [`crate::Error::Bridge`], [`crate::Error::Torch`].
    pub fn at_once(group: &Group, packed: Tensor) -> Result<Self> {
        let mut received = packed.f_empty_like()?;
        let works = vec![group.all_to_all_start(&mut received, &packed)?];
        Ok(Scattering { own: group.rank(), packed, received: Some(received), works })
    }

    /// Waits for the rows and adds them, in f32 whatever they were sent in.
    ///
    /// # Errors
    /// [`crate::Error::Bridge`], [`crate::Error::Torch`].
    pub fn finish(self) -> Result<Sum> {
        wait_all(self.works)?;
        let Some(received) = self.received else {
            return Ok(Sum::All(self.packed.f_to_kind(Kind::Float)?));
        };
        let add = |left: &mut Tensor, right: &Tensor| {
            _ = left.f_add_(right)?;
            Ok(())
        };
        let mut sum = TreeSum::new();
        for replica in 0..received.size()[0] as usize {
            let of = if replica == self.own { &self.packed } else { &received };
            sum.push(row(of, replica)?.f_to_kind(Kind::Float)?, add)?;
        }
        Ok(Sum::Own(sum.finish(add)?.expect("a group has a replica")))
    }
}

impl Sum {
    /// A replica's row.
    ///
    /// # Errors
    /// [`crate::Error::Torch`].
    pub fn own(self, replica: usize) -> Result<Tensor> {
        match self {
            Sum::Own(row) => Ok(row),
            Sum::All(rows) => row(&rows, replica),
        }
    }
}

fn row(rows: &Tensor, replica: usize) -> Result<Tensor> {
    Ok(rows.f_get(replica as i64)?) // fits: replicas are few
}

/// An exchange that sends every row to all replicas, in flight.
#[derive(Debug)]
pub struct Gathering {
    rows: Tensor,
    works: Vec<Work>,
}

impl Gathering {
    /// Sends this replica's row to all.
    ///
    /// # Errors
    /// [`crate::Error::Bridge`], [`crate::Error::Torch`].
    pub fn start(group: &Group, mine: &Tensor, tag: u32) -> Result<Self> {
        let (own, replicas) = (group.rank(), group.size());
        let size = [replicas as i64, mine.numel() as i64]; // fits: of memory
        let rows = mine.f_new_empty(size, like(mine))?;
        if group.device().is_cuda() {
            return Self::at_once(group, rows, mine);
        }
        let mut works = Vec::with_capacity(2 * replicas);
        for other in others(own, replicas) {
            works.push(group.recv(&mut row(&rows, other)?, other, tag)?);
        }
        for other in others(own, replicas) {
            works.push(group.send(mine, other, tag)?);
        }
        row(&rows, own)?.f_copy_(mine)?;
        Ok(Gathering { rows, works })
    }

    /// As [`Gathering::start`], into `rows`, as one collective.
    ///
    /// # Errors
    /// [`crate::Error::Bridge`], [`crate::Error::Torch`].
    pub fn at_once(group: &Group, rows: Tensor, mine: &Tensor) -> Result<Self> {
        let works = vec![group.all_gather_start(&mut rows.f_view([-1])?, mine)?];
        Ok(Gathering { rows, works })
    }

    /// All rows, one after the other.
    ///
    /// # Errors
    /// [`crate::Error::Bridge`], [`crate::Error::Torch`].
    pub fn finish(self) -> Result<Tensor> {
        wait_all(self.works)?;
        Ok(self.rows.f_view([-1])?)
    }
}

/// The other replicas, the next one first: so that not all send to the same one at once.
fn others(own: usize, count: usize) -> impl Iterator<Item = usize> {
    (1..count).map(move |step| (own + step) % count)
}

/// Waits for all, then returns the first error.
pub(crate) fn wait_all(works: Vec<Work>) -> Result<()> {
    let mut result = Ok(());
    for work in works {
        let ended = work.wait();
        if result.is_ok() {
            result = ended;
        }
    }
    Ok(result?)
}
