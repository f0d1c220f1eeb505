//! The denoising worker: fetches prefixes, runs packed denoising steps, decodes and encodes images.
//! It never sees a prompt.
#![forbid(unsafe_code)]

pub mod batch;
mod checkpoint;
mod denoiser;
#[cfg(feature = "cuda")]
mod device;
mod fetch;
mod former;
pub mod ledger;
#[cfg(test)]
mod mixed;
mod order;
mod pace;
mod picture;
mod places;
mod service;
pub mod steps;

use std::{path::PathBuf, sync::Arc};

use base::Shutdown;
use kv_transfer::{ClientConfig, KvClient};
use stage::{Device, HostConfig, StageError, host};
use telemetry::Metrics;

/// Jobs whose prefixes are in memory although they do not fit into the running step: exactly one
/// is fetched ahead.
const FETCHED_AHEAD: usize = 1;
/// Most tokens before a picture's in a row of a step.
#[cfg(feature = "cuda")]
const MAX_SPECIALS: usize = 3;

pub use batch::StepLimits;
pub use former::{Forming, Outlook};
pub use service::DitWorker;

/// What a DiT worker does and within which bounds.
#[derive(Debug, Clone)]
pub struct DitWorkerConfig {
    /// Checkpoint directory.
    pub model: PathBuf,
    /// How the model is spread over the ranks of this worker.
    pub plan: parallel::Plan,
    /// What they compute on.
    pub device: Device,
    /// Whether and how experts move between ranks.
    pub balance: model::BalanceOptions,
    /// How much of the decoder stays in memory; the rest is read in every step.
    pub residency: model::Residency,
    /// Client side of KV transfer.
    pub client: ClientConfig,
    /// Bounds of one packed step.
    pub limits: StepLimits,
    /// Whether pictures are decoded whole or in tiles, which the ranks share.
    pub tiles: model::vae::Tiles,
    /// Whether who steps together is chosen by what steps cost; else by class and order of arrival.
    pub by_cost: bool,
    /// How jobs save steps.
    pub step_cache: model::StepCache,
    /// Bytes that the process may have resident; `None`: what the machine has free once the model is loaded.
    pub memory: Option<u64>,
    /// Requests inside the worker beyond those in the running step.
    pub max_queue: usize,
}

impl DitWorkerConfig {
    /// Whether the device is there and the model fits it, as far as that can be said without loading.
    ///
    /// # Errors
    /// `Config` naming the setting at fault.
    pub fn check(&self) -> Result<(), StageError> {
        self.device.check_load(&self.plan, || self.on_gpus())
    }

    /// What the GPUs load, where the worker has any.
    pub(crate) fn on_gpus(&self) -> Result<Option<stage::OnGpus>, StageError> {
        let Device::Cuda(settings) = &self.device else {
            return Ok(None);
        };
        let refused = |field, what: &str| Err(StageError::config(field, format!("{what} on GPUs")));
        if self.step_cache != model::StepCache::Off {
            return refused("step_cache", "is not built");
        }
        if self.balance.eplb.enabled {
            return refused("eplb_interval", "is not built");
        }
        if self.memory.is_some() {
            return refused("memory", "is that of the host, see gpu_memory");
        }
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
        // A job beyond the limits of a step still runs, alone.
        let alone = 2 * (largest + MAX_SPECIALS);
        let rows = self.limits.max_rows + 2 * FETCHED_AHEAD;
        Ok(Some(stage::GpuLoad {
            dir: self.model.clone(),
            plan: self.plan,
            settings: settings.clone(),
            text: false,
            max_tokens: self.limits.max_tokens.min(rows * alone).max(alone),
            kv_tokens: rows * config.max_position_embeddings,
            max_rows: rows,
            vae: model::gpu::GpuVaeParts {
                decoder: true,
                encoder: false,
            },
            tiles: self.tiles,
        }))
    }
}

/// Runs a DiT worker until `shutdown`, a drain or a failure.
///
/// # Errors
/// The checkpoint does not load, the registry cannot be joined, the server breaks.
pub async fn run(
    config: DitWorkerConfig,
    host: HostConfig,
    metrics: Metrics,
    shutdown: Shutdown,
) -> Result<(), StageError> {
    kv_transfer::measure(&metrics);
    let client = KvClient::new(config.client.clone()).map_err(|error| StageError::of(&error))?;
    let worker = DitWorker::new(config, client, metrics.clone())?;
    host::run(Arc::new(worker), host, metrics, shutdown).await
}
