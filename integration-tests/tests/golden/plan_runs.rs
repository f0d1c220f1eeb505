//! Golden requests under every legal plan of 1, 2, 4 and 8 ranks: each equals one rank.
//!
//! One packed batch holds all of them: text to image with token counts that do and do not divide, an edit
//! behind its conditioning image, and two sizes more. Ranks are threads; each opens its own part of the
//! checkpoint and gets its own part of the prefixes.

use std::sync::Arc;
use std::time::Duration;

use model::cond::CondFeatures;
use model::pipeline::Pipeline;
use model::{
    DenoiseJob, JobOptions, JobSpec, LoadOptions, Model, Parts, PrefixKv, RankShard, RowKind,
    RowTokens, SequenceLayout,
};
use parallel::collective::threads;
use parallel::{Axis, Plan, RankContext, RingPrefix};
use serde_json::Value;

use crate::back_cond::recorded;
use crate::back_support::{bucket, ctx, grid, latents, models, numbers, single, words, words_of};
use crate::common::{Tensors, in_set, json, model_dir};
use crate::plan_table::{Mode, Outcome, Table};

/// Long enough never to be reached by ranks that are well.
const PATIENT: Duration = Duration::from_secs(120);
/// What the set must hold for these requests.
pub(crate) const FILES: [&str; 4] = [
    "03_denoise.json",
    "04_vit.json",
    "08_mixed.json",
    "09_cond.json",
];
/// Steps of every request.
const STEPS: usize = 2;
/// Largest difference relative to the largest value.
pub(crate) const LIMIT: f32 = 1e-5;
/// Tokens of a row that divide over any ranks tried here.
const DIVISOR: usize = 8;

/// A golden request with the whole prefixes of its rows.
struct Request {
    mode: Mode,
    spec: JobSpec,
    options: JobOptions,
}

/// The rows of one prefill, by what they are.
struct Prefill {
    layout: SequenceLayout,
    features: Vec<CondFeatures>,
    whole: Vec<PrefixKv>,
}

pub(crate) struct Cases {
    requests: Vec<Request>,
    prefills: Vec<Prefill>,
}

impl Prefill {
    fn new(model: &Model, layout: SequenceLayout, features: Vec<CondFeatures>) -> Self {
        let mut made = Self {
            layout,
            features,
            whole: Vec::new(),
        };
        made.whole = made.run(model, &ctx());
        made
    }

    fn run(&self, model: &Model, ctx: &RankContext) -> Vec<PrefixKv> {
        let row = |kind| RowTokens::with_images(&self.layout, kind, &self.features);
        let rows = [row(RowKind::Cond), row(RowKind::Uncond)];
        model
            .prefill(ctx, &rows.iter().collect::<Vec<_>>())
            .unwrap()
    }

    fn request(&self, model: &Model, mode: Mode, case: &Value, init: model::Latents) -> Request {
        let numbers = numbers(case, init);
        let cell = model.config().pixels_per_token();
        let (height, width) = grid(&self.layout);
        let prefix = |row: usize| Some(Arc::new(self.whole[row].clone()));
        Request {
            mode,
            spec: JobSpec {
                height: height * cell,
                width: width * cell,
                steps: STEPS,
                guidance: numbers.guidance,
                seed: 3,
                cond: prefix(0),
                uncond: prefix(1),
            },
            options: numbers.options,
        }
    }
}

impl Request {
    /// The same request at a size whose rows have a multiple of `DIVISOR` fresh tokens.
    fn that_divides(&self, model: &Model) -> Self {
        let cell = model.config().pixels_per_token();
        let job = DenoiseJob::with_options(model, self.spec.clone(), self.options.clone());
        let job = job.unwrap();
        let (h, w) = (self.spec.height / cell, self.spec.width / cell);
        let specials = job.tokens() / job.rows() - h * w;
        let divides = |(h, w): &(usize, usize)| (h * w + specials).is_multiple_of(DIVISOR);
        let near = (w..w + 2 * DIVISOR).flat_map(|w| [(h - 1, w), (h, w)]);
        let (h, w) = near.into_iter().find(divides).unwrap();
        Self {
            mode: Mode::Divides,
            spec: JobSpec {
                height: h * cell,
                width: w * cell,
                ..self.spec.clone()
            },
            options: JobOptions {
                init_latents: None,
                ..self.options.clone()
            },
        }
    }

    fn job(&self, model: &Model) -> DenoiseJob {
        let spec = self.spec.part_of(model.rank()).unwrap();
        DenoiseJob::with_options(model, spec, self.options.clone()).unwrap()
    }
}

impl Cases {
    /// A job of every request, at its first step.
    pub(crate) fn jobs(&self, model: &Model) -> Vec<DenoiseJob> {
        self.requests.iter().map(|r| r.job(model)).collect()
    }
}

pub(crate) fn cases(model: &Model) -> Cases {
    let ctx = ctx();
    let pipeline = Pipeline::new(model, &ctx);
    let (mut requests, mut prefills) = (Vec::new(), Vec::new());
    let runs = json("03_denoise.json");
    let single_prompt = |case: &&Value| case["prompt"].is_string();
    let (id, case) = runs
        .as_object()
        .unwrap()
        .iter()
        .find(|(_, c)| single_prompt(c))
        .unwrap();
    let file = Tensors::load(&format!("03_denoise_{id}.safetensors"));
    let layout = pipeline.image_layout(&words(model, case), None, &[], bucket(model, case));
    let prefill = Prefill::new(model, layout.unwrap(), vec![]);
    let t2i = prefill.request(model, Mode::T2i, case, latents(&file, "init_latents", 0));
    requests.push(t2i.that_divides(model));
    requests.push(t2i);
    prefills.push(prefill);

    let (case, file) = (json("09_cond.json"), Tensors::load("09_cond.safetensors"));
    let image = recorded(&case);
    let layout = pipeline.image_layout(
        &words(model, &case),
        None,
        &[image.grid],
        bucket(model, &case),
    );
    let features = vec![image.features(model, &single(&file, "cond_vae_noise"))];
    let prefill = Prefill::new(model, layout.unwrap(), features);
    let init = latents(&file, "init_latents", 0);
    requests.push(prefill.request(model, Mode::Edit, &case, init));
    prefills.push(prefill);

    let (mixed, file) = (json("08_mixed.json"), Tensors::load("08_mixed.safetensors"));
    for (i, case) in mixed.as_array().unwrap().iter().enumerate() {
        let words = words_of(model, case, case["prompt"].as_str().unwrap());
        let layout = pipeline
            .image_layout(&words, None, &[], bucket(model, case))
            .unwrap();
        let prefill = Prefill::new(model, layout, vec![]);
        let init = latents(&file, &format!("req{i}.init_latents"), 0);
        requests.push(prefill.request(model, Mode::Mixed, case, init));
    }
    Cases { requests, prefills }
}

/// Latents of every request after each step; `None` where a pipeline stage has none.
pub(crate) type Steps = Vec<Vec<Option<Vec<f32>>>>;

pub(crate) fn denoise(cases: &Cases, model: &Model, ctx: &RankContext) -> Steps {
    let mut jobs = cases.jobs(model);
    let mut steps = Vec::with_capacity(STEPS);
    for _ in 0..STEPS {
        let mut packed: Vec<&mut DenoiseJob> = jobs.iter_mut().collect();
        model.denoise_step(ctx, &mut packed).unwrap();
        let seen = jobs.iter().map(|job| job.latents().ok());
        steps.push(seen.map(|l| l.map(|l| l.data().to_vec())).collect());
    }
    steps
}

/// Largest difference relative to the largest value; infinite when something is not a number.
fn difference(got: &[f32], want: &[f32]) -> f32 {
    assert_eq!(got.len(), want.len());
    let scale = want.iter().fold(0_f32, |m, v| m.max(v.abs()));
    let worst = got.iter().zip(want).fold(0_f32, |m, (g, w)| {
        let d = (g - w).abs();
        if d.is_nan() { f32::INFINITY } else { m.max(d) }
    });
    worst / scale.max(f32::MIN_POSITIVE)
}

/// One rank's own part of the golden model.
pub(crate) fn open(plan: Plan, rank: usize) -> Model {
    let options = LoadOptions {
        parts: Parts {
            vae_decoder: false,
            ..Parts::DENOISE
        },
        plan,
        rank,
        ..LoadOptions::default()
    };
    Model::open(&model_dir(), options).unwrap()
}

/// Latents of every request after each step, and the largest difference of the prefixes.
pub(crate) fn run_rank(cases: &Cases, model: &Model, ctx: &RankContext) -> (Steps, f32) {
    // A prefill under a ring leaves each rank its part of the tokens, whatever denoising asks for.
    let dealt = Plan {
        ring_prefix: RingPrefix::Sharded,
        ..*ctx.plan()
    };
    let steps = denoise(cases, model, ctx);
    let shard = RankShard::new(model.config(), &dealt, ctx.rank()).unwrap();
    let mut prefill = 0_f32;
    for case in &cases.prefills {
        for (got, whole) in case.run(model, ctx).iter().zip(&case.whole) {
            let want = whole.part_of(&shard).unwrap();
            assert_eq!(got.held(), want.held());
            prefill = prefill.max(difference(got.data(), want.data()));
        }
    }
    (steps, prefill)
}

/// Largest difference of latents that both have.
pub(crate) fn worst(got: &Steps, want: &Steps) -> f32 {
    let pairs = got.iter().flatten().zip(want.iter().flatten());
    let both = pairs.filter_map(|(got, want)| Some(difference(got.as_ref()?, want.as_ref()?)));
    both.fold(0.0, f32::max)
}

fn outcome(plan: Plan, cases: &Cases, want: &Steps) -> Outcome {
    let mut outcome = Outcome::new(plan);
    let ranks = threads::on_ranks(&plan, PATIENT, |ctx| {
        run_rank(cases, &open(plan, ctx.rank()), &ctx)
    });
    for (rank, (steps, prefill)) in ranks.unwrap().into_iter().enumerate() {
        let stage = plan
            .mesh()
            .unwrap()
            .index_in(rank, Axis::Pp.into())
            .unwrap();
        let has_latents = stage == 0 || stage + 1 == plan.pp;
        for (got, want) in steps.iter().flatten().zip(want.iter().flatten()) {
            assert_eq!(got.is_some(), has_latents, "{plan:?}, rank {rank}");
            assert!(want.is_some());
        }
        for (got, want) in steps.iter().zip(want) {
            for ((request, got), want) in cases.requests.iter().zip(got).zip(want) {
                if let (Some(got), Some(want)) = (got, want) {
                    outcome.record(request.mode, difference(got, want));
                }
            }
        }
        outcome.record(Mode::Prefill, prefill);
    }
    outcome
}

#[test]
fn every_legal_plan_equals_one_rank() {
    if !in_set(&FILES) {
        return;
    }
    let (_, model) = models()[0];
    let cases = cases(model);
    let want = denoise(&cases, model, &ctx());
    let shape = model.config().shape();
    let mut table = Table::default();
    for ranks in [1, 2, 4, 8] {
        for plan in Plan::legal(&shape, ranks).unwrap() {
            let seen = outcome(plan, &cases, &want);
            for (mode, worst) in seen.modes() {
                // Without sums over ranks only data moves, so not a bit may change.
                let exact = plan.tp == 1 && plan.ring == 1;
                let limit = if exact { 0.0 } else { LIMIT };
                assert!(worst <= limit, "{plan:?}, {mode:?}: {worst:e}");
            }
            table.add(&seen);
        }
    }
    println!("{}", table.markdown());
    table.assert_readme();
}
