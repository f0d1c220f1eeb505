//! The walk of one request: wait for its turn, prefill, denoise, answer. Every wait is under the
//! request's deadline, and dropping the walk drops the stages' streams, which cancels their work.
mod denoise;
mod offer;
mod prefill;
mod recovery;

use std::{collections::HashSet, sync::Arc, time::Instant};

use base::{Code, Deadline, Failure, Fault as _, clock};
use proto::v1::{
    Done, GenerateResponse, Mode, PrefixReport, Queued, Timings, generate_response::Event,
    get_response::State,
};
use registry::Role;
use telemetry::{hop, names, trace::within};
use tonic::{Request, Status};

use self::{
    prefill::Prefix,
    recovery::{Missing, Prefixes},
};
use crate::{
    RouterError, audience::Audience, directory::Need, front::Context, gate::Seat, jobs::JobHandle,
    members::Assignment, notes::Notes, placement::role_name, validate::ValidRequest,
};

/// Members that one phase of a request may be sent to.
const MAX_ATTEMPTS: usize = 2;
/// Times that an image goes on elsewhere after a worker was lost on the way.
const MAX_RESUMES: usize = 8;
/// Name of the router's own queue in `Queued`.
const ROUTER: &str = "router";

/// What a client stream carries.
pub(crate) type Answer = Result<GenerateResponse, Status>;

/// One request under way.
#[derive(Debug)]
pub(crate) struct Walk {
    pub(crate) context: Arc<Context>,
    pub(crate) request: ValidRequest,
    pub(crate) tenant: String,
    /// The span that the client has the request in.
    pub(crate) trace: telemetry::trace::Parent,
    pub(crate) audience: Audience,
    pub(crate) deadline: Deadline,
    pub(crate) accepted_at: Instant,
    /// Where an operator reads later what happened here.
    pub(crate) notes: Notes,
}

/// A phase that did not come to its end.
struct Lost {
    error: RouterError,
    /// The client has seen a result of it: repeating it would tell the same twice.
    begun: bool,
    /// It had come further than those before it.
    moved: bool,
    /// It failed for want of its prefixes.
    missing: Option<Missing>,
}

/// The members of one role that were asked so far.
struct Tries {
    role: Role,
    /// Which image; 0 in a prefill.
    image: u32,
    /// Step that the next member goes on from.
    from_step: u32,
    tried: HashSet<String>,
    need: Need,
    /// That came to nothing.
    attempts: usize,
    /// That came further before they were lost.
    resumes: usize,
    last: Option<RouterError>,
}

impl Tries {
    fn new(role: Role, image: u32) -> Self {
        Self {
            role,
            image,
            from_step: 0,
            tried: HashSet::new(),
            need: Need::default(),
            attempts: 0,
            resumes: 0,
            last: None,
        }
    }

    /// Another member may be asked, or the error stands.
    fn again(&mut self, lost: Lost, assignment: &Assignment) -> Result<(), RouterError> {
        if lost.moved {
            self.resumes += 1;
        } else {
            self.attempts += 1;
        }
        let code = lost.error.code();
        let pointless = matches!(lost.error, RouterError::PrefixLost { .. });
        let enough = self.attempts >= MAX_ATTEMPTS || self.resumes > MAX_RESUMES;
        if lost.begun || pointless || enough || !code.is_retryable() {
            return Err(lost.error);
        }
        // An epoch that was too old says nothing against the member.
        if code != Code::Aborted {
            self.tried.insert(assignment.member_id.clone());
        }
        tracing::warn!(
            stage = role_name(self.role), member = %assignment.member_id, error = %lost.error,
            "stage lost before its result, trying another member"
        );
        self.last = Some(lost.error);
        Ok(())
    }
}

impl Walk {
    /// Walks to the end and answers the last event.
    pub(crate) async fn run(
        &self,
        job: &JobHandle,
        seat: &mut Seat,
    ) -> Result<GenerateResponse, RouterError> {
        self.send(Event::Accepted(self.request.accepted())).await?;
        let mut timings = Timings::default();
        if !seat.is_running() {
            let ahead = u32::try_from(seat.ahead).unwrap_or(u32::MAX);
            self.send(Event::Queued(Queued {
                ahead,
                stage: ROUTER.to_owned(),
            }))
            .await?;
        }
        timings.queue_ms = within(hop!("admit"), seat.started()).await;
        self.notes.queued(timings.queue_ms);
        job.set_state(State::Prefill);
        // From here to the end of the walk, however it ends, the prefixes are kept.
        let mut tries = Tries::new(Role::ArStage, 0);
        let first = self.prefill(&mut tries, true);
        let (prefix, rest) = within(hop!("prefix"), first).await?;
        let request = &self.request;
        let found = request.open_size.is_some() || request.align_image_size;
        if request.mode != Mode::Image || found {
            self.send(Event::Written(prefix.written())).await?;
        }
        let mut image_tokens = 0;
        if self.request.mode != Mode::Text {
            image_tokens = self.request.tokens_of(prefix.size);
        }
        let prefixes = Prefixes::new(prefix);
        if self.request.mode != Mode::Text {
            let stage = (rest, &mut tries);
            self.denoise_beside(&prefixes, stage, (job, &mut timings))
                .await?;
        }
        let prefix = prefixes.current().await;
        let done = prefixes.done(&prefix);
        timings.prefill_ms = done.prefill_ms;
        timings.transfer_ms += done.publish_ms;
        timings.total_ms = clock::millis_since(self.accepted_at);
        self.notes.done(&timings, (prefix.tokens, image_tokens));
        Ok(response(Event::Done(Done {
            timings: Some(timings),
            ar_stage: prefix.stage.clone(),
            prefix_tokens: prefix.tokens,
            image_tokens,
            prefix: Some(PrefixReport {
                cached_rows: done.cached_rows,
                ..prefixes.report(request.loss.policy)
            }),
        })))
    }

    async fn assign(&self, tries: &mut Tries) -> Result<Assignment, RouterError> {
        let context = &self.context;
        let first = tries.last.is_none();
        let weights = self.request.weights_id.as_str();
        let stage = role_name(tries.role);
        let assigned =
            context
                .members
                .assign(tries.role, weights, &tries.tried, (&tries.need, first));
        let assigned = within(hop!("place", stage), assigned).await;
        let outcome = if assigned.is_ok() { "placed" } else { "none" };
        context.metrics.count(&names::ROUTER_PLACEMENT, &[outcome]);
        match assigned {
            Ok(assignment) => {
                if !first {
                    context.metrics.count(&names::ROUTER_RETRIES, &[stage]);
                }
                tracing::debug!(
                    request_id = %self.request.request_id, stage, member = %assignment.member_id,
                    epoch = assignment.epoch, "placed"
                );
                let attempt = tries.attempts + tries.resumes + 1;
                self.notes.placed(proto::v1::Placement {
                    image: tries.image,
                    member: assignment.member_id.clone(),
                    attempt: u32::try_from(attempt).unwrap_or(u32::MAX),
                    from_step: tries.from_step,
                    ..assignment.considered.clone()
                });
                Ok(assignment)
            }
            // Nobody else: what the first one said is the answer.
            Err(missing) => Err(tries.last.take().unwrap_or(missing)),
        }
    }

    /// A stage did not bring a phase to its end.
    fn lost(&self, from: Instant, tries: &Tries, (at, error): (&Assignment, &RouterError)) {
        let stage = role_name(tries.role);
        self.notes
            .lost(from, (stage, tries.image), (&at.member_id, error));
        let object = format!("member/{}", at.member_id);
        let message = format!("{stage}, request {}: {error}", self.request.request_id);
        self.context.events.warn("StageLost", object, message);
    }

    async fn send(&self, event: Event) -> Result<(), RouterError> {
        self.audience.send(response(event)).await
    }

    fn timed<T>(&self, message: T) -> Request<T> {
        let mut request = Request::new(message);
        request.set_timeout(self.deadline.remaining(&clock::SystemClock));
        telemetry::trace::inject(request.metadata_mut());
        request
    }

    /// What a stage says next. A stage that says nothing while the registry has given it up counts as lost: its
    /// connection may take much longer to break.
    async fn word<T>(
        &self,
        assignment: &Assignment,
        said: impl Future<Output = Result<T, Status>>,
    ) -> Result<T, Status> {
        tokio::select! {
            said = said => said,
            () = self.context.members.gone(&assignment.member_id) => {
                Err(Status::unavailable("it is silent, and its lease in the registry has run out"))
            }
        }
    }

    /// Since the request came, in milliseconds.
    fn age_ms(&self) -> u32 {
        let age = clock::now().saturating_duration_since(self.accepted_at);
        u32::try_from(age.as_millis()).unwrap_or(u32::MAX)
    }
}

fn lost_here(error: RouterError, begun: bool) -> Lost {
    Lost {
        error,
        begun,
        moved: false,
        missing: None,
    }
}

fn response(event: Event) -> GenerateResponse {
    GenerateResponse { event: Some(event) }
}

fn protocol(role: Role, reason: &str) -> RouterError {
    RouterError::Protocol {
        stage: role_name(role),
        reason: reason.to_owned(),
    }
}

/// A stage's own words pass through; only an outage is put into ours, for the client knows no
/// member.
fn stage_error(role: Role, assignment: &Assignment, status: &Status) -> RouterError {
    let failure = proto::status::failure(status);
    if failure.code != Code::Unavailable {
        return RouterError::Stage(failure);
    }
    let message = format!(
        "{} {} went away: {}",
        role_name(role),
        assignment.member_id,
        failure.message
    );
    RouterError::Stage(Failure { message, ..failure })
}
