use proptest::prelude::*;

use super::*;

fn cluster() -> impl Strategy<Value = EplbCluster> {
    (1_usize..4, 1_usize..5, 1_usize..6).prop_map(|(hosts, ranks_per_host, slots_per_rank)| {
        EplbCluster {
            hosts,
            ranks_per_host,
            slots_per_rank,
        }
    })
}

/// A cluster and loads of experts it can hold under either spread.
fn case() -> impl Strategy<Value = (EplbCluster, Vec<u64>)> {
    cluster().prop_flat_map(|c| {
        let slots = c.hosts * c.ranks_per_host * c.slots_per_rank;
        let load = prop_oneof![3 => 0_u64..50, 1 => 0_u64..5000, 1 => Just(0_u64)];
        (Just(c), prop::collection::vec(load, 1..=slots))
    })
}

/// Every expert has a slot, no rank more than its slots, none twice.
fn is_legal(p: &Placement, c: &EplbCluster, experts: usize) -> Result<(), TestCaseError> {
    prop_assert_eq!(p.slots().len(), c.hosts * c.ranks_per_host);
    for own in p.slots() {
        prop_assert_eq!(own.len(), c.slots_per_rank);
        let mut held: Vec<_> = own.iter().flatten().collect();
        let count = held.len();
        held.sort_unstable();
        held.dedup();
        prop_assert_eq!(held.len(), count);
    }
    for expert in 0..experts {
        prop_assert!(!p.holders(expert).is_empty());
        for &(rank, slot) in p.holders(expert) {
            prop_assert_eq!(p.slots()[rank][slot], Some(expert));
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn every_expert_is_placed_within_capacity_and_bound((c, loads) in case()) {
        let p = place(&loads, &c, Spread::Global).unwrap();
        is_legal(&p, &c, loads.len())?;
        let bound = p.load_bound(&loads) * (1.0 + 1e-9);
        for load in p.rank_loads(&loads) {
            prop_assert!(load <= bound, "{load} > {bound}");
        }
        let total: f64 = p.rank_loads(&loads).iter().sum();
        let counted: u64 = loads.iter().sum();
        prop_assert!((total - counted as f64).abs() <= 1e-6 * (1.0 + total));
    }

    #[test]
    fn a_host_spread_keeps_replicas_together((c, loads) in case()) {
        let p = place(&loads, &c, Spread::Host).unwrap();
        is_legal(&p, &c, loads.len())?;
        for expert in 0..loads.len() {
            let host = |&(rank, _): &(usize, usize)| rank / c.ranks_per_host;
            let first = host(&p.holders(expert)[0]);
            prop_assert!(p.holders(expert).iter().all(|h| host(h) == first));
        }
    }

    /// Carrying the moves out turns the old slots into the new ones, from ranks that had them.
    #[test]
    fn moves_turn_one_placement_into_the_next(
        (c, old_loads) in case(), seed in prop::collection::vec(0_u64..100, 60),
    ) {
        let loads: Vec<_> = seed.iter().copied().cycle().take(old_loads.len()).collect();
        let old = place(&old_loads, &c, Spread::Global).unwrap();
        let fresh = place(&loads, &c, Spread::Global).unwrap();
        let new = fresh.aligned_to(&old);
        is_legal(&new, &c, loads.len())?;
        prop_assert_eq!(new.rank_loads(&loads).len(), fresh.rank_loads(&loads).len());
        let mut now = old.slots().to_vec();
        for m in new.moves_from(&old) {
            prop_assert!(old.slots()[m.from].contains(&Some(m.expert)));
            now[m.to][m.slot] = Some(m.expert);
        }
        for (now, wanted) in now.iter().flatten().zip(new.slots().iter().flatten()) {
            // A slot nobody wants keeps what it had.
            prop_assert!(wanted.is_none() || now == wanted);
        }
        // Aligning moves nothing that is on its rank already.
        for m in new.moves_from(&old) {
            prop_assert!(m.from != m.to);
        }
        prop_assert!(old.moves_from(&old).is_empty());
    }
}

#[test]
fn a_hot_expert_is_replicated_and_the_imbalance_falls() {
    let mut loads = vec![100_u64; 64];
    loads[3] = 2000;
    loads[4] = 900;
    let before = Placement::contiguous(64, 8).unwrap().imbalance(&loads);
    let c = EplbCluster {
        hosts: 1,
        ranks_per_host: 8,
        slots_per_rank: 9,
    };
    let after = place(&loads, &c, Spread::Global).unwrap();
    assert!(before > 3.0, "{before}");
    // Eight spare slots cannot even out two hot experts entirely.
    assert!(
        after.imbalance(&loads) < 1.15,
        "{}",
        after.imbalance(&loads)
    );
    assert!(after.holders(3).len() >= 5);
    // Tokens go round the replicas.
    let n = after.holders(3).len();
    let ranks: Vec<_> = (0..n).map(|t| after.holder_for(3, t).unwrap()).collect();
    assert_eq!(ranks, after.holders(3));
    assert_eq!(after.holder_for(3, n), after.holder_for(3, 0));
    assert_eq!(after.holder_for(64, 0), None);
}

#[test]
fn the_least_loaded_rank_takes_the_larger_of_what_is_left() {
    let c = EplbCluster {
        hosts: 1,
        ranks_per_host: 2,
        slots_per_rank: 2,
    };
    let loads = [1, 8, 3, 7];
    let p = place(&loads, &c, Spread::Global).unwrap();
    assert_eq!(p.slots(), [[Some(1), Some(0)], [Some(3), Some(2)]]);
    assert_eq!(p.rank_loads(&loads), [9.0, 10.0]);
}

#[test]
fn without_load_everything_is_placed_once_and_balanced() {
    let c = EplbCluster {
        hosts: 2,
        ranks_per_host: 2,
        slots_per_rank: 3,
    };
    let p = place(&[0; 8], &c, Spread::Host).unwrap();
    assert!((0..8).all(|e| p.holders(e).len() == 1));
    assert!((p.imbalance(&[0; 8]) - 1.0).abs() < f64::EPSILON);
}

#[test]
fn too_few_slots_and_absurd_sizes_are_named() {
    let c = EplbCluster {
        hosts: 2,
        ranks_per_host: 2,
        slots_per_rank: 2,
    };
    let refusal = |loads: &[u64], c| place(loads, &c, Spread::Host).unwrap_err().to_string();
    assert!(refusal(&[1; 9], c).starts_with("slots must lie in [5"));
    assert!(refusal(&[], c).starts_with("experts must lie"));
    let none = EplbCluster { hosts: 0, ..c };
    assert!(refusal(&[1], none).starts_with("hosts must lie"));
    assert!(Placement::contiguous(9, 4).is_err());
}

#[test]
fn counters_count_tokens_and_refuse_unknown_experts() {
    let mut loads = ExpertLoads::new(4);
    loads.record(&[0, 3, 3]).unwrap();
    assert!(loads.record(&[1, 4]).is_err());
    assert_eq!(loads.counts(), [1, 0, 0, 2]);
    loads.reset();
    assert_eq!(loads.counts(), [0; 4]);
    assert!(ExpertLoads::new(0).record(&[0]).is_err());
}
