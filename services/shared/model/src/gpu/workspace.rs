//! Memory that every layer of a pass uses again, for up to a fixed number of tokens.

use std::sync::Arc;

use kernels::AttnHeads;
use kernels::cuda::{DeviceBuffer, Gpu, GpuRouting, GpuTensor, GpuType, Permutation, RowIndex};

use super::group::Ranks;
use super::layout::{LayerDims, WeightType};
use super::share::{Attention, Flow};
use crate::error::ModelError;

/// Alignment of every part, in bytes.
const ALIGNMENT: usize = 1024;

/// Rows in e4m3 with a scale each.
#[derive(Clone, Debug)]
pub(crate) struct Codes {
    pub(crate) codes: GpuTensor,
    pub(crate) scales: GpuTensor,
}

/// Tokens of a pass on one rank, and what travels in its layers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Extent {
    /// First token of this rank among those of the group.
    pub(crate) first: usize,
    /// Tokens whose residual stream is here.
    pub(crate) own: usize,
    /// Tokens of all ranks of the group.
    pub(crate) all: usize,
    pub(crate) ranks: usize,
    /// Whole rows that are gathered at the end of a pass, or pictures that are embedded apart: tokens.
    pub(crate) whole: usize,
    pub(crate) flow: Flow,
}

impl Extent {
    /// A pass that one GPU computes by itself.
    pub(crate) fn alone(tokens: usize) -> Self {
        Self {
            first: 0,
            own: tokens,
            all: tokens,
            ranks: 1,
            whole: 0,
            flow: Flow::ALONE,
        }
    }

    /// Tokens whose heads attend here.
    fn attended(&self) -> usize {
        match self.flow.attention {
            Attention::Own | Attention::Ring => self.own,
            Attention::Heads | Attention::Turned => self.all,
        }
    }

    /// Tokens whose norms are here.
    fn normed(&self) -> usize {
        if self.flow.spread || self.flow.attention == Attention::Heads {
            self.all
        } else {
            self.own
        }
    }

    /// Tokens that experts here see.
    fn routed(&self) -> usize {
        if self.flow.spread { self.all } else { self.own }
    }

    /// Tokens that enter the output projection.
    fn mixed(&self) -> usize {
        match self.flow.attention {
            Attention::Heads => self.all,
            _ => self.own,
        }
    }

    /// Tokens that the shared expert sees here.
    fn shared(&self) -> std::ops::Range<usize> {
        if self.flow.spread && !self.flow.shared_cut {
            self.first..self.first + self.own
        } else {
            0..self.routed()
        }
    }

    /// Rows of sums that travel.
    fn sums(&self) -> usize {
        if self.flow.spread || self.flow.attention == Attention::Heads {
            self.all + (self.ranks - 1) * self.own
        } else {
            0
        }
    }
}

/// What travels from tokens to heads and back.
#[derive(Debug)]
pub(crate) struct Turn {
    /// The joint projection of own tokens, `[own tokens * ranks, width of a rank]`.
    pub(crate) joint: GpuTensor,
    /// The same by rank, `[ranks * own tokens, width of a rank]`.
    pub(crate) packed: GpuTensor,
    /// Row of `joint` of each row of `packed`.
    pub(crate) order: RowIndex,
    /// Results of own heads for all tokens.
    pub(crate) heads: GpuTensor,
    /// Results for own tokens by rank, `[ranks * own tokens, width of a rank]`.
    pub(crate) back: GpuTensor,
}

/// A second part of the keys in a ring.
#[derive(Debug)]
pub(crate) struct RingRoom {
    pub(crate) out: GpuTensor,
    pub(crate) lse: GpuTensor,
    pub(crate) other: GpuTensor,
}

/// Sums whose parts are on several ranks.
#[derive(Debug)]
pub(crate) struct Sums {
    /// `[all tokens + (ranks - 1) own tokens, hidden]`, see [`Ranks::scatter`].
    pub(crate) rows: GpuTensor,
    /// This rank's parts, for all tokens.
    pub(crate) sent: GpuTensor,
    /// I32 `[own tokens, ranks]`: the parts of each own token.
    pub(crate) places: GpuTensor,
    /// F32, ones.
    pub(crate) ones: GpuTensor,
}

/// Activations of one pass.
#[derive(Debug)]
pub(crate) struct Workspace {
    /// Residual stream `[own tokens, hidden]`.
    pub(crate) x: GpuTensor,
    /// Its norm, of all tokens where norms travel.
    pub(crate) h: GpuTensor,
    /// That of own tokens.
    pub(crate) h_own: GpuTensor,
    /// The norm in e4m3, with FP8 weights.
    pub(crate) h8: Option<Codes>,
    pub(crate) h8_own: Option<Codes>,
    /// `[tokens, qkv width]`.
    pub(crate) qkv: GpuTensor,
    /// `[tokens, query heads, dim]`.
    pub(crate) q: GpuTensor,
    /// `[tokens, query heads * dim]`: what enters the output projection.
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
    pub(crate) turn: Option<Turn>,
    pub(crate) ring: Option<RingRoom>,
    pub(crate) sums: Option<Sums>,
    /// `[tokens of whole rows, hidden]`.
    pub(crate) whole: Option<GpuTensor>,
}

/// Offset and size of a part, in bytes.
#[derive(Clone, Copy, Debug, Default)]
struct Place(usize);

/// Hands out places in the memory.
struct Plan {
    at: usize,
}

impl Plan {
    fn part(&mut self, bytes: usize) -> Place {
        let start = self.at.next_multiple_of(ALIGNMENT);
        self.at = start + bytes;
        Place(start)
    }
}

/// Offsets of all parts, and their total.
#[derive(Debug)]
struct Offsets {
    x: Place,
    h: Place,
    h8: Place,
    h8_scales: Place,
    sums: Place,
    whole: Place,
    qkv: Place,
    q: Place,
    mixed: Place,
    mixed8: Place,
    mixed8_scales: Place,
    joint: Place,
    packed: Place,
    heads: Place,
    back: Place,
    other: Place,
    lse: Place,
    other_lse: Place,
    experts: Place,
    gathered_scales: Place,
    inner: Place,
    inner8: Place,
    inner8_scales: Place,
    bytes: usize,
}

/// Everything that sizes depend on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sizes<'a> {
    pub(crate) dims: &'a LayerDims,
    /// Heads that attend here.
    pub(crate) heads: AttnHeads,
    pub(crate) weights: WeightType,
}

impl Sizes<'_> {
    /// Columns of the query heads that attend here.
    fn head_width(&self) -> usize {
        self.heads.q * self.heads.dim
    }

    fn expert_rows(&self, of: &Extent) -> usize {
        self.dims.expert_rows(of.routed(), of.shared().len())
    }

    fn offsets(&self, of: &Extent) -> Offsets {
        let (two, four) = (GpuType::Bf16.bytes(), GpuType::F32.bytes());
        let dims = self.dims;
        let rows = self.expert_rows(of);
        let fp8 = self.weights == WeightType::Fp8;
        let eight = |elements: usize| if fp8 { elements } else { 0 };
        let turned = |elements: usize| {
            let some = of.flow.attention == Attention::Turned;
            if some { elements } else { 0 }
        };
        let ring = |elements: usize| {
            let some = of.flow.attention == Attention::Ring;
            if some { elements } else { 0 }
        };
        let mut plan = Plan { at: 0 };
        let x = plan.part(of.own * dims.hidden * two);
        let h = plan.part(of.normed() * dims.hidden * two);
        let h8 = plan.part(eight(of.normed() * dims.hidden));
        let h8_scales = plan.part(eight(of.normed() * four));
        let sums = plan.part(of.sums() * dims.hidden * two);
        let whole = plan.part(of.whole * dims.hidden * two);
        // Attention is over before the experts begin: both use one place.
        let both = plan.at;
        let qkv = plan.part(of.attended() * self.heads.width() * two);
        let q = plan.part(of.attended() * self.head_width() * two);
        let mixed = plan.part(of.mixed() * dims.q_width() * two);
        let mixed8 = plan.part(eight(of.mixed() * dims.q_width()));
        let mixed8_scales = plan.part(eight(of.mixed() * four));
        let joint = plan.part(turned(of.own * dims.qkv_width() * two));
        let packed = plan.part(turned(of.own * dims.qkv_width() * two));
        let heads = plan.part(turned(of.all * self.head_width() * two));
        let back = plan.part(turned(of.own * dims.q_width() * two));
        let other = plan.part(ring(of.own * dims.q_width() * two));
        let lse = plan.part(ring(of.own * self.heads.q * four));
        let other_lse = plan.part(ring(of.own * self.heads.q * four));
        let attention_end = plan.at;
        plan.at = both;
        let experts = plan.part(rows * dims.hidden * two);
        let gathered_scales = plan.part(eight(rows * four));
        let inner = plan.part(rows * dims.inner * two);
        let inner8 = plan.part(eight(rows * dims.inner));
        let inner8_scales = plan.part(eight(rows * four));
        Offsets {
            x,
            h,
            h8,
            h8_scales,
            sums,
            whole,
            qkv,
            q,
            mixed,
            mixed8,
            mixed8_scales,
            joint,
            packed,
            heads,
            back,
            other,
            lse,
            other_lse,
            experts,
            gathered_scales,
            inner,
            inner8,
            inner8_scales,
            bytes: plan.at.max(attention_end),
        }
    }

    /// Bytes that a pass needs, without tables (well under one per cent).
    pub(crate) fn bytes(&self, of: &Extent) -> usize {
        self.offsets(of).bytes
    }
}

/// Memory, and what of it is where.
struct Maker<'a> {
    gpu: &'a Arc<Gpu>,
    memory: &'a Arc<DeviceBuffer>,
    sizes: Sizes<'a>,
    of: &'a Extent,
    at: Offsets,
}

impl Maker<'_> {
    fn view(&self, at: Place, dims: &[usize], dtype: GpuType) -> Result<GpuTensor, ModelError> {
        Ok(GpuTensor::view(self.memory, at.0, dims, dtype)?)
    }

    fn bf16(&self, at: Place, dims: &[usize]) -> Result<GpuTensor, ModelError> {
        self.view(at, dims, GpuType::Bf16)
    }

    fn codes(
        &self,
        at: Place,
        scales: Place,
        dims: [usize; 2],
    ) -> Result<Option<Codes>, ModelError> {
        let codes = || {
            Ok::<_, ModelError>(Codes {
                codes: self.view(at, &dims, GpuType::E4m3)?,
                scales: self.view(scales, &dims[..1], GpuType::F32)?,
            })
        };
        let fp8 = self.sizes.weights == WeightType::Fp8;
        fp8.then(codes).transpose()
    }

    fn turn(&self) -> Result<Option<Turn>, ModelError> {
        let of = self.of;
        if of.flow.attention != Attention::Turned {
            return Ok(None);
        }
        let (own, ranks) = (of.own, of.ranks);
        let (joint, width) = (self.sizes.heads.width(), self.sizes.head_width());
        let narrow = |row: usize| u32::try_from(row).unwrap_or(u32::MAX);
        let order: Vec<u32> = (0..ranks)
            .flat_map(|rank| (0..own).map(move |token| narrow(token * ranks + rank)))
            .collect();
        Ok(Some(Turn {
            joint: self.bf16(self.at.joint, &[own * ranks, joint])?,
            packed: self.bf16(self.at.packed, &[ranks * own, joint])?,
            order: RowIndex::new(self.gpu, &order, own * ranks)?,
            heads: self.bf16(self.at.heads, &[of.all, width])?,
            back: self.bf16(self.at.back, &[ranks * own, width])?,
        }))
    }

    fn ring(&self) -> Result<Option<RingRoom>, ModelError> {
        let (of, heads) = (self.of, self.sizes.heads.q);
        if of.flow.attention != Attention::Ring {
            return Ok(None);
        }
        let dims = [of.own, self.sizes.dims.q_width()];
        Ok(Some(RingRoom {
            out: self.bf16(self.at.other, &dims)?,
            lse: self.view(self.at.lse, &[of.own, heads], GpuType::F32)?,
            other: self.view(self.at.other_lse, &[of.own, heads], GpuType::F32)?,
        }))
    }

    fn sums(&self, ranks: Option<&Ranks>) -> Result<Option<Sums>, ModelError> {
        let (of, hidden) = (self.of, self.sizes.dims.hidden);
        let Some(ranks) = ranks.filter(|_| of.sums() > 0) else {
            return Ok(None);
        };
        let rows = self.bf16(self.at.sums, &[of.sums(), hidden])?;
        let dims = [of.own, of.ranks];
        let ones = vec![1.0; of.own * of.ranks];
        Ok(Some(Sums {
            sent: rows.narrow0(0, of.all)?,
            rows,
            places: GpuTensor::from_i32(self.gpu, &dims, &ranks.places(), "places of sums")?,
            ones: GpuTensor::from_f32(self.gpu, &dims, &ones, "weights of sums")?,
        }))
    }

    fn permutation(&self) -> Result<Permutation, ModelError> {
        let (dims, of) = (self.sizes.dims, self.of);
        let (tokens, shared) = (of.routed(), dims.shared && !of.flow.spread);
        let all = Permutation::new(self.gpu, tokens, dims.routed, dims.top_k, shared)?;
        if !of.flow.spread {
            return Ok(all);
        }
        let here = dims.first_expert..dims.first_expert + dims.experts;
        let shared = if dims.shared { of.shared() } else { 0..0 };
        Ok(all.keeping(here, shared)?)
    }
}

impl Workspace {
    /// Activations of a pass at the start of `memory`.
    pub(crate) fn new(
        gpu: &Arc<Gpu>,
        memory: &Arc<DeviceBuffer>,
        sizes: Sizes<'_>,
        of: &Extent,
        ranks: Option<&Ranks>,
    ) -> Result<Self, ModelError> {
        let (dims, heads) = (sizes.dims, sizes.heads);
        let at = sizes.offsets(of);
        let make = Maker {
            gpu,
            memory,
            sizes,
            of,
            at,
        };
        let at = &make.at;
        let rows = sizes.expert_rows(of);
        let fp8 = sizes.weights == WeightType::Fp8;
        let normed = [of.normed(), dims.hidden];
        let input = if fp8 { GpuType::E4m3 } else { GpuType::Bf16 };
        let scales = fp8.then(|| make.view(at.gathered_scales, &[rows], GpuType::F32));
        let h = make.bf16(at.h, &normed)?;
        let h8 = make.codes(at.h8, at.h8_scales, normed)?;
        let first = if of.normed() > of.own { of.first } else { 0 };
        let h8_own = h8.as_ref().map(|h8| {
            Ok::<_, ModelError>(Codes {
                codes: h8.codes.narrow0(first, of.own)?,
                scales: h8.scales.narrow0(first, of.own)?,
            })
        });
        let mixed = [of.mixed(), dims.q_width()];
        let attended = of.attended();
        let whole = (of.whole > 0).then(|| make.bf16(at.whole, &[of.whole, dims.hidden]));
        Ok(Self {
            x: make.bf16(at.x, &[of.own, dims.hidden])?,
            h_own: h.narrow0(first, of.own)?,
            h,
            h8_own: h8_own.transpose()?,
            h8,
            qkv: make.bf16(at.qkv, &[attended, heads.width()])?,
            q: make.bf16(at.q, &[attended, heads.q, heads.dim])?,
            mixed: make.bf16(at.mixed, &mixed)?,
            mixed8: make.codes(at.mixed8, at.mixed8_scales, mixed)?,
            gathered: make.view(at.experts, &[rows, dims.hidden], input)?,
            gathered_scales: scales.transpose()?,
            inner: make.bf16(at.inner, &[rows, dims.inner])?,
            inner8: make.codes(at.inner8, at.inner8_scales, [rows, dims.inner])?,
            outputs: make.bf16(at.experts, &[rows, dims.hidden])?,
            routing: GpuRouting::new(gpu, of.routed(), dims.routed, dims.top_k)?,
            permutation: make.permutation()?,
            turn: make.turn()?,
            ring: make.ring()?,
            sums: make.sums(ranks)?,
            whole: whole.transpose()?,
        })
    }
}
