//! A model that is larger than the memory it may take. A test binary of its own: memory is the process's.
#![allow(clippy::unwrap_used, clippy::print_stderr, missing_docs)]

use std::sync::Arc;

use dit_worker::ledger::{peak_bytes, reset_peak, resident_bytes};
use model::{DenoiseJob, JobSpec, LoadOptions, Model, ModelConfig, Parts, PrefixKv, Residency};
use parallel::RankContext;
use serde_json::json;

/// Sixteen layers of 5 MB.
fn config() -> ModelConfig {
    let config = json!({
        "vocab_size": 100, "hidden_size": 256, "num_hidden_layers": 16,
        "num_attention_heads": 8, "num_key_value_heads": 2, "attention_head_dim": 32,
        "moe_intermediate_size": 256, "num_experts": 12, "moe_topk": 2,
        "use_mixed_mlp_moe": true, "num_shared_expert": 1, "use_qk_norm": true,
        "max_position_embeddings": 300, "patch_embed_hidden_dim": 32, "image_base_size": 64,
        "vae": {
            "latent_channels": 4, "block_out_channels": [32, 32, 32, 32, 32],
            "layers_per_block": 1, "ffactor_spatial": 16, "ffactor_temporal": 4,
            "sample_size": 64, "scaling_factor": 0.5,
        },
        "vit": {
            "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
            "num_attention_heads": 2, "patch_size": 16, "num_patches": 16,
        },
        "vit_processor": { "max_num_patches": 16 },
        "vit_aligner": { "projector_type": "mlp_gelu", "input_dim": 16, "n_embed": 256 },
    });
    ModelConfig::parse(&config, &json!({})).unwrap()
}

fn job(model: &Model, seed: u64) -> DenoiseJob {
    let values = model.info().kv.elements_per_token() * 8;
    let prefix = || {
        let values = (0..values).map(|i| (i as f32 * 0.3 + seed as f32).sin());
        Some(Arc::new(
            PrefixKv::new(model.info().kv, 8, values.collect()).unwrap(),
        ))
    };
    let spec = JobSpec {
        height: 64,
        width: 64,
        steps: 2,
        guidance: 3.0,
        seed,
        cond: prefix(),
        uncond: prefix(),
    };
    DenoiseJob::new(model, spec).unwrap()
}

#[test]
fn a_model_larger_than_its_bytes_runs_within_them_and_makes_the_same_pictures() {
    let dir = tempfile::tempdir().unwrap();
    let options = |residency| LoadOptions {
        parts: Parts {
            vae_decoder: false,
            ..Parts::DENOISE
        },
        residency,
        ..LoadOptions::default()
    };
    let run = |model: &Model| {
        let mut jobs: Vec<DenoiseJob> = (0..3).map(|seed| job(model, seed)).collect();
        for _ in 0..2 {
            let mut packed: Vec<&mut DenoiseJob> = jobs.iter_mut().collect();
            model
                .denoise_step(&RankContext::single(), &mut packed)
                .unwrap();
        }
        jobs.iter()
            .map(|job| job.latents().unwrap())
            .collect::<Vec<_>>()
    };
    drop(Model::random_stored(config(), options(Residency::Layers(0)), 3, dir.path()).unwrap());
    let open = |residency| Model::stored(config(), options(residency), dir.path()).unwrap();
    let budget = 24 << 20;
    let before = resident_bytes().unwrap();
    reset_peak().unwrap();
    let model = open(Residency::Bytes(budget));
    let some = run(&model);
    let (peak, travelling) = (peak_bytes().unwrap() - before, model.travelling().unwrap());
    drop(model);
    let whole = open(Residency::All);
    let all = run(&whole);
    let size = open(Residency::Layers(0)).travelling().unwrap().bytes;
    eprintln!("{size} bytes of layers, {budget} allowed, {peak} more resident, {travelling:?}");
    assert!(some == all, "bits differ");
    assert!(size > 3 * budget && travelling.layers > 8);
    // Stem, head, activations and one tensor on its way from the file come on top of the layers.
    assert!(
        peak < budget + (24 << 20),
        "{peak} with {budget} for the layers"
    );
}
