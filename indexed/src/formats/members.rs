use std::fmt;
use std::io::{self, BufRead, Read};

use flate2::bufread::GzDecoder;

/// The decoder of one member of a compressed file. It ends where its member ends, and leaves the
/// bytes after it in its input.
pub trait MemberDecoder: Read {
    /// The compressed bytes.
    type Input: BufRead;

    /// Starts at the first byte of a member.
    fn start(input: Self::Input) -> Self;

    /// The bytes after the member, once it has ended.
    fn into_input(self) -> Self::Input;
}

impl<R: BufRead> MemberDecoder for GzDecoder<R> {
    type Input = R;

    fn start(input: R) -> Self {
        GzDecoder::new(input)
    }

    fn into_input(self) -> R {
        self.into_inner()
    }
}

/// The content of a compressed file of several members, one after another. Zeros after a member are
/// skipped: tapes, block devices and object stores pad files to whole blocks, and gzip(1) and
/// Python's `gzip` read such files. Any other byte there must start a member.
pub struct MemberReader<D: MemberDecoder>(Option<MemberState<D>>);

/// The content of a gzip file. See [`MemberReader`].
pub type GzipReader<R> = MemberReader<GzDecoder<R>>;

/// Position of the reader: in a member, or between two.
enum MemberState<D: MemberDecoder> {
    Member(D),
    Between(D::Input),
}

impl<D: MemberDecoder> fmt::Debug for MemberReader<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("MemberReader")
    }
}

impl<D: MemberDecoder> MemberReader<D> {
    /// Reads a file from its start, where a member must be.
    pub fn new(input: D::Input) -> Self {
        MemberReader(Some(MemberState::Member(D::start(input))))
    }

    /// Continues after a member: zeros, another member or the end may follow.
    pub fn between_members(input: D::Input) -> Self {
        MemberReader(Some(MemberState::Between(input)))
    }
}

impl<D: MemberDecoder> Read for MemberReader<D> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        if buf.is_empty() {
            return Ok(0);
        }
        loop {
            let Some(mut place) = self.0.take() else { return Ok(0) };
            let outcome = match &mut place {
                MemberState::Member(decoder) => decoder.read(buf),
                MemberState::Between(input) => skip_zeros(input).map(usize::from),
            };
            let next = match (place, outcome) {
                (MemberState::Member(decoder), Ok(0)) => MemberState::Between(decoder.into_input()),
                (MemberState::Between(input), Ok(1..)) => MemberState::Member(D::start(input)),
                (MemberState::Between(_), Ok(0)) => return Ok(0),
                (place @ MemberState::Member(_), Ok(read)) => {
                    self.0 = Some(place);
                    return Ok(read);
                }
                (place, Err(error)) => {
                    if error.kind() == io::ErrorKind::Interrupted {
                        self.0 = Some(place);
                    }
                    return Err(error);
                }
            };
            self.0 = Some(next);
        }
    }
}

/// Skips zeros. False at the end of the file.
fn skip_zeros(input: &mut impl BufRead) -> io::Result<bool> {
    loop {
        let bytes = input.fill_buf()?;
        if bytes.is_empty() {
            return Ok(false);
        }
        let zeros = bytes.iter().take_while(|&&byte| byte == 0).count();
        let is_all = zeros == bytes.len();
        input.consume(zeros);
        if !is_all {
            return Ok(true);
        }
    }
}
