//! Parts that the encoder and the decoder share.

use kernels::cuda::{GpuConvWeight, Moves, Shortcut};

use super::attention::Attention;
use super::room::{Flow, Need, Room};
use super::{Affine, VaeSource};
use crate::error::ModelError;

/// `x + conv2(silu(norm2(conv1(silu(norm1(x))))))`.
#[derive(Debug)]
pub(super) struct ResBlock {
    norm1: Affine,
    conv1: GpuConvWeight,
    norm2: Affine,
    conv2: GpuConvWeight,
}

impl ResBlock {
    pub(super) fn load(
        from: VaeSource<'_>,
        name: &str,
        channels: usize,
    ) -> Result<Self, ModelError> {
        let same = (channels, channels);
        Ok(Self {
            norm1: from.affine(&format!("{name}.norm1"), channels)?,
            conv1: from.conv(&format!("{name}.conv1"), same, 3)?,
            norm2: from.affine(&format!("{name}.norm2"), channels)?,
            conv2: from.conv(&format!("{name}.conv2"), same, 3)?,
        })
    }

    pub(super) fn need(&self, size: [usize; 5], need: &mut Need) {
        need.pictures(size);
        need.conv(size, &self.conv1);
    }

    /// In place: the result lies where the input did.
    pub(super) fn forward(&self, room: &Room, flow: Flow) -> Result<Flow, ModelError> {
        let [first, second] = flow.others();
        let (size, plain) = (flow.x.size(), (Moves::None, None));
        let normed = room.pictures(first, size)?;
        room.norm(&flow, &self.norm1, &normed, true)?;
        let x = room.pictures(second, size)?;
        let sums = room.conv(&x, &normed, &self.conv1, plain)?;
        let inner = Flow {
            x,
            buffer: second,
            sums,
        };
        room.norm(&inner, &self.norm2, &inner.x, true)?;
        let added = Shortcut {
            pictures: &flow.x,
            repeat: 1,
        };
        let sums = room.conv(&flow.x, &inner.x, &self.conv2, (Moves::None, Some(added)))?;
        Ok(Flow { sums, ..flow })
    }
}

/// Residual block, attention, residual block at the lowest resolution.
#[derive(Debug)]
pub(super) struct Mid {
    first: ResBlock,
    attention: Attention,
    second: ResBlock,
}

impl Mid {
    pub(super) fn load(
        from: VaeSource<'_>,
        name: &str,
        channels: usize,
    ) -> Result<Self, ModelError> {
        let block = |part: &str| ResBlock::load(from, &format!("{name}.{part}"), channels);
        Ok(Self {
            first: block("block_1")?,
            attention: Attention::load(from, &format!("{name}.attn_1"), channels)?,
            second: block("block_2")?,
        })
    }

    pub(super) fn need(&self, size: [usize; 5], need: &mut Need) {
        self.first.need(size, need);
        self.attention.need(size, need);
    }

    pub(super) fn forward(&self, room: &Room, flow: Flow) -> Result<Flow, ModelError> {
        let flow = self.first.forward(room, flow)?;
        let flow = self.attention.forward(room, flow)?;
        self.second.forward(room, flow)
    }
}
