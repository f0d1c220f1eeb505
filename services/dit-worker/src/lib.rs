//! The denoising worker: fetches prefixes, runs packed denoising steps, decodes and encodes images.
//! It never sees a prompt.
#![forbid(unsafe_code)]

pub mod batch;
mod checkpoint;
mod denoiser;
mod fetch;
pub mod ledger;
#[cfg(test)]
mod mixed;
mod order;
mod picture;
mod service;
pub mod steps;

use std::{path::PathBuf, sync::Arc};

use base::Shutdown;
use kv_transfer::{ClientConfig, KvClient};
use stage::{HostConfig, StageError, host};
use telemetry::Metrics;

pub use batch::StepLimits;
pub use service::DitWorker;

/// What a DiT worker does and within which bounds.
#[derive(Debug, Clone)]
pub struct DitWorkerConfig {
    /// Checkpoint directory.
    pub model: PathBuf,
    /// How the model is spread over the ranks of this worker.
    pub plan: parallel::Plan,
    /// Whether and how experts move between ranks.
    pub balance: model::BalanceOptions,
    /// How much of the decoder stays in memory; the rest is read in every step.
    pub residency: model::Residency,
    /// Client side of KV transfer.
    pub client: ClientConfig,
    /// Bounds of one packed step.
    pub limits: StepLimits,
    /// How jobs save steps.
    pub step_cache: model::StepCache,
    /// Bytes that the process may have resident; `None`: what the machine has free once the model is loaded.
    pub memory: Option<u64>,
    /// Requests inside the worker beyond those in the running step.
    pub max_queue: usize,
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
    let client = KvClient::new(config.client.clone()).map_err(|error| StageError::of(&error))?;
    let worker = DitWorker::new(config, client, metrics.clone())?;
    host::run(Arc::new(worker), host, metrics, shutdown).await
}
