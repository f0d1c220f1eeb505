//! Golden 02: every recorded inner state of a picture's first two passes and of a text pass.

use std::collections::HashMap;

use kernels::{Routing, Tensor};
use model::backbone::{Probe, Site};
use model::input::RowInput;
use model::layout::{LayoutInput, Target, TextTask};
use model::pipeline::Pipeline;
use model::{KvCache, Latents, Model, PrefixKv, RowKind, RowTokens, SequenceLayout};

use crate::back_support::{
    both_rows, bucket, channels_first_tensor, ctx, grid, latents, limit, models, words,
};
use crate::common::{Tensors, assert_close, in_set, json};

/// Keeps everything a pass shows.
#[derive(Default)]
struct Recorder {
    tensors: HashMap<(usize, Site), Vec<f32>>,
    routings: HashMap<usize, Routing>,
}

impl Probe for Recorder {
    fn tensor(&mut self, layer: usize, site: Site, value: &Tensor) {
        self.tensors.insert((layer, site), value.to_f32_vec());
    }

    fn routing(&mut self, layer: usize, routing: &Routing) {
        self.routings.insert(layer, routing.clone());
    }
}

/// Names of inner states as the golden files spell them.
const SITES: [(&str, Site); 7] = [
    ("input_layernorm", Site::InputNorm),
    ("qkv_proj", Site::Qkv),
    ("self_attn", Site::Attention),
    ("post_attention_layernorm", Site::PostNorm),
    ("shared_mlp", Site::SharedMlp),
    ("mlp", Site::Mlp),
    ("out", Site::Output),
];

impl Recorder {
    /// Compares with every state that the file records under `prefix`.
    fn assert_matches(&self, what: &str, file: &Tensors, prefix: &str, layers: usize) {
        let mut compared = 0;
        for layer in 0..layers {
            for (name, site) in SITES {
                let key = format!("{prefix}layer{layer}.{name}");
                if file.has(&key) {
                    let got = &self.tensors[&(layer, site)];
                    assert_close(
                        &format!("{what} {key}"),
                        got,
                        &file.f32(&key).1,
                        limit::STATE,
                    );
                    compared += 1;
                }
            }
            compared += self.assert_routing(what, file, &format!("{prefix}layer{layer}"), layer);
        }
        assert!(
            compared >= layers,
            "{what}: only {compared} states recorded under {prefix}"
        );
    }

    fn assert_routing(&self, what: &str, file: &Tensors, prefix: &str, layer: usize) -> usize {
        let key = format!("{prefix}.router_logits");
        if !file.has(&key) {
            return 0;
        }
        let routing = &self.routings[&layer];
        let logits = routing.logits.as_f32().unwrap();
        assert_close(
            &format!("{what} {key}"),
            logits,
            &file.f32(&key).1,
            limit::STATE,
        );
        let (_, chosen) = file.i32(&format!("{prefix}.topk_idx"));
        let got: Vec<i32> = routing.experts.iter().map(|e| *e as i32).collect();
        assert_eq!(got, chosen, "{what} {prefix}: chosen experts");
        let key = format!("{prefix}.topk_weight");
        assert_close(
            &format!("{what} {key}"),
            &routing.weights,
            &file.f32(&key).1,
            limit::STATE,
        );
        1
    }
}

/// Keys or values of one layer as `[rows, heads, tokens, dim]`.
fn side(prefixes: &[&PrefixKv], layer: usize, values: bool) -> Vec<f32> {
    let mut out = Vec::new();
    for prefix in prefixes {
        let g = prefix.geometry();
        let size = g.kv_heads * prefix.tokens() * g.head_dim;
        let start = (2 * layer + usize::from(values)) * size;
        out.extend_from_slice(&prefix.data()[start..start + size]);
    }
    out
}

fn assert_caches(what: &str, file: &Tensors, prefix: &str, layers: usize, rows: &[&PrefixKv]) {
    for layer in 0..layers {
        for (name, values) in [("k_cache", false), ("v_cache", true)] {
            let key = format!("{prefix}layer{layer}.{name}");
            if file.has(&key) {
                let got = side(rows, layer, values);
                assert_close(
                    &format!("{what} {key}"),
                    &got,
                    &file.f32(&key).1,
                    limit::STATE,
                );
            }
        }
    }
}

/// One pass of both rows of a picture's sequence at one time.
struct ImagePass<'a> {
    model: &'a Model,
    layout: &'a SequenceLayout,
    latents: Latents,
    timestep: f32,
}

impl ImagePass<'_> {
    fn image_tokens(&self) -> Tensor {
        let stem = self.model.image_stem().unwrap();
        let time = stem.patch_time.forward(&[self.timestep]).unwrap();
        let modulation = stem.patch_embed.modulation(&time).unwrap();
        let picture = channels_last(&self.latents);
        stem.patch_embed.forward(&picture, &modulation).unwrap()
    }

    fn timestep_token(&self) -> Tensor {
        let stem = self.model.image_stem().unwrap();
        stem.timestep_token.forward(&[self.timestep]).unwrap()
    }

    /// Computes tokens `start..end` of both rows behind the given caches.
    fn run(
        &self,
        range: std::ops::Range<usize>,
        caches: &mut [KvCache],
        probe: &mut Recorder,
    ) -> Tensor {
        let image = self.layout.generated.as_ref().unwrap();
        let vectors = [
            (image.timestep, self.timestep_token()),
            (image.span.tokens.start, self.image_tokens()),
        ];
        let (spans, full) = (self.layout.image_spans(), self.layout.full_blocks());
        let rows: Vec<RowInput<'_>> = [RowKind::Cond, RowKind::Uncond]
            .into_iter()
            .map(|kind| RowInput {
                start: range.start,
                ids: &self.layout.tokens(kind)[range.clone()],
                images: &spans,
                full: &full,
                vectors: &vectors,
            })
            .collect();
        let mut caches: Vec<&mut KvCache> = caches.iter_mut().collect();
        self.model
            .run_rows(&ctx(), &rows, &mut caches, probe)
            .unwrap()
    }

    /// Velocities of both rows, `[2, c, h, w]`, from hidden states whose rows begin at token `start`.
    fn velocity(&self, hidden: &Tensor, start: usize) -> Vec<f32> {
        let head = self.model.image_head().unwrap();
        let time = head.final_time.forward(&[self.timestep]).unwrap();
        let modulation = head.final_layer.modulation(&time).unwrap();
        let span = &self.layout.generated.as_ref().unwrap().span.tokens;
        let row = hidden.dim(0) / 2;
        (0..2)
            .flat_map(|r| {
                let image = hidden
                    .narrow0(r * row + span.start - start, span.len())
                    .unwrap();
                let v = head
                    .final_layer
                    .forward(&image, grid(self.layout), &modulation)
                    .unwrap();
                channels_first_tensor(&v)
            })
            .collect()
    }

    /// Compares embedders, stem and the input of the layers.
    fn assert_inputs(&self, what: &str, file: &Tensors, prefix: &str, start: usize) {
        let (stem, head) = (
            self.model.image_stem().unwrap(),
            self.model.image_head().unwrap(),
        );
        let t = [self.timestep];
        for (name, got) in [
            ("timestep_emb", stem.timestep_token.forward(&t).unwrap()),
            ("time_embed", stem.patch_time.forward(&t).unwrap()),
            ("time_embed_2", head.final_time.forward(&t).unwrap()),
            ("patch_embed", self.image_tokens()),
        ] {
            let key = format!("{prefix}{name}");
            let twice = [got.to_f32_vec(), got.to_f32_vec()].concat();
            assert_close(
                &format!("{what} {key}"),
                &twice,
                &file.f32(&key).1,
                limit::STATE,
            );
        }
        let key = format!("{prefix}patch_embed.conv_in");
        if file.has(&key) {
            let conv = stem
                .patch_embed
                .conv_in(&channels_last(&self.latents))
                .unwrap();
            let got = channels_first_tensor(&conv);
            let twice = [got.clone(), got].concat();
            assert_close(
                &format!("{what} {key}"),
                &twice,
                &file.f32(&key).1,
                limit::STATE,
            );
        }
        self.assert_embeds(what, file, &format!("{prefix}inputs_embeds"), start);
    }

    fn assert_embeds(&self, what: &str, file: &Tensors, key: &str, start: usize) {
        let (shape, want) = file.f32(key);
        let image = self.layout.generated.as_ref().unwrap();
        let (tokens, hidden) = (shape[1], shape[2]);
        let mut got = Vec::new();
        for kind in [RowKind::Cond, RowKind::Uncond] {
            let ids = &self.layout.tokens(kind)[start..start + tokens];
            let mut row = self
                .model
                .backbone()
                .unwrap()
                .embed(ids)
                .unwrap()
                .to_f32_vec();
            for (at, vectors) in [
                (image.timestep, self.timestep_token()),
                (image.span.tokens.start, self.image_tokens()),
            ] {
                let values = vectors.to_f32_vec();
                row[(at - start) * hidden..][..values.len()].copy_from_slice(&values);
            }
            got.extend(row);
        }
        assert_close(&format!("{what} {key}"), &got, &want, limit::STATE);
    }
}

fn channels_last(latents: &Latents) -> Tensor {
    let (c, h, w) = (latents.channels(), latents.height(), latents.width());
    let data = latents.data();
    let values = (0..h * w)
        .flat_map(|p| (0..c).map(move |i| data[i * h * w + p]))
        .collect();
    Tensor::from_f32(&[1, h, w, c], values).unwrap()
}

#[test]
fn a_pictures_first_two_passes_equal_the_reference() {
    if !in_set(&["02_prefill.json", "02_prefill_t2i.safetensors"]) {
        return;
    }
    let cases = json("02_prefill.json");
    let case = &cases["t2i"];
    let file = Tensors::load("02_prefill_t2i.safetensors");
    for (name, model) in models() {
        let what = format!("02 t2i {name}");
        let ctx = ctx();
        let pipeline = Pipeline::new(model, &ctx);
        let size = bucket(model, case);
        let layout = pipeline
            .image_layout(&words(model, case), None, &[], size)
            .unwrap();
        assert_eq!(
            both_rows(&layout),
            file.ids("step0.input_ids").1,
            "{what}: ids"
        );
        let pass = |prefix: &str| ImagePass {
            model,
            layout: &layout,
            latents: latents(&file, &format!("{prefix}latents"), 0),
            timestep: file.f32(&format!("{prefix}timestep")).1[0],
        };
        let whole = assert_first_pass(&what, &file, &pass("step0."));
        let cached = assert_second_pass(&what, &file, &pass("step1."), &whole);
        assert_uncached_pass(&what, &file, &pass("step1."), &cached);
    }
}

/// The whole sequence, trailing tokens included; returns its keys and values.
fn assert_first_pass(what: &str, file: &Tensors, pass: &ImagePass<'_>) -> Vec<PrefixKv> {
    let (model, layout) = (pass.model, pass.layout);
    let layers = model.config().num_layers();
    let mut caches = vec![KvCache::new(model.info().kv, layout.len()).unwrap(); 2];
    let mut seen = Recorder::default();
    let hidden = pass.run(0..layout.len(), &mut caches, &mut seen);
    pass.assert_inputs(what, file, "step0.", 0);
    seen.assert_matches(what, file, "step0.", layers);
    let whole: Vec<PrefixKv> = caches.into_iter().map(KvCache::into_prefix).collect();
    let rows: Vec<&PrefixKv> = whole.iter().collect();
    assert_caches(what, file, "step0.", layers, &rows);
    let pred = pass.velocity(&hidden, 0);
    let want = file.f32("step0.pred").1;
    assert_close(&format!("{what} step0.pred"), &pred, &want, limit::STATE);
    assert_final_block(what, file, pass, &hidden);
    whole
}

/// The target alone behind the prefix; returns its velocities.
fn assert_second_pass(
    what: &str,
    file: &Tensors,
    pass: &ImagePass<'_>,
    whole: &[PrefixKv],
) -> Vec<f32> {
    let target = pass.layout.target().unwrap();
    let prefixes = prefixes(pass.model, pass.layout);
    assert_prefix_of(&prefixes, whole);
    let mut caches: Vec<KvCache> = prefixes
        .iter()
        .map(|p| KvCache::resume(p, target.end).unwrap())
        .collect();
    let mut seen = Recorder::default();
    let hidden = pass.run(target.clone(), &mut caches, &mut seen);
    pass.assert_inputs(what, file, "step1.", target.start);
    seen.assert_matches(what, file, "step1.", pass.model.config().num_layers());
    let pred = pass.velocity(&hidden, target.start);
    let want = file.f32("step1.pred").1;
    assert_close(&format!("{what} step1.pred"), &pred, &want, limit::STATE);
    let renewed: Vec<PrefixKv> = caches.into_iter().map(KvCache::into_prefix).collect();
    assert_renewed_cache(what, file, &renewed, whole);
    pred
}

/// The same pass computed without a cache.
fn assert_uncached_pass(what: &str, file: &Tensors, pass: &ImagePass<'_>, cached: &[f32]) {
    let tokens = pass.layout.len();
    let mut caches = vec![KvCache::new(pass.model.info().kv, tokens).unwrap(); 2];
    let hidden = pass.run(0..tokens, &mut caches, &mut Recorder::default());
    let full = pass.velocity(&hidden, 0);
    let want = file.f32("step1_full_recompute.pred").1;
    let what = format!("{what} step1 without cache");
    assert_close(&what, &full, &want, limit::STATE);
    assert_close(&format!("{what}, and cached"), cached, &full, limit::STATE);
}

fn prefixes(model: &Model, layout: &SequenceLayout) -> Vec<PrefixKv> {
    let rows = [RowKind::Cond, RowKind::Uncond].map(|kind| RowTokens::new(layout, kind));
    model.prefill(&ctx(), &[&rows[0], &rows[1]]).unwrap()
}

/// The prefix does not depend on what comes after it: not on latents, not on time.
fn assert_prefix_of(prefixes: &[PrefixKv], whole: &[PrefixKv]) {
    for (prefix, whole) in prefixes.iter().zip(whole) {
        let dim = prefix.geometry().head_dim;
        let heads = prefix.data().chunks_exact(prefix.tokens() * dim);
        for (short, long) in heads.zip(whole.data().chunks_exact(whole.tokens() * dim)) {
            assert_eq!(short, &long[..short.len()], "prefix and whole pass");
        }
    }
}

/// The recorded cache of the second pass: prefix and target of that pass, trailing tokens of the first.
fn assert_renewed_cache(what: &str, file: &Tensors, renewed: &[PrefixKv], whole: &[PrefixKv]) {
    let merged: Vec<PrefixKv> = renewed
        .iter()
        .zip(whole)
        .map(|(new, old)| {
            let dim = new.geometry().head_dim;
            let mut data = old.data().to_vec();
            let heads = data.chunks_exact_mut(old.tokens() * dim);
            for (target, source) in heads.zip(new.data().chunks_exact(new.tokens() * dim)) {
                target[..source.len()].copy_from_slice(source);
            }
            PrefixKv::new(*old.geometry(), old.tokens(), data).unwrap()
        })
        .collect();
    let rows: Vec<&PrefixKv> = merged.iter().collect();
    assert_caches(what, file, "step1.", rows[0].geometry().layers, &rows);
}

fn assert_final_block(what: &str, file: &Tensors, pass: &ImagePass<'_>, hidden: &Tensor) {
    let key = "step0.final_layer.resblock";
    let (_, want) = file.f32(key);
    let head = pass.model.image_head().unwrap();
    let time = head.final_time.forward(&[pass.timestep]).unwrap();
    let modulation = head.final_layer.modulation(&time).unwrap();
    let span = &pass.layout.generated.as_ref().unwrap().span;
    let row = hidden.dim(0) / 2;
    let got: Vec<f32> = (0..2)
        .flat_map(|r| {
            let image = hidden
                .narrow0(r * row + span.tokens.start, span.tokens.len())
                .unwrap();
            let image = image
                .reshape(&[1, span.grid_h, span.grid_w, hidden.dim(1)])
                .unwrap();
            channels_first_tensor(&head.final_layer.block(&image, &modulation).unwrap())
        })
        .collect();
    assert_close(&format!("{what} {key}"), &got, &want, limit::STATE);
}

#[test]
fn a_text_pass_equals_the_reference() {
    if !in_set(&["02_prefill.json", "02_prefill_text.safetensors"]) {
        return;
    }
    let cases = json("02_prefill.json");
    let case = &cases["text"];
    let file = Tensors::load("02_prefill_text.safetensors");
    for (name, model) in models() {
        let what = format!("02 text {name}");
        let words = words(model, case);
        let layout = model
            .layout(&LayoutInput {
                prompt: words.prompt,
                system_prompt: words.system_prompt,
                assistant_text: None,
                template: words.template,
                drop_think: false,
                cond_images: &[],
                target: Target::Text(task(case["bot_task"].as_str().unwrap())),
            })
            .unwrap();
        let ids = layout.tokens(RowKind::Cond);
        assert_eq!(ids, file.ids("input_ids").1, "{what}: ids");
        let row = RowInput {
            start: 0,
            ids,
            images: &[],
            full: &[],
            vectors: &[],
        };
        let mut cache = KvCache::new(model.info().kv, ids.len()).unwrap();
        let mut seen = Recorder::default();
        let hidden = model
            .run_rows(&ctx(), &[row], &mut [&mut cache], &mut seen)
            .unwrap();
        let layers = model.config().num_layers();
        seen.assert_matches(&what, &file, "", layers);
        assert_caches(&what, &file, "", layers, &[&cache.into_prefix()]);
        let backbone = model.backbone().unwrap();
        let embedded = backbone.embed(ids).unwrap();
        let normed = backbone.final_norm(&hidden).unwrap();
        let logits = backbone.logits(&normed).unwrap();
        for (key, got) in [
            ("inputs_embeds", embedded),
            ("ln_f", normed),
            ("logits", logits),
        ] {
            let want = file.f32(key).1;
            assert_close(
                &format!("{what} {key}"),
                got.as_f32().unwrap(),
                &want,
                limit::STATE,
            );
        }
    }
}

/// The task of a text pass as the golden files spell it.
pub(crate) fn task(name: &str) -> TextTask {
    match name {
        "auto" => TextTask::Auto,
        "think" => TextTask::Think,
        "recaption" => TextTask::Recaption,
        "img_ratio" => TextTask::Ratio,
        other => panic!("bot task {other}"),
    }
}
