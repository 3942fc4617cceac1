//! The norm of a gradient that is divided among ranks, with the same bits in every layout.
//!
//! Squares are summed in f64 over blocks of [`block_elements`], which slices of ZeRO do not cut;
//! then blocks in their order within a parameter, then parameters in their order. A rank
//! counts blocks that it does not have as zero, and adding zeros is exact: so a plain reduction
//! combines the numbers, in whatever order the library adds.

use bridge::dist::{Group, Reduce};
use ckpt::layout::block_elements;
use tch::{Kind, Tensor};

use crate::{Result, device};

/// Elements that are converted to f64 at once: 512 KiB, so that they stay in the cache.
const CHUNK: i64 = 1 << 16;
/// The same on a GPU: 128 MiB, so that it is busy.
const CHUNK_GPU: i64 = 1 << 24;

/// How many blocks a parameter of this many elements has.
#[must_use]
pub fn block_count(elements: u64) -> usize {
    elements.div_ceil(block_elements(elements)) as usize // fits: fewer than elements of memory
}

/// The sums of squares of the blocks of a run of elements that starts at a block, f64, on the
/// device of the run. `elements` is the size of the whole parameter.
///
/// # Errors
/// [`crate::Error::Torch`].
pub fn block_sums(run: &Tensor, elements: u64) -> Result<Tensor> {
    let block = block_elements(elements) as i64; // fits: a small power of two
    let flat = run.f_reshape([-1])?;
    let len = flat.numel() as i64; // fits: libtorch counts in i64
    let whole = len / block * block;
    let chunk = if run.device().is_cuda() { CHUNK_GPU } else { CHUNK };
    let mut sums = vec![Tensor::f_zeros([0], (Kind::Double, run.device()))?];
    let mut first = 0;
    while first < len {
        // Full blocks many at a time; the remainder of the parameter is one block.
        let (count, width) = if first < whole {
            (chunk.min(whole - first) / block, block)
        } else {
            (1, len - whole)
        };
        let mut part = flat.f_narrow(0, first, count * width)?.f_to_kind(Kind::Double)?;
        let squares = part.f_square_()?.f_view([count, width])?;
        sums.push(squares.f_sum_dim_intlist([1_i64].as_slice(), false, Kind::Double)?);
        first += count * width;
    }
    Ok(Tensor::f_cat(&sums, 0)?)
}

/// Adds the numbers of all ranks of a group, in place.
///
/// # Errors
/// [`crate::Error::Bridge`], [`crate::Error::Torch`].
pub fn all_sum(group: Option<&Group>, numbers: &mut Vec<f64>) -> Result<()> {
    let Some(group) = group else { return Ok(()) };
    if numbers.is_empty() {
        return Ok(());
    }
    let options = (Kind::Double, group.device());
    let mut tensor = Tensor::f_zeros([numbers.len() as i64], options)?; // fits: of memory
    tensor.f_copy_(&Tensor::f_from_slice(numbers)?)?;
    group.all_reduce(&mut tensor, Reduce::Sum)?;
    *numbers = device::numbers(&[tensor])?;
    Ok(())
}
