//! HunyuanImage-3.0: config, weights, tokens, sequence layout, backbone, diffusion, VAE and ViT.
//!
//! The crate knows the model and nothing of processes: no runtime, no network, no clock. A caller opens a
//! checkpoint, lays a request out, computes the prefix and steps the denoise jobs; where and when is the
//! caller's business.

#![forbid(unsafe_code)]

pub mod config;
pub mod error;
pub mod tokenizer;
pub mod weights;

pub use config::{GenerationConfig, ModelConfig, MoeConfig, Template, VaeConfig, VitConfig};
pub use error::{ErrorKind, ModelError};
pub use tokenizer::{SpecialTokens, Tokenizer};
pub use weights::{Checkpoint, TensorSpec, expected_tensors};

/// Result with this crate's error.
pub type Result<T> = std::result::Result<T, ModelError>;
