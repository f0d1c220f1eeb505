//! Small moves around the convolutions: softmax of wide rows, layouts of latents, means of channels.

use cudarc::driver::{LaunchConfig, PushKernelArg};

use super::conv_layout::{ANY, Pictures, elementwise, same_gpu, suffix};
use super::error::{Result, argument, shape};
use super::launch::int;
use super::tensor::{GpuTensor, GpuType};

const FILE: &str = "vae";
const THREADS: u32 = 256;

/// `out = softmax(scale * x)` of the first `valid` columns of every row and zero in the others: `x [rows, columns]`
/// F32, columns a multiple of 4; `out` bf16 or f16; `scale` positive.
///
/// # Errors
/// `Argument` naming the operand that does not fit, or what the driver says.
pub fn wide_softmax(out: &GpuTensor, x: &GpuTensor, scale: f32, valid: usize) -> Result<()> {
    const OP: &str = "wide_softmax";
    x.expect(OP, "x", &[ANY, ANY], GpuType::F32)?;
    let name = match suffix(OP, "out", out.dtype())? {
        "bf16" => "softmax_rows_bf16",
        _ => "softmax_rows_f16",
    };
    out.expect(OP, "out", x.shape(), out.dtype())?;
    let aligned = [x, out].iter().all(|t| t.address().is_multiple_of(16));
    if !x.dim(1).is_multiple_of(4) || !aligned {
        return Err(shape(
            OP,
            "x",
            "columns in multiples of 4, aligned to 16 bytes",
            x.shape(),
        ));
    }
    if valid == 0 || valid > x.dim(1) || scale.is_nan() || scale <= 0.0 {
        return Err(argument(
            OP,
            "valid",
            "and scale must be positive, with as many columns",
        ));
    }
    same_gpu(OP, &[out, x])?;
    if x.numel() == 0 {
        return Ok(());
    }
    let valid = int(OP, "valid", valid)?;
    let columns = int(OP, "columns", x.dim(1))?;
    let rows = int(OP, "rows", x.dim(0))?;
    let (from, to) = (x.address(), out.address());
    let gpu = x.gpu();
    let kernel = gpu.kernel(FILE, name, 0)?;
    let mut launch = gpu.stream().launch_builder(&kernel);
    launch
        .arg(&from)
        .arg(&to)
        .arg(&columns)
        .arg(&valid)
        .arg(&scale);
    let config = LaunchConfig {
        grid_dim: (rows.unsigned_abs(), 1, 1),
        block_dim: (THREADS, 1, 1),
        shared_mem_bytes: 0,
    };
    // SAFETY: arguments are those of the kernel; a block reads and writes its own row of `columns`.
    unsafe { launch.launch(config) }?;
    Ok(())
}

/// `out = x * factor + addend` of planar `x [channels, height, width]` F32, channels-last, in every frame of
/// `out [1, frames, height, width, at least channels]` (bf16 or f16); channels beyond those of `x` are zero.
///
/// # Errors
/// `Argument` naming the operand that does not fit, or what the driver says.
pub fn to_channels_last(out: &Pictures, x: &GpuTensor, factor: f32, addend: f32) -> Result<()> {
    const OP: &str = "to_channels_last";
    x.expect(OP, "x", &[ANY, out.height, out.width], GpuType::F32)?;
    let name = match suffix(OP, "out", out.dtype())? {
        "bf16" => "to_channels_last_bf16",
        _ => "to_channels_last_f16",
    };
    if out.images != 1 || out.channels < x.dim(0) {
        return Err(shape(
            OP,
            "out",
            "one image of at least the channels of x",
            &out.size(),
        ));
    }
    same_gpu(OP, &[out.tensor(), x])?;
    if x.numel() == 0 {
        return Ok(());
    }
    let sizes = [
        int(OP, "channels", x.dim(0))?,
        int(OP, "channels", out.channels)?,
    ];
    let (pixels, frames) = (
        (out.height * out.width) as i64,
        int(OP, "frames", out.frames)?,
    );
    let (from, to) = (x.address(), out.tensor().address());
    let gpu = x.gpu();
    let kernel = gpu.kernel(FILE, name, 0)?;
    let mut launch = gpu.stream().launch_builder(&kernel);
    launch.arg(&from).arg(&to).arg(&sizes[0]).arg(&sizes[1]);
    launch.arg(&pixels).arg(&frames).arg(&factor).arg(&addend);
    let count = out.height * out.width * out.channels;
    // SAFETY: arguments are those of the kernel; `x` and `out` have the pixels, channels and frames named.
    unsafe { launch.launch(elementwise(gpu.multiprocessors(), count)) }?;
    Ok(())
}

/// `out` channel `k` = mean of `group` consecutive channels of `x` from `k * group` on; both bf16 or both f16.
/// The channel-matching shortcuts of the VAE's encoder.
///
/// # Errors
/// `Argument` naming the operand that does not fit, or what the driver says.
pub fn channel_means(out: &Pictures, x: &Pictures) -> Result<()> {
    const OP: &str = "channel_means";
    let name = match suffix(OP, "x", x.dtype())? {
        "bf16" => "channel_means_bf16",
        _ => "channel_means_f16",
    };
    let group = x.channels.checked_div(out.channels).unwrap_or(0);
    let size = [x.images, x.frames, x.height, x.width, out.channels];
    out.expect_size(OP, "out", size, x.dtype())?;
    if group * out.channels != x.channels {
        return Err(shape(
            OP,
            "out",
            "channels that divide those of x",
            &out.size(),
        ));
    }
    let dense = |p: &Pictures| p.images <= 1 || p.image_stride == p.pixels() * p.channels;
    if !dense(x) || !dense(out) {
        return Err(argument(OP, "x", "and out must have adjacent images"));
    }
    same_gpu(OP, &[out.tensor(), x.tensor()])?;
    let pixels = out.images * out.pixels();
    if pixels * group == 0 {
        return Ok(());
    }
    let (count, group) = ((pixels * out.channels) as i64, int(OP, "group", group)?);
    let (from, to) = (x.tensor().address(), out.tensor().address());
    let gpu = x.tensor().gpu();
    let kernel = gpu.kernel(FILE, name, 0)?;
    let mut launch = gpu.stream().launch_builder(&kernel);
    launch.arg(&from).arg(&to).arg(&count).arg(&group);
    // SAFETY: arguments are those of the kernel; `x` has `group` elements for each of the `count` of `out`.
    unsafe { launch.launch(elementwise(gpu.multiprocessors(), pixels * out.channels)) }?;
    Ok(())
}
