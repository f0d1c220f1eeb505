//! Passes of one token a row, at most 32 rows: kernels made for reading weights once, and nothing between them that
//! waits for the host.
//!
//! Seven launches a layer, each of which may begin while the one before it ends: what it needs of the weights
//! is on its way by then. A row's bits do not depend on the other rows, but they are not those of a packed pass.

use std::sync::Arc;

use kernels::cuda::{
    DecodeAttention, DecodeEnter, DecodeProduct, DecodeRoute, DecodeRouting, DecodeRow, DecodeRows,
    DecodeSource, DecodeWeights, Gpu, GpuTensor, GpuType, RmsNorm, Start, decode_activation,
    decode_attention, decode_dense, decode_down, decode_enter, decode_gate_up, decode_route,
};

use super::GpuModel;
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
        }))
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
        let pass = Pass {
            room,
            rows,
            routing,
            arena,
            shape: self.shape,
            start: if stays { Start::Early } else { Start::InOrder },
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
                (pass.between(), pass.start)
            };
            pass.enter(source, Some(&small.input_norm), start)?;
            pass.attend(index, small, &block)?;
            pass.experts(small, &block)?;
            self.store.done(index)?;
        }
        pass.enter(pass.between(), None, pass.start)?;
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
        DecodeSource::Experts {
            x: &self.room.behind,
            outputs: &self.room.outputs,
        }
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

    fn attend(
        &self,
        index: usize,
        small: &LayerSmall,
        block: &LayerBlock,
    ) -> Result<(), ModelError> {
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
        Ok(decode_dense(
            &room.projected,
            &room.mixed,
            block.output.decoded(),
            start,
        )?)
    }

    fn experts(&self, small: &LayerSmall, block: &LayerBlock) -> Result<(), ModelError> {
        let (room, routing, start) = (&self.room, &self.routing, self.start);
        let route = DecodeRoute {
            x: &room.x,
            add: &room.projected,
            out: &room.behind,
            norm: self.norm(&small.post_norm),
            h: &room.h,
            router: &small.router,
            renormalise: self.shape.renormalise,
        };
        decode_route(route, routing, start)?;
        decode_gate_up(
            &room.inner,
            &room.h,
            block.gate_up.decoded(),
            routing,
            start,
        )?;
        Ok(decode_down(
            &room.outputs,
            &room.inner,
            block.down.decoded(),
            routing,
            start,
        )?)
    }
}
