//! Convolutions and group normalisation against their plain definitions.
#![allow(missing_docs, clippy::unwrap_used)]

mod common;

use common::{assert_close, random};
use kernels::{Conv2dWeight, Conv3dWeight, GroupNorm, Tensor, conv2d, conv3d, group_norm, plain};
use proptest::prelude::*;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn conv2d_equals_its_definition(
        n in 1usize..3, h in 1usize..9, w in 1usize..9, c_in in 1usize..40, c_out in 1usize..40,
        one: bool, with_bias: bool, seed: u64,
    ) {
        let k = if one { 1 } else { 3 };
        let x = random(seed, &[n, h, w, c_in]);
        let (weight, b) = (random(seed ^ 1, &[c_out, c_in, k, k]), random(seed ^ 2, &[c_out]));
        let bias = with_bias.then_some(&b);
        let got = conv2d(&x, &Conv2dWeight::new(&weight, bias).unwrap()).unwrap();
        let x5 = x.reshape(&[n, 1, h, w, c_in]).unwrap();
        let w5 = weight.reshape(&[c_out, c_in, 1, k, k]).unwrap();
        let want = plain::conv(&x5, &w5, bias).reshape(&[n, h, w, c_out]).unwrap();
        assert_close("conv2d", &got, &want, 1e-4);
    }

    #[test]
    fn conv3d_equals_its_definition(
        n in 1usize..3, t in 1usize..4, h in 1usize..6, w in 1usize..6, c_in in 1usize..12, c_out in 1usize..40,
        one: bool, seed: u64,
    ) {
        let k = if one { 1 } else { 3 };
        let x = random(seed, &[n, t, h, w, c_in]);
        let (weight, b) = (random(seed ^ 1, &[c_out, c_in, k, k, k]), random(seed ^ 2, &[c_out]));
        let got = conv3d(&x, &Conv3dWeight::new(&weight, Some(&b)).unwrap()).unwrap();
        assert_close("conv3d", &got, &plain::conv(&x, &weight, Some(&b)), 1e-4);
    }

    #[test]
    fn group_norm_equals_its_definition(
        n in 1usize..3, spatial in 2usize..150, groups in 1usize..5, size in 1usize..9,
        offset in -20.0f32..20.0, adaptive: bool, silu: bool, seed: u64,
    ) {
        let c = groups * size;
        let data = random(seed, &[n, spatial, c]).to_f32_vec().iter().map(|v| v + offset).collect();
        let x = Tensor::from_f32(&[n, spatial, c], data).unwrap();
        let (w, b) = (random(seed ^ 1, &[c]), random(seed ^ 2, &[c]));
        let (s, t) = (random(seed ^ 3, &[n, c]), random(seed ^ 4, &[n, c]));
        let scale_shift = adaptive.then_some((&s, &t));
        let norm = GroupNorm { groups, weight: &w, bias: &b, eps: 1e-5 };
        let got = group_norm(&x, &norm, scale_shift, silu).unwrap();
        let want = plain::group_norm(&x, (groups, 1e-5), (&w, &b), scale_shift, silu);
        assert_close("group_norm", &got, &want, 1e-4);
    }
}

#[test]
fn the_images_of_a_batch_do_not_touch_each_other() {
    let x = random(5, &[3, 7, 9, 24]);
    let w = Conv2dWeight::new(&random(6, &[40, 24, 3, 3]), None).unwrap();
    let (g, b) = (random(7, &[40]), random(8, &[40]));
    let norm = GroupNorm {
        groups: 8,
        weight: &g,
        bias: &b,
        eps: 1e-5,
    };
    let run = |x: &Tensor| group_norm(&conv2d(x, &w).unwrap(), &norm, None, true).unwrap();
    let together = run(&x);
    for i in 0..3 {
        let alone = run(&common::rows(&x, i, 1));
        assert_eq!(
            common::bits(&alone),
            common::bits(&common::rows(&together, i, 1))
        );
    }
}

#[test]
fn threads_do_not_change_a_bit_of_an_image() {
    let x = random(5, &[1, 2, 40, 41, 32]);
    let w = Conv3dWeight::new(&random(6, &[64, 32, 3, 3, 3]), None).unwrap();
    let (g, b) = (random(7, &[64]), random(8, &[64]));
    let norm = GroupNorm {
        groups: 32,
        weight: &g,
        bias: &b,
        eps: 1e-6,
    };
    let run = || group_norm(&conv3d(&x, &w).unwrap(), &norm, None, true).unwrap();
    let one = common::on_threads(1, run);
    for threads in [2, 3] {
        assert_eq!(
            common::bits(&one),
            common::bits(&common::on_threads(threads, run))
        );
    }
}

#[test]
fn bad_images_and_weights_are_named() {
    let x = Tensor::zeros(&[1, 4, 4, 3]).unwrap();
    let w = Conv2dWeight::new(&Tensor::zeros(&[2, 5, 3, 3]).unwrap(), None).unwrap();
    assert!(
        conv2d(&x, &w)
            .unwrap_err()
            .to_string()
            .contains("[_, _, _, 5]")
    );
    let even = Tensor::zeros(&[2, 5, 2, 2]).unwrap();
    assert!(
        Conv2dWeight::new(&even, None)
            .unwrap_err()
            .to_string()
            .contains("odd")
    );
    let bias = Tensor::zeros(&[3]).unwrap();
    let odd = Tensor::zeros(&[2, 5, 3, 3]).unwrap();
    assert!(
        Conv2dWeight::new(&odd, Some(&bias))
            .unwrap_err()
            .to_string()
            .contains("bias")
    );
    assert!(Conv3dWeight::new(&odd, None).is_err());
    let c = Tensor::zeros(&[3]).unwrap();
    let norm = GroupNorm {
        groups: 2,
        weight: &c,
        bias: &c,
        eps: 1e-5,
    };
    assert!(
        group_norm(&x, &norm, None, false)
            .unwrap_err()
            .to_string()
            .contains("groups")
    );
}
