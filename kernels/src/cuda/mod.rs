//! The GPU twins of the operations, for NVIDIA Hopper (H100, H200).
//!
//! Activations are bf16 `[tokens, features]` with fp32 accumulation; the CPU operations of this crate define
//! what each one computes, and the tests compare (relative error at most 1e-2). One operation, one file:
//! `cuda/<op>.cu` is the kernel and `src/cuda/<op>.rs` checks its arguments and launches it.
//!
//! Every operation is enqueued on the stream of its [`Gpu`] and returns at once; reading a tensor waits.
//! Arguments are checked before anything is launched. Libraries are looked up when a GPU is opened, so that
//! a build with this path also starts where there is none.
#![allow(unsafe_code)]

mod bias;
mod comm;
mod comm_library;
mod comm_ops;
mod device;
mod error;
mod map;
mod memory;
mod random;
mod tensor;
mod transfer;

pub use bias::{Activation, bias_activation};
pub use comm::{Comm, CommAborter, CommId, CommOptions, Lane};
pub use comm_ops::Transfer;
pub use device::{Gpu, GpuMemory};
pub use error::{CudaError, Result};
pub use memory::DeviceBuffer;
pub use random::fill_random;
pub use tensor::{GpuTensor, GpuType};
pub use transfer::{CopyStream, Mark, PinnedBuffer};
