//! Two-dimensional rotary positions and their tables.
//!
//! HunyuanImage-3.0: a token that is no image token stands at (i, i), i being its index. An image of h x w
//! tokens whose first token has index L stands centred on the square of its h·w indices. Even frequencies turn
//! with y, odd ones with x.

use std::ops::Range;

use kernels::{RopeTable, Tensor};

use crate::error::ModelError;

/// Image tokens in raster order inside a sequence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImageSpan {
    /// Indices of the span's tokens; may be longer than the grid (ViT padding comes last).
    pub tokens: Range<usize>,
    /// Grid height in tokens.
    pub grid_h: usize,
    /// Grid width in tokens.
    pub grid_w: usize,
}

/// Position of one token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Position {
    /// Vertical.
    pub y: u32,
    /// Horizontal.
    pub x: u32,
}

/// Positions of tokens `range` of a sequence that holds these images.
///
/// # Errors
/// An image's grid has more tokens than its span.
pub fn positions(range: Range<usize>, images: &[ImageSpan]) -> Result<Vec<Position>, ModelError> {
    for image in images {
        if image.grid_h * image.grid_w > image.tokens.len() {
            return Err(ModelError::Internal(format!(
                "image grid {}x{} in a span of {} tokens",
                image.grid_h,
                image.grid_w,
                image.tokens.len()
            )));
        }
    }
    Ok(range.map(|index| position(index, images)).collect())
}

fn position(index: usize, images: &[ImageSpan]) -> Position {
    for image in images {
        let start = image.tokens.start;
        let (h, w) = (image.grid_h, image.grid_w);
        if (start..start + h * w).contains(&index) {
            let (row, column) = ((index - start) / w, (index - start) % w);
            // (w·h − h)/2 is a half at most; adding whole numbers and truncating is integer division.
            return Position {
                y: (start + (w * h - h) / 2 + row) as u32,
                x: (start + (w * h - w) / 2 + column) as u32,
            };
        }
    }
    Position {
        y: index as u32,
        x: index as u32,
    }
}

/// Inverse frequencies: `theta^(−2j/dim)` for j in 0..dim/2, in f32 as the reference evaluates them.
fn frequencies(dim: usize, theta: f64) -> Vec<f32> {
    (0..dim / 2)
        .map(|j| {
            let exponent = (2 * j) as f32 / dim as f32;
            1.0 / (libm::pow(theta, f64::from(exponent)) as f32)
        })
        .collect()
}

/// Cosines and sines `[tokens, dim]`; the second half of each row repeats the first.
///
/// # Errors
/// `dim` is odd or zero.
pub fn rope_table(positions: &[Position], dim: usize, theta: f64) -> Result<RopeTable, ModelError> {
    if dim == 0 || !dim.is_multiple_of(2) {
        return Err(ModelError::Internal(format!("rope over {dim} dimensions")));
    }
    let frequencies = frequencies(dim, theta);
    let half = dim / 2;
    let mut cos = vec![0f32; positions.len() * dim];
    let mut sin = vec![0f32; positions.len() * dim];
    for (i, position) in positions.iter().enumerate() {
        for (j, frequency) in frequencies.iter().enumerate() {
            let along = if j % 2 == 0 { position.y } else { position.x };
            let angle = along as f32 * frequency;
            // Correctly rounded from f64, so the table does not depend on the platform's f32 library.
            let (s, c) = libm::sincos(f64::from(angle));
            for at in [i * dim + j, i * dim + half + j] {
                cos[at] = c as f32;
                sin[at] = s as f32;
            }
        }
    }
    let shape = [positions.len(), dim];
    Ok(RopeTable {
        cos: Tensor::from_f32(&shape, cos)?,
        sin: Tensor::from_f32(&shape, sin)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn image(start: usize, h: usize, w: usize) -> ImageSpan {
        ImageSpan {
            tokens: start..start + h * w,
            grid_h: h,
            grid_w: w,
        }
    }

    #[test]
    fn a_square_image_is_centred_on_its_indices() {
        let got = positions(0..27, &[image(10, 4, 4)]).unwrap();
        assert_eq!(got[9], Position { y: 9, x: 9 });
        assert_eq!(got[10], Position { y: 16, x: 16 });
        assert_eq!(got[25], Position { y: 19, x: 19 });
        assert_eq!(got[26], Position { y: 26, x: 26 });
    }

    #[test]
    fn half_offsets_are_dropped() {
        let start = 100;
        let got = positions(start..start + 1, &[image(start, 80, 45)]).unwrap();
        assert_eq!(
            got[0],
            Position {
                y: 100 + 1760,
                x: 100 + 1777
            }
        );
    }

    #[test]
    fn a_grid_beyond_its_span_is_refused() {
        let span = ImageSpan {
            tokens: 3..5,
            grid_h: 2,
            grid_w: 2,
        };
        assert!(positions(0..5, &[span]).is_err());
    }

    proptest! {
        #[test]
        fn a_range_gives_the_same_positions_as_the_whole(
            start in 1usize..50, h in 1usize..9, w in 1usize..9, cut in 0usize..40
        ) {
            let images = [image(start, h, w)];
            let total = start + h * w + 5;
            let cut = cut.min(total);
            let whole = positions(0..total, &images).unwrap();
            prop_assert_eq!(&whole[cut..], positions(cut..total, &images).unwrap());
        }

        #[test]
        fn tables_are_unit_vectors(y in 0u32..30_000, x in 0u32..30_000) {
            let table = rope_table(&[Position { y, x }], 16, 10_000.0).unwrap();
            let (c, s) = (table.cos.to_f32_vec(), table.sin.to_f32_vec());
            for (c, s) in c.iter().zip(&s) {
                prop_assert!((c * c + s * s - 1.0).abs() < 1e-6);
            }
            prop_assert_eq!(&c[..8], &c[8..]);
        }
    }
}
