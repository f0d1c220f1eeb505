//! Reuse of large `f32` buffers between operations.
//!
//! A denoise step allocates the same few sizes again and again. Fresh pages from the operating system
//! cost a fault and a clearing each; a recycled buffer costs neither.

use std::ops::{Deref, DerefMut};
use std::sync::{Mutex, PoisonError};

/// Buffers shorter than this many elements are left to the allocator.
const MIN_ELEMENTS: usize = 1 << 12;
/// At most this many buffers are kept.
const MAX_BUFFERS: usize = 48;
/// At most this many bytes are kept in all.
const MAX_BYTES: usize = 256 << 20;

static SHELF: Mutex<Vec<Vec<f32>>> = Mutex::new(Vec::new());

/// An `f32` buffer that goes back to the shelf when dropped.
pub(crate) struct Recycled(Vec<f32>);

impl Recycled {
    /// A buffer of `len` elements with unspecified (but initialised) contents: the caller overwrites
    /// every element.
    pub(crate) fn stale(len: usize) -> Self {
        if len < MIN_ELEMENTS {
            return Self(vec![0.0; len]);
        }
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
        match found {
            Some(mut buffer) => {
                buffer.resize(len, 0.0);
                Self(buffer)
            }
            None => Self(vec![0.0; len]),
        }
    }
}

impl From<Vec<f32>> for Recycled {
    fn from(data: Vec<f32>) -> Self {
        Self(data)
    }
}

impl Deref for Recycled {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        &self.0
    }
}

impl DerefMut for Recycled {
    fn deref_mut(&mut self) -> &mut [f32] {
        &mut self.0
    }
}

impl Drop for Recycled {
    fn drop(&mut self) {
        if self.0.len() < MIN_ELEMENTS || self.0.len() * size_of::<f32>() > MAX_BYTES / 4 {
            return;
        }
        let buffer = std::mem::take(&mut self.0);
        let mut shelf = SHELF.lock().unwrap_or_else(PoisonError::into_inner);
        let held: usize = shelf.iter().map(|b| b.capacity() * size_of::<f32>()).sum();
        if shelf.len() < MAX_BUFFERS && held + buffer.capacity() * size_of::<f32>() <= MAX_BYTES {
            shelf.push(buffer);
        }
    }
}
