//! Linear layers, norms, activations and the expert block against their plain definitions.
#![allow(missing_docs, clippy::unwrap_used)]

mod common;

use common::{assert_close, random, random_bf16};
use kernels::{
    AttnHeads, ExpertWeights, KernelError, LinearWeight, RopeTable, Tensor, add, add_assign,
    add_scaled, embedding, gelu_erf, gelu_tanh, layer_norm, linear, moe_experts, moe_route, plain,
    qkv_split_rope_norm, rms_norm, silu, softmax_rows, swiglu_up_gate,
};
use proptest::prelude::*;

fn elementwise(x: &Tensor, f: fn(f32) -> f32) -> Tensor {
    Tensor::from_f32(x.shape(), x.to_f32_vec().into_iter().map(f).collect()).unwrap()
}

/// Pairs of (expert, weight) per token, as the plain definition wants them.
fn pairs(experts: &[u32], weights: &[f32], k: usize) -> Vec<Vec<(u32, f32)>> {
    let all: Vec<_> = experts
        .iter()
        .copied()
        .zip(weights.iter().copied())
        .collect();
    all.chunks(k).map(<[_]>::to_vec).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn linear_equals_its_definition(
        t in 1usize..40, n in 1usize..100, k in 1usize..600, with_bias: bool, seed: u64,
    ) {
        let (x, w, b) = (random(seed, &[t, k]), random(seed ^ 1, &[n, k]), random(seed ^ 2, &[n]));
        let bias = with_bias.then_some(&b);
        let y = linear(&x, &LinearWeight::new(&w, bias).unwrap()).unwrap();
        assert_close("linear", &y, &plain::linear(&x, &w, bias), 1e-4);
    }

    #[test]
    fn a_bf16_weight_gives_the_bits_of_the_widened_weight(
        t in 1usize..20, n in 1usize..70, k in 1usize..300, seed: u64,
    ) {
        let x = random(seed, &[t, k]);
        let (narrow, wide) = random_bf16(seed ^ 1, &[n, k]);
        let a = linear(&x, &LinearWeight::new(&narrow, None).unwrap()).unwrap();
        let b = linear(&x, &LinearWeight::new(&wide, None).unwrap()).unwrap();
        prop_assert_eq!(common::bits(&a), common::bits(&b));
    }

    #[test]
    fn norms_equal_their_definitions(t in 1usize..20, h in 1usize..300, seed: u64) {
        let (x, w, b) = (random(seed, &[t, h]), random(seed ^ 1, &[h]), random(seed ^ 2, &[h]));
        assert_close("rms", &rms_norm(&x, &w, 1e-5).unwrap(), &plain::rms_norm(&x, &w, 1e-5), 1e-5);
        // Variance of a short row may be tiny: a larger eps keeps the definition well conditioned.
        let eps = 1e-3;
        let (got, want) = (layer_norm(&x, &w, &b, eps).unwrap(), plain::layer_norm(&x, &w, &b, eps));
        assert_close("layer", &got, &want, 1e-4);
    }

    #[test]
    fn elementwise_operations_equal_their_definitions(n in 1usize..500, seed: u64, range in 0.1f32..60.0) {
        let x = elementwise(&random(seed, &[n]), |v| v);
        let x = Tensor::from_f32(&[n], x.to_f32_vec().iter().map(|v| v * range).collect()).unwrap();
        let y = random(seed ^ 1, &[n]);
        assert_close("silu", &silu(&x).unwrap(), &elementwise(&x, plain::silu), 1e-6);
        assert_close("erf", &gelu_erf(&x).unwrap(), &elementwise(&x, plain::gelu_erf), 1e-6);
        assert_close("tanh", &gelu_tanh(&x).unwrap(), &elementwise(&x, plain::gelu_tanh), 2e-6);
        let sum: Vec<f32> = x.to_f32_vec().iter().zip(y.to_f32_vec()).map(|(a, b)| a + b).collect();
        prop_assert_eq!(add(&x, &y).unwrap().to_f32_vec(), sum.clone());
        let (shared, mut z) = (x.clone(), x.clone());
        add_assign(&mut z, &y).unwrap();
        prop_assert_eq!(z.to_f32_vec(), sum);
        prop_assert_eq!(shared.to_f32_vec(), x.to_f32_vec());
        let scaled: Vec<f32> = x.to_f32_vec().iter().zip(y.to_f32_vec()).map(|(a, b)| a + 0.3 * b).collect();
        let mut z = x.clone();
        add_scaled(&mut z, 0.3, &y).unwrap();
        prop_assert_eq!(z.to_f32_vec(), scaled);
    }

    #[test]
    fn softmax_equals_its_definition(t in 1usize..10, n in 1usize..200, seed: u64) {
        let x = Tensor::from_f32(&[t, n], random(seed, &[t, n]).to_f32_vec().iter().map(|v| v * 30.0).collect());
        let x = x.unwrap();
        assert_close("softmax", &softmax_rows(&x).unwrap(), &plain::softmax_rows(&x), 1e-6);
    }

    #[test]
    fn swiglu_multiplies_the_first_half_by_silu_of_the_second(t in 1usize..10, half in 1usize..100, seed: u64) {
        let x = random(seed, &[t, 2 * half]);
        assert_close("swiglu", &swiglu_up_gate(&x).unwrap(), &plain::swiglu_up_gate(&x), 1e-6);
    }

    #[test]
    fn heads_are_split_rotated_then_normalised(
        t in 1usize..12, kv in 1usize..4, group in 1usize..5, half in 1usize..40, norm: bool, seed: u64,
    ) {
        let heads = AttnHeads { q: kv * group, kv, dim: 2 * half };
        let qkv = random(seed, &[t, heads.width()]);
        let rope = RopeTable {
            cos: random(seed ^ 1, &[t, heads.dim]),
            sin: random(seed ^ 2, &[t, heads.dim]),
        };
        let (qn, kn) = (random(seed ^ 3, &[heads.dim]), random(seed ^ 4, &[heads.dim]));
        let norms = norm.then_some((&qn, &kn));
        let got = qkv_split_rope_norm(&qkv, &rope, norms.map(|n| n.0), norms.map(|n| n.1), 1e-5, heads);
        let (got, want) = (got.unwrap(), plain::qkv_split_rope_norm(&qkv, &rope, norms, 1e-5, heads));
        assert_close("q", &got.0, &want.0, 1e-5);
        assert_close("k", &got.1, &want.1, 1e-5);
        assert_close("v", &got.2, &want.2, 0.0);
    }

    #[test]
    fn experts_equal_their_definition(
        t in 1usize..40, h in 1usize..50, half in 1usize..40, e in 1usize..10, k in 1usize..10, seed: u64,
    ) {
        let k = k.min(e);
        let x = random(seed, &[t, h]);
        let wg = LinearWeight::new(&random(seed ^ 1, &[e, h]), None).unwrap();
        let routing = moe_route(&x, &wg, k, true).unwrap();
        let p = plain::softmax_rows(&routing.logits).to_f32_vec();
        for (i, chosen) in pairs(&routing.experts, &routing.weights, k).iter().enumerate() {
            let want = plain::top_k(&p[i * e..(i + 1) * e], k, true);
            for (got, want) in chosen.iter().zip(&want) {
                prop_assert!((got.1 - want.1).abs() < 1e-6, "{got:?} {want:?}");
            }
        }
        let weights: Vec<(Tensor, Tensor)> = (0..e as u64)
            .map(|i| (random(seed ^ (10 + i), &[2 * half, h]), random(seed ^ (100 + i), &[h, half])))
            .collect();
        let prepared = |w: &Tensor| LinearWeight::new(w, None).unwrap();
        let (g, d) = weights.iter().map(|(g, d)| (prepared(g), prepared(d))).unzip();
        let got = moe_experts(&x, &routing, &ExpertWeights::new(g, d).unwrap()).unwrap();
        let want = plain::moe_experts(&x, &pairs(&routing.experts, &routing.weights, k), &weights);
        assert_close("experts", &got, &want, 1e-4);
    }
}

#[test]
fn among_equal_probabilities_the_lower_expert_comes_first() {
    let x = Tensor::from_f32(&[1, 1], vec![1.0]).unwrap();
    let wg = Tensor::from_f32(&[6, 1], vec![0.5, 2.0, 0.5, 2.0, 2.0, 0.5]).unwrap();
    let routing = moe_route(&x, &LinearWeight::new(&wg, None).unwrap(), 5, true).unwrap();
    assert_eq!(routing.experts, [1, 3, 4, 0, 2]);
    assert!((routing.weights.iter().sum::<f32>() - 1.0).abs() < 1e-6);
}

#[test]
fn without_renormalisation_the_weights_are_the_probabilities() {
    let x = random(1, &[7, 5]);
    let wg = random(2, &[9, 5]);
    let routing = moe_route(&x, &LinearWeight::new(&wg, None).unwrap(), 3, false).unwrap();
    let p = plain::softmax_rows(&plain::linear(&x, &wg, None)).to_f32_vec();
    for (slot, (&e, &w)) in routing.experts.iter().zip(&routing.weights).enumerate() {
        assert!((w - p[slot / 3 * 9 + e as usize]).abs() < 1e-6);
    }
}

#[test]
fn embedding_reads_rows_of_either_type_and_refuses_an_unknown_id() {
    let (narrow, wide) = random_bf16(3, &[11, 6]);
    let want: Vec<f32> = [10usize, 0, 10]
        .iter()
        .flat_map(|&i| wide.to_f32_vec()[i * 6..(i + 1) * 6].to_vec())
        .collect();
    assert_eq!(embedding(&[10, 0, 10], &wide).unwrap().to_f32_vec(), want);
    assert_eq!(embedding(&[10, 0, 10], &narrow).unwrap().to_f32_vec(), want);
    let error = embedding(&[0, 11], &wide).unwrap_err();
    assert_eq!(
        error,
        KernelError::Bounds {
            op: "embedding",
            what: "id",
            value: 11,
            limit: 11
        }
    );
}

#[test]
fn a_prepared_weight_gives_back_what_it_was_made_from() {
    for (n, k) in [(1, 1), (3, 5), (16, 7), (40, 9), (129, 33)] {
        let data: Vec<f32> = (0..n * k).map(|i| i as f32 * 0.25 - 3.0).collect();
        let wide = Tensor::from_f32(&[n, k], data.clone()).unwrap();
        let half = data.iter().map(|v| kernels::bf16::from_f32(*v)).collect();
        let narrow = Tensor::from_bf16(&[n, k], half).unwrap();
        for w in [wide, narrow] {
            let back = LinearWeight::new(&w, None).unwrap().to_tensor().unwrap();
            assert_eq!(back.shape(), w.shape());
            assert_eq!(
                back.to_f32_vec(),
                w.to_f32_vec(),
                "{n} x {k} {:?}",
                w.dtype()
            );
        }
    }
}
