//! A small random model and requests for it.
#![allow(dead_code, clippy::unwrap_used)]

use std::sync::Arc;

use model::input::RowInput;
use model::{JobSpec, KvCache, Model, ModelConfig, PrefixKv};
use parallel::{Plan, RankContext, RingPrefix, SharedExpert};
use serde_json::json;

pub(crate) const CELL: usize = 16;

pub(crate) fn config(distilled: bool) -> ModelConfig {
    parse(&base(distilled))
}

/// The same with sizes that many ranks divide: 8 query and 2 KV heads, 8 experts, 3 layers.
pub(crate) fn divisible() -> ModelConfig {
    let mut config = base(false);
    for (name, value) in [
        ("num_hidden_layers", json!(3)),
        ("num_attention_heads", json!(8)),
        ("moe_intermediate_size", json!([24, 40, 16])),
        ("num_experts", json!(8)),
        ("moe_topk", json!([3, 2, 4])),
        ("num_shared_expert", json!([2, 1, 1])),
    ] {
        config[name] = value;
    }
    parse(&config)
}

pub(crate) fn parse(config: &serde_json::Value) -> ModelConfig {
    ModelConfig::parse(config, &json!({ "flow_shift": 3.0 })).unwrap()
}

pub(crate) fn base(distilled: bool) -> serde_json::Value {
    json!({
        "vocab_size": 100, "hidden_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 6, "num_key_value_heads": 2, "attention_head_dim": 8,
        "intermediate_size": 24, "moe_intermediate_size": [24, 40], "num_experts": 5,
        "moe_topk": [3, 2], "use_mixed_mlp_moe": true, "num_shared_expert": [2, 1],
        "norm_topk_prob": true, "use_qk_norm": true, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "max_position_embeddings": 300, "patch_embed_hidden_dim": 32,
        "image_base_size": 64, "cfg_distilled": distilled, "use_meanflow": distilled,
        "vae": {
            "latent_channels": 4, "block_out_channels": [32, 32, 32, 32, 32],
            "layers_per_block": 1, "ffactor_spatial": CELL, "ffactor_temporal": 4,
            "sample_size": 64, "scaling_factor": 0.5,
        },
        "vit": {
            "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
            "num_attention_heads": 2, "patch_size": 16, "num_patches": 16,
            "hidden_act": "gelu_pytorch_tanh",
        },
        "vit_processor": { "max_num_patches": 16 },
        "vit_aligner": { "projector_type": "mlp_gelu", "input_dim": 16, "n_embed": 64 },
    })
}

pub(crate) fn ctx() -> RankContext {
    RankContext::single()
}

pub(crate) fn ids(tokens: usize, salt: u64) -> Vec<u32> {
    (0..tokens as u64)
        .map(|i| ((i * 37 + salt * 11 + i * i) % 100) as u32)
        .collect()
}

/// Keys and values of `ids` as text.
pub(crate) fn prefix(model: &Model, ids: &[u32]) -> Arc<PrefixKv> {
    let row = RowInput {
        start: 0,
        ids,
        images: &[],
        full: &[],
        vectors: &[],
    };
    let mut cache = KvCache::new(model.info().kv, ids.len()).unwrap();
    model.fill_rows(&ctx(), &[row], &mut [&mut cache]).unwrap();
    Arc::new(cache.into_prefix())
}

#[derive(Clone, Debug)]
pub(crate) struct Case {
    pub(crate) grid: (usize, usize),
    pub(crate) steps: usize,
    pub(crate) seed: u64,
    pub(crate) guidance: f64,
    pub(crate) tokens: (usize, usize),
}

impl Case {
    pub(crate) fn spec(&self, model: &Model) -> JobSpec {
        JobSpec {
            height: self.grid.0 * CELL,
            width: self.grid.1 * CELL,
            steps: self.steps,
            guidance: self.guidance,
            seed: self.seed,
            cond: Some(prefix(model, &ids(self.tokens.0, self.seed))),
            uncond: Some(prefix(model, &ids(self.tokens.1, self.seed + 1))),
        }
    }
}

/// Every plan on `ranks` ranks, with the options that only matter under some axes.
pub(crate) fn plans(ranks: usize) -> Vec<Plan> {
    let legal = Plan::legal(&divisible().shape(), ranks).unwrap();
    let mut all = Vec::new();
    for plan in legal {
        all.push(plan);
        if plan.tp > 1 {
            all.push(Plan {
                shared_expert: SharedExpert::Replicated,
                ..plan
            });
        }
        if plan.ring > 1 {
            all.push(Plan {
                ring_prefix: RingPrefix::Sharded,
                ..plan
            });
        }
    }
    all
}
