//! Denoising: scalars and latents in, velocity out, step by step.

mod convs;
mod time;

pub use convs::{FinalLayer, PatchEmbed};
pub use time::TimeEmbedder;
