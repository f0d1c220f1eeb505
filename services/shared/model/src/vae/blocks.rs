//! Parts the VAE's encoder and decoder share. Everything is channels-last `[1, t, h, w, c]`.

use kernels::{Conv3dWeight, GroupNorm, Tensor, add_assign, conv3d, group_norm, mha};

use crate::config::NORM_GROUPS;
use crate::error::ModelError;
use crate::source::{Affine, Scope};

/// Epsilon of every GroupNorm of the VAE.
const EPS: f32 = 1e-6;

/// GroupNorm then SiLU.
pub(super) fn norm_silu(x: &Tensor, affine: &Affine) -> Result<Tensor, ModelError> {
    Ok(group_norm(x, &params(affine), None, true)?)
}

/// A convolution of size 3 whose input has `frames` frames.
pub(super) fn conv3(
    scope: &Scope<'_>,
    (input, output): (usize, usize),
    frames: usize,
) -> Result<Conv3dWeight, ModelError> {
    if frames == 1 {
        scope.conv3d_of_one_frame(input, output, 3)
    } else {
        scope.conv3d(input, output, 3)
    }
}

fn params(affine: &Affine) -> GroupNorm<'_> {
    GroupNorm {
        groups: NORM_GROUPS,
        weight: &affine.weight,
        bias: &affine.bias,
        eps: EPS,
    }
}

/// `x + conv2(silu(norm2(conv1(silu(norm1(x))))))`.
#[derive(Debug)]
pub(super) struct ResBlock {
    norm1: Affine,
    conv1: Conv3dWeight,
    norm2: Affine,
    conv2: Conv3dWeight,
}

impl ResBlock {
    /// A block whose input has `frames` frames.
    pub(super) fn load(
        scope: &Scope<'_>,
        channels: usize,
        frames: usize,
    ) -> Result<Self, ModelError> {
        Ok(Self {
            norm1: scope.child("norm1").affine(channels)?,
            conv1: conv3(&scope.child("conv1"), (channels, channels), frames)?,
            norm2: scope.child("norm2").affine(channels)?,
            conv2: conv3(&scope.child("conv2"), (channels, channels), frames)?,
        })
    }

    pub(super) fn forward(&self, x: &Tensor) -> Result<Tensor, ModelError> {
        let inner = conv3d(&norm_silu(x, &self.norm1)?, &self.conv1)?;
        let mut out = conv3d(&norm_silu(&inner, &self.norm2)?, &self.conv2)?;
        add_assign(&mut out, x)?;
        Ok(out)
    }
}

/// Attention with one head as wide as the channels, over all positions of all frames.
#[derive(Debug)]
struct AttnBlock {
    norm: Affine,
    q: Conv3dWeight,
    k: Conv3dWeight,
    v: Conv3dWeight,
    out: Conv3dWeight,
}

impl AttnBlock {
    fn load(scope: &Scope<'_>, channels: usize) -> Result<Self, ModelError> {
        let point = |name: &str| scope.child(name).conv3d(channels, channels, 1);
        Ok(Self {
            norm: scope.child("norm").affine(channels)?,
            q: point("q")?,
            k: point("k")?,
            v: point("v")?,
            out: point("proj_out")?,
        })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor, ModelError> {
        let normed = group_norm(x, &params(&self.norm), None, false)?;
        let channels = x.dim(4);
        let positions = x.numel() / channels;
        let flat = [1, positions, 1, channels];
        let heads = |weight| Ok::<_, ModelError>(conv3d(&normed, weight)?.reshape(&flat)?);
        let scale = (channels as f32).sqrt().recip();
        let mixed = mha(
            &heads(&self.q)?,
            &heads(&self.k)?,
            &heads(&self.v)?,
            &[positions],
            scale,
        )?;
        let mut out = conv3d(&mixed.reshape(x.shape())?, &self.out)?;
        add_assign(&mut out, x)?;
        Ok(out)
    }
}

/// Residual block, attention, residual block at the lowest resolution, where there is one frame.
#[derive(Debug)]
pub(super) struct Mid {
    first: ResBlock,
    attention: AttnBlock,
    second: ResBlock,
}

impl Mid {
    pub(super) fn load(scope: &Scope<'_>, channels: usize) -> Result<Self, ModelError> {
        Ok(Self {
            first: ResBlock::load(&scope.child("block_1"), channels, 1)?,
            attention: AttnBlock::load(&scope.child("attn_1"), channels)?,
            second: ResBlock::load(&scope.child("block_2"), channels, 1)?,
        })
    }

    pub(super) fn forward(
        &self,
        x: &Tensor,
        see: &mut dyn FnMut(&str, &Tensor),
    ) -> Result<Tensor, ModelError> {
        let x = self.first.forward(x)?;
        see("mid.block_1", &x);
        let x = self.attention.forward(&x)?;
        see("mid.attn_1", &x);
        let x = self.second.forward(&x)?;
        see("mid.block_2", &x);
        Ok(x)
    }
}
