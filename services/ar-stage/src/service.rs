//! `ArStageService`: the door, the stream and the life of one request.
use std::{
    pin::Pin,
    sync::{Arc, OnceLock},
};

use base::{Failure, Fault as _, MemberId, limits::EVENT_QUEUE};
use kv_transfer::{KvClient, Lease};
use model::{BalanceOptions, Parts};
use proto::{
    names,
    v1::{
        self, PrefillRequest, PrefillResponse,
        ar_stage_service_server::{ArStageService, ArStageServiceServer},
    },
};
use registry::{Load, Role};
use stage::{Engine, Gate, RankLoad, Ranks, Stage, StageError, info};
use telemetry::Metrics;
use tokio::sync::mpsc;
use tokio_stream::Stream;
use tonic::{Request, Response, Status, service::RoutesBuilder};

use crate::{
    ArStageConfig,
    answers::{Answer, Answers},
    work,
};

/// The stage and its one model.
#[derive(Debug)]
pub struct ArStage {
    member_id: MemberId,
    gate: Gate,
    engine: Engine,
    ranks: OnceLock<Arc<Ranks>>,
    client: KvClient,
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
            engine: Engine::start("prefill", config.max_queue)?,
            ranks: OnceLock::new(),
            client,
            config,
            metrics,
        })
    }

    /// One request from its tokens to its handles.
    async fn prefill(&self, request: PrefillRequest) -> Result<Answer<Lease>, StageError> {
        let ranks = self.ranks.get().ok_or(StageError::NotReady {
            why: "the model is still loading",
        })?;
        let order = work::Order::new(&request, ranks.info())?;
        let ranks = Arc::clone(ranks);
        let prefilled = self
            .engine
            .run(move || work::prefill(&ranks, &order))
            .await??;
        self.metrics.observe(
            &telemetry::names::STAGE_STEP,
            &["ar-stage", "prefill"],
            prefilled.elapsed,
        );
        self.metrics.add(
            &telemetry::names::STAGE_TOKENS,
            &["ar-stage"],
            prefilled.tokens() as u64,
        );
        work::publish(
            &self.client,
            &self.config.kv_transfer,
            &request.request_id,
            prefilled,
        )
        .await
    }
}

#[tonic::async_trait]
impl Stage for ArStage {
    const ROLE: Role = Role::ArStage;
    const SERVICE: &'static str = names::AR_STAGE;

    fn mount(self: Arc<Self>, routes: &mut RoutesBuilder) {
        routes.add_service(
            ArStageServiceServer::new(Mounted(self))
                .max_decoding_message_size(base::limits::MAX_REQUEST_BYTES),
        );
    }

    async fn load(&self) -> Result<v1::ModelInfo, StageError> {
        let (dir, plan) = (self.config.model.clone(), self.config.plan);
        let ranks = self
            .engine
            .run(move || {
                let load = RankLoad {
                    parts: Parts::PREFIX,
                    alone: Parts::PREFIX,
                    plan,
                    balance: BalanceOptions::default(),
                };
                let ranks = Ranks::open(&dir, load)?;
                work::warm_up(&ranks)?;
                Ok::<_, StageError>(Arc::new(ranks))
            })
            .await??;
        let info = info::model_to_proto(ranks.info());
        // Loaded once; a second load would change nothing.
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
        let pending = u32::try_from(self.engine.pending()).unwrap_or(u32::MAX);
        let load = Load {
            running: pending.min(1),
            queued: pending.saturating_sub(1),
            capacity: 1,
        };
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
        stage.gate.tasks().spawn(async move {
            let request_id = request.request_id.clone();
            let answer = tokio::select! {
                answer = task.prefill(request) => answer,
                // The router has gone away: stop at the next phase and free what was taken.
                () = events.closed() => Err(StageError::Cancelled),
                () = stop.cancelled() => Err(StageError::Draining),
            };
            if let Err(error) = &answer {
                log(&request_id, error);
            }
            let answer = answer.map_err(|error| proto::status::status(&error));
            // Nobody listens any more: nothing to tell, and the leases are released.
            let _ = events.send(answer).await;
        });
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
