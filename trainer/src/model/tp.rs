use bridge::autograd::{copy_in, gather_rows, reduce_out, scatter_rows};
use bridge::dist::{Group, Reduce};
use tch::Tensor;

use crate::Result;

/// The ranks that share each matrix, from the view of one of them.
#[derive(Clone, Debug)]
pub struct Tp {
    /// All of them; `None` if this rank has every matrix whole.
    pub group: Option<Group>,
    /// This rank, among them.
    pub rank: usize,
    /// How many there are.
    pub size: usize,
    /// Whether they also share the activations between the matrices (sequence parallelism): each
    /// has an equal run of the tokens of a micro-batch there, in the order of the ranks.
    pub sequence: bool,
}

impl Tp {
    /// A rank that has every matrix whole.
    #[must_use]
    pub fn alone() -> Self {
        Tp { group: None, rank: 0, size: 1, sequence: false }
    }

    /// The ranks of a group, which also share the tokens if `sequence` is set.
    #[must_use]
    pub fn of(group: &Group, sequence: bool) -> Self {
        if group.size() == 1 {
            return Tp::alone();
        }
        let (rank, size) = (group.rank(), group.size());
        Tp { group: Some(group.clone()), rank, size, sequence }
    }

    /// Whether there is no other rank.
    #[must_use]
    pub fn is_alone(&self) -> bool {
        self.group.is_none()
    }

    /// The input of a block of matrices: all tokens. Backward sums its gradient over the ranks.
    pub(super) fn enter(&self, x: &Tensor) -> Result<Tensor> {
        Ok(match &self.group {
            None => x.shallow_clone(),
            Some(group) if self.sequence => gather_rows(group, x)?,
            Some(group) => copy_in(group, x)?,
        })
    }

    /// The output of a block of matrices: the sum over the ranks, of all tokens or this rank's.
    pub(super) fn leave(&self, x: &Tensor) -> Result<Tensor> {
        Ok(match &self.group {
            None => x.shallow_clone(),
            Some(group) if self.sequence => scatter_rows(group, x)?,
            Some(group) => reduce_out(group, x)?,
        })
    }

    /// The largest over the ranks, of each element, in place.
    pub(super) fn max(&self, x: &mut Tensor) -> Result<()> {
        self.group.iter().try_for_each(|group| Ok(group.all_reduce(x, Reduce::Max)?))
    }

    /// The sum over the ranks, of each element, in place.
    pub(super) fn sum(&self, x: &mut Tensor) -> Result<()> {
        self.group.iter().try_for_each(|group| Ok(group.all_reduce(x, Reduce::Sum)?))
    }

    /// This rank's run of a tensor with a row for each token.
    pub(super) fn own_rows(&self, x: &Tensor) -> Result<Tensor> {
        if !self.sequence {
            return Ok(x.shallow_clone());
        }
        let len = x.size()[0] / self.size as i64; // fits: ranks are few
        Ok(x.f_narrow(0, self.rank as i64 * len, len)?)
    }

    /// The rows of a table for some ids, `[tokens, width]`. Each rank has an equal run of the rows.
    pub(super) fn embed(&self, table: &Tensor, ids: &Tensor) -> Result<Tensor> {
        let rows = table.size()[0];
        if self.is_alone() {
            return embed(table, ids);
        }
        let ids = ids.f_sub_scalar(self.rank as i64 * rows)?; // fits: ranks are few
        let is_elsewhere = ids.f_lt(0)?.f_logical_or(&ids.f_ge(rows)?)?;
        let found = embed(table, &ids.f_masked_fill(&is_elsewhere, 0)?)?;
        let is_elsewhere = is_elsewhere.f_view([-1, 1])?;
        self.leave(&found.f_masked_fill(&is_elsewhere, 0)?)
    }
}

/// The rows of a table for some ids, `[tokens, width]`.
pub(super) fn embed(table: &Tensor, ids: &Tensor) -> Result<Tensor> {
    let found = Tensor::f_embedding(table, ids, -1, false, false)?;
    Ok(found.f_view([-1, table.size()[1]])?)
}
