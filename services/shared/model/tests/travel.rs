//! Layers that are read in every pass: the same bits as layers that stay, one read a pass for all of a batch.
#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use std::fs;
use std::path::Path;
use std::time::Duration;

use common::{Case, base, ids, parse};
use model::backbone::NoProbe;
use model::input::RowInput;
use model::{
    BalanceOptions, DenoiseJob, JobOptions, Latents, LoadOptions, Model, Parts, Residency,
};
use parallel::collective::threads;
use parallel::eplb::EplbConfig;
use parallel::{Plan, RankContext};
use serde_json::json;

const PATIENT: Duration = Duration::from_secs(60);
const CHECKPOINT: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/../../../integration-tests/fixtures/golden/model"
);

/// Six layers: enough for some to stay and some to travel on each of two stages.
fn config() -> model::ModelConfig {
    let mut config = base(false);
    for (name, value) in [
        ("num_hidden_layers", json!(6)),
        ("num_attention_heads", json!(8)),
        ("moe_intermediate_size", json!([24, 40, 16, 24, 24, 40])),
        ("num_experts", json!(8)),
        ("moe_topk", json!([3, 2, 4, 3, 2, 2])),
        ("num_shared_expert", json!([2, 1, 1, 2, 1, 1])),
    ] {
        config[name] = value;
    }
    parse(&config)
}

fn open(plan: Plan, rank: usize, residency: Residency, balance: BalanceOptions) -> Model {
    let parts = Parts {
        vae_decoder: false,
        text: true,
        ..Parts::DENOISE
    };
    let options = LoadOptions {
        parts,
        plan,
        rank,
        balance,
        residency,
        ..LoadOptions::default()
    };
    Model::random(config(), options, 5).unwrap()
}

fn alone(residency: Residency) -> Model {
    open(Plan::default(), 0, residency, BalanceOptions::default())
}

/// Four steps of three pictures in one batch, with a chance for experts to move after each.
fn denoise(whole: &Model, model: &Model, ctx: &RankContext) -> (Vec<Option<Latents>>, usize) {
    let mut jobs: Vec<DenoiseJob> = [((2, 3), 9), ((3, 5), 5), ((1, 7), 2)]
        .into_iter()
        .map(|(grid, tokens)| {
            let case = Case {
                grid,
                steps: 4,
                seed: tokens as u64,
                guidance: 3.5,
                tokens: (tokens, tokens + 3),
            };
            let spec = case.spec(whole).part_of(model.rank()).unwrap();
            DenoiseJob::with_options(model, spec, JobOptions::default()).unwrap()
        })
        .collect();
    let mut moves = 0;
    for _ in 0..4 {
        let mut packed: Vec<&mut DenoiseJob> = jobs.iter_mut().collect();
        model.denoise_step(ctx, &mut packed).unwrap();
        let changes = model.rebalance(ctx).unwrap();
        moves += changes.iter().map(|c| c.moves.len()).sum::<usize>();
    }
    (jobs.iter().map(|job| job.latents().ok()).collect(), moves)
}

#[test]
fn layers_that_travel_give_the_bits_of_layers_that_stay_under_plans_and_while_experts_move() {
    let whole = alone(Residency::All);
    let moving = BalanceOptions {
        eplb: EplbConfig {
            enabled: true,
            interval_steps: 1,
        },
        extra_slots: 1,
        hosts: 1,
    };
    for (text, balance) in [
        ("single", BalanceOptions::default()),
        ("pp=2", BalanceOptions::default()),
        ("cfg=2", BalanceOptions::default()),
        ("tp=2,ep=tp", BalanceOptions::default()),
        ("ring=2", BalanceOptions::default()),
        ("ulysses=2,ep=ulysses", moving),
    ] {
        let plan: Plan = text.parse().unwrap();
        let under = |residency| {
            threads::on_ranks(&plan, PATIENT, |ctx| {
                let model = open(plan, ctx.rank(), residency, balance);
                let (latents, moves) = denoise(&whole, &model, &ctx);
                (latents, moves, model.travelling().unwrap())
            })
            .unwrap()
        };
        let stay = under(Residency::All);
        for residency in [Residency::Layers(1), Residency::Layers(0)] {
            for (got, want) in under(residency).iter().zip(&stay) {
                assert!(got.0 == want.0, "{text}, {residency:?}: bits differ");
                assert_eq!(got.1, want.1, "{text}");
                assert!(balance.eplb.enabled == (got.1 > 0), "{text}: moves");
                // One read a step, whatever the batch.
                assert_eq!(got.2.read, 4 * got.2.layers as u64, "{text}");
                assert!(got.2.layers >= 2 && want.2.layers == 0, "{text}");
            }
        }
    }
}

#[test]
fn stored_weights_are_those_that_are_made_up() {
    let dir = tempfile::tempdir().unwrap();
    let options = LoadOptions {
        parts: Parts {
            vae_decoder: false,
            ..Parts::DENOISE
        },
        residency: Residency::Layers(2),
        ..LoadOptions::default()
    };
    let stored = Model::random_stored(config(), options, 5, dir.path()).unwrap();
    let (whole, ctx) = (alone(Residency::All), RankContext::single());
    let (got, want) = (
        denoise(&whole, &stored, &ctx),
        denoise(&whole, &whole, &ctx),
    );
    assert!(got == want);
    let again = Model::random_stored(config(), options, 5, dir.path());
    assert!(again.is_err(), "overwrote a checkpoint");
}

#[test]
fn text_is_the_same_where_layers_travel() {
    let ids = ids(9, 3);
    let run = |residency| {
        let model = alone(residency);
        let mut cache = model.cache(9).unwrap();
        let row = RowInput {
            start: 0,
            ids: &ids,
            images: &[],
            full: &[],
            vectors: &[],
        };
        let ctx = RankContext::single();
        let rows = model.run_rows(&ctx, &[row], &mut [&mut cache], &mut NoProbe);
        rows.unwrap().to_f32_vec()
    };
    assert_eq!(run(Residency::Layers(2)), run(Residency::All));
}

#[test]
fn too_few_bytes_for_two_layers_are_refused_by_name_and_more_bytes_hold_more() {
    let at = |bytes| {
        let options = LoadOptions {
            parts: Parts::PREFIX,
            residency: Residency::Bytes(bytes),
            ..LoadOptions::default()
        };
        Model::random(config(), options, 5)
    };
    let layers = |bytes| at(bytes).unwrap().travelling().unwrap().layers;
    let error = at(1000).unwrap_err().to_string();
    assert!(error.contains("resident_layers"), "{error}");
    let all = alone(Residency::Layers(0)).travelling().unwrap().bytes;
    assert_eq!(layers(all), 0);
    assert!(layers(all * 2 / 3) < layers(all / 2));
}

#[test]
fn a_checkpoint_that_becomes_shorter_ends_the_step_with_its_name_and_nothing_moves() {
    let dir = tempfile::tempdir().unwrap();
    for file in fs::read_dir(CHECKPOINT).unwrap() {
        let file = file.unwrap();
        fs::copy(file.path(), dir.path().join(file.file_name())).unwrap();
    }
    let options = LoadOptions {
        parts: Parts {
            vae_decoder: false,
            ..Parts::DENOISE
        },
        residency: Residency::Layers(0),
        ..LoadOptions::default()
    };
    let model = Model::open(dir.path(), options).unwrap();
    let whole = Model::open(Path::new(CHECKPOINT), LoadOptions::default()).unwrap();
    let case = Case {
        grid: (2, 2),
        steps: 3,
        seed: 1,
        guidance: 2.0,
        tokens: (3, 4),
    };
    let mut job = DenoiseJob::new(&model, case.spec(&whole)).unwrap();
    let ctx = RankContext::single();
    model.denoise_step(&ctx, &mut [&mut job]).unwrap();
    let before = job.latents().unwrap();
    let files = fs::read_dir(dir.path()).unwrap().map(|file| file.unwrap());
    for file in files.filter(|f| f.path().extension().is_some_and(|e| e == "safetensors")) {
        let kept = fs::metadata(file.path()).unwrap().len() / 4;
        let file = fs::OpenOptions::new().write(true).open(file.path());
        file.unwrap().set_len(kept).unwrap();
    }
    // What had been read ahead may still be used: the step after has nothing left.
    let error = model.denoise_step(&ctx, &mut [&mut job]).unwrap_err();
    assert!(error.to_string().contains(".safetensors"), "{error}");
    assert!(job.latents().unwrap() == before && job.step() == 1);
}
