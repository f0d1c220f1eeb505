//! Group normalisation, channels-last: sums of channels, then coefficients, then one pass over the pictures.
//!
//! The sums come with the output of [`conv`](super::conv), or from [`group_norm_sums`]. Statistics are added in
//! double precision in a fixed order; an image's result depends on that image alone.

use cudarc::driver::{LaunchConfig, PushKernelArg};

use super::conv_layout::{ANY, CHANNEL_STEP, ChannelSums, Pictures, same_gpu};
use super::error::{Result, argument, shape};
use super::launch::int;
use super::tensor::{GpuTensor, GpuType};

const FILE: &str = "group_norm";
const THREADS: u32 = 256;
/// Channels of a block of the sums.
const SLAB: usize = 256;
/// Parts an image is summed in: enough blocks to fill the GPU with narrow pictures too.
const UNITS: u32 = 64;
/// Pixels a thread has in flight, and blocks per multiprocessor, of the pass over the pictures.
const PIXELS: usize = 4;
const WAVES: u32 = 8;

/// Parameters of a group normalisation.
#[derive(Clone, Copy, Debug)]
pub struct GpuGroupNorm<'a> {
    /// Number of groups; divides the channels.
    pub groups: usize,
    /// F32 `[channels]`.
    pub weight: &'a GpuTensor,
    /// F32 `[channels]`.
    pub bias: &'a GpuTensor,
    /// Added to the variance. HunyuanImage-3.0: 1e-5 in the patch layers, 1e-6 in the VAE.
    pub eps: f32,
    /// `[images, 2 channels]`, F32 or 16 bits: scale, then shift; the result is `y (1 + scale) + shift`.
    pub modulation: Option<&'a GpuTensor>,
}

/// F32 elements that [`group_norm_sums`] needs for pictures of `images` and `channels`.
#[must_use]
pub fn group_norm_sum_elements(images: usize, channels: usize) -> usize {
    images * channels * UNITS as usize * 2
}

/// Sums the channels of `x` into `scratch`, F32 of [`group_norm_sum_elements`].
///
/// # Errors
/// `Argument` naming the operand that does not fit, or what the driver says.
pub fn group_norm_sums(scratch: &GpuTensor, x: &Pictures) -> Result<ChannelSums> {
    const OP: &str = "group_norm_sums";
    let name = match x.expect_half(OP, "x")? {
        "bf16" => "group_norm_sums_bf16",
        _ => "group_norm_sums_f16",
    };
    same_gpu(OP, &[scratch, x.tensor()])?;
    let sums = ChannelSums::within(OP, scratch, [x.images, x.channels, 1, UNITS as usize])?;
    if x.images == 0 || x.channels == 0 {
        return Ok(sums);
    }
    let blocks = (
        UNITS,
        grid(OP, x.channels.div_ceil(SLAB))?,
        grid(OP, x.images)?,
    );
    let (from, to) = (x.tensor().address(), sums.partials.address());
    let (stride, pixels) = (x.image_stride as i64, x.pixels() as i64);
    let channels = int(OP, "channels", x.channels)?;
    let gpu = x.tensor().gpu();
    let kernel = gpu.kernel(FILE, name, 0)?;
    let mut launch = gpu.stream().launch_builder(&kernel);
    launch
        .arg(&from)
        .arg(&stride)
        .arg(&pixels)
        .arg(&channels)
        .arg(&to);
    // SAFETY: arguments are those of the kernel; `x` has the pixels, and `sums` a pair for every channel and
    // unit.
    unsafe { launch.launch(config(blocks)) }?;
    Ok(sums)
}

/// `out [images, channels, 2]` F32: factor and addend of each channel, from the sums over `pixels` pixels an image.
///
/// # Errors
/// `Argument` naming the operand that does not fit, or what the driver says.
pub fn group_norm_coefficients(
    out: &GpuTensor,
    sums: &ChannelSums,
    pixels: usize,
    norm: &GpuGroupNorm<'_>,
) -> Result<()> {
    const OP: &str = "group_norm_coefficients";
    let (images, channels) = (sums.images, sums.channels);
    out.expect(OP, "out", &[images, channels, 2], GpuType::F32)?;
    norm.weight
        .expect(OP, "weight", &[channels], GpuType::F32)?;
    norm.bias.expect(OP, "bias", &[channels], GpuType::F32)?;
    let size = channels.checked_div(norm.groups).unwrap_or(0);
    if size * norm.groups != channels || !size.is_multiple_of(sums.per) || size == 0 {
        return Err(argument(
            OP,
            "groups",
            "must divide the channels into whole sums",
        ));
    }
    let (name, scale, shift) = modulation(OP, norm.modulation, images, channels)?;
    let others = norm.modulation.unwrap_or(out);
    same_gpu(OP, &[out, &sums.partials, norm.weight, norm.bias, others])?;
    if images == 0 {
        return Ok(());
    }
    let [per, units] = [int(OP, "sums", sums.per)?, int(OP, "sums", sums.units)?];
    let [narrow, groups] = [
        int(OP, "channels", channels)?,
        int(OP, "groups", norm.groups)?,
    ];
    let addresses = [
        sums.partials.address(),
        norm.weight.address(),
        norm.bias.address(),
    ];
    let (pixels, stride, to) = (pixels as i64, 2 * channels as i64, out.address());
    let gpu = out.gpu();
    let kernel = gpu.kernel(FILE, name, 0)?;
    let mut launch = gpu.stream().launch_builder(&kernel);
    launch
        .arg(&addresses[0])
        .arg(&per)
        .arg(&units)
        .arg(&narrow)
        .arg(&groups)
        .arg(&pixels);
    launch.arg(&norm.eps).arg(&addresses[1]).arg(&addresses[2]);
    launch.arg(&scale).arg(&shift).arg(&stride).arg(&to);
    let blocks = (grid(OP, norm.groups)?, grid(OP, images)?, 1);
    // SAFETY: arguments are those of the kernel, and all operands were held against images and channels.
    unsafe { launch.launch(config(blocks)) }?;
    Ok(())
}

/// Kernel by type, and the addresses of scale and shift.
fn modulation(
    op: &'static str,
    modulation: Option<&GpuTensor>,
    images: usize,
    channels: usize,
) -> Result<(&'static str, u64, u64)> {
    let Some(both) = modulation else {
        return Ok(("group_norm_coefficients_f32", 0, 0));
    };
    let name = match both.dtype() {
        GpuType::F32 => "group_norm_coefficients_f32",
        GpuType::Bf16 => "group_norm_coefficients_bf16",
        GpuType::F16 => "group_norm_coefficients_f16",
        _ => return Err(argument(op, "modulation", "must be f32, bf16 or f16")),
    };
    both.expect(op, "modulation", &[images, 2 * channels], both.dtype())?;
    let shift = both.address() + (channels * both.dtype().bytes()) as u64;
    Ok((name, both.address(), shift))
}

/// `out = x * factor + addend` by the coefficients `[images, channels, 2]` of the channels, then SiLU where
/// `silu`; one rounding. `out` may be `x`.
///
/// # Errors
/// `Argument` naming the operand that does not fit, or what the driver says.
pub fn group_norm_apply(
    out: &Pictures,
    x: &Pictures,
    coefficients: &GpuTensor,
    silu: bool,
) -> Result<()> {
    const OP: &str = "group_norm_apply";
    let name = match x.expect_half(OP, "x")? {
        "bf16" => "group_norm_apply_bf16",
        _ => "group_norm_apply_f16",
    };
    out.expect_half(OP, "out")?;
    out.expect_size(OP, "out", x.size(), x.dtype())?;
    coefficients.expect(OP, "coefficients", &[x.images, x.channels, 2], GpuType::F32)?;
    same_gpu(OP, &[out.tensor(), x.tensor(), coefficients])?;
    if out.tensor().numel() == 0 {
        return Ok(());
    }
    let chunks = x.channels / CHANNEL_STEP;
    let across = chunks.min(THREADS as usize);
    let at_once = (THREADS as usize / across) * PIXELS;
    let gpu = x.tensor().gpu();
    let most = (gpu.multiprocessors() * WAVES) as usize;
    let along = grid(OP, x.pixels().div_ceil(at_once).clamp(1, most))?;
    let blocks = (
        along,
        grid(OP, chunks.div_ceil(across))?,
        grid(OP, x.images)?,
    );
    let (from, to) = (x.tensor().address(), out.tensor().address());
    let (from_stride, to_stride) = (x.image_stride as i64, out.image_stride as i64);
    let (pixels, channels) = (x.pixels() as i64, int(OP, "channels", x.channels)?);
    let (factors, silu) = (coefficients.address(), i32::from(silu));
    let kernel = gpu.kernel(FILE, name, 0)?;
    let mut launch = gpu.stream().launch_builder(&kernel);
    launch.arg(&from).arg(&from_stride).arg(&to).arg(&to_stride);
    launch.arg(&pixels).arg(&channels).arg(&factors).arg(&silu);
    // SAFETY: arguments are those of the kernel; `out` and `x` have the same pixels, each thread its own.
    unsafe { launch.launch(config(blocks)) }?;
    Ok(())
}

fn config(blocks: (u32, u32, u32)) -> LaunchConfig {
    LaunchConfig {
        grid_dim: blocks,
        block_dim: (THREADS, 1, 1),
        shared_mem_bytes: 0,
    }
}

/// A number of blocks; the second and third direction hold 65,535.
fn grid(op: &'static str, blocks: usize) -> Result<u32> {
    const MOST: usize = 65_535;
    if blocks <= MOST {
        return Ok(blocks as u32);
    }
    Err(shape(op, "x", "fewer images and channels", &[blocks, ANY]))
}
