//! One step of many pictures in one packed pass on the device.

use std::sync::Arc;

use kernels::cuda::{Gpu, GpuTensor, GpuType, StepJob, StepJobs, guide_step};

use super::arena::KvLease;
use super::job::GpuJob;
use super::layer::{Layer, Pass};
use super::rows::{GpuRow, pass};
use super::workspace::Workspace;
use super::{GpuModel, Timings};
use crate::error::ModelError;

/// Sees the velocities of job `index` of a call.
pub type SeeVelocities<'a> = &'a mut dyn FnMut(usize, &[f32]);

/// What a step shows to whoever watches.
#[derive(Default)]
pub struct Watch<'a> {
    /// When each part was reached.
    pub timings: Option<&'a mut Timings>,
    /// Gets the number of a job in the call and its velocities `[rows, h w, latent channels]`, the conditional
    /// row first, before its latents change. Waits for the device.
    pub velocities: Option<SeeVelocities<'a>>,
}

impl std::fmt::Debug for Watch<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Watch")
    }
}

impl Watch<'_> {
    fn note(&mut self, gpu: &Gpu, what: &'static str) -> Result<(), ModelError> {
        match &mut self.timings {
            Some(timings) => timings.note(gpu, what),
            None => Ok(()),
        }
    }
}

/// What stays the same while the same jobs step together.
#[derive(Debug)]
pub(crate) struct Batch {
    /// Of the jobs, in order.
    ids: Vec<u64>,
    pub(super) pass: Pass,
    pub(super) work: Workspace,
    /// Fresh keys and values of every row; every layer uses the same.
    _leases: Vec<KvLease>,
}

impl GpuModel {
    /// Advances every job by one step, all rows packed in one pass.
    ///
    /// # Errors
    /// `Internal` when a job is done already, `Exhausted` when the batch does not fit, `Gpu` when the device
    /// failed.
    pub fn denoise_step(&mut self, jobs: &mut [&mut GpuJob]) -> Result<(), ModelError> {
        self.watched_step(jobs, &mut Watch::default())
    }

    /// Like [`GpuModel::denoise_step`], for a watcher.
    ///
    /// # Errors
    /// Those of [`GpuModel::denoise_step`].
    pub fn watched_step(
        &mut self,
        jobs: &mut [&mut GpuJob],
        watch: &mut Watch<'_>,
    ) -> Result<(), ModelError> {
        if jobs.is_empty() {
            return Ok(());
        }
        if let Some(job) = jobs.iter().find(|job| job.is_done()) {
            let steps = job.steps();
            return Err(ModelError::Internal(format!(
                "a job has done its {steps} steps"
            )));
        }
        let mut batch = self.take_batch(jobs)?;
        let gpu = self.gpu.clone();
        watch.note(&gpu, "begin")?;
        self.embed(jobs, &batch.work.x)?;
        watch.note(&gpu, "stem")?;
        let layers = self.small.len();
        for index in 0..layers {
            let block = self.store.block(index)?;
            let layer = Layer {
                index,
                dims: &self.dims[index],
                small: &self.small[index],
                block: &block,
            };
            if index == 0 {
                layer.enter(&batch.work, &batch.pass)?;
            }
            let next = self.small.get(index + 1).map(|small| &small.input_norm);
            layer.forward(&mut batch.work, &batch.pass, next)?;
            self.store.done(index)?;
            watch.note(&gpu, "layer")?;
        }
        let mut start = 0;
        for (index, job) in jobs.iter_mut().enumerate() {
            let velocity = self.velocity(job, &batch.work.x, start)?;
            if let Some(see) = &mut watch.velocities {
                see(index, &velocity.to_f32_vec()?);
            }
            self.advance(job, &velocity)?;
            start += job.tokens();
        }
        watch.note(&gpu, "head")?;
        for job in jobs.iter_mut() {
            job.step += 1;
        }
        self.batch = Some(batch);
        Ok(())
    }

    /// The batch of these jobs: the last one where they are the same.
    fn take_batch(&mut self, jobs: &[&mut GpuJob]) -> Result<Batch, ModelError> {
        let ids: Vec<u64> = jobs.iter().map(|job| job.id).collect();
        if let Some(batch) = self.batch.take().filter(|batch| batch.ids == ids) {
            return Ok(batch);
        }
        let tokens: usize = jobs.iter().map(|job| job.tokens()).sum();
        let (mut rows, mut leases) = (Vec::new(), Vec::new());
        for job in jobs {
            for prefix in &job.prefixes {
                let lease = self.arena.lease(job.row_tokens(), true)?;
                rows.push(GpuRow {
                    tokens: job.row_tokens(),
                    segments: &job.segments,
                    prefix: Some(prefix.run()).filter(|run| run.tokens > 0),
                    at: lease.place(),
                    appended: 0,
                });
                leases.push(lease);
            }
        }
        let table = |of: fn(&GpuJob) -> &GpuTensor| self.concat(jobs, of);
        let rope = (table(|job| &job.cos)?, table(|job| &job.sin)?);
        let pass = pass(self.shape, self.arena.tensor()?, &rows, rope)?;
        Ok(Batch {
            ids,
            pass,
            work: self.workspace(tokens)?,
            _leases: leases,
        })
    }

    /// A rotary table of all jobs.
    fn concat(
        &self,
        jobs: &[&mut GpuJob],
        of: fn(&GpuJob) -> &GpuTensor,
    ) -> Result<GpuTensor, ModelError> {
        if let [job] = jobs {
            return Ok(of(job).clone());
        }
        let tokens = jobs.iter().map(|job| of(job).dim(0)).sum();
        let dims = [tokens, self.config.head_dim];
        let all = GpuTensor::new(&self.gpu, &dims, GpuType::F32, "rotary table")?;
        let mut at = 0;
        for job in jobs {
            let part = of(job);
            all.narrow0(at, part.dim(0))?.copy_from(part)?;
            at += part.dim(0);
        }
        Ok(all)
    }

    /// Fresh tokens of all rows into `x`: a job's rows are alike, so its image is embedded once.
    fn embed(&mut self, jobs: &[&mut GpuJob], x: &GpuTensor) -> Result<(), ModelError> {
        let mut start = 0;
        for job in jobs {
            let specials = job.tokens.narrow0(job.step * job.specials, job.specials)?;
            let modulation = job.patch.narrow0(job.step, 1)?;
            let first = x.narrow0(start + job.specials, job.image_tokens())?;
            self.stem
                .forward(&job.narrow, job.grid, &modulation, &first)?;
            for row in 0..job.rows() {
                let at = start + row * job.row_tokens();
                x.narrow0(at, job.specials)?.copy_from(&specials)?;
                if row > 0 {
                    x.narrow0(at + job.specials, job.image_tokens())?
                        .copy_from(&first)?;
                }
            }
            start += job.tokens();
        }
        Ok(())
    }

    /// Velocities of a job's rows, which begin at token `start` of `x`; valid until the next call.
    fn velocity(
        &mut self,
        job: &GpuJob,
        x: &GpuTensor,
        start: usize,
    ) -> Result<GpuTensor, ModelError> {
        let modulation = job.last.narrow0(job.step * job.rows(), job.rows())?;
        let places = (start + job.specials, job.row_tokens());
        self.head.forward(x, places, job.grid, &modulation)
    }

    /// Guides a job's velocities and moves its latents by them.
    fn advance(&self, job: &GpuJob, velocity: &GpuTensor) -> Result<(), ModelError> {
        let each = job.latents.numel();
        let step = StepJob {
            latents: 0,
            cond: 0,
            uncond: (job.rows() > 1).then_some(each),
            positions: job.image_tokens(),
            guidance: job.guidance as f32,
            sigma_step: job.schedule.sigmas[job.step + 1] - job.schedule.sigmas[job.step],
            rescale: job.rescale as f32,
            preserve_norm: job.preserve_norm,
        };
        let steps = StepJobs::new(
            &self.gpu,
            std::slice::from_ref(&step),
            job.latents.dim(1),
            each,
            velocity.numel(),
        )?;
        let guided = steps
            .rescaled()
            .then(|| GpuTensor::new(&self.gpu, job.latents.shape(), GpuType::F32, "velocity"))
            .transpose()?;
        guide_step(
            &steps,
            velocity,
            &job.latents,
            Some(&job.narrow),
            guided.as_ref(),
        )?;
        Ok(())
    }

    /// Room for a pass of `tokens` tokens.
    pub(super) fn workspace(&self, tokens: usize) -> Result<Workspace, ModelError> {
        let dims = &self.dims[0];
        let needed = Workspace::bytes(dims, self.weights, tokens);
        if needed > self.memory.bytes() {
            return Err(ModelError::Exhausted {
                what: "gpu workspace",
                needed,
                free: self.memory.bytes(),
            });
        }
        Workspace::new(
            &self.gpu,
            &Arc::clone(&self.memory),
            dims,
            self.weights,
            tokens,
        )
    }
}
