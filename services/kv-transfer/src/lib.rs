//! Ships prefix KV between processes: a node service with a leased pool, a client that writes and
//! reads the pool one-sided over UCX, and the engine both use. It knows no model.
#![forbid(unsafe_code)]

mod client;
pub mod engine;
mod error;
pub mod limits;
pub mod service;
pub mod wire;

pub use client::{ClientConfig, Fetched, KvClient, Lease, PublishRequest, Published};
pub use error::TransferError;
pub use fabric::{PoolMemory, UcxError};
pub use service::{Host, Service, ServiceConfig};
