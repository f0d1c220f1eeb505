//! Plain convolution and group normalisation.

use super::{silu, tensor};
use crate::Tensor;

/// Convolution with stride 1 and zero padding `kernel / 2`, channels last.
///
/// `x` is `[n, t, h, w, c_in]`, `w` is `[c_out, c_in, kt, kh, kw]` (odd kernels); `[n, t, h, w, c_out]`.
#[must_use]
pub fn conv(x: &Tensor, w: &Tensor, bias: Option<&Tensor>) -> Tensor {
    let (xs, ws) = (x.shape().to_vec(), w.shape().to_vec());
    let (xd, wd, bias) = (x.to_f32_vec(), w.to_f32_vec(), bias.map(Tensor::to_f32_vec));
    let mut out = Vec::new();
    let shape = [xs[0], xs[1], xs[2], xs[3], ws[0]];
    for at in 0..shape.iter().product::<usize>() {
        let (co, pixel) = (at % ws[0], at / ws[0]);
        let (col, row) = (pixel % xs[3], pixel / xs[3] % xs[2]);
        let (frame, n) = (pixel / xs[3] / xs[2] % xs[1], pixel / xs[3] / xs[2] / xs[1]);
        let mut sum = bias.as_ref().map_or(0.0, |b| f64::from(b[co]));
        for tap in 0..ws[2] * ws[3] * ws[4] {
            let (kt, kh, kw) = (tap / ws[4] / ws[3], tap / ws[4] % ws[3], tap % ws[4]);
            // Source coordinates shifted by the padding, so that they stay unsigned.
            let (t, h, w) = (frame + kt, row + kh, col + kw);
            let (pt, ph, pw) = (ws[2] / 2, ws[3] / 2, ws[4] / 2);
            let inside = (pt..pt + xs[1]).contains(&t)
                && (ph..ph + xs[2]).contains(&h)
                && (pw..pw + xs[3]).contains(&w);
            if !inside {
                continue;
            }
            let source = ((n * xs[1] + t - pt) * xs[2] + h - ph) * xs[3] + w - pw;
            for ci in 0..xs[4] {
                let weight = wd[((co * ws[1] + ci) * ws[2] + kt) * ws[3] * ws[4] + kh * ws[4] + kw];
                sum += f64::from(xd[source * xs[4] + ci]) * f64::from(weight);
            }
        }
        out.push(sum as f32);
    }
    tensor(&shape, out)
}

/// Group normalisation over `[n, spatial.., c]`: each group of `c / groups` channels of an image has
/// zero mean and unit (biased) variance, then `* w + b`, then `* (1 + scale) + shift`, then SiLU.
#[must_use]
pub fn group_norm(
    x: &Tensor,
    (groups, eps): (usize, f32),
    (w, b): (&Tensor, &Tensor),
    scale_shift: Option<(&Tensor, &Tensor)>,
    with_silu: bool,
) -> Tensor {
    let (n, c) = (x.dim(0), x.dim(x.rank() - 1));
    let (data, w, b) = (x.to_f32_vec(), w.to_f32_vec(), b.to_f32_vec());
    let scale_shift = scale_shift.map(|(s, t)| (s.to_f32_vec(), t.to_f32_vec()));
    let per_image = data.len() / n;
    let size = c / groups;
    let mut out = data.clone();
    for image in 0..n {
        for group in 0..groups {
            let members: Vec<usize> = (image * per_image..(image + 1) * per_image)
                .filter(|i| i % c / size == group)
                .collect();
            let count = members.len() as f64;
            let mean = members.iter().map(|&i| f64::from(data[i])).sum::<f64>() / count;
            let var = members
                .iter()
                .map(|&i| (f64::from(data[i]) - mean).powi(2))
                .sum::<f64>()
                / count;
            let inv = 1.0 / (var + f64::from(eps)).sqrt();
            for &i in &members {
                let ch = i % c;
                let mut y = (f64::from(data[i]) - mean) * inv * f64::from(w[ch]) + f64::from(b[ch]);
                if let Some((s, t)) = &scale_shift {
                    y = y * (1.0 + f64::from(s[image * c + ch])) + f64::from(t[image * c + ch]);
                }
                out[i] = if with_silu { silu(y as f32) } else { y as f32 };
            }
        }
    }
    tensor(x.shape(), out)
}
