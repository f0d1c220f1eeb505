//! Denoising: scalars and latents in, velocity out, step by step.

mod bands;
mod cache;
mod convs;
mod embedders;
mod job;
mod step;
mod time;

pub use cache::{MAX_COEFFICIENTS, StepCache, TEA_FILE, Taylor, Tea, relative};
pub use convs::{FinalLayer, PatchEmbed};
pub use embedders::{ImageHead, ImageStem};
pub use job::{DenoiseJob, JobOptions, JobSpec, JobState, MAX_GUIDANCE};
#[cfg(feature = "cuda")]
pub(crate) use job::{check, initial, resumed, rope};
pub(crate) use step::Modules;
pub use step::{Observer, Velocities};
pub use time::TimeEmbedder;
#[cfg(feature = "cuda")]
pub(crate) use time::{CODE, code};
