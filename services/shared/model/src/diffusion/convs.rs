//! The convolutional ends of the decoder: latents to tokens and tokens to velocity.
//!
//! Everything here runs one picture at a time, channels-last, so that a packed batch of any sizes equals
//! the pictures alone.

use kernels::{
    Conv2dWeight, GroupNorm, LinearWeight, Tensor, add_assign, conv2d, group_norm, linear, silu,
};

use crate::config::{ModelConfig, NORM_GROUPS};
use crate::error::ModelError;
use crate::source::{Affine, Scope};

/// Epsilon of every GroupNorm in this file (the VAE's is another one).
const EPS: f32 = 1e-5;

/// Residual block whose second norm is scaled and shifted by a time vector.
#[derive(Debug)]
struct AdaResBlock {
    in_norm: Affine,
    in_conv: Conv2dWeight,
    modulation: LinearWeight,
    out_norm: Affine,
    out_conv: Conv2dWeight,
    /// `None` where input and output are equally wide: the skip is the identity and has no tensor.
    skip: Option<Conv2dWeight>,
    channels: usize,
}

impl AdaResBlock {
    fn load(
        scope: &Scope<'_>,
        hidden: usize,
        input: usize,
        output: usize,
    ) -> Result<Self, ModelError> {
        let skip = || scope.child("skip_connection").conv2d(input, output, 1);
        Ok(Self {
            in_norm: scope.child("in_layers.0").affine(input)?,
            in_conv: scope.child("in_layers.2").conv2d(input, output, 3)?,
            modulation: scope
                .child("emb_layers.1")
                .linear_bias(hidden, 2 * output)?,
            out_norm: scope.child("out_layers.0").affine(output)?,
            out_conv: scope.child("out_layers.3").conv2d(output, output, 3)?,
            skip: (input != output).then(skip).transpose()?,
            channels: output,
        })
    }

    /// Scale and shift for each time vector: `[n, hidden]` to `[2 n, channels]`, scale rows even.
    fn modulation(&self, time: &Tensor) -> Result<Tensor, ModelError> {
        let both = linear(&silu(time)?, &self.modulation)?;
        Ok(both.reshape(&[2 * time.dim(0), self.channels])?)
    }

    /// `x [1, h, w, in]`, `modulation [2, out]` to `[1, h, w, out]`.
    fn forward(&self, x: &Tensor, modulation: &Tensor) -> Result<Tensor, ModelError> {
        let scale = modulation.narrow0(0, 1)?;
        let shift = modulation.narrow0(1, 1)?;
        let inner = norm(x, &self.in_norm, None)?;
        let inner = conv2d(&inner, &self.in_conv)?;
        let inner = norm(&inner, &self.out_norm, Some((&scale, &shift)))?;
        let mut out = conv2d(&inner, &self.out_conv)?;
        match &self.skip {
            Some(skip) => add_assign(&mut out, &conv2d(x, skip)?)?,
            None => add_assign(&mut out, x)?,
        }
        Ok(out)
    }
}

/// Latent `[h, w, latent]` to image tokens `[h w, hidden]`.
#[derive(Debug)]
pub struct PatchEmbed {
    conv_in: Conv2dWeight,
    block: AdaResBlock,
}

impl PatchEmbed {
    pub(crate) fn load(scope: &Scope<'_>, config: &ModelConfig) -> Result<Self, ModelError> {
        let (hidden, inner) = (config.hidden_size, config.patch_embed_hidden);
        let scope = scope.child("model");
        Ok(Self {
            conv_in: scope
                .child(0)
                .conv2d(config.vae.latent_channels, inner, 3)?,
            block: AdaResBlock::load(&scope.child(1), hidden, inner, hidden)?,
        })
    }

    /// See [`FinalLayer::modulation`].
    ///
    /// # Errors
    /// `Kernel` when shapes disagree.
    pub fn modulation(&self, time: &Tensor) -> Result<Tensor, ModelError> {
        self.block.modulation(time)
    }

    /// The first convolution alone: `[1, h, w, latent]` to `[1, h, w, inner]`.
    ///
    /// # Errors
    /// `Kernel` when shapes disagree.
    pub fn conv_in(&self, latent: &Tensor) -> Result<Tensor, ModelError> {
        Ok(conv2d(latent, &self.conv_in)?)
    }

    /// `latent [1, h, w, latent]` with the `[2, hidden]` modulation of its time, to `[h w, hidden]`.
    ///
    /// # Errors
    /// `Kernel` when shapes disagree.
    pub fn forward(&self, latent: &Tensor, modulation: &Tensor) -> Result<Tensor, ModelError> {
        let tokens = latent.dim(1) * latent.dim(2);
        let out = self.block.forward(&self.conv_in(latent)?, modulation)?;
        Ok(out.reshape(&[tokens, self.block.channels])?)
    }
}

/// Image hidden states `[h w, hidden]` to velocity `[h, w, latent]`.
#[derive(Debug)]
pub struct FinalLayer {
    block: AdaResBlock,
    norm: Affine,
    conv_out: Conv2dWeight,
}

impl FinalLayer {
    pub(crate) fn load(scope: &Scope<'_>, config: &ModelConfig) -> Result<Self, ModelError> {
        let (hidden, inner) = (config.hidden_size, config.patch_embed_hidden);
        let scope = scope.child("model");
        Ok(Self {
            block: AdaResBlock::load(&scope.child(0), hidden, hidden, inner)?,
            norm: scope.child("1.0").affine(inner)?,
            conv_out: scope
                .child("1.2")
                .conv2d(inner, config.vae.latent_channels, 3)?,
        })
    }

    /// Scale and shift rows for time vectors `[n, hidden]`: `[2 n, channels]`, rows `2 i` (scale) and
    /// `2 i + 1` (shift) belong to vector `i`.
    ///
    /// # Errors
    /// `Kernel` when shapes disagree.
    pub fn modulation(&self, time: &Tensor) -> Result<Tensor, ModelError> {
        self.block.modulation(time)
    }

    /// The residual block alone: `[1, h, w, hidden]` to `[1, h, w, inner]`.
    ///
    /// # Errors
    /// `Kernel` when shapes disagree.
    pub fn block(&self, x: &Tensor, modulation: &Tensor) -> Result<Tensor, ModelError> {
        self.block.forward(x, modulation)
    }

    /// `hidden [h w, hidden]` of a `height x width` grid with the `[2, inner]` modulation of its time, to
    /// `[1, h, w, latent]`.
    ///
    /// # Errors
    /// `Kernel` when shapes disagree.
    pub fn forward(
        &self,
        hidden: &Tensor,
        grid: (usize, usize),
        modulation: &Tensor,
    ) -> Result<Tensor, ModelError> {
        let picture = hidden.reshape(&[1, grid.0, grid.1, hidden.dim(1)])?;
        let inner = self.block(&picture, modulation)?;
        Ok(conv2d(&norm(&inner, &self.norm, None)?, &self.conv_out)?)
    }
}

/// GroupNorm, optional modulation `y (1 + scale) + shift`, SiLU.
fn norm(
    x: &Tensor,
    affine: &Affine,
    modulation: Option<(&Tensor, &Tensor)>,
) -> Result<Tensor, ModelError> {
    let params = GroupNorm {
        groups: NORM_GROUPS,
        weight: &affine.weight,
        bias: &affine.bias,
        eps: EPS,
    };
    Ok(group_norm(x, &params, modulation, true)?)
}
