//! The AR stage: reads a prompt and its pictures, writes what the model thinks and says, and publishes the
//! prefix KV of the picture's rows. It never sees the latents of a picture that is being made.
#![forbid(unsafe_code)]

mod answers;
mod batch;
mod beginning;
mod decoder;
mod order;
mod pictures;
mod pools;
mod prefix;
mod publish;
mod row;
mod run;
mod service;
mod stream;
mod text;
mod work;

#[cfg(test)]
mod across;

use std::{path::PathBuf, sync::Arc};

use base::Shutdown;
use kv_transfer::{ClientConfig, KvClient};
use stage::{Device, HostConfig, StageError, host};
use telemetry::Metrics;

pub use service::ArStage;

/// What an AR stage does and within which bounds.
#[derive(Debug, Clone)]
pub struct ArStageConfig {
    /// Checkpoint directory.
    pub model: PathBuf,
    /// How the model is spread over the ranks of this stage.
    pub plan: parallel::Plan,
    /// What they compute on.
    pub device: Device,
    /// KV-transfer service of this node, `http://HOST:PORT`.
    pub kv_transfer: String,
    /// Its client side.
    pub client: ClientConfig,
    /// Requests that may wait for the model.
    pub max_queue: usize,
}

impl ArStageConfig {
    /// Whether the device is there and the model fits it, as far as that can be said without loading.
    ///
    /// # Errors
    /// `Config` naming the setting at fault.
    pub fn check(&self) -> Result<(), StageError> {
        self.device.check_load(&self.plan, || self.on_gpus())
    }

    /// What the GPUs load, where the stage has any.
    pub(crate) fn on_gpus(&self) -> Result<Option<stage::OnGpus>, StageError> {
        let Device::Cuda(settings) = &self.device else {
            return Ok(None);
        };
        self.gpu_load(settings)
    }

    #[cfg(not(feature = "cuda"))]
    fn gpu_load(&self, _: &stage::GpuSettings) -> Result<Option<stage::OnGpus>, StageError> {
        self.device.check(&self.plan).map(|()| None)
    }

    #[cfg(feature = "cuda")]
    fn gpu_load(&self, settings: &stage::GpuSettings) -> Result<Option<stage::OnGpus>, StageError> {
        let config = model::ModelConfig::from_dir(&self.model)?;
        let (height, width) = stage::largest_grid(&config)?;
        let largest = height * width;
        // A shown picture is computed in one piece: its own tokens, and those of the vision transformer.
        let shown = largest + config.vit_processor.max_num_patches + AROUND_PICTURE;
        Ok(Some(stage::GpuLoad {
            dir: self.model.clone(),
            plan: self.plan,
            settings: settings.clone(),
            text: true,
            max_tokens: batch::PASS_TOKENS.max(shown) + batch::MAX_RUNNING,
            kv_tokens: batch::MAX_HELD_TOKENS,
            max_rows: 2 * batch::MAX_RUNNING,
            vae: model::gpu::GpuVaeParts {
                decoder: false,
                encoder: true,
            },
            tiles: model::vae::Tiles::Whole,
        }))
    }
}

/// Special tokens around a shown picture, at most.
#[cfg(feature = "cuda")]
const AROUND_PICTURE: usize = 16;

/// Runs an AR stage until `shutdown`, a drain or a failure.
///
/// # Errors
/// The checkpoint does not load, the registry cannot be joined, the server breaks.
pub async fn run(
    config: ArStageConfig,
    host: HostConfig,
    metrics: Metrics,
    shutdown: Shutdown,
) -> Result<(), StageError> {
    kv_transfer::measure(&metrics);
    let client = KvClient::new(config.client.clone()).map_err(|error| StageError::of(&error))?;
    let stage = ArStage::new(config, client, metrics.clone())?;
    host::run(Arc::new(stage), host, metrics, shutdown).await
}
