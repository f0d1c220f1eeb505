//! What a model says about itself, in wire form.
use kv::{KvDType, KvGeometry};
use model::ModelInfo;
use proto::v1;

/// The wire form of a geometry.
pub fn geometry_to_proto(geometry: &KvGeometry) -> v1::KvGeometry {
    let dtype = match geometry.dtype {
        KvDType::F32 => v1::DType::F32,
        KvDType::Bf16 => v1::DType::Bf16,
    };
    v1::KvGeometry {
        layers: narrow(geometry.layers),
        kv_heads: narrow(geometry.kv_heads),
        head_dim: narrow(geometry.head_dim),
        dtype: dtype.into(),
    }
}

/// What the registry publishes of a model and of how its ranks run it.
pub fn ranks_to_proto(ranks: &crate::Ranks) -> v1::ModelInfo {
    v1::ModelInfo {
        plan: ranks.plan().to_string(),
        kernels: ranks.kernels().to_owned(),
        ..model_to_proto(ranks.info())
    }
}

/// What the registry publishes of a model.
pub fn model_to_proto(info: &ModelInfo) -> v1::ModelInfo {
    v1::ModelInfo {
        name: info.name.clone(),
        weights_id: info.weights_id.clone(),
        buckets: info
            .buckets
            .iter()
            .map(|bucket| v1::Bucket {
                ratio_index: narrow(bucket.ratio_index),
                height: narrow(bucket.height),
                width: narrow(bucket.width),
            })
            .collect(),
        default_steps: narrow(info.default_steps),
        default_guidance: info.default_guidance,
        cfg_distilled: info.cfg_distilled,
        max_sequence_tokens: narrow(info.max_sequence_tokens),
        default_template: info.default_template.name().to_owned(),
        kv_geometry: Some(geometry_to_proto(&info.kv)),
        pixels_per_token: narrow(info.pixels_per_token),
        default_mode: info.default_mode.clone(),
        system_prompts: info
            .system_prompts
            .iter()
            .map(|(name, fingerprint)| v1::SystemPrompt {
                name: (*name).to_owned(),
                fingerprint: fingerprint.clone(),
            })
            .collect(),
        max_new_tokens: narrow(info.max_new_tokens),
        ..v1::ModelInfo::default()
    }
}

// Config checks bound every one of these far below u32::MAX; saturate rather than wrap if that ever fails.
fn narrow(value: usize) -> u32 {
    u32::try_from(value).unwrap_or(u32::MAX)
}
