//! The operations on host memory, one file each.

pub(crate) mod attention;
pub(crate) mod conv;
pub(crate) mod elementwise;
pub(crate) mod embedding;
pub(crate) mod gemm;
pub(crate) mod group_norm;
pub(crate) mod linear;
pub mod memory;
pub(crate) mod moe;
pub(crate) mod norm;
pub(crate) mod par;
pub(crate) mod recycle;
pub(crate) mod rope;
pub(crate) mod simd;
pub(crate) mod softmax;
pub mod workspace;

/// Which of the equal code paths this CPU runs: `cpu`, `cpu-avx2` or `cpu-avx512`.
pub fn path() -> &'static str {
    simd::name()
}
