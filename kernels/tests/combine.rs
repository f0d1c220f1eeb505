//! Expert outputs computed apart and put together again: the bits of the expert block in one piece.
#![allow(missing_docs, clippy::unwrap_used)]

mod common;

use common::{assert_close, bits, on_threads, random};
use kernels::{
    ExpertWeights, KernelError, LinearWeight, Routing, Tensor, bf16, moe_combine, moe_experts,
    moe_route, plain,
};
use proptest::prelude::*;

/// The expert block of a small layer with its input.
struct Block {
    x: Tensor,
    routing: Routing,
    experts: ExpertWeights,
}

impl Block {
    fn new(tokens: usize, hidden: usize, experts: usize, top_k: usize, seed: u64) -> Self {
        let weight = |s: u64, n, k| LinearWeight::new(&random(seed ^ s, &[n, k]), None).unwrap();
        let x = random(seed, &[tokens, hidden]);
        let router = weight(1, experts, hidden);
        let count = experts as u64;
        Self {
            routing: moe_route(&x, &router, top_k, true).unwrap(),
            experts: ExpertWeights::new(
                (0..count).map(|e| weight(100 + e, 26, hidden)).collect(),
                (0..count).map(|e| weight(200 + e, hidden, 13)).collect(),
            )
            .unwrap(),
            x,
        }
    }

    /// Unweighted expert outputs of the given slots, one row each: what a rank sends back.
    fn slots(&self, slots: &[usize]) -> Tensor {
        let hidden = self.x.dim(1);
        let x = self.x.to_f32_vec();
        let gathered = slots
            .iter()
            .flat_map(|slot| x[slot / self.routing.top_k * hidden..][..hidden].to_vec())
            .collect();
        let routing = Routing {
            experts: slots.iter().map(|&s| self.routing.experts[s]).collect(),
            weights: vec![1.0; slots.len()],
            logits: Tensor::zeros(&[0, 0]).unwrap(),
            top_k: 1,
        };
        let x = Tensor::from_f32(&[slots.len(), hidden], gathered).unwrap();
        moe_experts(&x, &routing, &self.experts).unwrap()
    }
}

/// An order of `0 .. n` drawn from the keys, one a number.
fn shuffled(n: usize, seed: u64) -> Vec<usize> {
    let keys = common::values(seed, n);
    let mut order: Vec<usize> = (0..n).collect();
    order.sort_by(|&a, &b| keys[a].total_cmp(&keys[b]));
    order
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn slots_computed_apart_in_any_grouping_combine_to_the_bits_of_the_whole(
        shape in (1usize..40, 1usize..70, 1usize..9, 1usize..9), calls in 1usize..6, seed: u64,
    ) {
        let (tokens, hidden, experts, top_k) = shape;
        let top_k = top_k.min(experts);
        let block = Block::new(tokens, hidden, experts, top_k, seed);
        let slots = tokens * top_k;
        // Which call computes a slot, and the order of the rows inside of it, are arbitrary.
        let (order, call) = (shuffled(slots, seed ^ 5), common::values(seed ^ 6, slots));
        let (mut parts, mut position, mut at) = (Vec::new(), vec![u32::MAX; slots], 0);
        for c in 0..calls {
            let of_call = |s: usize| ((call[s] + 1.0) / 2.0 * calls as f32) as usize == c;
            let mine: Vec<usize> = order.iter().copied().filter(|&s| of_call(s)).collect();
            for &slot in &mine {
                position[slot] = at;
                at += 1;
            }
            parts.push(block.slots(&mine));
        }
        prop_assert_eq!(at as usize, slots);
        let parts = Tensor::concat0(&parts.iter().collect::<Vec<_>>()).unwrap();
        let whole = moe_experts(&block.x, &block.routing, &block.experts).unwrap();
        let got = moe_combine(&parts, &position, &block.routing).unwrap();
        prop_assert_eq!(bits(&got), bits(&whole));
        let want = plain::moe_combine(&parts, &position, &block.routing.weights, top_k);
        assert_close("combine", &got, &want, 1e-5);
    }
}

#[test]
fn threads_do_not_change_a_bit() {
    // Large enough to be worth several threads.
    let block = Block::new(400, 300, 6, 4, 9);
    let position: Vec<u32> = (0..1600).rev().collect();
    let parts = block.slots(&(0..1600).rev().collect::<Vec<_>>());
    let whole = on_threads(1, || moe_experts(&block.x, &block.routing, &block.experts)).unwrap();
    for threads in [1, 3] {
        let got = on_threads(threads, || moe_combine(&parts, &position, &block.routing));
        assert_eq!(bits(&got.unwrap()), bits(&whole));
    }
}

#[test]
fn no_tokens_combine_to_an_empty_answer() {
    let routing = Routing {
        experts: vec![],
        weights: vec![],
        logits: Tensor::zeros(&[0, 4]).unwrap(),
        top_k: 2,
    };
    let parts = Tensor::zeros(&[0, 5]).unwrap();
    assert_eq!(moe_combine(&parts, &[], &routing).unwrap().shape(), [0, 5]);
}

#[test]
fn bad_positions_and_lengths_are_named() {
    let good = Routing {
        experts: vec![0, 1, 1, 0],
        weights: vec![0.5; 4],
        logits: Tensor::zeros(&[2, 2]).unwrap(),
        top_k: 2,
    };
    let parts = random(1, &[4, 3]);
    let named = |result: Result<Tensor, KernelError>, name: &str| {
        let message = result.unwrap_err().to_string();
        assert!(message.contains(name), "{message} should name {name}");
    };
    let position = [3, 1, 0, 2];
    assert!(moe_combine(&parts, &position, &good).is_ok());
    assert_eq!(
        moe_combine(&parts, &[0, 1, 4, 2], &good).unwrap_err(),
        KernelError::Bounds {
            op: "moe_combine",
            what: "position",
            value: 4,
            limit: 4,
        }
    );
    named(moe_combine(&parts, &[0, 1, 1, 2], &good), "two slots");
    named(moe_combine(&parts, &[0, 1, 2], &good), "position length");
    named(
        moe_combine(&random(1, &[5, 3]), &position, &good),
        "parts has shape [5, 3]",
    );
    named(moe_combine(&random(1, &[4]), &position, &good), "parts");
    let narrow = Tensor::from_bf16(&[4, 3], vec![bf16::ONE; 12]).unwrap();
    named(moe_combine(&narrow, &position, &good), "parts is Bf16");
    let with = |change: fn(&mut Routing)| {
        let mut routing = good.clone();
        change(&mut routing);
        moe_combine(&parts, &position, &routing)
    };
    named(with(|r| r.top_k = 0), "routing.weights");
    named(with(|r| r.top_k = 3), "routing.weights");
    named(with(|r| r.weights.truncate(2)), "routing.experts length");
    named(with(|r| r.experts.truncate(2)), "routing.experts length");
}
