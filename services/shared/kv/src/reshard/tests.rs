use std::slice;

use parallel::{HeadShard, LayerShape, ModelShape, TokenShards, near_even_range};
use proptest::prelude::*;

use super::*;
use crate::{KvDType, KvHalf};

/// How one pool spreads a prefix: pipeline stages, sequence shards, head shards.
#[derive(Debug, Clone, Copy)]
struct Pool {
    pp: usize,
    sequence: usize,
    zigzag: bool,
    heads: usize,
}

fn geometry(layers: usize, kv_heads: usize, head_dim: usize) -> KvGeometry {
    KvGeometry {
        layers,
        kv_heads,
        head_dim,
        dtype: KvDType::Bf16,
    }
}

/// The shards of a pool as the ownership maps of the parallel plan have them.
fn shards(pool: Pool, g: &KvGeometry, tokens: usize) -> Vec<KvShard> {
    let layer = LayerShape {
        experts: 1,
        expert_inner: 1,
        shared_inner: None,
    };
    let shape = ModelShape {
        hidden: 1,
        heads: g.kv_heads * 8,
        kv_heads: g.kv_heads,
        head_dim: g.head_dim,
        layers: vec![layer; g.layers],
        cfg_distilled: false,
    };
    let split = if pool.zigzag {
        TokenShards::zigzag(tokens, pool.sequence)
    } else {
        TokenShards::contiguous(tokens, pool.sequence)
    };
    let split = split.unwrap();
    let mut all = Vec::new();
    for stage in 0..pool.pp {
        for rank in 0..pool.sequence {
            for index in 0..pool.heads {
                all.push(KvShard {
                    layers: near_even_range(g.layers, pool.pp, stage).unwrap(),
                    heads: HeadShard::new(&shape, pool.heads, index).unwrap().kv,
                    tokens: split.ranges(rank).unwrap(),
                });
            }
        }
    }
    all
}

/// A shard's buffer by its definition: element by element out of the whole payload, whose elements
/// are their own places.
fn cut(shard: &KvShard, g: &KvGeometry, tokens: usize) -> Vec<usize> {
    let mut buffer = Vec::new();
    for layer in shard.layers.clone() {
        for half in [KvHalf::Key, KvHalf::Value] {
            for head in shard.heads.clone() {
                let start = g.head_range(layer, half, head, tokens).unwrap().start;
                for token in shard.tokens.iter().cloned().flatten() {
                    let first = start + token * g.head_dim;
                    buffer.extend(first..first + g.head_dim);
                }
            }
        }
    }
    buffer
}

fn pool(layers: usize) -> impl Strategy<Value = Pool> {
    // Head shards up to twice the KV heads: then each KV head is held twice.
    (1..=layers, 1_usize..5, any::<bool>(), 0_u32..4).prop_map(|(pp, sequence, zigzag, heads)| {
        Pool {
            pp,
            sequence,
            zigzag,
            heads: 1 << heads,
        }
    })
}

fn case() -> impl Strategy<Value = (KvGeometry, usize, Pool, Pool)> {
    (1_usize..4, 0_u32..3, 1_usize..4, 0_usize..40).prop_flat_map(|(layers, heads, dim, tokens)| {
        let g = geometry(layers, 1 << heads, dim);
        (Just(g), Just(tokens), pool(layers), pool(layers))
    })
}

const UNSET: usize = usize::MAX;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn every_pool_reaches_every_pool_and_back((g, tokens, from, to) in case()) {
        let (src, dst) = (shards(from, &g, tokens), shards(to, &g, tokens));
        let cut_all = |s: &[KvShard]| s.iter().map(|s| cut(s, &g, tokens)).collect::<Vec<_>>();
        let (produced, needed) = (cut_all(&src), cut_all(&dst));
        let there = Reshard::new(&g, tokens, &src, &dst).unwrap();
        let mut got: Vec<_> = needed.iter().map(|b| vec![UNSET; b.len()]).collect();
        there.apply(&produced, &mut got).unwrap();
        prop_assert_eq!(&got, &needed);
        let back = Reshard::new(&g, tokens, &dst, &src).unwrap();
        let mut again: Vec<_> = produced.iter().map(|b| vec![UNSET; b.len()]).collect();
        back.apply(&got, &mut again).unwrap();
        prop_assert_eq!(again, produced);
    }

    #[test]
    fn each_rank_receives_its_elements_once_and_nothing_else((g, tokens, from, to) in case()) {
        let (src, dst) = (shards(from, &g, tokens), shards(to, &g, tokens));
        let plan = Reshard::new(&g, tokens, &src, &dst).unwrap();
        for (index, shard) in dst.iter().enumerate() {
            let mut written = vec![0; shard.elements(&g)];
            for c in plan.copies().iter().filter(|c| c.dst == index) {
                prop_assert!(c.len > 0 && shard.layers.contains(&c.layer));
                for n in &mut written[c.dst_offset..c.dst_offset + c.len] {
                    *n += 1;
                }
            }
            prop_assert!(written.iter().all(|&n| n == 1));
            let bytes: usize = (0..src.len()).map(|s| plan.bytes(s, index)).sum();
            prop_assert_eq!(bytes, shard.elements(&g) * 2);
        }
        let received: usize = plan.copies().iter().map(|c| c.len).sum();
        let copies = (to.heads / g.kv_heads).max(1);
        prop_assert_eq!(received, g.elements_per_token() * tokens * copies);
    }
}

fn by_heads(g: &KvGeometry, tokens: usize, ranks: usize) -> Vec<KvShard> {
    let pool = Pool {
        pp: 1,
        sequence: 1,
        zigzag: false,
        heads: ranks,
    };
    shards(pool, g, tokens)
}

#[test]
fn a_tensor_shard_is_one_copy_a_layer_and_half() {
    let g = geometry(32, 8, 128);
    let (two, four) = (by_heads(&g, 1250, 2), by_heads(&g, 1250, 4));
    let plan = Reshard::new(&g, 1250, &two, &four).unwrap();
    assert_eq!(plan.copies().len(), 4 * 32 * 2);
    // A quarter of the prefix each, from the one rank that has it.
    assert_eq!(plan.bytes(0, 1), g.prefix_bytes(1250) / 4);
    assert_eq!(plan.bytes(1, 1), 0);
    let first = plan.copies()[0];
    assert_eq!(first.len, 2 * 1250 * 128);
    // The same split on both sides joins keys and values.
    let same = Reshard::new(&g, 1250, &four, &four).unwrap();
    assert_eq!(same.copies().len(), 4 * 32);
    assert!(same.copies().iter().all(|c| c.src == c.dst));
}

#[test]
fn receivers_of_replicated_heads_ask_different_holders() {
    let g = geometry(2, 2, 4);
    let plan = Reshard::new(&g, 5, &by_heads(&g, 5, 4), &by_heads(&g, 5, 4)).unwrap();
    let sources: Vec<_> = (0..4)
        .map(|d| (0..4).filter(|&s| plan.bytes(s, d) > 0).collect::<Vec<_>>())
        .collect();
    assert_eq!(sources, [[0], [1], [2], [3]]);
}

#[test]
fn what_nobody_holds_is_named() {
    let g = geometry(2, 2, 4);
    let mut part = KvShard::whole(&g, 10);
    part.tokens[0].end = 7;
    let e = Reshard::new(&g, 10, &[part], &[KvShard::whole(&g, 10)]).unwrap_err();
    assert_eq!(
        e,
        KvError::Uncovered {
            layer: 0,
            head: 0,
            token: 7
        }
    );
}

#[test]
fn shards_outside_the_prefix_or_with_a_token_twice_are_refused() {
    let g = geometry(2, 2, 4);
    let whole = KvShard::whole(&g, 10);
    let field = |bad: KvShard| {
        let e = Reshard::new(&g, 10, slice::from_ref(&whole), &[bad]).unwrap_err();
        e.field()
    };
    let with = |change: fn(&mut KvShard)| {
        let mut shard = whole.clone();
        change(&mut shard);
        shard
    };
    assert_eq!(field(with(|s| s.layers.end = 3)), "shard.layers");
    assert_eq!(field(with(|s| s.heads.end = 3)), "shard.heads");
    assert_eq!(field(with(|s| s.tokens[0].end = 11)), "shard.tokens");
    assert_eq!(field(with(|s| s.tokens.push(4..5))), "shard.tokens");
    assert_eq!(
        field(with(|s| s.tokens[0] = Range { start: 5, end: 4 })),
        "shard.tokens"
    );
    assert_eq!(
        field(with(|s| s.layers = Range { start: 2, end: 1 })),
        "shard.layers"
    );
    let none = Reshard::new(&g, 10, &[], slice::from_ref(&whole)).unwrap_err();
    assert_eq!(none.field(), "src");
}

#[test]
fn buffers_of_another_size_are_refused_before_anything_is_written() {
    let g = geometry(1, 1, 2);
    let whole = [KvShard::whole(&g, 3)];
    let plan = Reshard::new(&g, 3, &whole, &whole).unwrap();
    let mut dst = vec![vec![0; 12]];
    assert_eq!(
        plan.apply(&[vec![1; 11]], &mut dst).unwrap_err().field(),
        "src"
    );
    assert_eq!(
        plan.apply(&[vec![1; 12]], &mut []).unwrap_err().field(),
        "dst"
    );
    assert_eq!(dst, [[0; 12]]);
    plan.apply(&[vec![1; 12]], &mut dst).unwrap();
    assert_eq!(dst, [[1; 12]]);
}
