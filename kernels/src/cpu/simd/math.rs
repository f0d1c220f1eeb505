//! Elementary functions that the compiler can vectorise, and sums with a fixed order.

/// `exp(x)` within 1.5 ulp for `x` in [-87.3, 88.3] (tested); 0 below, `exp(88.3)` above, NaN for NaN.
///
/// `x = n ln2 + r` with `|r| <= ln2 / 2` (two-word reduction), then a polynomial for `exp(r)`.
#[inline(always)]
pub(crate) fn exp(x: f32) -> f32 {
    const HIGH: f32 = 88.3;
    const LOW: f32 = -87.3;
    // Adding and subtracting 1.5 * 2^23 rounds to the nearest integer.
    const ROUND: f32 = 12_582_912.0;
    const LN2_HIGH: f32 = 0.693_145_75;
    const LN2_LOW: f32 = 1.428_606_8e-6;
    let clamped = if x > HIGH { HIGH } else { x };
    let shifted = clamped.mul_add(std::f32::consts::LOG2_E, ROUND);
    let n = shifted - ROUND;
    let r = n.mul_add(-LN2_LOW, n.mul_add(-LN2_HIGH, clamped));
    // Minimax coefficients near the Taylor series 1/k!, k = 6 .. 2.
    let mut p = 1.388_888_9e-3f32;
    p = p.mul_add(r, 8.333_334e-3);
    p = p.mul_add(r, 4.166_666_8e-2);
    p = p.mul_add(r, 0.166_666_67);
    p = p.mul_add(r, 0.5);
    p = (r * r).mul_add(p, r) + 1.0;
    // The low bits of `shifted` hold n; 2^n is a float whose exponent field is n + 127.
    let scale = f32::from_bits(shifted.to_bits().wrapping_add(127) << 23);
    if x < LOW { 0.0 } else { p * scale }
}

/// `x / (1 + exp(-x))`.
#[inline(always)]
pub(crate) fn silu(x: f32) -> f32 {
    x / (1.0 + exp(-x))
}

/// `x/2 * (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))`, written as `x * sigmoid(2 y)`.
#[inline(always)]
pub(crate) fn gelu_tanh(x: f32) -> f32 {
    const TWO_SQRT_2_OVER_PI: f32 = 1.595_769_1;
    let y = TWO_SQRT_2_OVER_PI * (x * x).mul_add(0.044_715 * x, x);
    x / (1.0 + exp(-y))
}

/// Lanes of the reductions below; a fixed number, so that every vector unit sums in the same order.
const LANES: usize = 32;

#[inline(always)]
fn fold(mut lanes: [f32; LANES]) -> f32 {
    let mut width = LANES / 2;
    while width > 0 {
        for i in 0..width {
            lanes[i] += lanes[i + width];
        }
        width /= 2;
    }
    lanes[0]
}

/// `sum f(x[i])` in a fixed order.
#[inline(always)]
pub(crate) fn sum_by(x: &[f32], f: impl Fn(f32, f32) -> f32) -> f32 {
    let mut lanes = [0f32; LANES];
    let (chunks, rest) = x.as_chunks::<LANES>();
    for chunk in chunks {
        for i in 0..LANES {
            lanes[i] = f(lanes[i], chunk[i]);
        }
    }
    for (lane, &v) in lanes.iter_mut().zip(rest) {
        *lane = f(*lane, v);
    }
    fold(lanes)
}

/// Largest element; negative infinity for an empty slice.
#[inline(always)]
pub(crate) fn max(x: &[f32]) -> f32 {
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let (chunks, rest) = x.as_chunks::<LANES>();
    for chunk in chunks {
        for i in 0..LANES {
            lanes[i] = if chunk[i] > lanes[i] {
                chunk[i]
            } else {
                lanes[i]
            };
        }
    }
    for (lane, &v) in lanes.iter_mut().zip(rest) {
        *lane = if v > *lane { v } else { *lane };
    }
    lanes
        .iter()
        .copied()
        .fold(f32::NEG_INFINITY, |a, b| if b > a { b } else { a })
}
