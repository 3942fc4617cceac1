//! What the file system of a path means for a run, by its kind and options.

use storage::ByteSize;
use storage::probe::MountInfo;

use super::{Findings, Purpose};

/// From here on a map or a read through the page cache moves many times the bytes of a sample.
const READ_AHEAD_KIB_MAX: u64 = 1024;

/// Fuller file systems slow down, and one target of Lustre may be full long before all are.
const FREE_SHARE_MIN: f64 = 0.1;

/// What clients and servers of NFS agree on by themselves if both may.
const NFS_REQUEST_BYTES_MIN: u64 = 1 << 20;

pub(super) fn judge(facts: &MountInfo, purpose: Purpose, found: &mut Findings) {
    let MountInfo { file_system, point, source, .. } = facts;
    found.fine("file system", format!("{file_system} at {point}, of {source}"));
    match file_system.as_str() {
        "lustre" => lustre(facts, found),
        "nfs" | "nfs4" => nfs(facts, purpose, found),
        "ceph" => ceph(facts, purpose, found),
        "fuse.ceph-fuse" | "fuse.ceph" => found.hurts(
            "client",
            "CephFS through ceph-fuse",
            "one process copies every byte and caches 200 MB: 4 to 16 requests at once are what \
             it carries, of a mount of the kernel's 64",
            "mount -t ceph MONITORS:/PATH POINT -o name=USER,ro (for data), or s3:// of its RGW",
        ),
        "overlay" => found.hurts(
            "place",
            "a layer of a container",
            "it is gone with the container, and a file that is changed is copied first",
            "a volume: -v /data:/data",
        ),
        "tmpfs" | "ramfs" if purpose != Purpose::Data => found.hurts(
            "place",
            "memory",
            "checkpoints here are gone with the machine, and take memory from the run",
            "checkpoint.dir on a disk; a fast first copy and a lasting second one are \
             checkpoint.drain_to",
        ),
        kind if kind.starts_with("fuse") => found.note(
            "client",
            format!("{kind}: a process that answers, often one request at a time"),
            "more than 4 requests at once are slower, and a save may find no exclusive rename",
            "the store's own client, or its s3:// address",
        ),
        _ => {}
    }
    options(facts, purpose, found);
    read_ahead(facts, found);
    space(facts, purpose, found);
}

fn lustre(facts: &MountInfo, found: &mut Findings) {
    if facts.has("localflock") {
        found.hurts(
            "locks",
            "mounted with localflock: they hold on this node alone",
            "two `preprocess` on two nodes that resume one output are not kept apart",
            "umount and mount -o flock",
        );
    } else if facts.has("noflock") {
        found.note(
            "locks",
            "mounted with noflock",
            "training takes none; a second `preprocess` of one output is not kept out",
            "umount and mount -o flock",
        );
    }
}

fn nfs(facts: &MountInfo, purpose: Purpose, found: &mut Findings) {
    let connections = facts.value("nconnect").and_then(|told| told.parse::<u32>().ok());
    match connections {
        Some(count @ 2..) => found.fine("connections", format!("nconnect={count}")),
        _ => found.hurts(
            "connections",
            "one TCP connection",
            "all reads and writes of a node share what one connection carries, 1 to 2 GB/s at best",
            "mount -o vers=4.2,nconnect=8",
        ),
    }
    if facts.value("vers").is_some_and(|told| told.starts_with(['2', '3'])) {
        found.note(
            "version",
            format!("NFS {}", facts.value("vers").unwrap_or_default()),
            "locks need a daemon of their own, and copies pass through this machine",
            "mount -o vers=4.2,nconnect=8",
        );
    }
    match (facts.has("soft") || facts.has("softerr"), purpose) {
        (true, Purpose::Checkpoint | Purpose::Both) => found.hurts(
            "errors",
            "mounted soft",
            "a save fails when the server is away for longer than timeo times retrans, where \
             hard would wait",
            "mount checkpoints -o hard; token files may be soft,timeo=100,retrans=3",
        ),
        (false, Purpose::Data) => found.note(
            "errors",
            "mounted hard",
            "what reads through the page cache (maps of indexes, other programs) of a server that \
             is gone cannot be killed; reads of samples, around it, end with an error",
            "mount token files -o soft,timeo=100,retrans=3",
        ),
        _ => {}
    }
    nfs_promises(facts, purpose, found);
    nfs_requests(facts, found);
}

/// Options that take back what NFS promises to several machines.
fn nfs_promises(facts: &MountInfo, purpose: Purpose, found: &mut Findings) {
    if let Some(which @ ("all" | "flock")) = facts.value("local_lock") {
        found.hurts(
            "locks",
            format!("local_lock={which}: they hold on this node alone"),
            "two `preprocess` on two nodes that resume one output are not kept apart",
            "umount and mount -o vers=4.2, without nolock",
        );
    }
    if facts.has("nocto") && purpose != Purpose::Data {
        found.hurts(
            "consistency",
            "mounted with nocto: opening a file or folder does not ask the server",
            "what other nodes write, a new checkpoint or the sign that a save is whole, is seen \
             up to a minute late",
            "umount and mount without nocto; token files may have it",
        );
    }
    if facts.value("proto").is_some_and(|told| told.starts_with("udp")) {
        found.breaks(
            "transport",
            "UDP",
            "at today's rates parts of two requests are put together as one, and the bytes are \
             wrong",
            "umount and mount -o proto=tcp",
        );
    }
}

/// Options that make many requests of one.
fn nfs_requests(facts: &MountInfo, found: &mut Findings) {
    let is_off = |option| facts.value(option) == Some("0");
    if facts.has("noac") || is_off("acregmax") || is_off("acdirmax") {
        found.hurts(
            "attributes",
            "not remembered (noac, or actimeo=0)",
            "every look at a file is a request, and with noac every write waits for the server's \
             disk by itself",
            "umount and mount without noac and actimeo; nothing here needs them",
        );
    }
    let sizes = ["rsize", "wsize"].map(|option| facts.value(option)?.parse::<u64>().ok());
    match sizes.into_iter().flatten().min() {
        Some(bytes) if bytes < NFS_REQUEST_BYTES_MIN => found.note(
            "request size",
            format!("{} at most", ByteSize(bytes)),
            "a save is so many more requests, each with its own wait for the server",
            "mount -o rsize=1048576,wsize=1048576; on a server of Linux the limit is \
             /proc/fs/nfsd/max_block_size, set before nfsd starts",
        ),
        Some(bytes) => found.fine("request size", format!("up to {}", ByteSize(bytes))),
        None => {}
    }
}

fn ceph(facts: &MountInfo, purpose: Purpose, found: &mut Findings) {
    if facts.value("recover_session") != Some("clean") {
        found.note(
            "recovery",
            "recover_session is not clean",
            "a client that the cluster gave up stays out until it is mounted again: every read \
             of the run fails",
            "mount -o recover_session=clean",
        );
    }
    if purpose == Purpose::Data && !facts.has("ro") {
        found.note(
            "capabilities",
            "mounted for writing",
            "one writer anywhere takes the right to cache away from all, and each read waits for \
             the server",
            "mount data -o ro on trainers",
        );
    }
}

fn options(facts: &MountInfo, purpose: Purpose, found: &mut Findings) {
    if facts.has("ro") {
        match purpose {
            Purpose::Data => found.fine("writing", "mounted read-only, as data should be"),
            Purpose::Checkpoint => found.breaks(
                "writing",
                "mounted read-only",
                "the first save fails",
                &format!("mount -o remount,rw {}", facts.point),
            ),
            Purpose::Both => found.hurts(
                "writing",
                "mounted read-only",
                "good for data; a save would fail",
                &format!("mount -o remount,rw {}, or --for data", facts.point),
            ),
        }
    }
    if facts.has("sync") && purpose != Purpose::Data {
        found.hurts(
            "writes",
            "mounted with sync",
            "every write of a save waits for the disk by itself",
            &format!("mount {} -o remount,async: a save syncs what it must", facts.point),
        );
    }
    if facts.has("nobarrier") || facts.value("barrier") == Some("0") {
        found.breaks(
            "durability",
            "mounted without barriers",
            "a power cut can take checkpoints that were said to be committed",
            &format!("mount -o remount,barrier=1 {}", facts.point),
        );
    }
    if facts.has("strictatime") {
        found.note(
            "access times",
            "strictatime",
            "every read of a file is a write of its time",
            &format!("mount -o remount,noatime {}", facts.point),
        );
    }
}

fn read_ahead(facts: &MountInfo, found: &mut Findings) {
    match facts.read_ahead_kib {
        Some(kib) if kib > READ_AHEAD_KIB_MAX => found.note(
            "read-ahead",
            format!("{kib} KiB"),
            "nothing here, which reads around the page cache; readers that map token files move \
             up to 240 bytes for each they want at 8192 KiB",
            "blockdev --setra 256 DEVICE, or read_ahead_kb of /sys/class/bdi",
        ),
        Some(kib) => found.fine("read-ahead", format!("{kib} KiB")),
        None => {}
    }
}

fn space(facts: &MountInfo, purpose: Purpose, found: &mut Findings) {
    if purpose == Purpose::Data {
        return;
    }
    if let (Some(free), Some(total)) = (facts.free_bytes, facts.total_bytes) {
        let told = format!("{} free of {}", ByteSize(free), ByteSize(total));
        let share = free as f64 / total.max(1) as f64;
        if free == 0 {
            let cost = "the first save fails";
            found.breaks("space", told, cost, "checkpoint.keep.last lower, or another disk");
        } else if share < FREE_SHARE_MIN {
            let cost = "file systems slow down when they are nearly full; of Lustre's targets \
                        one may be full already, and writes to it wait or fail";
            found.hurts("space", told, cost, "delete, checkpoint.keep.last lower, or another disk");
        } else {
            found.fine("space", told);
        }
    }
    if let (Some(free), Some(total)) = (facts.free_files, facts.total_files) {
        let told = format!("{free} of {total} left");
        // A step of a thousand ranks has a few thousand files.
        if free < 10_000 {
            let cost = "a save ends with 'no space left' while bytes are free";
            found.hurts(
                "inodes",
                told,
                cost,
                "delete small files, or a file system made with more",
            );
        } else {
            found.fine("inodes", told);
        }
    }
}
