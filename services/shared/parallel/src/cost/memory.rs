//! Bytes that the fullest rank needs.

use serde::Serialize;

use super::sizes::RankWeights;
use super::time::Timing;
use super::{ACTIVATION_BYTES, Machine};
use crate::ParallelError;

/// Bytes of a weight of the VAE, which is stored in F32.
const VAE_BYTES: u64 = 4;
/// Bytes alive for each element of the VAE's largest tensor: an input and an output in F16, and a
/// normalisation in F32.
const DECODE_BYTES: u64 = 8;
/// Layers in GPU memory for streaming: one that computes and one that is copied in.
const STAGING_LAYERS: usize = 2;

/// Bytes of one rank.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Memory {
    /// Weights in GPU memory, with the room for streamed layers.
    pub weights: u64,
    /// Weights in host memory that are copied in each step.
    pub streamed: u64,
    /// Keys and values of prefixes.
    pub prefixes: u64,
    /// Activations of a pass.
    pub activations: u64,
    /// Working memory of decoding a picture on rank 0, when no pass runs.
    pub decoding: u64,
    /// What is not ours.
    pub reserve: u64,
}

impl Memory {
    /// Most bytes of GPU memory at any time.
    #[must_use]
    pub fn peak(&self) -> u64 {
        self.weights + self.prefixes + self.activations.max(self.decoding) + self.reserve
    }
}

/// Bytes of weights in GPU memory.
pub(super) fn weight_bytes(weights: &RankWeights, machine: &Machine) -> u64 {
    let large = weights.attention + weights.experts + weights.shared;
    let rest = weights.small + weights.ends;
    large * machine.weights.bytes() + rest * ACTIVATION_BYTES + weights.vae * VAE_BYTES
}

/// The fullest rank of a plan, and how many of its layers are streamed: as few as fit, where `offload`
/// allows any.
pub(super) fn of(timing: &Timing<'_>, offload: bool) -> Result<(Memory, usize), ParallelError> {
    let (sizes, machine, plan) = (timing.sizes, timing.machine, &timing.plan);
    let decoding = sizes.vae.peak_elements(timing.work.image_tokens) * DECODE_BYTES;
    let mut fullest = Memory::default();
    for rank in 0..plan.mesh()?.ranks() {
        let load = timing.load(rank)?;
        let memory = Memory {
            weights: weight_bytes(&sizes.rank_weights(plan, rank)?, machine),
            streamed: 0,
            prefixes: load.prefix_bytes(timing.rows())?,
            activations: load.activation_bytes(timing.rows()),
            decoding: if rank == 0 { decoding } else { 0 },
            reserve: machine.reserve,
        };
        if memory.peak() > fullest.peak() {
            fullest = memory;
        }
    }
    if !offload || fullest.peak() <= machine.memory {
        return Ok((fullest, 0));
    }
    let layer = |index| Ok(weight_bytes(&sizes.layer(plan, 0, index)?, machine));
    let layers = 0..sizes.shape.layers.len();
    let layers: Vec<u64> = layers.map(layer).collect::<Result<_, ParallelError>>()?;
    Ok(streamed(fullest, &layers, machine))
}

/// Streams the first of `layers`, as few as fit.
fn streamed(resident: Memory, layers: &[u64], machine: &Machine) -> (Memory, usize) {
    let largest = layers.iter().copied().max().unwrap_or(0);
    let mut memory = resident;
    for count in 1..=layers.len() {
        let away: u64 = layers[..count].iter().sum();
        let staging = largest * count.min(STAGING_LAYERS) as u64;
        memory = Memory {
            weights: resident.weights - away + staging,
            streamed: away,
            ..resident
        };
        if memory.peak() <= machine.memory {
            return (memory, count);
        }
    }
    (memory, layers.len())
}
