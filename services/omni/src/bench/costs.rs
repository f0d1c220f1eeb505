//! `omni bench costs`: what a step costs on this machine, as the `[constants]` of a cluster of `omni simulate`.
use std::path::PathBuf;

use base::clock;
use clap::Args;
use model::{DenoiseJob, Latents, LoadOptions, Model, Parts};
use parallel::RankContext;
use schedule::cost::{Constants, Load, Rows};

use super::{
    bad,
    denoise::{Batch, Weights, guided_jobs, parse_size, read_config},
    median, model_error,
};
use crate::error::OmniError;

/// Steps of each kind that are run before anything is timed.
const WARM_UP_STEPS: usize = 1;
const MAX_STEPS: usize = 10_000;
/// Rows of a guided picture.
const ROWS: u32 = 2;
/// Pictures of the small size in the packed step.
const PACKED: usize = 4;

/// Time steps of several sizes and fit what they cost; prints the [constants] of a cluster file (TOML).
#[derive(Debug, Args)]
pub(crate) struct CostsArgs {
    /// Checkpoint directory.
    #[arg(long, value_name = "DIR", required_unless_present = "config")]
    model: Option<PathBuf>,
    /// config.json of a model; its weights are made up.
    #[arg(long, value_name = "FILE", conflicts_with = "model")]
    config: Option<PathBuf>,
    /// Use only the first layers of --config.
    #[arg(long, requires = "config")]
    layers: Option<usize>,
    /// Pixels of the small pictures, WIDTHxHEIGHT. Without it: half the model's square size.
    #[arg(long, value_name = "WxH")]
    small: Option<String>,
    /// Pixels of the large pictures, WIDTHxHEIGHT. Without it: the model's square size.
    #[arg(long, value_name = "WxH")]
    large: Option<String>,
    /// Prompt tokens cached before the image.
    #[arg(long, default_value_t = 32)]
    prefix: usize,
    /// Steps of each kind to time.
    #[arg(long, default_value_t = 5)]
    steps: usize,
    /// Compute threads; 0: one a core.
    #[arg(long, default_value_t = 0)]
    threads: usize,
    /// On this GPU, by its number (builds with the feature `cuda`).
    #[arg(long, value_name = "NUMBER")]
    gpu: Option<usize>,
    /// How the GPU holds the large matrices. Without it: bf16.
    #[arg(long, value_enum, requires = "gpu")]
    weights: Option<Weights>,
    /// Decoder layers that stay on the GPU; without it, all. What copying in the others takes becomes `stream_s`.
    #[arg(long, requires = "gpu")]
    resident_layers: Option<usize>,
}

/// Pictures of one size in one step.
#[derive(Debug, Clone, Copy)]
struct Shape {
    pictures: usize,
    size: (usize, usize),
}

/// Runs the measurement.
pub(crate) fn run(args: &CostsArgs) -> Result<String, OmniError> {
    if !(1..=MAX_STEPS).contains(&args.steps) {
        let got = args.steps;
        return Err(bad(format!("steps must be 1 to {MAX_STEPS}, got {got}")));
    }
    let (samples, stream_s, decode_token_s) = match args.gpu {
        Some(ordinal) => on_gpu(args, ordinal)?,
        None => on_cpu(args)?,
    };
    let fitted = Constants::fit(&samples).map_err(|error| bad(error.to_string()))?;
    let constants = Constants {
        stream_s,
        decode_token_s,
        ..fitted
    };
    printed(&constants, &samples)
}

/// The section of a cluster file, with what it was fitted to and how well it fits as comments.
fn printed(constants: &Constants, samples: &[(Load, f64)]) -> Result<String, OmniError> {
    let mut text =
        "# Measured by `omni bench costs`: rows, tokens, seconds of a step, predicted.\n"
            .to_owned();
    for (load, seconds) in samples {
        let predicted = constants.step(*load);
        let (rows, tokens) = (load.rows, load.tokens);
        text += &format!("# {rows:>4} {tokens:>7} {seconds:>12.6} {predicted:>12.6}\n");
    }
    let values = toml::to_string(constants).map_err(|error| bad(format!("toml: {error}")))?;
    Ok(text + "[constants]\n" + values.trim_end())
}

/// A step of next to nothing, of small and large pictures alone, and of small ones packed.
fn shapes(args: &CostsArgs, config: &model::ModelConfig) -> Result<[Shape; 4], OmniError> {
    let (width, height) = parse_size(args.large.as_deref(), config)?;
    let cell = config.pixels_per_token();
    let half = |side: usize| (side / 2).next_multiple_of(cell);
    let small = match &args.small {
        Some(text) => parse_size(Some(text), config)?,
        None => (half(width), half(height)),
    };
    if small.0 * small.1 >= width * height {
        return Err(bad("small must be smaller than large"));
    }
    let shape = |pictures, size| Shape { pictures, size };
    Ok([
        shape(1, (cell, cell)),
        shape(1, small),
        shape(1, (width, height)),
        shape(PACKED, small),
    ])
}

fn load(shape: Shape, cell: usize, prefix: usize) -> Load {
    let narrow = |count: usize| u32::try_from(count).unwrap_or(u32::MAX);
    // Beside the image a step computes one special token of a row.
    let tokens = narrow((shape.size.0 / cell) * (shape.size.1 / cell) + 1);
    let one = Load::from(Rows {
        rows: ROWS,
        tokens,
        prefix: narrow(prefix),
    });
    std::iter::repeat_n(one, shape.pictures).sum()
}

/// Loads with their seconds, what layers that travel take, and what an image token takes to decode.
type Measured = (Vec<(Load, f64)>, f64, f64);

fn on_cpu(args: &CostsArgs) -> Result<Measured, OmniError> {
    crate::roles::set_threads(args.threads)?;
    let options = LoadOptions {
        parts: Parts::DENOISE,
        ..LoadOptions::default()
    };
    let model = match (&args.model, &args.config) {
        (Some(dir), _) => Model::open(dir, options),
        (None, Some(path)) => Model::random(read_config(path, args.layers)?, options, 0),
        (None, None) => return Err(bad("give --model or --config")),
    };
    let model = model.map_err(model_error)?;
    let shapes = shapes(args, model.config())?;
    let cell = model.config().pixels_per_token();
    let mut samples = Vec::new();
    for shape in shapes {
        let seconds = step(&model, shape, args)?;
        samples.push((load(shape, cell, args.prefix), seconds));
    }
    let decode_token_s = decode(&model, shapes[1], cell)?;
    Ok((samples, 0.0, decode_token_s))
}

/// Median seconds of a step.
fn step(model: &Model, shape: Shape, args: &CostsArgs) -> Result<f64, OmniError> {
    let steps = WARM_UP_STEPS + args.steps;
    let mut jobs = guided_jobs(
        model,
        &Batch {
            pictures: shape.pictures,
            size: shape.size,
            steps,
            prefix: args.prefix,
            seed: 0,
        },
    )?;
    let mut times = Vec::new();
    for _ in 0..steps {
        let mut packed: Vec<&mut DenoiseJob> = jobs.iter_mut().collect();
        let start = clock::now();
        model
            .denoise_step(&RankContext::single(), &mut packed)
            .map_err(model_error)?;
        times.push(clock::millis_since(start) / 1e3);
    }
    Ok(median(&times[WARM_UP_STEPS..]))
}

/// Seconds of decoding an image token, by a picture of this shape.
fn decode(model: &Model, shape: Shape, cell: usize) -> Result<f64, OmniError> {
    let (across, down) = (shape.size.0 / cell, shape.size.1 / cell);
    let channels = model.config().vae.latent_channels;
    let values = vec![0.0; channels * down * across];
    let latents = Latents::new(channels, down, across, values).map_err(model_error)?;
    let start = clock::now();
    model
        .decode(&RankContext::single(), &latents)
        .map_err(model_error)?;
    Ok(clock::millis_since(start) / 1e3 / (across * down) as f64)
}

#[cfg(not(feature = "cuda"))]
fn on_gpu(_: &CostsArgs, _: usize) -> Result<Measured, OmniError> {
    Err(super::no_gpu())
}

/// The same on a GPU. Decoding is `omni bench vae --gpu`.
#[cfg(feature = "cuda")]
fn on_gpu(args: &CostsArgs, ordinal: usize) -> Result<Measured, OmniError> {
    use super::gpu::{GpuBench, Picture, run};

    let config = match (&args.model, &args.config) {
        (Some(dir), _) => model::ModelConfig::from_dir(dir).map_err(model_error)?,
        (None, Some(path)) => read_config(path, args.layers)?,
        (None, None) => return Err(bad("give --model or --config")),
    };
    let (shapes, cell) = (shapes(args, &config)?, config.pixels_per_token());
    let guidance = config.generation.guidance;
    let seconds = |shape: Shape, resident: Option<usize>| {
        let (width, height) = shape.size;
        let picture = Picture {
            width,
            height,
            guidance,
        };
        let report = run(&GpuBench {
            config: config.clone(),
            checkpoint: args.model.as_ref(),
            ordinal,
            plan: parallel::Plan::default(),
            weights: args.weights.unwrap_or_default().into(),
            resident_layers: resident,
            pictures: vec![picture; shape.pictures],
            steps: args.steps,
            prefix: args.prefix,
            whole: false,
            seed: 0,
        })?;
        let ms = report["ms_per_step"].as_f64();
        ms.map(|ms| ms / 1e3)
            .ok_or_else(|| bad("the measurement tells no ms_per_step"))
    };
    let mut samples = Vec::new();
    for shape in shapes {
        samples.push((load(shape, cell, args.prefix), seconds(shape, None)?));
    }
    let stream_s = match args.resident_layers {
        Some(_) => seconds(shapes[0], args.resident_layers)?,
        None => 0.0,
    };
    Ok((samples, stream_s, 0.0))
}
