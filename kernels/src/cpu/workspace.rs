//! Scratch memory of operations, counted.
//!
//! Every scratch buffer is taken through [`scratch`], so the peak is measured, not only computed.

use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicUsize, Ordering};

use super::recycle::Recycled;

static LIVE: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

/// A counted scratch buffer of `f32`.
pub(crate) struct Scratch(Recycled);

/// A scratch buffer of `len` elements with unspecified contents.
pub(crate) fn scratch(len: usize) -> Scratch {
    let data = Recycled::stale(len);
    let live = LIVE.fetch_add(len * size_of::<f32>(), Ordering::Relaxed) + len * size_of::<f32>();
    PEAK.fetch_max(live, Ordering::Relaxed);
    Scratch(data)
}

/// Bytes of scratch in use now, over all threads of the process.
#[must_use]
pub fn live_bytes() -> usize {
    LIVE.load(Ordering::Relaxed)
}

/// Largest number of scratch bytes in use at once since [`reset_peak`], over all threads.
#[must_use]
pub fn peak_bytes() -> usize {
    PEAK.load(Ordering::Relaxed)
}

/// Forgets the peak: it becomes what is in use now.
pub fn reset_peak() {
    PEAK.store(LIVE.load(Ordering::Relaxed), Ordering::Relaxed);
}

impl Deref for Scratch {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        &self.0
    }
}

impl DerefMut for Scratch {
    fn deref_mut(&mut self) -> &mut [f32] {
        &mut self.0
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        LIVE.fetch_sub(self.0.len() * size_of::<f32>(), Ordering::Relaxed);
    }
}
