//! The loop: batches in, weights changed, and now and then a line, an evaluation, a checkpoint.
//!
//! What a run is after a step depends on its config and the step alone. So the loop keeps an order:
//! all lines of a step are written and made durable before its checkpoint is begun, and a resumed
//! run cuts its log back to its checkpoint. Whatever a kill destroys is made again, bit for bit.

use std::io::Write;
use std::path::Path;
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
use crate::launch::rank_group::{self, RankGroup};
use crate::launch::{StartupStage, Watchdog, World};
use crate::plan::{PlanInputs, RunPlan, process_memory};
use crate::step::Trainer;
use crate::{Error, Result};

/// How a run ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// All its steps are done and saved.
    Done,
    /// The same, but a save on the way, or a copy to the second store, had failed.
    Gaps,
    /// It was asked to stop, or its time was up. What fitted into the time that was left is saved,
    /// and it goes on from there when started again.
    Saved,
}

/// What the world around a run gives it.
pub struct Host<'a> {
    /// Set to end the run after the step that is being computed, saved.
    pub stop: &'a AtomicBool,
    /// Takes the progress lines: standard error, for a program.
    pub terminal: Box<dyn Write + Send>,
    /// Starts a process that calls [`ckpt::serve_agent`], for a run that wants one.
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
/// writes is below `run.dir`, but for the checkpoints and the index cache if the config puts them
/// elsewhere. Sets the number of libtorch's threads for the whole process. Each of several ranks
/// calls it; all of them end when one does.
///
/// # Errors
/// [`Error::Mismatch`] if the config, the data and the checkpoint do not go together,
/// [`Error::NotFinite`], [`Error::Bridge`] if another rank is lost, or what reading, computing or
/// writing said. The newest checkpoint is then as good as before.
pub fn train(config: &Config, mut host: Host<'_>) -> Result<Outcome> {
    let begun = Instant::now();
    let config = feed::with_special(config.resolved())?;
    let crew = RankGroup::gather(host.world.take(), &config)?;
    let done = TrainingLoop::prepare(&config, host, &crew).and_then(|mut run| {
        let outcome = run.go(begun);
        if matches!(&outcome, Err(error) if error.is_peer_lost()) {
            run.saver.give_up();
        }
        // The folder is another process's now.
        let is_fenced = matches!(&outcome, Err(error) if error.is_lease_lost());
        let trace = run.trace.as_ref().filter(|_| !is_fenced);
        let traced = trace.map_or(Ok(()), Trace::write);
        // How the run ended says more than what became of its trace.
        let outcome = outcome?;
        traced?;
        Ok((outcome, run))
    });
    match done {
        Ok((outcome, run)) => {
            crew.finish()?;
            log::info!("{}", run.summary(outcome));
            Ok(outcome)
        }
        Err(error) => {
            crew.abort(&error);
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
    /// The step of the last save that was begun, or that the run began with.
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
    /// All that stands before the first step. `config` is resolved.
    fn prepare(config: &Config, host: Host<'a>, crew: &RankGroup) -> Result<Self> {
        tch::set_num_threads(config.run.threads as i32); // fits: at most 1024
        let device = device::choose(config, crew.local_rank())?;
        if config.precision.deterministic.unwrap_or(device == Device::Cpu) {
            bridge::runtime::set_deterministic()?;
        }
        log::info!("device: {}", format_args!("{device:?}").to_string().to_lowercase());
        let (comm, watchdog) = crew.connect(config, device)?;
        let ranks = comm.mesh.ranks() as u64;
        let open = || {
            let corpus = feed::open_corpus(config)?;
            let known = PlanInputs {
                corpus_tokens: Some(corpus.token_count()),
                world: Some(ranks),
                process_memory_bytes: process_memory().filter(|_| device == Device::Cpu),
                ..PlanInputs::default()
            };
            check_plan(config, &known, crew.is_first())?;
            Ok(Data::new(corpus, config)?)
        };
        // The first rank builds the index, and the others find it.
        let first = crew.stage(StartupStage::Index, || crew.is_first().then(open).transpose())?;
        let mut data = crew.stage(StartupStage::Data, || first.map_or_else(open, Ok))?;
        if crew.is_first() {
            data.start_order_check();
        }
        for doubt in data.doubts().iter().filter(|_| crew.is_first()) {
            log::warn!("data: {doubt}");
        }
        let ranks = crew.neighbours()?;
        warn_of_spinning(config.run.threads, ranks.len() as u64);
        if ranks.len() > 1 {
            let (_, job) = crew.told("job", || Ok(((), token())))?;
            data.share(NodePeers { job, ranks });
        }
        let restore = || Self::restore(config, host, crew, comm, data);
        let mut run = crew.stage(StartupStage::Checkpoint, restore)?;
        run._watchdog = watchdog;
        crew.stage(StartupStage::FirstCollective, || rank_group::any(run.trainer.comm(), [false]))?;
        crew.ready();
        Ok(run)
    }

    /// The state that the run begins with, and what saves it.
    fn restore(
        config: &Config,
        host: Host<'a>,
        crew: &RankGroup,
        comm: Comm,
        data: Data,
    ) -> Result<Self> {
        let fingerprint = data.fingerprint()?;
        let mut trainer = Trainer::unloaded(config, comm)?;
        let place = CheckpointFolder::open(config)?;
        let parts = JointSaveParts::new(&place.checkpoints, &trainer)?;
        // The others wait here for the first to have cleared what a killed run has left.
        let (lease, token) = crew.told("lease", || Ok((place.claim(config)?, token())))?;
        let start = Start { config, parts: &parts, data: &fingerprint, lease: lease.as_ref() };
        let progress = place.start(&start, crew, &mut trainer)?;
        let log = if crew.is_first() {
            // Reading a checkpoint takes minutes, and the logs are cut now.
            lease.as_ref().map_or(Ok(()), Lease::confirm)?;
            write_config(config)?;
            Some(RunLog::open(config, progress.step, host.terminal)?)
        } else {
            None
        };
        let comm = trainer.comm();
        let folder = Path::new(&config.run.dir).join("trace");
        let trace = (config.log.timers == Timers::Trace).then(|| Trace::new(&folder, comm.rank));
        if let Some(trace) = &trace {
            comm.activity.record(trace.clone());
        }
        // The first rank speaks for all, which are of one kind.
        let peak = if crew.is_first() { peak_flop_per_s(config, comm.device)? } else { 1.0 };
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

    fn go(&mut self, begun: Instant) -> Result<Outcome> {
        let total = self.config.steps_total();
        let rate = LearningRate::new(&self.config);
        let seat = self.trainer.comm().seat();
        let mut batches = self.data.train_batches(&self.config, seat, self.progress.samples)?;
        let mut micro = Vec::new();
        while self.progress.step < total {
            self.check_lease()?;
            // The earliest moment at which a signal may have come that is seen after the step.
            let step_begun = Instant::now();
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
            // A signal, a clock: not alike on all ranks.
            let out_of_time = self.config.run.max_wall.is_some_and(|max| begun.elapsed() >= max.0);
            let here = [self.stop.load(Ordering::Relaxed), out_of_time, self.save_is_due()];
            let [stop, out_of_time, save] = rank_group::any(self.trainer.comm(), here)?;
            if stop {
                return self.stop_until(Some(step_begun + self.config.checkpoint.grace.0));
            }
            if out_of_time {
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

    /// Saves what can be saved until then.
    fn stop_until(&mut self, until: Option<Instant>) -> Result<Outcome> {
        let ended = self.saver.finish_until(until);
        // What one rank has no time for, or cannot save, none begins.
        let is_late = !matches!(ended, Ok(true));
        let [is_late] = rank_group::any(self.trainer.comm(), [is_late])?;
        ended?;
        if !is_late && self.saved_step != self.progress.step {
            self.save()?;
            self.saver.finish_until(until)?;
        }
        Ok(Outcome::Saved)
    }

    fn step(&mut self, lr: f64, batches: &mut Batches, micro: &mut Vec<AnyBatch>) -> Result<()> {
        let step_begun = Instant::now();
        let step = self.progress.step + 1;
        if let Some(trace) = &self.trace {
            trace.step(step);
        }
        self.doing("waits for data");
        let comm = self.trainer.comm();
        let global = self.config.batch.at(self.progress.samples);
        let replica = global / self.config.batch.micro / comm.mesh.dp as u64;
        batches.fill(replica, micro)?;
        self.meter.data_wait += step_begun.elapsed();

        let waited = bridge::dist::waited();
        let report = self.trainer.step(&self.config.optim, micro, step, lr)?;
        self.meter.comm_wait += bridge::dist::waited() - waited;
        let samples = self.progress.samples;
        self.progress = TrainingProgress { step, samples: samples + self.config.batch.at(samples) };
        self.meter.work += step_begun.elapsed();
        self.doing("");
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

    /// Looks whether the loss of the last step, whose first sample is known, has leapt.
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

    /// Fails if another process has taken over the folder of checkpoints while this one gave no
    /// sign of life: it goes on from them, and this run is over.
    fn check_lease(&self) -> Result<()> {
        self.lease.as_ref().map_or(Ok(()), |lease| Ok(lease.check()?))
    }

    fn doing(&self, what: &str) {
        self.trainer.comm().activity.set(|| what.to_owned());
    }

    fn evaluate(&mut self) -> Result<()> {
        let begun = Instant::now();
        self.doing("evaluates");
        let valid = self.data.valid_batches(&self.config, self.trainer.comm().seat())?;
        let Some(mut batches) = valid else { return Ok(()) };
        let (loss, tokens) = self.trainer.evaluate(&mut batches)?;
        let seconds = begun.elapsed().as_secs_f64();
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
        let begun = Instant::now();
        self.doing("saves");
        self.check_lease()?;
        self.log.as_mut().map_or(Ok(()), RunLog::sync)?;
        self.saver.save(&mut self.trainer, self.progress, &self.config, &self.fingerprint)?;
        self.saved_step = self.progress.step;
        self.saved_at = Instant::now();
        self.meter.stall += begun.elapsed();
        self.doing("");
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

/// Says that threads which wait will take the cores of those that compute.
fn warn_of_spinning(threads: u64, ranks: u64) {
    let cores = available_parallelism().map_or(1, |count| count.get() as u64);
    let told = WAITING.iter().any(|name| std::env::var_os(name).is_some());
    if ranks > 1 && threads > 1 && threads * ranks > cores && !told {
        log::warn!(
            "{ranks} ranks of {threads} threads share {cores} cores, and waiting threads spin \
             (hint: export OMP_WAIT_POLICY=passive, or set run.threads)"
        );
    }
}

/// What no other process that saves has called itself.
fn token() -> String {
    let owner = storage::ProcessIdentity::new().to_string();
    format!("{:016x}", storage::crc64(owner.as_bytes()))
}

/// Logs what the run will take, on one of its ranks, and refuses what cannot work.
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

/// Leaves the resolved config in the run's folder, for people; checkpoints have their own.
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
