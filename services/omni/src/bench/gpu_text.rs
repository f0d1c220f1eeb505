//! Prefill and text decoding on one GPU.
use std::path::Path;

use base::clock;
use model::{
    ModelConfig,
    gpu::{GpuCache, GpuModel, GpuOptions, WeightType},
    input::RowInput,
};
use serde_json::{Value, json};

use super::{median, model_error};
use crate::error::OmniError;

/// Decoded tokens that are not timed.
const WARM_UP: usize = 4;
/// Passes of the prefill, of which the median counts.
const PREFILLS: usize = 3;

/// What was asked for.
pub(super) struct TextBench<'a> {
    /// Its weights are made up where there is no checkpoint.
    pub(super) config: ModelConfig,
    pub(super) checkpoint: Option<&'a Path>,
    pub(super) ordinal: usize,
    pub(super) weights: WeightType,
    pub(super) rows: usize,
    pub(super) prefix: usize,
    pub(super) steps: usize,
    pub(super) seed: u64,
}

/// Runs the measurement.
pub(super) fn run(bench: &TextBench<'_>) -> Result<Value, OmniError> {
    let config = &bench.config;
    let total = bench.prefix + WARM_UP + bench.steps;
    let row_bytes = config.num_layers() * 4 * config.num_kv_heads * config.head_dim;
    let options = GpuOptions {
        ordinal: bench.ordinal,
        weights: bench.weights,
        max_tokens: bench.rows.max(bench.prefix),
        kv_bytes: (bench.rows + 2) * (total + 256) * row_bytes,
        resident_layers: None,
        text: true,
    };
    let mut model = match bench.checkpoint {
        Some(dir) => GpuModel::open(dir, options),
        None => GpuModel::random(config.clone(), options, bench.seed),
    }
    .map_err(model_error)?;
    let ids: Vec<u32> = (0..bench.prefix)
        .map(|i| ((i * 7919 + 13) % config.vocab_size) as u32)
        .collect();
    let mut prefills = Vec::with_capacity(PREFILLS);
    for _ in 0..PREFILLS {
        let mut cache = model.cache(bench.prefix).map_err(model_error)?;
        synchronize(&model)?;
        let begun = clock::now();
        pass(&mut model, &[(0, &ids)], &mut [&mut cache], false)?;
        synchronize(&model)?;
        prefills.push(clock::millis_since(begun));
    }
    let mut caches = Vec::with_capacity(bench.rows);
    for _ in 0..bench.rows {
        let mut cache = model.cache(total).map_err(model_error)?;
        pass(&mut model, &[(0, &ids)], &mut [&mut cache], false)?;
        caches.push(cache);
    }
    let mut next = vec![ids[0]; bench.rows];
    let mut times = Vec::with_capacity(bench.steps);
    for step in 0..WARM_UP + bench.steps {
        let begun = clock::now();
        let at = bench.prefix + step;
        let inputs: Vec<(usize, &[u32])> = next.chunks(1).map(|id| (at, id)).collect();
        let mut borrowed: Vec<&mut GpuCache> = caches.iter_mut().collect();
        let logits = pass(&mut model, &inputs, &mut borrowed, true)?;
        next = logits
            .chunks_exact(config.vocab_size)
            .map(likeliest)
            .collect();
        if step >= WARM_UP {
            times.push(clock::millis_since(begun));
        }
    }
    Ok(report(bench, &model, median(&prefills), &times))
}

fn synchronize(model: &GpuModel) -> Result<(), OmniError> {
    let waited = model.gpu().synchronize();
    waited.map_err(|error| model_error(error.into()))
}

/// Runs rows `(start, ids)` on their caches; with `logits`, those of each row's last token.
fn pass(
    model: &mut GpuModel,
    rows: &[(usize, &[u32])],
    caches: &mut [&mut GpuCache],
    logits: bool,
) -> Result<Vec<f32>, OmniError> {
    let inputs: Vec<RowInput<'_>> = rows
        .iter()
        .map(|(start, ids)| RowInput {
            start: *start,
            ids,
            images: &[],
            full: &[],
            vectors: &[],
        })
        .collect();
    let hidden = model
        .run_rows(&inputs, caches, logits)
        .map_err(model_error)?;
    let Some(hidden) = hidden else {
        return Ok(Vec::new());
    };
    let logits = model.logits(&hidden).map_err(model_error)?;
    logits
        .to_f32_vec()
        .map_err(|error| model_error(error.into()))
}

fn likeliest(logits: &[f32]) -> u32 {
    let best = logits
        .iter()
        .enumerate()
        .max_by(|(_, a), (_, b)| a.total_cmp(b));
    best.map_or(0, |(id, _)| id as u32)
}

/// Weight bytes that one decoded token of one row reads: everything but the experts it does not choose.
fn weight_bytes(bench: &TextBench<'_>) -> f64 {
    let config = &bench.config;
    let width = config.num_heads * config.head_dim;
    let projections = config.hidden_size * (2 * width + 2 * config.num_kv_heads * config.head_dim);
    let element = match bench.weights {
        WeightType::Bf16 => 2,
        WeightType::Fp8 => 1,
    };
    let layers: usize = config
        .layers
        .iter()
        .map(|layer| {
            let inner = layer.top_k * layer.intermediate + layer.shared_intermediate.unwrap_or(0);
            element * (projections + 3 * config.hidden_size * inner)
        })
        .sum();
    (layers + 2 * config.vocab_size * config.hidden_size) as f64
}

fn report(bench: &TextBench<'_>, model: &GpuModel, prefill: f64, times: &[f64]) -> Value {
    let step = median(times);
    let bytes = weight_bytes(bench);
    json!({
        "bench": "decode",
        "version": crate::cli::version(),
        "device": model.gpu().name(),
        "model": bench.config.name,
        "weight_type": format!("{:?}", bench.weights).to_lowercase(),
        "layers": bench.config.num_layers(),
        "rows": bench.rows,
        "prefix_tokens": bench.prefix,
        "prefill_ms": prefill,
        "prefill_tokens_per_second": bench.prefix as f64 / prefill * 1e3,
        "ms_per_step": step,
        "tokens_per_second": bench.rows as f64 / step * 1e3,
        "weight_gigabytes_per_row": bytes / 1e9,
        "gigabytes_per_second_of_one_row": if bench.rows == 1 { json!(bytes / step / 1e6) } else { Value::Null },
    })
}
