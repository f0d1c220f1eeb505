//! The walk of one request: wait for its turn, prefill, denoise, answer. Every wait is under the
//! request's deadline, and dropping the walk drops the stages' streams, which cancels their work.
mod denoise;
mod offer;
mod recovery;

use std::{
    collections::HashSet,
    sync::{Arc, atomic::AtomicBool},
    time::Instant,
};

use base::{Code, Deadline, Failure, Fault as _, clock, limits::MAX_SIDE_PIXELS};
use proto::{
    size::Size,
    v1::{
        Done, GenerateResponse, Mode, PrefillDone, PrefillRequest, PrefillResponse,
        PrefillSampling, PrefillSize, PrefillTask, PrefixReport, PrefixRow, Queued, TextDelta,
        Timings, Written, ar_stage_service_client::ArStageServiceClient, generate_response::Event,
        get_response::State, prefill_response::Event as Prefilled, prefix_row::Kind,
    },
};
use registry::Role;
use telemetry::{hop, names, trace::within};
use tonic::{Request, Status};

use self::{
    offer::Rest,
    recovery::{Missing, Prefixes},
};
use crate::{
    RouterError,
    audience::Audience,
    directory::{Need, host_of},
    front::Context,
    gate::Seat,
    jobs::JobHandle,
    members::Assignment,
    notes::Notes,
    placement::role_name,
    prefix::Held,
    validate::{OpenSize, ValidRequest},
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

/// What a stage has told of its prefixes; with its stream, and whether the client has seen a text of it, when they
/// are only offered.
type Answered = (
    PrefillDone,
    Held,
    Option<(tonic::Streaming<PrefillResponse>, bool)>,
);

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

/// What the AR stage has published for a request: one prefix for all of its images.
#[derive(Debug)]
struct Prefix {
    done: PrefillDone,
    held: Held,
    /// Tokens that were read.
    tokens: u32,
    /// Of the picture as it is denoised, one of the model's.
    size: Size,
    /// Of the picture that comes out.
    output: Size,
    /// Member that computed it.
    stage: String,
    /// A worker has it, so all of it was there.
    fetched: AtomicBool,
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

    /// Computes the prefixes, or has them offered with what is left to do; `told`: the client hears what is
    /// written.
    async fn prefill(
        &self,
        tries: &mut Tries,
        told: bool,
    ) -> Result<(Prefix, Option<Rest>), RouterError> {
        let images = self
            .notes
            .fetching(self.context.fetcher.files(&self.request.images));
        let images = images.await?;
        loop {
            let assignment = self.assign(tries).await?;
            let from = clock::now();
            match self.prefill_once(&assignment, &images, told).await {
                Ok((done, held, more)) => {
                    if more.is_none() {
                        self.notes.prefilled(from, &assignment.member_id, &done);
                    }
                    let cond = done.rows.first().and_then(|row| row.prefix.as_ref());
                    let prefix = Prefix {
                        tokens: cond.map_or(done.prompt_tokens, |prefix| prefix.tokens),
                        size: self.size_of(&done)?,
                        output: self.output_of(&done)?,
                        stage: assignment.member_id.clone(),
                        fetched: AtomicBool::new(false),
                        done,
                        held,
                    };
                    let rest = more.map(|(stream, begun)| Rest {
                        stream,
                        assignment,
                        from,
                        begun,
                        offered: prefix.done.rows.clone(),
                    });
                    return Ok((prefix, rest));
                }
                Err(lost) => {
                    self.lost(from, tries, (&assignment, &lost.error));
                    tries.again(lost, &assignment)?;
                }
            }
        }
    }

    /// The size of the picture: the request's, or what the stage has found.
    fn size_of(&self, done: &PrefillDone) -> Result<Size, RouterError> {
        let request = &self.request;
        if request.open_size.is_none() || request.mode == Mode::Text {
            return Ok(request.size);
        }
        let (width, height) = (done.width, done.height);
        if width == 0 || height == 0 || width.max(height) > MAX_SIDE_PIXELS {
            return Err(protocol(Role::ArStage, "named no size"));
        }
        Ok(Size { width, height })
    }

    /// The size of the picture that comes out.
    fn output_of(&self, done: &PrefillDone) -> Result<Size, RouterError> {
        match (done.output_width, done.output_height) {
            (0, 0) => self.size_of(done),
            _ if !self.request.align_image_size => Err(protocol(
                Role::ArStage,
                "scales an image that stays as it is",
            )),
            (width, height) if width.max(height) > MAX_SIDE_PIXELS || width.min(height) == 0 => {
                Err(protocol(Role::ArStage, "named no size to scale to"))
            }
            (width, height) => Ok(Size { width, height }),
        }
    }

    async fn prefill_once(
        &self,
        assignment: &Assignment,
        images: &[Vec<u8>],
        told: bool,
    ) -> Result<Answered, Lost> {
        let mut begun = false;
        let lost = |status: &Status, begun| Lost {
            error: stage_error(Role::ArStage, assignment, status),
            begun,
            moved: false,
            missing: None,
        };
        let mut client = ArStageServiceClient::new(assignment.channel.clone());
        let call = client.prefill(self.timed(self.prefill_request(assignment.epoch, images)));
        let mut stream = self
            .word(assignment, call)
            .await
            .map_err(|status| lost(&status, false))?
            .into_inner();
        while let Some(message) = self
            .word(assignment, stream.message())
            .await
            .map_err(|status| lost(&status, begun))?
        {
            match message.event {
                Some(Prefilled::Text(_)) if !told => {}
                Some(Prefilled::Text(text)) => {
                    begun = true;
                    let delta = Event::Text(TextDelta { text: text.text });
                    self.send(delta)
                        .await
                        .map_err(|error| lost_here(error, begun))?;
                }
                Some(Prefilled::Done(mut done)) => {
                    let held = self.take_rows(&mut done.rows);
                    let held = held.map_err(|error| lost_here(error, begun))?;
                    // The stage releases the leases unless its stream is read to the end.
                    while self
                        .word(assignment, stream.message())
                        .await
                        .map_err(|status| lost(&status, begun))?
                        .is_some()
                    {}
                    return Ok((done, held, None));
                }
                Some(Prefilled::Offered(mut done)) => {
                    let held = self.take_rows(&mut done.rows);
                    let held = held.map_err(|error| lost_here(error, begun))?;
                    return Ok((done, held, Some((stream, begun))));
                }
                // A newer stage may say more than this router understands.
                None => {}
            }
        }
        Err(lost_here(
            protocol(Role::ArStage, "ended without a result"),
            begun,
        ))
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

    fn prefill_request(&self, epoch: u64, images: &[Vec<u8>]) -> PrefillRequest {
        let request = &self.request;
        let (size_from, size) = match request.open_size {
            _ if request.mode == Mode::Text => (PrefillSize::Unspecified, None),
            Some(OpenSize::Model) => (PrefillSize::Model, None),
            Some(OpenSize::FirstImage) => (PrefillSize::FirstImage, None),
            None => (PrefillSize::Unspecified, Some(request.size)),
        };
        let task = match request.mode {
            Mode::Unspecified | Mode::Image => PrefillTask::Unspecified,
            Mode::Think => PrefillTask::Think,
            Mode::Recaption => PrefillTask::Recaption,
            Mode::ThinkRecaption => PrefillTask::ThinkRecaption,
            Mode::Text => PrefillTask::Text,
        };
        let sampling = &request.sampling;
        PrefillRequest {
            request_id: request.request_id.to_string(),
            tenant: self.tenant.clone(),
            epoch,
            weights_id: request.weights_id.clone(),
            prompt: request.prompt.clone(),
            system_prompt: request.system_prompt.clone(),
            template: request.template.clone(),
            height: size.map_or(0, |size| size.height),
            width: size.map_or(0, |size| size.width),
            negative_row: request.rows > 1,
            task: task.into(),
            size_from: size_from.into(),
            images: images.to_vec(),
            sampling: Some(PrefillSampling {
                temperature: sampling.temperature,
                top_k: sampling.top_k,
                top_p: sampling.top_p,
                repetition_penalty: sampling.repetition_penalty,
                max_new_tokens: sampling.max_new_tokens,
            }),
            seed: request.prefix_seed(),
            drop_think: request.drop_think,
            system_prompt_name: request.system_prompt_name.clone(),
            align_image_size: request.align_image_size,
            transfer_timeout_ms: request.loss.transfer_timeout_ms,
        }
    }

    /// Takes the leases over, those of rows that turn out wrong as well, so that they are released.
    fn take_rows(&self, rows: &mut [PrefixRow]) -> Result<Held, RouterError> {
        let context = &self.context;
        let id = &self.request.request_id.to_string();
        let held = context
            .prefixes
            .hold(id, rows, (&context.members, self.request.loss.policy));
        let held = held.map_err(|reason| protocol(Role::ArStage, reason))?;
        self.check_rows(rows)?;
        Ok(held)
    }

    /// The stage must have built exactly the rows that were asked for, in order.
    fn check_rows(&self, rows: &[PrefixRow]) -> Result<(), RouterError> {
        let wanted: &[Kind] = if self.request.mode == Mode::Text {
            &[]
        } else if self.request.rows > 1 {
            &[Kind::Cond, Kind::Uncond]
        } else {
            &[Kind::Cond]
        };
        let right = rows.len() == wanted.len()
            && rows
                .iter()
                .zip(wanted)
                .all(|(row, &kind)| row.kind() == kind && row.prefix.is_some());
        if right {
            Ok(())
        } else {
            Err(protocol(
                Role::ArStage,
                "built other rows than it was asked for",
            ))
        }
    }
}

impl Prefix {
    /// What a worker needs to go on from it.
    fn need(&self, seconds: Option<f64>) -> Need {
        let handles = self.done.rows.iter().filter_map(|row| row.prefix.as_ref());
        let host = handles
            .clone()
            .next()
            .map(|prefix| host_of(&prefix.endpoint));
        Need {
            host: host.unwrap_or_default().to_owned(),
            bytes: handles
                .map(|prefix| prefix.bytes)
                .fold(0, u64::saturating_add),
            seconds: seconds.unwrap_or_default(),
        }
    }

    /// What the client is told of it.
    fn written(&self) -> Written {
        let done = &self.done;
        Written {
            text: done.text.clone(),
            tokens: done.new_tokens,
            cut: done.cut,
            width: if done.rows.is_empty() {
                0
            } else {
                self.output.width
            },
            height: if done.rows.is_empty() {
                0
            } else {
                self.output.height
            },
            size_fallback: done.size_fallback,
            reused_tokens: done.reused_tokens,
            system_prompt: done.system_prompt.clone(),
        }
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
