//! Numeric loops, compiled for the vector instructions of this processor.
//!
//! A [`Kernel`] is plain Rust that the compiler turns into vector instructions. It is compiled once
//! for every [`Width`], and all of them return the same bits: an operation of IEEE 754 has one
//! result, and none is reordered or fused unless the kernel does so explicitly.

/// What is computed. `run` and everything that it calls must be `#[inline(always)]`, because code
/// that is not inlined is compiled without the vector instructions.
pub trait Kernel {
    /// Its result.
    type Output;

    /// Computes it.
    fn run(self) -> Self::Output;
}

/// The vector width that a kernel is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Width {
    /// The baseline of the architecture.
    Portable,
    /// 256 bits, with fused multiplication and addition.
    Avx2,
    /// 512 bits.
    Avx512,
}

impl Width {
    /// All, the narrowest first.
    pub const ALL: [Width; 3] = [Width::Portable, Width::Avx2, Width::Avx512];

    /// The widest that this processor supports.
    #[must_use]
    pub fn widest() -> Self {
        *Width::ALL.iter().rfind(|width| width.is_here()).expect("every processor has the first")
    }

    /// Whether this processor supports it.
    #[must_use]
    pub fn is_here(self) -> bool {
        match self {
            Width::Portable => true,
            #[cfg(target_arch = "x86_64")]
            Width::Avx2 => {
                std::is_x86_feature_detected!("avx2") && std::is_x86_feature_detected!("fma")
            }
            #[cfg(target_arch = "x86_64")]
            Width::Avx512 => {
                Width::Avx2.is_here()
                    && std::is_x86_feature_detected!("avx512f")
                    && std::is_x86_feature_detected!("avx512bw")
                    && std::is_x86_feature_detected!("avx512dq")
                    && std::is_x86_feature_detected!("avx512vl")
            }
            #[cfg(not(target_arch = "x86_64"))]
            _ => false,
        }
    }

    /// Runs a kernel with this width, or with the baseline if this processor does not support it.
    #[inline]
    pub fn run<K: Kernel>(self, kernel: K) -> K::Output {
        #[cfg(target_arch = "x86_64")]
        if self.is_here() {
            match self {
                Width::Portable => {}
                // SAFETY: this processor has AVX2 and FMA, as was just checked.
                Width::Avx2 => return unsafe { avx2(kernel) },
                // SAFETY: this processor has these parts of AVX-512, as was just checked.
                Width::Avx512 => return unsafe { avx512(kernel) },
            }
        }
        kernel.run()
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn avx2<K: Kernel>(kernel: K) -> K::Output {
    kernel.run()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,avx512f,avx512bw,avx512dq,avx512vl")]
fn avx512<K: Kernel>(kernel: K) -> K::Output {
    kernel.run()
}
