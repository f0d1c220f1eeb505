//! The GPU engine beside the CPU definition, on the golden model's weights.
//!
//! Needs an H100 or H200: `cargo test -p model --features cuda --test gpu -- --ignored --test-threads 1`.
#![cfg(feature = "cuda")]
#![allow(clippy::unwrap_used, missing_docs)]

#[path = "common/numbers.rs"]
mod numbers;

use std::path::Path;
use std::sync::Arc;

use model::backbone::NoProbe;
use model::gpu::{GpuJob, GpuJobSpec, GpuModel, GpuOptions, GpuPrefix, WeightType};
use model::input::RowInput;
use model::{
    DenoiseJob, JobOptions, JobSpec, Latents, LoadOptions, Model, ModelConfig, PrefixKv, RowKind,
    RowTokens, T2iRequest,
};
use parallel::RankContext;

use numbers::relative;

const CHECKPOINT: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/../../../integration-tests/fixtures/golden/model"
);
const DEMO: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/../../../deploy/demo-model/checkpoint"
);
const PUBLISHED: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/../../../integration-tests/fixtures/published"
);
const STEPS: usize = 5;

fn cpu() -> Model {
    Model::open(Path::new(CHECKPOINT), LoadOptions::default()).unwrap()
}

fn options(weights: WeightType, resident_layers: Option<usize>) -> GpuOptions {
    GpuOptions {
        ordinal: 0,
        weights,
        max_tokens: 8192,
        kv_bytes: 256 << 20,
        resident_layers,
        text: true,
    }
}

fn gpu(weights: WeightType) -> GpuModel {
    GpuModel::open(Path::new(CHECKPOINT), options(weights, None)).unwrap()
}

/// ||a - b|| / ||b||.
fn cosine(a: &[f32], b: &[f32]) -> f64 {
    let dot = |a: &[f32], b: &[f32]| -> f64 {
        a.iter()
            .zip(b)
            .map(|(a, b)| f64::from(*a) * f64::from(*b))
            .sum()
    };
    dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()
}

/// Prefixes of both rows of a request for bucket `bucket`, and the size in pixels.
fn prefixes(model: &Model, prompt: &str, bucket: usize) -> ([PrefixKv; 2], (usize, usize)) {
    let bucket = model.info().buckets[bucket];
    let request = T2iRequest {
        prompt: prompt.into(),
        system_prompt: None,
        template: model.info().default_template,
        height: bucket.height,
        width: bucket.width,
    };
    let layout = model.layout_text_to_image(&request).unwrap();
    let row = |kind| {
        let row = RowTokens::new(&layout, kind);
        model
            .prefill(&RankContext::single(), &[&row])
            .unwrap()
            .remove(0)
    };
    let both = [row(RowKind::Cond), row(RowKind::Uncond)];
    (both, (bucket.height, bucket.width))
}

fn spec((height, width): (usize, usize), guidance: f64, seed: u64) -> JobSpec {
    JobSpec {
        height,
        width,
        steps: STEPS,
        guidance,
        seed,
        cond: None,
        uncond: None,
    }
}

fn on_cpu(model: &Model, both: &[PrefixKv; 2], spec: &JobSpec) -> Latents {
    let spec = JobSpec {
        cond: Some(Arc::new(both[0].clone())),
        uncond: Some(Arc::new(both[1].clone())),
        ..spec.clone()
    };
    let mut job = DenoiseJob::new(model, spec).unwrap();
    while !job.is_done() {
        model
            .denoise_step(&RankContext::single(), &mut [&mut job])
            .unwrap();
    }
    job.latents().unwrap()
}

fn gpu_job(model: &mut GpuModel, both: &[PrefixKv; 2], spec: &JobSpec) -> GpuJob {
    let [cond, uncond] = both.each_ref().map(|p| Arc::new(model.upload(p).unwrap()));
    let given = GpuJobSpec {
        spec: spec.clone(),
        options: JobOptions::default(),
        cond,
        uncond: Some(uncond),
    };
    GpuJob::new(model, given).unwrap()
}

fn on_gpu(model: &mut GpuModel, jobs: &mut [GpuJob]) -> Vec<Latents> {
    while jobs.iter().any(|job| !job.is_done()) {
        let mut live: Vec<&mut GpuJob> = jobs.iter_mut().filter(|job| !job.is_done()).collect();
        model.denoise_step(&mut live).unwrap();
    }
    jobs.iter().map(|job| job.latents().unwrap()).collect()
}

/// Without guidance: with it, the differences of a model with random weights are multiplied in every step.
#[test]
#[ignore = "needs a Hopper GPU"]
fn denoised_latents_agree_with_the_cpu_in_bf16_and_in_fp8() {
    let reference = cpu();
    let (both, size) = prefixes(&reference, "a red circle above a blue square", 0);
    for (weights, least) in [(WeightType::Bf16, 0.999), (WeightType::Fp8, 0.99)] {
        let mut model = gpu(weights);
        let spec = spec(size, 1.0, 7);
        let want = on_cpu(&reference, &both, &spec);
        let mut jobs = [gpu_job(&mut model, &both, &spec)];
        let got = on_gpu(&mut model, &mut jobs).remove(0);
        let (cos, rel) = (
            cosine(got.data(), want.data()),
            relative(got.data(), want.data()),
        );
        println!("{weights:?}: cosine {cos:.6}, relative error {rel:.2e}");
        assert!(got.is_finite());
        assert!(cos >= least, "{weights:?}: {cos}");
    }
}

#[test]
#[ignore = "needs a Hopper GPU"]
fn a_picture_in_a_packed_batch_of_sizes_is_the_picture_alone() {
    let reference = cpu();
    let mut model = gpu(WeightType::Bf16);
    let last = reference.info().buckets.len() - 1;
    let cases: Vec<_> = [(0, 1.0, 3), (last, 5.0, 4), (last / 2, 3.0, 5)]
        .into_iter()
        .map(|(bucket, guidance, seed)| {
            let (both, size) = prefixes(&reference, "two green triangles", bucket);
            (both, spec(size, guidance, seed))
        })
        .collect();
    let alone: Vec<Latents> = cases
        .iter()
        .map(|(both, spec)| {
            let mut jobs = [gpu_job(&mut model, both, spec)];
            on_gpu(&mut model, &mut jobs).remove(0)
        })
        .collect();
    let mut jobs: Vec<GpuJob> = cases
        .iter()
        .map(|(both, spec)| gpu_job(&mut model, both, spec))
        .collect();
    for (index, (packed, alone)) in on_gpu(&mut model, &mut jobs).iter().zip(&alone).enumerate() {
        let error = relative(packed.data(), alone.data());
        println!("job {index}: relative difference {error:.2e}");
        assert!(error == 0.0, "job {index}: {error}");
    }
}

#[test]
#[ignore = "needs a Hopper GPU"]
fn prefixes_and_logits_agree_with_the_cpu() {
    let reference = cpu();
    let mut model = gpu(WeightType::Bf16);
    let (_, size) = prefixes(&reference, "x", 0);
    let request = T2iRequest {
        prompt: "a small yellow star left of a tree".into(),
        system_prompt: None,
        template: reference.info().default_template,
        height: size.0,
        width: size.1,
    };
    let layout = reference.layout_text_to_image(&request).unwrap();
    let rows = [RowKind::Cond, RowKind::Uncond].map(|kind| RowTokens::new(&layout, kind));
    let rows: Vec<&RowTokens<'_>> = rows.iter().collect();
    let want = reference.prefill(&RankContext::single(), &rows).unwrap();
    let got: Vec<GpuPrefix> = model.prefill(&rows).unwrap();
    for (got, want) in got.iter().zip(&want) {
        let error = relative(got.download().unwrap().data(), want.data());
        println!(
            "prefix of {} tokens: relative error {error:.2e}",
            want.tokens()
        );
        assert!(error < 2e-2, "{error}");
    }

    let ids = &layout.tokens(RowKind::Cond)[..layout.prefix_len()];
    let input = |range: std::ops::Range<usize>| RowInput {
        start: range.start,
        ids: &ids[range],
        images: &[],
        full: &[],
        vectors: &[],
    };
    let mut cache = reference.cache(ids.len()).unwrap();
    let whole = [input(0..ids.len())];
    let hidden = reference
        .run_rows(
            &RankContext::single(),
            &whole,
            &mut [&mut cache],
            &mut NoProbe,
        )
        .unwrap();
    let backbone = reference.backbone().unwrap();
    let normed = backbone.final_norm(&hidden).unwrap();
    let want = backbone.logits(&normed).unwrap();
    // In two chunks on the device: the second continues the cache of the first.
    let cut = ids.len() / 2;
    let mut cache = model.cache(ids.len()).unwrap();
    for range in [0..cut, cut..ids.len()] {
        let rows = [input(range.clone())];
        let hidden = model
            .run_rows(&rows, &mut [&mut cache], true)
            .unwrap()
            .unwrap();
        let got = model.logits(&hidden).unwrap().to_f32_vec().unwrap();
        let vocab = want.dim(1);
        let want = &want.as_f32().unwrap()[range.start * vocab..range.end * vocab];
        let rows = got.chunks_exact(vocab).zip(want.chunks_exact(vocab));
        let mut errors: Vec<f64> = rows.map(|(got, want)| relative(got, want)).collect();
        errors.sort_by(f64::total_cmp);
        let middle = errors[errors.len() / 2];
        println!("logits of tokens {range:?}: middle relative error {middle:.1e}");
        // A token whose last expert is nearly tied may get the other one; the middle has none of these.
        assert!(middle < 2e-2, "{middle}");
    }
}

/// Prompts of several lengths, of tokens that every model has.
fn text_rows(vocab: usize) -> Vec<Vec<u32>> {
    [3_usize, 131, 17, 64, 260]
        .iter()
        .map(|len| {
            (0..*len)
                .map(|i| ((i * i * 31 + i * 7 + len * 13) % vocab) as u32)
                .collect()
        })
        .collect()
}

fn text_input(start: usize, ids: &[u32]) -> RowInput<'_> {
    RowInput {
        start,
        ids,
        images: &[],
        full: &[],
        vectors: &[],
    }
}

/// Greedy tokens of the CPU from each prompt on, with the logits they were chosen from.
fn greedy_on_cpu(model: &Model, prompt: &[u32], tokens: usize) -> Vec<(u32, Vec<f32>)> {
    let mut cache = model.cache(prompt.len() + tokens).unwrap();
    let backbone = model.backbone().unwrap();
    let (mut ids, mut start, mut out) = (prompt.to_vec(), 0, Vec::new());
    for _ in 0..tokens {
        let rows = [text_input(start, &ids)];
        let single = RankContext::single();
        let hidden = model
            .run_rows(&single, &rows, &mut [&mut cache], &mut NoProbe)
            .unwrap();
        let normed = backbone.final_norm(&hidden).unwrap();
        let logits = backbone.logits(&normed).unwrap();
        let last = logits.as_f32().unwrap();
        let last = last[last.len() - logits.dim(1)..].to_vec();
        let best = last.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1));
        let best = u32::try_from(best.unwrap().0).unwrap();
        start += ids.len();
        ids = vec![best];
        out.push((best, last));
    }
    out
}

/// Logits behind the last tokens of `prompt` with `given`, in one packed pass.
fn packed(model: &mut GpuModel, prompt: &[u32], given: &[u32]) -> Vec<Vec<f32>> {
    let ids: Vec<u32> = prompt.iter().chain(given).copied().collect();
    let mut cache = model.cache(ids.len()).unwrap();
    let rows = [text_input(0, &ids)];
    let hidden = model.run_rows(&rows, &mut [&mut cache], true).unwrap();
    let hidden = hidden.unwrap().narrow0(prompt.len(), given.len()).unwrap();
    let logits = model.logits(&hidden).unwrap();
    let vocab = logits.dim(1);
    let all = logits.to_f32_vec().unwrap();
    all.chunks(vocab).map(<[f32]>::to_vec).collect()
}

/// Logits after each of `given[row]` tokens of every row, all rows in one pass a token.
fn decoded(model: &mut GpuModel, prompts: &[&[u32]], given: &[Vec<u32>]) -> Vec<Vec<Vec<f32>>> {
    let steps = given[0].len();
    let mut caches: Vec<_> = prompts
        .iter()
        .map(|prompt| {
            let mut cache = model.cache(prompt.len() + steps).unwrap();
            let rows = [text_input(0, prompt)];
            model.run_rows(&rows, &mut [&mut cache], false).unwrap();
            cache
        })
        .collect();
    let mut out = vec![Vec::new(); prompts.len()];
    for step in 0..steps {
        let rows: Vec<_> = prompts
            .iter()
            .zip(given)
            .map(|(prompt, ids)| text_input(prompt.len() + step, &ids[step..=step]))
            .collect();
        let mut borrowed: Vec<_> = caches.iter_mut().collect();
        let hidden = model.run_rows(&rows, &mut borrowed, true).unwrap().unwrap();
        let logits = model.logits(&hidden).unwrap();
        let best = model.likeliest(&logits).unwrap();
        let host = model.logits_on_host(&hidden).unwrap();
        assert_eq!(host.concat(), logits.to_f32_vec().unwrap());
        for (row, logits) in host.iter().enumerate() {
            let most = logits.iter().copied().fold(f32::MIN, f32::max);
            let first = logits.iter().position(|x| *x == most).unwrap();
            assert_eq!(best[row] as usize, first);
            out[row].push(logits.clone());
        }
    }
    out
}

#[test]
#[ignore = "needs a Hopper GPU"]
fn decoded_tokens_are_those_of_the_cpu_and_do_not_depend_on_the_batch() {
    const TOKENS: usize = 9;
    for checkpoint in [CHECKPOINT, DEMO] {
        let reference = Model::open(Path::new(checkpoint), LoadOptions::default()).unwrap();
        let prompts = text_rows(reference.config().vocab_size);
        let prompts: Vec<&[u32]> = prompts.iter().map(Vec::as_slice).collect();
        let want: Vec<_> = prompts
            .iter()
            .map(|prompt| greedy_on_cpu(&reference, prompt, TOKENS))
            .collect();
        let given = |row: &Vec<(u32, Vec<f32>)>| row[..TOKENS - 1].iter().map(|t| t.0).collect();
        let given: Vec<Vec<u32>> = want.iter().map(given).collect();
        for (weights, room) in [(WeightType::Bf16, 1e-2), (WeightType::Fp8, 3e-2)] {
            let options = options(weights, None);
            let mut model = GpuModel::open(Path::new(checkpoint), options).unwrap();
            let together = decoded(&mut model, &prompts, &given);
            let (mut errors, mut others, mut equal) = (Vec::new(), Vec::new(), [0; 2]);
            for (row, prompt) in prompts.iter().enumerate() {
                let packed = packed(&mut model, prompt, &given[row]);
                for (step, (id, want)) in want[row][1..].iter().enumerate() {
                    errors.push(relative(&together[row][step], want));
                    others.push(relative(&packed[step], want));
                    for (equal, got) in equal.iter_mut().zip([&together[row], &packed]) {
                        let best = got[step]
                            .iter()
                            .enumerate()
                            .max_by(|a, b| a.1.total_cmp(b.1));
                        *equal += usize::from(best.unwrap().0 == *id as usize);
                    }
                }
            }
            errors.sort_by(f64::total_cmp);
            others.sort_by(f64::total_cmp);
            let (all, middle) = (errors.len(), errors.len() / 2);
            println!(
                "{weights:?}: {} of {all} tokens equal, {} in packed passes; middle errors {:.1e}, {:.1e}",
                equal[0], equal[1], errors[middle], others[middle]
            );
            println!("{errors:.4?} {others:.4?}");
            // Tokens whose last expert is nearly tied may get the other one, in packed passes as here.
            assert!(errors[middle] < others[middle] + room, "{weights:?}");
            assert!(equal[0] + all / 8 >= equal[1], "{weights:?}: {equal:?}");
            for (row, prompt) in prompts.iter().enumerate() {
                let alone = decoded(&mut model, &[prompt], &given[row..=row]);
                assert_eq!(alone[0], together[row], "{weights:?}, row {row}");
            }
        }
    }
}

#[test]
#[ignore = "needs a Hopper GPU"]
fn layers_that_travel_give_the_picture_of_layers_that_stay() {
    let reference = cpu();
    let (both, size) = prefixes(&reference, "a purple cross", 1);
    let spec = spec(size, 4.0, 11);
    for weights in [WeightType::Bf16, WeightType::Fp8] {
        let mut all = gpu(weights);
        let mut jobs = [gpu_job(&mut all, &both, &spec)];
        let want = on_gpu(&mut all, &mut jobs).remove(0);
        for resident in 0..reference.config().num_layers() {
            let options = options(weights, Some(resident));
            let mut model = GpuModel::open(Path::new(CHECKPOINT), options).unwrap();
            let mut jobs = [gpu_job(&mut model, &both, &spec)];
            let got = on_gpu(&mut model, &mut jobs).remove(0);
            assert_eq!(got, want, "{weights:?}, {resident} resident layers");
        }
    }
}

/// What one layer of the released sizes, with random weights, makes of a row of tokens.
fn one_layer(weights: WeightType) -> Vec<f32> {
    let mut config = ModelConfig::from_dir(Path::new(PUBLISHED)).unwrap();
    config.layers.truncate(1);
    config.vocab_size = 4096;
    let mut model = GpuModel::random(config, options(weights, None), 5).unwrap();
    let ids: Vec<u32> = (0..700).map(|i| i * 7919 % 4096).collect();
    let row = RowInput {
        start: 0,
        ids: &ids,
        images: &[],
        full: &[],
        vectors: &[],
    };
    let mut cache = model.cache(ids.len()).unwrap();
    let hidden = model.run_rows(&[row], &mut [&mut cache], true).unwrap();
    hidden.unwrap().to_f32_vec().unwrap()
}

#[test]
#[ignore = "needs a Hopper GPU"]
fn a_layer_of_random_weights_in_fp8_is_near_one_in_bf16() {
    let (want, got) = (one_layer(WeightType::Bf16), one_layer(WeightType::Fp8));
    let rows = want.chunks_exact(4096).zip(got.chunks_exact(4096));
    let mut all: Vec<f64> = rows.map(|(want, got)| cosine(want, got)).collect();
    all.sort_by(f64::total_cmp);
    let (least, middle) = (all[0], all[all.len() / 2]);
    println!("one layer in fp8: cosine {middle:.6}, least of any token {least:.6}");
    // Random weights and next to no residual: all of a token is the outcome of products whose operands have 3 mantissa
    // bits, and nearly tied experts may change places.
    assert!(middle >= 0.985 && least >= 0.93, "{middle}, {least}");
}

#[test]
#[ignore = "needs a Hopper GPU"]
fn a_gpu_that_is_not_there_or_too_small_is_refused_by_name() {
    let absent = GpuOptions {
        ordinal: 99,
        ..options(WeightType::Bf16, None)
    };
    let refused = GpuModel::open(Path::new(CHECKPOINT), absent)
        .map(drop)
        .unwrap_err();
    assert!(
        refused.to_string().contains("gpu 99 does not exist"),
        "{refused}"
    );
    let greedy = GpuOptions {
        max_tokens: 1 << 32,
        ..options(WeightType::Bf16, None)
    };
    let refused = GpuModel::open(Path::new(CHECKPOINT), greedy)
        .map(drop)
        .unwrap_err();
    let text = refused.to_string();
    assert!(
        text.contains("are missing") && text.contains("would fit"),
        "{text}"
    );
}
