use std::{thread, time::Duration};

use proptest::prelude::*;

use super::*;
use crate::shape::tests::published;
use crate::{HeadShard, ModelShape, Op, SequenceShards, TokenOrder, collective::threads, wire};

const PATIENT: Duration = Duration::from_secs(60);

/// An element that names its row, token, head and place.
fn element(row: usize, token: usize, head: usize, d: usize) -> f32 {
    (row * 1_000_000 + token * 10_000 + head * 100 + d + 1) as f32
}

/// `[tokens, heads, dim]` of the given tokens of every row.
fn packed(tokens: &[Vec<usize>], heads: Range<usize>, dim: usize) -> Vec<f32> {
    let mut all = Vec::new();
    for (row, tokens) in tokens.iter().enumerate() {
        for (&token, head) in tokens
            .iter()
            .flat_map(|t| heads.clone().map(move |h| (t, h)))
        {
            all.extend((0..dim).map(|d| element(row, token, head, d)));
        }
    }
    all
}

fn scaled(heads: &Range<usize>, dim: usize) -> Range<usize> {
    heads.start * dim..heads.end * dim
}

fn tokens_of(
    shards: &[SequenceShards],
    pick: impl Fn(&SequenceShards) -> Vec<usize>,
) -> Vec<Vec<usize>> {
    shards.iter().map(pick).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]

    /// Queries and keys reach their heads and the result comes back, for several rows of token counts
    /// that do and do not divide, with KV heads replicated when there are fewer of them than ranks.
    #[test]
    fn tokens_become_heads_and_back(
        rows in prop::collection::vec(0_usize..12, 1..4), ranks in 1_usize..5,
        q_per_rank in 1_usize..3, dim in 1_usize..4,
        replicate in any::<bool>(), zigzag in any::<bool>(),
    ) {
        let heads = ranks * q_per_rank;
        let kv_heads = if replicate { 1 } else { ranks };
        let shape = ModelShape { heads, kv_heads, head_dim: dim, ..published() };
        let order = if zigzag { TokenOrder::ZigZag } else { TokenOrder::Contiguous };
        let shards: Vec<_> =
            rows.iter().map(|&n| SequenceShards::new(n, 1, ranks, order).unwrap()).collect();
        let own: Vec<_> = (0..ranks)
            .map(|u| HeadShard::under_ulysses(&shape, (1, 0), (ranks, u)).unwrap())
            .collect();
        let q: Vec<_> = own.iter().map(|h| scaled(&h.q, dim)).collect();
        let kv: Vec<_> = own.iter().map(|h| scaled(&h.kv, dim)).collect();
        let ends = threads::group(ranks, PATIENT).unwrap();
        thread::scope(|scope| {
            for (rank, end) in ends.into_iter().enumerate() {
                let (q, kv, own, shards) = (&q, &kv, &own[rank], &shards);
                scope.spawn(move || {
                    let list = shards.iter().map(|s| ExchangeRow {
                        piece: s.piece(),
                        tokens: (0..ranks).map(|u| s.own_tokens(0, u)).collect(),
                    });
                    let exchange = HeadExchange::new(list.collect(), ranks, rank).unwrap();
                    let mine = tokens_of(shards, |s| {
                        s.own_ranges(0, rank).into_iter().flatten().collect()
                    });
                    let all = tokens_of(shards, |s| {
                        s.ring_ranges(0).iter().cloned().flatten().collect()
                    });
                    let q_local = packed(&mine, 0..heads, dim);
                    let kv_local = packed(&mine, 0..kv_heads, dim);
                    let tensors = [
                        ByHead { data: &q_local, width: heads * dim, columns: q },
                        ByHead { data: &kv_local, width: kv_heads * dim, columns: kv },
                    ];
                    let got = exchange.to_heads(&end, &tensors).unwrap().wait().unwrap();
                    assert_eq!(got[0], packed(&all, own.q.clone(), dim));
                    assert_eq!(got[1], packed(&all, own.kv.clone(), dim));
                    let back = exchange.to_tokens(&end, &got[0], heads * dim, q).unwrap();
                    assert_eq!(back.wait().unwrap(), q_local);
                    if ranks > 1 && replicate {
                        assert!(exchange.to_tokens(&end, &got[1], kv_heads * dim, kv).is_err());
                    }
                    end.barrier().unwrap().wait().unwrap();
                    let there = exchange.elements(q[0].len() + kv[0].len());
                    let predicted = [there, exchange.elements(q[0].len())]
                        .map(|n| wire::moved(Op::AllToAll, ranks, rank, n).sent);
                    assert_eq!(end.traffic().total().sent, predicted[0] + predicted[1]);
                });
            }
        });
    }
}

#[test]
fn what_does_not_fit_is_refused_by_name() {
    let row = |tokens: Vec<usize>| vec![ExchangeRow { piece: 2, tokens }; 1];
    let refusal = |rows, index| HeadExchange::new(rows, 2, index).unwrap_err().to_string();
    assert!(refusal(row(vec![2; 3]), 0).starts_with("ranks of a row must be 2"));
    assert!(refusal(row(vec![2, 3]), 0).starts_with("tokens of a rank must lie"));
    assert!(refusal(row(vec![2, 1]), 2).starts_with("index must lie"));
    let exchange = HeadExchange::new(row(vec![2, 1]), 2, 0).unwrap();
    let ends = threads::group(2, PATIENT).unwrap();
    let to_heads = |columns: &[Range<usize>], data: &[f32]| {
        let tensor = ByHead {
            data,
            width: 4,
            columns,
        };
        exchange
            .to_heads(&ends[0], &[tensor])
            .unwrap_err()
            .to_string()
    };
    assert!(to_heads(&[0..2, 2..5], &[0.0; 8]).starts_with("columns must lie"));
    assert!(to_heads(&[0..2, 2..3], &[0.0; 8]).starts_with("columns of a rank must be 2"));
    assert!(to_heads(&[0..2, 2..4], &[0.0; 7]).starts_with("elements of the own tokens must be 8"));
    let alone = threads::group(1, PATIENT).unwrap();
    assert!(exchange.to_heads(&alone[0], &[]).is_err());
}
