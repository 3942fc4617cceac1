//! Sums whose bits do not depend on which rank adds.
//!
//! Floating-point addition is not associative, so the gradient of a step depends on the order in
//! which its micro-batches are added. [`TreeSum`] fixes the order to a binary tree over the index
//! of the micro-batch: `((0+1)+(2+3))+((4+5)+(6+7))`. A rank that holds any aligned, power-of-two
//! run of micro-batches then holds a subtree, and any such division gives the same bits.

use tch::Tensor;

use crate::Result;

/// Sums items along a binary tree, in the order of arrival. At most one item a level waits for its
/// sibling: `log2(items) + 1` in all.
#[derive(Debug)]
pub struct TreeSum<T> {
    /// The waiting sums: at level `l` of `2^l` items, the largest first in the order.
    levels: Vec<Option<T>>,
}

impl<T> TreeSum<T> {
    /// Without items yet.
    #[must_use]
    pub fn new() -> Self {
        TreeSum { levels: Vec::new() }
    }

    /// Adds the next item. `add(left, right)` makes `left` the sum of two neighbours.
    ///
    /// # Errors
    /// Those of `add`.
    pub fn push(&mut self, item: T, add: impl Fn(&mut T, &T) -> Result<()>) -> Result<()> {
        let mut sum = item;
        for level in &mut self.levels {
            match level.take() {
                None => {
                    *level = Some(sum);
                    return Ok(());
                }
                Some(mut left) => {
                    add(&mut left, &sum)?;
                    sum = left;
                }
            }
        }
        self.levels.push(Some(sum));
        Ok(())
    }

    /// The sum; `None` without items. If the count is no power of two, the waiting sums are added
    /// from the right, the smallest first.
    ///
    /// # Errors
    /// Those of `add`.
    pub fn finish(self, add: impl Fn(&mut T, &T) -> Result<()>) -> Result<Option<T>> {
        let mut sum: Option<T> = None;
        for mut waiting in self.levels.into_iter().flatten() {
            if let Some(right) = &sum {
                add(&mut waiting, right)?;
            }
            sum = Some(waiting);
        }
        Ok(sum)
    }
}

impl<T> Default for TreeSum<T> {
    fn default() -> Self {
        Self::new()
    }
}

/// The sum of numbers along the tree; 0 if there are none.
#[must_use]
pub fn tree_sum(numbers: &[f64]) -> f64 {
    let add = |left: &mut f64, right: &f64| {
        *left += *right;
        Ok(())
    };
    let mut sum = TreeSum::new();
    for number in numbers {
        sum.push(*number, add).expect("adding numbers cannot fail");
    }
    sum.finish(add).expect("as above").unwrap_or(0.0)
}

/// What one micro-batch, or a sum of some, contributes to a step.
#[derive(Debug)]
pub struct Contribution {
    /// Weighted loss, in nats.
    pub loss: f64,
    /// f32 gradients in the order of the uses of the parameters: those of a parameter with several
    /// uses are summed separately and joined last, so that every layout gives the same bits.
    pub grads: Vec<Tensor>,
}

impl Contribution {
    /// Adds its right neighbour, in place.
    ///
    /// # Errors
    /// [`crate::Error::Torch`].
    pub fn absorb(&mut self, right: &Self) -> Result<()> {
        self.loss += right.loss;
        add_all(&mut self.grads, &right.grads)
    }
}

/// Adds each of the right tensors to its left one, in place.
///
/// # Errors
/// [`crate::Error::Torch`].
pub fn add_all(left: &mut [Tensor], right: &[Tensor]) -> Result<()> {
    let _no_grad = tch::no_grad_guard();
    for (left, right) in left.iter_mut().zip(right) {
        _ = left.f_add_(right)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn joined(parts: &[String]) -> String {
        let add = |a: &mut String, b: &String| {
            *a = format!("({a}+{b})");
            Ok(())
        };
        let mut sum = TreeSum::new();
        for part in parts {
            sum.push(part.clone(), add).unwrap();
        }
        sum.finish(add).unwrap().unwrap_or_default()
    }

    #[test]
    fn items_are_added_along_the_documented_tree() {
        let names = |n: usize| (0..n).map(|i| i.to_string()).collect::<Vec<_>>();
        for (count, expected) in [
            (0, ""),
            (1, "0"),
            (2, "(0+1)"),
            (3, "((0+1)+2)"),
            (6, "(((0+1)+(2+3))+(4+5))"),
            (7, "(((0+1)+(2+3))+((4+5)+6))"),
            (8, "(((0+1)+(2+3))+((4+5)+(6+7)))"),
        ] {
            assert_eq!(joined(&names(count)), expected, "{count} items");
        }
    }

    /// Ranks that hold aligned runs of the items, each summing its own and then one another.
    #[test]
    fn every_division_gives_the_same_tree() {
        let names: Vec<String> = (0..16).map(|i| i.to_string()).collect();
        let whole = joined(&names);
        for ranks in [1, 2, 4, 8, 16] {
            let shares: Vec<String> = names.chunks(16 / ranks).map(joined).collect();
            assert_eq!(joined(&shares), whole, "{ranks} ranks");
        }
    }
}
