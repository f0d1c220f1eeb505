//! `omni bench decode`: prefill and text decoding on one GPU, or on several under a plan.
use std::path::PathBuf;

use clap::Args;
#[cfg(feature = "cuda")]
use model::ModelConfig;
use parallel::Plan;
use serde_json::Value;

#[cfg(feature = "cuda")]
use super::model_error;
use super::{bad, denoise::Weights, json as print};
use crate::error::OmniError;

/// Most rows, tokens and steps that a measurement may ask for.
const MAX_ROWS: usize = 1024;
const MAX_TOKENS: usize = 1 << 17;

/// Time prefill and text decoding on one GPU, or on several under a plan; prints JSON.
#[derive(Debug, Args)]
pub(crate) struct DecodeArgs {
    /// config.json of a model; its weights are made up.
    #[arg(long, value_name = "FILE", required_unless_present = "model")]
    config: Option<PathBuf>,
    /// Checkpoint directory; its own weights are used.
    #[arg(long, value_name = "DIR", conflicts_with = "config")]
    model: Option<PathBuf>,
    /// The GPU, by its number (builds with the feature `cuda`).
    #[arg(long, value_name = "NUMBER", default_value_t = 0)]
    gpu: usize,
    /// Run on so many GPUs, from number 0 or --gpu on, under a plan.
    #[arg(long, value_name = "COUNT", requires = "plan")]
    gpus: Option<usize>,
    /// How the model is spread over them, such as tp=2.
    #[arg(long, requires = "gpus")]
    plan: Option<Plan>,
    /// How the GPU holds the large matrices.
    #[arg(long, value_enum, default_value_t)]
    weights: Weights,
    /// Rows that decode together; several numbers are measured one after the other.
    #[arg(long, value_delimiter = ',', default_value = "1,2,4,8,16,32")]
    rows: Vec<usize>,
    /// Tokens of every row before decoding begins.
    #[arg(long, default_value_t = 1024)]
    prefix: usize,
    /// Tokens to decode in every row.
    #[arg(long, default_value_t = 32)]
    steps: usize,
    /// Use only the first layers of the model.
    #[arg(long)]
    layers: Option<usize>,
    /// Seed of the weights.
    #[arg(long, default_value_t = 0)]
    seed: u64,
}

/// Runs the measurement.
pub(crate) fn run(args: &DecodeArgs) -> Result<String, OmniError> {
    let rows = args.rows.iter().map(|rows| ("rows", *rows, MAX_ROWS));
    for (name, value, most) in rows.chain([
        ("prefix", args.prefix, MAX_TOKENS),
        ("steps", args.steps, MAX_TOKENS),
    ]) {
        if !(1..=most).contains(&value) {
            return Err(bad(format!("{name} must be 1 to {most}, got {value}")));
        }
    }
    let plan = args.plan.unwrap_or_default();
    let ranks = plan.mesh().map_err(|e| bad(format!("plan: {e}")))?.ranks();
    if ranks != args.gpus.unwrap_or(1) {
        return Err(bad(format!("gpus: plan {plan} has {ranks} ranks")));
    }
    print(&measured(args, plan)?)
}

#[cfg(not(feature = "cuda"))]
fn measured(_args: &DecodeArgs, _plan: Plan) -> Result<Value, OmniError> {
    Err(super::no_gpu())
}

#[cfg(feature = "cuda")]
fn measured(args: &DecodeArgs, plan: Plan) -> Result<Value, OmniError> {
    let config = match (&args.model, &args.config) {
        (Some(dir), _) => ModelConfig::from_dir(dir).map_err(model_error)?,
        (None, Some(path)) => super::denoise::read_config(path, args.layers)?,
        (None, None) => return Err(bad("give --model or --config")),
    };
    super::gpu_text::run(&super::gpu_text::TextBench {
        config,
        checkpoint: args.model.as_deref(),
        ordinal: args.gpu,
        plan,
        weights: args.weights.into(),
        rows: &args.rows,
        prefix: args.prefix,
        steps: args.steps,
        seed: args.seed,
    })
}
