//! The plan of a round: every byte once, in ascending requests, near pieces coalesced.

use loader::plan::round::{Limits, PlanContext, PrefetchRound};
use loader::{DataFile, Error, PieceRef, SampleOrder};
use storage::testing::fault_store;
use storage::{BufferPool, Key};

const LIMITS: Limits = Limits { gap_bytes: 100, extent_bytes_max: 1000 };

/// Samples with explicit pieces: (file, offset, length).
#[derive(Debug)]
struct Written {
    sources: Vec<DataFile>,
    samples: Vec<Vec<(u32, u64, u64)>>,
}

impl Written {
    fn new(samples: Vec<Vec<(u32, u64, u64)>>) -> Self {
        let store: std::sync::Arc<dyn storage::Storage> =
            std::sync::Arc::new(fault_store::FaultStore::new(1, fault_store::FaultPlan::default()));
        let source =
            |name| DataFile::new(store.clone(), Key::new(name).unwrap(), FILE_BYTES as u64);
        Written { sources: vec![source("a"), source("b"), source("c")], samples }
    }
}

impl SampleOrder for Written {
    fn sources(&self) -> &[DataFile] {
        &self.sources
    }

    fn sample_count(&self) -> u64 {
        self.samples.len() as u64
    }

    fn pieces(&self, sample: u64, into: &mut Vec<PieceRef>) -> loader::Result<()> {
        let pieces = self.samples[sample as usize].iter();
        into.extend(pieces.map(|&(file, offset_bytes, len_bytes)| PieceRef {
            file,
            offset_bytes,
            len_bytes,
        }));
        Ok(())
    }

    fn name(&self) -> String {
        "written".to_owned()
    }
}

const FILE_BYTES: usize = 20_000;

/// The byte at an offset of a file. Neighbouring bytes and files differ.
fn byte(file: u32, offset: u64) -> u8 {
    (offset.wrapping_mul(31) ^ (offset >> 8) ^ (u64::from(file) * 101)) as u8
}

/// One extent of so many is kept in its buffer, and the others are copied; 0 keeps none.
const KEPT: [usize; 3] = [0, 1, 2];

/// Plans all samples as one batch, checks the invariants, and returns the requests of each store.
fn plan(order: &Written, store_of: &[usize]) -> Vec<Vec<(u32, u64, u64)>> {
    let [copied, kept, mixed] = KEPT.map(|every| plan_with(order, store_of, every));
    assert!(copied == kept && copied == mixed);
    copied
}

fn plan_with(order: &Written, store_of: &[usize], every: usize) -> Vec<Vec<(u32, u64, u64)>> {
    let pool = BufferPool::new(64 << 20);
    let limits = [LIMITS; 2];
    let context =
        PlanContext { order, store_of, limits: &limits, sample_cache: None, verify: true };
    let mut round = PrefetchRound::default();
    // Twice in the same memory: data of the first plan must not appear in the second.
    round.fill(&context, std::iter::once(0..order.sample_count() / 2)).unwrap();
    round.fill(&context, std::iter::once(0..order.sample_count())).unwrap();
    let mut requests = Vec::new();
    for (store, reads) in round.store_reads[..2].iter_mut().enumerate() {
        let reads = reads.as_mut().unwrap();
        let extents = reads.extents.clone();
        let list = |e: &loader::plan::round::Extent| (e.file, e.offset_bytes, e.len_bytes);
        requests.push(extents.iter().map(list).collect::<Vec<_>>());
        for pair in extents.windows(2) {
            let end = pair[0].offset_bytes + pair[0].len_bytes;
            let ascends = pair[1].file > pair[0].file || pair[1].offset_bytes >= end;
            assert!(ascends, "no byte is read twice: {pair:?}");
        }
        reads.bytes.fill(0xee);
        for (nth, extent) in extents.iter().enumerate() {
            assert!(extent.len_bytes <= LIMITS.extent_bytes_max, "{extent:?}");
            assert_eq!(store_of[extent.file as usize], store);
            let range = extent.offset_bytes..extent.offset_bytes + extent.len_bytes;
            let bytes: Vec<u8> = range.map(|at| byte(extent.file, at)).collect();
            if every == 0 || nth % every > 0 {
                reads.scatter(nth, &bytes);
                continue;
            }
            // The extent starts within its buffer, as after a read of whole sectors.
            let mut buf = pool.take(bytes.len() + 17).unwrap();
            let data = 17..17 + bytes.len();
            buf.fill(0xdd);
            buf[data.clone()].copy_from_slice(&bytes);
            reads.keep(nth, buf, data);
        }
    }
    for (nth, pieces) in order.samples.iter().enumerate() {
        let bytes = |&(file, offset, len)| (offset..offset + len).map(move |at| byte(file, at));
        let expected: Vec<u8> = pieces.iter().flat_map(bytes).collect();
        let mut scratch = Vec::new();
        let sample = round.sample(0, nth, &mut scratch);
        assert_eq!(sample.bytes, expected, "sample {nth} of {:?}", order.samples);
        assert_eq!(sample.number, nth as u64);
        assert_eq!(sample.parts().count(), pieces.len());
    }
    requests
}

fn check(samples: &[&[(u32, u64, u64)]], expected: &[(u32, u64, u64)]) {
    let samples = samples.iter().map(|pieces| pieces.to_vec()).collect();
    assert_eq!(plan(&Written::new(samples), &[0, 0, 0])[0], expected);
}

#[test]
fn near_pieces_are_coalesced() {
    check(&[&[(0, 500, 50)], &[(0, 100, 50)]], &[(0, 100, 50), (0, 500, 50)]);
    // A gap of 100 is read along, one of 101 is not.
    check(&[&[(0, 250, 50)], &[(0, 100, 50)]], &[(0, 100, 200)]);
    check(&[&[(0, 251, 50)], &[(0, 100, 50)]], &[(0, 100, 50), (0, 251, 50)]);
    check(&[&[(0, 100, 50), (0, 120, 10)], &[(0, 100, 90)]], &[(0, 100, 90)]);
    check(&[&[(1, 100, 50)], &[(0, 100, 50)]], &[(0, 100, 50), (1, 100, 50)]);
    check(&[&[], &[(0, 7, 0)], &[(2, 19_999, 1)]], &[(2, 19_999, 1)]);
}

#[test]
fn long_runs_are_cut_at_the_same_places() {
    check(&[&[(0, 300, 1000)]], &[(0, 300, 1000)]);
    check(&[&[(0, 300, 1001)]], &[(0, 300, 700), (0, 1000, 301)]);
    check(
        &[&[(0, 900, 1200)], &[(0, 950, 20)], &[(0, 2090, 500)]],
        &[(0, 900, 100), (0, 1000, 1000), (0, 2000, 590)],
    );
    // The bytes between the pieces and before the cut are not read.
    check(&[&[(0, 500, 450), (0, 1040, 800)]], &[(0, 500, 450), (0, 1040, 800)]);
}

#[test]
fn each_store_has_its_own_requests() {
    let order = Written::new(vec![vec![(0, 5, 10), (1, 5, 10), (2, 5, 10)], vec![(1, 10, 10)]]);
    let expected = [vec![(0, 5, 10), (2, 5, 10)], vec![(1, 5, 15)]];
    assert_eq!(plan(&order, &[0, 1, 0]), expected);
}

#[test]
fn random_pieces_yield_the_right_bytes() {
    for seed in 1..200_u64 {
        let mut state = seed;
        let mut below = |limit: u64| {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 33) % limit
        };
        let samples = (0..below(20)).map(|_| {
            let pieces = (0..below(6)).map(|_| {
                let len = if below(4) == 0 { below(5000) } else { below(60) };
                (below(3) as u32, below(FILE_BYTES as u64 - len), len)
            });
            pieces.collect()
        });
        plan(&Written::new(samples.collect()), &[0, 1, 0]);
    }
}

/// Extents are kept if they are long and most of their bytes are needed.
#[test]
fn long_requests_are_worth_keeping() {
    let limits = [Limits { gap_bytes: 1 << 20, extent_bytes_max: 8 << 20 }];
    for (pieces, expected) in [
        (vec![], false),
        (vec![(0, 7, 4098)], false),
        (vec![(0, 7, 16_386)], true),
        (vec![(0, 7, 300_000), (1, 0, 100)], true),
        (vec![(0, 0, 40_000), (0, 50_000, 40_000)], true),
        (vec![(0, 0, 40_000), (0, 100_000, 40_000)], false),
    ] {
        let mut order = Written::new(vec![pieces]);
        order.sources.iter_mut().for_each(|source| source.len_bytes = 1 << 20);
        let context = PlanContext {
            order: &order,
            store_of: &[0; 3],
            limits: &limits,
            sample_cache: None,
            verify: true,
        };
        let mut round = PrefetchRound::default();
        round.fill(&context, std::iter::once(0..1)).unwrap();
        let reads = round.store_reads[0].as_ref().unwrap();
        assert_eq!(reads.is_worth_keeping(), expected, "{:?}", order.samples);
    }
}

#[test]
fn pieces_outside_of_their_file_are_refused() {
    let bad = [(0, 20_000, 1), (0, 19_999, 2), (0, u64::MAX, 2), (0, 0, u64::MAX), (3, 0, 1)];
    for piece in bad {
        let order = Written::new(vec![vec![(0, 0, 5)], vec![piece]]);
        let context = PlanContext {
            order: &order,
            store_of: &[0, 0, 0],
            limits: &[LIMITS],
            sample_cache: None,
            verify: true,
        };
        let error = PrefetchRound::default().fill(&context, std::iter::once(0..2)).unwrap_err();
        assert!(matches!(error, Error::PieceOutside { sample: 1, .. }), "{error}");
    }
}
