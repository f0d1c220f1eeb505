//! What a prefix transfer promises, on every transport, between processes.
#![allow(clippy::unwrap_used)]
mod support;

use std::sync::Arc;
use std::time::Duration;

use base::{Code, Deadline, Fault as _};
use kv::{KvGeometry, Manifest};
use kv_transfer::engine::{Engine, Remote, Transport};
use kv_transfer::{KvClient, PublishRequest, TransferError};
use proto::v1;
use support::{CHUNK, MIB, Node, Process, TRANSPORTS, client, geometry, hasty_client, prefix};

async fn fetch(
    client: &KvClient,
    handle: &v1::PrefixHandle,
    geometry: &KvGeometry,
) -> Result<kv_transfer::Fetched, TransferError> {
    client
        .fetch(handle, geometry, "conformance", "receiver")
        .await
}

/// Name of the UCX transport that must be in use.
fn ucx_name(transport: Transport) -> &'static str {
    match transport {
        Transport::Shm => "posix",
        Transport::Tcp => "tcp",
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_prefix_of_any_size_arrives_as_it_was() {
    for transport in TRANSPORTS {
        let node = Node::start(transport, 80 * MIB);
        let (producer, consumer) = (client(transport), client(transport));
        let chunk_tokens = CHUNK / 4;
        for (heads, tokens) in [
            (1, 1),
            (1, 255),
            (1, chunk_tokens),
            (1, chunk_tokens + 1),
            (3, 3 * chunk_tokens - 1),
            (7, 100_003),
            (16, MIB as usize),
        ] {
            let sent = prefix(heads, tokens);
            let (payload, shape) = (sent.payload.clone(), sent.geometry);
            let published = producer.publish(&node.endpoint, sent).await.unwrap();
            let fetched = fetch(&consumer, &published.handle, &shape).await.unwrap();
            assert!(
                fetched.payload == payload,
                "{transport} {} bytes",
                payload.len()
            );
            assert_eq!(fetched.tokens, tokens);
            assert_eq!(
                (fetched.bytes, fetched.repaired_chunks),
                (payload.len() as u64, 0)
            );
            assert_eq!(fetched.transport, ucx_name(transport));
            assert_eq!(published.transport, ucx_name(transport));
            consumer.release(fetched.lease).await.unwrap();
            producer.release(published.lease).await.unwrap();
        }
        assert_eq!(node.list().await.used_bytes, 0, "{transport}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn two_consumers_read_one_prefix_at_once_and_the_last_release_frees_it() {
    for transport in TRANSPORTS {
        let node = Node::start(transport, 16 * MIB);
        let producer = client(transport);
        let sent = prefix(4, 200_000);
        let payload = sent.payload.clone();
        let published = producer.publish(&node.endpoint, sent).await.unwrap();
        let (first, second) = (client(transport), client(transport));
        let shape = geometry(4);
        let both = tokio::join!(
            fetch(&first, &published.handle, &shape),
            fetch(&second, &published.handle, &shape),
        );
        let (one, two) = (both.0.unwrap(), both.1.unwrap());
        assert!(
            one.payload == payload && two.payload == payload,
            "{transport}"
        );
        producer.release(published.lease).await.unwrap();
        first.release(one.lease).await.unwrap();
        let left = node.list().await;
        assert_eq!(
            left.slots
                .iter()
                .map(|slot| slot.leases)
                .collect::<Vec<_>>(),
            [1]
        );
        second.release(two.lease).await.unwrap();
        assert_eq!(node.list().await.used_bytes, 0, "{transport}");
    }
}

/// Reserves a slot, writes `payload` into it, and seals it with what `manifest` makes of it.
async fn seal_by_hand(
    node: &Node,
    engine: &Engine,
    request: &PublishRequest,
    damage: impl FnOnce(&mut v1::PrefixManifest),
) -> Result<(v1::ReserveResponse, v1::SealResponse), tonic::Status> {
    let mut stub = node.stub();
    let bytes = request.payload.len() as u64;
    let reserve = v1::ReserveRequest {
        request_id: "by-hand".into(),
        bytes,
        ttl_ms: 60_000,
    };
    let reserved = stub.reserve(reserve).await?.into_inner();
    let remote = remote(&reserved);
    let soon = Deadline::after(&base::clock::SystemClock, Duration::from_secs(30));
    engine
        .put(&remote, Arc::new(request.payload.clone()), soon)
        .await
        .unwrap();
    let PublishRequest {
        identity,
        geometry,
        tokens,
        payload,
        ..
    } = request;
    let manifest = Manifest::describe(*identity, *geometry, *tokens, payload, CHUNK).unwrap();
    let mut wire = v1::PrefixManifest {
        identity: manifest.identity.as_bytes().to_vec(),
        geometry: Some(kv_transfer::wire::geometry_to_proto(geometry)),
        tokens: u32::try_from(*tokens).unwrap(),
        bytes,
        chunk_bytes: u32::try_from(CHUNK).unwrap(),
        chunk_crc32c: manifest.crcs,
    };
    damage(&mut wire);
    let seal = v1::SealRequest {
        slot: reserved.slot,
        generation: reserved.generation,
        lease: reserved.lease,
        manifest: Some(wire),
    };
    let sealed = stub.seal(seal).await?.into_inner();
    Ok((reserved, sealed))
}

fn remote(reserved: &v1::ReserveResponse) -> Remote {
    let region = reserved.region.clone().unwrap();
    Remote {
        worker_address: region.worker_address,
        key: region.rkey,
        address: region.address,
        bytes: region.bytes,
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_byte_that_flips_after_the_seal_is_data_loss_at_the_consumer() {
    for transport in TRANSPORTS {
        let node = Node::start(transport, 16 * MIB);
        let engine = Engine::start(&support::config(transport)).unwrap();
        let request = prefix(1, 100_000);
        let sealed = seal_by_hand(&node, &engine, &request, |_| {}).await;
        let (reserved, sealed) = sealed.unwrap();
        let handle = sealed.handle.unwrap();
        let consumer = client(transport);
        fetch(&consumer, &handle, &geometry(1)).await.unwrap();

        let at = 3 * CHUNK + 5;
        let mut damaged = remote(&reserved);
        damaged.address += at as u64;
        damaged.bytes = 1;
        let soon = Deadline::after(&base::clock::SystemClock, Duration::from_secs(30));
        let flipped = Arc::new(vec![request.payload[at] ^ 0x10]);
        engine.put(&damaged, flipped, soon).await.unwrap();
        let error = fetch(&consumer, &handle, &geometry(1)).await.unwrap_err();
        assert_eq!(error.code(), Code::DataLoss, "{transport}: {error}");
        let first = match error {
            TransferError::DataLoss {
                chunks: 1, first, ..
            } => first,
            other => panic!("{other}"),
        };
        assert!(
            matches!(first, kv::KvError::Chunk { index: 3, .. }),
            "{first}"
        );

        let repaired = Arc::new(vec![request.payload[at]]);
        engine.put(&damaged, repaired, soon).await.unwrap();
        let fetched = fetch(&consumer, &handle, &geometry(1)).await.unwrap();
        assert!(fetched.payload == request.payload);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_seal_whose_manifest_is_wrong_is_refused_and_names_the_field() {
    let node = Node::start(Transport::Shm, 16 * MIB);
    let engine = Engine::start(&support::config(Transport::Shm)).unwrap();
    let request = prefix(1, 100_000);
    type Damage = fn(&mut v1::PrefixManifest);
    let cases: [(&str, Damage); 5] = [
        ("chunk_crc32c", |manifest| manifest.chunk_crc32c[2] ^= 1),
        ("chunk_crc32c", |manifest| manifest.chunk_crc32c.truncate(3)),
        ("bytes", |manifest| manifest.bytes -= 4),
        ("tokens", |manifest| manifest.tokens = u32::MAX),
        ("identity", |manifest| manifest.identity.truncate(5)),
    ];
    for (field, damage) in cases {
        let status = seal_by_hand(&node, &engine, &request, damage)
            .await
            .unwrap_err();
        let failure = proto::status::failure(&status);
        assert_eq!(failure.code, Code::InvalidArgument, "{failure}");
        assert_eq!(failure.field.as_deref(), Some(field), "{failure}");
    }
    seal_by_hand(&node, &engine, &request, |_| {})
        .await
        .unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn another_identity_or_geometry_is_never_handed_out() {
    let transport = Transport::Shm;
    let node = Node::start(transport, MIB);
    let client = client(transport);
    let published = client
        .publish(&node.endpoint, prefix(2, 100))
        .await
        .unwrap();
    let mut other = published.handle.clone();
    other.identity[0] ^= 1;
    let error = fetch(&client, &other, &geometry(2)).await.unwrap_err();
    assert_eq!(error.code(), Code::FailedPrecondition);
    assert_eq!(error.field(), Some("identity"));
    let error = fetch(&client, &published.handle, &geometry(4))
        .await
        .unwrap_err();
    assert_eq!(error.code(), Code::FailedPrecondition);
    assert_eq!(error.field(), Some("geometry"));
    let mut longer = published.handle.clone();
    longer.tokens += 1;
    let error = fetch(&client, &longer, &geometry(2)).await.unwrap_err();
    assert_eq!(error.field(), Some("tokens"));
    fetch(&client, &published.handle, &geometry(2))
        .await
        .unwrap();
}

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
    let held = v1::PullRequest {
        handle: Some(old.handle.clone()),
        request_id: "r".into(),
        receiver: "receiver".into(),
        ttl_ms: 60_000,
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
async fn a_bad_call_names_its_field_and_the_next_one_works() {
    let node = Node::start(Transport::Shm, MIB);
    let mut stub = node.stub();
    let good = v1::ReserveRequest {
        request_id: "r".into(),
        bytes: 100,
        ttl_ms: 1000,
    };
    let cases = [
        (
            "request_id",
            v1::ReserveRequest {
                request_id: "a b".into(),
                ..good.clone()
            },
        ),
        (
            "bytes",
            v1::ReserveRequest {
                bytes: 0,
                ..good.clone()
            },
        ),
        (
            "bytes",
            v1::ReserveRequest {
                bytes: u64::MAX,
                ..good.clone()
            },
        ),
        (
            "ttl_ms",
            v1::ReserveRequest {
                ttl_ms: 1,
                ..good.clone()
            },
        ),
        (
            "ttl_ms",
            v1::ReserveRequest {
                ttl_ms: u32::MAX,
                ..good.clone()
            },
        ),
    ];
    for (field, request) in cases {
        let status = stub.reserve(request).await.unwrap_err();
        let failure = proto::status::failure(&status);
        assert_eq!(failure.code, Code::InvalidArgument, "{failure}");
        assert_eq!(failure.field.as_deref(), Some(field), "{failure}");
    }
    let pull = v1::PullRequest::default();
    let failure = proto::status::failure(&stub.pull(pull).await.unwrap_err());
    assert_eq!(failure.code, Code::InvalidArgument);
    stub.reserve(good).await.unwrap();
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
    published.lease.leave_to_expire();
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
        let engine = Engine::start(&support::config(transport)).unwrap();
        let reserve = v1::ReserveRequest {
            request_id: "r".into(),
            bytes: 64 * MIB,
            ttl_ms: 60_000,
        };
        let reserved = node.stub().reserve(reserve).await.unwrap().into_inner();
        let payload = Arc::new(vec![9; 64 << 20]);

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
        let put = engine
            .put(&remote(&reserved), Arc::clone(&payload), soon)
            .await;
        // Shared memory needs no help of its owner; TCP does.
        match transport {
            Transport::Shm => drop(put.unwrap()),
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
            while engine
                .put(&remote(&reserved), Arc::clone(&payload), later)
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
    let engine = Engine::start(&support::config(Transport::Tcp)).unwrap();
    let reserve = v1::ReserveRequest {
        request_id: "r".into(),
        bytes: 64 * MIB,
        ttl_ms: 60_000,
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

    let other = Engine::start(&support::config(Transport::Tcp)).unwrap();
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
async fn health_and_reflection_answer() {
    let node = Node::start(Transport::Shm, MIB);
    let channel = proto::channel::connect(&node.endpoint).await.unwrap();
    let mut health = tonic_health::pb::health_client::HealthClient::new(channel.clone());
    for service in ["", proto::names::KV_TRANSFER] {
        let request = tonic_health::pb::HealthCheckRequest {
            service: service.into(),
        };
        let answer = health.check(request).await.unwrap().into_inner();
        assert_eq!(
            answer.status(),
            tonic_health::pb::health_check_response::ServingStatus::Serving
        );
    }
    let request = tonic_reflection::pb::v1::ServerReflectionRequest {
        host: String::new(),
        message_request: Some(
            tonic_reflection::pb::v1::server_reflection_request::MessageRequest::ListServices(
                String::new(),
            ),
        ),
    };
    let mut client =
        tonic_reflection::pb::v1::server_reflection_client::ServerReflectionClient::new(channel);
    let stream = tokio_stream::iter([request]);
    let mut answers = client
        .server_reflection_info(stream)
        .await
        .unwrap()
        .into_inner();
    let answer = format!("{:?}", answers.message().await.unwrap().unwrap());
    assert!(answer.contains(proto::names::KV_TRANSFER), "{answer}");
}
