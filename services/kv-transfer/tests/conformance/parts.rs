//! Parts, prefixes that are still being written, and many receivers.
use std::time::Duration;

use base::{Code, Fault as _};
use kv::{KvDType, KvGeometry, KvShard, PrefixIdentity};
use kv_transfer::engine::Transport;
use kv_transfer::{
    ClientConfig, Description, FetchRequest, Fetched, KvClient, PublishRequest, TransferError,
};
use proto::v1::PrefixHandle;

use crate::support::{MIB, Node, TRANSPORTS, client, fetch, hasty_client, prefix};

/// Layers, KV heads and head size of a small model; a head of 64 tokens has 2 KiB.
const SHAPE: KvGeometry = KvGeometry {
    layers: 4,
    kv_heads: 8,
    head_dim: 16,
    dtype: KvDType::Bf16,
};
const TOKENS: usize = 64;

fn payload() -> Vec<u8> {
    let byte = |i: usize| (i.wrapping_mul(151) ^ (i >> 7)) as u8;
    (0..SHAPE.prefix_bytes(TOKENS)).map(byte).collect()
}

fn description() -> Description {
    Description {
        request_id: "parts".into(),
        identity: PrefixIdentity([5; 32]),
        geometry: SHAPE,
        tokens: TOKENS,
        cache: None,
    }
}

fn request() -> PublishRequest {
    PublishRequest {
        request_id: "parts".into(),
        identity: PrefixIdentity([5; 32]),
        geometry: SHAPE,
        tokens: TOKENS,
        payload: payload(),
    }
}

/// The part of rank `rank` of `ranks` tensor-parallel ones.
fn heads(rank: usize, ranks: usize) -> KvShard {
    let each = SHAPE.kv_heads / ranks;
    KvShard {
        heads: rank * each..(rank + 1) * each,
        ..KvShard::whole(&SHAPE, TOKENS)
    }
}

async fn part(
    client: &KvClient,
    handle: &PrefixHandle,
    shard: &KvShard,
) -> Result<Fetched, TransferError> {
    client
        .fetch_part(FetchRequest {
            expected: Some(&SHAPE),
            part: Some(shard),
            ..FetchRequest::new(handle, "parts", "receiver")
        })
        .await
}

#[tokio::test(flavor = "multi_thread")]
async fn ranks_of_any_number_read_exactly_their_heads() {
    let payload = payload();
    for transport in TRANSPORTS {
        let node = Node::start(transport, 4 * MIB);
        let published = client(transport)
            .publish(&node.endpoint, request())
            .await
            .unwrap();
        // Two producers or four make the same payload; two, four and eight receivers take it apart.
        for ranks in [2, 4, 8] {
            let mut read = 0;
            for rank in 0..ranks {
                let consumer = client(transport);
                let shard = heads(rank, ranks);
                let got = part(&consumer, &published.handle, &shard).await.unwrap();
                assert_eq!(got.read_bytes, got.bytes, "{transport} TP{ranks}");
                read += got.read_bytes;
                let copies = kv::Reshard::new(
                    &SHAPE,
                    TOKENS,
                    &[KvShard::whole(&SHAPE, TOKENS)],
                    std::slice::from_ref(&shard),
                );
                let mut wanted = [vec![0u16; shard.elements(&SHAPE)]];
                let elements: Vec<u16> = payload
                    .chunks(2)
                    .map(|pair| u16::from_le_bytes([pair[0], pair[1]]))
                    .collect();
                copies.unwrap().apply(&[elements], &mut wanted).unwrap();
                let wanted: Vec<u8> = wanted[0].iter().flat_map(|e| e.to_le_bytes()).collect();
                assert!(got.to_vec().unwrap() == wanted, "{transport} rank {rank}");
            }
            assert_eq!(read, payload.len() as u64, "{transport} TP{ranks}");
        }
        let none = KvShard {
            heads: 7..9,
            ..KvShard::whole(&SHAPE, TOKENS)
        };
        let error = part(&client(transport), &published.handle, &none).await;
        assert_eq!(error.unwrap_err().field(), Some("shard.heads"));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn layers_are_read_while_later_ones_are_still_computed() {
    let payload = payload();
    let layer = payload.len() / SHAPE.layers;
    for transport in TRANSPORTS {
        let node = Node::start(transport, 4 * MIB);
        let producer = client(transport);
        let mut publication = producer.offer(&node.endpoint, description()).await.unwrap();
        let handle = publication.handle().unwrap().clone();
        let whole = {
            let (consumer, handle) = (client(transport), handle.clone());
            base::task::spawn(async move {
                let fetched = part(&consumer, &handle, &KvShard::whole(&SHAPE, TOKENS)).await?;
                fetched.to_vec()
            })
        };
        for (index, bytes) in payload.chunks(layer).enumerate() {
            // A part that is complete is there for those who need no more, although the rest is not.
            publication.write(bytes.to_vec()).await.unwrap();
            let shard = KvShard {
                layers: 0..index + 1,
                ..KvShard::whole(&SHAPE, TOKENS)
            };
            let consumer = client(transport);
            let got = part(&consumer, &handle, &shard).await.unwrap();
            assert!(got.to_vec().unwrap() == payload[..(index + 1) * layer]);
            if index + 1 < SHAPE.layers {
                assert!(!whole.is_finished(), "{transport} layer {index}");
                let listed = node.list().await.slots;
                assert_eq!(listed.len(), 1);
                assert!(!listed[0].sealed);
                assert_eq!(listed[0].sealed_chunks, 16 * (index as u32 + 1));
            }
        }
        let published = publication.finish().await.unwrap();
        assert_eq!(published.handle, handle);
        assert!(whole.await.unwrap().unwrap() == payload, "{transport}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn who_follows_a_producer_that_gives_up_learns_it_and_the_memory_comes_back() {
    for transport in TRANSPORTS {
        let node = Node::start(transport, 4 * MIB);
        let producer = hasty_client(transport, Duration::from_secs(2));
        let mut publication = producer.offer(&node.endpoint, description()).await.unwrap();
        publication
            .write(payload()[..40_000].to_vec())
            .await
            .unwrap();
        let handle = publication.handle().unwrap().clone();
        let consumer = client(transport);
        let follows = {
            let (consumer, handle) = (consumer.clone(), handle.clone());
            base::task::spawn(async move { fetch(&consumer, &handle, &SHAPE).await })
        };
        tokio::time::sleep(Duration::from_millis(200)).await;
        drop(publication);
        let error = follows.await.unwrap().unwrap_err();
        assert_eq!(error.code(), Code::Unavailable, "{transport}: {error}");
        assert!(error.to_string().contains("producer"), "{error}");
        node.wait_until_empty().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_offer_is_not_sealed_as_something_else_or_out_of_order() {
    let node = Node::start(Transport::Shm, 4 * MIB);
    let producer = client(Transport::Shm);
    let mut publication = producer.offer(&node.endpoint, description()).await.unwrap();
    publication.write(payload()[..4096].to_vec()).await.unwrap();
    let error = publication.write(payload()).await.unwrap_err();
    assert_eq!(error.field(), Some("bytes"), "more than was announced");
    let handle = publication.handle().unwrap().clone();
    let mut stub = node.stub();
    let part = |first_chunk, crc| proto::v1::SealPartRequest {
        slot: handle.slot,
        generation: handle.generation,
        lease: handle.lease,
        first_chunk,
        chunk_crc32c: vec![crc],
    };
    for (message, code) in [
        (part(3, 0), Code::InvalidArgument),
        (part(0, 0), Code::FailedPrecondition),
        (part(2, 1), Code::InvalidArgument),
        (part(u32::MAX, 1), Code::InvalidArgument),
    ] {
        let status = stub.seal_part(message).await.unwrap_err();
        assert_eq!(proto::status::failure(&status).code, code, "{status}");
    }
    let error = publication.finish().await.unwrap_err();
    assert_eq!(error.field(), Some("chunk_crc32c"), "bytes are missing");
}

#[tokio::test(flavor = "multi_thread")]
async fn eight_receivers_of_another_node_read_the_producer_once() {
    let origin = Node::start(Transport::Tcp, 16 * MIB);
    // Its own receivers map the pool of the second node; only that node goes over the wire.
    let near = Node::start_with("shm,tcp", 16 * MIB, &[]);
    let request = prefix(4, 250_000);
    let (sent, shape) = (request.payload.clone(), request.geometry);
    let published = client(Transport::Tcp)
        .publish(&origin.endpoint, request)
        .await
        .unwrap();
    let receivers: Vec<_> = (0..8)
        .map(|_| {
            let config = ClientConfig {
                node: Some(near.endpoint.clone()),
                ..ClientConfig::only(Transport::Shm)
            };
            let (client, handle) = (KvClient::new(config).unwrap(), published.handle.clone());
            base::task::spawn(async move {
                let got = fetch(&client, &handle, &shape).await.unwrap();
                assert_eq!(got.fetched.transport, kv_transfer::MAPPED);
                got.payload
            })
        })
        .collect();
    for receiver in receivers {
        assert!(receiver.await.unwrap() == sent);
    }
    let (origin, near) = (origin.list().await, near.list().await);
    assert_eq!(near.slots.len(), 1, "one copy: {:?}", near.slots);
    // The producer's lease, and at most that of the one reader.
    assert!(origin.slots[0].leases <= 2, "{:?}", origin.slots);
    assert_eq!(origin.slots[0].pulls, 1);
}

/// How often the test below pauses for the receiver before it seals the last layer.
const PAUSES: [u64; 4] = [200, 500, 2_000, 8_000];

#[tokio::test(flavor = "multi_thread")]
async fn layers_are_taken_out_while_the_next_ones_are_written() {
    let payload = payload();
    let layer = payload.len() / SHAPE.layers;
    for transport in TRANSPORTS {
        let node = Node::start(transport, 4 * MIB);
        let (producer, consumer) = (client(transport), client(transport));
        let mut early = 0;
        // However slow the machine: with a pause that is long enough, all layers but the last are there.
        for pause in PAUSES {
            let offered = producer.offer(&node.endpoint, description()).await;
            let mut publication = offered.unwrap();
            let handle = publication.handle().cloned().unwrap();
            let follower = consumer.clone();
            let follows = base::task::spawn(async move {
                let request = FetchRequest::new(&handle, "parts", "receiver");
                follower.fetch_to(request, |bytes| vec![0; bytes]).await
            });
            for (index, bytes) in payload.chunks(layer).enumerate() {
                if index + 1 == SHAPE.layers {
                    tokio::time::sleep(Duration::from_millis(pause)).await;
                }
                publication.write(bytes.to_vec()).await.unwrap();
            }
            let (fetched, got) = follows.await.unwrap().unwrap();
            assert!(got == payload, "{transport}");
            early = fetched.early_bytes;
            consumer.release(fetched.lease).await.unwrap();
            let published = publication.finish().await.unwrap();
            producer.release(published.lease).await.unwrap();
            if early == (payload.len() - layer) as u64 {
                break;
            }
        }
        assert_eq!(early, (payload.len() - layer) as u64, "{transport}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_part_in_odd_pieces_is_taken_out_whole() {
    let payload = payload();
    // Half of the tokens: no chunk is needed whole.
    let shard = KvShard {
        tokens: std::iter::once(0..TOKENS / 2).collect(),
        ..KvShard::whole(&SHAPE, TOKENS)
    };
    let head = TOKENS * SHAPE.head_dim * 2;
    let expected: Vec<u8> = payload
        .chunks(head)
        .flat_map(|head| head[..head.len() / 2].to_vec())
        .collect();
    for transport in TRANSPORTS {
        let node = Node::start(transport, 4 * MIB);
        let client = client(transport);
        let published = client.publish(&node.endpoint, request()).await.unwrap();
        let request = FetchRequest {
            part: Some(&shard),
            ..FetchRequest::new(&published.handle, "parts", "receiver")
        };
        let taken = client.fetch_to(request, |bytes| vec![0; bytes]).await;
        let (fetched, part) = taken.unwrap();
        assert!(part == expected, "{transport}");
        // What came over the wire is not kept a second time.
        let again = fetched.to_vec();
        match transport {
            Transport::Shm => assert!(again.unwrap() == expected),
            Transport::Tcp => assert_eq!(again.unwrap_err().field(), Some("out")),
        }
    }
}
