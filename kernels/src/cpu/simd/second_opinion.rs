//! Our matrix product against that of the `gemm` crate.

use crate::cpu::gemm::{Dense, Init, Packed, gemm};
use crate::tensor::Tensor;

/// `x [t, k] . w^T` by the `gemm` crate on one thread; `w` is `[n, k]`, or `[k, n]` when `transposed`.
fn library(x: &[f32], w: &[f32], (t, n, k): (usize, usize, usize), transposed: bool) -> Vec<f32> {
    assert!(x.len() == t * k && w.len() == n * k);
    let mut y = vec![0f32; t * n];
    // Column stride, then row stride, of each matrix.
    let (rs_y, rs_x) = (n as isize, k as isize);
    let (cs_w, rs_w) = if transposed {
        (1, n as isize)
    } else {
        (k as isize, 1)
    };
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
        for (a, b) in ours.iter().zip(library(&x, &w, (t, n, k), false)) {
            assert!(
                (a - b).abs() < 1e-4 * (1.0 + b.abs()),
                "{a} and {b} at {t} x {n} x {k}"
            );
        }
    }
}

/// Why the products are our own: both sides on one thread, best of many runs.
/// `cargo test --release -p kernels --lib products_beside -- --ignored --nocapture`
#[test]
#[ignore = "a measurement, to be run in a release build on an idle machine"]
#[allow(clippy::disallowed_methods, reason = "it measures")]
fn products_beside_the_gemm_crate() {
    use std::time::Instant;
    let best = |flops: f64, run: &mut dyn FnMut()| {
        let once = |run: &mut dyn FnMut()| {
            let start = Instant::now();
            run();
            start.elapsed().as_secs_f64()
        };
        let rounds = (4e9 / flops).clamp(5.0, 2000.0) as usize;
        let least = (0..rounds).map(|_| once(run)).fold(f64::MAX, f64::min);
        flops / least / 1e9
    };
    let pool = rayon::ThreadPoolBuilder::new()
        .num_threads(1)
        .build()
        .unwrap();
    println!("   t     n     k   ours [n,k] [k,n]  GFLOP/s");
    for (t, n, k) in [
        (514, 192, 128),
        (514, 128, 128),
        (128, 128, 128),
        (64, 128, 64),
        (514, 1152, 32),
        (1025, 4096, 4096),
    ] {
        let x: Vec<f32> = (0..t * k).map(|i| (i as f32 * 0.7).sin()).collect();
        let w: Vec<f32> = (0..n * k).map(|i| (i as f32 * 1.3).sin()).collect();
        let weight = Tensor::from_f32(&[n, k], w.clone()).unwrap();
        let packed = Packed::new(&weight, n, k, None).unwrap();
        let flops = 2.0 * (t * n * k) as f64;
        let ours = pool.install(|| {
            best(flops, &mut || {
                std::hint::black_box(gemm(&Dense { data: &x, k }, &packed, Init::Zero, t));
            })
        });
        let [plain, transposed] = [false, true].map(|transposed| {
            best(flops, &mut || {
                std::hint::black_box(library(&x, &w, (t, n, k), transposed));
            })
        });
        println!("{t:5} {n:5} {k:5} {ours:6.1} {plain:5.1} {transposed:5.1}");
        assert!(ours > 0.0 && plain > 0.0 && transposed > 0.0);
    }
}
