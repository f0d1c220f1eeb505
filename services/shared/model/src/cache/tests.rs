use kv::KvDType;
use proptest::prelude::*;

use super::*;
use crate::rank::CAUSAL_ORDER;

fn geometry() -> KvGeometry {
    KvGeometry {
        layers: 2,
        kv_heads: 3,
        head_dim: 4,
        dtype: KvDType::F32,
    }
}

/// `tokens` tokens whose value tells layer, side, head, token and dim apart.
fn filled(capacity: usize, tokens: usize) -> KvCache {
    let mut cache = KvCache::new(geometry(), capacity).unwrap();
    for layer in 0..2 {
        let make = |side: f32| {
            let data = (0..tokens * 12).map(|i| i as f32 + side * 1e3 + layer as f32 * 1e4);
            Tensor::from_f32(&[tokens, 3, 4], data.collect()).unwrap()
        };
        cache
            .write(layer, &make(0.0), &make(1.0), 0..tokens)
            .unwrap();
    }
    let alone = SequenceShards::new(tokens, 1, 1, CAUSAL_ORDER).unwrap();
    cache.advance(&alone, 0);
    cache
}

#[test]
fn values_are_laid_out_layer_side_head_token_dim() {
    let prefix = filled(5, 5).into_prefix();
    for (i, value) in prefix.data().iter().enumerate() {
        let (dim, token, head) = (i % 4, i / 4 % 5, i / 20 % 3);
        let (side, layer) = (i / 60 % 2, i / 120);
        let expected = (token * 12 + head * 4 + dim + side * 1000 + layer * 10000) as f32;
        assert_eq!(*value, expected);
    }
}

#[test]
fn spare_room_never_reaches_the_prefix() {
    assert_eq!(filled(9, 5).into_prefix(), filled(5, 5).into_prefix());
    let again = KvCache::resume(&filled(5, 5).into_prefix(), 8).unwrap();
    assert_eq!((again.len(), again.capacity()), (5, 8));
    assert_eq!(again.into_prefix(), filled(5, 5).into_prefix());
}

#[test]
fn bytes_round_trip_and_wrong_lengths_are_refused() {
    let prefix = filled(5, 5).into_prefix();
    let bytes = prefix.to_bytes();
    assert_eq!(PrefixKv::from_bytes(geometry(), 5, &bytes).unwrap(), prefix);
    assert!(PrefixKv::from_bytes(geometry(), 4, &bytes).is_err());
    assert!(PrefixKv::from_bytes(geometry(), 5, &bytes[..bytes.len() - 1]).is_err());
    assert!(PrefixKv::from_bytes(geometry(), usize::MAX, &bytes).is_err());
}

#[test]
fn a_cut_cache_and_a_branch_hold_the_first_tokens() {
    let mut cache = filled(9, 5);
    let branch = cache.branch(3, 7).unwrap();
    assert_eq!((branch.len(), branch.capacity()), (3, 7));
    cache.truncate(3).unwrap();
    assert_eq!(branch.into_prefix(), cache.clone().into_prefix());
    assert!(cache.truncate(4).is_err());
    assert!(cache.branch(3, 2).is_err());
    let cut = cache.into_prefix();
    let first = filled(5, 5).into_prefix();
    // The second token of the first head follows the first one.
    assert_eq!(cut.data()[4..12], first.data()[4..12]);
}

#[test]
fn rows_share_pages_until_one_writes_and_give_them_back() {
    let tokens = 2 * PAGE_TOKENS + 5;
    let pool = KvPool::new(geometry(), 6).unwrap();
    let fill = |cache: &mut KvCache, from: usize, to: usize, seed: f32| {
        for layer in 0..2 {
            let values = (0..(to - from) * 12).map(|i| seed + (i + layer) as f32);
            let values = Tensor::from_f32(&[to - from, 3, 4], values.collect()).unwrap();
            let written = cache.write(layer, &values, &values, 0..to - from);
            written.map_err(|e| e.to_string())?;
        }
        cache.advance(
            &SequenceShards::new(to - from, 1, 1, CAUSAL_ORDER).unwrap(),
            0,
        );
        Ok::<_, String>(())
    };
    let mut one = pool.cache(4 * PAGE_TOKENS);
    fill(&mut one, 0, tokens, 0.5).unwrap();
    assert_eq!((one.pages().len(), pool.free()), (3, 3));
    let mut two = one.branch(tokens, 4 * PAGE_TOKENS).unwrap();
    assert_eq!(pool.free(), 3, "a branch takes none");
    let before = one.clone().into_prefix();
    fill(&mut two, tokens, tokens + 1, 9.5).unwrap();
    assert_eq!(pool.free(), 2, "its own copy of the page that was not full");
    assert_eq!(
        one.clone().into_prefix(),
        before,
        "the other row is as it was"
    );
    assert_eq!(two.branch(tokens, tokens).unwrap().into_prefix(), before);
    let whole = KvCache::resume(&two.clone().into_prefix(), two.len()).unwrap();
    assert_eq!(whole.into_prefix(), two.clone().into_prefix());
    // The first row writes the page that is now its own.
    fill(&mut one, tokens, tokens + 1, 3.5).unwrap();
    assert_eq!(pool.free(), 2);
    assert!(!two.reserve(5 * PAGE_TOKENS + 1), "more than there is");
    let refused = fill(&mut two, tokens + 1, 4 * PAGE_TOKENS + 1, 0.0).unwrap_err();
    assert!(refused.contains("cannot take"), "{refused}");
    assert_eq!(pool.free(), 0);
    let three = pool.cache(4).reserve(1);
    assert!(!three, "all pages are taken");
    two.truncate(PAGE_TOKENS).unwrap();
    assert_eq!(pool.free(), 3);
    one.clear();
    drop(two);
    assert_eq!(pool.free(), 6);
    let again = pool.cache_from(Vec::new(), 3);
    assert!(again.is_empty() && again.capacity() == 3);
}

#[test]
fn a_pool_that_is_empty_says_how_much_is_missing() {
    let pool = KvPool::new(geometry(), 0).unwrap();
    let one = Tensor::zeros(&[1, 3, 4]).unwrap();
    let error = pool.cache(9).write(0, &one, &one, 0..1).unwrap_err();
    assert!(matches!(error, ModelError::Exhausted { .. }), "{error}");
    assert!(KvPool::new(geometry(), usize::MAX / 2).is_err());
}

#[test]
fn a_copy_of_a_cache_grows_by_itself() {
    let one = filled(2 * PAGE_TOKENS, 5);
    let copies = vec![one.clone(); 3];
    let before = one.into_prefix();
    for (number, mut copy) in copies.into_iter().enumerate() {
        assert!(copy.reserve(2 * PAGE_TOKENS));
        let more = Tensor::from_f32(&[70, 3, 4], vec![number as f32; 70 * 12]).unwrap();
        for layer in 0..2 {
            copy.write(layer, &more, &more, 0..70).unwrap();
        }
        let grown = SequenceShards::new(70, 1, 1, CAUSAL_ORDER).unwrap();
        copy.advance(&grown, 0);
        assert_eq!(copy.branch(5, 5).unwrap().into_prefix(), before);
        assert_eq!(copy.into_prefix().data().last(), Some(&(number as f32)));
    }
}

#[test]
fn a_full_cache_refuses_more() {
    let mut cache = filled(5, 5);
    let one = Tensor::zeros(&[1, 3, 4]).unwrap();
    assert!(cache.write(0, &one, &one, 0..1).is_err());
}

/// What is done to one of a few rows.
#[derive(Clone, Debug)]
enum Deed {
    Grow(usize, usize),
    Branch(usize, usize, usize),
    Cut(usize, usize),
    Clear(usize),
}

fn deed() -> impl Strategy<Value = Deed> {
    let row = 0..3_usize;
    prop_oneof![
        4 => (row.clone(), 1..90_usize).prop_map(|(row, tokens)| Deed::Grow(row, tokens)),
        2 => (row.clone(), row.clone(), 0..100_usize).prop_map(|(a, b, at)| Deed::Branch(a, b, at)),
        1 => (row.clone(), 0..100_usize).prop_map(|(row, at)| Deed::Cut(row, at)),
        1 => row.prop_map(Deed::Clear),
    ]
}

proptest! {
    /// Rows that share pages hold what rows that share nothing hold, and every page comes back.
    #[test]
    fn rows_that_share_pages_are_those_that_share_nothing(deeds in prop::collection::vec(deed(), 1..25)) {
        let pool = KvPool::new(geometry(), 9).unwrap();
        let mut rows = [(); 3].map(|()| pool.cache(1_000));
        let mut plain = [(); 3].map(|()| Vec::<f32>::new());
        for (mark, deed) in deeds.into_iter().enumerate() {
            let at = |row: usize, percent: usize, plain: &[Vec<f32>; 3]| plain[row].len() * percent / 100;
            match deed {
                Deed::Grow(row, tokens) => {
                    let values: Vec<f32> = (0..tokens).map(|i| (mark * 100 + i) as f32).collect();
                    if !rows[row].reserve(rows[row].len() + tokens) {
                        continue;
                    }
                    let each: Vec<f32> = values.iter().flat_map(|v| [*v; 12]).collect();
                    let both = Tensor::from_f32(&[tokens, 3, 4], each).unwrap();
                    for layer in 0..2 {
                        rows[row].write(layer, &both, &both, 0..tokens).unwrap();
                    }
                    rows[row].advance(&SequenceShards::new(tokens, 1, 1, CAUSAL_ORDER).unwrap(), 0);
                    plain[row].extend(values);
                }
                Deed::Branch(from, to, percent) => {
                    let tokens = at(from, percent, &plain);
                    rows[to] = rows[from].branch(tokens, 1_000).unwrap();
                    plain[to] = plain[from][..tokens].to_vec();
                }
                Deed::Cut(row, percent) => {
                    let tokens = at(row, percent, &plain);
                    rows[row].truncate(tokens).unwrap();
                    plain[row].truncate(tokens);
                }
                Deed::Clear(row) => {
                    rows[row].clear();
                    plain[row].clear();
                }
            }
            for (row, plain) in rows.iter().zip(&plain) {
                prop_assert_eq!(row.len(), plain.len());
                let held = row.clone().into_prefix();
                let heads = held.data().chunks_exact((4 * plain.len()).max(1));
                for head in heads {
                    let tokens: Vec<f32> = head.iter().step_by(4).copied().collect();
                    prop_assert_eq!(&tokens, plain);
                }
            }
        }
        drop(rows);
        prop_assert_eq!(pool.free(), 9);
    }
}
