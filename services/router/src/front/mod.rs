//! What clients speak to. Every endpoint goes through [`Context::accept`].
mod grpc;
mod http;

use std::{sync::Arc, time::Duration};

use base::{
    Code, Deadline, Fault as _, clock,
    limits::{DEFAULT_REQUEST_DEADLINE, EVENT_QUEUE, MAX_REQUEST_DEADLINE},
    rng::Source,
    task::Tracker,
};
use proto::{
    status::status,
    v1::{GenerateRequest, Priority},
};
use schedule::batching::Class;
use telemetry::{Metrics, names};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

pub use self::http::{HttpBounds, openapi};
pub(crate) use self::{
    grpc::server,
    http::{routes as http_routes, serve as serve_http},
};
use crate::{
    RouterError,
    admission::{Ask, Quota},
    dispatch::{Answer, Walk},
    events::Events,
    fetch::Fetcher,
    gate::{Gate, Seat},
    jobs::{JobHandle, Jobs},
    members::Members,
    prefix::Keeper,
    validate::{self, ValidRequest},
};

/// What every request needs.
#[derive(Debug)]
pub(crate) struct Context {
    pub(crate) members: Members,
    pub(crate) gate: Arc<Gate>,
    pub(crate) jobs: Jobs,
    /// What happens, for operators.
    pub(crate) events: Events,
    pub(crate) metrics: Metrics,
    pub(crate) chance: Source,
    pub(crate) tasks: Tracker,
    pub(crate) prefixes: Keeper,
    /// Of pictures that are named by their address.
    pub(crate) fetcher: Fetcher,
    /// No new request from here on.
    pub(crate) closing: CancellationToken,
    /// Running requests end now.
    pub(crate) kill: CancellationToken,
}

/// Who a request comes from, as far as the door it came through knows.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Caller {
    /// Who pays for it; empty: nobody in particular.
    pub(crate) tenant: String,
    /// What that one may take; `None`: what everybody may.
    pub(crate) quota: Option<Quota>,
}

impl Context {
    /// Checks a request, takes it in and starts its walk. An error here is an error before any
    /// stage was called.
    pub(crate) async fn accept(
        self: &Arc<Self>,
        caller: Caller,
        request: GenerateRequest,
        timeout: Option<Duration>,
    ) -> Result<mpsc::Receiver<Answer>, RouterError> {
        let accepted = self.take_in(caller, request, timeout).await;
        if let Err(error) = &accepted {
            tracing::debug!(%error, "request refused");
            self.metrics
                .count(&names::ROUTER_REQUESTS, &["", error.code().name()]);
            // Of one kind, so that a flood of them is one event with a count.
            let object = format!("code/{}", error.code().name());
            self.events
                .warn("RequestRefused", object, error.to_string());
            if let Some(reason) = error.shed_reason() {
                self.metrics.count(&names::ROUTER_SHED, &[reason]);
            }
        }
        accepted
    }

    /// What admission is asked for a request.
    fn ask<'a>(&self, request: &ValidRequest, caller: &'a Caller, deadline: Deadline) -> Ask<'a> {
        Ask {
            cost: request.cost,
            class: class(request.priority),
            tenant: &caller.tenant,
            quota: caller.quota,
            now: self.gate.since_origin(clock::now()),
            deadline: Some(self.gate.since_origin(deadline.instant())),
            alone: self.members.seconds_alone(request),
        }
    }

    async fn take_in(
        self: &Arc<Self>,
        caller: Caller,
        request: GenerateRequest,
        timeout: Option<Duration>,
    ) -> Result<mpsc::Receiver<Answer>, RouterError> {
        if self.closing.is_cancelled() {
            return Err(RouterError::ShuttingDown);
        }
        let accepted_at = clock::now();
        let timeout = timeout
            .unwrap_or(DEFAULT_REQUEST_DEADLINE)
            .min(MAX_REQUEST_DEADLINE);
        let deadline = Deadline::after(&clock::SystemClock, timeout);
        let checked = validate::check(request)?;
        self.fetcher.allows(&checked.images)?;
        let model = self.members.model(&checked.model).await?;
        let request = checked.resolve(&model, &self.chance)?;
        let job = self.jobs.begin(request.accepted())?;
        let notes = job.notes(accepted_at);
        notes.begun(&request);
        let seat = match self.gate.enter(self.ask(&request, &caller, deadline)) {
            Ok(seat) => seat,
            Err(error) => {
                job.end(Some(&error));
                return Err(error);
            }
        };
        let (events, answers) = mpsc::channel(EVENT_QUEUE);
        // The last word always has a place, however slowly the client reads.
        let last = events
            .clone()
            .try_reserve_owned()
            .map_err(|_| RouterError::Cancelled)?;
        let walk = Walk {
            context: self.clone(),
            request,
            events,
            deadline,
            accepted_at,
            notes,
        };
        self.tasks.spawn(Box::pin(drive(
            walk,
            job,
            seat,
            Last {
                place: last,
                timeout,
            },
        )));
        Ok(answers)
    }
}

fn class(priority: Priority) -> Class {
    match priority {
        Priority::Interactive => Class::Interactive,
        Priority::Unspecified | Priority::Standard => Class::Standard,
        Priority::Background => Class::Background,
    }
}

/// Where the last event goes, and the deadline it names when time ran out.
struct Last {
    place: mpsc::OwnedPermit<Answer>,
    timeout: Duration,
}

async fn drive(walk: Walk, job: JobHandle, mut seat: Seat, last: Last) {
    let context = walk.context.clone();
    let cancelled = job.cancelled();
    let outcome = tokio::select! {
        biased;
        () = cancelled.cancelled() => Err(RouterError::Cancelled),
        () = walk.events.closed() => Err(RouterError::Cancelled),
        () = context.kill.cancelled() => Err(RouterError::ShuttingDown),
        () = tokio::time::sleep_until(walk.deadline.instant().into()) => {
            Err(RouterError::DeadlineExceeded(last.timeout))
        }
        outcome = walk.run(&job, &mut seat) => outcome,
    };
    if outcome.is_ok() {
        seat.finished();
    }
    // Free the place first: whoever reads the last word may come again at once.
    drop(seat);
    report(&walk, outcome.as_ref().err());
    job.end(outcome.as_ref().err());
    last.place.send(outcome.map_err(|error| status(&error)));
}

fn report(walk: &Walk, error: Option<&RouterError>) {
    let request = &walk.request;
    let took = clock::now().saturating_duration_since(walk.accepted_at);
    let code = error.map_or("OK", |error| error.code().name());
    let metrics = &walk.context.metrics;
    metrics.count(&names::ROUTER_REQUESTS, &[&request.model, code]);
    metrics.observe(&names::ROUTER_DURATION, &[&request.model], took);
    let (request_id, size, ms) = (&request.request_id, request.size, took.as_millis());
    match error {
        None => tracing::info!(%request_id, %size, steps = request.steps, ms, "request done"),
        Some(error) if error.code() == Code::Cancelled => {
            tracing::info!(%request_id, %size, ms, "request cancelled");
        }
        Some(error) => {
            tracing::warn!(%request_id, %size, ms, code, %error, "request failed");
            let object = format!("request/{request_id}");
            let message = format!("{error} ({code})");
            walk.context.events.warn("RequestFailed", object, message);
        }
    }
}
