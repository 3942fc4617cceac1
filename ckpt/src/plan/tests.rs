use super::*;
use crate::{Dtype, Group};

const LIMITS: PlanLimits = PlanLimits {
    shard_bytes_max: 100,
    cut_bytes_min: 8,
    header_bytes_max: 1 << 20,
    align_all: false,
    folders: 1,
};

type Given<'a> = (&'a str, Group, Dtype, &'a [u64]);

fn specs(given: &[Given<'_>]) -> Vec<TensorSpec> {
    let spec = |&(name, group, dtype, shape): &Given<'_>| TensorSpec {
        name: name.to_owned(),
        group,
        dtype,
        shape: shape.to_vec(),
    };
    given.iter().map(spec).collect()
}

fn all_of(specs: &[TensorSpec]) -> Vec<HeldRegion> {
    let whole = |(tensor, spec): (usize, &TensorSpec)| HeldRegion {
        tensor,
        region: Region::whole(&spec.shape),
    };
    specs.iter().enumerate().map(whole).collect()
}

/// `expected` has the files as `name: entry[first byte..end]`, for a single writer.
fn check_plan(given: &[Given<'_>], limits: PlanLimits, expected: &[&str]) {
    let specs = specs(given);
    let plan = SavePlan::new(&specs, &[all_of(&specs)], limits).unwrap();
    let text = |shard: &Shard| {
        let piece = |p: &PlannedChunk| format!(" {}[{:?}]", specs[p.tensor].name, p.bytes);
        let pieces: String = shard.pieces.iter().map(piece).collect();
        format!("{}:{pieces}", shard.file)
    };
    assert_eq!(plan.all_shards().map(text).collect::<Vec<_>>(), expected);
}

#[test]
fn fills_files_and_cuts_rows() {
    use Dtype::*;
    use Group::*;
    check_plan(&[], LIMITS, &[]);
    check_plan(
        &[("b", Model, BF16, &[5]), ("a", Model, F32, &[3]), ("c", Model, F32, &[])],
        LIMITS,
        &["model-00001-of-00001.safetensors: a[0..12] c[0..4] b[0..10]"],
    );
    check_plan(
        &[("a", ExpAvg, F32, &[20]), ("a", Model, F32, &[20]), ("a", Master, F32, &[5])],
        LIMITS,
        &[
            "model-00001-of-00001.safetensors: a[0..80]",
            "optim-00001-of-00001.safetensors: a[0..20] a[0..80]",
        ],
    );
    check_plan(
        &[("a", Model, U8, &[60]), ("b", Model, U8, &[7, 30]), ("c", Model, U8, &[10])],
        LIMITS,
        &[
            "model-00001-of-00004.safetensors: a[0..60]",
            "model-00002-of-00004.safetensors: b[0..90]",
            "model-00003-of-00004.safetensors: b[90..180]",
            "model-00004-of-00004.safetensors: b[180..210] c[0..10]",
        ],
    );
    // A row is never cut to fit a file, however large.
    check_plan(
        &[("a", Model, U8, &[2, 150])],
        LIMITS,
        &[
            "model-00001-of-00002.safetensors: a[0..150]",
            "model-00002-of-00002.safetensors: a[150..300]",
        ],
    );
}

#[test]
fn full_header_starts_new_file() {
    let limits = PlanLimits { shard_bytes_max: 1 << 20, header_bytes_max: 700, ..LIMITS };
    check_plan(
        &[
            ("a", Group::Model, Dtype::U8, &[1]),
            ("b", Group::Model, Dtype::U8, &[1]),
            ("c", Group::Model, Dtype::U8, &[1]),
        ],
        limits,
        &[
            "model-00001-of-00002.safetensors: a[0..1] b[0..1]",
            "model-00002-of-00002.safetensors: c[0..1]",
        ],
    );
}

/// Large optimizer tensors begin at pages, after padding that has entries in the header.
#[test]
fn large_moments_begin_at_pages() {
    let specs = specs(&[
        ("a", Group::ExpAvg, Dtype::U8, &[5]),
        ("b", Group::ExpAvg, Dtype::U8, &[(1 << 20) + 1]),
        ("c", Group::ExpAvg, Dtype::F32, &[3]),
        ("d", Group::ExpAvg, Dtype::F32, &[1 << 18]),
        ("e", Group::Model, Dtype::U8, &[(1 << 20) + 1]),
        ("f", Group::Model, Dtype::U8, &[1 << 20]),
    ]);
    let plan = SavePlan::new(&specs, &[all_of(&specs)], PlanLimits::default()).unwrap();
    let [weights, moments] = plan.shards(0) else { panic!("two files") };
    assert_eq!(weights.pieces[1].offset, 4096 + (1 << 20) + 1, "weights are packed");
    let order: Vec<&str> = moments.pieces.iter().map(|p| specs[p.tensor].name.as_str()).collect();
    assert_eq!(order, ["d", "b", "c", "a"]);
    let offsets: Vec<u64> = moments.pieces.iter().map(|piece| piece.offset - 4096).collect();
    let after = (2 << 20) + 4;
    assert_eq!(offsets, [0, 1 << 20, after, after + 12]);
    let header = String::from_utf8_lossy(&moments.header[8..]).into_owned();
    let json: serde_json::Value = serde_json::from_str(&header).unwrap();
    let pad = serde_json::json!({
        "dtype": "U8", "shape": [3], "data_offsets": [after - 3, after],
    });
    assert_eq!(json["__pad__.0"], pad);
    assert_eq!(json.as_object().unwrap().len(), 6);
    assert_eq!(moments.bytes(), 4096 + after + 17);
}

/// Bytes of each writer's pieces.
fn loads(plan: &SavePlan) -> Vec<u64> {
    let load = |shards: &[Shard]| -> u64 {
        shards.iter().flat_map(|shard| &shard.pieces).map(|piece| piece.bytes.len() as u64).sum()
    };
    (0..plan.writers()).map(|writer| load(plan.shards(writer))).collect()
}

#[test]
fn replicas_are_spread_over_their_holders() {
    let specs = specs(&[
        ("whole", Group::Model, Dtype::F32, &[1000, 7]),
        ("norm", Group::Model, Dtype::F32, &[6]),
        ("mine", Group::Model, Dtype::U8, &[9000]),
        ("empty", Group::Model, Dtype::U8, &[0]),
    ]);
    let all = all_of(&specs);
    let but = |left_out: usize| -> Vec<HeldRegion> {
        all.iter().filter(|holding| holding.tensor != left_out).cloned().collect()
    };
    let held = [all.clone(), but(2), but(2)];
    let limits = PlanLimits { cut_bytes_min: 64, ..PlanLimits::default() };
    let plan = SavePlan::new(&specs, &held, limits).unwrap();
    let loads = loads(&plan);
    assert_eq!(loads.iter().sum::<u64>(), 28_000 + 24 + 9000);
    let (least, most) = (loads.iter().min().unwrap(), loads.iter().max().unwrap());
    assert!(most - least <= 128, "{loads:?}");
    assert_eq!(plan.pieces(0), 3);
    // Tensors are cut between rows, and the same inputs give the same plan.
    for piece in plan.all_shards().flat_map(|shard| &shard.pieces) {
        assert_eq!(piece.region.flat, None);
    }
    let again = SavePlan::new(&specs, &held, limits).unwrap();
    for (a, b) in plan.all_shards().zip(again.all_shards()) {
        assert_eq!((&a.file, &a.header, &a.pieces), (&b.file, &b.header, &b.pieces));
    }
}

/// A tensor that a later stage holds again in other regions is written once.
#[test]
fn second_copy_in_other_regions_is_not_written() {
    let specs = specs(&[("tied", Group::ExpAvg, Dtype::F32, &[4, 6])]);
    let part = |flat| {
        vec![HeldRegion {
            tensor: 0,
            region: Region { flat: Some(flat), ..Region::whole(&[4, 6]) },
        }]
    };
    let held = [part(0..7), part(7..24), part(0..5), part(5..24)];
    let plan = SavePlan::new(&specs, &held, LIMITS).unwrap();
    assert_eq!(loads(&plan), [28, 68, 0, 0]);
    let held = [part(0..7), part(8..24), part(0..5)];
    let text = SavePlan::new(&specs, &held, LIMITS).unwrap_err().to_string();
    assert!(text.contains("exp_avg 'tied': 3 different parts"), "{text}");
}

#[test]
fn invalid_inputs_are_rejected() {
    let good = specs(&[("w", Group::Model, Dtype::F32, &[2])]).remove(0);
    let name = |name: &str| TensorSpec { name: name.to_owned(), ..good.clone() };
    let shape = |shape: &[u64]| TensorSpec { shape: shape.to_vec(), ..good.clone() };
    let check = |specs: &[TensorSpec], held: &[Vec<HeldRegion>]| {
        let result = SavePlan::new(specs, held, LIMITS);
        assert!(matches!(result, Err(Error::BadInput { .. })), "{specs:?} {held:?}");
    };
    for bad in [
        name(""),
        name("__metadata__"),
        name("__pad__.0"),
        name("w#1"),
        name(&"x".repeat(4097)),
        shape(&[u64::MAX, 2]),
        shape(&[1; 33]),
        TensorSpec { dtype: Dtype::F4X2, ..shape(&[]) },
        TensorSpec { dtype: Dtype::F4X2, ..shape(&[0, 1 << 63]) },
    ] {
        let held = all_of(std::slice::from_ref(&bad));
        check(&[bad], &[held]);
    }
    let held = |tensor: usize, spans: &[[u64; 2]], flat: Option<Range<u64>>| {
        let spans = spans.iter().map(|&pair| pair.into()).collect();
        vec![HeldRegion { tensor, region: Region { spans, flat } }]
    };
    let one = [good.clone()];
    check(&[good.clone(), good.clone()], &[all_of(&[good.clone(), good.clone()])]);
    check(&one, &[]);
    check(&one, &[vec![]]);
    check(&one, &[held(1, &[[0, 2]], None)]);
    check(&one, &[held(0, &[[0, 1]], None)]);
    check(&one, &[held(0, &[[1, 2]], None)]);
    check(&one, &[held(0, &[[0, 2]], Some(0..3))]);
    check(&one, &[held(0, &[[0, 2]], None), held(0, &[[0, 1]], None), held(0, &[[0, 3]], None)]);
    let both = [good.clone(), TensorSpec { group: Group::Master, ..good.clone() }];
    let plan = SavePlan::new(&both, &[all_of(&both)], LIMITS).unwrap();
    assert!(plan.check_held(0, &[&[0; 8], &[0; 8]]).is_ok());
    assert!(plan.check_held(0, &[&[0; 8], &[0; 7]]).is_err());
    assert!(plan.check_held(0, &[&[0; 8]]).is_err());
}

#[test]
fn plan_is_cached_for_next_save() {
    let specs = specs(&[("w", Group::Model, Dtype::F32, &[2])]);
    let held = [all_of(&specs)];
    let cache = PlanCache::default();
    let plan = |limits| cache.plan(&specs, &held, limits).unwrap();
    let first = plan(LIMITS);
    assert!(Arc::ptr_eq(&first, &plan(LIMITS)));
    assert!(!Arc::ptr_eq(&first, &plan(PlanLimits { cut_bytes_min: 9, ..LIMITS })));
    let other = SavePlan::new(&specs, &[held[0].clone(), held[0].clone()], LIMITS).unwrap();
    assert_ne!(first.fingerprint(), other.fingerprint());
}
