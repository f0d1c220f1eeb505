//! Prints the time of each operation at the sizes of a small model (or of a wide one with `--wide`);
//! further words select the operations whose name contains them.
#![allow(
    clippy::print_stdout,
    clippy::disallowed_methods,
    clippy::unwrap_used,
    reason = "a tool"
)]

use std::hint::black_box;
use std::time::Instant;

use kernels::{
    AttnHeads, AttnRow, Conv2dWeight, ExpertWeights, GroupNorm, KvPart, LinearWeight, RopeTable,
    Segment, SegmentKind, Tensor, conv2d, group_norm, linear, merge_attention, moe_combine,
    moe_experts, moe_route, qkv_split_rope_norm, rms_norm, varlen_attention,
    varlen_attention_partial,
};

struct Sizes {
    rows: usize,
    tokens: usize,
    past: usize,
    hidden: usize,
    heads: AttnHeads,
    experts: usize,
    top_k: usize,
    width: usize,
    grid: usize,
}

const SMALL: Sizes = Sizes {
    rows: 2,
    tokens: 257,
    past: 40,
    hidden: 128,
    heads: AttnHeads {
        q: 8,
        kv: 2,
        dim: 16,
    },
    experts: 8,
    top_k: 2,
    width: 64,
    grid: 16,
};

const WIDE: Sizes = Sizes {
    rows: 1,
    tokens: 1025,
    past: 100,
    hidden: 4096,
    heads: AttnHeads {
        q: 32,
        kv: 8,
        dim: 128,
    },
    experts: 8,
    top_k: 4,
    width: 3072,
    grid: 32,
};

fn random(shape: &[usize]) -> Tensor {
    let mut state = 0x9E37_79B9_7F4A_7C15u64;
    let n = shape.iter().product();
    let data = (0..n)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
        })
        .collect();
    Tensor::from_f32(shape, data).unwrap()
}

fn weight(n: usize, k: usize) -> LinearWeight {
    LinearWeight::new(&random(&[n, k]), None).unwrap()
}

/// Best of many runs; `flop` in all.
fn time<R>(name: &str, flop: usize, mut f: impl FnMut() -> R) {
    if std::env::args()
        .skip(1)
        .any(|a| !a.starts_with("--") && !name.contains(&a))
    {
        return;
    }
    let (mut best, start) = (f64::INFINITY, Instant::now());
    for round in 0..2000 {
        let t = Instant::now();
        black_box(f());
        best = best.min(t.elapsed().as_secs_f64());
        if round > 3 && start.elapsed().as_secs_f64() > 0.5 {
            break;
        }
    }
    println!(
        "{name:16} {:9.1} us  {:7.1} GFLOP/s",
        best * 1e6,
        flop as f64 / best / 1e9
    );
}

fn main() {
    let s = if std::env::args().any(|a| a == "--wide") {
        WIDE
    } else {
        SMALL
    };
    attention(&s);
    experts(&s);
    image(&s);
}

fn attention(s: &Sizes) {
    let (t, h, heads) = (s.rows * s.tokens, s.hidden, s.heads);
    let (x, norm) = (random(&[t, h]), random(&[h]));
    time("rms_norm", 4 * t * h, || rms_norm(&x, &norm, 1e-5).unwrap());
    let w = weight(heads.width(), h);
    time("qkv linear", 2 * t * h * heads.width(), || {
        linear(&x, &w).unwrap()
    });
    let w = weight(h, h);
    time("o linear", 2 * t * h * h, || linear(&x, &w).unwrap());
    let qkv = random(&[t, heads.width()]);
    let rope = RopeTable {
        cos: random(&[t, heads.dim]),
        sin: random(&[t, heads.dim]),
    };
    let qn = random(&[heads.dim]);
    let split = || qkv_split_rope_norm(&qkv, &rope, Some(&qn), Some(&qn), 1e-5, heads).unwrap();
    time("rope + qk norm", 0, split);
    let (q, k, v) = split();
    let past = random(&[heads.kv * s.past * heads.dim]);
    let p = past.as_f32().unwrap();
    let (head_stride, token_stride) = (s.past * heads.dim, heads.dim);
    let part = KvPart {
        k: p,
        v: p,
        head_stride,
        token_stride,
        len: s.past,
    };
    let rows: Vec<AttnRow<'_>> = (0..s.rows)
        .map(|r| AttnRow {
            past: vec![part],
            fresh: r * s.tokens..(r + 1) * s.tokens,
        })
        .collect();
    let (kind, keys) = (SegmentKind::Full, s.past + s.tokens);
    let segments: Vec<Segment> = rows
        .iter()
        .enumerate()
        .map(|(row, r)| Segment {
            row,
            q: r.fresh.clone(),
            kind,
            q_pos: 0,
            keys,
        })
        .collect();
    let flop = 4 * t * keys * heads.q * heads.dim;
    time("attention", flop, || {
        varlen_attention(&q, &k, &v, &rows, &segments, 0.25).unwrap()
    });
    let partial = || varlen_attention_partial(&q, &rows, &k, &v, &segments, 0.25).unwrap();
    time("attention part", flop, partial);
    let (mut into, other) = (partial(), partial());
    time("attention merge", 0, || {
        merge_attention(&mut into, &other).unwrap();
    });
}

fn experts(s: &Sizes) {
    let (t, h) = (s.rows * s.tokens, s.hidden);
    let (x, router) = (random(&[t, h]), weight(s.experts, h));
    time("moe route", 2 * t * h * s.experts, || {
        moe_route(&x, &router, s.top_k, true).unwrap()
    });
    let routing = moe_route(&x, &router, s.top_k, true).unwrap();
    let experts = ExpertWeights::new(
        (0..s.experts).map(|_| weight(2 * s.width, h)).collect(),
        (0..s.experts).map(|_| weight(h, s.width)).collect(),
    )
    .unwrap();
    time("moe experts", 6 * t * s.top_k * h * s.width, || {
        moe_experts(&x, &routing, &experts).unwrap()
    });
    let slots = t * s.top_k;
    let (parts, position) = (random(&[slots, h]), (0..slots as u32).rev());
    let position: Vec<u32> = position.collect();
    time("moe combine", 2 * slots * h, || {
        moe_combine(&parts, &position, &routing).unwrap()
    });
}

fn image(s: &Sizes) {
    let (c, pixels) = (s.hidden.min(1024), s.rows * s.grid * s.grid);
    let x = random(&[s.rows, s.grid, s.grid, c / 4]);
    let w = Conv2dWeight::new(&random(&[c, c / 4, 3, 3]), None).unwrap();
    time("conv2d c/4 -> c", 2 * pixels * c * c / 4 * 9, || {
        conv2d(&x, &w).unwrap()
    });
    let x = random(&[s.rows, s.grid, s.grid, c]);
    let w = Conv2dWeight::new(&random(&[c, c, 3, 3]), None).unwrap();
    time("conv2d c -> c", 2 * pixels * c * c * 9, || {
        conv2d(&x, &w).unwrap()
    });
    let w = random(&[c]);
    let norm = GroupNorm {
        groups: 32,
        weight: &w,
        bias: &w,
        eps: 1e-5,
    };
    time("group_norm silu", 0, || {
        group_norm(&x, &norm, None, true).unwrap()
    });
}
