//! Least squares for small problems.

/// Solves `a x = b` for `N` right sides, `a` being square and row by row: Gaussian elimination with row
/// exchange; `None` for a singular matrix.
pub(crate) fn solve<const N: usize>(
    mut a: Vec<f64>,
    mut b: Vec<[f64; N]>,
) -> Option<Vec<[f64; N]>> {
    let n = b.len();
    for column in 0..n {
        let size = |row: &usize| a[row * n + column].abs();
        let pivot = (column..n).max_by(|x, y| size(x).total_cmp(&size(y)))?;
        if a[pivot * n + column].abs() < f64::MIN_POSITIVE {
            return None;
        }
        (0..n).for_each(|j| a.swap(pivot * n + j, column * n + j));
        b.swap(pivot, column);
        for row in 0..n {
            if row == column {
                continue;
            }
            let factor = a[row * n + column] / a[column * n + column];
            (column..n).for_each(|j| a[row * n + j] -= factor * a[column * n + j]);
            (0..N).for_each(|c| b[row][c] -= factor * b[column][c]);
        }
    }
    let scaled = b.iter().enumerate();
    Some(
        scaled
            .map(|(i, row)| row.map(|v| v / a[i * n + i]))
            .collect(),
    )
}

/// The polynomial of this degree, constant first, that comes closest to points `(x, y)` in squares.
///
/// `None` when the points do not determine it.
pub(crate) fn polynomial(points: &[(f64, f64)], degree: usize) -> Option<Vec<f64>> {
    let wide = degree + 1;
    // Powers of numbers near 1 are told apart better.
    let scale = points
        .iter()
        .fold(0.0_f64, |most, (x, _)| most.max(x.abs()));
    let mut square = vec![0.0; wide * wide];
    let mut right = vec![[0.0]; wide];
    for (x, y) in points {
        let power = |n: usize| (x / scale).powi(n as i32);
        for i in 0..wide {
            (0..wide).for_each(|j| square[i * wide + j] += power(i) * power(j));
            right[i][0] += power(i) * y;
        }
    }
    let solved = solve(square, right)?;
    let unscaled = solved.iter().enumerate();
    let all: Vec<f64> = unscaled.map(|(n, c)| c[0] / scale.powi(n as i32)).collect();
    all.iter().all(|c| c.is_finite()).then_some(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_polynomial_is_found_from_its_points_and_not_from_too_few() {
        let cubic = |x: f64| 0.5 - 2.0 * x + 30.0 * x.powi(3);
        let points: Vec<(f64, f64)> = (1..9)
            .map(|i| f64::from(i) * 0.02)
            .map(|x| (x, cubic(x)))
            .collect();
        let found = polynomial(&points, 3).unwrap();
        for (got, want) in found.iter().zip([0.5, -2.0, 0.0, 30.0]) {
            assert!((got - want).abs() < 1e-6, "{found:?}");
        }
        assert!(polynomial(&[(0.0, 1.0)], 1).is_none());
        assert!(polynomial(&[], 0).is_none());
    }
}
