//! Stages that follow a script. Each lives in a runtime of its own, so that ending the runtime is
//! what SIGKILL is to a process: its sockets close, nothing is said.
use std::{
    collections::VecDeque,
    pin::Pin,
    sync::{Arc, Mutex},
    time::Duration,
};

use base::{Code, Failure, task::Tracker};
use proto::{
    names,
    v1::{
        Bucket, DenoiseCheckpoint, DenoiseDone, DenoiseImage, DenoiseNoPrefix, DenoisePreview,
        DenoiseQueued, DenoiseRequest, DenoiseResponse, DenoiseStarted, DenoiseStep, ModelInfo,
        PrefillDone, PrefillRequest, PrefillResponse, PrefillText, PrefixHandle, PrefixRow,
        ar_stage_service_server::{ArStageService, ArStageServiceServer},
        denoise_response::Event as Denoised,
        dit_worker_service_server::{DitWorkerService, DitWorkerServiceServer},
        prefill_response::Event as Prefilled,
        prefix_row::Kind,
    },
};
use registry::{JoinOptions, Load, Member, MemberState, Membership, Role};
use tokio::{
    runtime::Runtime,
    sync::{Semaphore, mpsc, watch},
    task::AbortHandle,
};
use tokio_stream::{Stream, wrappers::ReceiverStream};
use tonic::{Request, Response, Status};

use super::{Cluster, pool::Pool};

/// What a stage does with one call.
#[derive(Debug, Clone)]
pub(crate) enum Act {
    /// Its work.
    Work,
    /// Refuses.
    Refuse(Failure),
    /// Takes the call and says nothing until told to go on.
    Hang,
    /// Ends its stream without a result.
    Silence,
    /// Builds the other row as well, asked or not.
    Twice,
    /// Cannot get its prefixes, which are gone for ever or not.
    NoPrefix(bool),
    /// Offers its prefixes, and works on once it has a step's permit.
    Offer,
    /// Offers its prefixes, and fails once it has a step's permit.
    OfferAndFail,
}

/// What the test holds of a stage.
#[derive(Debug, Clone)]
pub(crate) struct Script {
    /// One act a call; [`Act::Work`] when empty.
    pub(crate) acts: Arc<Mutex<VecDeque<Act>>>,
    /// Denoise steps that may be made.
    pub(crate) steps: Arc<Semaphore>,
    /// Calls so far.
    pub(crate) calls: Arc<watch::Sender<usize>>,
    /// Calls whose stream the other side dropped.
    pub(crate) dropped: Arc<watch::Sender<usize>>,
    /// The prefixes wait for a step's permit as well.
    pub(crate) waits: bool,
    /// Steps between the checkpoints it sends.
    pub(crate) every: u32,
    /// The last denoise request.
    pub(crate) asked: Arc<Mutex<Option<DenoiseRequest>>>,
    /// The time that it was given.
    pub(crate) given: Arc<Mutex<Option<Duration>>>,
    /// Prefixes of the last denoise request.
    pub(crate) handles: Arc<Mutex<Vec<PrefixHandle>>>,
    /// Where it publishes; set when it joins.
    pool: Option<Pool>,
    /// The last prefill request.
    pub(crate) seen: Arc<Mutex<Option<PrefillRequest>>>,
}

impl Script {
    pub(crate) fn new(acts: impl IntoIterator<Item = Act>) -> Self {
        Self {
            acts: Arc::new(Mutex::new(acts.into_iter().collect())),
            steps: Arc::new(Semaphore::new(1_000_000)),
            calls: Arc::new(watch::channel(0).0),
            dropped: Arc::new(watch::channel(0).0),
            waits: false,
            every: 2,
            asked: Arc::default(),
            given: Arc::default(),
            handles: Arc::default(),
            pool: None,
            seen: Arc::default(),
        }
    }

    /// Only so many steps, then it waits.
    pub(crate) fn paced(steps: usize) -> Self {
        Self {
            steps: Arc::new(Semaphore::new(steps)),
            ..Self::new([])
        }
    }

    /// Queues until a permit comes.
    pub(crate) fn waiting() -> Self {
        Self {
            waits: true,
            ..Self::paced(0)
        }
    }

    fn act(&self) -> Act {
        self.calls.send_modify(|calls| *calls += 1);
        self.acts.lock().unwrap().pop_front().unwrap_or(Act::Work)
    }

    pub(crate) fn calls(&self) -> usize {
        *self.calls.borrow()
    }

    /// Waits until the other side has dropped a stream.
    pub(crate) async fn dropped(&self) {
        let mut dropped = self.dropped.subscribe();
        super::bounded(dropped.wait_for(|count| *count > 0))
            .await
            .unwrap();
    }

    /// Waits until a call has come.
    pub(crate) async fn called(&self) {
        let mut calls = self.calls.subscribe();
        super::bounded(calls.wait_for(|count| *count > 0))
            .await
            .unwrap();
    }
}

pub(crate) fn model() -> ModelInfo {
    ModelInfo {
        name: "tiny".into(),
        weights_id: "weights".into(),
        buckets: vec![
            Bucket {
                ratio_index: 0,
                height: 64,
                width: 64,
            },
            Bucket {
                ratio_index: 1,
                height: 32,
                width: 128,
            },
        ],
        default_steps: 4,
        default_guidance: 5.0,
        default_template: "instruct".into(),
        pixels_per_token: 16,
        max_sequence_tokens: 1_024,
        ..ModelInfo::default()
    }
}

/// A registered stage.
pub(crate) struct Stage {
    /// `None` once killed.
    runtime: Option<Runtime>,
    membership: AbortHandle,
}

impl Stage {
    /// Ends it without a word. Its lease stays.
    pub(crate) fn kill(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }

    /// Stops renewing its lease and goes on with everything else.
    pub(crate) fn lapse(&self) {
        self.membership.abort();
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Starts a stage and joins it to the cluster. Ids order the members.
pub(crate) async fn join(cluster: &Cluster, role: Role, id: &str, script: &Script) -> Stage {
    join_model(cluster, role, id, script, model()).await
}

pub(crate) async fn join_model(
    cluster: &Cluster,
    role: Role,
    id: &str,
    script: &Script,
    model: ModelInfo,
) -> Stage {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .unwrap();
    let (registry, mut script) = (cluster.registry_address(), script.clone());
    script.pool = Some(cluster.pool.clone());
    let id = id.to_owned();
    let joined = runtime.spawn(async move {
        let listener = proto::server::bind("127.0.0.1:0", "listen").await.unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        let name = if role == Role::ArStage {
            names::AR_STAGE
        } else {
            names::DIT_WORKER
        };
        let (mut routes, _health) = proto::server::routes(&[name]).await.unwrap();
        match role {
            Role::ArStage => routes.add_service(ArStageServiceServer::new(script)),
            _ => routes.add_service(DitWorkerServiceServer::new(script)),
        };
        let member = Member {
            id,
            role: role.into(),
            endpoint,
            state: MemberState::Ready.into(),
            model: Some(model),
            load: Some(Load {
                running: 0,
                queued: 0,
                capacity: 4,
                ..Load::default()
            }),
            ..Member::default()
        };
        let registry = Arc::new(registry::Remote::new(&registry).unwrap());
        let joined = Membership::join(registry, member, JoinOptions::default())
            .await
            .unwrap();
        (listener, routes, joined)
    });
    let (listener, routes, joined) = joined.await.unwrap();
    let membership = runtime.spawn(async move {
        let _joined = joined;
        std::future::pending::<()>().await;
    });
    runtime.spawn(proto::server::serve(
        listener,
        routes,
        std::future::pending(),
    ));
    Stage {
        runtime: Some(runtime),
        membership: membership.abort_handle(),
    }
}

impl Cluster {
    fn registry_address(&self) -> String {
        self.address.clone()
    }
}

type Answers<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

fn answer<T: Send + 'static>(answers: mpsc::Receiver<Result<T, Status>>) -> Response<Answers<T>> {
    Response::new(Box::pin(ReceiverStream::new(answers)))
}

#[tonic::async_trait]
impl ArStageService for Script {
    type PrefillStream = Answers<PrefillResponse>;

    async fn prefill(
        &self,
        request: Request<PrefillRequest>,
    ) -> Result<Response<Self::PrefillStream>, Status> {
        let request = request.into_inner();
        *self.seen.lock().unwrap() = Some(request.clone());
        let (tx, rx) = mpsc::channel(4);
        let act = self.act();
        match act {
            Act::Refuse(failure) => return Err(proto::status::status(&failure)),
            Act::Silence => return Ok(answer(rx)),
            Act::Hang => {
                let script = self.clone();
                Tracker::new().spawn(async move {
                    tx.closed().await;
                    script.dropped.send_modify(|count| *count += 1);
                });
                return Ok(answer(rx));
            }
            Act::Work | Act::Twice | Act::NoPrefix(_) | Act::Offer | Act::OfferAndFail => {}
        }
        let pool = self.pool.as_ref().unwrap();
        let row = |kind: Kind| PrefixRow {
            kind: kind.into(),
            prefix: Some(pool.publish()),
        };
        let words = request.task() == proto::v1::PrefillTask::Text;
        if request.task() != proto::v1::PrefillTask::Unspecified {
            for text in ["a ", "text"] {
                let text = text.to_owned();
                let event = Some(Prefilled::Text(PrefillText { text }));
                tx.send(Ok(PrefillResponse { event })).await.unwrap();
            }
        }
        let mut rows = Vec::new();
        rows.extend((!words).then(|| row(Kind::Cond)));
        let both = request.negative_row || matches!(act, Act::Twice);
        rows.extend(both.then(|| row(Kind::Uncond)));
        let done = PrefillDone {
            rows,
            prefill_ms: 1.0,
            publish_ms: 2.0,
            text: "a text".to_owned(),
            new_tokens: 2,
            cut: true,
            // Asked to find a size, it finds the wide one.
            height: 32,
            width: 128,
            ..PrefillDone::default()
        };
        let offers = matches!(act, Act::Offer | Act::OfferAndFail);
        let script = self.clone();
        Tracker::new().spawn(async move {
            if offers {
                let early = PrefillDone {
                    prefill_ms: 0.0,
                    publish_ms: 0.0,
                    ..done.clone()
                };
                let event = Some(Prefilled::Offered(early));
                let _ = tx.send(Ok(PrefillResponse { event })).await;
                script.steps.acquire().await.unwrap().forget();
            }
            let told = if matches!(act, Act::OfferAndFail) {
                let failure = Failure::new(Code::Unavailable, "leaving");
                Err(proto::status::status(&failure))
            } else {
                let event = Some(Prefilled::Done(done));
                Ok(PrefillResponse { event })
            };
            let _ = tx.send(told).await;
        });
        Ok(answer(rx))
    }
}

#[tonic::async_trait]
impl DitWorkerService for Script {
    type DenoiseStream = Answers<DenoiseResponse>;

    async fn denoise(
        &self,
        request: Request<DenoiseRequest>,
    ) -> Result<Response<Self::DenoiseStream>, Status> {
        *self.given.lock().unwrap() = proto::deadline::timeout(request.metadata());
        let request = request.into_inner();
        let handles = request.rows.iter().filter_map(|row| row.prefix.clone());
        *self.handles.lock().unwrap() = handles.collect();
        *self.asked.lock().unwrap() = Some(request.clone());
        let (tx, rx) = mpsc::channel(1);
        let act = self.act();
        match act {
            Act::Refuse(failure) => return Err(proto::status::status(&failure)),
            Act::Silence => return Ok(answer(rx)),
            Act::NoPrefix(gone) => {
                let event = Some(Denoised::NoPrefix(DenoiseNoPrefix { gone }));
                tx.send(Ok(DenoiseResponse { event })).await.unwrap();
                let code = if gone {
                    Code::DataLoss
                } else {
                    Code::Unavailable
                };
                let failure = Failure::new(code, "chunks did not come");
                Tracker::new().spawn(async move {
                    let _ = tx.send(Err(proto::status::status(&failure))).await;
                });
                return Ok(answer(rx));
            }
            Act::Hang | Act::Work | Act::Twice | Act::Offer | Act::OfferAndFail => {}
        }
        let script = self.clone();
        Tracker::new().spawn(async move {
            let work = async {
                if matches!(act, Act::Hang) {
                    std::future::pending::<()>().await;
                }
                script.work(&tx, &request).await;
            };
            tokio::select! {
                () = work => {}
                () = tx.closed() => script.dropped.send_modify(|count| *count += 1),
            }
        });
        Ok(answer(rx))
    }
}

impl Script {
    async fn work(
        &self,
        tx: &mpsc::Sender<Result<DenoiseResponse, Status>>,
        request: &DenoiseRequest,
    ) {
        let send = |event| async {
            let _ = tx.send(Ok(DenoiseResponse { event: Some(event) })).await;
        };
        send(Denoised::Queued(DenoiseQueued { ahead: 1 })).await;
        if self.waits {
            self.steps.acquire().await.unwrap().forget();
        }
        send(Denoised::Started(DenoiseStarted {
            transfer_ms: 3.0,
            transfer_bytes: 4_096,
            transport: "posix".into(),
        }))
        .await;
        let from = request.resume.as_ref().map_or(0, |from| from.step);
        for step in from + 1..=request.steps {
            self.steps.acquire().await.unwrap().forget();
            let due = step.is_multiple_of(self.every) && step < request.steps;
            let checkpoint = due.then(|| DenoiseCheckpoint {
                step,
                latents: vec![step as u8; 8],
                crc32c: 7,
            });
            send(Denoised::Step(DenoiseStep {
                step,
                steps: request.steps,
                checkpoint,
            }))
            .await;
            if step <= request.previews {
                let image = Some(DenoiseImage {
                    width: 16,
                    height: 16,
                    png: vec![step as u8],
                });
                let index = step - 1;
                send(Denoised::Preview(DenoisePreview { index, image })).await;
            }
        }
        let png = request.seed.to_le_bytes().to_vec();
        let (width, height) = (request.width, request.height);
        send(Denoised::Image(DenoiseImage { width, height, png })).await;
        send(Denoised::Done(DenoiseDone {
            denoise_ms: 5.0,
            decode_ms: 6.0,
        }))
        .await;
    }
}

/// An outage in a stage's own words.
pub(crate) fn away() -> Act {
    Act::Refuse(Failure::new(Code::Unavailable, "leaving"))
}
