//! What a plan costs: memory of a rank, seconds of a step, pictures a second. Pure functions of a model, a
//! machine, a workload and a plan; for planning, before any GPU is touched.
//!
//! Work and bytes are counted exactly as the model does them ([`crate::traffic`], expectations where tokens
//! choose experts); seconds come from measured rates of a GPU ([`Machine`]), without queueing, kernel
//! launches or imbalance of experts.

mod load;
mod machine;
mod memory;
mod sizes;
mod time;

use std::fmt;

use serde::Serialize;

pub use machine::{Interconnect, Link, Machine, WeightType};
pub use memory::Memory;
pub use sizes::{ModelSizes, RankWeights, VaeSizes};

use crate::{AxisSet, GUIDANCE_ROWS, ParallelError, Plan, RingPrefix, SharedExpert};
use time::Timing;

/// Bytes of an activation, a cached key or value, and of an element on the wire between GPUs.
pub const ACTIVATION_BYTES: u64 = 2;

/// What is asked of a pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Work {
    /// Image tokens of a picture.
    pub image_tokens: usize,
    /// Rows of a picture: 2 under guidance, else 1.
    pub rows: usize,
    /// Prefix tokens of a row.
    pub prefix: usize,
    /// Steps of a picture.
    pub steps: usize,
    /// Pictures in the making at any time.
    pub concurrency: usize,
}

/// One way to use a number of GPUs: equal groups that run one plan each, on different pictures.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Candidate {
    /// The plan of a group.
    pub plan: Plan,
    /// Groups.
    pub replicas: usize,
    /// Layers may stay in host memory and be copied in while the one before computes.
    pub offload: bool,
}

/// Bytes and seconds of one group of ranks in a step.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct AxisCost {
    /// The axes of the group.
    pub axes: AxisSet,
    /// Bytes that the busiest rank sends.
    pub sent: u64,
    /// Seconds its operations take, hidden ones included.
    pub seconds: f64,
}

/// What a candidate costs.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Assessment {
    /// The candidate.
    pub candidate: Candidate,
    /// Layers that stay in host memory.
    pub streamed_layers: usize,
    /// Of the rank that needs most.
    pub memory: Memory,
    /// Seconds of computing in a step.
    pub compute_seconds: f64,
    /// By group of ranks.
    pub communication: Vec<AxisCost>,
    /// Seconds in which the streamed layers are copied in, once a step.
    pub stream_seconds: f64,
    /// Share of a pipeline's time in which its stages wait.
    pub bubble: f64,
    /// Seconds of a step of one group's pictures.
    pub step_seconds: f64,
    /// Seconds of decoding a picture.
    pub decode_seconds: f64,
    /// Seconds from the first step to the picture.
    pub picture_seconds: f64,
    /// Pictures a second of all groups.
    pub pictures_per_second: f64,
    /// Why it cannot be used.
    pub misfit: Option<Misfit>,
}

/// Why a candidate cannot be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Misfit {
    /// A rank needs more memory than there is.
    Memory {
        /// Bytes needed.
        needed: u64,
        /// Bytes there are.
        there: u64,
    },
    /// Guidance rows are spread, but a picture has one.
    OneRow,
}

impl fmt::Display for Misfit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Memory { needed, there } => {
                let gb = |bytes: u64| bytes as f64 / 1e9;
                write!(f, "needs {:.1} GB, has {:.1}", gb(*needed), gb(*there))
            }
            Self::OneRow => f.write_str("cfg needs two rows, a picture has one"),
        }
    }
}

/// Every way to use `gpus` GPUs: all legal plans on every divisor of them, as many groups as there is room
/// for, with the options that only matter under some axes.
///
/// # Errors
/// Those of [`Plan::legal`].
pub fn candidates(sizes: &ModelSizes, gpus: usize) -> Result<Vec<Candidate>, ParallelError> {
    crate::error::in_range("gpus", gpus, 1, crate::MAX_AXIS)?;
    let mut all = Vec::new();
    for ranks in (1..=gpus).filter(|n| gpus.is_multiple_of(*n)) {
        for plan in Plan::legal(&sizes.shape, ranks)? {
            let mut variants = vec![plan];
            if plan.tp > 1 && sizes.shape.layers.iter().any(|l| l.shared_inner.is_some()) {
                variants.push(Plan {
                    shared_expert: SharedExpert::Replicated,
                    ..plan
                });
            }
            if plan.ring > 1 {
                variants.push(Plan {
                    ring_prefix: RingPrefix::Sharded,
                    ..plan
                });
            }
            all.extend(variants.into_iter().map(|plan| Candidate {
                plan,
                replicas: gpus / ranks,
                // Each rank has all weights, so that copying them in is all that is left to save memory.
                offload: plan.pp * plan.tp == 1 && plan.ep.is_empty(),
            }));
        }
    }
    Ok(all)
}

/// What `candidate` costs.
///
/// # Errors
/// Those of [`Plan::validate`].
pub fn assess(
    sizes: &ModelSizes,
    machine: &Machine,
    work: &Work,
    candidate: Candidate,
) -> Result<Assessment, ParallelError> {
    let plan = candidate.plan;
    plan.validate(&sizes.shape)?;
    for (field, got) in [
        ("rows", work.rows),
        ("steps", work.steps),
        ("concurrency", work.concurrency),
        ("replicas", candidate.replicas),
        ("image_tokens", work.image_tokens),
    ] {
        let max = if field == "rows" {
            GUIDANCE_ROWS
        } else {
            1 << 24
        };
        crate::error::in_range(field, got, 1, max)?;
    }
    let one_row = plan.cfg > work.rows;
    // Priced as if there were a second row, so that the reader sees what it would cost.
    let work = &Work {
        rows: work.rows.max(plan.cfg),
        ..*work
    };
    let timing = Timing {
        sizes,
        machine,
        work,
        plan,
        batch: work.concurrency.div_ceil(candidate.replicas),
    };
    let step = timing.step()?;
    let (memory, streamed_layers) = memory::of(&timing, candidate.offload)?;
    let stream_seconds = memory.streamed as f64 / machine.host_rate;
    let step_seconds = offloaded_step(step.seconds, memory.streamed, machine.host_rate);
    let decode_seconds = sizes.vae.decode_flops(work.image_tokens) / machine.convolution;
    // Rank 0 decodes one picture after the other while the rest wait.
    let decodes = timing.batch as f64;
    let picture_seconds = work.steps as f64 * step_seconds + decodes * decode_seconds;
    let misfit = if one_row {
        Some(Misfit::OneRow)
    } else {
        (memory.peak() > machine.memory).then_some(Misfit::Memory {
            needed: memory.peak(),
            there: machine.memory,
        })
    };
    Ok(Assessment {
        candidate,
        streamed_layers,
        memory,
        compute_seconds: step.compute,
        communication: step.communication,
        stream_seconds,
        bubble: step.bubble,
        step_seconds,
        decode_seconds,
        picture_seconds,
        pictures_per_second: work.concurrency as f64 / picture_seconds,
        misfit,
    })
}

/// Seconds of a step of `seconds` beside which `bytes` of layers are brought in at `rate` bytes a second.
#[must_use]
pub fn offloaded_step(seconds: f64, bytes: u64, rate: f64) -> f64 {
    seconds.max(bytes as f64 / rate)
}

impl Candidate {
    /// GPUs of all groups.
    #[must_use]
    pub fn gpus(&self) -> usize {
        self.replicas * self.plan.sizes().iter().product::<usize>()
    }
}

#[cfg(test)]
mod tests;
