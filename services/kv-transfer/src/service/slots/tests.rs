use std::collections::BTreeSet;

use base::clock::{Clock as _, ManualClock};
use base::{Code, Fault as _};
use kv::{KvDType, KvGeometry};
use proptest::prelude::*;

use super::*;

const TTL: Duration = Duration::from_secs(10);
const REST: Duration = Duration::from_secs(5);
const FIRST: u64 = 77;
const PAGE: u64 = limits::MIN_PAGE_BYTES;
const POOL: u64 = 16 * PAGE;
const IDENTITY: PrefixIdentity = PrefixIdentity([3; 32]);

fn table() -> (SlotTable, ManualClock) {
    (
        SlotTable::new(bounds(POOL, 0), FIRST, REST),
        ManualClock::new(),
    )
}

fn bounds(pool: u64, cache: u64) -> Bounds {
    Bounds {
        pool,
        page: PAGE,
        prefix: pool,
        slots: limits::MAX_SLOTS,
        cache,
    }
}

fn asks(bytes: u64) -> Reservation {
    Reservation {
        bytes,
        ttl: TTL,
        request_id: "r".into(),
        offer: None,
        cache: None,
    }
}

/// A manifest of `bytes` bytes, a multiple of 4.
fn manifest(bytes: u64) -> Manifest {
    let geometry = KvGeometry {
        layers: 1,
        kv_heads: 1,
        head_dim: 1,
        dtype: KvDType::Bf16,
    };
    let tokens = usize::try_from(bytes / 4).unwrap();
    let payload = vec![0; geometry.prefix_bytes(tokens)];
    Manifest::describe(IDENTITY, geometry, tokens, &payload, 4096).unwrap()
}

fn reserve(table: &mut SlotTable, clock: &ManualClock, bytes: u64) -> Grant {
    table.reserve(clock.now(), asks(bytes)).unwrap()
}

fn sealed(table: &mut SlotTable, clock: &ManualClock, bytes: u64) -> Grant {
    let grant = reserve(table, clock, bytes);
    table.seal(clock.now(), grant.key, manifest(bytes)).unwrap();
    grant
}

fn pull(table: &mut SlotTable, clock: &ManualClock, key: LeaseKey) -> Result<Grant, TransferError> {
    let pulled = table.pull(
        clock.now(),
        (key.slot, key.generation),
        (IDENTITY, false),
        TTL,
    );
    pulled.map(|(grant, _)| grant)
}

#[test]
fn a_request_that_never_fits_blames_bytes_and_one_that_does_not_fit_now_says_when() {
    let (mut table, clock) = table();
    for bytes in [0, POOL + 1, u64::MAX] {
        let error = table.reserve(clock.now(), asks(bytes)).unwrap_err();
        assert_eq!(
            (error.code(), error.field()),
            (Code::InvalidArgument, Some("bytes"))
        );
    }
    reserve(&mut table, &clock, POOL);
    clock.advance(Duration::from_secs(4));
    let error = table.reserve(clock.now(), asks(1)).unwrap_err();
    assert_eq!(error.code(), Code::ResourceExhausted);
    assert_eq!(error.retry_after(), Some(Duration::from_secs(6)));
}

#[test]
fn a_slot_is_pulled_only_after_its_seal() {
    let (mut table, clock) = table();
    let grant = reserve(&mut table, &clock, 8);
    let error = pull(&mut table, &clock, grant.key).unwrap_err();
    assert_eq!(error.code(), Code::FailedPrecondition);
    table.seal(clock.now(), grant.key, manifest(8)).unwrap();
    assert_eq!(
        pull(&mut table, &clock, grant.key).unwrap().offset,
        grant.offset
    );
}

#[test]
fn a_repeated_seal_is_answered_again_and_a_different_one_is_refused() {
    let (mut table, clock) = table();
    let grant = sealed(&mut table, &clock, 8);
    table.seal(clock.now(), grant.key, manifest(8)).unwrap();
    let other = Manifest {
        identity: PrefixIdentity([4; 32]),
        ..manifest(8)
    };
    let error = table.seal(clock.now(), grant.key, other).unwrap_err();
    assert_eq!(error.code(), Code::FailedPrecondition);
}

#[test]
fn a_manifest_of_another_size_than_the_slot_is_refused() {
    let (mut table, clock) = table();
    let grant = reserve(&mut table, &clock, 8);
    let error = table
        .seal(clock.now(), grant.key, manifest(12))
        .unwrap_err();
    assert_eq!(
        (error.code(), error.field()),
        (Code::InvalidArgument, Some("bytes"))
    );
}

#[test]
fn another_identity_is_refused() {
    let (mut table, clock) = table();
    let key = sealed(&mut table, &clock, 8).key;
    let other = PrefixIdentity([9; 32]);
    let error = table
        .pull(clock.now(), (key.slot, key.generation), (other, false), TTL)
        .unwrap_err();
    assert_eq!(
        (error.code(), error.field()),
        (Code::FailedPrecondition, Some("identity"))
    );
}

#[test]
fn an_old_generation_is_refused_once_the_slot_is_recycled() {
    let (mut table, clock) = table();
    let old = sealed(&mut table, &clock, 8).key;
    table.release(clock.now(), old);
    let error = pull(&mut table, &clock, old).unwrap_err();
    assert_eq!(error.code(), Code::NotFound);
    let new = sealed(&mut table, &clock, 8).key;
    assert_eq!(new.slot, old.slot, "the slot is reused at once");
    let error = pull(&mut table, &clock, old).unwrap_err();
    assert_eq!(
        (error.code(), error.field()),
        (Code::Aborted, Some("generation"))
    );
    let error = table.renew(clock.now(), old, TTL).unwrap_err();
    assert_eq!(error.code(), Code::Aborted);
    let error = table.seal(clock.now(), old, manifest(8)).unwrap_err();
    assert_eq!(error.code(), Code::Aborted);
}

#[test]
fn a_double_release_frees_nothing_of_others() {
    let (mut table, clock) = table();
    let grant = sealed(&mut table, &clock, 8);
    let reader = pull(&mut table, &clock, grant.key).unwrap();
    table.release(clock.now(), grant.key);
    table.release(clock.now(), grant.key);
    assert_eq!(table.leases(), 1);
    assert!(table.used() > 0);
    table.release(clock.now(), reader.key);
    assert_eq!((table.used(), table.leases()), (0, 0));
    let next = sealed(&mut table, &clock, 8);
    table.release(clock.now(), reader.key);
    assert_eq!(
        pull(&mut table, &clock, next.key).unwrap().offset,
        next.offset
    );
}

#[test]
fn the_memory_of_an_expired_slot_rests_before_it_is_reused() {
    let (mut table, clock) = table();
    sealed(&mut table, &clock, POOL / 4 * 4);
    clock.advance(TTL);
    assert_eq!(table.reap(clock.now()), 1);
    assert_eq!((table.leases(), table.used()), (0, POOL));
    let error = table.reserve(clock.now(), asks(8)).unwrap_err();
    assert_eq!(error.retry_after(), Some(REST));
    clock.advance(REST);
    reserve(&mut table, &clock, POOL);
}

#[test]
fn the_memory_of_an_abandoned_write_rests_even_when_released() {
    let (mut table, clock) = table();
    let grant = reserve(&mut table, &clock, POOL);
    table.release(clock.now(), grant.key);
    assert_eq!(table.used(), POOL);
    clock.advance(REST);
    table.reap(clock.now());
    assert_eq!(table.used(), 0);
}

#[test]
fn a_renewed_lease_outlives_its_first_term_and_is_never_shortened() {
    let (mut table, clock) = table();
    let grant = sealed(&mut table, &clock, 8);
    clock.advance(TTL / 2);
    table.renew(clock.now(), grant.key, TTL).unwrap();
    table
        .renew(clock.now(), grant.key, Duration::from_millis(50))
        .unwrap();
    clock.advance(TTL / 2 + Duration::from_secs(1));
    pull(&mut table, &clock, grant.key).unwrap();
    clock.advance(TTL);
    assert_eq!(
        pull(&mut table, &clock, grant.key).unwrap_err().code(),
        Code::NotFound
    );
}

#[test]
fn leases_and_slots_are_bounded() {
    let (mut table, clock) = table();
    let grant = sealed(&mut table, &clock, 8);
    for _ in 1..limits::MAX_LEASES_PER_SLOT {
        pull(&mut table, &clock, grant.key).unwrap();
    }
    let error = pull(&mut table, &clock, grant.key).unwrap_err();
    assert_eq!(error.code(), Code::ResourceExhausted);

    let pool = PAGE * (limits::MAX_SLOTS as u64 + 1);
    let mut table = SlotTable::new(bounds(pool, 0), FIRST, REST);
    for _ in 0..limits::MAX_SLOTS {
        reserve(&mut table, &clock, 1);
    }
    let error = table.reserve(clock.now(), asks(1)).unwrap_err();
    assert!(
        matches!(error, TransferError::TooMany { what: "slots", .. }),
        "{error}"
    );
}

#[derive(Debug, Clone)]
enum Step {
    Reserve(u64),
    Seal(prop::sample::Index),
    Pull(prop::sample::Index),
    Release(prop::sample::Index),
    Renew(prop::sample::Index),
    Wait(u64),
}

fn step() -> impl Strategy<Value = Step> {
    let pick = any::<prop::sample::Index>;
    prop_oneof![
        3 => (1..POOL).prop_map(|bytes| Step::Reserve(bytes.next_multiple_of(4))),
        3 => pick().prop_map(Step::Seal),
        3 => pick().prop_map(Step::Pull),
        3 => pick().prop_map(Step::Release),
        1 => pick().prop_map(Step::Renew),
        2 => (0u64..8).prop_map(Step::Wait),
    ]
}

/// Live and resting memory is disjoint, inside the pool, and all that is counted as used.
fn assert_disjoint(table: &SlotTable) {
    let live = table.slots.values().map(|slot| slot.extent);
    let mut extents: Vec<Extent> = live.chain(table.resting.iter().map(|r| r.extent)).collect();
    extents.sort_by_key(|extent| extent.start);
    for pair in extents.windows(2) {
        assert!(
            pair[0].start + pair[0].len <= pair[1].start,
            "{pair:?} overlap"
        );
    }
    assert!(
        extents
            .last()
            .is_none_or(|last| last.start + last.len <= table.capacity())
    );
    assert_eq!(
        table.used(),
        extents.iter().map(|extent| extent.len).sum::<u64>()
    );
}

/// Runs one step; returns the generation it made, if any.
fn apply(
    table: &mut SlotTable,
    clock: &ManualClock,
    keys: &mut Vec<LeaseKey>,
    step: &Step,
) -> Option<u64> {
    let now = clock.now();
    let pick =
        |index: &prop::sample::Index| (!keys.is_empty()).then(|| keys[index.index(keys.len())]);
    match step {
        Step::Reserve(bytes) => {
            let grant = table.reserve(now, asks(*bytes)).ok()?;
            keys.push(grant.key);
            return Some(grant.key.generation);
        }
        Step::Seal(index) => {
            let key = pick(index)?;
            let bytes = table.slots.get(&key.slot).map(|slot| slot.bytes);
            let _ = table.seal(now, key, manifest(bytes.unwrap_or(8)));
        }
        Step::Pull(index) => {
            let key = pick(index)?;
            let named = (key.slot, key.generation);
            if let Ok((grant, _)) = table.pull(now, named, (IDENTITY, false), TTL) {
                keys.push(grant.key);
            }
        }
        Step::Release(index) => table.release(now, pick(index)?),
        Step::Renew(index) => {
            let _ = table.renew(now, pick(index)?, TTL);
        }
        Step::Wait(seconds) => clock.advance(Duration::from_secs(*seconds)),
    }
    None
}

proptest! {
    /// Whatever callers do: slots never overlap, a generation never repeats, and once everyone is
    /// gone the pool is whole again.
    #[test]
    fn slots_never_overlap_generations_never_repeat_and_usage_returns_to_zero(
        steps in prop::collection::vec(step(), 1..120),
    ) {
        let (mut table, clock) = table();
        let mut keys = vec![];
        let mut generations = BTreeSet::new();
        for step in &steps {
            if let Some(generation) = apply(&mut table, &clock, &mut keys, step) {
                prop_assert!(generations.insert(generation), "generation {} twice", generation);
            }
            assert_disjoint(&table);
        }
        clock.advance(TTL * 2);
        table.reap(clock.now());
        clock.advance(REST);
        table.reap(clock.now());
        prop_assert_eq!((table.used(), table.leases(), table.list(clock.now()).len()), (0, 0, 0));
        prop_assert!(table.reserve(clock.now(), asks(POOL)).is_ok());
    }
}

#[test]
fn a_clean_stop_has_work_until_a_leased_prefix_was_fetched_and_let_go() {
    let (mut table, clock) = table();
    assert_eq!(table.at_work(), 0);
    let grant = reserve(&mut table, &clock, 8);
    assert_eq!(table.at_work(), 1, "its producer writes");
    table.seal(clock.now(), grant.key, manifest(8)).unwrap();
    assert_eq!(table.at_work(), 1, "its receiver is on its way");
    let pulled = pull(&mut table, &clock, grant.key).unwrap();
    assert_eq!(table.at_work(), 1, "its receiver reads");
    table.release(clock.now(), pulled.key);
    assert_eq!(
        table.at_work(),
        0,
        "it may be read again, but nobody waits for it"
    );
    // Nobody comes: the lease ends the wait.
    sealed(&mut table, &clock, 8);
    assert_eq!(table.at_work(), 1);
    clock.advance(2 * TTL);
    table.reap(clock.now());
    assert_eq!(table.at_work(), 0);
}

fn keeps(bytes: u64, cost_us: u64, offer: PrefixIdentity) -> Reservation {
    let offer = Manifest {
        identity: offer,
        crcs: vec![],
        ..manifest(bytes)
    };
    Reservation {
        offer: Some(offer),
        cache: Some(CacheTerms {
            scope: String::new(),
            cost_us,
        }),
        ..asks(bytes)
    }
}

proptest! {
    /// Whatever is published, found and evicted: entries never pass the budget, a found prefix is the one
    /// looked for, and without pins a reservation that fits the pool always finds room once nobody is left.
    #[test]
    fn the_cache_keeps_its_budget_and_never_stands_in_the_way(
        steps in prop::collection::vec((0u8..6, 1u64..6, 0u64..100), 1..80),
    ) {
        let budget = 8 * PAGE;
        let (mut table, clock) = (SlotTable::new(bounds(POOL, budget), FIRST, REST), ManualClock::new());
        let mut held: Vec<LeaseKey> = vec![];
        for (id, units, cost) in steps {
            let now = clock.now();
            let identity = PrefixIdentity([id; 32]);
            match cost % 4 {
                0 => held.truncate(held.len() / 2),
                1 => {
                    if let Some((grant, found)) = table.lookup(now, "", identity, TTL).unwrap() {
                        prop_assert_eq!(found.identity, identity);
                        held.push(grant.key);
                    }
                }
                _ => {
                    let bytes = units * PAGE;
                    if let Ok(grant) = table.reserve(now, keeps(bytes, cost, identity)) {
                        let whole = Manifest { identity, ..manifest(bytes) };
                        table.seal_part(now, grant.key, 0, &whole.crcs).unwrap();
                        table.seal(now, grant.key, whole).unwrap();
                        held.push(grant.key);
                    }
                }
            }
            // Keys that were cut off above go by release.
            let live: Vec<LeaseKey> = held.clone();
            let all: Vec<(u64, Vec<u64>)> = table
                .slots
                .iter()
                .map(|(&slot, entry)| (slot, entry.leases.keys().copied().collect()))
                .collect();
            for (slot, leases) in all {
                for lease in leases {
                    if !live.iter().any(|key| key.slot == slot && key.lease == lease) {
                        let generation = table.slots[&slot].generation;
                        table.release(now, LeaseKey { slot, generation, lease });
                    }
                }
            }
            assert_disjoint(&table);
            prop_assert!(table.cached() <= budget);
        }
        for key in held {
            table.release(clock.now(), key);
        }
        prop_assert!(table.cached() <= budget);
        prop_assert!(table.reserve(clock.now(), asks(POOL)).is_ok());
    }
}

#[test]
fn a_cached_prefix_whose_reader_died_is_found_but_its_memory_still_rests() {
    let (mut table, clock) = (
        SlotTable::new(bounds(POOL, POOL), FIRST, REST),
        ManualClock::new(),
    );
    let bytes = POOL;
    let grant = table
        .reserve(clock.now(), keeps(bytes, 1, IDENTITY))
        .unwrap();
    let whole = manifest(bytes);
    table
        .seal_part(clock.now(), grant.key, 0, &whole.crcs)
        .unwrap();
    table.seal(clock.now(), grant.key, whole).unwrap();
    let named = (grant.key.slot, grant.key.generation);
    table
        .pull(clock.now(), named, (IDENTITY, false), TTL)
        .unwrap();
    table.release(clock.now(), grant.key);
    clock.advance(TTL);
    table.reap(clock.now());
    let error = table.reserve(clock.now(), asks(8)).unwrap_err();
    assert_eq!(
        error.code(),
        Code::ResourceExhausted,
        "the reader may be late"
    );
    let found = table.lookup(clock.now(), "", IDENTITY, TTL).unwrap();
    table.release(clock.now(), found.unwrap().0.key);
    clock.advance(REST);
    table.reserve(clock.now(), asks(8)).unwrap();
}

#[test]
fn followers_of_a_lost_producer_are_told_and_nobody_new_comes() {
    let (mut table, clock) = table();
    let grant = table
        .reserve(clock.now(), keeps(PAGE, 1, IDENTITY))
        .unwrap();
    let named = (grant.key.slot, grant.key.generation);
    let refused = table
        .pull(clock.now(), named, (IDENTITY, false), TTL)
        .unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition, "it cannot follow");
    let (follower, known) = table
        .pull(clock.now(), named, (IDENTITY, true), TTL * 2)
        .unwrap();
    assert!(known.crcs.is_empty());
    assert_eq!(
        table.news(clock.now(), follower.key, 0).unwrap(),
        (vec![], false)
    );
    clock.advance(TTL);
    for error in [
        table.news(clock.now(), follower.key, 0).unwrap_err(),
        table
            .pull(clock.now(), named, (IDENTITY, true), TTL)
            .unwrap_err(),
    ] {
        assert!(
            matches!(error, TransferError::ProducerLost { .. }),
            "{error}"
        );
    }
}
