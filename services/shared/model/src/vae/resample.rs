//! Changing resolution: sub-positions move between space and channels, with a channel-matching shortcut.
//!
//! A cell is `r_t x 2 x 2` sub-positions, `r_t` being 2 where frames change too. Channel
//! `sub * channels + c` holds sub-position `sub = (t * 2 + h) * 2 + w` of channel `c`: sub-position major,
//! channel minor (HunyuanImage-3.0 specification, VAE building blocks).

use kernels::{Conv3dWeight, Tensor, conv3d};
use rayon::prelude::*;

use super::blocks::conv3;
use crate::error::ModelError;
use crate::source::Scope;

/// Halves the sides (and frames): convolution to fewer channels, cells into channels, plus the mean of
/// consecutive channel groups of the input's cells.
#[derive(Debug)]
pub(super) struct Down {
    conv: Conv3dWeight,
    output: usize,
    cell: Cell,
}

/// Doubles the sides (and frames): convolution to more channels, channels into cells, plus the input's
/// channels repeated.
#[derive(Debug)]
pub(super) struct Up {
    conv: Conv3dWeight,
    output: usize,
    cell: Cell,
}

/// Extent of one cell.
#[derive(Clone, Copy, Debug)]
struct Cell {
    frames: usize,
}

impl Cell {
    fn new(temporal: bool) -> Self {
        Self {
            frames: if temporal { 2 } else { 1 },
        }
    }

    fn size(self) -> usize {
        self.frames * 4
    }
}

impl Down {
    pub(super) fn load(
        scope: &Scope<'_>,
        input: usize,
        output: usize,
        temporal: bool,
    ) -> Result<Self, ModelError> {
        let cell = Cell::new(temporal);
        let conv = scope.child("conv").conv3d(input, output / cell.size(), 3)?;
        Ok(Self { conv, output, cell })
    }

    pub(super) fn forward(&self, x: &Tensor) -> Result<Tensor, ModelError> {
        let main = conv3d(x, &self.conv)?;
        let (frames, height, width, input) = dims(x);
        let low = (frames / self.cell.frames, height / 2, width / 2);
        let whole = [low.0 * self.cell.frames, low.1 * 2, low.2 * 2] == [frames, height, width];
        if !whole {
            return Err(ModelError::Internal(format!(
                "vae down: {frames} x {height} x {width} does not split into cells"
            )));
        }
        let (source, main) = (x.as_f32()?, main.as_f32()?);
        let (narrow, group) = (
            self.output / self.cell.size(),
            self.cell.size() * input / self.output,
        );
        let mut out = vec![0.0; low.0 * low.1 * low.2 * self.output];
        out.par_chunks_mut(low.2 * self.output)
            .enumerate()
            .for_each(|(line, pixels)| {
                let mut gathered = vec![0.0; self.cell.size() * input];
                for (w, pixel) in pixels.chunks_exact_mut(self.output).enumerate() {
                    for sub in 0..self.cell.size() {
                        let t = line / low.1 * self.cell.frames + sub / 4;
                        let from =
                            (t * height + line % low.1 * 2 + sub / 2 % 2) * width + w * 2 + sub % 2;
                        pixel[sub * narrow..][..narrow]
                            .copy_from_slice(&main[from * narrow..][..narrow]);
                        gathered[sub * input..][..input]
                            .copy_from_slice(&source[from * input..][..input]);
                    }
                    for (value, part) in pixel.iter_mut().zip(gathered.chunks_exact(group)) {
                        *value += part.iter().sum::<f32>() / group as f32;
                    }
                }
            });
        Ok(Tensor::from_f32(
            &[1, low.0, low.1, low.2, self.output],
            out,
        )?)
    }
}

impl Up {
    pub(super) fn load(
        scope: &Scope<'_>,
        input: usize,
        output: usize,
        (temporal, frames): (bool, usize),
    ) -> Result<Self, ModelError> {
        let cell = Cell::new(temporal);
        let conv = conv3(&scope.child("conv"), (input, output * cell.size()), frames)?;
        Ok(Self { conv, output, cell })
    }

    pub(super) fn forward(&self, x: &Tensor) -> Result<Tensor, ModelError> {
        let main = conv3d(x, &self.conv)?;
        let (frames, height, width, input) = dims(x);
        let shape = [
            1,
            frames * self.cell.frames,
            height * 2,
            width * 2,
            self.output,
        ];
        let (source, main) = (x.as_f32()?, main.as_f32()?);
        let (wide, repeat) = (
            self.output * self.cell.size(),
            self.output * self.cell.size() / input,
        );
        let mut out = vec![0.0; shape.iter().product()];
        // One line of the output at a time.
        out.par_chunks_mut(2 * width * self.output)
            .enumerate()
            .for_each(|(line, pixels)| {
                let (t, h) = (line / (2 * height), line % (2 * height));
                let low = (t / self.cell.frames * height + h / 2) * width;
                for (w, pixel) in pixels.chunks_exact_mut(self.output).enumerate() {
                    let from = low + w / 2;
                    let first = ((t % self.cell.frames * 2 + h % 2) * 2 + w % 2) * self.output;
                    let cells = &main[from * wide + first..][..self.output];
                    let copied = &source[from * input..][..input];
                    for (c, (value, cell)) in pixel.iter_mut().zip(cells).enumerate() {
                        *value = cell + copied[(first + c) / repeat];
                    }
                }
            });
        Ok(Tensor::from_f32(&shape, out)?)
    }
}

fn dims(x: &Tensor) -> (usize, usize, usize, usize) {
    (x.dim(1), x.dim(2), x.dim(3), x.dim(4))
}
