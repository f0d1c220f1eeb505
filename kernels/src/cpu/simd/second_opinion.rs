//! Our matrix product against that of the `gemm` crate.

use crate::cpu::gemm::{Dense, Init, Packed, gemm};
use crate::tensor::Tensor;

/// `x [t, k] . w^T`, `w [n, k]`, by the `gemm` crate on one thread.
fn library(x: &[f32], w: &[f32], (t, n, k): (usize, usize, usize)) -> Vec<f32> {
    assert!(x.len() == t * k && w.len() == n * k);
    let mut y = vec![0f32; t * n];
    // Column stride, then row stride, of each matrix.
    let (rs_y, rs_x) = (n as isize, k as isize);
    let (cs_w, rs_w) = (k as isize, 1);
    let (a, b) = (x.as_ptr(), w.as_ptr());
    let (one, zero, off) = (1.0, 0.0, false);
    let threads = gemm::Parallelism::None;
    // SAFETY: y, x and the transposed w hold t x n, t x k and k x n elements at these strides (asserted).
    unsafe {
        gemm::gemm(
            t,
            n,
            k,
            y.as_mut_ptr(),
            1,
            rs_y,
            off,
            a,
            1,
            rs_x,
            b,
            cs_w,
            rs_w,
            zero,
            one,
            off,
            off,
            off,
            threads,
        );
    }
    y
}

#[test]
fn products_agree_with_the_gemm_crate() {
    let values = |n: usize, f: f32| (0..n).map(|i| (i as f32 * f).sin()).collect::<Vec<f32>>();
    for (t, n, k) in [(1, 5, 3), (7, 16, 40), (130, 192, 128), (33, 70, 1500)] {
        let (x, w) = (values(t * k, 0.7), values(n * k, 1.3));
        let weight = Tensor::from_f32(&[n, k], w.clone()).unwrap();
        let packed = Packed::new(&weight, n, k, None).unwrap();
        let ours = gemm(&Dense { data: &x, k }, &packed, Init::Zero, t);
        for (a, b) in ours.iter().zip(library(&x, &w, (t, n, k))) {
            assert!(
                (a - b).abs() < 1e-4 * (1.0 + b.abs()),
                "{a} and {b} at {t} x {n} x {k}"
            );
        }
    }
}
