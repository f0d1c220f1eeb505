//! Conditioning images: pixels to the vectors that stand in their part of a sequence.

use kernels::Tensor;
use parallel::RankContext;

use crate::error::ModelError;
use crate::layout::SequenceLayout;
use crate::model::Model;
use crate::picture::Latents;
use crate::vae::Tiles;
use crate::vit::Patches;

/// A picture prepared for both encoders.
#[derive(Clone, Copy, Debug)]
pub struct CondPixels<'a> {
    /// `[h, w, 3]` in -1..1, in the picture's own bucket.
    pub vae: &'a Tensor,
    /// Patches for the vision transformer.
    pub patches: Patches<'a>,
}

/// What a conditioning image puts into a sequence.
#[derive(Clone, Debug)]
pub struct CondFeatures {
    /// Replaces its `<timestep>`, `[1, hidden]`.
    pub timestep: Tensor,
    /// Replaces its VAE tokens, `[h w, hidden]`.
    pub vae: Tensor,
    /// Replaces its ViT tokens, padding included, `[max patches, hidden]`.
    pub vit: Tensor,
    /// Names the posterior sample and the pixels: equal names mean equal vectors.
    pub sample_id: [u8; 32],
}

impl Model {
    /// Encodes a conditioning image; `noise [latent, h, w]` is standard normal and picks the posterior
    /// sample, which is part of the prefix's identity.
    ///
    /// # Errors
    /// `Internal` when a part was not loaded or shapes disagree.
    pub fn encode_cond_image(
        &self,
        ctx: &RankContext,
        pixels: CondPixels<'_>,
        noise: &Latents,
    ) -> Result<CondFeatures, ModelError> {
        let posterior = self
            .vae()
            .encode(pixels.vae, Tiles::Whole, &mut |_, _| {})?;
        let latents = self.vae().sample(&posterior, noise)?;
        self.cond_features(ctx, &latents, pixels.patches)
    }

    /// The vectors of scaled latents that were sampled already, and of patches.
    ///
    /// # Errors
    /// `Internal` when a part was not loaded or shapes disagree.
    pub fn cond_features(
        &self,
        _ctx: &RankContext,
        latents: &Latents,
        patches: Patches<'_>,
    ) -> Result<CondFeatures, ModelError> {
        let stem = self.image_stem()?;
        // HunyuanImage-3.0: a conditioning image is clean, so its time is 0.
        let time = stem.patch_time.forward(&[0.0])?;
        let modulation = stem.patch_embed.modulation(&time)?;
        Ok(CondFeatures {
            timestep: stem.timestep_token.forward(&[0.0])?,
            vae: stem
                .patch_embed
                .forward(&latents.to_tensor()?, &modulation)?,
            vit: self.vit()?.forward(patches, &mut |_, _| {})?,
            sample_id: sample_id(latents, patches)?,
        })
    }
}

pub(crate) fn sample_id(latents: &Latents, patches: Patches<'_>) -> Result<[u8; 32], ModelError> {
    let mut digest = blake3::Hasher::new();
    let (rows, columns) = patches.grid;
    for n in [
        latents.channels(),
        latents.height(),
        latents.width(),
        rows,
        columns,
    ] {
        digest.update(&(n as u64).to_le_bytes());
    }
    let real = patches.values.narrow0(0, rows * columns)?;
    for value in latents.data().iter().chain(real.as_f32()?) {
        digest.update(&value.to_le_bytes());
    }
    Ok(digest.finalize().into())
}

/// The vectors of all conditioning images of a row and the indices they go to.
pub(crate) fn placed(
    layout: &SequenceLayout,
    features: &[CondFeatures],
) -> Result<Vec<(usize, Tensor)>, ModelError> {
    if layout.cond_images.len() != features.len() {
        return Err(ModelError::Internal(format!(
            "{} conditioning images in the sequence, features of {}",
            layout.cond_images.len(),
            features.len()
        )));
    }
    let mut out = Vec::with_capacity(3 * features.len());
    for (image, features) in layout.cond_images.iter().zip(features) {
        let sizes = [
            (image.vae.tokens.len(), &features.vae),
            (image.vit.tokens.len(), &features.vit),
        ];
        if let Some((tokens, vectors)) = sizes.iter().find(|(n, v)| *n != v.dim(0)) {
            return Err(ModelError::Internal(format!(
                "{} vectors for {tokens} tokens of a conditioning image",
                vectors.dim(0)
            )));
        }
        out.push((image.timestep, features.timestep.clone()));
        out.push((image.vae.tokens.start, features.vae.clone()));
        out.push((image.vit.tokens.start, features.vit.clone()));
    }
    Ok(out)
}
