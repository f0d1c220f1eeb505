//! What clients speak to. Every endpoint goes through [`Context::accept`].
mod caller;
mod grpc;
mod http;
mod status;

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use base::{
    Code, Deadline, Fault as _, clock,
    limits::{DEFAULT_REQUEST_DEADLINE, MAX_REQUEST_DEADLINE},
    rng::Source,
    task::Tracker,
};
use proto::{
    status::status,
    v1::{GenerateRequest, Priority},
};
use schedule::batching::Class;
use telemetry::{Metrics, hop, hop_under, names, trace::within};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

pub(crate) use self::{
    caller::Caller, grpc::server, http::routes as http_routes, status::routes as status_routes,
};
pub use self::{http::openapi, status::StatusPage};
use crate::{
    RouterError,
    admission::Ask,
    audience::{Audience, Audiences, ENDING_LOOK, ENDING_WAIT, Found, Likeness},
    dispatch::{Answer, Walk},
    events::Events,
    fetch::Fetcher,
    gate::{Gate, Seat},
    jobs::{JobHandle, Jobs},
    keys::ApiKeys,
    members::Members,
    prefix::Keeper,
    recorder::Recorder,
    validate::{self, ValidRequest},
};

/// What every request needs.
#[derive(Debug)]
pub(crate) struct Context {
    pub(crate) members: Members,
    pub(crate) gate: Arc<Gate>,
    pub(crate) jobs: Jobs,
    /// Of requests that their clients have named.
    pub(crate) audiences: Audiences,
    /// What happens, for operators.
    pub(crate) events: Events,
    pub(crate) metrics: Metrics,
    pub(crate) chance: Source,
    pub(crate) tasks: Tracker,
    pub(crate) prefixes: Keeper,
    /// Of pictures that are named by their address.
    pub(crate) fetcher: Fetcher,
    /// Who may ask; `None`: whoever connects.
    pub(crate) keys: Option<Arc<ApiKeys>>,
    /// Where requests are written down.
    pub(crate) recorder: Option<Recorder>,
    /// No new request from here on.
    pub(crate) closing: CancellationToken,
    /// Running requests end now.
    pub(crate) kill: CancellationToken,
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
        mut request: GenerateRequest,
        timeout: Option<Duration>,
    ) -> Result<mpsc::Receiver<Answer>, RouterError> {
        caller.hold(&mut request)?;
        if self.closing.is_cancelled() {
            return Err(RouterError::ShuttingDown);
        }
        let accepted_at = clock::now();
        let timeout = timeout
            .unwrap_or(DEFAULT_REQUEST_DEADLINE)
            .min(MAX_REQUEST_DEADLINE);
        let deadline = Deadline::after(&clock::SystemClock, timeout);
        // Only a name that the client has chosen can come twice.
        let named = (!request.request_id.is_empty()).then(|| {
            (
                request.request_id.clone(),
                Likeness::new(&request, &caller.tenant),
            )
        });
        let checked = validate::check(request)?;
        self.fetcher.allows(&checked.images)?;
        let model = self.members.model(&checked.model).await?;
        let request = match &named {
            // The same again, at any router and after any failure, is to be the same picture.
            Some((id, _)) => checked.resolve(&model, &seed_of(id))?,
            None => checked.resolve(&model, &self.chance)?,
        };
        let intake = Intake {
            caller,
            request,
            timeout,
            deadline,
            accepted_at,
        };
        match named {
            None => {
                let (begun, audience) = self.begin(intake)?;
                Ok(self.go(begun, audience, None))
            }
            Some((id, likeness)) => self.join_or_begin(id, &likeness, intake).await,
        }
    }

    /// The same request may run already; then there is one more who listens to it.
    async fn join_or_begin(
        self: &Arc<Self>,
        id: String,
        likeness: &Likeness,
        intake: Intake,
    ) -> Result<mpsc::Receiver<Answer>, RouterError> {
        let until = clock::now() + ENDING_WAIT;
        loop {
            let begin = || {
                let (begun, audience) = self.begin(intake.clone())?;
                Ok(((begun, audience.clone()), audience))
            };
            match self.audiences.join_or((&id, likeness), begin)? {
                Ok((begun, audience)) => return Ok(self.go(begun, audience, Some(id))),
                Err(Found::Joined(answers)) => {
                    tracing::info!(request_id = %id, "the same request runs already, joined it");
                    return Ok(answers);
                }
                Err(_) if clock::now() < until => tokio::time::sleep(ENDING_LOOK).await,
                Err(_) => return Err(RouterError::Duplicate(id)),
            }
        }
    }

    /// Takes a request in. Nothing here waits.
    fn begin(self: &Arc<Self>, intake: Intake) -> Result<(Begun, Audience), RouterError> {
        let Intake {
            caller,
            request,
            timeout,
            deadline,
            accepted_at,
        } = intake;
        let job = self.jobs.begin(request.accepted())?;
        job.set_tenant(&caller.tenant);
        let notes = job.notes(accepted_at);
        notes.begun(&request);
        let seat = match self.gate.enter(self.ask(&request, &caller, deadline)) {
            Ok(seat) => seat,
            Err(error) => {
                job.end(Some(&error));
                return Err(error);
            }
        };
        let (audience, answers) = Audience::open()?;
        let walk = Walk {
            context: self.clone(),
            request,
            tenant: caller.tenant,
            trace: caller.trace,
            audience: audience.clone(),
            deadline,
            accepted_at,
            notes,
        };
        let begun = Begun {
            walk,
            job,
            seat,
            timeout,
            answers,
        };
        Ok((begun, audience))
    }

    /// Starts the walk.
    fn go(
        self: &Arc<Self>,
        begun: Begun,
        audience: Audience,
        name: Option<String>,
    ) -> mpsc::Receiver<Answer> {
        let Begun {
            walk,
            job,
            seat,
            timeout,
            answers,
        } = begun;
        let last = Last {
            audience,
            name,
            timeout,
        };
        let (request_id, tenant) = (&walk.request.request_id, &walk.tenant);
        let span = hop_under!(&walk.trace, "request", %request_id, tenant);
        let driven = within(span, Box::pin(drive(walk, job, seat, last)));
        self.tasks.spawn(driven);
        answers
    }
}

/// A request that has been checked.
#[derive(Debug, Clone)]
struct Intake {
    caller: Caller,
    request: ValidRequest,
    timeout: Duration,
    deadline: Deadline,
    accepted_at: Instant,
}

/// A request that has its place.
struct Begun {
    walk: Walk,
    job: JobHandle,
    seat: Seat,
    timeout: Duration,
    answers: mpsc::Receiver<Answer>,
}

/// What chance decides for a request of this name.
fn seed_of(name: &str) -> Source {
    let hash = blake3::hash(name.as_bytes());
    let start = hash.as_bytes().first_chunk().copied();
    Source::seeded(u64::from_le_bytes(start.unwrap_or_default()))
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
    audience: Audience,
    /// Under which the request can be joined.
    name: Option<String>,
    timeout: Duration,
}

async fn drive(walk: Walk, job: JobHandle, mut seat: Seat, last: Last) {
    let context = walk.context.clone();
    let cancelled = job.cancelled();
    let outcome = tokio::select! {
        biased;
        () = cancelled.cancelled() => Err(RouterError::Cancelled),
        () = walk.audience.closed() => Err(RouterError::Cancelled),
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
    let _answer = hop!("answer").entered();
    match &last.name {
        Some(name) => context
            .audiences
            .end(name, || job.end(outcome.as_ref().err())),
        None => job.end(outcome.as_ref().err()),
    }
    last.audience.end(&outcome.map_err(|error| status(&error)));
}

fn report(walk: &Walk, error: Option<&RouterError>) {
    if let Some(recorder) = &walk.context.recorder {
        recorder.record(walk, error);
    }
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
