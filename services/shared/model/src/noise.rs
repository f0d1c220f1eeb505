//! Initial latents from a seed.
//!
//! The stream is this project's own: ChaCha12 keyed by the seed, each pair of uniforms turned into two normals
//! by Box and Muller in f64, with a portable mathematics library. It is not the generator of any other framework, so a seed gives a picture of its
//! own here; the same seed and shape give the same latents on every machine and for every batch.

use half::bf16;
use rand::{RngCore, SeedableRng};
use rand_chacha::ChaCha12Rng;

use crate::error::ModelError;

/// Most values of one latent; an image of 65536 tokens with 256 channels.
const MAX_VALUES: usize = 1 << 24;

/// Standard normal latents `[channels, height, width]`, rounded to bf16 and widened (the model was trained to
/// start from bf16 noise).
///
/// # Errors
/// A shape with no values or with absurdly many.
pub fn initial_latents(
    seed: u64,
    channels: usize,
    height: usize,
    width: usize,
) -> Result<Vec<f32>, ModelError> {
    Ok(standard_normal(seed, channels, height, width)?
        .into_iter()
        .map(|v| bf16::from_f64(v).to_f32())
        .collect())
}

/// Standard normal values `[channels, height, width]` in f32, for sampling a posterior; the stream differs from
/// that of [`initial_latents`] with the same seed.
///
/// # Errors
/// A shape with no values or with absurdly many.
pub fn posterior_noise(
    seed: u64,
    channels: usize,
    height: usize,
    width: usize,
) -> Result<Vec<f32>, ModelError> {
    // Any fixed constant that moves the key keeps the two streams apart.
    let seed = seed ^ 0x9E37_79B9_7F4A_7C15;
    Ok(standard_normal(seed, channels, height, width)?
        .into_iter()
        .map(|v| v as f32)
        .collect())
}

fn standard_normal(
    seed: u64,
    channels: usize,
    height: usize,
    width: usize,
) -> Result<Vec<f64>, ModelError> {
    let count = channels
        .checked_mul(height)
        .and_then(|n| n.checked_mul(width))
        .filter(|n| (1..=MAX_VALUES).contains(n))
        .ok_or_else(|| {
            ModelError::Internal(format!("noise of shape [{channels}, {height}, {width}]"))
        })?;
    let mut rng = ChaCha12Rng::seed_from_u64(seed);
    let mut values = Vec::with_capacity(count + 1);
    while values.len() < count {
        // (0, 1], so that the logarithm is finite.
        let radius = (-2.0 * libm::log(1.0 - unit(&mut rng))).sqrt();
        let (sin, cos) = libm::sincos(std::f64::consts::TAU * unit(&mut rng));
        values.push(radius * cos);
        values.push(radius * sin);
    }
    values.truncate(count);
    Ok(values)
}

/// A uniform value in [0, 1) with 53 random bits.
fn unit(rng: &mut ChaCha12Rng) -> f64 {
    (rng.next_u64() >> 11) as f64 / (1u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_gives_the_same_latents_always_and_another_seed_others() {
        let a = initial_latents(7, 16, 8, 8).unwrap();
        assert_eq!(a, initial_latents(7, 16, 8, 8).unwrap());
        assert_ne!(a, initial_latents(8, 16, 8, 8).unwrap());
        assert_ne!(a, posterior_noise(7, 16, 8, 8).unwrap());
        // Fixed values: a change of the stream changes every picture that anyone has made.
        let first: Vec<f32> = a[..4].to_vec();
        assert_eq!(first, STREAM_OF_SEED_7);
    }

    const STREAM_OF_SEED_7: [f32; 4] = [-0.086_914_06, 0.232_421_88, -0.535_156_25, -0.146_484_38];

    #[test]
    fn values_are_standard_normal_and_exact_in_bf16() {
        let values = initial_latents(u64::MAX, 16, 64, 64).unwrap();
        let count = values.len() as f64;
        let mean = values.iter().map(|v| f64::from(*v)).sum::<f64>() / count;
        let variance = values.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>() / count;
        assert!(mean.abs() < 0.02, "{mean}");
        assert!((variance - 1.0).abs() < 0.02, "{variance}");
        assert!(values.iter().all(|v| bf16::from_f32(*v).to_f32() == *v));
    }

    #[test]
    fn absurd_shapes_are_refused() {
        assert!(initial_latents(0, 0, 8, 8).is_err());
        assert!(initial_latents(0, usize::MAX, 8, 8).is_err());
        assert!(initial_latents(0, 1 << 12, 1 << 12, 1 << 12).is_err());
    }
}
