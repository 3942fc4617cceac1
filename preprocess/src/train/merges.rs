//! Byte-pair encoding: finds the pairs to merge, the most frequent one first.
//!
//! The trainer of the `tokenizers` crate finds the same pairs in the same order, but it moves the
//! rest of a word at each merge in it: its time grows with the square of a word's length, and it
//! cannot be interrupted. Here the symbols of all words are one linked list, and a pair knows its
//! places. A merge costs its places, however long the words are.
//!
//! Two rules of that trainer decide about ties and are kept, so that its vocabularies are too.
//! First, the places of a pair that are found during one merge form a group, and a pair that is
//! found during several merges has several groups. A group is merged alone, in all of its words,
//! and the last merge of a pair decides its rank. Second, a merged place stays in the count of its
//! pair. Both matter only for pairs of a token with itself, as in long runs of one character.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, HashSet};

use ahash::AHashMap;

use super::threads::Threads;
use crate::Result;

/// A pair that occurs once is not merged.
const PAIR_COUNT_MIN: i64 = 2;

/// Places that are merged between two looks at `stop`: a few milliseconds.
const PLACES_PER_LOOK: usize = 1 << 16;

/// No symbol: beyond the end of a word, or the second part of a merged pair. The sample has at most
/// 2^30 bytes, and spaces that are put before its words, which are fewer than its bytes.
const NONE: u32 = u32::MAX;

/// Two tokens, one after the other.
pub(super) type Pair = (u32, u32);

/// What is trained.
#[derive(Clone, Copy, Debug)]
pub(super) struct MergeRules {
    /// Tokens, those of the start included.
    pub(super) vocab_size: usize,
    /// Before the text of each symbol of a word but the first one.
    pub(super) inner_prefix: &'static str,
    /// A token has fewer characters than this, or two.
    pub(super) chars_end: usize,
}

/// The result.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Merges {
    /// The texts of all tokens, by id.
    pub(super) texts: Vec<String>,
    /// Pairs, first one first.
    pub(super) pairs: Vec<Pair>,
}

/// Merges pairs in counted words until there are enough tokens. `first` are the tokens of the
/// start, which include all characters.
///
/// # Errors
/// [`crate::Error::Stopped`].
pub(super) fn learn(
    first: Vec<String>,
    words: &[(String, u64)],
    rules: MergeRules,
    threads: Threads<'_>,
) -> Result<Merges> {
    let mut tokens = Tokens::new(first, rules);
    let mut symbols = Symbols::new(words, &tokens, threads)?;
    let mut places = Places::default();
    symbols.count(&mut places, threads)?;
    places.close_groups();
    let mut ranks: AHashMap<Pair, usize> = AHashMap::new();
    let mut merged = 0;
    while tokens.texts.len() < rules.vocab_size {
        threads.check()?;
        let Some((count, Reverse(pair), group)) = places.queue.pop() else { break };
        let now = places.pairs[&pair].count;
        if count != now {
            places.queue.push((now, Reverse(pair), group));
            continue;
        }
        if count < PAIR_COUNT_MIN {
            break;
        }
        let token = tokens.join(pair);
        ranks.insert(pair, merged);
        merged += 1;
        let found = places.take(pair, group, &symbols);
        for part in found.chunks(PLACES_PER_LOOK) {
            threads.check()?;
            part.iter().for_each(|&at| symbols.merge(at, pair, token, &tokens, &mut places));
        }
        places.close_groups();
    }
    let mut pairs: Vec<(usize, Pair)> =
        ranks.into_iter().map(|(pair, rank)| (rank, pair)).collect();
    pairs.sort_unstable();
    Ok(Merges { texts: tokens.texts, pairs: pairs.into_iter().map(|(_, pair)| pair).collect() })
}

/// The vocabulary as it grows.
#[derive(Debug)]
struct Tokens {
    rules: MergeRules,
    texts: Vec<String>,
    ids: HashMap<String, u32>,
    /// Symbols of which a token was made, by id.
    lens: Vec<usize>,
}

impl Tokens {
    fn new(first: Vec<String>, rules: MergeRules) -> Self {
        let ids = first.iter().zip(0..).map(|(text, id)| (text.clone(), id)).collect();
        Tokens { rules, lens: vec![1; first.len()], texts: first, ids }
    }

    /// The id of a character.
    fn symbol(&self, c: char, is_first: bool) -> u32 {
        let prefix = if is_first { "" } else { self.rules.inner_prefix };
        *self.ids.get(&format!("{prefix}{c}")).expect("all characters are in the first tokens")
    }

    /// The token of a pair, new or, if another pair has the same text, known.
    fn join(&mut self, (left, right): Pair) -> u32 {
        let [left, right] = [left, right].map(|id| id as usize); // fits: an index
        let second = &self.texts[right];
        let second = second.strip_prefix(self.rules.inner_prefix).unwrap_or(second);
        let text = format!("{}{second}", self.texts[left]);
        let len = self.lens[left] + self.lens[right];
        if let Some(&id) = self.ids.get(&text) {
            self.lens[id as usize] = len; // a special token may have the text
            return id;
        }
        let id = self.texts.len() as u32; // fits: a vocabulary has at most 2^20 tokens
        self.ids.insert(text.clone(), id);
        self.texts.push(text);
        self.lens.push(len);
        id
    }

    fn may_join(&self, (left, right): Pair) -> bool {
        self.lens[left as usize] + self.lens[right as usize] < self.rules.chars_end
    }
}

/// The symbols of all words, one word after the other.
#[derive(Debug, Default)]
struct Symbols {
    token: Vec<u32>,
    before: Vec<u32>,
    after: Vec<u32>,
    word: Vec<u32>,
    /// How often each word occurs.
    times: Vec<i64>,
}

impl Symbols {
    fn new(words: &[(String, u64)], tokens: &Tokens, threads: Threads<'_>) -> Result<Self> {
        let mut symbols = Symbols::default();
        let mut known: AHashMap<(char, bool), u32> = AHashMap::new();
        for (text, times) in words {
            threads.check()?;
            let word = symbols.times.len() as u32; // fits: fewer than symbols
            symbols.times.push(*times as i64); // fits: at most the bytes of the sample
            let start = symbols.token.len();
            for c in text.chars() {
                let is_first = symbols.token.len() == start;
                let token = known.entry((c, is_first));
                symbols.token.push(*token.or_insert_with(|| tokens.symbol(c, is_first)));
                let at = symbols.before.len() as u32; // fits: see NONE
                symbols.before.push(if is_first { NONE } else { at - 1 });
                symbols.after.push(at + 1);
                symbols.word.push(word);
            }
            if let Some(last) = symbols.after[start..].last_mut() {
                *last = NONE;
            }
        }
        Ok(symbols)
    }

    /// Adds all pairs.
    fn count(&self, places: &mut Places, threads: Threads<'_>) -> Result<()> {
        for at in 0..self.token.len() {
            if at % PLACES_PER_LOOK == 0 {
                threads.check()?;
            }
            if self.after[at] != NONE {
                let pair = (self.token[at], self.token[at + 1]);
                places.add(pair, at as u32, self.times_of(at)); // fits: see NONE
            }
        }
        Ok(())
    }

    fn times_of(&self, at: usize) -> i64 {
        self.times[self.word[at] as usize]
    }

    /// Merges a pair where it still is.
    fn merge(&mut self, at: u32, pair: Pair, token: u32, tokens: &Tokens, places: &mut Places) {
        let first = at as usize; // fits: an index
        let second = self.after[first];
        if self.token[first] != pair.0 || second == NONE || self.token[second as usize] != pair.1 {
            return;
        }
        let times = self.times_of(first);
        let (before, after) = (self.before[first], self.after[second as usize]);
        self.token[first] = token;
        self.token[second as usize] = NONE;
        self.after[first] = after;
        if before != NONE {
            let left = self.token[before as usize];
            places.remove((left, pair.0), times);
            if tokens.may_join((left, token)) {
                places.add((left, token), before, times);
            }
        }
        if after != NONE {
            self.before[after as usize] = at;
            let right = self.token[after as usize];
            places.remove((pair.1, right), times);
            if tokens.may_join((token, right)) {
                places.add((token, right), at, times);
            }
        }
    }
}

/// Where the pairs are, and how often.
#[derive(Debug, Default)]
struct Places {
    pairs: AHashMap<Pair, PairState>,
    /// Places that were found since the last group was closed.
    found: AHashMap<Pair, Vec<u32>>,
    /// The places of each group, in words where the pair may have vanished since.
    groups: Vec<Vec<u32>>,
    /// Groups by the counts that their pairs had, and then by the smallest pair.
    queue: BinaryHeap<(i64, Reverse<Pair>, usize)>,
}

#[derive(Debug, Default)]
struct PairState {
    count: i64,
    /// The groups in the queue.
    groups: Vec<usize>,
}

impl Places {
    fn add(&mut self, pair: Pair, at: u32, times: i64) {
        self.pairs.entry(pair).or_default().count += times;
        self.found.entry(pair).or_default().push(at);
    }

    fn remove(&mut self, pair: Pair, times: i64) {
        self.pairs.entry(pair).or_default().count -= times;
    }

    /// Makes a group of the places found of each pair.
    fn close_groups(&mut self) {
        for (pair, places) in self.found.drain() {
            let state = self.pairs.get_mut(&pair).expect("it was counted when it was found");
            if state.count > 0 {
                state.groups.push(self.groups.len());
                self.queue.push((state.count, Reverse(pair), self.groups.len()));
                self.groups.push(places);
            }
        }
    }

    /// The places of a group, which ends, and those of other groups of the pair in the same words.
    fn take(&mut self, pair: Pair, group: usize, symbols: &Symbols) -> Vec<u32> {
        let mut places = std::mem::take(&mut self.groups[group]);
        let state = self.pairs.get_mut(&pair).expect("it is in the queue");
        state.groups.retain(|&other| other != group);
        if !state.groups.is_empty() {
            let word = |at: &u32| symbols.word[*at as usize];
            let words: HashSet<u32> = places.iter().map(word).collect();
            for &other in &state.groups {
                places.extend(self.groups[other].iter().filter(|at| words.contains(&word(at))));
            }
        }
        places.sort_unstable();
        places
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;

    use compact_str::CompactString;
    use tokenizers::AddedToken;
    use tokenizers::models::bpe::{BPE, BpeTrainer};

    use super::*;

    static NEVER: AtomicBool = AtomicBool::new(false);
    const THREADS: Threads<'_> = Threads { workers: 1, stop: &NEVER };

    /// The same by the trainer of `tokenizers`.
    fn reference(first: &[String], words: &[(String, u64)], rules: MergeRules) -> Merges {
        let special = first.iter().map(|token| AddedToken::from(token.clone(), true)).collect();
        let mut trainer = BpeTrainer::builder()
            .show_progress(false)
            .vocab_size(rules.vocab_size)
            .min_frequency(PAIR_COUNT_MIN as u64)
            .max_token_length(Some(rules.chars_end))
            .special_tokens(special);
        if !rules.inner_prefix.is_empty() {
            trainer = trainer.continuing_subword_prefix(rules.inner_prefix.to_owned());
        }
        let counts: AHashMap<CompactString, u64> =
            words.iter().map(|(word, times)| (CompactString::from(word), *times)).collect();
        let mut model = BPE::default();
        trainer.build().do_train(&counts, &mut model).unwrap();
        let vocab = model.get_vocab();
        let file = serde_json::to_value(&model).unwrap();
        let pairs: Vec<(String, String)> = serde_json::from_value(file["merges"].clone()).unwrap();
        let pairs = pairs.iter().map(|(left, right)| (vocab[left], vocab[right])).collect();
        let mut texts: Vec<(u32, String)> = vocab.iter().map(|(t, id)| (*id, t.clone())).collect();
        texts.sort_unstable();
        Merges { texts: texts.into_iter().map(|(_, text)| text).collect(), pairs }
    }

    /// Each merge after a new count of all pairs.
    fn recounted(first: &[String], word: &str, merges: usize) -> Vec<(String, String)> {
        let id = |c: char| first.iter().position(|t| *t == c.to_string()).unwrap();
        let mut texts = first.to_vec();
        let mut symbols: Vec<usize> = word.chars().map(id).collect();
        let mut pairs = Vec::new();
        for _ in 0..merges {
            let mut counts: HashMap<(usize, usize), usize> = HashMap::new();
            symbols.windows(2).for_each(|w| *counts.entry((w[0], w[1])).or_default() += 1);
            let best = counts.into_iter().max_by_key(|&(pair, count)| (count, Reverse(pair)));
            let (pair, _) = best.unwrap();
            pairs.push((texts[pair.0].clone(), texts[pair.1].clone()));
            let token = texts.len();
            texts.push(format!("{}{}", texts[pair.0], texts[pair.1]));
            let (mut next, mut at) = (Vec::new(), 0);
            while at < symbols.len() {
                let is_pair = symbols[at] == pair.0 && symbols.get(at + 1) == Some(&pair.1);
                next.push(if is_pair { token } else { symbols[at] });
                at += if is_pair { 2 } else { 1 };
            }
            symbols = next;
        }
        pairs
    }

    /// A generator whose numbers depend on the seed alone.
    struct WordSource(u64);

    impl WordSource {
        fn below(&mut self, end: usize) -> usize {
            self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (self.0 >> 33) as usize % end
        }

        /// Words of few letters with runs, copies and cycles, in which pairs overlap themselves.
        fn words(&mut self, letters: &[char]) -> Vec<(String, u64)> {
            let mut words: HashMap<String, u64> = HashMap::new();
            let scale = [4, 12, 60, 400][self.below(4)];
            for _ in 0..1 + self.below(400 / scale + 8) {
                let mut word = String::new();
                while word.chars().count() < scale && self.below(5) > 0 {
                    let letter = letters[self.below(letters.len())];
                    match self.below(4) {
                        0 => word.extend(std::iter::repeat_n(letter, 1 + self.below(scale))),
                        1 if !word.is_empty() => word = word.repeat(2),
                        _ => word.push(letter),
                    }
                }
                if !word.is_empty() {
                    *words.entry(word).or_default() += 1 + self.below(6) as u64;
                }
            }
            let mut words: Vec<(String, u64)> = words.into_iter().collect();
            words.sort_unstable();
            words
        }
    }

    fn first(letters: &[char], prefix: &str) -> Vec<String> {
        let mut first: Vec<String> = ["<s>", "ab"].map(str::to_owned).to_vec();
        first.extend(letters.iter().map(char::to_string));
        if !prefix.is_empty() {
            first.extend(letters.iter().map(|c| format!("{prefix}{c}")));
        }
        first
    }

    fn check_seed(seed: u64) {
        let mut random = WordSource(seed);
        let letters: Vec<char> = "abcdé\u{2581}".chars().take(1 + random.below(6)).collect();
        let words = random.words(&letters);
        let inner_prefix = ["", "##"][random.below(2)];
        let first = first(&letters, inner_prefix);
        let rules = MergeRules {
            vocab_size: first.len() + 1 + random.below(120),
            inner_prefix,
            chars_end: [usize::MAX, 16, 5][random.below(3)],
        };
        let expected = reference(&first, &words, rules);
        let found = learn(first, &words, rules, THREADS).unwrap();
        assert_eq!(found, expected, "seed {seed}: {rules:?} {words:?}");
    }

    #[test]
    fn merges_are_those_of_the_tokenizers_crate() {
        (0..400).for_each(check_seed);
        // A run of one letter is merged by several groups of a pair.
        let words = [("a".repeat(37), 3), ("a".repeat(64), 1), ("ba".repeat(31), 2)];
        for chars_end in [usize::MAX, 16] {
            let rules = MergeRules { vocab_size: 60, inner_prefix: "", chars_end };
            let first = first(&['a', 'b'], "");
            let expected = reference(&first, &words, rules);
            assert_eq!(learn(first, &words, rules, THREADS).unwrap(), expected);
        }
    }

    /// One word without an end, which the crate's trainer takes minutes for.
    #[test]
    fn a_word_of_many_letters_is_trained_on() {
        let mut random = WordSource(5);
        let letters = ['a', 'c', 'g', 't', 'n'];
        let letter = |_| letters[random.below(5).min(random.below(5))];
        let word: String = (0..1 << 18).map(letter).collect();
        let first = first(&letters, "");
        let expected = recounted(&first, &word, 20);
        let rules =
            MergeRules { vocab_size: first.len() + 20, inner_prefix: "", chars_end: usize::MAX };
        let found = learn(first.clone(), &[(word, 1)], rules, THREADS).unwrap();
        let text = |id: u32| found.texts[id as usize].clone();
        let pairs: Vec<_> = found.pairs.iter().map(|&(a, b)| (text(a), text(b))).collect();
        assert_eq!(pairs, expected);
    }

    #[test]
    fn a_stop_ends_it() {
        let rules = MergeRules { vocab_size: 9, inner_prefix: "", chars_end: usize::MAX };
        let words = [("abab".to_owned(), 2)];
        let threads = Threads { workers: 1, stop: &AtomicBool::new(true) };
        let stopped = learn(first(&['a', 'b'], ""), &words, rules, threads);
        assert!(matches!(stopped, Err(crate::Error::Stopped)), "{stopped:?}");
    }
}
