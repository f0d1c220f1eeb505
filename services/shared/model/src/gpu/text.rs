//! The ends of the decoder that text needs: token embedding, final norm and vocabulary.

use kernels::cuda::{
    Finish, GpuTensor, GpuType, NormOutput, RmsNorm, RowIndex, gather_rows, gemm, rms_norm,
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
    /// bf16 `[vocab, hidden]`.
    projection: GpuTensor,
    eps: f32,
}

impl TextEnds {
    pub(super) fn load(from: From<'_>, config: &ModelConfig) -> Result<Self, ModelError> {
        let table = [config.vocab_size, config.hidden_size];
        let (gpu, source) = (from.gpu, from.source);
        Ok(Self {
            embedding: source.bf16(gpu, "model.wte.weight", &table)?,
            norm: source.bf16(gpu, "model.ln_f.weight", &[config.hidden_size])?,
            projection: source.bf16(gpu, "lm_head.weight", &table)?,
            eps: config.rms_norm_eps as f32,
        })
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
        let dims = [hidden.dim(0), self.projection.dim(0)];
        let logits = GpuTensor::new(gpu, &dims, GpuType::F32, "text head")?;
        gemm(&logits, &normed, &self.projection, Finish::Store)?;
        Ok(logits)
    }
}
