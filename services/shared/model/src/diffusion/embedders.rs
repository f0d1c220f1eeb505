//! The modules around the decoder that only images need.

use half::bf16;
use kernels::Tensor;

use super::{FinalLayer, PatchEmbed, TimeEmbedder};
use crate::config::ModelConfig;
use crate::error::ModelError;
use crate::scheduler::TIMESTEP_SCALE;
use crate::source::Scope;

/// What turns latents and their time into tokens: for generated and for conditioning images.
#[derive(Debug)]
pub struct ImageStem {
    /// Stands in for a `<timestep>` token.
    pub timestep_token: TimeEmbedder,
    /// Drives the patch embedding.
    pub patch_time: TimeEmbedder,
    /// Latents to tokens.
    pub patch_embed: PatchEmbed,
}

impl ImageStem {
    pub(crate) fn load(root: &Scope<'_>, config: &ModelConfig) -> Result<Self, ModelError> {
        let hidden = config.hidden_size;
        Ok(Self {
            timestep_token: TimeEmbedder::load(&root.child("timestep_emb"), hidden)?,
            patch_time: TimeEmbedder::load(&root.child("time_embed"), hidden)?,
            patch_embed: PatchEmbed::load(&root.child("patch_embed"), config)?,
        })
    }
}

/// What turns hidden states into velocity, and the extra tokens of distilled models.
#[derive(Debug)]
pub struct ImageHead {
    /// Drives the final layer.
    pub final_time: TimeEmbedder,
    /// Hidden states to velocity.
    pub final_layer: FinalLayer,
    /// Stands in for a `<guidance>` token.
    pub guidance_token: Option<TimeEmbedder>,
    /// Stands in for a `<timestep_r>` token.
    pub next_timestep_token: Option<TimeEmbedder>,
}

impl ImageHead {
    pub(crate) fn load(root: &Scope<'_>, config: &ModelConfig) -> Result<Self, ModelError> {
        let hidden = config.hidden_size;
        let when = |needed: bool, name: &str| {
            needed
                .then(|| TimeEmbedder::load(&root.child(name), hidden))
                .transpose()
        };
        Ok(Self {
            final_time: TimeEmbedder::load(&root.child("time_embed_2"), hidden)?,
            final_layer: FinalLayer::load(&root.child("final_layer"), config)?,
            guidance_token: when(config.cfg_distilled, "guidance_emb")?,
            next_timestep_token: when(config.use_meanflow, "timestep_r_emb")?,
        })
    }
}

/// The vectors of the tokens before a generated image, one row for each token of each step:
/// `[steps * specials, hidden]` in token order `<timestep>`, `<guidance>`, `<timestep_r>`.
///
/// `times` are the timesteps, `next` the ones each leads to.
pub(super) fn special_tokens(
    stem: &ImageStem,
    head: &ImageHead,
    times: &[f32],
    next: &[f32],
    guidance: f64,
) -> Result<Tensor, ModelError> {
    let mut kinds = vec![stem.timestep_token.forward(times)?];
    if let Some(embedder) = &head.guidance_token {
        // The released models see the guidance scale rounded to BF16.
        let scaled = bf16::from_f32(guidance as f32 * TIMESTEP_SCALE).to_f32();
        kinds.push(embedder.forward(&vec![scaled; times.len()])?);
    }
    if let Some(embedder) = &head.next_timestep_token {
        kinds.push(embedder.forward(next)?);
    }
    let mut rows = Vec::with_capacity(times.len() * kinds.len());
    for step in 0..times.len() {
        for kind in &kinds {
            rows.push(kind.narrow0(step, 1)?);
        }
    }
    Ok(Tensor::concat0(&rows.iter().collect::<Vec<_>>())?)
}
