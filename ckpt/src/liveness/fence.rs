//! Fencing: a lease that was lost stays lost, and its former owner changes nothing in the folder.
//!
//! A lease is void once its heartbeats time out, but its owner may only have been frozen: stopped,
//! suspended with its machine, or stuck in a call of its store. It must not write once it wakes. So
//! every lease has an epoch, a number that only grows: the object `.epoch-000000000007`, which is
//! created exclusively, and whose text is the [`ProcessIdentity`] of the owner. The highest epoch
//! holds the folder. Every commit and every deletion checks for a higher one.
//!
//! A process that claims the folder first reads the newest epoch, then lists leases, then creates
//! its own lease, and last the next epoch. So of several concurrent claims exactly one succeeds: a
//! process whose lease others did not see yet has not created its epoch yet either.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::liveness::heartbeat::{delete_if_exists, owner_of, write_text};
use crate::liveness::lease::LEASE;
use crate::{Error, Result};
use storage::{Key, ProcessIdentity, Storage};

/// Prefix of epochs.
pub(crate) const EPOCH: &str = ".epoch-";

/// The text of an epoch is one short line.
const EPOCH_BYTES_MAX: u64 = 4096;

/// The fence of one [`Checkpoints`](crate::Checkpoints).
pub(crate) struct Fence {
    store: Arc<dyn Storage>,
    folder: Key,
    /// Processes that may write here beside this one: a trainer and its agent.
    family: Mutex<Vec<ProcessIdentity>>,
    state: Mutex<FenceState>,
}

#[derive(Default)]
struct FenceState {
    /// The epoch of the lease that is held.
    number: Option<u64>,
    /// The process that took over a lease held here.
    successor: Option<String>,
    /// Whether an epoch of another process of the family was joined: the state that this process
    /// writes belongs to that one, and is void with its lease.
    has_joined: bool,
}

/// The newest epoch of a folder.
pub(crate) struct Epoch {
    pub(crate) number: u64,
    /// `None` if it is not known.
    pub(crate) owner: Option<ProcessIdentity>,
}

/// The owner of a lease or an epoch, for messages.
pub(crate) fn label_of(owner: Option<&ProcessIdentity>) -> String {
    owner.map_or_else(|| "an unknown process".to_owned(), ProcessIdentity::label)
}

impl fmt::Debug for Fence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Fence({})", self.store.display(&self.folder))
    }
}

impl Fence {
    pub(crate) fn new(store: Arc<dyn Storage>, folder: Key) -> Arc<Self> {
        let (family, state) = (Mutex::default(), Mutex::default());
        Arc::new(Fence { store, folder, family, state })
    }

    /// Permits another process to write beside this one.
    pub(crate) fn admit(&self, process: ProcessIdentity) {
        self.family.lock().unwrap_or_else(PoisonError::into_inner).push(process);
    }

    /// Whether `owner` is a process that may write beside this one.
    pub(crate) fn is_of_family(&self, owner: &ProcessIdentity) -> bool {
        let family = self.family.lock().unwrap_or_else(PoisonError::into_inner);
        family.iter().any(|one| one.is_same_process(owner))
    }

    /// The newest epoch of the folder.
    pub(crate) fn newest(&self) -> Result<Option<Epoch>> {
        // An epoch that does not exist when it is read was replaced by a higher one.
        for _ in 0..ATTEMPTS_MAX {
            let names = self.store.list_names(&self.folder)?;
            let Some(number) = newest_of(&names) else { return Ok(None) };
            match storage::read_small(&*self.store, &self.key(number)?, EPOCH_BYTES_MAX) {
                Ok(text) => {
                    let text = String::from_utf8(text).unwrap_or_default();
                    let owner = ProcessIdentity::parse(text.trim_end());
                    return Ok(Some(Epoch {
                        number,
                        owner: owner.or_else(|| owner_of_lease(&names)),
                    }));
                }
                // Another program wrote it; its number counts all the same.
                Err(storage::Error::Corrupt { .. }) => {
                    return Ok(Some(Epoch { number, owner: owner_of_lease(&names) }));
                }
                Err(storage::Error::NotFound { .. }) => {}
                Err(error) => return Err(error.into()),
            }
        }
        let object = format!("a stable epoch in {}", self.store.display(&self.folder));
        Err(storage::Error::NotFound { object }.into())
    }

    /// Binds this process to the epoch of its family, if that is the newest now.
    pub(crate) fn join_family(&self) -> Result<()> {
        let newest = self.newest()?;
        let owner = newest.and_then(|newest| newest.owner);
        if owner.is_some_and(|owner| self.is_of_family(&owner)) {
            self.state().has_joined = true;
        }
        Ok(())
    }

    /// Enters the epoch after `newest`, or that one if it is the family's. Returns whether it
    /// could: another process may have been first.
    pub(crate) fn enter(&self, newest: Option<&Epoch>, owner: &ProcessIdentity) -> Result<bool> {
        let is_family = |owner: &ProcessIdentity| self.is_of_family(owner);
        let number = match newest {
            Some(Epoch { number, owner: Some(owner) }) if is_family(owner) => {
                self.state().has_joined = true;
                *number
            }
            newest => {
                let is_own =
                    |owner: &ProcessIdentity| owner.is_same_process(&ProcessIdentity::new());
                if self.state().has_joined {
                    let Some(newest) = newest else { return Err(self.absent(1)?) };
                    if !newest.owner.as_ref().is_some_and(is_own) {
                        return Err(self.lose(label_of(newest.owner.as_ref())));
                    }
                }
                let number = newest.map_or(0, |newest| newest.number) + 1;
                match write_text(&*self.store, &self.key(number)?, &format!("{owner}\n")) {
                    Ok(()) => number,
                    Err(storage::Error::Exists { .. }) => return Ok(false),
                    Err(error) => return Err(error.into()),
                }
            }
        };
        self.state().number = Some(number);
        for name in self.store.list_names(&self.folder)? {
            if number_of(&name).is_some_and(|older| older < number) {
                delete_if_exists(&*self.store, &self.folder.join(&name)?)?;
            }
        }
        Ok(true)
    }

    /// The lease was released.
    pub(crate) fn leave(&self) {
        self.state().number = None;
    }

    /// Fails if a lease held here was lost, as far as this process knows.
    pub(crate) fn fail_if_lost(&self) -> Result<()> {
        match self.state().successor.clone() {
            Some(holder) => Err(self.error(holder)),
            None => Ok(()),
        }
    }

    /// Queries the store whether the lease is still held, before an operation that cannot be rolled
    /// back. Only a higher epoch of another process means that it is lost: a store that shows none
    /// at all, for example because its mount was lost, only fails the operation.
    pub(crate) fn check(&self) -> Result<()> {
        self.fail_if_lost()?;
        let Some(number) = self.state().number else { return Ok(()) };
        // A listing that races with a claim may miss the older of two epochs.
        for _ in 0..ATTEMPTS_MAX {
            let newest = newest_of(&self.store.list_names(&self.folder)?);
            if newest == Some(number) {
                return Ok(());
            }
            if newest.is_some_and(|newest| newest > number) {
                let owner = self.newest()?.and_then(|newest| newest.owner);
                if owner.as_ref().is_some_and(|owner| self.is_of_family(owner)) {
                    return Ok(());
                }
                return Err(self.lose(label_of(owner.as_ref())));
            }
        }
        Err(self.absent(number)?)
    }

    /// Ends the loss of a lease of a folder into which only copies are written.
    pub(crate) fn clear_loss(&self) {
        self.state().successor = None;
    }

    fn absent(&self, number: u64) -> Result<Error> {
        let object = self.store.display(&self.key(number)?);
        Ok(storage::Error::NotFound { object }.into())
    }

    fn lose(&self, holder: String) -> Error {
        log::error!("{}: lease was taken over by {holder}", self.store.display(&self.folder));
        self.state().successor.get_or_insert_with(|| holder.clone());
        self.error(holder)
    }

    fn error(&self, holder: String) -> Error {
        Error::LeaseLost { object: self.store.display(&self.folder), holder }
    }

    fn key(&self, number: u64) -> Result<Key> {
        Ok(self.folder.join(&format!("{EPOCH}{number:012}"))?)
    }

    fn state(&self) -> MutexGuard<'_, FenceState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// How often the newest epoch is read while other processes claim the folder.
const ATTEMPTS_MAX: usize = 16;

fn number_of(name: &str) -> Option<u64> {
    let digits = name.strip_prefix(EPOCH)?;
    let is_epoch = digits.len() == 12 && digits.bytes().all(|byte| byte.is_ascii_digit());
    if is_epoch { digits.parse().ok() } else { None }
}

/// The owner of a lease that another process holds.
fn owner_of_lease(names: &[String]) -> Option<ProcessIdentity> {
    let here = ProcessIdentity::new();
    let leases = names.iter().filter_map(|name| name.strip_prefix(LEASE));
    let mut owners = leases.filter_map(|name| owner_of(name).0);
    owners.find(|owner| !owner.is_same_process(&here))
}

fn newest_of(names: &[String]) -> Option<u64> {
    names.iter().filter_map(|name| number_of(name)).max()
}
