//! Where the layers' weights are: all on the device, or some in pinned host memory and copied in turn.
//!
//! Layers that travel share a few slots on the device. While one is computed the copy of a later one runs on
//! a stream of its own, so that a copy is hidden where the layers between two travelling ones compute for at
//! least as long. Travelling layers are spread evenly for that reason.

use std::sync::Arc;

use kernels::cuda::{CopyStream, DeviceBuffer, Gpu, Mark, PinnedBuffer};

use super::layout::{LayerDims, LayerLayout, WeightType};
use super::weights::{LayerBlock, Loader};
use crate::error::ModelError;

/// Slots of travelling layers: one is computed while the other is filled.
pub(crate) const SLOTS: usize = 2;

/// A place on the device that travelling layers take in turn.
#[derive(Debug)]
struct Slot {
    buffer: Arc<DeviceBuffer>,
    /// Which layer is in it or on its way.
    layer: usize,
    /// The end of that copy.
    filled: Mark,
}

/// The weights of all layers.
#[derive(Debug)]
pub(crate) struct LayerStore {
    gpu: Arc<Gpu>,
    layouts: Vec<LayerLayout>,
    /// By layer.
    resident: Vec<Option<LayerBlock>>,
    /// By layer: what travels.
    pinned: Vec<Option<PinnedBuffer>>,
    /// Layers that travel, in order.
    travelling: Vec<usize>,
    slots: Vec<Slot>,
    copies: Option<CopyStream>,
}

/// Which of `layers` layers travel when `resident` stay: spread evenly.
pub(crate) fn travelling(layers: usize, resident: usize) -> Vec<usize> {
    let count = layers.saturating_sub(resident);
    // The middle of each of `count` equal parts.
    (0..count)
        .map(|i| (2 * i + 1) * layers / (2 * count))
        .collect()
}

impl LayerStore {
    /// Loads every layer of this rank, from layer `first` of the model on; `resident` of them stay on the
    /// device.
    pub(crate) fn load(
        gpu: &Arc<Gpu>,
        (loader, first): (&Loader<'_>, usize),
        (dims, weights): (&[LayerDims], WeightType),
        resident: usize,
    ) -> Result<Self, ModelError> {
        let layouts: Vec<_> = dims.iter().map(|d| LayerLayout::new(d, weights)).collect();
        let moving = travelling(dims.len(), resident);
        let largest = layouts.iter().map(|l| l.bytes).max().unwrap_or(0);
        let buffers: Vec<_> = (0..SLOTS.min(moving.len()))
            .map(|_| DeviceBuffer::new(gpu, largest, "slot of travelling layers").map(Arc::new))
            .collect::<Result<_, _>>()?;
        let mut store = Self {
            gpu: gpu.clone(),
            resident: vec![None; dims.len()],
            pinned: dims.iter().map(|_| None).collect(),
            travelling: moving,
            slots: Vec::new(),
            copies: None,
            layouts,
        };
        for (index, dims) in dims.iter().enumerate() {
            let layout = &store.layouts[index];
            if !store.travelling.contains(&index) {
                let block = DeviceBuffer::new(gpu, layout.bytes, "weights of a layer")?;
                let block = LayerBlock::of(&Arc::new(block), layout)?;
                loader.fill(first + index, dims, &block)?;
                store.resident[index] = Some(block);
                continue;
            }
            // Prepared on the device, since quantisation runs there, then kept on the host.
            let block = LayerBlock::of(&buffers[0], layout)?;
            loader.fill(first + index, dims, &block)?;
            let mut host = PinnedBuffer::new(gpu, layout.bytes)?;
            buffers[0].read(0, host.as_mut_slice())?;
            store.pinned[index] = Some(host);
        }
        store.start(buffers)?;
        Ok(store)
    }

    /// Fills every slot with the first layers that travel.
    fn start(&mut self, buffers: Vec<Arc<DeviceBuffer>>) -> Result<(), ModelError> {
        if buffers.is_empty() {
            return Ok(());
        }
        let copies = CopyStream::new(&self.gpu)?;
        for (buffer, layer) in buffers.into_iter().zip(self.travelling.clone()) {
            let host = self.pinned[layer].as_ref().ok_or_else(|| lost(layer))?;
            copies.upload(&buffer, host)?;
            let filled = copies.mark()?;
            self.slots.push(Slot {
                buffer,
                layer,
                filled,
            });
        }
        self.copies = Some(copies);
        Ok(())
    }

    /// The weights of layer `index`, for work enqueued from now on.
    pub(crate) fn block(&self, index: usize) -> Result<LayerBlock, ModelError> {
        if let Some(block) = &self.resident[index] {
            return Ok(block.clone());
        }
        let slot = self.slots.iter().find(|slot| slot.layer == index);
        let slot = slot.ok_or_else(|| lost(index))?;
        self.gpu.wait_for(&slot.filled)?;
        LayerBlock::of(&slot.buffer, &self.layouts[index])
    }

    /// Says that the work of layer `index` has been enqueued: a layer that travels makes room for the one
    /// that follows all slots, round and round.
    pub(crate) fn done(&mut self, index: usize) -> Result<(), ModelError> {
        let Some(place) = self.travelling.iter().position(|l| *l == index) else {
            return Ok(());
        };
        let next = self.travelling[(place + self.slots.len()) % self.travelling.len()];
        let (Some(copies), Some(slot)) = (
            &self.copies,
            self.slots.iter_mut().find(|slot| slot.layer == index),
        ) else {
            return Err(lost(index));
        };
        if next == index {
            return Ok(());
        }
        let host = self.pinned[next].as_ref().ok_or_else(|| lost(next))?;
        copies.wait_for(&self.gpu.mark()?)?;
        copies.upload(&slot.buffer, host)?;
        slot.filled = copies.mark()?;
        slot.layer = next;
        Ok(())
    }

    /// Layers that travel.
    pub(crate) fn travelling(&self) -> &[usize] {
        &self.travelling
    }

    /// Bytes of the layers that travel, once a pass.
    pub(crate) fn travelling_bytes(&self) -> usize {
        self.travelling.iter().map(|l| self.layouts[*l].bytes).sum()
    }
}

fn lost(layer: usize) -> ModelError {
    ModelError::Internal(format!(
        "the weights of layer {layer} are not where they should be"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn travelling_layers_are_spread_evenly() {
        assert_eq!(travelling(32, 32), Vec::<usize>::new());
        assert_eq!(travelling(32, 40), Vec::<usize>::new());
        assert_eq!(travelling(8, 0), [0, 1, 2, 3, 4, 5, 6, 7]);
        assert_eq!(travelling(32, 28), [4, 12, 20, 28]);
        for layers in 1..40 {
            for resident in 0..=layers {
                let moving = travelling(layers, resident);
                assert_eq!(moving.len(), layers - resident);
                assert!(moving.windows(2).all(|w| w[0] < w[1]), "{moving:?}");
                assert!(moving.iter().all(|l| *l < layers));
            }
        }
    }
}
