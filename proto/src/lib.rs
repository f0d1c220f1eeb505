//! The wire contract of Omni: generated code of `omni/v1`, its descriptor set for reflection.

/// Messages and services of package `omni.v1`.
#[allow(missing_docs, unreachable_pub, clippy::all, clippy::disallowed_methods)]
pub mod v1 {
    tonic::include_proto!("omni.v1");
}

/// Encoded `FileDescriptorSet` of every file of this crate, for gRPC reflection.
pub const DESCRIPTOR_SET: &[u8] =
    include_bytes!(concat!(env!("OUT_DIR"), "/omni_descriptor.bin"));
