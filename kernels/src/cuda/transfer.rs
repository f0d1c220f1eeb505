//! Copies beside the compute stream: pinned host memory, a copy stream, and marks that order the two.

use std::sync::Arc;

use cudarc::driver::sys::{self, CUdeviceptr, CUevent_flags_enum as Flags};
use cudarc::driver::{CudaEvent, CudaStream, result};

use super::device::Gpu;
use super::error::{CudaError, Result};
use super::memory::DeviceBuffer;
use crate::error::KernelError;

/// Page-locked host memory, which the device copies from at the full rate of its link.
pub struct PinnedBuffer {
    gpu: Arc<Gpu>,
    data: *mut u8,
    bytes: usize,
}

// SAFETY: plain memory; `&self` only reads it, and writing needs `&mut self`.
unsafe impl Send for PinnedBuffer {}
// SAFETY: as above.
unsafe impl Sync for PinnedBuffer {}

impl std::fmt::Debug for PinnedBuffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PinnedBuffer")
            .field("bytes", &self.bytes)
            .finish_non_exhaustive()
    }
}

impl PinnedBuffer {
    /// Zeroed memory of `bytes` bytes.
    ///
    /// # Errors
    /// What the driver says: the host has too little memory, or may not lock it.
    pub fn new(gpu: &Arc<Gpu>, bytes: usize) -> Result<Self> {
        gpu.context()?;
        let flags = sys::CU_MEMHOSTALLOC_PORTABLE;
        // SAFETY: the context is current; the memory is freed once, on drop.
        let data = unsafe { result::malloc_host(bytes.max(1), flags) }?.cast::<u8>();
        // SAFETY: the allocation has `bytes` bytes.
        unsafe { std::ptr::write_bytes(data, 0, bytes) };
        Ok(Self {
            gpu: gpu.clone(),
            data,
            bytes,
        })
    }

    /// Its size.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The bytes.
    #[must_use]
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: the allocation has `bytes` initialised bytes, and nobody writes it while shared.
        unsafe { std::slice::from_raw_parts(self.data, self.bytes) }
    }

    /// The bytes, to be filled before the buffer is shared.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: the allocation has `bytes` initialised bytes; copies that read it hold it shared.
        unsafe { std::slice::from_raw_parts_mut(self.data, self.bytes) }
    }
}

impl Drop for PinnedBuffer {
    fn drop(&mut self) {
        if self.gpu.context().is_ok_and(|c| c.synchronize().is_ok()) {
            // SAFETY: allocated by `new`, freed here only, and no copy is under way any more. A failure has
            // nowhere to go.
            let _ = unsafe { result::free_host(self.data.cast()) };
        }
    }
}

/// A place in a stream's work; also a time.
#[derive(Debug)]
pub struct Mark(CudaEvent);

impl Mark {
    /// Marks this place in a stream of the current context.
    pub(crate) fn record(stream: &CudaStream) -> Result<Self> {
        let flags = Some(Flags::CU_EVENT_DEFAULT);
        Ok(Self(stream.record_event(flags)?))
    }

    /// Lets a stream of the current context go on only after this mark.
    pub(crate) fn hold(&self, stream: &CudaStream) -> Result<()> {
        Ok(stream.wait(&self.0)?)
    }

    /// Milliseconds from `earlier` to this mark, waiting for both.
    ///
    /// # Errors
    /// What the driver says.
    pub fn milliseconds_since(&self, earlier: &Self) -> Result<f32> {
        Ok(earlier.0.elapsed_ms(&self.0)?)
    }

    /// Waits until the work before it has run.
    ///
    /// # Errors
    /// A kernel that failed before, or what the driver says.
    pub fn wait(&self) -> Result<()> {
        Ok(self.0.synchronize()?)
    }
}

impl Gpu {
    /// Marks this place in the compute stream.
    ///
    /// # Errors
    /// What the driver says.
    pub fn mark(&self) -> Result<Mark> {
        self.context()?;
        let flags = Some(Flags::CU_EVENT_DEFAULT);
        Ok(Mark(self.stream().record_event(flags)?))
    }

    /// Lets the compute stream go on only after `mark`.
    ///
    /// # Errors
    /// What the driver says.
    pub fn wait_for(&self, mark: &Mark) -> Result<()> {
        self.context()?;
        Ok(self.stream().wait(&mark.0)?)
    }
}

/// A second stream for copies that run while kernels do.
#[derive(Debug)]
pub struct CopyStream {
    gpu: Arc<Gpu>,
    stream: Arc<CudaStream>,
}

impl CopyStream {
    /// A stream of `gpu`.
    ///
    /// # Errors
    /// What the driver says.
    pub fn new(gpu: &Arc<Gpu>) -> Result<Self> {
        let stream = gpu.context()?.new_stream()?;
        Ok(Self {
            gpu: gpu.clone(),
            stream,
        })
    }

    /// Marks this place in the copies.
    ///
    /// # Errors
    /// What the driver says.
    pub fn mark(&self) -> Result<Mark> {
        self.gpu.context()?;
        let flags = Some(Flags::CU_EVENT_DEFAULT);
        Ok(Mark(self.stream.record_event(flags)?))
    }

    /// Lets copies go on only after `mark`.
    ///
    /// # Errors
    /// What the driver says.
    pub fn wait_for(&self, mark: &Mark) -> Result<()> {
        self.gpu.context()?;
        Ok(self.stream.wait(&mark.0)?)
    }

    /// Copies all of `from` to the start of `to`. The caller orders it against the compute stream by marks
    /// and keeps both until a later mark has passed.
    ///
    /// # Errors
    /// `Argument` when it does not fit, or what the driver says.
    pub fn upload(&self, to: &DeviceBuffer, from: &PinnedBuffer) -> Result<()> {
        if from.bytes() > to.bytes() {
            return Err(CudaError::Argument(KernelError::Bounds {
                op: "upload",
                what: "from",
                value: from.bytes(),
                limit: to.bytes(),
            }));
        }
        self.upload_to(to.address(), from.as_slice())
    }

    /// Copies locked memory to a place on the device; both must stay until a later mark has passed.
    pub(crate) fn upload_to(&self, to: CUdeviceptr, from: &[u8]) -> Result<()> {
        self.gpu.context()?;
        let stream = self.stream.cu_stream();
        // SAFETY: the source is locked memory that waits for the device before it is freed; so does the target,
        // which callers have found to be large enough.
        Ok(unsafe { result::memcpy_htod_async(to, from, stream) }?)
    }
}
