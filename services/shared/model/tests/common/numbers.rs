//! Random values, and how far results lie apart.
#![allow(dead_code)]

/// `count` values in `[-1, 1)`, the same for the same seed.
pub(crate) fn values(seed: u64, count: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1_u64 << 23) as f32 - 1.0
    };
    (0..count).map(|_| next()).collect()
}

/// Size of the difference of `a` and `b` in sizes of `b`.
pub(crate) fn relative(a: &[f32], b: &[f32]) -> f64 {
    assert_eq!(a.len(), b.len());
    let square = |v: f64| v * v;
    let difference: f64 = a.iter().zip(b).map(|(a, b)| square(f64::from(a - b))).sum();
    let size: f64 = b.iter().map(|b| square(f64::from(*b))).sum();
    (difference / size).sqrt()
}
