//! Several nodes: a dead one or one that hangs costs a moment, not the lease.
use std::{net::TcpListener, sync::Arc, time::Duration};

use super::{SHORT, config, options, server::EtcdServer};
use crate::{
    Etcd, EtcdConfig, JoinOptions, MemberState, Membership, Registry as _, Role, Snapshots,
    conformance::{SOON, TTL, member, picture},
};

fn behind(server: &EtcdServer, first: &str) -> EtcdConfig {
    let mut config = config(server);
    config.endpoints.insert(0, first.to_owned());
    config
}

#[tokio::test]
async fn a_dead_node_is_passed_over() {
    let server = EtcdServer::start();
    let dead = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = dead.local_addr().unwrap().to_string();
    drop(dead);
    let etcd = Etcd::new(behind(&server, &address)).unwrap();
    etcd.register(member("a"), TTL).await.unwrap();
    assert_eq!(picture(&etcd).await.members.len(), 1);
}

#[tokio::test]
async fn a_node_that_hangs_does_not_cost_the_lease() {
    let server = EtcdServer::start();
    // Connections open, nobody answers.
    let deaf = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = deaf.local_addr().unwrap().to_string();
    let etcd = Arc::new(Etcd::new(behind(&server, &address)).unwrap());
    let joined = Membership::join(etcd.clone(), member("a"), options());
    let joined = joined.await.unwrap();
    tokio::time::sleep(SHORT * 2).await;
    assert!(joined.standing().leased);
    let snapshots = Snapshots::follow(etcd);
    let seen = snapshots.wait(SOON, |now| now.members.contains_key("a"));
    assert_eq!(seen.await.unwrap().members["a"].epoch, joined.epoch());
}

#[tokio::test]
async fn the_second_node_takes_over_when_the_first_dies() {
    // Two clusters of one node each: what matters is who is asked, not what they hold.
    let (mut first, second) = (EtcdServer::start(), EtcdServer::start());
    let mut both = config(&first);
    both.endpoints.extend(config(&second).endpoints);
    let etcd = Etcd::new(both).unwrap();
    etcd.register(member("a"), TTL).await.unwrap();
    let other = Etcd::new(config(&second)).unwrap();
    assert_eq!(picture(&other).await.members.len(), 0);
    first.kill();
    etcd.register(member("b"), TTL).await.unwrap();
    assert_eq!(picture(&other).await.members.len(), 1);
}

#[tokio::test]
async fn a_cluster_of_three_loses_any_node_and_no_member() {
    let mut nodes = EtcdServer::start_cluster(3);
    let mut all = config(&nodes[0]);
    all.endpoints = nodes.iter().map(EtcdServer::endpoint).collect();
    let open = || Arc::new(Etcd::new(all.clone()).unwrap());
    // Long enough for an election on a busy machine.
    let options = JoinOptions {
        ttl: Duration::from_secs(6),
        ..options()
    };
    let joined = Membership::join(open(), member("a"), options)
        .await
        .unwrap();
    let snapshots = Snapshots::follow(open());
    for turn in 0..nodes.len() {
        nodes[turn].kill();
        let state = [MemberState::Ready, MemberState::Draining][turn % 2];
        joined.set_state(state);
        let seen = snapshots.wait(SOON, |now| {
            now.members.get("a").map(crate::Member::state) == Some(state)
        });
        assert!(
            seen.await.is_some(),
            "a change after the loss of node {turn}"
        );
        nodes[turn].restart();
    }
    let now = snapshots.current();
    assert_eq!(now.ready(Role::DitWorker).count(), 1);
    assert_eq!(
        now.members["a"].epoch,
        joined.epoch(),
        "it never lost its lease"
    );
}
