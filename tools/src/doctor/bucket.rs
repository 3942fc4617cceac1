//! What an object store means for a run.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use storage::Stage;
use storage::probe::{BucketInfo, ProbeDepth};

use super::{ANSWERS, Finding, Findings, Patience, Purpose};

/// S3 refuses requests whose date is further off.
const SKEW_S_MAX: i64 = 900;

/// What is worth a word.
const SKEW_S_NOTED: i64 = 5;

/// What it has to come to its end when it is told to.
const GRACE: Duration = Duration::from_secs(10);

const RULE: &str = "aws s3api put-bucket-lifecycle-configuration --bucket BUCKET \
    --lifecycle-configuration '{\"Rules\":[{\"ID\":\"parts\",\"Status\":\"Enabled\",\"Filter\":{},\
    \"AbortIncompleteMultipartUpload\":{\"DaysAfterInitiation\":1}}]}'";

pub(super) fn look(url: &str, purpose: Purpose, patience: &Patience) -> Vec<Finding> {
    // Without its options: nothing of them is for a report.
    let mut found = Findings::of(url.split('?').next().unwrap_or(url));
    let step = Arc::new(Mutex::new("begin"));
    let (named, asked) = (Arc::clone(&step), url.to_owned());
    let trial = if purpose == Purpose::Data { ProbeDepth::Look } else { ProbeDepth::Write };
    let work = move || {
        let doing = |what| *named.lock().unwrap_or_else(PoisonError::into_inner) = what;
        BucketInfo::of(&asked, trial, &doing)
    };
    // It takes a dozen requests, of which the last removes what was written.
    let stage = Stage::begin("look at the bucket", patience.limit.saturating_mul(4));
    match stage.or_when(&patience.stop.0, GRACE).run(work) {
        Ok(Ok(facts)) => judge(&facts, &mut found),
        Ok(Err(error)) => found.breaks("address", error.to_string(), "no run can start", ""),
        Err(error) => {
            let step = *step.lock().unwrap_or_else(PoisonError::into_inner);
            let cost = "a run that starts waits as long, and ends";
            let stays = match trial {
                ProbeDepth::Look => "",
                ProbeDepth::Write => "; an object .tmp-doctor-... may stay",
            };
            found.breaks(ANSWERS, format!("{error}, at: {step}{stays}"), cost, "");
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
                    (true, _) => "no run can read here",
                    (_, "delete") => "old checkpoints stay, and cost space",
                    _ => "no run can save here",
                };
                let fix = "allow s3:ListBucket, s3:GetObject, s3:PutObject, s3:DeleteObject and \
                           s3:AbortMultipartUpload to these credentials";
                found.breaks(what, error.to_string(), cost, fix);
            }
        }
    }
    clock(facts.clock_ahead_s, found);
    match facts.conditional_put {
        Some(true) => found.fine("If-None-Match", "a name that is taken is refused"),
        Some(false) => found.breaks(
            "If-None-Match",
            "ignored: an object that is there is overwritten",
            "two runs that save one step overwrite each other's commit, and neither hears of it",
            "checkpoint.dir on a file system or on AWS, RGW or MinIO; here checkpoint.drain_to of \
             one run at a time",
        ),
        None => {}
    }
    if facts.conditional_put == Some(true) && facts.conditional_complete == Some(false) {
        found.note(
            "If-None-Match of parts",
            "ignored for uploads in parts, as Ceph RGW does",
            "one request more for each file above 16 MiB, which is looked for before and after; a \
             commit is smaller and exclusive",
            "",
        );
    }
    if let Some(why) = &facts.multipart {
        let cost = "no file above 16 MiB can be written: no checkpoint";
        found.breaks("parts", why, cost, "allow s3:PutObject and s3:AbortMultipartUpload");
    }
    match facts.checks_sums {
        Some(true) => found.fine("checksums", "bytes that differ from their CRC-64 are refused"),
        Some(false) => found.note(
            "checksums",
            "the server does not compare what it gets with a CRC-64/NVME",
            "what is damaged on its way there is found when it is read: every block has its sum",
            "feedline ckpt verify after a drain",
        ),
        None => {}
    }
    match facts.aborts_parts {
        Some(false) => found.note(
            "life cycle",
            "no rule removes parts of uploads that were never finished",
            "saves that were killed keep costing space that no listing shows",
            RULE,
        ),
        Some(true) => found.fine("life cycle", "parts of unfinished uploads are removed"),
        None => {}
    }
}

fn clock(ahead_s: Option<i64>, found: &mut Findings) {
    let Some(ahead_s) = ahead_s else { return };
    let word = if ahead_s < 0 { "behind" } else { "ahead of" };
    let told = match ahead_s {
        0 => "the server's shows the same second".to_owned(),
        _ => format!("the server's is {} s {word} ours", ahead_s.abs()),
    };
    let fix = "chronyc tracking, on both";
    match ahead_s.abs() {
        SKEW_S_MAX.. => found.breaks("clocks", told, "every request is refused", fix),
        SKEW_S_NOTED.. => {
            let cost = "requests are refused when it is 15 minutes; life cycle rules count by it";
            found.note("clocks", told, cost, fix);
        }
        _ => found.fine("clocks", told),
    }
}
