//! A picture on the GPUs of the worker.
use std::sync::Arc;

use model::{
    JobOptions, JobSpec, JobState, Latents, ModelError,
    gpu::{GpuJob, GpuJobOutline, GpuJobSpec, GpuModel, GpuPrefix},
};
use stage::{GpuRanks, StageError};

/// One rank's part of a picture.
#[derive(Debug)]
enum Part {
    /// Its prefixes are there; the rest is made by the thread that steps, when it first takes part.
    Waiting(Box<GpuJobSpec>),
    Running(Box<GpuJob>),
}

/// One picture in the making on all GPUs of the worker.
#[derive(Debug)]
pub(crate) struct DeviceJob {
    /// In the order of ranks; never empty.
    parts: Vec<Part>,
    outline: GpuJobOutline,
    steps: usize,
    /// After the last step, on the host: where the job goes on from, here or elsewhere.
    state: JobState,
    /// What the last step expects the end to be, where that is wanted.
    forecast: Option<Latents>,
    forecasts: bool,
}

/// What a step of the first rank says.
#[derive(Debug, Default)]
struct Stepped {
    latents: Vec<Latents>,
    /// Milliseconds on the device.
    device_ms: f64,
}

impl DeviceJob {
    /// Brings the prefixes in `spec` to the GPUs.
    pub(crate) fn new(
        gpus: &GpuRanks,
        config: &model::ModelConfig,
        spec: &JobSpec,
        options: JobOptions,
    ) -> Result<Self, StageError> {
        let given: Vec<_> = spec.cond.iter().chain(&spec.uncond).collect();
        let tokens: Vec<usize> = given.iter().map(|prefix| prefix.tokens()).collect();
        let outline = GpuJobOutline::new(config, spec, &options, &tokens)?;
        let used = given.iter().take(outline.rows);
        let mut placed = used.map(|prefix| gpus.upload(prefix));
        let missing = || ModelError::Internal("a picture without a prefix".to_owned());
        let cond = placed.next().ok_or_else(missing)??;
        let uncond = placed.next().transpose()?;
        let bare = JobSpec {
            cond: None,
            uncond: None,
            ..spec.clone()
        };
        let part = |rank: usize| {
            let of = |prefix: &Vec<Arc<GpuPrefix>>| Arc::clone(&prefix[rank]);
            Part::Waiting(Box::new(GpuJobSpec {
                spec: bare.clone(),
                options: options.clone(),
                cond: of(&cond),
                uncond: uncond.as_ref().map(of),
            }))
        };
        Ok(Self {
            parts: (0..gpus.count()).map(part).collect(),
            state: outline.state.clone(),
            steps: spec.steps,
            outline,
            forecast: None,
            forecasts: options.forecast,
        })
    }

    pub(crate) fn step(&self) -> usize {
        self.state.step
    }

    pub(crate) fn steps(&self) -> usize {
        self.steps
    }

    pub(crate) fn rows(&self) -> usize {
        self.outline.rows
    }

    pub(crate) fn tokens(&self) -> usize {
        self.outline.tokens
    }

    pub(crate) fn state(&self) -> &JobState {
        &self.state
    }

    pub(crate) fn forecast(&self) -> Option<&Latents> {
        self.forecast.as_ref()
    }
}

impl Part {
    /// The job on the device, made now if it is not there yet.
    fn running(&mut self, model: &mut GpuModel) -> Result<&mut GpuJob, ModelError> {
        if let Self::Waiting(spec) = self {
            *self = Self::Running(Box::new(GpuJob::new(model, (**spec).clone())?));
        }
        match self {
            Self::Running(job) => Ok(job),
            Self::Waiting(_) => Err(ModelError::Internal("a job that was not made".into())),
        }
    }
}

/// One step of all jobs, packed; milliseconds on the first rank's device. On an error no job has moved.
pub(crate) fn step(gpus: &GpuRanks, jobs: &mut [&mut DeviceJob]) -> Result<f64, StageError> {
    let first = std::iter::once(true).chain(std::iter::repeat(false));
    let inputs = by_rank(gpus, jobs).into_iter().zip(first).collect();
    let stepped = gpus.run(
        inputs,
        |model, (mut parts, first): (Vec<&mut Part>, bool)| {
            let mut own = Vec::with_capacity(parts.len());
            for part in &mut parts {
                own.push(part.running(model)?);
            }
            let begin = model.gpu().mark()?;
            model.denoise_step(&mut own)?;
            let end = model.gpu().mark()?;
            model.wait()?;
            if !first {
                return Ok(Stepped::default());
            }
            let latents = own.iter().map(|job| job.latents());
            Ok(Stepped {
                latents: latents.collect::<Result<_, _>>()?,
                device_ms: f64::from(end.milliseconds_since(&begin)?),
            })
        },
    );
    let stepped = match stepped {
        Ok(stepped) => stepped,
        Err(error) => {
            put_back(gpus, jobs);
            return Err(error);
        }
    };
    let Some(Stepped { latents, device_ms }) = stepped.into_iter().next() else {
        return Err(ModelError::Internal("a step of no rank".to_owned()).into());
    };
    for (job, latents) in jobs.iter_mut().zip(latents) {
        if job.forecasts {
            let (step, before) = (job.state.step, &job.state.latents);
            job.forecast = Some(job.outline.forecast(step, before, &latents)?);
        }
        job.state = JobState {
            step: job.state.step + 1,
            latents,
        };
    }
    Ok(device_ms)
}

/// After a step that failed, every job stands where it stood before it.
fn put_back(gpus: &GpuRanks, jobs: &mut [&mut DeviceJob]) {
    let states: Vec<JobState> = jobs.iter().map(|job| job.state.clone()).collect();
    let inputs = by_rank(gpus, jobs);
    let put = gpus.run(inputs, |_, parts: Vec<&mut Part>| {
        for (part, state) in parts.into_iter().zip(&states) {
            if let Part::Running(job) = part {
                job.resume(state.step, &state.latents)?;
            }
        }
        Ok(())
    });
    if let Err(error) = put {
        // The device is lost: whatever is tried on it next says so.
        tracing::error!(%error, "jobs could not be put back after a failed step");
    }
}

fn by_rank<'a>(gpus: &GpuRanks, jobs: &'a mut [&mut DeviceJob]) -> Vec<Vec<&'a mut Part>> {
    let mut by_rank: Vec<Vec<&mut Part>> = (0..gpus.count()).map(|_| Vec::new()).collect();
    for job in jobs.iter_mut() {
        for (own, part) in by_rank.iter_mut().zip(&mut job.parts) {
            own.push(part);
        }
    }
    by_rank
}
