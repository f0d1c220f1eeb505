//! A conditioning picture on its way into the model: once as pixels for the VAE, once as patches for the ViT.
//!
//! HunyuanImage-3.0: the VAE gets the picture scaled to cover its own bucket and cropped in the middle; the ViT
//! gets the uncropped picture scaled to as many patches as fit.

use kernels::Tensor;

use crate::buckets::{Bucket, ResolutionGroup};
use crate::config::VitProcessorConfig;
use crate::error::ModelError;
use crate::layout::{CondImageGrid, ImageGrid};
use crate::picture::RgbImage;
use crate::resample::{bilinear, lanczos};

/// Longest side of a picture that is taken in, in pixels.
pub const MAX_INPUT_SIDE: usize = 16_384;
/// Most pixels of a picture before cropping; bounds memory for very long and narrow pictures.
pub const MAX_RESIZED_PIXELS: usize = 1 << 26;
/// Bounds and end of the search for the ViT scale.
const SCALE_EPS: f64 = 1e-5;
const SCALE_MAX: f64 = 100.0;

/// A picture ready for the VAE encoder.
#[derive(Clone, Debug)]
pub struct VaePicture {
    /// The picture's bucket.
    pub bucket: Bucket,
    /// Scaled and cropped picture of the bucket's size.
    pub rgb: RgbImage,
    /// The same as `[height, width, 3]` in −1..1.
    pub pixels: Tensor,
}

/// A picture ready for the ViT.
#[derive(Clone, Debug)]
pub struct VitPicture {
    /// Patch rows and columns.
    pub grid: (usize, usize),
    /// `[max_num_patches, patch·patch·3]`: real patches in raster order, then zeros.
    pub values: Tensor,
}

/// Both forms of a conditioning picture.
#[derive(Clone, Debug)]
pub struct CondPicture {
    /// For the VAE.
    pub vae: VaePicture,
    /// For the ViT.
    pub vit: VitPicture,
}

/// How a picture gets the size of its bucket.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Fit {
    /// It is scaled to cover it, and cropped in the middle.
    #[default]
    Cover,
    /// Each side is scaled by itself.
    Stretch,
}

/// The size of an image that takes the shape of a shown picture.
///
/// HunyuanImage-3.0: of the pictures (height, width) the first counts whose bucket is that of the image; the
/// image gets its ratio at the area of the square bucket, unless the bucket's own ratio is within 0.01.
///
/// # Errors
/// `InvalidArgument` naming `images` for a picture so narrow that the image would be too long.
pub fn aligned_size(
    group: &ResolutionGroup,
    image: Bucket,
    shown: &[(usize, usize)],
) -> Result<Option<(usize, usize)>, ModelError> {
    for &(height, width) in shown {
        if group.nearest(height, width)?.ratio_index != image.ratio_index {
            continue;
        }
        let (h, w) = (height as f64, width as f64);
        if (h / w - image.ratio()).abs() < 0.01 {
            return Ok(None);
        }
        let base = group.base() as f64;
        let scale = (base * base / (w * h)).sqrt();
        let side = |side: f64| ((side * scale).round_ties_even() as usize).max(1);
        let (height, width) = (side(h), side(w));
        if height.max(width) > MAX_INPUT_SIDE {
            let message = format!("an image of the shape of {w}x{h} would be too long");
            return Err(ModelError::invalid("images", message));
        }
        return Ok(Some((height, width)));
    }
    Ok(None)
}

/// The picture at another size (Lanczos).
pub fn scaled(image: &RgbImage, height: usize, width: usize) -> RgbImage {
    lanczos(image, height, width)
}

impl CondPicture {
    /// Prepares a picture that covers its bucket.
    ///
    /// # Errors
    /// An empty, oversized or absurdly narrow picture, or data that does not fit its size.
    pub fn new(
        image: &RgbImage,
        group: &ResolutionGroup,
        processor: &VitProcessorConfig,
    ) -> Result<Self, ModelError> {
        Self::fitted(image, group, processor, Fit::Cover)
    }

    /// Prepares a picture.
    ///
    /// # Errors
    /// Those of [`CondPicture::new`].
    pub fn fitted(
        image: &RgbImage,
        group: &ResolutionGroup,
        processor: &VitProcessorConfig,
        fit: Fit,
    ) -> Result<Self, ModelError> {
        Ok(Self {
            vae: match fit {
                Fit::Cover => vae_picture(image, group)?,
                Fit::Stretch => {
                    check_picture(image)?;
                    let bucket = group.nearest(image.height, image.width)?;
                    of_bucket(lanczos(image, bucket.height, bucket.width).data, bucket)?
                }
            },
            vit: vit_picture(image, processor)?,
        })
    }

    /// The grids that the sequence layout needs.
    pub fn grid(&self, pixels_per_token: usize) -> CondImageGrid {
        let (height, width) = self.vae.bucket.grid(pixels_per_token);
        CondImageGrid {
            vae: ImageGrid {
                ratio_index: self.vae.bucket.ratio_index,
                height,
                width,
            },
            vit_height: self.vit.grid.0,
            vit_width: self.vit.grid.1,
        }
    }
}

/// Scales a picture to cover its nearest bucket (Lanczos), crops the middle and maps bytes to −1..1.
///
/// # Errors
/// As [`CondPicture::new`].
pub fn vae_picture(image: &RgbImage, group: &ResolutionGroup) -> Result<VaePicture, ModelError> {
    check_picture(image)?;
    let bucket = group.nearest(image.height, image.width)?;
    let (h, w) = (image.height as f64, image.width as f64);
    let (th, tw) = (bucket.height as f64, bucket.width as f64);
    let (rh, rw) = if h / w < th / tw {
        (bucket.height, (th / h * w).round_ties_even() as usize)
    } else {
        ((tw / w * h).round_ties_even() as usize, bucket.width)
    };
    // The pass along rows keeps the height, the one along columns keeps the new width.
    if rh.max(image.height).saturating_mul(rw) > MAX_RESIZED_PIXELS {
        return Err(ModelError::invalid(
            "images",
            format!(
                "a picture of {}x{} is too narrow to scale to {}x{}",
                image.height, image.width, bucket.height, bucket.width
            ),
        ));
    }
    let resized = lanczos(image, rh, rw);
    let top = ((rh - bucket.height) as f64 / 2.0).round_ties_even() as usize;
    let left = ((rw - bucket.width) as f64 / 2.0).round_ties_even() as usize;
    let mut data = Vec::with_capacity(bucket.height * bucket.width * 3);
    for row in top..top + bucket.height {
        let start = (row * rw + left) * 3;
        data.extend_from_slice(&resized.data[start..start + bucket.width * 3]);
    }
    of_bucket(data, bucket)
}

/// A picture that has the size of its bucket.
fn of_bucket(data: Vec<u8>, bucket: Bucket) -> Result<VaePicture, ModelError> {
    let values = data
        .iter()
        .map(|b| (f32::from(*b) / 255.0 - 0.5) / 0.5)
        .collect();
    Ok(VaePicture {
        bucket,
        pixels: Tensor::from_f32(&[bucket.height, bucket.width, 3], values)?,
        rgb: RgbImage {
            width: bucket.width,
            height: bucket.height,
            data,
        },
    })
}

/// Scales a picture to as many patches as fit (bilinear, antialiased) and cuts it into patches.
///
/// # Errors
/// As [`CondPicture::new`].
pub fn vit_picture(
    image: &RgbImage,
    processor: &VitProcessorConfig,
) -> Result<VitPicture, ModelError> {
    check_picture(image)?;
    let patch = processor.patch_size;
    let (rows, columns) = patch_grid(image.height, image.width, patch, processor.max_num_patches)?;
    let resized = bilinear(image, rows * patch, columns * patch);
    let row_values = patch * 3;
    let mut values = vec![0f32; processor.max_num_patches * patch * row_values];
    let mut at = 0;
    for cell in 0..rows * columns {
        let (row, column) = (cell / columns, cell % columns);
        for line in row * patch..(row + 1) * patch {
            let start = (line * columns * patch + column * patch) * 3;
            for (i, byte) in resized.data[start..start + row_values].iter().enumerate() {
                let scaled = f64::from(*byte) * processor.rescale_factor;
                let channel = i % 3;
                values[at] = ((scaled - processor.image_mean[channel])
                    / processor.image_std[channel]) as f32;
                at += 1;
            }
        }
    }
    Ok(VitPicture {
        grid: (rows, columns),
        values: Tensor::from_f32(&[processor.max_num_patches, patch * row_values], values)?,
    })
}

/// Patch rows and columns: the largest scale at which they stay within `max_patches`, found by halving.
///
/// # Errors
/// Not even one row or column of patches fits.
pub fn patch_grid(
    height: usize,
    width: usize,
    patch: usize,
    max_patches: usize,
) -> Result<(usize, usize), ModelError> {
    let cells = |side: usize, scale: f64| -> usize {
        ((side as f64 * scale / patch as f64).ceil() as usize).max(1)
    };
    let (mut low, mut high) = (SCALE_EPS / 10.0, SCALE_MAX);
    while high - low >= SCALE_EPS {
        let scale = (low + high) / 2.0;
        if cells(height, scale) * cells(width, scale) <= max_patches {
            low = scale;
        } else {
            high = scale;
        }
    }
    let (rows, columns) = (cells(height, low), cells(width, low));
    if rows * columns > max_patches {
        return Err(ModelError::invalid(
            "images",
            format!("a picture of {height}x{width} does not fit {max_patches} patches"),
        ));
    }
    Ok((rows, columns))
}

fn check_picture(image: &RgbImage) -> Result<(), ModelError> {
    let (height, width) = (image.height, image.width);
    let sides = 1..=MAX_INPUT_SIDE;
    if !sides.contains(&height) || !sides.contains(&width) {
        return Err(ModelError::invalid(
            "images",
            format!("a picture of {height}x{width} has a side outside 1..={MAX_INPUT_SIDE}"),
        ));
    }
    if image.data.len() != height * width * 3 {
        return Err(ModelError::invalid(
            "images",
            format!(
                "a picture of {height}x{width} has {} bytes of RGB",
                image.data.len()
            ),
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::buckets::BucketSet;
    use proptest::prelude::*;

    fn processor() -> VitProcessorConfig {
        VitProcessorConfig {
            max_num_patches: 64,
            patch_size: 16,
            image_mean: [0.5; 3],
            image_std: [0.5; 3],
            rescale_factor: 1.0 / 255.0,
        }
    }

    fn grey(height: usize, width: usize) -> RgbImage {
        RgbImage {
            width,
            height,
            data: vec![128; height * width * 3],
        }
    }

    fn group() -> ResolutionGroup {
        ResolutionGroup::new(256, 16, BucketSet::Base).unwrap()
    }

    #[test]
    fn a_grey_picture_stays_grey() {
        let picture = CondPicture::new(&grey(90, 240), &group(), &processor()).unwrap();
        assert!(picture.vae.rgb.data.iter().all(|b| *b == 128));
        let (rows, columns) = picture.vit.grid;
        let values = picture.vit.values.to_f32_vec();
        let real = rows * columns * 768;
        assert!(
            values[..real]
                .iter()
                .all(|v| (v - 0.003_921_6).abs() < 1e-6)
        );
        assert!(values[real..].iter().all(|v| *v == 0.0));
    }

    #[test]
    fn an_image_takes_the_shape_of_the_first_picture_with_its_bucket() {
        let group = group();
        let of = |height, width| group.nearest(height, width).unwrap();
        let aligned = |image, shown: &[(usize, usize)]| aligned_size(&group, image, shown).unwrap();
        // 90:240 is 0.375, its bucket 0.391; both sides grow by 256 / sqrt(90 * 240).
        let wide = of(90, 240);
        assert_eq!(aligned(wide, &[(90, 240)]), Some((157, 418)));
        assert_eq!(
            aligned(wide, &[(256, 256), (90, 240), (91, 240)]),
            Some((157, 418))
        );
        assert_eq!(aligned(wide, &[(256, 256)]), None);
        assert_eq!(aligned(of(256, 256), &[(500, 501)]), None);
        assert_eq!(aligned(wide, &[]), None);
        assert!(aligned_size(&group, of(1, 16_000), &[(1, 16_000)]).is_err());
    }

    #[test]
    fn a_stretched_picture_keeps_its_edges() {
        let mut picture = grey(90, 240);
        picture.data[..30 * 3].fill(0);
        let stretched = |fit| {
            let made = CondPicture::fitted(&picture, &group(), &processor(), fit).unwrap();
            made.vae.rgb.data[0]
        };
        assert!(stretched(Fit::Stretch) < 20);
        assert_eq!(scaled(&grey(8, 6), 3, 9), grey(3, 9));
    }

    #[test]
    fn impossible_pictures_are_refused() {
        let mut short = grey(4, 4);
        short.data.pop();
        for image in [grey(0, 4), grey(4, 0), grey(1, MAX_INPUT_SIDE + 1), short] {
            assert!(CondPicture::new(&image, &group(), &processor()).is_err());
        }
        let narrow = CondPicture::new(&grey(MAX_INPUT_SIDE, 1), &group(), &processor());
        assert!(matches!(
            narrow.unwrap_err().kind(),
            crate::ErrorKind::InvalidArgument { field: "images" }
        ));
    }

    proptest! {
        #[test]
        fn patches_fill_the_budget_without_exceeding_it(h in 1usize..3000, w in 1usize..3000) {
            if let Ok((rows, columns)) = patch_grid(h, w, 16, 64) {
                prop_assert!(rows * columns <= 64);
                prop_assert!((rows + 1) * (columns + 1) > 64);
            }
        }
    }
}
