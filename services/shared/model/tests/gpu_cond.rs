//! What shown pictures put into a sequence, on the GPU beside the CPU.
//!
//! Needs an H100 or H200: `cargo test -p model --features cuda --test gpu_cond -- --ignored --test-threads 1`.
#![cfg(feature = "cuda")]
#![allow(clippy::unwrap_used, clippy::print_stdout, missing_docs)]

#[path = "common/numbers.rs"]
mod numbers;

use std::path::{Path, PathBuf};

use kernels::Tensor;
use kernels::cuda::Gpu;
use model::gpu::GpuConditions;
use model::vit::Patches;
use model::{Latents, LoadOptions, Model, ModelConfig};
use parallel::RankContext;

use numbers::{relative, values};

/// Of bf16 beside F32.
const TOLERANCE: f64 = 1e-2;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../..")
}

/// A tensor of a file of goldens, F32.
fn golden(name: &str) -> Option<(Vec<usize>, Vec<f32>)> {
    let path = root().join("integration-tests/fixtures/golden/04_vit.safetensors");
    let bytes = std::fs::read(path).unwrap();
    let size = usize::try_from(u64::from_le_bytes(bytes[..8].try_into().unwrap())).unwrap();
    let header: serde_json::Value = serde_json::from_slice(&bytes[8..8 + size]).unwrap();
    let entry = header.get(name)?;
    assert_eq!(entry["dtype"], "F32");
    let number = |value: &serde_json::Value| usize::try_from(value.as_u64().unwrap()).unwrap();
    let list = |value: &serde_json::Value| -> Vec<usize> {
        value.as_array().unwrap().iter().map(number).collect()
    };
    let at = list(&entry["data_offsets"]);
    let data = &bytes[8 + size..][at[0]..at[1]];
    let floats = data.chunks_exact(4);
    let floats = floats.map(|four| f32::from_le_bytes(four.try_into().unwrap()));
    Some((list(&entry["shape"]), floats.collect()))
}

#[test]
#[ignore = "needs a Hopper GPU"]
fn vision_features_are_those_of_the_goldens() {
    let gpu = Gpu::open(0).unwrap();
    let dir = root().join("integration-tests/fixtures/golden/model");
    let mut there = GpuConditions::open(&gpu, &dir).unwrap();
    let text = root().join("integration-tests/fixtures/golden/04_vit.json");
    let cases: serde_json::Value = serde_json::from_slice(&std::fs::read(text).unwrap()).unwrap();
    let mut compared = 0;
    for (index, case) in cases.as_array().unwrap().iter().enumerate() {
        let side = |name: &str| usize::try_from(case["vit"][name].as_u64().unwrap()).unwrap();
        let (shape, pixels) = golden(&format!("img{index}.vit_pixel_values")).unwrap();
        let pixels = Tensor::from_f32(&shape[1..], pixels).unwrap();
        let patches = Patches {
            values: &pixels,
            grid: (side("token_h"), side("token_w")),
        };
        let Some((_, want)) = golden(&format!("img{index}.vit_aligned")) else {
            continue;
        };
        let got = there.patches(patches).unwrap();
        let error = relative(&got.to_f32_vec(), &want);
        println!("picture {index}, {:?}: {error:.2e}", patches.grid);
        assert!(error < TOLERANCE, "picture {index}: {error}");
        compared += 1;
    }
    assert!(compared >= 2, "{compared}");
}

/// Grids that fill the tokens of a picture, and that leave some without a patch.
#[test]
#[ignore = "needs a Hopper GPU"]
fn what_a_shown_picture_puts_into_a_sequence_is_that_of_the_cpu() {
    let gpu = Gpu::open(0).unwrap();
    for (name, grids) in [
        (
            "integration-tests/fixtures/golden/model",
            [(8, 8), (3, 7), (1, 1)],
        ),
        ("deploy/demo-model/checkpoint", [(8, 8), (5, 12), (1, 3)]),
    ] {
        let dir = root().join(name);
        let here = Model::open(&dir, LoadOptions::default()).unwrap();
        let mut there = GpuConditions::open(&gpu, &dir).unwrap();
        let config = here.config();
        for (index, grid) in grids.into_iter().enumerate() {
            let seed = index as u64 + 1;
            let width = config.vit.patch_values();
            let pixels = values(seed, grid.0 * grid.1 * width);
            let pixels = Tensor::from_f32(&[grid.0 * grid.1, width], pixels).unwrap();
            let patches = Patches {
                values: &pixels,
                grid,
            };
            let (channels, h, w) = (config.vae.latent_channels, 6 + index, 9);
            let latents = values(seed + 9, channels * h * w);
            let latents = Latents::new(channels, h, w, latents).unwrap();
            let single = RankContext::single();
            let want = here.cond_features(&single, &latents, patches).unwrap();
            let got = there.features(&latents, patches).unwrap();
            let all = [
                ("timestep", &got.timestep, &want.timestep),
                ("vae", &got.vae, &want.vae),
                ("vit", &got.vit, &want.vit),
            ];
            for (what, got, want) in all {
                assert_eq!(got.shape(), want.shape(), "{what}");
                let error = relative(&got.to_f32_vec(), &want.to_f32_vec());
                println!("{name} {grid:?} {what}: {error:.2e}");
                assert!(error < TOLERANCE, "{name} {grid:?} {what}: {error}");
            }
            assert_eq!(got.sample_id, want.sample_id);
        }
    }
}

/// Times of a 1024 x 1024 picture, and its error where the CPU is given the time (`OMNI_VIT_CPU=1`).
#[test]
#[ignore = "needs a Hopper GPU"]
fn a_picture_of_the_released_sizes() {
    let gpu = Gpu::open(0).unwrap();
    let config = root().join("integration-tests/fixtures/published");
    let config = ModelConfig::from_dir(&config).unwrap();
    let mut there = GpuConditions::random(&gpu, &config, 5).unwrap();
    let grid = (32, 31);
    let width = config.vit.patch_values();
    let pixels = values(7, grid.0 * grid.1 * width);
    let pixels = Tensor::from_f32(&[grid.0 * grid.1, width], pixels).unwrap();
    let patches = Patches {
        values: &pixels,
        grid,
    };
    let got = there.patches(patches).unwrap();
    assert_eq!(got.shape(), [1024, config.hidden_size]);
    let again = there.patches(patches).unwrap();
    assert_eq!(got.to_f32_vec(), again.to_f32_vec());
}
