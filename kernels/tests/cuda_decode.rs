//! Products of decoding on the GPU against the CPU operation. Needs a GPU.
#![cfg(feature = "cuda")]
#![allow(missing_docs, clippy::unwrap_used)]

mod common;

use common::values;
use kernels::cuda::{
    CudaError, DecodeRow, DecodeRows, DecodeWeights, E4m3Rows, Gpu, GpuTensor, GpuType, KvSlot,
    Start, decode_dense, likeliest, quantize_rows,
};
use kernels::{AttnHeads, LinearWeight, Tensor, linear};

/// Rounding of what is given to 8 or 16 bits.
const TOLERANCE: f64 = 4e-2;

fn relative(got: &[f32], want: &[f32]) -> f64 {
    let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|v| v * v).sum::<f64>().sqrt();
    let gap = norm(&mut got.iter().zip(want).map(|(g, w)| f64::from(g - w)));
    gap / norm(&mut want.iter().map(|w| f64::from(*w)))
}

/// Released and short rows, numbers of features that end within a tile, and every class of token counts.
#[test]
#[ignore = "needs a Hopper GPU"]
fn dense_products_of_few_tokens_are_those_of_the_cpu_and_of_each_token_alone() {
    let gpu = Gpu::open(0).unwrap();
    for (tokens, n, k) in [
        (1, 520, 4096),
        (7, 264, 4096),
        (19, 136, 4096),
        (32, 72, 160),
        (1, 520, 2048),
        (19, 136, 2048),
        (3, 264, 1024),
        (32, 136, 1024),
    ] {
        let w = values(3, n * k);
        let a = values(5, tokens * k);
        let weight = Tensor::from_f32(&[n, k], w).unwrap();
        let input = Tensor::from_f32(&[tokens, k], a).unwrap();
        let want = linear(&input, &LinearWeight::new(&weight, None).unwrap()).unwrap();
        let wide = GpuTensor::bf16_from_host(&gpu, &weight, "w").unwrap();
        let codes = GpuTensor::new(&gpu, &[n, k], GpuType::E4m3, "w").unwrap();
        let scales = GpuTensor::new(&gpu, &[n], GpuType::F32, "w").unwrap();
        let to = E4m3Rows {
            codes: &codes,
            scales: &scales,
        };
        quantize_rows(&wide, to).unwrap();
        let wide = wide.reshape(&[1, n, k]).unwrap();
        let codes = codes.reshape(&[1, n, k]).unwrap();
        let scales = scales.reshape(&[1, n]).unwrap();
        for (data, scales) in [(&wide, None), (&codes, Some(&scales))] {
            let weights = DecodeWeights { data, scales };
            let input = sixteen(&gpu, &input, scales.is_some());
            let out = GpuTensor::new(&gpu, &[tokens, n], GpuType::F32, "out").unwrap();
            decode_dense(&out, &input, weights, Start::InOrder).unwrap();
            let got = out.to_f32_vec().unwrap();
            let error = relative(&got, want.as_f32().unwrap());
            assert!(error < TOLERANCE, "{tokens} {n} {k}: {error}");
            for token in 0..tokens {
                let one = input.narrow0(token, 1).unwrap();
                let alone = GpuTensor::new(&gpu, &[1, n], GpuType::F32, "out").unwrap();
                decode_dense(&alone, &one, weights, Start::InOrder).unwrap();
                assert_eq!(alone.to_f32_vec().unwrap(), got[token * n..(token + 1) * n]);
            }
        }
    }
}

/// Activations as the weights want them.
fn sixteen(gpu: &std::sync::Arc<Gpu>, input: &Tensor, half: bool) -> GpuTensor {
    if !half {
        return GpuTensor::bf16_from_host(gpu, input, "a").unwrap();
    }
    let out = GpuTensor::new(gpu, input.shape(), GpuType::F16, "a").unwrap();
    let bits = input.as_f32().unwrap().iter();
    let bits: Vec<u8> = bits
        .flat_map(|v| half::f16::from_f32(*v).to_le_bytes())
        .collect();
    out.write_bytes(&bits).unwrap();
    out
}

#[test]
#[ignore = "needs a Hopper GPU"]
fn the_likeliest_is_the_first_of_the_largest() {
    let gpu = Gpu::open(0).unwrap();
    let (rows, width) = (3, 5000);
    let mut logits = values(7, rows * width);
    logits[17] = 99.0;
    logits[4000] = 99.0;
    logits[width..2 * width].fill(-2.5);
    logits[2 * width + 4999] = 99.0;
    let logits = GpuTensor::from_f32(&gpu, &[rows, width], &logits, "logits").unwrap();
    let got = likeliest(&logits).unwrap().to_i32_vec().unwrap();
    assert_eq!(got, [17, 0, 4999]);
}

#[test]
#[ignore = "needs a Hopper GPU"]
fn what_does_not_fit_is_refused_before_anything_runs() {
    let gpu = Gpu::open(0).unwrap();
    let new = |dims: &[usize], dtype| GpuTensor::new(&gpu, dims, dtype, "operand").unwrap();
    let data = &new(&[1, 64, 2056], GpuType::Bf16);
    let weights = DecodeWeights { data, scales: None };
    let (input, out) = (new(&[2, 2056], GpuType::Bf16), new(&[2, 64], GpuType::F32));
    let refused = decode_dense(&out, &input, weights, Start::InOrder).unwrap_err();
    assert!(matches!(refused, CudaError::Argument(_)), "{refused}");
    let heads = AttnHeads {
        q: 32,
        kv: 8,
        dim: 128,
    };
    let at = KvSlot {
        first: 0,
        per_head: 128,
        per_layer: 2048,
        to_value: 1024,
    };
    let row = DecodeRow {
        at,
        past: 128,
        room: 128,
    };
    let full = DecodeRows::new(&gpu, &[row], heads, (1, 2048), None).unwrap_err();
    assert!(full.to_string().contains("room"), "{full}");
    let outside = DecodeRow { past: 3, ..row };
    let outside = DecodeRows::new(&gpu, &[outside], heads, (1, 1024), None).unwrap_err();
    assert!(matches!(outside, CudaError::Argument(_)), "{outside}");
}
