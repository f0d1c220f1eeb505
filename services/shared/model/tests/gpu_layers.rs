//! What FP8 makes of one layer: each layer of the demo model, and one of the released sizes, in FP8 beside bf16 with the
//! same input. What is compared is the residual stream behind the layer, of each token.
//!
//! Needs an H100 or H200: `cargo test -p model --features cuda --test gpu_layers -- --ignored --test-threads 1 --nocapture`.
#![cfg(feature = "cuda")]
#![allow(clippy::unwrap_used, missing_docs)]

use std::collections::BTreeMap;
use std::path::Path;

use kernels::Tensor;
use model::backbone::{Probe, Site};
use model::gpu::{GpuModel, GpuOptions, WeightType};
use model::input::RowInput;
use model::{LoadOptions, Model, ModelConfig, RowKind, T2iRequest, Template};
use parallel::RankContext;
use serde_json::Value;

const DEMO: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/../../../deploy/demo-model/checkpoint"
);
const PUBLISHED: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/../../../integration-tests/fixtures/published"
);
const PROMPTS: [&str; 4] = [
    "a red circle",
    "a large blue square left of a small green triangle",
    "two yellow stars on a purple background",
    "a small orange ring above a white cross, wide picture",
];
/// Of a layer's residual stream with the weights of a trained model.
const LEAST_COSINE: f64 = 0.999;

fn options(weights: WeightType) -> GpuOptions {
    GpuOptions {
        ordinal: 0,
        weights,
        max_tokens: 4096,
        kv_bytes: 256 << 20,
        resident_layers: None,
        text: true,
    }
}

fn cosine(a: &[f32], b: &[f32]) -> f64 {
    let dot = |a: &[f32], b: &[f32]| -> f64 {
        let products = a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b));
        products.sum()
    };
    dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()
}

/// Cosines of the tokens of both: the middle one and the least.
fn tokens(want: &[f32], got: &[f32], width: usize) -> (f64, f64) {
    let pairs = want.chunks_exact(width).zip(got.chunks_exact(width));
    let mut all: Vec<f64> = pairs.map(|(want, got)| cosine(want, got)).collect();
    all.sort_by(f64::total_cmp);
    (all[all.len() / 2], all[0])
}

/// The residual stream in front of every layer, and behind the last.
#[derive(Default)]
struct Streams(Vec<Tensor>);

impl Probe for Streams {
    fn tensor(&mut self, _layer: usize, site: Site, value: &Tensor) {
        if site == Site::Output {
            self.0.push(value.clone());
        }
    }
}

/// Tensors of a shard by name: type, shape and bytes.
type Shard = BTreeMap<String, (Value, Vec<u8>)>;

fn read_shards(dir: &Path) -> Shard {
    let mut all = Shard::new();
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_none_or(|e| e != "safetensors") {
            continue;
        }
        let bytes = std::fs::read(path).unwrap();
        let (length, rest) = bytes.split_first_chunk::<8>().unwrap();
        let (header, data) = rest.split_at(u64::from_le_bytes(*length) as usize);
        let header: BTreeMap<String, Value> = serde_json::from_slice(header).unwrap();
        for (name, entry) in header {
            if name != "__metadata__" {
                let place = |i: usize| entry["data_offsets"][i].as_u64().unwrap() as usize;
                let values = data[place(0)..place(1)].to_vec();
                all.insert(name, (entry, values));
            }
        }
    }
    all
}

fn write_shard(path: &Path, shard: &Shard) {
    let (mut header, mut data) = (serde_json::Map::new(), Vec::new());
    for (name, (entry, values)) in shard {
        let mut entry = entry.clone();
        entry["data_offsets"] = [data.len(), data.len() + values.len()].as_slice().into();
        header.insert(name.clone(), entry);
        data.extend_from_slice(values);
    }
    let mut header = serde_json::to_vec(&header).unwrap();
    header.resize(header.len().next_multiple_of(8), b' ');
    let length = (header.len() as u64).to_le_bytes();
    std::fs::write(path, [&length, &header[..], &data[..]].concat()).unwrap();
}

/// A checkpoint whose only layer is layer `index` of `from`; every token takes `top_k` experts.
fn one_layer(from: &Path, all: &Shard, index: usize, top_k: usize, to: &Path) {
    let text = std::fs::read_to_string(from.join("config.json")).unwrap();
    let mut config: Value = serde_json::from_str(&text).unwrap();
    config["num_hidden_layers"] = 1.into();
    for key in ["moe_intermediate_size", "num_shared_expert"] {
        config[key] = vec![config[key][index].clone()].into();
    }
    config["moe_topk"] = vec![top_k].into();
    std::fs::write(to.join("config.json"), config.to_string()).unwrap();
    let file = "generation_config.json";
    std::fs::copy(from.join(file), to.join(file)).unwrap();
    let own = format!("model.layers.{index}.");
    let kept = all.iter().filter_map(|(name, values)| {
        let name = match name.strip_prefix(&own) {
            Some(rest) => format!("model.layers.0.{rest}"),
            None if name.starts_with("model.layers.") => return None,
            None => name.clone(),
        };
        Some((name, values.clone()))
    });
    write_shard(&to.join("model.safetensors"), &kept.collect());
}

/// What the only layer of a checkpoint makes of `stream`.
fn behind(dir: &Path, weights: WeightType, stream: &Tensor) -> Vec<f32> {
    let mut model = GpuModel::open(dir, options(weights)).unwrap();
    let ids = vec![0; stream.dim(0)];
    let vectors = [(0, stream.clone())];
    let row = RowInput {
        start: 0,
        ids: &ids,
        images: &[],
        full: &[],
        vectors: &vectors,
    };
    let mut cache = model.cache(ids.len()).unwrap();
    let hidden = model.run_rows(&[row], &mut [&mut cache], true).unwrap();
    hidden.unwrap().to_f32_vec().unwrap()
}

/// The residual streams of one row that has the tokens of all prompts.
fn demo_streams(model: &Model) -> Vec<Tensor> {
    let mut ids = Vec::new();
    for prompt in PROMPTS {
        let bucket = &model.info().buckets[0];
        let layout = model.layout_text_to_image(&T2iRequest {
            prompt: prompt.to_owned(),
            system_prompt: None,
            template: Template::Pretrain,
            height: bucket.height,
            width: bucket.width,
        });
        let layout = layout.unwrap();
        ids.extend_from_slice(&layout.tokens(RowKind::Cond)[..layout.prefix_len()]);
    }
    let row = RowInput {
        start: 0,
        ids: &ids,
        images: &[],
        full: &[],
        vectors: &[],
    };
    let mut cache = model.cache(ids.len()).unwrap();
    let mut streams = Streams::default();
    let alone = RankContext::single();
    model
        .run_rows(&alone, &[row], &mut [&mut cache], &mut streams)
        .unwrap();
    streams.0
}

#[test]
#[ignore = "needs a Hopper GPU"]
fn every_layer_of_the_demo_model_in_fp8_has_the_direction_of_bf16() {
    let dir = Path::new(DEMO);
    let reference = Model::open(dir, LoadOptions::default()).unwrap();
    let streams = demo_streams(&reference);
    let moe = &reference.config().layers[0];
    let all = read_shards(dir);
    let mut low = Vec::new();
    for (index, stream) in streams.iter().enumerate().take(streams.len() - 1) {
        // The layer behind the stream.
        for top_k in [moe.top_k, moe.experts] {
            let to = tempfile::tempdir().unwrap();
            one_layer(dir, &all, index + 1, top_k, to.path());
            let [want, got] = [WeightType::Bf16, WeightType::Fp8]
                .map(|weights| behind(to.path(), weights, stream));
            let (middle, least) = tokens(&want, &got, stream.dim(1));
            println!(
                "layer {}, {top_k} of {} experts: cosine {middle:.6}, least of any token {least:.6}",
                index + 1,
                moe.experts
            );
            if middle < LEAST_COSINE {
                low.push((index + 1, top_k, middle));
            }
        }
    }
    assert!(low.is_empty(), "{low:?}");
}

/// One layer with random weights of the released sizes over tokens with this much residual, in units of the embedding.
fn random_layer(weights: WeightType, experts: usize, stream: &Tensor) -> Vec<f32> {
    let mut config = ModelConfig::from_dir(Path::new(PUBLISHED)).unwrap();
    config.layers.truncate(1);
    config.layers[0].experts = experts;
    config.vocab_size = 4096;
    let mut model = GpuModel::random(config, options(weights), 5).unwrap();
    let ids = vec![0; stream.dim(0)];
    let vectors = [(0, stream.clone())];
    let row = RowInput {
        start: 0,
        ids: &ids,
        images: &[],
        full: &[],
        vectors: &vectors,
    };
    let mut cache = model.cache(ids.len()).unwrap();
    let hidden = model.run_rows(&[row], &mut [&mut cache], true).unwrap();
    hidden.unwrap().to_f32_vec().unwrap()
}

/// Where all of a token is the outcome of products whose operands have 3 mantissa bits, its direction cannot be better
/// than they are; the more there is of the residual stream, the better it is kept.
#[test]
#[ignore = "needs a Hopper GPU"]
fn a_layer_of_random_weights_in_fp8_is_nearer_to_bf16_the_more_residual_there_is() {
    const TOKENS: usize = 600;
    for experts in [64, 8] {
        let mut before = 0.0;
        for scale in [0.01_f32, 1.0, 10.0] {
            let mut seed = 1_u64;
            let values = (0..TOKENS * 4096).map(|_| {
                seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                let unit = (seed >> 40) as f32 / (1_u64 << 23) as f32 - 1.0;
                half::bf16::from_f32(unit * scale).to_f32()
            });
            let stream = Tensor::from_f32(&[TOKENS, 4096], values.collect()).unwrap();
            let [want, got] = [WeightType::Bf16, WeightType::Fp8]
                .map(|weights| random_layer(weights, experts, &stream));
            let size = |v: &[f32]| (v.iter().map(|v| v * v).sum::<f32>() / v.len() as f32).sqrt();
            let (middle, least) = tokens(&want, &got, 4096);
            println!(
                "8 of {experts} experts, residual {:.3} of {:.3}: cosine {middle:.6}, least {least:.6}",
                size(stream.as_f32().unwrap()),
                size(&want)
            );
            assert!(
                middle >= 0.985 && middle >= before,
                "{middle} after {before}"
            );
            before = middle - 1e-4;
        }
    }
}
