use serde::{Deserialize, Serialize};
use std::fmt;

/// The element type of a tensor, under its safetensors name. Elements are little-endian.
///
/// Elements are whole bytes. Where safetensors counts elements of 4 bits (`F4`), an element is a
/// pair of them, as torch counts them: [`Dtype::F4X2`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Dtype {
    /// One byte, 0 or 1.
    #[serde(rename = "BOOL")]
    Bool,
    /// Unsigned 8-bit integer.
    U8,
    /// Signed 8-bit integer.
    I8,
    /// 8-bit float of 4 exponent and 3 mantissa bits.
    #[serde(rename = "F8_E4M3")]
    F8E4M3,
    /// 8-bit float of 5 exponent and 2 mantissa bits.
    #[serde(rename = "F8_E5M2")]
    F8E5M2,
    /// As `F8_E4M3`, with the bias 8, no negative zero and a single NaN.
    #[serde(rename = "F8_E4M3FNUZ")]
    F8E4M3Fnuz,
    /// As `F8_E5M2`, with the bias 16, no infinities, no negative zero and a single NaN.
    #[serde(rename = "F8_E5M2FNUZ")]
    F8E5M2Fnuz,
    /// A power of two, of 8 exponent bits: the scale of a block of smaller floats.
    #[serde(rename = "F8_E8M0")]
    F8E8M0,
    /// Two floats of 2 exponent bits and 1 mantissa bit in a byte, the first in the lower half.
    /// The `F4` of safetensors, whose shape counts the floats: its last axis is twice as long.
    #[serde(rename = "F4_X2")]
    F4X2,
    /// Unsigned 16-bit integer.
    U16,
    /// Signed 16-bit integer.
    I16,
    /// IEEE half precision.
    F16,
    /// The upper half of an IEEE single.
    BF16,
    /// Unsigned 32-bit integer.
    U32,
    /// Signed 32-bit integer.
    I32,
    /// IEEE single precision.
    F32,
    /// Unsigned 64-bit integer.
    U64,
    /// Signed 64-bit integer.
    I64,
    /// IEEE double precision.
    F64,
    /// Complex number of two IEEE singles, the real part first.
    C64,
}

impl Dtype {
    /// All types, by the size of their elements.
    pub const ALL: [Dtype; 20] = [
        Dtype::Bool,
        Dtype::U8,
        Dtype::I8,
        Dtype::F8E4M3,
        Dtype::F8E5M2,
        Dtype::F8E4M3Fnuz,
        Dtype::F8E5M2Fnuz,
        Dtype::F8E8M0,
        Dtype::F4X2,
        Dtype::U16,
        Dtype::I16,
        Dtype::F16,
        Dtype::BF16,
        Dtype::U32,
        Dtype::I32,
        Dtype::F32,
        Dtype::U64,
        Dtype::I64,
        Dtype::F64,
        Dtype::C64,
    ];

    /// Bytes of one element.
    #[must_use]
    pub fn item_bytes(self) -> u64 {
        match self {
            Dtype::Bool
            | Dtype::U8
            | Dtype::I8
            | Dtype::F4X2
            | Dtype::F8E8M0
            | Dtype::F8E4M3
            | Dtype::F8E5M2
            | Dtype::F8E4M3Fnuz
            | Dtype::F8E5M2Fnuz => 1,
            Dtype::U16 | Dtype::I16 | Dtype::F16 | Dtype::BF16 => 2,
            Dtype::U32 | Dtype::I32 | Dtype::F32 => 4,
            Dtype::U64 | Dtype::I64 | Dtype::F64 | Dtype::C64 => 8,
        }
    }

    /// The name in the manifest, and in a safetensors header except for [`Dtype::F4X2`].
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Dtype::Bool => "BOOL",
            Dtype::U8 => "U8",
            Dtype::I8 => "I8",
            Dtype::F8E4M3 => "F8_E4M3",
            Dtype::F8E5M2 => "F8_E5M2",
            Dtype::F8E4M3Fnuz => "F8_E4M3FNUZ",
            Dtype::F8E5M2Fnuz => "F8_E5M2FNUZ",
            Dtype::F8E8M0 => "F8_E8M0",
            Dtype::F4X2 => "F4_X2",
            Dtype::U16 => "U16",
            Dtype::I16 => "I16",
            Dtype::F16 => "F16",
            Dtype::BF16 => "BF16",
            Dtype::U32 => "U32",
            Dtype::I32 => "I32",
            Dtype::F32 => "F32",
            Dtype::U64 => "U64",
            Dtype::I64 => "I64",
            Dtype::F64 => "F64",
            Dtype::C64 => "C64",
        }
    }

    /// The name in a safetensors header.
    #[must_use]
    pub fn header_name(self) -> &'static str {
        if self == Dtype::F4X2 { "F4" } else { self.name() }
    }

    /// How many elements a safetensors header counts for one element, along the last axis.
    #[must_use]
    pub fn header_items(self) -> u64 {
        if self == Dtype::F4X2 { 2 } else { 1 }
    }

    /// Whether a safetensors header can have a tensor of this shape: one axis at least if its
    /// elements are counted differently there.
    pub(crate) fn fits_header(self, shape: &[u64]) -> bool {
        let items = self.header_items();
        items == 1 || shape.last().is_some_and(|len| len.checked_mul(items).is_some())
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The role of a tensor in training. The same parameter has one tensor in each group of
/// [`Group::OF_PARAMETERS`], all under the parameter's name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Group {
    /// The weights, in the precision that the model computes in.
    Model,
    /// The fp32 weights that the optimizer updates, where the model computes in less.
    Master,
    /// The running mean of the gradient (Adam's m).
    ExpAvg,
    /// The running mean of its square (Adam's v).
    ExpAvgSq,
    /// State of no parameter, with its own name: the tensors of other optimizers, step
    /// counts, states of random generators.
    Other,
}

impl Group {
    /// All groups, in the order in which they are written.
    pub const ALL: [Group; 5] =
        [Group::Model, Group::Master, Group::ExpAvg, Group::ExpAvgSq, Group::Other];

    /// The groups of the parameters' own tensors.
    pub const OF_PARAMETERS: [Group; 4] =
        [Group::Model, Group::Master, Group::ExpAvg, Group::ExpAvgSq];

    /// The name in the manifest.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Group::Model => "model",
            Group::Master => "master",
            Group::ExpAvg => "exp_avg",
            Group::ExpAvgSq => "exp_avg_sq",
            Group::Other => "other",
        }
    }

    /// The name of a tensor inside a safetensors file. Weights keep their own name, so that every
    /// tool finds them; `piece` distinguishes the parts of a tensor that was cut into several.
    pub(crate) fn entry_name(self, name: &str, piece: Option<usize>) -> String {
        let whole = match self {
            Group::Model => name.to_owned(),
            _ => format!("{}/{name}", self.name()),
        };
        piece.map_or_else(|| whole.clone(), |k| format!("{whole}#{k}"))
    }
}

impl fmt::Display for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The names are the same in JSON and in messages, and are those of the safetensors crate.
    #[test]
    fn names_agree() {
        for dtype in Dtype::ALL {
            assert_eq!(serde_json::to_value(dtype).unwrap(), dtype.name());
            let name = serde_json::Value::from(dtype.header_name());
            let theirs: safetensors::Dtype = serde_json::from_value(name).unwrap();
            let bits = theirs.bitsize() as u64 * dtype.header_items();
            assert_eq!(bits, dtype.item_bytes() * 8, "{dtype}");
        }
        let sizes = Dtype::ALL.map(Dtype::item_bytes);
        assert!(sizes.is_sorted());
        for group in Group::ALL {
            assert_eq!(serde_json::to_value(group).unwrap(), group.name());
        }
    }
}
