//! Reads the three pairs of CPM-2, which together hold documents: the input of the encoder, the
//! target of the decoder, and where each piece of the target starts.
//!
//! Kept and masked pieces alternate. With V the size of the vocabulary,
//!
//! ```text
//! context        kept_0, V + 0, kept_1, V + 1, ...
//! target         V + 0, masked_0, V + 1, masked_1, ...
//! target_offset  start_0, len_0, start_1, len_1, ...      in the target; a length includes
//!                                                         the marker
//! ```
//!
//! so the text is kept_0, masked_0, kept_1, masked_1, .... Only the first marker in the files gives
//! V.

use std::sync::Arc;

use storage::{Key, Storage};

use super::boundaries::{Boundaries, Boundary, Lengths};
use super::pair::Pair;
use super::source::{Reader, Sink, TokenRun, TokenSource};
use super::{Format, MissingDocumentEnds};
use crate::mmididx::idx::{END_OF_FILE, malformed};
use crate::{Dtype, Error, FormatRule, Result};

/// The suffixes of the three pairs.
pub(super) const PARTS: [&str; 3] = ["context", "target", "target_offset"];

/// The three pairs.
#[derive(Debug)]
pub(super) struct Triple {
    parts: [TripleFile; 3],
}

#[derive(Debug)]
struct TripleFile {
    file: String,
    dtype: Dtype,
    run: [TokenRun; 1],
    lengths: Lengths,
}

pub(super) fn open(store: &Arc<dyn Storage>, prefix: &Key) -> Result<TokenSource> {
    let part = |name: &str| -> Result<TripleFile> {
        let pair = Pair::open(store, &prefix.with_suffix(&format!("_{name}"))?)?;
        let dtype = pair.layout.dtype;
        if !dtype.is_integer() {
            return Err(Error::NotTokens { file: pair.display, dtype });
        }
        let (file, run) = (pair.bin.display(), [pair.run()]);
        super::whole_tokens(&file, pair.bin.len_bytes(), dtype)?;
        Ok(TripleFile { file, dtype, run, lengths: pair.marks(MissingDocumentEnds::EachSequence) })
    };
    let parts = [part(PARTS[0])?, part(PARTS[1])?, part(PARTS[2])?];
    let [context, target, offset] = &parts;
    for other in [target, offset] {
        let (found, expected) = (other.lengths.lengths.count(), context.lengths.lengths.count());
        if found != expected {
            let found = format!("{found} sequences");
            let expected = format!("{expected} sequences as in {}", context.file);
            return Err(malformed(
                &other.lengths.lengths.file(),
                18,
                FormatRule::Triple,
                found,
                expected,
            ));
        }
    }
    if context.dtype != target.dtype {
        let found = format!("{} tokens", target.dtype);
        let expected = format!("{} tokens as in {}", context.dtype, context.file);
        return Err(malformed(
            &target.lengths.lengths.file(),
            17,
            FormatRule::Triple,
            found,
            expected,
        ));
    }
    Ok(TokenSource {
        format: Format::Cpm2,
        display: store.display(prefix),
        dtype: context.dtype,
        runs: parts.iter().map(|part| part.run[0].clone()).collect(),
        marks: Boundaries::Triple(Box::new(Triple { parts })),
        has_modes: false,
    })
}

impl Triple {
    /// The first marker: the size of the vocabulary that the files were made with.
    pub(super) fn vocab_size(&self) -> Result<Option<i64>> {
        let [_, target, _] = &self.parts;
        let mut reader = Reader::new(&target.run, target.dtype);
        let mut first = [0];
        let Some(bytes) = reader.take(1)? else { return Ok(None) };
        target.dtype.decode_i64(bytes, &mut first);
        Ok(Some(first[0]))
    }

    /// Reassembles the documents; any contradiction is an error.
    pub(super) fn read_into(&self, sink: &mut dyn Sink) -> Result<()> {
        // Without a target there is no document; a context without a target is refused.
        let vocab_size = self.vocab_size()?.unwrap_or(0);
        let mut readers = self.parts.each_ref().map(|part| Reader::new(&part.run, part.dtype));
        let mut lens = self.parts.each_ref().map(|part| part.lengths.iter());
        let mut document = Document { vocab_size, triple: self, nth: 0, parts: Default::default() };
        loop {
            for (nth, lens) in lens.iter_mut().enumerate() {
                let mut lens = lens.filter(|mark| !matches!(mark, Ok(Boundary::Document)));
                match lens.next().transpose()? {
                    Some(Boundary::Sequence { len, .. }) => {
                        document.parts[nth].read(&self.parts[nth], &mut readers[nth], len)?;
                    }
                    _ => return self.end(&mut readers),
                }
            }
            document.check_offsets()?;
            document.give(sink)?;
            document.nth += 1;
            for part in &mut document.parts {
                part.start += part.ids.len() as u64;
            }
        }
    }

    /// Checks that all tokens belong to a sequence.
    fn end(&self, readers: &mut [Reader<'_>]) -> Result<()> {
        for (reader, part) in readers.iter_mut().zip(&self.parts) {
            if reader.take(1)?.is_some() {
                let len = part.run[0].bytes.end;
                let found = "more tokens, with end of file";
                let expected = "no tokens after its last sequence";
                return Err(malformed(
                    &part.file,
                    len as usize,
                    FormatRule::BinTooLong,
                    found,
                    expected,
                ));
            }
        }
        Ok(())
    }
}

/// One document in its three parts.
struct Document<'a> {
    triple: &'a Triple,
    vocab_size: i64,
    nth: u64,
    parts: [Tokens; 3],
}

/// A sequence, as bytes of its file and decoded.
#[derive(Default)]
struct Tokens {
    bytes: Vec<u8>,
    ids: Vec<i64>,
    /// Tokens before it in its file.
    start: u64,
}

impl Tokens {
    fn read(&mut self, part: &TripleFile, reader: &mut Reader<'_>, len: u64) -> Result<()> {
        self.bytes.clear();
        if !reader.take_all(len, &mut self.bytes)? {
            let expected = format!("{len} more tokens at token {}", self.start);
            let at = part.run[0].bytes.end as usize; // a place in a message
            return Err(malformed(&part.file, at, FormatRule::BinTooShort, END_OF_FILE, expected));
        }
        self.ids.resize(len as usize, 0); // fits: the bytes are in memory
        part.dtype.decode_i64(&self.bytes, &mut self.ids);
        Ok(())
    }
}

impl Document<'_> {
    /// Checks that the pieces of the target are consecutive and start with their markers.
    fn check_offsets(&self) -> Result<()> {
        let [_, target, offset] = &self.parts;
        let pairs = offset.ids.chunks(2);
        let mut sum = 0_i64;
        for (piece, pair) in pairs.enumerate() {
            let &[start, len] = pair else {
                let found = format!("{} numbers", offset.ids.len());
                return Err(self.bad(2, 2 * piece, &found, "pairs of numbers".to_owned()));
            };
            if start != sum || len < 1 || len > target.ids.len() as i64 - sum {
                let found = format!("start {start} and length {len} of piece {piece}");
                let wrapped = start != sum && start == sum % (1 << 16);
                let why = if wrapped { " (which overflowed 16 bits)" } else { "" };
                let rest = target.ids.len() as i64 - sum;
                let expected = format!("start {sum}{why} and a length of 1 to {rest}");
                return Err(self.bad(2, 2 * piece, &found, expected));
            }
            self.check_marker(1, sum as usize, piece)?; // fits: within the target
            sum += len;
        }
        if sum != target.ids.len() as i64 {
            let found = format!("pieces of {sum} tokens");
            let expected = format!("pieces of {} tokens as in the target", target.ids.len());
            return Err(self.bad(2, offset.ids.len().saturating_sub(1), &found, expected));
        }
        Ok(())
    }

    fn check_marker(&self, part: usize, at: usize, piece: usize) -> Result<()> {
        let (found, expected) = (self.parts[part].ids[at], self.vocab_size + piece as i64);
        if found == expected {
            return Ok(());
        }
        let wrapped = expected > i64::from(self.triple.parts[part].dtype.token_max());
        let why = if wrapped { " (which overflowed its type)" } else { "" };
        let expected = format!("marker {expected}{why} for a vocabulary of {}", self.vocab_size);
        Err(self.bad(part, at, &format!("token {found}"), expected))
    }

    /// Writes kept and masked pieces alternately.
    fn give(&self, sink: &mut dyn Sink) -> Result<()> {
        let [context, target, offset] = &self.parts;
        let item_bytes = self.triple.parts[0].dtype.item_bytes() as usize; // fits: at most 8
        let of = |tokens: &Tokens, from: usize, to: usize| {
            tokens.bytes[from * item_bytes..to * item_bytes].to_vec()
        };
        let mut kept = 0;
        let mut pieces = offset.ids.chunks_exact(2).enumerate();
        let markers = (0..context.ids.len()).filter(|&at| context.ids[at] >= self.vocab_size);
        for at in markers {
            let Some((piece, pair)) = pieces.next() else {
                let expected = format!("no marker after {}", offset.ids.len() / 2);
                return Err(self.bad(0, at, &format!("token {}", context.ids[at]), expected));
            };
            self.check_marker(0, at, piece)?;
            sink.tokens(&of(context, kept, at))?;
            let (start, len) = (pair[0] as usize, pair[1] as usize); // fits: as was checked
            sink.tokens(&of(target, start + 1, start + len))?;
            kept = at + 1;
        }
        if let Some((piece, _)) = pieces.next() {
            let expected = format!("marker {} of piece {piece}", self.vocab_size + piece as i64);
            let at = context.ids.len();
            return Err(self.bad(0, at, "end of the context", expected));
        }
        // `preprocess` may write kept tokens after the last marker; CPM-2's writer never does.
        sink.tokens(&of(context, kept, context.ids.len()))?;
        sink.end_sequence(0)?;
        sink.end_document()
    }

    fn bad(&self, part: usize, token: usize, found: &str, expected: String) -> Error {
        let of = &self.triple.parts[part];
        let at = (self.parts[part].start + token as u64) * of.dtype.item_bytes();
        let found = format!("{found} in document {}", self.nth);
        malformed(&of.file, at as usize, FormatRule::Triple, found, expected)
    }
}
