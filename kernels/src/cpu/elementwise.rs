//! Sums and activations.

use super::recycle::Recycled;
use super::{par, simd};
use crate::error::{KernelError, Result};
use crate::tensor::{ANY, Tensor};

/// Elementary operations of one activation, for splitting work.
const ACTIVATION_WORK: usize = 8;

fn map(op: &'static str, x: &Tensor, f: impl Fn(&[f32], &mut [f32]) + Sync) -> Result<Tensor> {
    let data = x.f32_named(op, "x")?;
    let mut out = Recycled::stale(data.len());
    par::rows(&mut out, 1, ACTIVATION_WORK, |first, out| {
        f(&data[first..first + out.len()], out)
    });
    Ok(Tensor::output(x.shape(), out))
}

/// `x + y`, elementwise; equal shapes.
pub fn add(x: &Tensor, y: &Tensor) -> Result<Tensor> {
    y.expect_shape("add", "y", x.shape())?;
    let (a, b) = (x.f32_named("add", "x")?, y.f32_named("add", "y")?);
    let mut out = Recycled::stale(a.len());
    par::rows(&mut out, 1, 1, |first, out| {
        let (a, b) = (&a[first..first + out.len()], &b[first..first + out.len()]);
        for ((o, x), y) in out.iter_mut().zip(a).zip(b) {
            *o = x + y;
        }
    });
    Ok(Tensor::output(x.shape(), out))
}

/// `x += y`, elementwise; equal shapes. Copies `x` first where its buffer is shared.
pub fn add_assign(x: &mut Tensor, y: &Tensor) -> Result<()> {
    y.expect_shape("add_assign", "y", x.shape())?;
    x.f32_named("add_assign", "x")?;
    let b = y.f32_named("add_assign", "y")?;
    par::rows(x.as_f32_mut()?, 1, 1, |first, x| {
        let b = &b[first..first + x.len()];
        for (x, y) in x.iter_mut().zip(b) {
            *x += y;
        }
    });
    Ok(())
}

/// `x += factor * y`, elementwise, each product rounded; equal shapes. Copies `x` first where its buffer is shared.
pub fn add_scaled(x: &mut Tensor, factor: f32, y: &Tensor) -> Result<()> {
    y.expect_shape("add_scaled", "y", x.shape())?;
    x.f32_named("add_scaled", "x")?;
    let b = y.f32_named("add_scaled", "y")?;
    par::rows(x.as_f32_mut()?, 1, 1, |first, x| {
        let b = &b[first..first + x.len()];
        for (x, y) in x.iter_mut().zip(b) {
            *x += factor * y;
        }
    });
    Ok(())
}

/// `x / (1 + exp(-x))`.
pub fn silu(x: &Tensor) -> Result<Tensor> {
    map("silu", x, |x, out| {
        simd::run(
            #[inline(always)]
            || {
                for (o, &v) in out.iter_mut().zip(x) {
                    *o = simd::math::silu(v);
                }
            },
        );
    })
}

/// `x/2 * (1 + erf(x / sqrt 2))`: the exact GELU of the embedders and the aligner.
pub fn gelu_erf(x: &Tensor) -> Result<Tensor> {
    map("gelu_erf", x, |x, out| {
        for (o, &v) in out.iter_mut().zip(x) {
            *o = 0.5 * v * (1.0 + libm::erff(v * std::f32::consts::FRAC_1_SQRT_2));
        }
    })
}

/// `x/2 * (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))`: the GELU of the vision encoder.
pub fn gelu_tanh(x: &Tensor) -> Result<Tensor> {
    map("gelu_tanh", x, |x, out| {
        simd::run(
            #[inline(always)]
            || {
                for (o, &v) in out.iter_mut().zip(x) {
                    *o = simd::math::gelu_tanh(v);
                }
            },
        );
    })
}

/// `[T, 2I]` to `[T, I]`: first half times SiLU of the second half.
///
/// HunyuanImage-3.0 puts the linear part first and the gate second, unlike most fused layers.
pub fn swiglu_up_gate(x: &Tensor) -> Result<Tensor> {
    const OP: &str = "swiglu_up_gate";
    x.expect_shape(OP, "x", &[ANY, ANY])?;
    if !x.dim(1).is_multiple_of(2) {
        return Err(KernelError::shape(
            OP,
            "x",
            "[_, an even number]",
            x.shape(),
        ));
    }
    let data = x.f32_named(OP, "x")?;
    let (rows, half) = (x.dim(0), x.dim(1) / 2);
    let mut out = Recycled::stale(rows * half);
    par::rows(&mut out, half, half * ACTIVATION_WORK, |first, out| {
        swiglu_rows(&data[2 * half * first..], out, half);
    });
    Ok(Tensor::output(&[rows, half], out))
}

/// `out[t, i] = x[t, i] * silu(x[t, half + i])` for as many rows as `out` has.
pub(crate) fn swiglu_rows(x: &[f32], out: &mut [f32], half: usize) {
    if half == 0 {
        return;
    }
    simd::run(
        #[inline(always)]
        || {
            for (x, out) in x.chunks_exact(2 * half).zip(out.chunks_exact_mut(half)) {
                let (up, gate) = x.split_at(half);
                for ((o, &u), &g) in out.iter_mut().zip(up).zip(gate) {
                    *o = u * simd::math::silu(g);
                }
            }
        },
    );
}
