//! Plans of two GPUs beside one GPU.
//!
//! Needs an H100 or H200: `cargo test -p model --features cuda --test gpu_plans -- --ignored --test-threads 1`.
//! With two GPUs the ranks reach each other through NCCL; with one they share it, and copies on the device take
//! the place of NCCL.
#![cfg(feature = "cuda")]
#![allow(clippy::unwrap_used, clippy::print_stdout, missing_docs)]

#[path = "common/gpu_ranks.rs"]
mod gpu_ranks;
#[path = "common/numbers.rs"]
mod numbers;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use model::gpu::{GpuGroup, GpuJob, GpuJobSpec, GpuModel, GpuOptions, GpuShare, Watch, WeightType};
use model::{JobOptions, JobSpec, ModelConfig, ModelError, PrefixKv};
use parallel::Plan;

use gpu_ranks::{Meeting, PATIENCE, RANKS};
use numbers::{relative, values};

const FIXTURES: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/../../../integration-tests/fixtures"
);
const STEPS: usize = 3;
/// The same where it will not come.
const SHORT_PATIENCE: Duration = Duration::from_secs(4);

fn golden() -> ModelConfig {
    ModelConfig::from_dir(&Path::new(FIXTURES).join("golden/model")).unwrap()
}

/// The published sizes with two layers.
fn published() -> ModelConfig {
    let text = std::fs::read_to_string(Path::new(FIXTURES).join("published/config.json")).unwrap();
    let value = serde_json::from_str(&text).unwrap();
    let mut config = ModelConfig::parse(&value, &serde_json::json!({})).unwrap();
    config.layers.truncate(2);
    config
}

/// Velocities of every job in its first step, and final latents.
type Seen = (Vec<Vec<f32>>, Vec<Vec<f32>>);

/// Pictures of `sizes` (in tokens of 16 pixels), each with guidance, in one batch.
fn denoise(model: &mut GpuModel, sizes: &[(usize, usize)], guidance: f64) -> Seen {
    let config = model.config().clone();
    let cell = config.pixels_per_token();
    let geometry = config.kv_geometry();
    let mut jobs: Vec<GpuJob> = Vec::new();
    for (index, (height, width)) in sizes.iter().enumerate() {
        let seed = index as u64 + 1;
        let prefix = |salt: u64, tokens: usize| {
            let count = geometry.elements_per_token() * tokens;
            let made = PrefixKv::new(geometry, tokens, values(seed * 10 + salt, count)).unwrap();
            Arc::new(model.upload(&made).unwrap())
        };
        let given = GpuJobSpec {
            spec: JobSpec {
                height: height * cell,
                width: width * cell,
                steps: STEPS,
                guidance,
                seed,
                cond: None,
                uncond: None,
            },
            options: JobOptions::default(),
            cond: prefix(1, 37),
            uncond: Some(prefix(2, 37)),
        };
        jobs.push(GpuJob::new(model, given).unwrap());
    }
    let mut first = vec![Vec::new(); jobs.len()];
    for step in 0..STEPS {
        let mut see = |job: usize, velocity: &[f32]| first[job] = velocity.to_vec();
        let mut watch = Watch::default();
        if step == 0 {
            watch.velocities = Some(&mut see);
        }
        let mut packed: Vec<&mut GpuJob> = jobs.iter_mut().collect();
        model.watched_step(&mut packed, &mut watch).unwrap();
    }
    model.wait().unwrap();
    let last = jobs.iter().map(|job| job.latents().unwrap());
    (first, last.map(|l| l.data().to_vec()).collect())
}

fn options(weights: WeightType) -> GpuOptions {
    GpuOptions {
        ordinal: 0,
        weights,
        max_tokens: 8192,
        kv_bytes: 256 << 20,
        resident_layers: None,
        text: false,
    }
}

type Open<'a> = dyn Fn(GpuShare, Arc<dyn GpuGroup>) -> Result<GpuModel, ModelError> + Sync + 'a;

/// What each rank of `plan` sees.
fn under(plan: &Plan, config: &ModelConfig, open: &Open<'_>, run: &Run<'_>) -> Vec<Seen> {
    let meeting = Meeting::new();
    std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..RANKS)
            .map(|rank| {
                let meeting = &meeting;
                scope.spawn(move || {
                    let share = GpuShare::new(config, plan, rank).unwrap();
                    let mut model = open(share, meeting.join(rank, PATIENCE)).unwrap();
                    run(&mut model)
                })
            })
            .collect();
        ranks.into_iter().map(|r| r.join().unwrap()).collect()
    })
}

type Run<'a> = dyn Fn(&mut GpuModel) -> Seen + Sync + 'a;

/// Plans, and whether they split no sum: those must give the same bits.
const PLANS: [(&str, bool); 10] = [
    ("cfg=2", true),
    ("pp=2", true),
    ("ulysses=2", true),
    ("cfg=2,ep=cfg", false),
    ("ulysses=2,ep=ulysses", false),
    ("tp=2", false),
    ("tp=2,ep=tp,shared_expert=replicated", false),
    ("ring=2", false),
    ("ring=2,ep=ring", false),
    ("pp=2,shared_expert=replicated", true),
];

/// Largest relative errors of a plan that splits sums: of velocities in the first step, and of final latents.
///
/// Another order of a sum moves a value by a bit of bf16, and now and then a token to another expert, where
/// two are nearly tied; guidance multiplies both. How much that is shows one plan as well as another: ring,
/// which splits only the sums of attention, is where `tp` is.
type Bars = (f64, f64);

/// Every plan beside the model alone; what is wrong.
fn compare(
    config: &ModelConfig,
    mut alone: GpuModel,
    open: &Open<'_>,
    (run, bars): (&Run<'_>, Bars),
    what: &str,
) -> Vec<String> {
    let want = run(&mut alone);
    drop(alone);
    let mut wrong = Vec::new();
    for (text, exact) in PLANS {
        let plan: Plan = text.parse().unwrap();
        let seen = under(&plan, config, open, run);
        for (rank, got) in seen.iter().enumerate() {
            let worst = |a: &[Vec<f32>], b: &[Vec<f32>]| {
                let errors = a.iter().zip(b).map(|(a, b)| relative(a, b));
                errors.fold(0.0, |most, e| if e > most || e.is_nan() { e } else { most })
            };
            let (velocity, latents) = (worst(&got.0, &want.0), worst(&got.1, &want.1));
            println!("{what} {text} rank {rank}: velocity {velocity:.2e}, latents {latents:.2e}");
            let (of_velocity, of_latents) = if exact { (0.0, 0.0) } else { bars };
            // A NaN is not within either.
            let fine = velocity <= of_velocity && latents <= of_latents;
            if !fine || *got != seen[0] {
                wrong.push(format!(
                    "{what} {text} rank {rank}: {velocity:.2e} {latents:.2e}"
                ));
            }
        }
    }
    wrong
}

#[test]
#[ignore = "needs a Hopper GPU"]
fn every_plan_of_two_gpus_draws_what_one_gpu_draws() {
    let config = golden();
    let dir = Path::new(FIXTURES).join("golden/model");
    let mut wrong = Vec::new();
    for (weights, bars) in [
        (WeightType::Bf16, (5e-2, 0.3)),
        (WeightType::Fp8, (0.2, 0.6)),
    ] {
        let alone = GpuModel::open(&dir, options(weights)).unwrap();
        let sizes = bucket_sizes(&config);
        let run = |model: &mut GpuModel| denoise(model, &sizes, 5.0);
        let open = |share, group| GpuModel::open_rank(&dir, options(weights), share, group);
        let what = format!("golden {weights:?}");
        wrong.extend(compare(&config, alone, &open, (&run, bars), &what));
    }
    assert!(wrong.is_empty(), "{wrong:?}");
}

/// Two sizes that the model has.
fn bucket_sizes(config: &ModelConfig) -> Vec<(usize, usize)> {
    let buckets = model::Model::open(
        &Path::new(FIXTURES).join("golden/model"),
        model::LoadOptions::default(),
    )
    .unwrap();
    let cell = config.pixels_per_token();
    let all = &buckets.info().buckets;
    [0, all.len() - 1]
        .map(|i| (all[i].height / cell, all[i].width / cell))
        .to_vec()
}

#[test]
#[ignore = "needs a Hopper GPU"]
fn every_plan_computes_the_published_sizes() {
    let mut wrong = Vec::new();
    for (weights, bars) in [
        (WeightType::Bf16, (2e-2, 8e-2)),
        (WeightType::Fp8, (8e-2, 0.3)),
    ] {
        let what = format!("published {weights:?}");
        wrong.extend(random(&published(), (weights, bars), 5.0, &what));
    }
    assert!(wrong.is_empty(), "{wrong:?}");
}

/// Where every token has all experts, no order of a sum can move it to another one.
#[test]
#[ignore = "needs a Hopper GPU"]
fn plans_differ_by_rounding_alone_where_tokens_have_all_experts() {
    let mut config = published();
    for layer in &mut config.layers {
        layer.experts = 8;
        layer.top_k = 8;
    }
    let mut wrong = Vec::new();
    for (weights, bars) in [
        (WeightType::Bf16, (1e-2, 2e-2)),
        // A bit of bf16 moves some operands of 3 mantissa bits to the next one.
        (WeightType::Fp8, (5e-2, 6e-2)),
    ] {
        let what = format!("all experts {weights:?}");
        wrong.extend(random(&config, (weights, bars), 2.0, &what));
    }
    assert!(wrong.is_empty(), "{wrong:?}");
}

/// Every plan of a model with random weights.
fn random(
    config: &ModelConfig,
    (weights, bars): (WeightType, Bars),
    guidance: f64,
    what: &str,
) -> Vec<String> {
    let alone = GpuModel::random(config.clone(), options(weights), 3).unwrap();
    let run = |model: &mut GpuModel| denoise(model, &[(32, 32)], guidance);
    let open =
        |share, group| GpuModel::random_rank(config.clone(), options(weights), 3, share, group);
    compare(config, alone, &open, (&run, bars), what)
}

#[test]
#[ignore = "needs a Hopper GPU"]
fn a_rank_that_fails_ends_the_other() {
    let config = golden();
    let plan: Plan = "cfg=2,ep=cfg".parse().unwrap();
    let meeting = Meeting::new();
    let dir = Path::new(FIXTURES).join("golden/model");
    let sizes = bucket_sizes(&config);
    std::thread::scope(|scope| {
        for rank in 0..RANKS {
            let (meeting, config, plan, dir, sizes) = (&meeting, &config, &plan, &dir, &sizes);
            scope.spawn(move || {
                let share = GpuShare::new(config, plan, rank).unwrap();
                let group = meeting.join(rank, SHORT_PATIENCE);
                // Rank 1 has too little memory for a pass.
                let options = GpuOptions {
                    max_tokens: if rank == 0 { 8192 } else { 2 },
                    ..options(WeightType::Bf16)
                };
                let mut model = GpuModel::open_rank(dir, options, share, group).unwrap();
                let failed = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                    denoise(&mut model, &sizes[..1], 5.0)
                }));
                assert!(failed.is_err(), "rank {rank} went on");
            });
        }
    });
}

#[test]
fn plans_that_no_gpu_engine_runs_are_refused_before_anything_is_allocated() {
    let config = golden();
    for (plan, field) in [
        ("tp=3", "plan"),
        ("cfg=3", "plan"),
        ("pp=99", "plan"),
        ("cfg=2,tp=2", "unimplemented"),
        ("ring=2,ring_prefix=sharded", "unimplemented"),
        ("tp=2,ep=tp", "unimplemented"),
        ("tp=2,shared_expert=replicated", "unimplemented"),
    ] {
        let refused = GpuShare::new(&config, &plan.parse().unwrap(), 0).unwrap_err();
        assert!(refused.to_string().contains(field), "{plan}: {refused}");
    }
}
