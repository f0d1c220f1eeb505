//! The weights of one layer on the device, and how they get there.

use std::sync::{Arc, Mutex, PoisonError};

use kernels::DType;
use kernels::cuda::{
    DeviceBuffer, E4m3Rows, Gpu, GpuTensor, GpuType, RouterWeight, UploadRing, Uploader,
    quantize_rows,
};

use super::layout::{LayerDims, LayerLayout, MatrixPiece, Piece, WeightType};
use super::share::{GpuShare, MatrixCut};
use super::source::DeviceSource;
use crate::error::ModelError;
use crate::weights::{Checkpoint, Part};

/// Most threads that read a checkpoint: more only wait for the link.
const READERS: usize = 12;

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
    /// Between a checkpoint and the device.
    uploader: Option<Mutex<Uploader>>,
}

/// A stored matrix, what of it is wanted, and where.
struct Stored {
    name: String,
    shape: [usize; 2],
    cut: MatrixCut,
    data: GpuTensor,
    scales: Option<GpuTensor>,
}

impl Stored {
    fn part(&self) -> Part {
        let whole = Part::whole(&self.name, &self.shape, DType::Bf16);
        match &self.cut {
            MatrixCut::Whole => whole,
            MatrixCut::Rows(rows) => whole.with_rows(rows.clone()),
            MatrixCut::Columns { parts, index } => {
                let width = self.shape[1] / parts;
                whole.with_columns(index * width..(index + 1) * width)
            }
        }
    }
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
        let stored = matches!(source, DeviceSource::Stored(_));
        let uploader = stored.then(|| Uploader::new(gpu, &UploadRing::default()));
        Ok(Self {
            gpu: gpu.clone(),
            source,
            share,
            weights,
            staging: staging.transpose()?,
            uploader: uploader.transpose()?.map(Mutex::new),
        })
    }

    /// Fills the block of layer `index` of the model.
    pub(crate) fn fill(
        &self,
        index: usize,
        dims: &LayerDims,
        block: &LayerBlock,
    ) -> Result<(), ModelError> {
        let list = self.matrices(index, dims, block)?;
        if let (DeviceSource::Stored(checkpoint), Some(uploader)) = (&self.source, &self.uploader) {
            let mut uploader = uploader.lock().unwrap_or_else(PoisonError::into_inner);
            return self.upload(checkpoint, &list, &mut uploader);
        }
        list.iter().try_for_each(|matrix| {
            let to = self.landing(matrix)?;
            let source = &self.source;
            source.fill_part(&matrix.name, &matrix.shape, &matrix.cut, &to)?;
            self.arrived(matrix, &to)
        })
    }

    /// Reads, converts and copies all of `list` at the same time, and quantises each as it arrives.
    fn upload(
        &self,
        checkpoint: &Checkpoint,
        list: &[Stored],
        uploader: &mut Uploader,
    ) -> Result<(), ModelError> {
        let parts: Vec<(Part, GpuTensor)> = list
            .iter()
            .map(|matrix| Ok((matrix.part(), self.landing(matrix)?)))
            .collect::<Result<_, ModelError>>()?;
        let mut arrived = |i: usize, uploader: &Uploader| {
            self.arrived(&list[i], &parts[i].1)?;
            // The next one may land where this one is quantised from.
            Ok(uploader.hold(&self.gpu)?)
        };
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        checkpoint.upload(&parts, threads.min(READERS), uploader, &mut arrived)?;
        Ok(())
    }

    /// Where a matrix arrives in bf16.
    fn landing(&self, matrix: &Stored) -> Result<GpuTensor, ModelError> {
        let Some(staging) = &self.staging else {
            return Ok(matrix.data.clone());
        };
        let dims = matrix.data.shape();
        Ok(GpuTensor::view(staging, 0, dims, GpuType::Bf16)?)
    }

    /// Quantises a matrix that arrived elsewhere.
    fn arrived(&self, matrix: &Stored, wide: &GpuTensor) -> Result<(), ModelError> {
        let (WeightType::Fp8, Some(scales)) = (self.weights, &matrix.scales) else {
            return Ok(());
        };
        let codes = &matrix.data;
        Ok(quantize_rows(wide, E4m3Rows { codes, scales })?)
    }

    /// The matrices of layer `index` of the model, in the order in which checkpoints have them.
    fn matrices(
        &self,
        index: usize,
        dims: &LayerDims,
        block: &LayerBlock,
    ) -> Result<Vec<Stored>, ModelError> {
        let (h, shape, share) = (dims.hidden, self.share.shard().shape(), self.share);
        let mut list = Vec::with_capacity(2 + 2 * dims.groups());
        let mut want = |name: String, shape: [usize; 2], cut, (to, group): (&Matrix, usize)| {
            let (data, scales) = to.group(group)?;
            list.push(Stored {
                name: format!("model.layers.{index}.{name}.weight"),
                shape,
                cut,
                data,
                scales,
            });
            Ok::<_, ModelError>(())
        };
        let qkv = [(shape.heads + 2 * shape.kv_heads) * dims.head_dim, h];
        let output = [h, shape.heads * dims.head_dim];
        want(
            "self_attn.qkv_proj".into(),
            qkv,
            share.qkv(),
            (&block.qkv, 0),
        )?;
        want(
            "self_attn.o_proj".into(),
            output,
            share.output(),
            (&block.output, 0),
        )?;
        let inner = dims.whole_inner;
        for group in 0..dims.groups() {
            let expert = if group < dims.experts {
                format!("mlp.experts.{}", dims.first_expert + group)
            } else {
                "mlp.shared_mlp".to_owned()
            };
            let (gate_up, down) = (share.gate_up(inner)?, share.down());
            let name = format!("{expert}.gate_and_up_proj");
            want(name, [2 * inner, h], gate_up, (&block.gate_up, group))?;
            let name = format!("{expert}.down_proj");
            want(name, [h, inner], down, (&block.down, group))?;
        }
        Ok(list)
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
}
