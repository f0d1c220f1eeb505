//! Nothing leaks, nothing hangs and nobody is harmed when leases end, callers leave or processes
//! die.
use std::sync::Arc;
use std::time::Duration;

use base::{Code, Deadline, Fault as _};
use kv_transfer::engine::{Engine, Transport};
use proto::v1;

use crate::support::{
    Hand, MIB, Node, Process, TRANSPORTS, client, config, fetch, geometry, hasty_client, prefix,
    remote,
};

#[tokio::test(flavor = "multi_thread")]
async fn an_old_generation_is_refused_and_a_double_release_harms_nobody() {
    let transport = Transport::Shm;
    let node = Node::start(transport, MIB);
    let client = client(transport);
    let old = client
        .publish(&node.endpoint, prefix(1, 1000))
        .await
        .unwrap();
    let mut stub = node.stub();
    let token = client
        .grant(&old.handle, ("r", "receiver", 0), None)
        .await
        .unwrap();
    let held = v1::PullRequest {
        handle: Some(v1::PrefixHandle {
            pull_token: token,
            ..old.handle.clone()
        }),
        request_id: "r".into(),
        receiver: "receiver".into(),
        ttl_ms: 60_000,
        ..Default::default()
    };
    let lease = stub.pull(held).await.unwrap().into_inner().lease;
    let release = v1::ReleaseRequest {
        slot: old.handle.slot,
        generation: old.handle.generation,
        lease,
    };
    let handle = old.handle.clone();
    client.release(old.lease).await.unwrap();
    stub.release(release).await.unwrap();
    let error = fetch(&client, &handle, &geometry(1)).await.unwrap_err();
    assert_eq!(error.code(), Code::NotFound);

    let new = client
        .publish(&node.endpoint, prefix(1, 1000))
        .await
        .unwrap();
    assert_eq!(new.handle.slot, handle.slot, "the memory is reused");
    let error = fetch(&client, &handle, &geometry(1)).await.unwrap_err();
    assert_eq!(
        (error.code(), error.field()),
        (Code::Aborted, Some("generation"))
    );
    stub.release(release).await.unwrap();
    fetch(&client, &new.handle, &geometry(1)).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_pool_says_when_to_retry_and_an_impossible_size_blames_bytes() {
    let transport = Transport::Shm;
    let node = Node::start(transport, MIB);
    let client = client(transport);
    let kept = client
        .publish(&node.endpoint, prefix(1, 200_000))
        .await
        .unwrap();
    let error = client
        .publish(&node.endpoint, prefix(1, 200_000))
        .await
        .unwrap_err();
    assert_eq!(error.code(), Code::ResourceExhausted);
    assert!(error.retry_after().is_some(), "{error}");
    let error = client
        .publish(&node.endpoint, prefix(1, 300_000))
        .await
        .unwrap_err();
    assert_eq!(
        (error.code(), error.field()),
        (Code::InvalidArgument, Some("bytes"))
    );
    client.release(kept.lease).await.unwrap();
    client
        .publish(&node.endpoint, prefix(1, 200_000))
        .await
        .unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn leases_that_nobody_renews_are_reclaimed() {
    let transport = Transport::Shm;
    let node = Node::start(transport, MIB);
    let client = hasty_client(transport, Duration::from_millis(400));
    let published = client
        .publish(&node.endpoint, prefix(1, 1000))
        .await
        .unwrap();
    let handle = published.handle.clone();
    published.lease.hand_over();
    node.wait_until_empty().await;
    let error = fetch(&client, &handle, &geometry(1)).await.unwrap_err();
    assert_eq!(error.code(), Code::NotFound);
}

#[tokio::test(flavor = "multi_thread")]
async fn dropping_a_lease_releases_it() {
    let transport = Transport::Shm;
    let node = Node::start(transport, MIB);
    let client = client(transport);
    drop(
        client
            .publish(&node.endpoint, prefix(1, 1000))
            .await
            .unwrap(),
    );
    node.wait_until_empty().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_producer_is_reclaimed_by_its_time_to_live() {
    for transport in TRANSPORTS {
        let node = Node::start(transport, 4 * MIB);
        let args = [
            "hold".to_owned(),
            format!("--transport={transport}"),
            format!("--endpoint={}", node.endpoint),
            "--ttl-ms=2000".to_owned(),
        ];
        let mut producer = Process::probe(&args);
        assert!(producer.line.starts_with("held"));
        assert!(node.list().await.used_bytes > 0);
        producer.kill();
        node.wait_until_empty().await;
        let client = client(transport);
        let published = client
            .publish(&node.endpoint, prefix(1, 1000))
            .await
            .unwrap();
        fetch(&client, &published.handle, &geometry(1))
            .await
            .unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_service_that_is_killed_gives_a_typed_error_within_the_deadline() {
    for transport in TRANSPORTS {
        let mut node = Node::start(transport, 80 * MIB);
        let endpoint = node.endpoint.clone();
        let client = hasty_client(transport, Duration::from_secs(5));
        let published = client
            .publish(&endpoint, prefix(16, MIB as usize / 2))
            .await
            .unwrap();
        let busy = {
            let (client, handle) = (client.clone(), published.handle.clone());
            base::task::spawn(async move {
                loop {
                    if let Err(error) = fetch(&client, &handle, &geometry(16)).await {
                        return error;
                    }
                }
            })
        };
        // Let transfers be under way; wherever the kill hits, the promise is the same.
        tokio::time::sleep(Duration::from_millis(30)).await;
        node.process.kill();
        let bound = Duration::from_secs(30);
        let error = tokio::time::timeout(bound, busy)
            .await
            .expect("hung")
            .unwrap();
        let typed = matches!(error.code(), Code::Unavailable | Code::DeadlineExceeded);
        assert!(typed, "{transport}: {error:?}");
        let again = client.publish(&endpoint, prefix(1, 1000));
        let error = tokio::time::timeout(bound, again)
            .await
            .expect("hung")
            .unwrap_err();
        assert_eq!(error.code(), Code::Unavailable, "{transport}: {error:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_service_that_hangs_costs_a_deadline_and_nothing_else() {
    for transport in TRANSPORTS {
        let node = Node::start(transport, 80 * MIB);
        let hasty = hasty_client(transport, Duration::from_secs(2));
        let published = client(transport)
            .publish(&node.endpoint, prefix(16, 1000))
            .await
            .unwrap();
        let hand = Hand::new(transport);
        let reserve = v1::ReserveRequest {
            request_id: "r".into(),
            bytes: 64 * MIB,
            ttl_ms: 60_000,
            ..Default::default()
        };
        let reserved = node.stub().reserve(reserve).await.unwrap().into_inner();
        let payload = Arc::new(vec![9; 64 << 20]);
        let first = Arc::new(vec![9]);
        let begun = super::support::soon();
        hand.write(&reserved, 0, first, begun).await.unwrap();

        node.process.signal("STOP");
        let error = fetch(&hasty, &published.handle, &geometry(16))
            .await
            .unwrap_err();
        assert_eq!(
            error.code(),
            Code::DeadlineExceeded,
            "{transport}: {error:?}"
        );
        let soon = Deadline::after(&base::clock::SystemClock, Duration::from_secs(2));
        let put = hand.write(&reserved, 0, Arc::clone(&payload), soon).await;
        // Shared memory needs no help of its owner; TCP does.
        match transport {
            Transport::Shm => put.unwrap(),
            Transport::Tcp => assert_eq!(put.unwrap_err().code(), Code::DeadlineExceeded),
        }
        node.process.signal("CONT");

        let patient = client(transport);
        fetch(&patient, &published.handle, &geometry(16))
            .await
            .unwrap();
        let later = Deadline::after(&base::clock::SystemClock, Duration::from_secs(30));
        let again = async {
            // The connection that hung is cut after a grace; until then it may still be in use.
            while hand
                .write(&reserved, 0, Arc::clone(&payload), later)
                .await
                .is_err()
            {}
        };
        tokio::time::timeout(Duration::from_secs(30), again)
            .await
            .expect("never recovered");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dropped_transfer_stops_writing_long_before_its_deadline() {
    let node = Node::start(Transport::Tcp, 80 * MIB);
    let engine = Engine::start(&config(Transport::Tcp)).unwrap();
    let reserve = v1::ReserveRequest {
        request_id: "r".into(),
        bytes: 64 * MIB,
        ttl_ms: 60_000,
        ..Default::default()
    };
    let reserved = node.stub().reserve(reserve).await.unwrap().into_inner();
    let far = Deadline::after(&base::clock::SystemClock, Duration::from_secs(60));
    let whole = remote(&reserved);
    engine
        .put(&whole.part(0, 4), Arc::new(vec![9; 4]), far)
        .await
        .unwrap();

    node.process.signal("STOP");
    let payload = Arc::new(vec![9; 64 << 20]);
    let put = engine.put(&whole, payload, far);
    let given_up = tokio::time::timeout(Duration::from_millis(300), put).await;
    assert!(
        given_up.is_err(),
        "the peer hangs, so the transfer cannot have ended"
    );
    tokio::time::sleep(kv_transfer::limits::DRAIN_GRACE * 2).await;
    node.process.signal("CONT");
    // Time for what should not arrive.
    tokio::time::sleep(Duration::from_secs(1)).await;

    let other = Engine::start(&config(Transport::Tcp)).unwrap();
    // The last of what was under way when the caller left; sockets hold less than that.
    let under_way = kv_transfer::limits::PIECE_BYTES * kv_transfer::limits::PIECES_IN_FLIGHT;
    let end = whole.part(under_way as u64 - MIB, MIB);
    let (bytes, _) = other.get(&end, vec![1; 1 << 20], far).await.unwrap();
    assert!(
        bytes.iter().all(|&byte| byte == 0),
        "the end was written after all"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lease_that_was_passed_on_is_its_new_holders_to_renew_and_release() {
    let transport = Transport::Shm;
    let node = Node::start(transport, MIB);
    let ttl = Duration::from_secs(2);
    let client = hasty_client(transport, ttl);
    let published = client
        .publish(&node.endpoint, prefix(1, 1000))
        .await
        .unwrap();
    let handle = published.handle.clone();
    published.lease.hand_over();
    let mut stub = node.stub();
    let renew = v1::RenewRequest {
        slot: handle.slot,
        generation: handle.generation,
        lease: handle.lease,
        ttl_ms: 60_000,
    };
    stub.renew(renew).await.unwrap();
    // Its first time to live is over.
    tokio::time::sleep(2 * ttl).await;
    fetch(&client, &handle, &geometry(1)).await.unwrap();
    let release = v1::ReleaseRequest {
        slot: handle.slot,
        generation: handle.generation,
        lease: handle.lease,
    };
    stub.release(release).await.unwrap();
    node.wait_until_empty().await;
}
