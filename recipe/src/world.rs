//! Which rank this process is.

use std::fmt;

use crate::Incompatible;
pub use crate::hosts::expand;

/// The error for variables that contradict each other.
type Result<T> = std::result::Result<T, Incompatible>;

/// Which process hosts the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StoreHost {
    /// Rank 0.
    FirstRank,
    /// The launcher of the ranks.
    Launcher,
}

/// The rank of this process and the world, from the environment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct World {
    /// The rank of this process.
    pub rank: usize,
    /// World size.
    pub size: usize,
    /// Local rank: the number of this rank on its node.
    pub local_rank: usize,
    /// Host of the store.
    pub host: String,
    /// Port of the store.
    pub port: u16,
    /// Which process hosts the store.
    pub keeper: StoreHost,
    /// Number of restarts of the ranks, which distinguishes their keys from older ones.
    pub restart: u64,
    /// The source of these values.
    pub source: &'static str,
}

/// More than any machine has.
const RANKS_MAX: usize = 1 << 20;

impl World {
    /// Reads the environment: first the variables of torchrun, which other launchers set too and
    /// which override those of Slurm, then those of an `srun`. `None` if this process is the only
    /// one.
    ///
    /// # Errors
    /// If the variables are incomplete or contradict each other.
    pub fn find(variable: impl Fn(&str) -> Option<String>) -> Result<Option<Self>> {
        let env = LaunchEnv { variable: &variable };
        if env.has("RANK") || env.has("WORLD_SIZE") {
            return env.by_torchrun().map(Some);
        }
        // In a batch script, outside of any srun, there is a job with tasks, but no step.
        if env.has("SLURM_STEP_NODELIST") && env.has("SLURM_PROCID") {
            let world = env.by_slurm()?;
            return Ok((world.size > 1).then_some(world));
        }
        Ok(None)
    }
}

struct LaunchEnv<'a> {
    variable: &'a dyn Fn(&str) -> Option<String>,
}

impl LaunchEnv<'_> {
    fn has(&self, name: &str) -> bool {
        (self.variable)(name).is_some()
    }

    fn by_torchrun(&self) -> Result<World> {
        self.checked(World {
            rank: self.number("RANK")?,
            size: self.number("WORLD_SIZE")?,
            local_rank: self.number_or("LOCAL_RANK", 0)?,
            host: self.text("MASTER_ADDR")?,
            port: self.number("MASTER_PORT")?,
            keeper: self.keeper("TORCHELASTIC_USE_AGENT_STORE")?,
            restart: self.number_or("TORCHELASTIC_RESTART_COUNT", 0)?,
            source: "RANK and WORLD_SIZE",
        })
    }

    fn by_slurm(&self) -> Result<World> {
        let tasks = ["SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"];
        let tasks = tasks.iter().find(|name| self.has(name)).copied().unwrap_or(tasks[1]);
        let host = if self.has("MASTER_ADDR") {
            self.text("MASTER_ADDR")?
        } else if self.number_or("SLURM_STEP_NUM_NODES", 0)? == 1_u64 {
            "127.0.0.1".to_owned()
        } else {
            // Where task 0 is, unless tasks were distributed in some arbitrary way.
            expand(&self.text("SLURM_STEP_NODELIST")?)?.swap_remove(0)
        };
        let port = if self.has("MASTER_PORT") {
            self.number("MASTER_PORT")?
        } else {
            // Below the ephemeral ports, and different for jobs and steps that may run
            // concurrently.
            let job = self.number::<u64>("SLURM_JOB_ID")? % 1000;
            let step = self.number_or::<u64>("SLURM_STEP_ID", 0)? % 16;
            15_000 + (16 * job + step) as u16 // fits: 15,999 at most is added
        };
        self.checked(World {
            rank: self.number("SLURM_PROCID")?,
            size: self.number(tasks)?,
            local_rank: self.number_or("SLURM_LOCALID", 0)?,
            host,
            port,
            keeper: StoreHost::FirstRank,
            restart: self.number_or("SLURM_RESTART_COUNT", 0)?,
            source: "srun",
        })
    }

    fn checked(&self, world: World) -> Result<World> {
        if world.size == 0 || world.size > RANKS_MAX || world.rank >= world.size {
            let World { rank, size, source, .. } = world;
            return Err(refused(format!(
                "expected a rank below the world size, of at most {RANKS_MAX}; found rank {rank} \
                 of {size}, from {source}"
            )));
        }
        let World { local_rank, port, size, source, .. } = world;
        if local_rank >= size {
            return Err(refused(format!(
                "expected a rank on this machine below the world size of {size}, found \
                 {local_rank}, from {source}"
            )));
        }
        if port == 0 {
            return Err(refused(format!(
                "expected a port from 1 to 65535, found 0, from {source}"
            )));
        }
        Ok(world)
    }

    /// torchrun writes `True` or `False`.
    fn keeper(&self, name: &str) -> Result<StoreHost> {
        let text = (self.variable)(name).unwrap_or_default();
        match text.to_ascii_lowercase().as_str() {
            "true" => Ok(StoreHost::Launcher),
            "false" | "" => Ok(StoreHost::FirstRank),
            _ => Err(refused(format!("expected True or False in {name}, found {text:?}"))),
        }
    }

    fn text(&self, name: &str) -> Result<String> {
        let value = (self.variable)(name).filter(|value| !value.is_empty());
        value.ok_or_else(|| refused(format!("{name} is not set")))
    }

    fn number<N: std::str::FromStr>(&self, name: &str) -> Result<N> {
        let text = self.text(name)?;
        text.trim()
            .parse()
            .map_err(|_| refused(format!("expected a number in {name}, found {text:?}")))
    }

    fn number_or<N: std::str::FromStr>(&self, name: &str, absent: N) -> Result<N> {
        if self.has(name) { self.number(name) } else { Ok(absent) }
    }
}

fn refused(detail: String) -> Incompatible {
    let hint = "start ranks with torchrun, srun or `trainer launch -n 8 -- train ...`; unset RANK \
                and WORLD_SIZE for a run of one process";
    Incompatible::new("cannot determine the rank of this process", detail, hint)
}

impl fmt::Display for World {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let World { rank, size, host, port, .. } = self;
        write!(f, "rank {rank} of {size}, store on {host}:{port}")
    }
}
