use super::*;
use crate::plan::merge::WriterFiles;
use crate::plan::{PlanLimits, SavePlan};
use crate::spec::{HeldRegion, TensorSpec};
use serde_json::Value;

/// One tensor of bytes, 1000 by 1000, in `count` ranges of one element and a last range of the
/// other elements but for `left_out`.
fn catalog_of(count: u64, left_out: u64) -> Result<Catalog> {
    let total = u64::try_from(CHUNKS_MAX).unwrap();
    let whole = Span { start: 0, len: 1000 };
    let chunk = |start, len| Chunk {
        file: "a".to_owned(),
        offset: start,
        bytes: len,
        crc64: 0,
        blocks: Vec::new(),
        spans: vec![whole, whole],
        flat: Some(Span { start, len }),
        packed: None,
    };
    let mut chunks: Vec<Chunk> = (0..count).map(|start| chunk(start, 1)).collect();
    if count < total {
        chunks.push(chunk(count, total - count - left_out));
    }
    let tensor = TensorEntry {
        name: "t".to_owned(),
        group: Group::Master,
        dtype: Dtype::U8,
        shape: vec![1000, 1000],
        chunks,
    };
    let (tensors, blobs, user) = (vec![tensor], Vec::new(), Value::Null);
    let meta = Meta { step: 1, block_bytes: 1 << 20, tensors, blobs, user };
    let file = FileEntry { path: "a".to_owned(), bytes: 2 * total, crc64: 0 };
    Catalog::of(meta, vec![file], "m")
}

/// The maximum number of chunks of one tensor is checked without comparing all pairs.
#[test]
fn many_chunks_are_checked_and_more_are_refused() {
    catalog_of(999_999, 0).unwrap();
    let text = catalog_of(1000, 1).unwrap_err().to_string();
    assert!(text.contains("overlap or leave gaps"), "{text}");
    let text = catalog_of(1_000_001, 0).unwrap_err().to_string();
    assert!(text.contains("expected at most 1000000 chunks, found 1000001"), "{text}");
}

/// The output that another process reports is compared with the plan.
#[test]
fn parts_that_differ_from_plan_are_rejected() {
    let spec = |name: &str| TensorSpec {
        name: name.to_owned(),
        group: Group::Model,
        dtype: Dtype::U8,
        shape: vec![4, 10],
    };
    let specs = [spec("a"), spec("b")];
    let rows = |start| {
        let spans = vec![Span { start, len: 2 }, Span { start: 0, len: 10 }];
        let region = Region::of_box(spans);
        (0..2).map(|tensor| HeldRegion { tensor, region: region.clone() }).collect::<Vec<_>>()
    };
    let plan = SavePlan::new(&specs, &[rows(0), rows(2)], PlanLimits::default()).unwrap();
    let part = |writer: usize| -> Vec<(FileEntry, Vec<Chunk>)> {
        let shards = plan.shards(writer).iter();
        let file = |shard: &crate::Shard| FileEntry {
            path: shard.file.clone(),
            bytes: shard.bytes(),
            crc64: 0,
        };
        let chunk = |shard: &crate::Shard, piece: &crate::PlannedChunk| Chunk {
            file: shard.file.clone(),
            offset: piece.offset,
            bytes: piece.bytes.len() as u64,
            crc64: piece.offset,
            blocks: Vec::new(),
            spans: piece.region.spans.clone(),
            flat: piece.region.flat_span(),
            packed: None,
        };
        let chunks = |shard: &crate::Shard| shard.pieces.iter().map(|p| chunk(shard, p)).collect();
        shards.map(|shard| (file(shard), chunks(shard))).collect()
    };
    let good = || vec![part(0), part(1)];
    let (files, tensors) = merge_parts(&plan, None, good()).unwrap();
    assert_eq!((files.len(), tensors.len()), (2, 2));
    let firsts: Vec<u64> = tensors[1].chunks.iter().map(|chunk| chunk.spans[0].start).collect();
    assert_eq!(firsts, [0, 2]);

    let check = |change: &dyn Fn(&mut WriterFiles), expected: &str| {
        let mut parts = good();
        change(&mut parts);
        let text = merge_parts(&plan, None, parts).unwrap_err().to_string();
        assert!(text.contains(expected), "expected '{expected}', found '{text}'");
    };
    check(&|parts| drop(parts.pop()), "1 parts");
    check(
        &|parts| drop(parts[1].pop()),
        "the part of writer 1: expected 1 files as planned, found 0 files",
    );
    check(&|parts| parts.swap(0, 1), "the part of writer 0");
    check(&|parts| parts[1][0].0.bytes += 1, "the part of writer 1");
    check(&|parts| parts[1][0].0.path = "../a".to_owned(), "../a");
    check(&|parts| drop(parts[0][0].1.pop()), "1 chunks");
    check(&|parts| parts[0][0].1[0].offset += 1, "the part of writer 0");
    check(&|parts| parts[0][0].1[0].spans[0].start = 1, "the part of writer 0");
    check(&|parts| parts[0][0].1[0].flat = Some(Span { start: 0, len: 20 }), "the part");
    check(&|parts| parts[0][0].1.swap(0, 1), "the part of writer 0");
}
