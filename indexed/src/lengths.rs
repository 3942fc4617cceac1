//! The lengths of all sequences in a few bits each, for processes that share one copy.

use crate::{IndexedDataset, Result};

/// Sequences that share a width and a running sum. One long document then costs the width of its
/// 255 neighbours and no more; the sum costs half a bit a sequence; and finding where a sequence
/// begins adds up 128 lengths on average, a tenth of a microsecond.
const GROUP: u64 = 256;

/// How many tokens each sequence of a dataset has, and where it begins, in memory.
///
/// An `.idx` has 12 bytes a sequence for that, and lookups in it touch two pages each. Documents of
/// up to 1,000 tokens take 10 bits here, so that a hundred million are 132 MB: small enough to
/// be held once for all ranks of a node, and never faulted in again.
#[derive(Debug)]
pub struct Lengths {
    groups: Vec<Group>,
    words: Vec<u64>,
    sequences: u64,
}

#[derive(Clone, Copy, Debug)]
struct Group {
    /// Tokens before its first sequence.
    start_tokens: u64,
    /// Its first word times 64, and the bits of a length, at most 31.
    place_and_width: u64,
}

impl Lengths {
    /// Packs the lengths of a dataset, after holding them against its pointers.
    ///
    /// # Errors
    /// As [`IndexedDataset::check_tables`].
    pub fn of(dataset: &IndexedDataset) -> Result<Self> {
        dataset.check_tables()?;
        let lengths = dataset.lengths();
        let (mut groups, mut words) = (Vec::new(), Vec::<u64>::new());
        let mut start_tokens = 0;
        for group in lengths.chunks(GROUP as usize) {
            let values = || group.iter().map(|length| u64::from(u32::from_le_bytes(*length)));
            let width = u64::BITS - values().fold(0, |all, length| all | length).leading_zeros();
            let place = words.len();
            groups.push(Group {
                start_tokens,
                place_and_width: (place as u64) << 6 | u64::from(width),
            });
            // 256 numbers are a whole number of words for every width.
            words.resize(place + (GROUP / 64) as usize * width as usize, 0);
            for (nth, length) in values().enumerate() {
                let bit = nth * width as usize;
                let (word, shift) = (place + bit / 64, bit % 64);
                if width > 0 {
                    words[word] |= length << shift;
                }
                if shift + width as usize > 64 {
                    words[word + 1] |= length >> (64 - shift);
                }
                start_tokens += length;
            }
        }
        words.shrink_to_fit();
        Ok(Lengths { groups, words, sequences: dataset.sequence_count() })
    }

    /// How many sequences there are.
    #[must_use]
    pub fn sequence_count(&self) -> u64 {
        self.sequences
    }

    /// Tokens of a sequence.
    ///
    /// # Panics
    /// If there is no such sequence.
    #[must_use]
    pub fn sequence_len(&self, seq: u64) -> u32 {
        assert!(seq < self.sequences, "sequence {seq} of {}", self.sequences);
        self.unpack(self.groups[(seq / GROUP) as usize], seq % GROUP)
    }

    /// Tokens of all sequences before this one: where it begins in the `.bin`, in tokens.
    ///
    /// # Panics
    /// If there is no such sequence.
    #[must_use]
    pub fn sequence_offset_tokens(&self, seq: u64) -> u64 {
        assert!(seq < self.sequences, "sequence {seq} of {}", self.sequences);
        let group = self.groups[(seq / GROUP) as usize];
        let before = (0..seq % GROUP).map(|nth| u64::from(self.unpack(group, nth)));
        group.start_tokens + before.sum::<u64>()
    }

    /// The memory that it takes.
    #[must_use]
    pub fn memory_bytes(&self) -> u64 {
        (self.groups.len() * size_of::<Group>() + self.words.len() * size_of::<u64>()) as u64
    }

    fn unpack(&self, group: Group, nth: u64) -> u32 {
        let (place, width) = (group.place_and_width >> 6, group.place_and_width & 63);
        if width == 0 {
            return 0;
        }
        let bit = nth * width;
        let (word, shift) = ((place + bit / 64) as usize, bit % 64);
        let mut value = self.words[word] >> shift;
        if shift + width > 64 {
            value |= self.words[word + 1] << (64 - shift);
        }
        (value & ((1 << width) - 1)) as u32 // fits: at most 31 bits
    }
}
