//! What the pool does when it is full, what the cache keeps, and how processes of the node get at it.
use std::time::Duration;

use base::{Code, Fault as _};
use kv::PrefixIdentity;
use kv_transfer::engine::Transport;
use kv_transfer::{
    CacheTerms, ClientConfig, Description, FetchRequest, KvClient, Published, TransferError,
};
use proto::v1;

use crate::support::{MIB, Node, TRANSPORTS, client, fetch, geometry, prefix};

/// A client that waits in line.
fn patient(transport: Transport) -> KvClient {
    KvClient::new(ClientConfig {
        wait: Duration::from_secs(240),
        deadline: Duration::from_secs(240),
        ttl: Duration::from_secs(240),
        ..ClientConfig::only(transport)
    })
    .unwrap()
}

/// How many times larger than one MiB a prefix of the test below is; 64 is the size of real ones.
const SCALE: &str = "OMNI_TRANSFER_SCALE";

/// Publishes a prefix of `bytes` bytes when there is room, fetches and checks it; gives its generation.
async fn pass(client: &KvClient, endpoint: &str, id: u8, bytes: usize) -> u64 {
    let description = Description {
        request_id: "line".into(),
        identity: PrefixIdentity([id; 32]),
        geometry: geometry(16),
        tokens: bytes / 64,
        cache: None,
    };
    let mut publication = client.offer(endpoint, description).await.expect("offer");
    // What takes long must not keep this thread from the calls of the others.
    let sent = tokio::task::block_in_place(|| vec![id; bytes]);
    publication.write(sent).await.expect("write");
    let published = publication.finish().await.expect("finish");
    let request = FetchRequest::new(&published.handle, "line", "receiver");
    let got = client.fetch_to(request, |bytes| vec![0; bytes]).await;
    let (fetched, got) = got.expect("fetch");
    assert!(tokio::task::block_in_place(|| got == vec![id; bytes]));
    drop(got);
    client.release(fetched.lease).await.expect("release");
    client.release(published.lease).await.expect("release");
    published.handle.generation
}

#[tokio::test(flavor = "multi_thread")]
async fn two_hundred_prefixes_pass_through_a_pool_for_sixteen_and_none_is_lost() {
    let scale = std::env::var(SCALE).map_or(1, |text| text.parse().unwrap());
    for transport in TRANSPORTS {
        let node = Node::start(transport, 16 * scale * MIB);
        let client = patient(transport);
        let passing: Vec<_> = (0..200u8)
            .map(|id| {
                let (client, endpoint) = (client.clone(), node.endpoint.clone());
                let bytes = (scale * MIB) as usize;
                base::task::spawn(async move { pass(&client, &endpoint, id, bytes).await })
            })
            .collect();
        let mut generations = std::collections::BTreeSet::new();
        for passed in passing {
            generations.insert(passed.await.unwrap());
        }
        assert_eq!(generations.len(), 200, "{transport}");
        let listed = node.list().await;
        assert_eq!((listed.used_bytes, listed.waiting), (0, 0), "{transport}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn room_is_given_out_in_the_order_in_which_it_was_asked_for() {
    let node = Node::start(Transport::Shm, MIB);
    let holder = client(Transport::Shm);
    let held = holder
        .publish(&node.endpoint, prefix(1, 200_000))
        .await
        .unwrap();
    let mut waiting = vec![];
    for (place, tokens) in [200_000, 1_000, 200_000, 1_000].into_iter().enumerate() {
        let (client, endpoint) = (patient(Transport::Shm), node.endpoint.clone());
        let request = prefix(1, tokens);
        waiting.push(base::task::spawn(async move {
            let published = client.publish(&endpoint, request).await.unwrap();
            let generation = published.handle.generation;
            client.release(published.lease).await.unwrap();
            generation
        }));
        // The next one comes when this one stands in line.
        let stands = async {
            while node.list().await.waiting as usize <= place {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(20), stands)
            .await
            .unwrap();
    }
    // A small one would fit, but nobody passes.
    let error = client(Transport::Shm)
        .publish(&node.endpoint, prefix(1, 1_000))
        .await
        .unwrap_err();
    assert_eq!(error.code(), Code::ResourceExhausted);
    assert!(error.retry_after().is_some());
    holder.release(held.lease).await.unwrap();
    let mut generations = vec![];
    for task in waiting {
        generations.push(task.await.unwrap());
    }
    assert!(generations.is_sorted(), "{generations:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn waiting_in_line_ends_with_a_hint_when_no_room_comes() {
    let node = Node::start(Transport::Shm, MIB);
    let holder = client(Transport::Shm);
    let _held = holder
        .publish(&node.endpoint, prefix(1, 200_000))
        .await
        .unwrap();
    let waits = KvClient::new(ClientConfig {
        wait: Duration::from_millis(300),
        ..ClientConfig::only(Transport::Shm)
    })
    .unwrap();
    let error = waits
        .publish(&node.endpoint, prefix(1, 200_000))
        .await
        .unwrap_err();
    assert_eq!(error.code(), Code::ResourceExhausted, "{error}");
    assert!(error.retry_after().is_some(), "{error}");
    assert_eq!(node.list().await.waiting, 0);
}

/// Publishes a prefix of `kib` KiB that may be cached.
async fn cached(
    node: &Node,
    client: &KvClient,
    id: u8,
    (kib, cost_us, scope): (usize, u64, &str),
) -> Result<Published, TransferError> {
    let description = Description {
        request_id: "cache".into(),
        identity: PrefixIdentity([id; 32]),
        geometry: geometry(1),
        tokens: kib * 256,
        cache: Some(CacheTerms {
            scope: scope.to_owned(),
            cost_us,
        }),
    };
    let mut publication = client.offer(&node.endpoint, description).await?;
    publication.write(vec![id; kib << 10]).await?;
    publication.finish().await
}

async fn found(node: &Node, client: &KvClient, id: u8, scope: &str) -> bool {
    let identity = PrefixIdentity([id; 32]);
    let found = client
        .lookup(&node.endpoint, identity, scope, "cache")
        .await
        .unwrap();
    let Some((handle, lease)) = found else {
        return false;
    };
    let got = fetch(client, &handle, &geometry(1)).await.unwrap();
    assert!(got.payload.iter().all(|&byte| byte == id));
    client.release(got.fetched.lease).await.unwrap();
    client.release(lease).await.unwrap();
    true
}

/// A pool of 1 MiB of which half is for the cache, and so many entries of 128 KiB: (id, cost, scope).
async fn cache_of(entries: &[(u8, u64, &str)]) -> (Node, KvClient) {
    let node = Node::start_with("shm", MIB, &["--cache-bytes=524288".to_owned()]);
    let client = client(Transport::Shm);
    for &(id, cost, scope) in entries {
        let published = cached(&node, &client, id, (128, cost, scope)).await;
        client.release(published.unwrap().lease).await.unwrap();
    }
    (node, client)
}

#[tokio::test(flavor = "multi_thread")]
async fn the_cache_finds_exact_prefixes_of_its_scope_and_evicts_what_is_cheap_to_compute() {
    let all = [(1, 9_000_000, ""), (2, 1_000, "a"), (3, 800_000, "a")];
    let (node, client) = cache_of(&all).await;
    assert!(found(&node, &client, 1, "b").await, "shared by all");
    assert!(found(&node, &client, 2, "a").await);
    assert!(!found(&node, &client, 2, "b").await, "of another tenant");
    assert!(!found(&node, &client, 2, "").await);
    assert!(!found(&node, &client, 9, "a").await, "another identity");
    // Two more do not all fit into the budget: the cheapest goes first.
    for id in [4, 5] {
        let published = cached(&node, &client, id, (128, 700_000, "a")).await;
        client.release(published.unwrap().lease).await.unwrap();
    }
    assert!(!found(&node, &client, 2, "a").await);
    for id in [1, 3, 4, 5] {
        assert!(found(&node, &client, id, "a").await, "{id}");
    }
    let listed = node.list().await;
    let counted = (listed.cached_bytes, listed.cache_evictions);
    assert_eq!(counted, (512 << 10, 1));
    assert_eq!((listed.cache_hits, listed.cache_misses), (6, 4));
    assert_eq!(listed.cache_hit_bytes, 6 * (128 << 10));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pin_outlives_the_need_for_room_and_nothing_is_evicted_in_vain() {
    let all = [(1, 900_000, ""), (3, 800_000, ""), (4, 10, ""), (5, 20, "")];
    let (node, client) = cache_of(&all).await;
    let listed = node.list().await.slots;
    let slot = listed.iter().find(|slot| slot.identity[0] == 4).unwrap();
    let (slot, generation) = (slot.slot, slot.generation);
    let pin = |pinned| v1::PinRequest {
        slot,
        generation,
        pinned,
    };
    let mut stub = node.stub();
    stub.pin(pin(true)).await.unwrap();
    let error = client
        .publish(&node.endpoint, prefix(1, 240 * 1024))
        .await
        .unwrap_err();
    assert_eq!(error.code(), Code::ResourceExhausted);
    assert_eq!(node.list().await.cache_evictions, 0);
    let large = client
        .publish(&node.endpoint, prefix(1, 150 * 1024))
        .await
        .unwrap();
    assert!(!found(&node, &client, 5, "").await);
    for id in [1, 3, 4] {
        assert!(found(&node, &client, id, "").await, "{id}");
    }
    let evict = v1::EvictRequest { slot, generation };
    let refused = stub.evict(evict).await.unwrap_err();
    assert_eq!(refused.code(), tonic::Code::FailedPrecondition);
    stub.pin(pin(false)).await.unwrap();
    stub.evict(evict).await.unwrap();
    assert!(!found(&node, &client, 4, "").await);
    client.release(large.lease).await.unwrap();
    assert_eq!(node.list().await.used_bytes, 256 << 10, "1 and 3");
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_budget_nothing_stays() {
    let node = Node::start(Transport::Shm, MIB);
    let client = client(Transport::Shm);
    let published = cached(&node, &client, 1, (128, 1, "")).await.unwrap();
    assert!(!found(&node, &client, 1, "").await);
    client.release(published.lease).await.unwrap();
    node.wait_until_empty().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_socket_of_a_killed_service_is_replaced_and_other_files_are_not() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("pool.sock");
    let option = [format!("--pool-socket={}", socket.display())];
    let mut node = Node::start_with("shm", MIB, &option);
    let one = client(Transport::Shm);
    one.publish(&node.endpoint, prefix(1, 1000)).await.unwrap();
    node.process.kill();
    assert!(socket.exists(), "a killed process leaves its socket");
    let node = Node::start_with("shm", MIB, &option);
    one.publish(&node.endpoint, prefix(1, 1000)).await.unwrap();
    // A service that answers keeps its socket; what is no socket at all stays too.
    let taken = crate::support::refused_probe("shm", &option);
    assert!(taken.contains("pool_socket"), "{taken}");
    let file = folder.path().join("file");
    std::fs::write(&file, "precious").unwrap();
    let taken =
        crate::support::refused_probe("shm", &[format!("--pool-socket={}", file.display())]);
    assert!(taken.contains("pool_socket"), "{taken}");
    assert_eq!(std::fs::read_to_string(&file).unwrap(), "precious");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pool_that_no_allowed_way_leads_to_is_a_typed_error() {
    let node = Node::start(Transport::Tcp, MIB);
    let error = client(Transport::Shm)
        .publish(&node.endpoint, prefix(1, 1000))
        .await
        .unwrap_err();
    assert!(matches!(error, TransferError::NoPath { .. }), "{error}");
    let node = Node::start(Transport::Shm, MIB);
    let error = client(Transport::Tcp)
        .publish(&node.endpoint, prefix(1, 1000))
        .await
        .unwrap_err();
    assert!(matches!(error, TransferError::NoPath { .. }), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn pages_and_the_limits_of_size_and_number_hold() {
    let options = [
        "--page-bytes=65536",
        "--max-prefix-bytes=100000",
        "--max-slots=2",
    ];
    let node = Node::start_with("shm", MIB, &options.map(str::to_owned));
    let client = client(Transport::Shm);
    let error = client
        .publish(&node.endpoint, prefix(1, 25_001))
        .await
        .unwrap_err();
    assert_eq!(error.field(), Some("bytes"), "{error}");
    let first = client.publish(&node.endpoint, prefix(1, 25_000)).await;
    let first = first.unwrap();
    let second = client.publish(&node.endpoint, prefix(1, 1)).await.unwrap();
    assert_eq!(node.list().await.used_bytes, 3 << 16, "two pages and one");
    let error = client
        .publish(&node.endpoint, prefix(1, 1))
        .await
        .unwrap_err();
    assert_eq!(error.code(), Code::ResourceExhausted, "{error}");
    client.release(first.lease).await.unwrap();
    let third = client.publish(&node.endpoint, prefix(1, 1)).await.unwrap();
    for lease in [second.lease, third.lease] {
        client.release(lease).await.unwrap();
    }
    node.wait_until_empty().await;
}
