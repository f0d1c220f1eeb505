//! One picture being denoised on the device.

use std::sync::Arc;

use kernels::cuda::{GpuTensor, GpuType, narrow_to_bf16};

use super::GpuModel;
use super::prefix::GpuPrefix;
use crate::backbone::{RowSegment, segments};
use crate::config::ModelConfig;
use crate::diffusion::{JobOptions, JobSpec, JobState, StepCache, check, initial, resumed, rope};
use crate::error::ModelError;
use crate::picture::Latents;
use crate::scheduler::{Schedule, TIMESTEP_SCALE};

/// A picture between its first and its last step, its latents on the device.
///
/// Rotary tables, segments and everything that depends on time alone are computed once, here.
#[derive(Debug)]
pub struct GpuJob {
    pub(super) id: u64,
    pub(super) grid: (usize, usize),
    pub(super) schedule: Schedule,
    pub(super) step: usize,
    pub(super) guidance: f64,
    pub(super) rescale: f64,
    pub(super) preserve_norm: bool,
    /// The conditional one first.
    pub(super) prefixes: Vec<Arc<GpuPrefix>>,
    /// F32 `[rows * row tokens, head_dim]`.
    pub(super) cos: GpuTensor,
    /// Likewise.
    pub(super) sin: GpuTensor,
    /// The same for every row.
    pub(super) segments: Vec<RowSegment>,
    /// Tokens before the image in each row.
    pub(super) specials: usize,
    /// bf16 `[steps * specials, hidden]`.
    pub(super) tokens: GpuTensor,
    /// F32 `[steps, 2 hidden]`: scale and shift of the patch embedding.
    pub(super) patch: GpuTensor,
    /// F32 `[steps * rows, 2 inner]`: scale and shift of the final layer, for every row again.
    pub(super) last: GpuTensor,
    /// F32 `[h w, latent channels]`.
    pub(super) latents: GpuTensor,
    /// The same in bf16, as the stem reads them.
    pub(super) narrow: GpuTensor,
}

/// What a picture is made from, its prefixes being on the device.
#[derive(Clone, Debug)]
pub struct GpuJobSpec {
    /// Everything but the prefixes, whose fields are ignored.
    pub spec: JobSpec,
    /// What a caller rarely sets.
    pub options: JobOptions,
    /// Keys and values of the prompt.
    pub cond: Arc<GpuPrefix>,
    /// Keys and values of the row without prompt; needed (and used) only where guidance takes two rows.
    pub uncond: Option<Arc<GpuPrefix>>,
}

/// What is known of a picture before any of it is on a device.
#[derive(Clone, Debug)]
pub struct GpuJobOutline {
    /// 2 under guidance, else 1.
    pub rows: usize,
    /// Query tokens of one step.
    pub tokens: usize,
    /// Where it starts.
    pub state: JobState,
    /// Its sigmas, one more than steps.
    pub sigmas: Vec<f32>,
}

impl GpuJobOutline {
    /// Checks everything about a picture that takes no device; `prefixes` are the tokens of both prefixes.
    ///
    /// # Errors
    /// `InvalidArgument` naming the field that is out of range, `Unimplemented` for steps without the decoder.
    pub fn new(
        config: &ModelConfig,
        spec: &JobSpec,
        options: &JobOptions,
        prefixes: &[usize],
    ) -> Result<Self, ModelError> {
        if options.cache != StepCache::Off {
            let message = "step_cache on a gpu".to_owned();
            return Err(ModelError::Unimplemented(message));
        }
        let two = config.guidance_needs_two_rows(spec.guidance);
        if two && prefixes.len() < 2 {
            let message = format!("{} needs the unconditional prefix", spec.guidance);
            return Err(ModelError::invalid("guidance", message));
        }
        let rows = 1 + usize::from(two);
        let grid = check(config, spec, options, &prefixes[..rows.min(prefixes.len())])?;
        let shift = options.flow_shift.unwrap_or(config.generation.flow_shift);
        let schedule = Schedule::new(spec.steps, shift)?;
        let (step, given) = match &options.resume {
            Some(state) => (resumed(state, spec.steps)?, Some(state.latents.clone())),
            None => (0, options.init_latents.clone()),
        };
        let specials = 1 + usize::from(config.cfg_distilled) + usize::from(config.use_meanflow);
        Ok(Self {
            rows,
            tokens: rows * (specials + grid.0 * grid.1),
            state: JobState {
                step,
                latents: initial(config, spec, given, grid)?,
            },
            sigmas: schedule.sigmas,
        })
    }

    /// What step `step`, which led from `before` to `after`, expects the finished latents to be.
    ///
    /// # Errors
    /// `Internal` for latents of other pictures, or a step there is not.
    pub fn forecast(
        &self,
        step: usize,
        before: &Latents,
        after: &Latents,
    ) -> Result<Latents, ModelError> {
        let sigmas = self.sigmas.get(step).zip(self.sigmas.get(step + 1));
        let alike = before.data().len() == after.data().len();
        let (Some((sigma, next)), true) = (sigmas, alike) else {
            let message = "a forecast of another picture".to_owned();
            return Err(ModelError::Internal(message));
        };
        // The velocity took the latents from sigma to the next one; all of sigma leads to the end.
        let scale = sigma / (sigma - next);
        let pairs = before.data().iter().zip(after.data());
        let values = pairs.map(|(x, y)| x + scale * (y - x)).collect();
        Latents::new(after.channels(), after.height(), after.width(), values)
    }
}

impl GpuJob {
    /// A job at its first step.
    ///
    /// # Errors
    /// `InvalidArgument` naming the field that is out of range, `Gpu` or `Exhausted` when memory runs out.
    pub fn new(model: &mut GpuModel, given: GpuJobSpec) -> Result<Self, ModelError> {
        let GpuJobSpec {
            spec,
            options,
            cond,
            uncond,
        } = given;
        let config = &model.config;
        let plan = model.share.shard().plan();
        plan.check_guidance(spec.guidance)
            .map_err(|e| ModelError::invalid("guidance", e.to_string()))?;
        let mut prefixes = vec![cond];
        if config.guidance_needs_two_rows(spec.guidance) {
            prefixes.push(uncond.ok_or_else(|| {
                let message = format!("{} needs the unconditional prefix", spec.guidance);
                ModelError::invalid("guidance", message)
            })?);
        }
        let lengths: Vec<usize> = prefixes.iter().map(|p| p.tokens()).collect();
        let grid = check(config, &spec, &options, &lengths)?;
        let resume = options.resume;
        let shift = options.flow_shift.unwrap_or(config.generation.flow_shift);
        let schedule = Schedule::new(spec.steps, shift)?;
        let latents = initial(config, &spec, options.init_latents, grid)?;
        let (specials, tokens) = special_tokens(model, &schedule, spec.guidance)?;
        let times = &schedule.timesteps;
        let (gpu, config) = (&model.gpu, &model.config);
        let patch = model.stem.modulation(gpu, times)?;
        let last = repeated(&model.head.modulation(gpu, times)?, prefixes.len())?;
        let image = specials..specials + grid.0 * grid.1;
        let table = rope(config, &lengths, &image, grid)?;
        let dims = [grid.0 * grid.1, latents.channels()];
        let values = latents.to_tensor()?;
        let latents = GpuTensor::from_f32(gpu, &dims, values.as_f32()?, "latents")?;
        let narrow = GpuTensor::new(gpu, &dims, GpuType::Bf16, "latents")?;
        narrow_to_bf16(&latents, &narrow)?;
        model.jobs += 1;
        let mut job = Self {
            id: model.jobs,
            cos: GpuTensor::from_host(gpu, &table.cos, "rotary table")?,
            sin: GpuTensor::from_host(gpu, &table.sin, "rotary table")?,
            segments: segments(0..image.end, std::slice::from_ref(&image))?,
            grid,
            schedule,
            step: 0,
            guidance: spec.guidance,
            rescale: options.guidance_rescale,
            preserve_norm: options.preserve_norm,
            prefixes,
            specials,
            tokens,
            patch,
            last,
            latents,
            narrow,
        };
        if let Some(state) = resume {
            job.resume(resumed(&state, job.steps())?, &state.latents)?;
        }
        Ok(job)
    }

    /// Steps done.
    pub fn step(&self) -> usize {
        self.step
    }

    /// Steps in all.
    pub fn steps(&self) -> usize {
        self.schedule.steps()
    }

    /// Whether every step is done.
    pub fn is_done(&self) -> bool {
        self.step >= self.steps()
    }

    /// 2 under guidance, else 1.
    pub fn rows(&self) -> usize {
        self.prefixes.len()
    }

    /// Query tokens of one step.
    pub fn tokens(&self) -> usize {
        self.rows() * self.row_tokens()
    }

    /// Goes on from `latents`, as they were after `step` steps.
    ///
    /// # Errors
    /// `Internal` for latents of another picture or a step the job does not have; `Gpu` when the device failed.
    pub fn resume(&mut self, step: usize, latents: &Latents) -> Result<(), ModelError> {
        let size = (latents.height(), latents.width(), latents.channels());
        if size != (self.grid.0, self.grid.1, self.latents.dim(1)) || step > self.steps() {
            let message = "latents of another job, or a step it does not have".to_owned();
            return Err(ModelError::Internal(message));
        }
        let values = latents.to_tensor()?;
        self.latents
            .write_bytes(bytemuck::cast_slice(values.as_f32()?))?;
        narrow_to_bf16(&self.latents, &self.narrow)?;
        self.step = step;
        Ok(())
    }

    /// The latents after the steps done so far.
    ///
    /// # Errors
    /// `Gpu` when the device failed.
    pub fn latents(&self) -> Result<Latents, ModelError> {
        let (channels, values) = (self.latents.dim(1), self.latents.to_f32_vec()?);
        Latents::from_channels_last(channels, self.grid.0, self.grid.1, values)
    }

    pub(super) fn row_tokens(&self) -> usize {
        self.specials + self.grid.0 * self.grid.1
    }

    pub(super) fn image_tokens(&self) -> usize {
        self.grid.0 * self.grid.1
    }
}

/// Every row `times` times in a row.
fn repeated(x: &GpuTensor, times: usize) -> Result<GpuTensor, ModelError> {
    if times == 1 {
        return Ok(x.clone());
    }
    let dims = [x.dim(0) * times, x.dim(1)];
    let out = GpuTensor::new(x.gpu(), &dims, x.dtype(), "time vectors")?;
    for row in 0..x.dim(0) {
        for copy in 0..times {
            out.narrow0(row * times + copy, 1)?
                .copy_from(&x.narrow0(row, 1)?)?;
        }
    }
    Ok(out)
}

/// The vectors before a generated image, by step and then in token order: their number in a row, and bf16
/// `[steps * number, hidden]`.
fn special_tokens(
    model: &GpuModel,
    schedule: &Schedule,
    guidance: f64,
) -> Result<(usize, GpuTensor), ModelError> {
    let gpu = &model.gpu;
    let times = &schedule.timesteps;
    let mut kinds = vec![model.stem.timestep_token.forward(gpu, times)?];
    if let Some(embedder) = &model.head.guidance_token {
        // The released models see the guidance scale rounded to bf16.
        let scaled = half::bf16::from_f32(guidance as f32 * TIMESTEP_SCALE).to_f32();
        kinds.push(embedder.forward(gpu, &vec![scaled; times.len()])?);
    }
    if let Some(embedder) = &model.head.next_timestep_token {
        let next: Vec<f32> = (0..times.len())
            .map(|i| schedule.next_timestep(i))
            .collect();
        kinds.push(embedder.forward(gpu, &next)?);
    }
    let hidden = model.config.hidden_size;
    let dims = [times.len() * kinds.len(), hidden];
    let all = GpuTensor::new(gpu, &dims, GpuType::Bf16, "special tokens")?;
    for (place, kind) in kinds.iter().enumerate() {
        for step in 0..times.len() {
            let to = all.narrow0(step * kinds.len() + place, 1)?;
            narrow_to_bf16(&kind.narrow0(step, 1)?, &to)?;
        }
    }
    Ok((kinds.len(), all))
}
