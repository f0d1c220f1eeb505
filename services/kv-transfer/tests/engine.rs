//! The engine's promises on every transport, between two engines.
#![allow(clippy::unwrap_used)]
use std::sync::Arc;
use std::time::Duration;

use base::{Code, Deadline, Fault as _};
use kv_transfer::engine::{Engine, EngineConfig, Part, Transport};
use kv_transfer::{PoolMemory, TransferError};

const TRANSPORTS: [Transport; 2] = [Transport::Shm, Transport::Tcp];
const MIB: usize = 1 << 20;

fn soon() -> Deadline {
    Deadline::after(&base::clock::SystemClock, Duration::from_secs(30))
}

fn pattern(len: usize, seed: usize) -> Vec<u8> {
    (0..len)
        .map(|i| ((i.wrapping_mul(31) ^ (i >> 8)).wrapping_add(seed) & 0xff) as u8)
        .collect()
}

fn pair(transport: Transport, pool: usize) -> (Engine, PoolMemory, Engine) {
    let config = EngineConfig::only(transport);
    let owner = Engine::start(&config).unwrap();
    let memory = owner.allocate(pool).unwrap();
    (owner, memory, Engine::start(&config).unwrap())
}

#[tokio::test(flavor = "multi_thread")]
async fn put_and_get_move_every_byte_and_nothing_else() {
    for transport in TRANSPORTS {
        let (owner, memory, peer) = pair(transport, 65 * MIB);
        for len in [
            1,
            3,
            4095,
            4096,
            4097,
            1_000_003,
            4 * MIB,
            9 * MIB + 5,
            64 * MIB,
        ] {
            let remote = owner.export(&memory).unwrap().part(4096, len as u64);
            let sent = pattern(len, len);
            let guard = |at: usize| {
                let mut byte = [0; 1];
                assert!(memory.read(at, &mut byte));
                byte[0]
            };
            let (before, after) = (guard(4095), guard(4096 + len));
            let put = peer
                .put(&remote, Arc::new(sent.clone()), soon())
                .await
                .unwrap();
            let mut landed = vec![0; len];
            assert!(memory.read(4096, &mut landed));
            assert!(landed == sent, "{transport} put of {len} bytes");
            assert_eq!((guard(4095), guard(4096 + len)), (before, after));
            let (got, get) = peer.get(&remote, vec![0; len], soon()).await.unwrap();
            assert!(got == sent, "{transport} get of {len} bytes");
            let expected = if transport == Transport::Shm {
                "posix"
            } else {
                "tcp"
            };
            assert_eq!(
                (put.transport.as_str(), get.transport.as_str()),
                (expected, expected)
            );
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_get_of_parts_leaves_the_rest_of_the_buffer_alone() {
    for transport in TRANSPORTS {
        let (owner, memory, peer) = pair(transport, MIB);
        let remote = owner.export(&memory).unwrap().part(0, 100);
        peer.put(&remote, Arc::new(vec![7; 100]), soon())
            .await
            .unwrap();
        let parts = [3..5, 90..100];
        let (got, _) = peer
            .get_parts(
                &remote,
                vec![1; 100],
                parts.iter().cloned().map(Part::aligned).collect(),
                soon(),
            )
            .await
            .unwrap();
        for (i, &byte) in got.iter().enumerate() {
            let read = parts.iter().any(|part| part.contains(&i));
            assert_eq!(byte, if read { 7 } else { 1 }, "{transport} byte {i}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn many_transfers_at_once_all_land() {
    for transport in TRANSPORTS {
        let (owner, memory, peer) = pair(transport, 8 * MIB);
        let mut tasks = vec![];
        for i in 0..64 {
            let remote = owner.export(&memory).unwrap().part(i * 100_000, 100_000);
            let peer = peer.clone();
            tasks.push(base::task::spawn(async move {
                let sent = pattern(100_000, i as usize);
                peer.put(&remote, Arc::new(sent.clone()), soon())
                    .await
                    .unwrap();
                let buffer = vec![0; 100_000];
                let (got, _) = peer.get(&remote, buffer, soon()).await.unwrap();
                assert!(got == sent, "{transport} transfer {i}");
            }));
        }
        for task in tasks {
            task.await.unwrap();
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn bad_arguments_are_refused_before_ucx_sees_them() {
    let (owner, memory, peer) = pair(Transport::Shm, MIB);
    let remote = owner.export(&memory).unwrap().part(0, 100);
    let field = |error: TransferError| {
        assert_eq!(error.code(), Code::InvalidArgument);
        error.field().map(str::to_owned)
    };
    let put = |remote, bytes| {
        let peer = peer.clone();
        async move {
            peer.put(&remote, Arc::new(vec![0; bytes]), soon())
                .await
                .unwrap_err()
        }
    };
    assert_eq!(
        field(put(remote.clone(), 101).await).as_deref(),
        Some("region")
    );
    assert_eq!(
        field(put(remote.clone(), 0).await).as_deref(),
        Some("ranges")
    );
    let mut bad = remote.clone();
    bad.worker_address.clear();
    assert_eq!(field(put(bad, 10).await).as_deref(), Some("worker_address"));
    let mut bad = remote.clone();
    bad.key = vec![0; 100_000];
    assert_eq!(field(put(bad, 10).await).as_deref(), Some("rkey"));
    let mut bad = remote.clone();
    bad.address = u64::MAX;
    assert_eq!(field(put(bad, 10).await).as_deref(), Some("region"));
    let out = peer
        .get_parts(
            &remote,
            vec![0; 10],
            vec![Part::aligned(0..5), Part::aligned(5..11)],
            soon(),
        )
        .await
        .unwrap_err();
    assert_eq!(field(out).as_deref(), Some("ranges"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deadline_in_the_past_ends_a_transfer_and_the_next_one_works() {
    for transport in TRANSPORTS {
        let (owner, memory, peer) = pair(transport, 8 * MIB);
        let remote = owner.export(&memory).unwrap().part(0, 8 * MIB as u64);
        let past = Deadline::after(&base::clock::SystemClock, Duration::ZERO);
        let payload = Arc::new(vec![1; 8 * MIB]);
        let error = peer
            .put(&remote, Arc::clone(&payload), past)
            .await
            .unwrap_err();
        assert_eq!(error.code(), Code::DeadlineExceeded, "{transport}");
        peer.put(&remote, payload, soon()).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_peer_that_is_gone_gives_an_error_within_the_deadline() {
    let (owner, memory, peer) = pair(Transport::Tcp, 8 * MIB);
    let remote = owner.export(&memory).unwrap().part(0, 8 * MIB as u64);
    peer.put(&remote, Arc::new(vec![1; 1000]), soon())
        .await
        .unwrap();
    drop(memory);
    drop(owner);
    let short = Deadline::after(&base::clock::SystemClock, Duration::from_secs(2));
    let error = peer
        .put(&remote, Arc::new(vec![1; 8 * MIB]), short)
        .await
        .unwrap_err();
    assert!(
        matches!(error.code(), Code::Unavailable | Code::DeadlineExceeded),
        "{error}"
    );
}

#[test]
fn an_engine_without_a_usable_device_is_refused() {
    let config = EngineConfig {
        transports: vec![Transport::Tcp],
        net_devices: Some("no-such-device".into()),
    };
    let error = Engine::start(&config).unwrap_err();
    assert_ne!(error.to_string(), "");
}

#[test]
fn a_pool_larger_than_shared_memory_is_refused_before_it_is_filled() {
    let engine = Engine::start(&EngineConfig::only(Transport::Shm)).unwrap();
    let error = engine.allocate(1 << 45).unwrap_err();
    assert_eq!(
        (error.code(), error.field()),
        (Code::InvalidArgument, Some("pool_bytes"))
    );
    engine.allocate(MIB).unwrap();
}
