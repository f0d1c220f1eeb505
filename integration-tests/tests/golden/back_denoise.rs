//! Golden 03 and 08: whole denoise runs, alone and packed.

use model::pipeline::Pipeline;
use model::{DenoiseJob, Model, SequenceLayout};
use serde_json::Value;

use crate::back_support::{
    assert_run, both_rows, bucket, ctx, job, latents, models, trace, words_of,
};
use crate::common::{Tensors, in_set, json};

fn layout(model: &Model, case: &Value, prompt: &str) -> SequenceLayout {
    let ctx = ctx();
    let words = words_of(model, case, prompt);
    Pipeline::new(model, &ctx)
        .image_layout(&words, None, &[], bucket(model, case))
        .unwrap()
}

fn prompts(case: &Value) -> Vec<&str> {
    match &case["prompt"] {
        Value::String(prompt) => vec![prompt],
        list => list
            .as_array()
            .unwrap()
            .iter()
            .map(|p| p.as_str().unwrap())
            .collect(),
    }
}

#[test]
fn every_step_of_every_run_equals_the_reference() {
    if !in_set(&["03_denoise.json"]) {
        return;
    }
    for (id, case) in json("03_denoise.json").as_object().unwrap() {
        let file = Tensors::load(&format!("03_denoise_{id}.safetensors"));
        for (name, model) in models() {
            let layouts: Vec<SequenceLayout> = prompts(case)
                .into_iter()
                .map(|prompt| layout(model, case, prompt))
                .collect();
            let make = |i: usize| job(model, &layouts[i], case, latents(&file, "init_latents", i));
            let mut jobs: Vec<DenoiseJob> = (0..layouts.len()).map(make).collect();
            let runs = trace(model, &mut jobs);
            for (item, run) in runs.iter().enumerate() {
                let what = format!("03 {id}[{item}] {name}");
                assert_run(&what, &file, "", item, run);
                let alone = trace(model, &mut [make(item)]);
                assert!(alone[0] == *run, "{what}: packed and alone differ");
            }
        }
    }
}

#[test]
fn requests_of_different_sizes_in_one_batch_equal_the_reference_and_themselves_alone() {
    if !in_set(&["08_mixed.json", "08_mixed.safetensors"]) {
        return;
    }
    let file = Tensors::load("08_mixed.safetensors");
    let cases = json("08_mixed.json");
    let cases = cases.as_array().unwrap();
    assert!(cases.len() >= 2, "golden 08 holds fewer than two requests");
    for (name, model) in models() {
        let make = |i: usize| {
            let layout = layout(model, &cases[i], prompts(&cases[i])[0]);
            assert_eq!(
                both_rows(&layout),
                file.ids(&format!("req{i}.tokens")).1,
                "08 req{i}: ids"
            );
            job(
                model,
                &layout,
                &cases[i],
                latents(&file, &format!("req{i}.init_latents"), 0),
            )
        };
        let mut jobs: Vec<DenoiseJob> = (0..cases.len()).map(make).collect();
        let runs = trace(model, &mut jobs);
        for (i, run) in runs.iter().enumerate() {
            let what = format!("08 req{i} {name}");
            assert_run(&what, &file, &format!("req{i}."), 0, run);
            let alone = trace(model, &mut [make(i)]);
            assert!(alone[0] == *run, "{what}: packed and alone differ");
        }
    }
}
