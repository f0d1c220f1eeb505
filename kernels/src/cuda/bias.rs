//! Bias and activation of the small products that depend on time only.

use cudarc::driver::{LaunchConfig, PushKernelArg};

use super::error::{Result, shape};
use super::tensor::{GpuTensor, GpuType};

const OP: &str = "bias_activation";
const THREADS: u32 = 256;

/// What is applied after the bias.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// Nothing.
    None,
    /// `0.5 x (1 + erf(x / sqrt 2))`.
    GeluErf,
    /// `x / (1 + exp(-x))`.
    Silu,
    /// `0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))`.
    GeluTanh,
}

/// `out = activation(x + bias)`: `x [n, c]` F32, `bias [c]` F32 or absent, `out [n, c]` F32 or bf16; `out`
/// may be `x`.
///
/// # Errors
/// `Argument` naming the operand that does not fit, or what the driver says.
pub fn bias_activation(
    out: &GpuTensor,
    x: &GpuTensor,
    bias: Option<&GpuTensor>,
    activation: Activation,
) -> Result<()> {
    x.expect(OP, "x", &[usize::MAX, usize::MAX], GpuType::F32)?;
    let (rows, width) = (x.dim(0), x.dim(1));
    let name = match out.dtype() {
        GpuType::F32 => "bias_f32",
        GpuType::Bf16 => "bias_bf16",
        _ => return Err(shape(OP, "out", "f32 or bf16 elements", out.shape())),
    };
    out.expect(OP, "out", &[rows, width], out.dtype())?;
    if let Some(bias) = bias {
        bias.expect(OP, "bias", &[width], GpuType::F32)?;
    }
    let Ok(narrow) = u32::try_from(width) else {
        return Err(shape(OP, "x", "fewer columns", x.shape()));
    };
    if rows * width == 0 {
        return Ok(());
    }
    let gpu = x.gpu();
    let kernel = gpu.kernel("bias", name, 0)?;
    let (to, from) = (out.address(), x.address());
    let bias = bias.map_or(0, GpuTensor::address);
    let count = (rows * width) as u64;
    let kind: i32 = match activation {
        Activation::None => 0,
        Activation::GeluErf => 1,
        Activation::Silu => 2,
        Activation::GeluTanh => 3,
    };
    let blocks = count.div_ceil(u64::from(THREADS));
    let most = u64::from(gpu.multiprocessors()) * 16;
    let config = LaunchConfig {
        grid_dim: (u32::try_from(blocks.min(most)).unwrap_or(1), 1, 1),
        block_dim: (THREADS, 1, 1),
        shared_mem_bytes: 0,
    };
    let mut launch = gpu.stream().launch_builder(&kernel);
    launch
        .arg(&to)
        .arg(&from)
        .arg(&bias)
        .arg(&count)
        .arg(&narrow)
        .arg(&kind);
    // SAFETY: arguments are those of the kernel; all operands have `count` elements, the bias `width`.
    unsafe { launch.launch(config) }?;
    Ok(())
}
