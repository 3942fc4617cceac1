//! The training loop: reads batches, updates the weights, logs, evaluates and saves checkpoints.
//!
//! The state of a run after a step depends only on its config and the step. So the loop makes all
//! log lines of a step durable before it starts the checkpoint of that step, and a resumed run
//! truncates its log to its checkpoint. It recomputes what a kill destroyed, bit for bit.

use std::io::Write;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::available_parallelism;
use std::time::{Duration, Instant};

use ckpt::Lease;
use feed::{AnyBatch, Batches, Data, NodePeers};
use logbook::{EvalPerf, EvalRecord, LossSpikeDetector, Meter, RunLog, StepRecord, Trace};
use recipe::Incompatible;
use recipe::lr::LearningRate;
use recipe::text::thousands;
use serde_json::Value;
use storage::Key;
use tch::Device;

use crate::checkpoint::manager::CheckpointManager;
use crate::checkpoint::resume::{CheckpointFolder, Start};
use crate::checkpoint::state::{JointSaveParts, TrainingProgress};
use crate::config::{Config, OnSpike, Timers};
use crate::device;
use crate::dtype::peak_flop_per_s;
use crate::launch::comm::Comm;
use crate::launch::local::WAITING;
use crate::launch::rank_group::{RankGroup, any};
use crate::launch::{StartupStage, Watchdog, World};
use crate::plan::{PlanInputs, RunPlan, process_memory};
use crate::step::Trainer;
use crate::{Error, Result};

/// How a run ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// All its steps are done and saved.
    Done,
    /// The same, but an earlier save, or a copy to the second store, failed.
    Gaps,
    /// It was asked to stop, or its wall time was up. It saved what the remaining time allowed, and
    /// resumes from there when started again.
    Saved,
}

/// What the caller of a run provides.
pub struct Host<'a> {
    /// Set to save and end the run after the current step.
    pub stop: &'a AtomicBool,
    /// Takes the progress lines: standard error, for a program.
    pub terminal: Box<dyn Write + Send>,
    /// Starts a process that calls [`ckpt::serve_agent`], for a run with `checkpoint.agent`.
    pub agent: Option<Command>,
    /// Which of several ranks this is. `None`: the only one.
    pub world: Option<World>,
}

impl std::fmt::Debug for Host<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Host").field("stop", self.stop).finish_non_exhaustive()
    }
}

/// Trains to the end of the budget, from the newest checkpoint if there is one. Everything it
/// writes is below `run.dir`, except the checkpoints and the index cache if the config puts them
/// elsewhere. Sets the number of libtorch's threads for the whole process. Each of several ranks
/// calls it; all of them end when one does.
///
/// # Errors
/// [`Error::Mismatch`] if the config, the data and the checkpoint do not go together,
/// [`Error::NotFinite`], [`Error::Bridge`] if another rank is lost, or the error of a read, a
/// computation or a write. The newest checkpoint stays intact.
pub fn train(config: &Config, mut host: Host<'_>) -> Result<Outcome> {
    let started = Instant::now();
    let config = feed::with_special(config.resolved())?;
    let group = RankGroup::gather(host.world.take(), &config)?;
    let done = TrainingLoop::prepare(&config, host, &group).and_then(|mut run| {
        let outcome = run.run_steps(started);
        if matches!(&outcome, Err(error) if error.is_peer_lost()) {
            run.saver.give_up();
        }
        // Another process owns the folder now.
        let is_fenced = matches!(&outcome, Err(error) if error.is_lease_lost());
        let trace = run.trace.as_ref().filter(|_| !is_fenced);
        let traced = trace.map_or(Ok(()), Trace::write);
        // An error of the run takes precedence over one of its trace.
        let outcome = outcome?;
        traced?;
        Ok((outcome, run))
    });
    match done {
        Ok((outcome, run)) => {
            group.finish()?;
            log::info!("{}", run.summary(outcome));
            Ok(outcome)
        }
        Err(error) => {
            group.abort(&error);
            Err(error)
        }
    }
}

struct TrainingLoop<'a> {
    config: Config,
    data: Data,
    fingerprint: Value,
    trainer: Trainer,
    progress: TrainingProgress,
    /// The step of the last save that was started, or the step that the run started from.
    saved_step: u64,
    saved_at: Instant,
    saver: CheckpointManager,
    /// Of the first rank.
    log: Option<RunLog>,
    meter: Meter,
    spikes: LossSpikeDetector,
    trace: Option<Trace>,
    stop: &'a AtomicBool,
    /// Keeps other runs out of the folder of checkpoints: the first rank's.
    lease: Option<Lease>,
    _watchdog: Option<Watchdog>,
}

impl<'a> TrainingLoop<'a> {
    /// Prepares the run up to its first step. `config` is resolved.
    fn prepare(config: &Config, host: Host<'a>, group: &RankGroup) -> Result<Self> {
        tch::set_num_threads(config.run.threads as i32); // fits: at most 1024
        let device = device::choose(config, group.local_rank())?;
        if config.precision.deterministic.unwrap_or(device == Device::Cpu) {
            bridge::runtime::set_deterministic()?;
        }
        log::info!("device: {}", format_args!("{device:?}").to_string().to_lowercase());
        let (comm, watchdog) = group.connect(config, device)?;
        let ranks = comm.mesh.ranks() as u64;
        let open = || {
            let corpus = feed::open_corpus(config)?;
            let known = PlanInputs {
                corpus_tokens: Some(corpus.token_count()),
                world: Some(ranks),
                process_memory_bytes: process_memory().filter(|_| device == Device::Cpu),
                ..PlanInputs::default()
            };
            check_plan(config, &known, group.is_first())?;
            Ok(Data::new(corpus, config)?)
        };
        // The first rank builds the index, and the others find it.
        let first = group.stage(StartupStage::Index, || group.is_first().then(open).transpose())?;
        let mut data = group.stage(StartupStage::Data, || first.map_or_else(open, Ok))?;
        if group.is_first() {
            data.start_order_check();
        }
        for doubt in data.doubts().iter().filter(|_| group.is_first()) {
            log::warn!("data: {doubt}");
        }
        let ranks = group.neighbours()?;
        warn_of_spinning(config.run.threads, ranks.len() as u64);
        if ranks.len() > 1 {
            let (_, job) = group.broadcast("job", || Ok(((), token())))?;
            data.share(NodePeers { job, ranks });
        }
        let restore = || Self::restore(config, host, group, comm, data);
        let mut run = group.stage(StartupStage::Checkpoint, restore)?;
        run._watchdog = watchdog;
        group.stage(StartupStage::FirstCollective, || any(run.trainer.comm(), [false]))?;
        group.ready();
        Ok(run)
    }

    /// Loads or initializes the state, and prepares its saves.
    fn restore(
        config: &Config,
        host: Host<'a>,
        group: &RankGroup,
        comm: Comm,
        data: Data,
    ) -> Result<Self> {
        let fingerprint = data.fingerprint()?;
        let mut trainer = Trainer::unloaded(config, comm)?;
        let place = CheckpointFolder::open(config)?;
        let parts = JointSaveParts::new(&place.checkpoints, &trainer)?;
        // The others wait here until the first has removed the orphans of a killed run.
        let (lease, token) = group.broadcast("lease", || Ok((place.claim(config)?, token())))?;
        let start = Start { config, parts: &parts, data: &fingerprint, lease: lease.as_ref() };
        let progress = place.start(&start, group, &mut trainer)?;
        let log = if group.is_first() {
            // Reading a checkpoint takes minutes: confirm the lease before the logs are truncated.
            lease.as_ref().map_or(Ok(()), Lease::confirm)?;
            write_config(config)?;
            Some(RunLog::open(config, progress.step, host.terminal)?)
        } else {
            None
        };
        let comm = trainer.comm();
        let trace = (config.log.timers == Timers::Trace)
            .then(|| Trace::new(&config.log_dir().join("trace"), comm.rank));
        if let Some(trace) = &trace {
            comm.activity.record(trace.clone());
        }
        // The first rank measures for all, which have the same kind of device.
        let peak = if group.is_first() { peak_flop_per_s(config, comm.device)? } else { 1.0 };
        let meter = Meter::new(config, comm.mesh.ranks() as u64, peak);
        let steps = place.checkpoints;
        let local = data.local_cache();
        let saver =
            CheckpointManager::new(config, steps, parts, progress, token, host.agent, local)?;
        Ok(TrainingLoop {
            data,
            fingerprint,
            trainer,
            progress,
            saved_step: progress.step,
            saved_at: Instant::now(),
            saver,
            log,
            meter,
            spikes: LossSpikeDetector::new(&config.run.spike),
            trace,
            stop: host.stop,
            config: config.clone(),
            lease,
            _watchdog: None,
        })
    }

    fn run_steps(&mut self, started: Instant) -> Result<Outcome> {
        let total = self.config.steps_total();
        let rate = LearningRate::new(&self.config);
        let seat = self.trainer.comm().seat();
        let mut batches = self.data.train_batches(&self.config, seat, self.progress.samples)?;
        let mut micro = Vec::new();
        while self.progress.step < total {
            self.check_lease()?;
            // The earliest arrival of a signal that is noticed after the step.
            let step_started = Instant::now();
            let samples_before = self.progress.samples;
            let skipped = self.trainer.scaler().map_or(0, |scaler| scaler.skipped_samples);
            self.step(rate.at(samples_before - skipped), &mut batches, &mut micro)?;
            let step = self.progress.step;
            let eval_every = self.config.eval.every;
            if eval_every > 0 && (step.is_multiple_of(eval_every) || step == total) {
                self.evaluate()?;
            }
            if step == total {
                break;
            }
            // Signals and clocks differ between ranks, so the ranks combine their flags.
            let timed_out = self.config.run.max_wall.is_some_and(|max| started.elapsed() >= max.0);
            let here = [self.stop.load(Ordering::Relaxed), timed_out, self.save_is_due()];
            let [stop, timed_out, save] = any(self.trainer.comm(), here)?;
            if stop {
                return self.stop_until(Some(step_started + self.config.checkpoint.grace.0));
            }
            if timed_out {
                return self.stop_until(None);
            }
            if save {
                self.save()?;
            }
        }
        if self.saved_step != self.progress.step && self.config.checkpoint.every.end {
            self.save()?;
        }
        self.saver.finish()?;
        self.data.finish_order_check(self.stop)?;
        if let Err(error) = self.lease.as_ref().map_or(Ok(()), Lease::confirm) {
            self.check_lease()?;
            log::warn!("checkpoint: cannot confirm the lease: {error}");
        }
        Ok(if self.saver.failures() == 0 { Outcome::Done } else { Outcome::Gaps })
    }

    /// Saves what can be saved by `until`.
    fn stop_until(&mut self, until: Option<Instant>) -> Result<Outcome> {
        let ended = self.saver.finish_until(until);
        // If one rank has no time for a save, or cannot save, no rank starts one.
        let is_late = !matches!(ended, Ok(true));
        let [is_late] = any(self.trainer.comm(), [is_late])?;
        ended?;
        if !is_late && self.saved_step != self.progress.step {
            self.save()?;
            self.saver.finish_until(until)?;
        }
        Ok(Outcome::Saved)
    }

    fn step(&mut self, lr: f64, batches: &mut Batches, micro: &mut Vec<AnyBatch>) -> Result<()> {
        let step_started = Instant::now();
        let step = self.progress.step + 1;
        if let Some(trace) = &self.trace {
            trace.step(step);
        }
        self.set_activity("waits for data");
        let comm = self.trainer.comm();
        let global = self.config.batch.at(self.progress.samples);
        let replica = global / self.config.batch.micro / comm.mesh.dp as u64;
        batches.fill(replica, micro)?;
        self.meter.data_wait += step_started.elapsed();

        let waited = bridge::dist::waited();
        let report = self.trainer.step(&self.config.optim, micro, step, lr)?;
        self.meter.comm_wait += bridge::dist::waited() - waited;
        let samples = self.progress.samples;
        self.progress = TrainingProgress { step, samples: samples + self.config.batch.at(samples) };
        self.meter.work += step_started.elapsed();
        self.set_activity("");
        self.meter.steps += 1;
        self.meter.tokens +=
            (self.progress.samples - samples) * self.config.model.tokens_per_sample();
        if step == 1
            || step.is_multiple_of(self.config.log.every)
            || step == self.config.steps_total()
        {
            self.check_lease()?;
            let record = StepRecord {
                step,
                samples: self.progress.samples,
                tokens: self.progress.samples * self.config.model.tokens_per_sample(),
                loss: report.loss,
                lr,
                grad_norm: report.grad_norm,
                loss_scale: self.trainer.scaler().map(|scaler| scaler.scale),
                perf: self.meter.take(),
            };
            self.log.as_mut().map_or(Ok(()), |log| log.step(&record))?;
        }
        if report.skipped {
            return Ok(());
        }
        self.watch(report.loss, samples)
    }

    /// Checks whether the loss of the last step, which began at `first_sample`, is a spike.
    fn watch(&mut self, loss: f64, first_sample: u64) -> Result<()> {
        let Some(mean) = self.spikes.see(loss) else { return Ok(()) };
        let TrainingProgress { step, samples } = self.progress;
        let error =
            Error::Spike { step, loss, mean, first_sample, samples: samples - first_sample };
        match self.config.run.spike.action {
            OnSpike::Stop => Err(error),
            OnSpike::Warn if self.log.is_some() => {
                log::warn!("{}", storage::one_line(&error));
                Ok(())
            }
            OnSpike::Warn | OnSpike::Ignore => Ok(()),
        }
    }

    /// Fails if another process took over the folder of checkpoints while this one missed its
    /// heartbeats: that process resumes from them, and this run must end.
    fn check_lease(&self) -> Result<()> {
        self.lease.as_ref().map_or(Ok(()), |lease| Ok(lease.check()?))
    }

    fn set_activity(&self, activity: &str) {
        self.trainer.comm().activity.set(|| activity.to_owned());
    }

    fn evaluate(&mut self) -> Result<()> {
        let started = Instant::now();
        self.set_activity("evaluates");
        let valid = self.data.valid_batches(&self.config, self.trainer.comm().seat())?;
        let Some(mut batches) = valid else { return Ok(()) };
        let (loss, tokens) = self.trainer.evaluate(&mut batches)?;
        let seconds = started.elapsed().as_secs_f64();
        self.check_lease()?;
        let record = EvalRecord {
            step: self.progress.step,
            samples: self.progress.samples,
            eval_loss: loss / tokens,
            eval_tokens: tokens as u64, // fits: a count, exact below 2^53
            perf: EvalPerf { tokens_per_s: tokens / seconds, eval_ms: seconds * 1e3 },
        };
        Ok(self.log.as_mut().map_or(Ok(()), |log| log.eval(&record))?)
    }

    fn save_is_due(&self) -> bool {
        let every = &self.config.checkpoint.every;
        let by_step = every.steps > 0 && self.progress.step.is_multiple_of(every.steps);
        let pause = every.minutes.map(|minutes| Duration::from_secs(60 * minutes));
        by_step || pause.is_some_and(|pause| self.saved_at.elapsed() >= pause)
    }

    fn save(&mut self) -> Result<()> {
        let started = Instant::now();
        self.set_activity("saves");
        self.check_lease()?;
        self.log.as_mut().map_or(Ok(()), RunLog::sync)?;
        self.saver.save(&mut self.trainer, self.progress, &self.config, &self.fingerprint)?;
        self.saved_step = self.progress.step;
        self.saved_at = Instant::now();
        self.meter.stall += started.elapsed();
        self.set_activity("");
        self.trace.as_ref().map_or(Ok(()), |trace| Ok(trace.write()?))
    }

    fn summary(&self, outcome: Outcome) -> String {
        let tokens = self.progress.samples * self.config.model.tokens_per_sample();
        let tokens = thousands(tokens as f64);
        let failed = self.saver.failures();
        let what = match outcome {
            Outcome::Done => "done".to_owned(),
            Outcome::Gaps => format!("done and saved, but {failed} saves or copies failed"),
            Outcome::Saved => {
                format!("stopped, saved at step {}; start again to resume", self.saver.step())
            }
        };
        let dir = self.config.checkpoint_dir();
        format!("step {}, {tokens} tokens: {what}; checkpoints in {dir}", self.progress.step)
    }
}

/// Warns that waiting threads will take the cores of those that compute.
fn warn_of_spinning(threads: u64, ranks: u64) {
    let cores = available_parallelism().map_or(1, |count| count.get() as u64);
    let is_configured = WAITING.iter().any(|name| std::env::var_os(name).is_some());
    if ranks > 1 && threads > 1 && threads * ranks > cores && !is_configured {
        log::warn!(
            "{ranks} ranks of {threads} threads share {cores} cores, and waiting threads spin \
             (hint: export OMP_WAIT_POLICY=passive, or set run.threads)"
        );
    }
}

/// A token that no other process that saves uses.
fn token() -> String {
    let owner = storage::ProcessIdentity::new().to_string();
    format!("{:016x}", storage::crc64(owner.as_bytes()))
}

/// Logs the plan of the run, with its warnings if `logs`, and refuses what cannot work.
fn check_plan(config: &Config, known: &PlanInputs, logs: bool) -> Result<()> {
    let plan = RunPlan::new(config, known);
    log::info!("model: {}", plan.model);
    log::info!(
        "plan: {} parameters, {} steps of {} tokens, {:.2} epochs, {} threads",
        thousands(plan.parameters.total as f64),
        plan.run.steps,
        thousands(plan.run.tokens_per_step as f64),
        plan.run.epochs.unwrap_or(0.0),
        config.run.threads
    );
    for warning in plan.warnings.iter().filter(|_| logs) {
        log::warn!("plan: {warning}");
    }
    if plan.refusals.is_empty() {
        return Ok(());
    }
    let hint = "`trainer plan` checks a config";
    Err(Error::Mismatch(Incompatible {
        operation: "cannot run this config".to_owned(),
        details: plan.refusals,
        hint,
    }))
}

/// Writes the resolved config to the run's folder, for people; checkpoints have their own copy.
fn write_config(config: &Config) -> Result<()> {
    let store = storage::open_url(&config.run.dir)?;
    let key = Key::new("config.toml")?;
    match store.delete(&key) {
        Ok(()) | Err(storage::Error::NotFound { .. }) => {}
        Err(error) => return Err(error.into()),
    }
    storage::write_all(store.as_ref(), &key, config.to_toml().as_bytes())?;
    Ok(())
}
