//! One-sided copies between memory of this process and regions of its peers.
//!
//! One OS thread owns every UCX handle. Others send it transfers over a bounded queue; it sleeps on
//! the worker's descriptor between events. It knows nothing of slots, leases or checksums.

mod config;
mod handle;
mod job;
mod peers;
mod remote;
mod thread;

pub use config::EngineConfig;
pub use fabric::Transport;
pub use handle::{Engine, Landed, Part};
pub use remote::Remote;
