//! The node service: one registered pool, its slots and leases, and the gRPC face of both.

mod grpc;
mod host;
mod line;
mod node;
mod pool;
mod relay;
mod slots;

pub use host::{Host, run};
pub use node::{Service, ServiceConfig};
