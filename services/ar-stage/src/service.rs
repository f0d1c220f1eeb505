//! `ArStageService`: the door, the stream and the life of one request.
use std::{
    pin::Pin,
    sync::{Arc, OnceLock},
    time::{Duration, Instant},
};

use base::{Failure, Fault as _, MemberId, clock, limits::EVENT_QUEUE};
use kv_transfer::{KvClient, Lease};
use model::{BalanceOptions, Parts, layout::MAX_COND_IMAGES};
use proto::{
    names,
    v1::{
        self, PrefillRequest, PrefillResponse, PrefillText,
        ar_stage_service_server::{ArStageService, ArStageServiceServer},
        prefill_response,
        prefix_row::Kind,
    },
};
use registry::{Load, Role};
use stage::{Engine, Gate, RankLoad, Ranks, Stage, StageError, info};
use telemetry::Metrics;
use tokio::sync::{Semaphore, mpsc, oneshot};
use tokio_stream::Stream;
use tonic::{Request, Response, Status, service::RoutesBuilder};

use crate::{
    ArStageConfig,
    answers::{Answer, Answers},
    batch::{MAX_RUNNING, Ticket},
    decoder::Decoder,
    order::Order,
    pictures::{self, Pictures},
    publish::{Pace, Published, Publisher},
    run::{Begun, Foreseen, Outcome, foreseen},
    work,
};

/// Requests whose pictures are decoded and encoded at once; it bounds what they hold in memory.
const MAX_LOOKING: usize = 2;

/// The stage and its one model.
#[derive(Debug)]
pub struct ArStage {
    member_id: MemberId,
    gate: Gate,
    engine: Engine,
    ranks: OnceLock<Arc<Ranks>>,
    decoder: OnceLock<Decoder>,
    /// Requests whose pictures are being decoded and encoded.
    looking: Semaphore,
    client: KvClient,
    pace: Pace,
    config: ArStageConfig,
    metrics: Metrics,
}

impl ArStage {
    pub(crate) fn new(
        config: ArStageConfig,
        client: KvClient,
        metrics: Metrics,
    ) -> Result<Self, StageError> {
        Ok(Self {
            member_id: MemberId::generate(),
            gate: Gate::new(),
            engine: Engine::start("load", 1)?,
            ranks: OnceLock::new(),
            decoder: OnceLock::new(),
            looking: Semaphore::new(MAX_LOOKING),
            client,
            pace: Pace::default(),
            config,
            metrics,
        })
    }

    /// One request from its words and pictures to its handles; what it writes goes to `events` meanwhile.
    async fn prefill(
        &self,
        request: PrefillRequest,
        events: &Events,
    ) -> Result<Answer<Lease>, StageError> {
        let not_ready = || StageError::NotReady {
            why: "the model is still loading",
        };
        let ranks = self.ranks.get().ok_or_else(not_ready)?;
        let decoder = self.decoder.get().ok_or_else(not_ready)?;
        let order = Order::new(&request, ranks.first())?;
        let PrefillRequest {
            request_id,
            images,
            seed,
            align_image_size,
            transfer_timeout_ms,
            tenant,
            ..
        } = request;
        let pictures = self
            .look_at(ranks, images, (seed, align_image_size))
            .await?;
        let timeout = Some(Duration::from_millis(transfer_timeout_ms.into()));
        let publisher = Publisher {
            client: self.client.within(timeout.filter(|most| !most.is_zero())),
            endpoint: &self.config.kv_transfer,
            request_id: &request_id,
            tenant: &tenant,
            shows: !pictures.grids.is_empty(),
            pace: &self.pace,
        };
        let (mut order, started) = (order, clock::now());
        let mut known = Vec::new();
        let ahead = self.foresee((ranks, decoder), &order, &pictures).await?;
        if !ahead.rows.is_empty() {
            for (kind, identity) in ahead.rows {
                let found = publisher.find(kind, identity).await;
                known.extend(found.map_err(|error| StageError::of(&error))?);
            }
            let has = |kind| known.iter().any(|row| row.kind == kind);
            if has(Kind::Cond) && (has(Kind::Uncond) || !order.negative_row) {
                return Ok(work::done(
                    ahead.written,
                    known,
                    (0.0, clock::millis_since(started)),
                ));
            }
            order.negative_row &= !has(Kind::Uncond);
        }
        let way = (ranks, decoder.pools(), self.gate.tasks());
        let missing = match ahead.beginning {
            Some(beginning) if beginning.bring(way, &publisher).await => Some(beginning),
            _ => None,
        };
        let ticket = decoder.submit(order, pictures)?;
        let answer = self.compute(ticket, (publisher, known), events).await?;
        if let Some(beginning) = missing {
            let tasks = self.gate.tasks();
            let way = (Arc::clone(ranks), decoder.pools().clone(), tasks.clone());
            let to = (self.client.clone(), self.config.kv_transfer.clone());
            let cost = self.pace.cost_us(beginning.tokens());
            tasks.spawn(beginning.leave(way, to, cost));
        }
        Ok(answer)
    }

    /// What can be looked for before anything is computed.
    async fn foresee(
        &self,
        (ranks, decoder): (&Arc<Ranks>, &Decoder),
        order: &Order,
        pictures: &Pictures,
    ) -> Result<Foreseen, StageError> {
        let (ranks, order, pictures) = (Arc::clone(ranks), order.clone(), pictures.clone());
        let pools = decoder.pools().clone();
        let look = move || {
            stage::engine::guard("layout", || foreseen((&ranks, &pools), &order, &pictures))
        };
        let looked = self.gate.tasks().spawn_blocking(look).await;
        looked.map_err(|_| StageError::EngineStopped { engine: "layout" })??
    }

    /// Follows one request through the thread that computes; its rows go into the pool meanwhile.
    async fn compute(
        &self,
        ticket: Ticket,
        (publisher, known): (Publisher<'_>, Vec<Published>),
        events: &Events,
    ) -> Result<Answer<Lease>, StageError> {
        let Ticket {
            mut deltas,
            begun,
            answer,
        } = ticket;
        let (computed, rest) = oneshot::channel();
        let publish = async {
            // None: the request has no picture.
            let Ok(Begun { rows, written }) = begun.await else {
                return Ok(Vec::new());
            };
            let ship = async {
                let placed = publisher.place(rows, known).await;
                let placed = placed.map_err(|error| StageError::of(&error))?;
                if !placed.is_empty() {
                    let told = events.send(Ok(work::offered(written, &placed))).await;
                    told.map_err(|_| StageError::Cancelled)?;
                }
                publisher.write(placed, rest).await
            };
            telemetry::trace::within(telemetry::hop!("ship"), ship).await
        };
        let follow = async {
            let mut answer = answer;
            let ended = loop {
                tokio::select! {
                    biased;
                    Some(text) = deltas.recv() => tell(events, text).await?,
                    ended = &mut answer => break ended,
                }
            };
            let ended = ended.map_err(|_| StageError::EngineStopped { engine: "prefill" })??;
            while let Ok(text) = deltas.try_recv() {
                tell(events, text).await?;
            }
            if !ended.untold.is_empty() {
                tell(events, ended.untold).await?;
            }
            self.count(&ended.outcome);
            let Outcome {
                rows,
                written,
                elapsed,
            } = ended.outcome;
            // Whoever publishes has failed, and says so itself.
            let _ = computed.send(rows);
            Ok((written, elapsed, clock::now()))
        };
        let ((written, elapsed, end), published) =
            Box::pin(async { tokio::try_join!(follow, publish) }).await?;
        self.moved(&published, end);
        let times = (elapsed.as_secs_f64() * 1e3, clock::millis_since(end));
        Ok(work::done(written, published, times))
    }

    /// Counts what was published, in the time since the last layer was computed.
    fn moved(&self, published: &[Published], since: Instant) {
        let took = clock::now().saturating_duration_since(since);
        for row in published.iter().filter(|row| !row.found) {
            let way = [row.transport.as_str(), "out"];
            let metrics = &self.metrics;
            metrics.add(&telemetry::names::TRANSFER_BYTES, &way, row.handle.bytes);
            metrics.observe(&telemetry::names::TRANSFER_DURATION, &way, took);
        }
    }

    fn count(&self, outcome: &Outcome) {
        let metrics = &self.metrics;
        let stage = ["ar-stage", "prefill"];
        metrics.observe(&telemetry::names::STAGE_STEP, &stage, outcome.elapsed);
        let rows = outcome.rows.iter().map(|(_, _, prefix)| prefix.tokens());
        let tokens = rows.sum::<usize>() + outcome.written.new_tokens;
        self.pace.learn(tokens, outcome.elapsed);
        metrics.add(
            &telemetry::names::STAGE_TOKENS,
            &["ar-stage"],
            tokens as u64,
        );
    }

    /// Decodes and encodes the pictures of a request, beside the thread that computes.
    async fn look_at(
        &self,
        ranks: &Arc<Ranks>,
        files: Vec<Vec<u8>>,
        (seed, align): (u64, bool),
    ) -> Result<Pictures, StageError> {
        if files.is_empty() {
            return Ok(Pictures::default());
        }
        if files.len() > MAX_COND_IMAGES {
            let reason = format!(
                "images must be at most {MAX_COND_IMAGES}, got {}",
                files.len()
            );
            return Err(StageError::Other(Failure::invalid("images", reason)));
        }
        let ranks = Arc::clone(ranks);
        let stopped = StageError::EngineStopped { engine: "picture" };
        let Ok(_place) = self.looking.acquire().await else {
            return Err(stopped);
        };
        let start = clock::now();
        let work = move || {
            stage::engine::guard("picture", || pictures::encode(&ranks, &files, seed, align))
        };
        let looked = self.gate.tasks().spawn_blocking(work).await;
        let pictures = looked.map_err(|_| stopped)???;
        self.metrics.observe(
            &telemetry::names::STAGE_STEP,
            &["ar-stage", "encode"],
            clock::now().saturating_duration_since(start),
        );
        Ok(pictures)
    }
}

/// What a request's reader is sent.
type Events = mpsc::Sender<Result<Answer<Lease>, Status>>;

async fn tell(events: &Events, text: String) -> Result<(), StageError> {
    let event = prefill_response::Event::Text(PrefillText { text });
    let answer = Answer {
        response: PrefillResponse { event: Some(event) },
        leases: Vec::new(),
    };
    let told = events.send(Ok(answer)).await;
    told.map_err(|_| StageError::Cancelled)
}

#[tonic::async_trait]
impl Stage for ArStage {
    const ROLE: Role = Role::ArStage;
    const SERVICE: &'static str = names::AR_STAGE;

    fn mount(self: Arc<Self>, routes: &mut RoutesBuilder) {
        routes.add_service(
            ArStageServiceServer::new(Mounted(self))
                .max_decoding_message_size(base::limits::MAX_EDIT_BYTES),
        );
    }

    async fn load(&self) -> Result<v1::ModelInfo, StageError> {
        let (dir, plan) = (self.config.model.clone(), self.config.plan);
        let device = self.config.on_gpus()?;
        let ranks = self
            .engine
            .run(move || {
                let load = RankLoad {
                    parts: Parts::PREFIX,
                    alone: Parts::PREFIX_WITH_IMAGES,
                    plan,
                    balance: BalanceOptions::default(),
                    residency: model::Residency::All,
                    tiles: model::vae::Tiles::Whole,
                };
                let gpus = device.map(|gpus| (gpus, Parts::NONE));
                let ranks = Arc::new(Ranks::open_on(gpus, (&dir, load))?);
                work::warm_up(&ranks)?;
                Ok::<_, StageError>(ranks)
            })
            .await??;
        let info = info::ranks_to_proto(&ranks);
        let bound = self.config.max_queue;
        let decoder = Decoder::start(Arc::clone(&ranks), bound, self.metrics.clone())?;
        // Loaded once; a second load would change nothing.
        let _ = self.decoder.set(decoder);
        let _ = self.ranks.set(ranks);
        Ok(info)
    }

    fn member_id(&self) -> &MemberId {
        &self.member_id
    }

    fn gate(&self) -> &Gate {
        &self.gate
    }

    fn report(&self) -> Load {
        let (running, queued) = self.decoder.get().map_or((0, 0), Decoder::load);
        if let Some(decoder) = self.decoder.get() {
            decoder.pools().report();
        }
        let narrow = |count| u32::try_from(count).unwrap_or(u32::MAX);
        let load = Load {
            running: narrow(running),
            queued: narrow(queued),
            capacity: narrow(MAX_RUNNING),
            ..Load::default()
        };
        #[cfg(feature = "cuda")]
        if let Some(gpus) = self.ranks.get().and_then(|ranks| ranks.gpus()) {
            gpus.report(&self.metrics, "ar-stage");
        }
        self.metrics.set(
            &telemetry::names::STAGE_QUEUE,
            &["ar-stage"],
            load.queued.into(),
        );
        self.metrics.set(
            &telemetry::names::STAGE_RUNNING,
            &["ar-stage"],
            load.running.into(),
        );
        load
    }
}

/// The stage as tonic wants it.
#[derive(Debug, Clone)]
struct Mounted(Arc<ArStage>);

#[tonic::async_trait]
impl ArStageService for Mounted {
    type PrefillStream =
        Pin<Box<dyn Stream<Item = Result<PrefillResponse, Status>> + Send + 'static>>;

    async fn prefill(
        &self,
        request: Request<PrefillRequest>,
    ) -> Result<Response<Self::PrefillStream>, Status> {
        let request = request.into_inner();
        let stage = &self.0;
        stage
            .gate
            .enter(request.epoch, &request.weights_id)
            .map_err(|error| proto::status::status(&error))?;
        let (events, stream) = mpsc::channel(EVENT_QUEUE);
        let task = Arc::clone(stage);
        let stop = stage.gate.tasks().token().clone();
        let hop = telemetry::hop!("prefill", request_id = request.request_id);
        let work = telemetry::trace::within(hop, async move {
            let request_id = request.request_id.clone();
            let answer = tokio::select! {
                answer = task.prefill(request, &events) => answer,
                // The router has gone away: stop at the next phase and free what was taken.
                () = events.closed() => Err(StageError::Cancelled),
                () = stop.cancelled() => Err(StageError::Draining),
            };
            match &answer {
                Ok(_) => tracing::debug!(request_id, "prefill done"),
                Err(error) => log(&request_id, error),
            }
            let answer = answer.map_err(|error| proto::status::status(&error));
            // Nobody listens any more: nothing to tell, and the leases are released.
            let _ = events.send(answer).await;
        });
        stage.gate.tasks().spawn(work);
        Ok(Response::new(Box::pin(Answers::new(stream))))
    }
}

fn log(request_id: &str, error: &StageError) {
    let failure = Failure::of(error);
    if error.code().http_status() >= 500 {
        tracing::error!(request_id, code = %failure.code, error = %failure, "prefill failed");
    } else {
        tracing::info!(request_id, code = %failure.code, error = %failure, "prefill refused");
    }
}
