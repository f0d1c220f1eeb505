//! Prefixes on the device.

use std::sync::Arc;

use half::bf16;
use kernels::cuda::{GpuTensor, KvRun, PinnedBuffer};
use rayon::prelude::*;

use super::arena::{KvArena, KvLease};
use crate::error::ModelError;
use crate::prefix::PrefixKv;

/// Locked host memory that a prefix comes back through, about.
const LANDING_BYTES: usize = 32 << 20;

/// The keys and values of a prompt in the arena; immutable, shared by every picture made from it.
#[derive(Debug)]
pub struct GpuPrefix {
    lease: KvLease,
    tokens: usize,
}

impl GpuPrefix {
    /// Wraps what a prefill left.
    pub(super) fn of(lease: KvLease, tokens: usize) -> Self {
        Self { lease, tokens }
    }

    /// Room for a prefix of this arena's model, or of this rank's part; nothing is there yet.
    pub(super) fn place(arena: &Arc<KvArena>, prefix: &PrefixKv) -> Result<Self, ModelError> {
        let tokens = prefix.tokens();
        let lease = arena.lease(tokens, false)?;
        let dim = prefix.geometry().head_dim;
        let sides = lease.tensor()?.dim(0);
        let fits = *prefix.geometry() == arena.geometry() && prefix.held().len() <= 1;
        if !fits || sides * tokens * dim != prefix.data().len() {
            return Err(ModelError::Internal(
                "a prefix of another model, or a part of one, for a gpu".into(),
            ));
        }
        Ok(Self { lease, tokens })
    }

    /// All of its room, `[sides, tokens and what follows, head_dim]`.
    pub(super) fn tensor(&self) -> Result<GpuTensor, ModelError> {
        self.lease.tensor()
    }

    /// Brings a whole prefix to the device, rounded to bf16.
    pub(super) fn upload(arena: &Arc<KvArena>, prefix: &PrefixKv) -> Result<Self, ModelError> {
        let placed = Self::place(arena, prefix)?;
        let (tokens, dim) = (placed.tokens, prefix.geometry().head_dim);
        let (target, room) = (placed.tensor()?, placed.lease.capacity());
        // The room behind the tokens is read too, and must hold numbers.
        let mut padded = vec![bf16::ZERO; target.numel()];
        if tokens > 0 {
            let sides = prefix.data().chunks_exact(tokens * dim);
            for (to, from) in padded.chunks_exact_mut(room * dim).zip(sides) {
                for (to, from) in to.iter_mut().zip(from) {
                    *to = bf16::from_f32(*from);
                }
            }
        }
        target.write_bytes(bytemuck::cast_slice(&padded))?;
        Ok(placed)
    }

    /// Brings it back to the host; the values are bf16.
    ///
    /// # Errors
    /// `Gpu` when the device failed, or the host has no memory that may be locked.
    pub fn download(&self) -> Result<PrefixKv, ModelError> {
        let geometry = self.lease.arena().geometry();
        let all = self.lease.tensor()?;
        let (real, side) = (self.tokens * geometry.head_dim, all.dim(1) * all.dim(2));
        let mut data = vec![0_f32; all.dim(0) * real];
        if real == 0 {
            return PrefixKv::new(geometry, self.tokens, data);
        }
        let bytes = side * size_of::<bf16>();
        let at_once = (LANDING_BYTES / bytes).clamp(1, all.dim(0));
        let mut landing = self.lease.arena().landing();
        let landing = match landing.take() {
            Some(kept) if kept.bytes() >= at_once * bytes => landing.insert(kept),
            _ => landing.insert(PinnedBuffer::new(all.gpu(), LANDING_BYTES.max(bytes))?),
        };
        for (index, sides) in data.chunks_mut(at_once * real).enumerate() {
            let count = sides.len() / real * bytes;
            let start = all.offset() + index * at_once * bytes;
            let arrived = &mut landing.as_mut_slice()[..count];
            all.buffer().read(start, arrived)?;
            let from = bytemuck::cast_slice::<u8, bf16>(arrived).par_chunks_exact(side);
            let to = sides.par_chunks_exact_mut(real);
            to.zip(from).for_each(|(to, from)| {
                to.iter_mut()
                    .zip(from)
                    .for_each(|(to, from)| *to = from.to_f32());
            });
        }
        PrefixKv::new(geometry, self.tokens, data)
    }

    /// Its tokens.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Where attention reads it.
    pub(super) fn run(&self) -> KvRun {
        self.lease.run(self.tokens)
    }
}
