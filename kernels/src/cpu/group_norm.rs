//! Group normalisation, channels last.

use rayon::prelude::*;

use super::recycle::Recycled;
use super::{par, simd};
use crate::error::{KernelError, Result};
use crate::tensor::Tensor;

/// Parameters of a group normalisation layer.
#[derive(Debug, Clone, Copy)]
pub struct GroupNorm<'a> {
    /// Number of groups; divides the channels.
    pub groups: usize,
    /// Scale per channel `[C]`.
    pub weight: &'a Tensor,
    /// Shift per channel `[C]`.
    pub bias: &'a Tensor,
    /// Added to the variance. HunyuanImage-3.0: 1e-5 in the patch layers, 1e-6 in the VAE.
    pub eps: f32,
}

/// Normalises `x [n, spatial.., C]` per image and group of channels (biased variance), then
/// `y * weight + bias`, then `y * (1 + scale) + shift` where given (`[n, C]` each), then SiLU where `silu`.
pub fn group_norm(
    x: &Tensor,
    norm: &GroupNorm<'_>,
    scale_shift: Option<(&Tensor, &Tensor)>,
    silu: bool,
) -> Result<Tensor> {
    const OP: &str = "group_norm";
    if x.rank() < 2 {
        return Err(KernelError::shape(
            OP,
            "x",
            "[n, spatial.., channels]",
            x.shape(),
        ));
    }
    let (n, c) = (x.dim(0), x.dim(x.rank() - 1));
    if norm.groups == 0 || c == 0 || c % norm.groups != 0 {
        let reason = "must divide the channels";
        return Err(KernelError::Argument {
            op: OP,
            what: "groups",
            reason,
        });
    }
    norm.weight.expect_shape(OP, "weight", &[c])?;
    norm.bias.expect_shape(OP, "bias", &[c])?;
    let scale_shift = match scale_shift {
        Some((scale, shift)) => {
            scale.expect_shape(OP, "scale", &[n, c])?;
            shift.expect_shape(OP, "shift", &[n, c])?;
            Some((scale.f32_named(OP, "scale")?, shift.f32_named(OP, "shift")?))
        }
        None => None,
    };
    let data = x.f32_named(OP, "x")?;
    let (weight, bias) = (norm.weight.to_f32(), norm.bias.to_f32());
    let (weight, bias) = (weight.as_f32()?, bias.as_f32()?);
    let mut out = Recycled::stale(data.len());
    let per_image = data.len().checked_div(n).unwrap_or(0);
    if per_image == 0 {
        return Ok(Tensor::output(x.shape(), out));
    }
    for (image, (x, out)) in data
        .chunks_exact(per_image)
        .zip(out.chunks_exact_mut(per_image))
        .enumerate()
    {
        let range = image * c..(image + 1) * c;
        let adaptive = scale_shift.map(|(s, t)| (&s[range.clone()], &t[range.clone()]));
        let affine = affine(
            &statistics(x, c, norm),
            (weight, bias),
            adaptive,
            norm.groups,
        );
        apply(x, &affine, silu, out);
    }
    Ok(Tensor::output(x.shape(), out))
}

/// Rows summed in `f32` lanes before they are added to the `f64` totals.
const BLOCK_ROWS: usize = 64;

/// Mean and `1 / sqrt(var + eps)` of each group. Sums run over fixed blocks of rows, added in order.
fn statistics(x: &[f32], c: usize, norm: &GroupNorm<'_>) -> Vec<(f64, f64)> {
    let size = c / norm.groups;
    let count = (x.len() / c * size) as f64;
    let by_group = |sums: &[f64]| -> Vec<f64> {
        sums.chunks_exact(size)
            .map(|s| s.iter().sum::<f64>() / count)
            .collect()
    };
    let means = by_group(&channel_sums(x, &vec![0.0; c], c, false));
    let centre: Vec<f32> = (0..c).map(|ch| means[ch / size] as f32).collect();
    // The rounding of the centre to f32 is corrected below: var = E[(x-a)^2] - (mean-a)^2.
    let squares = by_group(&channel_sums(x, &centre, c, true));
    means
        .iter()
        .zip(squares)
        .map(|(&mean, square)| {
            let offset = mean - f64::from(mean as f32);
            let var = (square - offset * offset).max(0.0);
            (mean, 1.0 / (var + f64::from(norm.eps)).sqrt())
        })
        .collect()
}

/// Per channel: the sum over rows of `x - centre`, or of its square.
fn channel_sums(x: &[f32], centre: &[f32], c: usize, square: bool) -> Vec<f64> {
    let block = |rows: &[f32]| -> Vec<f32> {
        let mut sums = vec![0f32; c];
        simd::run(
            #[inline(always)]
            || {
                for row in rows.chunks_exact(c) {
                    for ((s, &v), &a) in sums.iter_mut().zip(row).zip(centre) {
                        let d = v - a;
                        *s = if square { d.mul_add(d, *s) } else { *s + d };
                    }
                }
            },
        );
        sums
    };
    let blocks: Vec<Vec<f32>> = if par::pieces(x.len(), 2) > 1 {
        x.par_chunks(BLOCK_ROWS * c).map(block).collect()
    } else {
        x.chunks(BLOCK_ROWS * c).map(block).collect()
    };
    let mut total = vec![0f64; c];
    for sums in &blocks {
        for (t, &s) in total.iter_mut().zip(sums) {
            *t += f64::from(s);
        }
    }
    total
}

/// Folds statistics, affine parameters and the adaptive scale into `x * a + b` per channel.
fn affine(
    statistics: &[(f64, f64)],
    (weight, bias): (&[f32], &[f32]),
    adaptive: Option<(&[f32], &[f32])>,
    groups: usize,
) -> Vec<(f32, f32)> {
    let size = weight.len() / groups;
    (0..weight.len())
        .map(|ch| {
            let (mean, inv) = statistics[ch / size];
            let mut a = inv * f64::from(weight[ch]);
            let mut b = f64::from(bias[ch]) - mean * a;
            if let Some((scale, shift)) = adaptive {
                let s = 1.0 + f64::from(scale[ch]);
                a *= s;
                b = b * s + f64::from(shift[ch]);
            }
            (a as f32, b as f32)
        })
        .collect()
}

fn apply(x: &[f32], affine: &[(f32, f32)], silu: bool, out: &mut [f32]) {
    let c = affine.len();
    let (a, b): (Vec<f32>, Vec<f32>) = affine.iter().copied().unzip();
    par::rows(out, c, 8 * c, |first, out| {
        let x = &x[first * c..][..out.len()];
        simd::run(
            #[inline(always)]
            || {
                for (x, out) in x.chunks_exact(c).zip(out.chunks_exact_mut(c)) {
                    for (((o, &v), &a), &b) in out.iter_mut().zip(x).zip(&a).zip(&b) {
                        let y = v.mul_add(a, b);
                        *o = if silu { simd::math::silu(y) } else { y };
                    }
                }
            },
        );
    });
}
