//! Routing and the way of tokens to their experts and back on the GPU against the definitions on the CPU.
#![cfg(feature = "cuda")]
#![allow(clippy::unwrap_used)]

mod common;
mod cuda_elementwise_common;

use std::sync::Arc;

use common::{random, random_bf16};
use cuda_elementwise_common::{BF16, EPS, assert_near, decoded, gpu, poisoned, relative, up};
use kernels::cuda::{
    E4m3Rows, ExpertOutputs, Gpu, GpuRouting, GpuTensor, GpuType, NormOutput, Permutation, RmsNorm,
    RouterWeight, combine, gather, gather_e4m3, permute, quantize_rows, rms_norm, route,
};
use kernels::{LinearWeight, Tensor, moe_combine, moe_route};

/// Routes random tokens; `(h, routing on the GPU, on the CPU)`.
fn routed(
    gpu: &Arc<Gpu>,
    (tokens, width, experts, top_k): (usize, usize, usize, usize),
) -> (Tensor, GpuRouting, kernels::Routing) {
    let (h, wide) = random_bf16(8, &[tokens, width]);
    let weight = random(9, &[experts, width]);
    let want = moe_route(
        &wide,
        &LinearWeight::new(&weight, None).unwrap(),
        top_k,
        true,
    )
    .unwrap();
    let router = RouterWeight::new(&up(gpu, &weight)).unwrap();
    let mut routing = GpuRouting::new(gpu, tokens + 3, experts, top_k).unwrap();
    route(&up(gpu, &h), &router, true, &mut routing).unwrap();
    (h, routing, want)
}

#[test]
#[ignore = "needs a GPU"]
fn experts_are_those_of_the_cpu_except_for_ties() {
    let gpu = gpu();
    for sizes in [(300, 128, 8, 2), (131, 200, 100, 6), (515, 4096, 64, 8)] {
        let (_, routing, want) = routed(&gpu, sizes);
        let experts = routing.choices().unwrap().to_i32_vec().unwrap();
        let gates = routing.gates().unwrap().to_f32_vec().unwrap();
        let same = |(a, b): &(&i32, &u32)| **a as u32 == **b;
        let slots = experts.len();
        assert_eq!(slots, sizes.0 * sizes.3);
        let agree = experts.iter().zip(&want.experts).filter(same).count();
        // Logits agree to some 1e-6: neighbours in probability that close are rare.
        assert!(
            slots - agree <= slots / 500,
            "{} of {slots} differ",
            slots - agree
        );
        let error = relative(&gates, &want.weights);
        assert!(error < 1e-4, "gates: {error}");
    }
}

#[test]
#[ignore = "needs a GPU"]
fn tokens_go_to_their_experts_in_order_and_come_back() {
    let gpu = gpu();
    for sizes in [
        (1, 128, 8, 2),
        (300, 256, 8, 2),
        (1030, 128, 64, 8),
        (40, 2560, 8, 2),
        (70, 4096, 8, 8),
    ] {
        let (tokens, width, experts, top_k) = sizes;
        let (h, routing, _) = routed(&gpu, sizes);
        let chosen = routing.choices().unwrap().to_i32_vec().unwrap();
        let mut there = Permutation::new(&gpu, tokens, experts, top_k, true).unwrap();
        permute(&routing, &mut there).unwrap();
        let mut order: Vec<usize> = (0..chosen.len()).collect();
        order.sort_by_key(|&slot| chosen[slot]);
        let position = there.position().unwrap().to_i32_vec().unwrap();
        assert!(
            order
                .iter()
                .enumerate()
                .all(|(row, &slot)| position[slot] as usize == row)
        );
        let offsets = there.offsets().to_i32_vec().unwrap();
        let below = |e: usize| chosen.iter().filter(|&&c| (c as usize) < e).count() as i32;
        let mut want: Vec<i32> = (0..=experts).map(below).collect();
        want.push((tokens * (top_k + 1)) as i32);
        assert_eq!(offsets, want);

        let rows = poisoned(&gpu, &[there.rows(), width], GpuType::Bf16);
        let on_gpu = up(&gpu, &h);
        gather(&on_gpu, &there, &rows).unwrap();
        let (moved, wide) = (rows.to_f32_vec().unwrap(), h.to_f32_vec());
        let row = |of: &[f32], at: usize| of[at * width..][..width].to_vec();
        for (slot, &at) in position.iter().enumerate() {
            assert_eq!(row(&moved, at as usize), row(&wide, slot / top_k));
        }
        assert_eq!(moved[tokens * top_k * width..], wide);
        back(&gpu, (&h, &routing), &there, &rows);
        e4m3_rows_move_alike(&gpu, &on_gpu, &there, &position);
    }
}

/// Experts that change nothing: their sum comes back to the residual stream.
fn back(
    gpu: &Arc<Gpu>,
    (h, routing): (&Tensor, &GpuRouting),
    there: &Permutation,
    rows: &GpuTensor,
) {
    let (tokens, width, top_k) = (h.dim(0), h.dim(1), routing.top_k());
    let gates = routing.gates().unwrap();
    let position = there.position().unwrap();
    let host = kernels::Routing {
        experts: vec![0; tokens * top_k],
        weights: gates.to_f32_vec().unwrap(),
        logits: Tensor::zeros(&[0, 1]).unwrap(),
        top_k,
    };
    let parts = rows.narrow0(0, tokens * top_k).unwrap();
    let parts = Tensor::from_f32(parts.shape(), parts.to_f32_vec().unwrap()).unwrap();
    let at: Vec<u32> = position
        .to_i32_vec()
        .unwrap()
        .iter()
        .map(|&p| p as u32)
        .collect();
    let sum = moe_combine(&parts, &at, &host).unwrap();
    let (x, wide) = random_bf16(10, &[tokens, width]);
    let want = kernels::add(&wide, &kernels::add(&sum, &h.to_f32()).unwrap()).unwrap();
    let (w, _) = random_bf16(11, &[width]);
    let normed = kernels::rms_norm(&want, &w, EPS).unwrap();
    let (x, w) = (up(gpu, &x), up(gpu, &w));
    let out = poisoned(gpu, &[tokens, width], GpuType::Bf16);
    let experts = ExpertOutputs {
        rows,
        position: &position,
        gate: &gates,
        shared: there.shared(),
    };
    let norm = RmsNorm {
        weight: &w,
        eps: EPS,
    };
    let to = NormOutput {
        rows: Some(&out),
        e4m3: None,
    };
    combine(&x, experts, Some(norm), to).unwrap();
    assert_near("combine", &x, want.as_f32().unwrap(), BF16);
    assert_near(
        "norm behind combine",
        &out,
        normed.as_f32().unwrap(),
        2.0 * BF16,
    );
    // The first norm of a pipeline's stage reads what the stage before has summed.
    let alone = poisoned(gpu, &[tokens, width], GpuType::Bf16);
    let to = NormOutput {
        rows: Some(&alone),
        e4m3: None,
    };
    rms_norm(&x, norm, to).unwrap();
    assert!(
        alone.to_bytes().unwrap() == out.to_bytes().unwrap(),
        "a norm alone and behind the experts have other bits at a width of {width}"
    );
}

fn e4m3_rows_move_alike(gpu: &Arc<Gpu>, h: &GpuTensor, there: &Permutation, position: &[i32]) {
    let (tokens, width, rows) = (h.dim(0), h.dim(1), there.rows());
    let make = |n: usize| {
        (
            poisoned(gpu, &[n, width], GpuType::E4m3),
            poisoned(gpu, &[n], GpuType::F32),
        )
    };
    let (from, to) = (make(tokens), make(rows));
    let from = E4m3Rows {
        codes: &from.0,
        scales: &from.1,
    };
    let to = E4m3Rows {
        codes: &to.0,
        scales: &to.1,
    };
    quantize_rows(h, from).unwrap();
    gather_e4m3(from, there, to).unwrap();
    let (one, many) = (decoded(from), decoded(to));
    for (slot, &at) in position.iter().enumerate() {
        let token = slot / (position.len() / tokens);
        assert_eq!(
            many[at as usize * width..][..width],
            one[token * width..][..width]
        );
    }
    assert_eq!(many[position.len() * width..], one);
}

#[test]
#[ignore = "needs a GPU"]
fn a_token_does_not_depend_on_the_others() {
    let gpu = gpu();
    let (tokens, width, experts, top_k) = (700, 4096, 64, 8);
    let (h, all, _) = routed(&gpu, (tokens, width, experts, top_k));
    let router = RouterWeight::new(&up(&gpu, &random(9, &[experts, width]))).unwrap();
    let h = up(&gpu, &h);
    let w = up(&gpu, &random_bf16(3, &[width]).0);
    let norm = RmsNorm {
        weight: &w,
        eps: EPS,
    };
    let normed = poisoned(&gpu, &[tokens, width], GpuType::Bf16);
    let out = NormOutput {
        rows: Some(&normed),
        e4m3: None,
    };
    rms_norm(&h, norm, out).unwrap();
    let mut alone = GpuRouting::new(&gpu, 1, experts, top_k).unwrap();
    for token in [0, 333, 699] {
        let one = h.narrow0(token, 1).unwrap();
        route(&one, &router, true, &mut alone).unwrap();
        let pick = |t: GpuTensor| t.narrow0(token, 1).unwrap().to_bytes().unwrap();
        assert_eq!(
            alone.choices().unwrap().to_bytes().unwrap(),
            pick(all.choices().unwrap())
        );
        assert_eq!(
            alone.gates().unwrap().to_bytes().unwrap(),
            pick(all.gates().unwrap())
        );
        let own = poisoned(&gpu, &[1, width], GpuType::Bf16);
        rms_norm(
            &one,
            norm,
            NormOutput {
                rows: Some(&own),
                e4m3: None,
            },
        )
        .unwrap();
        assert_eq!(own.to_bytes().unwrap(), pick(normed.clone()));
    }
}
