//! Joint save: one step saved by several processes that share nothing but the store.
//!
//! Writer 0 takes the lease, checks the space for all, and announces the save. Every writer follows
//! the same plan: it writes its files, makes them durable, and then writes its part of the
//! manifest. When all parts exist and are consistent, writer 0 writes the manifest and commits.
//!
//! The writer that first creates the decision object decides for all: writer 0 that the step is
//! committed, or any writer, after an error of its own or a timeout, that it is not. Every store
//! creates an object only once, so all writers reach the same outcome. A writer that dies decides
//! nothing: the others see that its heartbeats have stopped, or that the deadline has passed.
//!
//! Only writer 0 and a sweep, which hold the lease, delete anything. Another writer cannot
//! distinguish an error of its store from the end of the save, and on some stores would delete the
//! committed step.

use std::collections::HashSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use crate::base::save_control::SaveControl;
use crate::format::catalog::merge_parts;
use crate::liveness::heartbeat::Heartbeat;
use crate::liveness::tracker::{LivenessTracker, label_of};
use crate::plan::SavePlan;
use crate::save::commit_target::CommitTarget;
use crate::save::rendezvous::{Decision, Rendezvous, SaveAnnouncement, WriterOutput, pause};
use crate::save::{check_blobs, check_meta, check_space};
use crate::write::staging::{PieceSource, PreparedFiles, Staging, WrittenStep};
use crate::{Blob, Checkpoints, Error, PeakRate, Result, SaveReport};
use storage::{FileEntry, Key, ProcessIdentity};

/// How one process takes part in a joint save.
#[derive(Clone, Copy, Debug)]
pub struct JointSaveOptions<'a> {
    /// The same in all processes and unique to each try; letters, digits, `-`, `_` and `.`. For
    /// example the job number with the number of the try, or a random token that writer 0
    /// broadcasts.
    pub token: &'a str,
    /// Which of the plan's writers this process is.
    pub writer: usize,
    /// Longest time from the call to its return. Choose a time after which the store must be stuck:
    /// that of writing a writer's bytes at a tenth of the usual rate, plus a minute.
    pub deadline: Duration,
}

/// One writer's view of the save.
pub(super) struct JointSave<'a> {
    pub(super) steps: &'a Checkpoints,
    pub(super) step: u64,
    pub(super) plan: &'a SavePlan,
    /// The bytes that this writer writes.
    pieces: PieceSource<'a>,
    blobs: &'a [Blob<'a>],
    pub(super) together: &'a JointSaveOptions<'a>,
    /// The processes of all writers, if they are known beforehand.
    pub(super) members: &'a [ProcessIdentity],
    pub(super) rendezvous: Rendezvous<'a>,
    owner: ProcessIdentity,
    pub(super) started: Instant,
    pub(super) control: &'a SaveControl,
}

impl Checkpoints {
    /// Saves a step jointly with other processes. Each calls this with the same step, plan and
    /// token, and with the bytes of its own regions in `held`. They share only the store, and all
    /// get the same outcome: on success the step is committed durably; a failure is a failure for
    /// all, and the error names the writer and the cause. Each writer writes its files to the store
    /// directly, not through writer 0.
    ///
    /// Names of `blobs` are global, so per-rank state needs the rank in its name. Only the `meta`
    /// of writer 0 is stored.
    ///
    /// # Errors
    /// As [`Checkpoints::save`] in the writer that failed, [`Error::Aborted`] in the others. If
    /// writer 0 dies between the decision to commit and the commit, the others get an error that
    /// says so; the step may still appear, and is then complete.
    pub fn save_together(
        &self,
        step: u64,
        plan: &SavePlan,
        held: &[&[u8]],
        blobs: &[Blob<'_>],
        meta: serde_json::Value,
        together: &JointSaveOptions<'_>,
    ) -> Result<SaveReport> {
        let pieces = self.check_part(step, plan, held, blobs, together)?;
        let control = SaveControl::default();
        self.save_part(step, plan, PieceSource::Memory(&pieces), blobs, meta, together, &control)
    }

    /// As [`Checkpoints::save_together`], or [`Checkpoints::save_plan`] if the plan has one writer;
    /// with progress and cancellation. `members` are the processes of all writers, or none: a
    /// writer that dies before it joins the save is then noticed before the deadline.
    ///
    /// # Errors
    /// As these, and [`Error::Cancelled`].
    #[expect(clippy::too_many_arguments, reason = "what is saved, and how it is watched")]
    pub fn save_watched(
        &self,
        step: u64,
        plan: &SavePlan,
        held: &[&[u8]],
        blobs: &[Blob<'_>],
        meta: serde_json::Value,
        together: &JointSaveOptions<'_>,
        members: &[ProcessIdentity],
        control: &SaveControl,
    ) -> Result<SaveReport> {
        let is_alone = plan.writers() == 1 && together.writer == 0;
        if is_alone {
            let pieces = [PieceSource::Memory(&plan.pieces_held(0, held)?)];
            return self.save_pieces(Instant::now(), step, plan, &pieces, blobs, meta, control);
        }
        let pieces = self.check_part(step, plan, held, blobs, together)?;
        let pieces = PieceSource::Memory(&pieces);
        let joint = JointSave::new(self, step, plan, together, control)?;
        JointSave { pieces, blobs, members, ..joint }.run(meta)
    }

    /// Ends a joint save for all writers because this one cannot take part in it; `reason` is what
    /// they report. Without this they would wait for it until the deadline.
    ///
    /// # Errors
    /// Errors of the store.
    pub fn decline_save(
        &self,
        step: u64,
        plan: &SavePlan,
        together: &JointSaveOptions<'_>,
        reason: &str,
    ) -> Result<()> {
        let control = SaveControl::default();
        let joint = JointSave::new(self, step, plan, together, &control)?;
        joint.decide(false, &format!("{}: {reason}", joint.label())).map(|_| ())
    }

    /// As [`Checkpoints::save_together`], for files that already hold this writer's pieces.
    pub(crate) fn save_files_together(
        &self,
        step: u64,
        plan: &SavePlan,
        files: &dyn PreparedFiles,
        blobs: &[Blob<'_>],
        meta: serde_json::Value,
        together: &JointSaveOptions<'_>,
    ) -> Result<SaveReport> {
        let control = SaveControl::default();
        let joint = JointSave { blobs, ..JointSave::new(self, step, plan, together, &control)? };
        joint.check_call().inspect_err(|error| joint.decline(error))?;
        self.save_part(step, plan, PieceSource::Files(files), blobs, meta, together, &control)
    }

    /// Validates the call and returns the bytes of this writer's pieces. An error is also reported
    /// to the other writers.
    pub(crate) fn check_part<'a>(
        &self,
        step: u64,
        plan: &SavePlan,
        held: &[&'a [u8]],
        blobs: &[Blob<'_>],
        together: &JointSaveOptions<'_>,
    ) -> Result<Vec<&'a [u8]>> {
        let control = SaveControl::default();
        let joint = JointSave { blobs, ..JointSave::new(self, step, plan, together, &control)? };
        let checked = joint.check_call();
        let pieces = checked.and_then(|()| plan.pieces_held(together.writer, held));
        pieces.inspect_err(|error| joint.decline(error))
    }

    /// Saves pieces that were validated, with progress and cancellation. To cancel it cancels the
    /// save of all writers, as any failure does.
    #[expect(clippy::too_many_arguments, reason = "what is saved, and how it is watched")]
    pub(crate) fn save_part(
        &self,
        step: u64,
        plan: &SavePlan,
        pieces: PieceSource<'_>,
        blobs: &[Blob<'_>],
        meta: serde_json::Value,
        together: &JointSaveOptions<'_>,
        control: &SaveControl,
    ) -> Result<SaveReport> {
        let joint = JointSave::new(self, step, plan, together, control)?;
        JointSave { pieces, blobs, ..joint }.run(meta)
    }

    /// Reports to the other writers that this one cannot take part.
    pub(crate) fn decline(
        &self,
        step: u64,
        plan: &SavePlan,
        together: &JointSaveOptions<'_>,
        error: &Error,
    ) {
        let control = SaveControl::default();
        match JointSave::new(self, step, plan, together, &control) {
            Ok(joint) => joint.decline(error),
            Err(error) => log::warn!("step {step}: cannot notify the other writers: {error}"),
        }
    }

    /// Completes or aborts a save that another process was doing for this one when it died.
    pub(crate) fn take_over(
        &self,
        step: u64,
        plan: &SavePlan,
        together: &JointSaveOptions<'_>,
        control: &SaveControl,
    ) -> Result<SaveReport> {
        JointSave::new(self, step, plan, together, control)?.take_over()
    }
}

impl<'a> JointSave<'a> {
    /// With nothing to write.
    fn new(
        steps: &'a Checkpoints,
        step: u64,
        plan: &'a SavePlan,
        together: &'a JointSaveOptions<'a>,
        control: &'a SaveControl,
    ) -> Result<Self> {
        let rendezvous = Rendezvous::new(steps, step, together.token)?;
        let (owner, started) = (ProcessIdentity::new(), Instant::now());
        let (pieces, blobs): (_, &[Blob<'_>]) = (PieceSource::Memory(&[]), &[]);
        let members = &[];
        Ok(JointSave {
            steps,
            step,
            plan,
            pieces,
            blobs,
            together,
            members,
            rendezvous,
            owner,
            started,
            control,
        })
    }
}

impl JointSave<'_> {
    fn run(&self, meta: serde_json::Value) -> Result<SaveReport> {
        if self.together.writer == 0 { self.lead(meta) } else { self.follow() }
    }

    /// Validates the arguments.
    fn check_call(&self) -> Result<()> {
        self.steps.check_options(self.step)?;
        check_blobs(self.blobs)?;
        let writers = self.plan.writers();
        if self.together.writer >= writers {
            let reason = format!("the plan has {writers} writers");
            return Err(Error::BadInput { object: self.what(), reason });
        }
        Ok(())
    }

    pub(super) fn decline(&self, error: &Error) {
        self.warn_unless_notified(self.decide(false, &self.abort_reason(error)));
    }

    fn warn_unless_notified<T>(&self, notified: Result<T>) {
        if let Err(error) = notified {
            log::warn!("{}: cannot notify the other writers: {error}", self.what());
        }
    }

    fn lead(&self, user: serde_json::Value) -> Result<SaveReport> {
        let result = self.unless_panicked(|| self.try_lead(user));
        let Err(error) = result else { return result };
        let reason = self.abort_reason(&error);
        match self.decide(false, &reason) {
            Ok(decided) if decided.commit => {
                self.warn_unless_notified(self.rendezvous.end(false, &reason));
            }
            // Another writer decided first, and our error may follow from its error.
            Ok(decided) if decided.why != reason => return Err(self.aborted(decided.why)),
            decided => self.warn_unless_notified(decided),
        }
        Err(error)
    }

    fn try_lead(&self, user: serde_json::Value) -> Result<SaveReport> {
        check_meta(&user)?;
        let steps = self.steps;
        steps.change(|| {
            steps.clear_rendezvous(self.rendezvous.folder.name())?;
            let place = steps.find_place(self.step)?;
            let bytes: u64 = match self.pieces {
                PieceSource::Memory(_) => {
                    (0..self.plan.writers()).map(|writer| self.plan.bytes(writer)).sum()
                }
                PieceSource::Files(_) => 0, // their space is already allocated
            };
            check_space(&*steps.store, &place.target, bytes, self.plan.chunks() as u64)?;
            let below = |key: &Key| {
                let text = key.as_str().strip_prefix(steps.folder.as_str()).unwrap_or(key.as_str());
                text.trim_start_matches('/').to_owned()
            };
            // Before the announcement, so that every reader of it finds a heartbeat.
            let _heartbeat = self.start_heartbeat("lead")?;
            self.rendezvous.announce(&SaveAnnouncement {
                step: self.step,
                writers: self.plan.writers(),
                fingerprint: self.plan.fingerprint(),
                block_bytes: steps.options.block_bytes,
                codec: steps.options.codec,
                owner: self.owner.to_string(),
                data: below(&place.data),
                record: below(&place.record),
                has_damaged: place.has_damaged,
            })?;
            let planned = Instant::now();
            let prepared = self.prepare(&place, user).inspect_err(|error| {
                // Before the folder is deleted: otherwise a writer that fails on the missing folder
                // reports that as the cause.
                self.decline(error);
                steps.abandon(&place.data);
            });
            let (manifest, mine, durable) = prepared?;
            steps.publish(&place, &manifest)?;
            self.warn_unless_notified(self.rendezvous.end(true, ""));
            steps.note_latest(self.step, place.files());
            Ok(self.report(&mine, planned, durable))
        })
    }

    /// Everything before the commit, including the decision for it.
    fn prepare(
        &self,
        place: &CommitTarget,
        user: serde_json::Value,
    ) -> Result<(FileEntry, WriterOutput, Instant)> {
        let steps = self.steps;
        let mine = self.write(&place.data)?;
        let mut parts = vec![mine.clone()];
        parts.extend(self.wait_for_parts()?);
        let durable = Instant::now();
        let mut blobs = Vec::new();
        let mut extra = Vec::new();
        let mut shards = Vec::new();
        for part in parts {
            shards.push(part.shards);
            let (files, entries): (Vec<_>, Vec<_>) = part.blobs.into_iter().unzip();
            extra.extend(files);
            blobs.extend(entries);
        }
        let (mut files, tensors) = merge_parts(self.plan, steps.options.codec, shards)?;
        files.extend(self.staging(&place.data).write_index()?);
        files.extend(extra);
        let written = WrittenStep { files, tensors, blobs, sync: Duration::ZERO };
        self.check(place, &written)?;
        let manifest = steps.seal(self.step, place, written, user)?;
        self.control.check()?;
        match self.decide(true, "")? {
            Decision { commit: true, .. } => Ok((manifest, mine, durable)),
            Decision { why, .. } => Err(self.aborted(why)),
        }
    }

    /// Checks that exactly the planned files exist, with the lengths that were written.
    fn check(&self, place: &CommitTarget, written: &WrittenStep) -> Result<()> {
        let object = self.steps.store.display(&place.data);
        let there = self.steps.listing_of(&place.data)?;
        for file in &written.files {
            let found = there.get(&place.data.join(&file.path)?);
            if found != Some(&file.bytes) {
                let found = found.map_or("none".to_owned(), |bytes| format!("{bytes} bytes"));
                let (place, expected) = (file.path.clone(), format!("{} bytes", file.bytes));
                return Err(Error::BadManifest { object, place, found, expected });
            }
        }
        if there.len() != written.files.len() {
            let found = format!("{} files", there.len());
            let expected = format!("the {} planned files", written.files.len());
            return Err(Error::BadManifest { object, place: "files".to_owned(), found, expected });
        }
        Ok(())
    }

    fn wait_for_parts(&self) -> Result<Vec<WriterOutput>> {
        let writers = self.plan.writers();
        let tracker = LivenessTracker::new(writers, writers, self.steps.patience);
        let (alive, waited) = (self.rendezvous.key("alive")?, Instant::now());
        let mut tracker = tracker.expecting(self.members, waited);
        let mut polled_at: Option<Instant> = None;
        loop {
            let mut done = HashSet::from([0]);
            done.extend(self.rendezvous.list_parts()?);
            if (0..writers).all(|writer| done.contains(&writer)) {
                let owner = self.owner.to_string();
                return (1..writers).map(|writer| self.rendezvous.part(writer, &owner)).collect();
            }
            self.check_not_aborted()?;
            self.control.check()?;
            if polled_at.is_none_or(|polled_at| polled_at.elapsed() >= self.steps.patience.beat / 2)
            {
                polled_at = Some(Instant::now());
                tracker.record(&self.steps.store.list_names(&alive)?, Instant::now());
            }
            if let Some(dead) = tracker.dead(&done, Instant::now()) {
                return Err(self.aborted(dead));
            }
            if self.is_late() {
                tracker.record(&self.steps.store.list_names(&alive)?, Instant::now());
                let (late, deadline) = (tracker.late(&done), self.together.deadline);
                return Err(self.aborted(format!("{late}; the deadline is {deadline:?}")));
            }
            pause(waited);
        }
    }

    /// Writes this writer's files durably.
    pub(super) fn write(&self, data: &Key) -> Result<WriterOutput> {
        let staging = self.staging(data);
        let write = || staging.write_part(self.together.writer, self.pieces, self.blobs);
        match self.unless_aborted(|| self.unless_panicked(write)) {
            Err(Error::Cancelled) if !self.control.is_cancelled() => {
                self.check_not_aborted().and(Err(Error::Cancelled))
            }
            written => written,
        }
    }

    /// Runs `write`, and stops it early if any writer aborts the save meanwhile.
    fn unless_aborted<T>(&self, write: impl FnOnce() -> Result<T>) -> Result<T> {
        let (writing, written) = mpsc::channel::<()>();
        let pause = self.steps.patience.beat / 2;
        let watch = move || {
            while written.recv_timeout(pause) == Err(RecvTimeoutError::Timeout) {
                if matches!(self.rendezvous.decided(), Ok(Some(Decision { commit: false, .. }))) {
                    return self.control.mark_aborted();
                }
            }
        };
        thread::scope(|scope| {
            let thread = thread::Builder::new().name("ckpt-watch".to_owned());
            if let Err(error) = thread.spawn_scoped(scope, watch) {
                log::debug!(
                    "cannot start the abort watcher; aborts are seen after the write: {error}"
                );
            }
            let done = write();
            drop(writing);
            done
        })
    }

    /// Runs `work`. A panic becomes an error, which the other writers then report: this process may
    /// live on, so nothing else would end their wait before the deadline.
    fn unless_panicked<T>(&self, work: impl FnOnce() -> Result<T>) -> Result<T> {
        let panicked = |_| Err(Error::Panicked { object: self.what() });
        catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(panicked)
    }

    fn staging<'b>(&'b self, folder: &'b Key) -> Staging<'b> {
        Staging { steps: self.steps, folder, plan: self.plan, pieces: &[], control: self.control }
    }

    /// Fails if the save has been aborted.
    pub(super) fn check_not_aborted(&self) -> Result<()> {
        match self.rendezvous.decided()? {
            Some(Decision { commit: false, why }) => Err(self.aborted(why)),
            _ => Ok(()),
        }
    }

    pub(super) fn decide(&self, commit: bool, why: &str) -> Result<Decision> {
        self.rendezvous.decide(Decision { commit, why: why.to_owned() })
    }

    pub(super) fn start_heartbeat(&self, folder: &str) -> Result<Heartbeat> {
        let (steps, owner) = (self.steps, &self.owner);
        let writer = self.together.writer;
        let name = if writer == 0 { owner.to_string() } else { format!("{writer:05}-{owner}") };
        let text = format!("{}\n", self.label());
        let folder = self.rendezvous.key(folder)?;
        Heartbeat::start(&steps.store, &folder, name, text, steps.patience.beat, None)
    }

    pub(super) fn is_late(&self) -> bool {
        self.started.elapsed() >= self.together.deadline
    }

    pub(super) fn label(&self) -> String {
        label_of(self.together.writer, self.plan.writers(), Some(&self.owner))
    }

    pub(super) fn what(&self) -> String {
        format!("step {} as writer {}", self.step, self.together.writer)
    }

    /// The text that reports our error to the other writers.
    pub(super) fn abort_reason(&self, error: &Error) -> String {
        match error {
            Error::Aborted { reason, .. } => reason.clone(),
            error => format!("{}: {error}", self.label()),
        }
    }

    pub(super) fn aborted(&self, reason: String) -> Error {
        Error::Aborted { object: self.what(), reason }
    }

    pub(super) fn report(
        &self,
        part: &WriterOutput,
        planned: Instant,
        durable: Instant,
    ) -> SaveReport {
        SaveReport {
            step: self.step,
            bytes: part.files().map(|file| file.bytes).sum(),
            files: part.files().count(),
            plan: planned - self.started,
            write: durable - planned,
            sync: Duration::ZERO, // included in `write`
            commit: durable.elapsed(),
            peak_bytes_per_s: PeakRate::of(&*self.steps.store).map(|peak| peak.write_bytes_per_s),
        }
    }
}
