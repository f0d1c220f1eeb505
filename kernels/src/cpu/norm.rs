//! Normalisation over the last dimension.

use super::recycle::Recycled;
use super::simd::math::sum_by;
use super::{par, simd};
use crate::error::{KernelError, Result};
use crate::tensor::Tensor;

/// `x / sqrt(mean(x^2) + eps) * weight` over the last dimension. `x [.., H]`, `weight [H]`.
pub fn rms_norm(x: &Tensor, weight: &Tensor, eps: f32) -> Result<Tensor> {
    const OP: &str = "rms_norm";
    let (data, hidden) = last_dim(OP, x)?;
    weight.expect_shape(OP, "weight", &[hidden])?;
    let weight = weight.to_f32();
    let weight = weight.as_f32()?;
    let mut out = Recycled::stale(data.len());
    par::rows(&mut out, hidden, 2 * hidden, |first, out| {
        let x = &data[first * hidden..][..out.len()];
        simd::run(
            #[inline(always)]
            || {
                for (x, out) in x.chunks_exact(hidden).zip(out.chunks_exact_mut(hidden)) {
                    rms_row(x, weight, eps, out);
                }
            },
        );
    });
    Ok(Tensor::output(x.shape(), out))
}

#[inline(always)]
fn rms_row(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    let inv = rms_factor(x, eps);
    for ((o, &v), &w) in out.iter_mut().zip(x).zip(weight) {
        *o = v * inv * w;
    }
}

/// `1 / sqrt(mean(x^2) + eps)`.
#[inline(always)]
pub(crate) fn rms_factor(x: &[f32], eps: f32) -> f32 {
    let sum = sum_by(
        x,
        #[inline(always)]
        |acc, v| v.mul_add(v, acc),
    );
    1.0 / sum.mul_add(1.0 / x.len() as f32, eps).sqrt()
}

/// `(x - mean) / sqrt(var + eps) * w + b` over the last dimension, biased variance. `w`, `b` `[H]`.
pub fn layer_norm(x: &Tensor, w: &Tensor, b: &Tensor, eps: f32) -> Result<Tensor> {
    const OP: &str = "layer_norm";
    let (data, hidden) = last_dim(OP, x)?;
    w.expect_shape(OP, "w", &[hidden])?;
    b.expect_shape(OP, "b", &[hidden])?;
    let (w, b) = (w.to_f32(), b.to_f32());
    let (w, b) = (w.as_f32()?, b.as_f32()?);
    let mut out = Recycled::stale(data.len());
    par::rows(&mut out, hidden, 4 * hidden, |first, out| {
        let x = &data[first * hidden..][..out.len()];
        simd::run(
            #[inline(always)]
            || {
                for (x, out) in x.chunks_exact(hidden).zip(out.chunks_exact_mut(hidden)) {
                    layer_row(x, w, b, eps, out);
                }
            },
        );
    });
    Ok(Tensor::output(x.shape(), out))
}

#[inline(always)]
fn layer_row(x: &[f32], w: &[f32], b: &[f32], eps: f32, out: &mut [f32]) {
    let n = x.len() as f32;
    let mean = sum_by(
        x,
        #[inline(always)]
        |acc, v| acc + v,
    ) / n;
    let squares = sum_by(
        x,
        #[inline(always)]
        |acc, v| (v - mean).mul_add(v - mean, acc),
    );
    let inv = 1.0 / (squares / n + eps).sqrt();
    for (((o, &v), &w), &b) in out.iter_mut().zip(x).zip(w).zip(b) {
        *o = ((v - mean) * inv).mul_add(w, b);
    }
}

fn last_dim<'a>(op: &'static str, x: &'a Tensor) -> Result<(&'a [f32], usize)> {
    let data = x.f32_named(op, "x")?;
    match x.shape().last() {
        Some(&h) if h > 0 => Ok((data, h)),
        _ => Err(KernelError::shape(op, "x", "[.., at least 1]", x.shape())),
    }
}
