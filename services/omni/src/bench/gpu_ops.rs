//! Single operations of a layer on one GPU: attention, and the products of the experts.
use std::sync::Arc;

use kernels::{
    AttnHeads, Segment, SegmentKind, Tensor,
    cuda::{
        AttentionOut, AttentionPlan, CODE_COLUMNS, CudaError, E4m3Rows, Finish, Gpu, GpuAttnRow,
        GpuTensor, GpuType, KvRun, KvSlot, Result, SwiGluCodes, attention, fill_random, gemm,
        gemm_fp8, grouped_gemm, grouped_gemm_fp8, grouped_swiglu_fp8, quantize_rows,
    },
};
use model::ModelError;
use serde_json::{Value, json};

use super::{median, model_error};
use crate::error::OmniError;

/// Calls that are made before any is timed.
const WARM_UP: usize = 3;
/// Arena rows that a run of keys is rounded up to.
const KEY_TILE: usize = 128;

pub(super) fn gpu_error(error: CudaError) -> OmniError {
    model_error(ModelError::from(error))
}

/// The median of `rounds` calls on the device, in microseconds.
pub(super) fn timed(gpu: &Gpu, rounds: usize, mut call: impl FnMut() -> Result<()>) -> Result<f64> {
    for _ in 0..WARM_UP {
        call()?;
    }
    let mut marks = vec![gpu.mark()?];
    for _ in 0..rounds {
        call()?;
        marks.push(gpu.mark()?);
    }
    gpu.synchronize()?;
    let mut times = Vec::with_capacity(rounds);
    for pair in marks.windows(2) {
        times.push(f64::from(pair[1].milliseconds_since(&pair[0])?) * 1e3);
    }
    Ok(median(&times))
}

fn random(gpu: &Arc<Gpu>, dims: &[usize], key: u64, scale: f32) -> Result<GpuTensor> {
    let tensor = GpuTensor::new(gpu, dims, GpuType::Bf16, "operand")?;
    fill_random(&tensor, key, scale)?;
    Ok(tensor)
}

/// Rows of one size that all see their prefix and themselves.
#[derive(Clone, Copy, Debug)]
pub(super) struct AttentionCase {
    pub(super) heads: AttnHeads,
    pub(super) rows: usize,
    pub(super) tokens: usize,
    pub(super) prefix: usize,
}

/// Time and rate of attention.
pub(super) fn attention_on(ordinal: usize, case: AttentionCase, rounds: usize) -> Result<Value> {
    let gpu = Gpu::open(ordinal)?;
    let AttentionCase {
        heads,
        rows,
        tokens,
        prefix,
    } = case;
    let mut used = 0;
    let mut run = |tokens: usize| {
        let room = tokens.next_multiple_of(KEY_TILE);
        let narrow = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        let at = KvSlot {
            first: narrow(used),
            per_head: narrow(room),
            per_layer: narrow(2 * heads.kv * room),
            to_value: narrow(heads.kv * room),
        };
        used += 2 * heads.kv * room;
        KvRun { at, tokens }
    };
    let (mut all, mut segments) = (Vec::with_capacity(rows), Vec::with_capacity(rows));
    for row in 0..rows {
        all.push(GpuAttnRow {
            prefix: (prefix > 0).then(|| run(prefix)),
            fresh: run(tokens),
        });
        segments.push(Segment {
            row,
            q: row * tokens..(row + 1) * tokens,
            kind: SegmentKind::Full,
            q_pos: 0,
            keys: prefix + tokens,
        });
    }
    let arena = random(&gpu, &[used, heads.dim], 1, 1.0)?;
    let q = random(&gpu, &[rows * tokens, heads.q, heads.dim], 2, 1.0)?;
    let out = random(&gpu, &[rows * tokens, heads.q * heads.dim], 3, 1.0)?;
    let plan = AttentionPlan::new(&arena, heads, 1, &all, (&segments, rows * tokens))?;
    let to = AttentionOut {
        out: &out,
        lse: None,
    };
    let scale = 1.0 / (heads.dim as f32).sqrt();
    let us = timed(&gpu, rounds, || {
        attention(&plan, to, &q, (&arena, 0), scale)
    })?;
    let flops = 4.0 * (rows * tokens * (prefix + tokens) * heads.q * heads.dim) as f64;
    Ok(json!({
        "device": gpu.name(),
        "rows": rows,
        "tokens": tokens,
        "prefix": prefix,
        "us": us,
        "tflops": flops / us / 1e6,
    }))
}

/// The products of one layer's experts.
#[derive(Clone, Copy, Debug)]
pub(super) struct Experts {
    pub(super) hidden: usize,
    pub(super) inner: usize,
    /// Without the shared one, which sees every token.
    pub(super) experts: usize,
    pub(super) top_k: usize,
    pub(super) tokens: usize,
    /// Expert loads from half of the mean to one and a half; else all alike.
    pub(super) uneven: bool,
    pub(super) fp8: bool,
}

impl Experts {
    /// First row of every group, and the end.
    fn offsets(&self) -> Vec<i32> {
        let (choices, last) = (self.tokens * self.top_k, (self.experts - 1).max(1) as f64);
        let share = |e: usize| {
            if self.uneven {
                0.5 + e as f64 / last
            } else {
                1.0
            }
        };
        let total: f64 = (0..self.experts).map(share).sum();
        let (mut before, mut offsets) = (0.0, vec![0]);
        for expert in 0..self.experts {
            before += share(expert);
            offsets.push((choices as f64 * before / total).round() as i32);
        }
        offsets.push((choices + self.tokens) as i32);
        offsets
    }

    fn rows(&self) -> usize {
        self.tokens * (self.top_k + 1)
    }

    /// Times and rates of both halves, and of the products around attention for scale.
    pub(super) fn measure(&self, ordinal: usize, rounds: usize) -> Result<Vec<Value>> {
        let gpu = Gpu::open(ordinal)?;
        let (hidden, inner, groups) = (self.hidden, self.inner, self.experts + 1);
        let offsets = self.offsets();
        let offsets = GpuTensor::from_i32(&gpu, &[groups + 1], &offsets, "offsets")?;
        let wide = 1.7 / (hidden as f32).sqrt();
        let narrow = 1.7 / (inner as f32).sqrt();
        let (first, second) = ([groups, 2 * inner, hidden], [groups, hidden, inner]);
        let x = random(&gpu, &[self.rows(), hidden], 1, 1.7)?;
        let out = random(&gpu, &[self.rows(), hidden], 2, 1.0)?;
        let between = random(&gpu, &[self.rows(), inner], 3, 1.0)?;
        let w = [
            random(&gpu, &first, 4, wide)?,
            random(&gpu, &second, 5, narrow)?,
            random(&gpu, &[hidden, hidden], 6, wide)?,
        ];
        let dense = x.narrow0(0, self.tokens)?;
        let dense_out = out.narrow0(0, self.tokens)?;
        let times = if self.fp8 {
            let (x, y) = (Codes::of(&x)?, Codes::of(&between)?);
            let w = [Codes::of(&w[0])?, Codes::of(&w[1])?, Codes::of(&w[2])?];
            let a = Codes::of(&dense)?;
            let blocks = [self.rows(), inner.div_ceil(CODE_COLUMNS)];
            let exponents = GpuTensor::new(&gpu, &blocks, GpuType::U8, "exponents")?;
            let to = SwiGluCodes {
                rows: y.get(),
                exponents: &exponents,
            };
            [
                timed(&gpu, rounds, || {
                    grouped_swiglu_fp8(to, x.get(), w[0].get(), &offsets)
                })?,
                timed(&gpu, rounds, || {
                    grouped_gemm_fp8(&out, y.get(), w[1].get(), &offsets, Finish::Store)
                })?,
                timed(&gpu, rounds, || {
                    gemm_fp8(&dense_out, a.get(), w[2].get(), Finish::Store)
                })?,
            ]
        } else {
            [
                timed(&gpu, rounds, || {
                    grouped_gemm(&between, &x, &w[0], &offsets, Finish::SwiGlu)
                })?,
                timed(&gpu, rounds, || {
                    grouped_gemm(&out, &between, &w[1], &offsets, Finish::Store)
                })?,
                timed(&gpu, rounds, || {
                    gemm(&dense_out, &dense, &w[2], Finish::Store)
                })?,
            ]
        };
        let half = 2.0 * (self.rows() * hidden * inner) as f64;
        let square = 2.0 * (self.tokens * hidden * hidden) as f64;
        let named = [
            ("gate_up_swiglu", 2.0 * half),
            ("down", half),
            ("dense", square),
        ];
        let values = named.into_iter().zip(times);
        let one = |((name, flops), us): ((&str, f64), f64)| json!({"name": name, "us": us, "tflops": flops / us / 1e6});
        Ok(values.map(one).collect())
    }
}

/// Rows in e4m3.
struct Codes {
    codes: GpuTensor,
    scales: GpuTensor,
}

impl Codes {
    /// Of a tensor of any shape, along its last dimension.
    fn of(x: &GpuTensor) -> Result<Self> {
        let (gpu, shape) = (x.gpu(), x.shape());
        let (leading, width) = (&shape[..shape.len() - 1], shape[shape.len() - 1]);
        let rows: usize = leading.iter().product();
        let this = Self {
            codes: GpuTensor::new(gpu, shape, GpuType::E4m3, "codes")?,
            scales: GpuTensor::new(gpu, leading, GpuType::F32, "scales")?,
        };
        let flat = E4m3Rows {
            codes: &this.codes.reshape(&[rows, width])?,
            scales: &this.scales.reshape(&[rows])?,
        };
        quantize_rows(&x.reshape(&[rows, width])?, flat)?;
        Ok(this)
    }

    fn get(&self) -> E4m3Rows<'_> {
        E4m3Rows {
            codes: &self.codes,
            scales: &self.scales,
        }
    }
}

/// Times of the VAE at a picture's size, in milliseconds.
pub(super) fn vae(
    ordinal: usize,
    config: &model::ModelConfig,
    (width, height): (usize, usize),
    (rounds, seed): (usize, u64),
) -> std::result::Result<Value, OmniError> {
    use base::clock;
    use model::{Latents, gpu::GpuVae, gpu::GpuVaeParts};

    let gpu = Gpu::open(ordinal).map_err(gpu_error)?;
    let parts = GpuVaeParts {
        decoder: true,
        encoder: true,
    };
    let mut vae = GpuVae::random(&gpu, config, parts, seed).map_err(model_error)?;
    let (channels, factor) = (config.vae.latent_channels, config.vae.spatial_factor);
    let source = base::rng::Source::seeded(seed);
    let unit = || (source.next_u64() >> 40) as f32 / (1_u32 << 23) as f32 - 1.0;
    let (h, w) = (height / factor, width / factor);
    let data = (0..channels * h * w).map(|_| unit()).collect();
    let latents = Latents::new(channels, h, w, data).map_err(model_error)?;
    let pixels = (0..height * width * 3).map(|_| unit()).collect();
    let pixels =
        Tensor::from_f32(&[height, width, 3], pixels).map_err(|e| model_error(e.into()))?;
    let (mut decodes, mut encodes) = (Vec::new(), Vec::new());
    for _ in 0..=rounds {
        let begun = clock::now();
        vae.decode(&latents).map_err(model_error)?;
        decodes.push(clock::millis_since(begun));
        let begun = clock::now();
        vae.encode(&pixels).map_err(model_error)?;
        encodes.push(clock::millis_since(begun));
    }
    drop(vae);
    let (all, vision) = conditions((&gpu, config), &latents, (rounds, seed))?;
    Ok(json!({
        "device": gpu.name(),
        // The first of each grows the memory.
        "decode_ms": median(&decodes[1..]),
        "encode_ms": median(&encodes[1..]),
        "vision_ms": median(&vision[1..]),
        "conditions_ms": median(&all[1..]),
    }))
}

/// Time and memory of decoding in tiles and whole; the smaller one first.
pub(super) fn tiles(
    (ordinal, overlap): (usize, f64),
    config: &model::ModelConfig,
    (width, height): (usize, usize),
    (rounds, seed): (usize, u64),
) -> std::result::Result<Value, OmniError> {
    use base::clock;
    use model::{Latents, gpu::GpuVae, gpu::GpuVaeParts, vae::Tiles};

    let gpu = Gpu::open(ordinal).map_err(gpu_error)?;
    let (channels, factor) = (config.vae.latent_channels, config.vae.spatial_factor);
    let (h, w) = (height / factor, width / factor);
    let source = base::rng::Source::seeded(seed);
    let unit = || (source.next_u64() >> 40) as f32 / (1_u32 << 23) as f32 - 1.0;
    let data = (0..channels * h * w).map(|_| unit()).collect();
    let latents = Latents::new(channels, h, w, data).map_err(model_error)?;
    let decode = |tiles: Tiles| -> std::result::Result<(f64, usize), OmniError> {
        let parts = GpuVaeParts {
            decoder: true,
            encoder: false,
        };
        let vae = GpuVae::random(&gpu, config, parts, seed).map_err(model_error)?;
        let mut vae = vae.in_tiles(tiles);
        let before = gpu.memory().map_err(gpu_error)?.free;
        let mut ms = Vec::new();
        for _ in 0..=rounds {
            let begun = clock::now();
            vae.decode(&latents).map_err(model_error)?;
            ms.push(clock::millis_since(begun));
        }
        let after = gpu.memory().map_err(gpu_error)?.free;
        Ok((median(&ms[1..]), before.saturating_sub(after)))
    };
    let (tiled_ms, tiled) = decode(Tiles::Overlapping(overlap))?;
    let (whole_ms, whole) = decode(Tiles::Whole)?;
    Ok(json!({
        "overlap": overlap,
        "tiled_decode_ms": tiled_ms,
        "tiled_bytes": tiled,
        "whole_decode_ms": whole_ms,
        "whole_bytes": whole,
        "share_of_memory": tiled as f64 / whole.max(1) as f64,
    }))
}

/// Milliseconds of what a shown picture puts into a sequence, behind the VAE, and of its vision transformer alone with
/// as many patches as it takes.
fn conditions(
    (gpu, config): (&Arc<Gpu>, &model::ModelConfig),
    latents: &model::Latents,
    (rounds, seed): (usize, u64),
) -> std::result::Result<(Vec<f64>, Vec<f64>), OmniError> {
    use base::clock;
    use model::{gpu::GpuConditions, vit::Patches};

    let mut made = GpuConditions::random(gpu, config, seed).map_err(model_error)?;
    let side = config.vit_processor.max_num_patches.isqrt();
    let dims = [side * side, config.vit.patch_values()];
    let values = (0..dims[0] * dims[1]).map(|i| ((i * 37) % 255) as f32 / 127.0 - 1.0);
    let values = Tensor::from_f32(&dims, values.collect()).map_err(|e| model_error(e.into()))?;
    let patches = Patches {
        values: &values,
        grid: (side, side),
    };
    let (mut all, mut vision) = (Vec::new(), Vec::new());
    for _ in 0..=rounds {
        let begun = clock::now();
        made.patches(patches).map_err(model_error)?;
        vision.push(clock::millis_since(begun));
        let begun = clock::now();
        made.features(latents, patches).map_err(model_error)?;
        all.push(clock::millis_since(begun));
    }
    Ok((all, vision))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loads_of_experts_add_up_to_all_choices() {
        for uneven in [false, true] {
            let experts = Experts {
                hidden: 64,
                inner: 64,
                experts: 7,
                top_k: 3,
                tokens: 101,
                uneven,
                fp8: false,
            };
            let offsets = experts.offsets();
            assert_eq!(offsets.len(), 9);
            assert!(offsets.windows(2).all(|pair| pair[0] <= pair[1]));
            assert_eq!(offsets[7..], [303, 404]);
            assert_eq!(offsets[1] < offsets[7] - offsets[6], uneven);
        }
    }
}
