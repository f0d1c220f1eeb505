//! One decoder layer over the packed tokens of a pass.

use kernels::AttnHeads;
use kernels::cuda::{
    AttentionOut, AttentionPlan, E4m3Rows, ExpertOutputs, Finish, GpuTensor, KeptOutputs, KvSlots,
    Lane, NormOutput, Partial, Qkv, RmsNorm, SwiGluCodes, attention, combine, gather, gather_e4m3,
    gather_rows, gemm, gemm_fp8, grouped_gemm, grouped_gemm_fp8, grouped_swiglu_fp8,
    merge_attention, permute, qkv_rope_norm_write, quantize_rows, rms_norm, route, scatter_rows,
    sum_kept,
};

use super::group::{Ranks, Travel};
use super::layout::LayerDims;
use super::share::{Attention, Flow};
use super::weights::{LayerBlock, LayerSmall, Matrix};
use super::workspace::{Codes, Inner, RingRoom, Sums, Turn, Workspace};
use crate::error::ModelError;

/// The scale of attention that is left where queries carry the rest of it, see `Qkv::q_scale`.
const Q_SCALE_LEFT: f32 = std::f32::consts::LN_2;

/// What all layers of a pass share.
#[derive(Debug)]
pub(crate) struct Pass {
    /// F32 `[tokens, head_dim]`.
    pub(crate) cos: GpuTensor,
    /// Likewise.
    pub(crate) sin: GpuTensor,
    /// Where fresh keys and values go.
    pub(crate) slots: KvSlots,
    /// Which query sees which keys; none in a ring.
    pub(crate) attention: Option<AttentionPlan>,
    /// In a ring, the same for the keys of this rank, then for those of the others in order.
    pub(crate) ring: Vec<AttentionPlan>,
    /// All keys and values, `[arena rows, head_dim]`.
    pub(crate) arena: GpuTensor,
    /// Heads that attend here.
    pub(crate) heads: AttnHeads,
    pub(crate) eps: f32,
    pub(crate) renormalise: bool,
    pub(crate) flow: Flow,
    /// Who else computes this pass.
    pub(crate) ranks: Option<Ranks>,
    /// In a ring, the fresh keys and values of every layer: what goes to the others, and what comes from them.
    pub(crate) travel: Travel,
}

impl Pass {
    fn ranks(&self) -> Result<&Ranks, ModelError> {
        let lost = || ModelError::Internal("a pass that is shared by no ranks".into());
        self.ranks.as_ref().ok_or_else(lost)
    }

    fn whole(&self) -> Result<&AttentionPlan, ModelError> {
        let lost = || ModelError::Internal("a pass without a plan of attention".into());
        self.attention.as_ref().ok_or_else(lost)
    }
}

/// A part of the workspace that the flow of a pass needs.
fn room<T>(part: Option<&T>) -> Result<&T, ModelError> {
    part.ok_or_else(|| ModelError::Internal("a workspace of another flow".into()))
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
        let attention = pass.flow.attention;
        match attention {
            Attention::Own | Attention::Heads => self.attend(work, pass, &work.mixed)?,
            Attention::Turned => {
                let turn = room(work.turn.as_ref())?;
                self.attend(work, pass, &turn.heads)?;
                let ranks = pass.ranks()?;
                ranks.to_tokens(&turn.heads, &turn.back)?;
                let (rows, width) = (turn.back.dim(0), turn.back.dim(1));
                scatter_rows(
                    &turn.back,
                    &turn.order,
                    &work.mixed.reshape(&[rows, width])?,
                )?;
            }
            Attention::Ring => self.attend_ring(work, pass)?,
        }
        if let Some(codes) = &work.mixed8 {
            quantize_rows(&work.mixed, codes.rows())?;
        }
        let mixed = Input::new(&work.mixed, work.mixed8.as_ref());
        let norm = &self.small.post_norm;
        if attention == Attention::Heads {
            let sums = room(work.sums.as_ref())?;
            mixed.times(&self.block.output, &sums.sent, Finish::Store)?;
            summed(work, sums, Some(norm), pass, Norm::OfExperts)?;
        } else {
            mixed.times(&self.block.output, &work.x, Finish::Add(&work.x))?;
            normed(work, norm, pass, Norm::OfExperts)?;
        }
        self.experts(work, pass, next_norm)
    }

    /// Only what fills the cache: all that the last layer of a prefill has to do.
    pub(crate) fn keys(&self, work: &Workspace, pass: &Pass) -> Result<(), ModelError> {
        let h = Input::new(&work.h, work.h8.as_ref());
        let own = Input::new(&work.h_own, work.h8_own.as_ref());
        match pass.flow.attention {
            Attention::Own | Attention::Ring => {
                own.times(&self.block.qkv, &work.qkv, Finish::Store)?;
            }
            Attention::Heads => {
                // Codes travel where there are some: half the bytes.
                match &work.h8 {
                    Some(h8) => pass.ranks()?.gather(&[&h8.codes, &h8.scales])?,
                    None => pass.ranks()?.gather(&[&work.h])?,
                }
                h.times(&self.block.qkv, &work.qkv, Finish::Store)?;
            }
            Attention::Turned => {
                let turn = room(work.turn.as_ref())?;
                let own_rows = work.h_own.dim(0);
                let joint = turn.joint.reshape(&[own_rows, self.dims.qkv_width()])?;
                own.times(&self.block.qkv, &joint, Finish::Store)?;
                self.turn_heads(turn, work, pass)?;
            }
        }
        let qkv = Qkv {
            qkv: &work.qkv,
            cos: &pass.cos,
            sin: &pass.sin,
            q_norm: self.small.q_norm.as_ref(),
            k_norm: self.small.k_norm.as_ref(),
            eps: pass.eps,
            q_scale: std::f32::consts::LOG2_E / (self.dims.head_dim as f32).sqrt(),
            heads: pass.heads,
            layer: self.index,
        };
        Ok(qkv_rope_norm_write(
            &qkv,
            &pass.slots,
            &work.q,
            &pass.arena,
        )?)
    }

    /// The heads of each rank lie side by side in the joint projection.
    fn turn_heads(&self, turn: &Turn, work: &Workspace, pass: &Pass) -> Result<(), ModelError> {
        gather_rows(&turn.joint, &turn.order, &turn.packed)?;
        pass.ranks()?.to_heads(&turn.packed, &work.qkv)
    }

    fn attend(&self, work: &Workspace, pass: &Pass, out: &GpuTensor) -> Result<(), ModelError> {
        let to = AttentionOut { out, lse: None };
        let keys = (&pass.arena, self.index);
        Ok(attention(pass.whole()?, to, &work.q, keys, Q_SCALE_LEFT)?)
    }

    /// Own keys while those of the others travel, then theirs.
    fn attend_ring(&self, work: &Workspace, pass: &Pass) -> Result<(), ModelError> {
        let RingRoom { out, lse, other } = room(work.ring.as_ref())?;
        let (gpu, ranks) = (pass.arena.gpu(), pass.ranks()?);
        ranks.begin_beside()?;
        pass.travel.go(&*ranks.group, Lane::Beside)?;
        let arrived = ranks.group.mark()?;
        let all = Partial {
            out: &work.mixed,
            lse,
        };
        for (index, plan) in pass.ring.iter().enumerate() {
            if index == 1 {
                gpu.wait_for(&arrived)?;
            }
            let part = if index == 0 {
                all
            } else {
                Partial { out, lse: other }
            };
            let to = AttentionOut {
                out: part.out,
                lse: Some(part.lse),
            };
            let keys = (&pass.arena, self.index);
            attention(plan, to, &work.q, keys, Q_SCALE_LEFT)?;
            if index > 0 {
                merge_attention(all, part)?;
            }
        }
        Ok(())
    }

    fn experts(
        &self,
        work: &mut Workspace,
        pass: &Pass,
        next_norm: Option<&GpuTensor>,
    ) -> Result<(), ModelError> {
        if pass.flow.spread {
            // The router of every rank sees every token: the same bits everywhere, and no choice travels.
            pass.ranks()?.gather(&[&work.h])?;
            if let Some(h8) = &work.h8 {
                quantize_rows(&work.h, h8.rows())?;
            }
        }
        route(
            &work.h,
            &self.small.router,
            pass.renormalise,
            &mut work.routing,
        )?;
        permute(&work.routing, &mut work.permutation)?;
        self.multiply(work)?;
        if pass.flow.spread {
            let sums = room(work.sums.as_ref())?;
            let outputs = KeptOutputs {
                rows: &work.outputs,
                permutation: &work.permutation,
                gate: &work.routing.gates()?,
            };
            sum_kept(outputs, &sums.sent)?;
            return summed(work, sums, next_norm, pass, Norm::OfAttention);
        }
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
            norm_output(work, pass, Norm::OfAttention)
        });
        Ok(combine(&work.x, experts, norm, out)?)
    }

    /// The rows of each expert that is here through it.
    fn multiply(&self, work: &Workspace) -> Result<(), ModelError> {
        let (gate_up, down) = (&self.block.gate_up, &self.block.down);
        let (order, out) = (&work.permutation, &work.outputs);
        let offsets = order.offsets();
        match (&work.inner, &work.h8, &gate_up.scale, &down.scale) {
            (Inner::E4m3([rows, inner], exponents), Some(h8), Some(first), Some(second)) => {
                let (rows, inner) = (rows.rows(), inner.rows());
                gather_e4m3(h8.rows(), order, rows)?;
                let (codes, scales) = (&gate_up.data, first);
                let to = SwiGluCodes {
                    rows: inner,
                    exponents,
                };
                grouped_swiglu_fp8(to, rows, E4m3Rows { codes, scales }, offsets)?;
                let (codes, scales) = (&down.data, second);
                let w = E4m3Rows { codes, scales };
                Ok(grouped_gemm_fp8(out, inner, w, offsets, Finish::Store)?)
            }
            (Inner::Bf16([rows, inner]), ..) => {
                gather(&work.h, order, rows)?;
                grouped_gemm(inner, rows, &gate_up.data, offsets, Finish::SwiGlu)?;
                let w = &down.data;
                Ok(grouped_gemm(out, inner, w, offsets, Finish::Store)?)
            }
            _ => Err(ModelError::Internal("a workspace of other weights".into())),
        }
    }
}

/// The parts of sums to the ranks of their tokens, and there into `x` in the order of the ranks; then the norm.
fn summed(
    work: &Workspace,
    sums: &Sums,
    norm: Option<&GpuTensor>,
    pass: &Pass,
    reader: Norm,
) -> Result<(), ModelError> {
    pass.ranks()?.scatter(&sums.rows)?;
    let parts = ExpertOutputs {
        rows: &sums.rows,
        position: &sums.places,
        gate: &sums.ones,
        shared: None,
    };
    let norm = norm.map(|weight| RmsNorm {
        weight,
        eps: pass.eps,
    });
    let out = norm.map_or_else(NormOutput::default, |_| norm_output(work, pass, reader));
    Ok(combine(&work.x, parts, norm, out)?)
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
    Ok(rms_norm(&work.x, norm, norm_output(work, pass, reader))?)
}

fn norm_output<'a>(work: &'a Workspace, pass: &Pass, reader: Norm) -> NormOutput<'a> {
    // Codes for experts are made where the norms have travelled to.
    let later = reader == Norm::OfExperts && pass.flow.spread;
    NormOutput {
        rows: (work.h8.is_none() || reader == Norm::OfExperts).then_some(&work.h_own),
        e4m3: work.h8_own.as_ref().filter(|_| !later).map(Codes::rows),
    }
}
