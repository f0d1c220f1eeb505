//! The VAE on the GPU beside the CPU definition.
//!
//! Needs an H100 or H200: `cargo test -p model --features cuda --test gpu_vae -- --ignored --test-threads 1`.
#![cfg(feature = "cuda")]
#![allow(clippy::unwrap_used, missing_docs)]

#[path = "common/numbers.rs"]
mod numbers;

use std::path::Path;

use kernels::Tensor;
use kernels::cuda::Gpu;
use model::gpu::{GpuVae, GpuVaeParts};
use model::vae::Tiles;
use model::{Latents, LoadOptions, Model};

use numbers::{relative, values};

const CHECKPOINT: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/../../../integration-tests/fixtures/golden/model"
);
const BOTH: GpuVaeParts = GpuVaeParts {
    decoder: true,
    encoder: true,
};
/// f16 activations through some forty layers; f16 on the CPU differs from fp32 as much.
const TOLERANCE: f64 = 1e-2;

fn sides() -> (Model, GpuVae) {
    let cpu = Model::open(Path::new(CHECKPOINT), LoadOptions::default()).unwrap();
    let gpu = Gpu::open(0).unwrap();
    let vae = GpuVae::open(&gpu, Path::new(CHECKPOINT), BOTH).unwrap();
    (cpu, vae)
}

#[test]
#[ignore = "needs a Hopper GPU"]
fn decoded_pictures_equal_those_of_the_cpu() {
    let (cpu, mut vae) = sides();
    let channels = cpu.config().vae.latent_channels;
    // Sizes of whole tiles, of parts of tiles, and positions that are not a multiple of 8; the larger first
    // and last, because memory is used again.
    for (seed, (height, width)) in [(8, 8), (3, 5), (1, 1), (7, 10)].into_iter().enumerate() {
        let data = values(seed as u64 + 1, channels * height * width);
        let latents = Latents::new(channels, height, width, data).unwrap();
        let want = cpu.vae().decode_values(&latents, Tiles::Whole).unwrap();
        let got = vae.decode_values(&latents).unwrap();
        assert_eq!(got.shape(), want.shape());
        let error = relative(got.as_f32().unwrap(), want.as_f32().unwrap());
        assert!(error < TOLERANCE, "{height} x {width}: {error}");
        let image = vae.decode(&latents).unwrap();
        let exact = cpu.vae().decode(&latents, Tiles::Whole).unwrap();
        assert_eq!((image.width, image.height), (exact.width, exact.height));
        let steps = image.data.iter().zip(&exact.data);
        let mean =
            steps.map(|(a, b)| f64::from(a.abs_diff(*b))).sum::<f64>() / exact.data.len() as f64;
        assert!(mean < 1.0, "{height} x {width}: {mean} levels on average");
    }
}

#[test]
#[ignore = "needs a Hopper GPU"]
fn pictures_decoded_in_tiles_equal_those_of_the_cpu() {
    let (cpu, vae) = sides();
    let tiles = Tiles::Overlapping(0.25);
    let mut vae = vae.in_tiles(tiles);
    let config = &cpu.config().vae;
    let tile = config.sample_size / config.spatial_factor;
    for (height, width) in [(tile, tile), (2 * tile + 1, tile - 1), (tile + 3, 2 * tile)] {
        let data = values(height as u64, config.latent_channels * height * width);
        let latents = Latents::new(config.latent_channels, height, width, data).unwrap();
        let want = cpu.vae().decode_values(&latents, tiles).unwrap();
        let got = vae.decode_values(&latents).unwrap();
        assert_eq!(got.shape(), want.shape());
        let error = relative(got.as_f32().unwrap(), want.as_f32().unwrap());
        assert!(error < TOLERANCE, "{height} x {width}: {error}");
        let (image, exact) = (vae.decode(&latents), cpu.vae().decode(&latents, tiles));
        let (image, exact) = (image.unwrap(), exact.unwrap());
        assert_eq!((image.width, image.height), (exact.width, exact.height));
    }
}

#[test]
#[ignore = "needs a Hopper GPU"]
fn encoded_pictures_equal_those_of_the_cpu() {
    let (cpu, mut vae) = sides();
    let side = cpu.config().vae.spatial_factor;
    for (height, width) in [(4, 4), (3, 5)] {
        let (h, w) = (height * side, width * side);
        let pixels = Tensor::from_f32(&[h, w, 3], values(9, h * w * 3)).unwrap();
        let want = cpu
            .vae()
            .encode(&pixels, Tiles::Whole, &mut |_, _| {})
            .unwrap();
        let got = vae.encode(&pixels).unwrap();
        let error = relative(got.mean.data(), want.mean.data());
        assert!(error < TOLERANCE, "mean of {height} x {width}: {error}");
        let error = relative(got.log_variance.data(), want.log_variance.data());
        assert!(error < TOLERANCE, "variance of {height} x {width}: {error}");
    }
}

#[test]
#[ignore = "needs a Hopper GPU"]
fn numbers_that_are_none_are_refused_and_leave_no_trace() {
    let (cpu, mut vae) = sides();
    let channels = cpu.config().vae.latent_channels;
    let good = Latents::new(channels, 4, 4, values(3, channels * 16)).unwrap();
    let before = vae.decode(&good).unwrap();
    let mut bad = good.data().to_vec();
    bad[7] = f32::NAN;
    let bad = Latents::new(channels, 4, 4, bad).unwrap();
    let error = vae.decode(&bad).unwrap_err().to_string();
    assert!(error.contains("not a number"), "{error}");
    assert_eq!(vae.decode(&good).unwrap().data, before.data);
}
