//! Golden 07: a prompt to a picture, whole.

use model::pipeline::{Pipeline, RatioRule, Words};
use model::vae::Tiles;
use model::{Bucket, Model, RowKind, RowTokens};
use serde_json::Value;

use crate::back_prefill::task;
use crate::back_support::{
    both_rows, bucket, channels_first_tensor, ctx, latents, limit, models, numbers, words,
};
use crate::common::{Tensors, assert_close, count, in_set, json};

/// Most grey levels a byte may differ.
const GREY_LEVELS: u8 = 1;

/// Runs the text passes of a case, comparing ids; returns the assistant's text and the size.
fn text_passes(model: &Model, case: &Value, file: &Tensors) -> (Option<String>, Bucket) {
    let ctx = ctx();
    let pipeline = Pipeline::new(model, &ctx);
    let words: Words<'_> = words(model, case);
    let auto = case["image_size"] == "auto";
    let mut call = 0;
    let mut written = None;
    let bot_task = case["bot_task"].as_str().unwrap();
    if bot_task != "image" && bot_task != "img_ratio" {
        // The limit of the recorded pass is not in the JSON: it is as long as what was written.
        let max_new = recorded_new(file, call).len();
        let (seen, text) = pipeline
            .write(&words, task(bot_task), !auto, max_new)
            .unwrap();
        assert_call(file, call, &seen.prompt_ids, &seen.new_ids);
        written = Some(text);
        call += 1;
    }
    if !auto {
        return (written, bucket(model, case));
    }
    let (seen, size) = pipeline
        .choose_size(&words, written.as_deref(), RatioRule::Free)
        .unwrap();
    assert_call(file, call, &seen.prompt_ids, &seen.new_ids);
    assert_eq!(
        size.ratio_index,
        count(&case["ratio_index_used"]),
        "ratio of {case}"
    );
    (written, size)
}

fn recorded_new(file: &Tensors, call: usize) -> Vec<u32> {
    let prompt = file.ids(&format!("call{call}.prompt_ids")).1.len();
    file.ids(&format!("call{call}.output_ids"))
        .1
        .split_off(prompt)
}

fn assert_call(file: &Tensors, call: usize, prompt: &[u32], new: &[u32]) {
    assert_eq!(
        prompt,
        file.ids(&format!("call{call}.prompt_ids")).1,
        "call {call}: prompt"
    );
    assert_eq!(new, recorded_new(file, call), "call {call}: new ids");
}

#[test]
fn pictures_equal_the_reference() {
    if !in_set(&["07_e2e.json"]) {
        return;
    }
    for case in json("07_e2e.json").as_array().unwrap() {
        let id = case["id"].as_str().unwrap();
        let file = Tensors::load(&format!("07_e2e_{id}.safetensors"));
        for (name, model) in models() {
            let what = format!("07 {id} {name}");
            let (written, size) = text_passes(model, case, &file);
            let pixels = (count(&case["height"]), count(&case["width"]));
            assert_eq!((size.height, size.width), pixels, "{what}: size");
            let ctx = ctx();
            let pipeline = Pipeline::new(model, &ctx);
            let words = words(model, case);
            let layout = pipeline
                .image_layout(&words, written.as_deref(), &[], size)
                .unwrap();
            assert_eq!(both_rows(&layout), file.ids("gen_tokens").1, "{what}: ids");
            let init = latents(&file, "init_latents", 0);
            let mut job = pipeline.job(&layout, &[], &numbers(case, init)).unwrap();
            let done = pipeline.finish(&mut job).unwrap();
            let values = model.vae().decode_values(&done, Tiles::Whole).unwrap();
            let got = channels_first_tensor(&values);
            assert_close(
                &format!("{what} image"),
                &got,
                &file.f32("image").1,
                limit::RUN,
            );
            assert_bytes(
                &what,
                &model.decode(&ctx, &done).unwrap().data,
                &file.u8("rgb_u8").1,
            );
        }
    }
}

/// At most a grey level anywhere, and on few values only.
fn assert_bytes(what: &str, got: &[u8], want: &[u8]) {
    assert_eq!(got.len(), want.len(), "{what}: bytes");
    let worst = got
        .iter()
        .zip(want)
        .map(|(g, w)| g.abs_diff(*w))
        .max()
        .unwrap();
    let differing = got.iter().zip(want).filter(|(g, w)| g != w).count();
    println!(
        "{what}: {differing} of {} bytes differ, by at most {worst}",
        got.len()
    );
    assert!(worst <= GREY_LEVELS, "{what}: {worst} grey levels");
    assert!(
        differing * 1000 <= got.len(),
        "{what}: {differing} bytes differ"
    );
}

#[test]
fn an_unguided_job_needs_no_unconditional_row() {
    if !in_set(&["07_e2e.json"]) {
        return;
    }
    let (_, model) = models()[0];
    let cases = json("07_e2e.json");
    let case = &cases.as_array().unwrap()[0];
    let ctx = ctx();
    let pipeline = Pipeline::new(model, &ctx);
    let size = model.buckets().buckets()[0];
    let layout = pipeline
        .image_layout(&words(model, case), None, &[], size)
        .unwrap();
    let cond = RowTokens::new(&layout, RowKind::Cond);
    assert_eq!(model.prefill(&ctx, &[&cond]).unwrap().len(), 1);
    let numbers = model::pipeline::Numbers {
        steps: 1,
        guidance: 1.0,
        seed: 3,
        options: model::JobOptions::default(),
    };
    let mut job = pipeline.job(&layout, &[], &numbers).unwrap();
    assert_eq!(job.rows(), 1);
    assert!(pipeline.finish(&mut job).unwrap().is_finite());
}
