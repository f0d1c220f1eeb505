//! The weights of one layer on the device, and how they get there.

use std::sync::Arc;

use kernels::cuda::{DeviceBuffer, E4m3Rows, Gpu, GpuTensor, GpuType, RouterWeight, quantize_rows};

use super::layout::{LayerDims, LayerLayout, MatrixPiece, Piece, WeightType};
use super::share::{GpuShare, MatrixCut};
use super::source::DeviceSource;
use crate::error::ModelError;

/// A matrix `[groups, out, in]`, with the scales `[groups, out]` of FP8.
#[derive(Clone, Debug)]
pub(crate) struct Matrix {
    pub(crate) data: GpuTensor,
    pub(crate) scale: Option<GpuTensor>,
}

/// What of a layer always stays on the device.
#[derive(Debug)]
pub(crate) struct LayerSmall {
    pub(crate) input_norm: GpuTensor,
    pub(crate) post_norm: GpuTensor,
    pub(crate) q_norm: Option<GpuTensor>,
    pub(crate) k_norm: Option<GpuTensor>,
    pub(crate) router: RouterWeight,
}

/// The large matrices of a layer, in its block.
#[derive(Clone, Debug)]
pub(crate) struct LayerBlock {
    pub(crate) qkv: Matrix,
    pub(crate) output: Matrix,
    pub(crate) gate_up: Matrix,
    pub(crate) down: Matrix,
}

/// Prepares weights one matrix at a time.
#[derive(Debug)]
pub(crate) struct Loader<'a> {
    gpu: Arc<Gpu>,
    source: DeviceSource<'a>,
    share: &'a GpuShare,
    weights: WeightType,
    /// Room for the largest matrix in bf16, where it is quantised from there.
    staging: Option<Arc<DeviceBuffer>>,
}

/// A stored matrix and what of it is wanted.
struct Stored {
    name: String,
    shape: [usize; 2],
    cut: MatrixCut,
}

fn view(block: &Arc<DeviceBuffer>, piece: &Piece) -> Result<GpuTensor, ModelError> {
    Ok(GpuTensor::view(
        block,
        piece.offset,
        &piece.dims,
        piece.dtype,
    )?)
}

impl Matrix {
    fn of(block: &Arc<DeviceBuffer>, piece: &MatrixPiece) -> Result<Self, ModelError> {
        let scale = piece.scale.as_ref().map(|s| view(block, s)).transpose()?;
        let data = view(block, &piece.data)?;
        Ok(Self { data, scale })
    }

    /// Matrix `group` alone, `[out, in]` and `[out]`.
    pub(crate) fn group(&self, group: usize) -> Result<(GpuTensor, Option<GpuTensor>), ModelError> {
        let dims = &self.data.shape()[1..];
        let data = self.data.narrow0(group, 1)?.reshape(dims)?;
        let scale = self.scale.as_ref();
        let scale = scale.map(|s| s.narrow0(group, 1)?.reshape(&dims[..1]));
        Ok((data, scale.transpose()?))
    }
}

impl LayerBlock {
    /// The tensors of a block of this layout.
    pub(crate) fn of(block: &Arc<DeviceBuffer>, layout: &LayerLayout) -> Result<Self, ModelError> {
        Ok(Self {
            qkv: Matrix::of(block, &layout.qkv)?,
            output: Matrix::of(block, &layout.output)?,
            gate_up: Matrix::of(block, &layout.gate_up)?,
            down: Matrix::of(block, &layout.down)?,
        })
    }
}

impl<'a> Loader<'a> {
    /// A loader for layers of these sizes.
    pub(crate) fn new(
        gpu: &Arc<Gpu>,
        (source, share): (DeviceSource<'a>, &'a GpuShare),
        weights: WeightType,
        dims: &[LayerDims],
    ) -> Result<Self, ModelError> {
        let largest = |d: &LayerDims| d.hidden * d.qkv_width().max(2 * d.inner).max(d.q_width());
        let elements = dims.iter().map(largest).max().unwrap_or(0);
        let staging = (weights == WeightType::Fp8).then(|| {
            let bytes = elements * GpuType::Bf16.bytes();
            DeviceBuffer::new(gpu, bytes, "staging of weights").map(Arc::new)
        });
        Ok(Self {
            gpu: gpu.clone(),
            source,
            share,
            weights,
            staging: staging.transpose()?,
        })
    }

    /// Fills the block of layer `index` of the model.
    pub(crate) fn fill(
        &self,
        index: usize,
        dims: &LayerDims,
        block: &LayerBlock,
    ) -> Result<(), ModelError> {
        let at = |name: &str| format!("model.layers.{index}.{name}.weight");
        let (h, shape, share) = (dims.hidden, self.share.shard().shape(), self.share);
        let qkv = Stored {
            name: at("self_attn.qkv_proj"),
            shape: [(shape.heads + 2 * shape.kv_heads) * dims.head_dim, h],
            cut: share.qkv(),
        };
        self.matrix(&qkv, &block.qkv, 0)?;
        let output = Stored {
            name: at("self_attn.o_proj"),
            shape: [h, shape.heads * dims.head_dim],
            cut: share.output(),
        };
        self.matrix(&output, &block.output, 0)?;
        for group in 0..dims.groups() {
            let expert = if group < dims.experts {
                format!("mlp.experts.{}", dims.first_expert + group)
            } else {
                "mlp.shared_mlp".to_owned()
            };
            let gate_up = Stored {
                name: at(&format!("{expert}.gate_and_up_proj")),
                shape: [2 * dims.whole_inner, h],
                cut: share.gate_up(dims.whole_inner)?,
            };
            self.matrix(&gate_up, &block.gate_up, group)?;
            let down = Stored {
                name: at(&format!("{expert}.down_proj")),
                shape: [h, dims.whole_inner],
                cut: share.down(),
            };
            self.matrix(&down, &block.down, group)?;
        }
        Ok(())
    }

    /// The norms and the router of layer `index`.
    pub(crate) fn small(&self, index: usize, dims: &LayerDims) -> Result<LayerSmall, ModelError> {
        let at = |name: &str| format!("model.layers.{index}.{name}.weight");
        let norm = |name: &str, width| self.source.bf16(&self.gpu, &at(name), &[width]);
        let head = |name: &str| dims.qk_norm.then(|| norm(name, dims.head_dim)).transpose();
        let shape = [dims.routed, dims.hidden];
        let router = self.source.f32(&self.gpu, &at("mlp.gate.wg"), &shape)?;
        Ok(LayerSmall {
            input_norm: norm("input_layernorm", dims.hidden)?,
            post_norm: norm("post_attention_layernorm", dims.hidden)?,
            q_norm: head("self_attn.query_layernorm")?,
            k_norm: head("self_attn.key_layernorm")?,
            router: RouterWeight::new(&router)?,
        })
    }

    fn matrix(&self, stored: &Stored, to: &Matrix, group: usize) -> Result<(), ModelError> {
        let (data, scale) = to.group(group)?;
        let (name, shape) = (&stored.name, &stored.shape);
        match (self.weights, scale, &self.staging) {
            (WeightType::Fp8, Some(scales), Some(staging)) => {
                let wide = GpuTensor::view(staging, 0, data.shape(), GpuType::Bf16)?;
                self.source.fill_part(name, shape, &stored.cut, &wide)?;
                let codes = &data;
                let scales = &scales;
                Ok(quantize_rows(&wide, E4m3Rows { codes, scales })?)
            }
            _ => self.source.fill_part(name, shape, &stored.cut, &data),
        }
    }
}
