//! The GPU engine: the decoder, the denoiser and the VAE decoder on one GPU, in bf16 or with FP8 weights.
//!
//! The CPU path of this crate says what is computed; this path computes the same from the same checkpoint
//! with other kernels and a layout of its own: weights of a layer in one block, keys and values in one arena,
//! every row of a batch packed, and nothing that waits for the host within a step.

mod arena;
mod layout;
mod source;

pub use layout::WeightType;

/// Keys that attention reads at once; runs of the arena are multiples of it.
pub(crate) const KEY_TILE: usize = 128;
