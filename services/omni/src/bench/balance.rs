//! `omni bench balance`: what moving experts between ranks does to a trace that does not use them evenly.
use std::{path::PathBuf, time::Duration};

use base::clock;
use clap::Args;
use model::{BalanceOptions, DenoiseJob, LoadOptions, Model, Parts};
use parallel::{
    Plan, RankContext,
    collective::threads,
    eplb::{EplbConfig, LayerChange},
};
use serde_json::{Value, json};

use super::{
    bad,
    denoise::{Batch, guided_jobs, parse_size, read_config},
    json as print, median, model_error,
};
use crate::error::OmniError;

/// How long one rank waits for another.
const PATIENCE: Duration = Duration::from_secs(300);
const MAX_PICTURES: usize = 64;
const MAX_STEPS: usize = 10_000;

/// Time steps of a plan with experts spread over ranks, before and after they move; prints JSON.
///
/// Pictures begin one after the other, so that a step has all noise levels in it, as under steady load; who is
/// done is followed by a new one. Every rank computes with one thread.
#[derive(Debug, Args)]
pub(crate) struct BalanceArgs {
    /// config.json of a model; its weights are made up.
    #[arg(long, value_name = "FILE", required_unless_present = "model")]
    config: Option<PathBuf>,
    /// Checkpoint directory.
    #[arg(long, value_name = "DIR", conflicts_with = "config")]
    model: Option<PathBuf>,
    /// Use only the first layers of --config.
    #[arg(long, requires = "config")]
    layers: Option<usize>,
    /// With --config: draws tokens to the first half of the experts, by rows of routers that are 1 + SKEW times as
    /// long.
    #[arg(long, requires = "config", default_value_t = 0.0)]
    skew: f32,
    /// A plan with experts spread over ranks, which are threads here.
    #[arg(long, default_value = "ulysses=2,ep=ulysses")]
    plan: Plan,
    /// Steps from one decision to the next.
    #[arg(long, default_value_t = 8)]
    interval: usize,
    /// Expert slots of a rank beyond an even share.
    #[arg(long, default_value_t = 1)]
    extra_slots: usize,
    /// Guided pictures of the batch.
    #[arg(long, default_value_t = 4)]
    pictures: usize,
    /// Pixels, WIDTHxHEIGHT. Without it: the model's square size.
    #[arg(long, value_name = "WxH")]
    size: Option<String>,
    /// Prompt tokens cached before the image.
    #[arg(long, default_value_t = 32)]
    prefix: usize,
    /// Steps of a picture.
    #[arg(long, default_value_t = 16)]
    picture_steps: usize,
    /// Steps to run.
    #[arg(long, default_value_t = 32)]
    steps: usize,
}

/// A step of all ranks.
struct Step {
    ms: f64,
    /// Processor time of the rank: what the step would take if each rank had a processor of its own.
    cpu_ms: f64,
    /// Choices of experts in a layer, over all ranks.
    choices: usize,
    changes: Vec<LayerChange>,
    /// By layer, after the last step of an interval: busiest rank over the mean.
    seen: Vec<f64>,
}

/// Runs the measurement.
pub(crate) fn run(args: &BalanceArgs) -> Result<String, OmniError> {
    for (name, value, most) in [
        ("pictures", args.pictures, MAX_PICTURES),
        ("steps", args.steps, MAX_STEPS),
        (
            "picture_steps",
            args.picture_steps,
            model::scheduler::MAX_STEPS,
        ),
        ("interval", args.interval, MAX_STEPS),
    ] {
        if !(1..=most).contains(&value) {
            return Err(bad(format!("{name} must be 1 to {most}, got {value}")));
        }
    }
    if args.plan.ep.is_empty() {
        return Err(bad(
            "plan must spread experts over ranks, such as ulysses=2,ep=ulysses",
        ));
    }
    if !(0.0..=100.0).contains(&args.skew) {
        return Err(bad(format!("skew must be 0 to 100, got {}", args.skew)));
    }
    crate::roles::set_threads(0)?;
    let ranks = threads::on_ranks(&args.plan, PATIENCE, |ctx| rank(args, &ctx));
    let ranks = ranks.map_err(|e| bad(format!("plan: {e}")))?.into_iter();
    let ranks = ranks.collect::<Result<Vec<_>, _>>()?;
    let whole = (0..args.steps / args.interval).map(|index| {
        let own = index * args.interval..(index + 1) * args.interval;
        let steps = ranks.iter().map(|rank| &rank[own.clone()]);
        interval(&steps.collect::<Vec<_>>())
    });
    let intervals: Vec<Value> = whole.collect();
    print(&json!({
        "bench": "balance",
        "version": crate::cli::version(),
        "plan": args.plan.to_string(),
        "skew": args.skew,
        "pictures": args.pictures,
        "interval": args.interval,
        "extra_slots": args.extra_slots,
        "intervals": intervals,
    }))
}

/// What an interval was like, of whose steps each rank tells, and what moved at its end.
fn interval(ranks: &[&[Step]]) -> Value {
    let (steps, busy) = (ranks[0], |rank: &&[Step]| {
        median(&rank.iter().map(|step| step.cpu_ms).collect::<Vec<_>>())
    });
    let mean = |values: Vec<f64>| values.iter().sum::<f64>() / values.len().max(1) as f64;
    let ms: Vec<f64> = steps.iter().map(|step| step.ms).collect();
    let choices = steps.iter().map(|step| step.choices).sum::<usize>() as f64;
    let last = &steps[steps.len() - 1];
    let (seen, changes) = (mean(last.seen.clone()), &last.changes);
    let expected = changes.iter().map(|change| change.after).collect();
    json!({
        "step_ms": median(&ms),
        "busiest_rank_cpu_ms": ranks.iter().map(busy).fold(0.0, f64::max),
        "busiest_over_mean": seen,
        "worst_layer": last.seen.iter().copied().fold(1.0, f64::max),
        "busiest_rank_choices_per_layer": (seen * choices / ranks.len() as f64).round(),
        "then_moved": {
            "layers": changes.len(),
            "experts": changes.iter().map(|c| c.moves.len()).sum::<usize>(),
            "busiest_over_mean_expected": (!changes.is_empty()).then(|| mean(expected)),
        },
    })
}

fn rank(args: &BalanceArgs, ctx: &RankContext) -> Result<Vec<Step>, OmniError> {
    // A rank that shared its threads with the others would do their work while it waits.
    let own = rayon::ThreadPoolBuilder::new().num_threads(1).build();
    let own = own.map_err(|e| bad(format!("threads: {e}")))?;
    own.install(|| steps(args, ctx))
}

fn steps(args: &BalanceArgs, ctx: &RankContext) -> Result<Vec<Step>, OmniError> {
    let model = open(args, ctx)?;
    let size = parse_size(args.size.as_deref(), model.config())?;
    let jobs = |pictures: usize, seed: u64| {
        let batch = Batch {
            pictures,
            size,
            steps: args.picture_steps,
            prefix: args.prefix,
            seed,
        };
        guided_jobs(&model, &batch)
    };
    let mut running = jobs(args.pictures, 0)?;
    for (index, job) in running.iter_mut().enumerate() {
        for _ in 0..index * args.picture_steps / args.pictures {
            let alone = model.denoise_step(ctx, &mut [&mut *job]);
            alone.map_err(model_error)?;
        }
    }
    let top = model.config().layers.first().map_or(0, |layer| layer.top_k);
    let (mut steps, mut began) = (Vec::new(), args.pictures as u64);
    for _ in 0..args.steps {
        let mut packed: Vec<&mut DenoiseJob> = running.iter_mut().collect();
        let tokens = packed.iter().map(|job| job.tokens()).sum::<usize>();
        let (start, cpu) = (clock::now(), cpu_ms());
        model.denoise_step(ctx, &mut packed).map_err(model_error)?;
        let (ms, cpu_ms) = (clock::millis_since(start), cpu_ms() - cpu);
        let changes = model.rebalance(ctx).map_err(model_error)?;
        steps.push(Step {
            ms,
            cpu_ms,
            choices: tokens * top,
            changes,
            seen: model.imbalance().map_err(model_error)?,
        });
        for job in running.iter_mut().filter(|job| job.is_done()) {
            *job = jobs(1, began)?.remove(0);
            began += 1;
        }
    }
    Ok(steps)
}

/// Processor time of this thread so far; 0 where the system does not say.
fn cpu_ms() -> f64 {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    let first = text.split_whitespace().next();
    first.and_then(|ns| ns.parse::<f64>().ok()).unwrap_or(0.0) / 1e6
}

fn open(args: &BalanceArgs, ctx: &RankContext) -> Result<Model, OmniError> {
    let options = LoadOptions {
        parts: Parts {
            vae_decoder: false,
            ..Parts::DENOISE
        },
        plan: args.plan,
        rank: ctx.rank(),
        balance: BalanceOptions {
            eplb: EplbConfig {
                enabled: true,
                interval_steps: args.interval,
            },
            extra_slots: args.extra_slots,
            hosts: 1,
        },
        ..LoadOptions::default()
    };
    let opened = match (&args.model, &args.config) {
        (Some(dir), _) => Model::open(dir, options),
        (None, Some(path)) => {
            let config = read_config(path, args.layers)?;
            Model::random_skewed(config, options, (0, args.skew))
        }
        (None, None) => return Err(bad("give --model or --config")),
    };
    opened.map_err(model_error)
}
