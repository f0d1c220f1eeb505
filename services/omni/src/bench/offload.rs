//! `omni bench offload`: steps whose layers are read from the checkpoint, against steps whose layers stay.
use std::path::PathBuf;

use base::clock;
use clap::Args;
use model::{DenoiseJob, LoadOptions, Model, Parts, Residency};
use parallel::{RankContext, cost::offloaded_step};
use serde_json::{Value, json};

use super::{
    bad,
    denoise::{Batch, Weights, guided_jobs, parse_size, read_config},
    json as print, median, memory, model_error,
};
use crate::error::OmniError;

/// Steps that are run before anything is timed: the first one reads its layers with nothing to hide behind.
const WARM_UP_STEPS: usize = 2;
/// Most pictures of a batch, and most steps.
const MAX_PICTURES: usize = 128;
const MAX_STEPS: usize = 10_000;

/// Time packed steps with some layers resident and the others read in every step; prints JSON.
#[derive(Debug, Args)]
pub(crate) struct OffloadArgs {
    /// Checkpoint directory.
    #[arg(long, value_name = "DIR", required_unless_present = "config")]
    model: Option<PathBuf>,
    /// config.json of a model; made-up weights are written into --scratch and removed at the end.
    #[arg(long, value_name = "FILE", conflicts_with = "model")]
    config: Option<PathBuf>,
    /// Empty directory for made-up weights.
    #[arg(long, value_name = "DIR")]
    scratch: Option<PathBuf>,
    /// Use only the first layers of --config.
    #[arg(long, requires = "config")]
    layers: Option<usize>,
    /// Layers that stay, one measurement each beside that with all of them.
    #[arg(long, value_delimiter = ',', default_values_t = [0])]
    resident: Vec<usize>,
    /// Guided pictures of a batch, one measurement each.
    #[arg(long, value_delimiter = ',', default_values_t = [1, 4, 16])]
    pictures: Vec<usize>,
    /// Pixels, WIDTHxHEIGHT. Without it: the model's square size.
    #[arg(long, value_name = "WxH")]
    size: Option<String>,
    /// Prompt tokens cached before the image.
    #[arg(long, default_value_t = 32)]
    prefix: usize,
    /// Steps to time.
    #[arg(long, default_value_t = 5)]
    steps: usize,
    /// Compute threads; 0: one a core.
    #[arg(long, default_value_t = 0)]
    threads: usize,
    /// On this GPU, by its number, with layers that travel from host memory (builds with the feature `cuda`).
    #[arg(long, value_name = "NUMBER")]
    gpu: Option<usize>,
    /// How the GPU holds the large matrices. Without it: bf16.
    #[arg(long, value_enum, requires = "gpu")]
    weights: Option<Weights>,
}

/// Removes made-up weights however the measurement ends.
struct Scratch<'a>(Option<&'a PathBuf>);

impl Drop for Scratch<'_> {
    fn drop(&mut self) {
        if let Some(dir) = self.0 {
            // What cannot be removed is the caller's to see.
            let _ = std::fs::remove_file(dir.join(model::weights::SINGLE_FILE));
        }
    }
}

/// Runs the measurement.
pub(crate) fn run(args: &OffloadArgs) -> Result<String, OmniError> {
    for (name, values, most) in [
        ("pictures", &args.pictures, MAX_PICTURES),
        ("steps", &vec![args.steps], MAX_STEPS),
    ] {
        if values.iter().any(|value| !(1..=most).contains(value)) {
            return Err(bad(format!("{name} must be 1 to {most}, got {values:?}")));
        }
    }
    if let Some(ordinal) = args.gpu {
        return print(&on_gpu(args, ordinal)?);
    }
    crate::roles::set_threads(args.threads)?;
    let _scratch = Scratch(args.scratch.as_ref().filter(|_| args.config.is_some()));
    let mut first = true;
    let mut resident = Vec::new();
    let stay = measure(&open(args, Residency::All, &mut first)?, args)?;
    resident.push(report(&stay, &stay, None));
    for layers in &args.resident {
        let model = open(args, Residency::Layers(*layers), &mut first)?;
        let seen = measure(&model, args)?;
        // One token a row computes next to nothing: such a step takes as long as its layers are read.
        let rate = seen.bytes as f64 / seen.least_ms * 1e3;
        resident.push(report(&seen, &stay, (seen.bytes > 0).then_some(rate)));
    }
    print(&json!({
        "bench": "offload",
        "version": crate::cli::version(),
        "threads": rayon::current_num_threads(),
        "prefix_tokens": args.prefix,
        "steps": args.steps,
        "measured": resident,
    }))
}

#[cfg(not(feature = "cuda"))]
fn on_gpu(_: &OffloadArgs, _: usize) -> Result<Value, OmniError> {
    Err(super::no_gpu())
}

/// Steps of every batch with all layers on the GPU, then with fewer.
#[cfg(feature = "cuda")]
fn on_gpu(args: &OffloadArgs, ordinal: usize) -> Result<Value, OmniError> {
    use super::gpu::{GpuBench, Picture, run};

    let config = match (&args.model, &args.config) {
        (Some(dir), _) => model::ModelConfig::from_dir(dir).map_err(model_error)?,
        (None, Some(path)) => read_config(path, args.layers)?,
        (None, None) => return Err(bad("give --model or --config")),
    };
    let (width, height) = parse_size(args.size.as_deref(), &config)?;
    let guidance = config.generation.guidance;
    let picture = Picture {
        width,
        height,
        guidance,
    };
    let measure = |resident, pictures| {
        run(&GpuBench {
            config: config.clone(),
            checkpoint: args.model.as_ref(),
            ordinal,
            plan: parallel::Plan::default(),
            weights: args.weights.unwrap_or_default().into(),
            resident_layers: resident,
            pictures: vec![picture; pictures],
            steps: args.steps,
            prefix: args.prefix,
            whole: false,
            seed: 0,
        })
    };
    let mut measured = Vec::new();
    for pictures in &args.pictures {
        let stay = measure(None, *pictures)?;
        let ms = |of: &Value| of["ms_per_step"].as_f64().unwrap_or(f64::NAN);
        let all = ms(&stay);
        measured.push(stay);
        for resident in &args.resident {
            let mut some = measure(Some(*resident), *pictures)?;
            some["rate_of_all_resident"] = json!(all / ms(&some));
            measured.push(some);
        }
    }
    Ok(json!({
        "bench": "offload",
        "version": crate::cli::version(),
        "measured": measured,
    }))
}

/// Opens the model, whose made-up weights are written the first time.
fn open(args: &OffloadArgs, residency: Residency, first: &mut bool) -> Result<Model, OmniError> {
    let options = LoadOptions {
        parts: Parts {
            vae_decoder: false,
            ..Parts::DENOISE
        },
        residency,
        ..LoadOptions::default()
    };
    if let Some(dir) = &args.model {
        return Model::open(dir, options).map_err(model_error);
    }
    let (Some(path), Some(scratch)) = (&args.config, &args.scratch) else {
        return Err(bad("give --model, or --config and --scratch"));
    };
    let config = read_config(path, args.layers)?;
    let model = if std::mem::take(first) {
        Model::random_stored(config, options, 0, scratch)
    } else {
        Model::stored(config, options, scratch)
    };
    model.map_err(model_error)
}

/// What one model was seen to do.
struct Seen {
    layers: usize,
    travelling: usize,
    /// Read in a step.
    bytes: u64,
    resident: u64,
    /// Of a step of one image token a row.
    least_ms: f64,
    /// Pictures, tokens and milliseconds of a step.
    batches: Vec<(usize, usize, f64)>,
}

fn measure(model: &Model, args: &OffloadArgs) -> Result<Seen, OmniError> {
    let (width, height) = parse_size(args.size.as_deref(), model.config())?;
    let cell = model.config().pixels_per_token();
    let batch = |pictures, (width, height)| Batch {
        pictures,
        size: (width, height),
        steps: WARM_UP_STEPS + args.steps,
        prefix: args.prefix,
        seed: 0,
    };
    let (least_ms, _) = step(model, &batch(1, (cell, cell)))?;
    let mut batches = Vec::new();
    for pictures in &args.pictures {
        let (ms, tokens) = step(model, &batch(*pictures, (width, height)))?;
        batches.push((*pictures, tokens, ms));
    }
    let travelling = model.travelling().map_err(model_error)?;
    Ok(Seen {
        layers: model.config().num_layers(),
        travelling: travelling.layers,
        bytes: travelling.bytes,
        resident: memory::resident_bytes()?,
        least_ms,
        batches,
    })
}

/// Median milliseconds of a step of a batch, and its tokens.
fn step(model: &Model, batch: &Batch) -> Result<(f64, usize), OmniError> {
    let mut jobs = guided_jobs(model, batch)?;
    let mut times = Vec::new();
    for index in 0..batch.steps {
        let mut packed: Vec<&mut DenoiseJob> = jobs.iter_mut().collect();
        let start = clock::now();
        model
            .denoise_step(&RankContext::single(), &mut packed)
            .map_err(model_error)?;
        if index >= WARM_UP_STEPS {
            times.push(clock::millis_since(start));
        }
    }
    Ok((median(&times), jobs.iter().map(DenoiseJob::tokens).sum()))
}

/// `rate`: bytes a second at which layers are read.
fn report(seen: &Seen, stay: &Seen, rate: Option<f64>) -> Value {
    let batches = seen.batches.iter().zip(&stay.batches);
    let batches: Vec<Value> = batches
        .map(|((pictures, tokens, ms), (_, _, alone))| {
            let predicted = rate.map_or(*alone, |rate| {
                offloaded_step(alone / 1e3, seen.bytes, rate) * 1e3
            });
            json!({
                "pictures": pictures,
                "tokens": tokens,
                "ms_per_step": ms,
                "predicted_ms": predicted,
                "of_resident": alone / ms,
            })
        })
        .collect();
    json!({
        "layers": seen.layers,
        "resident_layers": seen.layers - seen.travelling,
        "bytes_read_per_step": seen.bytes,
        "bytes_read_per_second": rate,
        "resident_bytes": seen.resident,
        "batches": batches,
    })
}
