//! The ledger against what a process really takes. A test binary of its own: memory is the process's.
#![allow(clippy::unwrap_used, clippy::print_stderr, missing_docs)]

use std::path::Path;

use dit_worker::ledger::{Load, peak_bytes, rehearse, reset_peak, resident_bytes};
use model::vae::Tiles;
use model::{BalanceOptions, Latents, LoadOptions, Model, Parts};
use stage::{RankLoad, Ranks};

const CHECKPOINT: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/../../integration-tests/fixtures/golden/model"
);

/// Requests, side in pixels and prefix tokens of the kinds of each mix.
const MIXES: [&[(usize, usize, u32)]; 4] = [
    &[(6, 256, 700)],
    &[(2, 512, 300), (4, 256, 100), (6, 128, 900)],
    &[(1, 640, 50)],
    &[(16, 128, 20)],
];
/// Number of the mix that a process of its own is to run.
const MIX: &str = "OMNI_TEST_MIX";

#[test]
fn the_ledger_is_close_to_the_peak_for_every_mix() {
    let mut errors = Vec::new();
    for mix in 0..MIXES.len() {
        // What one mix leaves behind would be there for the next.
        let child = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--ignored", "--exact", "one_mix", "--nocapture"])
            .env(MIX, mix.to_string())
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&child.stdout);
        assert!(child.status.success(), "{said}");
        let error = said.lines().find_map(|line| line.split("error ").nth(1));
        eprintln!("{}", said.lines().find(|l| l.contains("error ")).unwrap());
        errors.push(error.unwrap().parse::<f64>().unwrap());
    }
    // Which buffers two threads find for reuse is chance, and so is whether decodes meet the steps of one large picture or
    // of many small ones: where they do not, less is taken than was foreseen, never much more.
    assert!(
        errors.iter().all(|e| (-0.06..0.25).contains(e)),
        "{errors:?}"
    );
    assert!(errors[0].abs() <= 0.06, "{errors:?}");
}

#[test]
#[ignore = "run by the test above, in processes of its own"]
#[allow(clippy::print_stdout)]
fn one_mix() {
    let mix: usize = std::env::var(MIX).unwrap().parse().unwrap();
    let load = RankLoad {
        parts: Parts::DENOISE,
        alone: Parts::DENOISE,
        plan: "single".parse().unwrap(),
        balance: BalanceOptions::default(),
        residency: model::Residency::All,
        tiles: model::vae::Tiles::Whole,
    };
    let ranks = Ranks::open(Path::new(CHECKPOINT), load).unwrap();
    let load = |(requests, side, prefix): &(usize, usize, u32)| Load {
        requests: *requests,
        size: (*side, *side),
        prefix: *prefix,
        steps: 2,
    };
    let loads: Vec<Load> = MIXES[mix].iter().map(load).collect();
    let seen = rehearse(&ranks, &loads).unwrap();
    let error = (seen.predicted as f64 - seen.peak as f64) / seen.peak as f64;
    println!("{:?}: {seen:?} error {error:+.4}", MIXES[mix]);
}

/// `OMNI_MODEL=DIR OMNI_SIDE=1024 cargo test -p dit-worker --test memory tiled -- --ignored --nocapture`
#[test]
#[ignore = "takes a minute and gigabytes"]
fn a_tiled_decode_takes_a_third_of_the_memory_of_a_whole_one_at_most() {
    let dir = std::env::var("OMNI_MODEL").unwrap();
    let side: usize = std::env::var("OMNI_SIDE").unwrap().parse().unwrap();
    let options = LoadOptions {
        parts: Parts {
            diffusion: false,
            ..Parts::DENOISE
        },
        ..LoadOptions::default()
    };
    let model = Model::open(Path::new(&dir), options).unwrap();
    let (channels, cells) = (
        model.config().vae.latent_channels,
        side / model.config().pixels_per_token(),
    );
    let values = (0..channels * cells * cells).map(|i| (i as f32 * 0.7).sin());
    let latents = Latents::new(channels, cells, cells, values.collect()).unwrap();
    let mut growth = Vec::new();
    // The smaller one first: what it leaves behind hides nothing of the larger one.
    for tiles in [Tiles::Overlapping(0.25), Tiles::Whole] {
        let before = resident_bytes().unwrap();
        reset_peak().unwrap();
        model.vae().decode(&latents, tiles).unwrap();
        growth.push(peak_bytes().unwrap() - before);
    }
    eprintln!("{side}: tiled {} whole {} bytes", growth[0], growth[1]);
    assert!(3 * growth[0] <= growth[1], "{growth:?}");
}
