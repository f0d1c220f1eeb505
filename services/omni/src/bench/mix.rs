//! `omni bench mix`: one packed step of pictures of two sizes, against the same work in steps of one size each,
//! and against the same pictures with the rows of the smaller ones padded to the larger size.
use std::path::PathBuf;

use base::clock;
use clap::Args;
use model::{DenoiseJob, LoadOptions, Model, ModelConfig, Parts};
use parallel::RankContext;
use serde_json::json;

use super::{
    bad,
    denoise::{Batch, guided_jobs, parse_size, read_config},
    json as print, median, model_error,
};
use crate::error::OmniError;

/// Rounds that are run before anything is timed.
const WARM_UP_STEPS: usize = 1;
/// Most pictures of a size, and most steps.
const MAX_PICTURES: usize = 64;
const MAX_STEPS: usize = 10_000;

/// Time a packed step of two sizes against uniform and padded steps; prints JSON.
#[derive(Debug, Args)]
pub(crate) struct MixArgs {
    /// config.json of a model; its weights are made up.
    #[arg(long, value_name = "FILE", required_unless_present = "model")]
    config: Option<PathBuf>,
    /// Checkpoint directory.
    #[arg(long, value_name = "DIR", conflicts_with = "config")]
    model: Option<PathBuf>,
    /// Use only the first layers of --config.
    #[arg(long, requires = "config")]
    layers: Option<usize>,
    /// Pixels of the smaller pictures, WIDTHxHEIGHT.
    #[arg(long, value_name = "WxH", default_value = "512x512")]
    small: String,
    /// Pixels of the larger pictures, WIDTHxHEIGHT.
    #[arg(long, value_name = "WxH", default_value = "1024x1024")]
    large: String,
    /// Guided pictures of each size.
    #[arg(long, default_value_t = 1)]
    pictures: usize,
    /// Prompt tokens cached before the image.
    #[arg(long, default_value_t = 32)]
    prefix: usize,
    /// Steps of each kind to time; they take turns.
    #[arg(long, default_value_t = 5)]
    steps: usize,
    /// Compute threads; 0: one a core.
    #[arg(long, default_value_t = 0)]
    threads: usize,
}

/// A batch and the times of its steps.
struct Timed {
    jobs: Vec<DenoiseJob>,
    ms: Vec<f64>,
}

impl Timed {
    fn new(jobs: Vec<DenoiseJob>) -> Self {
        let ms = Vec::new();
        Self { jobs, ms }
    }

    fn tokens(&self) -> usize {
        self.jobs.iter().map(DenoiseJob::tokens).sum()
    }

    fn step(&mut self, model: &Model) -> Result<(), OmniError> {
        let mut packed: Vec<&mut DenoiseJob> = self.jobs.iter_mut().collect();
        let start = clock::now();
        model
            .denoise_step(&RankContext::single(), &mut packed)
            .map_err(model_error)?;
        self.ms.push(clock::millis_since(start));
        Ok(())
    }

    fn median(&self) -> f64 {
        median(&self.ms[WARM_UP_STEPS..])
    }

    /// Milliseconds for each token.
    fn pace(&self) -> f64 {
        self.median() / self.tokens() as f64
    }
}

/// Runs the measurement.
pub(crate) fn run(args: &MixArgs) -> Result<String, OmniError> {
    for (name, value, most) in [
        ("pictures", args.pictures, MAX_PICTURES),
        ("steps", args.steps, MAX_STEPS),
    ] {
        if !(1..=most).contains(&value) {
            return Err(bad(format!("{name} must be 1 to {most}, got {value}")));
        }
    }
    crate::roles::set_threads(args.threads)?;
    let model = open(args)?;
    let jobs = |size, pictures| {
        let batch = Batch {
            pictures,
            size,
            steps: WARM_UP_STEPS + args.steps,
            prefix: args.prefix,
            seed: 0,
        };
        guided_jobs(&model, &batch)
    };
    let [small, large] = sizes(args, model.config())?;
    let mut mixed = jobs(small, args.pictures)?;
    mixed.extend(jobs(large, args.pictures)?);
    let mut mixed = Timed::new(mixed);
    // Of about as many tokens as the mix, so that they are as efficient.
    let alike = |size| {
        let one = jobs(size, 1)?.iter().map(DenoiseJob::tokens).sum::<usize>();
        let count = (mixed.tokens() + one / 2) / one;
        Ok::<_, OmniError>(Timed::new(jobs(size, count.max(1))?))
    };
    let (mut of_small, mut of_large) = (alike(small)?, alike(large)?);
    let mut padded = Timed::new(jobs(large, 2 * args.pictures)?);
    for _ in 0..WARM_UP_STEPS + args.steps {
        for timed in [&mut mixed, &mut of_small, &mut of_large, &mut padded] {
            timed.step(&model)?;
        }
    }
    let (few, many) = (
        args.pictures * of_small.tokens() / of_small.jobs.len(),
        args.pictures * of_large.tokens() / of_large.jobs.len(),
    );
    // The tokens of the mix at the pace of steps of one size.
    let uniform = few as f64 * of_small.pace() + many as f64 * of_large.pace();
    print(&json!({
        "bench": "mix",
        "version": crate::cli::version(),
        "threads": rayon::current_num_threads(),
        "layers": model.config().num_layers(),
        "small": args.small,
        "large": args.large,
        "pictures_of_each": args.pictures,
        "tokens": mixed.tokens(),
        "mixed_ms": mixed.median(),
        "uniform_ms": uniform,
        "padded_tokens": padded.tokens(),
        "padded_ms": padded.median(),
        "of_uniform": uniform / mixed.median(),
        "times_padded": padded.median() / mixed.median(),
    }))
}

/// Widths and heights, the smaller first.
fn sizes(args: &MixArgs, config: &ModelConfig) -> Result<[(usize, usize); 2], OmniError> {
    let small = parse_size(Some(&args.small), config)?;
    let large = parse_size(Some(&args.large), config)?;
    if small.0 * small.1 >= large.0 * large.1 {
        return Err(bad("small must be smaller than large"));
    }
    Ok([small, large])
}

fn open(args: &MixArgs) -> Result<Model, OmniError> {
    let options = LoadOptions {
        parts: Parts {
            vae_decoder: false,
            ..Parts::DENOISE
        },
        ..LoadOptions::default()
    };
    match (&args.model, &args.config) {
        (Some(dir), _) => Model::open(dir, options).map_err(model_error),
        (None, Some(path)) => {
            Model::random(read_config(path, args.layers)?, options, 0).map_err(model_error)
        }
        (None, None) => Err(bad("give --model or --config")),
    }
}
