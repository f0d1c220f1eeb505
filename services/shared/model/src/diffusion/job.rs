//! One picture being denoised: everything that stays fixed over its steps, and its latents.

use std::sync::Arc;

use kernels::{RopeTable, Tensor};
use parallel::{Axis, GUIDANCE_ROWS, SequenceShards};

use super::cache::{History, StepCache, changes};
use super::embedders::special_tokens;
use super::{ImageHead, ImageStem};
use crate::backbone::{RowSegment, segments};
use crate::config::ModelConfig;
use crate::error::ModelError;
use crate::model::Model;
use crate::noise::initial_latents;
use crate::picture::Latents;
use crate::positions::{ImageSpan, positions, rope_table};
use crate::prefix::PrefixKv;
use crate::rank::{PICTURE_ORDER, RankShard};
use crate::scheduler::Schedule;

/// Largest guidance scale that a job accepts.
pub const MAX_GUIDANCE: f64 = 1000.0;

/// What a picture is made from.
#[derive(Clone, Debug)]
pub struct JobSpec {
    /// Pixels down; a multiple of the model's pixels per token.
    pub height: usize,
    /// Pixels across; likewise.
    pub width: usize,
    /// Denoising steps.
    pub steps: usize,
    /// Guidance scale; at most 1 means off.
    pub guidance: f64,
    /// Seed of the initial latents.
    pub seed: u64,
    /// Keys and values of the prompt, as much of them as the rank needs. Absent on a rank that computes
    /// only the other row.
    pub cond: Option<Arc<PrefixKv>>,
    /// Keys and values of the row without prompt, likewise; needed (and used) only where guidance takes two
    /// rows.
    pub uncond: Option<Arc<PrefixKv>>,
}

impl JobSpec {
    /// The same picture with what `rank` needs of these whole prefixes: its part of the rows it computes. A
    /// rank that is alone needs all of them and copies nothing.
    ///
    /// # Errors
    /// Those of [`PrefixKv::part_of`].
    pub fn part_of(&self, rank: &RankShard) -> Result<Self, ModelError> {
        if rank.is_alone() {
            return Ok(self.clone());
        }
        let cfg = rank.place(Axis::Cfg);
        let part = |row: usize, whole: &Option<Arc<PrefixKv>>| {
            let own = cfg.size == 1 || cfg.index == row;
            let whole = whole.as_ref().filter(|_| own);
            whole.map(|p| p.part_of(rank).map(Arc::new)).transpose()
        };
        Ok(Self {
            cond: part(0, &self.cond)?,
            uncond: part(1, &self.uncond)?,
            ..self.clone()
        })
    }
}

/// What a caller rarely sets.
#[derive(Clone, Debug, Default)]
pub struct JobOptions {
    /// 0..=1: how far the guided velocity is brought back to the deviation of the conditional one.
    pub guidance_rescale: f64,
    /// Brings the guided velocity of every latent position back to the length of the conditional one.
    pub preserve_norm: bool,
    /// Shift of the sigma schedule; the model's default when absent.
    pub flow_shift: Option<f64>,
    /// Start from these latents rather than from the seed.
    pub init_latents: Option<Latents>,
    /// Go on from here rather than from the start; the picture is, bit for bit, that of a job that was never
    /// interrupted.
    pub resume: Option<JobState>,
    /// Steps that do without the decoder.
    pub cache: StepCache,
    /// Keep what each step expects the finished latents to be.
    pub forecast: bool,
}

/// All that a job has and its request does not say: enough to go on with it elsewhere.
#[derive(Clone, Debug, PartialEq)]
pub struct JobState {
    /// Steps done.
    pub step: usize,
    /// The latents after them.
    pub latents: Latents,
}

/// A picture between its first and its last step.
///
/// Rotary tables, segments and everything that depends on time alone are computed once, here.
#[derive(Debug)]
pub struct DenoiseJob {
    pub(super) grid: (usize, usize),
    pub(super) schedule: Schedule,
    pub(super) step: usize,
    pub(super) guidance: f64,
    pub(super) rescale: f64,
    pub(super) preserve_norm: bool,
    /// Rows over all ranks.
    rows: usize,
    /// Of this rank's rows, the conditional one first.
    pub(super) prefixes: Vec<Arc<PrefixKv>>,
    /// Of this rank's rows, one after the other.
    pub(super) rope: RopeTable,
    /// The same for every row.
    pub(super) segments: Vec<RowSegment>,
    pub(super) times: TimeVectors,
    /// `[1, h, w, latent]`.
    pub(super) latents: Tensor,
    row_padding: usize,
    pub(super) cache: StepCache,
    /// Which steps run the decoder.
    pub(super) runs: Vec<bool>,
    /// On the last pipeline stage.
    pub(super) history: History,
    /// Whether a step keeps its forecast.
    pub(super) forecasts: bool,
    /// `[1, h, w, latent]`, on the last pipeline stage.
    pub(super) forecast: Option<Tensor>,
    /// Steps whose decoder pass was saved.
    pub(super) saved: usize,
    /// The history is as old as the job: false after a resume until a step has run.
    pub(super) warm: bool,
    /// False on a rank between the first and the last pipeline stage after a step.
    pub(super) has_latents: bool,
}

/// Everything a step needs that depends on its time only.
#[derive(Debug)]
pub(super) struct TimeVectors {
    /// Tokens before the image.
    pub(super) specials: usize,
    /// `[steps * specials, hidden]`.
    pub(super) tokens: Tensor,
    /// `[2 steps, hidden]`: scale and shift of the patch embedding.
    pub(super) patch: Tensor,
    /// `[2 steps, inner]`: scale and shift of the final layer.
    pub(super) last: Tensor,
}

impl DenoiseJob {
    /// A job at its first step.
    ///
    /// # Errors
    /// `InvalidArgument` naming the field of `spec` that is out of range; `Internal` when a prefix does not
    /// belong to this model or the model was opened without its diffusion parts.
    pub fn new(model: &Model, spec: JobSpec) -> Result<Self, ModelError> {
        Self::with_options(model, spec, JobOptions::default())
    }

    /// Like [`DenoiseJob::new`], with rarely used options.
    ///
    /// # Errors
    /// Those of [`DenoiseJob::new`]; `InvalidArgument` naming the option.
    pub fn with_options(
        model: &Model,
        spec: JobSpec,
        options: JobOptions,
    ) -> Result<Self, ModelError> {
        let (config, rank) = (model.config(), model.rank());
        options.cache.check()?;
        let rows = rows(config, rank, spec.guidance)?;
        let prefixes = prefixes(&spec, rank, rows)?;
        let lengths: Vec<usize> = prefixes.iter().map(|p| p.tokens()).collect();
        let grid = check(config, &spec, &options, &lengths)?;
        let shift = options.flow_shift.unwrap_or(config.generation.flow_shift);
        let schedule = Schedule::new(spec.steps, shift)?;
        let (step, given) = match options.resume {
            Some(state) => (resumed(&state, spec.steps)?, Some(state.latents)),
            None => (0, options.init_latents),
        };
        let latents = initial(config, &spec, given, grid)?;
        let (stem, head) = (model.image_stem()?, model.image_head()?);
        let times = TimeVectors::new(stem, head, &schedule, spec.guidance)?;
        let own = rank.kv_geometry(&model.info().kv);
        for prefix in &prefixes {
            if *prefix.geometry() != own {
                return Err(ModelError::Internal(format!(
                    "prefix geometry {:?} is not the rank's {own:?}",
                    prefix.geometry()
                )));
            }
        }
        let image = times.specials..times.specials + grid.0 * grid.1;
        Ok(Self {
            rope: rope(config, &lengths, &image, grid)?,
            segments: segments(0..image.end, std::slice::from_ref(&image))?,
            latents: latents.to_tensor()?,
            grid,
            schedule,
            step,
            guidance: spec.guidance,
            rescale: options.guidance_rescale,
            preserve_norm: options.preserve_norm,
            rows,
            prefixes,
            row_padding: padding(rank, image.end)?,
            runs: options.cache.runs(&times, spec.steps)?,
            cache: options.cache,
            history: History::default(),
            forecasts: options.forecast,
            forecast: None,
            saved: 0,
            warm: false,
            times,
            has_latents: true,
        })
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

    /// Rows of the request, over all ranks: 2 under guidance, else 1.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Query tokens of one step, over all rows and ranks.
    pub fn tokens(&self) -> usize {
        self.rows() * self.row_tokens()
    }

    /// The latents after the steps done so far.
    ///
    /// # Errors
    /// `Internal` on a rank between the first and the last pipeline stage, which does not have them.
    pub fn latents(&self) -> Result<Latents, ModelError> {
        if !self.has_latents {
            let message = "latents are on the first and the last pipeline stage";
            return Err(ModelError::Internal(message.into()));
        }
        let channels = self.latents.dim(3);
        Latents::from_channels_last(
            channels,
            self.grid.0,
            self.grid.1,
            self.latents.to_f32_vec(),
        )
    }

    /// Whether the next step runs the decoder.
    pub fn runs_decoder(&self) -> bool {
        // A job that was resumed has nothing to go on from yet.
        !self.warm || self.runs.get(self.step).copied().unwrap_or(true)
    }

    /// Steps so far that did without the decoder.
    pub fn saved_steps(&self) -> usize {
        self.saved
    }

    /// What the last step expects the finished latents to be; `None` unless asked for by
    /// [`JobOptions::forecast`], before the first step, and elsewhere than on the last pipeline stage.
    ///
    /// # Errors
    /// `Internal`, which would be a defect.
    pub fn forecast(&self) -> Result<Option<Latents>, ModelError> {
        let Some(forecast) = &self.forecast else {
            return Ok(None);
        };
        let (channels, grid) = (forecast.dim(3), self.grid);
        Latents::from_channels_last(channels, grid.0, grid.1, forecast.to_f32_vec()).map(Some)
    }

    /// Under a [`Tea`](super::Tea) cache of threshold 0, which runs every step, on the last pipeline stage: how much what the decoder adds has
    /// changed, relatively, between the last two steps that ran.
    pub fn moved(&self) -> Option<f64> {
        self.history.moved()
    }

    /// Relative change of the time modulation from each step to the next: what a [`Tea`] cache goes by.
    ///
    /// # Errors
    /// `Kernel`, which would be a defect.
    ///
    /// [`Tea`]: super::Tea
    pub fn time_changes(&self) -> Result<Vec<f64>, ModelError> {
        changes(&self.times, self.steps())
    }

    /// Where the job stands, to be gone on with by [`JobOptions::resume`].
    ///
    /// # Errors
    /// Those of [`DenoiseJob::latents`].
    pub fn state(&self) -> Result<JobState, ModelError> {
        Ok(JobState {
            step: self.step,
            latents: self.latents()?,
        })
    }

    /// Padding tokens that an exchange of one step carries over all ranks of the sequence group, because the
    /// tokens of a row do not divide over them. They cost bytes; none is computed.
    pub fn padding(&self) -> usize {
        self.rows * self.row_padding
    }

    pub(super) fn row_tokens(&self) -> usize {
        self.times.specials + self.grid.0 * self.grid.1
    }
}

impl TimeVectors {
    fn new(
        stem: &ImageStem,
        head: &ImageHead,
        schedule: &Schedule,
        guidance: f64,
    ) -> Result<Self, ModelError> {
        let times = &schedule.timesteps;
        let next: Vec<f32> = (0..times.len())
            .map(|i| schedule.next_timestep(i))
            .collect();
        let tokens = special_tokens(stem, head, times, &next, guidance)?;
        Ok(Self {
            specials: tokens.dim(0) / times.len(),
            tokens,
            patch: stem
                .patch_embed
                .modulation(&stem.patch_time.forward(times)?)?,
            last: head
                .final_layer
                .modulation(&head.final_time.forward(times)?)?,
        })
    }
}

/// Rows of a request with this guidance, over all ranks.
fn rows(config: &ModelConfig, rank: &RankShard, guidance: f64) -> Result<usize, ModelError> {
    let rows = if config.guidance_needs_two_rows(guidance) {
        GUIDANCE_ROWS
    } else {
        1
    };
    let plan = rank.plan().check_guidance(guidance);
    plan.map_err(|e| ModelError::invalid("guidance", e.to_string()))?;
    Ok(rows)
}

/// Padding of a row of `tokens` fresh tokens over the sequence group.
fn padding(rank: &RankShard, tokens: usize) -> Result<usize, ModelError> {
    let (ring, ulysses) = (rank.place(Axis::Ring).size, rank.place(Axis::Ulysses).size);
    Ok(SequenceShards::new(tokens, ring, ulysses, PICTURE_ORDER)?.padding())
}

/// The prefixes of the rows this rank computes.
fn prefixes(
    spec: &JobSpec,
    rank: &RankShard,
    rows: usize,
) -> Result<Vec<Arc<PrefixKv>>, ModelError> {
    let cfg = rank.place(Axis::Cfg);
    let given = [&spec.cond, &spec.uncond];
    let own = if cfg.size == 1 {
        0..rows
    } else {
        cfg.index..cfg.index + 1
    };
    let taken = own.map(|row| {
        let (name, prefix) = (["conditional", "unconditional"][row], given[row].clone());
        prefix.ok_or_else(|| {
            let message = format!("{} needs the {name} prefix", spec.guidance);
            ModelError::invalid("guidance", message)
        })
    });
    taken.collect()
}

/// Checks every number of a job whose prefixes have `lengths` tokens; returns its latent grid.
pub(crate) fn check(
    config: &ModelConfig,
    spec: &JobSpec,
    options: &JobOptions,
    lengths: &[usize],
) -> Result<(usize, usize), ModelError> {
    let cell = config.pixels_per_token();
    for (field, side) in [("height", spec.height), ("width", spec.width)] {
        if side == 0 || side % cell != 0 {
            let message = format!("{side} is not a positive multiple of {cell}");
            return Err(ModelError::invalid(field, message));
        }
    }
    if !(0.0..=MAX_GUIDANCE).contains(&spec.guidance) {
        let message = format!("{} is not in 0..={MAX_GUIDANCE}", spec.guidance);
        return Err(ModelError::invalid("guidance", message));
    }
    if !(0.0..=1.0).contains(&options.guidance_rescale) {
        let message = format!("{} is not in 0..=1", options.guidance_rescale);
        return Err(ModelError::invalid("guidance_rescale", message));
    }
    let grid = (spec.height / cell, spec.width / cell);
    let longest = lengths.iter().copied().max().unwrap_or(0);
    let tokens = grid.0.saturating_mul(grid.1).saturating_add(longest);
    if tokens > config.max_position_embeddings {
        let message = format!(
            "{}x{} after {longest} tokens is above {} positions",
            spec.width, spec.height, config.max_position_embeddings
        );
        return Err(ModelError::invalid("size", message));
    }
    Ok(grid)
}

/// Steps that an interrupted job has done.
pub(crate) fn resumed(state: &JobState, steps: usize) -> Result<usize, ModelError> {
    if state.step > steps {
        let message = format!("step {} of a job of {steps}", state.step);
        return Err(ModelError::invalid("resume", message));
    }
    if !state.latents.is_finite() {
        return Err(ModelError::invalid("resume", "latents are not finite"));
    }
    Ok(state.step)
}

pub(crate) fn initial(
    config: &ModelConfig,
    spec: &JobSpec,
    given: Option<Latents>,
    grid: (usize, usize),
) -> Result<Latents, ModelError> {
    let channels = config.vae.latent_channels;
    let Some(given) = given else {
        let data = initial_latents(spec.seed, channels, grid.0, grid.1)?;
        return Latents::new(channels, grid.0, grid.1, data);
    };
    if (given.channels(), given.height(), given.width()) != (channels, grid.0, grid.1) {
        return Err(ModelError::invalid(
            "init_latents",
            format!(
                "shape {} x {} x {} is not {channels} x {} x {}",
                given.channels(),
                given.height(),
                given.width(),
                grid.0,
                grid.1
            ),
        ));
    }
    Ok(given)
}

/// Rotary tables of all rows, whose prefixes have `lengths` tokens; `image` counts from the end of a prefix.
pub(crate) fn rope(
    config: &ModelConfig,
    lengths: &[usize],
    image: &std::ops::Range<usize>,
    grid: (usize, usize),
) -> Result<RopeTable, ModelError> {
    let mut all = Vec::with_capacity(lengths.len() * image.end);
    for &start in lengths {
        let span = ImageSpan {
            tokens: start + image.start..start + image.end,
            grid_h: grid.0,
            grid_w: grid.1,
        };
        all.extend(positions(start..start + image.end, &[span])?);
    }
    rope_table(&all, config.head_dim, config.rope_theta)
}
