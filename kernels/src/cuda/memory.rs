//! Device and pinned host memory.

use std::sync::Arc;

use cudarc::driver::result;
use cudarc::driver::sys::CUdeviceptr;

use super::device::Gpu;
use super::error::{CudaError, Result};
use crate::error::KernelError;

/// Device memory of its own allocation, so that peers and transports can map it; freed on drop, after the
/// work that was enqueued has run.
pub struct DeviceBuffer {
    gpu: Arc<Gpu>,
    address: CUdeviceptr,
    bytes: usize,
}

impl std::fmt::Debug for DeviceBuffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DeviceBuffer")
            .field("bytes", &self.bytes)
            .finish_non_exhaustive()
    }
}

impl DeviceBuffer {
    /// Memory of `bytes` bytes with unknown contents; `what` names it in the error.
    ///
    /// # Errors
    /// `OutOfMemory`, saying how much is missing; or what the driver says.
    pub fn new(gpu: &Arc<Gpu>, bytes: usize, what: &'static str) -> Result<Self> {
        let free = gpu.memory()?.free;
        if bytes > free {
            let needed = bytes;
            return Err(CudaError::OutOfMemory { what, needed, free });
        }
        gpu.context()?;
        // The driver refuses empty allocations.
        // SAFETY: the context is current; the memory is freed once, on drop.
        let address = unsafe { result::malloc_sync(bytes.max(1)) }.map_err(|_| {
            let needed = bytes;
            CudaError::OutOfMemory { what, needed, free }
        })?;
        Ok(Self {
            gpu: gpu.clone(),
            address,
            bytes,
        })
    }

    /// Memory of `bytes` zero bytes.
    ///
    /// # Errors
    /// Those of [`DeviceBuffer::new`].
    pub fn zeroed(gpu: &Arc<Gpu>, bytes: usize, what: &'static str) -> Result<Self> {
        let buffer = Self::new(gpu, bytes, what)?;
        buffer.fill(0, 0, bytes)?;
        Ok(buffer)
    }

    /// The GPU that has it.
    #[must_use]
    pub fn gpu(&self) -> &Arc<Gpu> {
        &self.gpu
    }

    /// Its size.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Where it is on the device.
    pub(crate) fn address(&self) -> CUdeviceptr {
        self.address
    }

    fn range(&self, op: &'static str, start: usize, len: usize) -> Result<CUdeviceptr> {
        let end = start.checked_add(len).filter(|end| *end <= self.bytes);
        if end.is_none() {
            return Err(CudaError::Argument(KernelError::Bounds {
                op,
                what: "start + len",
                value: start.saturating_add(len),
                limit: self.bytes,
            }));
        }
        self.gpu.context()?;
        Ok(self.address + start as CUdeviceptr)
    }

    /// Sets `len` bytes from `start` to `value`, in stream order.
    ///
    /// # Errors
    /// `Argument` for a range outside the buffer, or what the driver says.
    pub fn fill(&self, value: u8, start: usize, len: usize) -> Result<()> {
        let at = self.range("fill", start, len)?;
        let stream = self.gpu.stream().cu_stream();
        // SAFETY: the range lies within an allocation that lives until after the work of the stream.
        Ok(unsafe { result::memset_d8_async(at, value, len, stream) }?)
    }

    /// Copies host bytes to `start`, in stream order; `data` may be reused on return.
    ///
    /// # Errors
    /// Those of [`DeviceBuffer::fill`].
    pub fn write(&self, start: usize, data: &[u8]) -> Result<()> {
        let at = self.range("write", start, data.len())?;
        let stream = self.gpu.stream().cu_stream();
        // SAFETY: the range lies within the allocation; pageable host memory is staged before the return.
        unsafe { result::memcpy_htod_async(at, data, stream) }?;
        Ok(())
    }

    /// Copies bytes from `start` to the host, after everything enqueued before.
    ///
    /// # Errors
    /// Those of [`DeviceBuffer::fill`], and a kernel that failed before.
    pub fn read(&self, start: usize, data: &mut [u8]) -> Result<()> {
        let at = self.range("read", start, data.len())?;
        let stream = self.gpu.stream().cu_stream();
        // SAFETY: the range lies within the allocation, and the stream is waited for before `data` is used.
        unsafe { result::memcpy_dtoh_async(data, at, stream) }?;
        self.gpu.synchronize()
    }

    /// Copies `len` bytes of `from` at `source` to `start`, in stream order; both on one GPU.
    ///
    /// # Errors
    /// Those of [`DeviceBuffer::fill`].
    pub fn copy_from(&self, start: usize, from: &Self, source: usize, len: usize) -> Result<()> {
        let to = self.range("copy_from", start, len)?;
        let from = from.range("copy_from", source, len)?;
        let stream = self.gpu.stream().cu_stream();
        // SAFETY: both ranges lie within allocations that live until after the work of the stream.
        Ok(unsafe { result::memcpy_dtod_async(to, from, len, stream) }?)
    }
}

impl Drop for DeviceBuffer {
    fn drop(&mut self) {
        if self.gpu.context().is_ok() {
            // Freeing waits for the device, so nothing enqueued still uses the memory. A failure can only
            // repeat one that was reported by the call that caused it.
            // SAFETY: allocated by `new` and freed here only.
            let _ = unsafe { result::free_sync(self.address) };
        }
    }
}
