use ckpt::layout::TensorSplit;

/// How a parameter begins.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Init {
    /// Normal, with this standard deviation.
    Normal(f64),
    /// All zeros: biases.
    Zeros,
    /// All ones: gains of norms.
    Ones,
}

/// One parameter of the whole model, before it has values.
#[derive(Clone, Debug, PartialEq)]
pub struct ParamSpec {
    /// Its name, as Hugging Face's model of the family has it.
    pub name: String,
    /// Its shape in the model without parallelism and without padding, row-major.
    pub shape: Vec<i64>,
    /// Its first values.
    pub init: Init,
    /// How tensor parallelism cuts it.
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

    /// [`ParamSpec::shape`], as checkpoints count.
    #[must_use]
    pub fn shape_u64(&self) -> Vec<u64> {
        self.shape.iter().map(|len| *len as u64).collect() // fits: lengths are not negative
    }

    /// The shape of what one of `tp` ranks has of it, padding included.
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
            // Each of the fused matrices is a matrix of its own in the memory of a rank.
            TensorSplit::Fused { axis, blocks, .. } => {
                let count = blocks.len() as i64; // fits: a few
                shape[*axis] /= count * tp;
                shape.insert(0, count);
            }
        }
        shape
    }
}

/// One place where a parameter works. The gradient of each use is summed over the micro-batches by
/// itself, and those of one parameter are joined last, in the order of
/// [`super::Blueprint::uses`]: so the bits of the sum do not depend on which uses are together on
/// one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Use {
    /// Place of the parameter in [`super::Blueprint::params`].
    pub param: usize,
    /// The unit that uses it.
    pub unit: usize,
    /// When the gradient of one tensor parallel rank is a part of the whole.
    partial: Partial,
}

impl Use {
    /// Whether one of `tp` ranks computes a part of the gradient only. With `sequence` each of them
    /// sees its own tokens only between the matrices.
    #[must_use]
    pub fn is_partial(&self, tp: usize, sequence: bool) -> bool {
        match self.partial {
            Partial::Never => false,
            Partial::UnderSequence => sequence,
            Partial::Always => tp > 1,
        }
    }
}

/// When a tensor parallel rank computes a part of a gradient that is to be summed over the ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Partial {
    /// Never: it is the rank's own part of the parameter.
    Never,
    /// If each rank sees its own tokens only.
    UnderSequence,
    /// Always: the gradients that come from above are partial there.
    Always,
}

/// A place in [`super::Blueprint::uses`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct UseId(pub usize);

/// Collects the parameters of a model in the order in which they are used.
#[derive(Debug)]
pub(super) struct Builder {
    params: Vec<ParamSpec>,
    uses: Vec<Use>,
    /// The unit that is being described.
    pub(super) unit: usize,
    /// Whether what is described comes after the tensor parallel ranks have joined their tokens.
    pub(super) is_joined: bool,
}

impl Builder {
    pub(super) fn new() -> Self {
        Builder { params: Vec::new(), uses: Vec::new(), unit: 0, is_joined: false }
    }

    /// A new parameter, and its use by the unit at hand.
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

    /// Another use of a parameter, by the unit at hand.
    pub(super) fn again(&mut self, of: UseId) -> UseId {
        let Use { param, partial, .. } = self.uses[of.0];
        self.uses.push(Use { param, unit: self.unit, partial });
        let units = &mut self.params[param].units;
        if !units.contains(&self.unit) {
            units.push(self.unit);
        }
        UseId(self.uses.len() - 1)
    }

    /// The parameters, those that decay first, so that the optimizer's two groups are two slices;
    /// and the uses of them, as they were described.
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
