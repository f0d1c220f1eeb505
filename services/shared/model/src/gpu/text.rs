//! The ends of the decoder that text needs: token embedding, final norm and vocabulary.

use std::sync::{Arc, Mutex, PoisonError};

use kernels::cuda::{
    DECODE_TOKENS, DecodeProduct, DecodeWeights, DeviceBuffer, Finish, GpuTensor, GpuType,
    NormOutput, PinnedBuffer, RmsNorm, RowIndex, Start, decode_dense, gather_rows, gemm, rms_norm,
};

use super::convs::From;
use crate::config::ModelConfig;
use crate::error::ModelError;

/// Embedding and vocabulary on the device.
#[derive(Debug)]
pub(crate) struct TextEnds {
    /// bf16 `[vocab, hidden]`.
    embedding: GpuTensor,
    norm: GpuTensor,
    /// bf16 `[1, vocab, hidden]`.
    projection: GpuTensor,
    eps: f32,
    /// Memory of logits, used again once nobody has them.
    room: Mutex<Option<Arc<DeviceBuffer>>>,
    /// Where logits arrive on the host: from pageable memory the link would take ten times as long.
    landing: Mutex<Option<PinnedBuffer>>,
}

impl TextEnds {
    pub(super) fn load(from: From<'_>, config: &ModelConfig) -> Result<Self, ModelError> {
        let table = [config.vocab_size, config.hidden_size];
        let (gpu, source) = (from.gpu, from.source);
        let projection = source.bf16(gpu, "lm_head.weight", &table)?;
        Ok(Self {
            embedding: source.bf16(gpu, "model.wte.weight", &table)?,
            norm: source.bf16(gpu, "model.ln_f.weight", &[config.hidden_size])?,
            projection: projection.reshape(&[1, table[0], table[1]])?,
            eps: config.rms_norm_eps as f32,
            room: Mutex::new(None),
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

    /// F32 vocabulary logits `[rows, vocab]` of hidden states `[rows, hidden]`.
    pub(super) fn logits(&self, hidden: &GpuTensor) -> Result<GpuTensor, ModelError> {
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
        let (rows, vocab, width) = (hidden.dim(0), self.projection.dim(1), hidden.dim(1));
        let logits = self.room(hidden, [rows, vocab])?;
        let few = (1..=DECODE_TOKENS).contains(&rows);
        if few && DecodeProduct::Dense.takes(width, GpuType::Bf16) {
            let weights = DecodeWeights {
                data: &self.projection,
                scales: None,
            };
            decode_dense(&logits, &normed, weights, Start::InOrder)?;
        } else {
            let weights = self.projection.reshape(&[vocab, width])?;
            gemm(&logits, &normed, &weights, Finish::Store)?;
        }
        Ok(logits)
    }

    /// F32 logits with unknown contents, in the memory of earlier ones where it is free and large enough:
    /// allocating would wait for the device.
    fn room(&self, hidden: &GpuTensor, dims: [usize; 2]) -> Result<GpuTensor, ModelError> {
        let bytes = dims[0] * dims[1] * GpuType::F32.bytes();
        let mut room = self.room.lock().unwrap_or_else(PoisonError::into_inner);
        let free = room.take().filter(|buffer| Arc::strong_count(buffer) == 1);
        let buffer = match free.filter(|buffer| buffer.bytes() >= bytes) {
            Some(buffer) => buffer,
            None => Arc::new(DeviceBuffer::new(hidden.gpu(), bytes, "text head")?),
        };
        *room = Some(buffer.clone());
        Ok(GpuTensor::view(&buffer, 0, &dims, GpuType::F32)?)
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
