//! The work of one request, phase by phase: check, lay out and prefill, publish.
use std::time::Duration;

use base::clock;
use kv::PrefixIdentity;
use kv_transfer::{KvClient, PublishRequest, Published};
use model::{Model, ModelInfo, PrefixKv, RowKind, RowTokens, T2iRequest, Template};
use parallel::RankContext;
use proto::v1::{self, PrefillRequest, PrefixRow, prefix_row::Kind};
use stage::StageError;

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

/// Lays the request out and computes both rows in one packed forward.
pub(crate) fn prefill(model: &Model, order: &Order) -> Result<Prefilled, StageError> {
    let start = clock::now();
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
    let prefixes = model.prefill(&RankContext::single(), &tokens.iter().collect::<Vec<_>>())?;
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

/// Moves the rows into the pool of the node. Either all of them stay there or none.
pub(crate) async fn publish(
    client: &KvClient,
    endpoint: &str,
    request_id: &str,
    prefilled: Prefilled,
) -> Result<v1::PrefillDone, StageError> {
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
    let rows = published
        .into_iter()
        .map(|(kind, row)| {
            // From here on the consumer's lease keeps the slot; ours only bounds how long it may take.
            row.lease.leave_to_expire();
            PrefixRow {
                kind: kind.into(),
                prefix: Some(row.handle),
            }
        })
        .collect();
    Ok(v1::PrefillDone {
        rows,
        prefill_ms: prefilled.elapsed.as_secs_f64() * 1e3,
        publish_ms: clock::millis_since(start),
    })
}

/// One small forward, so that the first request meets warm weights and threads.
pub(crate) fn warm_up(model: &Model) -> Result<(), StageError> {
    let info = model.info();
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
    prefill(model, &order).map(drop)
}
