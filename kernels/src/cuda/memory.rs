//! Device and pinned host memory.

use std::sync::{Arc, PoisonError};

use cudarc::driver::result;
use cudarc::driver::sys::CUdeviceptr;

use super::device::Gpu;
use super::error::{CudaError, Result};
use crate::error::KernelError;

/// Largest buffer that is kept for the next one of its size class rather than freed: freeing waits for the
/// device, and steps make small tables.
const SMALL_BYTES: usize = 1 << 20;
/// Smallest size class, in bytes.
const LEAST_BYTES: usize = 1 << 10;
/// Most small buffers that are kept.
const KEPT: usize = 1024;

/// Small buffers that nobody uses, by size class. Work on the one compute stream is in order, so what was
/// enqueued on a buffer's last use is over before its next use begins.
#[derive(Debug, Default)]
pub(crate) struct Spare {
    buffers: Vec<(usize, CUdeviceptr)>,
}

impl Spare {
    fn take(&mut self, class: usize) -> Option<CUdeviceptr> {
        let place = self.buffers.iter().position(|(size, _)| *size == class)?;
        Some(self.buffers.swap_remove(place).1)
    }

    fn keep(&mut self, class: usize, address: CUdeviceptr) -> bool {
        let room = self.buffers.len() < KEPT;
        if room {
            self.buffers.push((class, address));
        }
        room
    }

    /// All of them, to be freed.
    pub(crate) fn drain(&mut self) -> impl Iterator<Item = CUdeviceptr> {
        self.buffers.drain(..).map(|(_, address)| address)
    }
}

/// Bytes that a buffer of `bytes` takes: small ones are powers of two.
fn class(bytes: usize) -> usize {
    if bytes > SMALL_BYTES {
        return bytes;
    }
    bytes.max(LEAST_BYTES).next_power_of_two()
}

/// Device memory of its own allocation, so that peers and transports can map it; given back on drop, after the
/// work that was enqueued has run. It must not be used on other streams once dropped.
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
        let size = class(bytes);
        if size <= SMALL_BYTES {
            let mut spare = gpu.spare().lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(address) = spare.take(size) {
                drop(spare);
                return Ok(Self {
                    gpu: gpu.clone(),
                    address,
                    bytes,
                });
            }
        }
        let free = gpu.memory()?.free;
        if size > free {
            let needed = bytes;
            return Err(CudaError::OutOfMemory { what, needed, free });
        }
        gpu.context()?;
        // SAFETY: the context is current; the memory is freed once, on drop or with the GPU.
        let address = unsafe { result::malloc_sync(size) }.map_err(|_| {
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
        let size = class(self.bytes);
        if size <= SMALL_BYTES {
            let spare = self.gpu.spare();
            let mut spare = spare.lock().unwrap_or_else(PoisonError::into_inner);
            if spare.keep(size, self.address) {
                return;
            }
        }
        if self.gpu.context().is_ok() {
            // Freeing waits for the device, so nothing enqueued still uses the memory. A failure can only
            // repeat one that was reported by the call that caused it.
            // SAFETY: allocated by `new` and freed here only.
            let _ = unsafe { result::free_sync(self.address) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_buffers_come_back_by_size_class_and_large_ones_keep_their_size() {
        assert_eq!(class(0), LEAST_BYTES);
        assert_eq!(class(1025), 2048);
        assert_eq!(class(SMALL_BYTES), SMALL_BYTES);
        assert_eq!(class(SMALL_BYTES + 1), SMALL_BYTES + 1);
        let mut spare = Spare::default();
        assert!(spare.keep(2048, 7));
        assert_eq!(spare.take(1024), None);
        assert_eq!(spare.take(2048), Some(7));
        assert_eq!(spare.take(2048), None);
        assert!((0..KEPT).all(|i| spare.keep(1024, i as CUdeviceptr)));
        assert!(!spare.keep(1024, 0));
        assert_eq!(spare.drain().count(), KEPT);
    }
}
