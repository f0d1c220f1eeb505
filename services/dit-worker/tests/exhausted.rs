//! Memory that runs out in a step. A test binary of its own: memory is the process's.
#![allow(clippy::unwrap_used, clippy::print_stderr, missing_docs)]

use std::{path::Path, sync::Arc};

use base::{Code, Fault as _};
use dit_worker::{
    StepLimits,
    batch::{Class, Denoiser, Weight},
    steps::StepLoop,
};
use kernels::memory;
use model::{BalanceOptions, DenoiseJob, JobSpec, ModelError, Parts, PrefixKv};
use stage::{RankLoad, Ranks, StageError};

const CHECKPOINT: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/../../integration-tests/fixtures/golden/model"
);
const STEPS: usize = 4;
const LIMITS: StepLimits = StepLimits {
    max_rows: 64,
    max_tokens: 1 << 20,
};

/// One picture, its part on every rank.
type Job = Vec<DenoiseJob>;

struct Worker(Arc<Ranks>);

impl Denoiser for Worker {
    type Job = Job;
    type News = ();

    fn step(&self, jobs: &mut [&mut Job]) -> Result<(), StageError> {
        let mut by_rank: Vec<Vec<&mut DenoiseJob>> = Vec::new();
        by_rank.resize_with(self.0.models().len(), Vec::new);
        for job in jobs.iter_mut() {
            for (own, part) in by_rank.iter_mut().zip(job.iter_mut()) {
                own.push(part);
            }
        }
        let step = |model: &model::Model, ctx: &parallel::RankContext, mut own: Vec<_>| {
            model.denoise_step(ctx, &mut own)
        };
        self.0.run(by_rank, step).map(drop)
    }

    fn steps_done(&self, job: &Job) -> usize {
        job[0].step()
    }

    fn is_done(&self, job: &Job) -> bool {
        job[0].is_done()
    }

    fn check(&self, _: &Job) -> Result<(), StageError> {
        Ok(())
    }

    fn news(&self, _: &Job) -> Result<Option<()>, StageError> {
        Ok(None)
    }
}

/// A guided picture of a square.
fn job(ranks: &Ranks, side: usize, seed: u64) -> Job {
    let info = ranks.info();
    let values = (0..info.kv.elements_per_token() * 5).map(|i| (i as f32 * 0.3).sin() * 0.2);
    let prefix = Arc::new(PrefixKv::new(info.kv, 5, values.collect()).unwrap());
    let spec = JobSpec {
        height: side,
        width: side,
        steps: STEPS,
        guidance: 3.0,
        seed,
        cond: Some(Arc::clone(&prefix)),
        uncond: Some(prefix),
    };
    let part = |model: &Arc<model::Model>| DenoiseJob::new(model, spec.part_of(model.rank())?);
    let parts: Result<Job, ModelError> = ranks.models().iter().map(part).collect();
    parts.unwrap()
}

fn values(job: &Job) -> Vec<f32> {
    job[0].latents().unwrap().data().to_vec()
}

/// What a picture is alone, and the most bytes that were in use meanwhile.
fn alone(worker: &Worker, jobs: &mut [Job]) -> usize {
    memory::reset_peak();
    for _ in 0..STEPS {
        worker
            .step(&mut jobs.iter_mut().collect::<Vec<_>>())
            .unwrap();
    }
    memory::peak_bytes()
}

#[tokio::test]
async fn a_request_that_gets_no_memory_fails_alone_and_the_others_have_their_solo_bytes() {
    for plan in ["single", "ulysses=2", "cfg=2,tp=2"] {
        let load = RankLoad {
            parts: Parts {
                vae_decoder: false,
                ..Parts::DENOISE
            },
            alone: Parts::DENOISE,
            plan: plan.parse().unwrap(),
            balance: BalanceOptions::default(),
            residency: model::Residency::All,
            tiles: model::vae::Tiles::Whole,
        };
        let ranks = Arc::new(Ranks::open(Path::new(CHECKPOINT), load).unwrap());
        let worker = Worker(Arc::clone(&ranks));
        let sides = [64, 512, 64, 96];
        let make = || -> Vec<Job> {
            let each = sides.iter().zip(0..);
            each.map(|(side, seed)| job(&ranks, *side, seed)).collect()
        };
        let mut solo = make();
        let needs: Vec<usize> = solo
            .iter_mut()
            .map(|job| alone(&worker, std::slice::from_mut(job)))
            .collect();
        let small = needs[0].max(needs[2]).max(needs[3]);
        // Of a packed step, or of two jobs and what they keep, there may be enough or not.
        let limit = (small + needs[1]) / 2;
        eprintln!("{plan}: {needs:?}, limit {limit}");
        assert!(needs[1] > 4 * small, "{needs:?}");

        let jobs = make();
        memory::limit(Some(limit));
        let steps = StepLoop::start(worker, LIMITS, 8).unwrap();
        let weight = Weight { rows: 2, tokens: 1 };
        let tickets = jobs
            .into_iter()
            .map(|job| steps.submit(job, weight, Class::Standard));
        let tickets: Vec<_> = tickets.map(Result::unwrap).collect();
        for (index, ticket) in tickets.into_iter().enumerate() {
            let result = ticket.result.await.unwrap();
            if index == 1 {
                let error = result.unwrap_err();
                assert_eq!(error.code(), Code::ResourceExhausted, "{plan}: {error}");
                assert!(error.to_string().contains("memory"), "{plan}: {error}");
            } else {
                let ended = result.unwrap();
                assert_eq!(values(&ended.job), values(&solo[index]), "{plan}: {index}");
            }
        }
        // The worker lives on, and what failed is drawn where there is room.
        memory::limit(None);
        let again = steps.submit(job(&ranks, sides[1], 1), weight, Class::Standard);
        let ended = again.unwrap().result.await.unwrap().unwrap();
        assert_eq!(values(&ended.job), values(&solo[1]), "{plan}");
    }
}
