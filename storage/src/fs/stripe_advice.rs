//! Which layout suits a file, by what it is for.

use crate::ByteSize;
use crate::fs::lustre::LayoutComponent;

/// What a file is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// `.idx` files, manifests and the like: read completely, once per node.
    Index,
    /// Tokens, read in small pieces by all nodes.
    Data,
    /// A shard of a checkpoint: each writer has files of its own.
    Checkpoint,
    /// One file that all writers write into.
    Shared,
}

/// A layout, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Recommendation {
    /// Targets; [`LayoutComponent::ALL`] for all.
    pub stripe_count: u16,
    /// Stripe size in bytes.
    pub stripe_bytes: u32,
    /// The reason, for people.
    pub reason: String,
}

/// Shorter files are read by one request.
const SMALL_BYTES: u64 = 1 << 20;

/// Below this a single target has the bandwidth that readers of a shard need.
const SHARD_BYTES: u64 = 1 << 30;

/// From this length on a file is a complete corpus, read by all nodes at once.
const HUGE_BYTES: u64 = 64 << 30;

/// Nodes from which on readers of one file contend for a target.
const NODES_MANY: u32 = 16;

/// As long as the buffers that Feedline writes from, so that no write is split.
const WRITTEN_BYTES: u32 = 8 << 20;

/// Stripe size of a file that all write into: longer ones gain nothing, shorter ones cost more
/// locks.
const SHARED_BYTES_MIN: u64 = 4 << 20;
const SHARED_BYTES_MAX: u64 = 16 << 20;

impl Recommendation {
    /// Advice for a file of this length that this many nodes read or write, on a file system with
    /// this many targets, if known.
    #[must_use]
    pub fn new(purpose: Purpose, bytes: u64, nodes: u32, targets: Option<u32>) -> Self {
        let known = targets.unwrap_or(u32::MAX).max(1);
        let size = ByteSize(bytes);
        let (count, stripe_bytes, reason) = match purpose {
            _ if bytes < SMALL_BYTES || purpose == Purpose::Index => (
                1,
                1 << 20,
                "one request and one lock read it; more targets only add objects to open"
                    .to_owned(),
            ),
            Purpose::Data => Self::data(bytes, nodes),
            Purpose::Checkpoint if nodes >= known => (
                1,
                WRITTEN_BYTES,
                format!(
                    "files of {nodes} writers use all {known} targets; more stripes add objects \
                     and locks, and more targets that can delay a save"
                ),
            ),
            Purpose::Checkpoint => {
                // A stripe for each GiB at most: shorter files are done before it pays.
                let wanted = u64::from(known.div_ceil(nodes.max(1))).min(bytes >> 30).clamp(1, 4);
                let why = format!(
                    "files of {nodes} writers leave targets idle; one writer fills at most 4 \
                     stripes, and a file of {size} gains from one stripe for each GiB"
                );
                (wanted as u32, WRITTEN_BYTES, why) // fits: at most 4
            }
            Purpose::Shared | Purpose::Index => {
                let part = bytes / u64::from(nodes.max(1));
                let stripe = part.clamp(SHARED_BYTES_MIN, SHARED_BYTES_MAX) >> 16 << 16;
                let why = format!(
                    "a target for each of {nodes} writers; start each writer's part of {} at a \
                     multiple of the stripe size, or two writers contend for a lock",
                    ByteSize(part)
                );
                (nodes.max(1), stripe as u32, why) // fits: at most SHARED_BYTES_MAX
            }
        };
        // All targets, if their number is unknown.
        let stripe_count = u16::try_from(count.min(known)).unwrap_or(LayoutComponent::ALL);
        Recommendation { stripe_count, stripe_bytes, reason }
    }

    fn data(bytes: u64, nodes: u32) -> (u32, u32, String) {
        let size = ByteSize(bytes);
        let crowded = nodes >= NODES_MANY;
        let count = match bytes {
            ..SHARD_BYTES => 1,
            SHARD_BYTES..HUGE_BYTES => {
                if crowded {
                    8
                } else {
                    4
                }
            }
            _ if nodes > 4 * NODES_MANY => u32::MAX,
            _ => 8,
        };
        // Samples of many readers are spread more evenly by short stripes.
        let stripe = if crowded { 1 << 20 } else { 4 << 20 };
        let why = match bytes {
            ..SHARD_BYTES => {
                format!("a file of {size} is read at the rate of one target, and opened once")
            }
            _ => format!(
                "samples of {nodes} nodes spread over all of its targets, each of which serves 8 \
                 requests of a client at once"
            ),
        };
        (count, stripe, why)
    }
}
