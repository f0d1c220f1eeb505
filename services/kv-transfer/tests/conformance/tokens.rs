//! A pull needs a token, which is good for one request, one receiver, one epoch and one pull.
use base::{Code, Failure};
use kv_transfer::engine::Transport;
use kv_transfer::{KvClient, Published};
use proto::v1::{self, PrefixHandle};

use crate::support::{MIB, Node, client, prefix};

/// Whom the tokens of these tests are for.
const BEARER: (&str, &str, u64) = ("request", "worker", 7);

struct Pulls {
    node: Node,
    client: KvClient,
    published: Published,
}

impl Pulls {
    async fn start() -> Self {
        let node = Node::start(Transport::Shm, MIB);
        let client = client(Transport::Shm);
        let published = client.publish(&node.endpoint, prefix(1, 1000)).await;
        Self {
            published: published.unwrap(),
            node,
            client,
        }
    }

    async fn token(&self, epoch: u64, replaces: Option<Vec<u8>>) -> Result<Vec<u8>, Failure> {
        let bearer = (BEARER.0, BEARER.1, epoch);
        let made = self.client.grant(&self.published.handle, bearer, replaces);
        made.await.map_err(|error| Failure::of(&error))
    }

    async fn pull(&self, token: &[u8], bearer: (&str, &str, u64)) -> Result<u64, Failure> {
        let (request_id, receiver, epoch) = bearer;
        let pull = v1::PullRequest {
            handle: Some(PrefixHandle {
                pull_token: token.to_vec(),
                lease: 0,
                ..self.published.handle.clone()
            }),
            request_id: request_id.to_owned(),
            receiver: receiver.to_owned(),
            epoch,
            ttl_ms: 60_000,
            follows: true,
        };
        let pulled = self.node.stub().pull(pull).await;
        let pulled = pulled.map_err(|status| proto::status::failure(&status))?;
        Ok(pulled.into_inner().lease)
    }
}

fn refused(result: Result<u64, Failure>, why: &str) {
    let failure = result.unwrap_err();
    assert_eq!(failure.code, Code::PermissionDenied, "{failure}");
    assert_eq!(failure.field.as_deref(), Some("pull_token"));
    assert!(failure.message.contains(why), "{failure}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_token_is_good_for_one_pull() {
    let pulls = Pulls::start().await;
    let token = pulls.token(7, None).await.unwrap();
    pulls.pull(&token, BEARER).await.unwrap();
    refused(pulls.pull(&token, BEARER).await, "was used");
    refused(pulls.pull(&[], BEARER).await, "is required");
    refused(pulls.pull(&[0; 16], BEARER).await, "is unknown");
    refused(pulls.pull(&[0; 15], BEARER).await, "is unknown");
    let leases = pulls.node.list().await.slots[0].leases;
    assert_eq!(leases, 2, "the producer's and that of the one pull");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_token_is_for_its_request_its_receiver_and_its_epoch() {
    let pulls = Pulls::start().await;
    let cases = [
        (("other", BEARER.1, 7), "another request"),
        ((BEARER.0, "other", 7), "another receiver"),
        ((BEARER.0, BEARER.1, 6), "another epoch"),
        ((BEARER.0, BEARER.1, 8), "another epoch"),
    ];
    for (bearer, why) in cases {
        let token = pulls.token(7, None).await.unwrap();
        refused(pulls.pull(&token, bearer).await, why);
        // Whoever showed it has seen it: it is good for nobody any more.
        refused(pulls.pull(&token, BEARER).await, "was used");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn decisions_of_an_old_epoch_are_refused_and_what_was_replaced_is_void() {
    let pulls = Pulls::start().await;
    let first = pulls.token(7, None).await.unwrap();
    let second = pulls.token(9, Some(first.clone())).await.unwrap();
    refused(pulls.pull(&first, BEARER).await, "is unknown");
    let stale = pulls.token(8, None).await.unwrap_err();
    assert_eq!(
        (stale.code, stale.field.as_deref()),
        (Code::Aborted, Some("epoch"))
    );
    let bearer = (BEARER.0, BEARER.1, 9);
    pulls.pull(&second, bearer).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn only_who_answers_for_a_prefix_lets_others_pull() {
    let pulls = Pulls::start().await;
    let token = pulls.token(7, None).await.unwrap();
    let receivers = pulls.pull(&token, BEARER).await.unwrap();
    for (lease, code) in [
        (receivers, Code::FailedPrecondition),
        (receivers + 100, Code::NotFound),
    ] {
        let handle = PrefixHandle {
            lease,
            ..pulls.published.handle.clone()
        };
        let made = pulls.client.grant(&handle, BEARER, None).await;
        assert_eq!(Failure::of(&made.unwrap_err()).code, code);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_token_of_a_former_life_of_its_slot_is_unknown() {
    let mut pulls = Pulls::start().await;
    let token = pulls.token(7, None).await.unwrap();
    let old = pulls.published.handle.clone();
    let next = {
        let Pulls {
            node,
            client,
            published,
        } = pulls;
        client.release(published.lease).await.unwrap();
        let published = client.publish(&node.endpoint, prefix(1, 1000)).await;
        Pulls {
            published: published.unwrap(),
            node,
            client,
        }
    };
    pulls = next;
    assert_eq!(pulls.published.handle.slot, old.slot);
    refused(pulls.pull(&token, BEARER).await, "is unknown");
    pulls.published.handle.generation = old.generation;
    let failure = pulls.pull(&token, BEARER).await.unwrap_err();
    assert_eq!(failure.code, Code::Aborted, "{failure}");
}
