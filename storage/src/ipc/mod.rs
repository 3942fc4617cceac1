//! Bytes handed from one process to others of the same machine and user, without copies between.
//!
//! The memory has no name: it is a memfd, passed over a Unix socket, and the kernel frees it with
//! the last process that has it, however that ends. `shared_memory` creates and maps it,
//! [`RingSender`] and [`RingReceiver`] hand messages over in it, each slot belonging to one side at
//! a time, and [`LocalListener`] and [`Peer`] are the sockets by which the processes find each
//! other: their names are abstract, so that a killed process leaves nothing that blocks the next
//! run.

mod arena;
mod ring;
#[expect(unsafe_code, reason = "memory that two processes map, and the futex in it")]
mod shared_memory;
#[expect(unsafe_code, reason = "system calls that std does not offer")]
mod socket;

pub use arena::Arena;
pub use ring::{Geometry, RingEnd, RingReceiver, RingSender};
pub use socket::{LocalListener, Peer, ready};
