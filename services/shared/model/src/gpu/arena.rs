//! Keys and values on the device: one allocation, handed out in runs of arena rows.
//!
//! An arena row is one key or value of one head: `head_dim` values of bf16. All runs lie in one allocation,
//! so that one tensor map serves every row of a packed batch.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kernels::cuda::{DeviceBuffer, Gpu, GpuTensor, GpuType, KvRun, KvSlot, PinnedBuffer};
use kv::KvGeometry;

use super::KEY_TILE;
use crate::error::ModelError;

/// Free runs, by start; adjacent ones are always merged.
#[derive(Debug)]
struct FreeRuns(BTreeMap<usize, usize>);

impl FreeRuns {
    fn new(rows: usize) -> Self {
        Self(BTreeMap::from([(0, rows)]))
    }

    /// The first run that is long enough, cut to `rows`.
    fn take(&mut self, rows: usize) -> Option<usize> {
        let (&start, &len) = self.0.iter().find(|(_, len)| **len >= rows)?;
        self.0.remove(&start);
        if len > rows {
            self.0.insert(start + rows, len - rows);
        }
        Some(start)
    }

    fn give(&mut self, mut start: usize, mut rows: usize) {
        if let Some((&before, &len)) = self.0.range(..start).next_back()
            && before + len == start
        {
            self.0.remove(&before);
            (start, rows) = (before, rows + len);
        }
        if let Some(len) = self.0.remove(&(start + rows)) {
            rows += len;
        }
        self.0.insert(start, rows);
    }

    fn total(&self) -> usize {
        self.0.values().sum()
    }
}

/// The key-value memory of one GPU.
#[derive(Debug)]
pub(crate) struct KvArena {
    buffer: Arc<DeviceBuffer>,
    geometry: KvGeometry,
    rows: usize,
    free: Mutex<FreeRuns>,
    /// Locked host memory that prefixes come back through, once there was one.
    landing: Mutex<Option<PinnedBuffer>>,
}

/// Keys and values of consecutive tokens in all (or one) of the layers; given back on drop.
#[derive(Debug)]
pub(crate) struct KvLease {
    arena: Arc<KvArena>,
    rows: Range<usize>,
    layers: usize,
    capacity: usize,
}

impl KvArena {
    /// An arena of about `bytes` bytes, zeroed: memory that was never written holds numbers.
    ///
    /// # Errors
    /// `Gpu` when there is too little memory.
    pub(crate) fn new(
        gpu: &Arc<Gpu>,
        geometry: KvGeometry,
        bytes: usize,
    ) -> Result<Arc<Self>, ModelError> {
        let row = geometry.head_dim * GpuType::Bf16.bytes();
        // Kernels count arena rows in 31 bits.
        let rows = (bytes / row).min(i32::MAX as usize) / KEY_TILE * KEY_TILE;
        let buffer = DeviceBuffer::zeroed(gpu, rows * row, "kv arena")?;
        Ok(Arc::new(Self {
            buffer: Arc::new(buffer),
            geometry,
            rows,
            free: Mutex::new(FreeRuns::new(rows)),
            landing: Mutex::default(),
        }))
    }

    /// All of it, `[rows, head_dim]`.
    pub(crate) fn tensor(&self) -> Result<GpuTensor, ModelError> {
        let dims = [self.rows, self.geometry.head_dim];
        Ok(GpuTensor::view(&self.buffer, 0, &dims, GpuType::Bf16)?)
    }

    /// Room for `tokens` tokens in every layer, or in one that all layers share.
    ///
    /// # Errors
    /// `Exhausted` when no run is free that is long enough.
    pub(crate) fn lease(
        self: &Arc<Self>,
        tokens: usize,
        shared: bool,
    ) -> Result<KvLease, ModelError> {
        let layers = if shared { 1 } else { self.geometry.layers };
        let capacity = tokens.next_multiple_of(KEY_TILE);
        let rows = 2 * layers * self.geometry.kv_heads * capacity;
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        let start = free.take(rows).ok_or_else(|| ModelError::Exhausted {
            what: "kv arena",
            needed: rows * self.row_bytes(),
            free: free.total() * self.row_bytes(),
        })?;
        Ok(KvLease {
            arena: self.clone(),
            rows: start..start + rows,
            layers,
            capacity,
        })
    }

    /// What prefixes come back through, for one at a time.
    pub(crate) fn landing(&self) -> MutexGuard<'_, Option<PinnedBuffer>> {
        self.landing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Bytes that a lease takes.
    pub(crate) fn bytes_of(&self, tokens: usize, shared: bool) -> usize {
        let layers = if shared { 1 } else { self.geometry.layers };
        let rows = 2 * layers * self.geometry.kv_heads * tokens.next_multiple_of(KEY_TILE);
        rows * self.row_bytes()
    }

    /// Bytes in all, and bytes that are free, perhaps not in one piece.
    pub(crate) fn room(&self) -> (usize, usize) {
        let free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        (
            self.rows * self.row_bytes(),
            free.total() * self.row_bytes(),
        )
    }

    /// Layers, heads and head size of what it holds.
    pub(crate) fn geometry(&self) -> KvGeometry {
        self.geometry
    }

    fn row_bytes(&self) -> usize {
        self.geometry.head_dim * GpuType::Bf16.bytes()
    }
}

impl KvLease {
    /// The arena it is in.
    pub(crate) fn arena(&self) -> &Arc<KvArena> {
        &self.arena
    }

    /// Tokens it has room for.
    pub(crate) fn capacity(&self) -> usize {
        self.capacity
    }

    /// Its first `tokens` tokens, as attention reads them.
    pub(crate) fn run(&self, tokens: usize) -> KvRun {
        KvRun {
            at: self.place(),
            tokens,
        }
    }

    /// Where it is.
    pub(crate) fn place(&self) -> KvSlot {
        // Arena rows were bounded to 31 bits.
        let narrow = |rows: usize| u32::try_from(rows).unwrap_or(u32::MAX);
        let side = self.arena.geometry.kv_heads * self.capacity;
        KvSlot {
            first: narrow(self.rows.start),
            per_head: narrow(self.capacity),
            per_layer: if self.layers == 1 {
                0
            } else {
                narrow(2 * side)
            },
            to_value: narrow(side),
        }
    }

    /// The run as `[layers * 2 * kv_heads, capacity, head_dim]`.
    pub(crate) fn tensor(&self) -> Result<GpuTensor, ModelError> {
        let sides = 2 * self.layers * self.arena.geometry.kv_heads;
        let dims = [sides, self.capacity, self.arena.geometry.head_dim];
        let offset = self.rows.start * self.arena.row_bytes();
        let buffer = &self.arena.buffer;
        Ok(GpuTensor::view(buffer, offset, &dims, GpuType::Bf16)?)
    }
}

impl Drop for KvLease {
    fn drop(&mut self) {
        let free = &self.arena.free;
        let mut free = free.lock().unwrap_or_else(PoisonError::into_inner);
        free.give(self.rows.start, self.rows.len());
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn runs_never_overlap_and_all_room_comes_back(
            steps in prop::collection::vec((1_usize..40, any::<bool>(), any::<prop::sample::Index>()), 1..80)
        ) {
            let mut free = FreeRuns::new(128);
            let mut held: Vec<Range<usize>> = Vec::new();
            for (rows, give, which) in steps {
                if give && !held.is_empty() {
                    let run = held.swap_remove(which.index(held.len()));
                    free.give(run.start, run.len());
                } else if let Some(start) = free.take(rows) {
                    let run = start..start + rows;
                    prop_assert!(run.end <= 128);
                    prop_assert!(held.iter().all(|h| h.end <= run.start || run.end <= h.start));
                    held.push(run);
                }
                let taken: usize = held.iter().map(ExactSizeIterator::len).sum();
                prop_assert_eq!(free.total() + taken, 128);
            }
            for run in held {
                free.give(run.start, run.len());
            }
            prop_assert_eq!(free.0, BTreeMap::from([(0, 128)]));
        }
    }
}
