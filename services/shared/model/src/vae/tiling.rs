//! Cutting a picture into overlapping tiles and blending the results.
//!
//! Tiling is an approximation: norms and attention see one tile only. It bounds memory.

use kernels::Tensor;

use crate::error::ModelError;

/// Geometry of one tiled pass along either side; input and output differ in resolution.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tiling {
    /// Side of a tile of the input.
    pub(super) tile: usize,
    /// Distance between tile starts of the input.
    pub(super) stride: usize,
    /// Blended extent of the output.
    pub(super) blend: usize,
    /// Side kept of an output tile that another one follows.
    pub(super) keep: usize,
}

impl Tiling {
    /// Tiles of `tile` input cells that give `out` output cells, overlapping by the fraction `overlap`.
    pub(super) fn new(tile: usize, out: usize, overlap: f64) -> Result<Self, ModelError> {
        // Rounded towards zero, as the released code does.
        let stride = (tile as f64 * (1.0 - overlap)) as usize;
        let blend = (out as f64 * overlap) as usize;
        if !(0.0..1.0).contains(&overlap) || stride == 0 || blend >= out {
            return Err(ModelError::invalid(
                "tile_overlap",
                format!("{overlap} of tiles of {tile} leaves nothing to keep"),
            ));
        }
        Ok(Self {
            tile,
            stride,
            blend,
            keep: out - blend,
        })
    }

    /// The tiles of `x [1, t, h, w, c]`, row by row.
    pub(super) fn tiles(&self, x: &Tensor) -> Result<Vec<Tensor>, ModelError> {
        let tops = (0..x.dim(2)).step_by(self.stride);
        let at = |top| {
            (0..x.dim(3))
                .step_by(self.stride)
                .map(move |left| (top, left))
        };
        tops.flat_map(at).map(|at| cut(x, at, self.tile)).collect()
    }

    /// Runs `each` over the tiles of `x [1, t, h, w, c]` and joins the results.
    pub(super) fn run(
        &self,
        x: &Tensor,
        mut each: impl FnMut(&Tensor) -> Result<Tensor, ModelError>,
    ) -> Result<Tensor, ModelError> {
        let mut above: Vec<Tensor> = Vec::new();
        let mut bands = Vec::new();
        for top in (0..x.dim(2)).step_by(self.stride) {
            let mut row: Vec<Tensor> = Vec::new();
            for left in (0..x.dim(3)).step_by(self.stride) {
                let mut tile = each(&cut(x, (top, left), self.tile)?)?;
                // Blending is in place and vertical first: a tile meets neighbours already blended.
                if let Some(upper) = above.get(row.len()) {
                    self.blend_rows(upper, &mut tile)?;
                }
                if let Some(before) = row.last() {
                    self.blend_columns(before, &mut tile)?;
                }
                row.push(tile);
            }
            let kept = row
                .iter()
                .map(|tile| cut(tile, (0, 0), self.keep))
                .collect::<Result<Vec<_>, _>>()?;
            bands.push(kept);
            above = row;
        }
        join(&bands)
    }

    /// Ramps from the last rows of `upper` into the first rows of `tile`.
    fn blend_rows(&self, upper: &Tensor, tile: &mut Tensor) -> Result<(), ModelError> {
        let (high, low) = (Layout::of(upper), Layout::of(tile));
        let extent = self.blend.min(high.height).min(low.height);
        let source = upper.as_f32()?;
        let target = tile.as_f32_mut()?;
        for frame in 0..low.frames {
            for y in 0..extent {
                let share = y as f32 / extent as f32;
                let from = high.at(frame, high.height - extent + y, 0);
                let to = low.at(frame, y, 0);
                let len = low.width.min(high.width) * low.channels;
                mix(&mut target[to..to + len], &source[from..from + len], share);
            }
        }
        Ok(())
    }

    /// Ramps from the last columns of `before` into the first columns of `tile`.
    fn blend_columns(&self, before: &Tensor, tile: &mut Tensor) -> Result<(), ModelError> {
        let (left, right) = (Layout::of(before), Layout::of(tile));
        let extent = self.blend.min(left.width).min(right.width);
        let source = before.as_f32()?;
        let target = tile.as_f32_mut()?;
        for frame in 0..right.frames {
            for y in 0..right.height.min(left.height) {
                for x in 0..extent {
                    let share = x as f32 / extent as f32;
                    let from = left.at(frame, y, left.width - extent + x);
                    let to = right.at(frame, y, x);
                    let len = right.channels;
                    mix(&mut target[to..to + len], &source[from..from + len], share);
                }
            }
        }
        Ok(())
    }
}

/// `target = source * (1 - share) + target * share`.
fn mix(target: &mut [f32], source: &[f32], share: f32) {
    for (t, s) in target.iter_mut().zip(source) {
        *t = s * (1.0 - share) + *t * share;
    }
}

/// Sizes of a `[1, t, h, w, c]` tensor.
#[derive(Clone, Copy)]
struct Layout {
    frames: usize,
    height: usize,
    width: usize,
    channels: usize,
}

impl Layout {
    fn of(x: &Tensor) -> Self {
        Self {
            frames: x.dim(1),
            height: x.dim(2),
            width: x.dim(3),
            channels: x.dim(4),
        }
    }

    fn at(&self, frame: usize, y: usize, x: usize) -> usize {
        ((frame * self.height + y) * self.width + x) * self.channels
    }
}

/// The square of side `side` at `at`, clipped to the tensor.
fn cut(x: &Tensor, at: (usize, usize), side: usize) -> Result<Tensor, ModelError> {
    let from = Layout::of(x);
    let height = side.min(from.height - at.0);
    let width = side.min(from.width - at.1);
    let source = x.as_f32()?;
    let mut out = Vec::with_capacity(from.frames * height * width * from.channels);
    for frame in 0..from.frames {
        for y in 0..height {
            let start = from.at(frame, at.0 + y, at.1);
            out.extend_from_slice(&source[start..start + width * from.channels]);
        }
    }
    Ok(Tensor::from_f32(
        &[1, from.frames, height, width, from.channels],
        out,
    )?)
}

/// Puts bands of tiles together; tiles of one band have one height, tiles of one column one width.
fn join(bands: &[Vec<Tensor>]) -> Result<Tensor, ModelError> {
    let first = bands.first().and_then(|b| b.first());
    let first = Layout::of(first.ok_or_else(|| ModelError::Internal("vae: empty picture".into()))?);
    let height = bands.iter().map(|b| b[0].dim(2)).sum();
    let width = bands[0].iter().map(|t| t.dim(3)).sum();
    let whole = Layout {
        height,
        width,
        ..first
    };
    let mut out = vec![0.0; whole.frames * height * width * whole.channels];
    let mut top = 0;
    for band in bands {
        let mut left = 0;
        for tile in band {
            let part = Layout::of(tile);
            let source = tile.as_f32()?;
            let len = part.width * part.channels;
            for frame in 0..part.frames {
                for y in 0..part.height {
                    let (from, to) = (part.at(frame, y, 0), whole.at(frame, top + y, left));
                    out[to..to + len].copy_from_slice(&source[from..from + len]);
                }
            }
            left += part.width;
        }
        top += band[0].dim(2);
    }
    Ok(Tensor::from_f32(
        &[1, whole.frames, height, width, whole.channels],
        out,
    )?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ramp(height: usize, width: usize) -> Tensor {
        let data = (0..height * width).map(|i| i as f32).collect();
        Tensor::from_f32(&[1, 1, height, width, 1], data).unwrap()
    }

    #[test]
    fn tiles_of_an_identity_join_to_the_picture() {
        for (height, width) in [(8, 8), (20, 9), (17, 24), (3, 30)] {
            let x = ramp(height, width);
            let tiling = Tiling::new(8, 8, 0.25).unwrap();
            let y = tiling.run(&x, |t| Ok(t.clone())).unwrap();
            assert_eq!(y.shape(), x.shape());
            for (a, b) in y.as_f32().unwrap().iter().zip(x.as_f32().unwrap()) {
                assert!((a - b).abs() < 1e-3);
            }
        }
    }

    #[test]
    fn the_released_strides_and_limits_come_out() {
        let eighth = Tiling::new(24, 384, 0.125).unwrap();
        assert_eq!((eighth.stride, eighth.blend, eighth.keep), (21, 48, 336));
        let quarter = Tiling::new(24, 384, 0.25).unwrap();
        assert_eq!((quarter.stride, quarter.blend, quarter.keep), (18, 96, 288));
        let encode = Tiling::new(384, 24, 0.125).unwrap();
        assert_eq!((encode.stride, encode.blend, encode.keep), (336, 3, 21));
        assert!(Tiling::new(24, 384, 1.0).is_err());
        assert!(Tiling::new(24, 384, f64::NAN).is_err());
    }
}
