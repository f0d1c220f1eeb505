//! Passes of one token a row, at most 32 rows: kernels made for reading weights once, and nothing between them that
//! waits for the host.
//!
//! Seven launches a layer, each of which may begin while the one before it ends: what it needs of the weights
//! is on its way by then. A row's bits do not depend on the other rows, but they are not those of a packed pass.
//!
//! Under tensor parallelism every rank has all tokens, its heads and its part of every expert, and twice a layer the
//! ranks add their parts of the stream in the order of ranks: all of them have the same bits, so they route alike.

use std::sync::Arc;

use kernels::cuda::{
    DecodeAdded, DecodeAttention, DecodeEnter, DecodeParts, DecodeProduct, DecodeRoute,
    DecodeRouting, DecodeRow, DecodeRows, DecodeSource, DecodeWeights, Gpu, GpuTensor, GpuType,
    Lane, PartSum, RmsNorm, Start, decode_activation, decode_attention, decode_dense, decode_down,
    decode_enter, decode_gate_up, decode_route,
};

use super::GpuModel;
use super::group::GpuGroup;
use super::layout::{LayerDims, WeightType};
use super::prefill::GpuCache;
use super::rows::PassShape;
use super::weights::{LayerBlock, LayerSmall, Matrix};
use crate::error::ModelError;
use crate::input::RowInput;
use crate::positions::{positions, rope_table};

/// Memory of such passes.
#[derive(Debug)]
pub(crate) struct Decoder {
    routing: DecodeRouting,
    /// Of the last pass; its memory is used again.
    rows: Option<DecodeRows>,
    room: Room,
    most: usize,
    /// Where the ranks of a plan add, once they have met.
    parts: Option<DecodeParts>,
}

/// Activations; the first dimension is tokens or, of experts, rows.
#[derive(Clone, Debug)]
struct Room {
    /// The residual stream before attention, and behind it.
    x: GpuTensor,
    behind: GpuTensor,
    h: GpuTensor,
    qkv: GpuTensor,
    mixed: GpuTensor,
    projected: GpuTensor,
    inner: GpuTensor,
    outputs: GpuTensor,
    ids: GpuTensor,
    cos: GpuTensor,
    sin: GpuTensor,
}

impl Room {
    fn new(gpu: &Arc<Gpu>, d: &LayerDims, kind: GpuType, most: usize) -> Result<Self, ModelError> {
        let new = |rows: usize, width: usize, dtype| {
            GpuTensor::new(gpu, &[rows, width], dtype, "workspace of decoding")
        };
        let rows = d.expert_rows(most, most);
        Ok(Self {
            x: new(most, d.hidden, GpuType::Bf16)?,
            behind: new(most, d.hidden, GpuType::Bf16)?,
            h: new(most, d.hidden, kind)?,
            qkv: new(most, d.qkv_width(), GpuType::F32)?,
            mixed: new(most, d.q_width(), kind)?,
            projected: new(most, d.hidden, GpuType::F32)?,
            inner: new(rows, d.inner, kind)?,
            outputs: new(rows, d.hidden, GpuType::F32)?,
            ids: GpuTensor::new(gpu, &[most], GpuType::I32, "workspace of decoding")?,
            cos: new(most, d.head_dim, GpuType::F32)?,
            sin: new(most, d.head_dim, GpuType::F32)?,
        })
    }

    /// The part of a pass of so many tokens.
    fn of(&self, tokens: usize, rows: usize) -> Result<Self, ModelError> {
        let first = |t: &GpuTensor| t.narrow0(0, tokens);
        Ok(Self {
            x: first(&self.x)?,
            behind: first(&self.behind)?,
            h: first(&self.h)?,
            qkv: first(&self.qkv)?,
            mixed: first(&self.mixed)?,
            projected: first(&self.projected)?,
            inner: self.inner.narrow0(0, rows)?,
            outputs: self.outputs.narrow0(0, rows)?,
            ids: first(&self.ids)?,
            cos: first(&self.cos)?,
            sin: first(&self.sin)?,
        })
    }
}

/// What all layers of a pass share.
struct Pass<'a> {
    room: Room,
    rows: &'a DecodeRows,
    routing: DecodeRouting,
    arena: GpuTensor,
    shape: PassShape,
    /// Of everything but the first kernel.
    start: Start,
    /// The other ranks of a plan.
    ranks: Option<(&'a dyn GpuGroup, &'a mut DecodeParts)>,
    /// What the experts of all ranks add to the stream.
    added: Option<PartSum>,
}

impl Decoder {
    /// For layers of these sizes, where there are kernels for them.
    pub(super) fn new(
        gpu: &Arc<Gpu>,
        dims: &LayerDims,
        shape: PassShape,
        weights: WeightType,
    ) -> Result<Option<Self>, ModelError> {
        let kind = weights.element();
        let takes = [
            (DecodeProduct::Dense, dims.hidden),
            (DecodeProduct::Dense, dims.q_width()),
            (DecodeProduct::GateUp, dims.hidden),
            (DecodeProduct::Down, dims.inner),
        ];
        let fits = takes.iter().all(|(product, k)| product.takes(*k, kind))
            && DecodeRows::takes(shape.heads)
            && dims.experts == dims.routed
            && dims.inner.is_multiple_of(8);
        if !fits {
            return Ok(None);
        }
        let most = DecodeRouting::most_tokens(dims.top_k);
        Ok(Some(Self {
            routing: DecodeRouting::new(gpu, dims.routed, dims.top_k, dims.shared)?,
            rows: None,
            room: Room::new(gpu, dims, decode_activation(kind), most)?,
            most,
            parts: None,
        }))
    }

    /// Meets the ranks of a plan, unless it has.
    fn meet(&mut self, gpu: &Arc<Gpu>, group: Option<&dyn GpuGroup>) -> Result<(), ModelError> {
        if let (None, Some(group)) = (&self.parts, group) {
            let (place, size) = (
                (group.rank(), group.ranks()),
                (self.most, self.room.x.dim(1)),
            );
            let gather = |all: &GpuTensor| group.gather(all, Lane::Compute);
            self.parts = Some(DecodeParts::meet(gpu, place, size, &gather)?);
        }
        Ok(())
    }

    /// Leaves the group that it has met.
    pub(super) fn part(&mut self) {
        self.parts = None;
    }

    /// After everything enqueued has run: whether no rank was waited for in vain.
    pub(super) fn check(&self) -> Result<(), ModelError> {
        Ok(self.parts.as_ref().map_or(Ok(()), DecodeParts::check)?)
    }

    /// Whether a pass over these rows, of which hidden states are wanted, is one for it.
    pub(super) fn takes(&self, inputs: &[RowInput<'_>]) -> bool {
        let one = |row: &RowInput<'_>| row.ids.len() == 1 && row.vectors.is_empty();
        !inputs.is_empty() && inputs.len() <= self.most && inputs.iter().all(one)
    }
}

impl GpuModel {
    /// One token of every row on top of its cache: the raw hidden states `[rows, hidden]`, valid until the next
    /// pass. Rows were checked against their caches.
    pub(super) fn decode(
        &mut self,
        inputs: &[RowInput<'_>],
        caches: &mut [&mut GpuCache],
    ) -> Result<GpuTensor, ModelError> {
        let lost = || ModelError::Internal("a model that cannot decode".into());
        let mut decoder = self.decoder.take().ok_or_else(lost)?;
        let hidden = self.decode_with(&mut decoder, inputs, caches);
        self.decoder = Some(decoder);
        let hidden = hidden?;
        for cache in caches.iter_mut() {
            cache.append(1);
        }
        Ok(hidden)
    }

    fn decode_with(
        &mut self,
        decoder: &mut Decoder,
        inputs: &[RowInput<'_>],
        caches: &[&mut GpuCache],
    ) -> Result<GpuTensor, ModelError> {
        let group = self.group.clone();
        decoder.meet(&self.gpu, group.as_deref())?;
        let rows: Vec<DecodeRow> = caches.iter().map(|cache| cache.row()).collect();
        let arena = self.arena.tensor()?;
        let rows = DecodeRows::new(
            &self.gpu,
            &rows,
            self.shape.heads,
            (self.shape.layers, arena.dim(0)),
            decoder.rows.as_ref(),
        )?;
        let rows = decoder.rows.insert(rows);
        let routing = decoder.routing.of_tokens(inputs.len())?;
        let room = decoder.room.of(inputs.len(), routing.rows())?;
        self.upload_tokens(inputs, &room)?;
        // Weights that travel arrive between kernels.
        let stays = self.store.travelling().is_empty();
        let mut pass = Pass {
            room,
            rows,
            routing,
            arena,
            shape: self.shape,
            start: if stays { Start::Early } else { Start::InOrder },
            ranks: group.as_deref().zip(decoder.parts.as_mut()),
            added: None,
        };
        let table = self.text.as_ref().map(|text| text.embedding());
        let table = table.ok_or_else(|| ModelError::Internal("a decoder without text".into()))?;
        let layers = self.small.len();
        for index in 0..layers {
            let block = self.store.block(index)?;
            let small = &self.small[index];
            let (source, start) = if index == 0 {
                let ids = &pass.room.ids;
                (DecodeSource::Embedding { table, ids }, Start::InOrder)
            } else {
                (pass.between(), pass.behind_sum())
            };
            pass.enter(source, Some(&small.input_norm), start)?;
            let projected = pass.attend(index, small, &block)?;
            pass.experts(projected.as_ref(), small, &block)?;
            self.store.done(index)?;
        }
        pass.enter(pass.between(), None, pass.behind_sum())?;
        Ok(pass.room.x)
    }

    /// Numbers and rotary tables of the tokens.
    fn upload_tokens(&self, inputs: &[RowInput<'_>], room: &Room) -> Result<(), ModelError> {
        let vocab = self.config.vocab_size;
        let mut ids = Vec::with_capacity(inputs.len());
        let mut places = Vec::with_capacity(inputs.len());
        for row in inputs {
            for id in row.ids {
                if *id as usize >= vocab {
                    let message = format!("token {id} is not below {vocab}");
                    return Err(ModelError::invalid("prompt", message));
                }
                ids.push(id.to_le_bytes());
            }
            places.extend(positions(row.start..row.start + row.ids.len(), row.images)?);
        }
        room.ids.write_bytes(ids.as_flattened())?;
        let table = rope_table(&places, self.config.head_dim, self.config.rope_theta)?;
        let bytes =
            |t: &kernels::Tensor| Ok::<_, ModelError>(bytemuck::cast_slice(t.as_f32()?).to_vec());
        room.cos.write_bytes(&bytes(&table.cos)?)?;
        Ok(room.sin.write_bytes(&bytes(&table.sin)?)?)
    }
}

impl Matrix {
    fn decoded(&self) -> DecodeWeights<'_> {
        DecodeWeights {
            data: &self.data,
            scales: self.scale.as_ref(),
        }
    }
}

impl Pass<'_> {
    /// The stream behind a layer.
    fn between(&self) -> DecodeSource<'_> {
        let (x, outputs) = (&self.room.behind, &self.room.outputs);
        match &self.added {
            Some(sum) => DecodeSource::Parts { x, sum },
            None => DecodeSource::Experts { x, outputs },
        }
    }

    /// When a kernel starts that reads a sum: what brings the parts of other ranks may be no kernel of ours.
    fn behind_sum(&self) -> Start {
        match &self.ranks {
            Some((_, parts)) if !parts.is_direct() => Start::InOrder,
            _ => self.start,
        }
    }

    /// Room for what the ranks add next.
    fn sum(&mut self) -> Result<Option<PartSum>, ModelError> {
        let tokens = self.routing.tokens();
        let next = self.ranks.as_mut().map(|(_, parts)| parts.next(tokens));
        Ok(next.transpose()?)
    }

    /// Brings this rank's part of `sum` to the others, and theirs here. It is made of the outputs of the experts, or is
    /// there already.
    fn spread(&self, sum: &PartSum, of_experts: bool) -> Result<(), ModelError> {
        let Some((group, parts)) = &self.ranks else {
            return Ok(());
        };
        let outputs = of_experts.then_some((&self.room.outputs, &self.routing));
        parts.spread(sum, outputs, self.start)?;
        if !sum.is_direct() {
            group.gather(sum.all(), Lane::Compute)?;
        }
        Ok(())
    }

    fn norm<'a>(&self, weight: &'a GpuTensor) -> RmsNorm<'a> {
        let eps = self.shape.eps;
        RmsNorm { weight, eps }
    }

    fn enter(
        &self,
        source: DecodeSource<'_>,
        norm: Option<&GpuTensor>,
        start: Start,
    ) -> Result<(), ModelError> {
        let enter = DecodeEnter {
            source,
            out: &self.room.x,
            norm: norm.map(|weight| (self.norm(weight), &self.room.h)),
        };
        Ok(decode_enter(enter, &self.routing, start)?)
    }

    /// Attention; the parts of its sum where there are several ranks.
    fn attend(
        &mut self,
        index: usize,
        small: &LayerSmall,
        block: &LayerBlock,
    ) -> Result<Option<PartSum>, ModelError> {
        let sum = self.sum()?;
        let (room, start) = (&self.room, self.start);
        decode_dense(&room.qkv, &room.h, block.qkv.decoded(), start)?;
        let of = DecodeAttention {
            qkv: &room.qkv,
            cos: &room.cos,
            sin: &room.sin,
            q_norm: small.q_norm.as_ref(),
            k_norm: small.k_norm.as_ref(),
            eps: self.shape.eps,
            scale: 1.0 / (self.shape.heads.dim as f32).sqrt(),
            layer: index,
        };
        decode_attention(of, self.rows, &self.arena, &room.mixed, start)?;
        let own = sum.as_ref().map(PartSum::own).transpose()?;
        let to = own.as_ref().unwrap_or(&room.projected);
        decode_dense(to, &room.mixed, block.output.decoded(), start)?;
        if let Some(sum) = &sum {
            self.spread(sum, false)?;
        }
        Ok(sum)
    }

    /// The experts, after `projected` or what is its place where there are several ranks.
    fn experts(
        &mut self,
        projected: Option<&PartSum>,
        small: &LayerSmall,
        block: &LayerBlock,
    ) -> Result<(), ModelError> {
        let next = self.sum()?;
        let (room, routing, start) = (&self.room, &self.routing, self.start);
        let route = DecodeRoute {
            x: &room.x,
            add: projected.map_or(DecodeAdded::Whole(&room.projected), DecodeAdded::Parts),
            out: &room.behind,
            norm: self.norm(&small.post_norm),
            h: &room.h,
            router: &small.router,
            renormalise: self.shape.renormalise,
        };
        decode_route(route, routing, self.behind_sum())?;
        decode_gate_up(
            &room.inner,
            &room.h,
            block.gate_up.decoded(),
            routing,
            start,
        )?;
        decode_down(
            &room.outputs,
            &room.inner,
            block.down.decoded(),
            routing,
            start,
        )?;
        if let Some(sum) = &next {
            self.spread(sum, true)?;
        }
        self.added = next;
        Ok(())
    }
}
