//! Memory of results and scratch, and what becomes of an operation that gets none.
//!
//! Where the system, or a [`limit`], gives no more, an operation unwinds to the nearest [`guarded`], which answers
//! [`OutOfMemory`]: a pass that is too large fails and the process lives on. Buffers below a few kilobytes and those
//! of weights are not counted.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};

static LIVE: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);
static LIMIT: AtomicUsize = AtomicUsize::new(usize::MAX);

/// An operation got no memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("memory: {needed} bytes are needed, {free} are free")]
pub struct OutOfMemory {
    /// Bytes of the buffer that was refused.
    pub needed: usize,
    /// Bytes that were left below the limit; 0 where the system refused.
    pub free: usize,
}

/// Runs operations, all results of which are lost when memory runs out.
///
/// # Errors
/// [`OutOfMemory`] when it did. Other panics go on.
pub fn guarded<T>(work: impl FnOnce() -> T) -> Result<T, OutOfMemory> {
    // Whoever calls takes nothing of what `work` has half changed: it says so by calling.
    catch_unwind(AssertUnwindSafe(work)).map_err(|panic| match panic.downcast::<OutOfMemory>() {
        Ok(lack) => *lack,
        Err(other) => resume_unwind(other),
    })
}

/// Most bytes in use at once, over all threads; `None`: what the system gives.
pub fn limit(bytes: Option<usize>) {
    LIMIT.store(bytes.unwrap_or(usize::MAX), Ordering::Relaxed);
}

/// Bytes in use now, over all threads.
#[must_use]
pub fn live_bytes() -> usize {
    LIVE.load(Ordering::Relaxed)
}

/// Most bytes in use at once since [`reset_peak`].
#[must_use]
pub fn peak_bytes() -> usize {
    PEAK.load(Ordering::Relaxed)
}

/// Forgets the peak: it becomes what is in use now.
pub fn reset_peak() {
    PEAK.store(live_bytes(), Ordering::Relaxed);
}

/// Counts bytes that an operation is about to use.
pub(crate) fn take(bytes: usize) {
    let live = LIVE.fetch_add(bytes, Ordering::Relaxed) + bytes;
    let limit = LIMIT.load(Ordering::Relaxed);
    if live > limit {
        LIVE.fetch_sub(bytes, Ordering::Relaxed);
        refuse(bytes, limit.saturating_sub(live - bytes));
    }
    PEAK.fetch_max(live, Ordering::Relaxed);
}

/// No longer uses them.
pub(crate) fn give_back(bytes: usize) {
    LIVE.fetch_sub(bytes, Ordering::Relaxed);
}

/// Ends the running operation. No hook of panics is called: this is an answer, not a defect.
pub(crate) fn refuse(needed: usize, free: usize) -> ! {
    resume_unwind(Box::new(OutOfMemory { needed, free }))
}
