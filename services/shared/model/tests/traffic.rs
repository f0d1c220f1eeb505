//! The bytes that ranks move equal what the plan predicts: group by group, kind by kind, on every rank.
#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use std::thread;
use std::time::Duration;

use common::{Case, divisible, ids, plans};
use kernels::Routing;
use model::backbone::Probe;
use model::input::RowInput;
use model::{DenoiseJob, JobSpec, KvCache, LoadOptions, Model, Parts};
use parallel::collective::threads;
use parallel::traffic::{Predictor, Routes, StepJob};
use parallel::{AxisSet, Op, Plan, RankContext, Traffic};

/// Long enough never to be reached by ranks that are well.
const PATIENT: Duration = Duration::from_secs(60);
const SEED: u64 = 11;

fn open(plan: Plan, rank: usize) -> Model {
    let parts = Parts {
        vae_decoder: false,
        ..Parts::DENOISE
    };
    let options = LoadOptions {
        parts,
        plan,
        rank,
        ..LoadOptions::default()
    };
    Model::random(divisible(), options, SEED).unwrap()
}

/// Two pictures of different sizes with prefixes of different lengths; no count divides anything.
fn cases() -> [Case; 2] {
    let case = |grid, seed, tokens| Case {
        grid,
        steps: 1,
        seed,
        guidance: 3.5,
        tokens,
    };
    [case((2, 3), 1, (9, 7)), case((3, 5), 2, (5, 13))]
}

/// What tokens chose: `experts[layer][row]`.
#[derive(Debug, Default)]
struct Choices {
    /// Fresh tokens of every row.
    rows: Vec<usize>,
    experts: Vec<Vec<Vec<u32>>>,
    top_k: Vec<usize>,
}

impl Probe for Choices {
    fn routing(&mut self, layer: usize, routing: &Routing) {
        assert_eq!(layer, self.experts.len());
        let mut rest = routing.experts.as_slice();
        let mut rows = Vec::new();
        for tokens in &self.rows {
            let (row, after) = rest.split_at(tokens * routing.top_k);
            rows.push(row.to_vec());
            rest = after;
        }
        assert!(rest.is_empty());
        self.experts.push(rows);
        self.top_k.push(routing.top_k);
    }
}

/// One step of both jobs; prefixes are cut for the rank.
fn step<P: Probe>(specs: &[JobSpec], model: &Model, ctx: &RankContext, probe: &mut P) {
    let job = |spec: &JobSpec| {
        let spec = spec.part_of(model.rank()).unwrap();
        DenoiseJob::new(model, spec).unwrap()
    };
    let mut jobs: Vec<DenoiseJob> = specs.iter().map(job).collect();
    let mut packed: Vec<&mut DenoiseJob> = jobs.iter_mut().collect();
    model
        .denoise_step_observed(ctx, &mut packed, probe, &mut |_, _| {})
        .unwrap();
}

/// What every rank of a plan counts while it does `work`.
fn counted(plan: Plan, work: impl Fn(&Model, &RankContext) + Sync) -> Vec<Vec<(AxisSet, Traffic)>> {
    let contexts = threads::contexts(&plan, PATIENT).unwrap();
    thread::scope(|scope| {
        let work = &work;
        let ranks: Vec<_> = contexts
            .into_iter()
            .map(|ctx| {
                scope.spawn(move || {
                    work(&open(plan, ctx.rank()), &ctx);
                    // Bytes count once both sides have them; a barrier moves none.
                    for axes in plan.groups().unwrap() {
                        ctx.group(axes).unwrap().barrier().unwrap().wait().unwrap();
                    }
                    ctx
                })
            })
            .collect();
        let ranks: Vec<RankContext> = ranks.into_iter().map(|t| t.join().unwrap()).collect();
        ranks.iter().map(RankContext::traffic).collect()
    })
}

/// Steps under `plans`; returns which kinds of operations moved anything.
fn assert_steps_move_what_is_predicted(plans: &[Plan]) -> [bool; Op::KINDS] {
    let whole = open(Plan::default(), 0);
    let shape = divisible().shape();
    let specs: Vec<JobSpec> = cases().iter().map(|case| case.spec(&whole)).collect();
    let jobs: Vec<StepJob> = cases()
        .iter()
        .map(|case| StepJob {
            tokens: 1 + case.grid.0 * case.grid.1,
            prefixes: vec![case.tokens.0, case.tokens.1],
            latents: case.grid.0 * case.grid.1 * divisible().vae.latent_channels,
        })
        .collect();
    let rows = jobs
        .iter()
        .flat_map(|job| vec![job.tokens; job.prefixes.len()]);
    let mut choices = Choices {
        rows: rows.collect(),
        ..Choices::default()
    };
    step(&specs, &whole, &RankContext::single(), &mut choices);
    let routes = Routes::Known {
        experts: &choices.experts,
        top_k: &choices.top_k,
    };
    let mut moving = [false; Op::KINDS];
    for &plan in plans {
        let predictor = Predictor::new(&shape, &plan, routes).unwrap();
        let got = counted(plan, |model, ctx| {
            step(&specs, model, ctx, &mut model::backbone::NoProbe);
        });
        for (rank, got) in got.into_iter().enumerate() {
            let want = predictor.step(rank, &jobs).unwrap();
            assert_eq!(got, want.traffic(), "{plan:?}, rank {rank}");
            for (_, traffic) in want.traffic() {
                for (any, moved) in moving.iter_mut().zip(traffic.by_kind) {
                    *any |= moved.sent + moved.received > 0;
                }
            }
        }
    }
    moving
}

#[test]
fn a_step_on_two_ranks_moves_exactly_what_the_plan_predicts() {
    let moving = assert_steps_move_what_is_predicted(&plans(2));
    // No operation that a step uses was left untried.
    for op in [
        Op::AllReduce,
        Op::AllGather,
        Op::AllToAll,
        Op::AllToAllV,
        Op::RingShift { hop: 1 },
        Op::Send { to: 0 },
        Op::Recv { from: 0 },
    ] {
        assert!(moving[op.kind()], "{op}");
    }
}

#[test]
fn a_step_on_four_ranks_moves_exactly_what_the_plan_predicts() {
    assert_steps_move_what_is_predicted(&plans(4));
}

/// Of the many plans on eight ranks every third, hybrids of up to three axes among them.
#[test]
fn a_step_on_eight_ranks_moves_exactly_what_the_plan_predicts() {
    let some: Vec<Plan> = plans(8).into_iter().step_by(3).collect();
    let axes = |plan: &Plan| plan.sizes().iter().filter(|n| **n > 1).count();
    assert!(some.iter().any(|plan| axes(plan) == 3));
    assert_steps_move_what_is_predicted(&some);
}

const PREFILLS: [usize; 2] = [11, 6];

/// Fills two caches that live on this rank; the choices are those of one rank's pass.
fn fill(model: &Model, ctx: &RankContext) {
    let ids = PREFILLS.map(|tokens| ids(tokens, 3));
    let row = |ids| RowInput {
        start: 0,
        ids,
        images: &[],
        full: &[],
        vectors: &[],
    };
    let rows: Vec<RowInput<'_>> = ids.iter().map(|ids| row(ids.as_slice())).collect();
    let mut caches = PREFILLS.map(|tokens| model.cache(tokens).unwrap());
    let mut caches: Vec<&mut KvCache> = caches.iter_mut().collect();
    model.fill_rows(ctx, &rows, &mut caches).unwrap();
}

/// The choices of a prefill, read from a pass that wants hidden states as well.
fn prefill_choices(whole: &Model) -> Choices {
    let mut choices = Choices {
        rows: PREFILLS.to_vec(),
        ..Choices::default()
    };
    let ids = PREFILLS.map(|tokens| ids(tokens, 3));
    let row = |ids| RowInput {
        start: 0,
        ids,
        images: &[],
        full: &[],
        vectors: &[],
    };
    let rows: Vec<RowInput<'_>> = ids.iter().map(|ids| row(ids.as_slice())).collect();
    let mut caches = PREFILLS.map(|tokens| whole.cache(tokens).unwrap());
    let mut caches: Vec<&mut KvCache> = caches.iter_mut().collect();
    whole
        .run_rows(&RankContext::single(), &rows, &mut caches, &mut choices)
        .unwrap();
    choices
}

#[test]
fn a_prefill_on_two_and_four_ranks_moves_exactly_what_the_plan_predicts() {
    let whole = open(Plan::default(), 0);
    let choices = prefill_choices(&whole);
    let routes = Routes::Known {
        experts: &choices.experts,
        top_k: &choices.top_k,
    };
    let shape = divisible().shape();
    for plan in [2, 4].into_iter().flat_map(plans) {
        let predictor = Predictor::new(&shape, &plan, routes).unwrap();
        for (rank, got) in counted(plan, fill).into_iter().enumerate() {
            let want = predictor.fill(rank, &PREFILLS).unwrap();
            assert_eq!(got, want.traffic(), "{plan:?}, rank {rank}");
        }
    }
}
