//! Denoising: scalars and latents in, velocity out, step by step.

mod convs;
mod embedders;
mod job;
mod step;
mod time;

pub use convs::{FinalLayer, PatchEmbed};
pub use embedders::{ImageHead, ImageStem};
pub use job::{DenoiseJob, JobOptions, JobSpec, JobState, MAX_GUIDANCE};
#[cfg(feature = "cuda")]
pub(crate) use job::{check, initial, rope};
pub(crate) use step::Modules;
pub use step::{Observer, Velocities};
pub use time::TimeEmbedder;
#[cfg(feature = "cuda")]
pub(crate) use time::{CODE, code};
