//! The rows of a packed pass, as the kernels want them: slots, key runs and segments.

use kernels::cuda::{AttentionPlan, GpuAttnRow, GpuTensor, KvRun, KvSlot, KvSlots};
use kernels::{AttnHeads, Segment, SegmentKind};

use super::layer::Pass;
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

/// Prepares a pass over `rows`, whose rotary tables are given for all their tokens in order.
pub(crate) fn pass(
    shape: PassShape,
    arena: GpuTensor,
    rows: &[GpuRow<'_>],
    (cos, sin): (GpuTensor, GpuTensor),
) -> Result<Pass, ModelError> {
    let tokens = rows.iter().map(|row| row.tokens).sum();
    let slots: Vec<KvSlot> = rows
        .iter()
        .flat_map(|row| (0..row.tokens).map(|t| row.slot(t)))
        .collect();
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
    let segments = segments(rows);
    let attention = AttentionPlan::new(
        &arena,
        shape.heads,
        shape.layers,
        &keys,
        (&segments, tokens),
    )?;
    let gpu = arena.gpu().clone();
    let slots = KvSlots::new(&gpu, &slots, shape.heads.kv, shape.layers, arena.dim(0))?;
    Ok(Pass {
        cos,
        sin,
        slots,
        attention,
        arena,
        eps: shape.eps,
        renormalise: shape.renormalise,
    })
}

fn segments(rows: &[GpuRow<'_>]) -> Vec<Segment> {
    let (mut out, mut base) = (Vec::new(), 0);
    for (index, row) in rows.iter().enumerate() {
        let past = row.past();
        out.extend(row.segments.iter().map(|s| Segment {
            row: index,
            q: base + s.tokens.start..base + s.tokens.end,
            kind: s.kind,
            q_pos: match s.kind {
                SegmentKind::Causal => past + s.tokens.start,
                SegmentKind::Full => 0,
            },
            keys: past + s.tokens.end,
        }));
        base += row.tokens;
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
        };
        let rows = [row(Some(KvRun { at, tokens: 7 }), 0), row(None, 3)];
        let got = segments(&rows);
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
}
