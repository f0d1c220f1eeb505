use parallel::{
    Plan,
    cost::{Interconnect, Machine, WeightType},
};
use proptest::prelude::*;

use super::*;
use crate::ScheduleError;

/// The published model.
pub(crate) fn published() -> ModelNumbers {
    ModelNumbers {
        layers: 32,
        hidden: 4096,
        heads: 32,
        kv_heads: 8,
        head_dim: 128,
        experts: 64,
        top_k: 8,
        expert_inner: 3072,
        shared_inner: 3072,
        pixels_per_token: 16,
        specials: 1,
        edit_prefix_share: 1.25,
        decode_flops_per_token: 2.52e10,
    }
}

/// The published model on one H200.
pub(crate) fn h200(weights: WeightType, streamed_layers: u32) -> Constants {
    derive("single", weights, streamed_layers).unwrap()
}

fn derive(plan: &str, weights: WeightType, streamed: u32) -> Result<Constants, ScheduleError> {
    let machine = Machine::h200(0, weights, Interconnect::NvLink);
    let plan: Plan = plan.parse().unwrap();
    Constants::derive(&published(), &machine, &plan, streamed)
}

fn rows(rows: u32, tokens: u32, prefix: u32) -> Load {
    Load::from(Rows {
        rows,
        tokens,
        prefix,
    })
}

fn any_rows() -> impl Strategy<Value = Rows> {
    (1..3_u32, 1..9000_u32, 0..9000_u32).prop_map(|(rows, tokens, prefix)| Rows {
        rows,
        tokens,
        prefix,
    })
}

/// With and without layers that are copied in.
fn any_constants() -> impl Strategy<Value = Constants> {
    (any::<bool>(), 0..9_u32).prop_map(|(fp8, streamed)| {
        let weights = if fp8 {
            WeightType::Fp8
        } else {
            WeightType::Bf16
        };
        h200(weights, streamed)
    })
}

#[test]
fn a_guided_square_picture_takes_what_was_measured() {
    // Measured: 14.4 ms a layer with two rows of 4097 queries, 32 layers.
    let step = h200(WeightType::Bf16, 0).step(rows(2, 4097, 256));
    assert!((step / (32.0 * 14.4e-3) - 1.0).abs() < 0.1, "{step}");
}

#[test]
fn layers_that_are_copied_in_are_a_floor_under_every_step() {
    let constants = h200(WeightType::Bf16, 7);
    // 7 layers of 5 GB at 55 GB/s.
    assert!((constants.stream_s - 0.635).abs() < 0.02);
    assert_eq!(constants.step(rows(1, 1025, 64)), constants.stream_s);
    assert!(constants.step(rows(4, 4097, 64)) > constants.stream_s);
    assert_eq!(constants.step(Load::default()), 0.0);
}

#[test]
fn more_ranks_make_a_step_shorter_and_never_by_more_than_their_number() {
    let load = rows(2, 4097, 256);
    let one = h200(WeightType::Bf16, 0).step(load);
    for plan in ["tp=2", "ulysses=2,ep=ulysses", "ring=2,ep=ring"] {
        let two = derive(plan, WeightType::Bf16, 0).unwrap().step(load);
        assert!(two < one && two > one / 2.0, "{plan}: {two} of {one}");
    }
}

#[test]
fn plans_and_sizes_that_cannot_be_priced_are_refused_by_name() {
    for plan in ["pp=2", "cfg=2"] {
        let error = derive(plan, WeightType::Bf16, 0).unwrap_err();
        assert!(
            matches!(error, ScheduleError { field: "plan", .. }),
            "{error}"
        );
    }
    let error = derive("single", WeightType::Bf16, 33).unwrap_err();
    assert!(error.to_string().starts_with("streamed_layers "), "{error}");
    let machine = Machine::h200(0, WeightType::Bf16, Interconnect::NvLink);
    for broken in [
        ModelNumbers {
            hidden: 0,
            ..published()
        },
        ModelNumbers {
            top_k: 65,
            ..published()
        },
        ModelNumbers {
            edit_prefix_share: f64::NAN,
            ..published()
        },
    ] {
        let error = Constants::derive(&broken, &machine, &Plan::default(), 0).unwrap_err();
        assert!(error.to_string().starts_with("model "), "{error}");
    }
    let nan = Constants {
        fixed_s: f64::NAN,
        ..h200(WeightType::Fp8, 0)
    };
    assert!(nan.check().is_err());
}

proptest! {
    #[test]
    fn more_work_never_takes_less_time(
        constants in any_constants(), a in any_rows(), b in any_rows(),
        more in (0..3_u32, 0..500_u32, 0..500_u32),
    ) {
        let larger = Rows {
            rows: a.rows + more.0,
            tokens: a.tokens + more.1,
            prefix: a.prefix + more.2,
        };
        let (a, b) = (Load::from(a), Load::from(b));
        prop_assert!(constants.step(larger.into()) >= constants.step(a));
        prop_assert!(constants.step(a + b) >= constants.step(a));
        prop_assert!(constants.marginal(a + b) > constants.marginal(a));
    }

    /// What jobs add is theirs alone; what is paid once a step is the only thing that sharing can save.
    #[test]
    fn own_parts_add_up_and_sharing_saves_at_most_what_is_paid_once(
        constants in any_constants(), a in any_rows(), b in any_rows(),
    ) {
        let (a, b) = (Load::from(a), Load::from(b));
        let own = constants.marginal(a) + constants.marginal(b);
        prop_assert!((constants.marginal(a + b) - own).abs() <= 1e-9 * own);
        let saved = constants.step(a) + constants.step(b) - constants.step(a + b);
        let once = constants.fixed_s + constants.dense_read_s + constants.experts_read_s;
        prop_assert!(saved >= -1e-9, "sharing costs {}", -saved);
        prop_assert!(saved <= once.max(constants.stream_s) + 1e-9);
    }

    #[test]
    fn few_tokens_read_fewer_experts(constants in any_constants(), tokens in 1..64_u32) {
        let resident = Constants { stream_s: 0.0, ..constants };
        let read = |tokens: u32| {
            let load = rows(1, tokens, 0);
            resident.step(load) - resident.marginal(load)
        };
        prop_assert!(read(tokens) <= read(tokens + 1) + 1e-12);
        prop_assert!(read(1) < read(64) / 2.0);
    }

    #[test]
    fn the_correction_converges_to_what_is_measured(
        truth in 0.3..3.9_f64, first in 0.01..100.0_f64, load in any_rows(),
    ) {
        let mut predictor = Predictor::new(h200(WeightType::Fp8, 0));
        let load = Load::from(load);
        let expected = predictor.constants.step(load);
        predictor.observe(load, expected * first);
        for _ in 0..150 {
            predictor.observe(load, expected * truth);
        }
        prop_assert!((predictor.step(load) / (expected * truth) - 1.0).abs() < 1e-3);
    }

    #[test]
    fn the_correction_never_leaves_its_bounds(
        seen in proptest::collection::vec((any::<f64>(), any::<f64>()), 0..200),
    ) {
        let mut correction = Correction::default();
        for (predicted, measured) in seen {
            correction.observe(predicted, measured);
            let (least, most) = RATIO_BOUNDS;
            prop_assert!((least..=most).contains(&correction.ratio()));
        }
    }
}

#[test]
fn what_is_no_time_corrects_nothing() {
    let mut correction = Correction::default();
    for (predicted, measured) in [
        (0.0, 1.0),
        (1.0, 0.0),
        (-1.0, 1.0),
        (f64::NAN, 1.0),
        (1.0, f64::INFINITY),
    ] {
        correction.observe(predicted, measured);
        assert_eq!(correction.ratio(), 1.0);
    }
}

#[test]
fn samples_that_do_not_tell_what_a_token_costs_are_refused() {
    let (few, many) = (rows(2, 1, 10), rows(2, 400, 10));
    for samples in [
        vec![],
        vec![(few, 0.0)],
        vec![(few, f64::NAN), (many, 1.0)],
        vec![(Load::default(), 1.0)],
    ] {
        assert!(Constants::fit(&samples).is_err(), "{samples:?}");
    }
    // Measured the wrong way round: nothing is paid once, and the rest is what fits best.
    let odd = Constants::fit(&[(few, 1e-3), (many, 1e-4)]).unwrap();
    assert!(odd.check().is_ok());
}

proptest! {
    /// Exact times give back what they were made of, and noise of a per cent stays about that.
    #[test]
    fn fitted_constants_predict_what_was_measured(
        fixed_s in 0.0..0.1_f64, per_token_s in 1e-6..1e-4_f64, per_pair_s in 0.0..1e-9_f64,
        noise in proptest::collection::vec(-0.01..0.01_f64, 5),
    ) {
        let truth = Constants { fixed_s, per_token_s, per_pair_s, ..odd() };
        let loads = [rows(2, 2, 100), rows(2, 257, 100), rows(2, 1025, 100), rows(2, 4097, 100), rows(8, 1025, 100)];
        let exact: Vec<_> = loads.iter().map(|load| (*load, truth.step(*load))).collect();
        let fitted = Constants::fit(&exact).unwrap();
        let noisy: Vec<_> = exact.iter().zip(&noise).map(|((load, s), off)| (*load, s * (1.0 + off))).collect();
        let near = Constants::fit(&noisy).unwrap();
        for (load, seconds) in &exact {
            prop_assert!((fitted.step(*load) / seconds - 1.0).abs() < 1e-6);
            prop_assert!((near.step(*load) / seconds - 1.0).abs() < 0.03);
        }
        prop_assert!(near.check().is_ok());
    }
}

/// Nothing but a token's cost.
fn odd() -> Constants {
    Constants::fit(&[(rows(1, 1, 0), 1.0)]).unwrap()
}
