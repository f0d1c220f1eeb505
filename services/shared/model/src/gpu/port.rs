//! How prefixes come to the device while steps run: through pinned buffers on a stream of their own.

use std::sync::{Arc, Mutex, PoisonError};

use half::bf16;
use kernels::cuda::{Gpu, PinnedBuffer, UploadRing, Uploader};

use super::GpuModel;
use super::arena::KvArena;
use super::prefix::GpuPrefix;
use super::share::GpuShare;
use crate::error::ModelError;
use crate::prefix::PrefixKv;

/// One prefix at a time: a few buffers keep the link busy.
const RING: UploadRing = UploadRing {
    buffers: 8,
    bytes: 2 << 20,
};

/// Brings prefixes to one GPU from any thread, without the model and without waiting for its steps.
#[derive(Debug)]
pub struct PrefixPort {
    gpu: Arc<Gpu>,
    arena: Arc<KvArena>,
    share: GpuShare,
    /// Layers and heads of a whole prefix.
    whole: (usize, usize),
    uploader: Mutex<Uploader>,
}

impl GpuModel {
    /// A way for prefixes into this model's memory.
    ///
    /// # Errors
    /// `Gpu` when the host has no memory that may be locked.
    pub fn prefix_port(&self) -> Result<PrefixPort, ModelError> {
        Ok(PrefixPort {
            uploader: Mutex::new(Uploader::new(&self.gpu, &RING)?),
            gpu: self.gpu.clone(),
            arena: self.arena.clone(),
            share: self.share.clone(),
            whole: (self.config.num_layers(), self.config.num_kv_heads),
        })
    }

    /// Bytes for keys and values that a picture takes: those of its prefixes of so many tokens each, and in
    /// every step those of `fresh` tokens a row.
    pub fn picture_bytes(&self, prefixes: &[usize], fresh: usize) -> usize {
        let rows = prefixes.len();
        // Ranks of a ring have room for each other's pieces, each rounded up.
        let pieces = self.share.ranks();
        let each = fresh.div_ceil(pieces);
        let kept: usize = prefixes
            .iter()
            .map(|p| self.arena.bytes_of(*p, false))
            .sum();
        kept + rows * pieces * self.arena.bytes_of(each, true)
    }

    /// Bytes for keys and values in all, and those that are free.
    pub fn kv_room(&self) -> (usize, usize) {
        self.arena.room()
    }
}

impl PrefixPort {
    /// Brings a prefix to the device, rounded to bf16: a whole one, of which the rank keeps its part, or that part.
    /// It is there on return.
    ///
    /// # Errors
    /// `Exhausted` when there is no room, `Internal` for a prefix of another model, `Gpu` when a copy failed.
    pub fn upload(&self, prefix: &PrefixKv) -> Result<GpuPrefix, ModelError> {
        let geometry = prefix.geometry();
        if (geometry.layers, geometry.kv_heads) == self.whole && self.share.ranks() > 1 {
            let part = prefix.part_of(self.share.shard())?;
            return self.send(&part);
        }
        self.send(prefix)
    }

    fn send(&self, prefix: &PrefixKv) -> Result<GpuPrefix, ModelError> {
        let placed = GpuPrefix::place(&self.arena, prefix)?;
        let (tokens, dim) = (prefix.tokens(), prefix.geometry().head_dim);
        let target = placed.tensor()?;
        let room = target.dim(1);
        let mut uploader = self.uploader.lock().unwrap_or_else(PoisonError::into_inner);
        // Steps that are under way may still read what was here before.
        uploader.hold(&self.gpu)?;
        let mut free = uploader.buffers()?;
        let sent = (|| {
            let (mut at, total) = (0, target.numel());
            while at < total {
                let mut buffer = free.pop().ok_or_else(no_buffer)?;
                let count = (buffer.bytes() / size_of::<bf16>()).min(total - at);
                fill(
                    &mut buffer,
                    at..at + count,
                    (tokens * dim, room * dim),
                    prefix,
                );
                let bytes = count * size_of::<bf16>();
                let offset = at * size_of::<bf16>();
                free.extend(uploader.send(&target, offset, buffer, bytes)?);
                at += count;
            }
            Ok::<_, ModelError>(())
        })();
        let arrived = uploader.finish();
        for buffer in free {
            uploader.keep(buffer);
        }
        sent?;
        arrived?;
        Ok(placed)
    }
}

/// Values `range` of the device's layout, where a side of `whole` values has `real` ones and then zeros: the room
/// behind the tokens is read too, and must hold numbers.
fn fill(
    buffer: &mut PinnedBuffer,
    range: std::ops::Range<usize>,
    (real, whole): (usize, usize),
    prefix: &PrefixKv,
) {
    let values: &mut [bf16] = bytemuck::cast_slice_mut(buffer.as_mut_slice());
    let values = &mut values[..range.len()];
    let mut at = range.start;
    let mut rest = values;
    while !rest.is_empty() {
        let (side, inside) = (at / whole, at % whole);
        let count = (whole - inside).min(rest.len());
        let (now, later) = rest.split_at_mut(count);
        let given = real.saturating_sub(inside).min(count);
        let from = &prefix.data()[side * real + inside.min(real)..][..given];
        for (to, value) in now.iter_mut().zip(from) {
            *to = bf16::from_f32(*value);
        }
        now[given..].fill(bf16::ZERO);
        at += count;
        rest = later;
    }
}

fn no_buffer() -> ModelError {
    ModelError::Internal("an upload without a buffer".into())
}
