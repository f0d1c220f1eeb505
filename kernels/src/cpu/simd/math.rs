//! Elementary functions that the compiler can vectorise, and sums with a fixed order.

/// `exp(x)` within 1.5 ulp for `x` in [-87.3, 88.3] (tested); 0 below, `exp(88.3)` above, NaN for NaN.
#[inline(always)]
pub(crate) fn exp(x: f32) -> f32 {
    const HIGH: f32 = 88.3;
    exp_below(if x > HIGH { HIGH } else { x })
}

/// [`exp`] for `x` of at most 88.3.
///
/// `x = n ln2 + r` with `|r| <= ln2 / 2` (two-word reduction), then a polynomial for `exp(r)`.
#[inline(always)]
pub(crate) fn exp_below(x: f32) -> f32 {
    const LOW: f32 = -87.3;
    // Adding and subtracting 1.5 * 2^23 rounds to the nearest integer.
    const ROUND: f32 = 12_582_912.0;
    const LN2_HIGH: f32 = 0.693_145_75;
    const LN2_LOW: f32 = 1.428_606_8e-6;
    let shifted = x.mul_add(std::f32::consts::LOG2_E, ROUND);
    let n = shifted - ROUND;
    let r = n.mul_add(-LN2_LOW, n.mul_add(-LN2_HIGH, x));
    // exp(r) = 1 + r + r^2 p(r), p of degree 4 fitted to the relative error: 3e-9.
    let mut p = 1.395_047_5e-3f32;
    p = p.mul_add(r, 8.368_883e-3);
    p = p.mul_add(r, 4.166_620_6e-2);
    p = p.mul_add(r, 0.166_665_18);
    p = p.mul_add(r, 0.5);
    p = p.mul_add(r, 1.0);
    p = p.mul_add(r, 1.0);
    // The low bits of `shifted` hold n; 2^n is a float whose exponent field is n + 127.
    let scale = f32::from_bits(shifted.to_bits().wrapping_add(127) << 23);
    if x < LOW { 0.0 } else { p * scale }
}

/// `x[i] = exp(x[i] - max)` where no element is larger than `max`; returns the sum.
#[inline(always)]
pub(crate) fn exp_sum(x: &mut [f32], max: f32) -> f32 {
    let mut lanes = [0f32; LANES];
    let (chunks, rest) = x.as_chunks_mut::<LANES>();
    for chunk in chunks {
        for i in 0..LANES {
            chunk[i] = exp_below(chunk[i] - max);
            lanes[i] += chunk[i];
        }
    }
    if !rest.is_empty() {
        // The tail as one full vector: what is missing counts as exp(-inf) = 0.
        let mut tail = [f32::NEG_INFINITY; LANES];
        tail[..rest.len()].copy_from_slice(rest);
        for i in 0..LANES {
            tail[i] = exp_below(tail[i] - max);
            lanes[i] += tail[i];
        }
        rest.copy_from_slice(&tail[..rest.len()]);
    }
    fold(
        lanes,
        #[inline(always)]
        |a, b| a + b,
    )
}

/// `x / (1 + exp(-x))`.
#[inline(always)]
pub(crate) fn silu(x: f32) -> f32 {
    x / (1.0 + exp(-x))
}

/// `x/2 * (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))`, written as `x * sigmoid(2 y)`.
#[inline(always)]
pub(crate) fn gelu_tanh(x: f32) -> f32 {
    const TWO_SQRT_2_OVER_PI: f32 = 1.595_769;
    let y = TWO_SQRT_2_OVER_PI * (x * x).mul_add(0.044_715 * x, x);
    x / (1.0 + exp(-y))
}

/// Lanes of the reductions below; a fixed number, so that every vector unit sums in the same order.
const LANES: usize = 16;

/// Combines the lanes pairwise: 16, 8, 4, 2, 1.
#[inline(always)]
fn fold(x: [f32; LANES], f: impl Fn(f32, f32) -> f32) -> f32 {
    let x: [f32; 8] = std::array::from_fn(
        #[inline(always)]
        |i| f(x[i], x[i + 8]),
    );
    let x: [f32; 4] = std::array::from_fn(
        #[inline(always)]
        |i| f(x[i], x[i + 4]),
    );
    f(f(x[0], x[2]), f(x[1], x[3]))
}

/// Accumulates `f(lane, x[i])` in 16 lanes from `start`, then combines the lanes with `join`.
///
/// Elements whose `f` leaves a lane as it is may be appended without changing the result.
#[inline(always)]
fn reduce(
    x: &[f32],
    start: f32,
    f: impl Fn(f32, f32) -> f32,
    join: impl Fn(f32, f32) -> f32,
) -> f32 {
    let mut lanes = [start; LANES];
    let (chunks, rest) = x.as_chunks::<LANES>();
    for chunk in chunks {
        for i in 0..LANES {
            lanes[i] = f(lanes[i], chunk[i]);
        }
    }
    for (lane, &v) in lanes.iter_mut().zip(rest) {
        *lane = f(*lane, v);
    }
    fold(lanes, join)
}

/// Folds `f` over the elements from zero in a fixed order; `f` must add something to its first argument.
#[inline(always)]
pub(crate) fn sum_by(x: &[f32], f: impl Fn(f32, f32) -> f32) -> f32 {
    reduce(
        x,
        0.0,
        f,
        #[inline(always)]
        |a, b| a + b,
    )
}

#[inline(always)]
fn larger(a: f32, b: f32) -> f32 {
    if b > a { b } else { a }
}

/// Largest element; negative infinity for an empty slice. NaN is passed over.
#[inline(always)]
pub(crate) fn max(x: &[f32]) -> f32 {
    reduce(x, f32::NEG_INFINITY, larger, larger)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Error of `got` in units of the last place of `want`.
    fn ulps(got: f32, want: f64) -> f64 {
        let ulp = f64::from(f32::from_bits((want as f32).to_bits() + 1)) - f64::from(want as f32);
        (f64::from(got) - want).abs() / ulp
    }

    #[test]
    fn exp_is_within_one_and_a_half_ulp() {
        let mut worst = 0f64;
        for i in 0..2_000_000 {
            let x = -87.3 + (i as f32) * (175.6 / 2_000_000.0);
            worst = worst.max(ulps(exp(x), libm::exp(f64::from(x))));
        }
        assert!(worst <= 1.5, "{worst}");
    }

    #[test]
    fn exp_has_its_limits() {
        assert_eq!(exp(0.0).to_bits(), 1f32.to_bits());
        assert_eq!(exp(f32::NEG_INFINITY).to_bits(), 0f32.to_bits());
        assert_eq!(exp(-200.0).to_bits(), 0f32.to_bits());
        assert!(exp(1e9) > 1e38 && exp(f32::INFINITY) > 1e38);
        assert!(exp(f32::NAN).is_nan());
    }

    #[test]
    fn sums_and_maxima_are_those_of_the_elements() {
        for n in [0usize, 1, 7, 16, 31, 32, 33, 100] {
            let x: Vec<f32> = (0..n).map(|i| ((i * 37) % 101) as f32 - 50.0).collect();
            let sum: f32 = x.iter().sum();
            assert!((sum_by(&x, |a, v| a + v) - sum).abs() < 1e-3);
            let largest = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            assert_eq!(max(&x).to_bits(), largest.to_bits());
        }
    }
}
