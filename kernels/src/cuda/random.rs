//! Random weights made where they are used.

use cudarc::driver::{LaunchConfig, PushKernelArg};

use super::error::Result;
use super::tensor::{GpuTensor, GpuType};
use crate::error::KernelError;

const OP: &str = "fill_random";
const THREADS: u32 = 256;
/// Blocks for each multiprocessor: enough to fill it.
const WAVES: u32 = 8;

/// Fills a bf16 tensor with value `i` of stream `key` of the SplitMix64 generator, uniform in
/// `[-scale, scale)`.
///
/// # Errors
/// `Argument` for another element type, or what the driver says.
pub fn fill_random(out: &GpuTensor, key: u64, scale: f32) -> Result<()> {
    if out.dtype() != GpuType::Bf16 {
        let got = out.shape();
        return Err(KernelError::shape(OP, "out", "bf16 elements", got).into());
    }
    let gpu = out.gpu();
    let kernel = gpu.kernel("random", "random_bf16", 0)?;
    let (address, count) = (out.address(), out.numel() as u64);
    let mut launch = gpu.stream().launch_builder(&kernel);
    launch.arg(&address).arg(&count).arg(&key).arg(&scale);
    let config = LaunchConfig {
        grid_dim: (WAVES * gpu.multiprocessors(), 1, 1),
        block_dim: (THREADS, 1, 1),
        shared_mem_bytes: 0,
    };
    // SAFETY: arguments are those of `random_bf16`, which writes `count` elements from `address` on.
    unsafe { launch.launch(config) }?;
    Ok(())
}
