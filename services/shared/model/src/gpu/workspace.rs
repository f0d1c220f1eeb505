//! Memory that every layer of a pass uses again, for up to a fixed number of tokens.

use std::sync::Arc;

use kernels::cuda::{
    CODE_COLUMNS, DeviceBuffer, Gpu, GpuRouting, GpuTensor, GpuType, Permutation, RowIndex,
};

use super::group::Ranks;
use super::layout::WeightType;
pub(crate) use super::places::{Extent, Sizes};
use super::places::{Offsets, Place};
use super::share::Attention;
use crate::error::ModelError;

/// Rows in e4m3 with a scale each.
#[derive(Clone, Debug)]
pub(crate) struct Codes {
    pub(crate) codes: GpuTensor,
    pub(crate) scales: GpuTensor,
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

/// Inputs of both halves of the experts, `[expert rows, hidden]` and `[expert rows, inner]`, as the weights want them.
#[derive(Debug)]
pub(crate) enum Inner {
    Bf16([GpuTensor; 2]),
    /// The second with exponents, see `SwiGluCodes`.
    E4m3([Codes; 2], GpuTensor),
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
    /// What goes through the experts.
    pub(crate) inner: Inner,
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

    fn inner(&self) -> Result<Inner, ModelError> {
        let (at, dims) = (&self.at.experts, self.sizes.dims);
        let rows = self.sizes.expert_rows(self.of);
        let (first, second) = ([rows, dims.hidden], [rows, dims.inner]);
        let codes = self.codes(at.rows, at.gathered_scales, first)?;
        let inner = self.codes(at.inner, at.inner_scales, second)?;
        let (Some(codes), Some(inner)) = (codes, inner) else {
            let inner = self.bf16(at.inner, &second)?;
            return Ok(Inner::Bf16([self.bf16(at.rows, &first)?, inner]));
        };
        let blocks = [rows, dims.inner.div_ceil(CODE_COLUMNS)];
        let exponents = self.view(at.inner_exponents, &blocks, GpuType::U8)?;
        Ok(Inner::E4m3([codes, inner], exponents))
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
            joint: self.bf16(self.at.attention.joint, &[own * ranks, joint])?,
            packed: self.bf16(self.at.attention.packed, &[ranks * own, joint])?,
            order: RowIndex::new(self.gpu, &order, own * ranks)?,
            heads: self.bf16(self.at.attention.heads, &[of.all, width])?,
            back: self.bf16(self.at.attention.back, &[ranks * own, width])?,
        }))
    }

    fn ring(&self) -> Result<Option<RingRoom>, ModelError> {
        let (of, heads) = (self.of, self.sizes.heads.q);
        if of.flow.attention != Attention::Ring {
            return Ok(None);
        }
        let dims = [of.own, self.sizes.dims.q_width()];
        Ok(Some(RingRoom {
            out: self.bf16(self.at.attention.other, &dims)?,
            lse: self.view(self.at.attention.lse, &[of.own, heads], GpuType::F32)?,
            other: self.view(self.at.attention.other_lse, &[of.own, heads], GpuType::F32)?,
        }))
    }

    fn sums(&self, ranks: Option<&Ranks>) -> Result<Option<Sums>, ModelError> {
        let (of, hidden) = (self.of, self.sizes.dims.hidden);
        let Some(ranks) = ranks.filter(|_| of.sums() > 0) else {
            return Ok(None);
        };
        let rows = self.bf16(self.at.stream.sums, &[of.sums(), hidden])?;
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
        let normed = [of.normed(), dims.hidden];
        let h = make.bf16(at.stream.h, &normed)?;
        let h8 = make.codes(at.stream.h8, at.stream.h8_scales, normed)?;
        let first = if of.normed() > of.own { of.first } else { 0 };
        let h8_own = h8.as_ref().map(|h8| {
            Ok::<_, ModelError>(Codes {
                codes: h8.codes.narrow0(first, of.own)?,
                scales: h8.scales.narrow0(first, of.own)?,
            })
        });
        let mixed = [of.mixed(), dims.q_width()];
        let attended = of.attended();
        let whole = (of.whole > 0).then(|| make.bf16(at.stream.whole, &[of.whole, dims.hidden]));
        Ok(Self {
            x: make.bf16(at.stream.x, &[of.own, dims.hidden])?,
            h_own: h.narrow0(first, of.own)?,
            h,
            h8_own: h8_own.transpose()?,
            h8,
            qkv: make.bf16(at.attention.qkv, &[attended, heads.width()])?,
            q: make.bf16(at.attention.q, &[attended, heads.q, heads.dim])?,
            mixed: make.bf16(at.attention.mixed, &mixed)?,
            mixed8: make.codes(at.attention.mixed8, at.attention.mixed8_scales, mixed)?,
            inner: make.inner()?,
            outputs: make.bf16(at.experts.rows, &[rows, dims.hidden])?,
            routing: GpuRouting::new(gpu, of.routed(), dims.routed, dims.top_k)?,
            permutation: make.permutation()?,
            turn: make.turn()?,
            ring: make.ring()?,
            sums: make.sums(ranks)?,
            whole: whole.transpose()?,
        })
    }
}
