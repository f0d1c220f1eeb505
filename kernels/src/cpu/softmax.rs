//! Softmax over the last dimension.

use super::recycle::Recycled;
use super::{par, simd};
use crate::error::{KernelError, Result};
use crate::tensor::Tensor;

/// Softmax over the last dimension of `x [.., N]`.
pub fn softmax_rows(x: &Tensor) -> Result<Tensor> {
    const OP: &str = "softmax_rows";
    let data = x.f32_named(OP, "x")?;
    let n = match x.shape().last() {
        Some(&n) if n > 0 => n,
        _ => return Err(KernelError::shape(OP, "x", "[.., at least 1]", x.shape())),
    };
    let mut out = Recycled::stale(data.len());
    par::rows(&mut out, n, 10 * n, |first, out| {
        softmax_into(&data[first * n..][..out.len()], out, n);
    });
    Ok(Tensor::output(x.shape(), out))
}

/// Softmax of each row of `n` elements.
pub(crate) fn softmax_into(x: &[f32], out: &mut [f32], n: usize) {
    simd::run(
        #[inline(always)]
        || {
            for (x, out) in x.chunks_exact(n).zip(out.chunks_exact_mut(n)) {
                let max = simd::math::max(x);
                out.copy_from_slice(x);
                let sum = simd::math::exp_sum(out, max);
                for o in out.iter_mut() {
                    *o /= sum;
                }
            }
        },
    );
}
