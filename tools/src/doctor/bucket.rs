//! Findings about an object store.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use storage::probe::{BucketInfo, ProbeDepth};
use storage::{Location, Stage};

use super::{ANSWERS, Finding, Findings, Patience, Purpose};

/// S3 refuses requests whose date is further off.
const SKEW_S_MAX: i64 = 900;

/// Smaller clock differences are not reported.
const SKEW_S_NOTED: i64 = 5;

/// Maximum time until a probe ends after an interruption.
const GRACE: Duration = Duration::from_secs(10);

const RULE: &str = "aws s3api put-bucket-lifecycle-configuration --bucket BUCKET \
    --lifecycle-configuration '{\"Rules\":[{\"ID\":\"parts\",\"Status\":\"Enabled\",\"Filter\":{},\
    \"AbortIncompleteMultipartUpload\":{\"DaysAfterInitiation\":1}}]}'";

pub(super) fn look(url: &str, purpose: Purpose, patience: &Patience) -> Vec<Finding> {
    // The report omits the options of the URL.
    let mut found = Findings::of(Location::new(url).without_options().to_string());
    let step = Arc::new(Mutex::new("start"));
    let (named, owned_url) = (Arc::clone(&step), url.to_owned());
    let depth = if purpose == Purpose::Data { ProbeDepth::Look } else { ProbeDepth::Write };
    let work = move || {
        let set_step = |what| *named.lock().unwrap_or_else(PoisonError::into_inner) = what;
        BucketInfo::of(&owned_url, depth, &set_step)
    };
    // The probe makes a dozen requests; the last removes the objects that it wrote.
    let stage = Stage::begin("probe the bucket", patience.limit.saturating_mul(4));
    match stage.or_when(&patience.stop.0, GRACE).run(work) {
        Ok(Ok(facts)) => judge(&facts, &mut found),
        Ok(Err(error)) => found.breaks("address", error.to_string(), "a run cannot start", ""),
        Err(error) => {
            let step = *step.lock().unwrap_or_else(PoisonError::into_inner);
            let cost = "a run waits as long and then fails";
            let stays = match depth {
                ProbeDepth::Look => "",
                ProbeDepth::Write => "; it may leave an object .tmp-doctor-...",
            };
            found.breaks(ANSWERS, format!("{error}; stuck at: {step}{stays}"), cost, "");
        }
    }
    found.all
}

pub(super) fn judge(facts: &BucketInfo, found: &mut Findings) {
    found.fine("server", facts.endpoint.as_deref().unwrap_or("AWS"));
    for (what, outcome) in &facts.tried {
        let reads = matches!(*what, "list" | "get" | "get a range");
        match outcome {
            Ok(()) => found.fine(what, "allowed"),
            Err(error) => {
                let cost = match (reads, *what) {
                    (true, _) => "a run cannot read here",
                    (_, "delete") => "old checkpoints are not deleted and take space",
                    _ => "a run cannot save here",
                };
                let fix = "allow s3:ListBucket, s3:GetObject, s3:PutObject, s3:DeleteObject and \
                           s3:AbortMultipartUpload to these credentials";
                found.breaks(what, error.to_string(), cost, fix);
            }
        }
    }
    clock(facts.clock_ahead_s, found);
    match facts.conditional_put {
        Some(true) => found.fine("If-None-Match", "honored: no object is overwritten"),
        Some(false) => found.breaks(
            "If-None-Match",
            "ignored: an existing object is overwritten",
            "two runs that save the same step overwrite each other's commit without an error",
            "set checkpoint.dir to a file system, AWS, RGW or MinIO, and checkpoint.drain_to to \
             this bucket for one run at a time",
        ),
        None => {}
    }
    if facts.conditional_put == Some(true) && facts.conditional_complete == Some(false) {
        found.note(
            "If-None-Match of parts",
            "ignored for multipart uploads, as in Ceph RGW",
            "each file above 16 MiB takes one more request, to check its name before and after; a \
             commit is smaller and exclusive",
            "",
        );
    }
    if let Some(why) = &facts.multipart {
        let cost = "files above 16 MiB, and so checkpoints, cannot be written";
        found.breaks("parts", why, cost, "allow s3:PutObject and s3:AbortMultipartUpload");
    }
    match facts.checks_sums {
        Some(true) => found.fine("checksums", "bytes that differ from their CRC-64 are refused"),
        Some(false) => found.note(
            "checksums",
            "the server does not verify the CRC-64/NVME of uploads",
            "bytes corrupted in transit are found only when they are read, by the checksum of \
             their block",
            "run feedline ckpt verify after a drain",
        ),
        None => {}
    }
    match facts.aborts_parts {
        Some(false) => found.note(
            "life cycle",
            "no rule removes the parts of unfinished uploads",
            "killed saves leave parts that take space and appear in no listing",
            RULE,
        ),
        Some(true) => found.fine("life cycle", "parts of unfinished uploads are removed"),
        None => {}
    }
}

fn clock(ahead_s: Option<i64>, found: &mut Findings) {
    let Some(ahead_s) = ahead_s else { return };
    let word = if ahead_s < 0 { "behind" } else { "ahead of" };
    let fact = match ahead_s {
        0 => "the server's clock shows the same second".to_owned(),
        _ => format!("the server's clock is {} s {word} that of this machine", ahead_s.abs()),
    };
    let fix = "run chronyc tracking on both";
    match ahead_s.abs() {
        SKEW_S_MAX.. => found.breaks("clocks", fact, "the server refuses every request", fix),
        SKEW_S_NOTED.. => {
            let cost = "the server refuses requests from 15 minutes on, and applies lifecycle \
                        rules by its clock";
            found.note("clocks", fact, cost, fix);
        }
        _ => found.fine("clocks", fact),
    }
}
