//! The video VAE, used for single pictures: a picture is four equal frames on the way in and the last of
//! four frames on the way out.

mod blocks;
mod decoder;
mod encoder;
mod resample;
mod tiling;

use kernels::Tensor;
use parallel::Collective;

use self::decoder::Decoder;
use self::encoder::Encoder;
use self::tiling::Tiling;
use crate::config::{ModelConfig, VaeConfig};
use crate::error::ModelError;
use crate::picture::{Latents, RgbImage};
use crate::source::Scope;

/// Bounds of the log variance of a latent (HunyuanImage-3.0 specification, VAE encoder).
const LOG_VARIANCE: (f32, f32) = (-30.0, 20.0);

/// Whether a picture is processed whole or in tiles.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Tiles {
    /// The whole picture at once: exact.
    #[default]
    Whole,
    /// Tiles of the config's `vae.sample_size` that overlap by this fraction (released code: 0.25 or 0.125):
    /// an approximation with bounded memory. A picture no larger than one tile is processed whole.
    Overlapping(f64),
}

impl Tiles {
    /// Latent positions down and across of the largest piece that is decoded at once, of a picture of such latents.
    pub fn largest(self, config: &VaeConfig, (height, width): (usize, usize)) -> (usize, usize) {
        let tile = config.sample_size / config.spatial_factor;
        match self {
            Self::Whole => (height, width),
            Self::Overlapping(_) => (height.min(tile), width.min(tile)),
        }
    }
}

/// The picture `[h, w, c]` of scaled latents that `each` decodes, in tiles where there are some.
pub(crate) fn tiled(
    config: &VaeConfig,
    tiles: Tiles,
    latents: &Latents,
    each: &mut dyn FnMut(&Latents) -> Result<Tensor, ModelError>,
) -> Result<Tensor, ModelError> {
    let (channels, size) = (latents.channels(), (latents.height(), latents.width()));
    let Tiles::Overlapping(overlap) = tiles else {
        return each(latents);
    };
    if tiles.largest(config, size) == size {
        return each(latents);
    }
    let tile = config.sample_size / config.spatial_factor;
    let z = latents
        .to_tensor()?
        .reshape(&[1, 1, size.0, size.1, channels])?;
    let whole = Tiling::new(tile, config.sample_size, overlap)?.run(&z, |part| {
        let (height, width) = (part.dim(2), part.dim(3));
        let part = Latents::from_channels_last(channels, height, width, part.to_f32_vec())?;
        let picture = each(&part)?;
        let (height, width, colours) = (picture.dim(0), picture.dim(1), picture.dim(2));
        Ok(picture.reshape(&[1, 1, height, width, colours])?)
    })?;
    Ok(whole.reshape(&[whole.dim(2), whole.dim(3), whole.dim(4)])?)
}

/// A latent distribution, both `[latent, h, w]`.
#[derive(Clone, Debug, PartialEq)]
pub struct Posterior {
    /// Mean.
    pub mean: Latents,
    /// Log variance, clamped.
    pub log_variance: Latents,
}

/// The VAE, each half present where it was asked for.
#[derive(Debug)]
pub struct Vae {
    config: VaeConfig,
    encoder: Option<Encoder>,
    decoder: Option<Decoder>,
}

impl Vae {
    pub(crate) fn load(
        root: &Scope<'_>,
        config: &ModelConfig,
        with_encoder: bool,
        with_decoder: bool,
    ) -> Result<Self, ModelError> {
        let (scope, config) = (root.child("vae"), config.vae.clone());
        let encoder = with_encoder.then(|| Encoder::load(&scope.child("encoder"), &config));
        let decoder = with_decoder.then(|| Decoder::load(&scope.child("decoder"), &config));
        Ok(Self {
            encoder: encoder.transpose()?,
            decoder: decoder.transpose()?,
            config,
        })
    }

    /// The picture of scaled latents `[latent, h, w]`.
    ///
    /// # Errors
    /// `Internal` when the decoder was not loaded, the channels do not match or a value is not a number.
    pub fn decode(&self, latents: &Latents, tiles: Tiles) -> Result<RgbImage, ModelError> {
        let values = self.decode_values(latents, tiles)?;
        RgbImage::from_unit_values(values.dim(0), values.dim(1), values.as_f32()?)
    }

    /// The picture of scaled latents before clamping, `[h, w, 3]` around -1..1: the last decoded frame.
    ///
    /// # Errors
    /// `Internal` when the decoder was not loaded or the channels do not match.
    pub fn decode_values(&self, latents: &Latents, tiles: Tiles) -> Result<Tensor, ModelError> {
        tiled(&self.config, tiles, latents, &mut |piece| {
            let (decoder, z) = self.decoded(&self.unscale(piece))?;
            let last = decoder.last_frame(&z)?;
            Ok(last.reshape(&[last.dim(2), last.dim(3), last.dim(4)])?)
        })
    }

    /// Like a tiled [`Vae::decode_values`], bit for bit, with the tiles dealt out over the ranks of `group`,
    /// each of which has the decoder and gets the whole picture. A picture of one tile is decoded by each.
    ///
    /// # Errors
    /// Those of [`Vae::decode_values`]; `Ranks` when another rank fails.
    pub fn decode_values_over(
        &self,
        group: &dyn Collective,
        latents: &Latents,
        overlap: f64,
    ) -> Result<Tensor, ModelError> {
        let (decoder, z) = self.decoded(&self.unscale(latents))?;
        let (tile, side) = (self.latent_tile(), self.config.sample_size);
        let Some(overlap) = self.overlap(Tiles::Overlapping(overlap), &z, tile) else {
            return self.decode_values(latents, Tiles::Whole);
        };
        let tiling = Tiling::new(tile, side, overlap)?;
        let tiles = tiling.tiles(&z)?;
        let scale = side / tile;
        let shape = |t: &Tensor| {
            let (height, width) = (t.dim(2) * scale, t.dim(3) * scale);
            [1, 1, height, width, self.config.out_channels]
        };
        let values = |t: &Tensor| shape(t).iter().product::<usize>();
        let largest = tiles.iter().map(values).max().unwrap_or(0);
        let (ranks, own) = (group.size(), group.index());
        let mut mine = Vec::new();
        for tile in tiles.iter().skip(own).step_by(ranks) {
            mine.extend(decoder.last_frame(tile)?.to_f32_vec());
            mine.resize(mine.len().next_multiple_of(largest), 0.0);
        }
        // Every rank sends as much as the one with the most tiles.
        let each = tiles.len().div_ceil(ranks) * largest;
        mine.resize(each, 0.0);
        let all = group.all_gather(mine)?.wait()?;
        let mut number = 0;
        let picture = tiling.run(&z, |t| {
            let from = number % ranks * each + number / ranks * largest;
            number += 1;
            Ok(Tensor::from_f32(
                &shape(t),
                all[from..from + values(t)].to_vec(),
            )?)
        })?;
        Ok(picture.reshape(&[picture.dim(2), picture.dim(3), picture.dim(4)])?)
    }

    /// All frames `[1, t, h, w, 3]` (before clamping) of unscaled latents `[latent, h, w]`. `see` gets named
    /// inner activations of an untiled pass.
    ///
    /// # Errors
    /// `Internal` when the decoder was not loaded or the channels do not match.
    pub fn decode_frames(
        &self,
        z: &Latents,
        tiles: Tiles,
        see: &mut dyn FnMut(&str, &Tensor),
    ) -> Result<Tensor, ModelError> {
        let (decoder, z) = self.decoded(z)?;
        let (tile, side) = (self.latent_tile(), self.config.sample_size);
        match self.overlap(tiles, &z, tile) {
            None => decoder.forward(&z, see),
            Some(overlap) => {
                Tiling::new(tile, side, overlap)?.run(&z, |t| decoder.forward(t, &mut |_, _| {}))
            }
        }
    }

    /// The distribution of a picture's (unscaled) latents; `pixels [h, w, 3]` in -1..1, sides multiples of
    /// the spatial factor. `see` gets named inner activations of an untiled pass.
    ///
    /// # Errors
    /// `Internal` when the encoder was not loaded or a side does not divide.
    pub fn encode(
        &self,
        pixels: &Tensor,
        tiles: Tiles,
        see: &mut dyn FnMut(&str, &Tensor),
    ) -> Result<Posterior, ModelError> {
        let encoder = self.encoder.as_ref().ok_or_else(|| {
            ModelError::Internal("the vae encoder was not loaded (LoadOptions.vae_encoder)".into())
        })?;
        let frame = pixels.reshape(&[1, pixels.dim(0), pixels.dim(1), pixels.dim(2)])?;
        let frames = Tensor::concat0(&vec![&frame; self.config.temporal_factor])?;
        let x = frames.reshape(&[
            1,
            self.config.temporal_factor,
            pixels.dim(0),
            pixels.dim(1),
            pixels.dim(2),
        ])?;
        let (tile, side) = (self.latent_tile(), self.config.sample_size);
        let moments = match self.overlap(tiles, &x, side) {
            None => encoder.forward(&x, see)?,
            Some(overlap) => {
                Tiling::new(side, tile, overlap)?.run(&x, |t| encoder.forward(t, &mut |_, _| {}))?
            }
        };
        Posterior::from_moments(&moments, self.config.latent_channels)
    }

    /// Scaled latents from a distribution and standard normal noise `[latent, h, w]`.
    ///
    /// # Errors
    /// `Internal` when the noise has another shape.
    pub fn sample(&self, posterior: &Posterior, noise: &Latents) -> Result<Latents, ModelError> {
        let mean = &posterior.mean;
        if (noise.channels(), noise.height(), noise.width())
            != (mean.channels(), mean.height(), mean.width())
        {
            return Err(ModelError::Internal(
                "posterior noise has another shape".into(),
            ));
        }
        let (scale, shift) = self.scale_shift();
        let values = mean
            .data()
            .iter()
            .zip(posterior.log_variance.data())
            .zip(noise.data());
        let data = values
            .map(|((m, lv), n)| (m + (0.5 * lv).exp() * n - shift) * scale)
            .collect();
        Latents::new(mean.channels(), mean.height(), mean.width(), data)
    }

    /// The decoder, and unscaled latents as it takes them, `[1, 1, h, w, latent]`.
    fn decoded(&self, z: &Latents) -> Result<(&Decoder, Tensor), ModelError> {
        let decoder = self.decoder.as_ref().ok_or_else(|| {
            ModelError::Internal("the vae decoder was not loaded (LoadOptions.vae_decoder)".into())
        })?;
        if z.channels() != self.config.latent_channels {
            return Err(ModelError::Internal(format!(
                "latents have {} channels, the vae takes {}",
                z.channels(),
                self.config.latent_channels
            )));
        }
        let z = z
            .to_tensor()?
            .reshape(&[1, 1, z.height(), z.width(), z.channels()])?;
        Ok((decoder, z))
    }

    /// Latents as the decoder takes them: divided by the scaling factor, then shifted.
    fn unscale(&self, latents: &Latents) -> Latents {
        let (scale, shift) = self.scale_shift();
        latents.map(|v| v / scale + shift)
    }

    fn scale_shift(&self) -> (f32, f32) {
        (
            self.config.scaling_factor as f32,
            self.config.shift_factor.unwrap_or(0.0) as f32,
        )
    }

    fn latent_tile(&self) -> usize {
        self.config.sample_size / self.config.spatial_factor
    }

    /// The overlap, when tiling is on and `x [1, t, h, w, c]` is larger than one tile.
    fn overlap(&self, tiles: Tiles, x: &Tensor, tile: usize) -> Option<f64> {
        match tiles {
            Tiles::Overlapping(overlap) if x.dim(2) > tile || x.dim(3) > tile => Some(overlap),
            _ => None,
        }
    }
}

impl Posterior {
    /// Splits `[1, 1, h, w, 2 latent]` into mean (first half) and log variance.
    pub(crate) fn from_moments(moments: &Tensor, latent: usize) -> Result<Self, ModelError> {
        let (height, width) = (moments.dim(2), moments.dim(3));
        let values = moments.as_f32()?;
        let half = |offset: usize, clamp: bool| {
            let pixels = values.chunks_exact(2 * latent);
            let half = pixels.flat_map(|p| p[offset..offset + latent].iter().copied());
            let data = half
                .map(|v| {
                    if clamp {
                        v.clamp(LOG_VARIANCE.0, LOG_VARIANCE.1)
                    } else {
                        v
                    }
                })
                .collect();
            Latents::from_channels_last(latent, height, width, data)
        };
        Ok(Self {
            mean: half(0, false)?,
            log_variance: half(latent, true)?,
        })
    }
}
