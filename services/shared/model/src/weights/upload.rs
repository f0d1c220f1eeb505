//! Stored tensors straight to the device: read, converted and copied at the same time.

use kernels::cuda::{GpuTensor, GpuType, PinnedBuffer, Uploader};

use super::parts::width;
use super::{Checkpoint, Chunk, ChunkSink, Part, Streamed};
use crate::error::ModelError;

/// What is done once a tensor is on its way, see [`Checkpoint::upload`].
pub type Arrived<'a> = dyn FnMut(usize, &Uploader) -> Result<(), ModelError> + 'a;

struct Copies<'a> {
    list: &'a [(Part, GpuTensor)],
    uploader: &'a mut Uploader,
    arrived: &'a mut Arrived<'a>,
}

impl ChunkSink for Copies<'_> {
    type Slot = PinnedBuffer;

    fn slots(&mut self) -> Result<Vec<PinnedBuffer>, ModelError> {
        Ok(self.uploader.buffers()?)
    }

    fn take(
        &mut self,
        chunk: &Chunk,
        slot: PinnedBuffer,
    ) -> Result<Option<PinnedBuffer>, ModelError> {
        let target = &self.list[chunk.part].1;
        let back = self
            .uploader
            .send(target, chunk.offset, slot, chunk.bytes)?;
        if chunk.last {
            self.uploader.arrive(target.gpu())?;
            (self.arrived)(chunk.part, self.uploader)?;
        }
        Ok(back)
    }

    fn keep(&mut self, slot: PinnedBuffer) {
        self.uploader.keep(slot);
    }
}

impl Checkpoint {
    /// Fills device tensors with parts of stored ones, in order, with `readers` threads. `arrived` is called
    /// with each position of the list when what it enqueues on the compute stream will see that tensor; to
    /// reuse the memory for a later one it ends with [`Uploader::hold`].
    ///
    /// # Errors
    /// Before anything is read: a tensor of another size or type than its part; those of
    /// [`Checkpoint::stream`]; what the driver says. The uploader may have lost buffers then.
    pub fn upload<'a>(
        &self,
        list: &'a [(Part, GpuTensor)],
        readers: usize,
        uploader: &'a mut Uploader,
        arrived: &'a mut Arrived<'a>,
    ) -> Result<Streamed, ModelError> {
        for (part, to) in list {
            let float = matches!(to.dtype(), GpuType::F32 | GpuType::Bf16);
            let alike = float && to.dtype().bytes() == width(part.dtype);
            if !alike || to.numel() != part.numel() {
                let expected = format!("{} values of {:?}", part.numel(), part.dtype);
                return Err(ModelError::Internal(format!(
                    "tensor `{}`: {:?} of {:?} on the device for {expected}",
                    part.name,
                    to.shape(),
                    to.dtype()
                )));
            }
        }
        let parts: Vec<Part> = list.iter().map(|(part, _)| part.clone()).collect();
        let mut copies = Copies {
            list,
            uploader,
            arrived,
        };
        let streamed = self.stream(&parts, readers, &mut copies)?;
        copies.uploader.finish()?;
        Ok(streamed)
    }
}
