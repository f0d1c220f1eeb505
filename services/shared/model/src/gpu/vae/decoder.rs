//! Latents to pictures.

use kernels::cuda::{
    ConvOptions, GpuConvWeight, GpuTensor, GpuType, Moves, Pictures, Shortcut, conv,
    group_norm_apply, to_channels_last,
};

use super::blocks::{Mid, ResBlock};
use super::room::{Flow, Need, Room};
use super::{Affine, VaeSource};
use crate::config::VaeConfig;
use crate::error::ModelError;

/// Frames that the window around the last one holds.
const LAST_FRAMES: usize = 2;

/// Doubles the sides, and the frames where cells have two; the input's channels are repeated beside it.
#[derive(Debug)]
struct Up {
    conv: GpuConvWeight,
    frames: usize,
}

#[derive(Debug)]
pub(super) struct Decoder {
    conv_in: GpuConvWeight,
    mid: Mid,
    levels: Vec<(Vec<ResBlock>, Option<Up>)>,
    norm_out: Affine,
    conv_out: GpuConvWeight,
    latent: usize,
}

impl Decoder {
    pub(super) fn load(from: VaeSource<'_>, config: &VaeConfig) -> Result<Self, ModelError> {
        let at = |part: &str| format!("vae.decoder.{part}");
        let channels: Vec<usize> = config.block_out_channels.iter().rev().copied().collect();
        let (deepest, shallowest) = (channels[0], channels[channels.len() - 1]);
        let mut levels = Vec::with_capacity(channels.len());
        for (level, &width) in channels.iter().enumerate() {
            let name = at(&format!("up.{level}"));
            let blocks = (0..=config.layers_per_block)
                .map(|b| ResBlock::load(from, &format!("{name}.block.{b}"), width))
                .collect::<Result<Vec<_>, _>>()?;
            // Frames grow at the deepest levels.
            let frames = if level < config.temporal_levels() {
                2
            } else {
                1
            };
            let up = (level < config.spatial_levels()).then(|| {
                let sizes = (width, channels[level + 1] * 4 * frames);
                let conv = from.conv(&format!("{name}.upsample.conv"), sizes, 3)?;
                Ok::<_, ModelError>(Up { conv, frames })
            });
            levels.push((blocks, up.transpose()?));
        }
        let (latent, out) = (config.latent_channels, config.out_channels);
        Ok(Self {
            conv_in: from.conv(&at("conv_in"), (latent, deepest), 3)?,
            mid: Mid::load(from, &at("mid"), deepest)?,
            levels,
            norm_out: from.affine(&at("norm_out"), shallowest)?,
            conv_out: from.conv(&at("conv_out"), (shallowest, out), 3)?,
            latent,
        })
    }

    /// Memory for latents of this size.
    pub(super) fn need(&self, height: usize, width: usize) -> Need {
        let mut need = Need::default();
        let mut size = [1, 1, height, width, self.conv_in.c_out()];
        need.conv(size, &self.conv_in);
        self.mid.need(size, &mut need);
        for (blocks, up) in &self.levels {
            blocks.iter().for_each(|block| block.need(size, &mut need));
            if let Some(up) = up {
                need.conv(size, &up.conv);
                size = up.size(size);
                need.pictures(size);
            }
        }
        need
    }

    /// Planar F32 `z [latent, h, w]`, times and plus `scale`, to the last frame `[h', w', colours]` as U8
    /// colours or F32 values.
    pub(super) fn forward(
        &self,
        room: &Room,
        z: &GpuTensor,
        scale: (f32, f32),
        kind: GpuType,
    ) -> Result<GpuTensor, ModelError> {
        let mut flow = self.first(room, z, scale)?;
        flow = self.mid.forward(room, flow)?;
        for (blocks, up) in &self.levels {
            for block in blocks {
                flow = block.forward(room, flow)?;
            }
            if let Some(up) = up {
                flow = up.forward(room, flow)?;
            }
        }
        self.last(room, &flow, kind)
    }

    fn first(&self, room: &Room, z: &GpuTensor, scale: (f32, f32)) -> Result<Flow, ModelError> {
        let (height, width, deepest) = (z.dim(1), z.dim(2), self.conv_in.c_out());
        let latents = room.pictures(1, [1, 1, height, width, self.conv_in.c_in()])?;
        to_channels_last(&latents, z, scale.0, scale.1)?;
        // The window's input may have more channels, of zeros.
        let narrow = room.pictures(2, [1, 1, height, width, self.latent])?;
        to_channels_last(&narrow, z, scale.0, scale.1)?;
        let x = room.pictures(0, [1, 1, height, width, deepest])?;
        let repeated = Shortcut {
            pictures: &narrow,
            repeat: deepest / self.latent,
        };
        let sums = room.conv(&x, &latents, &self.conv_in, (Moves::None, Some(repeated)))?;
        Ok(Flow { x, buffer: 0, sums })
    }

    fn last(&self, room: &Room, flow: &Flow, kind: GpuType) -> Result<GpuTensor, ModelError> {
        let coefficients = room.coefficients(flow, &self.norm_out)?;
        // A value that is not a number anywhere in the pictures reaches the sums of its group.
        if !coefficients.to_f32_vec()?.iter().all(|v| v.is_finite()) {
            return Err(ModelError::Internal(
                "vae decode: a value is not a number".into(),
            ));
        }
        let frames = flow.x.size()[1].min(LAST_FRAMES);
        let tail = flow.x.frames_from(flow.x.size()[1] - frames)?;
        let normed = room.pictures(flow.others()[0], tail.size())?;
        group_norm_apply(&normed, &tail, &coefficients, true)?;
        let [_, _, height, width, _] = tail.size();
        let colours = self.conv_out.c_out();
        let size = [1, 1, height, width, colours];
        let out = GpuTensor::new(normed.tensor().gpu(), &size, kind, "picture")?;
        let options = ConvOptions {
            first_frame: frames - 1,
            ..ConvOptions::default()
        };
        conv(&Pictures::new(&out)?, &normed, &self.conv_out, options)?;
        Ok(out.reshape(&size[2..])?)
    }
}

impl Up {
    fn size(&self, [images, frames, height, width, _]: [usize; 5]) -> [usize; 5] {
        let channels = self.conv.c_out() / (4 * self.frames);
        [
            images,
            frames * self.frames,
            2 * height,
            2 * width,
            channels,
        ]
    }

    fn forward(&self, room: &Room, flow: Flow) -> Result<Flow, ModelError> {
        let buffer = flow.others()[0];
        let x = room.pictures(buffer, self.size(flow.x.size()))?;
        let repeat = self.conv.c_out() / flow.x.size()[4];
        let repeated = Shortcut {
            pictures: &flow.x,
            repeat,
        };
        let moves = Moves::ToSpace {
            frames: self.frames,
        };
        let sums = room.conv(&x, &flow.x, &self.conv, (moves, Some(repeated)))?;
        Ok(Flow { x, buffer, sums })
    }
}
