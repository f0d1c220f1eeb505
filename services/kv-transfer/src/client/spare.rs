//! Memory for what is read over the wire, used again: pages that the system must give and clear first cost as much
//! as the bytes that are to go there.
use std::sync::{Arc, Mutex, PoisonError};

use super::read::Store;
use crate::{TransferError, limits};

/// Buffers that nobody uses now. Clones share them.
#[derive(Debug, Clone, Default)]
pub(super) struct Spares(Arc<Mutex<Vec<Vec<u8>>>>);

impl Spares {
    /// Memory for `len` bytes, whatever is in it.
    ///
    /// # Errors
    /// [`TransferError::PoolFull`] when the system has not enough.
    pub(super) fn room(&self, len: usize) -> Result<Vec<u8>, TransferError> {
        let mut spares = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let fits = |spare: &Vec<u8>| spare.capacity() >= len && spare.capacity() / 2 <= len;
        if let Some(at) = spares.iter().position(fits) {
            let mut spare = spares.swap_remove(at);
            spare.resize(len, 0);
            return Ok(spare);
        }
        drop(spares);
        super::fetch::room(len)
    }

    /// Takes memory for later; what is too much goes back to the system.
    pub(super) fn give(&self, buffer: Vec<u8>) {
        let mut spares = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let held: usize = spares.iter().map(Vec::capacity).sum();
        if held + buffer.capacity() <= limits::MAX_SPARE_BYTES {
            spares.push(buffer);
        }
    }
}

/// Stores that were read; their memory is used again when they are dropped.
#[derive(Debug)]
pub(super) struct Stores {
    pub(super) stores: Vec<Store>,
    pub(super) spares: Spares,
}

impl Drop for Stores {
    fn drop(&mut self) {
        for store in self.stores.drain(..) {
            self.spares.give(store.bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_used_again_within_its_bound() {
        let spares = Spares::default();
        let stores = |bytes: Vec<u8>| {
            let store = Store {
                entries: 0..1,
                bytes,
                repaired: 0,
                checked: std::time::Duration::ZERO,
                transport: String::new(),
            };
            drop(Stores {
                stores: vec![store],
                spares: spares.clone(),
            });
        };
        let first = spares.room(10_000).unwrap();
        let place = first.as_ptr();
        stores(first);
        let small = spares.room(100).unwrap();
        assert_ne!(small.as_ptr(), place, "that one is far too large");
        let again = spares.room(9_000).unwrap();
        assert_eq!((again.as_ptr(), again.len()), (place, 9_000));
        stores(Vec::with_capacity(limits::MAX_SPARE_BYTES + 1));
        assert!(spares.0.lock().unwrap().is_empty());
    }
}
