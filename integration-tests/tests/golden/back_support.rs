//! What the golden tests of the model's passes share: opened models, laid out cases, compared velocities.

use std::path::Path;
use std::sync::OnceLock;

use kernels::Tensor;
use model::diffusion::Velocities;
use model::layout::ImageGrid;
use model::pipeline::{Numbers, Pipeline, Words};
use model::{
    Bucket, DenoiseJob, JobOptions, Latents, LoadOptions, Model, RowKind, SequenceLayout, Template,
};
use parallel::RankContext;
use serde_json::Value;

use crate::common::{Tensors, assert_close, count, max_abs, model_dir, widened_model_dir};
use crate::front_buckets::size_request;

/// Limits of the golden set's README, float32.
pub(crate) mod limit {
    /// Hidden states, keys, values, logits, single predictions, VAE and ViT.
    pub(crate) const STATE: f32 = 1e-4;
    /// Predictions and latents of whole runs; guidance multiplies the error.
    pub(crate) const RUN: f32 = 1e-3;
}

/// The golden model, its weights as stored and widened to F32.
pub(crate) fn models() -> [(&'static str, &'static Model); 2] {
    static STORED: OnceLock<Model> = OnceLock::new();
    static WIDENED: OnceLock<Model> = OnceLock::new();
    let open = |dir: &Path| Model::open(dir, LoadOptions::default()).unwrap();
    [
        ("stored", STORED.get_or_init(|| open(&model_dir()))),
        ("widened", WIDENED.get_or_init(|| open(widened_model_dir()))),
    ]
}

pub(crate) fn ctx() -> RankContext {
    RankContext::single()
}

/// A text of a case, `None` where it is absent or null.
pub(crate) fn text<'a>(case: &'a Value, field: &str) -> Option<&'a str> {
    case.get(field).and_then(Value::as_str)
}

/// The words of a case.
pub(crate) fn words<'a>(model: &Model, case: &'a Value) -> Words<'a> {
    words_of(model, case, text(case, "prompt").unwrap())
}

/// The words of a case that has several prompts.
pub(crate) fn words_of<'a>(model: &Model, case: &'a Value, prompt: &'a str) -> Words<'a> {
    Words {
        prompt,
        system_prompt: text(case, "system_prompt"),
        template: template(model, case),
        drop_think: model.config().generation.drop_think,
    }
}

pub(crate) fn template(model: &Model, case: &Value) -> Template {
    match text(case, "sequence_template") {
        Some(name) => name.parse().unwrap(),
        None => model.config().generation.template,
    }
}

/// The size of a case, checked against the grid it records.
pub(crate) fn bucket(model: &Model, case: &Value) -> Bucket {
    let wish = size_request(&case["image_size"]);
    let bucket = wish.snap(model.buckets()).unwrap().unwrap();
    if case.get("token_h").is_some() {
        let grid = bucket.grid(model.config().pixels_per_token());
        assert_eq!(
            grid,
            (count(&case["token_h"]), count(&case["token_w"])),
            "grid of {case}"
        );
    }
    bucket
}

/// Ids of both rows, one after the other.
pub(crate) fn both_rows(layout: &SequenceLayout) -> Vec<u32> {
    [layout.tokens(RowKind::Cond), layout.tokens(RowKind::Uncond)].concat()
}

/// The steps, guidance and start of a case.
pub(crate) fn numbers(case: &Value, init: Latents) -> Numbers {
    Numbers {
        steps: count(&case["steps"]),
        guidance: case["guidance_scale"].as_f64().unwrap(),
        seed: 0,
        options: JobOptions {
            flow_shift: case.get("flow_shift").and_then(Value::as_f64),
            init_latents: Some(init),
            ..JobOptions::default()
        },
    }
}

/// Item `index` of a `[B, C, h, w]` tensor.
pub(crate) fn latents(file: &Tensors, key: &str, index: usize) -> Latents {
    let (shape, values) = file.f32(key);
    let [_, c, h, w] = shape[..] else {
        panic!("{key}: {shape:?}")
    };
    let size = c * h * w;
    Latents::new(c, h, w, values[index * size..][..size].to_vec()).unwrap()
}

/// A `[.., C, (1,) h, w]` tensor that holds one picture.
pub(crate) fn single(file: &Tensors, key: &str) -> Latents {
    let (shape, values) = file.f32(key);
    let (h, w) = (shape[shape.len() - 2], shape[shape.len() - 1]);
    Latents::new(values.len() / (h * w), h, w, values).unwrap()
}

/// `[.., h, w, c]` values as `[c, h, w]`.
pub(crate) fn channels_first(values: &[f32], channels: usize, grid: (usize, usize)) -> Vec<f32> {
    let last = Latents::from_channels_last(channels, grid.0, grid.1, values.to_vec()).unwrap();
    last.data().to_vec()
}

/// `[1, .., c]` tensor as `[c, ..]` values.
pub(crate) fn channels_first_tensor(tensor: &Tensor) -> Vec<f32> {
    let channels = *tensor.shape().last().unwrap();
    let positions = tensor.numel() / channels;
    channels_first(&tensor.to_f32_vec(), channels, (positions, 1))
}

/// The grid of the picture of a layout.
pub(crate) fn grid(layout: &SequenceLayout) -> (usize, usize) {
    let span = &layout.generated.as_ref().unwrap().span;
    (span.grid_h, span.grid_w)
}

/// The ratio index and grid of a bucket.
pub(crate) fn image_grid(model: &Model, bucket: Bucket) -> ImageGrid {
    let (height, width) = bucket.grid(model.config().pixels_per_token());
    ImageGrid {
        ratio_index: bucket.ratio_index,
        height,
        width,
    }
}

/// Velocities and latents of one step, all `[c, h, w]`.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct StepTrace {
    pub(crate) cond: Vec<f32>,
    pub(crate) uncond: Option<Vec<f32>>,
    pub(crate) guided: Vec<f32>,
    pub(crate) latents: Vec<f32>,
}

/// Runs jobs to their ends in packed steps (a job leaves when it is done) and records every step.
pub(crate) fn trace(model: &Model, jobs: &mut [DenoiseJob]) -> Vec<Vec<StepTrace>> {
    let mut traces: Vec<Vec<StepTrace>> = jobs.iter().map(|_| Vec::new()).collect();
    while jobs.iter().any(|job| !job.is_done()) {
        let live: Vec<usize> = (0..jobs.len()).filter(|i| !jobs[*i].is_done()).collect();
        let shapes: Vec<Latents> = jobs.iter().map(|job| job.latents().unwrap()).collect();
        let mut packed: Vec<&mut DenoiseJob> =
            jobs.iter_mut().filter(|job| !job.is_done()).collect();
        let mut observe = |index: usize, seen: Velocities<'_>| {
            let like = &shapes[live[index]];
            let grid = (like.height(), like.width());
            let first = |values| channels_first(values, like.channels(), grid);
            traces[live[index]].push(StepTrace {
                cond: first(seen.cond),
                uncond: seen.uncond.map(first),
                guided: first(seen.guided),
                latents: Vec::new(),
            });
        };
        let mut probe = model::backbone::NoProbe;
        model
            .denoise_step_observed(&ctx(), &mut packed, &mut probe, &mut observe)
            .unwrap();
        for index in live {
            let latents = jobs[index].latents().unwrap().data().to_vec();
            traces[index].last_mut().unwrap().latents = latents;
        }
    }
    traces
}

/// Compares a run with the recorded one, picture `item` of `batch`; `prefix` names the keys.
pub(crate) fn assert_run(what: &str, file: &Tensors, prefix: &str, item: usize, run: &[StepTrace]) {
    let (shape, timesteps) = file.f32(&format!("{prefix}timesteps"));
    assert_eq!(shape, [run.len()], "{what}: steps");
    assert_eq!(timesteps.len(), run.len());
    for key in ["pred_cond", "pred_uncond", "pred_guided", "latents"] {
        let key_name = format!("{prefix}{key}");
        if !file.has(&key_name) {
            continue;
        }
        let (shape, want) = file.f32(&key_name);
        let size: usize = shape[2..].iter().product();
        let mut worst = 0f32;
        for (step, seen) in run.iter().enumerate() {
            let want = &want[(step * shape[1] + item) * size..][..size];
            let got = match key {
                "pred_cond" => &seen.cond,
                "pred_uncond" => seen.uncond.as_ref().unwrap(),
                "pred_guided" => &seen.guided,
                _ => &seen.latents,
            };
            worst = worst.max(max_abs(got, want));
        }
        println!(
            "{what} {key}: max abs difference {worst:.3e} (limit {:.0e})",
            limit::RUN
        );
        assert!(worst <= limit::RUN, "{what} {key}: {worst}");
    }
    let want = latents(file, &format!("{prefix}final_latents"), item);
    let last = &run.last().unwrap().latents;
    assert_close(
        &format!("{what} final_latents"),
        last,
        want.data(),
        limit::RUN,
    );
}

/// A job of a case without conditioning images.
pub(crate) fn job(
    model: &Model,
    layout: &SequenceLayout,
    case: &Value,
    init: Latents,
) -> DenoiseJob {
    let ctx = ctx();
    Pipeline::new(model, &ctx)
        .job(layout, &[], &numbers(case, init))
        .unwrap()
}
