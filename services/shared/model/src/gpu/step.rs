//! One step of many pictures in one packed pass on the device.

use std::sync::Arc;

use kernels::cuda::Gpu;

use super::batch::Batch;
use super::group::Ranks;
use super::job::GpuJob;
use super::layer::{Layer, Pass};
use super::workspace::{Extent, Sizes, Workspace};
use super::{GpuModel, Timings};
use crate::backbone::Goal;
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

impl GpuModel {
    /// Advances every job by one step, all rows packed in one pass. Under a plan every rank calls it with the
    /// same jobs; results count once [`GpuModel::wait`] has said so.
    ///
    /// # Errors
    /// `Internal` when a job is done already, `Exhausted` when the batch does not fit, `Gpu` when the device
    /// or another rank failed.
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
        let done = self.step(jobs, watch);
        if let (Err(error), Some(group)) = (&done, &self.group) {
            // The others wait for this rank.
            group.abort(&error.to_string());
        }
        done
    }

    fn step(&mut self, jobs: &mut [&mut GpuJob], watch: &mut Watch<'_>) -> Result<(), ModelError> {
        let mut batch = self.take_batch(jobs)?;
        let gpu = self.gpu.clone();
        watch.note(&gpu, "begin")?;
        if self.share.is_staged() {
            self.stages(jobs, &mut batch, watch)?;
        } else {
            for part in &mut batch.parts {
                self.embed(jobs, &batch.rows, (&part.work, &part.own))?;
                watch.note(&gpu, "stem")?;
                self.layers((&mut part.work, &part.pass), Goal::Hidden, watch)?;
            }
        }
        if batch.velocities.is_some() {
            self.shared_velocities(jobs, &batch)?;
        }
        let mut start = 0;
        for index in 0..jobs.len() {
            let velocity = match &batch.velocities {
                Some(_) => self.velocities_of(jobs, &batch, index)?,
                None => self.velocity(jobs[index], &batch.parts[0].work.x, start)?,
            };
            if let Some(see) = &mut watch.velocities {
                see(index, &velocity.to_f32_vec()?);
            }
            self.advance(jobs[index], &velocity)?;
            start += jobs[index].tokens();
        }
        watch.note(&gpu, "head")?;
        for job in jobs.iter_mut() {
            job.step += 1;
        }
        self.batch = Some(batch);
        Ok(())
    }

    /// The layers of this rank over one pass, of which `goal` says what is wanted.
    pub(super) fn layers(
        &mut self,
        (work, pass): (&mut Workspace, &Pass),
        goal: Goal,
        watch: &mut Watch<'_>,
    ) -> Result<(), ModelError> {
        let gpu = self.gpu.clone();
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
                layer.enter(work, pass)?;
            }
            if index + 1 == layers && goal == Goal::Cache {
                layer.keys(work, pass)?;
            } else {
                let next = self.small.get(index + 1).map(|small| &small.input_norm);
                layer.forward(work, pass, next)?;
            }
            self.store.done(index)?;
            watch.note(&gpu, "layer")?;
        }
        Ok(())
    }

    /// Row after row through the stages, so that all of them have work.
    fn stages(
        &mut self,
        jobs: &[&mut GpuJob],
        batch: &mut Batch,
        watch: &mut Watch<'_>,
    ) -> Result<(), ModelError> {
        let (stage, last) = (self.share.rank(), self.share.ranks() - 1);
        for index in 0..batch.parts.len() {
            let part = &batch.parts[index];
            let x = part.work.x.clone();
            if stage == 0 {
                self.embed(jobs, &batch.rows, (&part.work, &part.own))?;
            } else {
                self.hand_on(&x, Some(stage - 1), None)?;
            }
            watch.note(&self.gpu.clone(), "stem")?;
            let part = &mut batch.parts[index];
            self.layers((&mut part.work, &part.pass), Goal::Hidden, watch)?;
            if stage == last {
                self.row_velocity(jobs, batch, index, (&x, 0))?;
            } else {
                self.hand_on(&x, None, Some(stage + 1))?;
            }
        }
        Ok(())
    }

    /// Room for a pass.
    pub(super) fn workspace_of(
        &self,
        of: &Extent,
        ranks: Option<&Ranks>,
    ) -> Result<Workspace, ModelError> {
        let sizes = self.sizes();
        let needed = sizes.bytes(of);
        if needed > self.memory.bytes() {
            return Err(ModelError::Exhausted {
                what: "gpu workspace",
                needed,
                free: self.memory.bytes(),
            });
        }
        let memory = Arc::clone(&self.memory);
        Workspace::new(&self.gpu, &memory, sizes, of, ranks)
    }

    fn sizes(&self) -> Sizes<'_> {
        Sizes {
            dims: &self.dims[0],
            heads: self.shape.heads,
            weights: self.weights,
        }
    }
}
