//! The model behind the step loop.
use std::{sync::Arc, time::Duration};

use base::clock;
use model::{DenoiseJob, JobOptions, JobSpec, JobState, Latents, ModelError, PrefixKv};
use parallel::eplb::LayerChange;
use stage::{Ranks, StageError};
use telemetry::{Metrics, names};

#[cfg(feature = "cuda")]
use crate::device::{self, DeviceJob};
use crate::{
    batch::{Denoiser, Weight},
    picture,
};

/// Side of the latents that the decoder warms up with.
const WARM_UP_SIDE: usize = 2;
/// Guidance of the warm-up where it must have two rows.
const WARM_UP_GUIDANCE: f64 = 2.0;

/// What a caller is told between the steps of its job.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct NewsPlan {
    /// Steps from one checkpoint to the next; 0: none.
    pub(crate) checkpoint_every: usize,
    /// Previews, spread evenly over the steps.
    pub(crate) previews: usize,
    /// Previews are decoded by the VAE.
    pub(crate) vae: bool,
}

impl NewsPlan {
    /// Whether `step`, of `steps` in all, ends with a checkpoint. The last one does not: its picture
    /// follows.
    fn checkpoint_after(&self, step: usize, steps: usize) -> bool {
        self.checkpoint_every > 0 && step < steps && step.is_multiple_of(self.checkpoint_every)
    }

    /// Number of the preview after `step`. Of those that fall on one step the last is shown.
    fn preview_after(&self, step: usize, steps: usize) -> Option<usize> {
        let at = |index: usize| ((index + 1) * steps / (self.previews + 1)).max(1);
        (0..self.previews)
            .rev()
            .find(|index| step < steps && at(*index) == step)
    }
}

/// What there is to tell after a step.
#[derive(Debug)]
pub(crate) struct News {
    /// A place to go on from.
    pub(crate) state: Option<JobState>,
    /// Number of the preview, and the latents that the step expects at the end.
    pub(crate) preview: Option<(usize, Latents)>,
}

/// One picture in the making on all ranks of the worker.
#[derive(Debug)]
pub(crate) struct RankJob {
    parts: Parts,
    news: NewsPlan,
}

/// Where it is made.
#[derive(Debug)]
enum Parts {
    /// In the order of ranks; never empty.
    Host(Vec<DenoiseJob>),
    #[cfg(feature = "cuda")]
    Device(Box<DeviceJob>),
}

impl Parts {
    /// Those of ranks on the processor.
    fn on_host(&mut self) -> &mut [DenoiseJob] {
        match self {
            Self::Host(parts) => parts,
            #[cfg(feature = "cuda")]
            Self::Device(_) => &mut [],
        }
    }
}

impl RankJob {
    /// A job on every rank, each with its part of the whole prefixes in `spec`.
    pub(crate) fn new(
        ranks: &Ranks,
        spec: &JobSpec,
        options: &JobOptions,
        news: NewsPlan,
    ) -> Result<Self, StageError> {
        let options = JobOptions {
            forecast: news.previews > 0,
            ..options.clone()
        };
        #[cfg(feature = "cuda")]
        if let Some(gpus) = ranks.gpus() {
            let job = DeviceJob::new(gpus, ranks.first().config(), spec, options)?;
            let parts = Parts::Device(Box::new(job));
            return Ok(Self { parts, news });
        }
        let part = |model: &Arc<model::Model>| {
            DenoiseJob::with_options(model, spec.part_of(model.rank())?, options.clone())
        };
        let parts = ranks.models().iter().map(part);
        let parts = parts.collect::<Result<_, ModelError>>()?;
        Ok(Self {
            parts: Parts::Host(parts),
            news,
        })
    }

    /// One step of some jobs, packed, without a batch around it.
    pub(crate) fn step_together(ranks: &Ranks, jobs: &mut [Self]) -> Result<(), StageError> {
        let mut jobs: Vec<&mut Self> = jobs.iter_mut().collect();
        step(ranks, &mut jobs).map(drop)
    }

    /// Where the job stands.
    pub(crate) fn state(&self) -> Result<JobState, StageError> {
        match &self.parts {
            Parts::Host(parts) => Ok(parts[0].state()?),
            #[cfg(feature = "cuda")]
            Parts::Device(job) => Ok(job.state().clone()),
        }
    }

    /// What the last step expects the finished latents to be: only the last pipeline stage knows.
    fn forecast(&self) -> Result<Option<Latents>, StageError> {
        match &self.parts {
            Parts::Host(parts) => {
                let known = parts.iter().rev().map(DenoiseJob::forecast);
                let known = known.collect::<Result<Vec<_>, _>>()?;
                Ok(known.into_iter().flatten().next())
            }
            #[cfg(feature = "cuda")]
            Parts::Device(job) => Ok(job.forecast().cloned()),
        }
    }

    /// The latents, from a rank that has them: the first pipeline stage always does.
    pub(crate) fn latents(&self) -> Result<Latents, StageError> {
        match &self.parts {
            Parts::Host(parts) => Ok(parts[0].latents()?),
            #[cfg(feature = "cuda")]
            Parts::Device(job) => Ok(job.state().latents.clone()),
        }
    }

    fn step(&self) -> usize {
        match &self.parts {
            Parts::Host(parts) => parts[0].step(),
            #[cfg(feature = "cuda")]
            Parts::Device(job) => job.step(),
        }
    }

    fn steps(&self) -> usize {
        match &self.parts {
            Parts::Host(parts) => parts[0].steps(),
            #[cfg(feature = "cuda")]
            Parts::Device(job) => job.steps(),
        }
    }

    fn rows(&self) -> usize {
        match &self.parts {
            Parts::Host(parts) => parts[0].rows(),
            #[cfg(feature = "cuda")]
            Parts::Device(job) => job.rows(),
        }
    }

    fn tokens(&self) -> usize {
        match &self.parts {
            Parts::Host(parts) => parts[0].tokens(),
            #[cfg(feature = "cuda")]
            Parts::Device(job) => job.tokens(),
        }
    }

    /// Slots of a step that hold no token; GPUs have none.
    fn padding(&self) -> usize {
        match &self.parts {
            Parts::Host(parts) => parts[0].padding(),
            #[cfg(feature = "cuda")]
            Parts::Device(_) => 0,
        }
    }
}

/// What a step of all ranks came to.
#[derive(Debug, Default)]
struct Stepped {
    /// Experts that moved, by rank.
    changes: Vec<Vec<LayerChange>>,
    /// Milliseconds on the first rank's GPU.
    device_ms: Option<f64>,
}

/// One packed step on all ranks.
fn step(ranks: &Ranks, jobs: &mut [&mut RankJob]) -> Result<Stepped, StageError> {
    #[cfg(feature = "cuda")]
    if let Some(gpus) = ranks.gpus() {
        let own = jobs.iter_mut().filter_map(|job| match &mut job.parts {
            Parts::Device(job) => Some(&mut **job),
            Parts::Host(_) => None,
        });
        let device_ms = device::step(gpus, &mut own.collect::<Vec<_>>())?;
        return Ok(Stepped {
            device_ms: Some(device_ms),
            ..Stepped::default()
        });
    }
    let by_rank = by_rank(ranks, jobs);
    let changes = ranks.run(by_rank, |model, ctx, mut own| {
        model.denoise_step(ctx, &mut own)?;
        model.rebalance(ctx)
    })?;
    Ok(Stepped {
        changes,
        ..Stepped::default()
    })
}

/// Steps [`RankJob`]s.
#[derive(Debug)]
pub(crate) struct ModelDenoiser {
    pub(crate) ranks: Arc<Ranks>,
    pub(crate) metrics: Metrics,
}

impl ModelDenoiser {
    /// What moved between this step and the next. Ranks of one expert-parallel group say the same, so the
    /// first of each group speaks for it.
    fn report(&self, by_rank: &[Vec<LayerChange>]) {
        let speaks = |model: &Arc<model::Model>| model.rank().is_first_of_experts();
        let ranks = self.ranks.models().iter().zip(by_rank);
        let layers: Vec<&LayerChange> = ranks
            .filter(|(model, _)| speaks(model))
            .flat_map(|(_, changes)| changes)
            .collect();
        if layers.is_empty() {
            return;
        }
        let mean = |pick: fn(&LayerChange) -> f64| {
            layers.iter().map(|change| pick(change)).sum::<f64>() / layers.len() as f64
        };
        let (before, after) = (mean(|c| c.before), mean(|c| c.after));
        let moves: usize = layers.iter().map(|change| change.moves.len()).sum();
        for (when, value) in [("before", before), ("after", after)] {
            self.metrics
                .set(&names::STAGE_IMBALANCE, &["dit-worker", when], value);
        }
        self.metrics
            .add(&names::STAGE_EXPERT_MOVES, &["dit-worker"], moves as u64);
        tracing::info!(layers = layers.len(), moves, before, after, "experts moved");
    }
}

impl Denoiser for ModelDenoiser {
    type Job = RankJob;
    type News = News;

    fn step(&self, jobs: &mut [&mut RankJob]) -> Result<(), StageError> {
        let start = clock::now();
        let rows: usize = jobs.iter().map(|job| job.rows()).sum();
        let tokens: usize = jobs.iter().map(|job| job.tokens()).sum();
        let padding: usize = jobs.iter().map(|job| job.padding()).sum();
        let stepped = step(&self.ranks, jobs)?;
        self.report(&stepped.changes);
        if let Some(ms) = stepped.device_ms {
            let elapsed = Duration::from_secs_f64(ms.max(0.0) / 1e3);
            self.metrics
                .observe(&names::GPU_STEP, &["dit-worker", "denoise"], elapsed);
        }
        let elapsed = clock::now().saturating_duration_since(start);
        self.metrics
            .observe(&names::STAGE_STEP, &["dit-worker", "denoise"], elapsed);
        self.metrics
            .record(&names::STAGE_ROWS, &["dit-worker"], rows as f64);
        self.metrics
            .add(&names::STAGE_TOKENS, &["dit-worker"], tokens as u64);
        self.metrics
            .add(&names::STAGE_PADDING, &["dit-worker"], padding as u64);
        Ok(())
    }

    fn steps_done(&self, job: &RankJob) -> usize {
        job.step()
    }

    fn is_done(&self, job: &RankJob) -> bool {
        job.step() >= job.steps()
    }

    fn check(&self, job: &RankJob) -> Result<(), StageError> {
        let steps = job.step();
        if let Parts::Host(parts) = &job.parts
            && parts.iter().any(|part| part.step() != steps)
        {
            let message = "the ranks of a job are at different steps".to_owned();
            return Err(ModelError::Internal(message).into());
        }
        if job.latents()?.is_finite() {
            Ok(())
        } else {
            Err(StageError::NotFinite { what: "latents" })
        }
    }

    fn news(&self, job: &RankJob) -> Result<Option<News>, StageError> {
        let (step, steps) = (job.step(), job.steps());
        let state = job.news.checkpoint_after(step, steps).then(|| job.state());
        let preview = match job.news.preview_after(step, steps) {
            Some(index) => job.forecast()?.map(|latents| (index, latents)),
            None => None,
        };
        let news = News {
            state: state.transpose()?,
            preview,
        };
        Ok((news.state.is_some() || news.preview.is_some()).then_some(news))
    }
}

/// Each rank's parts of the jobs.
fn by_rank<'a>(ranks: &Ranks, jobs: &'a mut [&mut RankJob]) -> Vec<Vec<&'a mut DenoiseJob>> {
    let mut by_rank: Vec<Vec<&mut DenoiseJob>> =
        ranks.models().iter().map(|_| Vec::new()).collect();
    for job in jobs.iter_mut() {
        for (own, part) in by_rank.iter_mut().zip(job.parts.on_host()) {
            own.push(part);
        }
    }
    by_rank
}

/// What a job weighs in a step.
pub(crate) fn weight(job: &RankJob) -> Weight {
    Weight {
        rows: job.rows(),
        tokens: job.tokens(),
    }
}

/// One step of the smallest picture on a one-token prefix and the decode of a few latents, so that the
/// first request meets warm weights and threads.
pub(crate) fn warm_up(ranks: &Ranks) -> Result<(), StageError> {
    let info = ranks.info();
    let Some(bucket) = info
        .buckets
        .iter()
        .min_by_key(|bucket| bucket.height * bucket.width)
    else {
        return Ok(());
    };
    // One token of zeros: the shape of a prefix without the work of one.
    let values = info.kv.elements_per_token();
    let prefix = Arc::new(PrefixKv::new(info.kv, 1, vec![0.0; values])?);
    // Ranks over guidance rows have nothing to do without guidance.
    let guidance = if ranks.plan().cfg > 1 {
        WARM_UP_GUIDANCE
    } else {
        1.0
    };
    let spec = JobSpec {
        height: bucket.height,
        width: bucket.width,
        steps: 1,
        guidance,
        seed: 0,
        cond: Some(Arc::clone(&prefix)),
        uncond: Some(prefix),
    };
    let job = RankJob::new(ranks, &spec, &JobOptions::default(), NewsPlan::default())?;
    RankJob::step_together(ranks, &mut [job])?;
    let channels = ranks.first().config().vae.latent_channels;
    let few = vec![0.0; channels * WARM_UP_SIDE * WARM_UP_SIDE];
    let few = Latents::new(channels, WARM_UP_SIDE, WARM_UP_SIDE, few)?;
    picture::decoded(ranks, &few)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checkpoints_and_previews_come_at_their_steps_and_never_after_the_last() {
        let news = NewsPlan {
            checkpoint_every: 4,
            previews: 3,
            vae: false,
        };
        let checkpoints: Vec<usize> = (1..=8).filter(|s| news.checkpoint_after(*s, 8)).collect();
        assert_eq!(checkpoints, [4]);
        let previews = |steps: usize| -> Vec<(usize, usize)> {
            (1..=steps)
                .filter_map(|step| Some((step, news.preview_after(step, steps)?)))
                .collect()
        };
        assert_eq!(previews(8), [(2, 0), (4, 1), (6, 2)]);
        assert_eq!(previews(2), [(1, 2)]);
        assert_eq!(previews(1), []);
        assert_eq!(NewsPlan::default().preview_after(1, 4), None);
        assert!(!NewsPlan::default().checkpoint_after(4, 8));
    }
}
