//! Latents and pictures as they leave the model.

use kernels::Tensor;

use crate::error::ModelError;

/// Latents of one picture, `[channels, h, w]`, F32.
#[derive(Clone, Debug, PartialEq)]
pub struct Latents {
    channels: usize,
    height: usize,
    width: usize,
    data: Vec<f32>,
}

impl Latents {
    /// Wraps values in `[channels, h, w]` order.
    ///
    /// # Errors
    /// `Internal` when the number of values does not match.
    pub fn new(
        channels: usize,
        height: usize,
        width: usize,
        data: Vec<f32>,
    ) -> Result<Self, ModelError> {
        if channels * height * width != data.len() {
            return Err(ModelError::Internal(format!(
                "latents of {channels} x {height} x {width} got {} values",
                data.len()
            )));
        }
        Ok(Self {
            channels,
            height,
            width,
            data,
        })
    }

    /// Reorders values from `[h, w, channels]`.
    ///
    /// # Errors
    /// `Internal` when the number of values does not match.
    pub fn from_channels_last(
        channels: usize,
        height: usize,
        width: usize,
        data: Vec<f32>,
    ) -> Result<Self, ModelError> {
        let mut latents = Self::new(channels, height, width, data)?;
        latents.data = transposed(&latents.data, height * width, channels);
        Ok(latents)
    }

    /// Channels.
    pub fn channels(&self) -> usize {
        self.channels
    }

    /// Latent rows.
    pub fn height(&self) -> usize {
        self.height
    }

    /// Latent columns.
    pub fn width(&self) -> usize {
        self.width
    }

    /// The values, `[channels, h, w]`.
    pub fn data(&self) -> &[f32] {
        &self.data
    }

    /// Whether every value is a finite number.
    pub fn is_finite(&self) -> bool {
        self.data.iter().all(|v| v.is_finite())
    }

    /// Channels-last copy, `[1, h, w, channels]`.
    ///
    /// # Errors
    /// `Kernel`, which would be a defect.
    pub(crate) fn to_tensor(&self) -> Result<Tensor, ModelError> {
        let data = transposed(&self.data, self.channels, self.height * self.width);
        Ok(Tensor::from_f32(
            &[1, self.height, self.width, self.channels],
            data,
        )?)
    }

    pub(crate) fn map(&self, f: impl Fn(f32) -> f32) -> Self {
        Self {
            data: self.data.iter().map(|v| f(*v)).collect(),
            ..*self
        }
    }
}

/// `[rows, columns]` to `[columns, rows]`.
fn transposed(data: &[f32], rows: usize, columns: usize) -> Vec<f32> {
    let mut out = vec![0.0; data.len()];
    for row in 0..rows {
        for column in 0..columns {
            out[column * rows + row] = data[row * columns + column];
        }
    }
    out
}

/// An 8-bit RGB picture.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RgbImage {
    /// Pixels across.
    pub width: usize,
    /// Pixels down.
    pub height: usize,
    /// `[height, width, 3]`.
    pub data: Vec<u8>,
}

impl RgbImage {
    /// From values around -1..1, `[height, width, 3]`: `clamp(v / 2 + 0.5, 0, 1) * 255`, halves to even.
    ///
    /// # Errors
    /// `Internal` when the number of values does not match or one is not a number.
    pub fn from_unit_values(
        height: usize,
        width: usize,
        values: &[f32],
    ) -> Result<Self, ModelError> {
        if values.len() != height * width * 3 {
            return Err(ModelError::Internal(format!(
                "picture of {width} x {height} got {} values",
                values.len()
            )));
        }
        if values.iter().any(|v| v.is_nan()) {
            return Err(ModelError::Internal(
                "the decoded picture is not a number".into(),
            ));
        }
        let level = |v: &f32| ((v / 2.0 + 0.5).clamp(0.0, 1.0) * 255.0).round_ties_even() as u8;
        Ok(Self {
            width,
            height,
            data: values.iter().map(level).collect(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn channels_last_and_first_are_inverse() {
        let data: Vec<f32> = (0..24).map(|i| i as f32).collect();
        let latents = Latents::new(2, 3, 4, data).unwrap();
        let back = latents.to_tensor().unwrap().to_f32_vec();
        assert_eq!(back[..3], [0.0, 12.0, 1.0]);
        assert_eq!(Latents::from_channels_last(2, 3, 4, back).unwrap(), latents);
        assert!(Latents::new(2, 3, 4, vec![0.0; 23]).is_err());
    }

    #[test]
    fn grey_levels_are_clamped_and_halves_go_to_even() {
        // v with (v / 2 + 0.5) * 255 exactly 0.5 and 1.5 does not exist in binary; thirds do the rounding.
        let values = [-7.0, 7.0, 0.0, -1.0, 1.0, 0.25];
        let image = RgbImage::from_unit_values(1, 2, &values).unwrap();
        assert_eq!(image.data, [0, 255, 128, 0, 255, 159]);
        assert!(RgbImage::from_unit_values(1, 2, &[f32::NAN; 6]).is_err());
        assert!(RgbImage::from_unit_values(2, 2, &values).is_err());
    }
}
