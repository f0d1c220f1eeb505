use std::{thread, time::Duration};

use proptest::prelude::*;

use super::*;
use crate::shape::tests::published;
use crate::{HeadShard, ModelShape, Op, collective::threads, wire};

const PATIENT: Duration = Duration::from_secs(60);

/// An element that names its token, head and place.
fn element(token: usize, head: usize, d: usize) -> f32 {
    (token * 10_000 + head * 100 + d + 1) as f32
}

/// A shard of tokens with all heads; padding is a value that must never be seen again.
fn token_shard(shards: &TokenShards, rank: usize, heads: usize, dim: usize) -> Vec<f32> {
    let mut local = vec![f32::NAN; shards.shard_len() * heads * dim];
    for token in 0..shards.tokens() {
        let (holder, at) = shards.locate(token).unwrap();
        for (head, d) in (0..heads).flat_map(|h| (0..dim).map(move |d| (h, d))) {
            if holder == rank {
                local[(at * heads + head) * dim + d] = element(token, head, d);
            }
        }
    }
    local
}

fn all_tokens(tokens: usize, own: &Range<usize>, dim: usize) -> Vec<f32> {
    let mut all = Vec::new();
    for (token, head) in (0..tokens).flat_map(|t| own.clone().map(move |h| (t, h))) {
        all.extend((0..dim).map(|d| element(token, head, d)));
    }
    all
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]

    /// Queries and keys reach their heads and the result comes back, for token counts that do and
    /// do not divide, with KV heads replicated when there are fewer of them than ranks.
    #[test]
    fn tokens_become_heads_and_back(
        tokens in 0_usize..20, ranks in 1_usize..5, q_per_rank in 1_usize..3, dim in 1_usize..4,
        replicate in any::<bool>(), zigzag in any::<bool>(),
    ) {
        let heads = ranks * q_per_rank;
        let kv_heads = if replicate { 1 } else { ranks };
        let shape = ModelShape { heads, kv_heads, head_dim: dim, ..published() };
        let shards = if zigzag {
            TokenShards::zigzag(tokens, ranks).unwrap()
        } else {
            TokenShards::contiguous(tokens, ranks).unwrap()
        };
        let own: Vec<_> = (0..ranks)
            .map(|u| HeadShard::under_ulysses(&shape, (1, 0), (ranks, u)).unwrap())
            .collect();
        let ranges = |pick: fn(&HeadShard) -> Range<usize>| own.iter().map(pick).collect();
        let q = HeadExchange::new(shards.clone(), heads, ranges(|h| h.q.clone()), dim).unwrap();
        let kv = HeadExchange::new(shards.clone(), kv_heads, ranges(|h| h.kv.clone()), dim).unwrap();
        let ends = threads::group(ranks, PATIENT).unwrap();
        thread::scope(|scope| {
            for (rank, end) in ends.into_iter().enumerate() {
                let (q, kv, own, shards) = (&q, &kv, &own[rank], &shards);
                scope.spawn(move || {
                    let q_local = token_shard(shards, rank, heads, dim);
                    let kv_local = token_shard(shards, rank, kv_heads, dim);
                    // Both in flight at once.
                    let q_pending = q.to_heads(&end, &q_local).unwrap();
                    let kv_pending = kv.to_heads(&end, &kv_local).unwrap();
                    let q_all = q_pending.wait().unwrap();
                    assert_eq!(q_all, all_tokens(tokens, &own.q, dim));
                    let kv_all = kv_pending.wait().unwrap();
                    assert_eq!(kv_all, all_tokens(tokens, &own.kv, dim));
                    let back = q.to_tokens(&end, &q_all).unwrap().wait().unwrap();
                    for (got, sent) in back.iter().zip(&q_local) {
                        let expected = if sent.is_nan() { 0.0 } else { *sent };
                        assert!(got.to_bits() == expected.to_bits());
                    }
                    if ranks > 1 && replicate {
                        assert!(kv.to_tokens(&end, &kv_all).is_err());
                    }
                    end.barrier().unwrap().wait().unwrap();
                    let moved = |n| wire::moved(Op::AllToAll, ranks, rank, n).sent;
                    let kv_sent = ranks * shards.shard_len() * own.kv.len() * dim;
                    let predicted = 2 * moved(q.token_side()) + moved(kv_sent);
                    assert_eq!(end.traffic().total().sent, predicted);
                });
            }
        });
    }
}

#[test]
fn ranges_that_do_not_fit_are_refused() {
    let shards = TokenShards::contiguous(4, 2).unwrap();
    let refusal = |own: Vec<Range<usize>>| {
        let e = HeadExchange::new(shards.clone(), 4, own, 2).unwrap_err();
        e.to_string()
    };
    assert!(refusal(vec![0..4; 1]).starts_with("head ranges must be 2"));
    assert!(refusal(vec![0..2, 2..5]).starts_with("head range must lie"));
    assert!(refusal(vec![0..2, 2..3]).starts_with("heads of a rank must be 2"));
    let exchange = HeadExchange::new(shards.clone(), 4, vec![0..2, 2..4], 2).unwrap();
    let ends = threads::group(2, PATIENT).unwrap();
    let short = exchange.to_heads(&ends[0], &[0.0; 15]).unwrap_err();
    assert_eq!(short.to_string(), "token shard must be 16, got 15");
    let alone = threads::group(1, PATIENT).unwrap();
    assert!(exchange.to_heads(&alone[0], &[0.0; 16]).is_err());
}
