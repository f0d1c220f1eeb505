//! Resampling of 8-bit RGB pictures, to the byte as the reference prepares them.
//!
//! Separable, along rows first, fixed-point weights, rounding to bytes between the passes. The picture library of the
//! reference keeps 22 fraction bits of a weight (Lanczos, for the VAE); its tensor library keeps what fits 16 bits
//! (bilinear, for the ViT). One with the other's weights differs by two grey levels here and there.

use rayon::prelude::*;

use crate::picture::RgbImage;

/// Fraction bits of a wide weight: what 32 bits leave beside a byte and the kernel's overshoot.
const WIDE_BITS: u32 = 22;
/// Most fraction bits of a narrow weight, however small the weights are.
const MAX_NARROW_BITS: u32 = 21;
/// Bytes of a pixel.
const CHANNELS: usize = 3;

/// A resampling kernel and how its weights are stored.
#[derive(Clone, Copy)]
struct Filter {
    /// Half width in source pixels, before the kernel is stretched for shrinking.
    reach: f64,
    kernel: fn(f64) -> f64,
    /// Weights fit 16 bits.
    narrow: bool,
}

const LANCZOS: Filter = Filter {
    reach: 3.0,
    kernel: lanczos_kernel,
    narrow: false,
};
const BILINEAR: Filter = Filter {
    reach: 1.0,
    kernel: triangle_kernel,
    narrow: true,
};

/// The source pixels of one target pixel and their weights.
struct Taps {
    first: usize,
    weights: Vec<i32>,
}

/// All target pixels of one axis.
struct Axis {
    taps: Vec<Taps>,
    bits: u32,
}

impl Axis {
    /// Where a weighted sum starts, so that [`Axis::byte`] rounds.
    fn half(&self) -> i32 {
        1 << (self.bits - 1)
    }

    /// A weighted sum back to a byte.
    fn byte(&self, sum: i32) -> u8 {
        (sum >> self.bits).clamp(0, 255) as u8
    }
}

/// Resamples to `height` x `width` with the Lanczos kernel of three lobes; both at least 1, as are the sides of `image`.
pub(crate) fn lanczos(image: &RgbImage, height: usize, width: usize) -> RgbImage {
    resample(image, height, width, LANCZOS)
}

/// Resamples to `height` x `width` with the triangle kernel, stretched when shrinking (antialiased).
pub(crate) fn bilinear(image: &RgbImage, height: usize, width: usize) -> RgbImage {
    resample(image, height, width, BILINEAR)
}

fn resample(image: &RgbImage, height: usize, width: usize, filter: Filter) -> RgbImage {
    let wide = along_rows(image, width, filter);
    along_columns(&wide, height, filter)
}

fn sinc(x: f64) -> f64 {
    if x == 0.0 {
        return 1.0;
    }
    let x = x * std::f64::consts::PI;
    libm::sin(x) / x
}

fn lanczos_kernel(x: f64) -> f64 {
    if (-LANCZOS.reach..LANCZOS.reach).contains(&x) {
        sinc(x) * sinc(x / LANCZOS.reach)
    } else {
        0.0
    }
}

fn triangle_kernel(x: f64) -> f64 {
    (1.0 - x.abs()).max(0.0)
}

/// Weights of every target pixel of one axis.
fn axis(source: usize, target: usize, filter: Filter) -> Axis {
    let scale = source as f64 / target as f64;
    let stretch = scale.max(1.0);
    let reach = filter.reach * stretch;
    let exact: Vec<(usize, Vec<f64>)> = (0..target)
        .map(|i| {
            let centre = (i as f64 + 0.5) * scale;
            let first = (centre - reach + 0.5).max(0.0) as usize;
            let end = ((centre + reach + 0.5) as usize).min(source);
            let raw: Vec<f64> = (first..end)
                .map(|x| (filter.kernel)((x as f64 - centre + 0.5) / stretch))
                .collect();
            let sum: f64 = raw.iter().sum();
            (first, raw.into_iter().map(|w| w / sum).collect())
        })
        .collect();
    let bits = if filter.narrow {
        narrow_bits(&exact)
    } else {
        WIDE_BITS
    };
    let one = f64::from(1 << bits);
    let fixed = |weights: Vec<f64>| weights.iter().map(|w| (w * one).round() as i32).collect();
    let taps = exact.into_iter().map(|(first, weights)| Taps {
        first,
        weights: fixed(weights),
    });
    Axis {
        taps: taps.collect(),
        bits,
    }
}

/// The most fraction bits with which the largest weight of the axis still fits 16 bits with sign.
fn narrow_bits(exact: &[(usize, Vec<f64>)]) -> u32 {
    let weights = exact.iter().flat_map(|(_, weights)| weights);
    let largest = weights.fold(0.0_f64, |most, &w| most.max(w));
    let fits = |bits: u32| (largest * f64::from(1 << bits)).round() < f64::from(1 << 15);
    let bits = (1..=MAX_NARROW_BITS).rev().find(|&bits| fits(bits));
    bits.unwrap_or(1)
}

fn along_rows(image: &RgbImage, width: usize, filter: Filter) -> RgbImage {
    if width == image.width {
        return image.clone();
    }
    let axis = axis(image.width, width, filter);
    let mut data = vec![0u8; image.height * width * CHANNELS];
    data.par_chunks_exact_mut(width * CHANNELS)
        .zip(image.data.par_chunks_exact(image.width * CHANNELS))
        .for_each(|(target, source)| {
            for (pixel, taps) in target.chunks_exact_mut(CHANNELS).zip(&axis.taps) {
                let mut sums = [axis.half(); CHANNELS];
                let from = source[taps.first * CHANNELS..].chunks_exact(CHANNELS);
                for (value, weight) in from.zip(&taps.weights) {
                    for (sum, byte) in sums.iter_mut().zip(value) {
                        *sum += i32::from(*byte) * weight;
                    }
                }
                for (byte, sum) in pixel.iter_mut().zip(sums) {
                    *byte = axis.byte(sum);
                }
            }
        });
    RgbImage {
        width,
        height: image.height,
        data,
    }
}

fn along_columns(image: &RgbImage, height: usize, filter: Filter) -> RgbImage {
    if height == image.height {
        return image.clone();
    }
    let axis = axis(image.height, height, filter);
    let row = image.width * CHANNELS;
    let mut data = vec![0u8; height * row];
    data.par_chunks_exact_mut(row)
        .zip(&axis.taps)
        .for_each(|(target, taps)| {
            let mut sums = vec![axis.half(); row];
            let from = image.data[taps.first * row..].chunks_exact(row);
            for (source, weight) in from.zip(&taps.weights) {
                for (sum, byte) in sums.iter_mut().zip(source) {
                    *sum += i32::from(*byte) * weight;
                }
            }
            for (byte, sum) in target.iter_mut().zip(sums) {
                *byte = axis.byte(sum);
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
    fn narrow_weights_use_16_bits_and_no_more() {
        for (source, target) in [(7, 7), (7, 20), (1000, 3), (4000, 1)] {
            let axis = axis(source, target, BILINEAR);
            let largest = axis
                .taps
                .iter()
                .flat_map(|taps| &taps.weights)
                .max()
                .unwrap();
            assert!(*largest < 1 << 15, "{source} to {target}: {largest}");
            assert!(*largest >= 1 << 14 || axis.bits == MAX_NARROW_BITS);
        }
    }

    #[test]
    fn halving_by_the_triangle_averages_neighbours() {
        let image = picture(1, 4, [[0; 3], [80; 3], [160; 3], [240; 3]].concat());
        // Weights 3/8, 3/8, 1/8 over what lies inside, normalised; worked out by hand.
        assert_eq!(bilinear(&image, 1, 2).data, [[57; 3], [183; 3]].concat());
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
            prop_assert_eq!(bilinear(&image, th, tw).data, colour.repeat(th * tw));
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
