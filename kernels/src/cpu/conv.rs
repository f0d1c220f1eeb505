//! Convolutions with stride 1 and zero padding, channels last, as matrix products over gathered windows.
//!
//! The window matrix is never materialised: a few rows at a time are gathered while they are packed.

use std::ops::Range;

use super::gemm::{Init, Packed, RowSource, gemm};
use crate::error::{KernelError, Result};
use crate::tensor::{ANY, Tensor};

/// Weight of a 2-D convolution, prepared once.
#[derive(Clone)]
pub struct Conv2dWeight(ConvWeight);

/// Weight of a 3-D convolution, prepared once.
#[derive(Clone)]
pub struct Conv3dWeight(ConvWeight);

#[derive(Clone)]
struct ConvWeight {
    packed: Packed,
    bias: Option<Vec<f32>>,
    c_in: usize,
    /// Kernel size along t, h, w; odd.
    kernel: [usize; 3],
}

impl ConvWeight {
    /// `w [out, in, taps..]` with the given kernel; columns are reordered to `[taps][in]`.
    fn new(
        op: &'static str,
        w: &Tensor,
        bias: Option<&Tensor>,
        kernel: [usize; 3],
    ) -> Result<Self> {
        let (n, c_in) = (w.dim(0), w.dim(1));
        if n == 0 || c_in == 0 || kernel.iter().any(|k| k % 2 == 0) {
            let expected = "[at least 1, at least 1, odd kernel sizes]";
            return Err(KernelError::shape(op, "w", expected, w.shape()));
        }
        if let Some(bias) = bias {
            bias.expect_shape(op, "bias", &[n])?;
        }
        let taps: usize = kernel.iter().product();
        let order: Vec<usize> = (0..taps * c_in)
            .map(|i| (i % c_in) * taps + i / c_in)
            .collect();
        let packed = Packed::new(w, n, taps * c_in, Some(&order))?;
        Ok(Self {
            packed,
            bias: bias.map(Tensor::to_f32_vec),
            c_in,
            kernel,
        })
    }

    /// `data [n, t, h, w, c_in]` with `size = [n, t, h, w]` to `[n * t * h * w, c_out]`.
    fn run(&self, data: &[f32], size: [usize; 4]) -> super::recycle::Recycled {
        let [n, t, h, w] = size;
        let windows = Windows {
            data,
            t,
            h,
            w,
            c: self.c_in,
            kernel: self.kernel,
        };
        let init = self.bias.as_deref().map_or(Init::Zero, Init::Bias);
        gemm(&windows, &self.packed, init, n * t * h * w)
    }
}

/// Row `p` is the window around pixel `p`: taps in the order t, h, w, channels fastest.
struct Windows<'a> {
    data: &'a [f32],
    t: usize,
    h: usize,
    w: usize,
    c: usize,
    kernel: [usize; 3],
}

impl RowSource for Windows<'_> {
    fn copy_row(&self, row: usize, k: Range<usize>, out: &mut [f32]) {
        let [kt, kh, kw] = self.kernel;
        let (x, y) = (row % self.w, row / self.w % self.h);
        let (frame, image) = (
            row / self.w / self.h % self.t,
            row / self.w / self.h / self.t,
        );
        let mut at = k.start;
        while at < k.end {
            let tap = at / self.c;
            let end = ((tap + 1) * self.c).min(k.end);
            let out = &mut out[at - k.start..end - k.start];
            // Coordinates of the source pixel plus the padding, so that they stay unsigned.
            let (st, sy, sx) = (frame + tap / kw / kh, y + tap / kw % kh, x + tap % kw);
            let inside = (kt / 2..kt / 2 + self.t).contains(&st)
                && (kh / 2..kh / 2 + self.h).contains(&sy)
                && (kw / 2..kw / 2 + self.w).contains(&sx);
            if inside {
                let source = (image * self.t + st - kt / 2) * self.h + sy - kh / 2;
                let from = (source * self.w + sx - kw / 2) * self.c + at - tap * self.c;
                out.copy_from_slice(&self.data[from..from + out.len()]);
            } else {
                out.fill(0.0);
            }
            at = end;
        }
    }
}

impl Conv2dWeight {
    /// From a checkpoint tensor `w [out, in, kh, kw]` (odd sizes) and an optional bias `[out]`.
    pub fn new(w: &Tensor, bias: Option<&Tensor>) -> Result<Self> {
        w.expect_shape("conv2d weight", "w", &[ANY; 4])?;
        ConvWeight::new("conv2d weight", w, bias, [1, w.dim(2), w.dim(3)]).map(Self)
    }

    /// Output channels.
    #[must_use]
    pub fn c_out(&self) -> usize {
        self.0.packed.n
    }

    /// Input channels.
    #[must_use]
    pub fn c_in(&self) -> usize {
        self.0.c_in
    }
}

impl Conv3dWeight {
    /// From a checkpoint tensor `w [out, in, kt, kh, kw]` (odd sizes) and an optional bias `[out]`.
    pub fn new(w: &Tensor, bias: Option<&Tensor>) -> Result<Self> {
        w.expect_shape("conv3d weight", "w", &[ANY; 5])?;
        ConvWeight::new("conv3d weight", w, bias, [w.dim(2), w.dim(3), w.dim(4)]).map(Self)
    }

    /// Output channels.
    #[must_use]
    pub fn c_out(&self) -> usize {
        self.0.packed.n
    }

    /// Input channels.
    #[must_use]
    pub fn c_in(&self) -> usize {
        self.0.c_in
    }
}

impl std::fmt::Debug for Conv2dWeight {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "Conv2dWeight({} -> {}, {:?})",
            self.c_in(),
            self.c_out(),
            &self.0.kernel[1..]
        )
    }
}

impl std::fmt::Debug for Conv3dWeight {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "Conv3dWeight({} -> {}, {:?})",
            self.c_in(),
            self.c_out(),
            self.0.kernel
        )
    }
}

/// `x [n, h, w, c_in]` to `[n, h, w, c_out]`: stride 1, zero padding `kernel / 2`.
pub fn conv2d(x: &Tensor, w: &Conv2dWeight) -> Result<Tensor> {
    const OP: &str = "conv2d";
    x.expect_shape(OP, "x", &[ANY, ANY, ANY, w.c_in()])?;
    let (n, h, wd) = (x.dim(0), x.dim(1), x.dim(2));
    let out = w.0.run(x.f32_named(OP, "x")?, [n, 1, h, wd]);
    Ok(Tensor::output(&[n, h, wd, w.c_out()], out))
}

/// `x [n, t, h, w, c_in]` to `[n, t, h, w, c_out]`: stride 1, zero padding `kernel / 2` along t, h and w.
pub fn conv3d(x: &Tensor, w: &Conv3dWeight) -> Result<Tensor> {
    const OP: &str = "conv3d";
    x.expect_shape(OP, "x", &[ANY, ANY, ANY, ANY, w.c_in()])?;
    let size = [x.dim(0), x.dim(1), x.dim(2), x.dim(3)];
    let out = w.0.run(x.f32_named(OP, "x")?, size);
    Ok(Tensor::output(
        &[size[0], size[1], size[2], size[3], w.c_out()],
        out,
    ))
}
