//! Pictures to latent distributions.

use kernels::{Conv3dWeight, Tensor, conv3d};

use super::blocks::{Mid, ResBlock, norm_silu};
use super::resample::Down;
use crate::config::VaeConfig;
use crate::error::ModelError;
use crate::source::{Affine, Scope};

/// The encoder half of the VAE.
#[derive(Debug)]
pub(super) struct Encoder {
    conv_in: Conv3dWeight,
    levels: Vec<(Vec<ResBlock>, Option<Down>)>,
    mid: Mid,
    norm_out: Affine,
    conv_out: Conv3dWeight,
    moments: usize,
}

impl Encoder {
    pub(super) fn load(scope: &Scope<'_>, config: &VaeConfig) -> Result<Self, ModelError> {
        let channels = &config.block_out_channels;
        let (shallowest, deepest) = (channels[0], channels[channels.len() - 1]);
        let moments = 2 * config.latent_channels;
        let mut levels = Vec::with_capacity(channels.len());
        let mut frames = config.temporal_factor;
        for (level, &width) in channels.iter().enumerate() {
            let scope = scope.child("down").child(level);
            let blocks = (0..config.layers_per_block)
                .map(|b| ResBlock::load(&scope.child("block").child(b), width, frames))
                .collect::<Result<Vec<_>, _>>()?;
            // Frames shrink at the deepest levels.
            let temporal = level >= config.spatial_levels() - config.temporal_levels();
            let down = (level < config.spatial_levels()).then(|| {
                Down::load(
                    &scope.child("downsample"),
                    width,
                    channels[level + 1],
                    temporal,
                )
            });
            levels.push((blocks, down.transpose()?));
            if temporal && level < config.spatial_levels() {
                frames /= 2;
            }
        }
        Ok(Self {
            conv_in: scope
                .child("conv_in")
                .conv3d(config.in_channels, shallowest, 3)?,
            levels,
            mid: Mid::load(&scope.child("mid"), deepest)?,
            norm_out: scope.child("norm_out").affine(deepest)?,
            conv_out: scope
                .child("conv_out")
                .conv3d_of_one_frame(deepest, moments, 3)?,
            moments,
        })
    }

    /// `x [1, t, h, w, 3]` to mean and log variance side by side, `[1, t', h', w', 2 latent]`.
    pub(super) fn forward(
        &self,
        x: &Tensor,
        see: &mut dyn FnMut(&str, &Tensor),
    ) -> Result<Tensor, ModelError> {
        let mut x = conv3d(x, &self.conv_in)?;
        for (level, (blocks, down)) in self.levels.iter().enumerate() {
            for block in blocks {
                x = block.forward(&x)?;
            }
            if let Some(down) = down {
                x = down.forward(&x)?;
                see(&format!("down.{level}.downsample"), &x);
            }
        }
        x = self.mid.forward(&x, see)?;
        let mut out = conv3d(&norm_silu(&x, &self.norm_out)?, &self.conv_out)?;
        add_means(&mut out, &x, self.moments)?;
        Ok(out)
    }
}

/// Adds the mean of each group of consecutive channels of `x`, `channels` groups in all, to `out`.
fn add_means(out: &mut Tensor, x: &Tensor, channels: usize) -> Result<(), ModelError> {
    let wide = x.dim(4);
    let group = wide / channels;
    let pixels = out.as_f32_mut()?.chunks_exact_mut(channels);
    for (pixel, source) in pixels.zip(x.as_f32()?.chunks_exact(wide)) {
        for (value, part) in pixel.iter_mut().zip(source.chunks_exact(group)) {
            *value += part.iter().sum::<f32>() / group as f32;
        }
    }
    Ok(())
}
