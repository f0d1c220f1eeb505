//! Attention over a part of the keys, and the merge of such parts.

use super::core::Core;
use super::schedule::attend;
use super::{AttnRow, Segment, check, tiles};
use crate::cpu::recycle::Recycled;
use crate::cpu::{par, simd};
use crate::error::{KernelError, Result};
use crate::tensor::{ANY, Tensor};

/// Attention of queries over some of their keys, with what is needed to merge it with the others.
///
/// A query that sees no key has `out` 0 and `lse` negative infinity.
#[derive(Debug, Clone)]
pub struct PartialAttention {
    /// `softmax(scale * q . k) . v` over these keys alone; `[T, Hq * D]`.
    pub out: Tensor,
    /// `ln(sum(exp(scale * q . k)))` over these keys; `[T, Hq]`.
    pub lse: Tensor,
}

/// [`varlen_attention`](super::varlen_attention) over a part of the keys: queries `q [T, Hq, D]`, keys and
/// values `k`, `v` `[Tk, Hkv, D]`.
///
/// The keys need not be the packed tokens: [`AttnRow::fresh`] ranges over the `Tk` keys, [`Segment::q`] over
/// the `T` queries, and `Tk` may be 0. The key indices of a segment count the row's keys of this call, from
/// 0. A query may be in no segment, and a segment may see no key; no query may be in two segments.
///
/// Where a call has all keys of a query, `out` has the bits of `varlen_attention`.
///
/// # Errors
/// Shapes, types, rows beyond the keys, segments beyond rows, queries or the row's keys, and a query in two
/// segments.
pub fn varlen_attention_partial(
    q: &Tensor,
    rows: &[AttnRow<'_>],
    k: &Tensor,
    v: &Tensor,
    segments: &[Segment],
    scale: f32,
) -> Result<PartialAttention> {
    const OP: &str = "varlen_attention_partial";
    let shape = check::heads(OP, q, (k, v), ANY)?;
    let queries = q.dim(0);
    check::rows(OP, rows, k.dim(0), shape)?;
    check::partial_segments(OP, rows, segments, queries)?;
    let core = Core {
        q: q.f32_named(OP, "q")?,
        k: k.f32_named(OP, "k")?,
        v: v.f32_named(OP, "v")?,
        shape,
        scale,
    };
    let mut lse = Recycled::stale(queries * shape.q);
    let out = attend(&core, tiles(shape, rows, segments), &mut lse);
    Ok(PartialAttention {
        out: Tensor::output(&[queries, shape.q * shape.dim], out),
        lse: Tensor::output(&[queries, shape.q], lse),
    })
}

/// Merges `other` into `into`: afterwards `into` is the attention over the keys of both, which must be
/// disjoint. `out` `[T, Hq * D]` and `lse` `[T, Hq]` of both agree in shape.
///
/// With `m` the larger `lse` nothing overflows: `out = sum(exp(lse_i - m) * out_i) / sum(exp(lse_i - m))`. A
/// side that saw no key (`lse` of negative infinity) leaves the bits of the other. NaN stays NaN.
///
/// # Errors
/// Shapes or types that do not agree; `into` is then as it was.
pub fn merge_attention(into: &mut PartialAttention, other: &PartialAttention) -> Result<()> {
    const OP: &str = "merge_attention";
    into.out.expect_shape(OP, "into.out", &[ANY, ANY])?;
    let (tokens, width) = (into.out.dim(0), into.out.dim(1));
    into.lse.expect_shape(OP, "into.lse", &[tokens, ANY])?;
    let heads = into.lse.dim(1);
    if heads == 0 || width % heads != 0 {
        let reason = "must divide the width of into.out";
        return Err(KernelError::Argument {
            op: OP,
            what: "heads of into.lse",
            reason,
        });
    }
    other.out.expect_shape(OP, "other.out", &[tokens, width])?;
    other.lse.expect_shape(OP, "other.lse", &[tokens, heads])?;
    into.out.f32_named(OP, "into.out")?;
    let lse = into.lse.f32_named(OP, "into.lse")?;
    let other_out = other.out.f32_named(OP, "other.out")?;
    let other_lse = other.lse.f32_named(OP, "other.lse")?;
    par::rows(into.out.as_f32_mut()?, width, 2 * width, |first, out| {
        let (at, count) = (first * heads, out.len() / width * heads);
        let lse = lse[at..at + count].iter().zip(&other_lse[at..at + count]);
        merge_rows(out, &other_out[first * width..], lse, width / heads);
    });
    par::rows(into.lse.as_f32_mut()?, heads, 64 * heads, |first, lse| {
        for (a, &b) in lse.iter_mut().zip(&other_lse[first * heads..]) {
            *a = merge_lse(*a, b);
        }
    });
    Ok(())
}

/// Merges heads of `dim` elements; `lse` gives the pair of each head.
fn merge_rows<'a>(
    into: &mut [f32],
    other: &[f32],
    lse: impl Iterator<Item = (&'a f32, &'a f32)>,
    dim: usize,
) {
    simd::run(
        #[inline(always)]
        || {
            let heads = into.chunks_exact_mut(dim).zip(other.chunks_exact(dim));
            for ((into, other), (&a, &b)) in heads.zip(lse) {
                merge_head(into, other, a, b);
            }
        },
    );
}

/// One head: `a` is the `lse` of `into`, `b` that of `other`.
#[inline(always)]
fn merge_head(into: &mut [f32], other: &[f32], a: f32, b: f32) {
    if b == f32::NEG_INFINITY {
        return;
    }
    if a == f32::NEG_INFINITY {
        into.copy_from_slice(other);
        return;
    }
    let (large, small) = if b > a { (b, a) } else { (a, b) };
    let ratio = simd::math::exp_below(small - large);
    let (of_large, of_small) = (1.0 / (1.0 + ratio), ratio / (1.0 + ratio));
    let (of_into, of_other) = if b > a {
        (of_small, of_large)
    } else {
        (of_large, of_small)
    };
    for (x, &y) in into.iter_mut().zip(other) {
        *x = of_into.mul_add(*x, of_other * y);
    }
}

/// `ln(exp(a) + exp(b))`.
fn merge_lse(a: f32, b: f32) -> f32 {
    if b == f32::NEG_INFINITY {
        return a;
    }
    if a == f32::NEG_INFINITY {
        return b;
    }
    let (a, b) = (f64::from(a), f64::from(b));
    let (large, small) = if b > a { (b, a) } else { (a, b) };
    (large + libm::log1p(libm::exp(small - large))) as f32
}
