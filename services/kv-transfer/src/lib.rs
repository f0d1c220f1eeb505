//! Ships prefix KV between processes: a node service with a leased pool, a client that writes and
//! reads the pool through its own mapping of it or one-sided over UCX, and the engine of the latter. It
//! knows no model.
#![forbid(unsafe_code)]

mod client;
pub mod engine;
mod error;
pub mod fuzzing;
pub mod limits;
mod local;
mod measure;
pub mod service;
pub mod wire;

pub use client::{
    CacheTerms, ClientConfig, Description, FetchRequest, Fetched, KvClient, Lease, MAPPED, Place,
    Publication, PublishRequest, Published, Reach, Sums, Turn,
};
pub use error::TransferError;
pub use fabric::{Access, PoolMemory, UcxError};
pub use local::Mapped;
pub use measure::measure;
pub use service::{Host, Service, ServiceConfig};
