//! The demo model at work: pictures, sizes, recaptions and edits.

use std::path::Path;

use model::cond::CondPixels;
use model::layout::CondImageGrid;
use model::pipeline::{Numbers, Pipeline, RatioRule, Words, Written};
use model::preprocess::{CondPicture, vae_picture};
use model::text::Writing;
use model::vae::Tiles;
use model::vit::Patches;
use model::{
    Bucket, DenoiseJob, JobOptions, Latents, LoadOptions, Model, ModelError, RgbImage, StepCache,
    Template, noise,
};
use parallel::RankContext;

use super::{DemoEdit, DemoPrompt};
use crate::scene::draw;

/// Most tokens of one think and recaption text with its ratio.
pub const MAX_NEW_TOKENS: usize = 96;
/// Seed of every picture.
pub const SEED: u64 = 7;

/// A model with the defaults of its checkpoint, and one seed.
#[derive(Debug)]
pub struct Studio {
    model: Model,
    ctx: RankContext,
    numbers: Numbers,
}

impl Studio {
    /// Opens the checkpoint in `dir`.
    ///
    /// # Errors
    /// Those of [`Model::open`].
    pub fn open(dir: &Path, seed: u64) -> Result<Self, ModelError> {
        let model = Model::open(dir, LoadOptions::default())?;
        let numbers = Numbers {
            steps: model.info().default_steps,
            guidance: model.info().default_guidance,
            seed,
            options: JobOptions::default(),
        };
        Ok(Self {
            model,
            ctx: RankContext::single(),
            numbers,
        })
    }

    /// Takes other than the model's default steps.
    #[must_use]
    pub fn stepping(mut self, steps: usize) -> Self {
        self.numbers.steps = steps;
        self
    }

    /// Lets jobs save steps.
    #[must_use]
    pub fn saving(mut self, cache: StepCache) -> Self {
        self.save(cache);
        self
    }

    /// Lets jobs that begin from now on save steps.
    pub fn save(&mut self, cache: StepCache) {
        self.numbers.options.cache = cache;
    }

    /// The model.
    pub fn model(&self) -> &Model {
        &self.model
    }

    fn pipeline(&self) -> Pipeline<'_> {
        Pipeline::new(&self.model, &self.ctx)
    }

    /// The bucket of the format that an entry asks for.
    ///
    /// # Errors
    /// `Internal` when the model has no such bucket.
    pub fn wanted(&self, entry: &DemoPrompt) -> Result<Bucket, ModelError> {
        let index = entry.format.ratio_index();
        let bucket = self.model.buckets().by_index(index);
        bucket.ok_or_else(|| ModelError::Internal(format!("no bucket for ratio index {index}")))
    }

    /// A denoise job of a prompt at a given size, with the text written before it in the instruct template.
    ///
    /// # Errors
    /// Those of layout, prefill and jobs.
    pub fn job(
        &self,
        prompt: &str,
        written: Option<&Written>,
        bucket: Bucket,
    ) -> Result<DenoiseJob, ModelError> {
        let template = match written {
            Some(_) => Template::Instruct,
            None => Template::Pretrain,
        };
        let text = written.map(|written| written.text.as_str());
        let words = words(prompt, template);
        let layout = self.pipeline().image_layout(&words, text, &[], bucket)?;
        self.pipeline().job(&layout, &[], &self.numbers)
    }

    /// Runs jobs to their end, packed, and decodes them. Packing changes no bit of any picture.
    ///
    /// # Errors
    /// Those of denoise steps and of decoding.
    pub fn develop(&self, jobs: &mut [DenoiseJob]) -> Result<Vec<RgbImage>, ModelError> {
        loop {
            let mut live: Vec<&mut DenoiseJob> =
                jobs.iter_mut().filter(|job| !job.is_done()).collect();
            if live.is_empty() {
                break;
            }
            self.model.denoise_step(&self.ctx, &mut live)?;
        }
        jobs.iter().map(|job| self.decode(job)).collect()
    }

    /// One step of a job, alone.
    ///
    /// # Errors
    /// Those of denoise steps.
    pub fn step(&self, job: &mut DenoiseJob) -> Result<(), ModelError> {
        self.model.denoise_step(&self.ctx, &mut [job])
    }

    /// The picture of a job as it stands.
    ///
    /// # Errors
    /// Those of decoding.
    pub fn decode(&self, job: &DenoiseJob) -> Result<RgbImage, ModelError> {
        self.model.decode(&self.ctx, &job.latents()?)
    }

    /// The size that the model chooses for a prompt in the pretrain template: the likeliest ratio token.
    ///
    /// # Errors
    /// Those of text passes.
    pub fn ratio(&self, prompt: &str) -> Result<Bucket, ModelError> {
        let words = words(prompt, Template::Pretrain);
        let (_, bucket) = self
            .pipeline()
            .choose_size(&words, None, RatioRule::Restricted)?;
        Ok(bucket)
    }

    /// Think and recaption text and the chosen size, in the instruct template, greedily.
    ///
    /// # Errors
    /// Those of text passes.
    pub fn recaption(&self, prompt: &str) -> Result<Written, ModelError> {
        let words = words(prompt, Template::Instruct);
        self.pipeline()
            .write_before_picture(&words, Writing::ThinkRecaption, false, MAX_NEW_TOKENS)
    }

    /// A picture through the VAE and back, without posterior noise.
    ///
    /// # Errors
    /// Those of preprocessing, encoding and decoding.
    pub fn reconstruct(&self, picture: &RgbImage) -> Result<RgbImage, ModelError> {
        let pixels = vae_picture(picture, self.model.buckets())?.pixels;
        let vae = self.model.vae();
        let mean = vae.encode(&pixels, Tiles::Whole, &mut |_, _| {})?;
        let cell = self.model.config().pixels_per_token();
        let (h, w) = (picture.height / cell, picture.width / cell);
        let channels = self.model.config().vae.latent_channels;
        let none = Latents::new(channels, h, w, vec![0.0; channels * h * w])?;
        self.model.decode(&self.ctx, &vae.sample(&mean, &none)?)
    }

    /// Draws the source of an edit; the job that changes it.
    ///
    /// # Errors
    /// Those of preprocessing, encoding, layout and jobs.
    pub fn edit(&self, entry: &DemoEdit) -> Result<(RgbImage, DenoiseJob), ModelError> {
        let config = self.model.config();
        let before = draw(&entry.source);
        let picture = CondPicture::new(&before, self.model.buckets(), &config.vit_processor)?;
        let grid: CondImageGrid = picture.grid(config.pixels_per_token());
        let (channels, h, w) = (config.vae.latent_channels, grid.vae.height, grid.vae.width);
        let sample = noise::posterior_noise(self.numbers.seed, channels, h, w)?;
        let pixels = CondPixels {
            vae: &picture.vae.pixels,
            patches: Patches {
                values: &picture.vit.values,
                grid: picture.vit.grid,
            },
        };
        let sample = Latents::new(channels, h, w, sample)?;
        let features = [self.model.encode_cond_image(&self.ctx, pixels, &sample)?];
        let words = words(&entry.prompt, Template::Pretrain);
        let bucket = picture.vae.bucket;
        let layout = self
            .pipeline()
            .image_layout(&words, None, &[grid], bucket)?;
        let job = self.pipeline().job(&layout, &features, &self.numbers)?;
        Ok((before, job))
    }
}

fn words(prompt: &str, template: Template) -> Words<'_> {
    Words {
        prompt,
        system_prompt: None,
        template,
        drop_think: false,
    }
}

/// Peak signal-to-noise ratio of two pictures of one size, in dB.
pub fn psnr(a: &RgbImage, b: &RgbImage) -> f64 {
    let squares: u64 = (a.data.iter().zip(&b.data))
        .map(|(a, b)| u64::from(a.abs_diff(*b)).pow(2))
        .sum();
    let mean = squares as f64 / a.data.len().max(1) as f64;
    10.0 * (255.0 * 255.0 / mean).log10()
}
