//! Layer norm of rows, alone or behind a residual sum with a bias.

use cudarc::driver::DeviceRepr;

use super::error::{Result, shape};
use super::launch::{Grid, aligned, int, launch};
use super::tensor::{GpuTensor, GpuType};

const MAX_WIDTH: usize = 8192;
/// Elements of one 16-byte access.
const VECTOR: usize = 8;

/// The norm's parameters.
#[derive(Clone, Copy, Debug)]
pub struct GpuLayerNorm<'a> {
    /// F32 `[width]`.
    pub weight: &'a GpuTensor,
    /// F32 `[width]`.
    pub bias: &'a GpuTensor,
    /// Added to the variance.
    pub eps: f32,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct Arguments {
    x: u64,
    y: u64,
    bias: u64,
    weight: u64,
    shift: u64,
    eps: f32,
    out: u64,
    rows: i32,
    width: i32,
}

// SAFETY: plain numbers in the layout of the kernel's struct.
unsafe impl DeviceRepr for Arguments {}

/// `out = (x - mean) / sqrt(variance + eps) * weight + bias` over the last dimension, biased variance; `x` and
/// `out` bf16 `[rows, width]`, `width` a multiple of 8 up to 8192. Statistics are fp32.
///
/// # Errors
/// `Argument` naming the operand that does not fit, or what the driver says.
pub fn layer_norm(x: &GpuTensor, norm: GpuLayerNorm<'_>, out: &GpuTensor) -> Result<()> {
    run("layer_norm", x, None, norm, out)
}

/// `x += y + y_bias`, rounded once, then [`layer_norm`]: `y` bf16 `[rows, width]`, `y_bias` F32 `[width]` or absent.
///
/// # Errors
/// Those of [`layer_norm`].
pub fn add_layer_norm(
    x: &GpuTensor,
    (y, y_bias): (&GpuTensor, Option<&GpuTensor>),
    norm: GpuLayerNorm<'_>,
    out: &GpuTensor,
) -> Result<()> {
    run("add_layer_norm", x, Some((y, y_bias)), norm, out)
}

fn run(
    op: &'static str,
    x: &GpuTensor,
    added: Option<(&GpuTensor, Option<&GpuTensor>)>,
    norm: GpuLayerNorm<'_>,
    out: &GpuTensor,
) -> Result<()> {
    x.expect(op, "x", &[usize::MAX, usize::MAX], GpuType::Bf16)?;
    let (rows, width) = (x.dim(0), x.dim(1));
    if width == 0 || width > MAX_WIDTH || !width.is_multiple_of(VECTOR) {
        let expected = "[rows, a multiple of 8 up to 8192]";
        return Err(shape(op, "x", expected, x.shape()));
    }
    out.expect(op, "out", x.shape(), GpuType::Bf16)?;
    norm.weight.expect(op, "weight", &[width], GpuType::F32)?;
    norm.bias.expect(op, "bias", &[width], GpuType::F32)?;
    let mut operands = vec![
        ("x", x),
        ("out", out),
        ("weight", norm.weight),
        ("bias", norm.bias),
    ];
    if let Some((y, bias)) = added {
        y.expect(op, "y", x.shape(), GpuType::Bf16)?;
        operands.push(("y", y));
        if let Some(bias) = bias {
            bias.expect(op, "y_bias", &[width], GpuType::F32)?;
            operands.push(("y_bias", bias));
        }
    }
    aligned(op, &operands)?;
    if rows == 0 {
        return Ok(());
    }
    let bias = added.and_then(|(_, bias)| bias);
    let arguments = Arguments {
        x: x.address(),
        y: added.map_or(0, |(y, _)| y.address()),
        bias: bias.map_or(0, GpuTensor::address),
        weight: norm.weight.address(),
        shift: norm.bias.address(),
        eps: norm.eps,
        out: out.address(),
        rows: int(op, "x", rows)?,
        width: int(op, "x", width)?,
    };
    let (name, threads, each) = match width {
        ..=256 => ("layer_norm_256", 256, 8),
        257..=2048 => ("layer_norm_2048", 256, 1),
        _ => ("layer_norm_8192", 512, 1),
    };
    let grid = Grid::linear(rows.div_ceil(each) as u32, threads);
    // SAFETY: every operand was held against `rows` and `width`, which the kernel stays within.
    unsafe { launch(x.gpu(), "norm_layer", name, grid, &arguments) }
}
