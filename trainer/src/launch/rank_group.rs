//! All ranks of a run, from the view of one of them. If it is the only one, nothing here waits or
//! communicates.

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

/// A wait is reported after the timeout of a lost rank divided by this, so that the activity of
/// every rank is logged before all of them end.
const REPORT_DIVISOR: u32 = 4;

/// The ranks that were started together.
#[derive(Debug)]
pub(crate) struct RankGroup {
    session: Option<Session>,
    /// How long each startup stage took, including the wait for other ranks.
    took: RefCell<Vec<(StartupStage, Duration)>>,
}

impl RankGroup {
    /// Connects to the other ranks, if there are any.
    ///
    /// # Errors
    /// [`Error::Bridge`] that names the missing ranks, [`Error::Mismatch`].
    pub(crate) fn gather(world: Option<World>, config: &Config) -> Result<Self> {
        let (timeout, started) = (config.parallel.timeout.0, Instant::now());
        let session = world.map(|world| Session::begin(world, timeout)).transpose()?;
        let took = session.iter().map(|_| (StartupStage::Store, started.elapsed())).collect();
        Ok(RankGroup { session, took: RefCell::new(took) })
    }

    /// Whether this is the first rank, which does what one rank has to do for all.
    pub(crate) fn is_first(&self) -> bool {
        self.session.as_ref().is_none_or(|session| session.world().rank == 0)
    }

    /// This rank's number among those of its machine.
    pub(crate) fn local_rank(&self) -> usize {
        self.session.as_ref().map_or(0, |session| session.world().local_rank)
    }

    /// Does this rank's part of a startup stage, and waits for the others.
    ///
    /// # Errors
    /// The error of `work`; [`Error::Bridge`] with the ranks that are missing or failed.
    pub(crate) fn stage<T>(
        &self,
        stage: StartupStage,
        work: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        let started = Instant::now();
        let done = match &self.session {
            Some(session) => session.stage(stage, work),
            None => work(),
        };
        self.took.borrow_mut().push((stage, started.elapsed()));
        done
    }

    /// Logs how long the start of this process took, and each of its stages.
    pub(crate) fn ready(&self) {
        let text = |(stage, took): &(StartupStage, Duration)| {
            format!("{} {:.2} s", stage.name(), took.as_secs_f64())
        };
        let stages: Vec<String> = self.took.borrow().iter().map(text).collect();
        let all = age_of_process()
            .map_or_else(|| "ready".to_owned(), |s| format!("ready after {s:.2} s"));
        log::info!("start: {all}: {}", stages.join(", "));
    }

    /// Connects the ranks as the config divides them, and starts the watchdog.
    ///
    /// # Errors
    /// [`Error::Mismatch`] if it does not divide this number of ranks; [`Error::Bridge`].
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
        let limit = config.parallel.timeout.0 / REPORT_DIVISOR;
        let doing = comm.activity.clone();
        let watchdog = Watchdog::start(session.store(), (rank, size), limit, move || doing.get())?;
        Ok((comm, Some(watchdog)))
    }

    /// Returns on all ranks the text that `produce` returns on the first, and on the first also its
    /// value. Every `key` is used once.
    ///
    /// # Errors
    /// The error of `produce`, on all ranks.
    pub(crate) fn broadcast<T>(
        &self,
        key: &str,
        produce: impl FnOnce() -> Result<(T, String)>,
    ) -> Result<(Option<T>, String)> {
        let Some(session) = &self.session else {
            return produce().map(|(value, text)| (Some(value), text));
        };
        let (store, key) = (session.store(), format!("said/{key}"));
        if self.is_first() {
            let produced = produce();
            let text = match &produced {
                Ok((_, text)) => format!("+{text}"),
                Err(error) => format!("-{error}"),
            };
            store.set(&key, text.as_bytes())?;
            return produced.map(|(value, text)| (Some(value), text));
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
        // Each rank reads one value, not one for every rank.
        let (_, all) = self.broadcast("machines", || {
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

    /// Ends the session after the run succeeded here: returns when it has succeeded on all ranks.
    ///
    /// # Errors
    /// [`Error::Bridge`] with the ranks on which it has not.
    pub(crate) fn finish(self) -> Result<()> {
        self.session.map_or(Ok(()), Session::finish)
    }

    /// Ends the session after a failure, and logs which rank was the first to fail.
    pub(crate) fn abort(self, error: &Error) {
        if let Some(first) = self.session.and_then(|session| session.abort(error)) {
            log::error!("the first rank to fail was {first}");
        }
    }
}

/// Seconds since this process was started: its libraries are loaded before `main` runs.
fn age_of_process() -> Option<f64> {
    let uptime = std::fs::read_to_string("/proc/uptime").ok()?;
    let stat = std::fs::read_to_string("/proc/self/stat").ok()?;
    // The 22nd field, in hundredths of a second; the second is a name, in parentheses.
    let started: f64 = stat.rsplit(')').next()?.split_whitespace().nth(19)?.parse().ok()?;
    Some(uptime.split_whitespace().next()?.parse::<f64>().ok()? - started / 100.0)
}

/// Identifies a machine, or a container with a network namespace of its own.
fn machine() -> String {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let network = std::fs::read_link("/proc/self/ns/net").unwrap_or_default();
    format!("{} {}", boot.trim(), network.display())
}

/// The mesh of the config over this number of ranks.
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

/// Which of these flags are set on any rank.
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
