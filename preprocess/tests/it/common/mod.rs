//! Random texts from a seed.
#![allow(dead_code, reason = "each test file uses some of it")]
#![expect(clippy::print_stdout, reason = "a failed test must print its seed")]

pub mod byte_level;

/// Prints the seed, which is shown if the test fails, so that it can be repeated.
pub fn print_seed(test: &str, seed: u64) -> u64 {
    println!("{test}: seed {seed:#x}");
    seed
}

/// SplitMix64: small, and good enough for test texts.
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Random(seed)
    }

    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    pub fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }

    pub fn pick<'a, T>(&mut self, of: &'a [T]) -> &'a T {
        &of[self.below(of.len() as u64) as usize]
    }

    /// Short runs of characters of many kinds.
    pub fn soup(&mut self, chars: usize) -> String {
        let mut text = String::new();
        for _ in 0..chars / 4 {
            let kind = self.below(14);
            for _ in 0..=self.below(6) {
                text.push(self.char_of(kind));
            }
        }
        text
    }

    fn char_of(&mut self, kind: u64) -> char {
        const SPACES: [char; 12] = [
            ' ', ' ', ' ', '\n', '\t', '\r', '\u{a0}', '\u{3000}', '\u{2003}', '\u{85}', '\u{b}',
            '\u{2028}',
        ];
        let (first, count) = match kind {
            0..=2 => (0x20, 0x5f),
            3 => (u32::from(b'a'), 26),
            4 => (u32::from(b'0'), 10),
            5 => return *self.pick(&SPACES),
            6 => return *self.pick(&['\'', 's', 't', 'r', 'e', 'v', 'm', 'l', 'd', ' ']),
            7 => (0x80, 0x780),
            8 => (0x900, 0x700),
            9 => (0x4e00, 0x5200),
            10 => (0x1f300, 0x700),
            11 => (0x2000, 0x1000),
            12 => (0x1_0000, 0x2_0000),
            _ => (0, 0x11_0000),
        };
        char::from_u32(first + self.below(count) as u32).unwrap_or('\u{fffd}')
    }

    /// Words of two to twelve letters from a small vocabulary, with punctuation.
    pub fn english(&mut self, bytes: usize) -> String {
        let syllables = ["th", "e", "an", "in", "er", "ou", "st", "re", "on", "at", "ing", "ly"];
        let words: Vec<String> = (0..5000)
            .map(|_| (0..=self.below(4)).map(|_| *self.pick(&syllables)).collect())
            .collect();
        let mut text = String::with_capacity(bytes + 64);
        while text.len() < bytes {
            // Squared, so that some words are much more common than others.
            let part = (self.below(1 << 16) * self.below(1 << 16)) >> 16;
            text.push_str(&words[((part * words.len() as u64) >> 16) as usize]);
            text.push_str(
                self.pick::<&str>(&[" ", " ", " ", " ", " ", " ", ", ", ". ", "\n", " 19", "'s "]),
            );
        }
        text
    }

    /// Sentences of common Chinese characters.
    pub fn chinese(&mut self, chars: usize) -> String {
        let common: Vec<char> =
            "的一是不了人我在有他这为之大来以个中上们到说国和地也子时道出而要于就下得可你年生"
                .chars()
                .collect();
        let mut text = String::new();
        for _ in 0..chars {
            match self.below(12) {
                0 => text.push(*self.pick(&['，', '。', '！', '、', '\n'])),
                1..=5 => {
                    let code = 0x4e00 + self.below(0x5200) as u32;
                    text.push(char::from_u32(code).expect("below the surrogates"));
                }
                _ => text.push(*self.pick(&common)),
            }
        }
        text
    }
}
