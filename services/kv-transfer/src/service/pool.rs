use std::collections::BTreeMap;

use fabric::SharedMemory;

use crate::TransferError;

/// Where the system says how much memory is left.
const MEMORY_INFO: &str = "/proc/meminfo";

/// Memory for a pool. One that the machine has no room for is refused: finding out by filling it would
/// take everybody's memory first.
pub(super) fn allocate(bytes: u64) -> Result<SharedMemory, TransferError> {
    let refused = |message: String| TransferError::invalid("pool_bytes", message);
    let len = usize::try_from(bytes).map_err(|_| refused("does not fit this machine".into()))?;
    let info = std::fs::read_to_string(MEMORY_INFO).unwrap_or_default();
    if let Some(room) = available(&info).filter(|&room| room < bytes) {
        let message = format!("asks for {bytes} bytes, the machine has room for {room}");
        return Err(refused(message));
    }
    SharedMemory::create(len)
        .map_err(|error| refused(format!("the system cannot give {bytes} bytes: {error}")))
}

/// Bytes that are available, where the system tells.
fn available(info: &str) -> Option<u64> {
    let line = info.lines().find_map(|l| l.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

/// First-fit allocator over `[0, capacity)` in units of a page.
#[derive(Debug)]
pub(super) struct FreeList {
    page: u64,
    capacity: u64,
    /// Length of each free range by its start; neighbours are always merged.
    free: BTreeMap<u64, u64>,
}

/// An allocated range.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Extent {
    pub(super) start: u64,
    pub(super) len: u64,
}

impl Extent {
    fn end(self) -> u64 {
        self.start + self.len
    }
}

impl FreeList {
    /// An empty pool; what is over of the last page stays unused.
    pub(super) fn new(bytes: u64, page: u64) -> Self {
        let capacity = bytes / page * page;
        let free = (capacity > 0)
            .then_some((0, capacity))
            .into_iter()
            .collect();
        Self {
            page,
            capacity,
            free,
        }
    }

    pub(super) fn capacity(&self) -> u64 {
        self.capacity
    }

    pub(super) fn used(&self) -> u64 {
        self.capacity - self.free.values().sum::<u64>()
    }

    /// Takes the first range that holds `bytes` bytes. `None` when there is none.
    pub(super) fn take(&mut self, bytes: u64) -> Option<Extent> {
        let len = bytes.checked_next_multiple_of(self.page)?;
        let (&start, &room) = self.free.iter().find(|&(_, &room)| room >= len)?;
        self.free.remove(&start);
        if room > len {
            self.free.insert(start + len, room - len);
        }
        Some(Extent { start, len })
    }

    /// Gives a range back that [`Self::take`] gave out.
    pub(super) fn give(&mut self, extent: Extent) {
        let (mut start, mut end) = (extent.start, extent.end());
        if let Some((&before, &len)) = self.free.range(..start).next_back()
            && before + len == start
        {
            self.free.remove(&before);
            start = before;
        }
        if let Some(len) = self.free.remove(&end) {
            end += len;
        }
        self.free.insert(start, end - start);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use base::Fault as _;
    use proptest::prelude::*;

    #[test]
    fn a_pool_larger_than_the_machine_is_refused_before_it_is_filled() {
        let error = allocate(1 << 50).unwrap_err();
        assert_eq!(error.field(), Some("pool_bytes"), "{error}");
        assert_eq!(available("x\nMemAvailable:   12 kB\n"), Some(12 << 10));
        allocate(1 << 20).unwrap();
    }

    proptest! {
        /// Live ranges never overlap nor leave the pool, and a pool given back is whole again.
        #[test]
        fn extents_never_overlap_and_the_pool_heals(
            page in prop_oneof![Just(4096u64), Just(8192)],
            steps in prop::collection::vec((any::<bool>(), 1u64..40_000, any::<prop::sample::Index>()), 1..200),
        ) {
            let mut pool = FreeList::new(64 * page + 17, page);
            let mut live: Vec<Extent> = vec![];
            for (take, bytes, pick) in steps {
                if take {
                    if let Some(extent) = pool.take(bytes) {
                        prop_assert!(extent.len >= bytes && extent.end() <= pool.capacity());
                        prop_assert!(extent.start % page == 0 && extent.len % page == 0);
                        prop_assert!(live.iter().all(|l| l.end() <= extent.start || extent.end() <= l.start));
                        live.push(extent);
                    }
                } else if !live.is_empty() {
                    pool.give(live.swap_remove(pick.index(live.len())));
                }
                prop_assert_eq!(pool.used(), live.iter().map(|l| l.len).sum::<u64>());
            }
            for extent in live.drain(..) {
                pool.give(extent);
            }
            prop_assert_eq!(pool.used(), 0);
            let whole = Extent { start: 0, len: pool.capacity() };
            prop_assert_eq!(pool.take(pool.capacity()), Some(whole));
        }
    }
}
