//! etcd goes away and comes back: nothing that was known is lost meanwhile, and what has changed is
//! known soon after.
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};

use super::{SHORT, config, open, options, server::EtcdServer};
use crate::{
    Etcd, Event, MemberState, Membership, Picture, Registry as _, Role, Snapshots,
    conformance::{SOON, TTL, beat, member, next},
    etcd::{feed, keys::Keys, link::Link},
};

async fn contact(snapshots: &Snapshots, following: bool) {
    let mut contacts = snapshots.contacts();
    let turned = contacts.wait_for(|now| now.following == following);
    tokio::time::timeout(SOON, turned).await.unwrap().unwrap();
}

#[tokio::test]
async fn with_etcd_killed_members_keep_serving_and_all_agree_after_its_return() {
    let mut server = EtcdServer::start();
    let etcd = open(&server);
    let snapshots = Snapshots::follow(open(&server));
    let joined = Membership::join(etcd.clone(), member("a"), options());
    let joined = joined.await.unwrap();
    joined.set_state(MemberState::Ready);
    let ready = |now: &crate::Snapshot| now.ready(Role::DitWorker).count() == 1;
    let before = snapshots.wait(SOON, ready).await.unwrap();

    server.kill();
    contact(&snapshots, false).await;
    // Far longer than the lease.
    tokio::time::sleep(SHORT * 2).await;
    assert_eq!(snapshots.current(), before, "the last picture stays");
    assert!(snapshots.contact().stale_for() > SHORT);
    assert!(joined.standing().leased, "nobody has said that it is gone");
    // What changes meanwhile is not forgotten.
    joined.set_state(MemberState::Draining);

    server.restart();
    contact(&snapshots, true).await;
    let draining = |now: &crate::Snapshot| {
        let state = now.members.get("a").map(crate::Member::state);
        state == Some(MemberState::Draining)
    };
    let after = snapshots.wait(SOON, draining).await.unwrap();
    assert!(after.epoch > before.epoch);
    assert_eq!(snapshots.contact().stale_for(), Duration::ZERO);
    assert!(snapshots.contact().resyncs >= 1);
    assert_eq!(after.members["a"].epoch, joined.epoch());
    joined.leave().await.unwrap();
    let empty = snapshots.wait(SOON, |now| now.members.is_empty()).await;
    assert!(empty.is_some());
}

#[tokio::test]
async fn an_etcd_that_lost_everything_gets_its_members_back() {
    let mut server = EtcdServer::start();
    let snapshots = Snapshots::follow(open(&server));
    let joined = Membership::join(open(&server), member("a"), options());
    let joined = joined.await.unwrap();
    joined.set_state(MemberState::Ready);
    for pool in ["p", "q", "r"] {
        let plan = crate::Plan {
            pool: pool.to_owned(),
            generation: 1,
            ..crate::Plan::default()
        };
        open(&server).publish_plan(plan).await.unwrap();
    }
    let ready =
        |now: &crate::Snapshot| now.ready(Role::DitWorker).count() == 1 && now.plans.len() == 3;
    snapshots.wait(SOON, ready).await.unwrap();

    server.kill();
    server.wipe();
    server.restart();
    // Revisions begin anew: the epoch of the registration does as well, and a dispatch that is
    // decided on the new picture is not refused.
    let again =
        |now: &crate::Snapshot| now.plans.is_empty() && now.ready(Role::DitWorker).count() == 1;
    let after = snapshots.wait(SOON, again).await.unwrap();
    let epoch = after.members["a"].epoch;
    assert!(after.epoch >= epoch);
    let mut standings = joined.standings();
    let told = standings.wait_for(|now| now.leased && now.epoch == epoch);
    tokio::time::timeout(SOON, told).await.unwrap().unwrap();
}

#[tokio::test]
async fn an_etcd_that_hangs_is_noticed_and_followed_again_when_it_wakes() {
    let server = EtcdServer::start();
    let snapshots = Snapshots::follow(open(&server));
    contact(&snapshots, true).await;
    let pid = Pid::from_raw(i32::try_from(server.pid()).unwrap()).unwrap();
    kill_process(pid, Signal::STOP).unwrap();
    contact(&snapshots, false).await;
    let late = open(&server).register(member("a"), TTL).await.unwrap_err();
    assert_eq!(base::Fault::code(&late), base::Code::Unavailable, "{late}");
    kill_process(pid, Signal::CONT).unwrap();
    contact(&snapshots, true).await;
    open(&server).register(member("b"), TTL).await.unwrap();
    let seen = snapshots.wait(SOON, |now| now.members.contains_key("b"));
    assert!(seen.await.is_some());
}

#[tokio::test]
async fn a_quiet_watch_is_not_taken_for_a_broken_one() {
    let server = EtcdServer::start();
    let snapshots = Snapshots::follow(open(&server));
    contact(&snapshots, true).await;
    let since = snapshots.contact();
    // Longer than etcd may say nothing at all.
    tokio::time::sleep(base::limits::CONTROL_DEADLINE + SHORT).await;
    assert_eq!(snapshots.contact(), since);
}

#[tokio::test]
async fn a_watch_whose_revision_is_compacted_away_reads_everything_anew() {
    let server = EtcdServer::start();
    let etcd = open(&server);
    let grant = etcd.register(member("a"), TTL).await.unwrap();
    let (link, keys) = (Link::new(config(&server)).unwrap(), Keys::new("default"));
    let first = feed::picture(&link, &keys).await.unwrap();

    // While the watcher has not begun to follow, history goes on and is then dropped.
    for state in [MemberState::Ready, MemberState::Draining] {
        let beat = beat("a", grant.lease, state, 0);
        etcd.keep_alive(beat).await.unwrap();
    }
    let last = etcd.register(member("b"), TTL).await.unwrap();
    let mut raw = etcd_client::Client::connect([server.endpoint()], None)
        .await
        .unwrap();
    let revision = i64::try_from(last.epoch).unwrap();
    raw.compact(revision, None).await.unwrap();

    let mut watch = feed::follow_from(std::sync::Arc::new(link), keys, first);
    let old = next(&mut watch).await.event;
    assert!(matches!(old, Event::Snapshot(Picture { members, .. }) if members.len() == 1));
    let fresh = next(&mut watch).await;
    assert_eq!(fresh.epoch, last.epoch);
    let Event::Snapshot(Picture { members, .. }) = fresh.event else {
        panic!("no fresh picture: {fresh:?}");
    };
    assert_eq!(members.len(), 2);
    assert_eq!(members[0].state(), MemberState::Draining);

    // It goes on from there.
    etcd.deregister("b", last.lease).await.unwrap();
    assert_eq!(next(&mut watch).await.event, Event::Removed("b".to_owned()));
}

#[tokio::test]
async fn a_watch_that_runs_is_not_disturbed_by_a_compaction() {
    let server = EtcdServer::start();
    let etcd = open(&server);
    let grant = etcd.register(member("a"), TTL).await.unwrap();
    let mut watch = etcd.watch().await.unwrap();
    next(&mut watch).await;
    let mut raw = etcd_client::Client::connect([server.endpoint()], None)
        .await
        .unwrap();
    for queued in 1..20 {
        let beat = beat("a", grant.lease, MemberState::Starting, queued);
        etcd.keep_alive(beat).await.unwrap();
        let now = raw.get("any", None).await.unwrap();
        let revision = now.header().unwrap().revision();
        raw.compact(revision, None).await.unwrap();
        let Event::Put(member) = next(&mut watch).await.event else {
            panic!("a change was missed");
        };
        assert_eq!(member.load.unwrap().queued, queued);
    }
}

#[tokio::test]
async fn without_etcd_joining_ends_typed_and_in_time() {
    let mut server = EtcdServer::start();
    server.kill();
    let etcd = Etcd::new(config(&server)).unwrap();
    let brief = crate::JoinOptions {
        deadline: Duration::from_millis(500),
        ..options()
    };
    let joining = Membership::join(std::sync::Arc::new(etcd), member("a"), brief);
    let error = tokio::time::timeout(SOON, joining).await.unwrap();
    assert_eq!(
        base::Fault::code(&error.unwrap_err()),
        base::Code::Unavailable
    );
}
