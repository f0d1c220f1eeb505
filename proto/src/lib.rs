//! The wire contract of Omni: generated code of `omni/v1`, its descriptor set for reflection, and
//! the one place each for statuses, channels, servers, TLS, roles and strict decoding. It decides nothing.
#![forbid(unsafe_code)]

pub mod access;
pub mod channel;
pub mod deadline;
pub mod dial;
mod secret;
pub mod server;
pub mod size;
pub mod status;
pub mod strict;
pub mod tls;
pub mod web;

/// Messages and services of package `omni.v1`.
#[allow(
    missing_docs,
    missing_debug_implementations,
    unreachable_pub,
    clippy::all,
    clippy::pedantic,
    clippy::disallowed_methods,
    clippy::too_many_lines
)]
pub mod v1 {
    include!(concat!(env!("OUT_DIR"), "/lenient/omni.v1.rs"));
    include!(concat!(env!("OUT_DIR"), "/strict/omni.v1.rs"));
}

/// Encoded `FileDescriptorSet` of every file of this crate, for gRPC reflection.
pub const DESCRIPTOR_SET: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/omni_descriptor.bin"));

/// Full names of the services, as health and reflection know them.
pub mod names {
    /// What clients call.
    pub const IMAGE: &str = "omni.v1.ImageService";
    /// What operators call.
    pub const ADMIN: &str = "omni.v1.AdminService";
    /// The embedded registry.
    pub const REGISTRY: &str = "omni.v1.RegistryService";
    /// Prefix KV of prompts.
    pub const AR_STAGE: &str = "omni.v1.ArStageService";
    /// Denoising.
    pub const DIT_WORKER: &str = "omni.v1.DitWorkerService";
    /// Leases on a node's pool.
    pub const KV_TRANSFER: &str = "omni.v1.KvTransferService";
}
