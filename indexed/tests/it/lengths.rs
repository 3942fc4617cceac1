//! Packed lengths equal those of the `.idx`.

use crate::common;
use crate::common::{Dice, key};
use indexed::{Builder, Dtype, IndexedDataset, Lengths};

#[test]
fn packed_lengths_and_offsets_equal_the_index() {
    let seed = 11;
    let mut rng = Dice(seed);
    for count in [0, 1, 255, 256, 257, 3000] {
        for bits in [0, 1, 5, 10, 13] {
            let (_guard, store) = common::temp_store();
            let mut builder = Builder::create(&store, &key("a"), Dtype::U8).unwrap();
            for nth in 0..count {
                // Some are far longer than their neighbours.
                let bits = if nth % 700 == 699 { 17 } else { bits };
                let len = rng.below(1 << bits) as u32;
                builder.add_encoded(&vec![1; len as usize], &[len]).unwrap();
                builder.end_document().unwrap();
            }
            builder.finish().unwrap();
            let dataset = IndexedDataset::open_ready(&store, &key("a")).unwrap();
            let lengths = Lengths::of(&dataset).unwrap();
            assert_eq!(lengths.sequence_count(), count);
            for seq in 0..count {
                let found = (lengths.sequence_len(seq), lengths.sequence_offset_tokens(seq));
                let expected = (dataset.sequence_len(seq), dataset.sequence_offset_bytes(seq));
                assert_eq!(found, expected, "sequence {seq} of {count}, {bits} bits, seed {seed}");
            }
            assert!(lengths.memory_bytes() <= 16 + count.next_multiple_of(256) * 18 / 8 + 300);
        }
    }
}
