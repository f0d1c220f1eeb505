//! Where the device's weights come from: a checkpoint, or a generator that makes them in place.

use std::sync::Arc;

use kernels::Tensor;
use kernels::cuda::{Gpu, GpuTensor, GpuType, RowIndex, fill_random, gather_rows};

use super::share::MatrixCut;
use crate::error::ModelError;
use crate::random::{name_hash, random_scale};
use crate::weights::Checkpoint;

/// Hands out weights by their checkpoint name.
#[derive(Clone, Copy, Debug)]
pub(crate) enum DeviceSource<'a> {
    /// As stored.
    Stored(&'a Checkpoint),
    /// Equal to those of [`crate::Model::random`] with this seed.
    Random { seed: u64 },
}

impl DeviceSource<'_> {
    /// Writes tensor `name`, whose shape must be `shape`, into `out` as bf16.
    pub(crate) fn fill(
        &self,
        name: &str,
        shape: &[usize],
        out: &GpuTensor,
    ) -> Result<(), ModelError> {
        match self {
            Self::Stored(checkpoint) => {
                let stored = checkpoint.tensor(name, shape)?;
                let narrow = narrowed(&stored)?;
                Ok(out.write_bytes(bytemuck::cast_slice(&narrow))?)
            }
            Self::Random { seed } if shape.len() >= 2 => Ok(fill_random(
                out,
                seed ^ name_hash(name),
                random_scale(shape),
            )?),
            Self::Random { .. } => {
                let narrow = vec![half::bf16::from_f32(unit_or_zero(name)); out.numel()];
                Ok(out.write_bytes(bytemuck::cast_slice(&narrow))?)
            }
        }
    }

    /// Writes a part of matrix `name`, whose whole shape must be `shape`, into `out` as bf16.
    pub(crate) fn fill_part(
        &self,
        name: &str,
        shape: &[usize; 2],
        cut: &MatrixCut,
        out: &GpuTensor,
    ) -> Result<(), ModelError> {
        if *cut == MatrixCut::Whole {
            return self.fill(name, shape, out);
        }
        let whole = self.bf16(out.gpu(), name, shape)?;
        match cut {
            MatrixCut::Whole => Ok(out.copy_from(&whole)?),
            MatrixCut::Rows(ranges) => {
                let mut at = 0;
                for range in ranges {
                    let rows = whole.narrow0(range.start, range.len())?;
                    out.narrow0(at, range.len())?.copy_from(&rows)?;
                    at += range.len();
                }
                Ok(())
            }
            MatrixCut::Columns { parts, index } => {
                // A row of the whole is `parts` rows of that width, of which one is taken.
                let (rows, width) = (shape[0], shape[1] / parts);
                let wanted: Vec<u32> = (0..rows)
                    .map(|row| u32::try_from(row * parts + index).unwrap_or(u32::MAX))
                    .collect();
                let wanted = RowIndex::new(out.gpu(), &wanted, rows * parts)?;
                let whole = whole.reshape(&[rows * parts, width])?;
                Ok(gather_rows(&whole, &wanted, out)?)
            }
        }
    }

    /// A new bf16 tensor of it.
    pub(crate) fn bf16(
        &self,
        gpu: &Arc<Gpu>,
        name: &str,
        shape: &[usize],
    ) -> Result<GpuTensor, ModelError> {
        let out = GpuTensor::new(gpu, shape, GpuType::Bf16, "weights")?;
        self.fill(name, shape, &out)?;
        Ok(out)
    }

    /// A new F32 tensor of it.
    pub(crate) fn f32(
        &self,
        gpu: &Arc<Gpu>,
        name: &str,
        shape: &[usize],
    ) -> Result<GpuTensor, ModelError> {
        let host = self.host(gpu, name, shape)?;
        Ok(GpuTensor::from_f32(gpu, shape, host.as_f32()?, "weights")?)
    }

    /// It on the host, F32.
    pub(crate) fn host(
        &self,
        gpu: &Arc<Gpu>,
        name: &str,
        shape: &[usize],
    ) -> Result<Tensor, ModelError> {
        match self {
            Self::Stored(checkpoint) => checkpoint.tensor_f32(name, shape),
            Self::Random { .. } if shape.len() >= 2 => {
                let made = self.bf16(gpu, name, shape)?;
                Ok(Tensor::from_f32(shape, made.to_f32_vec()?)?)
            }
            Self::Random { .. } => {
                let numel = shape.iter().product();
                Ok(Tensor::from_f32(shape, vec![unit_or_zero(name); numel])?)
            }
        }
    }
}

/// Norm weights are 1 and biases 0, as in [`crate::Model::random`].
fn unit_or_zero(name: &str) -> f32 {
    if name.ends_with("bias") { 0.0 } else { 1.0 }
}

/// The values as bf16.
fn narrowed(tensor: &Tensor) -> Result<Vec<half::bf16>, ModelError> {
    if let Ok(values) = tensor.as_bf16() {
        return Ok(values.to_vec());
    }
    let values = tensor.as_f32()?.iter();
    Ok(values.map(|v| half::bf16::from_f32(*v)).collect())
}
