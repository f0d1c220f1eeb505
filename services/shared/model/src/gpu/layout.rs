//! Where the weights of one layer lie in one block of memory.
//!
//! A layer is one contiguous block, so that it can stay on the device or travel there as one copy.

use kernels::cuda::GpuType;

use super::share::GpuShare;
use crate::config::ModelConfig;
use crate::error::ModelError;

/// Alignment of every piece, in bytes: what tensor maps and wide loads want.
const ALIGNMENT: usize = 256;

/// How the large matrices of a layer are held.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WeightType {
    /// As released.
    #[default]
    Bf16,
    /// 8-bit floats with one scale for each output channel, made when the model is opened.
    Fp8,
}

impl WeightType {
    pub(super) fn element(self) -> GpuType {
        match self {
            Self::Bf16 => GpuType::Bf16,
            Self::Fp8 => GpuType::E4m3,
        }
    }
}

/// Sizes of what one rank has of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LayerDims {
    pub(crate) hidden: usize,
    pub(crate) q_heads: usize,
    pub(crate) kv_heads: usize,
    pub(crate) head_dim: usize,
    /// Routed experts that are here, and the first of them.
    pub(crate) experts: usize,
    pub(crate) first_expert: usize,
    /// All routed experts.
    pub(crate) routed: usize,
    pub(crate) top_k: usize,
    /// Inner width of every expert, as far as it is here.
    pub(crate) inner: usize,
    /// The whole inner width.
    pub(crate) whole_inner: usize,
    /// Whether one more expert sees every token.
    pub(crate) shared: bool,
    pub(crate) qk_norm: bool,
}

impl LayerDims {
    /// Of layer `index`.
    ///
    /// # Errors
    /// `Unimplemented` for a shared expert of another width than the routed ones.
    pub(crate) fn new(
        config: &ModelConfig,
        share: &GpuShare,
        index: usize,
    ) -> Result<Self, ModelError> {
        let moe = &config.layers[index];
        if let Some(width) = moe.shared_intermediate.filter(|w| *w != moe.intermediate) {
            return Err(ModelError::Unimplemented(format!(
                "config field `num_shared_expert`: a shared expert of width {width} beside experts of width {} on a gpu",
                moe.intermediate
            )));
        }
        let (q_heads, kv_heads) = share.projected();
        let here = share.experts(moe.experts)?;
        Ok(Self {
            hidden: config.hidden_size,
            q_heads,
            kv_heads,
            head_dim: config.head_dim,
            experts: here.len(),
            first_expert: here.start,
            routed: moe.experts,
            top_k: moe.top_k,
            inner: share.inner(moe.intermediate),
            whole_inner: moe.intermediate,
            shared: moe.shared_intermediate.is_some(),
            qk_norm: config.use_qk_norm,
        })
    }

    /// Matrices of the grouped product: the routed experts, then the shared one.
    pub(crate) fn groups(&self) -> usize {
        self.experts + usize::from(self.shared)
    }

    /// Most expert inputs of `tokens` tokens, of which `shared` go to the shared expert.
    pub(crate) fn expert_rows(&self, tokens: usize, shared: usize) -> usize {
        tokens * self.top_k + if self.shared { shared } else { 0 }
    }

    /// Columns of the joint projection.
    pub(crate) fn qkv_width(&self) -> usize {
        (self.q_heads + 2 * self.kv_heads) * self.head_dim
    }

    /// Columns of all query heads.
    pub(crate) fn q_width(&self) -> usize {
        self.q_heads * self.head_dim
    }
}

/// One tensor within the block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    /// Bytes from the start of the block.
    pub(crate) offset: usize,
    pub(crate) dims: Vec<usize>,
    pub(crate) dtype: GpuType,
}

/// A matrix `[groups, out, in]` and, where it is FP8, its scales `[groups, out]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct MatrixPiece {
    pub(crate) data: Piece,
    pub(crate) scale: Option<Piece>,
}

/// The whole block. Norms and the router are not in it: they are small and stay on the device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct LayerLayout {
    pub(crate) qkv: MatrixPiece,
    pub(crate) output: MatrixPiece,
    /// As in the checkpoint: the up half, then the gate half.
    pub(crate) gate_up: MatrixPiece,
    pub(crate) down: MatrixPiece,
    /// Size of the block.
    pub(crate) bytes: usize,
}

/// Hands out places one after the other.
#[derive(Default)]
struct Cursor(usize);

impl Cursor {
    fn piece(&mut self, dims: &[usize], dtype: GpuType) -> Piece {
        let offset = self.0.next_multiple_of(ALIGNMENT);
        self.0 = offset + dims.iter().product::<usize>() * dtype.bytes();
        Piece {
            offset,
            dims: dims.to_vec(),
            dtype,
        }
    }

    fn matrix(&mut self, dims: [usize; 3], weights: WeightType) -> MatrixPiece {
        let data = self.piece(&dims, weights.element());
        let scaled = weights == WeightType::Fp8;
        let scale = scaled.then(|| self.piece(&dims[..2], GpuType::F32));
        MatrixPiece { data, scale }
    }
}

impl LayerLayout {
    /// The block of a layer of these sizes.
    pub(crate) fn new(dims: &LayerDims, weights: WeightType) -> Self {
        let mut at = Cursor::default();
        let (h, groups) = (dims.hidden, dims.groups());
        Self {
            qkv: at.matrix([1, dims.qkv_width(), h], weights),
            output: at.matrix([1, h, dims.q_width()], weights),
            gate_up: at.matrix([groups, 2 * dims.inner, h], weights),
            down: at.matrix([groups, h, dims.inner], weights),
            bytes: at.0.next_multiple_of(ALIGNMENT),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dims() -> LayerDims {
        LayerDims {
            hidden: 4096,
            q_heads: 32,
            kv_heads: 8,
            head_dim: 128,
            experts: 64,
            first_expert: 0,
            routed: 64,
            top_k: 8,
            inner: 3072,
            whole_inner: 3072,
            shared: true,
            qk_norm: true,
        }
    }

    fn pieces(layout: &LayerLayout) -> Vec<&Piece> {
        let matrices = [&layout.qkv, &layout.output, &layout.gate_up, &layout.down];
        let mut all = Vec::new();
        for matrix in matrices {
            all.push(&matrix.data);
            all.extend(&matrix.scale);
        }
        all
    }

    #[test]
    fn pieces_of_a_layer_are_aligned_and_do_not_overlap() {
        for weights in [WeightType::Bf16, WeightType::Fp8] {
            for shared in [true, false] {
                let dims = LayerDims { shared, ..dims() };
                let layout = LayerLayout::new(&dims, weights);
                let mut spans: Vec<_> = pieces(&layout)
                    .into_iter()
                    .map(|p| {
                        assert_eq!(p.offset % ALIGNMENT, 0);
                        let bytes = p.dims.iter().product::<usize>() * p.dtype.bytes();
                        p.offset..p.offset + bytes
                    })
                    .collect();
                spans.sort_by_key(|s| s.start);
                assert!(spans.windows(2).all(|w| w[0].end <= w[1].start));
                assert!(spans.last().unwrap().end <= layout.bytes);
            }
        }
    }

    #[test]
    fn a_layer_of_the_released_model_has_the_bytes_the_specification_says() {
        // 2 495 873 280 parameters without the norms over a token, less the router's and those of the heads.
        let parameters = 2_495_873_280_usize - 64 * 4096 - 2 * 128;
        let bf16 = LayerLayout::new(&dims(), WeightType::Bf16).bytes;
        assert!(bf16.abs_diff(2 * parameters) < 16 * ALIGNMENT);
        let fp8 = LayerLayout::new(&dims(), WeightType::Fp8).bytes;
        assert!(fp8 < bf16 * 51 / 100, "{fp8} of {bf16}");
    }
}
