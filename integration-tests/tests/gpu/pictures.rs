//! Pictures of the demo model, drawn on the GPU and scored by the checker.

use std::sync::Arc;

use integration_tests::demo::{DemoPrompt, DemoSet, SEED, checkpoint_dir};
use integration_tests::scene::{judge, read};
use model::gpu::{GpuJob, GpuJobSpec, GpuModel, GpuOptions, GpuVae, GpuVaeParts, WeightType};
use model::{
    DenoiseJob, JobOptions, JobSpec, Latents, LoadOptions, Model, RowKind, RowTokens,
    SequenceLayout, T2iRequest, Template,
};
use parallel::RankContext;

/// Pictures denoised in one packed pass.
const PACKED: usize = 20;
/// Share that FP8 may lose against bf16: two hundred pictures tell shares apart to about three points.
const FP8_LOSS: f64 = 0.04;
/// Least share of right pictures in bf16: the CPU's share is in the model's card.
const RIGHT: f64 = 0.92;
/// Pictures whose latents are compared with the CPU's.
const COMPARED: usize = 4;

fn layout(reference: &Model, entry: &DemoPrompt) -> SequenceLayout {
    let bucket = reference
        .buckets()
        .by_index(entry.format.ratio_index())
        .unwrap();
    reference
        .layout_text_to_image(&T2iRequest {
            prompt: entry.prompt.clone(),
            system_prompt: None,
            template: Template::Pretrain,
            height: bucket.height,
            width: bucket.width,
        })
        .unwrap()
}

fn spec(reference: &Model, entry: &DemoPrompt) -> JobSpec {
    let bucket = reference
        .buckets()
        .by_index(entry.format.ratio_index())
        .unwrap();
    JobSpec {
        height: bucket.height,
        width: bucket.width,
        steps: reference.info().default_steps,
        guidance: reference.info().default_guidance,
        seed: SEED,
        cond: None,
        uncond: None,
    }
}

fn cpu_latents(reference: &Model, entries: &[DemoPrompt]) -> Vec<Latents> {
    let ctx = RankContext::single();
    let mut jobs: Vec<DenoiseJob> = entries
        .iter()
        .map(|entry| {
            let layout = layout(reference, entry);
            let prefix = |kind| {
                let row = RowTokens::new(&layout, kind);
                Arc::new(reference.prefill(&ctx, &[&row]).unwrap().remove(0))
            };
            let spec = JobSpec {
                cond: Some(prefix(RowKind::Cond)),
                uncond: Some(prefix(RowKind::Uncond)),
                ..spec(reference, entry)
            };
            DenoiseJob::new(reference, spec).unwrap()
        })
        .collect();
    while !jobs[0].is_done() {
        let mut live: Vec<&mut DenoiseJob> = jobs.iter_mut().collect();
        reference.denoise_step(&ctx, &mut live).unwrap();
    }
    jobs.iter().map(|job| job.latents().unwrap()).collect()
}

struct Easel<'a> {
    reference: &'a Model,
    model: GpuModel,
    vae: GpuVae,
}

impl<'a> Easel<'a> {
    fn new(reference: &'a Model, weights: WeightType) -> Self {
        let options = GpuOptions {
            ordinal: 0,
            weights,
            max_tokens: 1 << 15,
            kv_bytes: 2 << 30,
            resident_layers: None,
            text: true,
        };
        let model = GpuModel::open(&checkpoint_dir(), options).unwrap();
        let parts = GpuVaeParts {
            decoder: true,
            encoder: false,
        };
        let vae = GpuVae::open(model.gpu(), &checkpoint_dir(), parts).unwrap();
        Self {
            reference,
            model,
            vae,
        }
    }

    fn job(&mut self, entry: &DemoPrompt) -> GpuJob {
        let layout = layout(self.reference, entry);
        let rows = [RowKind::Cond, RowKind::Uncond].map(|kind| RowTokens::new(&layout, kind));
        let rows: Vec<&RowTokens<'_>> = rows.iter().collect();
        let mut prefixes = self.model.prefill(&rows).unwrap().into_iter().map(Arc::new);
        let given = GpuJobSpec {
            spec: spec(self.reference, entry),
            options: JobOptions::default(),
            cond: prefixes.next().unwrap(),
            uncond: prefixes.next(),
        };
        GpuJob::new(&mut self.model, given).unwrap()
    }

    fn latents(&mut self, entries: &[DemoPrompt]) -> Vec<Latents> {
        let mut jobs: Vec<GpuJob> = entries.iter().map(|entry| self.job(entry)).collect();
        while jobs.iter().any(|job| !job.is_done()) {
            let mut live: Vec<&mut GpuJob> = jobs.iter_mut().filter(|job| !job.is_done()).collect();
            self.model.denoise_step(&mut live).unwrap();
        }
        jobs.iter().map(|job| job.latents().unwrap()).collect()
    }

    /// Share of right pictures.
    fn score(&mut self, entries: &[DemoPrompt]) -> f64 {
        let mut right = 0;
        for chunk in entries.chunks(PACKED) {
            for (entry, latents) in chunk.iter().zip(self.latents(chunk)) {
                let picture = self.vae.decode(&latents).unwrap();
                right += usize::from(judge(&read(&picture), &entry.expect).is_none());
            }
        }
        right as f64 / entries.len() as f64
    }
}

#[test]
#[ignore = "needs a Hopper GPU"]
fn demo_prompts_are_drawn_as_well_in_fp8_as_in_bf16() {
    let reference = Model::open(&checkpoint_dir(), LoadOptions::default()).unwrap();
    let prompts = DemoSet::load().unwrap().prompts;
    let bf16 = Easel::new(&reference, WeightType::Bf16).score(&prompts);
    let fp8 = Easel::new(&reference, WeightType::Fp8).score(&prompts);
    let count = prompts.len();
    println!("{count} prompts: bf16 {bf16:.4}, fp8 {fp8:.4}");
    assert!(bf16 >= RIGHT, "{bf16}");
    assert!(fp8 >= bf16 - FP8_LOSS, "fp8 {fp8}, bf16 {bf16}");
}

#[test]
#[ignore = "needs a Hopper GPU"]
fn final_latents_of_the_demo_model_have_the_direction_of_the_cpus_in_bf16() {
    let reference = Model::open(&checkpoint_dir(), LoadOptions::default()).unwrap();
    let prompts = DemoSet::load().unwrap().prompts;
    let entries = &prompts[..COMPARED];
    let want = cpu_latents(&reference, entries);
    let got = Easel::new(&reference, WeightType::Bf16).latents(entries);
    for (want, got) in want.iter().zip(&got) {
        let cosine = crate::golden::cosine(got.data(), want.data());
        println!("cosine of final latents {cosine:.6}");
        assert!(cosine >= 0.999, "{cosine}");
    }
}
