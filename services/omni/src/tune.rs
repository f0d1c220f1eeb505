//! What a model needs to be measured for once: the rescale polynomial of the tea cache, and the colours of
//! cheap previews. Both are written next to the model.
use std::path::{Path, PathBuf};

use clap::Args;
use model::{
    DenoiseJob, JobOptions, LoadOptions, Model, ModelError, StepCache, Tea, Template,
    diffusion::TEA_FILE,
    pipeline::{Numbers, Pipeline, Words},
    preview::{self, LinearPreview},
};
use parallel::RankContext;
use serde_json::json;

use crate::error::OmniError;

/// Prompts where none is given.
const PROMPTS: [&str; 4] = [
    "a red circle left of a blue square on a white background",
    "a yellow star above a green ring on a gradient purple background",
    "a small black triangle on a striped orange background",
    "a large cyan heart on a gray background",
];
/// Step counts of a calibration: the distance between two steps depends on them.
const STEP_COUNTS: [usize; 3] = [8, 16, 32];
/// Degree of the polynomial.
const DEGREE: usize = 4;
/// Most prompts.
const MAX_PROMPTS: usize = 256;

/// Options of both commands.
#[derive(Debug, Args)]
pub(crate) struct TuneArgs {
    /// Checkpoint directory; the result is written there.
    #[arg(long, value_name = "DIR")]
    model: PathBuf,
    /// Write to this file instead.
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// What to draw; may be given more than once. Without it: a few shapes.
    #[arg(long)]
    prompt: Vec<String>,
    /// Denoising steps. Without it: the model's default for previews, several counts for a calibration.
    #[arg(long)]
    steps: Option<usize>,
    /// Seed of the first picture.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Compute threads; 0: one a core.
    #[arg(long, default_value_t = 0)]
    threads: usize,
}

struct Tuner<'a> {
    args: &'a TuneArgs,
    model: Model,
    ctx: RankContext,
}

impl<'a> Tuner<'a> {
    fn open(args: &'a TuneArgs) -> Result<Self, OmniError> {
        if args.prompt.len() > MAX_PROMPTS {
            let message = format!("at most {MAX_PROMPTS} prompts");
            return Err(OmniError::Config(message));
        }
        crate::roles::set_threads(args.threads)?;
        let model = Model::open(&args.model, LoadOptions::default()).map_err(failed)?;
        Ok(Self {
            args,
            model,
            ctx: RankContext::single(),
        })
    }

    /// A job of each prompt, with `steps` steps.
    fn each(
        &self,
        steps: usize,
        options: &JobOptions,
        mut work: impl FnMut(&Model, DenoiseJob) -> Result<(), ModelError>,
    ) -> Result<(), OmniError> {
        let given: Vec<&str> = self.args.prompt.iter().map(String::as_str).collect();
        let prompts = if given.is_empty() {
            &PROMPTS[..]
        } else {
            &given
        };
        let pipeline = Pipeline::new(&self.model, &self.ctx);
        for (seed, prompt) in (self.args.seed..).zip(prompts) {
            let job = square_job(&self.model, &pipeline, (prompt, seed, steps), options);
            job.and_then(|job| work(&self.model, job)).map_err(failed)?;
        }
        Ok(())
    }

    fn write(&self, name: &str, text: &str) -> Result<PathBuf, OmniError> {
        let path = self
            .args
            .out
            .clone()
            .unwrap_or_else(|| Path::new(&self.args.model).join(name));
        std::fs::write(&path, text)
            .map_err(|error| OmniError::io(format!("write {}", path.display()), error))?;
        Ok(path)
    }
}

/// A job of the model's square size and default guidance, from a prompt, a seed and a number of steps.
pub(crate) fn square_job(
    model: &Model,
    pipeline: &Pipeline<'_>,
    (prompt, seed, steps): (&str, u64, usize),
    options: &JobOptions,
) -> Result<DenoiseJob, ModelError> {
    let words = Words {
        prompt,
        system_prompt: None,
        template: Template::Pretrain,
        drop_think: false,
    };
    let numbers = Numbers {
        steps,
        guidance: model.info().default_guidance,
        seed,
        options: options.clone(),
    };
    let side = model.config().image_base_size;
    let bucket = model.buckets().nearest(side, side)?;
    let layout = pipeline.image_layout(&words, None, &[], bucket)?;
    pipeline.job(&layout, &[], &numbers)
}

/// Measures how what the decoder adds changes with the time modulation, and fits the polynomial.
pub(crate) fn calibrate(args: &TuneArgs) -> Result<String, OmniError> {
    let tuner = Tuner::open(args)?;
    // A threshold of 0 runs every step and keeps what the cache would go by.
    let options = JobOptions {
        cache: StepCache::Tea(Tea {
            threshold: 0.0,
            ..Tea::default()
        }),
        ..JobOptions::default()
    };
    let counts = args.steps.map_or(STEP_COUNTS.to_vec(), |steps| vec![steps]);
    let mut points = Vec::new();
    for steps in counts {
        tuner.each(steps, &options, |model, mut job| {
            let changes = job.time_changes()?;
            while !job.is_done() {
                let step = job.step();
                model.denoise_step(&tuner.ctx, &mut [&mut job])?;
                if let (Some(before), Some(moved)) = (step.checked_sub(1), job.moved()) {
                    points.push((changes[before], moved));
                }
            }
            Ok(())
        })?;
    }
    let coefficients = Tea::fit(&points, DEGREE).map_err(failed)?;
    let tea = Tea {
        threshold: 0.0,
        coefficients,
        ..Tea::default()
    };
    let errors = points.iter().map(|(x, y)| (tea.rescaled(*x) - y).powi(2));
    let error = (errors.sum::<f64>() / points.len() as f64).sqrt();
    let path = tuner.write(TEA_FILE, &json!(tea.coefficients).to_string())?;
    Ok(json!({
        "file": path,
        "points": points.len(),
        "coefficients": tea.coefficients,
        "rms_error": error,
    })
    .to_string())
}

/// Fits the linear map from latents to colours.
pub(crate) fn fit_preview(args: &TuneArgs) -> Result<String, OmniError> {
    let tuner = Tuner::open(args)?;
    let steps = args.steps.unwrap_or(tuner.model.info().default_steps);
    let mut pairs = Vec::new();
    tuner.each(steps, &JobOptions::default(), |model, mut job| {
        while !job.is_done() {
            model.denoise_step(&tuner.ctx, &mut [&mut job])?;
        }
        let latents = job.latents()?;
        let picture = model.decode(&tuner.ctx, &latents)?;
        pairs.push((latents, picture));
        Ok(())
    })?;
    let map = LinearPreview::fit(&pairs).map_err(failed)?;
    let error = map.error(&pairs).map_err(failed)?;
    let path = tuner.write(preview::FILE, &map.to_json().map_err(failed)?)?;
    Ok(json!({ "file": path, "pictures": pairs.len(), "rms_error": error }).to_string())
}

fn failed(error: model::ModelError) -> OmniError {
    OmniError::of(&stage::StageError::from(error))
}
