//! A set of byte strings, each with a value, that is walked one byte at a time.
//!
//! A double array: the child of a unit by a byte is at `base ^ byte`. No two units have the
//! same base, so that a unit is the child that was looked up if and only if its label is the byte.

use std::collections::HashSet;

/// The position of a walk. It is the unit itself, so that nothing is loaded twice.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TrieCursor(u64);

/// The sets that we make are of at most 2^24 - 2 strings.
#[derive(Debug)]
pub(crate) struct Trie {
    units: Vec<u64>,
}

/// From the lowest bit: the label, whether there is a unit, its base, its value and 1.
const USED: u64 = 1 << 8;
const BASE_SHIFT: u32 = 9;
const BASE_BITS: u32 = 31;
const VALUE_SHIFT: u32 = BASE_SHIFT + BASE_BITS;

/// Units of one base are in one block.
const BLOCK: usize = 256;

/// Free places that are tried before a new block is started. More makes the array a little smaller
/// and slower to build.
const TRIES_MAX: usize = 128;

impl TrieCursor {
    /// The value of the string walked so far, if it is in the set.
    #[inline]
    pub(crate) fn value(self) -> Option<u32> {
        ((self.0 >> VALUE_SHIFT) as u32).checked_sub(1) // fits: 24 bits
    }
}

impl Trie {
    /// # Panics
    /// If a string comes twice, or a value is above 2^24 - 2.
    pub(crate) fn new(mut entries: Vec<(&[u8], u32)>) -> Self {
        entries.sort_unstable();
        let mut builder = Builder::new();
        // Ranges of entries that share their first `depth` bytes, and the unit of these bytes.
        let mut open = vec![(0, entries.len(), 0, 0)];
        while let Some((mut from, to, depth, unit)) = open.pop() {
            if from < to && entries[from].0.len() == depth {
                let value = u64::from(entries[from].1) + 1;
                assert!(value < 1 << 24, "the value fits its bits");
                builder.units[unit] |= value << VALUE_SHIFT;
                from += 1;
            }
            let mut children: Vec<(u8, usize, usize)> = Vec::new();
            for (at, entry) in entries.iter().enumerate().take(to).skip(from) {
                let byte = *entry.0.get(depth).expect("no string comes twice");
                match children.last_mut() {
                    Some(last) if last.0 == byte => last.2 = at + 1,
                    _ => children.push((byte, at, at + 1)),
                }
            }
            if !children.is_empty() {
                let base = builder.place(unit, &children);
                let range = |&(byte, from, to): &(u8, _, _)| {
                    (from, to, depth + 1, base ^ usize::from(byte))
                };
                open.extend(children.iter().map(range));
            }
        }
        Trie { units: builder.units }
    }

    #[inline]
    pub(crate) fn root(&self) -> TrieCursor {
        TrieCursor(self.units[0])
    }

    /// One byte further, if a string of the set continues with it.
    #[inline]
    pub(crate) fn step(&self, state: TrieCursor, byte: u8) -> Option<TrieCursor> {
        let base = (state.0 >> BASE_SHIFT) as usize & ((1 << BASE_BITS) - 1);
        let unit = *self.units.get(base ^ usize::from(byte))?;
        (unit & (USED | 0xff) == USED | u64::from(byte)).then_some(TrieCursor(unit))
    }

    /// The value of a string of the set.
    pub(super) fn exact(&self, bytes: &[u8]) -> Option<u32> {
        let step = |state, &byte: &u8| self.step(state, byte);
        bytes.iter().try_fold(self.root(), step)?.value()
    }

    /// The values of all strings that the bytes begin with, the shortest first.
    pub(crate) fn values(&self, bytes: &[u8]) -> impl Iterator<Item = u32> {
        let mut state = Some(self.root());
        let states = bytes.iter().map_while(move |&byte| {
            state = self.step(state?, byte);
            state
        });
        states.filter_map(TrieCursor::value)
    }

    /// The length and the value of the longest string that the bytes begin with.
    #[inline]
    pub(super) fn longest(&self, bytes: &[u8]) -> Option<(usize, u32)> {
        let mut state = self.root();
        let mut found = None;
        for (at, &byte) in bytes.iter().enumerate() {
            let Some(next) = self.step(state, byte) else { break };
            state = next;
            if let Some(value) = state.value() {
                found = Some((at + 1, value));
            }
        }
        found
    }
}

/// The units so far, and a chain through the free ones.
#[derive(Debug)]
struct Builder {
    units: Vec<u64>,
    next_free: Vec<usize>,
    prev_free: Vec<usize>,
    bases: HashSet<usize>,
}

impl Builder {
    fn new() -> Self {
        let mut builder = Builder {
            units: Vec::new(),
            next_free: Vec::new(),
            prev_free: Vec::new(),
            // The base of units without children.
            bases: HashSet::from([0]),
        };
        builder.grow();
        builder
    }

    /// The chain is a ring; unit 0 is its anchor, and never free.
    fn grow(&mut self) {
        let start = self.units.len();
        assert!(start < 1 << 30, "the base fits its bits");
        self.units.resize(start + BLOCK, 0);
        self.next_free.resize(start + BLOCK, 0);
        self.prev_free.resize(start + BLOCK, 0);
        for at in start.max(1)..start + BLOCK {
            let last = self.prev_free[0];
            (self.prev_free[at], self.next_free[at]) = (last, 0);
            self.next_free[last] = at;
            self.prev_free[0] = at;
        }
    }

    fn take(&mut self, at: usize) {
        let (prev, next) = (self.prev_free[at], self.next_free[at]);
        self.next_free[prev] = next;
        self.prev_free[next] = prev;
    }

    /// Finds places for the children of a unit, and returns its base. The newest free places are
    /// tried first: the older ones were often tried without success.
    fn place(&mut self, unit: usize, children: &[(u8, usize, usize)]) -> usize {
        let first = usize::from(children[0].0);
        let mut at = self.prev_free[0];
        let mut base = None;
        for _ in 0..TRIES_MAX {
            if at == 0 {
                break;
            }
            let candidate = at ^ first;
            if !self.bases.contains(&candidate) && self.is_free(candidate, children) {
                base = Some(candidate);
                break;
            }
            at = self.prev_free[at];
        }
        let base = base.unwrap_or_else(|| {
            self.grow();
            // A base within a new block is no unit's, and the block is free.
            self.units.len() - BLOCK
        });
        self.bases.insert(base);
        self.units[unit] |= (base as u64) << BASE_SHIFT;
        for &(byte, _, _) in children {
            let at = base ^ usize::from(byte);
            self.take(at);
            self.units[at] = USED | u64::from(byte);
        }
        base
    }

    /// Unit 0 is the root, and no unit's child.
    fn is_free(&self, base: usize, children: &[(u8, usize, usize)]) -> bool {
        let mut places = children.iter().map(|&(byte, _, _)| base ^ usize::from(byte));
        places.all(|at| at != 0 && self.units[at] & USED == 0)
    }
}
