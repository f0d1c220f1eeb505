//! The VAE on the device: f16 with fp32 sums, as the released code runs it.
//!
//! Every frame takes part in the statistics of every norm, so no frame of the decoder can be left out before
//! the last convolution, which makes the last frame alone. What can be left out exactly is the part of each
//! window that lies before the first or behind the last frame: 81.8 of 104.6 TFLOP remain for 1024 x 1024.

mod attention;
mod blocks;
mod decoder;
mod encoder;
mod room;

use std::path::Path;
use std::sync::Arc;

use kernels::Tensor;
use kernels::cuda::{Gpu, GpuConvWeight, GpuTensor, GpuType};

use self::decoder::Decoder;
use self::encoder::Encoder;
use self::room::Room;
use super::source::DeviceSource;
use crate::config::{ModelConfig, VaeConfig};
use crate::error::ModelError;
use crate::picture::{Latents, RgbImage};
use crate::vae::{Posterior, Tiles, tiled};
use crate::weights::{Checkpoint, expected_tensors};

/// Type of activations and weights.
const ELEMENT: GpuType = GpuType::F16;

/// Which halves are loaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GpuVaeParts {
    /// Latents to pictures.
    pub decoder: bool,
    /// Pictures to latents.
    pub encoder: bool,
}

/// The VAE on one GPU. Pictures are encoded whole, and decoded whole or in tiles.
#[derive(Debug)]
pub struct GpuVae {
    gpu: Arc<Gpu>,
    config: VaeConfig,
    decoder: Option<Decoder>,
    encoder: Option<Encoder>,
    room: Room,
    /// How pictures are decoded.
    tiles: Tiles,
}

impl GpuVae {
    /// Loads from a checkpoint directory. The whole set of tensors is checked before any value is read.
    ///
    /// # Errors
    /// A bad config or checkpoint, each with the field, file or tensor named; `Gpu` when memory does not
    /// suffice.
    pub fn open(gpu: &Arc<Gpu>, dir: &Path, parts: GpuVaeParts) -> Result<Self, ModelError> {
        let config = ModelConfig::from_dir(dir)?;
        let checkpoint = Checkpoint::open(dir)?;
        checkpoint.verify(&expected_tensors(&config))?;
        Self::build(gpu, &config, DeviceSource::Stored(&checkpoint), parts)
    }

    /// With the weights of [`crate::Model::random`], made on the device.
    ///
    /// # Errors
    /// `Gpu` when memory does not suffice.
    pub fn random(
        gpu: &Arc<Gpu>,
        config: &ModelConfig,
        parts: GpuVaeParts,
        seed: u64,
    ) -> Result<Self, ModelError> {
        Self::build(gpu, config, DeviceSource::Random { seed }, parts)
    }

    fn build(
        gpu: &Arc<Gpu>,
        config: &ModelConfig,
        source: DeviceSource<'_>,
        parts: GpuVaeParts,
    ) -> Result<Self, ModelError> {
        let config = config.vae.clone();
        let from = VaeSource { gpu, source };
        let decoder = parts.decoder.then(|| Decoder::load(from, &config));
        let encoder = parts.encoder.then(|| Encoder::load(from, &config));
        let (decoder, encoder) = (decoder.transpose()?, encoder.transpose()?);
        gpu.synchronize()?;
        Ok(Self {
            gpu: gpu.clone(),
            config,
            decoder,
            encoder,
            room: Room::new(gpu),
            tiles: Tiles::Whole,
        })
    }

    /// Decodes pictures whole or in tiles from now on, cut and blended as [`crate::vae::Vae`] does.
    #[must_use]
    pub fn in_tiles(mut self, tiles: Tiles) -> Self {
        self.tiles = tiles;
        self
    }

    /// The GPU.
    pub fn gpu(&self) -> &Arc<Gpu> {
        &self.gpu
    }

    /// Device memory that decoding `height x width` latents needs beside the weights, in bytes.
    ///
    /// # Errors
    /// `Internal` when the decoder was not loaded.
    pub fn decode_bytes(&self, height: usize, width: usize) -> Result<usize, ModelError> {
        Ok(self.decoder()?.need(height, width).bytes())
    }

    /// Takes what latents of up to `height x width` positions need, so that no later picture of that size
    /// finds the memory taken.
    ///
    /// # Errors
    /// `Gpu` when memory does not suffice.
    pub fn reserve(&mut self, height: usize, width: usize) -> Result<(), ModelError> {
        let side = self.config.spatial_factor;
        if let Some(decoder) = &self.decoder {
            let (height, width) = self.tiles.largest(&self.config, (height, width));
            let need = decoder.need(height, width);
            self.room.fit(&need)?;
        }
        if let Some(encoder) = &self.encoder {
            let need = encoder.need(height * side, width * side);
            self.room.fit(&need)?;
        }
        Ok(())
    }

    /// The picture of scaled latents.
    ///
    /// # Errors
    /// `Internal` when the decoder was not loaded, the channels do not match or a value is not a number;
    /// `Gpu` when memory does not suffice.
    pub fn decode(&mut self, latents: &Latents) -> Result<RgbImage, ModelError> {
        let size = (latents.height(), latents.width());
        if self.tiles.largest(&self.config, size) != size {
            let values = self.decode_values(latents)?;
            return RgbImage::from_unit_values(values.dim(0), values.dim(1), values.as_f32()?);
        }
        let out = self.decode_as(latents, GpuType::U8)?;
        Ok(RgbImage {
            width: out.dim(1),
            height: out.dim(0),
            data: out.to_bytes()?,
        })
    }

    /// The picture of scaled latents before clamping, `[h, w, 3]` around -1..1.
    ///
    /// # Errors
    /// Those of [`GpuVae::decode`].
    pub fn decode_values(&mut self, latents: &Latents) -> Result<Tensor, ModelError> {
        let (config, tiles) = (self.config.clone(), self.tiles);
        tiled(&config, tiles, latents, &mut |tile| {
            let out = self.decode_as(tile, GpuType::F32)?;
            Ok(Tensor::from_f32(out.shape(), out.to_f32_vec()?)?)
        })
    }

    /// `[h, w, 3]` as colours (U8) or values (F32).
    fn decode_as(&mut self, latents: &Latents, kind: GpuType) -> Result<GpuTensor, ModelError> {
        let decoder = self.decoder.as_ref().ok_or_else(missing_decoder)?;
        let (height, width) = (latents.height(), latents.width());
        if latents.channels() != self.config.latent_channels || height * width == 0 {
            return Err(ModelError::Internal(format!(
                "latents of {} channels, {height} x {width}, for a vae of {}",
                latents.channels(),
                self.config.latent_channels
            )));
        }
        self.room.fit(&decoder.need(height, width))?;
        let shape = [latents.channels(), height, width];
        let z = GpuTensor::from_f32(&self.gpu, &shape, latents.data(), "latents")?;
        let shift = self.config.shift_factor.unwrap_or(0.0) as f32;
        let factor = 1.0 / self.config.scaling_factor as f32;
        decoder.forward(&self.room, &z, (factor, shift), kind)
    }

    /// The distribution of a picture's (unscaled) latents; `pixels [h, w, 3]` in -1..1, sides multiples of
    /// the spatial factor.
    ///
    /// # Errors
    /// `Internal` when the encoder was not loaded, a side does not divide or a value is not a number; `Gpu`
    /// when memory does not suffice.
    pub fn encode(&mut self, pixels: &Tensor) -> Result<Posterior, ModelError> {
        let missing = || ModelError::Internal("the vae encoder was not loaded on the gpu".into());
        let encoder = self.encoder.as_ref().ok_or_else(missing)?;
        let (config, side) = (&self.config, self.config.spatial_factor);
        let &[height, width, channels] = pixels.shape() else {
            return Err(ModelError::Internal(
                "vae encode: not [h, w, channels]".into(),
            ));
        };
        let divides = height.is_multiple_of(side) && width.is_multiple_of(side);
        if !divides || height * width == 0 || channels != config.in_channels {
            return Err(ModelError::Internal(format!(
                "vae encode: {height} x {width} of {channels} channels does not split into cells of {side}"
            )));
        }
        self.room.fit(&encoder.need(height, width))?;
        let planes = Latents::from_channels_last(channels, height, width, pixels.to_f32_vec())?;
        let shape = [channels, height, width];
        let x = GpuTensor::from_f32(&self.gpu, &shape, planes.data(), "picture")?;
        let moments = encoder.forward(&self.room, &x)?;
        let values = moments.to_f32_vec()?;
        if !values.iter().all(|v| v.is_finite()) {
            return Err(ModelError::Internal(
                "vae encode: a value is not a number".into(),
            ));
        }
        let moments = Tensor::from_f32(moments.shape(), values)?;
        Posterior::from_moments(&moments, config.latent_channels)
    }

    fn decoder(&self) -> Result<&Decoder, ModelError> {
        self.decoder.as_ref().ok_or_else(missing_decoder)
    }
}

fn missing_decoder() -> ModelError {
    ModelError::Internal("the vae decoder was not loaded on the gpu".into())
}

/// Scale and shift of a norm, F32.
#[derive(Debug)]
struct Affine {
    weight: GpuTensor,
    bias: GpuTensor,
}

/// Where the VAE's tensors are read from.
#[derive(Clone, Copy)]
struct VaeSource<'a> {
    gpu: &'a Arc<Gpu>,
    source: DeviceSource<'a>,
}

impl VaeSource<'_> {
    fn affine(self, name: &str, channels: usize) -> Result<Affine, ModelError> {
        let part = |kind: &str| {
            self.source
                .f32(self.gpu, &format!("{name}.{kind}"), &[channels])
        };
        Ok(Affine {
            weight: part("weight")?,
            bias: part("bias")?,
        })
    }

    /// A window of `side` in all directions.
    fn conv(
        self,
        name: &str,
        (input, output): (usize, usize),
        side: usize,
    ) -> Result<GpuConvWeight, ModelError> {
        let (weight, bias) = self.raw(name, &[output, input, side, side, side])?;
        Ok(GpuConvWeight::pack(&weight, Some(&bias), ELEMENT)?)
    }

    /// A weight as stored (F32 is not narrowed on the way) and its bias.
    fn raw(self, name: &str, shape: &[usize]) -> Result<(GpuTensor, GpuTensor), ModelError> {
        let bias = self
            .source
            .f32(self.gpu, &format!("{name}.bias"), &shape[..1])?;
        let name = format!("{name}.weight");
        let weight = match self.source {
            DeviceSource::Stored(checkpoint) => {
                GpuTensor::from_host(self.gpu, &checkpoint.tensor(&name, shape)?, "vae weights")?
            }
            DeviceSource::Random { .. } => self.source.bf16(self.gpu, &name, shape)?,
        };
        Ok((weight, bias))
    }
}
