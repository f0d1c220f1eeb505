//! Attention over packed rows, and dense multi-head attention.

mod check;
mod core;
mod partial;
mod schedule;

use std::ops::Range;

use self::core::Core;
use super::rope::AttnHeads;
use crate::error::{KernelError, Result};
use crate::tensor::{ANY, Tensor};
use schedule::{HeadShape, QueryTile, attend};

pub use partial::{PartialAttention, merge_attention, varlen_attention_partial};

/// Keys and values that are in a cache already: `k[head * head_stride + token * token_stride + i]`.
#[derive(Debug, Clone, Copy)]
pub struct KvPart<'a> {
    /// Keys, after rotation and norm.
    pub k: &'a [f32],
    /// Values, laid out as the keys are.
    pub v: &'a [f32],
    /// Elements from one KV head to the next.
    pub head_stride: usize,
    /// Elements from one token to the next.
    pub token_stride: usize,
    /// Tokens.
    pub len: usize,
}

/// One row of a packed batch. Its keys are the tokens of `past`, then the packed tokens `fresh`.
#[derive(Debug, Clone)]
pub struct AttnRow<'a> {
    /// What is cached, one part after the other: pages. All but the last have equally many tokens, and the last
    /// no more.
    pub past: Vec<KvPart<'a>>,
    /// Packed tokens of this call that belong to the row.
    pub fresh: Range<usize>,
}

impl AttnRow<'_> {
    /// Cached tokens.
    #[must_use]
    pub fn cached(&self) -> usize {
        self.past.iter().map(|part| part.len).sum()
    }

    /// Number of keys of the row.
    #[must_use]
    pub fn keys(&self) -> usize {
        self.cached() + self.fresh.len()
    }
}

/// Which keys the queries of a segment see.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SegmentKind {
    /// Query `i` of the segment sees keys `[0, q_pos + i + 1)` of its row.
    Causal,
    /// Every query of the segment sees keys `[0, keys)` of its row.
    Full,
}

/// Consecutive queries of one row that see keys by one rule. Generalised causal attention is a list of
/// these, so no mask exists anywhere.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Segment {
    /// Row, an index into the list of rows.
    pub row: usize,
    /// Packed tokens that query.
    pub q: Range<usize>,
    /// The rule.
    pub kind: SegmentKind,
    /// Key index (in the row) of the first query; read for [`SegmentKind::Causal`].
    pub q_pos: usize,
    /// Number of visible keys; read for [`SegmentKind::Full`].
    pub keys: usize,
}

/// Attention of packed queries `q [T, Hq, D]` over the keys of their rows, with grouped KV heads
/// (`k`, `v` `[T, Hkv, D]`, query head `h` reads KV head `h / (Hq / Hkv)`); `[T, Hq * D]`.
///
/// `softmax(scale * q . k) . v` with a running maximum and sum, so memory is proportional to a tile, never
/// to queries times keys. Every packed token must be a query of exactly one segment.
pub fn varlen_attention(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    rows: &[AttnRow<'_>],
    segments: &[Segment],
    scale: f32,
) -> Result<Tensor> {
    const OP: &str = "varlen_attention";
    let shape = check::heads(OP, q, (k, v), q.dim(0))?;
    let tokens = q.dim(0);
    check::rows(OP, rows, tokens, shape)?;
    check::segments(OP, rows, segments, tokens)?;
    let core = Core {
        q: q.f32_named(OP, "q")?,
        k: k.f32_named(OP, "k")?,
        v: v.f32_named(OP, "v")?,
        shape,
        scale,
    };
    let out = attend(&core, tiles(shape, rows, segments), &mut []);
    Ok(Tensor::output(&[tokens, shape.q * shape.dim], out))
}

/// The tiles of segments that have been checked.
fn tiles<'a>(
    shape: HeadShape,
    rows: &'a [AttnRow<'a>],
    segments: &[Segment],
) -> Vec<QueryTile<'a>> {
    let mut tiles = Vec::new();
    for s in segments {
        let row = &rows[s.row];
        let (visible, step) = match s.kind {
            SegmentKind::Causal => (s.q_pos + 1, 1),
            SegmentKind::Full => (s.keys, 0),
        };
        if visible == 0 {
            continue;
        }
        let q = s.q.clone();
        let segment = QueryTile {
            q,
            visible,
            step,
            past: &row.past,
            cached: row.cached(),
            fresh: row.fresh.start,
        };
        shape.split(segment, &mut tiles);
    }
    tiles
}

/// Upper bound of the scratch bytes of one [`varlen_attention`] or [`varlen_attention_partial`] call on
/// `threads` threads. It depends on the tile and head sizes, not on the number of queries or keys.
#[must_use]
pub fn varlen_attention_workspace_bytes(heads: AttnHeads, threads: usize) -> usize {
    let shape = HeadShape {
        q: heads.q,
        kv: heads.kv.max(1),
        dim: heads.dim,
    };
    threads * shape.scratch_per_thread() * size_of::<f32>()
}

/// Dense attention without a mask: `q [n, Tq, h, d]`, `k`, `v` `[n, Tk, h, d]`; item `i` sees keys
/// `[0, key_len[i])`; `[n, Tq, h * d]`.
pub fn mha(q: &Tensor, k: &Tensor, v: &Tensor, key_len: &[usize], scale: f32) -> Result<Tensor> {
    const OP: &str = "mha";
    q.expect_shape(OP, "q", &[ANY; 4])?;
    let (n, tq, h, d) = (q.dim(0), q.dim(1), q.dim(2), q.dim(3));
    k.expect_shape(OP, "k", &[n, ANY, h, d])?;
    let tk = k.dim(1);
    v.expect_shape(OP, "v", &[n, tk, h, d])?;
    if key_len.len() != n {
        let value = key_len.len();
        return Err(KernelError::Bounds {
            op: OP,
            what: "key_len length",
            value,
            limit: n,
        });
    }
    if let Some(&bad) = key_len.iter().find(|&&len| len > tk || len == 0) {
        return Err(KernelError::Bounds {
            op: OP,
            what: "key_len",
            value: bad,
            limit: tk,
        });
    }
    if h == 0 || d == 0 {
        return Err(KernelError::shape(
            OP,
            "q",
            "[_, _, at least 1, at least 1]",
            q.shape(),
        ));
    }
    let shape = HeadShape {
        q: h,
        kv: h,
        dim: d,
    };
    let core = Core {
        q: q.f32_named(OP, "q")?,
        k: k.f32_named(OP, "k")?,
        v: v.f32_named(OP, "v")?,
        shape,
        scale,
    };
    let mut tiles = Vec::new();
    for (i, &visible) in key_len.iter().enumerate() {
        let q = i * tq..(i + 1) * tq;
        shape.split(
            QueryTile {
                q,
                visible,
                step: 0,
                past: &[],
                cached: 0,
                fresh: i * tk,
            },
            &mut tiles,
        );
    }
    let out = attend(&core, tiles, &mut []);
    Ok(Tensor::output(&[n, tq, h * d], out))
}
