//! Single predictions beside those of the official implementation. Whole runs of this model drift apart in
//! bf16: its weights are random and guidance multiplies every difference.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use integration_tests::golden_dir;
use model::gpu::{GpuJob, GpuJobSpec, GpuModel, GpuOptions, Watch, WeightType};
use model::{
    JobOptions, JobSpec, Latents, LoadOptions, Model, RowKind, RowTokens, T2iRequest, Template,
};
use safetensors::SafeTensors;
use serde_json::Value;

type Tensors = BTreeMap<String, (Vec<usize>, Vec<f32>)>;

fn floats(data: &[u8]) -> Vec<f32> {
    let (words, _) = data.as_chunks::<4>();
    words.iter().map(|word| f32::from_le_bytes(*word)).collect()
}

fn read(path: &Path) -> Tensors {
    let bytes = std::fs::read(path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    file.iter()
        .filter(|(_, view)| view.dtype() == safetensors::Dtype::F32)
        .map(|(name, view)| {
            (
                name.to_owned(),
                (view.shape().to_vec(), floats(view.data())),
            )
        })
        .collect()
}

pub(crate) fn cosine(a: &[f32], b: &[f32]) -> f64 {
    assert_eq!(a.len(), b.len());
    let dot = |a: &[f32], b: &[f32]| -> f64 {
        a.iter()
            .zip(b)
            .map(|(a, b)| f64::from(*a) * f64::from(*b))
            .sum()
    };
    dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()
}

/// `[c, h, w]` as `[h w, c]`.
fn channels_last(planar: &[f32], channels: usize) -> Vec<f32> {
    let pixels = planar.len() / channels;
    let at = |i: usize| planar[(i % channels) * pixels + i / channels];
    (0..planar.len()).map(at).collect()
}

struct Case<'a> {
    name: String,
    request: &'a Value,
    tensors: Tensors,
}

/// The denoising cases that have one prompt.
fn cases(runs: &Value) -> Vec<Case<'_>> {
    let all = runs.as_object().unwrap().iter();
    all.filter(|(_, case)| case["prompt"].is_string())
        .map(|(id, request)| Case {
            name: id.clone(),
            request,
            tensors: read(&golden_dir().join(format!("03_denoise_{id}.safetensors"))),
        })
        .collect()
}

#[test]
#[ignore = "needs a Hopper GPU"]
fn every_prediction_has_the_direction_of_the_official_one() {
    let dir = golden_dir().join("model");
    let runs = std::fs::read_to_string(golden_dir().join("03_denoise.json")).unwrap();
    let runs: Value = serde_json::from_str(&runs).unwrap();
    let cases = cases(&runs);
    assert!(!cases.is_empty());
    let reference = Model::open(&dir, LoadOptions::default()).unwrap();
    for (weights, least) in [(WeightType::Bf16, 0.998), (WeightType::Fp8, 0.95)] {
        let options = GpuOptions {
            ordinal: 0,
            weights,
            max_tokens: 8192,
            kv_bytes: 256 << 20,
            resident_layers: None,
            text: true,
        };
        let mut model = GpuModel::open(&dir, options).unwrap();
        for case in &cases {
            let worst = case.worst(&reference, &mut model);
            println!("{weights:?} {}: least cosine {worst:.6}", case.name);
            assert!(worst >= least, "{weights:?} {}: {worst}", case.name);
        }
    }
}

impl Case<'_> {
    /// The least cosine over all steps and both rows.
    fn worst(&self, reference: &Model, model: &mut GpuModel) -> f64 {
        let number = |name: &str| self.request[name].as_u64().unwrap() as usize;
        let (height, width, steps) = (number("height"), number("width"), number("steps"));
        let layout = reference
            .layout_text_to_image(&T2iRequest {
                prompt: self.request["prompt"].as_str().unwrap().into(),
                system_prompt: None,
                template: Template::Pretrain,
                height,
                width,
            })
            .unwrap();
        let rows = [RowKind::Cond, RowKind::Uncond].map(|kind| RowTokens::new(&layout, kind));
        let rows: Vec<&RowTokens<'_>> = rows.iter().collect();
        let mut prefixes = model.prefill(&rows).unwrap().into_iter().map(Arc::new);
        let (_, init) = &self.tensors["init_latents"];
        let channels = reference.config().vae.latent_channels;
        let cell = reference.config().pixels_per_token();
        let latents =
            |values: Vec<f32>| Latents::new(channels, height / cell, width / cell, values).unwrap();
        let given = GpuJobSpec {
            spec: JobSpec {
                height,
                width,
                steps,
                guidance: self.request["guidance_scale"].as_f64().unwrap(),
                seed: 0,
                cond: None,
                uncond: None,
            },
            options: JobOptions {
                init_latents: Some(latents(init.clone())),
                ..JobOptions::default()
            },
            cond: prefixes.next().unwrap(),
            uncond: prefixes.next(),
        };
        let mut job = GpuJob::new(model, given).unwrap();
        let mut worst = 1.0_f64;
        for step in 0..steps {
            let of = |what: &str| {
                let (_, values) = &self.tensors[what];
                let each = values.len() / steps;
                values[step * each..(step + 1) * each].to_vec()
            };
            let want = ["pred_cond", "pred_uncond"].map(|w| channels_last(&of(w), channels));
            let mut see = |_: usize, got: &[f32]| {
                for (got, want) in got.chunks_exact(want[0].len()).zip(&want) {
                    worst = worst.min(cosine(got, want));
                }
            };
            let mut watch = Watch {
                velocities: Some(&mut see),
                ..Watch::default()
            };
            model.watched_step(&mut [&mut job], &mut watch).unwrap();
            // From where the official run went on.
            job.resume(step + 1, &latents(of("latents"))).unwrap();
        }
        worst
    }
}
