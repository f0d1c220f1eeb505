//! The promise of the crate: a row's result does not depend on the batch nor on the threads, bit for bit.
#![allow(missing_docs, clippy::unwrap_used)]

mod common;

use common::{bits, on_threads, random, rows};
use kernels::{ExpertWeights, LinearWeight, Tensor, linear, moe_experts, moe_route, rms_norm};
use proptest::prelude::*;

/// Norm, projection, routing and experts of a small layer.
struct Layer {
    norm: Tensor,
    proj: LinearWeight,
    router: LinearWeight,
    experts: ExpertWeights,
}

impl Layer {
    fn new(hidden: usize, seed: u64) -> Self {
        let weight = |s: u64, n, k| LinearWeight::new(&random(seed ^ s, &[n, k]), None).unwrap();
        Self {
            norm: random(seed, &[hidden]),
            proj: weight(1, hidden, hidden),
            router: weight(2, 6, hidden),
            experts: ExpertWeights::new(
                (0..6).map(|e| weight(10 + e, 48, hidden)).collect(),
                (0..6).map(|e| weight(30 + e, hidden, 24)).collect(),
            )
            .unwrap(),
        }
    }

    fn run(&self, x: &Tensor) -> Tensor {
        let x = linear(&rms_norm(x, &self.norm, 1e-5).unwrap(), &self.proj).unwrap();
        let routing = moe_route(&x, &self.router, 2, true).unwrap();
        moe_experts(&x, &routing, &self.experts).unwrap()
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn a_row_in_a_batch_has_the_bits_of_the_row_alone(
        hidden in prop::sample::select(vec![7usize, 32, 130, 520]), a in 1usize..30, b in 1usize..30, seed: u64,
    ) {
        let layer = Layer::new(hidden, seed);
        let x = random(seed ^ 99, &[a + b, hidden]);
        let together = layer.run(&x);
        prop_assert_eq!(bits(&layer.run(&rows(&x, 0, a))), bits(&rows(&together, 0, a)));
        prop_assert_eq!(bits(&layer.run(&rows(&x, a, b))), bits(&rows(&together, a, b)));
    }

    #[test]
    fn threads_do_not_change_a_bit(t in 1usize..400, seed: u64) {
        let layer = Layer::new(128, seed);
        let x = random(seed ^ 99, &[t, 128]);
        let one = on_threads(1, || layer.run(&x));
        for threads in [2, 3, 7] {
            prop_assert_eq!(bits(&one), bits(&on_threads(threads, || layer.run(&x))));
        }
    }
}

#[test]
fn a_wide_layer_split_over_columns_has_the_same_bits() {
    let w = LinearWeight::new(&random(1, &[1500, 700]), Some(&random(2, &[1500]))).unwrap();
    let x = random(3, &[3, 700]);
    let one = on_threads(1, || linear(&x, &w).unwrap());
    for threads in [2, 5] {
        assert_eq!(
            bits(&one),
            bits(&on_threads(threads, || linear(&x, &w).unwrap()))
        );
    }
    for i in 0..3 {
        let alone = on_threads(4, || linear(&rows(&x, i, 1), &w).unwrap());
        assert_eq!(bits(&alone), bits(&rows(&one, i, 1)));
    }
}
