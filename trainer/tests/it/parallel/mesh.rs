//! The coordinates of each rank of a run, which checkpoints use too, and the tags of its messages.

use std::collections::HashSet;

use recipe::schedule::{Action, Pass, Pipeline};
use trainer::mesh::{DeviceMesh, MicroBatchShare, RankCoords};
use trainer::parallel::{pipe, tied};

#[test]
fn ranks_and_places_are_one_to_one() {
    for (tp, pp, dp) in [(1, 1, 1), (2, 3, 4), (4, 2, 1), (1, 5, 3)] {
        let mesh = DeviceMesh { tp, pp, dp, virtual_stages: 2 };
        let theirs = ckpt::layout::DeviceMesh {
            tp: tp as u64,
            pp: pp as u64,
            dp: dp as u64,
            ..ckpt::layout::DeviceMesh::default()
        };
        for rank in 0..mesh.ranks() {
            let place = mesh.place(rank);
            assert_eq!(mesh.rank(place), rank);
            let ckpt::layout::RankCoords { tp, dp, pp } = theirs.place(rank as u64);
            let same = RankCoords { tp: tp as usize, dp: dp as usize, pp: pp as usize };
            assert_eq!(place, same, "rank {rank} of {mesh:?}");
            assert_eq!(mesh.tp_group(place)[place.tp], rank);
            assert_eq!(mesh.dp_group(place)[place.dp], rank);
            assert_eq!(mesh.pp_group(place)[place.pp], rank);
        }
        assert_eq!(mesh.ranks() as u64, theirs.ranks());
    }
}

#[test]
fn every_micro_batch_is_of_one_replica() {
    for (share, dp) in [
        (MicroBatchShare::Run, 1),
        (MicroBatchShare::Run, 4),
        (MicroBatchShare::Stride, 2),
        (MicroBatchShare::Stride, 4),
    ] {
        let mesh = DeviceMesh { dp, ..DeviceMesh::ALONE };
        let mut all: Vec<usize> =
            (0..dp).flat_map(|replica| mesh.share(share, replica, 8)).collect();
        all.sort_unstable();
        assert_eq!(all, (0..8).collect::<Vec<_>>(), "{share:?} {dp}");
    }
    let four = DeviceMesh { dp: 4, ..DeviceMesh::ALONE };
    assert_eq!(four.share(MicroBatchShare::Run, 1, 8), [2, 3]);
    assert_eq!(four.share(MicroBatchShare::Stride, 1, 8), [1, 5]);
}

/// The messages of a pipeline and the gradients of shared parameters go through one group: their
/// tags are disjoint, also in the largest step, and no tag is used twice at a time.
#[test]
fn message_tags_are_unique() {
    let shape = Pipeline { ranks: 16, chunks: 64 };
    for first in [0, 1 << 15, (1 << 21) - 8, (1 << 24) - 16] {
        let mut tags = HashSet::new();
        for micro in first..first + 16 {
            for (chunk, pass) in (0..64).flat_map(|at| [(at, Pass::Forward), (at, Pass::Backward)])
            {
                for index in 0..4 {
                    let tag = pipe::tag(shape, &Action { pass, micro, chunk }, index);
                    assert!(tag < pipe::TAGS, "micro-batch {micro}");
                    assert!(tags.insert(tag), "micro-batch {micro}: {tag} for two");
                }
            }
        }
    }
    for at in [0, 1, 100_000] {
        assert!(tied::tag(at) >= pipe::TAGS && i32::try_from(tied::tag(at)).is_ok());
    }
    assert_ne!(tied::tag(1), tied::tag(2));
}
