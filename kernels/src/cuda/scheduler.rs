//! The end of a step of many jobs: guidance, its options, and Euler's step on fp32 latents.

use std::sync::Arc;

use cudarc::driver::{DeviceRepr, LaunchConfig, PushKernelArg};

use super::device::Gpu;
use super::error::{Result, argument, shape};
use super::launch::{Grid, int, launch};
use super::tensor::{GpuTensor, GpuType, bytes_of};
use crate::error::KernelError;

const OP: &str = "guide_step";
const FILE: &str = "scheduler";
const THREADS: u32 = 256;
const RESCALE_THREADS: u32 = 1024;
/// 32-bit words of a job on the device.
const WORDS: usize = 8;
/// Blocks of one job: enough for the largest pictures, few for small ones.
const BLOCKS: u32 = 64;

/// One job of a step. Offsets count elements.
#[derive(Clone, Copy, Debug)]
pub struct StepJob {
    /// First of its latents.
    pub latents: usize,
    /// First of its velocity with the prompt.
    pub cond: usize,
    /// First of the one without; under guidance only.
    pub uncond: Option<usize>,
    /// Latent positions, each of all channels.
    pub positions: usize,
    /// Scale of guidance: `uncond + guidance * (cond - uncond)`.
    pub guidance: f32,
    /// `sigma[i + 1] - sigma[i]`.
    pub sigma_step: f32,
    /// 0 ..= 1: how far the guided velocity is brought back to the deviation of the conditional one.
    pub rescale: f32,
    /// Brings the guided velocity of every position back to the length of the conditional one.
    pub preserve_norm: bool,
}

/// The jobs of a step on the device, checked against the sizes of what they point into.
#[derive(Clone, Debug)]
pub struct StepJobs {
    jobs: GpuTensor,
    factors: GpuTensor,
    channels: usize,
    latents: usize,
    velocities: usize,
    rescaled: bool,
}

impl StepJobs {
    /// Uploads `jobs` over `latents` latents and `velocities` velocity elements of `channels` channels.
    ///
    /// # Errors
    /// `Argument` for a job outside them or options out of range; those of [`GpuTensor::new`].
    pub fn new(
        gpu: &Arc<Gpu>,
        jobs: &[StepJob],
        channels: usize,
        latents: usize,
        velocities: usize,
    ) -> Result<Self> {
        int(OP, "latents", latents)?;
        int(OP, "velocities", velocities)?;
        let mut words = Vec::with_capacity(jobs.len());
        for job in jobs {
            words.push(job.words(channels, latents, velocities)?);
        }
        let dims = [jobs.len(), WORDS];
        let table = GpuTensor::new(gpu, &dims, GpuType::I32, "jobs of a step")?;
        table.write_bytes(bytes_of(&words))?;
        Ok(Self {
            jobs: table,
            factors: GpuTensor::new(gpu, &[jobs.len()], GpuType::F32, "jobs of a step")?,
            channels,
            latents,
            velocities,
            rescaled: jobs.iter().any(|j| j.rescale > 0.0 && j.uncond.is_some()),
        })
    }

    /// Whether a job asks for the guidance rescale, which needs the buffer of guided velocities.
    #[must_use]
    pub fn rescaled(&self) -> bool {
        self.rescaled
    }
}

impl StepJob {
    fn words(&self, channels: usize, latents: usize, velocities: usize) -> Result<[u32; WORDS]> {
        let count = self.positions.saturating_mul(channels);
        if channels == 0 || (self.rescale > 0.0 && count < 2) {
            return Err(argument(OP, "job", "has fewer than two values"));
        }
        if !(0.0..=1.0).contains(&self.rescale) {
            return Err(argument(OP, "rescale", "is not in 0..=1"));
        }
        let ranges = [
            ("latents of a job", self.latents, latents),
            ("velocity of a job", self.cond, velocities),
            (
                "unconditional velocity of a job",
                self.uncond.unwrap_or(0),
                velocities,
            ),
        ];
        for (what, start, limit) in ranges {
            let end = start.saturating_add(count);
            if end > limit {
                return Err(KernelError::Bounds {
                    op: OP,
                    what,
                    value: end,
                    limit: limit + 1,
                }
                .into());
            }
        }
        // All of these are below the limits, which 32 bits hold.
        Ok([
            self.latents as u32,
            self.cond as u32,
            self.uncond.map_or(u32::MAX, |at| at as u32),
            self.positions as u32,
            self.guidance.to_bits(),
            self.sigma_step.to_bits(),
            self.rescale.to_bits(),
            u32::from(self.preserve_norm),
        ])
    }
}

#[derive(Clone, Copy)]
#[repr(C)]
struct Arguments {
    jobs: u64,
    velocity: u64,
    guided: u64,
    factor: u64,
    latents: u64,
    narrow: u64,
    channels: i32,
}

// SAFETY: plain numbers in the layout of the kernel's struct.
unsafe impl DeviceRepr for Arguments {}

/// Guides the velocities of all jobs and moves their latents by one Euler step.
///
/// `velocity` F32 or bf16, `latents` F32, both as long as `jobs` was made for; `narrow`, bf16 and as long as the
/// latents, gets the new latents as the next step's stem reads them. `guided`, F32 and as long as the latents,
/// gets the guided velocities; it is needed where a job is [rescaled](StepJobs::rescaled). Where no option is used
/// the results are those of the CPU bit for bit.
///
/// # Errors
/// `Argument` naming the operand that does not fit, or what the driver says.
pub fn guide_step(
    jobs: &StepJobs,
    velocity: &GpuTensor,
    latents: &GpuTensor,
    narrow: Option<&GpuTensor>,
    guided: Option<&GpuTensor>,
) -> Result<()> {
    let names = match velocity.dtype() {
        GpuType::F32 => ("guide_step_f32", "rescale_factor_f32"),
        GpuType::Bf16 => ("guide_step_bf16", "rescale_factor_bf16"),
        _ => {
            return Err(shape(
                OP,
                "velocity",
                "f32 or bf16 elements",
                velocity.shape(),
            ));
        }
    };
    let operands = [
        (
            "velocity",
            Some(velocity),
            velocity.dtype(),
            jobs.velocities,
        ),
        ("latents", Some(latents), GpuType::F32, jobs.latents),
        ("narrow", narrow, GpuType::Bf16, jobs.latents),
        ("guided", guided, GpuType::F32, jobs.latents),
    ];
    for (what, tensor, dtype, count) in operands {
        if let Some(tensor) = tensor.filter(|t| t.numel() != count || t.dtype() != dtype) {
            let expected = format!("{count} elements of {dtype:?}");
            return Err(shape(OP, what, expected, tensor.shape()));
        }
    }
    if jobs.rescaled && guided.is_none() {
        return Err(argument(OP, "guided", "is needed where a job is rescaled"));
    }
    if jobs.jobs.dim(0) == 0 {
        return Ok(());
    }
    let address = |t: Option<&GpuTensor>| t.map_or(0, GpuTensor::address);
    let step = Arguments {
        jobs: jobs.jobs.address(),
        velocity: velocity.address(),
        guided: address(guided),
        factor: 0,
        latents: latents.address(),
        narrow: address(narrow),
        channels: int(OP, "channels", jobs.channels)?,
    };
    let (gpu, grid) = (latents.gpu(), jobs.grid());
    if !jobs.rescaled {
        // SAFETY: the jobs were held against the sizes of the operands.
        return unsafe { launch(gpu, FILE, names.0, grid, &step) };
    }
    let guide = Arguments {
        latents: 0,
        narrow: 0,
        ..step
    };
    // SAFETY: as above; without latents the kernel writes `guided` alone.
    unsafe { launch(gpu, FILE, names.0, grid, &guide) }?;
    jobs.rescale(gpu, names.1, &guide)?;
    let step = Arguments {
        factor: jobs.factors.address(),
        ..step
    };
    // SAFETY: as above; with factors the kernel reads `guided`.
    unsafe { launch(gpu, FILE, names.0, grid, &step) }
}

impl StepJobs {
    fn grid(&self) -> Grid {
        Grid {
            blocks: (BLOCKS, self.jobs.dim(0) as u32, 1),
            threads: THREADS,
            shared: 0,
        }
    }

    fn rescale(&self, gpu: &Gpu, name: &'static str, arguments: &Arguments) -> Result<()> {
        let kernel = gpu.kernel(FILE, name, 0)?;
        let factors = self.factors.address();
        let mut launch = gpu.stream().launch_builder(&kernel);
        launch.arg(arguments).arg(&factors);
        let config = LaunchConfig {
            grid_dim: (self.jobs.dim(0) as u32, 1, 1),
            block_dim: (RESCALE_THREADS, 1, 1),
            shared_mem_bytes: 0,
        };
        // SAFETY: one block and one factor a job.
        unsafe { launch.launch(config) }?;
        Ok(())
    }
}
