//! Whatever becomes of a slot's bytes, its manifest or its handle: a wrong byte is never used.
use std::sync::Arc;

use base::{Code, Fault as _};
use kv_transfer::engine::Transport;
use proto::v1::PrefixHandle;

use crate::support::{
    CHUNK, Hand, MIB, Node, TRANSPORTS, client, fetch, geometry, prefix, seal_by_hand, soon,
};

/// Numbers that repeat with their seed.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: usize) -> usize {
        // xorshift64*
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        let roll = self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33;
        roll as usize % sides
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn each_of_a_thousand_random_mutations_is_detected() {
    for (transport, rounds) in [(Transport::Shm, 700), (Transport::Tcp, 300)] {
        let node = Node::start(transport, 4 * MIB);
        let hand = Hand::new(transport);
        let consumer = client(transport);
        let request = prefix(1, 5 * CHUNK / 16 + 77);
        let good = &request.payload;
        let sealed = seal_by_hand(&node, &hand, &request, |_| {}).await;
        let (reserved, sealed) = sealed.unwrap();
        let handle = sealed.handle.unwrap();
        let shape = geometry(1);
        let mut dice = Dice(0x9e37_79b9_7f4a_7c15);
        for round in 0..rounds {
            // Up to three bytes anywhere, a run of zeros, or the end of the payload torn off.
            let (at, bytes) = match dice.roll(4) {
                0 => {
                    let at = good.len() - 1 - dice.roll(CHUNK / 2);
                    (at, vec![0; good.len() - at])
                }
                1 => {
                    let at = dice.roll(good.len() - 64);
                    (at, vec![0; 1 + dice.roll(63)])
                }
                _ => {
                    let at = dice.roll(good.len() - 3);
                    let len = 1 + dice.roll(3);
                    let flips = good[at..at + len]
                        .iter()
                        .map(|byte| byte ^ (1 << dice.roll(8)));
                    (at, flips.collect())
                }
            };
            let before = good[at..at + bytes.len()].to_vec();
            if before == bytes {
                continue;
            }
            let bytes = Arc::new(bytes);
            hand.write(&reserved, at, bytes, soon()).await.unwrap();
            let error = fetch(&consumer, &handle, &shape).await.unwrap_err();
            assert_eq!(error.code(), Code::DataLoss, "{transport} {round}: {error}");
            let before = Arc::new(before);
            hand.write(&reserved, at, before, soon()).await.unwrap();
        }
        let got = fetch(&consumer, &handle, &shape).await.unwrap();
        assert!(&got.payload == good);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn no_replayed_or_altered_handle_gives_a_prefix() {
    for transport in TRANSPORTS {
        let node = Node::start(transport, 4 * MIB);
        let owner = client(transport);
        let old = owner
            .publish(&node.endpoint, prefix(2, 1000))
            .await
            .unwrap();
        let replayed = old.handle.clone();
        owner.release(old.lease).await.unwrap();
        let new = owner
            .publish(&node.endpoint, prefix(2, 1000))
            .await
            .unwrap();
        assert_eq!(replayed.slot, new.handle.slot, "the same memory");
        let error = fetch(&owner, &replayed, &geometry(2)).await.unwrap_err();
        assert_eq!(error.field(), Some("generation"), "{transport}: {error}");
        type Alter = fn(&mut PrefixHandle);
        let alterations: [(&str, Alter); 6] = [
            ("slot", |h| h.slot ^= 1),
            ("generation", |h| h.generation += 1),
            ("generation", |h| h.generation -= 1),
            ("identity", |h| h.identity[31] ^= 0x80),
            ("bytes", |h| h.bytes -= 8),
            ("tokens", |h| h.tokens -= 1),
        ];
        for (field, alter) in alterations {
            let mut handle = new.handle.clone();
            alter(&mut handle);
            let error = fetch(&owner, &handle, &geometry(2)).await.unwrap_err();
            assert_eq!(error.field(), Some(field), "{transport}: {error}");
        }
        fetch(&owner, &new.handle, &geometry(2)).await.unwrap();
    }
}
