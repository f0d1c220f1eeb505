//! The rows of a packed pass, as the kernels want them: slots, key runs and segments.

use std::ops::Range;

use kernels::cuda::{AttentionPlan, GpuAttnRow, GpuTensor, KvRun, KvSlot, KvSlots};
use kernels::{AttnHeads, Segment, SegmentKind};

use super::deal::Piece;
use super::group::{Ranks, Travel};
use super::layer::Pass;
use super::share::{Attention, Flow};
use crate::backbone::RowSegment;
use crate::error::ModelError;

/// One row of a packed pass.
#[derive(Clone, Debug)]
pub(crate) struct GpuRow<'a> {
    /// Tokens of this pass.
    pub(crate) tokens: usize,
    /// Cover them without gap, in order.
    pub(crate) segments: &'a [RowSegment],
    /// Where keys of earlier passes lie, unless they lie right before the fresh ones.
    pub(crate) prefix: Option<KvRun>,
    /// Where all keys from token `appended` on lie: earlier ones first, if any, then those of this pass.
    pub(crate) at: KvSlot,
    /// Earlier tokens at `at`.
    pub(crate) appended: usize,
    /// In a ring, the fresh keys of each rank: this one's first, which `at` is too, then the others' in order.
    pub(crate) ring: Vec<RingKeys>,
}

/// Fresh keys of a row that one rank of a ring computes, and where they are on this one.
#[derive(Clone, Debug)]
pub(crate) struct RingKeys {
    pub(crate) tokens: Range<usize>,
    pub(crate) at: KvSlot,
}

impl GpuRow<'_> {
    fn past(&self) -> usize {
        self.appended + self.prefix.map_or(0, |run| run.tokens)
    }

    /// The slot of fresh token `token`.
    fn slot(&self, token: usize) -> KvSlot {
        let ahead = u32::try_from(self.appended + token).unwrap_or(u32::MAX);
        KvSlot {
            first: self.at.first.saturating_add(ahead),
            ..self.at
        }
    }
}

/// What of the model every pass needs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PassShape {
    pub(crate) heads: AttnHeads,
    /// Layers of the arena.
    pub(crate) layers: usize,
    pub(crate) eps: f32,
    pub(crate) renormalise: bool,
}

/// Which queries a pass has of its rows, and how it reaches other ranks.
pub(crate) struct PassTokens<'a> {
    /// In the order of the packed tokens.
    pub(crate) pieces: &'a [Piece],
    /// F32 `[tokens, head_dim]`, of the same tokens.
    pub(crate) cos: GpuTensor,
    pub(crate) sin: GpuTensor,
    pub(crate) flow: Flow,
    pub(crate) ranks: Option<Ranks>,
    /// Fresh keys and values of a ring.
    pub(crate) travel: Travel,
}

/// Prepares a pass over `rows`.
pub(crate) fn pass(
    shape: PassShape,
    arena: GpuTensor,
    rows: &[GpuRow<'_>],
    given: PassTokens<'_>,
) -> Result<Pass, ModelError> {
    let pieces = given.pieces;
    let tokens = pieces.iter().map(|piece| piece.tokens.len()).sum();
    let ring = given.flow.attention == Attention::Ring;
    let slots: Vec<KvSlot> = pieces
        .iter()
        .flat_map(|piece| {
            // In a ring a rank keeps the keys of its own tokens apart.
            let first = if ring { piece.tokens.start } else { 0 };
            let row = &rows[piece.row];
            piece.tokens.clone().map(move |t| row.slot(t - first))
        })
        .collect();
    let (layers, heads) = (shape.layers, shape.heads);
    let (attention, parts) = if ring {
        (None, ring_parts(shape, &arena, rows, (pieces, tokens))?)
    } else {
        let keys: Vec<GpuAttnRow> = rows
            .iter()
            .map(|row| GpuAttnRow {
                prefix: row.prefix,
                fresh: KvRun {
                    at: row.at,
                    tokens: row.appended + row.tokens,
                },
            })
            .collect();
        let queries = segments(rows, pieces);
        // Text goes token by token: with few rows, blocks share a row's keys.
        let plan = if queries.iter().all(|s| s.q.len() == 1) {
            AttentionPlan::in_parts
        } else {
            AttentionPlan::new
        };
        let plan = plan(&arena, heads, layers, &keys, (&queries, tokens))?;
        (Some(plan), Vec::new())
    };
    let gpu = arena.gpu().clone();
    let slots = KvSlots::new(&gpu, &slots, heads.kv, layers, arena.dim(0))?;
    Ok(Pass {
        cos: given.cos,
        sin: given.sin,
        slots,
        attention,
        ring: parts,
        arena,
        heads,
        eps: shape.eps,
        renormalise: shape.renormalise,
        flow: given.flow,
        ranks: given.ranks,
        travel: given.travel,
    })
}

/// Attention over the keys of each rank of a ring: this one first, with the prefixes, then the others in order.
fn ring_parts(
    shape: PassShape,
    arena: &GpuTensor,
    rows: &[GpuRow<'_>],
    (pieces, tokens): (&[Piece], usize),
) -> Result<Vec<AttentionPlan>, ModelError> {
    let parts = rows.iter().map(|row| row.ring.len()).max().unwrap_or(0);
    let mut plans = Vec::with_capacity(parts);
    for part in 0..parts {
        let keys: Vec<GpuAttnRow> = rows
            .iter()
            .map(|row| GpuAttnRow {
                prefix: row.prefix.filter(|_| part == 0),
                fresh: KvRun {
                    at: row.ring[part].at,
                    tokens: row.ring[part].tokens.len(),
                },
            })
            .collect();
        let queries = ring_segments(rows, pieces, part);
        let queries = (&queries[..], tokens);
        plans.push(AttentionPlan::partial(
            arena,
            shape.heads,
            shape.layers,
            &keys,
            queries,
        )?);
    }
    Ok(plans)
}

/// The parts of row segments that lie in pieces, with the packed tokens of each.
fn cut<'a>(
    rows: &'a [GpuRow<'_>],
    pieces: &'a [Piece],
) -> impl Iterator<Item = (usize, &'a RowSegment, Range<usize>, Range<usize>)> {
    let mut base = 0;
    pieces.iter().flat_map(move |piece| {
        let start = base;
        base += piece.tokens.len();
        rows[piece.row].segments.iter().filter_map(move |s| {
            let low = s.tokens.start.max(piece.tokens.start);
            let high = s.tokens.end.min(piece.tokens.end);
            let packed = |token: usize| start + token - piece.tokens.start;
            (low < high).then(|| (piece.row, s, low..high, packed(low)..packed(high)))
        })
    })
}

fn segments(rows: &[GpuRow<'_>], pieces: &[Piece]) -> Vec<Segment> {
    cut(rows, pieces)
        .map(|(row, s, tokens, q)| {
            let past = rows[row].past();
            Segment {
                row,
                q,
                kind: s.kind,
                q_pos: match s.kind {
                    SegmentKind::Causal => past + tokens.start,
                    SegmentKind::Full => 0,
                },
                keys: past + s.tokens.end,
            }
        })
        .collect()
}

/// What queries see of the keys of one part of a ring.
fn ring_segments(rows: &[GpuRow<'_>], pieces: &[Piece], part: usize) -> Vec<Segment> {
    let mut out = Vec::new();
    for (row, s, tokens, q) in cut(rows, pieces) {
        let past = if part == 0 { rows[row].past() } else { 0 };
        let there = rows[row].ring[part].tokens.clone();
        let seen = |end: usize| end.clamp(there.start, there.end) - there.start;
        if s.kind == SegmentKind::Full {
            out.push(Segment {
                row,
                q,
                kind: SegmentKind::Full,
                q_pos: 0,
                keys: past + seen(s.tokens.end),
            });
            continue;
        }
        // Few tokens are causal: each sees a number of keys of its own.
        for (query, token) in q.zip(tokens) {
            out.push(Segment {
                row,
                q: query..query + 1,
                kind: SegmentKind::Full,
                q_pos: 0,
                keys: past + seen(token + 1),
            });
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn segments_count_the_keys_of_earlier_passes() {
        let segment = |tokens, kind| RowSegment { tokens, kind };
        let parts = [
            segment(0..1, SegmentKind::Causal),
            segment(1..5, SegmentKind::Full),
        ];
        let at = KvSlot {
            first: 256,
            per_head: 128,
            per_layer: 0,
            to_value: 1024,
        };
        let row = |prefix, appended| GpuRow {
            tokens: 5,
            segments: &parts,
            prefix,
            at,
            appended,
            ring: Vec::new(),
        };
        let rows = [row(Some(KvRun { at, tokens: 7 }), 0), row(None, 3)];
        let got = segments(&rows, &crate::gpu::deal::Deal::whole(&[5, 5]));
        let seen: Vec<_> = got
            .iter()
            .map(|s| (s.row, s.q.clone(), s.q_pos, s.keys))
            .collect();
        assert_eq!(
            seen,
            [
                (0, 0..1, 7, 8),
                (0, 1..5, 0, 12),
                (1, 5..6, 3, 4),
                (1, 6..10, 0, 8)
            ]
        );
        assert_eq!(rows[0].slot(2).first, 258);
        assert_eq!(rows[1].slot(2).first, 261);
    }

    #[test]
    fn the_parts_of_a_ring_show_each_query_its_keys_once() {
        let segment = |tokens, kind| RowSegment { tokens, kind };
        let parts = [
            segment(0..2, SegmentKind::Causal),
            segment(2..9, SegmentKind::Full),
        ];
        let at = KvSlot {
            first: 0,
            per_head: 128,
            per_layer: 0,
            to_value: 1024,
        };
        let past = 7;
        for me in 0..2 {
            let halves = [0..5, 5..9];
            let keys = |rank: usize| RingKeys {
                tokens: halves[rank].clone(),
                at,
            };
            let rows = [GpuRow {
                tokens: 9,
                segments: &parts,
                prefix: Some(KvRun { at, tokens: past }),
                at,
                appended: 0,
                ring: vec![keys(me), keys(1 - me)],
            }];
            let pieces = [Piece {
                row: 0,
                tokens: halves[me].clone(),
            }];
            let mut seen = vec![0; halves[me].len()];
            for part in 0..2 {
                for s in ring_segments(&rows, &pieces, part) {
                    assert_eq!(s.kind, SegmentKind::Full);
                    for query in s.q {
                        seen[query] += s.keys;
                    }
                }
            }
            let whole = |token: usize| past + if token < 2 { token + 1 } else { 9 };
            let want: Vec<usize> = halves[me].clone().map(whole).collect();
            assert_eq!(seen, want, "rank {me}");
        }
    }
}
