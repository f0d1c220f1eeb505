//! Attention on the GPU against the CPU operation.
#![cfg(feature = "cuda")]
#![allow(missing_docs, clippy::unwrap_used)]

mod common;

use std::sync::Arc;

use common::batch::{Batch, RowSpec};
use common::{full, values};
use kernels::cuda::{
    AttentionOut, AttentionPlan, Gpu, GpuAttnRow, GpuTensor, GpuType, KvRun, KvSlot,
    WholeAttention, attention, attention_fused, plan_fused,
};
use kernels::{AttnHeads, PartialAttention, Segment, Tensor, bf16, mha, varlen_attention_partial};

const LAYERS: usize = 2;
/// The layer that is attended to.
const LAYER: usize = 1;
const TOLERANCE: f64 = 1e-2;

fn heads(q: usize, kv: usize, dim: usize) -> AttnHeads {
    AttnHeads { q, kv, dim }
}

fn spec(past: usize, causal: usize, full: usize) -> RowSpec {
    RowSpec { past, causal, full }
}

fn rounded(x: &[f32]) -> Vec<f32> {
    x.iter().map(|v| bf16::from_f32(*v).to_f32()).collect()
}

fn round(x: &Tensor) -> Tensor {
    Tensor::from_f32(x.shape(), rounded(&x.to_f32_vec())).unwrap()
}

/// A batch whose numbers are all bf16.
fn batch(heads: AttnHeads, specs: &[RowSpec], seed: u64) -> Batch {
    let mut batch = Batch::new(heads, specs.to_vec(), seed);
    (batch.q, batch.k, batch.v) = (round(&batch.q), round(&batch.k), round(&batch.v));
    for (k, v) in &mut batch.past {
        (*k, *v) = (rounded(k), rounded(v));
    }
    batch
}

/// An arena that is being filled; what nobody writes are other numbers.
struct Filling {
    heads: AttnHeads,
    data: Vec<f32>,
}

impl Filling {
    /// A run of `tokens` tokens with the keys and values that `at(side, head, token)` gives to `LAYER`.
    fn run(&mut self, tokens: usize, at: impl Fn(usize, usize, usize) -> Vec<f32>) -> KvRun {
        let AttnHeads { kv, dim, .. } = self.heads;
        let (first, capacity) = (self.data.len() / dim, tokens.next_multiple_of(128));
        let more = LAYERS * 2 * kv * capacity * dim;
        self.data.extend(values(first as u64, more));
        for (side, head, token) in
            (0..2 * kv * tokens).map(|i| (i / kv / tokens, i / tokens % kv, i % tokens))
        {
            let row = first + ((LAYER * 2 + side) * kv + head) * capacity + token;
            self.data[row * dim..][..dim].copy_from_slice(&at(side, head, token));
        }
        let narrow = |n: usize| u32::try_from(n).unwrap();
        let at = KvSlot {
            first: narrow(first),
            per_head: narrow(capacity),
            per_layer: narrow(2 * kv * capacity),
            to_value: narrow(kv * capacity),
        };
        KvRun { at, tokens }
    }
}

/// A batch on the device.
struct OnGpu {
    q: GpuTensor,
    arena: GpuTensor,
    rows: Vec<GpuAttnRow>,
    out: GpuTensor,
    lse: GpuTensor,
}

fn upload(gpu: &Arc<Gpu>, batch: &Batch) -> OnGpu {
    let heads = batch.heads;
    let (kv, dim) = (heads.kv, heads.dim);
    let mut filling = Filling {
        heads,
        data: Vec::new(),
    };
    let fresh_sides = [batch.k.to_f32_vec(), batch.v.to_f32_vec()];
    let mut rows = Vec::new();
    for ((row, spec), (past_k, past_v)) in batch.rows().iter().zip(&batch.specs).zip(&batch.past) {
        let past_sides = [past_k, past_v];
        let prefix = (spec.past > 0).then(|| {
            filling.run(spec.past, |side, head, token| {
                past_sides[side][(head * spec.past + token) * dim..][..dim].to_vec()
            })
        });
        let start = row.fresh.start;
        let fresh = filling.run(row.fresh.len(), |side, head, token| {
            fresh_sides[side][((start + token) * kv + head) * dim..][..dim].to_vec()
        });
        rows.push(GpuAttnRow { prefix, fresh });
    }
    let arena = Tensor::from_f32(&[filling.data.len() / dim, dim], filling.data).unwrap();
    let tokens = batch.q.dim(0);
    let poison = Tensor::from_f32(
        &[tokens, heads.q * dim],
        vec![f32::NAN; tokens * heads.q * dim],
    );
    OnGpu {
        q: GpuTensor::bf16_from_host(gpu, &batch.q, "q").unwrap(),
        arena: GpuTensor::bf16_from_host(gpu, &arena, "arena").unwrap(),
        rows,
        out: GpuTensor::bf16_from_host(gpu, &poison.unwrap(), "out").unwrap(),
        lse: GpuTensor::new(gpu, &[tokens, heads.q], GpuType::F32, "lse").unwrap(),
    }
}

impl OnGpu {
    fn plan(&self, batch: &Batch, segments: &[Segment]) -> AttentionPlan {
        let tokens = (segments, batch.q.dim(0));
        AttentionPlan::new(&self.arena, batch.heads, LAYERS, &self.rows, tokens).unwrap()
    }

    fn attend(&self, plan: &AttentionPlan, scale: f32) -> Vec<f32> {
        let to = AttentionOut {
            out: &self.out,
            lse: Some(&self.lse),
        };
        attention(plan, to, &self.q, (&self.arena, LAYER), scale).unwrap();
        self.out.to_f32_vec().unwrap()
    }
}

/// `|a - b| / |b|`.
fn error(a: &[f32], b: &[f32]) -> f64 {
    assert_eq!(a.len(), b.len());
    let square = |x: f64| x * x;
    let differences = a.iter().zip(b).map(|(a, b)| square(f64::from(a - b)));
    let all: f64 = b.iter().map(|b| square(f64::from(*b))).sum();
    (differences.sum::<f64>() / all).sqrt()
}

fn on_cpu(batch: &Batch) -> PartialAttention {
    let (q, k, v) = (&batch.q, &batch.k, &batch.v);
    let segments = batch.segments();
    varlen_attention_partial(q, &batch.rows(), k, v, &segments, batch.scale()).unwrap()
}

/// Batches with every kind of edge: tiles that are full, short by one, one too long; no prefix; only causal ones.
fn batches() -> Vec<Batch> {
    let rows = [
        spec(44, 1, 32),
        spec(0, 130, 70),
        spec(256, 1, 128),
        spec(1, 0, 1),
        spec(300, 33, 0),
        spec(128, 1, 144),
    ];
    let sizes = [
        heads(32, 8, 128),
        heads(4, 1, 128),
        heads(8, 2, 32),
        heads(4, 2, 16),
        heads(4, 4, 72),
        heads(3, 1, 256),
        heads(6, 2, 128),
    ];
    let made = sizes.iter().enumerate();
    made.map(|(seed, heads)| batch(*heads, &rows, seed as u64))
        .collect()
}

#[test]
#[ignore = "needs a GPU"]
fn packed_attention_is_that_of_the_cpu() {
    let gpu = Gpu::open(0).unwrap();
    for batch in batches() {
        let there = upload(&gpu, &batch);
        let plan = there.plan(&batch, &batch.segments());
        let want = on_cpu(&batch);
        // Twice: a launch leaves the plan as it found it.
        for _ in 0..2 {
            let got = there.attend(&plan, batch.scale());
            let off = error(&got, &want.out.to_f32_vec());
            assert!(off < TOLERANCE, "{:?}: {off}", batch.heads);
            let off = error(&there.lse.to_f32_vec().unwrap(), &want.lse.to_f32_vec());
            assert!(off < 1e-3, "{:?}: lse {off}", batch.heads);
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn queries_that_carry_the_scale_give_the_same() {
    let gpu = Gpu::open(0).unwrap();
    let mut batch = batch(heads(8, 2, 128), &[spec(300, 1, 128)], 8);
    let want = on_cpu(&batch);
    let carried = batch.q.to_f32_vec();
    let factor = batch.scale() * std::f32::consts::LOG2_E;
    let carried = carried.iter().map(|v| v * factor).collect();
    batch.q = round(&Tensor::from_f32(batch.q.shape(), carried).unwrap());
    let there = upload(&gpu, &batch);
    let plan = there.plan(&batch, &batch.segments());
    let got = there.attend(&plan, std::f32::consts::LN_2);
    assert!(error(&got, &want.out.to_f32_vec()) < TOLERANCE);
}

#[test]
#[ignore = "needs a GPU"]
fn few_tokens_with_many_keys_are_summed_from_parts() {
    let gpu = Gpu::open(0).unwrap();
    let rows = [
        spec(2000, 1, 0),
        spec(700, 3, 0),
        spec(511, 0, 2),
        spec(512, 1, 0),
        spec(40, 1, 0),
        spec(600, 5, 0),
    ];
    let batch = batch(heads(8, 2, 128), &rows, 12);
    let there = upload(&gpu, &batch);
    let (segments, tokens) = (batch.segments(), batch.q.dim(0));
    let plan = AttentionPlan::in_parts(
        &there.arena,
        batch.heads,
        LAYERS,
        &there.rows,
        (&segments, tokens),
    )
    .unwrap();
    let want = on_cpu(&batch);
    let first = there.attend(&plan, batch.scale());
    assert!(error(&first, &want.out.to_f32_vec()) < TOLERANCE);
    let off = error(&there.lse.to_f32_vec().unwrap(), &want.lse.to_f32_vec());
    assert!(off < 1e-3, "lse {off}");
    // Whichever part comes last.
    for _ in 0..10 {
        assert_eq!(there.attend(&plan, batch.scale()), first);
    }
}

/// Scores of hundreds, so that sums do not fit the fast kernel's range: some rows far above it, some below.
#[test]
#[ignore = "needs a GPU"]
fn scores_that_are_large_are_attended_with_running_maxima() {
    let gpu = Gpu::open(0).unwrap();
    for sign in [40.0, -40.0] {
        let mut batch = batch(heads(8, 2, 128), &[spec(200, 30, 40), spec(0, 3, 60)], 9);
        let large = |x: &Tensor, factor: f32| {
            let data = x.to_f32_vec().iter().map(|v| v.abs() * factor).collect();
            round(&Tensor::from_f32(x.shape(), data).unwrap())
        };
        // Powers of two, so that scaling the queries does not round them.
        let scale = 0.5 * std::f32::consts::LN_2;
        (batch.q, batch.k) = (large(&batch.q, sign), large(&batch.k, 1.0));
        for (k, _) in &mut batch.past {
            k.iter_mut().for_each(|k| *k = k.abs());
        }
        let there = upload(&gpu, &batch);
        let plan = there.plan(&batch, &batch.segments());
        for _ in 0..2 {
            let got = there.attend(&plan, scale);
            let (q, k, v) = (&batch.q, &batch.k, &batch.v);
            let (rows, segments) = (batch.rows(), batch.segments());
            let want = varlen_attention_partial(q, &rows, k, v, &segments, scale).unwrap();
            let off = error(&got, &want.out.to_f32_vec());
            assert!(off < TOLERANCE, "{sign}: {off}");
            let off = error(&there.lse.to_f32_vec().unwrap(), &want.lse.to_f32_vec());
            assert!(off < 1e-4, "{sign}: lse {off}");
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn a_row_has_the_same_bits_alone_and_packed() {
    let gpu = Gpu::open(0).unwrap();
    for heads in [heads(8, 2, 128), heads(4, 2, 16)] {
        let specs = [spec(70, 1, 140), spec(300, 40, 20)];
        let both = batch(heads, &specs, 3);
        let there = upload(&gpu, &both);
        let packed = there.attend(&there.plan(&both, &both.segments()), both.scale());
        let start = both.rows()[1].fresh.start;
        let second = |x: &Tensor| {
            let part = x.narrow0(start, 60).unwrap();
            Tensor::from_f32(part.shape(), part.to_f32_vec()).unwrap()
        };
        let mut alone = batch(heads, &specs[1..], 3);
        (alone.q, alone.k, alone.v) = (second(&both.q), second(&both.k), second(&both.v));
        alone.past = vec![both.past[1].clone()];
        let there = upload(&gpu, &alone);
        let one = there.attend(&there.plan(&alone, &alone.segments()), alone.scale());
        assert_eq!(one, packed[start * heads.q * heads.dim..]);
    }
}

#[test]
#[ignore = "needs a GPU"]
fn parts_without_keys_are_zero_and_tokens_left_out_stay() {
    let gpu = Gpu::open(0).unwrap();
    for heads in [heads(8, 2, 128), heads(4, 2, 16)] {
        let batch = batch(heads, &[spec(0, 0, 100)], 5);
        let there = upload(&gpu, &batch);
        let segments = [full(0, 0..40, 0), full(0, 60..100, 100)];
        let tokens = (&segments[..], 100);
        let plan = AttentionPlan::partial(&there.arena, heads, LAYERS, &there.rows, tokens);
        let got = there.attend(&plan.unwrap(), batch.scale());
        let width = heads.q * heads.dim;
        assert!(got[..40 * width].iter().all(|v| *v == 0.0));
        assert!(got[40 * width..60 * width].iter().all(|v| v.is_nan()));
        let want = on_cpu(&batch).out.to_f32_vec();
        assert!(error(&got[60 * width..], &want[60 * width..]) < TOLERANCE);
        let lse = there.lse.to_f32_vec().unwrap();
        assert!(lse[..40 * heads.q].iter().all(|v| *v == f32::NEG_INFINITY));
    }
}

#[test]
#[ignore = "needs a GPU"]
fn attention_within_a_fused_projection_is_that_of_the_cpu() {
    let gpu = Gpu::open(0).unwrap();
    let (heads, dim, sequences) = (3, 72, [50, 131]);
    let tokens: usize = sequences.iter().sum();
    let qkv = rounded(&values(9, tokens * 3 * heads * dim));
    let width = heads * dim;
    let part = |i: usize, start: usize, n: usize| {
        let rows = qkv.chunks(3 * width).skip(start).take(n);
        let data = rows.flat_map(|row| row[i * width..(i + 1) * width].to_vec());
        Tensor::from_f32(&[1, n, heads, dim], data.collect()).unwrap()
    };
    let scale = 0.3;
    let plan = plan_fused(&gpu, (heads, dim), &sequences).unwrap();
    let host = Tensor::from_f32(&[tokens, 3 * width], qkv.clone()).unwrap();
    let there = GpuTensor::bf16_from_host(&gpu, &host, "qkv").unwrap();
    let out = GpuTensor::new(&gpu, &[tokens, width], GpuType::Bf16, "out").unwrap();
    attention_fused(&plan, &out, &there, scale).unwrap();
    let got = out.to_f32_vec().unwrap();
    let mut start = 0;
    for n in sequences {
        let want = mha(
            &part(0, start, n),
            &part(1, start, n),
            &part(2, start, n),
            &[n],
            scale,
        )
        .unwrap();
        let got = &got[start * width..(start + n) * width];
        assert!(error(got, &want.to_f32_vec()) < TOLERANCE);
        start += n;
    }
}

/// Heads of several sizes, numbers of tokens that fill no group, and tokens that nobody sees.
#[test]
#[ignore = "needs a GPU"]
fn attention_of_small_heads_is_that_of_the_cpu() {
    let gpu = Gpu::open(0).unwrap();
    for (heads, dim, tokens, keys) in [
        (3, 72, 131, 97),
        (4, 12, 5, 5),
        (2, 128, 400, 399),
        (1, 16, 1, 1),
    ] {
        let width = heads * dim;
        let sums = values(9, tokens * 3 * width);
        let bias = values(11, 3 * width);
        let part = |i: usize| {
            let row = |row: &[f32]| -> Vec<f32> {
                let range = i * width..(i + 1) * width;
                row[range.clone()]
                    .iter()
                    .zip(&bias[range])
                    .map(|(x, b)| x + b)
                    .collect()
            };
            let data = sums.chunks(3 * width).flat_map(row).collect();
            Tensor::from_f32(&[1, tokens, heads, dim], data).unwrap()
        };
        let scale = 1.0 / (dim as f32).sqrt();
        let want = mha(&part(0), &part(1), &part(2), &[keys], scale).unwrap();
        let f32s =
            |dims: &[usize], values: &[f32]| GpuTensor::from_f32(&gpu, dims, values, "x").unwrap();
        let (there, bias) = (f32s(&[tokens, 3 * width], &sums), f32s(&[3 * width], &bias));
        let out = GpuTensor::new(&gpu, &[tokens, width], GpuType::Bf16, "out").unwrap();
        let whole = WholeAttention::new(&gpu, (heads, dim), (tokens, keys)).unwrap();
        for _ in 0..2 {
            whole.run(&out, (&there, Some(&bias)), scale).unwrap();
            let error = error(&out.to_f32_vec().unwrap(), &want.to_f32_vec());
            assert!(error < TOLERANCE, "{heads} {dim} {tokens}: {error}");
        }
    }
    assert!(WholeAttention::new(&gpu, (2, 129), (4, 4)).is_err());
    assert!(WholeAttention::new(&gpu, (2, 64), (4, 5)).is_err());
}

#[test]
#[ignore = "needs a GPU"]
fn operands_that_are_not_the_plans_are_refused_before_a_launch() {
    let gpu = Gpu::open(0).unwrap();
    let batch = batch(heads(8, 2, 128), &[spec(0, 1, 9)], 1);
    let there = upload(&gpu, &batch);
    let plan = there.plan(&batch, &batch.segments());
    let short = there.q.narrow0(0, 9).unwrap();
    let to = AttentionOut {
        out: &there.out,
        lse: None,
    };
    let refused = |q: &GpuTensor, arena: &GpuTensor, layer: usize| {
        let result = attention(&plan, to, q, (arena, layer), 1.0);
        result.unwrap_err().to_string()
    };
    assert!(refused(&short, &there.arena, 0).contains("q has shape"));
    assert!(refused(&there.q, &there.q, 0).contains("arena has shape"));
    assert!(refused(&there.q, &there.arena, LAYERS).contains("layer is 2"));
    assert!(attention_fused(&plan, &there.out, &there.q, 1.0).is_err());
}
