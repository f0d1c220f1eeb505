//! The last frame alone, and tiles over ranks: exactly what all frames on one rank give.
#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use std::time::Duration;

use common::config;
use model::vae::Tiles;
use model::{Latents, LoadOptions, Model, Parts};
use parallel::collective::threads;
use parallel::{Axis, Plan};

fn model() -> Model {
    let options = LoadOptions {
        parts: Parts {
            diffusion: false,
            ..Parts::DENOISE
        },
        ..LoadOptions::default()
    };
    Model::random(config(false), options, 5).unwrap()
}

fn latents(height: usize, width: usize) -> Latents {
    let values = (0..4 * height * width).map(|i| (i as f32 * 0.7).sin());
    Latents::new(4, height, width, values.collect()).unwrap()
}

#[test]
fn the_last_frame_alone_is_the_last_of_all_frames_bit_for_bit() {
    let model = model();
    for (height, width) in [(1, 1), (2, 3), (5, 4)] {
        for tiles in [Tiles::Whole, Tiles::Overlapping(0.25)] {
            let scaled = latents(height, width);
            let last = model.vae().decode_values(&scaled, tiles).unwrap();
            let factor = model.config().vae.scaling_factor as f32;
            let data = scaled.data().iter().map(|v| v / factor + 0.0).collect();
            let z = Latents::new(4, height, width, data).unwrap();
            let all = model
                .vae()
                .decode_frames(&z, tiles, &mut |_, _| {})
                .unwrap();
            assert_eq!(all.dim(1), 4);
            let values = all.to_f32_vec();
            let from = values.len() / 4 * 3;
            assert!(
                last.to_f32_vec() == values[from..],
                "{height} x {width}, {tiles:?}"
            );
        }
    }
}

#[test]
fn tiles_over_ranks_are_the_tiles_of_one_rank_bit_for_bit() {
    let whole = model();
    // Tiles of 4 x 4: one, some that do not divide over the ranks, fewer than ranks.
    for (height, width) in [(4, 4), (9, 5), (6, 12)] {
        let latents = latents(height, width);
        let want = whole
            .vae()
            .decode_values(&latents, Tiles::Overlapping(0.25))
            .unwrap();
        let plan: Plan = "ulysses=3".parse().unwrap();
        let got = threads::on_ranks(&plan, Duration::from_secs(60), |ctx| {
            let group = ctx.group(Axis::Ulysses.into()).unwrap();
            let picture = whole
                .vae()
                .decode_values_over(group, &latents, 0.25)
                .unwrap();
            picture.to_f32_vec()
        });
        for (rank, got) in got.unwrap().into_iter().enumerate() {
            assert!(got == want.to_f32_vec(), "{height} x {width}, rank {rank}");
        }
    }
}
