use std::ffi::CString;
use std::fmt;
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tch::{Device, Tensor};

use super::store::milliseconds;
use super::{Op, Reduce, Store, Work, missing_ranks};
use crate::ffi::{self, Call, RawGroup};
use crate::{Error, Result};

/// Where a rank listens for the others of its groups.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Listen {
    /// An address of this machine, or a name of one.
    Address(String),
    /// A network interface, such as `eth0`.
    Interface(String),
}

/// How a group is connected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupOptions {
    /// How long any operation may wait for another rank, and the connection of the group for all.
    pub timeout: Duration,
    /// Where this rank listens.
    pub listen: Listen,
}

impl GroupOptions {
    /// For ranks that are all on this machine.
    #[must_use]
    pub fn local(timeout: Duration) -> Self {
        GroupOptions { timeout, listen: Listen::Address("127.0.0.1".to_owned()) }
    }
}

/// Some connected ranks. A clone is the same group.
///
/// All its ranks must start its collectives in the same order; sends and receives may come
/// between them in any. Tensors are contiguous, and of the same shape on all ranks.
#[derive(Clone)]
pub struct Group(Arc<Inner>);

pub(crate) struct Inner {
    pub(super) raw: NonNull<RawGroup>,
    pub(super) name: String,
    pub(super) rank: usize,
    pub(super) members: Vec<usize>,
    pub(super) device: Device,
    /// The store, below a name that is the group's.
    pub(super) store: Store,
    /// The newest collective of which the others were notified that this rank waits for it.
    pub(super) announced: AtomicU64,
}

// SAFETY: the shim holds a lock while an operation is started, and c10d's groups may be waited for
// and destroyed on any thread.
unsafe impl Send for Inner {}
// SAFETY: as above.
unsafe impl Sync for Inner {}

impl Drop for Inner {
    fn drop(&mut self) {
        // SAFETY: the shim passed ownership of this reference; graphs that need the group have
        // their own.
        unsafe { ffi::fb_group_free(self.raw.as_ptr()) };
    }
}

/// Groups are known to the shim by numbers of this process.
static NEXT_ID: AtomicU64 = AtomicU64::new(1);

impl Group {
    /// Connects the ranks `members` of the world over TCP; this one is `members[rank]`. Only they
    /// make this call, all with the same `name`, which no other group of the store has.
    ///
    /// # Errors
    /// [`Error::Absent`] with the missing ranks, [`Error::Store`], or [`Error::Torch`] if
    /// they cannot be connected.
    pub fn gloo(
        store: &Store,
        name: &str,
        rank: usize,
        members: &[usize],
        options: &GroupOptions,
    ) -> Result<Self> {
        let operation = "connect group";
        let text = |text: &str| {
            CString::new(text)
                .map_err(|_| Error::Torch { operation, text: format!("{text:?} contains NUL") })
        };
        let (interface, address) = match &options.listen {
            Listen::Interface(name) => (Some(text(name)?), None),
            Listen::Address(address) => (None, Some(text(address)?)),
        };
        let pointer = |text: &Option<CString>| text.as_ref().map_or(ptr::null(), |t| t.as_ptr());
        Self::make(store, name, (rank, members), Device::Cpu, options, |prefix, id, out| {
            // SAFETY: the store and the texts are alive during the call, and `out` has room.
            unsafe {
                ffi::fb_group_gloo(
                    store.raw(),
                    prefix.as_ptr(),
                    rank as i32,          // fits: `make` looked
                    members.len() as i32, // fits: so too
                    milliseconds(options.timeout),
                    pointer(&interface),
                    pointer(&address),
                    id,
                    out,
                )
            }
        })
    }

    /// As [`Group::gloo`], of GPUs, one a rank: this rank's is `device`, the current one of this
    /// thread. Waiting for an operation then orders it before the later work of this thread on
    /// the GPU, and returns at once: [`settle`](super::settle) reports lost ranks. Tags have no
    /// effect: two ranks must receive in the order in which the other sends.
    ///
    /// # Errors
    /// As [`Group::gloo`]; without the feature `cuda` always [`Error::Torch`].
    pub fn nccl(
        store: &Store,
        name: &str,
        rank: usize,
        members: &[usize],
        device: Device,
        options: &GroupOptions,
    ) -> Result<Self> {
        Self::make(store, name, (rank, members), device, options, |prefix, id, out| {
            // SAFETY: the store and the text are alive during the call, and `out` has room.
            unsafe {
                ffi::fb_group_nccl(
                    store.raw(),
                    prefix.as_ptr(),
                    rank as i32,          // fits: `make` looked
                    members.len() as i32, // fits: so too
                    milliseconds(options.timeout),
                    id,
                    out,
                )
            }
        })
    }

    fn make(
        store: &Store,
        name: &str,
        (rank, members): (usize, &[usize]),
        device: Device,
        options: &GroupOptions,
        create: impl FnOnce(&CString, u64, *mut *mut RawGroup) -> i32,
    ) -> Result<Self> {
        let operation = "connect group";
        if rank >= members.len() || i32::try_from(members.len()).is_err() {
            let text = format!("{name}: expected a rank below {}, found {rank}", members.len());
            return Err(Error::Torch { operation, text });
        }
        let place = format!("group/{name}");
        if members.len() > 1 {
            store.meet(&place, members[rank], members, options.timeout)?;
        }
        let own = store.below(&place);
        let id = NEXT_ID.fetch_add(1, Ordering::Relaxed);
        let mut raw = ptr::null_mut();
        let code = create(&own.key("c10d")?, id, &raw mut raw);
        if code != 0 {
            let text = format!("{name}: {}", missing_ranks::one_line(&ffi::last_error()));
            return Err(Error::Torch { operation, text });
        }
        let raw = NonNull::new(raw).expect("the call succeeded");
        let inner = Arc::new(Inner {
            raw,
            name: name.to_owned(),
            rank,
            members: members.to_vec(),
            device,
            store: own,
            announced: AtomicU64::new(0),
        });
        missing_ranks::register(id, &inner);
        Ok(Group(inner))
    }

    /// The name in messages.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// This rank's place in the group.
    #[must_use]
    pub fn rank(&self) -> usize {
        self.0.rank
    }

    /// How many ranks the group has.
    #[must_use]
    pub fn size(&self) -> usize {
        self.0.members.len()
    }

    /// The ranks of the group, as ranks of the world.
    #[must_use]
    pub fn members(&self) -> &[usize] {
        &self.0.members
    }

    /// Where the tensors of its operations must be.
    #[must_use]
    pub fn device(&self) -> Device {
        self.0.device
    }

    pub(crate) fn raw(&self) -> *mut RawGroup {
        self.0.raw.as_ptr()
    }

    pub(crate) fn start(
        &self,
        op: Op,
        call: &Call,
        out: Option<&Tensor>,
        input: Option<&Tensor>,
    ) -> Result<Work> {
        Work::start(self, op.name(), call, out, input)
    }
}

/// The operations of all ranks. Errors are [`Error::Collective`] if a rank is missing or lost, and
/// [`Error::Torch`] if the tensors do not fit.
impl Group {
    /// Every element becomes the reduction of those of all ranks.
    pub fn all_reduce(&self, tensor: &mut Tensor, how: Reduce) -> Result<()> {
        self.all_reduce_start(tensor, how)?.wait()
    }

    /// As [`Group::all_reduce`], without waiting.
    pub fn all_reduce_start(&self, tensor: &mut Tensor, how: Reduce) -> Result<Work> {
        self.start(Op::AllReduce, &Op::AllReduce.reducing(how), Some(tensor), None)
    }

    /// The root's elements, on all ranks.
    pub fn broadcast(&self, tensor: &mut Tensor, root: usize) -> Result<()> {
        self.broadcast_start(tensor, root)?.wait()
    }

    /// As [`Group::broadcast`], without waiting.
    pub fn broadcast_start(&self, tensor: &mut Tensor, root: usize) -> Result<Work> {
        self.start(Op::Broadcast, &Op::Broadcast.with(root), Some(tensor), None)
    }

    /// The root's elements become the reduction of those of all ranks. The tensors of the others
    /// are unspecified afterwards.
    pub fn reduce(&self, tensor: &mut Tensor, root: usize, how: Reduce) -> Result<()> {
        let call = Call { reduce: how as i32, ..Op::Reduce.with(root) };
        self.start(Op::Reduce, &call, Some(tensor), None)?.wait()
    }

    /// `out` becomes the inputs of all ranks, in their order along the first dimension.
    pub fn all_gather(&self, out: &mut Tensor, input: &Tensor) -> Result<()> {
        self.all_gather_start(out, input)?.wait()
    }

    /// As [`Group::all_gather`], without waiting.
    pub fn all_gather_start(&self, out: &mut Tensor, input: &Tensor) -> Result<Work> {
        self.start(Op::AllGather, &Op::AllGather.call(), Some(out), Some(input))
    }

    /// `out` becomes this rank's part of the reduction of all inputs, along the first dimension.
    pub fn reduce_scatter(&self, out: &mut Tensor, input: &Tensor, how: Reduce) -> Result<()> {
        self.reduce_scatter_start(out, input, how)?.wait()
    }

    /// As [`Group::reduce_scatter`], without waiting.
    pub fn reduce_scatter_start(
        &self,
        out: &mut Tensor,
        input: &Tensor,
        how: Reduce,
    ) -> Result<Work> {
        self.start(Op::ReduceScatter, &Op::ReduceScatter.reducing(how), Some(out), Some(input))
    }

    /// Part i of `out` becomes this rank's part of the input of rank i, in equal parts along the
    /// first dimension.
    pub fn all_to_all(&self, out: &mut Tensor, input: &Tensor) -> Result<()> {
        self.all_to_all_start(out, input)?.wait()
    }

    /// As [`Group::all_to_all`], without waiting.
    pub fn all_to_all_start(&self, out: &mut Tensor, input: &Tensor) -> Result<Work> {
        self.start(Op::AllToAll, &Op::AllToAll.call(), Some(out), Some(input))
    }

    /// The root's `out` becomes the inputs of all ranks; the others pass `None`.
    #[expect(clippy::needless_pass_by_value, reason = "a mutable borrow cannot be lent twice")]
    pub fn gather(&self, out: Option<&mut Tensor>, input: &Tensor, root: usize) -> Result<()> {
        self.start(Op::Gather, &Op::Gather.with(root), out.as_deref(), Some(input))?.wait()
    }

    /// `out` becomes this rank's part of the root's `input`; the others pass `None`.
    pub fn scatter(&self, out: &mut Tensor, input: Option<&Tensor>, root: usize) -> Result<()> {
        self.start(Op::Scatter, &Op::Scatter.with(root), Some(out), input)?.wait()
    }

    /// Sends to the rank `to` of the group, which must call [`Group::recv`] with the same tag.
    /// Complete when the other side has received it.
    pub fn send(&self, tensor: &Tensor, to: usize, tag: u32) -> Result<Work> {
        let call = Call { tag: tag_of(tag)?, ..Op::Send.with(to) };
        self.start(Op::Send, &call, None, Some(tensor))
    }

    /// Receives from the rank `from` of the group. Messages with one tag arrive in their order.
    pub fn recv(&self, tensor: &mut Tensor, from: usize, tag: u32) -> Result<Work> {
        let call = Call { tag: tag_of(tag)?, ..Op::Recv.with(from) };
        self.start(Op::Recv, &call, Some(tensor), None)
    }

    /// Returns when all ranks have reached it.
    pub fn barrier(&self) -> Result<()> {
        self.start(Op::Barrier, &Op::Barrier.call(), None, None)?.wait()
    }

    /// As [`Group::barrier`], through the store: takes a few round trips, has a timeout of its
    /// own, and on every rank names all that are missing ([`Error::Absent`]). The group stays
    /// usable.
    pub fn monitored_barrier(&self, name: &str, timeout: Duration) -> Result<()> {
        let own = self.0.members[self.0.rank];
        self.0.store.meet(name, own, &self.0.members, timeout)
    }
}

fn tag_of(tag: u32) -> Result<i32> {
    i32::try_from(tag).map_err(|_| Error::Torch {
        operation: "send with this tag",
        text: format!("expected at most {}, found {tag}", i32::MAX),
    })
}

impl fmt::Debug for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Group")
            .field("name", &self.0.name)
            .field("rank", &self.0.rank)
            .field("members", &self.0.members)
            .finish_non_exhaustive()
    }
}
