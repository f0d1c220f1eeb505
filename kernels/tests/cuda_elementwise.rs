//! Norms, rotation, moves of rows and the end of a step on the GPU against their definitions on the CPU.
#![cfg(feature = "cuda")]
#![allow(clippy::unwrap_used)]

mod common;
mod cuda_elementwise_common;

use common::{random, random_bf16, values};
use cuda_elementwise_common::{BF16, EPS, assert_near, decoded, gpu, poisoned, relative, up};
use kernels::cuda::{
    Activation, CudaError, E4m3Rows, GpuLayerNorm, GpuTensor, GpuType, KvSlot, KvSlots, NormOutput,
    Qkv, RmsNorm, RowIndex, StepJob, StepJobs, add_layer_norm, add_rms_norm, bias_activation,
    gather_rows, guide_step, layer_norm, move_rows, narrow_to_bf16, qkv_rope_norm_write,
    quantize_rows, rms_norm, scalar_code, scatter_rows,
};
use kernels::{AttnHeads, RopeTable, Tensor, bf16, qkv_split_rope_norm};

#[test]
#[ignore = "needs a GPU"]
fn norms_and_their_e4m3_are_those_of_the_cpu_at_every_width() {
    let gpu = gpu();
    for (tokens, width) in [
        (5, 128),
        (77, 256),
        (3, 1152),
        (9, 3072),
        (77, 4096),
        (2, 5120),
    ] {
        let (x, wide) = random_bf16(1, &[tokens, width]);
        let (y, wide_y) = random_bf16(2, &[tokens, width]);
        let (w, _) = random_bf16(3, &[width]);
        let want = kernels::rms_norm(&wide, &w, EPS).unwrap();
        let (x, y, w) = (up(&gpu, &x), up(&gpu, &y), up(&gpu, &w));
        let norm = RmsNorm {
            weight: &w,
            eps: EPS,
        };
        let h = poisoned(&gpu, &[tokens, width], GpuType::Bf16);
        let codes = poisoned(&gpu, &[tokens, width], GpuType::E4m3);
        let scales = poisoned(&gpu, &[tokens], GpuType::F32);
        let e4m3 = E4m3Rows {
            codes: &codes,
            scales: &scales,
        };
        let both = NormOutput {
            rows: Some(&h),
            e4m3: Some(e4m3),
        };
        rms_norm(&x, norm, both).unwrap();
        assert_near("rms_norm", &h, want.as_f32().unwrap(), BF16);
        let rows = h.to_f32_vec().unwrap();
        let error = relative(&decoded(e4m3), &rows);
        assert!(error < 4e-2, "width {width}: e4m3 {error}");
        let of_norm = (codes.to_bytes().unwrap(), scales.to_bytes().unwrap());
        quantize_rows(&h, e4m3).unwrap();
        let alone = (codes.to_bytes().unwrap(), scales.to_bytes().unwrap());
        assert!(of_norm == alone, "width {width}: fused codes differ");
        let sum = kernels::add(&wide, &wide_y).unwrap();
        let sum = Tensor::from_bf16(&[tokens, width], narrow(sum.as_f32().unwrap())).unwrap();
        let want = kernels::rms_norm(&sum.to_f32(), &w_host(&w), EPS).unwrap();
        add_rms_norm(&x, &y, norm, both).unwrap();
        assert_eq!(x.to_f32_vec().unwrap(), sum.to_f32_vec());
        assert_near("add_rms_norm", &h, want.as_f32().unwrap(), BF16);
    }
}

fn narrow(values: &[f32]) -> Vec<bf16> {
    values.iter().map(|v| bf16::from_f32(*v)).collect()
}

fn w_host(w: &GpuTensor) -> Tensor {
    Tensor::from_f32(w.shape(), w.to_f32_vec().unwrap()).unwrap()
}

#[test]
#[ignore = "needs a GPU"]
fn layer_norms_and_activations_are_those_of_the_cpu() {
    let gpu = gpu();
    for (rows, width) in [(77, 128), (5, 1152), (3, 4096)] {
        let (x, wide) = random_bf16(20, &[rows, width]);
        let (y, wide_y) = random_bf16(21, &[rows, width]);
        let [w, b, c] = [22, 23, 24].map(|seed| random(seed, &[width]));
        let (x, y) = (up(&gpu, &x), up(&gpu, &y));
        let on_gpu = [&w, &b, &c].map(|t| up(&gpu, t));
        let norm = GpuLayerNorm {
            weight: &on_gpu[0],
            bias: &on_gpu[1],
            eps: EPS,
        };
        let out = poisoned(&gpu, &[rows, width], GpuType::Bf16);
        layer_norm(&x, norm, &out).unwrap();
        let want = kernels::layer_norm(&wide, &w, &b, EPS).unwrap();
        assert_near("layer_norm", &out, want.as_f32().unwrap(), BF16);
        add_layer_norm(&x, (&y, Some(&on_gpu[2])), norm, &out).unwrap();
        let bias = c.as_f32().unwrap().repeat(rows);
        let bias = Tensor::from_f32(&[rows, width], bias).unwrap();
        let sum = kernels::add(&wide, &kernels::add(&wide_y, &bias).unwrap()).unwrap();
        assert_near("sum", &x, sum.as_f32().unwrap(), BF16);
        let want = kernels::layer_norm(&sum, &w, &b, EPS).unwrap();
        let want = want.as_f32().unwrap();
        assert_near("add_layer_norm", &out, want, 2.0 * BF16);
        let wide = up(&gpu, &sum);
        let to = poisoned(&gpu, &[rows, width], GpuType::F32);
        bias_activation(&to, &wide, None, Activation::GeluTanh).unwrap();
        let want = kernels::gelu_tanh(&sum).unwrap();
        assert_near("gelu_tanh", &to, want.as_f32().unwrap(), 1e-5);
    }
}

#[test]
#[ignore = "needs a GPU"]
fn heads_are_rotated_normalised_and_written_where_the_slots_say() {
    let gpu = gpu();
    let layers = 3;
    for (tokens, q, kv, dim) in [(7, 4, 2, 16), (33, 8, 2, 32), (77, 32, 8, 128)] {
        let heads = AttnHeads { q, kv, dim };
        let (qkv, wide) = random_bf16(4, &[tokens, heads.width()]);
        let angle = values(5, tokens * dim);
        let cos = angle.iter().map(|a| (a * 50.0).cos()).collect();
        let sin = angle.iter().map(|a| (a * 50.0).sin()).collect();
        let table = RopeTable {
            cos: Tensor::from_f32(&[tokens, dim], cos).unwrap(),
            sin: Tensor::from_f32(&[tokens, dim], sin).unwrap(),
        };
        let ((qn, _), (kn, _)) = (random_bf16(6, &[dim]), random_bf16(7, &[dim]));
        let want = qkv_split_rope_norm(&wide, &table, Some(&qn), Some(&kn), EPS, heads).unwrap();
        // Slots in reverse order, a row of space before and after.
        let capacity = tokens + 2;
        let slots: Vec<KvSlot> = (0..tokens)
            .map(|t| KvSlot {
                first: (tokens - t) as u32,
                per_head: capacity as u32,
                per_layer: (2 * kv * capacity) as u32,
                to_value: (kv * capacity) as u32,
            })
            .collect();
        let rows = 2 * layers * kv * capacity;
        let arena = GpuTensor::from_host(
            &gpu,
            &Tensor::from_bf16(&[rows, dim], vec![bf16::from_f32(7.0); rows * dim]).unwrap(),
            "test",
        )
        .unwrap();
        let on_gpu = KvSlots::new(&gpu, &slots, kv, layers, rows).unwrap();
        let out = poisoned(&gpu, &[tokens, q, dim], GpuType::Bf16);
        let (qn, kn) = (up(&gpu, &qn), up(&gpu, &kn));
        let input = Qkv {
            qkv: &up(&gpu, &qkv),
            cos: &up(&gpu, &table.cos),
            sin: &up(&gpu, &table.sin),
            q_norm: Some(&qn),
            k_norm: Some(&kn),
            eps: EPS,
            q_scale: 0.3,
            heads,
            layer: 1,
        };
        qkv_rope_norm_write(&input, &on_gpu, &out, &arena).unwrap();
        let scaled: Vec<f32> = want.0.as_f32().unwrap().iter().map(|v| v * 0.3).collect();
        assert_near("q", &out, &scaled, BF16);
        let got = arena.to_f32_vec().unwrap();
        let mut expected = vec![7.0; rows * dim];
        for (t, slot) in slots.iter().enumerate() {
            for head in 0..kv {
                let key = (slot.first + head as u32 * slot.per_head + slot.per_layer) as usize;
                for (source, row) in [(&want.1, key), (&want.2, key + slot.to_value as usize)] {
                    let from = &source.as_f32().unwrap()[(t * kv + head) * dim..][..dim];
                    expected[row * dim..][..dim].copy_from_slice(from);
                }
            }
        }
        let outside = expected.iter().zip(&got).filter(|(want, _)| **want == 7.0);
        assert!(outside.clone().count() > 0 && outside.clone().all(|(_, got)| *got == 7.0));
        let error = relative(&got, &expected);
        assert!(error < BF16, "keys and values: {error}");
        let late = Qkv {
            layer: layers,
            ..input
        };
        let refused = qkv_rope_norm_write(&late, &on_gpu, &out, &arena);
        assert!(matches!(refused, Err(CudaError::Argument(_))));
        assert!(KvSlots::new(&gpu, &slots, kv, layers, rows - 2).is_err());
    }
}

#[test]
#[ignore = "needs a GPU"]
fn guidance_and_the_step_are_those_of_the_cpu_bit_for_bit() {
    let gpu = gpu();
    let channels = 32;
    let (a, b) = (60 * channels, 17 * channels);
    let velocity = values(12, 2 * a + b);
    let latents = values(13, a + b);
    let job = |latents, cond, uncond, positions| StepJob {
        latents,
        cond,
        uncond,
        positions,
        guidance: 5.0,
        sigma_step: -0.037,
        rescale: 0.0,
        preserve_norm: false,
    };
    let both = [job(0, 0, Some(a), 60), job(a, 2 * a, None, 17)];
    let make = |jobs: &[StepJob]| StepJobs::new(&gpu, jobs, channels, a + b, 2 * a + b);
    let jobs = make(&both).unwrap();
    let v = GpuTensor::from_f32(&gpu, &[2 * a + b], &velocity, "test").unwrap();
    let x = GpuTensor::from_f32(&gpu, &[a + b], &latents, "test").unwrap();
    let thin = poisoned(&gpu, &[a + b], GpuType::Bf16);
    guide_step(&jobs, &v, &x, Some(&thin), None).unwrap();
    let want: Vec<f32> = (0..a + b)
        .map(|i| {
            let guided = if i < a {
                velocity[a + i] + 5.0 * (velocity[i] - velocity[a + i])
            } else {
                velocity[a + i]
            };
            latents[i] + guided * -0.037
        })
        .collect();
    assert_eq!(x.to_f32_vec().unwrap(), want);
    let again = poisoned(&gpu, &[a + b], GpuType::Bf16);
    narrow_to_bf16(&x, &again).unwrap();
    assert_eq!(thin.to_bytes().unwrap(), again.to_bytes().unwrap());

    // All of the deviation brought back: what is left has that of the conditional velocity.
    let rescaled = [StepJob {
        rescale: 1.0,
        sigma_step: 1.0,
        ..both[0]
    }];
    let jobs = make(&rescaled).unwrap();
    let zero = GpuTensor::from_f32(&gpu, &[a + b], &vec![0.0; a + b], "test").unwrap();
    assert!(guide_step(&jobs, &v, &zero, None, None).is_err());
    let guided = poisoned(&gpu, &[a + b], GpuType::F32);
    guide_step(&jobs, &v, &zero, None, Some(&guided)).unwrap();
    let deviation = |v: &[f32]| {
        let mean = v.iter().sum::<f32>() / v.len() as f32;
        (v.iter().map(|x| (x - mean).powi(2)).sum::<f32>() / (v.len() - 1) as f32).sqrt()
    };
    let got = deviation(&zero.to_f32_vec().unwrap()[..a]);
    assert!((got / deviation(&velocity[..a]) - 1.0).abs() < 1e-4);
    assert!(make(&[job(0, 0, Some(a + b + 1), 60)]).is_err());
}

#[test]
#[ignore = "needs a GPU"]
fn rows_move_by_index_and_scalars_become_codes() {
    let gpu = gpu();
    let (table, wide) = random_bf16(14, &[50, 128]);
    let table = up(&gpu, &table);
    let wide = wide.to_f32_vec();
    let row = |i: usize| &wide[i * 128..][..128];
    let ids = RowIndex::new(&gpu, &[49, 0, 7, 7], 50).unwrap();
    let to = poisoned(&gpu, &[4, 128], GpuType::Bf16);
    gather_rows(&table, &ids, &to).unwrap();
    assert_eq!(
        to.to_f32_vec().unwrap(),
        [row(49), row(0), row(7), row(7)].concat()
    );
    let target = RowIndex::new(&gpu, &[2, 0], 4).unwrap();
    let source = RowIndex::new(&gpu, &[1, 2], 50).unwrap();
    move_rows(&table, &source, &to, &target).unwrap();
    assert_eq!(
        to.to_f32_vec().unwrap(),
        [row(2), row(0), row(1), row(7)].concat()
    );
    scatter_rows(&table.narrow0(3, 2).unwrap(), &target, &to).unwrap();
    assert_eq!(
        to.to_f32_vec().unwrap(),
        [row(4), row(0), row(3), row(7)].concat()
    );
    assert!(RowIndex::new(&gpu, &[50], 50).is_err());

    let times = [1000.0_f32, 2496.0, 0.0];
    let scalars = GpuTensor::from_f32(&gpu, &[3], &times, "test").unwrap();
    let code = poisoned(&gpu, &[3, 256], GpuType::F32);
    scalar_code(&scalars, &code).unwrap();
    let code = code.to_f32_vec().unwrap();
    for (i, got) in code.iter().enumerate() {
        let (row, column) = (i / 256, i % 256);
        let frequency = 10_000_f64.powf(-((column % 128) as f64) / 128.0);
        let angle = f64::from(times[row]) * frequency;
        let want = if column < 128 {
            angle.cos()
        } else {
            angle.sin()
        };
        assert!(
            (f64::from(*got) - want).abs() < 1e-3,
            "{row} {column}: {got} {want}"
        );
    }
}
