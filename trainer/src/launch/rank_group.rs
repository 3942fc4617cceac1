//! All ranks of a run, as one of them sees them. It may be the only one, and then nothing here
//! waits or talks.

use std::cell::RefCell;
use std::time::{Duration, Instant};

use recipe::Incompatible;
use tch::Device;

use crate::config::Config;
use crate::launch::comm::Comm;
use crate::launch::{Session, StartupStage, Watchdog, World};
use crate::mesh::DeviceMesh;
use crate::parallel::norm::all_sum;
use crate::{Error, Result};

/// How long a rank waits for another before that is told: a part of the time after which it is
/// lost, so that it is known who does what before all of them end.
const TELL_AFTER: u32 = 4;

/// The ranks that were started together.
#[derive(Debug)]
pub(crate) struct RankGroup {
    session: Option<Session>,
    /// How long each stage of the start took, the waiting for others among it.
    took: RefCell<Vec<(StartupStage, Duration)>>,
}

impl RankGroup {
    /// Finds the others, if there are any.
    ///
    /// # Errors
    /// [`Error::Bridge`] that names those that do not come, [`Error::Mismatch`].
    pub(crate) fn gather(world: Option<World>, config: &Config) -> Result<Self> {
        let (timeout, begun) = (config.parallel.timeout.0, Instant::now());
        let session = world.map(|world| Session::begin(world, timeout)).transpose()?;
        let took = session.iter().map(|_| (StartupStage::Store, begun.elapsed())).collect();
        Ok(RankGroup { session, took: RefCell::new(took) })
    }

    /// Whether this rank does what one has to do for all.
    pub(crate) fn is_first(&self) -> bool {
        self.session.as_ref().is_none_or(|session| session.world().rank == 0)
    }

    /// This rank's number among those of its machine.
    pub(crate) fn local_rank(&self) -> usize {
        self.session.as_ref().map_or(0, |session| session.world().local_rank)
    }

    /// Does this rank's part of a stage of the start, and waits for the others'.
    ///
    /// # Errors
    /// What `work` says; [`Error::Bridge`] with who is missing or has failed.
    pub(crate) fn stage<T>(
        &self,
        stage: StartupStage,
        work: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        let begun = Instant::now();
        let done = match &self.session {
            Some(session) => session.stage(stage, work),
            None => work(),
        };
        self.took.borrow_mut().push((stage, begun.elapsed()));
        done
    }

    /// Tells how long the start of this process took, and each of its stages.
    pub(crate) fn ready(&self) {
        let text = |(stage, took): &(StartupStage, Duration)| {
            format!("{} {:.2} s", stage.name(), took.as_secs_f64())
        };
        let stages: Vec<String> = self.took.borrow().iter().map(text).collect();
        let all = age_of_process()
            .map_or_else(|| "ready".to_owned(), |s| format!("ready after {s:.2} s"));
        log::info!("start: {all}: {}", stages.join(", "));
    }

    /// Connects the ranks as the config divides them, and watches over them from here on.
    ///
    /// # Errors
    /// [`Error::Mismatch`] if it does not divide so many; [`Error::Bridge`].
    pub(crate) fn connect(
        &self,
        config: &Config,
        device: Device,
    ) -> Result<(Comm, Option<Watchdog>)> {
        let Some(session) = &self.session else { return Ok((Comm::alone(device), None)) };
        let World { rank, size, local_rank, .. } = *session.world();
        let mut comm = self.stage(StartupStage::Groups, || {
            let mesh = mesh(config, size)?;
            Comm::connect(session.store(), mesh, rank, device, &session.options())
        })?;
        comm.local_rank = local_rank;
        let limit = config.parallel.timeout.0 / TELL_AFTER;
        let doing = comm.activity.clone();
        let watchdog = Watchdog::start(session.store(), (rank, size), limit, move || doing.get())?;
        Ok((comm, Some(watchdog)))
    }

    /// What the first rank says, on all ranks, and on that one what it has besides. Every `key` is
    /// used once.
    ///
    /// # Errors
    /// What `say` says, on all ranks.
    pub(crate) fn told<T>(
        &self,
        key: &str,
        say: impl FnOnce() -> Result<(T, String)>,
    ) -> Result<(Option<T>, String)> {
        let Some(session) = &self.session else {
            return say().map(|(value, text)| (Some(value), text));
        };
        let (store, key) = (session.store(), format!("said/{key}"));
        if self.is_first() {
            let said = say();
            let text = match &said {
                Ok((_, text)) => format!("+{text}"),
                Err(error) => format!("-{error}"),
            };
            store.set(&key, text.as_bytes())?;
            return said.map(|(value, text)| (Some(value), text));
        }
        let text = store.get(&key, session.patience(StartupStage::Checkpoint))?;
        let text = String::from_utf8_lossy(&text).into_owned();
        if let Some(text) = text.strip_prefix('+') {
            return Ok((None, text.to_owned()));
        }
        let text = format!("rank 0: {}", text.trim_start_matches('-'));
        Err(bridge::Error::Peer { operation: "continue".to_owned(), text }.into())
    }

    /// The ranks of this machine, this one among them, ascending.
    ///
    /// # Errors
    /// [`Error::Bridge`].
    pub(crate) fn neighbours(&self) -> Result<Vec<usize>> {
        let Some(session) = &self.session else { return Ok(vec![0]) };
        let (store, World { rank, size, .. }) = (session.store(), session.world());
        let own = machine();
        store.set(&format!("machine/{rank}"), own.as_bytes())?;
        // Each asks one rank, and not every other.
        let (_, all) = self.told("machines", || {
            let of = |rank| -> Result<String> {
                let name =
                    store.get(&format!("machine/{rank}"), session.patience(StartupStage::Data))?;
                Ok(String::from_utf8_lossy(&name).into_owned())
            };
            Ok(((), (0..*size).map(of).collect::<Result<Vec<_>>>()?.join("\n")))
        })?;
        let same = all.lines().enumerate().filter(|(_, name)| *name == own);
        Ok(same.map(|(rank, _)| rank).collect())
    }

    /// Parts from the others after the run has ended well here: returns when it has on all.
    ///
    /// # Errors
    /// [`Error::Bridge`] with those on which it has not.
    pub(crate) fn finish(self) -> Result<()> {
        self.session.map_or(Ok(()), Session::finish)
    }

    /// Parts from the others after a failure, and tells which rank was the first to fail.
    pub(crate) fn abort(self, error: &Error) {
        if let Some(first) = self.session.and_then(|session| session.abort(error)) {
            log::error!("the first rank to fail was {first}");
        }
    }
}

/// Seconds since this process was started: its libraries are loaded before anything of ours runs.
fn age_of_process() -> Option<f64> {
    let uptime = std::fs::read_to_string("/proc/uptime").ok()?;
    let stat = std::fs::read_to_string("/proc/self/stat").ok()?;
    // The 22nd field, in hundredths of a second; the second is a name, in parentheses.
    let begun: f64 = stat.rsplit(')').next()?.split_whitespace().nth(19)?.parse().ok()?;
    Some(uptime.split_whitespace().next()?.parse::<f64>().ok()? - begun / 100.0)
}

/// Tells one machine, or container with a network of its own, from another.
fn machine() -> String {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let network = std::fs::read_link("/proc/self/ns/net").unwrap_or_default();
    format!("{} {}", boot.trim(), network.display())
}

/// The mesh of the config over so many ranks.
fn mesh(config: &Config, ranks: usize) -> Result<DeviceMesh> {
    let division = config.divide(ranks as u64).map_err(|details| {
        Error::Mismatch(Incompatible {
            operation: format!("cannot divide the run among {ranks} ranks"),
            details,
            hint: "`trainer plan --ranks N` checks a layout",
        })
    })?;
    let [tp, pp, dp, virtual_stages] =
        [division.tp, division.pp, division.dp, config.parallel.virtual_stages]
            .map(|count| count as usize); // fits: as many as ranks, or 64 at most
    Ok(DeviceMesh { tp, pp, virtual_stages, dp })
}

/// Which of these hold on any rank.
///
/// # Errors
/// [`Error::Bridge`] if a rank is lost.
pub(crate) fn any<const N: usize>(comm: &Comm, flags: [bool; N]) -> Result<[bool; N]> {
    if comm.mesh.ranks() == 1 {
        return Ok(flags);
    }
    comm.activity.set(|| "agrees with the others".to_owned());
    let mut counts = flags.map(|flag| f64::from(u8::from(flag))).to_vec();
    for group in [&comm.tp, &comm.dp, &comm.pp] {
        all_sum(group.as_ref(), &mut counts)?;
    }
    Ok(std::array::from_fn(|i| counts[i] > 0.0))
}
