//! What a worker does: lines to documents of tokens.

use indexed::Dtype;
use memchr::memchr;

use crate::json::{Fault, TextFinder};
use crate::parcel::{BUFFER_BYTES_KEPT_MAX, Documents, Parcel, Stop, too_long};
use crate::tokenizer::Encode;

/// What all workers of a run do alike.
#[derive(Clone, Debug)]
pub(crate) struct Work {
    pub(crate) key: String,
    /// Appended to every document that has tokens.
    pub(crate) eod: Option<u32>,
    pub(crate) dtype: Dtype,
    pub(crate) line_bytes_max: usize,
}

/// One worker's memory.
#[derive(Debug)]
pub(crate) struct Worker<'a> {
    work: &'a Work,
    encoder: Box<dyn Encode + 'a>,
    finder: TextFinder,
    ids: Vec<u32>,
}

impl<'a> Worker<'a> {
    pub(crate) fn new(work: &'a Work, encoder: Box<dyn Encode + 'a>) -> Self {
        Worker { work, encoder, finder: TextFinder::new(&work.key), ids: Vec::new() }
    }

    /// Encodes the lines of a parcel, up to the first bad one.
    pub(crate) fn encode(&mut self, parcel: &mut Parcel) {
        let mut offset = 0;
        while offset < parcel.bytes.len() {
            let rest = &parcel.bytes[offset..];
            let line = &rest[..memchr(b'\n', rest).unwrap_or(rest.len())];
            if let Err(fault) = self.encode_line(line, &mut parcel.documents) {
                parcel.stop = Some(Stop::Line { offset, fault });
                return;
            }
            parcel.documents.lines += 1;
            offset += line.len() + 1;
        }
        self.finder.shrink_to(BUFFER_BYTES_KEPT_MAX);
        self.ids.clear();
        self.ids.shrink_to(BUFFER_BYTES_KEPT_MAX / size_of::<u32>());
    }

    fn encode_line(&mut self, line: &[u8], documents: &mut Documents) -> Result<(), Fault> {
        if line.len() > self.work.line_bytes_max {
            return Err(too_long(self.work.line_bytes_max));
        }
        if line.iter().all(|byte| matches!(byte, b' ' | b'\t' | b'\r')) {
            documents.blank_lines += 1;
            return Ok(());
        }
        let line = std::str::from_utf8(line).map_err(|e| not_utf8(line, e.valid_up_to()))?;
        let text = self.finder.find(line)?;
        documents.text_bytes += text.len() as u64;
        self.ids.clear();
        self.encoder.encode(text, &mut self.ids);
        // As Megatron's writer: a document without tokens stays without, and gets no end.
        if !self.ids.is_empty() {
            self.ids.extend(self.work.eod);
        }
        write_ids(&self.ids, self.work.dtype, &mut documents.bytes);
        // fits: a line, and so its tokens, are bounded by `Options::line_bytes_max`, below 2^31.
        documents.lens.push(self.ids.len() as u32);
        Ok(())
    }
}

pub(crate) fn not_utf8(line: &[u8], at: usize) -> Fault {
    Fault {
        column: at,
        got: format!("the byte {:#04x}, which is no UTF-8", line[at]),
        due: "JSON in UTF-8".to_owned(),
        hint: Some("if the file is GBK or Latin-1, convert it: iconv -f GB18030 -t UTF-8 FILE"),
    }
}

/// Appends ids as they stand in a `.bin`. All are below the vocabulary size that chose the type.
fn write_ids(ids: &[u32], dtype: Dtype, bytes: &mut Vec<u8>) {
    let start = bytes.len();
    if dtype == Dtype::U16 {
        bytes.resize(start + ids.len() * 2, 0);
        for (item, &id) in bytes[start..].as_chunks_mut().0.iter_mut().zip(ids) {
            *item = (id as u16).to_le_bytes(); // fits: the vocabulary is below 65,500
        }
    } else {
        bytes.resize(start + ids.len() * 4, 0);
        for (item, &id) in bytes[start..].as_chunks_mut().0.iter_mut().zip(ids) {
            *item = id.to_le_bytes();
        }
    }
}
