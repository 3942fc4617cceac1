//! Tests a file system in a temporary folder that is removed afterwards.

use std::io;
use std::path::{Path, PathBuf};

use storage::fs::lustre::Striping;
use storage::probe::{MountInfo, ProbeFolder};
use storage::{ByteSize, Error, Location, Stage};

use super::{ANSWERS, Finding, Findings, FolderOrigin, Patience, Purpose, mount};
use crate::ui::unfinished_files::{FileTotal, UnfinishedFiles};

/// Commits slower than the first limit are reported. Commits slower than the second delay a run.
const COMMIT_MS_NOTED: f64 = 50.0;
const COMMIT_MS_MAX: f64 = 500.0;

/// Clock difference to a server, in seconds, above which it is reported: smaller ones are noise.
const SKEW_S_NOTED: f64 = 1.0;
const SKEW_S_MAX: f64 = 60.0;

/// Kinds of unfinished files, with a description and how to remove them.
type UnfinishedKind = (fn(&UnfinishedFiles) -> &FileTotal, &'static str, &'static str);
const UNFINISHED: [UnfinishedKind; 5] = [
    (
        |files| &files.orphans,
        "temporary files of dead processes",
        "run feedline convert, merge, split, repair or materialize into that folder, which removes \
         them; in a folder of checkpoints, the next save removes them",
    ),
    (
        |files| &files.debris,
        "outputs of killed runs without a manifest",
        "run the same feedline convert, merge, split or repair again",
    ),
    (
        |files| &files.drafts,
        "drafts of killed or running processes",
        "run the same command again, which resumes them; preprocess and feedline materialize \
         remove them with --restart",
    ),
    (
        |files| &files.unknown,
        "temporary files of processes on other machines or in other containers",
        "rm, if those processes have ended",
    ),
    (|files| &files.live, "temporary files of running processes", ""),
];

pub(super) fn look(
    place: &str,
    purpose: Purpose,
    made: FolderOrigin,
    patience: &Patience,
) -> Vec<Finding> {
    let (path, patience) = (path_of(place), patience.clone());
    let mut probe = FolderProbe { found: Findings::of(place), path, purpose, made, patience };
    if let Err(ProbeEnd::Hangs(what)) = probe.all() {
        probe.found.breaks(
            ANSWERS,
            what,
            "a run here waits as long, and may ignore signals meanwhile",
            "check the server with lfs check servers, ceph health detail or the log of the NFS \
             server, and this machine with dmesg",
        );
    }
    probe.found.all
}

/// The path of a plain path or of a `file:` URL, without the options of the URL.
pub(super) fn path_of(place: &str) -> PathBuf {
    Location::new(place).local_path().map_or_else(|| place.into(), Path::to_owned)
}

/// Why the probe ended early.
enum ProbeEnd {
    /// A step did not return; the text names it.
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
        let facts = match self.step("find the mount", move || MountInfo::of(&path))? {
            Ok(facts) => facts,
            Err(error) => {
                self.found.breaks("place", error.to_string(), "a run cannot start here", "");
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

    /// Reports unfinished files of killed runs in the folder.
    fn unfinished(&mut self, facts: &MountInfo) -> Result<(), ProbeEnd> {
        let folder = PathBuf::from(&facts.nearest);
        if !facts.is_there || !folder.is_dir() {
            return Ok(());
        }
        let search = move || UnfinishedFiles::find(&folder);
        let files = match self.step("search for unfinished files", search)? {
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
                let size_text = format!("{meaning}: {files}, {size} in total, such as {example}");
                self.found.note("unfinished files", size_text, "they take space", fix);
            }
        }
        if files.is_partial {
            let reason = "the folder has too many files to search all of them";
            self.found.note(
                "unfinished files",
                reason,
                "",
                "run feedline doctor on its subfolders",
            );
        } else if files.is_empty() {
            self.found.fine("unfinished files", "none");
        }
        Ok(())
    }

    fn is_there(&mut self, facts: &MountInfo) -> bool {
        let fact = || {
            format!(
                "does not exist; nearest existing folder: {}, on {}",
                facts.nearest, facts.point
            )
        };
        match self.made {
            _ if facts.is_there => {}
            FolderOrigin::ByRun => self.found.note(
                "place",
                fact(),
                "no effect if the path is as intended: the run creates it",
                "mount the file system first, if one belongs there",
            ),
            FolderOrigin::MustExist => self.found.breaks(
                "place",
                fact(),
                "a run fails with 'no such file', or fills the system disk",
                "mount it, or correct the path",
            ),
        }
        facts.is_there || self.made == FolderOrigin::ByRun
    }

    /// Runs a step that may hang, on a separate thread.
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
                "default of the file system, usually one stripe",
                "no effect on shards, which feedline stripes by their size; a file copied here is \
                 as fast as one target",
                "run feedline stripe recommend --bytes SIZE --for data, then feedline stripe set",
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
        let scratch = match self.step("create a folder", make)? {
            Ok(scratch) => scratch,
            Err(error) => {
                self.refused(&error);
                return Ok(());
            }
        };
        let tried = self.probes(&scratch, facts);
        if let Err(ProbeEnd::Hangs(what)) = tried {
            // Removing the folder now would hang as well.
            return Err(ProbeEnd::Hangs(format!("{what}; {} is left there", scratch.name())));
        }
        let removing = scratch.clone();
        let stage = Stage::begin("remove the test folder", self.patience.limit);
        let removed = stage.run(move || removing.remove());
        match removed.map_err(|error| {
            ProbeEnd::Hangs(format!("{error}; {} is left there", scratch.name()))
        })? {
            Ok(()) => tried,
            Err(error) => {
                let cost = "old checkpoints cannot be deleted either";
                self.found.breaks("removing", error.to_string(), cost, "");
                tried
            }
        }
    }

    fn refused(&mut self, error: &Error) {
        let fact = format!("not writable: {error}");
        let (cost, fix) = match error {
            Error::Denied { .. } => {
                ("a save fails", "chown, or chmod u+rwx, for the user of the run")
            }
            Error::NoSpace { .. } => ("a save fails", "delete files, or raise the quota"),
            _ => ("a save fails", "mount -o remount,rw, or use another folder"),
        };
        match self.purpose {
            Purpose::Checkpoint => self.found.breaks("writing", fact, cost, fix),
            _ => self.found.hurts("writing", fact, "usable for data; a save would fail", fix),
        }
    }

    fn probes(&mut self, scratch: &ProbeFolder, facts: &MountInfo) -> Result<(), ProbeEnd> {
        self.names(scratch)?;
        let own = scratch.clone();
        match self.step("lock a file", move || own.lock())? {
            Ok(true) => self.found.fine("locks", "a second lock is refused"),
            outcome => self.found.note(
                "locks",
                outcome.map_or_else(
                    |e| e.to_string(),
                    |_| "a second lock is granted, so locks have no effect".to_owned(),
                ),
                "no effect on training; a second preprocess of the same output is not refused",
                "mount -o flock on Lustre, mount -o vers=4 on NFS",
            ),
        }
        let own = scratch.clone();
        match self.step("clone a file", move || own.reflink())? {
            Ok(()) => {
                self.found.fine("shared blocks", "available: merging a dataset copies no bytes");
            }
            Err(_) => {
                self.found.fine("shared blocks", "not available: merging a dataset copies it");
            }
        }
        let own = scratch.clone();
        match self.step("reserve space", move || own.allocate())? {
            Ok(()) => self
                .found
                .fine("reserved space", "available: a full disk is detected before a save"),
            Err(error) => self.found.note(
                "reserved space",
                error.to_string(),
                "a disk that fills up during a save makes that save fail midway",
                "",
            ),
        }
        self.direct(scratch, facts)?;
        self.times(scratch)
    }

    /// Checks that creating, renaming and linking refuse an existing name.
    fn names(&mut self, scratch: &ProbeFolder) -> Result<(), ProbeEnd> {
        let own = scratch.clone();
        let created = self.step("create a file", move || own.exclusive_create())?;
        let own = scratch.clone();
        let renamed = self.step("rename a file", move || own.exclusive_rename())?;
        let own = scratch.clone();
        let linked = self.step("link a file", move || own.hard_link())?;
        let lost = "two runs that save the same step can overwrite each other without an error";
        match created {
            Ok(true) => self.found.fine("new files", "an existing name is refused"),
            Ok(false) => self.found.breaks("new files", "O_EXCL is ignored", lost, ""),
            Err(error) => self.found.breaks("new files", error.to_string(), "a save fails", ""),
        }
        match (renamed, linked) {
            (Ok(true), _) => {
                self.found.fine("new names", "a rename to an existing name is refused");
            }
            (Ok(false), _) => {
                self.found.breaks("new names", "RENAME_NOREPLACE is ignored", lost, "");
            }
            (Err(error), Ok(())) => self.found.fine(
                "new names",
                format!("by hard links; RENAME_NOREPLACE is not available: {error}"),
            ),
            (Err(error), Err(link)) => self.found.breaks(
                "new names",
                format!("neither by RENAME_NOREPLACE ({error}) nor by hard links ({link})"),
                "no object can be published atomically, so a save fails",
                "use another file system",
            ),
        }
        Ok(())
    }

    fn direct(&mut self, scratch: &ProbeFolder, facts: &MountInfo) -> Result<(), ProbeEnd> {
        let own = scratch.clone();
        let in_memory = matches!(facts.file_system.as_str(), "tmpfs" | "ramfs");
        match self.step("use direct I/O", move || own.direct())? {
            Ok(direct) => {
                let memory = match direct.memory_align {
                    Some(bytes) => format!("{bytes} bytes"),
                    None => "not reported".to_owned(),
                };
                let fact = format!(
                    "alignment of offsets {} bytes, of memory {memory}",
                    direct.offset_align
                );
                self.found.fine("direct IO", fact);
            }
            Err(error) if in_memory => {
                self.found.fine("direct IO", format!("not available: {error}"));
            }
            Err(error) => self.found.hurts(
                "direct IO",
                is_refused(&error),
                "every byte is copied once more and evicts others from the page cache; a save \
                 writes in bursts, at a fraction of the disk's throughput",
                "use another file system; on Lustre and NFS, a client that supports direct I/O",
            ),
        }
        Ok(())
    }

    fn times(&mut self, scratch: &ProbeFolder) -> Result<(), ProbeEnd> {
        let own = scratch.clone();
        match self.step("write and fsync a file", move || own.commit_ms())? {
            Ok(ms) if ms < COMMIT_MS_NOTED => {
                self.found.fine("a durable file", format!("{ms:.1} ms"));
            }
            Ok(ms) if ms < COMMIT_MS_MAX => self.found.note(
                "a durable file",
                format!("{ms:.0} ms"),
                "a commit takes about five in a row, which an async save hides",
                "",
            ),
            Ok(ms) => self.found.hurts(
                "a durable file",
                format!("{ms:.0} ms"),
                "a commit takes about five in a row, and so does the log before each save",
                "set checkpoint.dir to a closer disk, and checkpoint.drain_to to this one",
            ),
            Err(error) => {
                self.found.breaks("a durable file", error.to_string(), "a save fails", "");
            }
        }
        let own = scratch.clone();
        if let Ok(ahead) = self.step("read the time of a new file", move || own.clock_ahead_s())? {
            let word = if ahead < 0.0 { "behind" } else { "ahead of" };
            let fact =
                format!("times of files are {:.1} s {word} the clock of this machine", ahead.abs());
            let fix = "run chronyc tracking on both";
            match ahead.abs() {
                SKEW_S_MAX.. => {
                    let cost = "programs that use the age of files (rsync, make, clean-up jobs) \
                                choose wrong ones; leases are not affected";
                    self.found.hurts("clocks", fact, cost, fix);
                }
                SKEW_S_NOTED.. => {
                    self.found.note("clocks", fact, "times of logs and files differ", fix);
                }
                _ => {
                    self.found
                        .fine("clocks", "times of files agree with the clock of this machine");
                }
            }
        }
        Ok(())
    }
}

fn is_refused(error: &io::Error) -> String {
    format!("refused: {error}")
}
