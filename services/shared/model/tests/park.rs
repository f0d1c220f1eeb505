//! Jobs that are interrupted, jobs that save steps, and what a job expects of its end.
#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use common::{Case, config, ctx};
use model::{DenoiseJob, ErrorKind, JobOptions, JobState, LoadOptions, Model, Parts};
use proptest::prelude::*;

fn model() -> Model {
    let parts = Parts {
        vae_decoder: false,
        ..Parts::DENOISE
    };
    let options = LoadOptions {
        parts,
        ..LoadOptions::default()
    };
    Model::random(config(false), options, 11).unwrap()
}

fn case(seed: u64, steps: usize) -> Case {
    Case {
        grid: (2 + seed as usize % 2, 3),
        steps,
        seed,
        guidance: [1.0, 4.0][seed as usize % 2],
        tokens: (5, 3),
    }
}

fn with(model: &Model, case: &Case, options: JobOptions) -> DenoiseJob {
    DenoiseJob::with_options(model, case.spec(model), options).unwrap()
}

fn cached(text: &str) -> JobOptions {
    JobOptions {
        cache: with_coefficients(text),
        ..JobOptions::default()
    }
}

/// A tea cache whose rescaled distance is the change itself.
fn with_coefficients(text: &str) -> model::StepCache {
    match text.parse().unwrap() {
        model::StepCache::Tea(mut tea) => {
            tea.coefficients = vec![0.0, 1.0];
            model::StepCache::Tea(tea)
        }
        other => other,
    }
}

fn run(model: &Model, jobs: &mut [DenoiseJob]) {
    loop {
        let mut live: Vec<&mut DenoiseJob> = jobs.iter_mut().filter(|j| !j.is_done()).collect();
        if live.is_empty() {
            return;
        }
        model.denoise_step(&ctx(), &mut live).unwrap();
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    #[test]
    fn a_job_parked_at_any_step_and_resumed_is_the_job_that_was_not(
        seed in 0_u64..1000,
        steps in 1_usize..6,
        at in 0_usize..7,
    ) {
        let (model, case) = (model(), case(seed, steps));
        let mut whole = [with(&model, &case, JobOptions::default())];
        run(&model, &mut whole);
        let mut first = with(&model, &case, JobOptions::default());
        for _ in 0..at.min(steps) {
            model.denoise_step(&ctx(), &mut [&mut first]).unwrap();
        }
        let state = first.state().unwrap();
        prop_assert_eq!(state.step, at.min(steps));
        let options = JobOptions { resume: Some(state), ..JobOptions::default() };
        let mut second = [with(&model, &case, options)];
        run(&model, &mut second);
        prop_assert_eq!(second[0].state().unwrap(), whole[0].state().unwrap());
    }
}

#[test]
fn a_state_of_another_picture_is_refused_by_name() {
    let (model, case) = (model(), case(1, 3));
    let other = with(&model, &self::case(2, 3), JobOptions::default());
    let own = with(&model, &case, JobOptions::default()).state().unwrap();
    let late = JobState { step: 4, ..own };
    for (state, name) in [(other.state().unwrap(), "latents"), (late, "resume")] {
        let options = JobOptions {
            resume: Some(state),
            ..JobOptions::default()
        };
        let refused = DenoiseJob::with_options(&model, case.spec(&model), options).unwrap_err();
        let kind = refused.kind();
        let named = matches!(&kind, ErrorKind::InvalidArgument { field } if field.contains(name));
        assert!(named, "{refused}");
    }
}

#[test]
fn a_job_that_saves_steps_is_the_same_in_any_batch_and_close_to_one_that_does_not() {
    let model = model();
    let texts = ["off", "taylor:interval=2,first=1", "tea:threshold=1.5"];
    let jobs = || -> Vec<DenoiseJob> {
        let each = texts.iter().zip(1..);
        each.map(|(text, seed)| with(&model, &case(seed, 8), cached(text)))
            .collect()
    };
    let mut packed = jobs();
    run(&model, &mut packed);
    for ((alone, packed), text) in jobs().into_iter().zip(&packed).zip(texts) {
        let mut alone = [alone];
        run(&model, &mut alone);
        let (alone, packed_state) = (&alone[0], packed.state().unwrap());
        assert_eq!(alone.state().unwrap(), packed_state, "{text}");
        assert_eq!(packed.saved_steps() > 0, text != "off", "{text}");
        let mut plain = [with(
            &model,
            &case(seed_of(text, &texts), 8),
            JobOptions::default(),
        )];
        run(&model, &mut plain);
        let (a, b) = (packed_state.latents, plain[0].latents().unwrap());
        let dot: f32 = a.data().iter().zip(b.data()).map(|(x, y)| x * y).sum();
        let norm = |v: &[f32]| v.iter().map(|x| x * x).sum::<f32>().sqrt();
        let cosine = dot / norm(a.data()) / norm(b.data());
        assert!(cosine > 0.9, "{text}: {cosine}");
    }
}

fn seed_of(text: &str, texts: &[&str]) -> u64 {
    texts.iter().position(|t| *t == text).unwrap() as u64 + 1
}

#[test]
fn a_cache_that_never_skips_changes_no_bit() {
    let model = model();
    let case = case(5, 4);
    let run_with = |text: &str| {
        let mut job = [with(&model, &case, cached(text))];
        run(&model, &mut job);
        assert_eq!(job[0].saved_steps(), 0, "{text}");
        job[0].state().unwrap()
    };
    let plain = run_with("off");
    assert_eq!(run_with("taylor:interval=1"), plain);
    assert_eq!(run_with("tea:threshold=0"), plain);
}

#[test]
fn a_job_that_saves_steps_goes_on_after_it_was_resumed() {
    let model = model();
    for text in ["taylor:interval=3,first=1", "tea:threshold=1.5"] {
        let case = case(3, 8);
        let mut first = with(&model, &case, cached(text));
        for _ in 0..4 {
            model.denoise_step(&ctx(), &mut [&mut first]).unwrap();
        }
        let options = JobOptions {
            resume: Some(first.state().unwrap()),
            ..cached(text)
        };
        let mut second = [with(&model, &case, options)];
        assert!(
            second[0].runs_decoder(),
            "{text}: it has nothing to go on from"
        );
        run(&model, &mut second);
        assert!(second[0].latents().unwrap().is_finite(), "{text}");
    }
}

#[test]
fn what_the_last_step_expects_is_the_end_itself() {
    let model = model();
    let options = JobOptions {
        forecast: true,
        ..JobOptions::default()
    };
    let mut job = [with(&model, &case(4, 3), options)];
    assert!(job[0].forecast().unwrap().is_none());
    run(&model, &mut job);
    let forecast = job[0].forecast().unwrap().unwrap();
    assert_eq!(forecast, job[0].latents().unwrap());
}
