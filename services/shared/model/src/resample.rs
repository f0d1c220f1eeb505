//! Lanczos resampling of 8-bit RGB pictures.
//!
//! Separable, along rows first, with 22-bit fixed-point weights and rounding to bytes between the passes: the
//! arithmetic of the imaging library that the reference prepares its pictures with, so that the VAE sees the very
//! same bytes. (Libraries with 16-bit weights differ by two grey levels here and there.)

use rayon::prelude::*;

use crate::picture::RgbImage;

/// Half width of the Lanczos kernel in source pixels, before it is stretched for shrinking.
const LOBES: f64 = 3.0;
/// Fraction bits of a weight: what 32 bits leave beside a byte and the kernel's overshoot.
const FRACTION_BITS: u32 = 22;
/// Bytes of a pixel.
const CHANNELS: usize = 3;

/// The source pixels of one target pixel and their weights.
struct Taps {
    first: usize,
    weights: Vec<i32>,
}

/// Resamples to `height` x `width`; both at least 1, as are the sides of `image`.
pub(crate) fn lanczos(image: &RgbImage, height: usize, width: usize) -> RgbImage {
    let wide = along_rows(image, width);
    along_columns(&wide, height)
}

fn sinc(x: f64) -> f64 {
    if x == 0.0 {
        return 1.0;
    }
    let x = x * std::f64::consts::PI;
    libm::sin(x) / x
}

fn kernel(x: f64) -> f64 {
    if (-LOBES..LOBES).contains(&x) {
        sinc(x) * sinc(x / LOBES)
    } else {
        0.0
    }
}

/// Weights of every target pixel of one axis.
fn taps(source: usize, target: usize) -> Vec<Taps> {
    let scale = source as f64 / target as f64;
    let stretch = scale.max(1.0);
    let reach = LOBES * stretch;
    (0..target)
        .map(|i| {
            let centre = (i as f64 + 0.5) * scale;
            let first = (centre - reach + 0.5).max(0.0) as usize;
            let end = ((centre + reach + 0.5) as usize).min(source);
            let raw: Vec<f64> = (first..end)
                .map(|x| kernel((x as f64 - centre + 0.5) / stretch))
                .collect();
            let sum: f64 = raw.iter().sum();
            let one = f64::from(1 << FRACTION_BITS);
            Taps {
                first,
                weights: raw
                    .into_iter()
                    .map(|w| (w / sum * one).round() as i32)
                    .collect(),
            }
        })
        .collect()
}

/// A weighted sum back to a byte, rounded.
fn to_byte(sum: i32) -> u8 {
    (sum >> FRACTION_BITS).clamp(0, 255) as u8
}

const HALF: i32 = 1 << (FRACTION_BITS - 1);

fn along_rows(image: &RgbImage, width: usize) -> RgbImage {
    if width == image.width {
        return image.clone();
    }
    let taps = taps(image.width, width);
    let mut data = vec![0u8; image.height * width * CHANNELS];
    data.par_chunks_exact_mut(width * CHANNELS)
        .zip(image.data.par_chunks_exact(image.width * CHANNELS))
        .for_each(|(target, source)| {
            for (pixel, taps) in target.chunks_exact_mut(CHANNELS).zip(&taps) {
                let mut sums = [HALF; CHANNELS];
                let from = source[taps.first * CHANNELS..].chunks_exact(CHANNELS);
                for (value, weight) in from.zip(&taps.weights) {
                    for (sum, byte) in sums.iter_mut().zip(value) {
                        *sum += i32::from(*byte) * weight;
                    }
                }
                for (byte, sum) in pixel.iter_mut().zip(sums) {
                    *byte = to_byte(sum);
                }
            }
        });
    RgbImage {
        width,
        height: image.height,
        data,
    }
}

fn along_columns(image: &RgbImage, height: usize) -> RgbImage {
    if height == image.height {
        return image.clone();
    }
    let taps = taps(image.height, height);
    let row = image.width * CHANNELS;
    let mut data = vec![0u8; height * row];
    data.par_chunks_exact_mut(row)
        .zip(&taps)
        .for_each(|(target, taps)| {
            let mut sums = vec![HALF; row];
            let from = image.data[taps.first * row..].chunks_exact(row);
            for (source, weight) in from.zip(&taps.weights) {
                for (sum, byte) in sums.iter_mut().zip(source) {
                    *sum += i32::from(*byte) * weight;
                }
            }
            for (byte, sum) in target.iter_mut().zip(sums) {
                *byte = to_byte(sum);
            }
        });
    RgbImage {
        width: image.width,
        height,
        data,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn picture(height: usize, width: usize, data: Vec<u8>) -> RgbImage {
        RgbImage {
            width,
            height,
            data,
        }
    }

    #[test]
    fn the_same_size_is_the_same_picture() {
        let image = picture(2, 3, (0..18).collect());
        assert_eq!(lanczos(&image, 2, 3), image);
    }

    proptest! {
        #[test]
        fn a_plain_colour_stays_plain(
            colour in any::<[u8; 3]>(), h in 1usize..40, w in 1usize..40, th in 1usize..60, tw in 1usize..60
        ) {
            let image = picture(h, w, colour.repeat(h * w));
            prop_assert_eq!(lanczos(&image, th, tw).data, colour.repeat(th * tw));
        }

        #[test]
        fn mirrored_pictures_give_mirrored_results(
            row in proptest::collection::vec(any::<[u8; 3]>(), 1..30), tw in 1usize..50
        ) {
            let mirror = |data: &[u8]| -> Vec<u8> {
                data.chunks_exact(3).rev().flatten().copied().collect()
            };
            let image = picture(1, row.len(), row.concat());
            let turned = picture(1, row.len(), mirror(&image.data));
            let got = mirror(&lanczos(&turned, 1, tw).data);
            let want = lanczos(&image, 1, tw).data;
            // The weights round alike on both sides up to the last bit of the sum.
            prop_assert!(got.iter().zip(&want).all(|(a, b)| a.abs_diff(*b) <= 1));
        }
    }
}
