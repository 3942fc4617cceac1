//! A model to measure with, and the rate of the memory itself.

use std::time::{Duration, Instant};

use storage::{Kernel, Width, Zeros};

use super::memory::STAGGER_BYTES;
use crate::base::parallel_io;
use crate::layout::{DeviceMesh, Layout, Param, TensorSplit};
use crate::{Dtype, Group, Result};

/// Parameters of one matrix: 64 MiB of each array.
const MATRIX: u64 = 1 << 24;

/// The state of a model with this many parameters, in matrices, on one rank.
///
/// # Errors
/// [`crate::Error::BadInput`] for more than a manifest has chunks for.
pub fn layout(parameters: u64) -> Result<Layout> {
    let count = parameters.div_ceil(MATRIX);
    let param = |number: u64| {
        let elements = MATRIX.min(parameters - number * MATRIX);
        Param {
            name: format!("layers.{number}.weight"),
            shape: vec![elements],
            split: TensorSplit::Replicate,
            stages: vec![0],
        }
    };
    let groups = [Group::Master, Group::ExpAvg, Group::ExpAvgSq].map(|group| (group, Dtype::F32));
    Layout::new(DeviceMesh::default(), (0..count).map(param).collect(), &groups)
}

/// Bytes per second of the STREAM triad, `a = b + s * c`, counted as STREAM counts them: 24 for
/// each element, although a line is read before it is overwritten. The best of `rounds` rounds.
///
/// # Errors
/// If there is no memory.
pub fn triad(bytes: usize, threads: usize, rounds: usize) -> Result<f64> {
    let each = (bytes / 3).next_multiple_of(ROW_BYTES);
    let room = || {
        let room = Zeros::try_new(each + 3 * STAGGER_BYTES);
        room.map_err(|e| storage::Error::from_io("allocate", "memory for the benchmark", e))
    };
    let (mut a, mut b, mut c) = (room()?, room()?, room()?);
    [&mut a, &mut b, &mut c].into_iter().for_each(|zeros| zeros.fill(1));
    // The alignment of the state's own arrays.
    let a = &mut a[STAGGER_BYTES..][..each];
    let b = &b[2 * STAGGER_BYTES..][..each];
    let c = &c[3 * STAGGER_BYTES..][..each];
    let width = Width::widest();
    let mut best = Duration::MAX;
    for _ in 0..rounds.max(1) {
        let rows = a.chunks_mut(ROW_BYTES).zip(b.chunks(ROW_BYTES)).zip(c.chunks(ROW_BYTES));
        let rows = rows.map(|((a, b), c)| Triad { a, b, c }).collect();
        let started = Instant::now();
        parallel_io::each(rows, threads, |row: Triad<'_>, _| {
            width.run(row);
            Ok(())
        })?;
        best = best.min(started.elapsed());
    }
    Ok(3.0 * each as f64 / best.as_secs_f64())
}

/// Unit of work of a thread.
const ROW_BYTES: usize = 1 << 20;

struct Triad<'a> {
    a: &'a mut [u8],
    b: &'a [u8],
    c: &'a [u8],
}

impl Kernel for Triad<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let numbers = self.b.as_chunks::<8>().0.iter().zip(self.c.as_chunks::<8>().0);
        for (a, (b, c)) in self.a.as_chunks_mut::<8>().0.iter_mut().zip(numbers) {
            *a = (f64::from_le_bytes(*b) + 3.0 * f64::from_le_bytes(*c)).to_le_bytes();
        }
    }
}
