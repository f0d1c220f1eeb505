//! What ar-stage and dit-worker share: the thread that computes, loading, registration, the load
//! report, drain and the server around them. It knows no prompt and no pixel.
#![forbid(unsafe_code)]

pub mod device;
pub mod engine;
mod error;
mod gate;
#[cfg(feature = "cuda")]
mod gpu;
pub mod host;
pub mod info;
mod ranks;
mod rendezvous;

pub use device::{Device, GpuSettings, OnGpus};
pub use engine::Engine;
pub use error::{StageError, model_code};
pub use gate::Gate;
#[cfg(feature = "cuda")]
pub use gpu::{GpuLoad, GpuRanks, largest_grid};
pub use host::{HostConfig, Stage};
pub use ranks::{MAX_LOCAL_RANKS, RANK_PATIENCE, RankLoad, Ranks};
pub use rendezvous::RegistryRendezvous;
