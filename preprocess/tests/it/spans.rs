//! CPM-2's objective: the bytes of the golden triple, the span counts of the original, the
//! distribution of the chosen spans, and the inputs that are refused.

use std::collections::BTreeMap;
use std::path::Path;

use indexed::{Builder, Dtype};
use preprocess::objective::{Dropped, Span, SpanConfig, Triple, choose_spans, corrupt, lay_out};
use storage::Key;

const GOLDEN_IDS: [u32; 11] = [100, 101, 102, 103, 104, 105, 106, 107, 108, 109, 7];

fn span(start: u32, end: u32) -> Span {
    Span { start, end }
}

fn spans_of(tokens: u32, document: u64, config: &SpanConfig) -> Vec<Span> {
    let mut spans = Vec::new();
    choose_spans(tokens, document, config, &mut spans);
    spans
}

/// Restores the document from its three sequences.
fn restore(triple: &Triple, vocab_size: u32) -> Vec<u32> {
    let mut ids = Vec::new();
    for &id in &triple.context {
        let Some(marker) = id.checked_sub(vocab_size) else {
            ids.push(id);
            continue;
        };
        let [start, len] = triple.offsets[2 * marker as usize..][..2] else { unreachable!() };
        let part = &triple.target[start as usize..][..len as usize];
        assert_eq!(part[0], id, "a piece of the target starts with its marker");
        ids.extend(&part[1..]);
    }
    ids
}

#[test]
fn the_golden_triple_is_written_byte_for_byte() {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/cpm2");
    let config = SpanConfig { offsets: Dtype::U16, ..SpanConfig::new(26_240) };
    let mut triple = Triple::default();
    lay_out(&GOLDEN_IDS, &[span(3, 5), span(9, 11)], &config, &mut triple).unwrap();

    let folder = tempfile::tempdir().unwrap();
    let store = storage::open_url(folder.path().to_str().unwrap()).unwrap();
    let parts = [
        ("context", &triple.context, config.ids),
        ("target", &triple.target, config.ids),
        ("target_offset", &triple.offsets, config.offsets),
    ];
    for (part, ids, dtype) in parts {
        let name = format!("demo_document_{part}");
        let mut builder = Builder::create(&store, &Key::new(&name).unwrap(), dtype).unwrap();
        builder.add_sequence(ids).unwrap();
        builder.finish_without_documents().unwrap();
        for suffix in ["bin", "idx"] {
            let file = format!("{name}.{suffix}");
            let (found, expected) = (folder.path().join(&file), golden.join(&file));
            assert_eq!(std::fs::read(found).unwrap(), std::fs::read(expected).unwrap(), "{file}");
        }
    }
}

/// With another configuration, some document number draws the spans of the golden file, so that
/// `choose_spans` and `lay_out` agree on what a span is.
#[test]
fn the_golden_spans_can_be_drawn() {
    let config = SpanConfig { density: 0.36, mean_len: 2.0, ..SpanConfig::new(26_240) };
    let expected = [span(3, 5), span(9, 11)];
    assert!((0..1000).any(|document| spans_of(11, document, &config) == expected));
}

#[test]
fn span_counts_match_the_original() {
    // Tokens, density, mean length; then hidden tokens and spans, by Python's
    // noise = min(max(round(n * density), 1), n - 1) and max(round(noise / mean), 1).
    let cases = [
        (11, 0.15, 3.0, 2, 1),
        (30, 0.15, 3.0, 4, 1),  // round(4.5) is 4
        (50, 0.15, 3.0, 8, 3),  // round(7.5) is 8
        (70, 0.15, 3.0, 10, 3), // round(10.5) is 10
        (18, 0.25, 4.0, 4, 1),  // round(4.5) is 4
        (40, 0.25, 4.0, 10, 2), // round(2.5) is 2
        (2, 0.15, 3.0, 1, 1),   // none would be hidden
        (2, 0.99, 3.0, 1, 1),   // none would be kept
        (512, 0.15, 3.0, 77, 26),
        (330_000, 0.15, 3.0, 49_500, 16_500),
    ];
    for (tokens, density, mean_len, noise, count) in cases {
        let config = SpanConfig { density, mean_len, ..SpanConfig::new(26_240) };
        let spans = spans_of(tokens, 5, &config);
        let hidden: u32 = spans.iter().map(|span| span.end - span.start).sum();
        assert_eq!((hidden, spans.len()), (noise, count), "{tokens} tokens, {density}, {mean_len}");
    }
}

#[test]
fn documents_are_restored_from_their_triples() {
    let mut triple = Triple::default();
    for document in 0..2000_u64 {
        let tokens = 2 + (document * document) % 1777;
        let ids: Vec<u32> = (0..tokens as u32).map(|at| at * 7 % 26_240).collect();
        let density = [0.15, 0.5, 0.9][document as usize % 3];
        let config = SpanConfig { density, ..SpanConfig::new(26_240) };
        corrupt(&ids, document, &config, &mut triple).unwrap();
        assert_eq!(restore(&triple, 26_240), ids, "document {document}");
        let spans = spans_of(ids.len() as u32, document, &config);
        let mut at = 0;
        for span in &spans {
            assert!(at < span.start && span.start < span.end, "an empty piece in {spans:?}");
            at = span.end;
        }
        assert_eq!(at as usize, ids.len(), "the end is hidden");
    }
}

#[test]
fn spans_depend_on_seed_and_document_alone() {
    let config = SpanConfig::new(26_240);
    let of = |seed, document| spans_of(400, document, &SpanConfig { seed, ..config.clone() });
    assert_eq!(of(233, 4), of(233, 4));
    assert_ne!(of(233, 4), of(233, 5));
    assert_ne!(of(233, 4), of(234, 4));
    // A mix that only added seed and document would choose the same spans for these two.
    assert_ne!(of(233, 4), of(232, 5));
    assert_eq!(of(233, 0)[..2], [span(11, 17), span(18, 20)], "the spans of a seed never change");
}

/// 16 tokens of which 6 are hidden in 3 spans: `C(5, 2) * C(9, 2)` is 360 ways. The statistic of
/// 359 degrees of freedom is above 446 once in a thousand seeds.
#[test]
fn all_span_choices_are_equally_likely() {
    let config = SpanConfig { density: 0.375, mean_len: 2.0, ..SpanConfig::new(26_240) };
    let mut seen = BTreeMap::<Vec<(u32, u32)>, u64>::new();
    let draws = 360 * 200;
    for document in 0..draws {
        let spans = spans_of(16, document, &config);
        *seen.entry(spans.iter().map(|span| (span.start, span.end)).collect()).or_default() += 1;
    }
    assert_eq!(seen.len(), 360);
    let chi: f64 = seen.values().map(|&count| (count as f64 - 200.0).powi(2) / 200.0).sum();
    assert!((276.0..446.0).contains(&chi), "chi-square {chi} of seed {}", config.seed);
}

#[test]
fn spans_max_does_not_change_the_hidden_token_count() {
    let config = SpanConfig { spans_max: 190, ..SpanConfig::new(26_240) };
    let spans = spans_of(20_000, 1, &config);
    let hidden: u32 = spans.iter().map(|span| span.end - span.start).sum();
    assert_eq!((hidden, spans.len()), (3000, 190));
}

#[test]
fn documents_beyond_the_limits_of_the_dtypes_are_refused() {
    let refuse = |tokens: usize, config: &SpanConfig| {
        let ids = vec![100; tokens];
        corrupt(&ids, 0, config, &mut Triple::default()).map_err(|error| error.to_string())
    };
    let u16_offsets = SpanConfig { offsets: Dtype::U16, ..SpanConfig::new(26_240) };
    assert_eq!(refuse(320_000, &u16_offsets), Ok(()));
    let error = refuse(340_000, &u16_offsets).unwrap_err();
    assert!(error.contains("with an offset of 679") && error.contains("at most 65535"), "{error}");
    assert_eq!(refuse(340_000, &SpanConfig::new(26_240)), Ok(()));

    // At most 65,536 - 26,240 spans; one span for 20 tokens.
    assert_eq!(refuse(39_296 * 20, &SpanConfig::new(26_240)), Ok(()));
    let error = refuse(39_297 * 20, &SpanConfig::new(26_240)).unwrap_err();
    assert!(error.contains("with 39297 spans") && error.contains("at most 39296"), "{error}");
    let wide = SpanConfig { ids: Dtype::I32, ..SpanConfig::new(26_240) };
    assert_eq!(refuse(39_297 * 20, &wide), Ok(()));

    assert!(refuse(1, &wide).unwrap_err().contains("found a document of 1 tokens"));
    assert!(
        refuse(20, &SpanConfig::new(100))
            .unwrap_err()
            .contains("expected an id below 100, the first marker, found token 100")
    );
}

#[test]
fn long_lines_and_short_documents_are_dropped() {
    assert_eq!(Dropped::of(5_000_000, 10), None);
    assert_eq!(Dropped::of(5_000_001, 10), Some(Dropped::LongLine));
    assert_eq!(Dropped::of(40, 9), Some(Dropped::FewTokens));
}

#[test]
fn settings_are_checked() {
    let base = SpanConfig::new(26_240);
    base.check().unwrap();
    let bad = [
        SpanConfig { density: 0.0, ..base.clone() },
        SpanConfig { density: 1.0, ..base.clone() },
        SpanConfig { density: f64::NAN, ..base.clone() },
        SpanConfig { mean_len: 0.5, ..base.clone() },
        SpanConfig { mean_len: f64::INFINITY, ..base.clone() },
        SpanConfig { spans_max: 0, ..base.clone() },
        SpanConfig { vocab_size: 70_000, ..base },
    ];
    for config in bad {
        assert!(config.check().is_err(), "{config:?}");
    }
}
