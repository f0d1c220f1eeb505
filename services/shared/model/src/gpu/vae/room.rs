//! Memory that the VAE's layers use in turn: three buffers of pictures, and the numbers of a norm.

use std::sync::Arc;

use kernels::cuda::{
    ChannelSums, ConvOptions, DeviceBuffer, Gpu, GpuConvWeight, GpuGroupNorm, GpuTensor, GpuType,
    Moves, Pictures, Shortcut, conv, conv_sum_elements, group_norm_apply, group_norm_coefficients,
    group_norm_sum_elements, group_norm_sums,
};

use super::super::scratch::{ALIGNMENT, Parts};
use super::{Affine, ELEMENT};
use crate::config::NORM_GROUPS;
use crate::error::ModelError;

/// Epsilon of every GroupNorm of the VAE.
const EPS: f32 = 1e-6;
/// Buffers of pictures: what a block starts from and ends in, its input's norm, and what lies between.
pub(super) const BUFFERS: usize = 3;
/// Outputs of whole multiples of it bring their sums along.
const SUMMED_CHANNELS: usize = 128;

/// How much a pass needs.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Need {
    /// Bytes of each buffer of pictures.
    buffer: usize,
    /// F32 elements of sums.
    sums: usize,
    channels: usize,
}

impl Need {
    /// Room for pictures of this size, and for their norm.
    pub(super) fn pictures(&mut self, size: [usize; 5]) {
        self.part(size.iter().product::<usize>() * ELEMENT.bytes());
        self.sums = self.sums.max(group_norm_sum_elements(size[0], size[4]));
        self.channels = self.channels.max(size[0] * size[4]);
    }

    /// Room for the sums that a convolution of such pictures makes.
    pub(super) fn conv(&mut self, x: [usize; 5], w: &GpuConvWeight) {
        self.sums = self.sums.max(conv_sum_elements(x, w));
    }

    /// Room for a buffer of this size.
    pub(super) fn part(&mut self, bytes: usize) {
        self.buffer = self.buffer.max(bytes.next_multiple_of(ALIGNMENT));
    }

    /// Device memory, in bytes.
    pub(super) fn bytes(&self) -> usize {
        BUFFERS * self.buffer + self.number_bytes()
    }

    fn number_bytes(&self) -> usize {
        (self.sums + 2 * self.channels) * GpuType::F32.bytes()
    }
}

/// The memory itself; grows to the largest need so far.
#[derive(Debug)]
pub(super) struct Room {
    gpu: Arc<Gpu>,
    has: Need,
    buffers: Vec<Arc<DeviceBuffer>>,
    /// Sums, then coefficients.
    numbers: Option<Arc<DeviceBuffer>>,
}

/// Pictures in one of the buffers, with their sums where a convolution made them.
#[derive(Debug)]
pub(super) struct Flow {
    pub(super) x: Pictures,
    pub(super) buffer: usize,
    pub(super) sums: Option<ChannelSums>,
}

impl Flow {
    /// The buffers that do not hold it.
    pub(super) fn others(&self) -> [usize; 2] {
        [(self.buffer + 1) % BUFFERS, (self.buffer + 2) % BUFFERS]
    }
}

impl Room {
    pub(super) fn new(gpu: &Arc<Gpu>) -> Self {
        let (buffers, numbers) = (Vec::new(), None);
        Self {
            gpu: gpu.clone(),
            has: Need::default(),
            buffers,
            numbers,
        }
    }

    /// Makes room for `need`; what was there is gone.
    pub(super) fn fit(&mut self, need: &Need) -> Result<(), ModelError> {
        if need.buffer > self.has.buffer {
            self.has.buffer = 0;
            self.buffers.clear();
            let made = (0..BUFFERS)
                .map(|_| DeviceBuffer::new(&self.gpu, need.buffer, "pictures of the vae"));
            self.buffers = made.map(|b| b.map(Arc::new)).collect::<Result<_, _>>()?;
            self.has.buffer = need.buffer;
        }
        if need.sums > self.has.sums || need.channels > self.has.channels {
            let (sums, channels) = (
                need.sums.max(self.has.sums),
                need.channels.max(self.has.channels),
            );
            self.numbers = None;
            (self.has.sums, self.has.channels) = (0, 0);
            let wanted = Need {
                buffer: 0,
                sums,
                channels,
            };
            let made = DeviceBuffer::new(&self.gpu, wanted.number_bytes(), "sums of the vae")?;
            self.numbers = Some(Arc::new(made));
            (self.has.sums, self.has.channels) = (sums, channels);
        }
        Ok(())
    }

    /// Pictures of this size at the front of a buffer.
    pub(super) fn pictures(&self, buffer: usize, size: [usize; 5]) -> Result<Pictures, ModelError> {
        Ok(Pictures::new(&self.parts(buffer)?.take(&size, ELEMENT)?)?)
    }

    pub(super) fn parts(&self, buffer: usize) -> Result<Parts, ModelError> {
        let buffer = self.buffers.get(buffer).ok_or_else(no_room)?;
        Ok(Parts::new(buffer.clone()))
    }

    fn numbers(&self, offset: usize, elements: usize) -> Result<GpuTensor, ModelError> {
        let buffer = self.numbers.as_ref().ok_or_else(no_room)?;
        let at = offset * GpuType::F32.bytes();
        Ok(GpuTensor::view(buffer, at, &[elements], GpuType::F32)?)
    }

    /// `out = norm(x)`, then SiLU where `silu`; `out` may be `x`. The coefficients are valid until the next
    /// norm.
    pub(super) fn norm(
        &self,
        x: &Flow,
        affine: &Affine,
        out: &Pictures,
        silu: bool,
    ) -> Result<(), ModelError> {
        let coefficients = self.coefficients(x, affine)?;
        Ok(group_norm_apply(out, &x.x, &coefficients, silu)?)
    }

    /// F32 `[images, channels, 2]`.
    pub(super) fn coefficients(&self, x: &Flow, affine: &Affine) -> Result<GpuTensor, ModelError> {
        let [images, .., channels] = x.x.size();
        let made = match &x.sums {
            Some(sums) => sums.clone(),
            None => group_norm_sums(&self.numbers(0, self.has.sums)?, &x.x)?,
        };
        let place = self.numbers(self.has.sums, 2 * images * channels)?;
        let coefficients = place.reshape(&[images, channels, 2])?;
        let norm = GpuGroupNorm {
            groups: NORM_GROUPS,
            weight: &affine.weight,
            bias: &affine.bias,
            eps: EPS,
            modulation: None,
        };
        group_norm_coefficients(&coefficients, &made, x.x.pixels(), &norm)?;
        Ok(coefficients)
    }

    /// `out = conv(x)`, `out` of any type.
    pub(super) fn plain(
        &self,
        out: &Pictures,
        x: &Pictures,
        w: &GpuConvWeight,
    ) -> Result<(), ModelError> {
        conv(out, x, w, ConvOptions::default())?;
        Ok(())
    }

    /// `out = moves(conv(x) + shortcut)`, with the sums of `out` where its channels allow; they are valid
    /// until the next convolution.
    pub(super) fn conv(
        &self,
        out: &Pictures,
        x: &Pictures,
        w: &GpuConvWeight,
        (moves, shortcut): (Moves, Option<Shortcut<'_>>),
    ) -> Result<Option<ChannelSums>, ModelError> {
        let sums = self.numbers(0, self.has.sums)?;
        let still = !matches!(moves, Moves::ToChannels { .. });
        let summed = still && out.size()[4].is_multiple_of(SUMMED_CHANNELS);
        let sums = summed.then_some(&sums);
        let options = ConvOptions {
            moves,
            shortcut,
            sums,
            first_frame: 0,
        };
        Ok(conv(out, x, w, options)?)
    }
}

fn no_room() -> ModelError {
    ModelError::Internal("vae: no room was made".into())
}
