//! The ends of the decoder that text needs: token embedding, final norm and vocabulary.

use std::sync::{Arc, Mutex, PoisonError};

use kernels::cuda::{
    DECODE_TOKENS, DecodeProduct, DecodeWeights, DeviceBuffer, Finish, GpuTensor, GpuType, Lane,
    NormOutput, PinnedBuffer, RmsNorm, RowIndex, Start, decode_dense, gather_rows, gemm, rms_norm,
};

use super::convs::From;
use super::group::GpuGroup;
use super::share::{GpuShare, MatrixCut};
use crate::config::ModelConfig;
use crate::error::ModelError;

type Room = Mutex<Option<Arc<DeviceBuffer>>>;

/// Embedding and vocabulary on the device.
#[derive(Debug)]
pub(crate) struct TextEnds {
    /// bf16 `[vocab, hidden]`.
    embedding: GpuTensor,
    norm: GpuTensor,
    /// bf16 `[1, vocab, hidden]`, or as many rows of it as each rank has.
    projection: GpuTensor,
    vocab: usize,
    eps: f32,
    /// Memory of logits, used again once nobody has them: of whole ones, and of the parts of ranks.
    room: [Room; 2],
    /// Where logits arrive on the host: from pageable memory the link would take ten times as long.
    landing: Mutex<Option<PinnedBuffer>>,
}

impl TextEnds {
    pub(super) fn load(
        from: From<'_>,
        config: &ModelConfig,
        share: &GpuShare,
    ) -> Result<Self, ModelError> {
        let table = [config.vocab_size, config.hidden_size];
        let (gpu, source) = (from.gpu, from.source);
        let own = share.vocabulary(config.vocab_size);
        let projection = GpuTensor::new(gpu, &[own.len(), table[1]], GpuType::Bf16, "weights")?;
        let cut = if own.len() == table[0] {
            MatrixCut::Whole
        } else {
            MatrixCut::Rows(vec![own.clone()])
        };
        source.fill_part("lm_head.weight", &table, &cut, &projection)?;
        Ok(Self {
            embedding: source.bf16(gpu, "model.wte.weight", &table)?,
            norm: source.bf16(gpu, "model.ln_f.weight", &[config.hidden_size])?,
            projection: projection.reshape(&[1, own.len(), table[1]])?,
            vocab: table[0],
            eps: config.rms_norm_eps as f32,
            room: Default::default(),
            landing: Mutex::new(None),
        })
    }

    /// bf16 `[vocab, hidden]`.
    pub(super) fn embedding(&self) -> &GpuTensor {
        &self.embedding
    }

    /// Token embeddings into `out [ids, hidden]`.
    pub(super) fn embed(&self, ids: &[u32], out: &GpuTensor) -> Result<(), ModelError> {
        let index = RowIndex::new(out.gpu(), ids, self.embedding.dim(0))?;
        Ok(gather_rows(&self.embedding, &index, out)?)
    }

    /// F32 vocabulary logits `[rows, vocab]` of hidden states `[rows, hidden]`; of `group` each rank computes a part
    /// where the vocabulary is dealt.
    pub(super) fn logits(
        &self,
        hidden: &GpuTensor,
        group: Option<&dyn GpuGroup>,
    ) -> Result<GpuTensor, ModelError> {
        let (rows, own) = (hidden.dim(0), self.projection.dim(1));
        let Some(group) = group.filter(|_| own < self.vocab) else {
            let logits = room(&self.room[0], hidden, &[rows, self.vocab])?;
            self.project(hidden, &logits)?;
            return Ok(logits);
        };
        let (rank, ranks) = (group.rank(), group.ranks());
        let parts = room(&self.room[1], hidden, &[ranks, rows, own])?;
        self.project(hidden, &parts.narrow0(rank, 1)?.reshape(&[rows, own])?)?;
        group.gather(&parts, Lane::Compute)?;
        if rows == 1 {
            return Ok(parts.reshape(&[1, self.vocab])?);
        }
        let logits = room(&self.room[0], hidden, &[rows * ranks, own])?;
        let narrow = |row: usize| u32::try_from(row).unwrap_or(u32::MAX);
        let order: Vec<u32> = (0..rows)
            .flat_map(|row| (0..ranks).map(move |rank| narrow(rank * rows + row)))
            .collect();
        let order = RowIndex::new(hidden.gpu(), &order, ranks * rows)?;
        gather_rows(&parts.reshape(&[ranks * rows, own])?, &order, &logits)?;
        Ok(logits.reshape(&[rows, self.vocab])?)
    }

    /// The rows of the vocabulary that are here, of normed hidden states, into `logits`.
    fn project(&self, hidden: &GpuTensor, logits: &GpuTensor) -> Result<(), ModelError> {
        let gpu = hidden.gpu();
        let normed = GpuTensor::new(gpu, hidden.shape(), GpuType::Bf16, "text head")?;
        let norm = RmsNorm {
            weight: &self.norm,
            eps: self.eps,
        };
        let out = NormOutput {
            rows: Some(&normed),
            e4m3: None,
        };
        rms_norm(hidden, norm, out)?;
        let (rows, own, width) = (hidden.dim(0), self.projection.dim(1), hidden.dim(1));
        let few = (1..=DECODE_TOKENS).contains(&rows);
        if few && DecodeProduct::Dense.takes(width, GpuType::Bf16) {
            let weights = DecodeWeights {
                data: &self.projection,
                scales: None,
            };
            return Ok(decode_dense(logits, &normed, weights, Start::InOrder)?);
        }
        let weights = self.projection.reshape(&[own, width])?;
        Ok(gemm(logits, &normed, &weights, Finish::Store)?)
    }

    /// Each row of F32 logits `[rows, vocab]` on the host, after everything enqueued before.
    pub(super) fn read(&self, logits: &GpuTensor) -> Result<Vec<Vec<f32>>, ModelError> {
        let bytes = logits.bytes();
        let mut landing = self.landing.lock().unwrap_or_else(PoisonError::into_inner);
        let large_enough = landing.take().filter(|memory| memory.bytes() >= bytes);
        let mut memory = match large_enough {
            Some(memory) => memory,
            None => PinnedBuffer::new(logits.gpu(), bytes)?,
        };
        let arrived = &mut memory.as_mut_slice()[..bytes];
        logits.buffer().read(logits.offset(), arrived)?;
        let values: &[f32] = bytemuck::cast_slice(arrived);
        let rows = values.chunks_exact(logits.dim(1));
        let rows = rows.map(<[f32]>::to_vec).collect();
        *landing = Some(memory);
        Ok(rows)
    }
}

/// F32 logits with unknown contents, in the memory of earlier ones where it is free and large enough: allocating would
/// wait for the device.
fn room(room: &Room, hidden: &GpuTensor, dims: &[usize]) -> Result<GpuTensor, ModelError> {
    let bytes = dims.iter().product::<usize>() * GpuType::F32.bytes();
    let mut room = room.lock().unwrap_or_else(PoisonError::into_inner);
    let free = room.take().filter(|buffer| Arc::strong_count(buffer) == 1);
    let buffer = match free.filter(|buffer| buffer.bytes() >= bytes) {
        Some(buffer) => buffer,
        None => Arc::new(DeviceBuffer::new(hidden.gpu(), bytes, "text head")?),
    };
    *room = Some(buffer.clone());
    Ok(GpuTensor::view(&buffer, 0, dims, GpuType::F32)?)
}
