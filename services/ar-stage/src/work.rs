//! The work of one request, phase by phase: check, lay out and prefill, publish.
use std::time::Duration;

use base::clock;
use kv::PrefixIdentity;
use kv_transfer::{KvClient, Lease, PublishRequest, Published};
use model::{ModelInfo, PrefixKv, RankShard, RowKind, RowTokens, T2iRequest, Template};
use proto::v1::{
    PrefillDone, PrefillRequest, PrefillResponse, PrefixRow, prefill_response::Event,
    prefix_row::Kind,
};
use stage::{Ranks, StageError};

use crate::answers::Answer;

/// What the model warms up with.
const WARM_UP_PROMPT: &str = "warm up";

/// A request whose fields are understood.
#[derive(Debug, Clone)]
pub(crate) struct Order {
    prompt: String,
    system_prompt: Option<String>,
    template: Template,
    height: usize,
    width: usize,
    negative_row: bool,
}

impl Order {
    /// Reads the request. The texts' own bounds are the layout's to check.
    pub(crate) fn new(request: &PrefillRequest, info: &ModelInfo) -> Result<Self, StageError> {
        let template = match request.template.as_str() {
            "" => info.default_template,
            name => name.parse().map_err(|_| {
                invalid("template", format!("is {name:?}, not pretrain or instruct"))
            })?,
        };
        let (height, width) = (request.height as usize, request.width as usize);
        Ok(Self {
            prompt: request.prompt.clone(),
            system_prompt: Some(request.system_prompt.clone()).filter(|text| !text.is_empty()),
            template,
            height,
            width,
            negative_row: request.negative_row,
        })
    }
}

fn invalid(field: &'static str, reason: String) -> StageError {
    StageError::Other(base::Failure::invalid(field, format!("{field} {reason}")))
}

/// The rows of one request, computed.
#[derive(Debug)]
pub(crate) struct Prefilled {
    rows: Vec<(Kind, PrefixIdentity, PrefixKv)>,
    pub(crate) elapsed: Duration,
}

impl Prefilled {
    /// Tokens of all rows.
    pub(crate) fn tokens(&self) -> usize {
        self.rows.iter().map(|(_, _, prefix)| prefix.tokens()).sum()
    }
}

/// Lays the request out and computes both rows in one packed forward over all ranks.
pub(crate) fn prefill(ranks: &Ranks, order: &Order) -> Result<Prefilled, StageError> {
    let start = clock::now();
    let model = ranks.first();
    let layout = model.layout_text_to_image(&T2iRequest {
        prompt: order.prompt.clone(),
        system_prompt: order.system_prompt.clone(),
        template: order.template,
        height: order.height,
        width: order.width,
    })?;
    let mut kinds = vec![(Kind::Cond, RowKind::Cond)];
    if order.negative_row {
        kinds.push((Kind::Uncond, RowKind::Uncond));
    }
    let tokens: Vec<RowTokens<'_>> = kinds
        .iter()
        .map(|&(_, row)| RowTokens::new(&layout, row))
        .collect();
    let tokens: Vec<&RowTokens<'_>> = tokens.iter().collect();
    let alone = ranks.models().len() == 1;
    let inputs = vec![(); ranks.models().len()];
    let parts = ranks.run(inputs, |model, ctx, ()| model.prefill(ctx, &tokens))?;
    let prefixes: Vec<PrefixKv> = if alone {
        parts.into_iter().flatten().collect()
    } else {
        let whole = |row: usize| {
            let shards: Vec<(&RankShard, &PrefixKv)> = ranks
                .models()
                .iter()
                .zip(&parts)
                .map(|(model, rows)| (model.rank(), &rows[row]))
                .collect();
            PrefixKv::whole_of(&model.info().kv, &shards)
        };
        (0..kinds.len()).map(whole).collect::<Result<_, _>>()?
    };
    let rows = kinds
        .into_iter()
        .zip(prefixes)
        .map(|((kind, row), prefix)| Ok((kind, model.prefix_identity(&layout, row)?, prefix)))
        .collect::<Result<_, StageError>>()?;
    Ok(Prefilled {
        rows,
        elapsed: clock::now().saturating_duration_since(start),
    })
}

/// Moves the rows into the pool of the node. Either all of them stay there or none: whoever drops the
/// answer releases them.
pub(crate) async fn publish(
    client: &KvClient,
    endpoint: &str,
    request_id: &str,
    prefilled: Prefilled,
) -> Result<Answer<Lease>, StageError> {
    let start = clock::now();
    let mut published: Vec<(Kind, Published)> = Vec::new();
    for (kind, identity, prefix) in prefilled.rows {
        let request = PublishRequest {
            request_id: request_id.to_owned(),
            identity,
            geometry: *prefix.geometry(),
            tokens: prefix.tokens(),
            payload: prefix.to_bytes(),
        };
        // When a later row fails, the leases of the earlier ones are dropped and their slots freed.
        let row = client.publish(endpoint, request).await;
        published.push((kind, row.map_err(|error| StageError::of(&error))?));
    }
    let mut leases = Vec::new();
    let rows = published
        .into_iter()
        .map(|(kind, row)| {
            leases.push(row.lease);
            PrefixRow {
                kind: kind.into(),
                prefix: Some(row.handle),
            }
        })
        .collect();
    let done = PrefillDone {
        rows,
        prefill_ms: prefilled.elapsed.as_secs_f64() * 1e3,
        publish_ms: clock::millis_since(start),
    };
    let response = PrefillResponse {
        event: Some(Event::Done(done)),
    };
    Ok(Answer { response, leases })
}

/// One small forward, so that the first request meets warm weights and threads.
pub(crate) fn warm_up(ranks: &Ranks) -> Result<(), StageError> {
    let info = ranks.info();
    let Some(bucket) = info.buckets.first() else {
        return Ok(());
    };
    let order = Order {
        prompt: WARM_UP_PROMPT.to_owned(),
        system_prompt: None,
        template: info.default_template,
        height: bucket.height,
        width: bucket.width,
        negative_row: false,
    };
    prefill(ranks, &order).map(drop)
}

#[cfg(test)]
mod tests {
    use base::{Code, Fault as _, Shutdown, task};
    use kv::{KvDType, KvGeometry};
    use kv_transfer::engine::{EngineConfig, Transport};
    use kv_transfer::{ClientConfig, Host, ServiceConfig, service};
    use proto::v1::{
        ListSlotsRequest, kv_transfer_service_client::KvTransferServiceClient as Pool,
    };
    use telemetry::Metrics;

    use super::*;

    const POOL_BYTES: u64 = 1 << 20;
    /// Longest wait for a release in the background; far below the time to live of a lease.
    const SOON: Duration = Duration::from_secs(10);

    /// A node service in this process; ends with its task.
    async fn node() -> (String, task::Owned<()>) {
        let engine = EngineConfig::only(Transport::Shm);
        let config = ServiceConfig::new(engine, POOL_BYTES);
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
    fn prefilled(bytes: [u64; 2]) -> Prefilled {
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
        Prefilled {
            rows: vec![row(Kind::Cond, bytes[0]), row(Kind::Uncond, bytes[1])],
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
        let (endpoint, _node) = node().await;
        let client = KvClient::new(ClientConfig::only(Transport::Shm)).unwrap();
        let rows = prefilled([POOL_BYTES * 3 / 4, POOL_BYTES / 2]);
        let refused = publish(&client, &endpoint, "one", rows).await.unwrap_err();
        assert_eq!(refused.code(), Code::ResourceExhausted);
        emptied(&endpoint).await;
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn published_rows_name_their_leases_and_go_with_an_answer_that_nobody_reads() {
        let (endpoint, _node) = node().await;
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
