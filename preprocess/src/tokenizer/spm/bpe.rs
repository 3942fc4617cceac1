//! Byte-pair encoding as SentencePiece does it: of all neighbours the two that make the piece of
//! the highest score become that piece, the leftmost first, until no two make a piece.
//!
//! It begins with characters and user-defined pieces, which stay as they are. A character need not
//! be a piece to be part of one. Pieces marked unused are merged too, and split again at the end.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::ops::Range;

use super::joins::char_at;
use super::trie::Trie;

/// Symbols of a text during merging: the pieces, by id, then characters that are no pieces.
type Symbol = u32;

/// No symbol, no rank, no node.
const NONE: u32 = u32::MAX;

/// Up to this many symbols, all pairs are scanned for each merge; beyond, a heap finds the next.
const SCAN_MAX: usize = 40;

/// A piece of the vocabulary as normalised texts have it.
#[derive(Clone, Copy, Debug)]
pub(super) struct BpePiece<'a> {
    pub(super) text: &'a str,
    pub(super) id: u32,
    pub(super) score: f32,
    pub(super) user_defined: bool,
    pub(super) unused: bool,
}

/// A vocabulary, ready to merge.
#[derive(Debug)]
pub(super) struct Bpe {
    /// Symbols of one character.
    chars: Trie,
    /// User-defined pieces, as symbols of their own that make nothing with any other.
    frozen: Trie,
    pairs: SymbolPairs,
    symbols: Vec<SymbolOutput>,
    /// The longest symbol that merging starts from.
    pub(super) symbol_bytes_max: usize,
    unk: u32,
}

/// The output of a symbol that remains at the end.
#[derive(Clone, Copy, Debug)]
struct SymbolOutput {
    id: u32,
    /// Its length in bytes.
    len: u32,
    /// It is split again instead.
    unused: bool,
}

/// The buffers of [`Bpe::merge`], and its result.
#[derive(Debug, Default)]
pub(super) struct Merged {
    nodes: Vec<SymbolNode>,
    /// Rank, left node and the merged symbol; some entries are stale.
    heap: BinaryHeap<Reverse<(u32, u32, Symbol)>>,
    /// For an unused symbol the last two that could be merged to it.
    halves: HashMap<Symbol, (Symbol, Symbol)>,
    stack: Vec<(Symbol, usize)>,
    /// The pieces, first to last: ids, and the bytes of the part that they take.
    pub(super) pieces: Vec<(u32, Range<usize>)>,
}

/// A symbol in a list, and its merge with the next.
#[derive(Clone, Copy, Debug)]
struct SymbolNode {
    symbol: Symbol,
    start: u32,
    prev: u32,
    next: u32,
    rank: u32,
    makes: Symbol,
}

impl Bpe {
    pub(super) fn new(pieces: &[BpePiece<'_>], piece_count: u32, unk: u32) -> Self {
        let mut by_text: HashMap<&str, Symbol> =
            pieces.iter().map(|piece| (piece.text, piece.id)).collect();
        // fits: pieces are short
        let written = |id, text: &str, unused| SymbolOutput { id, len: text.len() as u32, unused };
        let mut symbols = vec![written(unk, "", false); piece_count as usize];
        for piece in pieces {
            symbols[piece.id as usize] = written(piece.id, piece.text, piece.unused);
        }
        for piece in pieces {
            for (at, char) in piece.text.char_indices() {
                let text = &piece.text[at..at + char.len_utf8()];
                by_text.entry(text).or_insert_with(|| {
                    symbols.push(written(unk, text, false));
                    symbols.len() as u32 - 1 // fits: no more symbols than bytes in the file
                });
            }
        }
        let pairs = SymbolPairs::new(pieces, &by_text);
        let chars = by_text.iter().filter(|(text, _)| text.chars().count() == 1);
        let chars = chars.map(|(text, &symbol)| (text.as_bytes(), symbol)).collect();
        let mut frozen = Vec::new();
        for piece in pieces.iter().filter(|piece| piece.user_defined) {
            frozen.push((piece.text.as_bytes(), symbols.len() as u32));
            symbols.push(symbols[piece.id as usize]);
        }
        let frozen_bytes = frozen.iter().map(|(text, _)| text.len());
        let symbol_bytes_max = frozen_bytes.max().unwrap_or(0).max(char::MAX.len_utf8());
        let (chars, frozen) = (Trie::new(chars), Trie::new(frozen));
        Bpe { chars, frozen, pairs, symbols, symbol_bytes_max, unk }
    }

    /// Whether an ASCII character on its own is not written as the unknown.
    pub(super) fn is_known(&self, char: u8) -> bool {
        let symbol = self.chars.longest(&[char]).and_then(|it| self.symbols.get(it.1 as usize));
        symbol.is_some_and(|written| written.id != self.unk)
    }

    /// Cuts a part of a text into pieces. Parts are whole characters, and no piece reaches across
    /// their ends; with unused pieces, a part is the whole text.
    ///
    /// # Panics
    /// If the part is 4 GiB or longer.
    pub(super) fn merge(&self, part: &[u8], merged: &mut Merged) {
        assert!(part.len() < NONE as usize, "a place fits its number");
        self.split(part, merged);
        if merged.nodes.len() <= SCAN_MAX {
            while let Some(left) = lowest(&merged.nodes) {
                self.join(left, merged);
            }
        } else {
            let Merged { nodes, heap, .. } = merged;
            let ranked = nodes.iter().zip(0..).filter(|(node, _)| node.rank != NONE);
            heap.extend(ranked.map(|(node, at)| Reverse((node.rank, at, node.makes))));
            while let Some(Reverse((rank, left, makes))) = merged.heap.pop() {
                let node = &merged.nodes[left as usize];
                if (node.rank, node.makes) == (rank, makes) {
                    let [before, here] = self.join(left, merged);
                    for at in [before, here] {
                        let node = merged.nodes.get(at as usize);
                        if let Some(node) = node.filter(|node| node.rank != NONE) {
                            merged.heap.push(Reverse((node.rank, at, node.makes)));
                        }
                    }
                }
            }
        }
        self.write_pieces(part.len(), merged);
    }

    /// The symbols to begin with.
    fn split(&self, part: &[u8], merged: &mut Merged) {
        merged.nodes.clear();
        merged.halves.clear();
        let mut at = 0;
        while at < part.len() {
            let (len, symbol) = self.frozen.longest(&part[at..]).unwrap_or_else(|| {
                let (_, end) = char_at(part, at);
                let known = self.chars.longest(&part[at..end]);
                (end - at, known.map_or(NONE, |(_, symbol)| symbol))
            });
            // fits: places are below 4 GiB, and there are no more nodes than places
            let (start, index) = (at as u32, merged.nodes.len() as u32);
            let (prev, next) = (index.wrapping_sub(1), index + 1);
            merged.nodes.push(SymbolNode { symbol, start, prev, next, rank: NONE, makes: NONE });
            at += len;
        }
        if let Some(last) = merged.nodes.last_mut() {
            last.next = NONE;
        }
        for left in 1..merged.nodes.len() as u32 {
            self.look_up(left - 1, merged);
        }
    }

    /// Merges a node with its next, and returns the nodes whose pairs are new.
    fn join(&self, left: u32, merged: &mut Merged) -> [u32; 2] {
        let nodes = &mut merged.nodes;
        let SymbolNode { prev, next: right, makes, .. } = nodes[left as usize];
        let next = nodes[right as usize].next;
        (nodes[left as usize].symbol, nodes[left as usize].next) = (makes, next);
        nodes[right as usize].rank = NONE;
        if next != NONE {
            nodes[next as usize].prev = left;
        }
        if prev != NONE {
            self.look_up(prev, merged);
        }
        self.look_up(left, merged);
        [prev, left]
    }

    /// Looks up the merge of a node with its next.
    fn look_up(&self, left: u32, merged: &mut Merged) {
        let SymbolNode { symbol, next, .. } = merged.nodes[left as usize];
        let right = merged.nodes.get(next as usize).map(|right| right.symbol);
        let found = right.and_then(|right| self.pairs.get(symbol, right));
        if let (Some(right), Some((_, makes))) = (right, found)
            && self.symbols[makes as usize].unused
        {
            merged.halves.insert(makes, (symbol, right));
        }
        let node = &mut merged.nodes[left as usize];
        (node.rank, node.makes) = found.unwrap_or((NONE, NONE));
    }

    /// Writes the remaining symbols as pieces; unused ones are split again.
    fn write_pieces(&self, len: usize, merged: &mut Merged) {
        let Merged { nodes, halves, stack, pieces, .. } = merged;
        pieces.clear();
        let mut at = 0;
        while at != NONE && !nodes.is_empty() {
            let SymbolNode { symbol, start, next, .. } = nodes[at as usize];
            let end = nodes.get(next as usize).map_or(len, |next| next.start as usize);
            stack.push((symbol, end));
            let mut start = start as usize;
            while let Some((symbol, end)) = stack.pop() {
                let written = self.symbols.get(symbol as usize);
                let unused = written.is_some_and(|written| written.unused);
                if unused && let Some(&(left, right)) = halves.get(&symbol) {
                    let middle = start + self.symbols[left as usize].len as usize;
                    stack.extend([(right, end), (left, middle)]);
                } else {
                    pieces.push((written.map_or(self.unk, |written| written.id), start..end));
                    start = end;
                }
            }
            at = next;
        }
    }
}

/// The leftmost of the nodes with the lowest rank.
fn lowest(nodes: &[SymbolNode]) -> Option<u32> {
    let (mut lowest, mut found) = (NONE, None);
    for (node, at) in nodes.iter().zip(0..) {
        if node.rank < lowest {
            (lowest, found) = (node.rank, Some(at));
        }
    }
    found
}

/// Which two symbols make which piece, and the rank of its score: a hash table with open
/// addressing, at most half full.
#[derive(Debug)]
struct SymbolPairs {
    /// Left and right symbol, rank and merged symbol. An empty place holds [`NONE`] four times.
    slots: Vec<[u32; 4]>,
    shift: u32,
}

impl SymbolPairs {
    /// `by_text` has a symbol for every piece and every character of one.
    fn new(pieces: &[BpePiece<'_>], by_text: &HashMap<&str, Symbol>) -> Self {
        let symbols = |turned: bool| {
            let turn = |text: &str| -> Vec<u8> {
                match turned {
                    true => text.bytes().rev().collect(),
                    false => text.bytes().collect(),
                }
            };
            let texts = by_text.iter().map(|(text, &symbol)| (turn(text), symbol));
            let texts: Vec<(Vec<u8>, Symbol)> = texts.collect();
            Trie::new(texts.iter().map(|(text, symbol)| (text.as_slice(), *symbol)).collect())
        };
        let (beginnings, endings) = (symbols(false), symbols(true));
        let mut scores: Vec<f32> = pieces.iter().map(|piece| piece.score).collect();
        scores.sort_by(|a, b| b.total_cmp(a));
        // -0 is 0, as it is to the library.
        scores.dedup_by(|a, b| a == b);
        let mut found = Vec::new();
        for piece in pieces {
            let rank = scores.partition_point(|&score| score > piece.score) as u32; // fits: an id
            let bytes = piece.text.as_bytes();
            let lefts = walk(&beginnings, bytes.iter());
            let mut rights = walk(&endings, bytes.iter().rev());
            rights.reverse();
            // The first `at` bytes are a symbol, and so is the rest.
            for (left, right) in lefts.iter().zip(rights.iter().skip(1)) {
                if let (Some(left), Some(right)) = (*left, *right) {
                    found.push([left, right, rank, piece.id]);
                }
            }
        }
        SymbolPairs::of(&found)
    }

    fn of(found: &[[u32; 4]]) -> Self {
        let len = (2 * found.len()).next_power_of_two().max(2);
        let shift = u64::BITS - len.trailing_zeros();
        let mut slots = vec![[NONE; 4]; len];
        for pair in found {
            let mut at = slot(pair[0], pair[1], shift);
            while slots[at][0] != NONE {
                at = (at + 1) % len;
            }
            slots[at] = *pair;
        }
        SymbolPairs { slots, shift }
    }

    /// The rank and the merged symbol of two.
    #[inline]
    fn get(&self, left: Symbol, right: Symbol) -> Option<(u32, Symbol)> {
        let mut at = slot(left, right, self.shift);
        loop {
            let [of_left, of_right, rank, makes] = self.slots[at];
            if (of_left, of_right) == (left, right) {
                return (makes != NONE).then_some((rank, makes));
            }
            if of_left == NONE {
                return None;
            }
            at = (at + 1) % self.slots.len();
        }
    }
}

#[inline]
fn slot(left: Symbol, right: Symbol, shift: u32) -> usize {
    let pair = u64::from(left) << 32 | u64::from(right);
    let mixed = (pair ^ (pair >> 29)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (mixed >> shift) as usize
}

/// The value of each prefix, by its length less one.
fn walk<'a>(trie: &Trie, bytes: impl ExactSizeIterator<Item = &'a u8>) -> Vec<Option<u32>> {
    let mut values = vec![None; bytes.len()];
    let mut state = trie.root();
    for (byte, value) in bytes.zip(&mut values) {
        let Some(next) = trie.step(state, *byte) else { break };
        state = next;
        *value = state.value();
    }
    values
}
