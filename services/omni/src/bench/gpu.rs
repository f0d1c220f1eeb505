//! `omni bench denoise --gpu`: denoising steps, and whole pictures, on one GPU or several under a plan.
use std::{path::PathBuf, sync::Arc};

use base::clock;
use model::{
    JobOptions, JobSpec, ModelConfig, PrefixKv,
    gpu::{
        GpuJob, GpuJobSpec, GpuModel, GpuOptions, GpuPrefix, GpuVae, GpuVaeParts, Timings, Watch,
        WeightType,
    },
};
use parallel::Plan;
use serde_json::{Value, json};

use super::{
    bad, denoise,
    flops::{self, RowShape},
    median, model_error,
};
use crate::error::OmniError;

/// Steps that are run before anything is timed.
const WARM_UP_STEPS: usize = 3;

/// What `omni bench denoise --gpu` was asked for.
pub(super) struct GpuBench<'a> {
    /// Its weights are made up where there is no checkpoint.
    pub(super) config: ModelConfig,
    pub(super) checkpoint: Option<&'a PathBuf>,
    /// The GPU, or that of the first rank: the others have the next ones.
    pub(super) ordinal: usize,
    pub(super) plan: Plan,
    pub(super) weights: WeightType,
    pub(super) resident_layers: Option<usize>,
    pub(super) pictures: Vec<Picture>,
    pub(super) steps: usize,
    pub(super) prefix: usize,
    /// Denoise and decode one whole picture as well.
    pub(super) whole: bool,
    pub(super) seed: u64,
}

/// One picture of the batch.
#[derive(Clone, Copy, Debug)]
pub(super) struct Picture {
    pub(super) width: usize,
    pub(super) height: usize,
    pub(super) guidance: f64,
}

impl std::str::FromStr for Picture {
    type Err = String;

    /// `WIDTHxHEIGHT@GUIDANCE`.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let wrong = || format!("{text} is not WIDTHxHEIGHT@GUIDANCE");
        let (size, guidance) = text.split_once('@').ok_or_else(wrong)?;
        let size: proto::size::Size = size.parse().map_err(|_| wrong())?;
        Ok(Self {
            width: size.width as usize,
            height: size.height as usize,
            guidance: guidance.parse().map_err(|_| wrong())?,
        })
    }
}

/// Runs the measurement.
pub(super) fn run(bench: &GpuBench<'_>) -> Result<Value, OmniError> {
    let ranks = bench.plan.mesh().map_err(|e| bad(e.to_string()))?.ranks();
    if ranks == 1 {
        return measure(bench, None);
    }
    super::gpu_plan::run(bench)
}

/// Runs the measurement on one GPU, or as one rank of a plan.
pub(super) fn measure(
    bench: &GpuBench<'_>,
    rank: Option<super::gpu_plan::Rank>,
) -> Result<Value, OmniError> {
    let rows = |p: &Picture| {
        if bench.config.guidance_needs_two_rows(p.guidance) {
            2
        } else {
            1
        }
    };
    let cell = bench.config.pixels_per_token();
    // A few special tokens a row are more than any model has.
    let tokens = |p: &Picture| rows(p) * ((p.width / cell) * (p.height / cell) + 8);
    let max_tokens = bench.pictures.iter().map(tokens).sum::<usize>();
    let options = GpuOptions {
        ordinal: bench.ordinal,
        weights: bench.weights,
        max_tokens,
        kv_bytes: kv_bytes(bench, max_tokens),
        resident_layers: bench.resident_layers,
        text: false,
    };
    let begun = clock::now();
    let first = rank.as_ref().is_none_or(|(share, _)| share.rank() == 0);
    let config = bench.config.clone();
    let mut model = match (bench.checkpoint, rank) {
        (Some(dir), None) => GpuModel::open(dir, options),
        (Some(dir), Some((share, group))) => GpuModel::open_rank(dir, options, share, group),
        (None, None) => GpuModel::random(config, options, bench.seed),
        (None, Some((share, group))) => {
            GpuModel::random_rank(config, options, bench.seed, share, group)
        }
    }
    .map_err(model_error)?;
    let load_s = clock::millis_since(begun) / 1e3;
    let mut jobs = jobs(bench, &mut model, WARM_UP_STEPS + bench.steps)?;
    let mut timings = Timings::default();
    let mut wall = Vec::with_capacity(bench.steps);
    for index in 0..WARM_UP_STEPS + bench.steps {
        let mut packed: Vec<&mut GpuJob> = jobs.iter_mut().collect();
        let begun = clock::now();
        let mut watch = Watch {
            timings: (index >= WARM_UP_STEPS).then_some(&mut timings),
            velocities: None,
        };
        model
            .watched_step(&mut packed, &mut watch)
            .map_err(model_error)?;
        model.wait().map_err(model_error)?;
        if index >= WARM_UP_STEPS {
            wall.push(clock::millis_since(begun));
        }
    }
    let parts = timings.parts().map_err(model_error)?;
    let mut report = report(bench, &model, &jobs, (&wall, &parts));
    report["load_seconds"] = json!(load_s);
    if bench.whole {
        drop(jobs);
        report["whole"] = whole(bench, &mut model, first)?;
    }
    Ok(report)
}

/// Room for all prefixes and fresh tokens, with some to spare.
fn kv_bytes(bench: &GpuBench<'_>, tokens: usize) -> usize {
    let config = &bench.config;
    let token = 2 * config.num_kv_heads * config.head_dim * 2;
    let prefixes = 2 * bench.pictures.len() * (bench.prefix + 128) * config.num_layers();
    (prefixes + tokens + 1024 * bench.pictures.len()) * token * 5 / 4 + (1 << 20)
}

fn jobs(
    bench: &GpuBench<'_>,
    model: &mut GpuModel,
    steps: usize,
) -> Result<Vec<GpuJob>, OmniError> {
    let mut jobs = Vec::with_capacity(bench.pictures.len());
    for (index, picture) in bench.pictures.iter().enumerate() {
        let seed = bench.seed.wrapping_add(index as u64);
        let spec = JobSpec {
            height: picture.height,
            width: picture.width,
            steps,
            guidance: picture.guidance,
            seed,
            cond: None,
            uncond: None,
        };
        let prefix = |salt: u64| -> Result<Arc<GpuPrefix>, OmniError> {
            let made = random_prefix(bench, seed ^ salt)?;
            Ok(Arc::new(model.upload(&made).map_err(model_error)?))
        };
        let two = bench.config.guidance_needs_two_rows(picture.guidance);
        let given = GpuJobSpec {
            spec,
            options: JobOptions::default(),
            cond: prefix(1 << 32)?,
            uncond: if two { Some(prefix(2 << 32)?) } else { None },
        };
        jobs.push(GpuJob::new(model, given).map_err(model_error)?);
    }
    Ok(jobs)
}

fn random_prefix(bench: &GpuBench<'_>, seed: u64) -> Result<PrefixKv, OmniError> {
    let config = &bench.config;
    denoise::prefix_values(config.kv_geometry(), bench.prefix, seed)
}

/// One whole picture: every step, the decoder on the first rank, and the picture on the host.
fn whole(bench: &GpuBench<'_>, model: &mut GpuModel, decodes: bool) -> Result<Value, OmniError> {
    let one = GpuBench {
        pictures: bench.pictures[..1].to_vec(),
        config: bench.config.clone(),
        ..*bench
    };
    let parts = GpuVaeParts {
        decoder: true,
        encoder: false,
    };
    let gpu = model.gpu().clone();
    let open = || match bench.checkpoint {
        Some(dir) => GpuVae::open(&gpu, dir, parts),
        None => GpuVae::random(&gpu, &bench.config, parts, bench.seed),
    };
    let mut vae = decodes.then(open).transpose().map_err(model_error)?;
    let steps = bench.config.generation.steps;
    // The first picture also grows the scratch memory.
    let mut last = (0.0, 0.0);
    for _ in 0..2 {
        let mut job = jobs(&one, model, steps)?.remove(0);
        model.wait().map_err(model_error)?;
        let begun = clock::now();
        while !job.is_done() {
            model.denoise_step(&mut [&mut job]).map_err(model_error)?;
        }
        model.wait().map_err(model_error)?;
        let denoised = clock::millis_since(begun);
        let latents = job.latents().map_err(model_error)?;
        if let Some(vae) = &mut vae {
            vae.decode(&latents).map_err(model_error)?;
        }
        last = (denoised, clock::millis_since(begun));
    }
    Ok(json!({
        "steps": steps,
        "denoise_seconds": last.0 / 1e3,
        "decode_seconds": (last.1 - last.0) / 1e3,
        "seconds": last.1 / 1e3,
    }))
}

fn report(
    bench: &GpuBench<'_>,
    model: &GpuModel,
    jobs: &[GpuJob],
    (wall, parts): (&[f64], &[(&'static str, f64)]),
) -> Value {
    let config = &bench.config;
    let of = |what: &str| -> Vec<f64> {
        let some = parts.iter().filter(|(name, _)| *name == what);
        some.map(|(_, ms)| *ms).collect()
    };
    // Stages have fewer layers, and go through them once a row.
    let all = of("layer");
    let each = (all.len() / wall.len().max(1)).max(1);
    let layers: Vec<f64> = all.chunks(each).map(|step| step.iter().sum()).collect();
    let tokens: usize = jobs.iter().map(GpuJob::tokens).sum();
    let cell = config.pixels_per_token();
    let (mut in_layers, mut in_ends) = (0.0, 0.0);
    for (job, picture) in jobs.iter().zip(&bench.pictures) {
        let image = (picture.width / cell) * (picture.height / cell);
        let row = RowShape {
            prefix: bench.prefix,
            specials: job.tokens() / job.rows() - image,
            image,
        };
        in_layers += flops::layers(config, row) * job.rows() as f64;
        in_ends += flops::convolutions(config, row) * job.rows() as f64;
    }
    let (step_ms, layers_ms) = (median(wall), median(&layers));
    let rate = |flops: f64, ms: f64| flops / ms / 1e9;
    let (travelling, travelling_bytes) = model.travelling();
    json!({
        "bench": "denoise",
        "version": crate::cli::version(),
        "device": model.gpu().name(),
        "model": config.name,
        "plan": bench.plan.to_string(),
        "gpus": model.share().ranks(),
        "weights": if bench.checkpoint.is_some() { "checkpoint" } else { "random" },
        "weight_type": format!("{:?}", bench.weights).to_lowercase(),
        "layers": config.num_layers(),
        "layers_from_host": travelling,
        "bytes_from_host_per_step": travelling_bytes,
        "pictures": bench.pictures.iter()
            .map(|p| format!("{}x{}@{}", p.width, p.height, p.guidance))
            .collect::<Vec<_>>(),
        "rows": jobs.iter().map(GpuJob::rows).sum::<usize>(),
        "prefix_tokens": bench.prefix,
        "tokens_per_step": tokens,
        "steps": wall.len(),
        "ms_per_step": step_ms,
        "ms_per_step_min": wall.iter().copied().fold(f64::INFINITY, f64::min),
        "ms_per_step_max": wall.iter().copied().fold(0.0, f64::max),
        "ms_per_layer": layers_ms / config.num_layers() as f64,
        "ms_stem": median(&of("stem")),
        "ms_head": median(&of("head")),
        "gflop_per_step": (in_layers + in_ends) / 1e9,
        "tflops": rate(in_layers + in_ends, step_ms),
        "tflops_in_layers": rate(in_layers, layers_ms),
        "tokens_per_second": tokens as f64 / step_ms * 1e3,
        "us_per_token_and_layer": layers_ms / config.num_layers() as f64 / tokens as f64 * 1e3,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pictures_of_a_batch_are_sizes_with_their_guidance() {
        let picture: Picture = "1280x768@2.5".parse().unwrap();
        assert_eq!((picture.width, picture.height), (1280, 768));
        assert!((picture.guidance - 2.5).abs() < 1e-9);
        for wrong in ["1280x768", "1280@5", "x@5", "8x8@", ""] {
            assert!(wrong.parse::<Picture>().is_err(), "{wrong}");
        }
    }
}
