//! Follower side of a joint save: the writers other than 0.

use std::collections::HashSet;
use std::time::Instant;

use crate::liveness::tracker::LivenessTracker;
use crate::save::commit_target::STAGING;
use crate::save::joint::JointSave;
use crate::save::rendezvous::{Decision, SaveAnnouncement, WriterOutput, pause};
use crate::steps::checkpoints::step_name;
use crate::{Codec, Error, Result, SaveReport};
use storage::{Key, Manifest};

/// An announcement that has been validated against our plan.
struct AnnouncedSave {
    announce: SaveAnnouncement,
    data: Key,
    record: Key,
}

impl JointSave<'_> {
    pub(super) fn follow(&self) -> Result<SaveReport> {
        let announced = self.wait_for_announce();
        let goal = announced.inspect_err(|error| self.decline(error))?;
        let planned = Instant::now();
        let (heartbeat, written) = match self.start_heartbeat("alive") {
            Ok(heartbeat) => (Some(heartbeat), self.write_part(&goal)),
            Err(error) => (None, Err(error)),
        };
        let durable = Instant::now();
        let own_reason = written.as_ref().err().map(|error| self.abort_reason(error));
        let ended = self.wait_for_step(&goal, written.as_ref().ok(), own_reason.as_deref());
        drop(heartbeat);
        match (written, ended) {
            (Ok(part), Ok(())) => Ok(self.report(&part, planned, durable)),
            // The part was written despite the error, and the step is committed.
            (Err(_), Ok(())) => Ok(self.report(&WriterOutput::default(), planned, durable)),
            // Another writer decided first, and our error may follow from its error.
            (Err(_), Err(Error::Aborted { reason, .. }))
                if own_reason.is_some_and(|own| own != reason) =>
            {
                Err(self.aborted(reason))
            }
            (Ok(_), Err(Error::Aborted { reason, .. }))
                if self.cancelled().is_some_and(|own| own == reason) =>
            {
                Err(Error::Cancelled)
            }
            (Err(error), Err(_)) | (Ok(_), Err(error)) => Err(error),
        }
    }

    /// Ends a save that another process was doing as this writer when it died. If its part exists,
    /// the step may still be committed; if not, the save is aborted for all writers.
    pub(super) fn take_over(&self) -> Result<SaveReport> {
        let own_reason = format!("{}: the process that saved for it died", self.label());
        let Some(announce) = self.rendezvous.announced()? else {
            let decided = self.decide(false, &own_reason)?;
            return Err(self.aborted(decided.why));
        };
        let (goal, writer) = (self.check_announcement(announce)?, self.together.writer);
        let part = match writer {
            0 => None,
            _ => self.rendezvous.part(writer, &goal.announce.owner).ok(),
        };
        let own = part.is_none().then_some(own_reason.as_str());
        let ended = self.wait_for_step(&goal, part.as_ref(), own);
        if ended.is_err() && writer == 0 && goal.announce.data.starts_with(STAGING) {
            // No other process would before the next sweep, and the next save may need the space.
            let _alone = self.steps.begin_change()?;
            self.steps.abandon(&goal.data);
        }
        let now = Instant::now();
        ended.map(|()| self.report(&part.unwrap_or_default(), self.started, now))
    }

    /// The abort reason for the other writers, if this save was cancelled.
    fn cancelled(&self) -> Option<String> {
        self.control.is_cancelled().then(|| self.abort_reason(&Error::Cancelled))
    }

    fn write_part(&self, goal: &AnnouncedSave) -> Result<WriterOutput> {
        let part = self.write(&goal.data)?;
        self.rendezvous.put_part(self.together.writer, &goal.announce.owner, &part)?;
        Ok(part)
    }

    fn wait_for_announce(&self) -> Result<AnnouncedSave> {
        let tracker = LivenessTracker::new(1, self.plan.writers(), self.steps.patience);
        let tracker = tracker.expecting(self.members, Instant::now());
        let announce = loop {
            self.check_not_aborted()?;
            self.control.check()?;
            if let Some(announce) = self.rendezvous.announced()? {
                break announce;
            }
            if let Some(dead) = tracker.dead(&HashSet::new(), Instant::now()) {
                return Err(self.aborted(dead));
            }
            if self.is_late() {
                let deadline = self.together.deadline;
                return Err(self.aborted(format!("writer 0 did not start within {deadline:?}")));
            }
            pause(self.started);
        };
        self.check_announcement(announce)
    }

    /// Rejects an announcement that differs from what this writer is to save.
    fn check_announcement(&self, announce: SaveAnnouncement) -> Result<AnnouncedSave> {
        let &SaveAnnouncement { step, writers, fingerprint, block_bytes, codec, .. } = &announce;
        let ours = (
            self.step,
            self.plan.writers(),
            self.plan.fingerprint(),
            self.steps.options.block_bytes,
            self.steps.options.codec,
        );
        let theirs = (step, writers, fingerprint, block_bytes, codec);
        if theirs != ours {
            let (ours, theirs) = (plan_text(ours), plan_text(theirs));
            let reason = format!(
                "expected {theirs} as announced by writer 0, found {ours} (hint: plan the same \
                 tensors and regions with the same options in all processes)"
            );
            return Err(Error::BadInput { object: self.what(), reason });
        }
        let name = step_name(step);
        let is_place = announce.data.starts_with(&format!("{STAGING}{name}-"))
            || announce.data.starts_with(&format!("{name}/data-"));
        if !is_place || !announce.record.starts_with(&format!("{name}/")) {
            let (object, place) = (self.what(), "announcement".to_owned());
            let found = format!("files in '{}', committed by '{}'", announce.data, announce.record);
            return Err(Error::BadManifest {
                object,
                place,
                found,
                expected: format!("files and commit record of {name}"),
            });
        }
        let below = |name: &str| self.steps.folder.join(name);
        Ok(AnnouncedSave {
            data: below(&announce.data)?,
            record: below(&announce.record)?,
            announce,
        })
    }

    /// Waits until the step is durably committed or certain not to be. `own` is our error, as it is
    /// reported to the others.
    fn wait_for_step(
        &self,
        goal: &AnnouncedSave,
        part: Option<&WriterOutput>,
        own: Option<&str>,
    ) -> Result<()> {
        let mut leader = LeaderLiveness::new(self, &goal.announce)?;
        let (mut decided, waited) = (None, Instant::now());
        loop {
            let is_late = self.is_late();
            match self.poll(goal, part, own, &mut leader, &mut decided) {
                Ok(Some(ended)) => return ended,
                Ok(None) => {}
                // The others may still commit: a failed poll decides nothing.
                Err(error) if !is_late => {
                    log::warn!("{}: poll failed; retrying: {error}", self.what());
                }
                Err(error) => return Err(error),
            }
            pause(waited);
        }
    }

    /// Polls once. Returns the outcome of the save, or `None` while it is open.
    fn poll(
        &self,
        goal: &AnnouncedSave,
        part: Option<&WriterOutput>,
        own: Option<&str>,
        leader: &mut LeaderLiveness<'_>,
        decided: &mut Option<Decision>,
    ) -> Result<Option<Result<()>>> {
        // Checked first, so that everything read below is newer.
        let failed = leader.failure()?;
        if decided.is_none() {
            *decided = self.rendezvous.decided()?;
        }
        let cancelled = self.cancelled();
        if decided.is_none()
            && !leader.has_left
            && let Some(why) = own.or(cancelled.as_deref()).or(failed.as_deref())
        {
            *decided = self.try_abort(goal, why)?;
            leader.has_left = decided.is_none();
        }
        match decided {
            Some(Decision { commit: false, why }) => {
                return Ok(Some(Err(self.aborted(why.clone()))));
            }
            Some(_) => match self.rendezvous.ended()? {
                Some(Decision { commit: true, .. }) => return Ok(Some(Ok(()))),
                Some(Decision { why, .. }) => return Ok(Some(Err(self.aborted(why)))),
                None => {}
            },
            None => {}
        }
        let when = "after the commit decision and before the commit was visible";
        let why = match (failed, decided.is_some()) {
            _ if leader.has_left => "rendezvous was closed without an outcome".to_owned(),
            (Some(why), true) => format!("{why}, {when}"),
            _ => return Ok(None),
        };
        if !self.is_committed(goal, part)? {
            return Ok(Some(Err(self.aborted(why))));
        }
        // Writer 0 may have died before it made the name durable.
        let steps = self.steps;
        for folder in [&goal.record.parent(), &steps.folder] {
            steps.store.sync_folder(folder)?;
        }
        Ok(Some(Ok(())))
    }

    /// Decides to abort, unless a decision exists. `None` if the rendezvous is over: a decision in
    /// its empty folder then binds no writer. Its announcement is deleted first, so while that
    /// still exists no earlier decision can have been made and removed.
    fn try_abort(&self, goal: &AnnouncedSave, why: &str) -> Result<Option<Decision>> {
        let is_on =
            || Ok::<_, Error>(self.rendezvous.announced()?.as_ref() == Some(&goal.announce));
        if !is_on()? {
            return Ok(None);
        }
        let decided = self.decide(false, why)?;
        Ok(is_on()?.then_some(decided))
    }

    /// Whether the step is committed by this very save. After a rename only the folder's contents
    /// can show that, and not even they if a damaged step had that name before.
    fn is_committed(&self, goal: &AnnouncedSave, part: Option<&WriterOutput>) -> Result<bool> {
        let record = match Manifest::read(&*self.steps.store, &goal.record) {
            Err(storage::Error::NotFound { .. }) => return Ok(false),
            record => record?,
        };
        if goal.announce.data.starts_with(STAGING) {
            let mut files = part.into_iter().flat_map(WriterOutput::files);
            return Ok(!goal.announce.has_damaged && files.all(|file| record.files.contains(file)));
        }
        let below = format!("{}/", goal.data.name());
        Ok(record.files.iter().any(|file| file.path.starts_with(&below)))
    }
}

/// Liveness of writer 0, seen by a follower.
struct LeaderLiveness<'a> {
    joint: &'a JointSave<'a>,
    folder: Key,
    tracker: LivenessTracker,
    polled_at: Instant,
    /// Whether its rendezvous folder was removed, as the next holder of the lease does.
    has_left: bool,
}

impl<'a> LeaderLiveness<'a> {
    fn new(joint: &'a JointSave<'a>, announce: &SaveAnnouncement) -> Result<Self> {
        let mut tracker = LivenessTracker::new(1, announce.writers, joint.steps.patience);
        tracker.record(&[format!("00000-{}", announce.owner)], Instant::now());
        let (folder, polled_at) = (joint.rendezvous.key("lead")?, Instant::now());
        Ok(LeaderLiveness { joint, folder, tracker, polled_at, has_left: false })
    }

    /// Why writer 0 will report no outcome; `None` while it may.
    fn failure(&mut self) -> Result<Option<String>> {
        let steps = self.joint.steps;
        if self.polled_at.elapsed() >= steps.patience.beat / 2 {
            self.polled_at = Instant::now();
            let names = steps.store.list_names(&self.folder)?;
            if names.is_empty() {
                self.has_left = true;
                return Ok(Some("writer 0 has left the rendezvous".to_owned()));
            }
            let names: Vec<_> = names.iter().map(|name| format!("00000-{name}")).collect();
            self.tracker.record(&names, self.polled_at);
        }
        if self.joint.is_late() {
            let deadline = self.joint.together.deadline;
            return Ok(Some(format!(
                "{}: not finished within {deadline:?}",
                self.tracker.label(0)
            )));
        }
        Ok(self.tracker.dead(&HashSet::new(), Instant::now()))
    }
}

fn plan_text(of: (u64, usize, u64, u64, Option<Codec>)) -> String {
    let (step, writers, fingerprint, block_bytes, codec) = of;
    let how = codec.map_or("unpacked", Codec::name);
    format!(
        "step {step} by {writers} writers, plan {fingerprint:016x}, blocks of {block_bytes} bytes, \
         {how}"
    )
}
