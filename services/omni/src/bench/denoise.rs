//! `omni bench denoise`: the time of one packed denoising step.
use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::Instant,
};

use base::clock;
use clap::Args;
use kernels::Tensor;
use model::{
    DenoiseJob, JobSpec, LoadOptions, Model, ModelConfig, Parts, PrefixKv,
    backbone::{Probe, Site},
};
use parallel::{Plan, RankContext};
use serde_json::{Value, json};

use super::{
    bad,
    flops::{self, RowShape},
    json as print, median, memory, model_error,
};
use crate::error::OmniError;

/// Steps that are run before anything is timed.
const WARM_UP_STEPS: usize = 2;
/// Guidance of the measured jobs where two rows are asked for.
const GUIDANCE: f64 = 5.0;
/// Most rows, steps and prefix tokens that a measurement may ask for.
const MAX_ROWS: usize = 256;
const MAX_STEPS: usize = 100_000;
const MAX_PREFIX: usize = 1 << 20;

/// Time one packed denoising step; prints JSON.
#[derive(Debug, Args)]
pub(crate) struct DenoiseArgs {
    /// config.json of a model; its weights are made up.
    #[arg(long, value_name = "FILE", required_unless_present = "model")]
    config: Option<PathBuf>,
    /// Checkpoint directory; its own weights are used.
    #[arg(long, value_name = "DIR", conflicts_with = "config")]
    model: Option<PathBuf>,
    /// Pixels, WIDTHxHEIGHT. Without it: the model's square size.
    #[arg(long, value_name = "WxH")]
    size: Option<String>,
    /// Rows in the batch. An even number is that many halves of guided pictures, an odd one so many
    /// unguided pictures.
    #[arg(long, default_value_t = 2)]
    rows: usize,
    /// Steps to time.
    #[arg(long, default_value_t = 10)]
    steps: usize,
    /// Compute threads; 0: one a core.
    #[arg(long, default_value_t = 0)]
    threads: usize,
    /// Use only the first layers of the model.
    #[arg(long)]
    layers: Option<usize>,
    /// Prompt tokens cached before the image.
    #[arg(long, default_value_t = 32)]
    prefix: usize,
    /// Seed of weights, prefix and latents.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Run on this GPU, by its number (builds with the feature `cuda`).
    #[arg(long, value_name = "NUMBER")]
    gpu: Option<usize>,
    /// Run on so many GPUs, from number 0 or --gpu on, under a plan.
    #[arg(long, value_name = "COUNT", requires = "plan")]
    gpus: Option<usize>,
    /// How several GPUs share the work, like cfg=2,ep=cfg.
    #[arg(long, requires = "gpus")]
    plan: Option<Plan>,
    /// How the GPU holds the large matrices. Without it: bf16.
    #[arg(long, value_enum)]
    weights: Option<Weights>,
    /// Layers that stay on the GPU; the others travel from the host in every step. Without it: all stay.
    #[arg(long, value_name = "LAYERS")]
    resident_layers: Option<usize>,
    /// Pictures of the batch, WIDTHxHEIGHT@GUIDANCE, instead of --size and --rows.
    #[arg(long, value_delimiter = ',', value_name = "PICTURES")]
    pictures: Vec<String>,
    /// Also denoise and decode one whole picture.
    #[arg(long)]
    whole: bool,
}

/// How a GPU holds the large matrices.
#[derive(Debug, Clone, Copy, Default, clap::ValueEnum)]
pub(crate) enum Weights {
    /// As released.
    #[default]
    Bf16,
    /// 8-bit floats with one scale for each output channel.
    Fp8,
}

#[cfg(feature = "cuda")]
impl From<Weights> for model::gpu::WeightType {
    fn from(weights: Weights) -> Self {
        match weights {
            Weights::Bf16 => Self::Bf16,
            Weights::Fp8 => Self::Fp8,
        }
    }
}

/// Runs the measurement.
pub(crate) fn run(args: &DenoiseArgs) -> Result<String, OmniError> {
    for (name, value, most) in [
        ("rows", args.rows, MAX_ROWS),
        ("steps", args.steps, MAX_STEPS),
        ("prefix", args.prefix, MAX_PREFIX),
    ] {
        if !(1..=most).contains(&value) {
            return Err(bad(format!("{name} must be 1 to {most}, got {value}")));
        }
    }
    crate::roles::set_threads(args.threads)?;
    if args.gpu.is_some() || args.gpus.is_some() {
        return print(&on_gpu(args, args.gpu.unwrap_or(0))?);
    }
    let for_gpus = [
        ("weights", args.weights.is_some()),
        ("resident-layers", args.resident_layers.is_some()),
        ("pictures", !args.pictures.is_empty()),
        ("whole", args.whole),
    ];
    if let Some((name, _)) = for_gpus.iter().find(|(_, given)| *given) {
        return Err(bad(format!("{name} needs --gpu or --gpus")));
    }
    let model = open(args)?;
    let mut jobs = jobs(args, &model)?;
    let mut timer = LayerTimer::default();
    let (mut steps, mut layers) = (Vec::new(), Vec::new());
    for index in 0..WARM_UP_STEPS + args.steps {
        let mut packed: Vec<&mut DenoiseJob> = jobs.iter_mut().collect();
        timer.spans.clear();
        let start = clock::now();
        model
            .denoise_step_observed(
                &RankContext::single(),
                &mut packed,
                &mut timer,
                &mut |_, _| {},
            )
            .map_err(model_error)?;
        if index >= WARM_UP_STEPS {
            steps.push(clock::millis_since(start));
            layers.push(timer.mean());
        }
    }
    print(&report(args, &model, &jobs, (&steps, &layers))?)
}

#[cfg(not(feature = "cuda"))]
fn on_gpu(_args: &DenoiseArgs, _ordinal: usize) -> Result<Value, OmniError> {
    Err(super::no_gpu())
}

#[cfg(feature = "cuda")]
fn on_gpu(args: &DenoiseArgs, ordinal: usize) -> Result<Value, OmniError> {
    use super::gpu::{GpuBench, Picture, run};

    let plan = args.plan.unwrap_or_default();
    let ranks = plan.mesh().map_err(|e| bad(format!("plan: {e}")))?.ranks();
    if ranks != args.gpus.unwrap_or(1) {
        return Err(bad(format!("gpus: plan {plan} has {ranks} ranks")));
    }
    let config = match &args.model {
        Some(dir) => ModelConfig::from_dir(dir).map_err(model_error)?,
        None => config(args)?,
    };
    let pictures = if args.pictures.is_empty() {
        let (width, height) = size(args, &config)?;
        let guided = args.rows.is_multiple_of(2) && !config.cfg_distilled;
        let picture = Picture {
            width,
            height,
            guidance: if guided { GUIDANCE } else { 1.0 },
        };
        vec![picture; if guided { args.rows / 2 } else { args.rows }]
    } else {
        let each = args.pictures.iter().map(|text| text.parse());
        each.collect::<Result<_, String>>().map_err(bad)?
    };
    run(&GpuBench {
        config,
        checkpoint: args.model.as_ref(),
        ordinal,
        plan,
        weights: args.weights.unwrap_or_default().into(),
        resident_layers: args.resident_layers,
        pictures,
        steps: args.steps,
        prefix: args.prefix,
        whole: args.whole,
        seed: args.seed,
    })
}

fn open(args: &DenoiseArgs) -> Result<Model, OmniError> {
    let options = LoadOptions {
        parts: Parts {
            vae_decoder: false,
            ..Parts::DENOISE
        },
        ..LoadOptions::default()
    };
    if args.config.is_none() {
        let Some(dir) = &args.model else {
            return Err(bad("give --model or --config"));
        };
        if args.layers.is_some() {
            return Err(bad("layers cannot be cut from a checkpoint, use --config"));
        }
        return Model::open(dir, options).map_err(model_error);
    }
    Model::random(config(args)?, options, args.seed).map_err(model_error)
}

/// The config of a model whose weights are made up.
fn config(args: &DenoiseArgs) -> Result<ModelConfig, OmniError> {
    let Some(path) = &args.config else {
        return Err(bad("give --model or --config"));
    };
    read_config(path, args.layers)
}

/// The config in a file, and that of generation beside it if there is one, with only the first `layers` layers.
pub(super) fn read_config(path: &Path, layers: Option<usize>) -> Result<ModelConfig, OmniError> {
    let read = |path: &Path| -> Result<Value, OmniError> {
        let wrong =
            |error: &dyn std::fmt::Display| bad(format!("config {}: {error}", path.display()));
        let text = std::fs::read_to_string(path).map_err(|error| wrong(&error))?;
        serde_json::from_str(&text).map_err(|error| wrong(&error))
    };
    let beside = path.with_file_name(model::config::GENERATION_FILE);
    let generation = if beside.exists() {
        read(&beside)?
    } else {
        Value::Object(serde_json::Map::new())
    };
    let mut config = ModelConfig::parse(&read(path)?, &generation).map_err(model_error)?;
    if let Some(layers) = layers {
        if !(1..=config.num_layers()).contains(&layers) {
            let most = config.num_layers();
            return Err(bad(format!("layers must be 1 to {most}, got {layers}")));
        }
        config.layers.truncate(layers);
    }
    Ok(config)
}

/// Guided pictures of one size.
pub(super) struct Batch {
    pub(super) pictures: usize,
    /// Pixels across and down.
    pub(super) size: (usize, usize),
    pub(super) steps: usize,
    pub(super) prefix: usize,
    pub(super) seed: u64,
}

/// Jobs of a batch, each with prefixes of its own; two rows each where guidance takes two.
pub(super) fn guided_jobs(model: &Model, batch: &Batch) -> Result<Vec<DenoiseJob>, OmniError> {
    let job = |index: usize| {
        let seed = batch.seed.wrapping_add(index as u64);
        let prefix = |salt: u64| random_prefix(model, batch.prefix, seed ^ salt).map(Arc::new);
        let spec = JobSpec {
            height: batch.size.1,
            width: batch.size.0,
            steps: batch.steps,
            guidance: GUIDANCE,
            seed,
            cond: Some(prefix(1 << 32)?),
            uncond: Some(prefix(2 << 32)?),
        };
        let part = spec.part_of(model.rank());
        part.and_then(|spec| DenoiseJob::new(model, spec))
            .map_err(model_error)
    };
    (0..batch.pictures).map(job).collect()
}

fn jobs(args: &DenoiseArgs, model: &Model) -> Result<Vec<DenoiseJob>, OmniError> {
    let (width, height) = size(args, model.config())?;
    let guided = args.rows.is_multiple_of(2) && !model.info().cfg_distilled;
    let count = if guided { args.rows / 2 } else { args.rows };
    (0..count)
        .map(|index| {
            let seed = args.seed.wrapping_add(index as u64);
            let prefix = |salt: u64| random_prefix(model, args.prefix, seed ^ salt).map(Arc::new);
            let spec = JobSpec {
                height,
                width,
                steps: WARM_UP_STEPS + args.steps,
                guidance: if guided { GUIDANCE } else { 1.0 },
                seed,
                cond: Some(prefix(1 << 32)?),
                uncond: if guided { Some(prefix(2 << 32)?) } else { None },
            };
            DenoiseJob::new(model, spec).map_err(model_error)
        })
        .collect()
}

fn size(args: &DenoiseArgs, config: &ModelConfig) -> Result<(usize, usize), OmniError> {
    parse_size(args.size.as_deref(), config)
}

/// Width and height; without a text the model's square size.
pub(super) fn parse_size(
    text: Option<&str>,
    config: &ModelConfig,
) -> Result<(usize, usize), OmniError> {
    let Some(text) = text else {
        let side = config.image_base_size;
        return Ok((side, side));
    };
    let size: proto::size::Size = text
        .parse()
        .map_err(|error: proto::size::SizeError| bad(error.to_string()))?;
    Ok((size.width as usize, size.height as usize))
}

/// Keys and values of the size real ones have; their values do not change the work.
fn random_prefix(model: &Model, tokens: usize, seed: u64) -> Result<PrefixKv, OmniError> {
    prefix_values(model.info().kv, tokens, seed)
}

pub(super) fn prefix_values(
    geometry: kv::KvGeometry,
    tokens: usize,
    seed: u64,
) -> Result<PrefixKv, OmniError> {
    let source = base::rng::Source::seeded(seed);
    let values = geometry.elements_per_token() * tokens;
    let unit = |bits: u64| ((bits >> 40) as f32) / ((1_u32 << 23) as f32) - 1.0;
    let data = (0..values).map(|_| unit(source.next_u64())).collect();
    PrefixKv::new(geometry, tokens, data).map_err(model_error)
}

fn report(
    args: &DenoiseArgs,
    model: &Model,
    jobs: &[DenoiseJob],
    (steps, layers): (&[f64], &[f64]),
) -> Result<Value, OmniError> {
    let config = model.config();
    let (width, height) = size(args, model.config())?;
    let rows: usize = jobs.iter().map(DenoiseJob::rows).sum();
    let tokens: usize = jobs.iter().map(DenoiseJob::tokens).sum();
    let (h, w) = (
        height / config.pixels_per_token(),
        width / config.pixels_per_token(),
    );
    let row = RowShape {
        prefix: args.prefix,
        specials: tokens / rows - h * w,
        image: h * w,
    };
    let in_layers = flops::layers(config, row) * rows as f64;
    let in_all = in_layers + flops::convolutions(config, row) * rows as f64;
    let (step_ms, layer_ms) = (median(steps), median(layers));
    // Milliseconds and TFLOP/s: 1e12 / 1e3.
    let rate = |flops: f64, ms: f64| flops / ms / 1e9;
    Ok(json!({
        "bench": "denoise",
        "version": crate::cli::version(),
        "model": config.name,
        "weights": if args.model.is_some() { "checkpoint" } else { "random" },
        "layers": config.num_layers(),
        "width": width,
        "height": height,
        "rows": rows,
        "prefix_tokens": args.prefix,
        "tokens_per_step": tokens,
        "threads": rayon::current_num_threads(),
        "steps": steps.len(),
        "ms_per_step": step_ms,
        "ms_per_step_min": steps.iter().copied().fold(f64::INFINITY, f64::min),
        "ms_per_step_max": steps.iter().copied().fold(0.0, f64::max),
        "ms_per_layer": layer_ms,
        "gflop_per_step": in_all / 1e9,
        "tflops": rate(in_all, step_ms),
        "tflops_in_layers": rate(in_layers / config.num_layers() as f64, layer_ms),
        "tokens_per_second": tokens as f64 / step_ms * 1e3,
        "peak_resident_bytes": memory::peak_resident_bytes()?,
    }))
}

/// Times every layer from its first norm to its output.
#[derive(Debug, Default)]
struct LayerTimer {
    begun: Option<Instant>,
    spans: Vec<f64>,
}

impl LayerTimer {
    fn mean(&self) -> f64 {
        self.spans.iter().sum::<f64>() / self.spans.len().max(1) as f64
    }
}

impl Probe for LayerTimer {
    fn tensor(&mut self, layer: usize, site: Site, _value: &Tensor) {
        match site {
            // The first layer has no layer before it: it is timed from the end of its first norm.
            Site::InputNorm if layer == 0 => self.begun = Some(clock::now()),
            Site::Output => {
                if let Some(begun) = self.begun {
                    self.spans.push(clock::millis_since(begun));
                }
                self.begun = Some(clock::now());
            }
            _ => {}
        }
    }
}
