//! The ends of a request's work: its answers, and the first pass of all.
use std::sync::Arc;

use kv_transfer::Lease;
use model::text::Sampling;
use proto::v1::{
    PrefillDone, PrefillResponse, PrefixHandle, PrefixRow, prefill_response::Event,
    prefix_row::Kind,
};
use stage::{Ranks, StageError};
use telemetry::Metrics;

use crate::{
    answers::Answer,
    batch::{Batch, Job, ticket},
    order::{Order, Size, Task},
    pictures::Pictures,
    publish::{Placed, Published},
    run::{Run, Written},
};

/// What the model warms up with.
const WARM_UP_PROMPT: &str = "warm up";

/// What the router is told: with `published`, everything; before that, what is known already.
pub(crate) fn told(written: Written, rows: Vec<PrefixRow>) -> PrefillDone {
    PrefillDone {
        rows,
        prefill_ms: 0.0,
        publish_ms: 0.0,
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
    }
}

/// Rows that are offered while they are computed.
pub(crate) fn offered(written: Written, placed: &[Placed]) -> Answer<Lease> {
    let rows = placed.iter().map(|placed| {
        let (kind, handle) = placed.row();
        row(kind, handle)
    });
    let done = told(written, rows.collect());
    let event = Event::Offered(PrefillDone {
        cached_rows: narrow(placed.iter().filter(|placed| placed.is_found()).count()),
        ..done
    });
    Answer {
        response: PrefillResponse { event: Some(event) },
        leases: Vec::new(),
    }
}

/// The last answer, with the leases of the rows.
pub(crate) fn done(
    written: Written,
    published: Vec<Published>,
    (prefill_ms, publish_ms): (f64, f64),
) -> Answer<Lease> {
    let cached = published.iter().filter(|row| row.found).count();
    let (rows, leases) = published
        .into_iter()
        .map(|published| (row(published.kind, published.handle), published.lease))
        .unzip();
    let done = PrefillDone {
        prefill_ms,
        publish_ms,
        cached_rows: narrow(cached),
        ..told(written, rows)
    };
    Answer {
        response: PrefillResponse {
            event: Some(Event::Done(done)),
        },
        leases,
    }
}

fn row(kind: Kind, handle: PrefixHandle) -> PrefixRow {
    PrefixRow {
        kind: kind.into(),
        prefix: Some(handle),
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
        tenant: String::new(),
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
    let mut batch = Batch::new(Arc::clone(ranks), Metrics::default())?;
    let (mut ticket, desk) = ticket();
    let run = Run::new((ranks, batch.pools()), order, Pictures::default())?;
    batch.add(Job::new(run, desk));
    while !batch.is_empty() {
        batch.pass();
    }
    match ticket.answer.try_recv() {
        Ok(ended) => ended.map(drop),
        Err(_) => Err(StageError::EngineStopped { engine: "prefill" }),
    }
}
