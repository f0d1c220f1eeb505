//! Golden 09: a conditioning image before the prompt, to a picture and to text.

use kernels::Tensor;
use model::backbone::NoProbe;
use model::cond::{CondFeatures, CondPixels};
use model::input::RowInput;
use model::layout::{CondImageGrid, ImageGrid, LayoutInput, Target};
use model::pipeline::Pipeline;
use model::vit::Patches;
use model::{KvCache, Latents, Model, RowKind, RowTokens, SequenceLayout};
use serde_json::Value;

use crate::back_prefill::task;
use crate::back_support::{
    assert_run, both_rows, bucket, ctx, image_grid, latents, limit, models, numbers, single, trace,
    words,
};
use crate::back_vae::cond_pixels;
use crate::common::{Tensors, assert_close, count, in_set, json};

/// A recorded conditioning image: its pixels for both encoders.
pub(crate) struct Recorded {
    pub(crate) grid: CondImageGrid,
    vae: Tensor,
    patches: Tensor,
}

/// Finds the picture of `case` among those of golden 04.
pub(crate) fn recorded(case: &Value) -> Recorded {
    let pictures = json("04_vit.json");
    let pictures = pictures.as_array().unwrap();
    let index = pictures
        .iter()
        .position(|p| p["file"] == case["cond_image"])
        .unwrap();
    let (vae, vit) = (&pictures[index]["vae"], &pictures[index]["vit"]);
    let file = Tensors::load("04_vit.safetensors");
    let (shape, values) = file.f32(&format!("img{index}.vit_pixel_values"));
    Recorded {
        grid: CondImageGrid {
            vae: ImageGrid {
                ratio_index: count(&vae["ratio_index"]),
                height: count(&vae["token_h"]),
                width: count(&vae["token_w"]),
            },
            vit_height: count(&vit["token_h"]),
            vit_width: count(&vit["token_w"]),
        },
        vae: cond_pixels(&file, index),
        patches: Tensor::from_f32(&shape[1..], values).unwrap(),
    }
}

impl Recorded {
    pub(crate) fn features(&self, model: &Model, noise: &Latents) -> CondFeatures {
        let patches = Patches {
            values: &self.patches,
            grid: (self.grid.vit_height, self.grid.vit_width),
        };
        let pixels = CondPixels {
            vae: &self.vae,
            patches,
        };
        model.encode_cond_image(&ctx(), pixels, noise).unwrap()
    }
}

#[test]
fn an_edit_equals_the_reference() {
    if !in_set(&[
        "09_cond.json",
        "09_cond.safetensors",
        "04_vit.json",
        "04_vit.safetensors",
    ]) {
        return;
    }
    let case = json("09_cond.json");
    let file = Tensors::load("09_cond.safetensors");
    let image = recorded(&case);
    assert!(file.f32("cond_timestep").1.iter().all(|t| *t == 0.0));
    for (name, model) in models() {
        let what = format!("09 edit {name}");
        let ctx = ctx();
        let pipeline = Pipeline::new(model, &ctx);
        let size = bucket(model, &case);
        let layout = pipeline
            .image_layout(&words(model, &case), None, &[image.grid], size)
            .unwrap();
        assert_eq!(both_rows(&layout), file.ids("tokens").1, "{what}: ids");
        let features = [image.features(model, &single(&file, "cond_vae_noise"))];
        let init = latents(&file, "init_latents", 0);
        assert_first_pass(&what, &file, model, &layout, &features);
        let mut job = pipeline
            .job(&layout, &features, &numbers(&case, init))
            .unwrap();
        let runs = trace(model, std::slice::from_mut(&mut job));
        assert_run(&what, &file, "", 0, &runs[0]);
        assert_eq!(
            image_grid(model, size).height,
            layout.generated.unwrap().span.grid_h
        );
    }
}

/// The whole conditional row of the first step: what goes into the layers and what comes out.
fn assert_first_pass(
    what: &str,
    file: &Tensors,
    model: &Model,
    layout: &SequenceLayout,
    features: &[CondFeatures],
) {
    let (shape, want) = file.f32("step0.inputs_embeds_row0");
    let time = file.f32("timesteps").1[0];
    let stem = model.image_stem().unwrap();
    let modulation = stem
        .patch_embed
        .modulation(&stem.patch_time.forward(&[time]).unwrap());
    let init = latents(file, "init_latents", 0);
    let (c, h, w) = (init.channels(), init.height(), init.width());
    let data = init.data();
    let values = (0..h * w)
        .flat_map(|p| (0..c).map(move |i| data[i * h * w + p]))
        .collect();
    let picture = Tensor::from_f32(&[1, h, w, c], values).unwrap();
    let target = layout.generated.as_ref().unwrap();
    let mut vectors = vec![
        (
            target.timestep,
            stem.timestep_token.forward(&[time]).unwrap(),
        ),
        (
            target.span.tokens.start,
            stem.patch_embed
                .forward(&picture, &modulation.unwrap())
                .unwrap(),
        ),
    ];
    for (at, image) in layout.cond_images.iter().zip(features) {
        vectors.push((at.timestep, image.timestep.clone()));
        vectors.push((at.vae.tokens.start, image.vae.clone()));
        vectors.push((at.vit.tokens.start, image.vit.clone()));
    }
    let ids = layout.tokens(RowKind::Cond);
    let mut embeds = model.backbone().unwrap().embed(ids).unwrap().to_f32_vec();
    for (at, tensor) in &vectors {
        let values = tensor.to_f32_vec();
        embeds[at * shape[1]..][..values.len()].copy_from_slice(&values);
    }
    assert_close(
        &format!("{what} step0.inputs_embeds_row0"),
        &embeds,
        &want,
        limit::STATE,
    );
    let (images, full) = (layout.image_spans(), layout.full_blocks());
    let row = RowInput {
        start: 0,
        ids,
        images: &images,
        full: &full,
        vectors: &vectors,
    };
    let mut cache = KvCache::new(model.info().kv, ids.len()).unwrap();
    let out = model
        .run_rows(&ctx(), &[row], &mut [&mut cache], &mut NoProbe)
        .unwrap();
    let want = file.f32("step0.last_layer_out_row0").1;
    let what = format!("{what} step0.last_layer_out_row0");
    assert_close(&what, out.as_f32().unwrap(), &want, limit::STATE);
}

#[test]
fn text_about_a_picture_equals_the_reference() {
    if !in_set(&[
        "09_cond.json",
        "09_cond.safetensors",
        "04_vit.json",
        "04_vit.safetensors",
    ]) {
        return;
    }
    let cases = json("09_cond.json");
    let case = &cases["text"];
    let file = Tensors::load("09_cond.safetensors");
    let image = recorded(case);
    for (name, model) in models() {
        let what = format!("09 text {name}");
        let words = words(model, case);
        let layout = model
            .layout(&LayoutInput {
                prompt: words.prompt,
                system_prompt: words.system_prompt,
                assistant_text: None,
                template: words.template,
                drop_think: false,
                cond_images: &[image.grid],
                target: Target::Text(task(case["bot_task"].as_str().unwrap())),
            })
            .unwrap();
        assert_eq!(
            layout.tokens(RowKind::Cond),
            file.ids("text.prompt_ids").1,
            "{what}: ids"
        );
        let features = [image.features(model, &single(&file, "text.cond_vae_noise"))];
        let row = RowTokens::with_images(&layout, RowKind::Cond, &features);
        let want_ids = file.ids("text.new_ids").1;
        assert_eq!(want_ids.len(), count(&case["new_tokens"]));
        let mut pass = model
            .start_text(&ctx(), &[&row], want_ids.len())
            .unwrap()
            .remove(0);
        let mut logits = Vec::new();
        for want in &want_ids {
            logits.extend_from_slice(pass.logits());
            assert_eq!(pass.most_likely(), *want, "{what}: ids");
            model.step_text(&ctx(), &mut [&mut pass], &[*want]).unwrap();
        }
        let want = file.f32("text.logits").1;
        assert_close(&format!("{what} logits"), &logits, &want, limit::STATE);
    }
}
