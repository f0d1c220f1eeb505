//! Pictures to latent distributions.

use kernels::cuda::{
    GpuConvWeight, GpuTensor, Moves, Pictures, Shortcut, channel_means, to_channels_last,
};

use super::blocks::{Mid, ResBlock};
use super::room::{Flow, Need, Room};
use super::{Affine, ELEMENT, VaeSource};
use crate::config::VaeConfig;
use crate::error::ModelError;

/// Halves the sides, and the frames where cells have two; means of the input's channels beside it.
#[derive(Debug)]
struct Down {
    conv: GpuConvWeight,
    frames: usize,
}

#[derive(Debug)]
pub(super) struct Encoder {
    conv_in: GpuConvWeight,
    levels: Vec<(Vec<ResBlock>, Option<Down>)>,
    mid: Mid,
    norm_out: Affine,
    conv_out: GpuConvWeight,
    frames: usize,
}

impl Encoder {
    pub(super) fn load(from: VaeSource<'_>, config: &VaeConfig) -> Result<Self, ModelError> {
        let at = |part: &str| format!("vae.encoder.{part}");
        let channels = &config.block_out_channels;
        let (shallowest, deepest) = (channels[0], channels[channels.len() - 1]);
        let mut levels = Vec::with_capacity(channels.len());
        for (level, &width) in channels.iter().enumerate() {
            let name = at(&format!("down.{level}"));
            let blocks = (0..config.layers_per_block)
                .map(|b| ResBlock::load(from, &format!("{name}.block.{b}"), width))
                .collect::<Result<Vec<_>, _>>()?;
            // Frames shrink at the deepest levels.
            let temporal = level >= config.spatial_levels() - config.temporal_levels();
            let frames = if temporal { 2 } else { 1 };
            let down = (level < config.spatial_levels()).then(|| {
                let sizes = (width, channels[level + 1] / (4 * frames));
                let conv = from.conv(&format!("{name}.downsample.conv"), sizes, 3)?;
                Ok::<_, ModelError>(Down { conv, frames })
            });
            levels.push((blocks, down.transpose()?));
        }
        let moments = 2 * config.latent_channels;
        Ok(Self {
            conv_in: from.conv(&at("conv_in"), (config.in_channels, shallowest), 3)?,
            levels,
            mid: Mid::load(from, &at("mid"), deepest)?,
            norm_out: from.affine(&at("norm_out"), deepest)?,
            conv_out: from.conv(&at("conv_out"), (deepest, moments), 3)?,
            frames: config.temporal_factor,
        })
    }

    /// Memory for a picture of this size.
    pub(super) fn need(&self, height: usize, width: usize) -> Need {
        let mut need = Need::default();
        let mut size = [1, self.frames, height, width, self.conv_in.c_in()];
        need.pictures(size);
        need.conv(size, &self.conv_in);
        size[4] = self.conv_in.c_out();
        for (blocks, down) in &self.levels {
            blocks.iter().for_each(|block| block.need(size, &mut need));
            need.pictures(size);
            if let Some(down) = down {
                size = down.size(size);
            }
        }
        need.pictures(size);
        self.mid.need(size, &mut need);
        need
    }

    /// Planar F32 `x [colours, h, w]` to mean and log variance side by side, `[1, 1, h', w', 2 latent]`.
    pub(super) fn forward(&self, room: &Room, x: &GpuTensor) -> Result<GpuTensor, ModelError> {
        let size = [1, self.frames, x.dim(1), x.dim(2), self.conv_in.c_in()];
        let frames = room.pictures(1, size)?;
        to_channels_last(&frames, x, 1.0, 0.0)?;
        let [images, count, height, width, _] = size;
        let x = room.pictures(0, [images, count, height, width, self.conv_in.c_out()])?;
        let sums = room.conv(&x, &frames, &self.conv_in, (Moves::None, None))?;
        let mut flow = Flow { x, buffer: 0, sums };
        for (blocks, down) in &self.levels {
            for block in blocks {
                flow = block.forward(room, flow)?;
            }
            if let Some(down) = down {
                flow = down.forward(room, flow)?;
            }
        }
        flow = self.mid.forward(room, flow)?;
        self.last(room, &flow)
    }

    fn last(&self, room: &Room, flow: &Flow) -> Result<GpuTensor, ModelError> {
        let [first, second] = flow.others();
        let normed = room.pictures(first, flow.x.size())?;
        room.norm(flow, &self.norm_out, &normed, true)?;
        let mut size = flow.x.size();
        size[4] = self.conv_out.c_out();
        let means = room.pictures(second, size)?;
        channel_means(&means, &flow.x)?;
        let out = GpuTensor::new(normed.tensor().gpu(), &size, ELEMENT, "moments")?;
        let added = Shortcut {
            pictures: &means,
            repeat: 1,
        };
        let moments = Pictures::new(&out)?;
        room.conv(
            &moments,
            &normed,
            &self.conv_out,
            (Moves::None, Some(added)),
        )?;
        Ok(out)
    }
}

impl Down {
    fn size(&self, [images, frames, height, width, _]: [usize; 5]) -> [usize; 5] {
        let channels = self.conv.c_out() * 4 * self.frames;
        [
            images,
            frames / self.frames,
            height / 2,
            width / 2,
            channels,
        ]
    }

    fn forward(&self, room: &Room, flow: Flow) -> Result<Flow, ModelError> {
        let [first, buffer] = flow.others();
        let mut size = flow.x.size();
        // The mean over a cell's channels is one over those of a pixel: groups do not cross sub-positions.
        size[4] = self.conv.c_out();
        let means = room.pictures(first, size)?;
        channel_means(&means, &flow.x)?;
        let x = room.pictures(buffer, self.size(flow.x.size()))?;
        let added = Shortcut {
            pictures: &means,
            repeat: 1,
        };
        let moves = Moves::ToChannels {
            frames: self.frames,
        };
        let sums = room.conv(&x, &flow.x, &self.conv, (moves, Some(added)))?;
        Ok(Flow { x, buffer, sums })
    }
}
