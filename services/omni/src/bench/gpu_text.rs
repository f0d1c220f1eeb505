//! Prefill and text decoding on one GPU, or on several under a plan.
use std::path::Path;

use base::clock;
use kernels::cuda::{CudaError, GpuTensor, GpuType, fill_random};
use model::{
    ModelConfig,
    gpu::{GpuCache, GpuModel, GpuOptions, WeightType},
    input::RowInput,
};
use parallel::Plan;
use serde_json::{Value, json};

use super::{gpu_plan, median, model_error};
use crate::error::OmniError;

/// Decoded tokens that are not timed.
const WARM_UP: usize = 8;
/// Passes of the prefill, of which the median counts.
const PREFILLS: usize = 5;
/// Bytes that are copied to learn the rate of the memory, and how often: the first ones warm up.
const COPIED_BYTES: usize = 2 << 30;
const COPIES: usize = 40;

/// What was asked for.
pub(super) struct TextBench<'a> {
    /// Its weights are made up where there is no checkpoint.
    pub(super) config: ModelConfig,
    pub(super) checkpoint: Option<&'a Path>,
    /// The GPU, or that of the first rank: the others have the next ones.
    pub(super) ordinal: usize,
    pub(super) plan: Plan,
    pub(super) weights: WeightType,
    /// Sizes of the batches, each measured on its own.
    pub(super) rows: &'a [usize],
    pub(super) prefix: usize,
    pub(super) steps: usize,
    pub(super) seed: u64,
}

/// What one rank measured.
struct Measured {
    device: String,
    /// Milliseconds.
    prefill: f64,
    /// Gigabytes a second.
    copy: f64,
    /// Milliseconds of a step, by batch.
    steps: Vec<f64>,
}

/// Runs the measurement.
pub(super) fn run(bench: &TextBench<'_>) -> Result<Value, OmniError> {
    let ranks = if bench.plan == Plan::default() {
        vec![measure(bench, None)?]
    } else {
        let of = (&bench.config, &bench.plan);
        gpu_plan::every(of, bench.ordinal, &|rank| measure(bench, Some(rank)))?
    };
    let config = &bench.config;
    let copy: f64 = ranks.iter().map(|rank| rank.copy).sum();
    let slowest = |of: &dyn Fn(&Measured) -> f64| ranks.iter().map(of).fold(0.0, f64::max);
    let prefill = slowest(&|rank| rank.prefill);
    let batches = bench.rows.iter().enumerate();
    let batches = batches.map(|(index, rows)| {
        let step = slowest(&|rank| rank.steps[index]);
        batch(bench, *rows, step, copy)
    });
    Ok(json!({
        "bench": "decode",
        "version": crate::cli::version(),
        "device": ranks.first().map(|rank| rank.device.as_str()),
        "gpus": ranks.len(),
        "plan": bench.plan.to_string(),
        "model": config.name,
        "weight_type": format!("{:?}", bench.weights).to_lowercase(),
        "layers": config.num_layers(),
        "prefix_tokens": bench.prefix,
        "prefill_ms": prefill,
        "prefill_tokens_per_second": bench.prefix as f64 / prefill * 1e3,
        "copy_gigabytes_per_second": copy,
        "batches": batches.collect::<Vec<_>>(),
    }))
}

/// The measurement on one GPU, or as one rank of a plan.
fn measure(bench: &TextBench<'_>, rank: Option<gpu_plan::Rank>) -> Result<Measured, OmniError> {
    let config = &bench.config;
    let total = bench.prefix + WARM_UP + bench.steps;
    let row_bytes = config.num_layers() * 4 * config.num_kv_heads * config.head_dim;
    let most = bench.rows.iter().copied().max().unwrap_or(1);
    let options = GpuOptions {
        ordinal: bench.ordinal,
        weights: bench.weights,
        max_tokens: most.max(bench.prefix),
        kv_bytes: (most + 2) * (total + 256) * row_bytes,
        resident_layers: None,
        text: true,
    };
    let own = config.clone();
    let mut model = match (bench.checkpoint, rank) {
        (Some(dir), None) => GpuModel::open(dir, options),
        (Some(dir), Some((share, group))) => GpuModel::open_rank(dir, options, share, group),
        (None, None) => GpuModel::random(own, options, bench.seed),
        (None, Some((share, group))) => {
            GpuModel::random_rank(own, options, bench.seed, share, group)
        }
    }
    .map_err(model_error)?;
    let prefill = prefill(&mut model, bench)?;
    let copy = copy_rate(&model)?;
    let mut steps = Vec::with_capacity(bench.rows.len());
    for rows in bench.rows {
        steps.push(median(&decode(&mut model, bench, *rows)?));
    }
    Ok(Measured {
        device: model.gpu().name().to_owned(),
        prefill,
        copy,
        steps,
    })
}

/// A prompt of its own for each row: rows of one prompt would share their experts.
fn prompt(bench: &TextBench<'_>, row: usize) -> Vec<u32> {
    (0..bench.prefix)
        .map(|i| (((i + 1) * (7919 + 2 * row) + 13 * row) % bench.config.vocab_size) as u32)
        .collect()
}

/// Milliseconds from a prompt to the logits of its last token.
fn prefill(model: &mut GpuModel, bench: &TextBench<'_>) -> Result<f64, OmniError> {
    let ids = prompt(bench, 0);
    let mut times = Vec::with_capacity(PREFILLS);
    for _ in 0..PREFILLS {
        let mut cache = model.cache(bench.prefix).map_err(model_error)?;
        synchronize(model)?;
        let begun = clock::now();
        let hidden = pass(model, &[(0, &ids)], &mut [&mut cache])?;
        let last = hidden.narrow0(bench.prefix - 1, 1).map_err(gpu_error)?;
        model.logits(&last).map_err(model_error)?;
        synchronize(model)?;
        times.push(clock::millis_since(begun));
    }
    Ok(median(&times))
}

/// Milliseconds of each step of `rows` rows, with the choice of every row's token back on the host.
fn decode(model: &mut GpuModel, bench: &TextBench<'_>, rows: usize) -> Result<Vec<f64>, OmniError> {
    let total = bench.prefix + WARM_UP + bench.steps;
    let mut caches = Vec::with_capacity(rows);
    let mut next = Vec::with_capacity(rows);
    for row in 0..rows {
        let mut cache = model.cache(total).map_err(model_error)?;
        let ids = prompt(bench, row);
        pass(model, &[(0, &ids)], &mut [&mut cache])?;
        next.push(ids[bench.prefix - 1]);
        caches.push(cache);
    }
    let mut times = Vec::with_capacity(bench.steps);
    for step in 0..WARM_UP + bench.steps {
        let begun = clock::now();
        let at = bench.prefix + step;
        let inputs: Vec<(usize, &[u32])> = next.chunks(1).map(|id| (at, id)).collect();
        let mut borrowed: Vec<&mut GpuCache> = caches.iter_mut().collect();
        let hidden = pass(model, &inputs, &mut borrowed)?;
        let logits = model.logits(&hidden).map_err(model_error)?;
        next = model.likeliest(&logits).map_err(model_error)?;
        if step >= WARM_UP {
            times.push(clock::millis_since(begun));
        }
    }
    Ok(times)
}

/// Gigabytes read and written per second by a large copy on the device.
fn copy_rate(model: &GpuModel) -> Result<f64, OmniError> {
    let dims = [COPIED_BYTES / GpuType::Bf16.bytes()];
    let new = || GpuTensor::new(model.gpu(), &dims, GpuType::Bf16, "copied bytes");
    let (from, to) = (new().map_err(gpu_error)?, new().map_err(gpu_error)?);
    fill_random(&from, 1, 1.0).map_err(gpu_error)?;
    let mut times = Vec::with_capacity(COPIES);
    for _ in 0..COPIES {
        synchronize(model)?;
        let begun = clock::now();
        to.copy_from(&from).map_err(gpu_error)?;
        synchronize(model)?;
        times.push(clock::millis_since(begun));
    }
    Ok(2.0 * COPIED_BYTES as f64 / median(&times[COPIES / 2..]) / 1e6)
}

fn synchronize(model: &GpuModel) -> Result<(), OmniError> {
    model.wait().map_err(model_error)
}

fn gpu_error(error: CudaError) -> OmniError {
    model_error(error.into())
}

/// Runs rows `(start, ids)` on their caches: their hidden states.
fn pass(
    model: &mut GpuModel,
    rows: &[(usize, &[u32])],
    caches: &mut [&mut GpuCache],
) -> Result<GpuTensor, OmniError> {
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
    let hidden = model.run_rows(&inputs, caches, true).map_err(model_error)?;
    let lost = || model::ModelError::Internal("a pass without hidden states".into());
    hidden.ok_or_else(|| model_error(lost()))
}

/// Weight bytes that one step of `rows` rows reads at least, where each token chooses its experts at random.
fn weight_bytes(bench: &TextBench<'_>, rows: usize) -> f64 {
    let config = &bench.config;
    let width = config.num_heads * config.head_dim;
    let projections = config.hidden_size * (2 * width + 2 * config.num_kv_heads * config.head_dim);
    let element = match bench.weights {
        WeightType::Bf16 => 2.0,
        WeightType::Fp8 => 1.0,
    };
    let layers: f64 = config
        .layers
        .iter()
        .map(|layer| {
            let experts = layer.experts as f64;
            let missed = 1.0 - layer.top_k as f64 / experts;
            let chosen = experts * (1.0 - missed.powf(rows as f64)) * layer.intermediate as f64;
            let inner = chosen + layer.shared_intermediate.unwrap_or(0) as f64;
            element * (projections as f64 + 3.0 * config.hidden_size as f64 * inner)
        })
        .sum();
    layers + (2 * config.vocab_size * config.hidden_size) as f64
}

/// Bytes of keys and values that a step of `rows` rows reads in the middle of the measurement.
fn kv_bytes(bench: &TextBench<'_>, rows: usize) -> f64 {
    let config = &bench.config;
    let tokens = bench.prefix + WARM_UP + bench.steps / 2;
    let token = config.num_layers() * 2 * config.num_kv_heads * config.head_dim * 2;
    (rows * tokens * token) as f64
}

/// The bound is the time that a copy of as many bytes, read and written, takes on all GPUs together: of weights alone,
/// and with the keys and values.
fn batch(bench: &TextBench<'_>, rows: usize, step: f64, copy: f64) -> Value {
    let (weights, kv) = (weight_bytes(bench, rows), kv_bytes(bench, rows));
    json!({
        "rows": rows,
        "ms_per_step": step,
        "tokens_per_second": rows as f64 / step * 1e3,
        "weight_gigabytes": weights / 1e9,
        "kv_gigabytes": kv / 1e9,
        "gigabytes_per_second": (weights + kv) / step / 1e6,
        "share_of_weight_bound": weights / step / 1e6 / copy,
        "share_of_bound": (weights + kv) / step / 1e6 / copy,
    })
}
