//! Memory for the steps of one module, used again by the next.

use std::sync::Arc;

use kernels::cuda::{DeviceBuffer, Gpu, GpuTensor, GpuType};

use crate::error::ModelError;

/// Alignment of every part, in bytes.
pub(crate) const ALIGNMENT: usize = 1024;

/// One buffer that grows to the largest need so far.
#[derive(Debug)]
pub(crate) struct Scratch {
    gpu: Arc<Gpu>,
    what: &'static str,
    buffer: Option<Arc<DeviceBuffer>>,
}

/// Parts handed out one after the other.
#[derive(Debug)]
pub(crate) struct Parts {
    buffer: Arc<DeviceBuffer>,
    at: usize,
}

/// Bytes of a part of so many elements, with its alignment.
pub(crate) fn part_bytes(elements: usize, dtype: GpuType) -> usize {
    (elements * dtype.bytes()).next_multiple_of(ALIGNMENT)
}

impl Scratch {
    pub(crate) fn new(gpu: &Arc<Gpu>, what: &'static str) -> Self {
        Self {
            gpu: gpu.clone(),
            what,
            buffer: None,
        }
    }

    /// At least `bytes` bytes with unknown contents; what was handed out before is gone.
    pub(crate) fn parts(&mut self, bytes: usize) -> Result<Parts, ModelError> {
        let large_enough = self.buffer.take().filter(|b| b.bytes() >= bytes);
        let buffer = match large_enough {
            Some(buffer) => buffer,
            None => Arc::new(DeviceBuffer::new(&self.gpu, bytes, self.what)?),
        };
        self.buffer = Some(buffer.clone());
        Ok(Parts::new(buffer))
    }
}

impl Parts {
    /// Parts from the start of `buffer` on.
    pub(crate) fn new(buffer: Arc<DeviceBuffer>) -> Self {
        Self { buffer, at: 0 }
    }

    pub(crate) fn take(&mut self, dims: &[usize], dtype: GpuType) -> Result<GpuTensor, ModelError> {
        let tensor = GpuTensor::view(&self.buffer, self.at, dims, dtype)?;
        self.at += part_bytes(tensor.numel(), dtype);
        Ok(tensor)
    }
}
