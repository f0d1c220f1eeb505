//! Latents to pictures.

use kernels::{Conv3dWeight, Tensor, conv3d};

use super::blocks::{Mid, ResBlock, norm_silu};
use super::resample::Up;
use crate::config::VaeConfig;
use crate::error::ModelError;
use crate::source::{Affine, Scope};

/// The decoder half of the VAE.
#[derive(Debug)]
pub(super) struct Decoder {
    conv_in: Conv3dWeight,
    mid: Mid,
    levels: Vec<(Vec<ResBlock>, Option<Up>)>,
    norm_out: Affine,
    conv_out: Conv3dWeight,
    deepest: usize,
}

impl Decoder {
    pub(super) fn load(scope: &Scope<'_>, config: &VaeConfig) -> Result<Self, ModelError> {
        let channels: Vec<usize> = config.block_out_channels.iter().rev().copied().collect();
        let (deepest, shallowest) = (channels[0], channels[channels.len() - 1]);
        let mut levels = Vec::with_capacity(channels.len());
        for (level, &width) in channels.iter().enumerate() {
            let scope = scope.child("up").child(level);
            let blocks = (0..=config.layers_per_block)
                .map(|b| ResBlock::load(&scope.child("block").child(b), width))
                .collect::<Result<Vec<_>, _>>()?;
            // Frames grow at the deepest levels.
            let temporal = level < config.temporal_levels();
            let up = (level < config.spatial_levels()).then(|| {
                Up::load(
                    &scope.child("upsample"),
                    width,
                    channels[level + 1],
                    temporal,
                )
            });
            levels.push((blocks, up.transpose()?));
        }
        Ok(Self {
            conv_in: scope
                .child("conv_in")
                .conv3d(config.latent_channels, deepest, 3)?,
            mid: Mid::load(&scope.child("mid"), deepest)?,
            levels,
            norm_out: scope.child("norm_out").affine(shallowest)?,
            conv_out: scope
                .child("conv_out")
                .conv3d(shallowest, config.out_channels, 3)?,
            deepest,
        })
    }

    /// `z [1, t, h, w, latent]` to all frames `[1, t', h', w', 3]`.
    pub(super) fn forward(
        &self,
        z: &Tensor,
        see: &mut dyn FnMut(&str, &Tensor),
    ) -> Result<Tensor, ModelError> {
        let mut x = conv3d(z, &self.conv_in)?;
        see("conv_in", &x);
        add_repeated(&mut x, z, self.deepest)?;
        x = self.mid.forward(&x, see)?;
        for (level, (blocks, up)) in self.levels.iter().enumerate() {
            for (b, block) in blocks.iter().enumerate() {
                x = block.forward(&x)?;
                see(&format!("up.{level}.block.{b}"), &x);
            }
            if let Some(up) = up {
                x = up.forward(&x)?;
                see(&format!("up.{level}.upsample"), &x);
            }
        }
        Ok(conv3d(&norm_silu(&x, &self.norm_out)?, &self.conv_out)?)
    }
}

/// Adds each channel of `z`, repeated to `channels` in place, to `x`.
fn add_repeated(x: &mut Tensor, z: &Tensor, channels: usize) -> Result<(), ModelError> {
    let narrow = z.dim(4);
    let repeat = channels / narrow;
    let pixels = x.as_f32_mut()?.chunks_exact_mut(channels);
    for (pixel, source) in pixels.zip(z.as_f32()?.chunks_exact(narrow)) {
        for (values, copied) in pixel.chunks_exact_mut(repeat).zip(source) {
            values.iter_mut().for_each(|v| *v += copied);
        }
    }
    Ok(())
}
