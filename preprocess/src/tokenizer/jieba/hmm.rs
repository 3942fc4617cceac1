//! Cuts a run of Han characters without dictionary words by a hidden Markov model: each character
//! begins a word, is in its middle, ends it, or is a word alone, and the likeliest sequence of such
//! states wins.

use std::collections::HashMap;

use serde::Deserialize;

use super::alphabet::{HAN, HAN_COUNT, code_of};

/// The position of a character in its word, in the order of the letters B, E, M and S. Of two
/// equally likely sequences, the later one in this order wins.
type BmesTag = usize;
const BEGIN: BmesTag = 0;
const END: BmesTag = 1;
const MIDDLE: BmesTag = 2;
const SINGLE: BmesTag = 3;
const LETTERS: [char; 4] = ['B', 'E', 'M', 'S'];

/// Which two states can come before each state, the later one second.
const BEFORE: [[BmesTag; 2]; 4] = [[END, SINGLE], [BEGIN, MIDDLE], [BEGIN, MIDDLE], [END, SINGLE]];

/// Represents the logarithm of zero: so low that adding others to it has no effect.
const NEVER: f64 = -3.14e100;

/// Its uncompressed length, 899,353 bytes, and some more, so that a longer file would be noticed.
const TABLES_BYTES_MAX: usize = 899_354;

/// The model's tables, in natural logarithms.
#[derive(Debug)]
pub(super) struct Hmm {
    start: [f64; 4],
    /// From each of [`BEFORE`] to the state.
    transition: [[f64; 2]; 4],
    /// By code, from [`HAN`].
    emission: Vec<[f64; 4]>,
}

/// Buffers for one run, reused for the next.
#[derive(Debug, Default)]
pub(super) struct Rows {
    /// Bit s: the best sequence to state s comes from the second of its [`BEFORE`].
    from: Vec<u8>,
    states: Vec<BmesTag>,
}

#[derive(Deserialize)]
struct Tables {
    start: HashMap<char, f64>,
    transition: HashMap<char, HashMap<char, f64>>,
    emission: HashMap<char, HashMap<char, f64>>,
}

impl Hmm {
    pub(super) fn built_in() -> Self {
        let packed = include_bytes!("../../../assets/jieba/hmm.json.zst");
        let json =
            zstd::bulk::decompress(packed, TABLES_BYTES_MAX).expect("the built-in file is valid");
        let tables: Tables = serde_json::from_slice(&json).expect("the built-in file is valid");
        let mut emission = vec![[NEVER; 4]; HAN_COUNT];
        for (state, letter) in LETTERS.iter().enumerate() {
            for (&char, &log) in &tables.emission[letter] {
                // Characters outside blocks are never looked up here.
                if let Some(code) = code_of(char).filter(|&code| code >= HAN) {
                    emission[usize::from(code - HAN)][state] = log;
                }
            }
        }
        Hmm {
            start: LETTERS.map(|letter| tables.start[&letter]),
            transition: std::array::from_fn(|to| {
                BEFORE[to].map(|from| tables.transition[&LETTERS[from]][&LETTERS[to]])
            }),
            emission,
        }
    }

    /// Cuts a run of Han codes, not empty, and calls `word` with the length of each word.
    pub(super) fn cut(&self, run: &[u16], rows: &mut Rows, mut word: impl FnMut(usize)) {
        self.likeliest(run, rows);
        let mut begin = 0;
        for (at, &state) in rows.states.iter().enumerate() {
            match state {
                BEGIN => begin = at,
                END => word(at + 1 - begin),
                SINGLE => word(1),
                _ => (),
            }
        }
    }

    /// Fills `states`. Sums are computed in the order of the original, because they are rounded.
    fn likeliest(&self, run: &[u16], rows: &mut Rows) {
        let emission = |code: u16| &self.emission[usize::from(code - HAN)];
        let first = emission(run[0]);
        let mut log: [f64; 4] = std::array::from_fn(|to| self.start[to] + first[to]);
        rows.from.clear();
        for &code in &run[1..] {
            let emitted = emission(code);
            let mut from = 0;
            log = std::array::from_fn(|to| {
                let by = |which: usize| {
                    log[BEFORE[to][which]] + self.transition[to][which] + emitted[to]
                };
                let (earlier, later) = (by(0), by(1));
                from |= u8::from(later >= earlier) << to;
                if later >= earlier { later } else { earlier }
            });
            rows.from.push(from);
        }
        let mut state = if log[SINGLE] >= log[END] { SINGLE } else { END };
        rows.states.clear();
        rows.states.push(state);
        for from in rows.from.iter().rev() {
            state = BEFORE[state][usize::from(from >> state & 1)];
            rows.states.push(state);
        }
        rows.states.reverse();
    }
}
