//! The released configs parse, and each unusable value is refused by name.

use serde_json::{Value, json};

use super::*;
use crate::error::ErrorKind;
use crate::weights::{expected_tensors, is_tolerated_extra};

/// The base release's config, as far as inference reads it.
const RELEASED: &str = r#"{
    "architectures": ["HunyuanImage3ForCausalMM"],
    "model_type": "hunyuan_image_3_moe",
    "model_version": "HunyuanImage-3.0",
    "vocab_size": 133120, "hidden_size": 4096, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "attention_head_dim": 128,
    "intermediate_size": 3072, "num_experts": 64,
    "use_mixed_mlp_moe": true, "moe_layer_num_skipped": 0, "norm_topk_prob": true,
    "moe_drop_tokens": false, "capacity_factor": 1.0, "hidden_act": "silu",
    "norm_type": "rms", "rms_norm_eps": 1e-5, "use_qk_norm": true,
    "use_rotary_pos_emb": true, "rope_type": "2d", "rope_theta": 10000.0,
    "rope_scaling": {"type": "custom", "factor": 1.0, "alpha": 1.0},
    "max_position_embeddings": 22800, "attention_bias": false, "mlp_bias": false,
    "tie_word_embeddings": false, "use_cla": false, "use_mla": false,
    "add_classification_head": false, "cond_token_attn_type": "joint_full",
    "cond_image_type": "vae_vit", "vae_downsample_factor": [16, 16],
    "vae": {
        "in_channels": 3, "out_channels": 3, "latent_channels": 32,
        "block_out_channels": [128, 256, 512, 1024, 1024], "layers_per_block": 2,
        "ffactor_spatial": 16, "ffactor_temporal": 4, "sample_size": 384,
        "sample_tsize": 96, "downsample_match_channel": true,
        "upsample_match_channel": true, "scaling_factor": 0.562679178327931
    },
    "vit": {
        "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27,
        "num_attention_heads": 16, "patch_size": 16, "num_patches": 256,
        "num_channels": 3, "layer_norm_eps": 1e-6, "hidden_act": "gelu_pytorch_tanh"
    },
    "vit_processor": {"max_num_patches": 1024, "patch_size": 16, "resample": 2},
    "vit_aligner": {
        "projector_type": "mlp_gelu", "input_dim": 1152, "n_embed": 4096, "depth": 2
    }
}"#;

fn released() -> Value {
    let mut config: Value = serde_json::from_str(RELEASED).unwrap();
    for (field, value) in [
        ("moe_intermediate_size", 3072),
        ("moe_topk", 8),
        ("num_shared_expert", 1),
    ] {
        config[field] = json!(vec![value; 32]);
    }
    config
}

fn parse(config: &Value) -> Result<ModelConfig, ModelError> {
    ModelConfig::parse(config, &json!({}))
}

/// The released config with one field set; `path` may lead into a nested object.
fn with(path: &str, value: Value) -> Value {
    let mut config = released();
    let mut at = &mut config;
    for part in path.split('.') {
        at = &mut at[part];
    }
    *at = value;
    config
}

#[test]
fn the_released_config_calls_for_the_published_tensors_and_parameters() {
    let count = |config: &ModelConfig| {
        let set = expected_tensors(config);
        let parameters: usize = set.iter().map(|s| s.shape.iter().product::<usize>()).sum();
        assert!(!set.iter().any(|s| is_tolerated_extra(&s.name)));
        (set.len(), parameters)
    };
    // Published: 5161 tensors of which 11, with 15 238 352 values, are the unused pooling head.
    let base = count(&parse(&released()).unwrap());
    assert_eq!(base, (5161 - 11, 83_009_199_459 - 15_238_352));
    // The distilled release adds two time embedders.
    let mut distilled = released();
    distilled["cfg_distilled"] = true.into();
    distilled["use_meanflow"] = true.into();
    let distilled = parse(&distilled).unwrap();
    assert_eq!(count(&distilled), (base.0 + 8, base.1 + 35_667_968));
    assert!(distilled.extra_ratios);
    assert!(!distilled.guidance_needs_two_rows(5.0));
}

#[test]
fn tensor_names_are_unique() {
    let set = expected_tensors(&parse(&released()).unwrap());
    let names: std::collections::BTreeSet<&str> = set.iter().map(|s| s.name.as_str()).collect();
    assert_eq!(names.len(), set.len());
}

#[test]
fn per_layer_fields_may_be_one_number_or_a_list() {
    let list = parse(&released()).unwrap();
    for (field, value) in [
        ("moe_intermediate_size", json!(3072)),
        ("num_experts", json!(vec![64; 32])),
        ("moe_topk", json!(8)),
        ("num_shared_expert", json!(1)),
    ] {
        assert_eq!(parse(&with(field, value)).unwrap(), list, "{field}");
    }
    let mut widths = vec![3072; 32];
    widths[5] = 1024;
    let uneven = parse(&with("moe_intermediate_size", json!(widths))).unwrap();
    assert_eq!(uneven.layers[5].intermediate, 1024);
    assert_eq!(uneven.layers[5].shared_intermediate, Some(1024));
    assert_eq!(uneven.layers[6], list.layers[6]);
}

#[test]
fn only_instruct_releases_have_the_extra_ratios() {
    assert!(!parse(&released()).unwrap().extra_ratios);
    let instruct = with("model_version", json!("HunyuanImage-3.0-Instruct"));
    assert!(parse(&instruct).unwrap().extra_ratios);
    let mut unnamed = released();
    unnamed.as_object_mut().unwrap().remove("model_version");
    assert!(!parse(&unnamed).unwrap().extra_ratios);
}

#[test]
fn impossible_values_are_refused_by_name() {
    for (field, value) in [
        ("hidden_size", json!(0)),
        ("hidden_size", json!(-1)),
        ("hidden_size", json!(4096.5)),
        ("hidden_size", json!("4096")),
        ("hidden_size", json!(1u64 << 40)),
        ("hidden_size", json!(4090)),
        ("num_hidden_layers", json!(1_000_000)),
        ("num_key_value_heads", json!(5)),
        ("attention_head_dim", json!(127)),
        ("moe_topk", json!(65)),
        // The list of expected tensors would be as long.
        ("num_experts", json!(1 << 20)),
        ("vae.layers_per_block", json!(1 << 20)),
        ("vit.num_hidden_layers", json!(1 << 20)),
        ("vit_aligner.depth", json!(1 << 20)),
        ("moe_intermediate_size", json!([3072, 3072])),
        ("rms_norm_eps", json!(0.0)),
        ("rope_theta", json!(-1.0)),
        ("max_position_embeddings", json!(null)),
        ("use_qk_norm", json!("yes")),
        ("vae_downsample_factor", json!([8, 8])),
        ("image_base_size", json!(1000)),
        ("vae", json!([])),
        ("vae.ffactor_spatial", json!(12)),
        ("vae.block_out_channels", json!([128, 256, 512, 1024])),
        ("vae.block_out_channels", json!([100, 256, 512, 1024, 1024])),
        ("vae.latent_channels", json!(33)),
        ("vae.scaling_factor", json!(0)),
        ("vit.num_patches", json!(255)),
        ("vit.num_attention_heads", json!(7)),
        ("vit_processor.image_std", json!([0.5, 0.5])),
        ("vit_aligner.n_embed", json!(1024)),
    ] {
        let error = parse(&with(field, value)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Checkpoint, "{field}: {error}");
        assert!(error.to_string().contains(field), "{field}: {error}");
    }
}

#[test]
fn mathematics_that_is_not_built_is_refused_by_name() {
    for (field, value) in [
        ("use_mla", json!(true)),
        ("use_cla", json!(true)),
        ("group_limited_greedy", json!(true)),
        ("tie_word_embeddings", json!(true)),
        ("moe_drop_tokens", json!(true)),
        ("moe_layer_num_skipped", json!(1)),
        ("num_experts", json!(1)),
        ("cond_token_attn_type", json!("full")),
        ("hidden_act", json!("gelu")),
        ("patch_size", json!(2)),
        ("rope_scaling.factor", json!(2.0)),
        ("vae.downsample_match_channel", json!(false)),
        ("vit.hidden_act", json!("gelu")),
        ("vit_processor.resample", json!(3)),
        ("vit_aligner.projector_type", json!("linear")),
    ] {
        let error = parse(&with(field, value)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unimplemented, "{field}: {error}");
        assert!(error.to_string().contains(field), "{field}: {error}");
    }
}

#[test]
fn generation_defaults_are_read_and_checked() {
    let file = json!({
        "diff_infer_steps": 8, "diff_guidance_scale": 2.5, "flow_shift": 3.0,
        "sequence_template": "instruct", "max_length": 12_800, "temperature": 0.6,
    });
    let config = ModelConfig::parse(&released(), &file).unwrap();
    let generation = &config.generation;
    assert_eq!((generation.steps, generation.guidance), (8, 2.5));
    assert_eq!(generation.template, Template::Instruct);
    assert_eq!(config.max_text_tokens(), 12_800);
    let bare = parse(&released()).unwrap();
    assert_eq!(bare.generation.steps, 50);
    assert_eq!(bare.max_text_tokens(), 22_800);
    for bad in [
        json!({"diff_infer_steps": 0}),
        json!({"flow_shift": 0}),
        json!({"sequence_template": "chat"}),
        json!([]),
    ] {
        assert!(ModelConfig::parse(&released(), &bad).is_err(), "{bad}");
    }
}

#[test]
fn no_json_value_makes_the_parser_panic() {
    let paths: Vec<String> = released()
        .as_object()
        .unwrap()
        .iter()
        .flat_map(|(name, value)| {
            let nested = value.as_object().into_iter().flat_map(|o| o.keys());
            let nested: Vec<String> = nested.map(|k| format!("{name}.{k}")).collect();
            std::iter::once(name.clone()).chain(nested)
        })
        .collect();
    for path in paths {
        for value in [
            json!(null),
            json!(0),
            json!(1),
            json!(3),
            json!(-1),
            json!(u64::MAX),
            json!(1e300),
            json!("x"),
            json!([]),
            json!([0]),
            json!({}),
            json!(true),
        ] {
            // Either outcome is right; reaching the next value is the promise.
            drop(parse(&with(&path, value)));
        }
    }
}
