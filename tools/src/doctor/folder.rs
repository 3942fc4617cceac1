//! A file system, tried in a folder of our own that is gone afterwards.

use std::io;
use std::path::{Path, PathBuf};

use storage::fs::lustre::Striping;
use storage::probe::{MountInfo, ProbeFolder};
use storage::{ByteSize, Error, Stage};

use super::{ANSWERS, Finding, Findings, FolderOrigin, Patience, Purpose, mount};
use crate::ui::unfinished_files::{FileTotal, UnfinishedFiles};

/// A commit that takes longer is felt, one that takes as long as the second holds up a run.
const COMMIT_MS_NOTED: f64 = 50.0;
const COMMIT_MS_MAX: f64 = 500.0;

/// Seconds by which the clock of a server may differ: what is less is told apart from nothing.
const SKEW_S_NOTED: f64 = 1.0;
const SKEW_S_MAX: f64 = 60.0;

/// Kinds of unfinished files, what they are, and the line that removes them.
type UnfinishedKind = (fn(&UnfinishedFiles) -> &FileTotal, &'static str, &'static str);
const UNFINISHED: [UnfinishedKind; 5] = [
    (
        |files| &files.orphans,
        "temporary files of dead processes",
        "the next feedline convert, merge, split, repair or materialize into that folder; in a \
         folder of checkpoints, the next run that saves there",
    ),
    (
        |files| &files.debris,
        "outputs of killed runs without a manifest",
        "the same feedline convert, merge, split or repair again",
    ),
    (
        |files| &files.drafts,
        "drafts of runs that were killed or are at work",
        "the same command again, which resumes; with --restart, preprocess and feedline \
         materialize remove them",
    ),
    (
        |files| &files.unknown,
        "temporary files of processes on other machines or in other containers",
        "rm, if those processes are gone",
    ),
    (|files| &files.live, "temporary files of processes at work", ""),
];

pub(super) fn look(
    place: &str,
    purpose: Purpose,
    made: FolderOrigin,
    patience: &Patience,
) -> Vec<Finding> {
    let (path, patience) = (path_of(place), patience.clone());
    let mut visit = FolderProbe { found: Findings::of(place), path, purpose, made, patience };
    if let Err(ProbeEnd::Hangs(what)) = visit.all() {
        visit.found.breaks(
            ANSWERS,
            what,
            "a run that starts here waits as long, and may not be killed",
            "lfs check servers, ceph health detail, or the log of the NFS server; dmesg here",
        );
    }
    visit.found.all
}

/// A plain path is taken as it is; a URL may have options.
pub(super) fn path_of(place: &str) -> PathBuf {
    match place.strip_prefix("file:") {
        Some(url) => url.strip_prefix("//").unwrap_or(url).split('?').next().unwrap_or(url).into(),
        None => place.into(),
    }
}

/// Why there is nothing more to be tried.
enum ProbeEnd {
    /// A step did not come back, in words.
    Hangs(String),
    Interrupted,
}

struct FolderProbe {
    found: Findings,
    path: PathBuf,
    purpose: Purpose,
    made: FolderOrigin,
    patience: Patience,
}

impl FolderProbe {
    fn all(&mut self) -> Result<(), ProbeEnd> {
        let path = self.path.clone();
        let facts = match self.step("look where it is", move || MountInfo::of(&path))? {
            Ok(facts) => facts,
            Err(error) => {
                self.found.breaks("place", error.to_string(), "no run can start here", "");
                return Ok(());
            }
        };
        if !self.is_there(&facts) {
            return Ok(());
        }
        mount::judge(&facts, self.purpose, &mut self.found);
        if facts.file_system == "lustre" {
            self.layout(Path::new(&facts.nearest))?;
        }
        if self.purpose != Purpose::Data && !facts.has("ro") {
            self.try_out(&facts)?;
        }
        self.unfinished(&facts)
    }

    /// What killed runs left in the folder.
    fn unfinished(&mut self, facts: &MountInfo) -> Result<(), ProbeEnd> {
        let folder = PathBuf::from(&facts.nearest);
        if !facts.is_there || !folder.is_dir() {
            return Ok(());
        }
        let search = move || UnfinishedFiles::find(&folder);
        let files = match self.step("look for unfinished files", search)? {
            Ok(files) => files,
            Err(error) => {
                self.found.note("unfinished files", error.to_string(), "", "");
                return Ok(());
            }
        };
        for (total, meaning, fix) in UNFINISHED {
            let FileTotal { files, bytes, example } = total(&files);
            if *files > 0 {
                let size = ByteSize(*bytes);
                let size_text = format!("{meaning}: {size} in {files}, such as {example}");
                self.found.note("unfinished files", size_text, "they take space", fix);
            }
        }
        if files.is_partial {
            let reason = "the folder has more files than are searched";
            self.found.note("unfinished files", reason, "", "feedline doctor on its subfolders");
        } else if files.is_empty() {
            self.found.fine("unfinished files", "none");
        }
        Ok(())
    }

    fn is_there(&mut self, facts: &MountInfo) -> bool {
        let told = || format!("not there; the nearest is {}, on {}", facts.nearest, facts.point);
        match self.made {
            _ if facts.is_there => {}
            FolderOrigin::ByRun => self.found.note(
                "place",
                told(),
                "nothing, if that is where it should be: the run makes it",
                "if a file system should be mounted there, mount it first",
            ),
            FolderOrigin::ByNobody => self.found.breaks(
                "place",
                told(),
                "a run ends with 'no such file', or fills the disk of the system",
                "mount it, or correct the path",
            ),
        }
        facts.is_there || self.made == FolderOrigin::ByRun
    }

    /// Does a step that may hang, on a thread of its own.
    fn step<T: Send + 'static>(
        &self,
        what: &str,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, ProbeEnd> {
        if self.patience.stop.is_set() {
            return Err(ProbeEnd::Interrupted);
        }
        self.patience.stage(what).run(work).map_err(|error| ProbeEnd::Hangs(error.to_string()))
    }

    fn layout(&mut self, path: &Path) -> Result<(), ProbeEnd> {
        let own = path.to_owned();
        match self.step("read the layout", move || Striping::of(&own))? {
            Ok(Some(striping)) => self.found.fine("striping", striping.to_string()),
            Ok(None) => self.found.note(
                "striping",
                "that of the file system, which is usually one stripe",
                "nothing for shards that feedline writes, which it stripes by their size; a file \
                 that is copied here has the rate of one target",
                "feedline stripe recommend --bytes SIZE --for data, then feedline stripe set",
            ),
            Err(error) => self.found.note("striping", error.to_string(), "", ""),
        }
        Ok(())
    }

    fn try_out(&mut self, facts: &MountInfo) -> Result<(), ProbeEnd> {
        let nearest = PathBuf::from(&facts.nearest);
        let make = move || match nearest.parent() {
            Some(folder) if !nearest.is_dir() => ProbeFolder::new(folder),
            _ => ProbeFolder::new(&nearest),
        };
        let scratch = match self.step("make a folder", make)? {
            Ok(scratch) => scratch,
            Err(error) => {
                self.refused(&error);
                return Ok(());
            }
        };
        let tried = self.probes(&scratch, facts);
        if let Err(ProbeEnd::Hangs(what)) = tried {
            // Whoever removes it now would hang as well.
            return Err(ProbeEnd::Hangs(format!("{what}; {} stays", scratch.name())));
        }
        let removing = scratch.clone();
        let stage = Stage::begin("remove what was tried", self.patience.limit);
        let removed = stage.run(move || removing.remove());
        match removed
            .map_err(|error| ProbeEnd::Hangs(format!("{error}; {} stays", scratch.name())))?
        {
            Ok(()) => tried,
            Err(error) => {
                let cost = "old checkpoints cannot be deleted either";
                self.found.breaks("removing", error.to_string(), cost, "");
                tried
            }
        }
    }

    fn refused(&mut self, error: &Error) {
        let told = format!("nothing can be written: {error}");
        let (cost, fix) = match error {
            Error::Denied { .. } => ("a save fails", "chown or chmod u+rwx, as the run's user"),
            Error::NoSpace { .. } => ("a save fails", "delete something, or ask for more quota"),
            _ => ("a save fails", "mount -o remount,rw, or another folder"),
        };
        match self.purpose {
            Purpose::Checkpoint => self.found.breaks("writing", told, cost, fix),
            _ => self.found.hurts("writing", told, "good for data; a save would fail", fix),
        }
    }

    fn probes(&mut self, scratch: &ProbeFolder, facts: &MountInfo) -> Result<(), ProbeEnd> {
        self.names(scratch)?;
        let own = scratch.clone();
        match self.step("lock a file", move || own.lock())? {
            Ok(true) => self.found.fine("locks", "one keeps a second out"),
            outcome => self.found.note(
                "locks",
                outcome.map_or_else(|e| e.to_string(), |_| "they keep nobody out".to_owned()),
                "training takes none; a second `preprocess` of one output is not kept out",
                "on Lustre mount -o flock; on NFS vers=4",
            ),
        }
        let own = scratch.clone();
        match self.step("share blocks", move || own.reflink())? {
            Ok(()) => self.found.fine("shared blocks", "copies of datasets copy nothing"),
            Err(_) => self.found.fine("shared blocks", "none: merging a dataset copies it"),
        }
        let own = scratch.clone();
        match self.step("reserve space", move || own.allocate())? {
            Ok(()) => self.found.fine("reserved space", "a full disk is found before a save"),
            Err(error) => self.found.note(
                "reserved space",
                error.to_string(),
                "a disk that fills up meanwhile is found in the middle of a save, which is then \
                 given up",
                "",
            ),
        }
        self.direct(scratch, facts)?;
        self.times(scratch)
    }

    /// Whether names are given once.
    fn names(&mut self, scratch: &ProbeFolder) -> Result<(), ProbeEnd> {
        let own = scratch.clone();
        let created = self.step("make a file", move || own.exclusive_create())?;
        let own = scratch.clone();
        let renamed = self.step("rename a file", move || own.exclusive_rename())?;
        let own = scratch.clone();
        let linked = self.step("link a file", move || own.hard_link())?;
        let lost = "two runs that save one step can overwrite each other's, and neither hears";
        match created {
            Ok(true) => self.found.fine("new files", "a name that is taken is refused"),
            Ok(false) => self.found.breaks("new files", "O_EXCL is ignored", lost, ""),
            Err(error) => self.found.breaks("new files", error.to_string(), "a save fails", ""),
        }
        match (renamed, linked) {
            (Ok(true), _) => self.found.fine("new names", "a rename over another is refused"),
            (Ok(false), _) => {
                self.found.breaks("new names", "RENAME_NOREPLACE is ignored", lost, "");
            }
            (Err(error), Ok(())) => self
                .found
                .fine("new names", format!("given by links, for RENAME_NOREPLACE says: {error}")),
            (Err(error), Err(link)) => self.found.breaks(
                "new names",
                format!("neither RENAME_NOREPLACE ({error}) nor links ({link})"),
                "no object can be made visible in one step: no save",
                "another file system",
            ),
        }
        Ok(())
    }

    fn direct(&mut self, scratch: &ProbeFolder, facts: &MountInfo) -> Result<(), ProbeEnd> {
        let own = scratch.clone();
        let in_memory = matches!(facts.file_system.as_str(), "tmpfs" | "ramfs");
        match self.step("read and write around the page cache", move || own.direct())? {
            Ok(direct) => {
                let memory = match direct.memory_align {
                    Some(bytes) => format!("memory to {bytes}"),
                    None => "of memory it does not tell".to_owned(),
                };
                let told = format!("offsets aligned to {} bytes, {memory}", direct.offset_align);
                self.found.fine("direct IO", told);
            }
            Err(error) if in_memory => self.found.fine("direct IO", format!("none: {error}")),
            Err(error) => self.found.hurts(
                "direct IO",
                is_refused(&error),
                "every byte is copied once more and pushes others out of the page cache; a save \
                 writes at a fraction of the disk's rate, in bursts",
                "another file system, or on Lustre and NFS a client that has it",
            ),
        }
        Ok(())
    }

    fn times(&mut self, scratch: &ProbeFolder) -> Result<(), ProbeEnd> {
        let own = scratch.clone();
        match self.step("make a file durable", move || own.commit_ms())? {
            Ok(ms) if ms < COMMIT_MS_NOTED => {
                self.found.fine("a durable file", format!("takes {ms:.1} ms"));
            }
            Ok(ms) if ms < COMMIT_MS_MAX => self.found.note(
                "a durable file",
                format!("takes {ms:.0} ms"),
                "a commit is about five of them in a row: behind a run it is not felt",
                "",
            ),
            Ok(ms) => self.found.hurts(
                "a durable file",
                format!("takes {ms:.0} ms"),
                "a commit is about five of them in a row, and so is the log before each save",
                "checkpoint.dir on a nearer disk, and checkpoint.drain_to for this one",
            ),
            Err(error) => self.found.breaks("a durable file", error.to_string(), "no save", ""),
        }
        let own = scratch.clone();
        if let Ok(ahead) = self.step("date a file", move || own.clock_ahead_s())? {
            let word = if ahead < 0.0 { "behind" } else { "ahead of" };
            let told = format!("files are dated {:.1} s {word} this machine", ahead.abs());
            let fix = "chronyc tracking, on both";
            match ahead.abs() {
                SKEW_S_MAX.. => {
                    let cost = "what goes by the age of files (rsync, make, clean-up jobs) takes \
                                the wrong ones; leases here do not";
                    self.found.hurts("clocks", told, cost, fix);
                }
                SKEW_S_NOTED.. => {
                    self.found.note("clocks", told, "logs and files do not line up", fix);
                }
                _ => self.found.fine("clocks", "files are dated as this machine has it"),
            }
        }
        Ok(())
    }
}

fn is_refused(error: &io::Error) -> String {
    format!("refused: {error}")
}
