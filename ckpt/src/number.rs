//! Values of elements, and casts of elements to another type.

use crate::Dtype;

/// The value of one little-endian element. Integers beyond 2^53 are rounded.
///
/// # Panics
/// If `item` is not as long as an element of the type, or the type has two values ([`to_pair`]).
#[must_use]
pub fn to_f64(dtype: Dtype, item: &[u8]) -> f64 {
    match dtype {
        Dtype::Bool | Dtype::U8 => f64::from(item[0]),
        Dtype::I8 => f64::from(item[0].cast_signed()),
        Dtype::F8E4M3 => small_float(item[0].into(), 4, 3, Specials::OneNan),
        Dtype::F8E5M2 => small_float(item[0].into(), 5, 2, Specials::Ieee),
        Dtype::F8E4M3Fnuz => fnuz(item[0], 3),
        Dtype::F8E5M2Fnuz => fnuz(item[0], 2),
        Dtype::F8E8M0 if item[0] == 0xff => f64::NAN,
        Dtype::F8E8M0 => 2_f64.powi(i32::from(item[0]) - 127),
        Dtype::U16 => f64::from(u16::from_le_bytes(fixed(item))),
        Dtype::I16 => f64::from(i16::from_le_bytes(fixed(item))),
        Dtype::F16 => small_float(u16::from_le_bytes(fixed(item)).into(), 5, 10, Specials::Ieee),
        Dtype::BF16 => f64::from(f32::from_bits(u32::from(u16::from_le_bytes(fixed(item))) << 16)),
        Dtype::U32 => f64::from(u32::from_le_bytes(fixed(item))),
        Dtype::I32 => f64::from(i32::from_le_bytes(fixed(item))),
        Dtype::F32 => f64::from(f32::from_le_bytes(fixed(item))),
        Dtype::U64 => u64::from_le_bytes(fixed(item)) as f64,
        Dtype::I64 => i64::from_le_bytes(fixed(item)) as f64,
        Dtype::F64 => f64::from_le_bytes(fixed(item)),
        Dtype::F4X2 | Dtype::C64 => panic!("{dtype} has two values"),
    }
}

/// Both values of one element: the two floats of an `F4_X2`, or the real and the imaginary part of
/// a `C64`. `None` for other types, which have one.
///
/// # Panics
/// If `item` is not as long as an element of the type.
#[must_use]
pub fn to_pair(dtype: Dtype, item: &[u8]) -> Option<[f64; 2]> {
    let quarter = |bits: u8| small_float(bits.into(), 2, 1, Specials::None);
    match dtype {
        Dtype::F4X2 => Some([quarter(item[0] & 0xf), quarter(item[0] >> 4)]),
        Dtype::C64 => Some([&item[..4], &item[4..]].map(|part| to_f64(Dtype::F32, part))),
        _ => None,
    }
}

/// Whether [`cast`] supports this pair of types.
#[must_use]
pub fn can_cast(from: Dtype, to: Dtype) -> bool {
    let is_float = |dtype| matches!(dtype, Dtype::F16 | Dtype::BF16 | Dtype::F32 | Dtype::F64);
    from == to || (is_float(from) && is_float(to))
}

/// Appends elements of one floating type as elements of another, rounded to the nearest, ties to
/// even, as torch does. Values that are too large become infinite; a NaN stays a NaN.
///
/// # Panics
/// If `from` is not a whole number of elements, or [`can_cast`] is false.
pub fn cast(from: &[u8], from_dtype: Dtype, to_dtype: Dtype, into: &mut Vec<u8>) {
    assert!(can_cast(from_dtype, to_dtype), "{from_dtype} to {to_dtype}");
    // fits: an element has at most 8 bytes
    let items = from.chunks_exact(from_dtype.item_bytes() as usize);
    assert!(items.remainder().is_empty(), "whole elements");
    match (from_dtype, to_dtype) {
        (a, b) if a == b => into.extend_from_slice(from),
        // The common casts directly: loops that the compiler vectorizes.
        (Dtype::F32, Dtype::BF16) => {
            into.extend(items.flat_map(|item| bf16(f32::from_le_bytes(fixed(item))).to_le_bytes()));
        }
        (Dtype::BF16, Dtype::F32) => {
            into.extend(items.flat_map(|item| [0, 0, item[0], item[1]]));
        }
        (_, Dtype::BF16) => into.extend(items.flat_map(|item| {
            // f64 to f32 to bf16 would round twice; with round-to-odd first, the result is exact.
            bf16(to_odd(to_f64(from_dtype, item))).to_le_bytes()
        })),
        (_, Dtype::F16) => {
            into.extend(items.flat_map(|item| f16(to_f64(from_dtype, item)).to_le_bytes()));
        }
        (_, Dtype::F32) => {
            into.extend(items.flat_map(|item| (to_f64(from_dtype, item) as f32).to_le_bytes()));
        }
        _ => into.extend(items.flat_map(|item| to_f64(from_dtype, item).to_le_bytes())),
    }
}

/// Appends a value as an element of a floating-point type.
///
/// # Panics
/// If the type is not a float that [`cast`] supports.
pub(crate) fn from_f64(value: f64, dtype: Dtype, into: &mut Vec<u8>) {
    cast(&value.to_le_bytes(), Dtype::F64, dtype, into);
}

fn fixed<const N: usize>(item: &[u8]) -> [u8; N] {
    item.try_into().expect("callers pass whole elements")
}

/// The values of a small float's largest exponent.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Specials {
    /// Infinities and NaNs.
    Ieee,
    /// A NaN with the largest mantissa.
    OneNan,
    /// Numbers only.
    None,
}

/// Decodes a float of few bits: sign, exponent, mantissa.
fn small_float(bits: u32, exponent_bits: u32, mantissa_bits: u32, specials: Specials) -> f64 {
    let bias = (1 << (exponent_bits - 1)) - 1;
    let mantissa = bits & ((1 << mantissa_bits) - 1);
    let exponent_mask = (1 << exponent_bits) - 1;
    let exponent = bits >> mantissa_bits & exponent_mask;
    let sign = if bits >> (mantissa_bits + exponent_bits) & 1 == 1 { -1.0 } else { 1.0 };
    let is_last = exponent == exponent_mask;
    let is_full = mantissa + 1 == 1 << mantissa_bits;
    let scale = f64::from(mantissa) / f64::from(1_u32 << mantissa_bits);
    let value = match specials {
        Specials::Ieee if is_last && mantissa == 0 => f64::INFINITY,
        Specials::Ieee if is_last => f64::NAN,
        Specials::OneNan if is_last && is_full => f64::NAN,
        _ if exponent == 0 => scale * 2_f64.powi(1 - bias),
        _ => (1.0 + scale) * 2_f64.powi(exponent.cast_signed() - bias),
    };
    sign * value
}

/// Decodes an 8-bit float whose bias is one larger than that of IEEE, so that each value is half of
/// the same bits' value there. Negative zero is the only NaN.
fn fnuz(bits: u8, mantissa_bits: u32) -> f64 {
    if bits == 0x80 {
        return f64::NAN;
    }
    small_float(bits.into(), 7 - mantissa_bits, mantissa_bits, Specials::None) / 2.0
}

/// Converts f32 to bf16, rounded to nearest even.
fn bf16(value: f32) -> u16 {
    let bits = value.to_bits();
    if value.is_nan() {
        return (bits >> 16) as u16 | 0x40; // fits: 16 bits remain
    }
    (bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16) as u16 // fits: 16 bits remain
}

/// Rounds f64 to f32 toward zero, and sets the last bit if the result is not exact.
fn to_odd(value: f64) -> f32 {
    let near = value as f32;
    if f64::from(near) == value || near.is_nan() {
        return near;
    }
    let down =
        if f64::from(near).abs() > value.abs() { f32::from_bits(near.to_bits() - 1) } else { near };
    f32::from_bits(down.to_bits() | 1)
}

/// Converts f64 to f16, rounded to nearest even.
fn f16(value: f64) -> u16 {
    let sign = ((value.to_bits() >> 48) & 0x8000) as u16; // fits: one bit
    let size = value.abs();
    if size.is_nan() {
        return sign | 0x7e00;
    }
    // 65,520 is halfway between the largest f16 and the next value that f16 would have.
    if size >= 65_520.0 {
        return sign | 0x7c00;
    }
    let exponent = ((size.to_bits() >> 52).cast_signed() - 1023).max(-14) as i32; // fits: -14 to 15
    let units = (size * 2_f64.powi(10 - exponent)).round_ties_even() as u16; // fits: at most 2048
    // A mantissa that rounds up to 2048 carries into the exponent, as it should.
    sign | ((((exponent + 14) as u16) << 10) + units) // fits: 0 to 29
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every f16 is converted to f64 and back; values halfway between two round to the even one.
    #[test]
    fn f16_rounds_to_even() {
        for bits in 0..=u16::MAX {
            let value = to_f64(Dtype::F16, &bits.to_le_bytes());
            if value.is_nan() {
                assert!(to_f64(Dtype::F16, &f16(value).to_le_bytes()).is_nan(), "{bits:04x}");
                continue;
            }
            assert_eq!(f16(value), bits, "{bits:04x} is {value}");
            let next = to_f64(Dtype::F16, &(bits + 1).to_le_bytes());
            if next.is_finite() && value.is_finite() {
                let even = if bits & 1 == 0 { bits } else { bits + 1 };
                assert_eq!(f16(value.midpoint(next)), even, "after {bits:04x}");
            }
        }
    }

    #[test]
    fn bf16_rounds_to_even() {
        for bits in 0..=u16::MAX {
            let value = f32::from_bits(u32::from(bits) << 16);
            let half = f32::from_bits(u32::from(bits) << 16 | 0x8000);
            if value.is_nan() {
                assert!(f32::from_bits(u32::from(bf16(value)) << 16).is_nan(), "{bits:04x}");
                continue;
            }
            assert_eq!(bf16(value), bits);
            if value.is_finite() {
                assert_eq!(bf16(half), bits + (bits & 1), "after {bits:04x}");
            }
        }
        // Just above halfway: an intermediate f32 must not round it down to even.
        let mut out = Vec::new();
        cast(
            &(1.0 + 2_f64.powi(-8) + 2_f64.powi(-40)).to_le_bytes(),
            Dtype::F64,
            Dtype::BF16,
            &mut out,
        );
        assert_eq!(out, 0x3f81_u16.to_le_bytes());
    }

    #[test]
    fn f8_values_are_decoded() {
        let check = |dtype, bits: u8, expected: f64| {
            assert_eq!(to_f64(dtype, &[bits]), expected, "{dtype} {bits:02x}");
        };
        check(Dtype::F8E4M3, 0x7e, 448.0);
        check(Dtype::F8E4M3, 0x01, 2_f64.powi(-9));
        check(Dtype::F8E4M3, 0xb8, -1.0);
        check(Dtype::F8E5M2, 0x7b, 57_344.0);
        check(Dtype::F8E5M2, 0x01, 2_f64.powi(-16));
        check(Dtype::F8E5M2, 0xfc, f64::NEG_INFINITY);
        check(Dtype::F8E4M3Fnuz, 0x7f, 240.0);
        check(Dtype::F8E4M3Fnuz, 0x01, 2_f64.powi(-10));
        check(Dtype::F8E4M3Fnuz, 0xc0, -1.0);
        check(Dtype::F8E5M2Fnuz, 0x7f, 57_344.0);
        check(Dtype::F8E5M2Fnuz, 0x01, 2_f64.powi(-17));
        check(Dtype::F8E5M2Fnuz, 0xc0, -1.0);
        check(Dtype::F8E8M0, 0x00, 2_f64.powi(-127));
        check(Dtype::F8E8M0, 0x7f, 1.0);
        check(Dtype::F8E8M0, 0xfe, 2_f64.powi(127));
        let nan = [
            (Dtype::F8E4M3, 0x7f),
            (Dtype::F8E5M2, 0x7d),
            (Dtype::F8E4M3Fnuz, 0x80),
            (Dtype::F8E5M2Fnuz, 0x80),
            (Dtype::F8E8M0, 0xff),
        ];
        for (dtype, bits) in nan {
            assert!(to_f64(dtype, &[bits]).is_nan(), "{dtype}");
        }
        // Types without infinities have one NaN, or one for each sign.
        for (dtype, nans) in [(Dtype::F8E4M3, 2), (Dtype::F8E4M3Fnuz, 1), (Dtype::F8E5M2Fnuz, 1)] {
            let all = (0..=u8::MAX).map(|bits| to_f64(dtype, &[bits]));
            assert_eq!(all.filter(|value| !value.is_finite()).count(), nans, "{dtype}");
        }
    }

    #[test]
    fn pairs_have_two_values() {
        let sizes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
        for bits in 0..=u8::MAX {
            let value = |half: u8| {
                let size = sizes[usize::from(half & 7)];
                if half < 8 { size } else { -size }
            };
            let expected = [value(bits & 15), value(bits >> 4)];
            assert_eq!(to_pair(Dtype::F4X2, &[bits]), Some(expected), "{bits:02x}");
        }
        let complex: Vec<u8> = [1.5_f32, -2.0].iter().flat_map(|part| part.to_le_bytes()).collect();
        assert_eq!(to_pair(Dtype::C64, &complex), Some([1.5, -2.0]));
        assert_eq!(to_pair(Dtype::F32, &[0; 4]), None);
    }

    #[test]
    fn f32_round_trips_through_f64() {
        let values = [0.0_f32, -0.0, 1.5, f32::MIN_POSITIVE / 2.0, f32::MAX, f32::NEG_INFINITY];
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        let (mut wide, mut back) = (Vec::new(), Vec::new());
        cast(&bytes, Dtype::F32, Dtype::F64, &mut wide);
        cast(&wide, Dtype::F64, Dtype::F32, &mut back);
        assert_eq!(back, bytes);
        assert!(!can_cast(Dtype::I64, Dtype::F32));
    }
}
