//! Host memory to the device through a bounded ring of pinned buffers: while some are filled, others travel.

use std::collections::VecDeque;
use std::sync::Arc;

use super::device::Gpu;
use super::error::{CudaError, Result, argument};
use super::tensor::GpuTensor;
use super::transfer::{CopyStream, Mark, PinnedBuffer};
use crate::error::KernelError;

const OP: &str = "upload";

/// How many buffers there are, and how large.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UploadRing {
    /// Buffers; at least two, so that one can travel while another is filled.
    pub buffers: usize,
    /// Bytes of each.
    pub bytes: usize,
}

impl Default for UploadRing {
    /// 128 MiB in all. Larger buffers fall out of the host's caches between being filled and being copied;
    /// smaller ones are too short for the full rate of the link. Twelve threads fill enough of them.
    fn default() -> Self {
        Self {
            buffers: 64,
            bytes: 2 << 20,
        }
    }
}

/// Sends pinned buffers to the device on a stream of its own and gives them back when they have arrived.
#[derive(Debug)]
pub struct Uploader {
    copies: CopyStream,
    free: Vec<PinnedBuffer>,
    /// Under way, oldest first.
    flying: VecDeque<(PinnedBuffer, Mark)>,
    /// Most that may be under way.
    most: usize,
}

impl Uploader {
    /// A ring of pinned buffers for `gpu`.
    ///
    /// # Errors
    /// `Argument` for fewer than two buffers; what the driver says: the host has too little memory, or may
    /// not lock it.
    pub fn new(gpu: &Arc<Gpu>, ring: &UploadRing) -> Result<Self> {
        if ring.buffers < 2 {
            return Err(argument(OP, "buffers", "must be two or more"));
        }
        let buffer = |_| PinnedBuffer::new(gpu, ring.bytes);
        Ok(Self {
            copies: CopyStream::new(gpu)?,
            free: (0..ring.buffers).map(buffer).collect::<Result<_>>()?,
            flying: VecDeque::new(),
            // Two keep the link busy; more only keeps them from being filled.
            most: (ring.buffers / 4).max(1),
        })
    }

    /// All buffers that are here, waiting for those under way.
    ///
    /// # Errors
    /// A copy that failed, or what the driver says.
    pub fn buffers(&mut self) -> Result<Vec<PinnedBuffer>> {
        self.finish()?;
        Ok(std::mem::take(&mut self.free))
    }

    /// Takes a buffer back that was handed out and not sent.
    pub fn keep(&mut self, buffer: PinnedBuffer) {
        self.free.push(buffer);
    }

    /// Sends the first `bytes` bytes of `from` to `to`, from its byte `offset` on, after everything sent
    /// before. Returns the oldest buffer under way, once it has arrived, when there are enough of them.
    ///
    /// The caller orders it against the compute stream, see [`Uploader::arrive`] and [`Uploader::hold`], and
    /// keeps the tensor until then.
    ///
    /// # Errors
    /// `Argument` when it does not fit, a copy that failed, or what the driver says.
    pub fn send(
        &mut self,
        to: &GpuTensor,
        offset: usize,
        from: PinnedBuffer,
        bytes: usize,
    ) -> Result<Option<PinnedBuffer>> {
        let end = offset.checked_add(bytes).filter(|end| *end <= to.bytes());
        let (Some(_), true) = (end, bytes <= from.bytes()) else {
            return Err(CudaError::Argument(KernelError::Bounds {
                op: OP,
                what: "offset + bytes",
                value: offset.saturating_add(bytes),
                limit: to.bytes().min(offset.saturating_add(from.bytes())),
            }));
        };
        let target = to.address() + offset as u64;
        self.copies.upload_to(target, &from.as_slice()[..bytes])?;
        self.flying.push_back((from, self.copies.mark()?));
        if self.flying.len() <= self.most {
            return Ok(None);
        }
        self.oldest()
    }

    /// Lets work that is enqueued on the compute stream from now on see everything sent so far.
    ///
    /// # Errors
    /// What the driver says.
    pub fn arrive(&self, gpu: &Gpu) -> Result<()> {
        gpu.wait_for(&self.copies.mark()?)
    }

    /// Lets what is sent from now on wait for everything that is enqueued on the compute stream so far, which
    /// may still read what it overwrites.
    ///
    /// # Errors
    /// What the driver says.
    pub fn hold(&self, gpu: &Gpu) -> Result<()> {
        self.copies.wait_for(&gpu.mark()?)
    }

    /// Waits until everything sent has arrived.
    ///
    /// # Errors
    /// A copy that failed, or what the driver says.
    pub fn finish(&mut self) -> Result<()> {
        while let Some(buffer) = self.oldest()? {
            self.free.push(buffer);
        }
        Ok(())
    }

    fn oldest(&mut self) -> Result<Option<PinnedBuffer>> {
        let Some((buffer, mark)) = self.flying.pop_front() else {
            return Ok(None);
        };
        mark.wait()?;
        Ok(Some(buffer))
    }
}

impl AsMut<[u8]> for PinnedBuffer {
    fn as_mut(&mut self) -> &mut [u8] {
        self.as_mut_slice()
    }
}
