//! Memory that every layer of a pass uses again, for up to a fixed number of tokens.

use std::sync::Arc;

use kernels::cuda::{DeviceBuffer, Gpu, GpuRouting, GpuTensor, GpuType, Permutation};

use super::layout::{LayerDims, WeightType};
use crate::error::ModelError;

/// Alignment of every part, in bytes.
const ALIGNMENT: usize = 1024;

/// Rows in e4m3 with a scale each.
#[derive(Clone, Debug)]
pub(crate) struct Codes {
    pub(crate) codes: GpuTensor,
    pub(crate) scales: GpuTensor,
}

/// Activations of one pass of `tokens` tokens.
#[derive(Debug)]
pub(crate) struct Workspace {
    /// Residual stream `[tokens, hidden]`.
    pub(crate) x: GpuTensor,
    /// Its norm.
    pub(crate) h: GpuTensor,
    /// Its norm in e4m3, with FP8 weights.
    pub(crate) h8: Option<Codes>,
    /// `[tokens, qkv width]`.
    pub(crate) qkv: GpuTensor,
    /// `[tokens, query heads, dim]`.
    pub(crate) q: GpuTensor,
    /// `[tokens, query heads * dim]`.
    pub(crate) mixed: GpuTensor,
    pub(crate) mixed8: Option<Codes>,
    /// Inputs of the experts, `[expert rows, hidden]`; bf16, or e4m3 with FP8 weights.
    pub(crate) gathered: GpuTensor,
    pub(crate) gathered_scales: Option<GpuTensor>,
    /// `[expert rows, inner]`.
    pub(crate) inner: GpuTensor,
    pub(crate) inner8: Option<Codes>,
    /// Outputs of the experts, `[expert rows, hidden]`; where the inputs were.
    pub(crate) outputs: GpuTensor,
    pub(crate) routing: GpuRouting,
    pub(crate) permutation: Permutation,
}

/// Places in the memory, in bytes.
struct Plan {
    at: usize,
}

impl Plan {
    fn part(&mut self, bytes: usize) -> usize {
        let start = self.at.next_multiple_of(ALIGNMENT);
        self.at = start + bytes;
        start
    }
}

/// Offsets of all parts, and their total.
#[derive(Debug)]
struct Offsets {
    x: usize,
    h: usize,
    h8: usize,
    h8_scales: usize,
    qkv: usize,
    q: usize,
    mixed: usize,
    mixed8: usize,
    mixed8_scales: usize,
    experts: usize,
    gathered_scales: usize,
    inner: usize,
    inner8: usize,
    inner8_scales: usize,
    bytes: usize,
}

impl Offsets {
    fn new(dims: &LayerDims, weights: WeightType, tokens: usize) -> Self {
        let (two, four) = (GpuType::Bf16.bytes(), GpuType::F32.bytes());
        let rows = dims.expert_rows(tokens);
        let eight = |elements: usize| {
            if weights == WeightType::Fp8 {
                elements
            } else {
                0
            }
        };
        let mut plan = Plan { at: 0 };
        let x = plan.part(tokens * dims.hidden * two);
        let h = plan.part(tokens * dims.hidden * two);
        let h8 = plan.part(eight(tokens * dims.hidden));
        let h8_scales = plan.part(eight(tokens * four));
        // Attention is over before the experts begin: both use one place.
        let both = plan.at;
        let qkv = plan.part(tokens * dims.qkv_width() * two);
        let q = plan.part(tokens * dims.q_width() * two);
        let mixed = plan.part(tokens * dims.q_width() * two);
        let mixed8 = plan.part(eight(tokens * dims.q_width()));
        let mixed8_scales = plan.part(eight(tokens * four));
        let attention_end = plan.at;
        plan.at = both;
        let experts = plan.part(rows * dims.hidden * two);
        let gathered_scales = plan.part(eight(rows * four));
        let inner = plan.part(rows * dims.inner * two);
        let inner8 = plan.part(eight(rows * dims.inner));
        let inner8_scales = plan.part(eight(rows * four));
        Self {
            x,
            h,
            h8,
            h8_scales,
            qkv,
            q,
            mixed,
            mixed8,
            mixed8_scales,
            experts,
            gathered_scales,
            inner,
            inner8,
            inner8_scales,
            bytes: plan.at.max(attention_end),
        }
    }
}

impl Workspace {
    /// Bytes that a pass of `tokens` tokens needs, without routing tables (well under one per cent).
    pub(crate) fn bytes(dims: &LayerDims, weights: WeightType, tokens: usize) -> usize {
        Offsets::new(dims, weights, tokens).bytes
    }

    /// Activations of `tokens` tokens at the start of `memory`.
    pub(crate) fn new(
        gpu: &Arc<Gpu>,
        memory: &Arc<DeviceBuffer>,
        dims: &LayerDims,
        weights: WeightType,
        tokens: usize,
    ) -> Result<Self, ModelError> {
        let at = Offsets::new(dims, weights, tokens);
        let fp8 = weights == WeightType::Fp8;
        let rows = dims.expert_rows(tokens);
        let view = |offset, dims: &[usize], dtype| GpuTensor::view(memory, offset, dims, dtype);
        let codes = |offset, scales, dims: [usize; 2]| {
            let codes = || {
                Ok::<_, ModelError>(Codes {
                    codes: view(offset, &dims, GpuType::E4m3)?,
                    scales: view(scales, &dims[..1], GpuType::F32)?,
                })
            };
            fp8.then(codes).transpose()
        };
        let (hidden, width) = ([tokens, dims.hidden], [tokens, dims.q_width()]);
        let input = if fp8 { GpuType::E4m3 } else { GpuType::Bf16 };
        let scales = fp8.then(|| view(at.gathered_scales, &[rows], GpuType::F32));
        Ok(Self {
            x: view(at.x, &hidden, GpuType::Bf16)?,
            h: view(at.h, &hidden, GpuType::Bf16)?,
            h8: codes(at.h8, at.h8_scales, hidden)?,
            qkv: view(at.qkv, &[tokens, dims.qkv_width()], GpuType::Bf16)?,
            q: view(at.q, &[tokens, dims.q_heads, dims.head_dim], GpuType::Bf16)?,
            mixed: view(at.mixed, &width, GpuType::Bf16)?,
            mixed8: codes(at.mixed8, at.mixed8_scales, width)?,
            gathered: view(at.experts, &[rows, dims.hidden], input)?,
            gathered_scales: scales.transpose()?,
            inner: view(at.inner, &[rows, dims.inner], GpuType::Bf16)?,
            inner8: codes(at.inner8, at.inner8_scales, [rows, dims.inner])?,
            outputs: view(at.experts, &[rows, dims.hidden], GpuType::Bf16)?,
            routing: GpuRouting::new(gpu, tokens, dims.experts, dims.top_k)?,
            permutation: Permutation::new(gpu, tokens, dims.experts, dims.top_k, dims.shared)?,
        })
    }
}
