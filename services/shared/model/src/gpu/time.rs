//! Scalars (timestep, guidance, next timestep) as vectors, and what the convolutional ends make of them.
//!
//! Everything here is computed once for all steps of a picture.

use std::sync::Arc;

use kernels::cuda::{Activation, Finish, Gpu, GpuTensor, GpuType, bias_activation, gemm};

use super::source::DeviceSource;
use crate::diffusion::{CODE, code};
use crate::error::ModelError;

/// `x . w^T + bias` with F32 results.
#[derive(Debug)]
pub(crate) struct BiasedLinear {
    pub(super) weight: GpuTensor,
    pub(super) bias: GpuTensor,
}

impl BiasedLinear {
    pub(crate) fn load(
        gpu: &Arc<Gpu>,
        source: DeviceSource<'_>,
        name: &str,
        [output, input]: [usize; 2],
    ) -> Result<Self, ModelError> {
        Ok(Self {
            weight: source.bf16(gpu, &format!("{name}.weight"), &[output, input])?,
            bias: source.f32(gpu, &format!("{name}.bias"), &[output])?,
        })
    }

    /// `activation(x . w^T + bias)` of bf16 `x [n, in]`, in `dtype` (F32 or bf16).
    pub(super) fn forward(
        &self,
        x: &GpuTensor,
        activation: Activation,
        dtype: GpuType,
    ) -> Result<GpuTensor, ModelError> {
        let (gpu, dims) = (x.gpu(), [x.dim(0), self.weight.dim(0)]);
        let sums = GpuTensor::new(gpu, &dims, GpuType::F32, "time vectors")?;
        gemm(&sums, x, &self.weight, Finish::Store)?;
        let out = match dtype {
            GpuType::F32 => sums.clone(),
            other => GpuTensor::new(gpu, &dims, other, "time vectors")?,
        };
        bias_activation(&out, &sums, Some(&self.bias), activation)?;
        Ok(out)
    }
}

/// Sinusoidal code, then `Linear, GELU (erf), Linear` (HunyuanImage-3.0 specification, scalar embedding).
#[derive(Debug)]
pub(crate) struct GpuTimeEmbedder {
    first: BiasedLinear,
    second: BiasedLinear,
}

impl GpuTimeEmbedder {
    pub(crate) fn load(
        gpu: &Arc<Gpu>,
        source: DeviceSource<'_>,
        name: &str,
        hidden: usize,
    ) -> Result<Self, ModelError> {
        let linear = |layer, input| {
            BiasedLinear::load(gpu, source, &format!("{name}.mlp.{layer}"), [hidden, input])
        };
        Ok(Self {
            first: linear(0, CODE)?,
            second: linear(2, hidden)?,
        })
    }

    /// One vector for each scalar, F32 `[scalars, hidden]`.
    pub(crate) fn forward(&self, gpu: &Arc<Gpu>, scalars: &[f32]) -> Result<GpuTensor, ModelError> {
        let codes = scalars.iter().flat_map(|t| code(*t));
        let codes: Vec<half::bf16> = codes.map(half::bf16::from_f32).collect();
        let dims = [scalars.len(), CODE];
        let x = GpuTensor::new(gpu, &dims, GpuType::Bf16, "time vectors")?;
        x.write_bytes(bytemuck::cast_slice(&codes))?;
        let inner = self.first.forward(&x, Activation::GeluErf, GpuType::Bf16)?;
        self.second.forward(&inner, Activation::None, GpuType::F32)
    }
}

/// Scale and shift of an adaptive norm: `Linear(SiLU(time))`.
#[derive(Debug)]
pub(crate) struct Modulation(BiasedLinear);

impl Modulation {
    pub(crate) fn load(
        gpu: &Arc<Gpu>,
        source: DeviceSource<'_>,
        name: &str,
        (hidden, channels): (usize, usize),
    ) -> Result<Self, ModelError> {
        let linear = BiasedLinear::load(gpu, source, name, [2 * channels, hidden])?;
        Ok(Self(linear))
    }

    /// F32 `time [n, hidden]` to F32 `[n, 2 channels]`: scale, then shift.
    pub(crate) fn forward(&self, time: &GpuTensor) -> Result<GpuTensor, ModelError> {
        let x = GpuTensor::new(time.gpu(), time.shape(), GpuType::Bf16, "time vectors")?;
        bias_activation(&x, time, None, Activation::Silu)?;
        self.0.forward(&x, Activation::None, GpuType::F32)
    }
}
