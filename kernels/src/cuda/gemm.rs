//! Matrix products on the tensor cores: dense, grouped by expert, and in 8-bit floats.
//!
//! `out [rows, n] = a [rows, k] . w [n, k]^T`, weights as checkpoints store them, fp32 accumulation. A row's
//! result depends on that row alone: sums run along k in one order, whatever else is in the call.
//!
//! The kernels of one [`Gpu`](super::Gpu) share a counter of work, so products run one after another: all on its
//! one stream.

use super::codes::{SwiGluCodes, settle_codes};
use super::error::Result;
use super::gemm_launch::{ANY, After, Product};
use super::norm::E4m3Rows;
use super::tensor::{GpuTensor, GpuType};

/// What follows a product, in the registers that hold it; one rounding at the end.
#[derive(Clone, Copy, Debug)]
pub enum Finish<'a> {
    /// Nothing; `out [rows, n]`, bf16 or (dense bf16 products only) F32.
    Store,
    /// HunyuanImage-3.0: the first half of the n features, linear, times SiLU of the second half;
    /// `out [rows, n / 2]`, bf16. For bf16 products; see [`grouped_swiglu_fp8`].
    SwiGlu,
    /// Plus this, bf16 `[rows, n]`; it may be `out`.
    Add(&'a GpuTensor),
}

impl<'a> From<Finish<'a>> for After<'a> {
    fn from(finish: Finish<'a>) -> Self {
        match finish {
            Finish::Store => Self::Store,
            Finish::SwiGlu => Self::SwiGlu,
            Finish::Add(residual) => Self::Add(residual),
        }
    }
}

/// `out = finish(a . w^T)` with `a [rows, k]` and `w [n, k]` in bf16; k and n (n / 2 with SwiGLU) are
/// multiples of 8.
///
/// # Errors
/// `Argument` naming the operand that does not fit, or what the driver says.
pub fn gemm(out: &GpuTensor, a: &GpuTensor, w: &GpuTensor, finish: Finish<'_>) -> Result<()> {
    const OP: &str = "gemm";
    w.expect(OP, "w", &[ANY, ANY], GpuType::Bf16)?;
    let w = w.reshape(&[1, w.dim(0), w.dim(1)])?;
    Product {
        op: OP,
        out,
        a,
        w: &w,
        offsets: None,
        scales: None,
        finish: finish.into(),
    }
    .run()
}

/// Grouped: rows `offsets[g]..offsets[g + 1]` of `a [rows, k]` are multiplied by `w[g]` of `w [groups, n, k]`.
///
/// `offsets [groups + 1]` I32 ascend from 0 to at most `rows` and stay on the device; groups may be empty, and
/// rows of `out` that belong to no group are not written. At most 128 groups.
///
/// # Errors
/// Those of [`gemm`].
pub fn grouped_gemm(
    out: &GpuTensor,
    a: &GpuTensor,
    w: &GpuTensor,
    offsets: &GpuTensor,
    finish: Finish<'_>,
) -> Result<()> {
    const OP: &str = "grouped_gemm";
    w.expect(OP, "w", &[ANY, ANY, ANY], GpuType::Bf16)?;
    Product {
        op: OP,
        out,
        a,
        w,
        offsets: Some(offsets),
        scales: None,
        finish: finish.into(),
    }
    .run()
}

/// [`gemm`] of 8-bit floats with one scale for each row of both; `out` is bf16, k is a multiple of 16.
/// [`quantize_rows`](super::quantize_rows) makes both operands.
///
/// # Errors
/// Those of [`gemm`].
pub fn gemm_fp8(
    out: &GpuTensor,
    a: E4m3Rows<'_>,
    w: E4m3Rows<'_>,
    finish: Finish<'_>,
) -> Result<()> {
    const OP: &str = "gemm_fp8";
    w.codes.expect(OP, "w", &[ANY, ANY], GpuType::E4m3)?;
    w.scales
        .expect(OP, "w scales", &[w.codes.dim(0)], GpuType::F32)?;
    let (n, k) = (w.codes.dim(0), w.codes.dim(1));
    let (values, scales) = (w.codes.reshape(&[1, n, k])?, w.scales.reshape(&[1, n])?);
    let scales = Some((a.scales, &scales));
    Product {
        op: OP,
        out,
        a: a.codes,
        w: &values,
        offsets: None,
        scales,
        finish: finish.into(),
    }
    .run()
}

/// [`grouped_gemm`] of 8-bit floats; k is a multiple of 16. Codes of `w [groups, n, k]`, scales `[groups, n]`.
///
/// # Errors
/// Those of [`gemm`].
pub fn grouped_gemm_fp8(
    out: &GpuTensor,
    a: E4m3Rows<'_>,
    w: E4m3Rows<'_>,
    offsets: &GpuTensor,
    finish: Finish<'_>,
) -> Result<()> {
    const OP: &str = "grouped_gemm_fp8";
    w.codes.expect(OP, "w", &[ANY, ANY, ANY], GpuType::E4m3)?;
    let scales = Some((a.scales, w.scales));
    Product {
        op: OP,
        out,
        a: a.codes,
        w: w.codes,
        offsets: Some(offsets),
        scales,
        finish: finish.into(),
    }
    .run()
}

/// The first half of experts in 8-bit floats: [`grouped_gemm_fp8`] with [`Finish::SwiGlu`] into 8-bit floats; k and
/// n / 2 are multiples of 16.
///
/// Scales are powers of two, the smallest of every eighth that holds a row: codes lose nothing to the best scale until
/// values lie a factor of 110 and more below the row's largest. Rows of no group stay.
///
/// # Errors
/// Those of [`gemm`].
pub fn grouped_swiglu_fp8(
    out: SwiGluCodes<'_>,
    a: E4m3Rows<'_>,
    w: E4m3Rows<'_>,
    offsets: &GpuTensor,
) -> Result<()> {
    const OP: &str = "grouped_swiglu_fp8";
    w.codes.expect(OP, "w", &[ANY, ANY, ANY], GpuType::E4m3)?;
    Product {
        op: OP,
        out: out.rows.codes,
        a: a.codes,
        w: w.codes,
        offsets: Some(offsets),
        scales: Some((a.scales, w.scales)),
        finish: After::Codes(out.exponents),
    }
    .run()?;
    settle_codes(out, &offsets.narrow0(w.codes.dim(0), 1)?)
}
