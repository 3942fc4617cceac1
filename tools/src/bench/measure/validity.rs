//! How far a number can be trusted: bytes moved per byte delivered, the share of the file in the
//! page cache, and the CPU time of the benchmark itself.

use serde::Serialize;

use crate::bench::measure::counters::CounterSource;
use crate::bench::patterns::{Direction, Pattern, PatternRun};

/// Below this ratio, a cache was measured.
const CACHED_BELOW: f64 = 0.9;

/// Above this ratio, more was moved than requested.
const AMPLIFIED_ABOVE: f64 = 1.2;

/// If more of a file is in the page cache, buffered reads do not measure the store.
const RESIDENT_MAX: f64 = 0.1;

/// Cores per GB/s; a client that takes more may be the bottleneck that was measured.
pub const OWN_CORE_S_PER_GB_MAX: f64 = 0.1;

/// Metric of buffered reads: the share of the file that was in the page cache before.
pub const RESIDENT: &str = "page_cache_share_before";

/// Why a number is not that of the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum ValidityFlag {
    /// It is the rate of a cache, at least in part.
    Cached,
    /// More was moved than requested.
    Amplified,
    /// There is no device: the files are in memory.
    Memory,
}

impl ValidityFlag {
    /// Label beside the number.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            ValidityFlag::Cached => "CACHED",
            ValidityFlag::Amplified => "AMPLIFIED",
            ValidityFlag::Memory => "MEMORY",
        }
    }

    /// Whether the device did less than the number suggests.
    #[must_use]
    pub fn flatters(self) -> bool {
        self != ValidityFlag::Amplified
    }
}

/// Bytes moved per byte delivered, if both are known, and the flag of the number.
#[must_use]
pub fn judged(
    pattern: Pattern,
    all: &PatternRun,
    witness: CounterSource,
) -> (Option<f64>, Option<ValidityFlag>) {
    if pattern.direction() == Direction::Both || all.bytes == 0 {
        return (None, None);
    }
    if witness == CounterSource::Memory {
        return (None, Some(ValidityFlag::Memory));
    }
    // A count of requests does not show the caches below them, but the kernel reports how much of a
    // file it caches.
    let resident = all.more.get(RESIDENT).is_some_and(|share| *share > RESIDENT_MAX);
    // The requests of saves and restores are not counted.
    let is_uncounted = matches!(pattern, Pattern::Save | Pattern::SaveOne | Pattern::Restore);
    if witness == CounterSource::Requests && is_uncounted {
        return (None, resident.then_some(ValidityFlag::Cached));
    }
    let ratio = all.moved_bytes as f64 / all.bytes as f64;
    let is_long = !matches!(pattern, Pattern::Samples | Pattern::Rate | Pattern::Replay);
    let flag = match ratio {
        ratio if ratio < CACHED_BELOW => Some(ValidityFlag::Cached),
        _ if resident && witness == CounterSource::Requests => Some(ValidityFlag::Cached),
        ratio if ratio > AMPLIFIED_ABOVE && is_long => Some(ValidityFlag::Amplified),
        _ => None,
    };
    (Some(ratio), flag)
}

/// CPU time of the benchmark itself.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct ClientOverhead {
    /// Cores that it kept busy.
    #[serde(rename = "own_cores")]
    pub cores: f64,
    /// Core-seconds per gigabyte, which are cores per GB/s; only of patterns measured in bytes.
    #[serde(rename = "own_core_s_per_gb")]
    pub core_s_per_gb: Option<f64>,
    /// The kernel's part of them, which any client needs for the same requests.
    #[serde(rename = "own_kernel_core_s_per_gb")]
    pub kernel_core_s_per_gb: Option<f64>,
    /// CPU microseconds per operation.
    #[serde(rename = "own_us_per_op")]
    pub us_per_op: f64,
    /// Whether that is more than [`OWN_CORE_S_PER_GB_MAX`].
    #[serde(rename = "own_is_over")]
    pub is_over: bool,
}

impl ClientOverhead {
    /// Of all rounds together, which took `seconds`.
    #[must_use]
    pub fn of(pattern: Pattern, all: &PatternRun, seconds: f64) -> Self {
        let gigabytes = all.bytes as f64 / 1e9;
        // With a fixed rate or small objects, the CPU time does not depend on the bytes.
        let by_bytes = !matches!(pattern, Pattern::Rate) && pattern.direction() != Direction::Both;
        let per_gb = |cpu_s: f64| (by_bytes && gigabytes > 0.001).then(|| cpu_s / gigabytes);
        let core_s_per_gb = per_gb(all.cpu_s);
        ClientOverhead {
            cores: all.cpu_s / seconds.max(1e-9),
            core_s_per_gb,
            kernel_core_s_per_gb: per_gb(all.kernel_cpu_s),
            us_per_op: all.cpu_s * 1e6 / all.ops.max(1) as f64,
            is_over: core_s_per_gb.is_some_and(|s| s > OWN_CORE_S_PER_GB_MAX),
        }
    }
}
