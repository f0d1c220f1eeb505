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
use serde_json::json;

use super::{
    bad,
    denoise::{Batch, guided_jobs, parse_size},
    json as print, median, model_error,
};
use crate::error::OmniError;

/// How long one rank waits for another.
const PATIENCE: Duration = Duration::from_secs(300);
const MAX_PICTURES: usize = 64;
const MAX_STEPS: usize = 10_000;

/// Time steps of a plan with experts spread over ranks, before and after they move; prints JSON.
#[derive(Debug, Args)]
pub(crate) struct BalanceArgs {
    /// Checkpoint directory.
    #[arg(long, value_name = "DIR")]
    model: PathBuf,
    /// A plan with experts spread over ranks, which are threads here.
    #[arg(long, default_value = "ulysses=2,ep=ulysses")]
    plan: Plan,
    /// Steps from one decision to the next.
    #[arg(long, default_value_t = 4)]
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
    /// Steps to run.
    #[arg(long, default_value_t = 16)]
    steps: usize,
}

/// A step of all ranks.
struct Step {
    ms: f64,
    changes: Vec<LayerChange>,
}

/// Runs the measurement.
pub(crate) fn run(args: &BalanceArgs) -> Result<String, OmniError> {
    for (name, value, most) in [
        ("pictures", args.pictures, MAX_PICTURES),
        ("steps", args.steps, MAX_STEPS),
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
    crate::roles::set_threads(0)?;
    let mut ranks = threads::on_ranks(&args.plan, PATIENCE, |ctx| rank(args, &ctx))
        .map_err(|e| bad(format!("plan: {e}")))?
        .into_iter();
    let first = ranks.next().ok_or_else(|| bad("plan has no ranks"))??;
    ranks.collect::<Result<Vec<_>, _>>()?;
    let mean = |changes: &[LayerChange], pick: fn(&LayerChange) -> f64| {
        changes.iter().map(pick).sum::<f64>() / changes.len() as f64
    };
    let moved = first
        .iter()
        .enumerate()
        .filter(|(_, step)| !step.changes.is_empty());
    let moves: Vec<_> = moved
        .map(|(index, Step { changes, .. })| {
            json!({
                "after_step": index + 1,
                "layers": changes.len(),
                "experts_moved": changes.iter().map(|c| c.moves.len()).sum::<usize>(),
                "imbalance_as_it_was": mean(changes, |c| c.before),
                "imbalance_expected": mean(changes, |c| c.after),
            })
        })
        .collect();
    let ms = |steps: &[Step]| median(&steps.iter().map(|step| step.ms).collect::<Vec<_>>());
    let (unbalanced, balanced) = first.split_at(args.interval.min(first.len()));
    print(&json!({
        "bench": "balance",
        "version": crate::cli::version(),
        "plan": args.plan.to_string(),
        "steps": args.steps,
        "interval": args.interval,
        "extra_slots": args.extra_slots,
        "moves": moves,
        "ms_before_the_first_move": ms(unbalanced),
        "ms_after_it": ms(balanced),
    }))
}

fn rank(args: &BalanceArgs, ctx: &RankContext) -> Result<Vec<Step>, OmniError> {
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
    let model = Model::open(&args.model, options).map_err(model_error)?;
    let batch = Batch {
        pictures: args.pictures,
        size: parse_size(args.size.as_deref(), model.config())?,
        steps: args.steps,
        prefix: args.prefix,
        seed: 0,
    };
    let mut jobs = guided_jobs(&model, &batch)?;
    let mut steps = Vec::new();
    for _ in 0..args.steps {
        let mut packed: Vec<&mut DenoiseJob> = jobs.iter_mut().collect();
        let start = clock::now();
        model.denoise_step(ctx, &mut packed).map_err(model_error)?;
        let ms = clock::millis_since(start);
        let changes = model.rebalance(ctx).map_err(model_error)?;
        steps.push(Step { ms, changes });
    }
    Ok(steps)
}
