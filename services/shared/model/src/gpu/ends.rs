//! The two ends of a step: latents to tokens of every row, and hidden states to velocities and new latents.

use kernels::cuda::{GpuTensor, GpuType, Lane, StepJob, StepJobs, guide_step};

use super::GpuModel;
use super::batch::Batch;
use super::deal::{BatchRow, Deal, Piece};
use super::group::Travel;
use super::job::GpuJob;
use super::workspace::Workspace;
use crate::error::ModelError;

impl GpuModel {
    /// Fresh tokens of `own` into the residual stream of `work`: a job's rows are alike, so its image is embedded
    /// once.
    pub(super) fn embed(
        &mut self,
        jobs: &[&mut GpuJob],
        rows: &[BatchRow],
        (work, own): (&Workspace, &[Piece]),
    ) -> Result<(), ModelError> {
        let mut embedded: Option<(usize, GpuTensor)> = None;
        let mut at = 0;
        for piece in own {
            let row = &rows[piece.row];
            let job = &jobs[row.job];
            let count = piece.tokens.len();
            let to = work.x.narrow0(at, count)?;
            at += count;
            let known = embedded.take().filter(|(job, _)| *job == row.job);
            let image = match known {
                Some((_, image)) => image,
                None => {
                    let all = count == row.tokens;
                    let image = match &work.whole {
                        Some(whole) if !all => whole.narrow0(0, job.image_tokens())?,
                        _ => to.narrow0(job.specials, job.image_tokens())?,
                    };
                    let modulation = job.patch.narrow0(job.step, 1)?;
                    self.stem
                        .forward(&job.narrow, job.grid, &modulation, &image)?;
                    image
                }
            };
            place(job, piece, &image, &to)?;
            embedded = Some((row.job, image));
        }
        Ok(())
    }

    /// What lies before the layers of a stage that is not the first, or behind those of one that is not the last.
    pub(super) fn hand_on(
        &self,
        x: &GpuTensor,
        from: Option<usize>,
        to: Option<usize>,
    ) -> Result<(), ModelError> {
        let Some(group) = &self.group else {
            return Ok(());
        };
        let mut travel = Travel::default();
        if let Some(from) = from {
            travel.receive(from, x.clone());
        }
        if let Some(to) = to {
            travel.send(to, x.clone());
        }
        travel.go(&**group, Lane::Compute)
    }

    /// The velocities of all rows of a batch, on every rank: each row is computed by one.
    pub(super) fn shared_velocities(
        &mut self,
        jobs: &[&mut GpuJob],
        batch: &Batch,
    ) -> Result<(), ModelError> {
        let mut whole = None;
        if let (false, Some(part)) = (self.share.is_staged(), batch.parts.first())
            && let Some(room) = &part.work.whole
        {
            self.gather_rows((&batch.deal, &batch.rows), &part.work.x, room)?;
            whole = Some(room.clone());
        }
        for (index, row) in batch.rows.iter().enumerate() {
            // Stages have made theirs on the way.
            if self.share.is_staged() || self.owner(index, row) != self.share.rank() {
                continue;
            }
            let (x, start) = match &whole {
                Some(whole) => (whole.clone(), row.start),
                None => self.own_row(batch, index)?,
            };
            self.row_velocity(jobs, batch, index, (&x, start))?;
        }
        self.spread_velocities(jobs, batch)
    }

    /// The velocity of one row, which begins at token `start` of `x`, to its place.
    pub(super) fn row_velocity(
        &mut self,
        jobs: &[&mut GpuJob],
        batch: &Batch,
        index: usize,
        (x, start): (&GpuTensor, usize),
    ) -> Result<(), ModelError> {
        let row = &batch.rows[index];
        let job = &jobs[row.job];
        let modulation = job.last.narrow0(job.step * job.rows() + row.side, 1)?;
        let places = (start + job.specials, job.row_tokens());
        let velocity = self.head.forward(x, places, job.grid, &modulation)?;
        let to = self.velocity_of(jobs, batch, index)?;
        Ok(to.copy_from(&velocity)?)
    }

    /// Where the velocity of a row is among those of the batch.
    fn velocity_of(
        &self,
        jobs: &[&mut GpuJob],
        batch: &Batch,
        index: usize,
    ) -> Result<GpuTensor, ModelError> {
        let size = |row: &BatchRow| jobs[row.job].latents.numel();
        let start = batch.rows[..index].iter().map(size).sum();
        let all = batch.velocities.as_ref().ok_or_else(no_velocities)?;
        Ok(all.narrow0(start, size(&batch.rows[index]))?)
    }

    /// The velocities of a job's rows, one after the other.
    pub(super) fn velocities_of(
        &self,
        jobs: &[&mut GpuJob],
        batch: &Batch,
        job: usize,
    ) -> Result<GpuTensor, ModelError> {
        let (each, rows) = (jobs[job].latents.numel(), jobs[job].rows());
        let before = jobs[..job].iter().map(|j| j.latents.numel() * j.rows());
        let all = batch.velocities.as_ref().ok_or_else(no_velocities)?;
        Ok(all.narrow0(before.sum(), each * rows)?)
    }

    /// Which rank computes the velocity of a row.
    fn owner(&self, index: usize, row: &BatchRow) -> usize {
        if self.share.is_staged() {
            self.share.ranks() - 1
        } else if self.share.cuts_rows() {
            row.side
        } else {
            index % self.share.ranks()
        }
    }

    /// The residual stream of whole rows into `whole`, where each rank has a part of them in `x`.
    pub(super) fn gather_rows(
        &self,
        (deal, rows): (&Deal, &[BatchRow]),
        x: &GpuTensor,
        whole: &GpuTensor,
    ) -> Result<(), ModelError> {
        let Some(group) = &self.group else {
            return Ok(());
        };
        let mut travel = Travel::default();
        let mut at = 0;
        for piece in deal.own() {
            let len = piece.tokens.len();
            let own = x.narrow0(at, len)?;
            let start = rows[piece.row].start + piece.tokens.start;
            whole.narrow0(start, len)?.copy_from(&own)?;
            for rank in (0..deal.pieces.len()).filter(|rank| *rank != deal.me) {
                travel.send(rank, own.clone());
            }
            at += len;
        }
        for (rank, pieces) in deal.pieces.iter().enumerate() {
            for piece in pieces.iter().filter(|_| rank != deal.me) {
                let start = rows[piece.row].start + piece.tokens.start;
                travel.receive(rank, whole.narrow0(start, piece.tokens.len())?);
            }
        }
        travel.go(&**group, Lane::Compute)
    }

    /// The residual stream of a row that is here as a whole, and where it begins.
    fn own_row(&self, batch: &Batch, index: usize) -> Result<(GpuTensor, usize), ModelError> {
        let mut start = 0;
        for part in &batch.parts {
            for piece in &part.own {
                if piece.row == index {
                    return Ok((part.work.x.clone(), start));
                }
                start += piece.tokens.len();
            }
        }
        Err(ModelError::Internal("a row of another rank".into()))
    }

    /// Every row's velocity from the rank that has it to the others.
    fn spread_velocities(&self, jobs: &[&mut GpuJob], batch: &Batch) -> Result<(), ModelError> {
        let Some(group) = &self.group else {
            return Ok(());
        };
        let (me, ranks) = (self.share.rank(), self.share.ranks());
        let mut travel = Travel::default();
        for (index, row) in batch.rows.iter().enumerate() {
            let owner = self.owner(index, row);
            let velocity = self.velocity_of(jobs, batch, index)?;
            if owner != me {
                travel.receive(owner, velocity);
                continue;
            }
            for rank in (0..ranks).filter(|rank| *rank != me) {
                travel.send(rank, velocity.clone());
            }
        }
        travel.go(&**group, Lane::Compute)
    }

    /// Velocities of a job's rows, which begin at token `start` of `x`; valid until the next call.
    pub(super) fn velocity(
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
    pub(super) fn advance(&self, job: &GpuJob, velocity: &GpuTensor) -> Result<(), ModelError> {
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
}

/// The tokens of a piece: the special ones that are in it, and its part of the image unless that is there.
fn place(job: &GpuJob, piece: &Piece, image: &GpuTensor, to: &GpuTensor) -> Result<(), ModelError> {
    let (first, end) = (piece.tokens.start, piece.tokens.end);
    let specials = job.specials.min(end).saturating_sub(first);
    if specials > 0 {
        let from = job
            .tokens
            .narrow0(job.step * job.specials + first, specials)?;
        to.narrow0(0, specials)?.copy_from(&from)?;
    }
    let count = piece.tokens.len() - specials;
    let rest = to.narrow0(specials, count)?;
    let there =
        std::sync::Arc::ptr_eq(rest.buffer(), image.buffer()) && rest.offset() == image.offset();
    if there || count == 0 {
        return Ok(());
    }
    let from = image.narrow0(first + specials - job.specials, count)?;
    Ok(rest.copy_from(&from)?)
}

fn no_velocities() -> ModelError {
    ModelError::Internal("a batch of one gpu has no velocities of others".into())
}
