//! Splitting the fused projection into heads, rotation, and the norm of queries and keys.

use super::norm::rms_factor;
use super::recycle::Recycled;
use super::simd;
use crate::error::{KernelError, Result};
use crate::tensor::{ANY, Tensor};
use rayon::prelude::*;

/// Head counts of an attention layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AttnHeads {
    /// Query heads; a multiple of `kv`.
    pub q: usize,
    /// Key and value heads.
    pub kv: usize,
    /// Elements per head.
    pub dim: usize,
}

impl AttnHeads {
    /// Query heads that share one key and value head.
    #[must_use]
    pub fn group(&self) -> usize {
        self.q / self.kv.max(1)
    }

    /// Width of the fused projection: `(q + 2 kv) * dim`.
    #[must_use]
    pub fn width(&self) -> usize {
        (self.q + 2 * self.kv) * self.dim
    }

    fn check(&self, op: &'static str) -> Result<()> {
        if self.kv == 0 || self.q == 0 || self.dim == 0 || !self.q.is_multiple_of(self.kv) {
            let reason = "need q a positive multiple of kv and a positive dim";
            return Err(KernelError::Argument {
                op,
                what: "heads",
                reason,
            });
        }
        if !self.dim.is_multiple_of(2) {
            let reason = "need an even dim";
            return Err(KernelError::Argument {
                op,
                what: "heads",
                reason,
            });
        }
        Ok(())
    }
}

/// Rotary tables of the packed tokens: `cos` and `sin`, both `f32 [T, D]`.
#[derive(Debug, Clone)]
pub struct RopeTable {
    /// Cosines `[T, D]`.
    pub cos: Tensor,
    /// Sines `[T, D]`.
    pub sin: Tensor,
}

/// Splits `qkv [T, (q + 2 kv) * dim]` into `q [T, q, dim]`, `k [T, kv, dim]`, `v [T, kv, dim]`.
///
/// The columns are grouped per KV head: its query heads, its key, its value. Queries and keys are rotated
/// (half-split pairs: element `i` with `i + dim/2`) and *then* normalised per head (RMS over `dim`),
/// the order of HunyuanImage-3.0; the two do not commute because the norm weight is per element.
pub fn qkv_split_rope_norm(
    qkv: &Tensor,
    rope: &RopeTable,
    q_norm: Option<&Tensor>,
    k_norm: Option<&Tensor>,
    eps: f32,
    heads: AttnHeads,
) -> Result<(Tensor, Tensor, Tensor)> {
    const OP: &str = "qkv_split_rope_norm";
    heads.check(OP)?;
    qkv.expect_shape(OP, "qkv", &[ANY, heads.width()])?;
    let (tokens, d) = (qkv.dim(0), heads.dim);
    rope.cos.expect_shape(OP, "rope.cos", &[tokens, d])?;
    rope.sin.expect_shape(OP, "rope.sin", &[tokens, d])?;
    let norm = |what, weight: Option<&Tensor>| -> Result<Option<Tensor>> {
        weight
            .map(|w| w.expect_shape(OP, what, &[d]).map(|()| w.to_f32()))
            .transpose()
    };
    let (q_norm, k_norm) = (norm("q_norm", q_norm)?, norm("k_norm", k_norm)?);
    let step = HeadStep {
        cos: rope.cos.f32_named(OP, "rope.cos")?,
        sin: rope.sin.f32_named(OP, "rope.sin")?,
        q_norm: q_norm.as_ref().map(Tensor::as_f32).transpose()?,
        k_norm: k_norm.as_ref().map(Tensor::as_f32).transpose()?,
        eps,
        heads,
    };
    let data = qkv.f32_named(OP, "qkv")?;
    let mut q = Recycled::stale(tokens * heads.q * d);
    let mut k = Recycled::stale(tokens * heads.kv * d);
    let mut v = Recycled::stale(tokens * heads.kv * d);
    if tokens > 0 {
        let per_piece = tokens.div_ceil(super::par::pieces(tokens, 6 * heads.width()));
        q.par_chunks_mut(per_piece * heads.q * d)
            .zip(k.par_chunks_mut(per_piece * heads.kv * d))
            .zip(v.par_chunks_mut(per_piece * heads.kv * d))
            .enumerate()
            .for_each(|(i, ((q, k), v))| step.tokens(i * per_piece, data, q, k, v));
    }
    Ok((
        Tensor::output(&[tokens, heads.q, d], q),
        Tensor::output(&[tokens, heads.kv, d], k),
        Tensor::output(&[tokens, heads.kv, d], v),
    ))
}

struct HeadStep<'a> {
    cos: &'a [f32],
    sin: &'a [f32],
    q_norm: Option<&'a [f32]>,
    k_norm: Option<&'a [f32]>,
    eps: f32,
    heads: AttnHeads,
}

impl HeadStep<'_> {
    /// Tokens `first ..`, as many as the outputs hold.
    fn tokens(&self, first: usize, qkv: &[f32], q: &mut [f32], k: &mut [f32], v: &mut [f32]) {
        let (d, group) = (self.heads.dim, self.heads.group());
        simd::run(
            #[inline(always)]
            || {
                let rows = qkv[first * self.heads.width()..].chunks_exact(self.heads.width());
                let tables = self.cos[first * d..]
                    .chunks_exact(d)
                    .zip(self.sin[first * d..].chunks_exact(d));
                let outputs = q
                    .chunks_exact_mut(self.heads.q * d)
                    .zip(k.chunks_exact_mut(self.heads.kv * d))
                    .zip(v.chunks_exact_mut(self.heads.kv * d));
                for ((row, table), ((q, k), v)) in rows.zip(tables).zip(outputs) {
                    for (j, part) in row.chunks_exact((group + 2) * d).enumerate() {
                        let (queries, rest) = part.split_at(group * d);
                        let (key, value) = rest.split_at(d);
                        rotate_heads(queries, table, &mut q[j * group * d..(j + 1) * group * d]);
                        rotate_heads(key, table, &mut k[j * d..(j + 1) * d]);
                        v[j * d..(j + 1) * d].copy_from_slice(value);
                    }
                    // A pass of its own: reading a head right after writing it in other pieces stalls.
                    norm_heads(q, d, self.q_norm, self.eps);
                    norm_heads(k, d, self.k_norm, self.eps);
                }
            },
        );
    }
}

/// Rotates heads of one token; the usual sizes are compiled with a constant length.
#[inline(always)]
fn rotate_heads(x: &[f32], (cos, sin): (&[f32], &[f32]), out: &mut [f32]) {
    let d = cos.len();
    for (x, out) in x.chunks_exact(d).zip(out.chunks_exact_mut(d)) {
        match d {
            16 => rotate::<8>(x, cos, sin, out),
            32 => rotate::<16>(x, cos, sin, out),
            64 => rotate::<32>(x, cos, sin, out),
            128 => rotate::<64>(x, cos, sin, out),
            _ => rotate_any(x, cos, sin, out),
        }
    }
}

/// RMS norm of each head of `d` elements, in place.
#[inline(always)]
fn norm_heads(x: &mut [f32], d: usize, weight: Option<&[f32]>, eps: f32) {
    let Some(weight) = weight else { return };
    for head in x.chunks_exact_mut(d) {
        let inv = rms_factor(head, eps);
        for (o, &w) in head.iter_mut().zip(weight) {
            *o = *o * inv * w;
        }
    }
}

#[inline(always)]
fn rotate<const HALF: usize>(x: &[f32], cos: &[f32], sin: &[f32], out: &mut [f32]) {
    match (
        x.as_chunks::<HALF>(),
        cos.as_chunks::<HALF>(),
        sin.as_chunks::<HALF>(),
        out.as_chunks_mut::<HALF>(),
    ) {
        (([x0, x1], _), ([c0, c1], _), ([s0, s1], _), ([o0, o1], _)) => {
            for i in 0..HALF {
                o0[i] = x0[i] * c0[i] - x1[i] * s0[i];
                o1[i] = x1[i] * c1[i] + x0[i] * s1[i];
            }
        }
        _ => rotate_any(x, cos, sin, out),
    }
}

#[inline(always)]
fn rotate_any(x: &[f32], cos: &[f32], sin: &[f32], out: &mut [f32]) {
    let half = x.len() / 2;
    for i in 0..half {
        out[i] = x[i] * cos[i] - x[i + half] * sin[i];
        out[i + half] = x[i + half] * cos[i + half] + x[i] * sin[i + half];
    }
}
