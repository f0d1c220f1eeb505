//! `omni bench saving`: what step caches save on a model, and how far its latents end from those without one.
use std::path::PathBuf;

use base::clock;
use clap::Args;
use model::{JobOptions, LoadOptions, Model, StepCache, pipeline::Pipeline};
use parallel::RankContext;
use serde_json::json;

use super::{bad, json as print, median, model_error};
use crate::{error::OmniError, tune::square_job};

/// Most prompts and caches.
const MAX_PROMPTS: usize = 256;
const MAX_CACHES: usize = 64;

/// Time denoising with step caches against denoising without one; prints JSON.
#[derive(Debug, Args)]
pub(crate) struct SavingArgs {
    /// Checkpoint directory.
    #[arg(long, value_name = "DIR")]
    model: PathBuf,
    /// A step cache, as of omni dit-worker; may be given more than once.
    #[arg(long, required = true)]
    cache: Vec<String>,
    /// What to draw; may be given more than once.
    #[arg(long, required = true)]
    prompt: Vec<String>,
    /// Denoising steps. Without it: the model's default.
    #[arg(long)]
    steps: Option<usize>,
    /// Seed of the first picture.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Compute threads; 0: one a core.
    #[arg(long, default_value_t = 0)]
    threads: usize,
}

/// One picture's denoising.
struct Drawn {
    latents: Vec<f32>,
    ms: f64,
    saved: usize,
}

/// Runs the measurement.
pub(crate) fn run(args: &SavingArgs) -> Result<String, OmniError> {
    if args.prompt.len() > MAX_PROMPTS || args.cache.len() > MAX_CACHES {
        let message = format!("at most {MAX_PROMPTS} prompts and {MAX_CACHES} caches");
        return Err(bad(message));
    }
    crate::roles::set_threads(args.threads)?;
    let model = Model::open(&args.model, LoadOptions::default()).map_err(model_error)?;
    let cache = |text: &String| text.parse::<StepCache>()?.of_model(&args.model);
    let caches: Result<Vec<_>, _> = args.cache.iter().map(cache).collect();
    let caches = caches.map_err(model_error)?;
    let steps = args.steps.unwrap_or(model.info().default_steps);
    let mut plain = Vec::new();
    let mut saving: Vec<Vec<(Drawn, f64)>> = caches.iter().map(|_| Vec::new()).collect();
    for (seed, prompt) in (args.seed..).zip(&args.prompt) {
        // Side by side, so that what else runs on the machine meets all of them.
        let off = draw(&model, (prompt, seed, steps), &StepCache::Off)?;
        for (cache, drawn) in caches.iter().zip(&mut saving) {
            let some = draw(&model, (prompt, seed, steps), cache)?;
            let near = cosine(&some.latents, &off.latents);
            drawn.push((some, near));
        }
        plain.push(off.ms);
    }
    let ms = median(&plain);
    let each = args.cache.iter().zip(&saving).map(|(text, drawn)| {
        let times: Vec<f64> = drawn.iter().map(|(drawn, _)| drawn.ms).collect();
        let ratios: Vec<f64> = plain.iter().zip(&times).map(|(off, on)| off / on).collect();
        let near: Vec<f64> = drawn.iter().map(|(_, near)| *near).collect();
        json!({
            "cache": text,
            "passes": steps,
            "passes_saved": drawn.iter().map(|(drawn, _)| drawn.saved).sum::<usize>() as f64
                / drawn.len() as f64,
            "ms": median(&times),
            "times_faster": median(&ratios),
            "cosine": near.iter().sum::<f64>() / near.len() as f64,
            "least_cosine": near.iter().copied().fold(1.0, f64::min),
        })
    });
    print(&json!({
        "bench": "saving",
        "version": crate::cli::version(),
        "threads": rayon::current_num_threads(),
        "pictures": args.prompt.len(),
        "steps": steps,
        "ms_without": ms,
        "caches": each.collect::<Vec<_>>(),
    }))
}

/// The final latents of a picture of the model's square size, and the time of its steps.
fn draw(
    model: &Model,
    (prompt, seed, steps): (&str, u64, usize),
    cache: &StepCache,
) -> Result<Drawn, OmniError> {
    let ctx = RankContext::single();
    let pipeline = Pipeline::new(model, &ctx);
    let options = JobOptions {
        cache: cache.clone(),
        ..JobOptions::default()
    };
    let job = square_job(model, &pipeline, (prompt, seed, steps), &options);
    let mut job = job.map_err(model_error)?;
    let start = clock::now();
    let latents = pipeline.finish(&mut job).map_err(model_error)?;
    Ok(Drawn {
        ms: clock::millis_since(start),
        latents: latents.data().to_vec(),
        saved: job.saved_steps(),
    })
}

fn cosine(a: &[f32], b: &[f32]) -> f64 {
    let dot = |a: &[f32], b: &[f32]| -> f64 {
        let products = a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b));
        products.sum()
    };
    dot(a, b) / (dot(a, a) * dot(b, b)).sqrt().max(f64::MIN_POSITIVE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cosine_of_equals_is_one_and_of_opposites_minus_one() {
        assert!((cosine(&[1.0, 2.0], &[2.0, 4.0]) - 1.0).abs() < 1e-12);
        assert!((cosine(&[1.0, 2.0], &[-1.0, -2.0]) + 1.0).abs() < 1e-12);
        assert_eq!(cosine(&[0.0], &[1.0]), 0.0);
    }
}
