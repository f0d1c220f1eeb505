//! Every legal plan on threads equals one rank: denoising, prefills, text, and the bytes that move.
#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use std::ops::Range;
use std::time::Duration;

use common::{Case, divisible, ids, plans};
use kernels::Tensor;
use model::backbone::{NoProbe, Probe, Site};
use model::input::RowInput;
use model::{
    BalanceOptions, DenoiseJob, JobOptions, KvCache, Latents, LoadOptions, Model, Parts, PrefixKv,
    RankShard,
};
use parallel::collective::threads;
use parallel::eplb::EplbConfig;
use parallel::{Axis, Plan, RankContext, RingPrefix};

/// Long enough never to be reached by ranks that are well.
const PATIENT: Duration = Duration::from_secs(60);
const SEED: u64 = 11;

fn open(plan: Plan, rank: usize) -> Model {
    open_with(plan, rank, BalanceOptions::default())
}

fn open_with(plan: Plan, rank: usize, balance: BalanceOptions) -> Model {
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
        ..LoadOptions::default()
    };
    Model::random(divisible(), options, SEED).unwrap()
}

/// Runs `work` on every rank of a plan, each with its own weights; results in rank order.
fn on_ranks<T: Send>(plan: Plan, work: impl Fn(&Model, &RankContext) -> T + Sync) -> Vec<T> {
    let work = |ctx: RankContext| work(&open(plan, ctx.rank()), &ctx);
    threads::on_ranks(&plan, PATIENT, work).unwrap()
}

fn cases() -> [Case; 3] {
    let case = |grid, steps, seed, tokens| Case {
        grid,
        steps,
        seed,
        guidance: 3.5,
        tokens,
    };
    // Fresh tokens of a row: 1 + 6, 1 + 15, 1 + 7.
    [
        case((2, 3), 2, 1, (9, 7)),
        case((3, 5), 2, 2, (5, 13)),
        case((1, 7), 2, 3, (1, 2)),
    ]
}

/// Two packed steps of mixed sizes; prefixes are whole and cut for the rank.
fn denoise(whole: &Model, model: &Model, ctx: &RankContext) -> Vec<Option<Latents>> {
    let mut jobs: Vec<DenoiseJob> = cases()
        .iter()
        .map(|case| {
            let spec = case.spec(whole).part_of(model.rank()).unwrap();
            let options = JobOptions {
                guidance_rescale: 0.3,
                preserve_norm: case.seed == 2,
                ..JobOptions::default()
            };
            DenoiseJob::with_options(model, spec, options).unwrap()
        })
        .collect();
    for _ in 0..2 {
        let mut packed: Vec<&mut DenoiseJob> = jobs.iter_mut().collect();
        model.denoise_step(ctx, &mut packed).unwrap();
    }
    jobs.iter().map(|job| job.latents().ok()).collect()
}

fn assert_near(what: &str, got: &[f32], want: &[f32]) {
    assert_eq!(got.len(), want.len(), "{what}");
    let scale = want.iter().fold(0_f32, |m, v| m.max(v.abs()));
    let worst = got
        .iter()
        .zip(want)
        .fold(0_f32, |m, (g, w)| m.max((g - w).abs()));
    assert!(worst <= 1e-5 * scale, "{what}: {worst} of {scale}");
}

fn assert_plans_equal_one_rank(ranks: usize) {
    let whole = open(Plan::default(), 0);
    let want = denoise(&whole, &whole, &RankContext::single());
    let all = plans(ranks);
    assert!(all.len() > ranks, "{} plans", all.len());
    for plan in all {
        let exact = plan.tp == 1 && plan.ring == 1;
        for (rank, got) in on_ranks(plan, |model, ctx| denoise(&whole, model, ctx))
            .into_iter()
            .enumerate()
        {
            let stage = plan
                .mesh()
                .unwrap()
                .index_in(rank, Axis::Pp.into())
                .unwrap();
            let held = stage == 0 || stage + 1 == plan.pp;
            for (index, (got, want)) in got.iter().zip(&want).enumerate() {
                let what = format!("{plan:?}, rank {rank}, job {index}");
                assert_eq!(got.is_some(), held, "{what}");
                let Some(got) = got else { continue };
                let want = want.as_ref().unwrap();
                if exact {
                    assert!(got == want, "{what}: only data moved, yet bits differ");
                }
                assert_near(&what, got.data(), want.data());
            }
        }
    }
}

#[test]
fn padding_is_counted_and_only_where_tokens_do_not_divide() {
    let whole = open(Plan::default(), 0);
    // Rows of 7, 16 and 8 fresh tokens.
    for (text, want) in [
        ("single", [0, 0, 0]),
        ("ulysses=2", [1, 0, 0]),
        ("ring=2,ulysses=4", [1, 0, 0]),
    ] {
        let model = open(text.parse().unwrap(), 0);
        let padding = |case: &Case| {
            let spec = case.spec(&whole).part_of(model.rank()).unwrap();
            DenoiseJob::new(&model, spec).unwrap().padding()
        };
        assert_eq!(
            cases().map(|case| padding(&case)),
            want.map(|row| 2 * row),
            "{text}"
        );
    }
}

/// Counts the tokens that go into the first layer.
#[derive(Default)]
struct Computed(usize);

impl Probe for Computed {
    fn tensor(&mut self, layer: usize, site: Site, value: &Tensor) {
        if layer == 0 && site == Site::InputNorm {
            self.0 += value.dim(0);
        }
    }
}

#[test]
fn no_rank_computes_a_token_that_is_padding() {
    let whole = open(Plan::default(), 0);
    // Rows of 7, 16 and 8 fresh tokens, two of each.
    let tokens = 2 * (7 + 16 + 8);
    for text in [
        "single",
        "ulysses=2",
        "ring=2",
        "ring=2,ulysses=4",
        "cfg=2,ulysses=2",
    ] {
        let plan: Plan = text.parse().unwrap();
        let computed = on_ranks(plan, |model, ctx| {
            let mut jobs = cases().map(|case| {
                let spec = case.spec(&whole).part_of(model.rank()).unwrap();
                DenoiseJob::new(model, spec).unwrap()
            });
            let mut packed: Vec<&mut DenoiseJob> = jobs.iter_mut().collect();
            let mut seen = Computed::default();
            model
                .denoise_step_observed(ctx, &mut packed, &mut seen, &mut |_, _| {})
                .unwrap();
            seen.0
        });
        assert_eq!(
            computed.iter().sum::<usize>(),
            tokens,
            "{text}: {computed:?}"
        );
    }
}

#[test]
fn experts_that_move_between_steps_change_no_picture() {
    let whole = open(Plan::default(), 0);
    let want = denoise(&whole, &whole, &RankContext::single());
    for text in [
        "ulysses=2,ep=ulysses",
        "cfg=2,ulysses=2,ep=cfg+ulysses",
        "tp=2,ep=tp",
    ] {
        let plan: Plan = text.parse().unwrap();
        let ranks = threads::on_ranks(&plan, PATIENT, |ctx| {
            let balance = BalanceOptions {
                eplb: EplbConfig {
                    enabled: true,
                    interval_steps: 2,
                },
                extra_slots: 1,
                hosts: 1,
            };
            let model = open_with(plan, ctx.rank(), balance);
            let (mut moved, mut before, mut after) = (0, 0.0, 0.0);
            // The first interval counts and moves, the second runs on what was moved.
            for _ in 0..2 {
                assert_eq!(denoise(&whole, &model, &ctx).len(), want.len());
                assert!(model.rebalance(&ctx).unwrap().is_empty());
                for change in model.rebalance(&ctx).unwrap() {
                    moved += change.moves.len();
                    before += change.before;
                    after += change.after;
                }
            }
            (denoise(&whole, &model, &ctx), moved, before, after)
        });
        for (got, moved, before, after) in ranks.unwrap() {
            assert!(moved > 0, "{text}: no expert has moved");
            assert!(after < before, "{text}: {before} to {after}");
            for (got, want) in got.iter().zip(&want) {
                let (got, want) = (got.as_ref().unwrap(), want.as_ref().unwrap());
                assert_near(text, got.data(), want.data());
                assert!(plan.tp > 1 || got == want, "{text}: bits differ");
            }
        }
    }
}

#[test]
fn a_decision_about_experts_sees_the_tokens_of_its_interval_only() {
    let plan: Plan = "ulysses=2,ep=ulysses".parse().unwrap();
    let balance = BalanceOptions {
        eplb: EplbConfig {
            enabled: true,
            interval_steps: 1,
        },
        extra_slots: 1,
        hosts: 1,
    };
    // The same tokens again move nothing, so how often they came must not be seen in what follows.
    let decision = |times: u64| {
        let ranks = threads::on_ranks(&plan, PATIENT, |ctx| {
            let model = open_with(plan, ctx.rank(), balance);
            let interval = |salt| {
                let ids = ids(24, salt);
                let mut cache = model.cache(24).unwrap();
                let rows = [row(0, &ids, &[])];
                model
                    .run_rows(&ctx, &rows, &mut [&mut cache], &mut NoProbe)
                    .unwrap();
                model.rebalance(&ctx).unwrap()
            };
            assert!(!interval(1).is_empty(), "no expert has moved");
            for _ in 1..times {
                assert!(interval(1).is_empty());
            }
            interval(2)
        });
        ranks.unwrap()
    };
    let once = decision(1);
    assert!(!once[0].is_empty(), "no expert has moved");
    assert_eq!(once, decision(4));
}

/// Keys and values, and hidden states, of one rank after each of several passes.
struct Written {
    prefixes: Vec<PrefixKv>,
    hidden: Vec<Vec<f32>>,
}

fn row<'a>(start: usize, ids: &'a [u32], full: &'a [Range<usize>]) -> RowInput<'a> {
    RowInput {
        start,
        ids,
        images: &[],
        full,
        vectors: &[],
    }
}

/// A prefill of two rows, one with a picture's full span, then two single tokens each.
fn write(model: &Model, ctx: &RankContext) -> Written {
    let (first, second) = (ids(13, 5), ids(6, 6));
    let full = std::slice::from_ref(&(4..9));
    let mut caches = [model.cache(15).unwrap(), model.cache(8).unwrap()];
    let mut written = Written {
        prefixes: Vec::new(),
        hidden: Vec::new(),
    };
    let mut pass = |caches: &mut [KvCache; 2], rows: [RowInput<'_>; 2]| {
        let [a, b] = caches;
        let hidden = model.run_rows(ctx, &rows, &mut [a, b], &mut NoProbe);
        written.hidden.push(hidden.unwrap().to_f32_vec());
    };
    pass(&mut caches, [row(0, &first, full), row(0, &second, &[])]);
    for step in 0..2 {
        let next = [7 + step as u32, 50];
        let rows = [
            row(13 + step, &next[..1], &[]),
            row(6 + step, &next[1..], &[]),
        ];
        pass(&mut caches, rows);
    }
    // Filling alone leaves the same keys and values.
    let mut filled = model.cache(13).unwrap();
    let rows = [row(0, &first, full)];
    model.fill_rows(ctx, &rows, &mut [&mut filled]).unwrap();
    written.prefixes = caches
        .into_iter()
        .chain([filled])
        .map(KvCache::into_prefix)
        .collect();
    written
}

fn assert_prefills_equal_one_rank(ranks: usize) {
    let whole = open(Plan::default(), 0);
    let want = write(&whole, &RankContext::single());
    for plan in plans(ranks) {
        let dealt = Plan {
            ring_prefix: RingPrefix::Sharded,
            ..plan
        };
        let all = on_ranks(plan, write);
        let shards: Vec<RankShard> = (0..all.len())
            .map(|rank| RankShard::new(whole.config(), &plan, rank).unwrap())
            .collect();
        for (index, want) in want.prefixes.iter().enumerate() {
            let parts = shards.iter().zip(all.iter().map(|w| &w.prefixes[index]));
            let joined = PrefixKv::whole_of(want.geometry(), &parts.collect::<Vec<_>>()).unwrap();
            assert_near(&format!("{plan:?}, joined"), joined.data(), want.data());
        }
        for (rank, got) in all.into_iter().enumerate() {
            let what = format!("{plan:?}, rank {rank}");
            for (got, want) in got.hidden.iter().zip(&want.hidden) {
                assert_near(&what, got, want);
            }
            // Single tokens went to one rank of a ring, so only the prefill has the shard's tokens.
            let shard = RankShard::new(whole.config(), &dealt, rank).unwrap();
            let filled = want.prefixes[2].part_of(&shard).unwrap();
            assert_eq!(got.prefixes[2].held(), filled.held(), "{what}");
            assert_near(&what, got.prefixes[2].data(), filled.data());
            if plan.ring == 1 {
                for (got, want) in got.prefixes.iter().zip(&want.prefixes) {
                    let want = want.part_of(&shard).unwrap();
                    assert_eq!(got.held(), want.held(), "{what}");
                    assert_near(&what, got.data(), want.data());
                }
            }
        }
    }
}

#[test]
fn prefills_and_text_equal_one_rank_under_every_plan_on_two_ranks() {
    assert_prefills_equal_one_rank(2);
}

#[test]
fn prefills_and_text_equal_one_rank_under_every_plan_on_four_ranks() {
    assert_prefills_equal_one_rank(4);
}

#[test]
fn every_plan_on_two_ranks_equals_one() {
    assert_plans_equal_one_rank(2);
}

#[test]
fn every_plan_on_four_ranks_equals_one() {
    assert_plans_equal_one_rank(4);
}
