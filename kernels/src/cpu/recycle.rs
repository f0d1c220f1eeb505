//! Reuse of large `f32` buffers between operations.
//!
//! A denoise step allocates the same few sizes again and again. Fresh pages from the operating system
//! cost a fault and a clearing each; a recycled buffer costs neither.

use std::ops::{Deref, DerefMut};
use std::sync::{Mutex, PoisonError};

use super::memory;

/// Buffers shorter than this many elements are left to the allocator.
const MIN_ELEMENTS: usize = 1 << 12;
/// At most this many buffers are kept.
const MAX_BUFFERS: usize = 48;
/// At most this many bytes are kept in all.
const MAX_BYTES: usize = 256 << 20;

static SHELF: Mutex<Vec<Vec<f32>>> = Mutex::new(Vec::new());

/// An `f32` buffer that goes back to the shelf when dropped.
pub(crate) struct Recycled {
    data: Vec<f32>,
    /// Bytes that [`memory`] counts for it.
    counted: usize,
}

impl Recycled {
    /// A buffer of `len` elements with unspecified (but initialised) contents: the caller overwrites
    /// every element. Unwinds with [`memory::OutOfMemory`] where there is no memory.
    pub(crate) fn stale(len: usize) -> Self {
        if len < MIN_ELEMENTS {
            return Self::from(vec![0.0; len]);
        }
        let counted = len.saturating_mul(size_of::<f32>());
        memory::take(counted);
        // From here on the count is given back, whatever happens.
        let mut buffer = Self {
            data: Vec::new(),
            counted,
        };
        let found = {
            let mut shelf = SHELF.lock().unwrap_or_else(PoisonError::into_inner);
            // Best fit, and never a buffer more than twice as large as needed.
            let best = shelf
                .iter()
                .enumerate()
                .filter(|(_, b)| b.capacity() >= len && b.capacity() / 2 <= len)
                .min_by_key(|(_, b)| b.capacity())
                .map(|(i, _)| i);
            best.map(|i| shelf.swap_remove(i))
        };
        buffer.data = match found {
            Some(mut data) => {
                data.resize(len, 0.0);
                data
            }
            None => fresh(len),
        };
        buffer
    }
}

/// Zeros from the system. What is kept for reuse goes back to it before anything is refused.
fn fresh(len: usize) -> Vec<f32> {
    // A trial first: `vec!` takes pages that are zero already, but ends the process where there are none.
    let gives = || {
        let mut trial: Vec<f32> = Vec::new();
        let given = trial.try_reserve_exact(len).is_ok();
        std::hint::black_box(&trial);
        given
    };
    if !gives() {
        SHELF.lock().unwrap_or_else(PoisonError::into_inner).clear();
        if !gives() {
            memory::refuse(len.saturating_mul(size_of::<f32>()), 0);
        }
    }
    vec![0.0; len]
}

impl From<Vec<f32>> for Recycled {
    fn from(data: Vec<f32>) -> Self {
        Self { data, counted: 0 }
    }
}

impl Deref for Recycled {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        &self.data
    }
}

impl DerefMut for Recycled {
    fn deref_mut(&mut self) -> &mut [f32] {
        &mut self.data
    }
}

impl Drop for Recycled {
    fn drop(&mut self) {
        memory::give_back(self.counted);
        let len = self.data.len();
        if len < MIN_ELEMENTS || len * size_of::<f32>() > MAX_BYTES / 4 {
            return;
        }
        let buffer = std::mem::take(&mut self.data);
        let mut shelf = SHELF.lock().unwrap_or_else(PoisonError::into_inner);
        let held: usize = shelf.iter().map(|b| b.capacity() * size_of::<f32>()).sum();
        if shelf.len() < MAX_BUFFERS && held + buffer.capacity() * size_of::<f32>() <= MAX_BYTES {
            shelf.push(buffer);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_system_does_not_have_is_an_answer_and_nothing_stays_counted() {
        // More than any address space.
        let elements = isize::MAX as usize / size_of::<f32>() / 2;
        let lack = memory::guarded(|| Recycled::stale(elements).len()).unwrap_err();
        assert_eq!((lack.needed, lack.free), (elements * size_of::<f32>(), 0));
        assert!(memory::live_bytes() < lack.needed);
        let held = memory::guarded(|| Recycled::stale(2 * MIN_ELEMENTS).len());
        assert_eq!(held, Ok(2 * MIN_ELEMENTS));
    }

    #[test]
    fn other_panics_are_not_taken_for_missing_memory() {
        let panic = std::panic::catch_unwind(|| memory::guarded(|| panic!("a defect")));
        assert!(panic.is_err());
    }
}
