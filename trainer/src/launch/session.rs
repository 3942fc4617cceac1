//! The ranks of a run from the moment they find one another until they part.

use std::net::{IpAddr, SocketAddr, ToSocketAddrs as _, UdpSocket};
use std::time::{Duration, Instant};

use bridge::dist::{GroupOptions, Listen, Store};
use recipe::Incompatible;
use recipe::world::{StoreHost, World};

use crate::{Error, Result};

/// How a run starts. All ranks pass each stage together, so that one that is late or lost is named
/// where that happens, and not in the first step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StartupStage {
    /// The ranks find one another.
    Store,
    /// They are connected to those that they work with.
    Groups,
    /// The order of the samples is mapped or built.
    Index,
    /// The corpus is opened and its first batches are asked for.
    Data,
    /// Weights are drawn, or read from a checkpoint.
    Checkpoint,
    /// All of them do one thing together.
    FirstCollective,
}

impl StartupStage {
    /// The name, as it stands in messages.
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

/// How long who keeps the store waits for others to leave it. After a failure some never will, and
/// the rest have asked what they had to ask within a second or so.
const LEAVE_WAIT: Duration = Duration::from_secs(5);

/// Logs where the store is reached, which no password protects.
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
    /// Finds the other ranks. Whoever is silent for `timeout` is lost, here and later.
    ///
    /// # Errors
    /// [`Error::Bridge`] that names the ranks that do not come; [`Error::Mismatch`] if they were
    /// told different things.
    pub fn begin(world: World, timeout: Duration) -> Result<Self> {
        let begun = Instant::now();
        let World { rank, ref host, port, .. } = world;
        let keeps = world.keeper == StoreHost::FirstRank && rank == 0;
        let store = if keeps {
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
        if let Err(error) = session.meet() {
            // The others may still be asking the store who is missing.
            session.leave();
            return Err(error);
        }
        session.listen = session.listen()?;
        log::info!(
            "launch: {} ranks connected after {:.1} s (from {})",
            session.world.size,
            begun.elapsed().as_secs_f64(),
            session.world.told_by
        );
        Ok(session)
    }

    fn meet(&self) -> Result<()> {
        if let Err(error) = self.agree() {
            self.tell("stage/store", &error);
            return Err(error);
        }
        self.stage(StartupStage::Store, || Ok(()))
    }

    /// Tells the others why this rank does not come to a place.
    fn tell(&self, place: &str, error: &Error) {
        // Without a store nobody can hear it; what is to be said here is still the reason.
        _ = self.store.fail(place, self.world.rank, &error.to_string());
    }

    /// Each rank is there once, and all were told of the same number.
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
        let told = match self.store.get("size", self.timeout) {
            Ok(told) => told,
            Err(bridge::Error::Store { .. }) => {
                let (operation, after) = ("pass barrier stage/store".to_owned(), self.timeout);
                return Err(bridge::Error::Absent { operation, missing: vec![0], after }.into());
            }
            Err(error) => return Err(error.into()),
        };
        let first = String::from_utf8_lossy(&told).into_owned();
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

    /// Where this rank can be reached by the others. The way to the store says it, but for ranks
    /// that have the store on their own machine: they see it in the loopback, which others do not
    /// reach, and take the way to one of those.
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

    /// What this rank was told.
    #[must_use]
    pub fn world(&self) -> &World {
        &self.world
    }

    /// Where the ranks meet, for their groups.
    #[must_use]
    pub fn store(&self) -> &Store {
        &self.store
    }

    /// How groups are connected.
    #[must_use]
    pub fn options(&self) -> GroupOptions {
        GroupOptions { timeout: self.timeout, listen: self.listen.clone() }
    }

    /// Does this rank's part of a stage, and waits until all have done theirs. Every stage comes
    /// once.
    ///
    /// # Errors
    /// What `work` says, which the others then hear of, or [`Error::Bridge`] with the ranks that
    /// are missing, or the one that failed and why.
    pub fn stage<T>(&self, stage: StartupStage, work: impl FnOnce() -> Result<T>) -> Result<T> {
        let place = format!("stage/{}", stage.name());
        let done = match work() {
            Ok(done) => done,
            Err(error) => {
                self.tell(&place, &error);
                return Err(error);
            }
        };
        self.store.meet(&place, self.world.rank, &self.members, self.patience(stage))?;
        Ok(done)
    }

    /// How long a rank may be behind the first of them in a stage.
    #[must_use]
    pub fn patience(&self, stage: StartupStage) -> Duration {
        self.timeout * stage.patience()
    }

    /// Parts from the others after a run that ended well: returns when all have come here.
    ///
    /// # Errors
    /// [`Error::Bridge`] with those that have not.
    pub fn finish(self) -> Result<()> {
        self.store.meet("end", self.world.rank, &self.members, self.timeout)?;
        self.leave();
        Ok(())
    }

    /// Parts from the others after a failure: leaves them the reason, and gives the first reason
    /// that any rank left, if that is another's.
    pub fn abort(self, error: &Error) -> Option<String> {
        let why = format!("rank {}: {error}", self.world.rank);
        let first = self.store.add("failures", 1).ok()?;
        if first == 1 {
            self.store.set("why", why.as_bytes()).ok()?;
        }
        // A rank that lost a peer can hear why, if that peer could still say it.
        let why = (first > 1).then(|| self.store.get("why", LEAVE_WAIT).ok()).flatten();
        self.leave();
        why.map(|why| String::from_utf8_lossy(&why).into_owned())
    }

    /// Who keeps the store keeps it until the others need it no more, or for a while.
    fn leave(self) {
        let keeps = self.world.keeper == StoreHost::FirstRank && self.world.rank == 0;
        // That the store has gone means that its keeper has: then there is nothing to wait for.
        if keeps {
            let alone = self.world.size == 1;
            _ = alone || self.store.wait(&["left/all"], LEAVE_WAIT).unwrap_or(false);
        } else if self.store.add("left/count", 1).unwrap_or(0) + 1 == self.told_size() {
            _ = self.store.set("left/all", b"");
        }
    }

    /// How many ranks the first one was told of: one that was told of fewer must not send the
    /// keeper away while others still ask.
    fn told_size(&self) -> i64 {
        let told = self.store.look("size").ok().flatten().unwrap_or_default();
        String::from_utf8_lossy(&told).parse().unwrap_or(self.world.size as i64) // at most 2^20
    }
}
