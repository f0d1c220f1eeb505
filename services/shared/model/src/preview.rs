//! Cheap previews: a linear map of each latent position to one colour, fitted to what the VAE decodes.

use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::config::read_bounded;
use crate::error::ModelError;
use crate::picture::{Latents, RgbImage};
use crate::squares::solve;

/// Name of the file with a model's coefficients, in its checkpoint directory.
pub const FILE: &str = "preview.json";
/// Largest accepted file.
const MAX_FILE_BYTES: u64 = 1 << 20;
/// A preview is this many times smaller than the picture, along each side.
const SHRINK: usize = 4;
/// Kept small against the sum of squares, so that channels that never move get no weight.
const RIDGE: f64 = 1e-3;

/// Coefficients of a linear preview, in units of -1..1.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LinearPreview {
    /// Pixels per latent position along each side.
    pixels: usize,
    /// `[3, channels]`.
    weights: Vec<Vec<f32>>,
    /// Of red, green and blue.
    bias: Vec<f32>,
}

impl LinearPreview {
    /// The coefficients in a checkpoint directory; `None` where it has none.
    ///
    /// # Errors
    /// `File` when the file cannot be read or does not fit latents of `channels` channels.
    pub fn load(dir: &Path, channels: usize) -> Result<Option<Self>, ModelError> {
        if !dir.join(FILE).exists() {
            return Ok(None);
        }
        let bytes = read_bounded(dir, FILE, MAX_FILE_BYTES)?;
        let map: Self = serde_json::from_slice(&bytes)
            .map_err(|error| ModelError::file(FILE, error.to_string()))?;
        let fits = map.weights.len() == 3
            && map.bias.len() == 3
            && map.pixels > 0
            && map.weights.iter().all(|row| row.len() == channels);
        let values = map.weights.iter().flatten().chain(&map.bias);
        if !fits || values.into_iter().any(|v| !v.is_finite()) {
            let message = format!("is no map of {channels} channels to three colours");
            return Err(ModelError::file(FILE, message));
        }
        Ok(Some(map))
    }

    /// The map that comes closest, in squares, to the pictures that the VAE decodes of these latents; each
    /// position is held against the mean colour of its pixels.
    ///
    /// # Errors
    /// `InvalidArgument` without pairs, or with a picture that is no multiple of its latents.
    pub fn fit(pairs: &[(Latents, RgbImage)]) -> Result<Self, ModelError> {
        let bad = |message: &str| ModelError::invalid("pairs", message);
        let (latents, image) = pairs.first().ok_or_else(|| bad("there are none"))?;
        let (channels, pixels) = (latents.channels(), image.height / latents.height().max(1));
        let wide = channels + 1;
        let mut square = vec![0.0_f64; wide * wide];
        let mut right = vec![[0.0_f64; 3]; wide];
        for (latents, image) in pairs {
            let size = (latents.height() * pixels, latents.width() * pixels);
            if pixels == 0 || (image.height, image.width) != size || latents.channels() != channels
            {
                return Err(bad("a picture does not fit its latents"));
            }
            for y in 0..latents.height() {
                for x in 0..latents.width() {
                    let mut input = position(latents, y, x);
                    input.push(1.0);
                    let colour = mean_colour(image, (y, x), pixels);
                    for i in 0..wide {
                        for j in 0..wide {
                            square[i * wide + j] += input[i] * input[j];
                        }
                        (0..3).for_each(|c| right[i][c] += input[i] * colour[c]);
                    }
                }
            }
        }
        (0..channels).for_each(|i| square[i * wide + i] += RIDGE);
        let solved = solve(square, right).ok_or_else(|| bad("do not determine the map"))?;
        let weights = |c: usize| solved[..channels].iter().map(|row| row[c] as f32).collect();
        Ok(Self {
            pixels,
            weights: (0..3).map(weights).collect(),
            bias: solved[channels].iter().map(|v| *v as f32).collect(),
        })
    }

    /// Root of the mean square distance from the mean colours that [`LinearPreview::fit`] goes by, in grey
    /// levels.
    ///
    /// # Errors
    /// `Internal` when the latents have other channels.
    pub fn error(&self, pairs: &[(Latents, RgbImage)]) -> Result<f64, ModelError> {
        let (mut sum, mut count) = (0.0, 0);
        for (latents, image) in pairs {
            let colours = self.colours(latents)?;
            for (at, colour) in colours.iter().enumerate() {
                let cell = (at / latents.width(), at % latents.width());
                for (got, want) in colour.iter().zip(mean_colour(image, cell, self.pixels)) {
                    sum += (127.5 * (f64::from(*got) - want)).powi(2);
                    count += 1;
                }
            }
        }
        Ok((sum / f64::from(count.max(1))).sqrt())
    }

    /// The colour of each position, in -1..1.
    fn colours(&self, latents: &Latents) -> Result<Vec<[f32; 3]>, ModelError> {
        if latents.channels() != self.weights[0].len() {
            return Err(ModelError::Internal("a preview of other latents".into()));
        }
        let (rows, columns) = (latents.height(), latents.width());
        let mut colours = Vec::with_capacity(rows * columns);
        for y in 0..rows {
            for x in 0..columns {
                let at = position(latents, y, x);
                let colour = |c: usize| {
                    let products = self.weights[c].iter().zip(&at);
                    f64::from(self.bias[c]) + products.map(|(w, v)| f64::from(*w) * v).sum::<f64>()
                };
                colours.push([0, 1, 2].map(|c| colour(c) as f32));
            }
        }
        Ok(colours)
    }

    /// As the file holds it.
    ///
    /// # Errors
    /// `Internal`, which would be a defect.
    pub fn to_json(&self) -> Result<String, ModelError> {
        serde_json::to_string(self).map_err(|error| ModelError::Internal(error.to_string()))
    }

    /// The picture that latents promise, a quarter as wide and high as the decoded one and bilinear between
    /// positions.
    ///
    /// # Errors
    /// `Internal` when the latents have other channels or are not numbers.
    pub fn draw(&self, latents: &Latents) -> Result<RgbImage, ModelError> {
        let colours = self.colours(latents)?;
        let (rows, columns) = (latents.height(), latents.width());
        let side = |positions: usize| (positions * self.pixels / SHRINK).max(1);
        let (height, width) = (side(rows), side(columns));
        let mut values = Vec::with_capacity(height * width * 3);
        for y in 0..height {
            let (top, bottom, down) = between(y, height, rows);
            for x in 0..width {
                let (left, right, across) = between(x, width, columns);
                let at = |y: usize, x: usize| colours[y * columns + x];
                let mix = |a: [f32; 3], b: [f32; 3], share: f32| {
                    std::array::from_fn(|c| a[c] * (1.0 - share) + b[c] * share)
                };
                let upper = mix(at(top, left), at(top, right), across);
                let lower = mix(at(bottom, left), at(bottom, right), across);
                let both: [f32; 3] = mix(upper, lower, down);
                values.extend(both);
            }
        }
        RgbImage::from_unit_values(height, width, &values)
    }
}

/// The channels at one position.
fn position(latents: &Latents, y: usize, x: usize) -> Vec<f64> {
    let plane = latents.height() * latents.width();
    let at = y * latents.width() + x;
    let values = latents.data().iter().skip(at).step_by(plane);
    values.map(|v| f64::from(*v)).collect()
}

/// Mean of the pixels of one position, in -1..1.
fn mean_colour(image: &RgbImage, (y, x): (usize, usize), pixels: usize) -> [f64; 3] {
    let mut sum = [0.0; 3];
    for row in y * pixels..(y + 1) * pixels {
        let from = (row * image.width + x * pixels) * 3;
        for (i, level) in image.data[from..from + pixels * 3].iter().enumerate() {
            sum[i % 3] += f64::from(*level);
        }
    }
    sum.map(|v| v / (pixels * pixels) as f64 / 127.5 - 1.0)
}

/// The two of `cells` that output `index` of `size` lies between, and its share of the second.
fn between(index: usize, size: usize, cells: usize) -> (usize, usize, f32) {
    let at = ((index as f32 + 0.5) * cells as f32 / size as f32 - 0.5).max(0.0);
    let low = (at as usize).min(cells - 1);
    (low, (low + 1).min(cells - 1), at - low as f32)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Latents whose pictures are an exact linear map of them.
    fn pair(seed: usize) -> (Latents, RgbImage) {
        let (channels, height, width, pixels) = (4, 3, 5, 8);
        let value = |i: usize| (((i * 7919 + seed * 104_729) % 200) as f32 / 100.0 - 1.0) * 0.4;
        let data: Vec<f32> = (0..channels * height * width).map(value).collect();
        let latents = Latents::new(channels, height, width, data).unwrap();
        let mut values = Vec::new();
        for y in 0..height * pixels {
            for x in 0..width * pixels {
                let at = position(&latents, y / pixels, x / pixels);
                values.extend([
                    (at[0] + 0.5 * at[1]) as f32,
                    (0.3 - at[2]) as f32,
                    at[3] as f32,
                ]);
            }
        }
        let image = RgbImage::from_unit_values(height * pixels, width * pixels, &values).unwrap();
        (latents, image)
    }

    #[test]
    fn a_linear_decoder_is_found_and_drawn() {
        let pairs: Vec<_> = (0..4).map(pair).collect();
        let map = LinearPreview::fit(&pairs).unwrap();
        let want = [
            [1.0, 0.5, 0.0, 0.0],
            [0.0, 0.0, -1.0, 0.0],
            [0.0, 0.0, 0.0, 1.0],
        ];
        for (got, want) in map.weights.iter().flatten().zip(want.as_flattened()) {
            assert!((got - want).abs() < 0.02, "{map:?}");
        }
        let drawn = map.draw(&pairs[0].0).unwrap();
        assert_eq!((drawn.height, drawn.width), (6, 10));
        // Corners are not mixed with other positions.
        let exact = &pairs[0].1.data[..3];
        for (got, want) in drawn.data[..3].iter().zip(exact) {
            assert!(got.abs_diff(*want) <= 2, "{:?} {exact:?}", &drawn.data[..3]);
        }
    }

    #[test]
    fn a_file_of_other_channels_is_refused_by_name() {
        let dir = std::env::temp_dir().join(format!("omni-preview-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        assert!(LinearPreview::load(&dir, 4).unwrap().is_none());
        let map = LinearPreview::fit(&[pair(0), pair(1)]).unwrap();
        std::fs::write(dir.join(FILE), map.to_json().unwrap()).unwrap();
        assert_eq!(LinearPreview::load(&dir, 4).unwrap().unwrap(), map);
        let error = LinearPreview::load(&dir, 5).unwrap_err();
        assert!(error.to_string().contains(FILE), "{error}");
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
