//! The learned position grid, resized to a picture's patch grid.

use kernels::Tensor;

use crate::error::ModelError;

/// Resizes `table [side * side, width]` to `[height * width, width]`: bilinear, half-pixel centres,
/// antialiased where it shrinks (HunyuanImage-3.0 specification, SigLIP2 encoder).
pub(crate) fn resize(
    table: &Tensor,
    side: usize,
    grid: (usize, usize),
) -> Result<Vec<f32>, ModelError> {
    let (values, channels) = (table.as_f32()?, table.dim(1));
    let (rows, columns) = (taps(side, grid.0), taps(side, grid.1));
    // Columns first: [side, grid.1, channels].
    let mut lines = vec![0.0; side * grid.1 * channels];
    for y in 0..side {
        for (x, tap) in columns.iter().enumerate() {
            let target = &mut lines[(y * grid.1 + x) * channels..][..channels];
            for (i, weight) in tap.weights.iter().enumerate() {
                accumulate(
                    target,
                    &values[(y * side + tap.start + i) * channels..],
                    *weight,
                );
            }
        }
    }
    let mut out = vec![0.0; grid.0 * grid.1 * channels];
    let line = grid.1 * channels;
    for (target, tap) in out.chunks_exact_mut(line).zip(&rows) {
        for (i, weight) in tap.weights.iter().enumerate() {
            accumulate(target, &lines[(tap.start + i) * line..], *weight);
        }
    }
    Ok(out)
}

fn accumulate(target: &mut [f32], source: &[f32], weight: f32) {
    for (t, s) in target.iter_mut().zip(source) {
        *t += s * weight;
    }
}

/// The inputs of one output and their weights, which sum to one.
struct Tap {
    start: usize,
    weights: Vec<f32>,
}

/// Triangle filter along one side, widened by the scale where the side shrinks.
fn taps(input: usize, output: usize) -> Vec<Tap> {
    let scale = input as f32 / output as f32;
    let reach = scale.max(1.0);
    (0..output)
        .map(|i| {
            let centre = scale * (i as f32 + 0.5);
            let start = (centre - reach + 0.5).max(0.0) as usize;
            let end = ((centre + reach + 0.5) as usize).min(input);
            let weight = |j: usize| (1.0 - ((j as f32 - centre + 0.5) / reach).abs()).max(0.0);
            let raw: Vec<f32> = (start..end).map(weight).collect();
            let total: f32 = raw.iter().sum();
            Tap {
                start,
                weights: raw.into_iter().map(|w| w / total).collect(),
            }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_size_is_the_identity() {
        let table = Tensor::from_f32(&[9, 2], (0..18).map(|i| i as f32).collect()).unwrap();
        assert_eq!(resize(&table, 3, (3, 3)).unwrap(), table.to_f32_vec());
    }

    #[test]
    fn halving_averages_with_a_triangle_of_twice_the_width() {
        // One column of 4 to 2: weights of output 0 are 3/7, 3/7, 1/7 of inputs 0, 1, 2.
        let table: Vec<f32> = (0..4).flat_map(|y| [y as f32 * y as f32; 4]).collect();
        let table = Tensor::from_f32(&[16, 1], table).unwrap();
        let got = resize(&table, 4, (2, 1)).unwrap();
        assert!((got[0] - (3.0 + 4.0) / 7.0).abs() < 1e-6, "{got:?}");
        assert!(
            (got[1] - (1.0 + 3.0 * 4.0 + 3.0 * 9.0) / 7.0).abs() < 1e-6,
            "{got:?}"
        );
    }

    #[test]
    fn doubling_interpolates_between_half_pixel_centres() {
        let table = Tensor::from_f32(&[4, 1], vec![0.0, 0.0, 1.0, 1.0]).unwrap();
        let got = resize(&table, 2, (4, 1)).unwrap();
        for (g, want) in got.iter().zip([0.0, 0.25, 0.75, 1.0]) {
            assert!((g - want).abs() < 1e-6, "{got:?}");
        }
    }
}
