//! The model behind the step loop.
use std::sync::Arc;

use base::clock;
use model::{DenoiseJob, Latents, Model, PrefixKv};
use parallel::RankContext;
use stage::StageError;
use telemetry::{Metrics, names};

use crate::batch::{Denoiser, Weight};

/// Side of the latents that the decoder warms up with.
const WARM_UP_SIDE: usize = 2;

/// Steps [`DenoiseJob`]s.
#[derive(Debug)]
pub(crate) struct ModelDenoiser {
    pub(crate) model: Arc<Model>,
    pub(crate) metrics: Metrics,
}

impl Denoiser for ModelDenoiser {
    type Job = DenoiseJob;

    fn step(&self, jobs: &mut [&mut DenoiseJob]) -> Result<(), StageError> {
        let start = clock::now();
        let rows: usize = jobs.iter().map(|job| job.rows()).sum();
        let tokens: usize = jobs.iter().map(|job| job.tokens()).sum();
        self.model.denoise_step(&RankContext::single(), jobs)?;
        let elapsed = clock::now().saturating_duration_since(start);
        self.metrics
            .observe(&names::STAGE_STEP, &["dit-worker", "denoise"], elapsed);
        self.metrics
            .record(&names::STAGE_ROWS, &["dit-worker"], rows as f64);
        self.metrics
            .add(&names::STAGE_TOKENS, &["dit-worker"], tokens as u64);
        Ok(())
    }

    fn steps_done(&self, job: &DenoiseJob) -> usize {
        job.step()
    }

    fn is_done(&self, job: &DenoiseJob) -> bool {
        job.is_done()
    }

    fn check(&self, job: &DenoiseJob) -> Result<(), StageError> {
        if job.latents()?.is_finite() {
            Ok(())
        } else {
            Err(StageError::NotFinite { what: "latents" })
        }
    }
}

/// What a job weighs in a step.
pub(crate) fn weight(job: &DenoiseJob) -> Weight {
    Weight {
        rows: job.rows(),
        tokens: job.tokens(),
    }
}

/// One step of the smallest picture on a one-token prefix and the decode of a few latents, so that the
/// first request meets warm weights and threads.
pub(crate) fn warm_up(model: &Model) -> Result<(), StageError> {
    let info = model.info();
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
    let spec = model::JobSpec {
        height: bucket.height,
        width: bucket.width,
        steps: 1,
        guidance: 1.0,
        seed: 0,
        cond: Some(prefix),
        uncond: None,
    };
    let context = RankContext::single();
    let mut job = DenoiseJob::new(model, spec)?;
    model.denoise_step(&context, &mut [&mut job])?;
    let channels = job.latents()?.channels();
    let few = vec![0.0; channels * WARM_UP_SIDE * WARM_UP_SIDE];
    model.decode(
        &context,
        &Latents::new(channels, WARM_UP_SIDE, WARM_UP_SIDE, few)?,
    )?;
    Ok(())
}
