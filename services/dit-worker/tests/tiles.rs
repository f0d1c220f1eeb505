//! What tiles save of a decode's memory. A test binary of its own: memory is the process's.
#![allow(clippy::unwrap_used, clippy::print_stderr, missing_docs)]

use dit_worker::ledger::{peak_bytes, reset_peak, resident_bytes};
use model::vae::Tiles;
use model::{Latents, LoadOptions, Model, ModelConfig, Parts};
use serde_json::json;

/// Cells of a side: 8 tiles, as a picture of 2048 x 2048 has about 5 of 384. Freed buffers of up to 48 tiles are kept
/// for reuse, which is nothing beside real ones.
const CELLS: usize = 24;

fn config() -> ModelConfig {
    let config = json!({
        "vocab_size": 100, "hidden_size": 64, "num_hidden_layers": 1,
        "num_attention_heads": 4, "num_key_value_heads": 2, "attention_head_dim": 16,
        "moe_intermediate_size": 64, "num_experts": 2, "moe_topk": 1,
        "max_position_embeddings": 300, "patch_embed_hidden_dim": 32, "image_base_size": 64,
        "vae": {
            "latent_channels": 4, "block_out_channels": [32, 32, 32, 32, 32],
            "layers_per_block": 1, "ffactor_spatial": 16, "ffactor_temporal": 4,
            "sample_size": 48, "scaling_factor": 0.5,
        },
        "vit": {
            "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
            "num_attention_heads": 2, "patch_size": 16, "num_patches": 16,
        },
        "vit_processor": { "max_num_patches": 16 },
        "vit_aligner": { "projector_type": "mlp_gelu", "input_dim": 16, "n_embed": 64 },
    });
    ModelConfig::parse(&config, &json!({})).unwrap()
}

#[test]
fn a_tiled_decode_takes_a_third_of_the_memory_of_a_whole_one_at_most() {
    let options = LoadOptions {
        parts: Parts {
            diffusion: false,
            ..Parts::DENOISE
        },
        ..LoadOptions::default()
    };
    let model = Model::random(config(), options, 1).unwrap();
    let values = (0..4 * CELLS * CELLS).map(|i| (i as f32 * 0.7).sin());
    let latents = Latents::new(4, CELLS, CELLS, values.collect()).unwrap();
    let mut growth = Vec::new();
    // The smaller one first: what it leaves behind hides nothing of the larger one.
    for tiles in [Tiles::Overlapping(0.25), Tiles::Whole] {
        let before = resident_bytes().unwrap();
        reset_peak().unwrap();
        model.vae().decode(&latents, tiles).unwrap();
        growth.push(peak_bytes().unwrap() - before);
    }
    eprintln!("tiled {} whole {} bytes", growth[0], growth[1]);
    assert!(3 * growth[0] <= growth[1], "{growth:?}");
}
