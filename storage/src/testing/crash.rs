//! Simulates a power cut: the states that it may leave on the disk.
//!
//! Content: of the sectors written since the last successful sync of a file, any subset; one sector
//! of the last write is half written. Its length is any that it had since then. Bytes that were
//! never written may have any value. Names: of the changes to folders since their last sync, any
//! subset; a rename happened or it did not, also between two folders. Syncing a folder makes
//! durable every change of it, and all earlier changes of the folders that these touch, as in
//! journaling file systems.

use std::collections::{BTreeMap, BTreeSet};

use crate::base::rng::Rng;
use crate::testing::tree::{Content, Node, TOP, Tree};

/// A sector is written completely or not at all, except the last sector of all.
const SECTOR_BYTES: usize = 512;

/// One operation, as recorded for a power cut.
#[derive(Clone, Debug)]
pub(super) enum Op {
    /// Entries of folders are added (with a node) and removed, atomically; and the file that this
    /// creates, if any.
    Name {
        edits: Vec<Edit>,
        new_file: Option<Node>,
    },
    Write {
        node: Node,
        offset: u64,
        bytes: Vec<u8>,
    },
    SetLen {
        node: Node,
        len_bytes: u64,
    },
    Sync {
        node: Node,
    },
    SyncFailed {
        node: Node,
    },
    SyncFolder {
        folder: Node,
    },
    /// Nothing happened.
    Failed,
}

#[derive(Clone, Debug)]
pub(super) struct Edit {
    folder: Node,
    name: String,
    node: Option<Node>,
}

impl Op {
    pub(super) fn create_file(folder: Node, name: &str, node: Node) -> Self {
        Op::Name { edits: vec![Edit::new((folder, name), Some(node))], new_file: Some(node) }
    }

    pub(super) fn create_folder(folder: Node, name: &str, node: Node) -> Self {
        Op::Name { edits: vec![Edit::new((folder, name), Some(node))], new_file: None }
    }

    pub(super) fn remove(folder: Node, name: &str) -> Self {
        Op::Name { edits: vec![Edit::new((folder, name), None)], new_file: None }
    }

    pub(super) fn rename(from: (Node, &str), to: (Node, &str), node: Node) -> Self {
        let edits = vec![Edit::new(from, None), Edit::new(to, Some(node))];
        Op::Name { edits, new_file: None }
    }
}

impl Edit {
    fn new((folder, name): (Node, &str), node: Option<Node>) -> Self {
        Edit { folder, name: name.to_owned(), node }
    }
}

/// Returns one of the trees that a disk may hold after a power cut, if it started as `start` and
/// then did the operations in `log`.
pub(super) fn image(start: &Tree, log: &[Op], seed: u64) -> Tree {
    let mut rng = Rng::new(seed);
    // Sometimes everything that is not durable is lost, or nothing; otherwise each operation is
    // lost or kept at random.
    let kept_per_mille = [0, 100, 500, 900, 1000][rng.below(5) as usize];
    let folders = folders_after(start, log, kept_per_mille, &mut rng);
    let mut files = files_after(start, log, kept_per_mille, &mut rng);

    // The new tree numbers its nodes from scratch, in the order in which they are reached.
    let mut tree = Tree::new();
    let mut stack = vec![(TOP, TOP)];
    while let Some((old, new)) = stack.pop() {
        for (name, &child) in folders.get(&old).into_iter().flatten() {
            let content = match files.remove(&child) {
                Some(bytes) => Content::File(bytes),
                None => Content::Folder(BTreeMap::new()),
            };
            let added = tree.add(content);
            let folder = tree.folder_mut(new).expect("only folders have children");
            folder.insert(name.clone(), added);
            stack.push((child, added));
        }
    }
    tree
}

type Folders = BTreeMap<Node, BTreeMap<String, Node>>;

fn folders_after(start: &Tree, log: &[Op], kept_per_mille: u32, rng: &mut Rng) -> Folders {
    let mut durable = Folders::new();
    let mut add = |node| {
        if let Ok(entries) = start.folder(node) {
            durable.insert(node, entries.clone());
        }
    };
    add(TOP);
    start.walk(TOP, "", &mut |_, node| add(node));

    let mut pending: Vec<&[Edit]> = Vec::new();
    for op in log {
        match op {
            Op::Name { edits, .. } => pending.push(edits),
            Op::SyncFolder { folder } => {
                let mut touched = BTreeSet::from([*folder]);
                let mut synced = vec![false; pending.len()];
                for (edits, synced) in pending.iter().zip(&mut synced).rev() {
                    *synced = edits.iter().any(|edit| touched.contains(&edit.folder));
                    if *synced {
                        touched.extend(edits.iter().map(|edit| edit.folder));
                    }
                }
                let mut synced = synced.into_iter();
                pending.retain(|edits| {
                    let synced = synced.next().expect("one for each");
                    if synced {
                        apply(&mut durable, edits);
                    }
                    !synced
                });
            }
            _ => {}
        }
    }
    for edits in pending {
        if rng.chance(kept_per_mille) {
            apply(&mut durable, edits);
        }
    }
    durable
}

fn apply(folders: &mut Folders, edits: &[Edit]) {
    for Edit { folder, name, node } in edits {
        let entries = folders.entry(*folder).or_default();
        match node {
            Some(node) => entries.insert(name.clone(), *node),
            None => entries.remove(name),
        };
    }
}

/// A file while the log is replayed.
#[derive(Default)]
struct ReplayedFile<'a> {
    durable: Vec<u8>,
    /// Operations since the last sync, and whether a failed sync has lost them permanently.
    pending: Vec<(&'a Op, bool)>,
}

fn files_after(
    start: &Tree,
    log: &[Op],
    kept_per_mille: u32,
    rng: &mut Rng,
) -> BTreeMap<Node, Vec<u8>> {
    let mut files: BTreeMap<Node, ReplayedFile<'_>> = BTreeMap::new();
    start.walk(TOP, "", &mut |_, node| {
        if let Ok(bytes) = start.file(node) {
            files.insert(node, ReplayedFile { durable: bytes.clone(), pending: Vec::new() });
        }
    });
    let last_write = log.iter().rposition(|op| matches!(op, Op::Write { .. }));
    for op in log {
        match op {
            // A file that is never written has no bytes.
            Op::Name { new_file: Some(node), .. } => {
                files.insert(*node, ReplayedFile::default());
            }
            Op::Write { node, .. } | Op::SetLen { node, .. } => {
                files.entry(*node).or_default().pending.push((op, false));
            }
            Op::Sync { node } => {
                let file = files.entry(*node).or_default();
                let mut lost = Vec::new();
                for (op, is_lost) in std::mem::take(&mut file.pending) {
                    match is_lost {
                        true => lost.push((op, true)),
                        false => write(&mut file.durable, op),
                    }
                }
                file.pending = lost;
            }
            Op::SyncFailed { node } => {
                let pending = &mut files.entry(*node).or_default().pending;
                pending.iter_mut().for_each(|(_, is_lost)| *is_lost = true);
            }
            _ => {}
        }
    }
    let last_write = last_write.map(|at| &log[at]);
    let content_of = |(node, file): (Node, ReplayedFile<'_>)| {
        (node, content_after(&file, last_write, kept_per_mille, rng))
    };
    files.into_iter().map(content_of).collect()
}

/// Applies one operation completely.
fn write(content: &mut Vec<u8>, op: &Op) {
    match op {
        Op::Write { offset, bytes, .. } => {
            let start = *offset as usize; // fits: it was in memory
            content.resize(content.len().max(start + bytes.len()), 0);
            content[start..start + bytes.len()].copy_from_slice(bytes);
        }
        Op::SetLen { len_bytes, .. } => content.resize(*len_bytes as usize, 0), // fits: as above
        _ => {}
    }
}

/// Returns the content with a random subset of the pending operations.
fn content_after(
    file: &ReplayedFile<'_>,
    last_write: Option<&Op>,
    kept_per_mille: u32,
    rng: &mut Rng,
) -> Vec<u8> {
    let mut now = file.durable.clone();
    let mut lens = vec![now.len()];
    for (op, _) in &file.pending {
        write(&mut now, op);
        lens.push(now.len());
    }
    let len = match kept_per_mille {
        1000 => now.len(),
        _ => lens[rng.below(lens.len() as u64) as usize],
    };
    let mut content = file.durable.clone();
    let longest = lens.into_iter().max().unwrap_or(0);
    let grown = content.len();
    content.resize(longest, 0);
    if rng.chance(500) {
        rng.fill(&mut content[grown..]);
    }
    for (op, _) in &file.pending {
        let Op::Write { offset, bytes, .. } = op else { continue };
        let mut at = *offset as usize; // fits: it was in memory
        let mut rest = &bytes[..];
        let partial_sector = if last_write.is_some_and(|last_write| std::ptr::eq(last_write, *op)) {
            rng.below(bytes.len().div_ceil(SECTOR_BYTES) as u64)
        } else {
            u64::MAX
        };
        let mut sector = 0;
        while !rest.is_empty() {
            let (now, later) = rest.split_at(rest.len().min(SECTOR_BYTES - at % SECTOR_BYTES));
            if rng.chance(kept_per_mille) {
                let is_complete = kept_per_mille == 1000 || sector != partial_sector;
                let len_kept =
                    if is_complete { now.len() } else { rng.below(now.len() as u64) as usize };
                content[at..at + len_kept].copy_from_slice(&now[..len_kept]);
            }
            at += now.len();
            (rest, sector) = (later, sector + 1);
        }
    }
    content.truncate(len);
    content
}
