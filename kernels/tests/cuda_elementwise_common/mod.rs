//! What the tests of the memory-bound operations share.
#![allow(dead_code, reason = "each test binary uses a part")]

use std::sync::Arc;

use kernels::Tensor;
use kernels::cuda::{E4m3Rows, Gpu, GpuTensor, GpuType};

pub(crate) const EPS: f32 = 1e-5;
/// bf16 keeps 8 bits: a rounding is at most 2^-9 of a value.
pub(crate) const BF16: f32 = 4e-3;

pub(crate) fn gpu() -> Arc<Gpu> {
    Gpu::open(0).unwrap()
}

pub(crate) fn up(gpu: &Arc<Gpu>, tensor: &Tensor) -> GpuTensor {
    GpuTensor::from_host(gpu, tensor, "test").unwrap()
}

/// A tensor whose every value is NaN: what is not written shows.
pub(crate) fn poisoned(gpu: &Arc<Gpu>, dims: &[usize], dtype: GpuType) -> GpuTensor {
    let tensor = GpuTensor::new(gpu, dims, dtype, "test").unwrap();
    tensor.write_bytes(&vec![0xFF; tensor.bytes()]).unwrap();
    tensor
}

pub(crate) fn relative(got: &[f32], want: &[f32]) -> f32 {
    assert_eq!(got.len(), want.len());
    let square = |v: f32| f64::from(v).powi(2);
    let error: f64 = got.iter().zip(want).map(|(a, b)| square(a - b)).sum();
    let size: f64 = want.iter().map(|v| square(*v)).sum();
    (error / size.max(1e-30)).sqrt() as f32
}

pub(crate) fn assert_near(what: &str, got: &GpuTensor, want: &[f32], tolerance: f32) {
    let error = relative(&got.to_f32_vec().unwrap(), want);
    assert!(error < tolerance, "{what}: relative error {error}");
}

/// Values of e4m3 rows.
pub(crate) fn decoded(rows: E4m3Rows<'_>) -> Vec<f32> {
    let scales = rows.scales.to_f32_vec().unwrap();
    let codes = rows.codes.to_bytes().unwrap();
    let width = rows.codes.dim(1);
    let value = |code: u8| {
        let (exponent, mantissa) = (i32::from(code >> 3 & 15), f32::from(code & 7));
        let magnitude = match exponent {
            0 => mantissa / 8.0 * 2f32.powi(-6),
            _ => (1.0 + mantissa / 8.0) * 2f32.powi(exponent - 7),
        };
        if code & 0x7F == 0x7F {
            f32::NAN
        } else if code >> 7 == 1 {
            -magnitude
        } else {
            magnitude
        }
    };
    let codes = codes.iter().enumerate();
    codes.map(|(i, &c)| value(c) * scales[i / width]).collect()
}
