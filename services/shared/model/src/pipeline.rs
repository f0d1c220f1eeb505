//! A whole request in one process, start to picture: what the stages do together, without them.
//!
//! The services do not use this; tests compare them with it.

use std::sync::Arc;

use parallel::RankContext;

use crate::buckets::Bucket;
use crate::cond::CondFeatures;
use crate::config::Template;
use crate::diffusion::{DenoiseJob, JobOptions, JobSpec};
use crate::error::ModelError;
use crate::layout::{
    CondImageGrid, ImageGrid, LayoutInput, RowKind, SequenceLayout, Target, TextTask,
    stop_token_ids,
};
use crate::model::Model;
use crate::picture::{Latents, RgbImage};
use crate::prefill::RowTokens;
use crate::text::{Transitions, Writing, argmax};

/// How the ratio token of an "auto" size is chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RatioRule {
    /// Any token may come; one that is no ratio token means the square (base release).
    Free,
    /// The most likely ratio token (Instruct releases).
    Restricted,
}

/// The words of a request.
#[derive(Clone, Copy, Debug)]
pub struct Words<'a> {
    /// What to draw.
    pub prompt: &'a str,
    /// System text, taken as it is.
    pub system_prompt: Option<&'a str>,
    /// Order of roles and separators.
    pub template: Template,
    /// Leave think blocks out of the picture's sequence.
    pub drop_think: bool,
}

/// A picture's numbers.
#[derive(Clone, Debug)]
pub struct Numbers {
    /// Denoising steps.
    pub steps: usize,
    /// Guidance scale.
    pub guidance: f64,
    /// Seed of the initial latents.
    pub seed: u64,
    /// Rarely set.
    pub options: JobOptions,
}

/// Runs requests on one model, one at a time.
#[derive(Clone, Copy, Debug)]
pub struct Pipeline<'m> {
    model: &'m Model,
    ctx: &'m RankContext,
}

/// What one text pass read and wrote.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TextCall {
    /// Ids of the sequence it continued.
    pub prompt_ids: Vec<u32>,
    /// Ids it wrote, the stop token included.
    pub new_ids: Vec<u32>,
}

/// What the assistant wrote before a picture.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Written {
    /// The pass itself.
    pub call: TextCall,
    /// Text for the picture's sequence: opening tag to closing tag, or all of it when the tag never came.
    pub text: String,
    /// The size the model named; none when it was given, or when the token limit came first.
    pub bucket: Option<Bucket>,
}

impl<'m> Pipeline<'m> {
    /// A pipeline on `model`.
    pub fn new(model: &'m Model, ctx: &'m RankContext) -> Self {
        Self { model, ctx }
    }

    /// Lets the model think or rewrite the prompt; returns its text, opening tag included.
    ///
    /// # Errors
    /// Those of layout and of text passes.
    pub fn write(
        &self,
        words: &Words<'_>,
        task: TextTask,
        size_given: bool,
        max_new: usize,
    ) -> Result<(TextCall, String), ModelError> {
        let layout = self.text_layout(words, None, task)?;
        let stops = stop_token_ids(self.model.special_tokens()?, task, size_given);
        let row = RowTokens::new(&layout, RowKind::Cond);
        let new_ids = self.model.write_greedy(self.ctx, &row, max_new, &stops)?;
        let special = self.model.special_tokens()?;
        let opening = match task {
            TextTask::Think => vec![special.think],
            TextTask::Recaption => vec![special.recaption],
            TextTask::Auto | TextTask::Ratio => Vec::new(),
        };
        let text = self
            .model
            .tokenizer()?
            .decode(&[opening, new_ids.clone()].concat())?;
        Ok((
            TextCall {
                prompt_ids: layout.tokens(RowKind::Cond).to_vec(),
                new_ids,
            },
            text,
        ))
    }

    /// Lets the model think, rewrite the prompt and (unless `size_given`) name a size, all in one pass.
    ///
    /// # Errors
    /// Those of layout and of text passes.
    pub fn write_before_picture(
        &self,
        words: &Words<'_>,
        writing: Writing,
        size_given: bool,
        max_new: usize,
    ) -> Result<Written, ModelError> {
        let special = self.model.special_tokens()?;
        let base = self.model.config().image_base_size;
        let auto_size = (!size_given).then_some(base);
        let transitions = Transitions::new(special, writing, words.template, auto_size)?;
        let layout = self.text_layout(words, None, writing.task())?;
        let row = RowTokens::new(&layout, RowKind::Cond);
        let new_ids = self
            .model
            .write_along(self.ctx, &row, max_new, transitions)?;
        let closing = writing.closing(special);
        let end = new_ids.iter().position(|id| *id == closing);
        let kept = &new_ids[..end.map_or(new_ids.len(), |at| at + 1)];
        let ids = [&[writing.opening(special)], kept].concat();
        let ratio = new_ids.last().and_then(|id| special.ratio_index(*id));
        Ok(Written {
            text: self.model.tokenizer()?.decode(&ids)?,
            bucket: ratio
                .filter(|_| !size_given)
                .and_then(|index| self.model.buckets().by_index(index)),
            call: TextCall {
                prompt_ids: layout.tokens(RowKind::Cond).to_vec(),
                new_ids,
            },
        })
    }

    /// Lets the model choose a size.
    ///
    /// # Errors
    /// Those of layout and of text passes.
    pub fn choose_size(
        &self,
        words: &Words<'_>,
        assistant_text: Option<&str>,
        rule: RatioRule,
    ) -> Result<(TextCall, Bucket), ModelError> {
        let layout = self.text_layout(words, assistant_text, TextTask::Ratio)?;
        let row = RowTokens::new(&layout, RowKind::Cond);
        let passes = self.model.start_text(self.ctx, &[&row], 0)?;
        let logits = passes.first().map(|pass| pass.logits()).unwrap_or_default();
        let ratios = &self.model.special_tokens()?.ratios;
        let id = match rule {
            RatioRule::Free => argmax(logits),
            RatioRule::Restricted => {
                let allowed: Vec<f32> = ratios.iter().map(|id| logits[*id as usize]).collect();
                ratios[argmax(&allowed) as usize]
            }
        };
        let buckets = self.model.buckets();
        let index = ratios.iter().position(|ratio| *ratio == id);
        let index = index.unwrap_or_else(|| buckets.fallback_index());
        let bucket = buckets
            .by_index(index)
            .ok_or_else(|| ModelError::Internal(format!("no bucket for ratio index {index}")))?;
        let prompt_ids = layout.tokens(RowKind::Cond).to_vec();
        Ok((
            TextCall {
                prompt_ids,
                new_ids: vec![id],
            },
            bucket,
        ))
    }

    /// The sequence of a picture.
    ///
    /// # Errors
    /// Those of layout.
    pub fn image_layout(
        &self,
        words: &Words<'_>,
        assistant_text: Option<&str>,
        cond_images: &[CondImageGrid],
        bucket: Bucket,
    ) -> Result<SequenceLayout, ModelError> {
        let (height, width) = bucket.grid(self.model.config().pixels_per_token());
        self.model.layout(&LayoutInput {
            prompt: words.prompt,
            system_prompt: words.system_prompt,
            assistant_text,
            template: words.template,
            drop_think: words.drop_think,
            cond_images,
            target: Target::Image(ImageGrid {
                ratio_index: bucket.ratio_index,
                height,
                width,
            }),
        })
    }

    /// A denoise job of a laid out picture, its prefixes computed.
    ///
    /// # Errors
    /// Those of prefill and of jobs.
    pub fn job(
        &self,
        layout: &SequenceLayout,
        images: &[CondFeatures],
        numbers: &Numbers,
    ) -> Result<DenoiseJob, ModelError> {
        let config = self.model.config();
        let target = layout.generated.as_ref().map(|image| &image.span);
        let span = target.ok_or_else(|| ModelError::Internal("a sequence without image".into()))?;
        let cond = RowTokens::with_images(layout, RowKind::Cond, images);
        let uncond = RowTokens::with_images(layout, RowKind::Uncond, images);
        let rows = if config.guidance_needs_two_rows(numbers.guidance) {
            vec![&cond, &uncond]
        } else {
            vec![&cond]
        };
        let mut prefixes = self
            .model
            .prefill(self.ctx, &rows)?
            .into_iter()
            .map(Arc::new);
        let spec = JobSpec {
            height: span.grid_h * config.pixels_per_token(),
            width: span.grid_w * config.pixels_per_token(),
            steps: numbers.steps,
            guidance: numbers.guidance,
            seed: numbers.seed,
            cond: prefixes.next(),
            uncond: prefixes.next(),
        };
        DenoiseJob::with_options(self.model, spec, numbers.options.clone())
    }

    /// Runs a job to its end; returns the final latents.
    ///
    /// # Errors
    /// Those of denoise steps.
    pub fn finish(&self, job: &mut DenoiseJob) -> Result<Latents, ModelError> {
        while !job.is_done() {
            self.model.denoise_step(self.ctx, &mut [&mut *job])?;
        }
        job.latents()
    }

    /// Text to image at a given size.
    ///
    /// # Errors
    /// Those of every part.
    pub fn text_to_image(
        &self,
        words: &Words<'_>,
        bucket: Bucket,
        numbers: &Numbers,
    ) -> Result<RgbImage, ModelError> {
        let layout = self.image_layout(words, None, &[], bucket)?;
        let latents = self.finish(&mut self.job(&layout, &[], numbers)?)?;
        self.model.decode(self.ctx, &latents)
    }

    fn text_layout(
        &self,
        words: &Words<'_>,
        assistant_text: Option<&str>,
        task: TextTask,
    ) -> Result<SequenceLayout, ModelError> {
        self.model.layout(&LayoutInput {
            prompt: words.prompt,
            system_prompt: words.system_prompt,
            assistant_text,
            template: words.template,
            drop_think: words.drop_think,
            cond_images: &[],
            target: Target::Text(task),
        })
    }
}
