//! Attention against its plain definition: packed rows, grouped heads, caches, mixed segments.
#![allow(missing_docs, clippy::unwrap_used)]

mod common;

use common::batch::{Batch, RowSpec, head_shapes, row_spec};
use common::{assert_close, causal, full, random};
use kernels::{
    AttnHeads, AttnRow, KvPart, Segment, SegmentKind, Tensor, mha, plain, varlen_attention,
};
use proptest::prelude::*;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn packed_attention_equals_its_definition(
        heads in head_shapes(), specs in prop::collection::vec(row_spec(), 1..4), seed: u64,
    ) {
        let batch = Batch::new(heads, specs, seed);
        assert_close("attention", &batch.run(), &batch.definition().out, 2e-5);
    }

    #[test]
    fn a_row_in_a_batch_has_the_bits_of_the_row_alone(
        heads in head_shapes(), specs in prop::collection::vec(row_spec(), 2..5), seed: u64,
    ) {
        let batch = Batch::new(heads, specs, seed);
        let together = batch.run();
        for (i, row) in batch.rows().iter().enumerate() {
            let (start, len) = (row.fresh.start, row.fresh.len());
            let alone = Batch {
                heads,
                q: common::rows(&batch.q, start, len),
                k: common::rows(&batch.k, start, len),
                v: common::rows(&batch.v, start, len),
                past: vec![batch.past[i].clone()],
                specs: vec![batch.specs[i].clone()],
                page: None,
            };
            let part = common::rows(&together, start, len);
            prop_assert_eq!(common::bits(&alone.run()), common::bits(&part), "row {}", i);
        }
    }

    #[test]
    fn threads_do_not_change_a_bit(heads in head_shapes(), specs in prop::collection::vec(row_spec(), 1..4), seed: u64) {
        let batch = Batch::new(heads, specs, seed);
        let one = common::on_threads(1, || batch.run());
        for threads in [2, 5] {
            let many = common::on_threads(threads, || batch.run());
            prop_assert_eq!(common::bits(&one), common::bits(&many));
        }
    }

    #[test]
    fn cached_and_fresh_keys_give_the_same_bits(heads in head_shapes(), past in 1usize..200, n in 1usize..20, seed: u64) {
        // The last `n` tokens of a causal row, once with the row before them fresh and once cached.
        let whole = Batch::new(heads, vec![RowSpec { past: 0, causal: past + n, full: 0 }], seed);
        let head_major = |x: &Tensor| -> Vec<f32> {
            let data = x.to_f32_vec();
            let (kv, d) = (heads.kv, heads.dim);
            (0..kv * past * d)
                .map(|i| data[((i / d % past) * kv + i / d / past) * d + i % d])
                .collect()
        };
        let tail = Batch {
            heads,
            q: common::rows(&whole.q, past, n),
            k: common::rows(&whole.k, past, n),
            v: common::rows(&whole.v, past, n),
            past: vec![(head_major(&whole.k), head_major(&whole.v))],
            specs: vec![RowSpec { past, causal: n, full: 0 }],
            page: None,
        };
        prop_assert_eq!(common::bits(&tail.run()), common::bits(&common::rows(&whole.run(), past, n)));
    }

    #[test]
    fn pages_of_any_length_change_no_bit(
        heads in head_shapes(), specs in prop::collection::vec(row_spec(), 1..4), page in 1usize..300, seed: u64,
    ) {
        let whole = Batch::new(heads, specs, seed);
        let want = common::bits(&whole.run());
        let paged = Batch { page: Some(page), ..whole };
        prop_assert_eq!(common::bits(&paged.run()), want);
    }

    #[test]
    fn dense_attention_equals_its_definition(
        n in 1usize..3, tq in 1usize..60, tk in 1usize..200, h in 1usize..4,
        d in prop::sample::select(vec![5usize, 16, 72, 300]), seed: u64,
    ) {
        let (q, k, v) = (
            random(seed, &[n, tq, h, d]), random(seed ^ 1, &[n, tk, h, d]), random(seed ^ 2, &[n, tk, h, d]),
        );
        let key_len: Vec<usize> = (0..n).map(|i| if i == 0 { tk } else { tk.div_ceil(2) }).collect();
        let scale = 1.0 / (d as f32).sqrt();
        let got = mha(&q, &k, &v, &key_len, scale).unwrap();
        let (qd, kd, vd) = (q.to_f32_vec(), k.to_f32_vec(), v.to_f32_vec());
        let mut want = Vec::new();
        for i in 0..n * tq * h {
            let (item, head) = (i / h / tq, i % h);
            let at = |j: usize| ((item * tk + j) * h + head) * d;
            let keys: Vec<&[f32]> = (0..key_len[item]).map(|j| &kd[at(j)..at(j) + d]).collect();
            let vals: Vec<&[f32]> = (0..key_len[item]).map(|j| &vd[at(j)..at(j) + d]).collect();
            want.extend(plain::attention(&qd[i * d..(i + 1) * d], &keys, &vals, scale));
        }
        let want = Tensor::from_f32(&[n, tq, h * d], want).unwrap();
        assert_close("mha", &got, &want, 2e-5);
    }
}

#[test]
fn no_packed_tokens_is_an_empty_answer() {
    let heads = AttnHeads {
        q: 2,
        kv: 1,
        dim: 4,
    };
    let batch = Batch::new(
        heads,
        vec![RowSpec {
            past: 3,
            causal: 0,
            full: 0,
        }],
        1,
    );
    assert_eq!(batch.run().shape(), [0, 8]);
}

#[test]
fn scores_far_apart_do_not_overflow() {
    let q = Tensor::from_f32(&[2, 1, 2], vec![300.0, 0.0, 300.0, 0.0]).unwrap();
    let k = Tensor::from_f32(&[2, 1, 2], vec![-300.0, 0.0, 300.0, 0.0]).unwrap();
    let v = Tensor::from_f32(&[2, 1, 2], vec![1.0, 2.0, 3.0, 4.0]).unwrap();
    let rows = [AttnRow {
        past: Vec::new(),
        fresh: 0..2,
    }];
    let y = varlen_attention(&q, &k, &v, &rows, &[causal(0, 0..2, 0)], 1.0).unwrap();
    assert_eq!(y.to_f32_vec(), [1.0, 2.0, 3.0, 4.0]);
}

#[test]
fn bad_rows_and_segments_are_named() {
    let heads = AttnHeads {
        q: 2,
        kv: 1,
        dim: 4,
    };
    let batch = Batch::new(
        heads,
        vec![RowSpec {
            past: 2,
            causal: 1,
            full: 3,
        }],
        1,
    );
    let run = |rows: &[AttnRow<'_>], segments: &[Segment]| {
        varlen_attention(&batch.q, &batch.k, &batch.v, rows, segments, 1.0)
            .map(|_| ())
            .map_err(|e| e.to_string())
    };
    let good = batch.rows();
    let named = |result: Result<(), String>, name: &str| {
        let message = result.unwrap_err();
        assert!(message.contains(name), "{message} should name {name}");
    };
    assert_eq!(run(&good, &batch.segments()), Ok(()));
    named(run(&good, &[causal(0, 0..4, 3)]), "segment keys");
    named(run(&good, &[full(0, 0..4, 7)]), "segment keys");
    named(run(&good, &[full(0, 0..4, 0)]), "segment keys");
    named(run(&good, &[full(1, 0..4, 4)]), "segment.row");
    named(run(&good, &[full(0, 0..5, 4)]), "segment.q");
    named(run(&good, &[full(0, 0..3, 4)]), "uncovered");
    named(run(&good, &[full(0, 0..3, 4), full(0, 2..4, 4)]), "twice");
    named(
        run(
            &[AttnRow {
                past: Vec::new(),
                fresh: 0..5,
            }],
            &[full(0, 0..4, 4)],
        ),
        "row.fresh",
    );
    let mut long = good[0].clone();
    long.past[0].len = 3;
    named(run(&[long], &batch.segments()), "row.past");
    let mut uneven = good[0].clone();
    let part = uneven.past[0];
    uneven.past = vec![KvPart { len: 1, ..part }, part];
    named(run(&[uneven.clone()], &[]), "parts of row.past");
    uneven.past = vec![KvPart { len: 0, ..part }];
    named(run(&[uneven], &[]), "parts of row.past");
    let three = Tensor::zeros(&[4, 3, 4]).unwrap();
    let two = Tensor::zeros(&[4, 2, 4]).unwrap();
    let error = varlen_attention(&three, &two, &two, &good, &batch.segments(), 1.0).unwrap_err();
    assert!(error.to_string().contains("heads"), "{error}");
    assert!(matches!(batch.segments()[0].kind, SegmentKind::Full));
}
