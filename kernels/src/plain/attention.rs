//! Plain attention and the step before it.

use super::{rms_norm, tensor};
use crate::{AttnHeads, RopeTable, Tensor};

/// Attention of one query over explicit keys and values: `softmax(scale * q.k) . v`.
///
/// `q` has `dim` elements; `k` and `v` list the visible keys and values, each of `dim` elements.
#[must_use]
pub fn attention(q: &[f32], k: &[&[f32]], v: &[&[f32]], scale: f32) -> Vec<f32> {
    attention_partial(q, k, v, scale).0
}

/// [`attention`] and `ln(sum(exp(scale * q.k)))`; zeros and negative infinity where there is no key.
#[must_use]
pub fn attention_partial(q: &[f32], k: &[&[f32]], v: &[&[f32]], scale: f32) -> (Vec<f32>, f32) {
    let scores: Vec<f64> = k
        .iter()
        .map(|key| {
            f64::from(scale)
                * q.iter()
                    .zip(*key)
                    .map(|(&a, &b)| f64::from(a) * f64::from(b))
                    .sum::<f64>()
        })
        .collect();
    if scores.is_empty() {
        return (vec![0.0; q.len()], f32::NEG_INFINITY);
    }
    let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let e: Vec<f64> = scores.iter().map(|&s| libm::exp(s - max)).collect();
    let sum: f64 = e.iter().sum();
    let out = (0..q.len())
        .map(|d| {
            (e.iter()
                .zip(v)
                .map(|(p, val)| p * f64::from(val[d]))
                .sum::<f64>()
                / sum) as f32
        })
        .collect();
    (out, (max + libm::log(sum)) as f32)
}

/// Attention of one query over the keys of all parts, which are disjoint. A part is the `out` and `lse` of
/// [`attention_partial`]: `out = sum(exp(lse_i) * out_i) / sum(exp(lse_i))`, `lse = ln(sum(exp(lse_i)))`.
#[must_use]
pub fn merge_attention(parts: &[(Vec<f32>, f32)]) -> (Vec<f32>, f32) {
    let max = parts
        .iter()
        .map(|p| f64::from(p.1))
        .fold(f64::NEG_INFINITY, f64::max);
    let mut out = vec![0f64; parts[0].0.len()];
    if max == f64::NEG_INFINITY {
        return (parts[0].0.clone(), f32::NEG_INFINITY);
    }
    let e: Vec<f64> = parts
        .iter()
        .map(|p| libm::exp(f64::from(p.1) - max))
        .collect();
    let sum: f64 = e.iter().sum();
    for (weight, (part, _)) in e.iter().zip(parts) {
        for (o, &v) in out.iter_mut().zip(part) {
            *o += weight * f64::from(v) / sum;
        }
    }
    let out = out.iter().map(|&v| v as f32).collect();
    (out, (max + libm::log(sum)) as f32)
}

/// Splits rows grouped per KV head (`g` query heads, one key, one value), rotates queries and keys
/// (half-split pairs), then normalises each head of them.
#[must_use]
pub fn qkv_split_rope_norm(
    qkv: &Tensor,
    rope: &RopeTable,
    norms: Option<(&Tensor, &Tensor)>,
    eps: f32,
    heads: AttnHeads,
) -> (Tensor, Tensor, Tensor) {
    let (rows, d, g) = (qkv.dim(0), heads.dim, heads.q / heads.kv);
    let data = qkv.to_f32_vec();
    let (cos, sin) = (rope.cos.to_f32_vec(), rope.sin.to_f32_vec());
    let (mut q, mut k, mut v) = (Vec::new(), Vec::new(), Vec::new());
    for t in 0..rows {
        let rotate = |x: &[f32]| -> Vec<f32> {
            (0..d)
                .map(|i| {
                    let (c, s) = (f64::from(cos[t * d + i]), f64::from(sin[t * d + i]));
                    let partner = if i < d / 2 {
                        -f64::from(x[i + d / 2])
                    } else {
                        f64::from(x[i - d / 2])
                    };
                    (f64::from(x[i]) * c + partner * s) as f32
                })
                .collect()
        };
        for group in data[t * heads.width()..(t + 1) * heads.width()].chunks((g + 2) * d) {
            for head in group[..g * d].chunks(d) {
                q.extend(rotate(head));
            }
            k.extend(rotate(&group[g * d..(g + 1) * d]));
            v.extend_from_slice(&group[(g + 1) * d..]);
        }
    }
    let (mut q, mut k) = (
        tensor(&[rows, heads.q, d], q),
        tensor(&[rows, heads.kv, d], k),
    );
    if let Some((q_norm, k_norm)) = norms {
        (q, k) = (rms_norm(&q, q_norm, eps), rms_norm(&k, k_norm, eps));
    }
    (q, k, tensor(&[rows, heads.kv, d], v))
}
