//! Packed lengths are those of the `.idx`.

use crate::common;
use crate::common::{Dice, key};
use indexed::{Builder, Dtype, IndexedDataset, Lengths};

#[test]
fn every_length_and_place_is_kept() {
    let seed = 11;
    let mut dice = Dice(seed);
    for count in [0, 1, 255, 256, 257, 3000] {
        for bits in [0, 1, 5, 10, 13] {
            let (_guard, store) = common::temp_store();
            let mut builder = Builder::create(&store, &key("a"), Dtype::U8).unwrap();
            for nth in 0..count {
                // Now and then one that is far longer than its neighbours.
                let bits = if nth % 700 == 699 { 17 } else { bits };
                let len = dice.below(1 << bits) as u32;
                builder.add_encoded(&vec![1; len as usize], &[len]).unwrap();
                builder.end_document().unwrap();
            }
            builder.finish().unwrap();
            let dataset = IndexedDataset::open_ready(&store, &key("a")).unwrap();
            let lengths = Lengths::of(&dataset).unwrap();
            assert_eq!(lengths.sequence_count(), count);
            for seq in 0..count {
                let got = (lengths.sequence_len(seq), lengths.sequence_offset_tokens(seq));
                let due = (dataset.sequence_len(seq), dataset.sequence_offset_bytes(seq));
                assert_eq!(got, due, "sequence {seq} of {count}, {bits} bits, seed {seed}");
            }
            assert!(lengths.memory_bytes() <= 16 + count.next_multiple_of(256) * 18 / 8 + 300);
        }
    }
}
