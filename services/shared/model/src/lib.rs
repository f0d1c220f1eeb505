//! HunyuanImage-3.0: config, weights, tokens, sequence layout, backbone, diffusion, VAE and ViT.
//!
//! The crate knows the model and nothing of processes: no runtime, no network, no clock. A caller opens a
//! checkpoint, lays a request out, computes the prefix and steps the denoise jobs; where and when is the
//! caller's business.

#![forbid(unsafe_code)]

pub mod backbone;
pub mod buckets;
pub mod cache;
pub mod cond;
pub mod config;
pub mod diffusion;
pub mod error;
#[cfg(feature = "cuda")]
pub mod gpu;
pub mod growing;
pub mod input;
pub mod layout;
pub mod model;
pub mod noise;
pub mod pages;
pub mod picture;
pub mod pipeline;
pub mod positions;
pub mod prefill;
pub mod prefix;
pub mod preprocess;
pub mod preview;
mod random;
pub mod rank;
mod resample;
pub mod scheduler;
mod source;
mod squares;
pub mod system_prompts;
pub mod text;
pub mod tokenizer;
pub mod vae;
pub mod vit;
pub mod weights;

pub use backbone::{BalanceOptions, Residency, Travelling};
pub use buckets::{Bucket, BucketSet, ResolutionGroup, SizeRequest};
pub use cache::{KvCache, LayerSink};
pub use config::{GenerationConfig, ModelConfig, MoeConfig, Template, VaeConfig, VitConfig};
pub use diffusion::{DenoiseJob, JobOptions, JobSpec, JobState, StepCache, Taylor, Tea};
pub use error::{ErrorKind, ModelError};
pub use growing::{Advance, GrowingRow};
pub use layout::{LayoutInput, LayoutRules, RowKind, SequenceLayout, Target, TextTask};
pub use model::{LoadOptions, Model, ModelInfo, Parts};
pub use pages::{KvPage, KvPool, PAGE_TOKENS, pages_for};
pub use picture::{Latents, RgbImage};
pub use prefill::{RowTokens, T2iRequest};
pub use prefix::PrefixKv;
pub use rank::RankShard;
pub use scheduler::Schedule;
pub use system_prompts::SystemPrompts;
pub use tokenizer::{SpecialTokens, Tokenizer};
pub use weights::{Checkpoint, TensorSpec, expected_tensors};

/// Result with this crate's error.
pub type Result<T> = std::result::Result<T, ModelError>;
