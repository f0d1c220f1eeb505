//! Attention over parts of the keys, merged: what attention over all keys gives.
#![allow(missing_docs, clippy::unwrap_used)]

mod common;

use std::ops::Range;

use common::batch::{Batch, head_shapes, row_spec};
use common::{assert_close, bits, causal, full, random};
use kernels::{
    AttnHeads, AttnRow, KvPart, PartialAttention, Segment, SegmentKind, Tensor, bf16,
    merge_attention, plain, varlen_attention_partial,
};
use proptest::prelude::*;

/// Relative to one plus the size of the value.
const TOLERANCE: f32 = 2e-6;

/// Some keys of every row of a batch, as a rank of a ring holds them.
struct Part {
    /// `[Tk, Hkv, D]`, row after row.
    k: Tensor,
    v: Tensor,
    /// Key indices that the part holds of each row.
    keys: Vec<Range<usize>>,
    /// Of those, the leading ones that are given as cached keys.
    cached: Vec<usize>,
}

impl Part {
    fn new(batch: &Batch, keys: Vec<Range<usize>>, cache_half: bool) -> Self {
        let (mut k, mut v) = (Vec::new(), Vec::new());
        for (row, keys) in keys.iter().enumerate() {
            for key in keys.clone() {
                let (key, value) = all_heads(batch, row, key);
                k.extend(key);
                v.extend(value);
            }
        }
        let AttnHeads { kv, dim, .. } = batch.heads;
        let shape = [k.len() / kv / dim, kv, dim];
        let half = |r: &Range<usize>| if cache_half { r.len() / 2 } else { 0 };
        Self {
            k: Tensor::from_f32(&shape, k).unwrap(),
            v: Tensor::from_f32(&shape, v).unwrap(),
            cached: keys.iter().map(half).collect(),
            keys,
        }
    }

    fn run(&self, batch: &Batch) -> PartialAttention {
        let AttnHeads { kv, dim, .. } = batch.heads;
        let (k, v) = (self.k.as_f32().unwrap(), self.v.as_f32().unwrap());
        let mut at = 0;
        let rows: Vec<AttnRow<'_>> = self
            .keys
            .iter()
            .zip(&self.cached)
            .map(|(keys, &len)| {
                let start = at * kv * dim;
                let past = KvPart {
                    k: &k[start..],
                    v: &v[start..],
                    head_stride: dim,
                    token_stride: kv * dim,
                    len,
                };
                let fresh = at + len..at + keys.len();
                at += keys.len();
                AttnRow {
                    past: (len > 0).then_some(past).into_iter().collect(),
                    fresh,
                }
            })
            .collect();
        let segments: Vec<Segment> = batch
            .segments()
            .iter()
            .flat_map(|s| over_keys(s, &self.keys[s.row]))
            .collect();
        let scale = batch.scale();
        varlen_attention_partial(&batch.q, &rows, &self.k, &self.v, &segments, scale).unwrap()
    }
}

/// Key `key` of a row in all KV heads, and the value.
fn all_heads(batch: &Batch, row: usize, key: usize) -> (Vec<f32>, Vec<f32>) {
    let AttnHeads { kv, dim, .. } = batch.heads;
    let (past, rows) = (batch.specs[row].past, batch.rows());
    if key >= past {
        let token = rows[row].fresh.start + key - past;
        let of = |x: &Tensor| x.narrow0(token, 1).unwrap().to_f32_vec();
        return (of(&batch.k), of(&batch.v));
    }
    let of = |x: &[f32]| {
        let head = |h: usize| x[(h * past + key) * dim..][..dim].to_vec();
        (0..kv).flat_map(head).collect()
    };
    (of(&batch.past[row].0), of(&batch.past[row].1))
}

/// The segments that see what a segment sees of `keys`, which count from zero there. The queries of a causal
/// segment that lie before all of them are in none.
fn over_keys(s: &Segment, keys: &Range<usize>) -> Vec<Segment> {
    if s.kind == SegmentKind::Full {
        let visible = s.keys.clamp(keys.start, keys.end) - keys.start;
        return vec![full(s.row, s.q.clone(), visible)];
    }
    // Query i sees the keys up to q_pos + i: from `first` on some of them, from `all` on every one.
    let first = keys.start.saturating_sub(s.q_pos).min(s.q.len());
    let all = keys.end.saturating_sub(s.q_pos).clamp(first, s.q.len());
    let at = |i: usize| s.q.start + i;
    let mut segments = vec![full(s.row, at(all)..s.q.end, keys.len())];
    if first < all {
        let q_pos = s.q_pos + first - keys.start;
        segments.push(causal(s.row, at(first)..at(all), q_pos));
    }
    segments
}

/// All keys of every row, cut at random places into `parts` parts, some of them empty.
fn cut(batch: &Batch, parts: usize, seed: u64) -> Vec<Part> {
    let cuts: Vec<Vec<usize>> = batch
        .rows()
        .iter()
        .enumerate()
        .map(|(row, r)| {
            let places = common::values(seed ^ row as u64, parts - 1);
            // Beyond either end now and then, so that parts are empty.
            let place = |v: f32| ((0.5 + 0.6 * v).clamp(0.0, 1.0) * r.keys() as f32) as usize;
            let mut cuts: Vec<usize> = places.into_iter().map(place).collect();
            cuts.extend([0, r.keys()]);
            cuts.sort_unstable();
            cuts
        })
        .collect();
    (0..parts)
        .map(|p| {
            let keys = cuts.iter().map(|c| c[p]..c[p + 1]).collect();
            Part::new(batch, keys, p % 2 == 1)
        })
        .collect()
}

fn merged(parts: &[PartialAttention], order: &[usize]) -> PartialAttention {
    let mut into = parts[order[0]].clone();
    for &i in &order[1..] {
        merge_attention(&mut into, &parts[i]).unwrap();
    }
    into
}

fn batches() -> impl Strategy<Value = Batch> {
    let specs = prop::collection::vec(row_spec(), 1..4);
    (head_shapes(), specs, any::<u64>()).prop_map(|(h, specs, seed)| Batch::new(h, specs, seed))
}

fn order() -> impl Strategy<Value = Vec<usize>> {
    (1usize..=5).prop_flat_map(|n| Just((0..n).collect::<Vec<_>>()).prop_shuffle())
}

impl std::fmt::Debug for Batch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?} {:?}", self.heads, self.specs)
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn parts_merged_in_any_order_are_attention_over_all_keys(
        batch in batches(), order in order(), seed: u64,
    ) {
        let parts: Vec<_> = cut(&batch, order.len(), seed).iter().map(|p| p.run(&batch)).collect();
        let got = merged(&parts, &order);
        assert_close("beside the whole", &got.out, &batch.run(), TOLERANCE);
        let want = batch.definition();
        assert_close("out", &got.out, &want.out, TOLERANCE);
        assert_close("lse", &got.lse, &want.lse, TOLERANCE);
    }

    #[test]
    fn merging_equals_its_definition(
        batch in batches(), order in order(), seed: u64,
    ) {
        let parts: Vec<_> = cut(&batch, order.len(), seed).iter().map(|p| p.run(&batch)).collect();
        let got = merged(&parts, &order);
        let (out, lse) = (got.out.to_f32_vec(), got.lse.to_f32_vec());
        let dim = batch.heads.dim;
        for (i, &lse) in lse.iter().enumerate() {
            let of = |p: &PartialAttention| {
                let out = p.out.as_f32().unwrap()[i * dim..][..dim].to_vec();
                (out, p.lse.as_f32().unwrap()[i])
            };
            let (want, want_lse) = plain::merge_attention(&parts.iter().map(of).collect::<Vec<_>>());
            prop_assert!((lse - want_lse).abs() <= TOLERANCE * (1.0 + want_lse.abs()));
            for (a, b) in out[i * dim..][..dim].iter().zip(want) {
                prop_assert!((a - b).abs() <= TOLERANCE * (1.0 + b.abs()), "{a} {b}");
            }
        }
    }

    #[test]
    fn one_part_with_all_keys_has_the_bits_of_the_whole(batch in batches(), seed: u64) {
        let part = cut(&batch, 1, seed)[0].run(&batch);
        prop_assert_eq!(bits(&part.out), bits(&batch.run()));
    }

    #[test]
    fn threads_do_not_change_a_bit(batch in batches(), seed: u64) {
        let part = &cut(&batch, 2, seed)[1];
        let run = |threads| common::on_threads(threads, || {
            let mut one = part.run(&batch);
            merge_attention(&mut one, &part.run(&batch)).unwrap();
            (bits(&one.out), bits(&one.lse))
        });
        let one = run(1);
        prop_assert_eq!(&run(2), &one);
        prop_assert_eq!(&run(5), &one);
    }
}

/// Two rows of three queries over `keys` fresh keys each; `[T 6, Hq 2, D 4]`, one KV head.
fn two_rows(keys: usize) -> (Tensor, Tensor, [AttnRow<'static>; 2]) {
    let row = |r: usize| AttnRow {
        past: Vec::new(),
        fresh: r * keys..(r + 1) * keys,
    };
    let (q, k) = (random(1, &[6, 2, 4]), random(2, &[2 * keys, 1, 4]));
    (q, k, [row(0), row(1)])
}

fn assert_saw_nothing(part: &PartialAttention, queries: Range<usize>) {
    let (out, lse) = (part.out.as_f32().unwrap(), part.lse.as_f32().unwrap());
    for t in queries {
        assert_eq!(out[t * 8..][..8], [0.0; 8], "out of query {t}");
        assert_eq!(
            lse[t * 2..][..2],
            [f32::NEG_INFINITY; 2],
            "lse of query {t}"
        );
    }
}

#[test]
fn a_query_that_sees_no_key_has_no_weight() {
    let (q, k, rows) = two_rows(5);
    let run =
        |segments: &[Segment]| varlen_attention_partial(&q, &rows, &k, &k, segments, 1.0).unwrap();
    // Queries 0, 4 and 5 are in no segment; 1 sees no key.
    let part = run(&[full(1, 2..4, 5), full(0, 1..2, 0)]);
    assert_saw_nothing(&part, 0..2);
    assert_saw_nothing(&part, 4..6);
    let lse = part.lse.as_f32().unwrap();
    assert!(lse[4..8].iter().all(|v| v.is_finite()));
    assert_saw_nothing(&run(&[]), 0..6);
}

#[test]
fn no_keys_at_all_are_allowed() {
    let (q, k, rows) = two_rows(0);
    let segments = [full(0, 0..3, 0), full(1, 3..6, 0)];
    let part = varlen_attention_partial(&q, &rows, &k, &k, &segments, 1.0).unwrap();
    assert_saw_nothing(&part, 0..6);
    let none = Tensor::zeros(&[0, 2, 4]).unwrap();
    let part = varlen_attention_partial(&none, &rows, &k, &k, &[], 1.0).unwrap();
    assert_eq!(
        (part.out.shape(), part.lse.shape()),
        (&[0, 8][..], &[0, 2][..])
    );
}

#[test]
fn queries_may_be_more_than_the_keys_or_fewer() {
    let (q, k, rows) = two_rows(1);
    let part = varlen_attention_partial(&q, &rows, &k, &k, &[full(1, 0..6, 1)], 1.0).unwrap();
    // One key: its value is the answer, its score the lse.
    let (q, k) = (q.to_f32_vec(), k.to_f32_vec());
    for head in 0..12 {
        assert_eq!(part.out.as_f32().unwrap()[head * 4..][..4], k[4..8]);
        let score: f32 = (0..4).map(|i| q[head * 4 + i] * k[4 + i]).sum();
        assert!((part.lse.as_f32().unwrap()[head] - score).abs() < 1e-6);
    }
}

#[test]
fn a_side_that_saw_nothing_leaves_the_bits_of_the_other() {
    let (q, k, rows) = two_rows(5);
    let run =
        |segments: &[Segment]| varlen_attention_partial(&q, &rows, &k, &k, segments, 1.0).unwrap();
    let (some, none) = (run(&[full(0, 0..3, 4), full(1, 3..6, 5)]), run(&[]));
    for (mut into, other) in [(some.clone(), &none), (none.clone(), &some)] {
        merge_attention(&mut into, other).unwrap();
        assert_eq!(bits(&into.out), bits(&some.out));
        assert_eq!(bits(&into.lse), bits(&some.lse));
    }
    let mut into = none.clone();
    merge_attention(&mut into, &none).unwrap();
    assert_saw_nothing(&into, 0..6);
}

/// One query with one head of two elements.
fn one_head(out: [f32; 2], lse: f32) -> PartialAttention {
    PartialAttention {
        out: Tensor::from_f32(&[1, 2], out.to_vec()).unwrap(),
        lse: Tensor::from_f32(&[1, 1], vec![lse]).unwrap(),
    }
}

#[test]
fn weights_far_apart_neither_overflow_nor_vanish() {
    for (a, b, want) in [
        (1e4, -1e4, [1.0, 2.0]),
        (-1e4, 1e4, [3.0, 6.0]),
        (1e4, 1e4, [2.0, 4.0]),
        (-1e4, -1e4, [2.0, 4.0]),
        (f32::MAX, f32::MIN, [1.0, 2.0]),
    ] {
        let mut into = one_head([1.0, 2.0], a);
        merge_attention(&mut into, &one_head([3.0, 6.0], b)).unwrap();
        assert_eq!(into.out.to_f32_vec(), want);
        let larger = a.max(b);
        let lse = into.lse.to_f32_vec()[0];
        assert!((lse - larger).abs() <= 0.7 && lse.is_finite(), "{lse}");
    }
    let mut into = one_head([1.0, 2.0], f32::NAN);
    merge_attention(&mut into, &one_head([3.0, 6.0], 0.0)).unwrap();
    assert!(into.out.to_f32_vec().iter().all(|v| v.is_nan()));
    assert!(into.lse.to_f32_vec()[0].is_nan());
}

#[test]
fn scores_far_apart_do_not_overflow_the_lse() {
    let q = Tensor::from_f32(&[1, 1, 2], vec![300.0, 0.0]).unwrap();
    let k = Tensor::from_f32(&[2, 1, 2], vec![-300.0, 0.0, 300.0, 0.0]).unwrap();
    let row = AttnRow {
        past: Vec::new(),
        fresh: 0..2,
    };
    let part = varlen_attention_partial(&q, &[row], &k, &k, &[full(0, 0..1, 2)], 1.0).unwrap();
    assert_eq!(part.lse.to_f32_vec(), [90_000.0]);
}

#[test]
fn threads_do_not_change_a_bit_of_a_large_merge() {
    let side = |seed| PartialAttention {
        out: random(seed, &[600, 256]),
        lse: random(seed ^ 1, &[600, 8]),
    };
    let run = |threads| {
        let mut into = side(1);
        common::on_threads(threads, || merge_attention(&mut into, &side(9))).unwrap();
        (bits(&into.out), bits(&into.lse))
    };
    assert_eq!(run(3), run(1));
}

fn named<T: std::fmt::Debug, E: ToString + std::fmt::Debug>(result: Result<T, E>, name: &str) {
    let message = result.unwrap_err().to_string();
    assert!(message.contains(name), "{message} should name {name}");
}

#[test]
fn bad_rows_segments_and_shapes_are_named() {
    let (q, k, good) = two_rows(5);
    let run = |rows: &[AttnRow<'_>], segments: &[Segment]| {
        varlen_attention_partial(&q, rows, &k, &k, segments, 1.0)
    };
    assert!(run(&good, &[full(0, 0..3, 5), causal(1, 3..6, 2)]).is_ok());
    named(run(&good, &[full(2, 0..3, 5)]), "segment.row");
    // The bound of queries is the queries, not the keys.
    named(
        run(&good, &[full(0, 3..7, 5)]),
        "segment.q is 7, the limit is 6",
    );
    #[expect(clippy::reversed_empty_ranges, reason = "the bad input")]
    let reversed = full(0, 3..2, 5);
    named(run(&good, &[reversed]), "segment.q");
    named(
        run(&good, &[full(0, 0..3, 6)]),
        "segment keys is 6, the limit is 5",
    );
    named(
        run(&good, &[causal(0, 0..3, 3)]),
        "segment keys is 6, the limit is 5",
    );
    named(run(&good, &[causal(0, 0..3, usize::MAX)]), "segment keys");
    named(run(&good, &[full(0, 0..3, 5), full(1, 2..4, 0)]), "twice");
    let mut rows = good.clone();
    rows[1].fresh = 5..11;
    named(run(&rows, &[]), "row.fresh is 11, the limit is 10");
    rows[1].fresh = 5..10;
    let cached = [0.0; 4];
    rows[1].past = vec![KvPart {
        k: &cached,
        v: &cached,
        head_stride: 4,
        token_stride: 4,
        len: 2,
    }];
    named(run(&rows, &[]), "row.past end is 8, the limit is 4");
    let with =
        |q: &Tensor, k: &Tensor, v: &Tensor| varlen_attention_partial(q, &good, k, v, &[], 1.0);
    named(
        with(&q, &k, &random(1, &[9, 1, 4])),
        "v has shape [9, 1, 4]",
    );
    named(with(&q, &random(1, &[10, 1, 3]), &k), "k has shape");
    named(with(&random(1, &[6, 8]), &k, &k), "q has shape");
    let three = random(1, &[10, 3, 4]);
    named(with(&q, &three, &three), "heads");
    let none = Tensor::zeros(&[10, 0, 4]).unwrap();
    named(with(&q, &none, &none), "heads");
    let narrow = Tensor::from_bf16(&[10, 1, 4], vec![bf16::ONE; 40]).unwrap();
    named(with(&q, &k, &narrow), "v is Bf16");
}

#[test]
fn parts_that_do_not_fit_are_not_merged() {
    let good = one_head([1.0, 2.0], 0.5);
    let merge = |other: PartialAttention| {
        let mut into = good.clone();
        let result = merge_attention(&mut into, &other);
        assert_eq!(bits(&into.out), bits(&good.out));
        assert_eq!(bits(&into.lse), bits(&good.lse));
        result
    };
    let with = |out: Tensor, lse: Tensor| PartialAttention { out, lse };
    let two = random(1, &[2, 2]);
    named(merge(with(two.clone(), good.lse.clone())), "other.out");
    named(merge(with(good.out.clone(), two.clone())), "other.lse");
    let narrow = Tensor::from_bf16(&[1, 1], vec![bf16::ONE]).unwrap();
    named(merge(with(good.out.clone(), narrow)), "other.lse is Bf16");
    let mut into = with(good.out.clone(), two);
    named(merge_attention(&mut into, &good), "into.lse");
    let mut into = with(random(1, &[1, 3]), random(1, &[1, 2]));
    named(merge_attention(&mut into, &good), "heads");
}
