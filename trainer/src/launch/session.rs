//! The session of a run's ranks, from their rendezvous to their end.

use std::net::{IpAddr, SocketAddr, ToSocketAddrs as _, UdpSocket};
use std::time::{Duration, Instant};

use bridge::dist::{GroupOptions, Listen, Store};
use recipe::Incompatible;
use recipe::world::{StoreHost, World};

use crate::{Error, Result};

/// The stages of a start. All ranks pass each stage together, so that a late or lost rank is named
/// in the stage where that happens, and not in the first step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StartupStage {
    /// The ranks find one another.
    Store,
    /// The process groups are connected.
    Groups,
    /// The sample index is mapped or built.
    Index,
    /// The corpus is opened and its first batches are requested.
    Data,
    /// The weights are initialized, or read from a checkpoint.
    Checkpoint,
    /// All ranks run one collective.
    FirstCollective,
}

impl StartupStage {
    /// The name in messages.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            StartupStage::Store => "store",
            StartupStage::Groups => "groups",
            StartupStage::Index => "index",
            StartupStage::Data => "data",
            StartupStage::Checkpoint => "checkpoint",
            StartupStage::FirstCollective => "first collective",
        }
    }

    /// How long a rank may be behind the first of them, as a multiple of the time after which a
    /// silent peer is lost. Building an index or reading a checkpoint from a busy file system takes
    /// one rank far longer than another.
    fn patience(self) -> u32 {
        match self {
            StartupStage::Store | StartupStage::Groups | StartupStage::FirstCollective => 1,
            StartupStage::Data => 5,
            StartupStage::Index | StartupStage::Checkpoint => 15,
        }
    }
}

/// How long the host of the store waits for the others to leave. After a failure some never do, and
/// the rest need the store for about a second.
const LEAVE_WAIT: Duration = Duration::from_secs(5);

/// Logs the address of the store, which no password protects.
fn log_listener(address: SocketAddr, host: &str) {
    if address.ip().is_unspecified() {
        log::warn!(
            "launch: {host} is not an address of this machine; the store listens on all its \
             addresses, {address} (hint: set MASTER_ADDR to one of them, or close the port)"
        );
    } else {
        log::info!("launch: the store listens on {address}");
    }
}

/// One rank's part in a run of several.
#[derive(Debug)]
pub struct Session {
    world: World,
    store: Store,
    listen: Listen,
    timeout: Duration,
    members: Vec<usize>,
}

impl Session {
    /// Finds the other ranks. A rank that is silent for `timeout` is lost, here and later.
    ///
    /// # Errors
    /// [`Error::Bridge`] that names the missing ranks; [`Error::Mismatch`] if the settings of the
    /// ranks contradict each other.
    pub fn begin(world: World, timeout: Duration) -> Result<Self> {
        let started = Instant::now();
        let World { rank, ref host, port, .. } = world;
        let hosts_store = world.keeper == StoreHost::FirstRank && rank == 0;
        let store = if hosts_store {
            Store::serve(host, port, timeout)?
        } else {
            Store::connect(host, port, timeout)?
        };
        if let Some(address) = store.listens_on() {
            log_listener(address, host);
        }
        let store = store.below(&format!("feedline/{}", world.restart));
        let listen = Listen::Address(String::new());
        let members = (0..world.size).collect();
        let mut session = Session { world, store, listen, timeout, members };
        if let Err(error) = session.rendezvous() {
            // The others may still query the store for the missing ranks.
            session.leave();
            return Err(error);
        }
        session.listen = session.listen()?;
        log::info!(
            "launch: {} ranks connected after {:.1} s (from {})",
            session.world.size,
            started.elapsed().as_secs_f64(),
            session.world.source
        );
        Ok(session)
    }

    fn rendezvous(&self) -> Result<()> {
        if let Err(error) = self.agree() {
            self.report_failure("stage/store", &error);
            return Err(error);
        }
        self.stage(StartupStage::Store, || Ok(()))
    }

    /// Reports to the others why this rank does not reach a barrier.
    fn report_failure(&self, barrier: &str, error: &Error) {
        // Without a store the report is lost; the caller returns the error in any case.
        _ = self.store.fail(barrier, self.world.rank, &error.to_string());
    }

    /// Checks that each rank exists once, and that all have the same world size.
    fn agree(&self) -> Result<()> {
        let World { rank, size, .. } = self.world;
        let refuse = |detail: String| {
            Error::Mismatch(Incompatible::new(
                "cannot find the other ranks",
                detail,
                "check how the ranks are started, and that no other run uses the same \
                 MASTER_ADDR and MASTER_PORT",
            ))
        };
        if rank == 0 {
            self.store.set("size", size.to_string().as_bytes())?;
        }
        let first = match self.store.get("size", self.timeout) {
            Ok(size) => size,
            Err(bridge::Error::Store { .. }) => {
                let (operation, after) = ("pass barrier stage/store".to_owned(), self.timeout);
                return Err(bridge::Error::Absent { operation, missing: vec![0], after }.into());
            }
            Err(error) => return Err(error.into()),
        };
        let first = String::from_utf8_lossy(&first).into_owned();
        if first != size.to_string() {
            return Err(refuse(format!("expected {first} ranks, found {size} on rank {rank}")));
        }
        if self.store.add(&format!("claims/{rank}"), 1)? > 1 {
            return Err(refuse(format!("two processes have rank {rank}")));
        }
        let own = self.address(&self.world.host).unwrap_or(IpAddr::from([127, 0, 0, 1]));
        Ok(self.store.set(&format!("address/{rank}"), own.to_string().as_bytes())?)
    }

    /// The address by which this machine reaches `host`. Nothing is sent.
    fn address(&self, host: &str) -> Option<IpAddr> {
        let to = (host, self.world.port).to_socket_addrs().ok()?.next()?;
        let any = if to.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
        let socket = UdpSocket::bind(any).ok()?;
        socket.connect(to).ok()?;
        socket.local_addr().ok().map(|local| local.ip())
    }

    /// The address at which the others reach this rank: that of its route to the store. Ranks on
    /// the machine of the store get a loopback address there, which the others cannot reach, and
    /// take their route to one of the others.
    fn listen(&self) -> Result<Listen> {
        if let Ok(interface) = std::env::var("GLOO_SOCKET_IFNAME") {
            return Ok(Listen::Interface(interface));
        }
        let of = |rank: usize| -> Result<Option<IpAddr>> {
            let text = self.store.get(&format!("address/{rank}"), self.timeout)?;
            Ok(String::from_utf8_lossy(&text).parse().ok())
        };
        let loopback = IpAddr::from([127, 0, 0, 1]);
        let own = of(self.world.rank)?.unwrap_or(loopback);
        if !own.is_loopback() {
            return Ok(Listen::Address(own.to_string()));
        }
        for rank in &self.members {
            if let Some(there) = of(*rank)?.filter(|there| !there.is_loopback()) {
                let own = self.address(&there.to_string()).unwrap_or(loopback);
                return Ok(Listen::Address(own.to_string()));
            }
        }
        Ok(Listen::Address(loopback.to_string()))
    }

    /// Which rank this is, and how the ranks were started.
    #[must_use]
    pub fn world(&self) -> &World {
        &self.world
    }

    /// The store of the ranks, for the rendezvous of their groups.
    #[must_use]
    pub fn store(&self) -> &Store {
        &self.store
    }

    /// How groups are connected.
    #[must_use]
    pub fn options(&self) -> GroupOptions {
        GroupOptions { timeout: self.timeout, listen: self.listen.clone() }
    }

    /// Does this rank's part of a stage, and waits until all have done theirs. Every stage runs
    /// once.
    ///
    /// # Errors
    /// The error of `work`, which the others then receive, or [`Error::Bridge`] with the missing
    /// ranks, or with the rank that failed and its error.
    pub fn stage<T>(&self, stage: StartupStage, work: impl FnOnce() -> Result<T>) -> Result<T> {
        let barrier = format!("stage/{}", stage.name());
        let done = match work() {
            Ok(done) => done,
            Err(error) => {
                self.report_failure(&barrier, &error);
                return Err(error);
            }
        };
        self.store.meet(&barrier, self.world.rank, &self.members, self.patience(stage))?;
        Ok(done)
    }

    /// How long a rank may be behind the first of them in a stage.
    #[must_use]
    pub fn patience(&self, stage: StartupStage) -> Duration {
        self.timeout * stage.patience()
    }

    /// Ends the session after a run that succeeded: returns when all ranks have reached this point.
    ///
    /// # Errors
    /// [`Error::Bridge`] with the ranks that have not.
    pub fn finish(self) -> Result<()> {
        self.store.meet("end", self.world.rank, &self.members, self.timeout)?;
        self.leave();
        Ok(())
    }

    /// Ends the session after a failure: stores the reason for the others, and returns the first
    /// reason that any rank stored, if that is another's.
    pub fn abort(self, error: &Error) -> Option<String> {
        let reason = format!("rank {}: {error}", self.world.rank);
        let first = self.store.add("failures", 1).ok()?;
        if first == 1 {
            self.store.set("why", reason.as_bytes()).ok()?;
        }
        // A rank that lost a peer gets the peer's reason, if the peer could still store it.
        let reason = (first > 1).then(|| self.store.get("why", LEAVE_WAIT).ok()).flatten();
        self.leave();
        reason.map(|reason| String::from_utf8_lossy(&reason).into_owned())
    }

    /// The host of the store keeps it until the others no longer need it, for a limited time.
    fn leave(self) {
        let hosts_store = self.world.keeper == StoreHost::FirstRank && self.world.rank == 0;
        // If the store is unreachable, its host has ended: then there is nothing to wait for.
        if hosts_store {
            let alone = self.world.size == 1;
            _ = alone || self.store.wait(&["left/all"], LEAVE_WAIT).unwrap_or(false);
        } else if self.store.add("left/count", 1).unwrap_or(0) + 1 == self.first_size() {
            _ = self.store.set("left/all", b"");
        }
    }

    /// The world size of the first rank: a rank with a smaller one must not end the host's wait
    /// while others still use the store.
    fn first_size(&self) -> i64 {
        let size = self.store.look("size").ok().flatten().unwrap_or_default();
        String::from_utf8_lossy(&size).parse().unwrap_or(self.world.size as i64) // at most 2^20
    }
}
