use super::*;
use crate::plan::merge::WriterFiles;
use crate::plan::{PlanLimits, SavePlan};
use crate::spec::{HeldRegion, TensorSpec};
use serde_json::{Value, json};

/// A manifest of one tensor of bytes, 400 by 500, in so many ranges of one element, and what is
/// left in one more.
fn manifest_of(count: u64, left_out: u64) -> Manifest {
    let box_: Value = json!([[0, 400], [0, 500]]);
    let zero = "0000000000000000";
    let chunk = |start: u64, len: u64| {
        json!({
            "file": "a", "offset": start, "bytes": len, "crc64": zero, "box": box_,
            "flat": [start, len],
        })
    };
    let mut chunks: Vec<Value> = (0..count).map(|start| chunk(start, 1)).collect();
    if count < 200_000 {
        chunks.push(chunk(count, 200_000 - count - left_out));
    }
    let tensor = json!({
        "name": "t", "group": "master", "dtype": "U8", "shape": [400, 500], "chunks": chunks,
    });
    let meta = json!({
        "step": 1, "block_bytes": 1 << 20, "tensors": [tensor], "blobs": [], "user": null,
    });
    let file = FileEntry { path: "a".to_owned(), bytes: 300_000, crc64: 0 };
    Manifest { format: FORMAT.to_owned(), version: 1, files: vec![file], meta }
}

/// As many chunks of one tensor as a manifest may have are checked without comparing all pairs.
#[test]
fn many_chunks_are_checked_and_more_are_refused() {
    Catalog::new(manifest_of(199_999, 0), "m").unwrap();
    let text = Catalog::new(manifest_of(1000, 1), "m").unwrap_err().to_string();
    assert!(text.contains("overlap or leave gaps"), "{text}");
    let text = Catalog::new(manifest_of(200_001, 0), "m").unwrap_err().to_string();
    assert!(text.contains("expected at most 200000 chunks, found 200001"), "{text}");
}

/// What another process says that it wrote is compared with what it was to write.
#[test]
fn parts_that_are_not_of_the_plan_are_refused() {
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

    let check = |change: &dyn Fn(&mut WriterFiles), due: &str| {
        let mut parts = good();
        change(&mut parts);
        let text = merge_parts(&plan, None, parts).unwrap_err().to_string();
        assert!(text.contains(due), "got '{text}', due '{due}'");
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
