//! The convolutional ends of the decoder on the device: latents to tokens and tokens to velocity.
//!
//! Pictures are read and written where their tokens lie among the packed rows; nothing is copied.

use std::sync::Arc;

use kernels::cuda::{
    ConvOptions, Gpu, GpuConvWeight, GpuGroupNorm, GpuTensor, GpuType, Pictures, Shortcut, conv,
    group_norm_apply, group_norm_coefficients, group_norm_sum_elements, group_norm_sums,
};

use super::scratch::{Parts, Scratch, part_bytes};
use super::source::DeviceSource;
use super::time::{GpuTimeEmbedder, Modulation};
use crate::config::{ModelConfig, NORM_GROUPS};
use crate::error::ModelError;

/// Epsilon of every GroupNorm in this file (the VAE's is another one).
const EPS: f32 = 1e-5;

/// Scale and shift of a normalisation, F32.
#[derive(Debug)]
pub(super) struct GpuAffine {
    pub(super) weight: GpuTensor,
    pub(super) bias: GpuTensor,
}

/// Where modules are read from.
#[derive(Clone, Copy)]
pub(super) struct From<'a> {
    pub(super) gpu: &'a Arc<Gpu>,
    pub(super) source: DeviceSource<'a>,
}

impl From<'_> {
    pub(super) fn affine(self, name: &str, channels: usize) -> Result<GpuAffine, ModelError> {
        let part = |kind: &str| {
            self.source
                .f32(self.gpu, &format!("{name}.{kind}"), &[channels])
        };
        Ok(GpuAffine {
            weight: part("weight")?,
            bias: part("bias")?,
        })
    }

    fn conv(
        self,
        name: &str,
        input: usize,
        output: usize,
        side: usize,
    ) -> Result<GpuConvWeight, ModelError> {
        let shape = [output, input, side, side];
        let weight = self
            .source
            .bf16(self.gpu, &format!("{name}.weight"), &shape)?;
        let bias = self
            .source
            .f32(self.gpu, &format!("{name}.bias"), &[output])?;
        Ok(GpuConvWeight::pack(&weight, Some(&bias), GpuType::Bf16)?)
    }
}

/// Residual block whose second norm is scaled and shifted by a time vector.
#[derive(Debug)]
struct AdaResBlock {
    in_norm: GpuAffine,
    in_conv: GpuConvWeight,
    modulation: Modulation,
    out_norm: GpuAffine,
    out_conv: GpuConvWeight,
    /// `None` where input and output are equally wide: the skip is the identity and has no tensor.
    skip: Option<GpuConvWeight>,
    input: usize,
    output: usize,
}

impl AdaResBlock {
    fn load(
        from: From<'_>,
        name: &str,
        hidden: usize,
        input: usize,
        output: usize,
    ) -> Result<Self, ModelError> {
        let at = |part: &str| format!("{name}.{part}");
        let skip = || from.conv(&at("skip_connection"), input, output, 1);
        let vectors = at("emb_layers.1");
        Ok(Self {
            in_norm: from.affine(&at("in_layers.0"), input)?,
            in_conv: from.conv(&at("in_layers.2"), input, output, 3)?,
            modulation: Modulation::load(from.gpu, from.source, &vectors, (hidden, output))?,
            out_norm: from.affine(&at("out_layers.0"), output)?,
            out_conv: from.conv(&at("out_layers.3"), output, output, 3)?,
            skip: (input != output).then(skip).transpose()?,
            input,
            output,
        })
    }

    /// Bytes of scratch for so many pixels of so many images.
    fn bytes(&self, pixels: usize, images: usize) -> usize {
        let wide = self.input.max(self.output);
        part_bytes(pixels * self.input, GpuType::Bf16)
            + 2 * part_bytes(pixels * self.output, GpuType::Bf16)
            + 2 * norm_bytes(images, wide)
    }

    /// `x` (`input` channels) to `out` (`output` channels); `modulation [images, 2 output]`.
    fn forward(
        &self,
        x: &Pictures,
        out: &Pictures,
        modulation: &GpuTensor,
        scratch: &mut Parts,
    ) -> Result<(), ModelError> {
        let [images, _, height, width, _] = x.size();
        let mut pictures = |channels| {
            let dims = [images, 1, height, width, channels];
            Ok::<_, ModelError>(Pictures::new(&scratch.take(&dims, GpuType::Bf16)?)?)
        };
        let (normed, inner) = (pictures(self.input)?, pictures(self.output)?);
        let skipped = self
            .skip
            .as_ref()
            .map(|_| pictures(self.output))
            .transpose()?;
        norm_silu(x, &normed, &self.in_norm, None, scratch)?;
        conv(&inner, &normed, &self.in_conv, ConvOptions::default())?;
        norm_silu(&inner, &inner, &self.out_norm, Some(modulation), scratch)?;
        if let (Some(skip), Some(skipped)) = (&self.skip, &skipped) {
            conv(skipped, x, skip, ConvOptions::default())?;
        }
        let shortcut = Shortcut {
            pictures: skipped.as_ref().unwrap_or(x),
            repeat: 1,
        };
        let options = ConvOptions {
            shortcut: Some(shortcut),
            ..ConvOptions::default()
        };
        conv(out, &inner, &self.out_conv, options)?;
        Ok(())
    }
}

/// Bytes of scratch of one norm.
fn norm_bytes(images: usize, channels: usize) -> usize {
    part_bytes(group_norm_sum_elements(images, channels), GpuType::F32)
        + part_bytes(2 * images * channels, GpuType::F32)
}

/// `out = SiLU(norm(x) (1 + scale) + shift)`; `out` may be `x`.
fn norm_silu(
    x: &Pictures,
    out: &Pictures,
    affine: &GpuAffine,
    modulation: Option<&GpuTensor>,
    scratch: &mut Parts,
) -> Result<(), ModelError> {
    let [images, .., channels] = x.size();
    let sums = [group_norm_sum_elements(images, channels)];
    let sums = group_norm_sums(&scratch.take(&sums, GpuType::F32)?, x)?;
    let coefficients = scratch.take(&[images, channels, 2], GpuType::F32)?;
    let norm = GpuGroupNorm {
        groups: NORM_GROUPS,
        weight: &affine.weight,
        bias: &affine.bias,
        eps: EPS,
        modulation,
    };
    group_norm_coefficients(&coefficients, &sums, x.pixels(), &norm)?;
    Ok(group_norm_apply(out, x, &coefficients, true)?)
}

/// Latents to tokens, and what stands in for `<timestep>`.
#[derive(Debug)]
pub(crate) struct GpuStem {
    pub(super) timestep_token: GpuTimeEmbedder,
    patch_time: GpuTimeEmbedder,
    conv_in: GpuConvWeight,
    block: AdaResBlock,
    scratch: Scratch,
}

impl GpuStem {
    pub(super) fn load(from: From<'_>, config: &ModelConfig) -> Result<Self, ModelError> {
        let (hidden, inner) = (config.hidden_size, config.patch_embed_hidden);
        let time = |name: &str| GpuTimeEmbedder::load(from.gpu, from.source, name, hidden);
        let latent = config.vae.latent_channels;
        Ok(Self {
            timestep_token: time("timestep_emb")?,
            patch_time: time("time_embed")?,
            conv_in: from.conv("patch_embed.model.0", latent, inner, 3)?,
            block: AdaResBlock::load(from, "patch_embed.model.1", hidden, inner, hidden)?,
            scratch: Scratch::new(from.gpu, "scratch of the stem"),
        })
    }

    /// F32 `[times, 2 hidden]`: scale, then shift.
    pub(super) fn modulation(
        &self,
        gpu: &Arc<Gpu>,
        times: &[f32],
    ) -> Result<GpuTensor, ModelError> {
        self.block
            .modulation
            .forward(&self.patch_time.forward(gpu, times)?)
    }

    /// bf16 `latents [h w, latent channels]` to the rows `out [h w, hidden]`; `modulation [1, 2 hidden]`.
    pub(super) fn forward(
        &mut self,
        latents: &GpuTensor,
        grid: (usize, usize),
        modulation: &GpuTensor,
        out: &GpuTensor,
    ) -> Result<(), ModelError> {
        let (pixels, inner) = (grid.0 * grid.1, self.block.input);
        let bytes = part_bytes(pixels * inner, GpuType::Bf16) + self.block.bytes(pixels, 1);
        let mut scratch = self.scratch.parts(bytes)?;
        let first = scratch.take(&[1, 1, grid.0, grid.1, inner], GpuType::Bf16)?;
        let first = Pictures::new(&first)?;
        let latents = Pictures::among_rows(latents, (0, pixels), 1, grid)?;
        let out = Pictures::among_rows(out, (0, pixels), 1, grid)?;
        conv(&first, &latents, &self.conv_in, ConvOptions::default())?;
        self.block.forward(&first, &out, modulation, &mut scratch)
    }
}

/// Image hidden states to velocity, and the extra tokens of distilled models.
#[derive(Debug)]
pub(crate) struct GpuHead {
    final_time: GpuTimeEmbedder,
    pub(super) guidance_token: Option<GpuTimeEmbedder>,
    pub(super) next_timestep_token: Option<GpuTimeEmbedder>,
    block: AdaResBlock,
    norm: GpuAffine,
    conv_out: GpuConvWeight,
    scratch: Scratch,
}

impl GpuHead {
    pub(super) fn load(from: From<'_>, config: &ModelConfig) -> Result<Self, ModelError> {
        let (hidden, inner) = (config.hidden_size, config.patch_embed_hidden);
        let time = |name: &str| GpuTimeEmbedder::load(from.gpu, from.source, name, hidden);
        let when = |needed: bool, name| needed.then(|| time(name)).transpose();
        let latent = config.vae.latent_channels;
        Ok(Self {
            final_time: time("time_embed_2")?,
            guidance_token: when(config.cfg_distilled, "guidance_emb")?,
            next_timestep_token: when(config.use_meanflow, "timestep_r_emb")?,
            block: AdaResBlock::load(from, "final_layer.model.0", hidden, hidden, inner)?,
            norm: from.affine("final_layer.model.1.0", inner)?,
            conv_out: from.conv("final_layer.model.1.2", inner, latent, 3)?,
            scratch: Scratch::new(from.gpu, "scratch of the head"),
        })
    }

    /// F32 `[times, 2 inner]`: scale, then shift.
    pub(super) fn modulation(
        &self,
        gpu: &Arc<Gpu>,
        times: &[f32],
    ) -> Result<GpuTensor, ModelError> {
        self.block
            .modulation
            .forward(&self.final_time.forward(gpu, times)?)
    }

    /// The pictures that begin at rows `first` and `first + distance`, .. of `x [tokens, hidden]` to F32
    /// velocities `[images, h w, latent channels]`; `modulation [images, 2 inner]`. The result is valid until
    /// the next call.
    pub(super) fn forward(
        &mut self,
        x: &GpuTensor,
        (first, distance): (usize, usize),
        grid: (usize, usize),
        modulation: &GpuTensor,
    ) -> Result<GpuTensor, ModelError> {
        let (images, inner) = (modulation.dim(0), self.block.output);
        let pixels = images * grid.0 * grid.1;
        let bytes = part_bytes(pixels * self.conv_out.c_out(), GpuType::F32)
            + part_bytes(pixels * inner, GpuType::Bf16)
            + self.block.bytes(pixels, images)
            + norm_bytes(images, inner);
        let mut scratch = self.scratch.parts(bytes)?;
        let dims = [images, 1, grid.0, grid.1, self.conv_out.c_out()];
        let velocity = scratch.take(&dims, GpuType::F32)?;
        let hidden = scratch.take(&[images, 1, grid.0, grid.1, inner], GpuType::Bf16)?;
        let hidden = Pictures::new(&hidden)?;
        let x = Pictures::among_rows(x, (first, distance), images, grid)?;
        self.block.forward(&x, &hidden, modulation, &mut scratch)?;
        norm_silu(&hidden, &hidden, &self.norm, None, &mut scratch)?;
        let out = Pictures::new(&velocity)?;
        conv(&out, &hidden, &self.conv_out, ConvOptions::default())?;
        Ok(velocity.reshape(&[images, grid.0 * grid.1, self.conv_out.c_out()])?)
    }
}
