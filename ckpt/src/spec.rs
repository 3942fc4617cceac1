//! The tensors of a model, and the regions that each process holds.

use std::collections::HashSet;

use serde::{Deserialize, Serialize};

use crate::region::{self, Region};
use crate::{Dtype, Error, Group, Result};

/// Longer than any parameter's name, and short enough that a header cannot outgrow its limit.
const NAME_BYTES_MAX: usize = 4096;

/// Prefix of padding entries in safetensors files, which are not tensors.
pub(crate) const PAD_PREFIX: &str = "__pad__";

/// A tensor of the whole model, without ranks and without bytes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TensorSpec {
    /// The parameter's name; the same in every group. Without `#`, which marks pieces.
    pub name: String,
    /// The role of the tensor for the parameter.
    pub group: Group,
    /// Its elements.
    pub dtype: Dtype,
    /// Elements along each axis; empty for a scalar. Row-major.
    pub shape: Vec<u64>,
}

impl TensorSpec {
    /// Bytes of the whole tensor; `None` if they are too many to count.
    #[must_use]
    pub fn bytes(&self) -> Option<u64> {
        region::elements(self.shape.iter().copied())?.checked_mul(self.dtype.item_bytes())
    }

    /// Its name in messages.
    pub(crate) fn label(&self) -> String {
        format!("{} '{}'", self.group, self.name)
    }
}

/// A region of a tensor that a writer holds in memory: these elements, contiguous and row-major.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HeldRegion {
    /// Index of the tensor in the model.
    pub tensor: usize,
    /// The region of it.
    pub region: Region,
}

/// Rejects tensors that cannot be saved.
pub(crate) fn check_specs(specs: &[TensorSpec]) -> Result<()> {
    let mut seen = HashSet::with_capacity(specs.len());
    for spec in specs {
        let bad = |reason: String| Err(Error::BadInput { object: spec.label(), reason });
        match spec.name.as_str() {
            "" => return bad("expected a name, found none".to_owned()),
            "__metadata__" => return bad("name is reserved by safetensors".to_owned()),
            name if name.starts_with(PAD_PREFIX) => {
                return bad(format!("names that start with {PAD_PREFIX} are reserved for padding"));
            }
            name if name.len() > NAME_BYTES_MAX => {
                return bad(format!("expected a name of at most {NAME_BYTES_MAX} bytes"));
            }
            name if name.contains('#') => {
                return bad("'#' in a name is reserved for the chunks of a tensor".to_owned());
            }
            _ => {}
        }
        if spec.shape.len() > region::RANK_MAX {
            return bad(format!("expected at most {} axes", region::RANK_MAX));
        }
        if spec.bytes().is_none() {
            return bad(format!("expected fewer than 2^64 bytes, found shape {:?}", spec.shape));
        }
        if !spec.dtype.fits_header(&spec.shape) {
            let found = format!("{} of shape {:?}", spec.dtype, spec.shape);
            return bad(format!("expected at least one axis, of fewer than 2^63, found {found}"));
        }
        if !seen.insert((spec.group, spec.name.as_str())) {
            return bad("duplicate name".to_owned());
        }
    }
    Ok(())
}
