//! The lengths of all sequences in a few bits each.

use storage::Zeros;

use crate::{Error, IndexedDataset, Result};

/// Sequences that share a width and a running sum. One long document then only widens its 255
/// neighbours; the sum costs half a bit a sequence; and finding the start of a sequence adds up 128
/// lengths on average, a tenth of a microsecond.
const GROUP: u64 = 256;

/// Lengths that are packed at a time: several groups.
const AT_ONCE: usize = 8 << 20;

const _: () = assert!((AT_ONCE as u64).is_multiple_of(GROUP));

/// The length and start of each sequence of a dataset, in memory.
///
/// An `.idx` has 12 bytes a sequence for that, and each lookup touches two pages. Documents of up
/// to 1,000 tokens take 10 bits here, so that a hundred million take 132 MB. An index is built from
/// this copy in the order of its shuffle, while the file is read once, sequentially.
#[derive(Debug)]
pub struct Lengths {
    groups: Vec<Group>,
    /// Little-endian words of 64 bits.
    words: Zeros,
    sequences: u64,
}

#[derive(Clone, Copy, Debug)]
struct Group {
    /// Tokens before its first sequence.
    start_tokens: u64,
    /// Index of its first word times 64, plus the bits of a length, at most 31.
    place_and_width: u64,
}

impl Lengths {
    /// Packs the lengths of a dataset, after checking them against its pointers.
    ///
    /// # Errors
    /// As [`IndexedDataset::check_tables`]; [`Error::OutOfMemory`].
    pub fn of(dataset: &IndexedDataset) -> Result<Self> {
        dataset.check_tables()?;
        let (mut groups, mut words) = (Vec::new(), 0);
        let mut start_tokens = 0;
        dataset.for_lengths(AT_ONCE, |lengths| {
            groups.extend(lengths.chunks(GROUP as usize).map(|group| {
                let (mut all, mut sum) = (0, 0);
                for length in group.iter().map(|length| u64::from(u32::from_le_bytes(*length))) {
                    (all, sum) = (all | length, sum + length);
                }
                let width = u64::from(u64::BITS - u64::leading_zeros(all));
                let packed = Group { start_tokens, place_and_width: words << 6 | width };
                // For every width 256 numbers fill a whole number of words.
                (start_tokens, words) = (start_tokens + sum, words + GROUP / 64 * width);
                packed
            }));
        });
        // An empty table cannot be allocated.
        let bytes = words.max(1) * 8;
        let words = usize::try_from(bytes).ok().and_then(|bytes| Zeros::try_new(bytes).ok());
        let no_memory = Error::OutOfMemory { object: "packed lengths", bytes: bytes.into() };
        let mut words = words.ok_or(no_memory)?;
        let (mut left, table) = (groups.iter(), words.as_chunks_mut().0);
        dataset.for_lengths(AT_ONCE, |lengths| {
            for (lengths, group) in lengths.chunks(GROUP as usize).zip(left.by_ref()) {
                group.pack(lengths, table);
            }
        });
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

    /// Tokens of all sequences before this one: its start in the `.bin`, in tokens.
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

    /// The memory of the table in bytes.
    #[must_use]
    pub fn memory_bytes(&self) -> u64 {
        (self.groups.len() * size_of::<Group>() + self.words.len()) as u64
    }

    fn unpack(&self, group: Group, nth: u64) -> u32 {
        let (place, width) = (group.place(), group.width());
        if width == 0 {
            return 0;
        }
        let words: &[[u8; 8]] = self.words.as_chunks().0;
        let bit = nth * width;
        let (word, shift) = (place + (bit / 64) as usize, bit % 64);
        let mut value = u64::from_le_bytes(words[word]) >> shift;
        if shift + width > 64 {
            value |= u64::from_le_bytes(words[word + 1]) << (64 - shift);
        }
        (value & ((1 << width) - 1)) as u32 // fits: at most 31 bits
    }
}

impl Group {
    fn place(self) -> usize {
        (self.place_and_width >> 6) as usize // fits: an index in memory
    }

    fn width(self) -> u64 {
        self.place_and_width & 63
    }

    fn pack(self, lengths: &[[u8; 4]], words: &mut [[u8; 8]]) {
        let (width, mut place) = (self.width(), self.place());
        let (mut word, mut filled) = (0_u64, 0);
        for length in lengths.iter().map(|length| u64::from(u32::from_le_bytes(*length))) {
            word |= length << filled;
            filled += width;
            if filled >= 64 {
                words[place] = word.to_le_bytes();
                (place, filled) = (place + 1, filled - 64);
                word = length >> (width - filled);
            }
        }
        if filled > 0 {
            words[place] = word.to_le_bytes();
        }
    }
}
