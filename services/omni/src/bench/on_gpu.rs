//! `omni bench moe|vae|collectives`: parts of a step on the GPUs of this machine.
use std::path::PathBuf;

use clap::Args;
use serde_json::Value;

use super::{bad, denoise::Weights, json as print};
use crate::error::OmniError;

/// Most calls, tokens and GPUs that a measurement may ask for.
const MAX_ROUNDS: usize = 10_000;
const MAX_TOKENS: usize = 1 << 17;
const MAX_WIDTH: usize = 1 << 15;
const MAX_GPUS: usize = 64;

/// Time the products of one layer's experts on a GPU; prints JSON.
#[derive(Debug, Args)]
pub(crate) struct MoeArgs {
    /// config.json of a model.
    #[arg(long, value_name = "FILE")]
    config: PathBuf,
    /// The GPU, by its number (builds with the feature `cuda`).
    #[arg(long, value_name = "NUMBER", default_value_t = 0)]
    gpu: usize,
    /// How the matrices are held.
    #[arg(long, value_enum, default_value_t)]
    weights: Weights,
    /// Tokens of a step.
    #[arg(long, default_value_t = 8194)]
    tokens: usize,
    /// Load some experts three times as much as others.
    #[arg(long)]
    uneven: bool,
    /// Calls to time.
    #[arg(long, default_value_t = 20)]
    rounds: usize,
}

/// Time decoding and encoding of a picture on a GPU, with made-up weights; prints JSON.
#[derive(Debug, Args)]
pub(crate) struct VaeArgs {
    /// config.json of a model.
    #[arg(long, value_name = "FILE")]
    config: PathBuf,
    /// The GPU, by its number (builds with the feature `cuda`).
    #[arg(long, value_name = "NUMBER", default_value_t = 0)]
    gpu: usize,
    /// Pixels, WIDTHxHEIGHT.
    #[arg(long, value_name = "WxH", default_value = "1024x1024")]
    size: String,
    /// Decode in tiles as well that overlap by this fraction, and print what both take of the device's memory.
    #[arg(long, value_name = "FRACTION")]
    tiles: Option<f64>,
    /// Pictures to time.
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Seed of weights and latents.
    #[arg(long, default_value_t = 0)]
    seed: u64,
}

/// Time what the ranks of a plan exchange between GPUs; prints JSON.
#[derive(Debug, Args)]
pub(crate) struct CollectivesArgs {
    /// GPUs, from number 0 on (builds with the feature `cuda`).
    #[arg(long, value_name = "COUNT", default_value_t = 2)]
    gpus: usize,
    /// Rows of all ranks.
    #[arg(long, default_value_t = 8194)]
    tokens: usize,
    /// bf16 elements of a row.
    #[arg(long, default_value_t = 4096)]
    width: usize,
    /// Measurements, of which the median counts.
    #[arg(long, default_value_t = 9)]
    rounds: usize,
}

fn within(limits: &[(&str, usize, usize)]) -> Result<(), OmniError> {
    let wrong = limits
        .iter()
        .find(|(_, got, most)| !(1..=*most).contains(got));
    wrong.map_or(Ok(()), |(name, got, most)| {
        Err(bad(format!("{name} must be 1 to {most}, got {got}")))
    })
}

/// Runs the measurement.
pub(crate) fn moe(args: &MoeArgs) -> Result<String, OmniError> {
    within(&[
        ("tokens", args.tokens, MAX_TOKENS),
        ("rounds", args.rounds, MAX_ROUNDS),
    ])?;
    print(&with_gpu::moe(args)?)
}

/// Runs the measurement.
pub(crate) fn vae(args: &VaeArgs) -> Result<String, OmniError> {
    within(&[("rounds", args.rounds, MAX_ROUNDS)])?;
    print(&with_gpu::vae(args)?)
}

/// Runs the measurement.
pub(crate) fn collectives(args: &CollectivesArgs) -> Result<String, OmniError> {
    within(&[
        ("gpus", args.gpus, MAX_GPUS),
        ("tokens", args.tokens, MAX_TOKENS),
        ("width", args.width, MAX_WIDTH),
        ("rounds", args.rounds, MAX_ROUNDS),
    ])?;
    print(&with_gpu::collectives(args)?)
}

/// What every report begins with.
#[cfg(feature = "cuda")]
fn report(bench: &str, measured: Value) -> Value {
    serde_json::json!({
        "bench": bench,
        "version": crate::cli::version(),
        "measured": measured,
    })
}

#[cfg(not(feature = "cuda"))]
mod with_gpu {
    use super::{CollectivesArgs, MoeArgs, OmniError, VaeArgs, Value};
    use crate::bench::no_gpu;

    pub(super) fn moe(_: &MoeArgs) -> Result<Value, OmniError> {
        Err(no_gpu())
    }

    pub(super) fn vae(_: &VaeArgs) -> Result<Value, OmniError> {
        Err(no_gpu())
    }

    pub(super) fn collectives(_: &CollectivesArgs) -> Result<Value, OmniError> {
        Err(no_gpu())
    }
}

#[cfg(feature = "cuda")]
mod with_gpu {
    use model::gpu::WeightType;
    use serde_json::json;

    use super::{
        super::{
            denoise::read_config,
            gpu_collectives,
            gpu_ops::{self, Experts, gpu_error},
        },
        CollectivesArgs, MoeArgs, OmniError, VaeArgs, Value, bad, report,
    };

    pub(super) fn moe(args: &MoeArgs) -> Result<Value, OmniError> {
        let config = read_config(&args.config, Some(1))?;
        let layer = &config.layers[0];
        let experts = Experts {
            hidden: config.hidden_size,
            inner: layer.intermediate,
            experts: layer.experts,
            top_k: layer.top_k,
            tokens: args.tokens,
            uneven: args.uneven,
            fp8: WeightType::from(args.weights) == WeightType::Fp8,
        };
        let measured = experts.measure(args.gpu, args.rounds).map_err(gpu_error)?;
        let mut all = report("moe", measured.into());
        all["tokens"] = json!(args.tokens);
        all["uneven"] = json!(args.uneven);
        all["weight_type"] = json!(if experts.fp8 { "fp8" } else { "bf16" });
        Ok(all)
    }

    pub(super) fn vae(args: &VaeArgs) -> Result<Value, OmniError> {
        let config = read_config(&args.config, None)?;
        let size: proto::size::Size = args.size.parse().map_err(|e| bad(format!("size: {e}")))?;
        let (width, height) = (size.width as usize, size.height as usize);
        let factor = config.vae.spatial_factor;
        if !width.is_multiple_of(factor) || !height.is_multiple_of(factor) {
            return Err(bad(format!("size: sides must be multiples of {factor}")));
        }
        let run = (args.rounds, args.seed);
        let mut measured = gpu_ops::vae(args.gpu, &config, (width, height), run)?;
        if let Some(overlap) = args.tiles {
            let size = (width, height);
            measured["tiles"] = gpu_ops::tiles((args.gpu, overlap), &config, size, run)?;
        }
        let mut all = report("vae", measured);
        all["size"] = json!(args.size);
        Ok(all)
    }

    pub(super) fn collectives(args: &CollectivesArgs) -> Result<Value, OmniError> {
        let sizes = (args.tokens, args.width);
        let measured = gpu_collectives::run(args.gpus, sizes, args.rounds)?;
        let mut all = report("collectives", measured);
        all["gpus"] = json!(args.gpus);
        all["tokens"] = json!(args.tokens);
        all["width"] = json!(args.width);
        Ok(all)
    }
}
