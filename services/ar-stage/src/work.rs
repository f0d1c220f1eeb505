//! The ends of a request's work: the pool of the node, and the first pass of all.
use std::sync::Arc;

use base::clock;
use kv_transfer::{CacheTerms, KvClient, Lease, PublishRequest, TransferError};
use model::text::Sampling;
use proto::v1::{
    PrefillDone, PrefillResponse, PrefixHandle, PrefixRow, prefill_response::Event,
    prefix_row::Kind,
};
use stage::{Ranks, StageError};

use crate::{
    answers::Answer,
    batch::{Batch, Job, ticket},
    order::{Order, Size, Task},
    pictures::Pictures,
    run::{Outcome, Run},
};

/// The one tenant there is.
const TENANT: &str = "default";
/// What the model warms up with.
const WARM_UP_PROMPT: &str = "warm up";

/// Moves the rows into the pool of the node. Either all of them stay there or none: whoever drops the
/// answer releases them.
pub(crate) async fn publish(
    client: &KvClient,
    endpoint: &str,
    request_id: &str,
    outcome: Outcome,
) -> Result<Answer<Lease>, StageError> {
    let start = clock::now();
    let written = outcome.written;
    let refused = |error: TransferError| StageError::of(&error);
    // One request after the other: two that each hold one row of a full pool would wait for ever.
    let _turn = client.turn().await.map_err(refused)?;
    let mut published: Vec<(Kind, PrefixHandle, Lease)> = Vec::new();
    for (kind, identity, prefix) in outcome.rows {
        let terms = CacheTerms {
            scope: scope(kind).to_owned(),
            cost_us: u64::try_from(outcome.elapsed.as_micros()).unwrap_or(u64::MAX),
        };
        // The very same row may lie there already.
        let found = client.lookup(endpoint, identity, &terms.scope, request_id);
        if let Some((handle, lease)) = found.await.map_err(refused)? {
            published.push((kind, handle, lease));
            continue;
        }
        let request = PublishRequest {
            request_id: request_id.to_owned(),
            identity,
            geometry: *prefix.geometry(),
            tokens: prefix.tokens(),
            payload: prefix.to_bytes(),
        };
        // When a later row fails, the leases of the earlier ones are dropped and their slots freed.
        let row = client.publish_cached(endpoint, request, terms);
        let row = row.await.map_err(refused)?;
        published.push((kind, row.handle, row.lease));
    }
    let mut leases = Vec::new();
    let rows = published
        .into_iter()
        .map(|(kind, handle, lease)| {
            leases.push(lease);
            PrefixRow {
                kind: kind.into(),
                prefix: Some(handle),
            }
        })
        .collect();
    let done = PrefillDone {
        rows,
        prefill_ms: outcome.elapsed.as_secs_f64() * 1e3,
        publish_ms: clock::millis_since(start),
        text: written.text,
        new_tokens: narrow(written.new_tokens),
        cut: written.cut,
        height: narrow(written.size.map_or(0, |(height, _)| height)),
        width: narrow(written.size.map_or(0, |(_, width)| width)),
        size_fallback: written.size_fallback,
        output_height: narrow(written.output.map_or(0, |(height, _)| height)),
        output_width: narrow(written.output.map_or(0, |(_, width)| width)),
        reused_tokens: narrow(written.reused),
        system_prompt: written.fingerprint,
        prompt_tokens: narrow(written.prompt_tokens),
        cached_rows: 0,
    };
    let response = PrefillResponse {
        event: Some(Event::Done(done)),
    };
    Ok(Answer { response, leases })
}

/// Who may find a cached row: everybody the row without the prompt, the tenant all others.
fn scope(kind: Kind) -> &'static str {
    match kind {
        Kind::Uncond => "",
        Kind::Cond | Kind::Unspecified => TENANT,
    }
}

// Far below u32::MAX by the bounds of a sequence; saturate rather than wrap if that ever fails.
fn narrow(count: usize) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}

/// One small request, so that the first one meets warm weights and threads.
pub(crate) fn warm_up(ranks: &Arc<Ranks>) -> Result<(), StageError> {
    let info = ranks.info();
    let Some(bucket) = info.buckets.first() else {
        return Ok(());
    };
    let order = Order {
        prompt: WARM_UP_PROMPT.to_owned(),
        system_prompt: None,
        fingerprint: String::new(),
        template: info.default_template,
        task: Task::Draw,
        size: Size::Given {
            height: bucket.height,
            width: bucket.width,
        },
        negative_row: false,
        drop_think: false,
        align: false,
        sampling: Sampling::GREEDY,
        max_new: 1,
    };
    let mut batch = Batch::new(Arc::clone(ranks));
    let (mut ticket, desk) = ticket();
    let run = Run::new(ranks, order, Pictures::default())?;
    batch.add(Job::new(run, desk));
    while !batch.is_empty() {
        batch.pass();
    }
    match ticket.answer.try_recv() {
        Ok(ended) => ended.map(drop),
        Err(_) => Err(StageError::EngineStopped { engine: "prefill" }),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use base::{Code, Fault as _, Shutdown, task};
    use kv::{KvDType, KvGeometry, PrefixIdentity};
    use kv_transfer::engine::{EngineConfig, Transport};
    use kv_transfer::{ClientConfig, Host, ServiceConfig, service};
    use model::PrefixKv;
    use proto::v1::{
        ListSlotsRequest, kv_transfer_service_client::KvTransferServiceClient as Pool,
    };
    use telemetry::Metrics;

    use super::*;
    use crate::run::Written;

    const POOL_BYTES: u64 = 1 << 20;
    /// Longest wait for a release in the background; far below the time to live of a lease.
    const SOON: Duration = Duration::from_secs(10);

    /// A node service in this process; ends with its task.
    async fn node(cache_bytes: u64) -> (String, task::Owned<()>) {
        let engine = EngineConfig::only(Transport::Shm);
        let config = ServiceConfig {
            cache_bytes,
            ..ServiceConfig::new(engine, POOL_BYTES)
        };
        let listener = proto::server::bind("127.0.0.1:0", "listen").await.unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        let host = Host {
            listener,
            admin_listener: None,
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

    /// Two rows of so many bytes.
    fn prefilled(bytes: [u64; 2]) -> Outcome {
        let geometry = KvGeometry {
            layers: 1,
            kv_heads: 1,
            head_dim: 64,
            dtype: KvDType::F32,
        };
        let row = |kind, bytes: u64| {
            let tokens = usize::try_from(bytes).unwrap() / geometry.bytes_per_token();
            let values = geometry.prefix_bytes(tokens) / 4;
            let prefix = PrefixKv::new(geometry, tokens, vec![0.5; values]).unwrap();
            (kind, PrefixIdentity([1; 32]), prefix)
        };
        Outcome {
            rows: vec![row(Kind::Cond, bytes[0]), row(Kind::Uncond, bytes[1])],
            written: Written::default(),
            elapsed: Duration::ZERO,
        }
    }

    async fn used(endpoint: &str) -> u64 {
        let channel = proto::channel::lazy(endpoint).unwrap();
        let list = Pool::new(channel).list(ListSlotsRequest {}).await.unwrap();
        list.into_inner().used_bytes
    }

    async fn emptied(endpoint: &str) {
        let empty = async {
            while used(endpoint).await > 0 {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        tokio::time::timeout(SOON, empty)
            .await
            .expect("rows are left in the pool");
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_row_is_released_when_the_other_one_finds_no_room() {
        let (endpoint, _node) = node(0).await;
        let client = KvClient::new(ClientConfig::only(Transport::Shm)).unwrap();
        let rows = prefilled([POOL_BYTES * 3 / 4, POOL_BYTES / 2]);
        let refused = publish(&client, &endpoint, "one", rows).await.unwrap_err();
        assert_eq!(refused.code(), Code::ResourceExhausted);
        emptied(&endpoint).await;
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_row_that_lies_in_the_pool_already_is_not_written_again() {
        let (endpoint, _node) = node(POOL_BYTES).await;
        let client = KvClient::new(ClientConfig::only(Transport::Shm)).unwrap();
        let handles = |answer: &Answer<Lease>| {
            let Some(Event::Done(done)) = &answer.response.event else {
                panic!("{:?}", answer.response);
            };
            let of = |row: &PrefixRow| row.prefix.clone().unwrap();
            done.rows.iter().map(of).collect::<Vec<_>>()
        };
        let rows = || prefilled([POOL_BYTES / 4; 2]);
        let first = publish(&client, &endpoint, "one", rows()).await.unwrap();
        let second = publish(&client, &endpoint, "two", rows()).await.unwrap();
        assert_eq!(used(&endpoint).await, POOL_BYTES / 2);
        for (one, two) in handles(&first).iter().zip(&handles(&second)) {
            assert_eq!((one.slot, one.generation), (two.slot, two.generation));
            assert_ne!(one.lease, two.lease, "each request has its own");
        }
        drop((first, second));
        let third = publish(&client, &endpoint, "three", rows()).await.unwrap();
        assert_eq!(used(&endpoint).await, POOL_BYTES / 2, "it stayed");
        drop(third);
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn published_rows_name_their_leases_and_go_with_an_answer_that_nobody_reads() {
        let (endpoint, _node) = node(0).await;
        let client = KvClient::new(ClientConfig::only(Transport::Shm)).unwrap();
        let rows = prefilled([POOL_BYTES / 4; 2]);
        let answer = publish(&client, &endpoint, "one", rows).await.unwrap();
        let Some(Event::Done(done)) = &answer.response.event else {
            panic!("{:?}", answer.response);
        };
        let leases = done
            .rows
            .iter()
            .map(|row| row.prefix.as_ref().unwrap().lease);
        assert!(leases.into_iter().all(|lease| lease > 0));
        assert_eq!(
            (answer.leases.len(), used(&endpoint).await),
            (2, POOL_BYTES / 2)
        );
        drop(answer);
        emptied(&endpoint).await;
    }
}
