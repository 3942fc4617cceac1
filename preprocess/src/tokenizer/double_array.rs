//! A trie in one array of eight-byte units: a step to a child is one load and one comparison.
//!
//! The children of a node are at its base plus their label, interleaved with those of others; a
//! unit keeps its label, and no two nodes share a base, so a unit with the right label is the
//! child.

/// Units that a base can point to.
pub(super) const UNITS_MAX: usize = 1 << 24;

/// Values that a unit can carry, none among them.
pub(super) const VALUES_MAX: usize = 1 << 24;

/// Words of 64 bases each that are tried for a node before they are skipped for nodes of its
/// width. It bounds the time for adversarial keys.
const TRIES_MAX: usize = 512;

/// The array. Labels are 1 to 65,535, values 1 to `VALUES_MAX - 1`.
#[derive(Debug)]
pub(super) struct Trie {
    units: Vec<Unit>,
    root: Base,
}

/// The base of a node's children. 0: it has none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Base(u32);

/// Bits 0 to 23: the base of its children. 24 to 39: its label, 0 in a free unit. 40 to 63: its
/// value, 0 for none.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Unit(u64);

impl Unit {
    #[inline]
    pub(super) fn children(self) -> Base {
        Base(self.0 as u32 & 0xff_ffff) // fits: masked
    }

    #[inline]
    pub(super) fn value(self) -> Option<u32> {
        let value = (self.0 >> 40) as u32; // fits: 24 bits
        (value != 0).then_some(value)
    }

    #[inline]
    fn label(self) -> u16 {
        (self.0 >> 24) as u16 // fits: the bits above are cut off on purpose
    }
}

impl Trie {
    /// From keys in ascending order without repetition, none empty. None: they take too many units.
    pub(super) fn new<'k>(keys: impl Iterator<Item = (&'k [u16], u32)>) -> Option<Self> {
        let nodes = Nodes::new(keys);
        let mut places = Places::default();
        let mut bases = vec![Base(0); nodes.children.len()];
        for node in nodes.widest_first() {
            let children = &nodes.children[node];
            let labels = nodes.labels[children.clone()].iter().copied();
            bases[node] = places.take(labels)?;
        }
        let mut units = vec![Unit(0); places.units + 1 + usize::from(u16::MAX)];
        for (node, children) in nodes.children.iter().enumerate() {
            for child in children.clone() {
                let (label, value) = (nodes.labels[child], nodes.values[child]);
                let place = bases[node].0 as usize + usize::from(label);
                let base = u64::from(bases[child].0);
                units[place] = Unit(base | u64::from(label) << 24 | u64::from(value) << 40);
            }
        }
        Some(Trie { units, root: bases[0] })
    }

    #[inline]
    pub(super) fn root(&self) -> Base {
        self.root
    }

    /// The child of that label.
    #[inline]
    pub(super) fn child(&self, of: Base, label: u16) -> Option<Unit> {
        let unit = self.units[of.0 as usize + usize::from(label)];
        (unit.label() == label).then_some(unit)
    }

    /// The value of a whole key.
    pub(super) fn get(&self, key: impl Iterator<Item = u16>) -> Option<u32> {
        let mut unit = Unit(u64::from(self.root.0));
        for label in key {
            unit = self.child(unit.children(), label)?;
        }
        unit.value()
    }
}

/// The trie as a list of nodes in which siblings are contiguous. The first is the root.
#[derive(Debug)]
struct Nodes {
    labels: Vec<u16>,
    values: Vec<u32>,
    children: Vec<std::ops::Range<usize>>,
}

impl Nodes {
    fn new<'k>(keys: impl Iterator<Item = (&'k [u16], u32)>) -> Self {
        let keys: Vec<_> = keys.collect();
        let mut nodes = Nodes { labels: vec![0], values: vec![0], children: Vec::new() };
        // The keys below each node, and the length of their common prefix.
        let mut below = vec![(0..keys.len(), 0)];
        while let Some((range, depth)) = below.get(nodes.children.len()).cloned() {
            let first = below.len();
            let mut at = range.start;
            // The value of a key that ends here is already in this node.
            at += usize::from(keys.get(at).is_some_and(|(key, _)| key.len() == depth));
            while at < range.end {
                let label = keys[at].0[depth];
                let more = keys[at..range.end].partition_point(|(key, _)| key[depth] == label);
                let (key, value) = keys[at];
                nodes.labels.push(label);
                nodes.values.push(if key.len() == depth + 1 { value } else { 0 });
                below.push((at..at + more, depth + 1));
                at += more;
            }
            nodes.children.push(first..below.len());
        }
        nodes
    }

    /// Nodes with many children first: they find no room between others, narrow ones do.
    fn widest_first(&self) -> Vec<usize> {
        let inner = (0..self.children.len()).filter(|&node| !self.children[node].is_empty());
        let mut order: Vec<usize> = inner.collect();
        order.sort_by_key(|&node| std::cmp::Reverse(self.children[node].len()));
        order
    }
}

/// Which units and which bases are taken, a bit for each.
#[derive(Debug, Default)]
struct Places {
    taken: Vec<u64>,
    bases: Vec<u64>,
    /// How many children the last node had, in powers of two, and the word of bases where the
    /// search for such nodes begins. It moves on when nothing fits there.
    width: u32,
    cursor: usize,
    /// The units in use end here.
    units: usize,
}

impl Places {
    /// Takes the units of children with these labels, which ascend.
    fn take(&mut self, labels: impl Iterator<Item = u16> + Clone) -> Option<Base> {
        // From the start for each power of two: for every width of its own the search took two
        // thirds of the time to open jieba's dictionary, and saved a sixth of the units.
        let width = labels.clone().count().ilog2();
        if width != self.width {
            (self.width, self.cursor) = (width, 0);
        }
        // After the last unit anything fits.
        let base = loop {
            let words = self.cursor..self.cursor + TRIES_MAX;
            let found = words.clone().find_map(|word| self.fit(word, labels.clone()));
            match found {
                Some(base) if base / 64 == words.start => break base,
                Some(base) => {
                    self.cursor += 1;
                    break base;
                }
                None => self.cursor = words.end,
            }
        };
        let units = base + labels.clone().last().map_or(0, usize::from) + 1;
        if units >= UNITS_MAX {
            return None;
        }
        self.units = self.units.max(units);
        let words = self.units / 64 + 2;
        self.taken.resize(words.max(self.taken.len()), 0);
        self.bases.resize(words.max(self.bases.len()), 0);
        self.bases[base / 64] |= 1 << (base % 64);
        for label in labels {
            let place = base + usize::from(label);
            self.taken[place / 64] |= 1 << (place % 64);
        }
        Some(Base(base as u32)) // fits: below UNITS_MAX
    }

    /// The first base of the 64 of this word at which all labels find free units.
    fn fit(&self, word: usize, labels: impl Iterator<Item = u16>) -> Option<usize> {
        let at = |bits: &[u64], word: usize| bits.get(word).copied().unwrap_or(0);
        // Base 0 is that of nodes without children.
        let mut full = at(&self.bases, word) | u64::from(word == 0);
        for label in labels {
            let (over, shift) = (word + usize::from(label) / 64, u32::from(label) % 64);
            let low = at(&self.taken, over) >> shift;
            let high = at(&self.taken, over + 1).checked_shl(64 - shift).unwrap_or(0);
            full |= low | high;
            if full == u64::MAX {
                return None;
            }
        }
        Some(word * 64 + full.trailing_ones() as usize)
    }
}
