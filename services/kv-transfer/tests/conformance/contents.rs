//! What arrives is what was sent, or a typed error.
use std::sync::Arc;

use base::{Code, Fault as _};
use kv_transfer::TransferError;
use kv_transfer::engine::Transport;
use proto::v1;

use crate::support::{
    CHUNK, Hand, MIB, Node, TRANSPORTS, client, fetch, geometry, prefix, seal_by_hand, soon, way,
};

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
            let fetched = fetched.fetched;
            assert_eq!(fetched.tokens, tokens);
            assert_eq!(
                (fetched.bytes, fetched.repaired_chunks),
                (payload.len() as u64, 0)
            );
            assert_eq!(fetched.transport, way(transport));
            assert_eq!(published.transport, way(transport));
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
        first.release(one.fetched.lease).await.unwrap();
        let left = node.list().await;
        assert_eq!(
            left.slots
                .iter()
                .map(|slot| slot.leases)
                .collect::<Vec<_>>(),
            [1]
        );
        second.release(two.fetched.lease).await.unwrap();
        assert_eq!(node.list().await.used_bytes, 0, "{transport}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_byte_that_flips_after_the_seal_is_data_loss_at_the_consumer() {
    for transport in TRANSPORTS {
        let node = Node::start(transport, 16 * MIB);
        let hand = Hand::new(transport);
        let request = prefix(1, 100_000);
        let sealed = seal_by_hand(&node, &hand, &request, |_| {}).await;
        let (reserved, sealed) = sealed.unwrap();
        let handle = sealed.handle.unwrap();
        let consumer = client(transport);
        fetch(&consumer, &handle, &geometry(1)).await.unwrap();

        let at = 3 * CHUNK + 5;
        let flipped = Arc::new(vec![request.payload[at] ^ 0x10]);
        hand.write(&reserved, at, flipped, soon()).await.unwrap();
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
        hand.write(&reserved, at, repaired, soon()).await.unwrap();
        let fetched = fetch(&consumer, &handle, &geometry(1)).await.unwrap();
        assert!(fetched.payload == request.payload);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_seal_whose_manifest_is_wrong_is_refused_and_names_the_field() {
    let node = Node::start(Transport::Shm, 16 * MIB);
    let hand = Hand::new(Transport::Shm);
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
        let status = seal_by_hand(&node, &hand, &request, damage)
            .await
            .unwrap_err();
        let failure = proto::status::failure(&status);
        assert_eq!(failure.code, Code::InvalidArgument, "{failure}");
        assert_eq!(failure.field.as_deref(), Some(field), "{failure}");
    }
    seal_by_hand(&node, &hand, &request, |_| {}).await.unwrap();
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
async fn a_bad_call_names_its_field_and_the_next_one_works() {
    let node = Node::start(Transport::Shm, MIB);
    let mut stub = node.stub();
    let good = v1::ReserveRequest {
        request_id: "r".into(),
        bytes: 100,
        ttl_ms: 1000,
        ..Default::default()
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
