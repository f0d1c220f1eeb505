//! One suite, run on every backend.
mod setup;

use std::{sync::Arc, time::Duration};

use base::{Code, Fault as _};
use proto::v1::ModelInfo;

use self::setup::{Setup, embedded, etcd, remote};
use crate::{
    Beat, Event, JoinOptions, Load, Member, MemberState, Membership, Picture, Plan, Registry,
    RegistryError, Remote, Role, Snapshot, Snapshots, Update, Watch,
};

/// Bound of every wait in these tests; none is expected to come near it.
pub(crate) const SOON: Duration = Duration::from_secs(20);
pub(crate) const TTL: Duration = Duration::from_secs(5);

/// What a registry holds, as a watcher sees it first.
pub(crate) async fn picture(registry: &dyn Registry) -> Snapshot {
    let mut watch = registry.watch().await.unwrap();
    let mut snapshot = Snapshot::default();
    snapshot.apply(next(&mut watch).await);
    snapshot
}

pub(crate) fn member(id: &str) -> Member {
    Member {
        id: id.to_owned(),
        role: Role::DitWorker.into(),
        pool: "default".to_owned(),
        endpoint: "http://127.0.0.1:7001".to_owned(),
        state: MemberState::Starting.into(),
        model: Some(ModelInfo {
            name: "tiny".to_owned(),
            ..ModelInfo::default()
        }),
        load: Some(Load::default()),
        ..Member::default()
    }
}

pub(crate) fn beat(id: &str, lease: u64, state: MemberState, queued: u32) -> Beat {
    let load = Load {
        running: 0,
        queued,
        capacity: 4,
        ..Load::default()
    };
    Beat {
        member_id: id.to_owned(),
        lease,
        load,
        state,
    }
}

pub(crate) async fn next(watch: &mut Watch) -> Update {
    tokio::time::timeout(SOON, watch.next())
        .await
        .unwrap()
        .unwrap()
        .unwrap()
}

async fn next_put(watch: &mut Watch) -> (u64, Member) {
    match next(watch).await {
        Update {
            epoch,
            event: Event::Put(member),
        } => (epoch, *member),
        other => panic!("no put: {other:?}"),
    }
}

async fn a_watch_starts_with_everything_and_follows_in_order(setup: Setup) {
    let registry = setup.registry.clone();
    let first = registry.register(member("a"), TTL).await.unwrap();
    let mut watch = registry.watch().await.unwrap();
    let Update {
        epoch,
        event: Event::Snapshot(Picture { members, .. }),
    } = next(&mut watch).await
    else {
        panic!("no snapshot first");
    };
    assert_eq!((epoch, members.len()), (first.epoch, 1));
    assert_eq!(members[0].epoch, first.epoch);

    let second = registry.register(member("b"), TTL).await.unwrap();
    assert!(second.epoch > first.epoch && second.lease != first.lease);
    let (epoch, put) = next_put(&mut watch).await;
    assert_eq!((epoch, put.id.as_str()), (second.epoch, "b"));

    registry.deregister("b", second.lease).await.unwrap();
    let update = next(&mut watch).await;
    assert_eq!(update.event, Event::Removed("b".to_owned()));
    assert!(update.epoch > epoch);
}

async fn a_state_is_a_new_epoch_and_load_alone_is_not(setup: Setup) {
    let registry = setup.registry.clone();
    let grant = registry.register(member("a"), TTL).await.unwrap();
    let mut watch = registry.watch().await.unwrap();
    next(&mut watch).await;
    registry
        .keep_alive(beat("a", grant.lease, MemberState::Ready, 0))
        .await
        .unwrap();
    let (epoch, put) = next_put(&mut watch).await;
    assert_eq!(put.state(), MemberState::Ready);
    assert!(epoch > grant.epoch);
    assert_eq!(
        put.epoch, grant.epoch,
        "a member keeps the epoch it joined in"
    );

    let renewal = registry
        .keep_alive(beat("a", grant.lease, MemberState::Ready, 3))
        .await
        .unwrap();
    assert_eq!((renewal.epoch, renewal.drain), (epoch, false));
    let (_, put) = next_put(&mut watch).await;
    assert_eq!(put.load.unwrap().queued, 3);
}

async fn a_lost_lease_is_not_found_and_ending_it_is_harmless(setup: Setup) {
    let registry = setup.registry.clone();
    let grant = registry.register(member("a"), TTL).await.unwrap();
    let stale = beat("a", grant.lease + 1, MemberState::Ready, 0);
    let error = registry.keep_alive(stale).await.unwrap_err();
    assert!(matches!(error, RegistryError::LeaseGone { .. }), "{error}");
    assert_eq!(error.code(), Code::NotFound);

    // Registering again replaces the lease: the old one can neither renew nor remove.
    let again = registry.register(member("a"), TTL).await.unwrap();
    assert!(
        registry
            .keep_alive(beat("a", grant.lease, MemberState::Ready, 0))
            .await
            .is_err()
    );
    registry.deregister("a", grant.lease).await.unwrap();
    registry
        .keep_alive(beat("a", again.lease, MemberState::Ready, 0))
        .await
        .unwrap();
    registry.deregister("a", again.lease).await.unwrap();
    registry.deregister("a", again.lease).await.unwrap();
    assert!(
        registry
            .keep_alive(beat("a", again.lease, MemberState::Ready, 0))
            .await
            .is_err()
    );
}

async fn a_silent_member_is_removed(setup: Setup) {
    let registry = setup.registry.clone();
    registry
        .register(member("silent"), setup.short)
        .await
        .unwrap();
    let mut watch = registry.watch().await.unwrap();
    let first = next(&mut watch).await.event;
    assert!(matches!(first, Event::Snapshot(Picture { members, .. }) if members.len() == 1));
    assert_eq!(
        next(&mut watch).await.event,
        Event::Removed("silent".to_owned())
    );
}

async fn bad_records_are_refused_by_field(setup: Setup) {
    let registry = setup.registry.clone();
    let with = |change: fn(&mut Member)| {
        let mut record = member("a");
        change(&mut record);
        record
    };
    let cases = [
        (with(|m| m.id = String::new()), TTL, "member_id"),
        (with(|m| m.role = 0), TTL, "role"),
        (with(|m| m.role = 99), TTL, "role"),
        (with(|m| m.state = 0), TTL, "state"),
        (with(|m| m.endpoint = "nowhere".to_owned()), TTL, "endpoint"),
        (with(|m| m.model = None), TTL, "model"),
        (with(|m| m.pool = "p".repeat(300)), TTL, "pool"),
        (member("a"), Duration::from_millis(1), "ttl_ms"),
        (member("a"), Duration::from_secs(3_600), "ttl_ms"),
    ];
    for (record, ttl, field) in cases {
        let error = registry.register(record, ttl).await.unwrap_err();
        assert_eq!(
            (error.code(), error.field()),
            (Code::InvalidArgument, Some(field)),
            "{error}"
        );
    }
    assert!(setup.now().await.members.is_empty());
}

async fn a_drained_member_hears_of_it_and_stays_drained(setup: Setup) {
    let registry = setup.registry.clone();
    let grant = registry.register(member("a"), TTL).await.unwrap();
    registry
        .keep_alive(beat("a", grant.lease, MemberState::Ready, 0))
        .await
        .unwrap();
    let unknown = registry.drain("b").await.unwrap_err();
    assert_eq!(unknown, RegistryError::NoMember("b".to_owned()));
    let before = setup.now().await.epoch;
    // Whoever asks, and however often.
    setup.other.drain("a").await.unwrap();
    registry.drain("a").await.unwrap();
    let drained = setup.now().await;
    assert_eq!(drained.ready(Role::DitWorker).count(), 0);
    assert!(drained.epoch > before);
    let renewal = registry
        .keep_alive(beat("a", grant.lease, MemberState::Ready, 0))
        .await
        .unwrap();
    assert!(renewal.drain);
    let again = registry.register(member("a"), TTL).await.unwrap();
    let state = setup.now().await.members["a"].state();
    assert_eq!(state, MemberState::Draining);

    // A drain ends with the record it is about.
    registry.deregister("a", again.lease).await.unwrap();
    registry.register(member("a"), TTL).await.unwrap();
    let state = setup.now().await.members["a"].state();
    assert_eq!(state, MemberState::Starting);
}

/// Registers "a" and makes it ready; answers its lease.
async fn ready(setup: &Setup) -> u64 {
    let grant = setup.registry.register(member("a"), TTL).await.unwrap();
    let beat = beat("a", grant.lease, MemberState::Ready, 0);
    let renewal = setup.registry.keep_alive(beat).await.unwrap();
    assert!(!renewal.drain);
    grant.lease
}

/// How many workers take work.
async fn offered(setup: &Setup) -> usize {
    setup.now().await.ready(Role::DitWorker).count()
}

async fn a_cordoned_member_takes_no_work_until_it_is_let_again(setup: Setup) {
    ready(&setup).await;
    let before = setup.now().await.epoch;
    // Whoever asks, and however often.
    setup.other.cordon("a", true).await.unwrap();
    setup.registry.cordon("a", true).await.unwrap();
    assert_eq!(offered(&setup).await, 0);
    assert!(setup.now().await.epoch > before);
    setup.registry.cordon("a", false).await.unwrap();
    setup.other.cordon("a", false).await.unwrap();
    assert_eq!(offered(&setup).await, 1);
    let unknown = setup.registry.cordon("b", true).await.unwrap_err();
    assert_eq!(unknown, RegistryError::NoMember("b".to_owned()));
}

async fn a_cordon_is_no_drain_and_ends_with_the_record_it_is_about(setup: Setup) {
    ready(&setup).await;
    setup.registry.cordon("a", true).await.unwrap();
    // No beat and no new record of the member's ends it.
    let again = ready(&setup).await;
    let now = setup.now().await;
    assert_eq!(now.members["a"].state(), MemberState::Ready);
    assert_eq!(now.ready(Role::DitWorker).count(), 0);
    setup.registry.deregister("a", again).await.unwrap();
    ready(&setup).await;
    assert_eq!(offered(&setup).await, 1);
}

async fn a_watcher_that_slept_sees_the_truth_in_order(setup: Setup) {
    let registry = setup.registry.clone();
    let grant = registry.register(member("a"), TTL).await.unwrap();
    let mut watch = registry.watch().await.unwrap();
    assert!(matches!(next(&mut watch).await.event, Event::Snapshot(_)));
    let last = setup.flood;
    for queued in 1..=last {
        setup
            .other
            .keep_alive(beat("a", grant.lease, MemberState::Ready, queued))
            .await
            .unwrap();
    }
    let (mut fresh, mut seen) = (false, 0);
    while seen < last {
        let members = match next(&mut watch).await.event {
            Event::Snapshot(picture) => {
                fresh = true;
                picture.members
            }
            Event::Put(member) => vec![*member],
            other => panic!("{other:?}"),
        };
        let queued = members[0].load.unwrap().queued;
        assert!(queued >= seen, "order");
        seen = queued;
    }
    assert_eq!(fresh, setup.skips, "the watcher never fell behind");
}

async fn a_membership_renews_reports_and_leaves(setup: Setup) {
    let snapshots = Snapshots::follow(setup.registry.clone());
    let options = JoinOptions {
        ttl: setup.short,
        deadline: SOON,
    };
    let joined = Membership::join(setup.registry.clone(), member("a"), options)
        .await
        .unwrap();
    joined.set_state(MemberState::Ready);
    joined.set_load(Load {
        running: 2,
        queued: 1,
        capacity: 4,
        ..Load::default()
    });
    let ready = snapshots
        .wait(SOON, |now| {
            now.ready(Role::DitWorker)
                .any(|m| m.load.is_some_and(|load| load.running == 2))
        })
        .await
        .unwrap();
    assert_eq!(ready.members["a"].epoch, joined.epoch());

    // It outlives its TTL several times.
    tokio::time::sleep(setup.short * 4).await;
    assert_eq!(setup.now().await.ready(Role::DitWorker).count(), 1);
    assert!(joined.standing().leased);

    setup.other.drain("a").await.unwrap();
    tokio::time::timeout(SOON, joined.drain_requested())
        .await
        .unwrap();
    joined.leave().await.unwrap();
    snapshots
        .wait(SOON, |now| now.members.is_empty())
        .await
        .unwrap();
}

async fn a_membership_registers_again_when_its_lease_is_gone(setup: Setup) {
    let options = JoinOptions {
        ttl: setup.short,
        deadline: SOON,
    };
    let joined = Membership::join(setup.registry.clone(), member("a"), options)
        .await
        .unwrap();
    joined.set_state(MemberState::Ready);
    let before = joined.epoch();
    // Somebody else takes the record away, as an expiry would.
    let thief = setup.registry.register(member("a"), TTL).await.unwrap();
    setup.registry.deregister("a", thief.lease).await.unwrap();
    let mut standings = joined.standings();
    let again = tokio::time::timeout(SOON, standings.wait_for(|now| now.epoch > before)).await;
    assert!(again.unwrap().unwrap().leased);
    assert_eq!(setup.now().await.ready(Role::DitWorker).count(), 1);
}

/// What makes fencing by epoch sound: a picture names no member that joined after it, and whoever
/// comes back is newer than every picture of its earlier life.
async fn a_member_that_returns_is_newer_than_every_picture_of_before(setup: Setup) {
    let registry = setup.registry.clone();
    let first = registry.register(member("a"), setup.short).await.unwrap();
    let seen = setup.now().await;
    assert!(seen.epoch >= first.epoch);
    assert_eq!(seen.members["a"].epoch, first.epoch);

    // It falls silent until it is gone, then comes back under the same id.
    let snapshots = Snapshots::follow(setup.other.clone());
    let gone = snapshots.wait(SOON, |now| now.epoch > seen.epoch && now.members.is_empty());
    let gone = gone.await.unwrap();
    let again = registry.register(member("a"), TTL).await.unwrap();
    assert!(again.epoch > gone.epoch && again.epoch > seen.epoch);
    let back = setup.now().await;
    assert!(back.epoch >= back.members["a"].epoch);
    assert_eq!(back.members["a"].epoch, again.epoch);

    // The lease of its earlier life is worth nothing.
    let late = registry.keep_alive(beat("a", first.lease, MemberState::Ready, 0));
    assert_eq!(late.await.unwrap_err().code(), Code::NotFound);
    registry.deregister("a", first.lease).await.unwrap();
    assert_eq!(setup.now().await.members.len(), 1);
}

fn plan(pool: &str, generation: u64, body: &[u8]) -> Plan {
    Plan {
        pool: pool.to_owned(),
        generation,
        body: body.to_vec(),
        epoch: 0,
    }
}

async fn plans_follow_one_another_and_outlive_members(setup: Setup) {
    let registry = setup.registry.clone();
    let grant = registry.register(member("a"), TTL).await.unwrap();
    let snapshots = Snapshots::follow(setup.other.clone());
    let first = registry.publish_plan(plan("p", 1, b"one")).await.unwrap();
    assert!(first > grant.epoch, "a plan is a new epoch");
    let seen = snapshots
        .wait(SOON, |now| now.plans.contains_key("p"))
        .await;
    let seen = seen.unwrap();
    assert_eq!(seen.epoch, first);
    assert_eq!(
        (seen.plans["p"].generation, seen.plans["p"].epoch),
        (1, first)
    );
    assert_eq!(seen.plans["p"].body, b"one");

    // Of those who saw generation 1 one publishes generation 2.
    let second = setup
        .other
        .publish_plan(plan("p", 2, b"two"))
        .await
        .unwrap();
    assert!(second > first);
    for stale in [
        plan("p", 2, b"late"),
        plan("p", 4, b"early"),
        plan("q", 2, b""),
    ] {
        let error = registry.publish_plan(stale).await.unwrap_err();
        let blamed = (error.code(), error.field().map(str::to_owned));
        assert_eq!(
            blamed,
            (Code::Aborted, Some("generation".to_owned())),
            "{error}"
        );
    }
    registry.deregister("a", grant.lease).await.unwrap();
    let now = setup.now().await;
    assert_eq!((now.members.len(), now.plans.len()), (0, 1));
    assert_eq!(
        (now.plans["p"].generation, now.plans["p"].epoch),
        (2, second)
    );
    assert_eq!(now.plans["p"].body, b"two");
}

async fn bad_plans_are_refused_by_field(setup: Setup) {
    for (bad, field) in [
        (plan("", 1, b""), "pool"),
        (plan(&"p".repeat(300), 1, b""), "pool"),
        (plan("p", 0, b""), "generation"),
        (plan("p", 1, &[0; 70_000]), "body"),
    ] {
        let error = setup.registry.publish_plan(bad).await.unwrap_err();
        let blamed = (error.code(), error.field());
        assert_eq!(blamed, (Code::InvalidArgument, Some(field)), "{error}");
    }
    assert!(setup.now().await.plans.is_empty());
}

macro_rules! suite {
    ($($test:ident)*) => {
        mod on_embedded {
            $(#[tokio::test] async fn $test() { super::$test(super::embedded().await).await; })*
        }
        mod on_remote {
            $(#[tokio::test] async fn $test() { super::$test(super::remote().await).await; })*
        }
        mod on_etcd {
            $(#[tokio::test] async fn $test() { super::$test(super::etcd().await).await; })*
        }
    };
}

suite! {
    a_watch_starts_with_everything_and_follows_in_order
    a_state_is_a_new_epoch_and_load_alone_is_not
    a_lost_lease_is_not_found_and_ending_it_is_harmless
    a_silent_member_is_removed
    bad_records_are_refused_by_field
    a_drained_member_hears_of_it_and_stays_drained
    a_cordoned_member_takes_no_work_until_it_is_let_again
    a_cordon_is_no_drain_and_ends_with_the_record_it_is_about
    a_watcher_that_slept_sees_the_truth_in_order
    a_member_that_returns_is_newer_than_every_picture_of_before
    plans_follow_one_another_and_outlive_members
    bad_plans_are_refused_by_field
    a_membership_renews_reports_and_leaves
    a_membership_registers_again_when_its_lease_is_gone
}

#[tokio::test]
async fn without_a_registry_joining_ends_typed_and_in_time() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    drop(listener);
    let options = JoinOptions {
        ttl: TTL,
        deadline: Duration::from_millis(300),
    };
    let registry = Arc::new(Remote::new(&address).unwrap());
    let joining = Membership::join(registry, member("a"), options);
    let error = tokio::time::timeout(SOON, joining)
        .await
        .unwrap()
        .unwrap_err();
    assert_eq!(error.code(), Code::Unavailable);
}

#[tokio::test]
async fn with_the_registry_away_the_last_snapshot_stays() {
    let setup = remote().await;
    let snapshots = Snapshots::follow(setup.registry.clone());
    setup.registry.register(member("a"), TTL).await.unwrap();
    snapshots
        .wait(SOON, |now| now.members.len() == 1)
        .await
        .unwrap();
    let mut watch = setup.registry.watch().await.unwrap();
    next(&mut watch).await;
    setup.stop.cancel();
    let end = tokio::time::timeout(SOON, async {
        while let Some(Ok(_)) = watch.next().await {}
    });
    end.await.unwrap();
    assert_eq!(snapshots.current().members.len(), 1);
}
