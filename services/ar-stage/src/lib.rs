//! The AR stage: reads a prompt and its pictures, writes what the model thinks and says, and publishes the
//! prefix KV of the picture's rows. It never sees the latents of a picture that is being made.
#![forbid(unsafe_code)]

mod answers;
mod batch;
mod decoder;
mod order;
mod pictures;
mod prefix;
mod publish;
mod row;
mod run;
mod service;
mod stream;
mod text;
mod work;

use std::{path::PathBuf, sync::Arc};

use base::Shutdown;
use kv_transfer::{ClientConfig, KvClient};
use stage::{HostConfig, StageError, host};
use telemetry::Metrics;

pub use service::ArStage;

/// What an AR stage does and within which bounds.
#[derive(Debug, Clone)]
pub struct ArStageConfig {
    /// Checkpoint directory.
    pub model: PathBuf,
    /// How the model is spread over the ranks of this stage.
    pub plan: parallel::Plan,
    /// KV-transfer service of this node, `http://HOST:PORT`.
    pub kv_transfer: String,
    /// Its client side.
    pub client: ClientConfig,
    /// Requests that may wait for the model.
    pub max_queue: usize,
}

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
    let client = KvClient::new(config.client.clone()).map_err(|error| StageError::of(&error))?;
    let stage = ArStage::new(config, client, metrics.clone())?;
    host::run(Arc::new(stage), host, metrics, shutdown).await
}
