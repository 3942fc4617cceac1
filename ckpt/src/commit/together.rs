//! A save of several processes, which share nothing but the store.
//!
//! Writer 0 takes the lease, looks for space for all, and announces the save. Every writer follows
//! the same plan: it writes its files, makes them durable, and then its part of the manifest. When
//! all parts are there and fit, writer 0 writes the manifest and commits.
//!
//! Who decides is whoever first creates one object: writer 0 that the step is committed, or any
//! writer, for an error of its own or for want of patience, that it is not. An object is created
//! once on every store, so all come to the same end. A writer that dies decides nothing: the others
//! see that its signs of life have stopped, or that the deadline has passed.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use crate::catalog::merge_parts;
use crate::checkpoints::step_name;
use crate::commit::meeting::{Announce, Decision, Meeting, pause};
use crate::commit::roll::{Roll, label_of};
use crate::commit::{Part, Place, Pulse, STAGING};
use crate::control::Control;
use crate::plan::SavePlan;
use crate::save::{check_blobs, check_space};
use crate::staging::{Staging, Written};
use crate::{Blob, Checkpoints, Error, Peak, Result, SaveReport};
use storage::{FileEntry, Key, Owner};

/// How one of several processes takes part in a save.
#[derive(Clone, Copy, Debug)]
pub struct Together<'a> {
    /// The same in all processes, and another for every try: letters, digits, `-`, `_` and `.`.
    /// A job's number with that of the try in it is one, or what writer 0 draws and broadcasts.
    pub token: &'a str,
    /// Which of the plan's writers this process is.
    pub writer: usize,
    /// From the call to its return. It is time to give up when the store must be stuck: the bytes
    /// of a writer at a tenth of its usual rate, and a minute.
    pub deadline: Duration,
}

/// One save, as one writer sees it.
struct Joint<'a> {
    steps: &'a Checkpoints,
    step: u64,
    plan: &'a SavePlan,
    held: &'a [&'a [u8]],
    blobs: &'a [Blob<'a>],
    together: &'a Together<'a>,
    meeting: Meeting<'a>,
    owner: Owner,
    begun: Instant,
    control: Control,
}

impl Checkpoints {
    /// Saves a step together with other processes, each of which calls this with the same step,
    /// plan and token, and with `held`, the bytes of its own holdings. What they share is the
    /// store, and nothing else. All of them come to the same end: when this returns, the step is
    /// there and stays there; when it fails, it fails for all, and the error says for which writer,
    /// and why. The files go to the store from where they are: nothing passes through writer 0.
    ///
    /// Names of `blobs` are global, so that a state of each rank has the rank in its name. `meta`
    /// is that of writer 0.
    ///
    /// # Errors
    /// As [`Checkpoints::save`] in the writer that it happened to, [`Error::Aborted`] in the
    /// others. A writer whose coordinator dies between the decision to commit and the commit itself
    /// is told so; the step may then appear nevertheless, whole.
    pub fn save_together(
        &self,
        step: u64,
        plan: &SavePlan,
        held: &[&[u8]],
        blobs: &[Blob<'_>],
        meta: serde_json::Value,
        together: &Together<'_>,
    ) -> Result<SaveReport> {
        self.check_options(step)?;
        check_blobs(blobs)?;
        let (writer, writers) = (together.writer, plan.writers());
        if writer >= writers {
            let what = format!("step {step} as writer {writer}");
            return Err(Error::BadInput { what, why: format!("the plan has {writers} writers") });
        }
        let meeting = Meeting::new(self, step, together.token)?;
        let (owner, begun) = (Owner::new(), Instant::now());
        let control = Control::default();
        let joint = Joint {
            steps: self,
            step,
            plan,
            held,
            blobs,
            together,
            meeting,
            owner,
            begun,
            control,
        };
        if writer == 0 { joint.lead(meta) } else { joint.follow() }
    }
}

impl Joint<'_> {
    fn lead(&self, user: serde_json::Value) -> Result<SaveReport> {
        let led = self.try_lead(user);
        let Err(error) = led else { return led };
        let told = self.told(&error);
        match self.decide(false, &told) {
            Ok(decided) if decided.commit => {
                if let Err(untold) = self.meeting.fail(&told) {
                    log::warn!("the other writers of {} are not told: {untold}", self.what());
                }
            }
            // Somebody else was first, and ours may follow from that.
            Ok(decided) if decided.why != told => return Err(self.aborted(decided.why)),
            Ok(_) => {}
            Err(untold) => {
                log::warn!("the other writers of {} are not told: {untold}", self.what());
            }
        }
        Err(error)
    }

    fn try_lead(&self, user: serde_json::Value) -> Result<SaveReport> {
        let steps = self.steps;
        let _alone = steps.begin_change()?;
        steps.clear_meetings(self.meeting.folder.name())?;
        let place = steps.find_place(self.step)?;
        self.plan.check_held(0, self.held)?;
        let bytes: u64 = (0..self.plan.writers()).map(|writer| self.plan.bytes(writer)).sum();
        check_space(&*steps.store, &place.target, bytes, self.plan.chunks() as u64)?;
        let below = |key: &Key| {
            let text = key.as_str().strip_prefix(steps.folder.as_str()).unwrap_or(key.as_str());
            text.trim_start_matches('/').to_owned()
        };
        // Before the announcement: whoever has read that finds a sign.
        let _pulse = self.pulse("lead")?;
        self.meeting.announce(&Announce {
            step: self.step,
            writers: self.plan.writers(),
            fingerprint: self.plan.fingerprint(),
            block_bytes: steps.options.block_bytes,
            owner: self.owner.to_string(),
            data: below(&place.data),
            record: below(&place.record),
        })?;
        let planned = Instant::now();
        let prepared = self.prepare(&place, user).inspect_err(|error| {
            // Before the folder goes: else a writer that meets its end takes that for the cause.
            let _ = self.decide(false, &self.told(error));
            steps.abandon(&place.data);
        });
        let (manifest, mine, durable) = prepared?;
        steps.publish(&place, &manifest)?;
        steps.note_latest(place.files());
        Ok(self.report(&mine, planned, durable))
    }

    /// All that comes before the commit, the decision for it included.
    fn prepare(
        &self,
        place: &Place,
        user: serde_json::Value,
    ) -> Result<(FileEntry, Part, Instant)> {
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
        let (mut files, tensors) = merge_parts(self.plan, shards)?;
        files.extend(self.staging(&place.data).write_index()?);
        files.extend(extra);
        let written = Written { files, tensors, blobs, sync: Duration::ZERO };
        self.check(place, &written)?;
        let manifest = steps.seal(self.step, place, written, user)?;
        match self.decide(true, "")? {
            Decision { commit: true, .. } => Ok((manifest, mine, durable)),
            Decision { why, .. } => Err(self.aborted(why)),
        }
    }

    /// Whether all files are there, as long as they were written, and no others.
    fn check(&self, place: &Place, written: &Written) -> Result<()> {
        let what = self.steps.store.display(&place.data);
        let there = self.steps.listing_of(&place.data)?;
        for file in &written.files {
            let got = there.get(&place.data.join(&file.path)?);
            if got != Some(&file.bytes) {
                let got = got.map_or("none".to_owned(), |bytes| format!("{bytes} bytes"));
                let (place, due) = (file.path.clone(), format!("{} bytes", file.bytes));
                return Err(Error::BadManifest { what, place, got, due });
            }
        }
        if there.len() != written.files.len() {
            let got = format!("{} files", there.len());
            let due = format!("the {} that were planned", written.files.len());
            return Err(Error::BadManifest { what, place: "its files".to_owned(), got, due });
        }
        Ok(())
    }

    fn wait_for_parts(&self) -> Result<Vec<Part>> {
        let writers = self.plan.writers();
        let mut roll = Roll::new(writers, writers, self.steps.patience);
        let (alive, waited) = (self.meeting.key("alive")?, Instant::now());
        let mut called: Option<Instant> = None;
        loop {
            let mut done = HashSet::from([0]);
            done.extend(self.meeting.parts_there()?);
            if (0..writers).all(|writer| done.contains(&writer)) {
                let owner = self.owner.to_string();
                return (1..writers).map(|writer| self.meeting.part(writer, &owner)).collect();
            }
            self.go_on()?;
            if called.is_none_or(|called| called.elapsed() >= self.steps.patience.beat / 2) {
                called = Some(Instant::now());
                roll.call(&self.steps.store.names(&alive)?, Instant::now());
            }
            if let Some(dead) = roll.dead(&done, Instant::now()) {
                return Err(self.aborted(dead));
            }
            if self.is_late() {
                roll.call(&self.steps.store.names(&alive)?, Instant::now());
                let (late, deadline) = (roll.late(&done), self.together.deadline);
                return Err(self.aborted(format!("{late}; the deadline is {deadline:?}")));
            }
            pause(waited);
        }
    }

    fn follow(&self) -> Result<SaveReport> {
        let announced = self.wait_for_announce();
        let announce =
            announced.inspect_err(|error| drop(self.decide(false, &self.told(error))))?;
        let data = self.steps.folder.join(&announce.data)?;
        let _pulse = self.pulse("alive")?;
        let planned = Instant::now();
        let written = self.write(&data).and_then(|part| {
            self.meeting.put_part(self.together.writer, &announce.owner, &part)?;
            Ok(part)
        });
        let part = match written {
            Ok(part) => part,
            Err(error) => {
                let told = self.told(&error);
                let decided = self.decide(false, &told);
                // If the part was there although this is an error, all may have gone well.
                if !matches!(&decided, Ok(Decision { commit: true, .. })) {
                    self.steps.abandon(&data);
                    return Err(match decided {
                        Ok(decided) if decided.why != told => self.aborted(decided.why),
                        _ => error,
                    });
                }
                Part::default()
            }
        };
        let durable = Instant::now();
        self.wait_for_step(&announce, &data)?;
        Ok(self.report(&part, planned, durable))
    }

    fn wait_for_announce(&self) -> Result<Announce> {
        let announce = loop {
            self.go_on()?;
            if let Some(announce) = self.meeting.announced()? {
                break announce;
            }
            if self.is_late() {
                let deadline = self.together.deadline;
                return Err(self.aborted(format!("writer 0 did not begin within {deadline:?}")));
            }
            pause(self.begun);
        };
        let Announce { step, writers, fingerprint, block_bytes, .. } = announce;
        let ours = (
            self.step,
            self.plan.writers(),
            self.plan.fingerprint(),
            self.steps.options.block_bytes,
        );
        if (step, writers, fingerprint, block_bytes) != ours {
            let theirs = plan_text(step, writers, fingerprint, block_bytes);
            let ours = plan_text(ours.0, ours.1, ours.2, ours.3);
            let why = format!(
                "it is {ours}, and writer 0 has {theirs}; hint: all processes are to plan the same \
                 tensors, held alike, with the same options"
            );
            return Err(Error::BadInput { what: self.what(), why });
        }
        let name = step_name(step);
        let is_place = announce.data.starts_with(&format!("{STAGING}{name}-"))
            || announce.data.starts_with(&format!("{name}/data-"));
        if !is_place || !announce.record.starts_with(&format!("{name}/")) {
            let (what, place) = (self.what(), "the announcement".to_owned());
            let got = format!("files in '{}', committed by '{}'", announce.data, announce.record);
            return Err(Error::BadManifest { what, place, got, due: format!("those of {name}") });
        }
        Ok(announce)
    }

    /// Waits until the step is there or it is certain that it will not be.
    fn wait_for_step(&self, announce: &Announce, data: &Key) -> Result<()> {
        let record = self.steps.folder.join(&announce.record)?;
        let mut leader = Leader::new(self, announce)?;
        let waited = Instant::now();
        let mut decided = None;
        loop {
            // Asked for first: what is seen below then came after it.
            let gone = leader.is_gone()?;
            if decided.is_none() {
                decided = self.meeting.decided()?;
            }
            match (&decided, gone) {
                (Some(Decision { commit: false, why }), _) => {
                    self.steps.abandon(data);
                    return Err(self.aborted(why.clone()));
                }
                (Some(_), gone) => {
                    if self.is_there(&record)? {
                        return Ok(());
                    }
                    if let Some(failed) = self.meeting.failed()? {
                        return Err(self.aborted(failed.why));
                    }
                    if let Some(why) = gone {
                        let when = "after the commit was decided and before it was seen";
                        return Err(self.aborted(format!("{why}, {when}")));
                    }
                }
                (None, Some(_)) if leader.has_left => {
                    // It has begun another save: this one has ended, and the record says how.
                    return match self.is_there(&record)? {
                        true => Ok(()),
                        false => Err(self.aborted("it has ended, and nobody says why".to_owned())),
                    };
                }
                (None, Some(why)) => {
                    decided = Some(self.decide(false, &why)?);
                    continue;
                }
                (None, None) => {}
            }
            pause(waited);
        }
    }

    fn is_there(&self, record: &Key) -> Result<bool> {
        match self.steps.store.open(record) {
            Ok(_) => Ok(true),
            Err(storage::Error::NotFound { .. }) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    /// Writes this writer's files, durably.
    fn write(&self, data: &Key) -> Result<Part> {
        self.plan.check_held(self.together.writer, self.held)?;
        self.staging(data).write_part(self.together.writer, self.held, self.blobs)
    }

    fn staging<'b>(&'b self, folder: &'b Key) -> Staging<'b> {
        Staging { steps: self.steps, folder, plan: self.plan, held: &[], control: &self.control }
    }

    /// Fails if somebody has decided that there is no such step.
    fn go_on(&self) -> Result<()> {
        match self.meeting.decided()? {
            Some(Decision { commit: false, why }) => Err(self.aborted(why)),
            _ => Ok(()),
        }
    }

    fn decide(&self, commit: bool, why: &str) -> Result<Decision> {
        self.meeting.decide(Decision { commit, why: why.to_owned() })
    }

    fn pulse(&self, folder: &str) -> Result<Pulse> {
        let (steps, owner) = (self.steps, &self.owner);
        let writer = self.together.writer;
        let name = if writer == 0 { owner.to_string() } else { format!("{writer:05}-{owner}") };
        let text = format!("{}\n", self.label());
        let folder = self.meeting.key(folder)?;
        Pulse::start(&steps.store, &folder, name, text, steps.patience.beat)
    }

    fn is_late(&self) -> bool {
        self.begun.elapsed() >= self.together.deadline
    }

    fn label(&self) -> String {
        label_of(self.together.writer, self.plan.writers(), Some(&self.owner))
    }

    fn what(&self) -> String {
        format!("step {} as writer {}", self.step, self.together.writer)
    }

    /// What the others are told of an error of ours.
    fn told(&self, error: &Error) -> String {
        match error {
            Error::Aborted { why, .. } => why.clone(),
            error => format!("{}: {error}", self.label()),
        }
    }

    fn aborted(&self, why: String) -> Error {
        Error::Aborted { what: self.what(), why }
    }

    fn report(&self, part: &Part, planned: Instant, durable: Instant) -> SaveReport {
        SaveReport {
            step: self.step,
            bytes: part.files().map(|file| file.bytes).sum(),
            files: part.files().count(),
            plan: planned - self.begun,
            write: durable - planned,
            sync: Duration::ZERO, // it is within the writing
            commit: durable.elapsed(),
            peak_bytes_per_s: Peak::of(&*self.steps.store).map(|peak| peak.write_bytes_per_s),
        }
    }
}

/// Writer 0, as another sees it.
struct Leader<'a> {
    joint: &'a Joint<'a>,
    folder: Key,
    roll: Roll,
    called: Instant,
    /// Whether its meeting was cleared away, as it does when it begins another.
    has_left: bool,
}

impl<'a> Leader<'a> {
    fn new(joint: &'a Joint<'a>, announce: &Announce) -> Result<Self> {
        let mut roll = Roll::new(1, announce.writers, joint.steps.patience);
        roll.call(&[format!("00000-{}", announce.owner)], Instant::now());
        let (folder, called) = (joint.meeting.key("lead")?, Instant::now());
        Ok(Leader { joint, folder, roll, called, has_left: false })
    }

    /// Why nothing is to be expected of it any more.
    fn is_gone(&mut self) -> Result<Option<String>> {
        let steps = self.joint.steps;
        if self.called.elapsed() >= steps.patience.beat / 2 {
            self.called = Instant::now();
            let names = steps.store.names(&self.folder)?;
            if names.is_empty() {
                self.has_left = true;
                return Ok(Some("writer 0 has left".to_owned()));
            }
            let names: Vec<_> = names.iter().map(|name| format!("00000-{name}")).collect();
            self.roll.call(&names, self.called);
        }
        if self.joint.is_late() {
            let deadline = self.joint.together.deadline;
            return Ok(Some(format!("{}: no end within {deadline:?}", self.roll.label(0))));
        }
        Ok(self.roll.dead(&HashSet::new(), Instant::now()))
    }
}

fn plan_text(step: u64, writers: usize, fingerprint: u64, block_bytes: u64) -> String {
    format!("step {step} by {writers} writers, plan {fingerprint:016x}, blocks of {block_bytes}")
}
