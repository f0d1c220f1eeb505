//! Attention over packed rows, and dense multi-head attention.

use std::ops::Range;

use super::attention_core::{HeadShape, QueryTile, attend};
use super::rope::AttnHeads;
use crate::error::{KernelError, Result};
use crate::tensor::{ANY, Tensor};

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

/// One row of a packed batch. Its keys are the `past` tokens followed by the packed tokens `fresh`.
#[derive(Debug, Clone)]
pub struct AttnRow<'a> {
    /// The cached part.
    pub past: Option<KvPart<'a>>,
    /// Packed tokens of this call that belong to the row.
    pub fresh: Range<usize>,
}

impl AttnRow<'_> {
    /// Number of keys of the row.
    #[must_use]
    pub fn keys(&self) -> usize {
        self.past.map_or(0, |p| p.len) + self.fresh.len()
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
    q.expect_shape(OP, "q", &[ANY, ANY, ANY])?;
    let (tokens, hq, d) = (q.dim(0), q.dim(1), q.dim(2));
    k.expect_shape(OP, "k", &[tokens, ANY, d])?;
    let hkv = k.dim(1);
    v.expect_shape(OP, "v", &[tokens, hkv, d])?;
    if hkv == 0 || hq == 0 || d == 0 || hq % hkv != 0 {
        let reason = "need query heads a positive multiple of KV heads and a positive head size";
        return Err(KernelError::Argument {
            op: OP,
            what: "heads",
            reason,
        });
    }
    check_rows(OP, rows, tokens, hkv, d)?;
    check_segments(OP, rows, segments, tokens)?;
    let (q, k, v) = (
        q.f32_named(OP, "q")?,
        k.f32_named(OP, "k")?,
        v.f32_named(OP, "v")?,
    );
    let shape = HeadShape {
        q: hq,
        kv: hkv,
        dim: d,
    };
    let mut tiles = Vec::new();
    for s in segments {
        let (past, fresh) = (rows[s.row].past, rows[s.row].fresh.start);
        let (visible, step) = match s.kind {
            SegmentKind::Causal => (s.q_pos + 1, 1),
            SegmentKind::Full => (s.keys, 0),
        };
        shape.split(
            QueryTile {
                q: s.q.clone(),
                visible,
                step,
                past,
                fresh,
            },
            &mut tiles,
        );
    }
    let out = attend(q, (k, v), shape, tiles, scale);
    Ok(Tensor::output(&[tokens, hq * d], out))
}

fn check_rows(
    op: &'static str,
    rows: &[AttnRow<'_>],
    tokens: usize,
    heads: usize,
    d: usize,
) -> Result<()> {
    for row in rows {
        if row.fresh.end > tokens || row.fresh.start > row.fresh.end {
            let (value, limit) = (row.fresh.end.max(row.fresh.start), tokens);
            return Err(KernelError::Bounds {
                op,
                what: "row.fresh",
                value,
                limit,
            });
        }
        let Some(past) = row.past.filter(|p| p.len > 0) else {
            continue;
        };
        let last = (heads - 1)
            .checked_mul(past.head_stride)
            .zip((past.len - 1).checked_mul(past.token_stride))
            .and_then(|(a, b)| a.checked_add(b)?.checked_add(d));
        let held = past.k.len().min(past.v.len());
        if last.is_none_or(|last| last > held) {
            let value = last.unwrap_or(usize::MAX);
            return Err(KernelError::Bounds {
                op,
                what: "row.past end",
                value,
                limit: held,
            });
        }
    }
    Ok(())
}

fn check_segments(
    op: &'static str,
    rows: &[AttnRow<'_>],
    segments: &[Segment],
    tokens: usize,
) -> Result<()> {
    let mut covered = vec![false; tokens];
    for s in segments {
        let Some(row) = rows.get(s.row) else {
            return Err(KernelError::Bounds {
                op,
                what: "segment.row",
                value: s.row,
                limit: rows.len(),
            });
        };
        if s.q.start < row.fresh.start || s.q.end > row.fresh.end || s.q.start > s.q.end {
            let value = if s.q.start < row.fresh.start {
                s.q.start
            } else {
                s.q.end
            };
            let limit = row.fresh.end;
            return Err(KernelError::Bounds {
                op,
                what: "segment.q",
                value,
                limit,
            });
        }
        let keys = match s.kind {
            SegmentKind::Causal => s.q_pos.saturating_add(s.q.len()),
            SegmentKind::Full => s.keys,
        };
        if keys > row.keys() || (keys == 0 && !s.q.is_empty()) {
            let limit = row.keys();
            return Err(KernelError::Bounds {
                op,
                what: "segment keys",
                value: keys,
                limit,
            });
        }
        for t in s.q.clone() {
            if std::mem::replace(&mut covered[t], true) {
                let reason = "cover a token twice";
                return Err(KernelError::Argument {
                    op,
                    what: "segments",
                    reason,
                });
            }
        }
    }
    if covered.contains(&false) {
        let reason = "leave a token uncovered";
        return Err(KernelError::Argument {
            op,
            what: "segments",
            reason,
        });
    }
    Ok(())
}

/// Upper bound of the scratch bytes of one [`varlen_attention`] call on `threads` threads. It depends on
/// the tile and head sizes, not on the number of queries or keys.
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
    let (q, k, v) = (
        q.f32_named(OP, "q")?,
        k.f32_named(OP, "k")?,
        v.f32_named(OP, "v")?,
    );
    let shape = HeadShape {
        q: h,
        kv: h,
        dim: d,
    };
    let mut tiles = Vec::new();
    for (i, &visible) in key_len.iter().enumerate() {
        let q = i * tq..(i + 1) * tq;
        shape.split(
            QueryTile {
                q,
                visible,
                step: 0,
                past: None,
                fresh: i * tk,
            },
            &mut tiles,
        );
    }
    let out = attend(q, (k, v), shape, tiles, scale);
    Ok(Tensor::output(&[n, tq, h * d], out))
}
