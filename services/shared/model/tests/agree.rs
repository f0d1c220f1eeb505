//! Ranks that disagree end together; what all of them refuse ends nothing.
#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use common::{CELL, Case, divisible, ids};
use model::backbone::NoProbe;
use model::diffusion::Velocities;
use model::input::RowInput;
use model::{BalanceOptions, DenoiseJob, JobSpec, KvCache, LoadOptions, Model, ModelError, Parts};
use parallel::collective::threads;
use parallel::eplb::EplbConfig;
use parallel::{ParallelError, Plan, RankContext};

/// Long enough never to be reached by ranks that are well.
const PATIENT: Duration = Duration::from_secs(60);
/// More positions than the model has.
const TOO_MANY: usize = 301;

/// One group of each kind; ranks 0 and 1 share one.
const PLANS: [&str; 4] = ["tp=2", "ulysses=2,ep=ulysses", "ring=2", "pp=2"];

fn open(plan: Plan, rank: usize) -> Model {
    let balance = BalanceOptions {
        eplb: EplbConfig {
            enabled: true,
            interval_steps: 1,
        },
        ..BalanceOptions::default()
    };
    let options = LoadOptions {
        parts: Parts {
            diffusion: true,
            ..Parts::PREFIX
        },
        plan,
        rank,
        balance,
        ..LoadOptions::default()
    };
    Model::random(divisible(), options, 1).unwrap()
}

/// Runs `tokens` as the tokens `start..` of a row that has none yet.
fn run(model: &Model, ctx: &RankContext, range: Range<usize>) -> Result<(), ModelError> {
    let ids = ids(range.len(), 1);
    let row = RowInput {
        start: range.start,
        ids: &ids,
        images: &[],
        full: &[],
        vectors: &[],
    };
    let mut cache: KvCache = model.cache(range.len()).unwrap();
    let ran = model.run_rows(ctx, &[row], &mut [&mut cache], &mut NoProbe);
    ran.map(drop)
}

#[test]
fn a_rank_that_fails_alone_ends_the_pass_on_the_others() {
    for text in PLANS {
        let plan: Plan = text.parse().unwrap();
        let ranks = threads::on_ranks(&plan, PATIENT, |ctx| {
            let model = open(plan, ctx.rank());
            // Rank 1 is told to continue a row that is empty.
            let start = ctx.rank();
            let ended = run(&model, &ctx, start..start + 5).unwrap_err();
            // A context that is dropped would end the others, too.
            (ended, ctx)
        });
        let ranks = ranks.unwrap();
        let of_rank = |rank: usize| &ranks[rank].0;
        assert!(matches!(of_rank(1), ModelError::Internal(_)), "{text}");
        let told = matches!(
            of_rank(0),
            ModelError::Ranks(ParallelError::Aborted { rank: 1, .. })
        );
        assert!(told, "{text}: {}", of_rank(0));
    }
}

#[test]
fn what_every_rank_refuses_leaves_the_groups_as_they_were() {
    for text in PLANS {
        let plan: Plan = text.parse().unwrap();
        let ranks = threads::on_ranks(&plan, PATIENT, |ctx| {
            let model = open(plan, ctx.rank());
            let refused = run(&model, &ctx, 0..TOO_MANY).unwrap_err();
            (refused, run(&model, &ctx, 0..5), ctx)
        });
        for (refused, after, _) in ranks.unwrap() {
            let named = matches!(refused, ModelError::InvalidArgument { .. });
            assert!(named, "{text}: {refused}");
            assert!(after.is_ok(), "{text}: {after:?}");
        }
    }
}

#[test]
fn weights_of_another_rank_or_plan_run_nothing() {
    let plan: Plan = "tp=2".parse().unwrap();
    let contexts = threads::contexts(&plan, PATIENT).unwrap();
    for (rank, ctx) in [(0, &contexts[1]), (1, &RankContext::single())] {
        let refused = run(&open(plan, rank), ctx, 0..5).unwrap_err();
        assert!(matches!(refused, ModelError::Internal(_)), "{refused}");
    }
}

#[test]
fn a_request_without_guidance_is_refused_by_name_where_its_rows_are_spread() {
    let plan: Plan = "cfg=2".parse().unwrap();
    for rank in 0..2 {
        let model = open(plan, rank);
        let cache = model.cache(1).unwrap();
        let prefix = Some(Arc::new(cache.into_prefix()));
        let job = |guidance: f64| {
            let spec = JobSpec {
                height: CELL,
                width: CELL,
                steps: 1,
                guidance,
                seed: 0,
                cond: prefix.clone(),
                uncond: prefix.clone(),
            };
            DenoiseJob::new(&model, spec)
        };
        for guidance in [0.0, 1.0, f64::NAN] {
            let refused = job(guidance).unwrap_err();
            let named = matches!(
                refused,
                ModelError::InvalidArgument {
                    field: "guidance",
                    ..
                }
            );
            assert!(named, "rank {rank}, {guidance}: {refused}");
        }
        assert!(job(1.5).is_ok());
    }
}

#[test]
fn experts_whose_move_failed_are_not_used_again() {
    let plan: Plan = "ulysses=2,ep=ulysses".parse().unwrap();
    let models = [open(plan, 0), open(plan, 1)];
    let both = |work: &(dyn Fn(&Model, &RankContext) -> Result<(), ModelError> + Sync)| {
        threads::on_ranks(&plan, PATIENT, |ctx| {
            let done = work(&models[ctx.rank()], &ctx);
            (done, ctx)
        })
        .unwrap()
        .into_iter()
        .map(|(done, _)| done)
        .collect::<Vec<_>>()
    };
    let pass = |model: &Model, ctx: &RankContext| run(model, ctx, 0..9);
    let moving = |model: &Model, ctx: &RankContext| model.rebalance(ctx).map(drop);
    assert!(both(&pass).iter().all(Result::is_ok));
    assert!(both(&moving).iter().all(Result::is_ok));
    assert!(both(&pass).iter().all(Result::is_ok));
    // Rank 1 gives up before it has said what its tokens chose.
    let half = both(&|model: &Model, ctx: &RankContext| {
        if ctx.rank() == 0 {
            return moving(model, ctx);
        }
        ctx.abort("gave up");
        Ok(())
    });
    assert!(half[0].is_err() && half[1].is_ok());
    let after = both(&pass);
    let refused = after[0].as_ref().unwrap_err();
    assert!(matches!(refused, ModelError::Internal(_)), "{refused}");
    assert!(after[1].is_err(), "rank 1 went on without rank 0");
}

/// A job of `case` with the prefixes that the model's rank needs.
fn job(case: &Case, whole: &Model, model: &Model) -> DenoiseJob {
    let spec = case.spec(whole).part_of(model.rank()).unwrap();
    DenoiseJob::new(model, spec).unwrap()
}

#[test]
fn a_step_that_fails_between_stages_moves_no_picture() {
    let plan: Plan = "pp=2".parse().unwrap();
    let case = |grid, seed| Case {
        grid,
        steps: 2,
        seed,
        guidance: 3.5,
        tokens: (3, 4),
    };
    let cases = [case((2, 3), 1), case((1, 2), 2)];
    let whole = open(Plan::default(), 0);
    let models = [open(plan, 0), open(plan, 1)];
    let jobs = |model: &Model| cases.clone().map(|case| job(&case, &whole, model));
    let both = models.each_ref().map(|model| Mutex::new(jobs(model)));
    let step = |fails: bool| {
        threads::on_ranks(&plan, PATIENT, |ctx| {
            let mut jobs = both[ctx.rank()].lock().unwrap();
            let mut packed: Vec<&mut DenoiseJob> = jobs.iter_mut().collect();
            // The last stage has the velocity of its last picture: all that is left is to bring latents home.
            let mut observe = |index: usize, _: Velocities<'_>| {
                if fails && index == 1 {
                    ctx.abort("gave up");
                }
            };
            let model = &models[ctx.rank()];
            let done = model.denoise_step_observed(&ctx, &mut packed, &mut NoProbe, &mut observe);
            (done, ctx)
        })
        .unwrap()
    };
    assert!(step(true).iter().all(|(done, _)| done.is_err()));
    assert!(step(false).iter().all(|(done, _)| done.is_ok()));
    let mut want = jobs(&whole);
    let mut packed: Vec<&mut DenoiseJob> = want.iter_mut().collect();
    whole
        .denoise_step(&RankContext::single(), &mut packed)
        .unwrap();
    for jobs in &both {
        for (got, want) in jobs.lock().unwrap().iter().zip(&want) {
            assert_eq!(got.step(), 1);
            assert!(got.latents().unwrap() == want.latents().unwrap());
        }
    }
}
