//! Plain definitions: every operation in obvious loops with `f64` sums.
//!
//! These are the meaning of the operations. They are slow, check nothing beyond what indexing checks
//! (a wrong shape panics), and serve as the oracle of the tests.

mod attention;
mod image;

pub use attention::{attention, attention_partial, merge_attention, qkv_split_rope_norm};
pub use image::{conv, group_norm};

use crate::Tensor;

fn tensor(shape: &[usize], data: Vec<f32>) -> Tensor {
    Tensor::from_f32(shape, data).unwrap_or_else(|e| panic!("plain definition: {e}"))
}

/// `y[t, n] = bias[n] + sum_k x[t, k] * w[n, k]`.
#[must_use]
pub fn linear(x: &Tensor, w: &Tensor, bias: Option<&Tensor>) -> Tensor {
    let (rows, n, k) = (x.dim(0), w.dim(0), w.dim(1));
    let (x, w, bias) = (x.to_f32_vec(), w.to_f32_vec(), bias.map(Tensor::to_f32_vec));
    let mut y = Vec::with_capacity(rows * n);
    for t in 0..rows {
        for j in 0..n {
            let mut sum = bias.as_ref().map_or(0.0, |b| f64::from(b[j]));
            for i in 0..k {
                sum += f64::from(x[t * k + i]) * f64::from(w[j * k + i]);
            }
            y.push(sum as f32);
        }
    }
    tensor(&[rows, n], y)
}

/// `x / sqrt(mean(x^2) + eps) * weight`, over the last dimension.
#[must_use]
pub fn rms_norm(x: &Tensor, weight: &Tensor, eps: f32) -> Tensor {
    let w = weight.to_f32_vec();
    let mut out = Vec::with_capacity(x.numel());
    for row in x.to_f32_vec().chunks(w.len()) {
        let mean = row.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>() / w.len() as f64;
        let inv = 1.0 / (mean + f64::from(eps)).sqrt();
        out.extend(
            row.iter()
                .zip(&w)
                .map(|(&v, &g)| (f64::from(v) * inv * f64::from(g)) as f32),
        );
    }
    tensor(x.shape(), out)
}

/// `(x - mean) / sqrt(var + eps) * w + b`, over the last dimension, biased variance.
#[must_use]
pub fn layer_norm(x: &Tensor, w: &Tensor, b: &Tensor, eps: f32) -> Tensor {
    let (w, b) = (w.to_f32_vec(), b.to_f32_vec());
    let n = w.len() as f64;
    let mut out = Vec::with_capacity(x.numel());
    for row in x.to_f32_vec().chunks(w.len()) {
        let mean = row.iter().map(|&v| f64::from(v)).sum::<f64>() / n;
        let var = row
            .iter()
            .map(|&v| (f64::from(v) - mean).powi(2))
            .sum::<f64>()
            / n;
        let inv = 1.0 / (var + f64::from(eps)).sqrt();
        for (i, &v) in row.iter().enumerate() {
            out.push(((f64::from(v) - mean) * inv * f64::from(w[i]) + f64::from(b[i])) as f32);
        }
    }
    tensor(x.shape(), out)
}

/// `x / (1 + exp(-x))`.
#[must_use]
pub fn silu(x: f32) -> f32 {
    let x = f64::from(x);
    (x / (1.0 + libm::exp(-x))) as f32
}

/// `x/2 * (1 + erf(x / sqrt(2)))`.
#[must_use]
pub fn gelu_erf(x: f32) -> f32 {
    let x = f64::from(x);
    (0.5 * x * (1.0 + libm::erf(x * std::f64::consts::FRAC_1_SQRT_2))) as f32
}

/// `x/2 * (1 + tanh(sqrt(2/pi) * (x + 0.044715 x^3)))`.
#[must_use]
pub fn gelu_tanh(x: f32) -> f32 {
    let x = f64::from(x);
    let inner = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x * x * x);
    (0.5 * x * (1.0 + libm::tanh(inner))) as f32
}

/// `up * silu(gate)` where `up` is the first half of each row and `gate` the second.
#[must_use]
pub fn swiglu_up_gate(x: &Tensor) -> Tensor {
    let (rows, half) = (x.dim(0), x.dim(1) / 2);
    let mut out = Vec::with_capacity(rows * half);
    for row in x.to_f32_vec().chunks(2 * half) {
        for i in 0..half {
            let g = f64::from(row[half + i]);
            out.push((f64::from(row[i]) * g / (1.0 + libm::exp(-g))) as f32);
        }
    }
    tensor(&[rows, half], out)
}

/// Softmax over the last dimension.
#[must_use]
pub fn softmax_rows(x: &Tensor) -> Tensor {
    let n = x.dim(x.rank() - 1);
    let mut out = Vec::with_capacity(x.numel());
    for row in x.to_f32_vec().chunks(n) {
        let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let e: Vec<f64> = row
            .iter()
            .map(|&v| libm::exp(f64::from(v) - f64::from(max)))
            .collect();
        let sum: f64 = e.iter().sum();
        out.extend(e.iter().map(|v| (v / sum) as f32));
    }
    tensor(x.shape(), out)
}

/// Expert choice from router probabilities `p` of one token: the `top_k` largest in descending order,
/// the lower index first among equals, with weights that sum to one where `renormalise`.
#[must_use]
pub fn top_k(p: &[f32], top_k: usize, renormalise: bool) -> Vec<(u32, f32)> {
    let mut order: Vec<usize> = (0..p.len()).collect();
    order.sort_by(|&a, &b| p[b].total_cmp(&p[a]).then(a.cmp(&b)));
    order.truncate(top_k);
    let sum: f64 = order.iter().map(|&e| f64::from(p[e])).sum();
    let norm = if renormalise {
        sum.max(f64::from(f32::EPSILON))
    } else {
        1.0
    };
    order
        .iter()
        .map(|&e| (e as u32, (f64::from(p[e]) / norm) as f32))
        .collect()
}

/// `y[t] = sum over the experts e chosen for t of weight * down_e(swiglu(gate_up_e(x[t])))`.
///
/// `routing[t]` lists the (expert, weight) pairs of token `t`; `experts[e]` is `(gate_up [2I,H], down [H,I])`.
#[must_use]
pub fn moe_experts(
    x: &Tensor,
    routing: &[Vec<(u32, f32)>],
    experts: &[(Tensor, Tensor)],
) -> Tensor {
    let (rows, hidden) = (x.dim(0), x.dim(1));
    let x = x.to_f32_vec();
    let mut out = Vec::with_capacity(rows * hidden);
    for t in 0..rows {
        let mut sum = vec![0f64; hidden];
        let row = tensor(&[1, hidden], x[t * hidden..(t + 1) * hidden].to_vec());
        for &(e, weight) in &routing[t] {
            let (gate_up, down) = &experts[e as usize];
            let y = linear(&swiglu_up_gate(&linear(&row, gate_up, None)), down, None);
            for (s, v) in sum.iter_mut().zip(y.to_f32_vec()) {
                *s += f64::from(weight) * f64::from(v);
            }
        }
        out.extend(sum.iter().map(|&v| v as f32));
    }
    tensor(&[rows, hidden], out)
}

/// `y[t] = sum over slots s of weight[t, s] * parts[position[t * top_k + s]]`; `[T, H]`.
///
/// `parts [T * top_k, H]` holds the unweighted expert output of one (token, slot) a row; `position` and
/// `weights` `[T * top_k]` list the row and the weight of each (token, slot).
#[must_use]
pub fn moe_combine(parts: &Tensor, position: &[u32], weights: &[f32], top_k: usize) -> Tensor {
    let hidden = parts.dim(1);
    let parts = parts.to_f32_vec();
    let mut out = Vec::new();
    for (position, weights) in position.chunks(top_k).zip(weights.chunks(top_k)) {
        for i in 0..hidden {
            let mut sum = 0f64;
            for (&row, &weight) in position.iter().zip(weights) {
                sum += f64::from(weight) * f64::from(parts[row as usize * hidden + i]);
            }
            out.push(sum as f32);
        }
    }
    tensor(&[position.len() / top_k, hidden], out)
}
