//! Random models under random legal plans equal one rank: pictures, prefixes, text, and experts that move.
#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use common::{CELL, base, ids, parse};
use model::backbone::NoProbe;
use model::input::RowInput;
use model::{
    BalanceOptions, DenoiseJob, JobOptions, JobSpec, KvCache, LoadOptions, Model, ModelConfig,
    Parts, PrefixKv, RankShard,
};
use parallel::collective::threads;
use parallel::eplb::EplbConfig;
use parallel::{Axis, Plan, RankContext, RingPrefix, SharedExpert};
use proptest::prelude::*;
use proptest::sample::{Index, select};
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};
use serde_json::json;

/// Long enough never to be reached by ranks that are well.
const PATIENT: Duration = Duration::from_secs(60);
const CASES: u32 = 100;
/// Steps of every picture, and single tokens behind every prefill.
const STEPS: usize = 3;
const MORE_TOKENS: usize = 5;
const LATENTS: &str = "latents";

/// One picture of a packed batch.
#[derive(Clone, Debug)]
struct Picture {
    grid: (usize, usize),
    /// Tokens of the conditional and of the other prefix.
    prefixes: (usize, usize),
    guided: bool,
    rescale: f64,
    preserve_norm: bool,
}

#[derive(Clone, Debug)]
struct Case {
    config: ModelConfig,
    plan: Plan,
    balance: BalanceOptions,
    seed: u64,
    pictures: Vec<Picture>,
    /// Tokens of each row of a prefill.
    prefills: Vec<usize>,
    /// Of the first row's tokens, those that see each other.
    full: Option<Range<usize>>,
}

fn config() -> impl Strategy<Value = ModelConfig> {
    let layer = (select(vec![12_usize, 24, 36, 40]), 1_usize..4, 1_usize..3);
    let heads = (
        select(vec![1_usize, 2, 3, 4]),
        select(vec![1_usize, 2, 3, 4]),
    );
    let layers = prop::collection::vec(layer, 1..5);
    (
        heads,
        select(vec![32_usize, 64, 96]),
        3_usize..9,
        layers,
        any::<bool>(),
    )
        .prop_map(|((kv_heads, group), hidden, experts, layers, distilled)| {
            let mut config = base(distilled);
            let list = |pick: fn(&(usize, usize, usize)) -> usize| {
                layers.iter().map(pick).collect::<Vec<_>>()
            };
            for (name, value) in [
                ("num_hidden_layers", json!(layers.len())),
                ("num_attention_heads", json!(kv_heads * group)),
                ("num_key_value_heads", json!(kv_heads)),
                ("hidden_size", json!(hidden)),
                ("num_experts", json!(experts)),
                ("moe_intermediate_size", json!(list(|l| l.0))),
                ("moe_topk", json!(list(|l| l.1))),
                ("num_shared_expert", json!(list(|l| l.2))),
            ] {
                config[name] = value;
            }
            config["vit_aligner"]["n_embed"] = json!(hidden);
            parse(&config)
        })
}

fn picture() -> impl Strategy<Value = Picture> {
    let tokens = prop_oneof![Just(0), Just(1), 2_usize..40];
    let grid = (1_usize..5, 1_usize..5);
    let prefixes = (tokens.clone(), tokens);
    let options = (any::<bool>(), select(vec![0.0, 0.6]), any::<bool>());
    (grid, prefixes, options).prop_map(|(grid, prefixes, options)| Picture {
        grid,
        prefixes,
        guided: options.0,
        rescale: options.1,
        preserve_norm: options.2,
    })
}

fn plan(config: &ModelConfig, ranks: usize, pick: &Index, options: (bool, bool)) -> Plan {
    let legal = (1..=ranks)
        .rev()
        .map(|ranks| Plan::legal(&config.shape(), ranks).unwrap())
        .find(|legal| !legal.is_empty());
    let plan = *pick.get(&legal.unwrap());
    Plan {
        shared_expert: if options.0 && plan.tp > 1 {
            SharedExpert::Replicated
        } else {
            SharedExpert::Split
        },
        ring_prefix: if options.1 && plan.ring > 1 {
            RingPrefix::Sharded
        } else {
            RingPrefix::Replicated
        },
        ..plan
    }
}

fn case() -> impl Strategy<Value = Case> {
    let plans = (2_usize..9, any::<Index>(), any::<(bool, bool)>());
    let balance = (any::<bool>(), 0_usize..3);
    let rows = prop::collection::vec(prop_oneof![Just(1), 2_usize..20], 1..4);
    let pictures = prop::collection::vec(picture(), 1..4);
    let span = (any::<bool>(), any::<(Index, Index)>());
    (
        config(),
        plans,
        balance,
        any::<u64>(),
        pictures,
        (rows, span),
    )
        .prop_map(
            |(config, (ranks, pick, options), (enabled, extra_slots), seed, mut pictures, rest)| {
                let plan = plan(&config, ranks, &pick, options);
                for picture in &mut pictures {
                    picture.guided |= plan.cfg > 1;
                }
                let (prefills, (spans, (start, end))) = rest;
                let start = start.index(prefills[0]);
                let full = spans.then(|| start..start + 1 + end.index(prefills[0] - start));
                let eplb = EplbConfig {
                    enabled,
                    interval_steps: 1,
                };
                let balance = BalanceOptions {
                    eplb,
                    extra_slots,
                    hosts: 1,
                };
                Case {
                    config,
                    plan,
                    balance,
                    seed,
                    pictures,
                    prefills,
                    full,
                }
            },
        )
}

impl Case {
    fn open(&self, plan: Plan, rank: usize) -> Model {
        let parts = Parts {
            vae_decoder: false,
            text: true,
            ..Parts::DENOISE
        };
        let options = LoadOptions {
            parts,
            plan,
            rank,
            balance: self.balance,
            ..LoadOptions::default()
        };
        Model::random(self.config.clone(), options, self.seed).unwrap()
    }

    /// A whole prefix; an empty one has no values.
    fn prefix(&self, whole: &Model, tokens: usize, salt: u64) -> PrefixKv {
        let mut cache = KvCache::new(whole.info().kv, tokens).unwrap();
        if tokens > 0 {
            let ids = ids(tokens, salt);
            let ctx = RankContext::single();
            whole
                .fill_rows(&ctx, &[row(0, &ids, &[])], &mut [&mut cache])
                .unwrap();
        }
        cache.into_prefix()
    }

    fn job(&self, whole: &Model, model: &Model, index: usize) -> DenoiseJob {
        let picture = &self.pictures[index];
        let own = |tokens, salt| {
            let whole = self.prefix(whole, tokens, salt);
            Some(Arc::new(whole.part_of(model.rank()).unwrap()))
        };
        let seed = index as u64;
        let spec = JobSpec {
            height: picture.grid.0 * CELL,
            width: picture.grid.1 * CELL,
            steps: STEPS,
            guidance: if picture.guided { 1.5 } else { 1.0 },
            seed,
            cond: own(picture.prefixes.0, seed),
            uncond: own(picture.prefixes.1, seed + 9),
        };
        let options = JobOptions {
            guidance_rescale: picture.rescale,
            preserve_norm: picture.preserve_norm,
            ..JobOptions::default()
        };
        DenoiseJob::with_options(model, spec, options).unwrap()
    }

    /// Latents of every picture where the rank has them. Experts may move after each step.
    fn denoise(&self, whole: &Model, model: &Model, ctx: &RankContext) -> Vec<Option<Vec<f32>>> {
        let indices = 0..self.pictures.len();
        let mut jobs: Vec<_> = indices.map(|index| self.job(whole, model, index)).collect();
        for _ in 0..STEPS {
            let mut packed: Vec<&mut DenoiseJob> = jobs.iter_mut().collect();
            model.denoise_step(ctx, &mut packed).unwrap();
            model.rebalance(ctx).unwrap();
        }
        let latents = jobs.iter().map(|job| job.latents().ok());
        latents.map(|l| l.map(|l| l.data().to_vec())).collect()
    }

    /// Hidden states of a prefill and of single tokens behind it, and what the caches hold in the end.
    fn write(&self, model: &Model, ctx: &RankContext) -> (Vec<Vec<f32>>, Vec<PrefixKv>) {
        let cache = |tokens: &usize| model.cache(tokens + MORE_TOKENS).unwrap();
        let mut caches: Vec<KvCache> = self.prefills.iter().map(cache).collect();
        let mut hidden = Vec::new();
        for pass in 0..=MORE_TOKENS {
            let texts: Vec<(usize, Vec<u32>)> = self
                .prefills
                .iter()
                .zip(0_u64..)
                .map(|(&tokens, salt)| match pass {
                    0 => (0, ids(tokens, salt)),
                    _ => (tokens + pass - 1, ids(1, salt + 3 * pass as u64)),
                })
                .collect();
            let spans = self.full.as_slice();
            let rows = texts.iter().enumerate().map(|(index, (start, ids))| {
                row(*start, ids, if index == 0 { spans } else { &[] })
            });
            let mut caches: Vec<&mut KvCache> = caches.iter_mut().collect();
            let rows: Vec<RowInput<'_>> = rows.collect();
            let out = model.run_rows(ctx, &rows, &mut caches, &mut NoProbe);
            hidden.push(out.unwrap().to_f32_vec());
        }
        (
            hidden,
            caches.into_iter().map(KvCache::into_prefix).collect(),
        )
    }

    fn check(&self) -> Result<(), TestCaseError> {
        let single = Plan::default();
        let whole = self.open(single, 0);
        let ctx = RankContext::single();
        let want = (self.denoise(&whole, &whole, &ctx), self.write(&whole, &ctx));
        let work = |ctx: RankContext| {
            let model = self.open(self.plan, ctx.rank());
            // Text after pictures runs on experts that have moved.
            (self.denoise(&whole, &model, &ctx), self.write(&model, &ctx))
        };
        let ranks = threads::on_ranks(&self.plan, PATIENT, work).unwrap();
        let (want_latents, (want_hidden, want_prefixes)) = &want;
        let mesh = self.plan.mesh().unwrap();
        for (rank, (latents, (hidden, _))) in ranks.iter().enumerate() {
            let stage = mesh.index_in(rank, Axis::Pp.into()).unwrap();
            for (got, want) in latents.iter().zip(want_latents) {
                prop_assert_eq!(got.is_some(), stage == 0 || stage + 1 == self.plan.pp);
                if let Some(got) = got {
                    self.near(LATENTS, got, want.as_ref().unwrap())?;
                }
            }
            for (got, want) in hidden.iter().zip(want_hidden) {
                self.near("hidden states", got, want)?;
            }
        }
        let shard = |rank| RankShard::new(&self.config, &self.plan, rank).unwrap();
        let shards: Vec<RankShard> = (0..ranks.len()).map(shard).collect();
        for (index, want) in want_prefixes.iter().enumerate() {
            let parts = ranks.iter().map(|(_, (_, prefixes))| &prefixes[index]);
            let parts: Vec<_> = shards.iter().zip(parts).collect();
            let joined = PrefixKv::whole_of(want.geometry(), &parts).unwrap();
            self.near("keys and values", joined.data(), want.data())?;
            let cut = shards.iter().map(|shard| want.part_of(shard).unwrap());
            let cut: Vec<PrefixKv> = cut.collect();
            let parts: Vec<_> = shards.iter().zip(&cut).collect();
            let again = PrefixKv::whole_of(want.geometry(), &parts).unwrap();
            prop_assert!(again == *want, "cut and joined, a prefix is another");
        }
        Ok(())
    }

    /// The same bits where only data moves, else within what sums in another order cost.
    fn near(&self, what: &str, got: &[f32], want: &[f32]) -> Result<(), TestCaseError> {
        // Norms over pictures of two tokens make much of little.
        let bound = if what == LATENTS { 3e-4 } else { 1e-5 };
        prop_assert_eq!(got.len(), want.len(), "{}", what);
        if self.plan.tp == 1 && self.plan.ring == 1 {
            prop_assert!(got == want, "{}: only data moved, yet bits differ", what);
        }
        let scale = want.iter().fold(0_f32, |m, v| m.max(v.abs()));
        let far = got.iter().zip(want).map(|(g, w)| (g - w).abs());
        let worst = far.fold(0_f32, |m, d| if d > m || d.is_nan() { d } else { m });
        prop_assert!(worst <= bound * scale, "{}: {} of {}", what, worst, scale);
        Ok(())
    }
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

#[test]
fn random_models_under_random_plans_equal_one_rank() {
    // The same cases in every run: one in a million choices of an expert is so close that the order of a
    // sum decides it.
    let config = Config {
        cases: CASES,
        failure_persistence: None,
        max_shrink_iters: 60,
        ..Config::default()
    };
    let mut runner =
        TestRunner::new_with_rng(config, TestRng::deterministic_rng(RngAlgorithm::ChaCha));
    runner.run(&case(), |case| case.check()).unwrap();
}
