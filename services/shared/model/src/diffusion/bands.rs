//! The slow part of hidden states along their tokens.

use std::f64::consts::TAU;

use kernels::Tensor;
use rayon::prelude::*;

use crate::error::ModelError;

/// Share of the highest frequency up to which a change along the tokens counts as slow (HunyuanImage-3.0
/// specification, Taylor cache).
const LOW_SHARE: f64 = 0.1;

/// What is left of each row's part of `x [tokens of all rows, hidden]` when every frequency along its tokens
/// above a tenth of the highest is taken out. The `rows` rows are equally long.
pub(super) fn low_band(x: &Tensor, rows: usize) -> Result<Tensor, ModelError> {
    let (tokens, width) = (x.dim(0) / rows.max(1), x.dim(1));
    let kept = (LOW_SHARE * (tokens / 2) as f64) as usize;
    let wave = |k: usize, n: usize| {
        // Reduced in integers, so that long rows lose no phase.
        let angle = TAU * (k * n % tokens) as f64 / tokens as f64;
        (angle.cos() as f32, angle.sin() as f32)
    };
    let mut out = Vec::with_capacity(x.numel());
    for row in x.as_f32()?.chunks_exact((tokens * width).max(1)) {
        // Frequency k as a cosine and a sine part, [2, width].
        let parts: Vec<Vec<f32>> = (0..=kept)
            .into_par_iter()
            .map(|k| {
                let mut part = vec![0.0_f32; 2 * width];
                let (cosine, sine) = part.split_at_mut(width);
                for (n, token) in row.chunks_exact(width).enumerate() {
                    let (c, s) = wave(k, n);
                    for ((a, b), v) in cosine.iter_mut().zip(sine.iter_mut()).zip(token) {
                        *a += c * v;
                        *b += s * v;
                    }
                }
                part
            })
            .collect();
        let mut slow = vec![0.0_f32; tokens * width];
        slow.par_chunks_mut(width)
            .enumerate()
            .for_each(|(n, token)| {
                for (k, part) in parts.iter().enumerate() {
                    let (c, s) = wave(k, n);
                    let weight = if k == 0 || 2 * k == tokens { 1.0 } else { 2.0 } / tokens as f32;
                    for (i, v) in token.iter_mut().enumerate() {
                        *v += weight * (c * part[i] + s * part[width + i]);
                    }
                }
            });
        out.extend(slow);
    }
    Ok(Tensor::from_f32(x.shape(), out)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slow_waves_pass_and_fast_ones_do_not() {
        let tokens = 60;
        let wave = |k: usize| {
            let values =
                (0..tokens).map(|n| (TAU * (k * n) as f64 / tokens as f64 + 0.3).cos() as f32);
            values.collect::<Vec<_>>()
        };
        for (k, passes) in [(0, true), (3, true), (4, false), (20, false)] {
            // Two rows, the second one louder.
            let one = wave(k);
            let both: Vec<f32> = one
                .iter()
                .copied()
                .chain(one.iter().map(|v| 2.0 * v))
                .collect();
            let x = Tensor::from_f32(&[2 * tokens, 1], both.clone()).unwrap();
            let got = low_band(&x, 2).unwrap().to_f32_vec();
            for (g, v) in got.iter().zip(&both) {
                let want = if passes { *v } else { 0.0 };
                assert!((g - want).abs() < 1e-4, "{k}: {g} {want}");
            }
        }
    }
}
