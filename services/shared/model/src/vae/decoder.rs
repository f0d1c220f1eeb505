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
        let mut frames = 1;
        for (level, &width) in channels.iter().enumerate() {
            let scope = scope.child("up").child(level);
            let blocks = (0..=config.layers_per_block)
                .map(|b| ResBlock::load(&scope.child("block").child(b), width, frames))
                .collect::<Result<Vec<_>, _>>()?;
            // Frames grow at the deepest levels.
            let temporal = level < config.temporal_levels();
            let up = (level < config.spatial_levels()).then(|| {
                Up::load(
                    &scope.child("upsample"),
                    width,
                    channels[level + 1],
                    (temporal, frames),
                )
            });
            levels.push((blocks, up.transpose()?));
            frames *= 1 + usize::from(temporal && level < config.spatial_levels());
        }
        Ok(Self {
            conv_in: scope.child("conv_in").conv3d_of_one_frame(
                config.latent_channels,
                deepest,
                3,
            )?,
            mid: Mid::load(&scope.child("mid"), deepest)?,
            levels,
            norm_out: scope.child("norm_out").affine(shallowest)?,
            conv_out: scope
                .child("conv_out")
                .conv3d(shallowest, config.out_channels, 3)?,
            deepest,
        })
    }

    /// What the last convolution reads, `[1, t', h', w', shallowest]`.
    fn normed(&self, z: &Tensor, see: &mut dyn FnMut(&str, &Tensor)) -> Result<Tensor, ModelError> {
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
        norm_silu(&x, &self.norm_out)
    }

    /// `z [1, 1, h, w, latent]` to all frames `[1, t', h', w', 3]`.
    pub(super) fn forward(
        &self,
        z: &Tensor,
        see: &mut dyn FnMut(&str, &Tensor),
    ) -> Result<Tensor, ModelError> {
        Ok(conv3d(&self.normed(z, see)?, &self.conv_out)?)
    }

    /// `z [1, 1, h, w, latent]` to the last frame `[1, 1, h', w', 3]`: exactly that of all frames. Norms and
    /// attention see all of them, so that only the last convolution, which sees two, can leave some out.
    pub(super) fn last_frame(&self, z: &Tensor) -> Result<Tensor, ModelError> {
        let x = self.normed(z, &mut |_, _| {})?;
        let two = last_frames(&x, 2)?;
        drop(x);
        last_frames(&conv3d(&two, &self.conv_out)?, 1)
    }
}

/// The last frames of `x [1, t, h, w, c]`, at most `count`.
fn last_frames(x: &Tensor, count: usize) -> Result<Tensor, ModelError> {
    let (all, shape) = (x.dim(1), [x.dim(2), x.dim(3), x.dim(4)]);
    let kept = count.min(all);
    let frames = x.reshape(&[all, shape[0], shape[1], shape[2]])?;
    let last = frames.narrow0(all - kept, kept)?;
    Ok(last.reshape(&[1, kept, shape[0], shape[1], shape[2]])?)
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
