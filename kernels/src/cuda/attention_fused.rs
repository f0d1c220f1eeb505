//! Full attention within sequences whose queries, keys and values are one fused projection, as the image encoder has
//! them. It runs on the plain kernel, which reads the projection as an arena.

use std::sync::Arc;

use super::attention::{AttentionOut, AttentionPlan, Plain, Style};
use super::attention_tiles::{Extent, GpuAttnRow, KvRun, OP};
use super::device::Gpu;
use super::error::{Result, argument};
use super::launch::{aligned, int};
use super::rope::KvSlot;
use super::tensor::{GpuTensor, GpuType};
use crate::cpu::rope::AttnHeads;
use crate::{Segment, SegmentKind};

/// A plan for [`attention_fused`]: `sequences` follow one another in `tokens` packed tokens of a fused projection
/// `[tokens, 3 * H * D]` (queries, keys, values, each head by head), and every token sees its whole sequence.
///
/// # Errors
/// Those of [`AttentionPlan::new`].
pub fn plan_fused(
    gpu: &Arc<Gpu>,
    (heads, dim): (usize, usize),
    sequences: &[usize],
) -> Result<AttentionPlan> {
    let (mut rows, mut segments, mut start) = (Vec::new(), Vec::new(), 0_usize);
    for (row, &tokens) in sequences.iter().enumerate() {
        let first = int(
            OP,
            "sequences",
            start.saturating_mul(3 * heads).saturating_add(heads),
        )?;
        let narrow = heads as u32;
        let at = KvSlot {
            first: first.unsigned_abs(),
            per_head: 1,
            per_layer: 0,
            to_value: narrow,
        };
        let fresh = KvRun { at, tokens };
        rows.push(GpuAttnRow {
            prefix: None,
            fresh,
        });
        segments.push(Segment {
            row,
            q: start..start + tokens,
            kind: SegmentKind::Full,
            q_pos: 0,
            keys: tokens,
        });
        start = start.saturating_add(tokens);
    }
    let heads = AttnHeads {
        q: heads,
        kv: heads,
        dim,
    };
    let extent = Extent {
        arena_rows: start.saturating_mul(3 * heads.q),
        layers: 1,
        token_stride: 3 * heads.q,
    };
    AttentionPlan::upload(gpu, heads, extent, &rows, (&segments, start, Style::Whole))
}

/// Full attention within the sequences of [`plan_fused`]: `qkv` bf16 `[tokens, 3 * H * D]`, `out` bf16
/// `[tokens, H * D]`.
///
/// # Errors
/// `Argument` naming the operand that is not the plan's, or what the driver says.
pub fn attention_fused(
    plan: &AttentionPlan,
    out: &GpuTensor,
    qkv: &GpuTensor,
    scale: f32,
) -> Result<()> {
    let heads = plan.heads;
    let width = 3 * heads.q * heads.dim;
    if plan.extent.token_stride != 3 * heads.q {
        return Err(argument(OP, "plan", "is not one of plan_fused"));
    }
    plan.check(0, out, None)?;
    qkv.expect(OP, "qkv", &[plan.tokens, width], GpuType::Bf16)?;
    aligned(OP, &[("qkv", qkv), ("out", out)])?;
    if plan.tiles == 0 {
        return Ok(());
    }
    let plain = Plain {
        q: qkv.address(),
        q_stride: width,
        arena: qkv.address(),
    };
    plain.run(plan, AttentionOut { out, lse: None }, 0, scale)
}
