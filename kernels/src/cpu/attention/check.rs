//! Every bound of an attention call, checked before anything is computed.

use std::ops::Range;

use super::schedule::HeadShape;
use super::{AttnRow, KvPart, Segment, SegmentKind};
use crate::error::{KernelError, Result};
use crate::tensor::{ANY, Tensor};

/// Head sizes of `q [_, Hq, D]` and of keys and values `[keys, Hkv, D]`; `keys` may be [`ANY`].
pub(super) fn heads(
    op: &'static str,
    q: &Tensor,
    (k, v): (&Tensor, &Tensor),
    keys: usize,
) -> Result<HeadShape> {
    q.expect_shape(op, "q", &[ANY, ANY, ANY])?;
    let (heads, dim) = (q.dim(1), q.dim(2));
    k.expect_shape(op, "k", &[keys, ANY, dim])?;
    let kv = k.dim(1);
    v.expect_shape(op, "v", &[k.dim(0), kv, dim])?;
    if kv == 0 || heads == 0 || dim == 0 || heads % kv != 0 {
        let reason = "need query heads a positive multiple of KV heads and a positive head size";
        return Err(KernelError::Argument {
            op,
            what: "heads",
            reason,
        });
    }
    Ok(HeadShape { q: heads, kv, dim })
}

/// The rows against `tokens` fresh keys and against their cached parts.
pub(super) fn rows(
    op: &'static str,
    rows: &[AttnRow<'_>],
    tokens: usize,
    shape: HeadShape,
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
        let page = row.past.first().map_or(0, |part| part.len);
        for (index, part) in row.past.iter().enumerate() {
            cached(op, part, shape)?;
            let last = index + 1 == row.past.len();
            if part.len == 0 || part.len > page || (part.len < page && !last) {
                let reason =
                    "must have equally many tokens, the last one no more, and none of them none";
                return Err(KernelError::Argument {
                    op,
                    what: "parts of row.past",
                    reason,
                });
            }
        }
    }
    Ok(())
}

/// The last element of a cached part is there.
fn cached(op: &'static str, part: &KvPart<'_>, shape: HeadShape) -> Result<()> {
    let last = (shape.kv - 1)
        .checked_mul(part.head_stride)
        .zip(part.len.saturating_sub(1).checked_mul(part.token_stride))
        .and_then(|(a, b)| a.checked_add(b)?.checked_add(shape.dim));
    let held = part.k.len().min(part.v.len());
    if last.is_none_or(|last| last > held) {
        let value = last.unwrap_or(usize::MAX);
        return Err(KernelError::Bounds {
            op,
            what: "row.past end",
            value,
            limit: held,
        });
    }
    Ok(())
}

/// Segments whose queries are the fresh tokens of their row; they cover each of `tokens` once.
pub(super) fn segments(
    op: &'static str,
    rows: &[AttnRow<'_>],
    segments: &[Segment],
    tokens: usize,
) -> Result<()> {
    let mut covered = vec![false; tokens];
    for s in segments {
        let row = row_of(op, rows, s)?;
        check_queries(op, s, row.fresh.clone())?;
        check_keys(op, s, row, 1)?;
        cover(op, s, &mut covered)?;
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

/// Segments over any of `queries` queries, each covered at most once; they may see no key.
pub(super) fn partial_segments(
    op: &'static str,
    rows: &[AttnRow<'_>],
    segments: &[Segment],
    queries: usize,
) -> Result<()> {
    let mut covered = vec![false; queries];
    for s in segments {
        let row = row_of(op, rows, s)?;
        check_queries(op, s, 0..queries)?;
        check_keys(op, s, row, 0)?;
        cover(op, s, &mut covered)?;
    }
    Ok(())
}

fn row_of<'r, 'a>(
    op: &'static str,
    rows: &'r [AttnRow<'a>],
    s: &Segment,
) -> Result<&'r AttnRow<'a>> {
    rows.get(s.row).ok_or(KernelError::Bounds {
        op,
        what: "segment.row",
        value: s.row,
        limit: rows.len(),
    })
}

fn check_queries(op: &'static str, s: &Segment, within: Range<usize>) -> Result<()> {
    if s.q.start < within.start || s.q.end > within.end || s.q.start > s.q.end {
        let value = if s.q.start < within.start {
            s.q.start
        } else {
            s.q.end
        };
        return Err(KernelError::Bounds {
            op,
            what: "segment.q",
            value,
            limit: within.end,
        });
    }
    Ok(())
}

/// The last key that a query of the segment sees lies in the row, and each query sees `least` keys.
fn check_keys(op: &'static str, s: &Segment, row: &AttnRow<'_>, least: usize) -> Result<()> {
    let keys = match s.kind {
        SegmentKind::Causal => s.q_pos.saturating_add(s.q.len()),
        SegmentKind::Full => s.keys,
    };
    if keys > row.keys() || (keys < least && !s.q.is_empty()) {
        return Err(KernelError::Bounds {
            op,
            what: "segment keys",
            value: keys,
            limit: row.keys(),
        });
    }
    Ok(())
}

fn cover(op: &'static str, s: &Segment, covered: &mut [bool]) -> Result<()> {
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
    Ok(())
}
