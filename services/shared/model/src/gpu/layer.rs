//! One decoder layer over the packed tokens of a pass.

use kernels::AttnHeads;
use kernels::cuda::{
    AttentionOut, AttentionPlan, E4m3Rows, ExpertOutputs, Finish, GpuTensor, KvSlots, NormOutput,
    Qkv, RmsNorm, attention, combine, gather, gather_e4m3, gemm, gemm_fp8, grouped_gemm,
    grouped_gemm_fp8, permute, qkv_rope_norm_write, quantize_rows, rms_norm, route,
};

use super::layout::LayerDims;
use super::weights::{LayerBlock, LayerSmall, Matrix};
use super::workspace::{Codes, Workspace};
use crate::error::ModelError;

/// What all layers of a pass share.
#[derive(Debug)]
pub(crate) struct Pass {
    /// F32 `[tokens, head_dim]`.
    pub(crate) cos: GpuTensor,
    /// Likewise.
    pub(crate) sin: GpuTensor,
    /// Where fresh keys and values go.
    pub(crate) slots: KvSlots,
    /// Which query sees which keys.
    pub(crate) attention: AttentionPlan,
    /// All keys and values, `[arena rows, head_dim]`.
    pub(crate) arena: GpuTensor,
    pub(crate) eps: f32,
    pub(crate) renormalise: bool,
}

/// Rows to be multiplied, as the weights want them.
#[derive(Clone, Copy)]
struct Input<'a> {
    bf16: &'a GpuTensor,
    e4m3: Option<E4m3Rows<'a>>,
}

impl Codes {
    fn rows(&self) -> E4m3Rows<'_> {
        E4m3Rows {
            codes: &self.codes,
            scales: &self.scales,
        }
    }
}

impl<'a> Input<'a> {
    fn new(bf16: &'a GpuTensor, codes: Option<&'a Codes>) -> Self {
        Self {
            bf16,
            e4m3: codes.map(Codes::rows),
        }
    }

    /// `rows . w^T` for the one matrix of `w`.
    fn times(self, w: &Matrix, out: &GpuTensor, finish: Finish<'_>) -> Result<(), ModelError> {
        let (data, scale) = w.group(0)?;
        match (self.e4m3, &scale) {
            (Some(rows), Some(scales)) => {
                let codes = &data;
                Ok(gemm_fp8(out, rows, E4m3Rows { codes, scales }, finish)?)
            }
            _ => Ok(gemm(out, self.bf16, &data, finish)?),
        }
    }

    /// Each group's rows times its own matrix.
    fn times_grouped(
        self,
        w: &Matrix,
        offsets: &GpuTensor,
        out: &GpuTensor,
        finish: Finish<'_>,
    ) -> Result<(), ModelError> {
        match (self.e4m3, &w.scale) {
            (Some(rows), Some(scales)) => {
                let codes = &w.data;
                let w = E4m3Rows { codes, scales };
                Ok(grouped_gemm_fp8(out, rows, w, offsets, finish)?)
            }
            _ => Ok(grouped_gemm(out, self.bf16, &w.data, offsets, finish)?),
        }
    }
}

/// One layer: its weights where they are now, and its number among the layers of the arena.
#[derive(Debug)]
pub(crate) struct Layer<'a> {
    pub(crate) index: usize,
    pub(crate) dims: &'a LayerDims,
    pub(crate) small: &'a LayerSmall,
    pub(crate) block: &'a LayerBlock,
}

impl Layer<'_> {
    /// The norm before the layer, for the first one: later ones get theirs from the layer before.
    pub(crate) fn enter(&self, work: &Workspace, pass: &Pass) -> Result<(), ModelError> {
        normed(work, &self.small.input_norm, pass, Norm::OfAttention)
    }

    /// Advances the residual stream by this layer, and leaves the norm of the next one behind.
    pub(crate) fn forward(
        &self,
        work: &mut Workspace,
        pass: &Pass,
        next_norm: Option<&GpuTensor>,
    ) -> Result<(), ModelError> {
        self.keys(work, pass)?;
        let to = AttentionOut {
            out: &work.mixed,
            lse: None,
        };
        attention(
            &pass.attention,
            to,
            &work.q,
            (&pass.arena, self.index),
            // What `q_scale` leaves.
            std::f32::consts::LN_2,
        )?;
        if let Some(codes) = &work.mixed8 {
            quantize_rows(&work.mixed, codes.rows())?;
        }
        let mixed = Input::new(&work.mixed, work.mixed8.as_ref());
        mixed.times(&self.block.output, &work.x, Finish::Add(&work.x))?;
        normed(work, &self.small.post_norm, pass, Norm::OfExperts)?;
        self.experts(work, pass, next_norm)
    }

    /// Only what fills the cache: all that the last layer of a prefill has to do.
    pub(crate) fn keys(&self, work: &Workspace, pass: &Pass) -> Result<(), ModelError> {
        let h = Input::new(&work.h, work.h8.as_ref());
        h.times(&self.block.qkv, &work.qkv, Finish::Store)?;
        let qkv = Qkv {
            qkv: &work.qkv,
            cos: &pass.cos,
            sin: &pass.sin,
            q_norm: self.small.q_norm.as_ref(),
            k_norm: self.small.k_norm.as_ref(),
            eps: pass.eps,
            q_scale: std::f32::consts::LOG2_E / (self.dims.head_dim as f32).sqrt(),
            heads: AttnHeads {
                q: self.dims.q_heads,
                kv: self.dims.kv_heads,
                dim: self.dims.head_dim,
            },
            layer: self.index,
        };
        Ok(qkv_rope_norm_write(
            &qkv,
            &pass.slots,
            &work.q,
            &pass.arena,
        )?)
    }

    fn experts(
        &self,
        work: &mut Workspace,
        pass: &Pass,
        next_norm: Option<&GpuTensor>,
    ) -> Result<(), ModelError> {
        route(
            &work.h,
            &self.small.router,
            pass.renormalise,
            &mut work.routing,
        )?;
        permute(&work.routing, &mut work.permutation)?;
        match (&work.h8, &work.gathered_scales) {
            (Some(h8), Some(scales)) => {
                let to = E4m3Rows {
                    codes: &work.gathered,
                    scales,
                };
                gather_e4m3(h8.rows(), &work.permutation, to)?;
            }
            _ => gather(&work.h, &work.permutation, &work.gathered)?,
        }
        let offsets = work.permutation.offsets();
        let scales = work.gathered_scales.as_ref();
        let gathered = Input {
            bf16: &work.gathered,
            e4m3: scales.map(|scales| E4m3Rows {
                codes: &work.gathered,
                scales,
            }),
        };
        gathered.times_grouped(&self.block.gate_up, offsets, &work.inner, Finish::SwiGlu)?;
        if let Some(codes) = &work.inner8 {
            quantize_rows(&work.inner, codes.rows())?;
        }
        let inner = Input::new(&work.inner, work.inner8.as_ref());
        inner.times_grouped(&self.block.down, offsets, &work.outputs, Finish::Store)?;
        let experts = ExpertOutputs {
            rows: &work.outputs,
            position: &work.permutation.position()?,
            gate: &work.routing.gates()?,
            shared: work.permutation.shared(),
        };
        let norm = next_norm.map(|weight| RmsNorm {
            weight,
            eps: pass.eps,
        });
        let out = norm.map_or_else(NormOutput::default, |_| {
            norm_output(work, Norm::OfAttention)
        });
        Ok(combine(&work.x, experts, norm, out)?)
    }
}

/// Who reads a norm.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Norm {
    /// The joint projection, which reads e4m3 rows alone where it has them.
    OfAttention,
    /// The router too, which always reads bf16.
    OfExperts,
}

/// `h = norm(x)`, also in e4m3 where the weights want it.
fn normed(
    work: &Workspace,
    weight: &GpuTensor,
    pass: &Pass,
    reader: Norm,
) -> Result<(), ModelError> {
    let norm = RmsNorm {
        weight,
        eps: pass.eps,
    };
    Ok(rms_norm(&work.x, norm, norm_output(work, reader))?)
}

fn norm_output(work: &Workspace, reader: Norm) -> NormOutput<'_> {
    NormOutput {
        rows: (work.h8.is_none() || reader == Norm::OfExperts).then_some(&work.h),
        e4m3: work.h8.as_ref().map(Codes::rows),
    }
}
