//! Launching kernels whose arguments are one struct passed by value.

use cudarc::driver::{DeviceRepr, LaunchConfig, PushKernelArg};

use super::device::Gpu;
use super::error::{Result, argument};
use super::tensor::GpuTensor;

/// Blocks, threads a block, and bytes of dynamic shared memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Grid {
    pub(crate) blocks: (u32, u32, u32),
    pub(crate) threads: u32,
    pub(crate) shared: u32,
}

impl Grid {
    /// `blocks` blocks of `threads` threads.
    pub(crate) fn linear(blocks: u32, threads: u32) -> Self {
        Self {
            blocks: (blocks, 1, 1),
            threads,
            shared: 0,
        }
    }
}

/// Enqueues kernel `name` of `cuda/<file>.cu`.
///
/// # Safety
/// `arguments` has the layout of the kernel's argument, and the kernel, started on `grid`, stays within the
/// memory they name.
pub(crate) unsafe fn launch<A: DeviceRepr>(
    gpu: &Gpu,
    file: &'static str,
    name: &'static str,
    grid: Grid,
    arguments: &A,
) -> Result<()> {
    let kernel = gpu.kernel(file, name, grid.shared)?;
    let mut launch = gpu.stream().launch_builder(&kernel);
    launch.arg(arguments);
    let config = LaunchConfig {
        grid_dim: grid.blocks,
        block_dim: (grid.threads, 1, 1),
        shared_mem_bytes: grid.shared,
    };
    // SAFETY: the caller vouches for layout and ranges.
    unsafe { launch.launch(config) }?;
    Ok(())
}

/// A size as the `int` of a kernel.
pub(crate) fn int(op: &'static str, what: &'static str, value: usize) -> Result<i32> {
    i32::try_from(value).map_err(|_| argument(op, what, "has more elements than the kernel counts"))
}

/// Refuses operands that the 16-byte accesses of a kernel cannot reach, by name.
pub(crate) fn aligned(op: &'static str, operands: &[(&'static str, &GpuTensor)]) -> Result<()> {
    const BYTES: u64 = 16;
    let bad = operands
        .iter()
        .find(|(_, t)| !t.address().is_multiple_of(BYTES));
    bad.map_or(Ok(()), |(what, _)| {
        Err(argument(op, what, "is not aligned to 16 bytes"))
    })
}
