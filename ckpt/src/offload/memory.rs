//! A state in host memory.

use std::ops::Range;

use storage::Zeros;

use super::adamw::AdamWRow;
use super::form::{ITEM_BYTES, ROLES, StateLayout};
use super::{AdamW, OffloadOptions, Update, WeightsOut};
use crate::base::parallel_io::{self, IoBuffer};
use crate::{Checkpoint, Group, RegionRequest, Result};

/// Arrays begin at cache lines, so that vectors are aligned.
const LINE_BYTES: usize = 64;

/// Offset within a page between the arrays of one role and the next, and of those of the first role
/// from the page start, where a gradient often begins. Some processors predict the way of the L1
/// cache from a hash of the address, and lines with the same hash and page offset evict each other.
/// For arrays that are a multiple of 256 MiB apart, this is every line.
pub(super) const STAGGER_BYTES: usize = 1 << 10;

/// Elements that a thread updates at once: 1 MiB of each array.
const ROW_ELEMENTS: usize = 1 << 18;

/// The arrays of all roles, end to end in one arena per role.
#[derive(Debug)]
pub(super) struct MemoryState {
    arenas: [Zeros; ROLES],
    /// The offset of each parameter in every arena, and the end of the last one.
    starts: Vec<usize>,
}

impl MemoryState {
    pub(super) fn new(form: &StateLayout) -> Result<Self> {
        let mut starts = Vec::with_capacity(form.params.len() + 1);
        let mut end = 0_usize;
        for param in &form.params {
            starts.push(end);
            end += (param.elements * ITEM_BYTES).next_multiple_of(LINE_BYTES);
        }
        starts.push(end);
        let arena = || {
            let what = || format!("{end} bytes for the optimizer state");
            let room = Zeros::try_new(end + ROLES * STAGGER_BYTES);
            room.map_err(|e| storage::Error::from_io("allocate", what(), e))
        };
        Ok(MemoryState { arenas: [arena()?, arena()?, arena()?], starts })
    }

    /// One array.
    pub(super) fn array(&self, form: &StateLayout, param: usize, role: usize) -> &[u8] {
        let start = first(role) + self.starts[param];
        &self.arenas[role][start..start + form.params[param].elements * ITEM_BYTES]
    }

    /// The arrays of some parameters, one after the other.
    fn arrays(&mut self, form: &StateLayout, params: Range<usize>) -> Vec<[&mut [u8]; ROLES]> {
        let MemoryState { arenas, starts } = self;
        let mut role = 0..ROLES;
        let mut rest = arenas.each_mut().map(|arena| {
            &mut arena[first(role.next().expect("one for each")) + starts[params.start]..]
        });
        let mut arrays = Vec::with_capacity(params.len());
        for param in params {
            let (len, room) =
                (form.params[param].elements * ITEM_BYTES, starts[param + 1] - starts[param]);
            let cut = rest.map(|rest| rest.split_at_mut(room));
            let [(weights, a), (exp_avgs, b), (exp_avg_sqs, c)] = cut;
            rest = [a, b, c];
            arrays.push([weights, exp_avgs, exp_avg_sqs].map(|array| &mut array[..len]));
        }
        arrays
    }

    pub(super) fn fill(&mut self, form: &StateLayout, weights: &[&[u8]]) {
        for (array, given) in self.arrays(form, 0..form.params.len()).into_iter().zip(weights) {
            let [weights, exp_avgs, exp_avg_sqs] = array;
            weights.copy_from_slice(given);
            exp_avgs.fill(0);
            exp_avg_sqs.fill(0);
        }
    }

    pub(super) fn load(
        &mut self,
        form: &StateLayout,
        checkpoint: &Checkpoint,
        groups: &[Group],
    ) -> Result<()> {
        let mut requests = Vec::new();
        let arrays = self.arrays(form, 0..form.params.len());
        for (param, arrays) in arrays.into_iter().enumerate() {
            let it = &form.params[param];
            for (role, into) in arrays.into_iter().enumerate() {
                let group = form.group(param, role);
                match groups.contains(&group) {
                    true => {
                        requests.push(RegionRequest {
                            name: &it.name,
                            group,
                            region: it.region.clone(),
                            into,
                        });
                    }
                    false => into.fill(0),
                }
            }
        }
        checkpoint.read(requests).map(drop)
    }

    pub(super) fn weights(
        &self,
        form: &StateLayout,
        into: &mut [WeightsOut<'_>],
        options: OffloadOptions,
    ) -> Result<()> {
        let items = into.iter_mut().enumerate().collect();
        let OffloadOptions { threads, width, .. } = options;
        let copy = |(param, into): (usize, &mut WeightsOut<'_>), _: &mut IoBuffer| {
            if !into.bytes.is_empty() {
                AdamWRow::copy(self.array(form, param, 0), into.bytes, into.dtype, width);
            }
            Ok(())
        };
        parallel_io::each(items, threads, copy).map(drop)
    }

    /// Updates the parameters from `first` on.
    pub(super) fn update(
        &mut self,
        form: &StateLayout,
        adamw: &AdamW,
        first: usize,
        updates: Vec<Update<'_>>,
        options: OffloadOptions,
    ) -> Result<()> {
        let params = first..first + updates.len();
        let mut rows = Vec::new();
        for (arrays, update) in self.arrays(form, params).into_iter().zip(updates) {
            let factors = adamw.factors(update.weight_decay);
            rows.extend(rows_of(arrays, update).into_iter().map(|row| (row, factors)));
        }
        let OffloadOptions { threads, width, .. } = options;
        let work = |(row, factors): (AdamWRow<'_>, _), _: &mut IoBuffer| {
            row.update(&factors, width);
            Ok(())
        };
        parallel_io::each(rows, threads, work).map(drop)
    }
}

/// Where the first array of a role begins.
const fn first(role: usize) -> usize {
    (role + 1) * STAGGER_BYTES
}

/// Cuts one parameter into rows.
fn rows_of<'a>(arrays: [&'a mut [u8]; ROLES], update: Update<'a>) -> Vec<AdamWRow<'a>> {
    let Update { grad, grad_dtype, weights: WeightsOut { dtype: copy_dtype, bytes: copy }, .. } =
        update;
    // fits: 2 or 4
    let (grad_bytes, copy_bytes) =
        (grad_dtype.item_bytes() as usize, copy_dtype.item_bytes() as usize);
    let [weights, exp_avgs, exp_avg_sqs] =
        arrays.map(|array| array.chunks_mut(ROW_ELEMENTS * ITEM_BYTES));
    let mut copies = copy.chunks_mut(ROW_ELEMENTS * copy_bytes);
    let state = weights.zip(exp_avgs).zip(exp_avg_sqs);
    let rows = state.zip(grad.chunks(ROW_ELEMENTS * grad_bytes));
    rows.map(|(((weights, exp_avgs), exp_avg_sqs), grads)| {
        let copy = copies.next().unwrap_or_default();
        AdamWRow { weights, exp_avgs, exp_avg_sqs, grads, grad_dtype, copy, copy_dtype }
    })
    .collect()
}
