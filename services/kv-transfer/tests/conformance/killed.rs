//! SIGKILL in each phase of a transfer, of whoever takes part in it: what is used is right or nothing is, the
//! pool is empty within one time to live and the rest of its memory, and later requests work.
use std::time::Duration;

use base::{Code, Fault as _};
use kv_transfer::engine::Transport;
use proto::v1::PrefixHandle;

use crate::support::{MIB, Node, Process, TRANSPORTS, client, fetch, geometry, prefix};

/// Shape and size of what `kv-probe` publishes, and its identity.
const SHAPE: kv::KvGeometry = kv::KvGeometry {
    layers: 32,
    kv_heads: 8,
    head_dim: 64,
    dtype: kv::KvDType::Bf16,
};
const TOKENS: usize = 48;

/// A process that has reached a phase, and the producer's lease.
fn victim(
    node: &Node,
    transport: Transport,
    (command, lease): (&str, u64),
    phase: &str,
) -> (Process, u64) {
    let victim = Process::probe(&[
        command.to_owned(),
        format!("--lease={lease}"),
        format!("--transport={transport}"),
        format!("--endpoint={}", node.endpoint),
        format!("--tokens={TOKENS}"),
        format!("--phase={phase}"),
        "--ttl-ms=1000".to_owned(),
    ]);
    let (reached, lease) = victim.line.split_once(' ').unwrap();
    assert_eq!(reached, phase);
    let lease = lease.parse().unwrap();
    (victim, lease)
}

async fn works(node: &Node, transport: Transport) {
    let client = client(transport);
    let published = client
        .publish(&node.endpoint, prefix(1, 1000))
        .await
        .unwrap();
    let got = fetch(&client, &published.handle, &geometry(1))
        .await
        .unwrap();
    assert!(got.payload == prefix(1, 1000).payload);
    client.release(got.fetched.lease).await.unwrap();
    client.release(published.lease).await.unwrap();
}

/// The one slot of the pool as consumers name it.
async fn handle(node: &Node, lease: u64) -> PrefixHandle {
    let slot = node.list().await.slots.remove(0);
    PrefixHandle {
        identity: vec![1; 32],
        endpoint: node.endpoint.clone(),
        generation: slot.generation,
        slot: slot.slot,
        tokens: TOKENS as u32,
        bytes: slot.bytes,
        lease,
        pull_token: vec![],
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_producer_killed_in_any_phase_leaves_nothing_that_could_be_used_wrongly() {
    for transport in TRANSPORTS {
        let node = Node::start(transport, 16 * MIB);
        for phase in ["reserved", "written", "part-sealed", "sealed"] {
            let (mut producer, lease) = victim(&node, transport, ("produce", 0), phase);
            let handle = handle(&node, lease).await;
            let consumer = client(transport);
            let follows = {
                let (consumer, handle) = (consumer.clone(), handle.clone());
                base::task::spawn(async move { fetch(&consumer, &handle, &SHAPE).await })
            };
            tokio::time::sleep(Duration::from_millis(100)).await;
            producer.kill();
            match follows.await.unwrap() {
                Ok(got) => {
                    assert_eq!(phase, "sealed");
                    assert!(got.payload.iter().all(|&byte| byte == 0x5a));
                }
                Err(error) => {
                    assert_ne!(phase, "sealed", "{transport}: {error}");
                    assert_eq!(
                        error.code(),
                        Code::Unavailable,
                        "{transport} {phase}: {error}"
                    );
                }
            }
            node.wait_until_empty().await;
            works(&node, transport).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_consumer_killed_in_any_phase_holds_nothing_beyond_its_time_to_live() {
    for transport in TRANSPORTS {
        let node = Node::start(transport, 16 * MIB);
        let (producer, lease) = victim(&node, transport, ("produce", 0), "sealed");
        let checker = client(transport);
        for phase in ["pulled", "copied", "acknowledged"] {
            let (mut consumer, _) = victim(&node, transport, ("consume", lease), phase);
            consumer.kill();
            let ends = async {
                while node.list().await.slots[0].leases > 1 {
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
            };
            tokio::time::timeout(Duration::from_secs(20), ends)
                .await
                .unwrap();
            let got = fetch(&checker, &handle(&node, lease).await, &SHAPE)
                .await
                .unwrap();
            assert!(got.payload.iter().all(|&byte| byte == 0x5a));
            checker.release(got.fetched.lease).await.unwrap();
        }
        drop(producer);
        works(&node, transport).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_service_killed_in_any_phase_is_a_typed_error_and_its_successor_works() {
    for transport in TRANSPORTS {
        for phase in ["reserved", "part-sealed", "sealed"] {
            let mut node = Node::start(transport, 16 * MIB);
            let (producer, lease) = victim(&node, transport, ("produce", 0), phase);
            let handle = handle(&node, lease).await;
            let consumer = client(transport);
            let follows = {
                let (consumer, handle) = (consumer.clone(), handle.clone());
                base::task::spawn(async move { fetch(&consumer, &handle, &SHAPE).await })
            };
            tokio::time::sleep(Duration::from_millis(100)).await;
            node.process.kill();
            let bound = Duration::from_secs(40);
            let ended = tokio::time::timeout(bound, follows)
                .await
                .expect("hung")
                .unwrap();
            match ended {
                Ok(got) => assert!(got.payload.iter().all(|&byte| byte == 0x5a)),
                Err(error) => assert_eq!(
                    error.code(),
                    Code::Unavailable,
                    "{transport} {phase}: {error}"
                ),
            }
            // A handle of the former life means nothing to the next one.
            let next = Node::start(transport, 16 * MIB);
            let stale = PrefixHandle {
                endpoint: next.endpoint.clone(),
                ..handle
            };
            let error = fetch(&consumer, &stale, &SHAPE).await.unwrap_err();
            assert!(
                matches!(error.code(), Code::NotFound | Code::Aborted),
                "{error}"
            );
            works(&next, transport).await;
            drop(producer);
        }
    }
}
