use ckpt::layout::TensorSplit;

/// The initial values of a parameter.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Init {
    /// Normal, with this standard deviation.
    Normal(f64),
    /// All zeros: biases.
    Zeros,
    /// All ones: gains of norms.
    Ones,
}

/// One parameter of the whole model, without values.
#[derive(Clone, Debug, PartialEq)]
pub struct ParamSpec {
    /// Its name in the model of the family by Hugging Face.
    pub name: String,
    /// Its shape in the model without parallelism and without padding, row-major.
    pub shape: Vec<i64>,
    /// Its initial values.
    pub init: Init,
    /// How tensor parallelism divides it.
    pub split: TensorSplit,
    /// The units that use it, ascending. The first of them owns it.
    pub units: Vec<usize>,
}

impl ParamSpec {
    /// Elements, without padding.
    #[must_use]
    pub fn numel(&self) -> usize {
        // fits: a model that is not addressable fails when it is allocated.
        self.shape.iter().product::<i64>() as usize
    }

    /// Whether weight decay applies: to matrices, never to norms and biases.
    #[must_use]
    pub fn decays(&self) -> bool {
        self.shape.len() >= 2
    }

    /// [`ParamSpec::shape`], as in checkpoints.
    #[must_use]
    pub fn shape_u64(&self) -> Vec<u64> {
        self.shape.iter().map(|len| *len as u64).collect() // fits: lengths are not negative
    }

    /// The shape of the part of one of `tp` ranks, padding included.
    #[must_use]
    pub fn local_shape(&self, tp: usize) -> Vec<i64> {
        let tp = tp as i64; // fits: a number of ranks
        let mut shape = self.shape.clone();
        match &self.split {
            TensorSplit::Replicate => {}
            TensorSplit::Axis(axis) => shape[*axis] /= tp,
            TensorSplit::Padded { rows } => shape[0] = *rows as i64 / tp, // fits: rows of memory
            TensorSplit::Fused { axis: 0, .. } => shape[0] /= tp,
            TensorSplit::Fused { .. } if tp == 1 => {}
            // The fused matrices are separate matrices in the memory of a rank.
            TensorSplit::Fused { axis, blocks, .. } => {
                let count = blocks.len() as i64; // fits: a few
                shape[*axis] /= count * tp;
                shape.insert(0, count);
            }
        }
        shape
    }
}

/// One use of a parameter. The gradient of each use is summed over the micro-batches separately,
/// and the gradients of the uses of one parameter are added last, in the order of
/// [`super::Blueprint::uses`]. So the bits of the sum do not depend on which uses are on the same
/// rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Use {
    /// Index of the parameter in [`super::Blueprint::params`].
    pub param: usize,
    /// The unit that uses it.
    pub unit: usize,
    /// When the gradient of one tensor parallel rank is a partial sum.
    partial: Partial,
}

impl Use {
    /// Whether each of `tp` ranks computes only a partial sum of the gradient. With `sequence` each
    /// rank has only its own tokens between the matrices.
    #[must_use]
    pub fn is_partial(&self, tp: usize, sequence: bool) -> bool {
        match self.partial {
            Partial::Never => false,
            Partial::UnderSequence => sequence,
            Partial::Always => tp > 1,
        }
    }
}

/// When a tensor parallel rank computes a partial gradient, which is summed over the ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Partial {
    /// Never: the parameter is divided, and the gradient of each part is complete.
    Never,
    /// If each rank has only its own tokens.
    UnderSequence,
    /// Always: the incoming gradients are partial there.
    Always,
}

/// An index in [`super::Blueprint::uses`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct UseId(pub usize);

/// Collects the parameters of a model in the order in which they are used.
#[derive(Debug)]
pub(super) struct Builder {
    params: Vec<ParamSpec>,
    uses: Vec<Use>,
    /// The current unit.
    pub(super) unit: usize,
    /// Whether the tensor parallel ranks have gathered their tokens before the current part.
    pub(super) is_joined: bool,
}

impl Builder {
    pub(super) fn new() -> Self {
        Builder { params: Vec::new(), uses: Vec::new(), unit: 0, is_joined: false }
    }

    /// Adds a parameter and its use by the current unit.
    pub(super) fn param(
        &mut self,
        name: impl Into<String>,
        shape: &[i64],
        init: Init,
        split: TensorSplit,
    ) -> UseId {
        let partial = match split {
            TensorSplit::Replicate if self.is_joined => Partial::Always,
            TensorSplit::Replicate => Partial::UnderSequence,
            _ => Partial::Never,
        };
        let (name, shape) = (name.into(), shape.to_vec());
        self.params.push(ParamSpec { name, shape, init, split, units: vec![self.unit] });
        self.uses.push(Use { param: self.params.len() - 1, unit: self.unit, partial });
        UseId(self.uses.len() - 1)
    }

    /// Adds another use of a parameter by the current unit.
    pub(super) fn again(&mut self, of: UseId) -> UseId {
        let Use { param, partial, .. } = self.uses[of.0];
        self.uses.push(Use { param, unit: self.unit, partial });
        let units = &mut self.params[param].units;
        if !units.contains(&self.unit) {
            units.push(self.unit);
        }
        UseId(self.uses.len() - 1)
    }

    /// The parameters, those with weight decay first, so that the two groups of the optimizer are
    /// two slices; and their uses, in the order in which they were added.
    pub(super) fn finish(self) -> (Vec<ParamSpec>, Vec<Use>) {
        let mut order: Vec<usize> = (0..self.params.len()).collect();
        order.sort_by_key(|at| !self.params[*at].decays());
        let mut place = vec![0; order.len()];
        for (to, from) in order.iter().enumerate() {
            place[*from] = to;
        }
        let params = order.iter().map(|from| self.params[*from].clone()).collect();
        let uses = self.uses.into_iter().map(|it| Use { param: place[it.param], ..it }).collect();
        (params, uses)
    }
}
