//! What a conditioning picture puts into a sequence, made on a GPU: the vectors of its latents and of its patches.

use std::path::Path;
use std::sync::Arc;

use kernels::Tensor;
use kernels::cuda::{Gpu, GpuTensor, GpuType};

use super::convs::{From, GpuStem};
use super::source::DeviceSource;
use super::vit::{GpuVit, on_host};
use crate::cond::{CondFeatures, sample_id};
use crate::config::ModelConfig;
use crate::error::ModelError;
use crate::picture::Latents;
use crate::vit::Patches;
use crate::weights::{Checkpoint, expected_tensors};

/// The stem and the vision transformer on one GPU.
#[derive(Debug)]
pub struct GpuConditions {
    gpu: Arc<Gpu>,
    hidden: usize,
    stem: GpuStem,
    vit: GpuVit,
}

impl GpuConditions {
    /// Loads from a checkpoint directory. The whole set of tensors is checked before any value is read.
    ///
    /// # Errors
    /// A bad config or checkpoint, each with the field, file or tensor named; `Gpu` when memory does not suffice.
    pub fn open(gpu: &Arc<Gpu>, dir: &Path) -> Result<Self, ModelError> {
        let config = ModelConfig::from_dir(dir)?;
        let checkpoint = Checkpoint::open(dir)?;
        checkpoint.verify(&expected_tensors(&config))?;
        Self::build(gpu, &config, DeviceSource::Stored(&checkpoint))
    }

    /// With the weights of [`crate::Model::random`], made on the device.
    ///
    /// # Errors
    /// `Gpu` when memory does not suffice.
    pub fn random(gpu: &Arc<Gpu>, config: &ModelConfig, seed: u64) -> Result<Self, ModelError> {
        Self::build(gpu, config, DeviceSource::Random { seed })
    }

    fn build(
        gpu: &Arc<Gpu>,
        config: &ModelConfig,
        source: DeviceSource<'_>,
    ) -> Result<Self, ModelError> {
        let from = From { gpu, source };
        let made = Self {
            gpu: gpu.clone(),
            hidden: config.hidden_size,
            stem: GpuStem::load(from, config)?,
            vit: GpuVit::load(from, config)?,
        };
        gpu.synchronize()?;
        Ok(made)
    }

    /// What a picture of these scaled latents and patches puts into a sequence; its vectors are bf16 but for that of the
    /// timestep.
    ///
    /// # Errors
    /// `Internal` when shapes disagree; `Gpu` when memory does not suffice.
    pub fn features(
        &mut self,
        latents: &Latents,
        patches: Patches<'_>,
    ) -> Result<CondFeatures, ModelError> {
        Ok(CondFeatures {
            timestep: self.timestep()?,
            vae: self.latents(latents)?,
            vit: self.patches(patches)?,
            sample_id: sample_id(latents, patches)?,
        })
    }

    /// The vision transformer and its aligner alone: bf16 `[tokens, hidden]`, as [`crate::vit::Vit::forward`] gives them.
    ///
    /// # Errors
    /// Those of [`GpuConditions::features`].
    pub fn patches(&mut self, patches: Patches<'_>) -> Result<Tensor, ModelError> {
        self.vit.forward(patches)
    }

    fn timestep(&self) -> Result<Tensor, ModelError> {
        let token = self.stem.timestep_token.forward(&self.gpu, &[0.0])?;
        Ok(Tensor::from_f32(token.shape(), token.to_f32_vec()?)?)
    }

    /// HunyuanImage-3.0: a conditioning image is clean, so its time is 0.
    fn latents(&mut self, latents: &Latents) -> Result<Tensor, ModelError> {
        let grid = (latents.height(), latents.width());
        let rows = grid.0 * grid.1;
        let wide = latents.to_tensor()?;
        let wide = wide.reshape(&[rows, latents.channels()])?;
        let narrow = GpuTensor::bf16_from_host(&self.gpu, &wide, "latents")?;
        let modulation = self.stem.modulation(&self.gpu, &[0.0])?;
        let out = GpuTensor::new(&self.gpu, &[rows, self.hidden], GpuType::Bf16, "picture")?;
        self.stem.forward(&narrow, grid, &modulation, &out)?;
        on_host(&out)
    }
}
