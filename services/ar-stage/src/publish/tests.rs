use std::sync::{Arc, atomic::AtomicBool};

use base::{Code, Fault as _, Shutdown, task};
use kv::{KvDType, KvGeometry};
use kv_transfer::engine::{EngineConfig, Transport};
use kv_transfer::{ClientConfig, Host, ServiceConfig, service};
use proto::v1::{ListSlotsRequest, kv_transfer_service_client::KvTransferServiceClient as Pool};
use telemetry::Metrics;

use super::*;

const POOL_BYTES: u64 = 1 << 20;
/// Longest wait for what happens in the background; far below the time to live of a lease.
const SOON: Duration = Duration::from_secs(10);
const GEOMETRY: KvGeometry = KvGeometry {
    layers: 4,
    kv_heads: 2,
    head_dim: 16,
    dtype: KvDType::F32,
};

/// A node service in this process; ends with its task.
async fn node(cache_bytes: u64) -> (String, task::Owned<()>) {
    node_of(POOL_BYTES, cache_bytes).await
}

pub(crate) async fn node_of(pool_bytes: u64, cache_bytes: u64) -> (String, task::Owned<()>) {
    let engine = EngineConfig::only(Transport::Shm);
    let config = ServiceConfig {
        cache_bytes,
        ..ServiceConfig::new(engine, pool_bytes)
    };
    let listener = proto::server::bind("127.0.0.1:0", "listen").await.unwrap();
    let endpoint = format!("http://{}", listener.local_addr().unwrap());
    let host = Host {
        listener,
        admin: None,
        advertise: endpoint.clone(),
        pool: "default".into(),
        registry: None,
        metrics: Metrics::default(),
    };
    let served = task::spawn(async move {
        service::run(config, host, Shutdown::new()).await.unwrap();
    });
    (endpoint, served)
}

pub(crate) fn client() -> KvClient {
    KvClient::new(ClientConfig::only(Transport::Shm)).unwrap()
}

/// A prefix of so many bytes; each value says where it stands.
fn prefix(bytes: u64) -> PrefixKv {
    let tokens = usize::try_from(bytes).unwrap() / GEOMETRY.bytes_per_token();
    let values = (0..GEOMETRY.prefix_bytes(tokens) / 4).map(|i| i as f32);
    PrefixKv::new(GEOMETRY, tokens, values.collect()).unwrap()
}

/// Two rows of so many bytes, begun.
fn begun(bytes: [u64; 2]) -> (Vec<BegunRow>, Vec<mpsc::Sender<Part>>, Rows) {
    let (mut begun, mut tells, mut rows) = (vec![], vec![], vec![]);
    for (kind, bytes) in [Kind::Cond, Kind::Uncond].into_iter().zip(bytes) {
        let (tell, parts) = mpsc::channel(GEOMETRY.layers);
        let identity = PrefixIdentity([1 + kind as u8; 32]);
        let prefix = prefix(bytes);
        begun.push(BegunRow {
            kind,
            identity,
            geometry: GEOMETRY,
            tokens: prefix.tokens(),
            parts,
            found: Arc::new(AtomicBool::new(false)),
        });
        tells.push(tell);
        rows.push((kind, identity, prefix));
    }
    (begun, tells, rows)
}

/// Publishes two rows that come whole, at the end.
async fn published(way: (&KvClient, &str), bytes: [u64; 2]) -> Result<Vec<Published>, StageError> {
    published_of("", way, bytes).await
}

async fn published_of(
    tenant: &str,
    (client, endpoint): (&KvClient, &str),
    bytes: [u64; 2],
) -> Result<Vec<Published>, StageError> {
    let publisher = Publisher {
        client: client.clone(),
        endpoint,
        request_id: "one",
        tenant,
        shows: false,
        pace: &Pace::default(),
    };
    let (begun, tells, rows) = begun(bytes);
    let placed = publisher.place(begun, vec![]).await;
    let placed = placed.map_err(|error| StageError::of(&error))?;
    drop(tells);
    let (computed, rest) = oneshot::channel();
    computed.send(rows).unwrap();
    publisher.write(placed, rest).await
}

async fn used(endpoint: &str) -> u64 {
    let channel = proto::channel::lazy(endpoint).unwrap();
    let list = Pool::new(channel).list(ListSlotsRequest {}).await.unwrap();
    list.into_inner().used_bytes
}

async fn sealed_chunks(endpoint: &str) -> Vec<(u32, u32)> {
    let channel = proto::channel::lazy(endpoint).unwrap();
    let list = Pool::new(channel).list(ListSlotsRequest {}).await.unwrap();
    let slots = list.into_inner().slots;
    slots.iter().map(|s| (s.sealed_chunks, s.chunks)).collect()
}

async fn emptied(endpoint: &str) {
    let channel = proto::channel::lazy(endpoint).unwrap();
    let empty = async {
        let mut pool = Pool::new(channel);
        loop {
            let list = pool.list(ListSlotsRequest {}).await.unwrap();
            if list.get_ref().slots.is_empty() {
                return;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(SOON, empty)
        .await
        .expect("rows are left in the pool");
}

/// What a worker gets of a row.
async fn fetched(client: &KvClient, handle: &PrefixHandle) -> Vec<u8> {
    let fetched = client.fetch(handle, &GEOMETRY, "two", "worker").await;
    fetched.unwrap().to_vec().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_layer_is_sealed_while_later_ones_are_still_computed_and_a_worker_follows() {
    let (endpoint, _node) = node(0).await;
    let client = client();
    let publisher = Publisher {
        client: client.clone(),
        endpoint: &endpoint,
        request_id: "one",
        tenant: "",
        shows: false,
        pace: &Pace::default(),
    };
    let (begun, tells, rows) = begun([POOL_BYTES / 4; 2]);
    let placed = publisher.place(begun, vec![]).await.unwrap();
    let handles: Vec<_> = placed.iter().map(|placed| placed.row().1).collect();
    let worker = {
        let (client, handle) = (client.clone(), handles[0].clone());
        task::spawn(async move { fetched(&client, &handle).await })
    };
    let (computed, rest) = oneshot::channel();
    let compute = async {
        for layer in 0..GEOMETRY.layers - 1 {
            for (tell, (_, _, prefix)) in tells.iter().zip(&rows) {
                let part = Part {
                    layer,
                    heads: 0..GEOMETRY.kv_heads,
                    bytes: prefix.layer_bytes(layer),
                };
                tell.try_send(part).unwrap();
            }
            let per_layer = 2 * GEOMETRY.kv_heads as u32;
            let told = (layer as u32 + 1) * per_layer;
            let sealed = async {
                while sealed_chunks(&endpoint).await != [(told, 4 * per_layer); 2] {
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
            };
            tokio::time::timeout(SOON, sealed).await.unwrap();
        }
        // The last layer comes with the whole.
        let expected = rows[0].2.to_bytes();
        drop(tells);
        computed.send(rows).unwrap();
        expected
    };
    let (expected, published) = tokio::join!(compute, publisher.write(placed, rest));
    let published = published.unwrap();
    assert!(worker.await.unwrap() == expected);
    let kinds: Vec<_> = published.iter().map(|row| row.kind).collect();
    assert_eq!(kinds, [Kind::Cond, Kind::Uncond]);
    for (row, offered) in published.iter().zip(&handles) {
        assert_eq!(row.handle.slot, offered.slot);
        assert_eq!(row.handle.lease, offered.lease, "the offer's lease stays");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_row_is_released_when_the_other_one_finds_no_room() {
    let (endpoint, _node) = node(0).await;
    let (client, bytes) = (client(), [POOL_BYTES * 3 / 4, POOL_BYTES / 2]);
    let refused = published((&client, &endpoint), bytes).await.unwrap_err();
    assert_eq!(refused.code(), Code::ResourceExhausted);
    emptied(&endpoint).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_that_ends_before_its_rows_are_computed_leaves_nothing_behind() {
    let (endpoint, _node) = node(POOL_BYTES).await;
    let publisher = Publisher {
        client: client(),
        endpoint: &endpoint,
        request_id: "one",
        tenant: "",
        shows: false,
        pace: &Pace::default(),
    };
    let (begun, tells, _) = begun([POOL_BYTES / 4; 2]);
    let placed = publisher.place(begun, vec![]).await.unwrap();
    assert_eq!(used(&endpoint).await, POOL_BYTES / 2);
    drop(tells);
    let (_, rest) = oneshot::channel();
    let ended = publisher.write(placed, rest).await.unwrap_err();
    assert_eq!(ended.code(), Code::Cancelled);
    emptied(&endpoint).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_row_of_another_tenant_is_not_found_but_for_the_one_without_the_prompt() {
    let (endpoint, _node) = node(POOL_BYTES).await;
    let client = client();
    let way = (&client, endpoint.as_str());
    let bytes = [POOL_BYTES / 8; 2];
    for tenant in ["a", "b", ""] {
        let first = tenant == "a";
        let rows = published_of(tenant, way, bytes).await.unwrap();
        let found = |kind| rows.iter().find(|row| row.kind == kind).unwrap().found;
        assert!(
            !found(Kind::Cond),
            "{tenant:?} is told of a prompt of another"
        );
        assert_eq!(found(Kind::Uncond), !first, "{tenant:?}");
        let again = published_of(tenant, way, bytes).await.unwrap();
        assert!(
            again.iter().all(|row| row.found),
            "{tenant:?} finds its own"
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_row_that_lies_in_the_pool_already_is_neither_computed_nor_written_again() {
    let (endpoint, _node) = node(POOL_BYTES).await;
    let client = client();
    let way = (&client, endpoint.as_str());
    let bytes = [POOL_BYTES / 4; 2];
    let first = published(way, bytes).await.unwrap();
    assert!(first.iter().all(|row| !row.found));
    let second = published(way, bytes).await.unwrap();
    assert!(second.iter().all(|row| row.found));
    assert_eq!(used(&endpoint).await, POOL_BYTES / 2);
    for (one, two) in first.iter().zip(&second) {
        let (one, two) = (&one.handle, &two.handle);
        assert_eq!((one.slot, one.generation), (two.slot, two.generation));
        assert_ne!(one.lease, two.lease, "each request has its own");
    }
    drop((first, second));
    let (begun, _tells, _) = begun(bytes);
    let flags: Vec<_> = begun.iter().map(|row| Arc::clone(&row.found)).collect();
    let publisher = Publisher {
        client: client.clone(),
        endpoint: &endpoint,
        request_id: "three",
        tenant: "",
        shows: false,
        pace: &Pace::default(),
    };
    let third = publisher.place(begun, vec![]).await.unwrap();
    assert!(third.iter().all(Placed::is_found), "they stayed");
    assert!(flags.iter().all(|found| found.load(Ordering::Acquire)));
}
