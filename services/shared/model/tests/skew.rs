//! What moving experts does to a trace that uses some far more than others, by counters of the tokens that came.
#![allow(clippy::unwrap_used, clippy::print_stderr, missing_docs)]

mod common;

use std::time::Duration;

use common::{Case, divisible};
use model::{BalanceOptions, DenoiseJob, LoadOptions, Model, Parts};
use parallel::collective::threads;
use parallel::eplb::EplbConfig;
use parallel::{Plan, RankContext};

const PATIENT: Duration = Duration::from_secs(60);
/// Steps from one decision to the next.
const INTERVAL: usize = 3;

fn open(plan: Plan, rank: usize, enabled: bool) -> Model {
    let parts = Parts {
        vae_decoder: false,
        ..Parts::DENOISE
    };
    let balance = BalanceOptions {
        eplb: EplbConfig {
            enabled,
            interval_steps: INTERVAL,
        },
        extra_slots: 1,
        hosts: 1,
    };
    let options = LoadOptions {
        parts,
        plan,
        rank,
        balance,
        ..LoadOptions::default()
    };
    Model::random_skewed(divisible(), options, (11, 4.0)).unwrap()
}

/// Busiest rank over the mean, over the layers, in each of some intervals.
fn intervals(whole: &Model, model: &Model, ctx: &RankContext) -> Vec<f64> {
    let job = |seed: u64| {
        let case = Case {
            grid: (5, 7),
            steps: 3 * INTERVAL,
            seed,
            guidance: 3.5,
            tokens: (9, 7),
        };
        DenoiseJob::new(model, case.spec(whole).part_of(model.rank()).unwrap()).unwrap()
    };
    let mut jobs = [job(1), job(2), job(3)];
    let mut seen = Vec::new();
    for step in 1..=3 * INTERVAL {
        let mut packed: Vec<&mut DenoiseJob> = jobs.iter_mut().collect();
        model.denoise_step(ctx, &mut packed).unwrap();
        model.rebalance(ctx).unwrap();
        if step % INTERVAL == 0 {
            let layers = model.imbalance().unwrap();
            seen.push(layers.iter().sum::<f64>() / layers.len() as f64);
        }
    }
    seen
}

#[test]
fn the_busiest_rank_has_fewer_tokens_once_experts_have_moved() {
    let whole = open(Plan::default(), 0, false);
    assert!(whole.imbalance().unwrap().is_empty());
    for text in ["ulysses=2,ep=ulysses", "ulysses=4,ep=ulysses"] {
        let plan: Plan = text.parse().unwrap();
        let ranks = threads::on_ranks(&plan, PATIENT, |ctx| {
            intervals(&whole, &open(plan, ctx.rank(), true), &ctx)
        });
        let ranks = ranks.unwrap();
        eprintln!("{text}: {:?}", ranks[0]);
        assert!(
            ranks.iter().all(|rank| rank == &ranks[0]),
            "{text}: {ranks:?}"
        );
        let [first, second, third] = ranks[0][..] else {
            panic!("{text}: {:?}", ranks[0]);
        };
        // What is beyond an even share is less than half of what it was.
        let half = 1.0 + (first - 1.0) / 2.0;
        assert!(second < half && third < half, "{text}: {:?}", ranks[0]);
    }
}
