//! Findings about the file system of a path: its type and its mount options.

use storage::ByteSize;
use storage::probe::MountInfo;

use super::{Findings, Purpose};

/// With more read-ahead, a mapping or a buffered read moves many times the bytes of a sample.
const READ_AHEAD_KIB_MAX: u64 = 1024;

/// Fuller file systems slow down, and one target of Lustre may be full long before all are.
const FREE_SHARE_MIN: f64 = 0.1;

/// Request size that NFS clients and servers negotiate by default.
const NFS_REQUEST_BYTES_MIN: u64 = 1 << 20;

pub(super) fn judge(facts: &MountInfo, purpose: Purpose, found: &mut Findings) {
    let MountInfo { file_system, point, source, .. } = facts;
    found.fine("file system", format!("{file_system} at {point}, from {source}"));
    match file_system.as_str() {
        "lustre" => lustre(facts, found),
        "nfs" | "nfs4" => nfs(facts, purpose, found),
        "ceph" => ceph(facts, purpose, found),
        "fuse.ceph-fuse" | "fuse.ceph" => found.hurts(
            "client",
            "CephFS through ceph-fuse",
            "one process copies every byte and caches 200 MB: it serves 4 to 16 requests at once, \
             a kernel mount 64",
            "mount -t ceph MONITORS:/PATH POINT -o name=USER,ro (for data), or use s3:// of its \
             RGW",
        ),
        "overlay" => found.hurts(
            "place",
            "the writable layer of a container",
            "files are lost with the container, and changing a file copies it first",
            "use a volume: -v /data:/data",
        ),
        "tmpfs" | "ramfs" if purpose != Purpose::Data => found.hurts(
            "place",
            "a file system in memory",
            "checkpoints are lost when the machine stops, and take memory from the run",
            "set checkpoint.dir to a disk, or add checkpoint.drain_to for a durable second copy",
        ),
        kind if kind.starts_with("fuse") => found.note(
            "client",
            format!("{kind}: a user-space process serves requests, often one at a time"),
            "more than 4 requests at once are slower, and exclusive rename may be missing for a \
             save",
            "use the kernel client of the store, or its s3:// address",
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
            "mounted with localflock: locks hold on this node only",
            "two preprocess on two nodes that resume the same output do not exclude each other",
            "umount, then mount -o flock",
        );
    } else if facts.has("noflock") {
        found.note(
            "locks",
            "mounted with noflock",
            "no effect on training; a second preprocess of the same output is not refused",
            "umount, then mount -o flock",
        );
    }
}

fn nfs(facts: &MountInfo, purpose: Purpose, found: &mut Findings) {
    let connections = facts.value("nconnect").and_then(|fact| fact.parse::<u32>().ok());
    match connections {
        Some(count @ 2..) => found.fine("connections", format!("nconnect={count}")),
        _ => found.hurts(
            "connections",
            "one TCP connection",
            "all reads and writes of a node share its throughput, 1 to 2 GB/s at best",
            "mount -o vers=4.2,nconnect=8",
        ),
    }
    if facts.value("vers").is_some_and(|fact| fact.starts_with(['2', '3'])) {
        found.note(
            "version",
            format!("NFS {}", facts.value("vers").unwrap_or_default()),
            "locks need a separate daemon, and copies pass through this machine",
            "mount -o vers=4.2,nconnect=8",
        );
    }
    match (facts.has("soft") || facts.has("softerr"), purpose) {
        (true, Purpose::Checkpoint | Purpose::Both) => found.hurts(
            "errors",
            "mounted soft",
            "a save fails when the server does not respond for timeo times retrans; a hard mount \
             waits",
            "mount checkpoints with -o hard; token files may use soft,timeo=100,retrans=3",
        ),
        (false, Purpose::Data) => found.note(
            "errors",
            "mounted hard",
            "a process in a buffered read (a mapped index, other programs) cannot be killed while \
             the server is down; direct reads of samples end with an error",
            "mount token files with -o soft,timeo=100,retrans=3",
        ),
        _ => {}
    }
    nfs_promises(facts, purpose, found);
    nfs_requests(facts, found);
}

/// Options that weaken the guarantees of NFS between machines.
fn nfs_promises(facts: &MountInfo, purpose: Purpose, found: &mut Findings) {
    if let Some(which @ ("all" | "flock")) = facts.value("local_lock") {
        found.hurts(
            "locks",
            format!("local_lock={which}: locks hold on this node only"),
            "two preprocess on two nodes that resume the same output do not exclude each other",
            "umount, then mount -o vers=4.2 without nolock",
        );
    }
    if facts.has("nocto") && purpose != Purpose::Data {
        found.hurts(
            "consistency",
            "mounted with nocto: opening a file or folder does not query the server",
            "writes of other nodes, such as a new checkpoint or its commit, are seen up to a \
             minute late",
            "umount, then mount without nocto; token files may use it",
        );
    }
    if facts.value("proto").is_some_and(|fact| fact.starts_with("udp")) {
        found.breaks(
            "transport",
            "UDP",
            "at high rates fragments of two requests are joined into one, which corrupts data",
            "umount, then mount -o proto=tcp",
        );
    }
}

/// Options that turn one request into many.
fn nfs_requests(facts: &MountInfo, found: &mut Findings) {
    let is_off = |option| facts.value(option) == Some("0");
    if facts.has("noac") || is_off("acregmax") || is_off("acdirmax") {
        found.hurts(
            "attributes",
            "not cached (noac, or actimeo=0)",
            "every stat of a file is a request, and with noac every write waits for the server's \
             disk",
            "umount, then mount without noac and actimeo, which feedline does not need",
        );
    }
    let sizes = ["rsize", "wsize"].map(|option| facts.value(option)?.parse::<u64>().ok());
    match sizes.into_iter().flatten().min() {
        Some(bytes) if bytes < NFS_REQUEST_BYTES_MIN => found.note(
            "request size",
            format!("at most {}", ByteSize(bytes)),
            "a save takes more requests, each of which waits for the server",
            "mount -o rsize=1048576,wsize=1048576; a Linux server limits them by \
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
            "an evicted client stays out until it is mounted again, and every read of the run \
             fails",
            "mount -o recover_session=clean",
        );
    }
    if purpose == Purpose::Data && !facts.has("ro") {
        found.note(
            "capabilities",
            "mounted read-write",
            "one writer on any node revokes the cache capability of all, and each read waits for \
             the server",
            "mount data with -o ro on trainers",
        );
    }
}

fn options(facts: &MountInfo, purpose: Purpose, found: &mut Findings) {
    if facts.has("ro") {
        match purpose {
            Purpose::Data => found.fine("writing", "mounted read-only, as recommended for data"),
            Purpose::Checkpoint => found.breaks(
                "writing",
                "mounted read-only",
                "the first save fails",
                &format!("mount -o remount,rw {}", facts.point),
            ),
            Purpose::Both => found.hurts(
                "writing",
                "mounted read-only",
                "usable for data; a save would fail",
                &format!("mount -o remount,rw {}, or --for data", facts.point),
            ),
        }
    }
    if facts.has("sync") && purpose != Purpose::Data {
        found.hurts(
            "writes",
            "mounted with sync",
            "each write of a save waits for the disk",
            &format!("mount {} -o remount,async; a save syncs its files itself", facts.point),
        );
    }
    if facts.has("nobarrier") || facts.value("barrier") == Some("0") {
        found.breaks(
            "durability",
            "mounted without barriers",
            "a power cut can lose checkpoints that were reported as committed",
            &format!("mount -o remount,barrier=1 {}", facts.point),
        );
    }
    if facts.has("strictatime") {
        found.note(
            "access times",
            "strictatime",
            "every read of a file also writes its access time",
            &format!("mount -o remount,noatime {}", facts.point),
        );
    }
}

fn read_ahead(facts: &MountInfo, found: &mut Findings) {
    match facts.read_ahead_kib {
        Some(kib) if kib > READ_AHEAD_KIB_MAX => found.note(
            "read-ahead",
            format!("{kib} KiB"),
            "no effect on feedline, which uses direct I/O; programs that map token files move up \
             to 240 bytes per byte wanted at 8192 KiB",
            "blockdev --setra 256 DEVICE, or read_ahead_kb in /sys/class/bdi",
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
        let fact = format!("{} free of {}", ByteSize(free), ByteSize(total));
        let share = free as f64 / total.max(1) as f64;
        if free == 0 {
            let cost = "the first save fails";
            found.breaks("space", fact, cost, "lower checkpoint.keep.last, or use another disk");
        } else if share < FREE_SHARE_MIN {
            let cost = "a nearly full file system is slow; on Lustre one target may already be \
                        full, and writes to it wait or fail";
            found.hurts(
                "space",
                fact,
                cost,
                "delete files, lower checkpoint.keep.last, or use another disk",
            );
        } else {
            found.fine("space", fact);
        }
    }
    if let (Some(free), Some(total)) = (facts.free_files, facts.total_files) {
        let fact = format!("{free} free of {total}");
        // A step of a thousand ranks has a few thousand files.
        if free < 10_000 {
            let cost = "a save fails with 'no space left' while bytes are free";
            found.hurts(
                "inodes",
                fact,
                cost,
                "delete small files, or make the file system with more inodes",
            );
        } else {
            found.fine("inodes", fact);
        }
    }
}
