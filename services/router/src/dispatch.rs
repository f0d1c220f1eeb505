//! The walk of one request: wait for its turn, prefill, denoise, answer. Every wait is under the
//! request's deadline, and dropping the walk drops the stages' streams, which cancels their work.
use std::{collections::HashSet, sync::Arc, time::Instant};

use base::{Code, Deadline, Failure, Fault as _, clock, limits::MAX_RESPONSE_BYTES};
use proto::v1::{
    DenoiseDone, DenoiseImage, DenoiseRequest, DenoiseStarted, Done, GenerateResponse, Image,
    PrefillDone, PrefillRequest, PrefixRow, Queued, StepDone, TextDelta, Timings,
    ar_stage_service_client::ArStageServiceClient, denoise_response::Event as Denoised,
    dit_worker_service_client::DitWorkerServiceClient, generate_response::Event,
    get_response::State, prefill_response::Event as Prefilled, prefix_row::Kind,
};
use registry::Role;
use telemetry::names;
use tokio::sync::mpsc;
use tonic::{Request, Status};

use crate::{
    RouterError, front::Context, gate::Seat, jobs::JobHandle, members::Assignment,
    placement::role_name, prefix::Held, validate::ValidRequest,
};

/// Members that one phase of a request may be sent to.
const MAX_ATTEMPTS: usize = 2;
/// Name of the router's own queue in `Queued`.
const ROUTER: &str = "router";

/// What a client stream carries.
pub(crate) type Answer = Result<GenerateResponse, Status>;

/// One request under way.
#[derive(Debug)]
pub(crate) struct Walk {
    pub(crate) context: Arc<Context>,
    pub(crate) request: ValidRequest,
    pub(crate) events: mpsc::Sender<Answer>,
    pub(crate) deadline: Deadline,
    pub(crate) accepted_at: Instant,
}

/// A phase that did not come to its end.
struct Lost {
    error: RouterError,
    /// The client has seen a result of it: repeating it would tell the same twice.
    begun: bool,
}

/// The members of one role that were asked so far.
struct Tries {
    role: Role,
    tried: HashSet<String>,
    attempts: usize,
    last: Option<RouterError>,
}

impl Tries {
    fn new(role: Role) -> Self {
        Self {
            role,
            tried: HashSet::new(),
            attempts: 0,
            last: None,
        }
    }

    /// Another member may be asked, or the error stands.
    fn again(&mut self, lost: Lost, assignment: &Assignment) -> Result<(), RouterError> {
        self.attempts += 1;
        let code = lost.error.code();
        let pointless = matches!(lost.error, RouterError::PrefixLost(_));
        if lost.begun || pointless || self.attempts >= MAX_ATTEMPTS || !code.is_retryable() {
            return Err(lost.error);
        }
        // An epoch that was too old says nothing against the member.
        if code != Code::Aborted {
            self.tried.insert(assignment.member_id.clone());
        }
        tracing::warn!(
            stage = role_name(self.role), member = %assignment.member_id, error = %lost.error,
            "stage lost before its first result, trying another member"
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
        timings.queue_ms = seat.started().await;
        job.set_state(State::Prefill);
        // From here to the end of the walk, however it ends, the prefixes are kept.
        let (prefilled, held) = self.prefill().await?;
        timings.prefill_ms = prefilled.prefill_ms;
        timings.transfer_ms = prefilled.publish_ms;
        job.set_state(State::Denoise);
        let ended = self.denoise(&prefilled.rows, &held, job).await?;
        timings.transfer_ms += ended.started.transfer_ms;
        timings.transfer_bytes = ended.started.transfer_bytes;
        timings.transport = ended.started.transport;
        timings.denoise_ms = ended.done.denoise_ms;
        timings.decode_ms = ended.done.decode_ms;
        timings.total_ms = clock::millis_since(self.accepted_at);
        Ok(response(Event::Done(Done {
            timings: Some(timings),
        })))
    }

    async fn prefill(&self) -> Result<(PrefillDone, Held), RouterError> {
        let mut tries = Tries::new(Role::ArStage);
        loop {
            let assignment = self.assign(&mut tries).await?;
            match self.prefill_once(&assignment).await {
                Ok(done) => return Ok(done),
                Err(lost) => tries.again(lost, &assignment)?,
            }
        }
    }

    async fn prefill_once(&self, assignment: &Assignment) -> Result<(PrefillDone, Held), Lost> {
        let mut begun = false;
        let lost = |status: &Status, begun| Lost {
            error: stage_error(Role::ArStage, assignment, status),
            begun,
        };
        let mut client = ArStageServiceClient::new(assignment.channel.clone());
        let call = client.prefill(self.timed(self.prefill_request(assignment.epoch)));
        let mut stream = call
            .await
            .map_err(|status| lost(&status, false))?
            .into_inner();
        while let Some(message) = stream
            .message()
            .await
            .map_err(|status| lost(&status, begun))?
        {
            match message.event {
                Some(Prefilled::Text(text)) => {
                    begun = true;
                    let delta = Event::Text(TextDelta { text: text.text });
                    self.send(delta)
                        .await
                        .map_err(|error| Lost { error, begun })?;
                }
                Some(Prefilled::Done(mut done)) => {
                    let held = self.take_rows(&mut done.rows);
                    let held = held.map_err(|error| Lost { error, begun })?;
                    // The stage releases the leases unless its stream is read to the end.
                    while stream
                        .message()
                        .await
                        .map_err(|status| lost(&status, begun))?
                        .is_some()
                    {}
                    return Ok((done, held));
                }
                // A newer stage may say more than this router understands.
                None => {}
            }
        }
        Err(Lost {
            error: protocol(Role::ArStage, "ended without a result"),
            begun,
        })
    }

    async fn denoise(
        &self,
        rows: &[PrefixRow],
        held: &Held,
        job: &JobHandle,
    ) -> Result<Ended, RouterError> {
        let mut tries = Tries::new(Role::DitWorker);
        loop {
            let assignment = self.assign(&mut tries).await?;
            match self.denoise_once(&assignment, rows, held, job).await {
                Ok(ended) => return Ok(ended),
                Err(lost) => tries.again(lost, &assignment)?,
            }
        }
    }

    async fn denoise_once(
        &self,
        assignment: &Assignment,
        rows: &[PrefixRow],
        held: &Held,
        job: &JobHandle,
    ) -> Result<Ended, Lost> {
        let mut progress = Progress::default();
        let lost = |status: &Status, begun| Lost {
            error: stage_error(Role::DitWorker, assignment, status),
            begun,
        };
        let mut client = DitWorkerServiceClient::new(assignment.channel.clone())
            .max_decoding_message_size(MAX_RESPONSE_BYTES);
        let call = client.denoise(self.timed(self.denoise_request(assignment.epoch, rows)));
        let mut stream = call
            .await
            .map_err(|status| lost(&status, false))?
            .into_inner();
        loop {
            let message = tokio::select! {
                message = stream.message() => {
                    message.map_err(|status| lost(&status, progress.begun))?
                }
                // Once fetched, the worker needs the pool no more.
                error = held.lost(), if !progress.fetched => {
                    return Err(Lost { error, begun: progress.begun });
                }
            };
            let Some(message) = message else {
                let error = protocol(Role::DitWorker, "ended without a result");
                return Err(Lost {
                    error,
                    begun: progress.begun,
                });
            };
            let Some(event) = message.event else { continue };
            let step = self.follow(event, &mut progress, job).await;
            match step {
                Ok(None) => {}
                Ok(Some(done)) => {
                    return Ok(Ended {
                        started: progress.started,
                        done,
                    });
                }
                Err(error) => {
                    return Err(Lost {
                        error,
                        begun: progress.begun,
                    });
                }
            }
        }
    }

    /// One event of the denoiser. `Some`: it was the last.
    async fn follow(
        &self,
        event: Denoised,
        progress: &mut Progress,
        job: &JobHandle,
    ) -> Result<Option<DenoiseDone>, RouterError> {
        match event {
            Denoised::Queued(queued) => {
                let stage = role_name(Role::DitWorker).to_owned();
                self.send(Event::Queued(Queued {
                    ahead: queued.ahead,
                    stage,
                }))
                .await?;
            }
            Denoised::Started(started) => {
                progress.started = started;
                progress.fetched = true;
            }
            Denoised::Step(step) => {
                progress.begun = true;
                if step.step != progress.step + 1 || step.step > self.request.steps {
                    return Err(protocol(Role::DitWorker, "counted its steps wrongly"));
                }
                progress.step = step.step;
                job.set_step(step.step);
                let steps = self.request.steps;
                self.send(Event::Step(StepDone {
                    step: step.step,
                    steps,
                }))
                .await?;
            }
            Denoised::Image(image) => {
                progress.begun = true;
                self.check_image(&image, progress)?;
                progress.image = true;
                let DenoiseImage { width, height, png } = image;
                self.send(Event::Image(Image {
                    index: 0,
                    width,
                    height,
                    png,
                }))
                .await?;
            }
            Denoised::Done(_) if !progress.image => {
                return Err(protocol(Role::DitWorker, "finished without an image"));
            }
            Denoised::Done(done) => return Ok(Some(done)),
        }
        Ok(None)
    }

    async fn assign(&self, tries: &mut Tries) -> Result<Assignment, RouterError> {
        let context = &self.context;
        let first = tries.last.is_none();
        let weights = self.request.weights_id.as_str();
        let assigned = context
            .members
            .assign(tries.role, weights, &tries.tried, first)
            .await;
        let stage = role_name(tries.role);
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
                Ok(assignment)
            }
            // Nobody else: what the first one said is the answer.
            Err(missing) => Err(tries.last.take().unwrap_or(missing)),
        }
    }

    async fn send(&self, event: Event) -> Result<(), RouterError> {
        self.events
            .send(Ok(response(event)))
            .await
            .map_err(|_| RouterError::Cancelled)
    }

    fn timed<T>(&self, message: T) -> Request<T> {
        let mut request = Request::new(message);
        request.set_timeout(self.deadline.remaining(&clock::SystemClock));
        request
    }

    fn prefill_request(&self, epoch: u64) -> PrefillRequest {
        let request = &self.request;
        PrefillRequest {
            request_id: request.request_id.to_string(),
            epoch,
            weights_id: request.weights_id.clone(),
            prompt: request.prompt.clone(),
            system_prompt: request.system_prompt.clone(),
            template: request.template.clone(),
            height: request.size.height,
            width: request.size.width,
            negative_row: request.rows > 1,
        }
    }

    fn denoise_request(&self, epoch: u64, rows: &[PrefixRow]) -> DenoiseRequest {
        let request = &self.request;
        DenoiseRequest {
            request_id: request.request_id.to_string(),
            epoch,
            weights_id: request.weights_id.clone(),
            rows: rows.to_vec(),
            height: request.size.height,
            width: request.size.width,
            steps: request.steps,
            guidance: request.guidance,
            seed: request.seed,
        }
    }

    /// Takes the leases over, those of rows that turn out wrong as well, so that they are released.
    fn take_rows(&self, rows: &mut [PrefixRow]) -> Result<Held, RouterError> {
        let context = &self.context;
        let id = &self.request.request_id.to_string();
        let held = context.prefixes.hold(id, rows, &context.members);
        let held = held.map_err(|reason| protocol(Role::ArStage, reason))?;
        self.check_rows(rows)?;
        Ok(held)
    }

    /// The stage must have built exactly the rows that were asked for, in order.
    fn check_rows(&self, rows: &[PrefixRow]) -> Result<(), RouterError> {
        let wanted: &[Kind] = if self.request.rows > 1 {
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

    fn check_image(&self, image: &DenoiseImage, progress: &Progress) -> Result<(), RouterError> {
        let size = self.request.size;
        if progress.image || progress.step != self.request.steps {
            return Err(protocol(Role::DitWorker, "sent an image at the wrong time"));
        }
        if (image.width, image.height) != (size.width, size.height) || image.png.is_empty() {
            return Err(protocol(Role::DitWorker, "made an image of another size"));
        }
        Ok(())
    }
}

/// What the denoiser has told so far.
#[derive(Debug, Default)]
struct Progress {
    started: DenoiseStarted,
    /// The worker has its prefixes.
    fetched: bool,
    step: u32,
    image: bool,
    begun: bool,
}

/// What the denoiser told in all.
struct Ended {
    started: DenoiseStarted,
    done: DenoiseDone,
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
