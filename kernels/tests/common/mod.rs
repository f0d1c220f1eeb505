//! What the tests share: reproducible numbers, comparisons and thread pools.
#![allow(dead_code, reason = "each test binary uses a part")]

pub(crate) mod batch;

use kernels::{Segment, SegmentKind, Tensor, bf16};

/// Reproducible values, roughly uniform in [-1, 1).
pub(crate) fn values(seed: u64, n: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ 0xD1B5_4A32_D192_ED03;
    (0..n)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
        })
        .collect()
}

/// A tensor of [`values`].
pub(crate) fn random(seed: u64, shape: &[usize]) -> Tensor {
    Tensor::from_f32(shape, values(seed, shape.iter().product())).unwrap()
}

/// The same numbers rounded to bf16, as a bf16 and as an f32 tensor.
pub(crate) fn random_bf16(seed: u64, shape: &[usize]) -> (Tensor, Tensor) {
    let data: Vec<bf16> = random(seed, shape)
        .to_f32_vec()
        .into_iter()
        .map(bf16::from_f32)
        .collect();
    let narrow = Tensor::from_bf16(shape, data).unwrap();
    let wide = narrow.to_f32();
    (narrow, wide)
}

/// Panics unless shapes agree and every element is within `tolerance * (1 + |want|)`.
pub(crate) fn assert_close(what: &str, got: &Tensor, want: &Tensor, tolerance: f32) {
    assert_eq!(got.shape(), want.shape(), "{what}: shapes");
    for (i, (a, b)) in got.to_f32_vec().iter().zip(want.to_f32_vec()).enumerate() {
        assert!(
            (a - b).abs() <= tolerance * (1.0 + b.abs()),
            "{what}[{i}]: {a} and {b}"
        );
    }
}

/// Bit patterns, for exact comparison.
pub(crate) fn bits(x: &Tensor) -> Vec<u32> {
    x.to_f32_vec().iter().map(|v| v.to_bits()).collect()
}

/// Runs `f` on a pool of its own.
pub(crate) fn on_threads<R: Send>(threads: usize, f: impl FnOnce() -> R + Send) -> R {
    rayon::ThreadPoolBuilder::new()
        .num_threads(threads)
        .build()
        .unwrap()
        .install(f)
}

/// Rows `start .. start + len`, copied.
pub(crate) fn rows(x: &Tensor, start: usize, len: usize) -> Tensor {
    let view = x.narrow0(start, len).unwrap();
    Tensor::from_f32(view.shape(), view.to_f32_vec()).unwrap()
}

/// A causal segment that continues a row at key `q_pos`.
pub(crate) fn causal(row: usize, q: std::ops::Range<usize>, q_pos: usize) -> Segment {
    Segment {
        row,
        q,
        kind: SegmentKind::Causal,
        q_pos,
        keys: 0,
    }
}

/// A segment whose queries see `keys` keys.
pub(crate) fn full(row: usize, q: std::ops::Range<usize>, keys: usize) -> Segment {
    Segment {
        row,
        q,
        kind: SegmentKind::Full,
        q_pos: 0,
        keys,
    }
}
