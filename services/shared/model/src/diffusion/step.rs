//! One step of many pictures in one packed pass.
//!
//! Hot path: no table, no weight and no time vector is computed here.

use kernels::{RopeTable, Tensor};
use parallel::{Axis, RankContext};

use super::cache::{History, StepCache};
use super::job::DenoiseJob;
use super::{ImageHead, ImageStem};
use crate::backbone::{Backbone, Goal, Probe, Row, RowKv};
use crate::error::ModelError;
use crate::rank::{PICTURE_ORDER, RankShard, group};
use crate::scheduler::{guide, preserve_norm, rescale};

/// The velocities of one job in one step, each `[h, w, latent]`.
#[derive(Clone, Copy, Debug)]
pub struct Velocities<'a> {
    /// Row with the prompt.
    pub cond: &'a [f32],
    /// Row without, under guidance.
    pub uncond: Option<&'a [f32]>,
    /// What the step uses.
    pub guided: &'a [f32],
}

/// Sees the velocities of job `index` (its place in the call) before its latents change; called on the last
/// pipeline stage.
pub type Observer<'a> = &'a mut dyn FnMut(usize, Velocities<'_>);

/// The modules that a step runs, and the rank that runs them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Modules<'a> {
    pub(crate) backbone: &'a Backbone,
    pub(crate) stem: &'a ImageStem,
    pub(crate) head: &'a ImageHead,
    pub(crate) rank: &'a RankShard,
    pub(crate) ctx: &'a RankContext,
}

impl Modules<'_> {
    /// Advances every job by one step. Nothing changes when an error is returned.
    pub(crate) fn denoise_step<P: Probe>(
        self,
        jobs: &mut [&mut DenoiseJob],
        probe: &mut P,
        observe: Observer<'_>,
    ) -> Result<(), ModelError> {
        if jobs.is_empty() {
            return Ok(());
        }
        if let Some(job) = jobs.iter().find(|job| job.is_done()) {
            return Err(ModelError::Internal(format!(
                "a job has done its {} steps",
                job.steps()
            )));
        }
        let last = self.rank.ends().1;
        let hidden = self.hidden(jobs, probe)?;
        let mut moved = Vec::new();
        if last {
            let states: Vec<&Tensor> = hidden.iter().map(|(state, _)| state).collect();
            let own = velocities(self.head, jobs, &states)?;
            let rows = self.gather_rows(own)?;
            for (index, (job, rows)) in jobs.iter().zip(rows).enumerate() {
                let velocity = guided_velocity(index, job, rows, observe)?;
                moved.push(Moved::new(job, &velocity)?);
            }
        }
        let advanced = moved.iter().map(|m| m.latents.clone()).collect();
        let mut advanced = self.hop(jobs, advanced)?.into_iter();
        let mut histories = hidden.into_iter().map(|(_, history)| history);
        let mut forecasts = moved.into_iter().map(|m| m.forecast);
        // From here on nothing fails.
        for job in jobs {
            let latents = advanced.next();
            job.has_latents = latents.is_some();
            if let Some(latents) = latents {
                job.latents = latents;
            }
            if let Some(Some(history)) = histories.next() {
                job.history = history;
            }
            job.forecast = forecasts.next().flatten();
            job.saved += usize::from(!job.runs_decoder());
            job.warm = true;
            job.step += 1;
        }
        Ok(())
    }

    /// On the last stage the hidden states of each job's rows, and its history if the step adds to it. Only
    /// rows whose step runs the decoder go through it.
    fn hidden<P: Probe>(
        self,
        jobs: &[&mut DenoiseJob],
        probe: &mut P,
    ) -> Result<Vec<(Tensor, Option<History>)>, ModelError> {
        let (first, last) = self.rank.ends();
        let runs: Vec<bool> = jobs.iter().map(|job| job.runs_decoder()).collect();
        let mut inputs = Vec::with_capacity(jobs.len());
        for (job, runs) in jobs.iter().zip(&runs) {
            // The last stage compares a step's input with its output.
            let compared = last && matches!(job.cache, StepCache::Tea(_));
            let wanted = (first && *runs) || compared;
            inputs.push(wanted.then(|| tokens(self.stem, job)).transpose()?);
        }
        let x = packed(&inputs, &runs)?;
        for (job, input) in jobs.iter().zip(&mut inputs) {
            if !matches!(job.cache, StepCache::Tea(_)) {
                *input = None;
            }
        }
        let mut decoded = self.decoded(jobs, &runs, x, probe)?.into_iter();
        if !last {
            return Ok(Vec::new());
        }
        let mut all = Vec::with_capacity(jobs.len());
        for ((job, runs), input) in jobs.iter().zip(runs).zip(&inputs) {
            let input = input.as_ref();
            if !runs {
                let rows = job.prefixes.len();
                let predicted = job.history.predict(&job.cache, job.step, input, rows)?;
                all.push((predicted, None));
                continue;
            }
            let missing = || ModelError::Internal("the last stage made no result".into());
            let state = decoded.next().ok_or_else(missing)?;
            let keeps = job.cache != StepCache::Off;
            let history = keeps.then(|| job.history.after(&job.cache, job.step, (input, &state)));
            all.push((state, history.transpose()?));
        }
        Ok(all)
    }

    /// The rows of jobs that run, through the decoder; on the last stage what came out for each job.
    fn decoded<P: Probe>(
        self,
        jobs: &[&mut DenoiseJob],
        runs: &[bool],
        x: Option<Tensor>,
        probe: &mut P,
    ) -> Result<Vec<Tensor>, ModelError> {
        let running: Vec<&DenoiseJob> = jobs
            .iter()
            .zip(runs)
            .filter(|(_, runs)| **runs)
            .map(|(job, _)| &**job)
            .collect();
        if running.is_empty() {
            return Ok(Vec::new());
        }
        let mut rows: Vec<Row<'_>> = Vec::with_capacity(2 * running.len());
        for job in &running {
            rows.extend(job.prefixes.iter().map(|prefix| Row {
                tokens: job.row_tokens(),
                segments: &job.segments,
                kv: RowKv::Past(prefix),
                order: PICTURE_ORDER,
            }));
        }
        let rope = rope(&running)?;
        let hidden = self
            .backbone
            .run(self.ctx, x, (&mut rows, &rope), Goal::Hidden, probe)?;
        let Some(hidden) = hidden else {
            return Ok(Vec::new());
        };
        let mut start = 0;
        let each = |job: &&DenoiseJob| {
            let tokens = job.prefixes.len() * job.row_tokens();
            start += tokens;
            Ok(hidden.narrow0(start - tokens, tokens)?)
        };
        running.iter().map(each).collect()
    }

    /// The velocities of both guidance rows where each is on another rank.
    fn gather_rows(self, own: Vec<Vec<Tensor>>) -> Result<Vec<Vec<Tensor>>, ModelError> {
        let cfg = self.rank.place(Axis::Cfg);
        if cfg.size == 1 {
            return Ok(own);
        }
        let mine: Vec<&Tensor> = own.iter().flatten().collect();
        let mut flat = Vec::new();
        for tensor in &mine {
            flat.extend_from_slice(tensor.as_f32()?);
        }
        let each = flat.len();
        let all = group(self.ctx, Axis::Cfg)?.all_gather(flat)?.wait()?;
        let (mut jobs, mut at) = (Vec::with_capacity(own.len()), 0);
        for tensor in mine {
            let row = |rank: usize| {
                let start = rank * each + at;
                Tensor::from_f32(tensor.shape(), all[start..start + tensor.numel()].to_vec())
            };
            jobs.push((0..cfg.size).map(row).collect::<Result<_, _>>()?);
            at += tensor.numel();
        }
        Ok(jobs)
    }

    /// Brings the new latents from the last pipeline stage to the first, which embeds them next; nothing on
    /// the stages between.
    fn hop(
        self,
        jobs: &[&mut DenoiseJob],
        advanced: Vec<Tensor>,
    ) -> Result<Vec<Tensor>, ModelError> {
        let stage = self.rank.place(Axis::Pp);
        let (first, last) = self.rank.ends();
        if stage.size == 1 {
            return Ok(advanced);
        }
        let group = group(self.ctx, Axis::Pp)?;
        if last {
            for latents in &advanced {
                group.send(0, latents.to_f32_vec())?;
            }
            return Ok(advanced);
        }
        let receive = |job: &&mut DenoiseJob| {
            let latents = group.recv(stage.size - 1)?.wait()?;
            Ok(Tensor::from_f32(job.latents.shape(), latents)?)
        };
        let arriving = jobs.iter().filter(|_| first);
        arriving.map(receive).collect()
    }
}

/// What a step makes of a job's latents.
struct Moved {
    latents: Tensor,
    forecast: Option<Tensor>,
}

impl Moved {
    fn new(job: &DenoiseJob, velocity: &Tensor) -> Result<Self, ModelError> {
        let velocity = velocity.as_f32()?;
        let mut latents = job.latents.clone();
        job.schedule
            .step(job.step, latents.as_f32_mut()?, velocity)?;
        let forecast = job.forecasts.then(|| {
            // The velocity leads from data to noise, so that all of sigma leads back.
            let mut clean = job.latents.clone();
            let sigma = job.schedule.sigmas[job.step];
            for (x, v) in clean.as_f32_mut()?.iter_mut().zip(velocity) {
                *x -= sigma * v;
            }
            Ok::<_, ModelError>(clean)
        });
        Ok(Self {
            latents,
            forecast: forecast.transpose()?,
        })
    }
}

/// The inputs of the jobs that run, one after the other; `None` where the rank has none.
fn packed(inputs: &[Option<Tensor>], runs: &[bool]) -> Result<Option<Tensor>, ModelError> {
    let running = inputs.iter().zip(runs).filter(|(_, runs)| **runs);
    let fresh: Vec<&Tensor> = running.filter_map(|(input, _)| input.as_ref()).collect();
    let some = !fresh.is_empty();
    Ok(some.then(|| Tensor::concat0(&fresh)).transpose()?)
}

/// Fresh tokens of a job's rows, `[tokens, hidden]`: they are alike, so its image is embedded once.
fn tokens(stem: &ImageStem, job: &DenoiseJob) -> Result<Tensor, ModelError> {
    let times = &job.times;
    let specials = times
        .tokens
        .narrow0(job.step * times.specials, times.specials)?;
    let modulation = times.patch.narrow0(2 * job.step, 2)?;
    let image = stem.patch_embed.forward(&job.latents, &modulation)?;
    let parts: Vec<&Tensor> = job
        .prefixes
        .iter()
        .flat_map(|_| [&specials, &image])
        .collect();
    Ok(Tensor::concat0(&parts)?)
}

fn rope(jobs: &[&DenoiseJob]) -> Result<RopeTable, ModelError> {
    if let [job] = jobs {
        return Ok(job.rope.clone());
    }
    let cos: Vec<_> = jobs.iter().map(|job| &job.rope.cos).collect();
    let sin: Vec<_> = jobs.iter().map(|job| &job.rope.sin).collect();
    Ok(RopeTable {
        cos: Tensor::concat0(&cos)?,
        sin: Tensor::concat0(&sin)?,
    })
}

/// Velocities of every row of every job, each `[1, h, w, latent]`.
fn velocities(
    head: &ImageHead,
    jobs: &[&mut DenoiseJob],
    hidden: &[&Tensor],
) -> Result<Vec<Vec<Tensor>>, ModelError> {
    let mut out = Vec::with_capacity(jobs.len());
    for (job, hidden) in jobs.iter().zip(hidden) {
        let mut start = 0;
        let modulation = job.times.last.narrow0(2 * job.step, 2)?;
        let mut rows = Vec::with_capacity(job.rows());
        for _ in &job.prefixes {
            let image = hidden.narrow0(start + job.times.specials, job.grid.0 * job.grid.1)?;
            rows.push(head.final_layer.forward(&image, job.grid, &modulation)?);
            start += job.row_tokens();
        }
        out.push(rows);
    }
    Ok(out)
}

/// Guidance and its rescale over the rows of one job.
fn guided_velocity(
    index: usize,
    job: &DenoiseJob,
    rows: Vec<Tensor>,
    observe: &mut dyn FnMut(usize, Velocities<'_>),
) -> Result<Tensor, ModelError> {
    let mut rows = rows.into_iter();
    let cond = rows
        .next()
        .ok_or_else(|| ModelError::Internal("a job without rows".into()))?;
    let uncond = rows.next();
    let mut guided = cond.clone();
    if let Some(uncond) = &uncond {
        guide(guided.as_f32_mut()?, uncond.as_f32()?, job.guidance)?;
        if job.preserve_norm {
            let channels = cond.dim(cond.rank() - 1);
            preserve_norm(guided.as_f32_mut()?, cond.as_f32()?, channels)?;
        }
        rescale(guided.as_f32_mut()?, cond.as_f32()?, job.rescale)?;
    }
    let uncond = uncond.as_ref().map(Tensor::as_f32).transpose()?;
    observe(
        index,
        Velocities {
            cond: cond.as_f32()?,
            uncond,
            guided: guided.as_f32()?,
        },
    );
    Ok(guided)
}
