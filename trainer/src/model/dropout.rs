//! Dropout in training, without the state of a generator: the mask is a function of the seed, the
//! sample's place in the order, the layer, and the place within it. So it is the same in every
//! layout, when a layer is recomputed, after a resume, and in micro-batches of another size. Tensor
//! parallel ranks draw their parts of the same mask.
//!
//! A loop on the CPU draws in about a nanosecond an element ([`Stream`]), and keeps one byte of
//! each for the backward pass. A GPU would wait for that: there libtorch's own kernels draw, from a
//! generator that is reseeded before each of them. Then a mask is a function of the seed, the first
//! sample of the micro-batch, the layer, and the tensor parallel rank, if ranks have parts: the
//! same in every layout of replicas and stages, when a layer is recomputed, and after a resume.

use std::sync::{Mutex, PoisonError};

use tch::{Cuda, Kind, Tensor};

use super::Tp;
use crate::Result;
use crate::config::ModelConfig;
use recipe::rng::Stream;

/// How many elements a thread draws in the time that it takes to start.
const THREAD_ELEMENTS_MIN: usize = 1 << 16;

/// The dropout of one micro-batch.
#[derive(Clone, Copy, Debug)]
pub(super) struct Dropout {
    seed: u64,
    /// How many of 65,536 elements between blocks, and of attention weights, are dropped.
    hidden: u16,
    weights: u16,
    first_sample: u64,
    rows: usize,
}

/// The dropout of one place in the network. `None` drops nothing.
#[derive(Clone, Copy)]
pub(super) struct DropoutSite<'a> {
    pub(super) dropout: Option<&'a Dropout>,
    pub(super) tp: &'a Tp,
    pub(super) unit: usize,
    pub(super) block: &'static str,
}

/// Which elements of a whole tensor a rank has: `count` runs of one length, each of them the
/// `rank`th of `ranks` adjacent ones.
#[derive(Clone, Copy)]
struct LocalElements {
    count: usize,
    ranks: usize,
    rank: usize,
}

impl Dropout {
    /// `None` if nothing is dropped.
    pub(super) fn new(
        config: &ModelConfig,
        seed: u64,
        first_sample: u64,
        rows: i64,
    ) -> Option<Self> {
        // fits: it is below 1, and no rate below 1 is made 1.
        let rate = |p: f64| (p * 65_536.0).round().min(65_535.0) as u16;
        let (hidden, weights) = (rate(config.dropout), rate(config.attention_dropout()));
        let rows = rows as usize; // fits: of memory
        (hidden > 0 || weights > 0).then_some(Dropout { seed, hidden, weights, first_sample, rows })
    }

    /// Whether attention weights are dropped, which needs them as a matrix.
    pub(super) fn drops_weights(&self) -> bool {
        self.weights > 0
    }

    /// Seeds the current GPU from the stream and the first sample, and from the rank if several
    /// have parts.
    fn seed_gpu(&self, stream: Stream, rank: usize, ranks: usize) {
        let [a, b, ..] = stream.block(self.first_sample * ranks as u64 + rank as u64);
        Cuda::manual_seed(u64::from(a) << 32 | u64::from(b));
    }
}

impl DropoutSite<'_> {
    /// Between blocks: `[tokens, hidden]`, of which a rank may have a run.
    pub(super) fn hidden(self, x: Tensor) -> Result<Tensor> {
        let Tp { rank, size, sequence, .. } = *self.tp;
        let (ranks, rank) = if sequence { (size, rank) } else { (1, 0) };
        let rate = |dropout: &Dropout| dropout.hidden;
        self.apply("", rate, x, LocalElements { count: 1, ranks, rank })
    }

    /// Within a block: `[tokens, width]`, of which a rank has a part of the width.
    pub(super) fn inner(self, x: Tensor) -> Result<Tensor> {
        let Tp { rank, size: ranks, .. } = *self.tp;
        let count = x.size()[0] as usize; // fits: of memory
        self.apply(".inner", |dropout| dropout.hidden, x, LocalElements { count, ranks, rank })
    }

    /// Of the attention weights: `[rows, heads, queries, keys]`, of which a rank has some heads.
    pub(super) fn weights(self, x: Tensor) -> Result<Tensor> {
        let Tp { rank, size: ranks, .. } = *self.tp;
        let count = x.size()[0] as usize; // fits: of memory
        self.apply(".weights", |dropout| dropout.weights, x, LocalElements { count, ranks, rank })
    }

    /// Seeds the generator of a fused attention kernel on a GPU, and returns which part of the
    /// weights it drops.
    pub(super) fn seed_weights(self) -> f64 {
        let Some(dropout) = self.dropout.filter(|it| it.drops_weights()) else { return 0.0 };
        dropout.seed_gpu(self.stream(dropout, ".weights"), self.tp.rank, self.tp.size);
        part_of(dropout.weights)
    }

    /// Whether [`DropoutSite::weights`] does anything.
    pub(super) fn drops_weights(self) -> bool {
        self.dropout.is_some_and(Dropout::drops_weights)
    }

    fn apply(
        self,
        place: &str,
        rate: impl Fn(&Dropout) -> u16,
        x: Tensor,
        part: LocalElements,
    ) -> Result<Tensor> {
        let Some((dropout, rate)) = self.dropout.map(|it| (it, rate(it))).filter(|it| it.1 > 0)
        else {
            return Ok(x);
        };
        let stream = self.stream(dropout, place);
        let (elements, LocalElements { count, ranks, rank }) = (x.numel(), part);
        if x.device().is_cuda() {
            dropout.seed_gpu(stream, rank, ranks);
            return Ok(x.f_native_dropout(part_of(rate), true)?.0);
        }
        let (len, of_sample) = (elements / count, elements * ranks / dropout.rows);
        let first_sample = dropout.first_sample;
        let draw = Draw { stream, rate, first_sample, of_sample, len, ranks, rank };
        let dropped = Tensor::f_from_slice(&draw.all(elements))?;
        // Bytes of 0 and 1 are booleans. A product with them takes two thirds of the time of
        // filling with zeros, and keeps no more memory.
        let dropped = dropped.f_view_dtype(Kind::Bool)?.f_view(x.size().as_slice())?;
        let kept = dropped.f_logical_not()?;
        Ok(x.f_mul(&kept)?.f_mul_scalar_(1.0 / (1.0 - part_of(rate)))?)
    }

    fn stream(self, dropout: &Dropout, place: &str) -> Stream {
        let DropoutSite { unit, block, .. } = self;
        Stream::new(dropout.seed, &format!("dropout.{unit}.{block}{place}"))
    }
}

fn part_of(rate: u16) -> f64 {
    f64::from(rate) / 65_536.0
}

/// How a rank draws the dropout of its part of a tensor.
#[derive(Clone, Copy)]
struct Draw {
    stream: Stream,
    rate: u16,
    first_sample: u64,
    /// Elements of one sample, those of all ranks.
    of_sample: usize,
    /// Elements of a run.
    len: usize,
    ranks: usize,
    rank: usize,
}

impl Draw {
    /// For each element of the part 1 if it is dropped, else 0. Threads share what is large.
    fn all(self, elements: usize) -> Vec<u8> {
        let mut out = vec![0; elements];
        let threads = usize::try_from(tch::get_num_threads()).unwrap_or(1).max(1);
        let each = elements.div_ceil(threads).max(THREAD_ELEMENTS_MIN);
        let shares = Mutex::new(out.chunks_mut(each).zip((0..).step_by(each)));
        let next = || shares.lock().unwrap_or_else(PoisonError::into_inner).next();
        let work = || {
            while let Some((share, begin)) = next() {
                self.fill(begin, share);
            }
        };
        std::thread::scope(|scope| {
            for _ in 1..elements.div_ceil(each) {
                // If the system creates no more threads, the existing ones do all of it.
                _ = std::thread::Builder::new().spawn_scoped(scope, work);
            }
            work();
        });
        out
    }

    /// The same for the elements of the part from `begin` on.
    fn fill(self, begin: usize, mut out: &mut [u8]) {
        let Draw { of_sample, len, ranks, rank, .. } = self;
        let mut at = begin;
        while !out.is_empty() {
            let place = (at / len * ranks + rank) * len + at % len;
            let (row, first) = (place / of_sample, place % of_sample);
            let left = (of_sample - first).min(len - at % len).min(out.len());
            let (now, later) = out.split_at_mut(left);
            let sample = self.first_sample + row as u64;
            self.stream.fill_dropped(sample, first as u64, self.rate, now);
            (at, out) = (at + left, later);
        }
    }
}
