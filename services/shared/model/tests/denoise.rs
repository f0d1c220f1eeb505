//! Denoise jobs on a small random model: packing, isolation, caching and refusals.
#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use std::ops::Range;
use std::sync::{Arc, OnceLock};

use common::{CELL, Case, config, ctx, ids};
use kernels::Tensor;
use model::backbone::NoProbe;
use model::diffusion::Velocities;
use model::input::RowInput;
use model::positions::ImageSpan;
use model::{
    DenoiseJob, ErrorKind, JobOptions, JobSpec, KvCache, Latents, LoadOptions, Model, ModelError,
    Parts, PrefixKv,
};
use proptest::prelude::*;

fn model(distilled: bool) -> &'static Model {
    static PLAIN: OnceLock<Model> = OnceLock::new();
    static DISTILLED: OnceLock<Model> = OnceLock::new();
    let cell = if distilled { &DISTILLED } else { &PLAIN };
    cell.get_or_init(|| {
        let parts = Parts {
            vae_decoder: false,
            ..Parts::DENOISE
        };
        let options = LoadOptions {
            parts,
            ..LoadOptions::default()
        };
        Model::random(config(distilled), options, 11).unwrap()
    })
}

fn job(case: &Case, model: &Model) -> DenoiseJob {
    DenoiseJob::new(model, case.spec(model)).unwrap()
}

fn case() -> impl Strategy<Value = Case> {
    (
        (1_usize..6, 1_usize..6),
        1_usize..4,
        0_u64..1000,
        prop_oneof![Just(0.0), Just(1.0), 1.5..9.0],
        (1_usize..20, 1_usize..20),
    )
        .prop_map(|(grid, steps, seed, guidance, tokens)| Case {
            grid,
            steps,
            seed,
            guidance,
            tokens,
        })
}

/// Runs jobs to their ends; job `i` joins the batch at step `joins[i]` of the whole.
fn run(model: &Model, mut jobs: Vec<DenoiseJob>, joins: &[usize]) -> Vec<Latents> {
    for step in 0.. {
        let mut live: Vec<&mut DenoiseJob> = jobs
            .iter_mut()
            .zip(joins)
            .filter(|(job, join)| **join <= step && !job.is_done())
            .map(|(job, _)| job)
            .collect();
        model.denoise_step(&ctx(), &mut live).unwrap();
        if jobs.iter().all(DenoiseJob::is_done) {
            break;
        }
    }
    jobs.iter().map(|job| job.latents().unwrap()).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn a_picture_in_any_batch_equals_the_picture_alone(
        cases in prop::collection::vec(case(), 1..5),
        joins in prop::collection::vec(0_usize..3, 5),
        distilled: bool,
    ) {
        let model = model(distilled);
        let packed = run(model, cases.iter().map(|c| job(c, model)).collect(), &joins);
        for (case, packed) in cases.iter().zip(packed) {
            let alone = run(model, vec![job(case, model)], &[0]);
            prop_assert!(alone[0].is_finite());
            prop_assert_eq!(&alone[0], &packed);
        }
    }

    #[test]
    fn the_number_of_threads_changes_nothing(case in case(), threads in 2_usize..4) {
        let model = model(false);
        let with = |threads: usize| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            pool.install(|| run(model, vec![job(&case, model)], &[0]))
        };
        prop_assert_eq!(with(1), with(threads));
    }

    #[test]
    fn numbers_that_are_none_stay_in_their_own_picture(bad in case(), good in case()) {
        let model = model(false);
        let (h, w) = bad.grid;
        let poison = Latents::new(4, h, w, vec![f32::NAN; 4 * h * w]).unwrap();
        let options = JobOptions { init_latents: Some(poison), ..JobOptions::default() };
        let poisoned = DenoiseJob::with_options(model, bad.spec(model), options).unwrap();
        let together = run(model, vec![poisoned, job(&good, model)], &[0, 0]);
        prop_assert!(!together[0].is_finite());
        prop_assert_eq!(&together[1], &run(model, vec![job(&good, model)], &[0])[0]);
    }

    #[test]
    fn a_step_behind_a_prefix_equals_the_whole_sequence(case in case(), distilled: bool) {
        let model = model(distilled);
        let case = Case { guidance: if distilled { 2.5 } else { 1.0 }, steps: 3, ..case };
        let mut job = job(&case, model);
        let mut start = job.latents().unwrap();
        for step in 0..case.steps {
            let mut cached = Vec::new();
            let mut observe = |_: usize, seen: Velocities<'_>| cached = seen.guided.to_vec();
            model
                .denoise_step_observed(&ctx(), &mut [&mut job], &mut NoProbe, &mut observe)
                .unwrap();
            let whole = whole_sequence(model, &case, &start, step);
            for (a, b) in cached.iter().zip(&whole) {
                prop_assert!((a - b).abs() <= 1e-4, "step {step}: {a} {b}");
            }
            start = job.latents().unwrap();
        }
    }
}

/// The velocity of one row computed without any cache, from the definition of the sequence: prefix,
/// `<timestep>`, `<guidance>`, `<timestep_r>`, image, and one token after it.
fn whole_sequence(model: &Model, case: &Case, latents: &Latents, step: usize) -> Vec<f32> {
    let (stem, head) = (model.image_stem().unwrap(), model.image_head().unwrap());
    let schedule = model::Schedule::new(case.steps, 3.0).unwrap();
    let time = schedule.timesteps[step];
    let mut row = ids(case.tokens.0, case.seed);
    let mut vectors = vec![(row.len(), stem.timestep_token.forward(&[time]).unwrap())];
    if let Some(embedder) = &head.guidance_token {
        // 2.5 in thousandths, rounded to BF16.
        vectors.push((row.len() + 1, embedder.forward(&[2496.0]).unwrap()));
    }
    if let Some(embedder) = &head.next_timestep_token {
        let next = schedule.next_timestep(step);
        vectors.push((
            row.len() + vectors.len(),
            embedder.forward(&[next]).unwrap(),
        ));
    }
    let first = row.len() + vectors.len();
    let (h, w) = case.grid;
    let span: Range<usize> = first..first + h * w;
    let patch = stem
        .patch_embed
        .modulation(&stem.patch_time.forward(&[time]).unwrap())
        .unwrap();
    let image = stem
        .patch_embed
        .forward(&channels_last(latents), &patch)
        .unwrap();
    vectors.push((first, image));
    row.resize(span.end + 1, 7);
    let images = [ImageSpan {
        tokens: span.clone(),
        grid_h: h,
        grid_w: w,
    }];
    let full = [span.clone()];
    let input = RowInput {
        start: 0,
        ids: &row,
        images: &images,
        full: &full,
        vectors: &vectors,
    };
    let mut cache = KvCache::new(model.info().kv, row.len()).unwrap();
    let hidden = model
        .run_rows(&ctx(), &[input], &mut [&mut cache], &mut NoProbe)
        .unwrap();
    let last = head
        .final_layer
        .modulation(&head.final_time.forward(&[time]).unwrap())
        .unwrap();
    let tokens = hidden.narrow0(span.start, span.len()).unwrap();
    head.final_layer
        .forward(&tokens, case.grid, &last)
        .unwrap()
        .to_f32_vec()
}

fn channels_last(latents: &Latents) -> Tensor {
    let (c, h, w) = (latents.channels(), latents.height(), latents.width());
    let data = latents.data();
    let values = (0..h * w)
        .flat_map(|p| (0..c).map(move |i| data[i * h * w + p]))
        .collect();
    Tensor::from_f32(&[1, h, w, c], values).unwrap()
}

fn plain() -> Case {
    Case {
        grid: (2, 3),
        steps: 2,
        seed: 1,
        guidance: 3.0,
        tokens: (5, 5),
    }
}

fn field(result: Result<DenoiseJob, ModelError>) -> &'static str {
    match result.unwrap_err().kind() {
        ErrorKind::InvalidArgument { field } => field,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_bad_number_is_refused_by_name() {
    let model = model(false);
    let good = plain().spec(model);
    let try_spec = |edit: &dyn Fn(&mut JobSpec)| {
        let mut spec = good.clone();
        edit(&mut spec);
        field(DenoiseJob::new(model, spec))
    };
    assert_eq!(try_spec(&|s| s.height = 0), "height");
    assert_eq!(try_spec(&|s| s.width = 17), "width");
    assert_eq!(try_spec(&|s| s.width = usize::MAX - CELL + 1), "size");
    assert_eq!(try_spec(&|s| s.height = 1 << 20), "size");
    assert_eq!(try_spec(&|s| s.steps = 0), "steps");
    assert_eq!(try_spec(&|s| s.steps = usize::MAX), "steps");
    for guidance in [f64::NAN, -3.0, 1e9, f64::INFINITY] {
        assert_eq!(try_spec(&|s| s.guidance = guidance), "guidance");
    }
    assert_eq!(try_spec(&|s| s.uncond = None), "guidance");
    for (options, name) in [
        (
            JobOptions {
                guidance_rescale: 1.5,
                ..JobOptions::default()
            },
            "guidance_rescale",
        ),
        (
            JobOptions {
                init_latents: Some(Latents::new(4, 1, 1, vec![0.0; 4]).unwrap()),
                ..JobOptions::default()
            },
            "init_latents",
        ),
    ] {
        assert_eq!(
            field(DenoiseJob::with_options(model, good.clone(), options)),
            name
        );
    }
}

#[test]
fn a_foreign_prefix_is_refused() {
    let model = model(false);
    let mut spec = plain().spec(model);
    let mut geometry = *spec.cond.as_ref().unwrap().geometry();
    geometry.layers = 1;
    let data = vec![0.0; geometry.elements_per_token() * 5];
    spec.cond = Some(Arc::new(PrefixKv::new(geometry, 5, data).unwrap()));
    assert!(matches!(
        DenoiseJob::new(model, spec).unwrap_err().kind(),
        ErrorKind::Internal
    ));
}

#[test]
fn a_finished_job_fails_the_call_and_changes_no_other_job() {
    let model = model(false);
    let one_step = Case {
        steps: 1,
        ..plain()
    };
    let mut done = job(&one_step, model);
    model.denoise_step(&ctx(), &mut [&mut done]).unwrap();
    assert!(done.is_done());
    let mut other = job(&plain(), model);
    let before = other.latents().unwrap();
    assert!(
        model
            .denoise_step(&ctx(), &mut [&mut other, &mut done])
            .is_err()
    );
    assert_eq!((other.step(), other.latents().unwrap()), (0, before));
    model.denoise_step(&ctx(), &mut []).unwrap();
}

#[test]
fn options_of_guidance_change_the_picture_and_their_defaults_do_not() {
    let model = model(false);
    let with = |guidance_rescale: f64, preserve_norm: bool| {
        let options = JobOptions {
            guidance_rescale,
            preserve_norm,
            ..JobOptions::default()
        };
        let job = DenoiseJob::with_options(model, plain().spec(model), options).unwrap();
        run(model, vec![job], &[0]).remove(0)
    };
    let plain = run(model, vec![job(&plain(), model)], &[0]).remove(0);
    assert_eq!(with(0.0, false), plain);
    assert_ne!(with(0.7, false), plain);
    assert_ne!(with(0.0, true), plain);
    assert_ne!(with(0.7, true), with(0.7, false));
}

#[test]
fn a_part_that_was_not_loaded_answers_with_its_name() {
    let model = model(false);
    let error = model.vit().unwrap_err().to_string();
    assert!(error.contains("vit"), "{error}");
    let latents = Latents::new(4, 2, 2, vec![0.0; 16]).unwrap();
    let error = model.decode(&ctx(), &latents).unwrap_err().to_string();
    assert!(error.contains("vae_decoder"), "{error}");
    let hidden = Tensor::zeros(&[1, 64]).unwrap();
    let error = model
        .backbone()
        .unwrap()
        .final_norm(&hidden)
        .unwrap_err()
        .to_string();
    assert!(error.contains("text"), "{error}");
    assert!(model.tokenizer().is_err());
}
