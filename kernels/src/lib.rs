//! The arithmetic of Omni: a small [`Tensor`] and one function per operation, on the CPU.
//!
//! This crate knows shapes and numbers. It knows no model, no checkpoint, no request and no network.
//!
//! # Conventions
//! * Activations are `f32`, row-major `[tokens, features]`; images are channels-last `[n, h, w, c]`
//!   or `[n, t, h, w, c]`. Weights may be `f32` or `bf16`; a `bf16` weight is widened exactly.
//! * Every operation checks shapes and types first and answers with a [`KernelError`].
//! * **Batch invariance**: a row of a result never depends, bit for bit, on which other rows are in the
//!   call, nor on the number of threads. Work is split over output tiles only and every sum has one
//!   fixed order.
//! * Threads come from the current rayon pool.
//! * [`plain`] holds the definition of every operation in obvious loops; the tests compare against it.

mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;
mod error;
pub mod plain;
mod tensor;

pub use cpu::attention::{
    AttnRow, KvPart, PartialAttention, Segment, SegmentKind, merge_attention, mha,
    varlen_attention, varlen_attention_partial, varlen_attention_workspace_bytes,
};
pub use cpu::conv::{Conv2dWeight, Conv3dWeight, conv2d, conv3d};
pub use cpu::elementwise::{
    add, add_assign, add_scaled, gelu_erf, gelu_tanh, silu, swiglu_up_gate,
};
pub use cpu::embedding::embedding;
pub use cpu::group_norm::{GroupNorm, group_norm};
pub use cpu::linear::{LinearWeight, linear};
pub use cpu::memory;
pub use cpu::moe::{ExpertWeights, Routing, moe_combine, moe_experts, moe_route};
pub use cpu::norm::{layer_norm, rms_norm};
pub use cpu::path as cpu_path;
pub use cpu::rope::{AttnHeads, RopeTable, qkv_split_rope_norm};
pub use cpu::softmax::softmax_rows;
pub use cpu::workspace;
pub use error::{KernelError, Result};
pub use half::bf16;
pub use tensor::{DType, Device, Tensor};
