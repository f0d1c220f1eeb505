//! `DitWorkerService`: the door, the stream and the life of one request.
use std::{
    pin::Pin,
    sync::{Arc, OnceLock},
    time::Instant,
};

use base::{
    Code, Failure, Fault as _, MemberId, clock,
    limits::{EVENT_QUEUE, MAX_PREVIEWS},
};
use futures_util::{StreamExt as _, stream::FuturesUnordered};
use kv_transfer::KvClient;
use model::{JobOptions, JobSpec, JobState, Latents, Parts, StepCache, preview::LinearPreview};
use proto::{
    names,
    v1::{
        self, DenoiseDone, DenoiseNoPrefix, DenoisePreview, DenoiseQueued, DenoiseRequest,
        DenoiseResponse, DenoiseStarted, DenoiseStep,
        denoise_response::Event,
        dit_worker_service_server::{DitWorkerService, DitWorkerServiceServer},
    },
};
use registry::{Load, Role};
use schedule::cost::Constants;
use stage::{Engine, Gate, RankLoad, Ranks, Stage, StageError, info};
use telemetry::{Metrics, names as metric, trace::within};
use tokio::sync::{Semaphore, mpsc};
use tokio_stream::{Stream, wrappers::ReceiverStream};
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status, service::RoutesBuilder};

use crate::{
    DitWorkerConfig, FETCHED_AHEAD,
    batch::Ended,
    checkpoint,
    denoiser::{ModelDenoiser, RankJob, warm_up, weight},
    fetch::{self, Leases, Prefixes},
    former::Forming,
    ledger::{Costs, Ledger},
    order::Order,
    pace,
    picture::{self, Picture},
    places::Held,
    steps::{StepLoop, Ticket},
};

/// The worker and its one model.
#[derive(Debug)]
pub struct DitWorker {
    member_id: MemberId,
    gate: Gate,
    /// Builds jobs and loads the model.
    prepare: Engine,
    /// Decodes and encodes, beside the step loop.
    decode: Engine,
    /// Draws cheap previews.
    preview: Engine,
    /// Makes files of pictures, while the next one is decoded.
    encode: Engine,
    loaded: OnceLock<Loaded>,
    client: KvClient,
    config: DitWorkerConfig,
    metrics: Metrics,
    /// Requests inside, waiting ones included.
    inside: Semaphore,
    bound: usize,
}

#[derive(Debug)]
struct Loaded {
    ranks: Arc<Ranks>,
    steps: StepLoop<ModelDenoiser>,
    preview: Option<Arc<LinearPreview>>,
    cache: StepCache,
    ledger: Ledger,
    costs: Constants,
}

type Events = mpsc::Sender<Result<DenoiseResponse, Status>>;

impl DitWorker {
    pub(crate) fn new(
        config: DitWorkerConfig,
        client: KvClient,
        metrics: Metrics,
    ) -> Result<Self, StageError> {
        let bound = places(&config) + config.max_queue;
        Ok(Self {
            member_id: MemberId::generate(),
            gate: Gate::new(),
            prepare: Engine::start("prepare", bound)?,
            decode: Engine::start("decode", bound * (1 + MAX_PREVIEWS as usize))?,
            preview: Engine::start("preview", bound * MAX_PREVIEWS as usize)?,
            encode: Engine::start("encode", bound * (1 + MAX_PREVIEWS as usize))?,
            loaded: OnceLock::new(),
            client,
            config,
            metrics,
            inside: Semaphore::new(bound),
            bound,
        })
    }

    fn loaded(&self) -> Result<&Loaded, StageError> {
        self.loaded.get().ok_or(StageError::NotReady {
            why: "the model is still loading",
        })
    }

    fn inside(&self) -> usize {
        self.bound - self.inside.available_permits()
    }

    /// One request from its prefixes to its picture.
    async fn denoise(
        &self,
        (request, due): (DenoiseRequest, Option<Instant>),
        events: &Events,
        stop: &CancellationToken,
    ) -> Result<(), StageError> {
        let loaded = self.loaded()?;
        let channels = loaded.ranks.first().config().vae.latent_channels;
        let order = Order {
            due,
            ..Order::new(request, loaded.ranks.info(), channels)?
        };
        loaded.check_previews(&order)?;
        let _place = self
            .inside
            .try_acquire()
            .map_err(|_| StageError::QueueFull {
                queue: "dit-worker",
                bound: self.config.max_queue,
            })?;
        let bytes = loaded.ledger.bytes(&order)?;
        let begin = async {
            let resident = self
                .wait_for_memory(loaded, (&order, bytes), events)
                .await?;
            let (job, leases) = self.prepare(loaded, &order, events).await?;
            Ok((job, leases, resident))
        };
        let (job, leases, resident) = or_stop(stop, Box::pin(begin)).await?;
        let weight = weight(&job);
        let ticket = loaded.steps.submit(job, weight, order.terms())?;
        let steps = self.follow(loaded, ticket, (&order, events, stop));
        let ended = within(telemetry::hop!("steps", steps = order.steps), steps).await?;
        let state = ended.job.state()?;
        drop(ended.job);
        // The slots in the pool are free from here on.
        drop(leases);
        drop(resident);
        if ended.parked {
            hand_over(&state, &order, events).await?;
            return Err(StageError::Draining);
        }
        let make = self.make(&loaded.ranks, state.latents.clone(), order.output);
        let make = within(telemetry::hop!("decode"), make);
        let picture = tokio::select! {
            picture = make => picture?,
            () = stop.cancelled() => {
                hand_over(&state, &order, events).await?;
                return Err(StageError::Draining);
            }
        };
        self.metrics.count(&metric::STAGE_IMAGES, &["dit-worker"]);
        send(events, Event::Image(picture.image)).await?;
        let done = DenoiseDone {
            denoise_ms: ended.denoise_ms,
            decode_ms: picture.decode_ms,
        };
        send(events, Event::Done(done)).await
    }

    /// Passes progress on until the job ends. When the worker stops, the job comes back as it stands.
    async fn follow(
        &self,
        loaded: &Loaded,
        mut ticket: Ticket<ModelDenoiser>,
        (order, events, stop): (&Order, &Events, &CancellationToken),
    ) -> Result<Ended<RankJob>, StageError> {
        if ticket.ahead > 0 {
            queued(events, ticket.ahead).await?;
        }
        let mut previews = FuturesUnordered::new();
        let mut stopping = false;
        loop {
            tokio::select! {
                told = ticket.progress.recv() => {
                    let Some(told) = told else { break };
                    let news = told.news;
                    let state = news.as_ref().and_then(|news| news.state.as_ref());
                    step(told.step, order, state, events).await?;
                    if let Some(preview) = news.and_then(|news| news.preview) {
                        previews.push(self.preview(loaded, preview, order.news.vae));
                    }
                }
                Some(preview) = previews.next() => {
                    send(events, Event::Preview(preview?)).await?;
                }
                () = stop.cancelled(), if !stopping => {
                    stopping = true;
                    ticket.park();
                }
            }
        }
        while let Some(preview) = previews.next().await {
            send(events, Event::Preview(preview?)).await?;
        }
        ticket
            .result
            .await
            .map_err(|_| StageError::EngineStopped { engine: "denoise" })?
    }

    /// The picture of latents as a file; `output` is the height and width that it is scaled to, if it is. It is
    /// decoded in line with the others, and its file made while the next one is decoded.
    async fn make(
        &self,
        ranks: &Arc<Ranks>,
        latents: Latents,
        output: Option<(usize, usize)>,
    ) -> Result<Picture, StageError> {
        let ranks = Arc::clone(ranks);
        let decode = move || timed(|| picture::decoded(&ranks, &latents));
        let (image, decoding) = self.decode.run(decode).await?;
        let image = image?;
        let encode = move || timed(|| picture::file(image, output));
        let (image, encoding) = self.encode.run(encode).await?;
        Ok(Picture {
            image: image?,
            decode_ms: decoding + encoding,
        })
    }

    /// A preview of latents: cheap ones beside the decoder, decoded ones in line with finished pictures, so
    /// that one decoder's memory is enough.
    async fn preview(
        &self,
        loaded: &Loaded,
        (number, latents): (usize, Latents),
        vae: bool,
    ) -> Result<DenoisePreview, StageError> {
        let image = if vae {
            self.make(&loaded.ranks, latents, None).await?.image
        } else {
            let map = loaded.preview.clone();
            let draw = move || {
                let map = map.as_deref().ok_or(StageError::NotReady {
                    why: "it has no preview coefficients",
                })?;
                picture::encoded(&map.draw(&latents)?)
            };
            self.preview.run(draw).await??
        };
        Ok(DenoisePreview {
            index: narrow(number),
            image: Some(image),
        })
    }

    /// Waits until there is room for one more request.
    async fn wait_for_memory(
        &self,
        loaded: &Loaded,
        (order, bytes): (&Order, u64),
        events: &Events,
    ) -> Result<Held, StageError> {
        if let Some(held) = loaded.ledger.try_take(bytes, order) {
            return Ok(held);
        }
        queued(events, self.inside().saturating_sub(1)).await?;
        loaded.ledger.take(bytes, order).await
    }

    /// Counts what was fetched.
    fn moved(&self, transport: &str, (bytes, repaired): (u64, u64), since: Instant) {
        let (way, metrics) = ([transport, "in"], &self.metrics);
        metrics.add(&metric::TRANSFER_BYTES, &way, bytes);
        metrics.add(&metric::TRANSFER_REPAIRED, &[transport], repaired);
        let took = clock::now().saturating_duration_since(since);
        metrics.observe(&metric::TRANSFER_DURATION, &way, took);
    }

    /// Fetches the prefixes and builds the job on them.
    async fn prepare(
        &self,
        loaded: &Loaded,
        order: &Order,
        events: &Events,
    ) -> Result<(RankJob, Leases), StageError> {
        let start = clock::now();
        let geometry = loaded.ranks.info().kv;
        let arrived = async {
            let both = fetch::both(&self.client, order, &geometry, &self.member_id);
            let fetched = Box::pin(both).await?;
            let carried = (fetched.bytes(), fetched.transport(), fetched.waited_ms());
            self.moved(&carried.1, (carried.0, fetched.repaired()), start);
            let checked = self.prepare.run(move || fetched.into_prefixes(geometry));
            Ok::<_, StageError>((checked.await??, carried))
        };
        let arrived = within(telemetry::hop!("fetch"), arrived);
        let (prefixes, (bytes, transport, waited_ms)) = match arrived.await {
            Ok(arrived) => arrived,
            Err(error) => {
                if error.code() == Code::DataLoss {
                    self.metrics.count(&metric::TRANSFER_VERIFY, &["digest"]);
                }
                let gone = fetch::is_gone(&error);
                send(events, Event::NoPrefix(DenoiseNoPrefix { gone })).await?;
                return Err(error);
            }
        };
        let Prefixes {
            cond,
            uncond,
            leases,
        } = prefixes;
        let started = DenoiseStarted {
            transfer_ms: (clock::millis_since(start) - waited_ms).max(0.0),
            transfer_bytes: bytes,
            transport,
        };
        send(events, Event::Started(started)).await?;
        let ranks = Arc::clone(&loaded.ranks);
        let order = order.clone();
        let options = JobOptions {
            resume: order.resume.clone(),
            cache: loaded.cache.clone(),
            ..JobOptions::default()
        };
        self.prepare
            .run(move || {
                let spec = JobSpec {
                    height: order.height,
                    width: order.width,
                    steps: order.steps,
                    guidance: order.guidance,
                    seed: order.seed,
                    cond: Some(cond),
                    uncond,
                };
                let job = RankJob::new(&ranks, &spec, &options, order.news)?;
                Ok::<_, StageError>((job, leases))
            })
            .await?
    }
}

impl Loaded {
    /// Refuses previews that this model cannot make.
    fn check_previews(&self, order: &Order) -> Result<(), StageError> {
        if order.news.previews == 0 || order.news.vae || self.preview.is_some() {
            return Ok(());
        }
        let message = format!(
            "preview_kind: the model has no {}; `omni fit-preview` makes one",
            model::preview::FILE
        );
        let mut failure = Failure::new(Code::FailedPrecondition, message);
        failure.field = Some("preview_kind".to_owned());
        Err(StageError::Other(failure))
    }
}

/// The memory of a worker whose model is loaded, and warm from here on.
fn ledger(
    ranks: &Arc<Ranks>,
    cache: &StepCache,
    (memory, places): (Option<u64>, usize),
) -> Result<Ledger, StageError> {
    #[cfg(feature = "cuda")]
    if ranks.gpus().is_some() {
        warm_up(ranks)?;
        return Ok(Ledger::on_gpus(ranks, places));
    }
    let costs = Costs::measure(ranks, cache)?;
    warm_up(ranks)?;
    Ledger::new(costs, memory, places)
}

/// Requests in memory: those of a full step, and one that is fetched ahead.
fn places(config: &DitWorkerConfig) -> usize {
    config.limits.max_rows + FETCHED_AHEAD
}

/// What work made, and the milliseconds that it took.
fn timed<T>(work: impl FnOnce() -> T) -> (T, f64) {
    let start = clock::now();
    let made = work();
    (made, clock::millis_since(start))
}

/// The work's result, unless the worker stops first.
async fn or_stop<T>(
    stop: &CancellationToken,
    work: impl Future<Output = Result<T, StageError>>,
) -> Result<T, StageError> {
    tokio::select! {
        done = work => done,
        () = stop.cancelled() => Err(StageError::Draining),
    }
}

async fn step(
    step: usize,
    order: &Order,
    state: Option<&JobState>,
    events: &Events,
) -> Result<(), StageError> {
    let step = DenoiseStep {
        step: narrow(step),
        steps: narrow(order.steps),
        checkpoint: state.and_then(checkpoint::write),
    };
    send(events, Event::Step(step)).await
}

/// Tells the router where another worker may go on.
async fn hand_over(state: &JobState, order: &Order, events: &Events) -> Result<(), StageError> {
    tracing::info!(
        request_id = order.request_id,
        step = state.step,
        "job handed over"
    );
    step(state.step, order, Some(state), events).await
}

async fn queued(events: &Events, ahead: usize) -> Result<(), StageError> {
    let ahead = narrow(ahead);
    send(events, Event::Queued(DenoiseQueued { ahead })).await
}

async fn send(events: &Events, event: Event) -> Result<(), StageError> {
    let response = DenoiseResponse { event: Some(event) };
    events
        .send(Ok(response))
        .await
        .map_err(|_| StageError::Cancelled)
}

fn narrow(value: usize) -> u32 {
    u32::try_from(value).unwrap_or(u32::MAX)
}

/// Rounded up: what is not nothing is told.
fn whole(value: f64) -> u32 {
    value.ceil().clamp(0.0, f64::from(u32::MAX)) as u32
}

#[tonic::async_trait]
impl Stage for DitWorker {
    const ROLE: Role = Role::DitWorker;
    const SERVICE: &'static str = names::DIT_WORKER;

    fn mount(self: Arc<Self>, routes: &mut RoutesBuilder) {
        routes.add_service(
            DitWorkerServiceServer::new(Mounted(self))
                .max_decoding_message_size(base::limits::MAX_REQUEST_BYTES),
        );
    }

    async fn load(&self) -> Result<v1::ModelInfo, StageError> {
        let (dir, plan) = (self.config.model.clone(), self.config.plan);
        let (balance, residency) = (self.config.balance, self.config.residency);
        let tiles = self.config.tiles;
        let cache = self.config.step_cache.clone();
        let memory = (self.config.memory, places(&self.config));
        let device = self.config.on_gpus()?;
        let (ranks, preview, cache, ledger, costs) = self
            .prepare
            .run(move || {
                let parts = Parts {
                    vae_decoder: false,
                    ..Parts::DENOISE
                };
                let load = RankLoad {
                    parts,
                    alone: Parts::DENOISE,
                    plan,
                    balance,
                    residency,
                    tiles,
                };
                let gpus = device.map(|gpus| (gpus, Parts::NONE));
                let ranks = Ranks::open_on(gpus, (&dir, load))?;
                let cache = cache.of_model(&dir)?;
                let ranks = Arc::new(ranks);
                let ledger = ledger(&ranks, &cache, memory)?;
                let pace = pace::measure(&ranks)?;
                let channels = ranks.first().config().vae.latent_channels;
                let preview = LinearPreview::load(&dir, channels)?.map(Arc::new);
                Ok::<_, StageError>((ranks, preview, cache, ledger, pace))
            })
            .await??;
        let denoiser = ModelDenoiser {
            ranks: Arc::clone(&ranks),
            metrics: self.metrics.clone(),
        };
        let forming = Forming {
            limits: self.config.limits,
            costs: self.config.by_cost.then_some(costs),
        };
        let steps = StepLoop::start(denoiser, forming, self.bound)?;
        let info = info::ranks_to_proto(&ranks);
        // Loaded once; a second load would change nothing.
        let _ = self.loaded.set(Loaded {
            ranks,
            steps,
            preview,
            cache,
            ledger,
            costs,
        });
        Ok(info)
    }

    fn member_id(&self) -> &MemberId {
        &self.member_id
    }

    fn gate(&self) -> &Gate {
        &self.gate
    }

    fn step_costs(&self) -> Option<v1::StepCosts> {
        let loaded = self.loaded.get()?;
        Some(pace::told(&loaded.costs))
    }

    fn report(&self) -> Load {
        let inside = narrow(self.inside());
        let loaded = self.loaded.get();
        let running = loaded.map_or(0, |loaded| narrow(loaded.steps.live()));
        let outlook = loaded.map(|loaded| loaded.steps.outlook());
        let outlook = outlook.unwrap_or_default();
        let load = Load {
            running: running.min(inside),
            queued: inside.saturating_sub(running),
            // Under guidance a job takes two rows.
            capacity: narrow(self.config.limits.max_rows.div_ceil(2)),
            backlog_ms: whole(outlook.backlog_s * 1e3),
            step_ratio: whole(outlook.ratio * 1e3),
            free_bytes: loaded.map_or(0, |loaded| loaded.ledger.free()),
        };
        let reserved = loaded.map_or(0, |loaded| loaded.ledger.reserved());
        #[cfg(feature = "cuda")]
        if let Some(gpus) = self.loaded.get().and_then(|loaded| loaded.ranks.gpus()) {
            gpus.report(&self.metrics, "dit-worker");
        }
        self.metrics
            .set(&metric::STAGE_RESERVED, &["dit-worker"], reserved as f64);
        self.metrics
            .set(&metric::STAGE_QUEUE, &["dit-worker"], load.queued.into());
        self.metrics
            .set(&metric::STAGE_RUNNING, &["dit-worker"], load.running.into());
        load
    }
}

/// The worker as tonic wants it.
#[derive(Debug, Clone)]
struct Mounted(Arc<DitWorker>);

#[tonic::async_trait]
impl DitWorkerService for Mounted {
    type DenoiseStream =
        Pin<Box<dyn Stream<Item = Result<DenoiseResponse, Status>> + Send + 'static>>;

    async fn denoise(
        &self,
        request: Request<DenoiseRequest>,
    ) -> Result<Response<Self::DenoiseStream>, Status> {
        let left = proto::deadline::timeout(request.metadata());
        let due = left.and_then(|left| clock::now().checked_add(left));
        let request = request.into_inner();
        let worker = Arc::clone(&self.0);
        worker
            .gate
            .enter(request.epoch, &request.weights_id)
            .map_err(|error| proto::status::status(&error))?;
        let (events, stream) = mpsc::channel(EVENT_QUEUE);
        let tasks = worker.gate.tasks().clone();
        let hop = telemetry::hop!("denoise", request_id = request.request_id);
        tasks.spawn(telemetry::trace::within(hop, async move {
            let request_id = request.request_id.clone();
            let stop = worker.gate.tasks().token();
            let ended = tokio::select! {
                ended = Box::pin(worker.denoise((request, due), &events, stop)) => ended,
                // The router has gone away: the job leaves at the next step boundary.
                () = events.closed() => Err(StageError::Cancelled),
            };
            let Err(error) = ended else {
                tracing::debug!(request_id, "denoise done");
                return;
            };
            log(&request_id, &error);
            // Nobody may listen any more: nothing to tell.
            let _ = events.send(Err(proto::status::status(&error))).await;
        }));
        Ok(Response::new(Box::pin(ReceiverStream::new(stream))))
    }
}

fn log(request_id: &str, error: &StageError) {
    let failure = Failure::of(error);
    if error.code().http_status() >= 500 {
        tracing::error!(request_id, code = %failure.code, error = %failure, "denoise failed");
    } else {
        tracing::info!(request_id, code = %failure.code, error = %failure, "denoise ended early");
    }
}
