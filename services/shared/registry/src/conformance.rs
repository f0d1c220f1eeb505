//! One suite, run on every backend.
use std::{sync::Arc, time::Duration};

use base::{Code, Fault as _, limits::WATCH_QUEUE, task};
use proto::v1::ModelInfo;
use tokio_util::sync::CancellationToken;

use crate::{
    Beat, Embedded, Event, JoinOptions, Load, Member, MemberState, Membership, Registry,
    RegistryError, Remote, Role, Snapshots, Update, Watch, service,
};

/// Bound of every wait in these tests; none is expected to come near it.
const SOON: Duration = Duration::from_secs(10);
const TTL: Duration = Duration::from_secs(5);
const SHORT: Duration = Duration::from_millis(200);

/// A backend under test, and the embedded registry that is behind it.
struct Setup {
    registry: Arc<dyn Registry>,
    core: Embedded,
    stop: CancellationToken,
    _server: Option<task::Owned<()>>,
}

async fn embedded() -> Setup {
    let core = Embedded::start(base::clock::system());
    Setup {
        registry: Arc::new(core.clone()),
        core,
        stop: CancellationToken::new(),
        _server: None,
    }
}

async fn remote() -> Setup {
    let core = Embedded::start(base::clock::system());
    let listener = proto::server::bind("127.0.0.1:0", "listen").await.unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    let stop = CancellationToken::new();
    let (mut routes, _health) = proto::server::routes(&[proto::names::REGISTRY])
        .await
        .unwrap();
    routes.add_service(service::server(Arc::new(core.clone()), stop.clone()));
    let stopped = stop.clone().cancelled_owned();
    let server = task::spawn(async move {
        proto::server::serve(listener, routes, stopped)
            .await
            .unwrap();
    });
    let registry = Arc::new(Remote::new(&address).unwrap());
    Setup {
        registry,
        core,
        stop,
        _server: Some(server),
    }
}

fn member(id: &str) -> Member {
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
        epoch: 0,
        load: Some(Load::default()),
    }
}

fn beat(id: &str, lease: u64, state: MemberState, queued: u32) -> Beat {
    let load = Load {
        running: 0,
        queued,
        capacity: 4,
    };
    Beat {
        member_id: id.to_owned(),
        lease,
        load,
        state,
    }
}

async fn next(watch: &mut Watch) -> Update {
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
    let registry = setup.registry;
    let first = registry.register(member("a"), TTL).await.unwrap();
    let mut watch = registry.watch().await.unwrap();
    let Update {
        epoch,
        event: Event::Snapshot(members),
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
    let registry = setup.registry;
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
    let registry = setup.registry;
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
    let registry = setup.registry;
    registry.register(member("silent"), SHORT).await.unwrap();
    let mut watch = registry.watch().await.unwrap();
    assert!(matches!(next(&mut watch).await.event, Event::Snapshot(members) if members.len() == 1));
    assert_eq!(
        next(&mut watch).await.event,
        Event::Removed("silent".to_owned())
    );
}

async fn bad_records_are_refused_by_field(setup: Setup) {
    let registry = setup.registry;
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
    assert!(setup.core.snapshot().members.is_empty());
}

async fn a_drained_member_hears_of_it_and_stays_drained(setup: Setup) {
    let registry = setup.registry;
    let grant = registry.register(member("a"), TTL).await.unwrap();
    registry
        .keep_alive(beat("a", grant.lease, MemberState::Ready, 0))
        .await
        .unwrap();
    assert_eq!(
        setup.core.drain("b"),
        Err(RegistryError::NoMember("b".to_owned()))
    );
    setup.core.drain("a").unwrap();
    setup.core.drain("a").unwrap();
    assert_eq!(setup.core.snapshot().ready(Role::DitWorker).count(), 0);
    let renewal = registry
        .keep_alive(beat("a", grant.lease, MemberState::Ready, 0))
        .await
        .unwrap();
    assert!(renewal.drain);
    registry.register(member("a"), TTL).await.unwrap();
    assert_eq!(
        setup.core.snapshot().members["a"].state(),
        MemberState::Draining
    );
}

async fn a_lagging_watcher_gets_a_fresh_snapshot(setup: Setup) {
    let registry = setup.registry;
    let grant = registry.register(member("a"), TTL).await.unwrap();
    let mut watch = registry.watch().await.unwrap();
    assert!(matches!(next(&mut watch).await.event, Event::Snapshot(_)));
    // Far more than the broadcast and the buffers of a connection hold.
    let last = 40 * u32::try_from(WATCH_QUEUE).unwrap();
    for queued in 1..=last {
        setup
            .core
            .keep_alive(beat("a", grant.lease, MemberState::Ready, queued))
            .await
            .unwrap();
    }
    let (mut fresh, mut seen) = (false, 0);
    while seen < last {
        let members = match next(&mut watch).await.event {
            Event::Snapshot(members) => {
                fresh = true;
                members
            }
            Event::Put(member) => vec![*member],
            Event::Removed(id) => panic!("{id} removed"),
        };
        let queued = members[0].load.unwrap().queued;
        assert!(queued >= seen, "order");
        seen = queued;
    }
    assert!(fresh, "the watcher never fell behind");
}

async fn a_membership_renews_reports_and_leaves(setup: Setup) {
    let snapshots = Snapshots::follow(setup.registry.clone());
    let options = JoinOptions {
        ttl: SHORT,
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
    tokio::time::sleep(SHORT * 4).await;
    assert_eq!(setup.core.snapshot().ready(Role::DitWorker).count(), 1);
    assert!(joined.standing().leased);

    setup.core.drain("a").unwrap();
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
        ttl: SHORT,
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
    assert_eq!(setup.core.snapshot().ready(Role::DitWorker).count(), 1);
}

macro_rules! suite {
    ($($test:ident)*) => {
        mod on_embedded {
            $(#[tokio::test] async fn $test() { super::$test(super::embedded().await).await; })*
        }
        mod on_remote {
            $(#[tokio::test] async fn $test() { super::$test(super::remote().await).await; })*
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
    a_lagging_watcher_gets_a_fresh_snapshot
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
