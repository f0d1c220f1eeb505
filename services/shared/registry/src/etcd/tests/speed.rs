//! From a change in etcd to the picture that placement reads.
use super::{open, server::EtcdServer};
use crate::{
    MemberState, Registry as _, Snapshots,
    conformance::{SOON, TTL, beat, member},
};

const CHANGES: usize = 200;

/// Prints the figure; what is checked is that every change arrives.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_change_reaches_the_view_of_placement() {
    let server = EtcdServer::start();
    let etcd = open(&server);
    let grant = etcd.register(member("a"), TTL).await.unwrap();
    let snapshots = Snapshots::follow(open(&server));
    snapshots
        .wait(SOON, |now| now.members.len() == 1)
        .await
        .unwrap();
    let mut raw = etcd_client::Client::connect([server.endpoint()], None)
        .await
        .unwrap();
    let (mut asked, mut written) = (Vec::new(), Vec::new());
    for turn in 0..CHANGES {
        let state = [MemberState::Ready, MemberState::Starting][turn % 2];
        let record = crate::Member {
            state: state.into(),
            load: None,
            epoch: grant.epoch,
            ..member("a")
        };
        let leased = etcd_client::PutOptions::new();
        let leased = leased.with_lease(i64::try_from(grant.lease).unwrap());
        let started = base::clock::now();
        let mut changes = snapshots.changes();
        let seen = base::task::spawn(async move {
            let shown = |now: &std::sync::Arc<crate::Snapshot>| now.members["a"].state() == state;
            let waiting = tokio::time::timeout(SOON, changes.wait_for(shown)).await;
            assert!(waiting.unwrap().is_ok(), "a change did not arrive");
            base::clock::now()
        });
        let value = prost::Message::encode_to_vec(&record);
        raw.put("/omni/default/members/a", value, Some(leased))
            .await
            .unwrap();
        let put = base::clock::now();
        let at = seen.await.unwrap();
        asked.push(at.saturating_duration_since(started));
        written.push(at.saturating_duration_since(put));
        if turn % 20 == 0 {
            let alive = beat("a", grant.lease, MemberState::Unspecified, 0);
            etcd.keep_alive(alive).await.unwrap();
        }
    }
    for (what, mut times) in [("write asked for", asked), ("write answered", written)] {
        times.sort_unstable();
        let at = |part: usize| times[(CHANGES - 1) * part / 100].as_secs_f64() * 1e3;
        println!(
            "etcd change to placement view, {CHANGES} changes, from the {what}: p50 {:.2} ms, p99 {:.2} ms, max {:.2} ms",
            at(50),
            at(99),
            at(100),
        );
    }
}
