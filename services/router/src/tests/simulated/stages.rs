//! Stages that compute with numbers instead of tensors: what comes out depends on the seed and the prefix, and on every
//! step having been made once and in order.
use std::{pin::Pin, time::Duration};

use proto::{
    names,
    v1::{
        DenoiseCheckpoint, DenoiseDone, DenoiseImage, DenoiseRequest, DenoiseResponse,
        DenoiseStarted, DenoiseStep, ListSlotsRequest, PrefillDone, PrefillRequest,
        PrefillResponse, PrefixRow,
        ar_stage_service_server::{ArStageService, ArStageServiceServer},
        denoise_response::Event as Denoised,
        dit_worker_service_server::{DitWorkerService, DitWorkerServiceServer},
        kv_transfer_service_client::KvTransferServiceClient,
        prefill_response::Event as Prefilled,
        prefix_row::Kind,
    },
};
use registry::Role;
use tokio::sync::mpsc;
use tokio_stream::{Stream, wrappers::ReceiverStream};
use tonic::{Request, Response, Status};

use super::{Judge, hosts};
use crate::tests::pool::Pool;

type Answers<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

/// A number from two, all bits of which matter.
pub(super) fn mixed(a: u64, b: u64) -> u64 {
    let x = (a ^ b.rotate_left(32)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (x ^ (x >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9) ^ (x >> 32)
}

/// What a prompt becomes.
pub(super) fn identity(prompt: &str) -> u64 {
    prompt.bytes().fold(7, |all, byte| mixed(all, byte.into()))
}

/// The picture that has to come out.
pub(super) fn picture(prompt: &str, seed: u64, steps: u32) -> Vec<u8> {
    let start = mixed(seed, identity(prompt));
    let end = (1..=steps).fold(start, |latents, step| mixed(latents, step.into()));
    end.to_le_bytes().to_vec()
}

#[derive(Debug)]
struct Ar {
    pool: Pool,
}

/// An AR stage, with the pool of its node.
pub(super) async fn ar(
    name: &'static str,
    number: usize,
    ttl: Duration,
    judge: Judge,
) -> turmoil::Result {
    judge.note(format!("{name} starts"));
    let (pool, service) = Pool::simulated(hosts::address(name), number);
    let served = [names::AR_STAGE, names::KV_TRANSFER];
    let (mut routes, _health) = proto::server::routes(&served).await?;
    routes.add_service(ArStageServiceServer::new(Ar { pool }));
    routes.add_service(service);
    let (_joined, served) =
        tokio::join!(hosts::join(name, Role::ArStage, ttl), hosts::serve(routes));
    served
}

#[tonic::async_trait]
impl ArStageService for Ar {
    type PrefillStream = Answers<PrefillResponse>;

    async fn prefill(
        &self,
        request: Request<PrefillRequest>,
    ) -> Result<Response<Self::PrefillStream>, Status> {
        let request = request.into_inner();
        tokio::time::sleep(Duration::from_millis(60)).await;
        let row = |kind: Kind| {
            let mut prefix = self.pool.publish();
            prefix.identity = identity(&request.prompt).to_le_bytes().to_vec();
            PrefixRow {
                kind: kind.into(),
                prefix: Some(prefix),
            }
        };
        let mut rows = vec![row(Kind::Cond)];
        rows.extend(request.negative_row.then(|| row(Kind::Uncond)));
        let done = PrefillDone {
            rows,
            height: request.height,
            width: request.width,
            ..PrefillDone::default()
        };
        let event = Some(Prefilled::Done(done));
        let answers = tokio_stream::iter([Ok(PrefillResponse { event })]);
        Ok(Response::new(Box::pin(answers)))
    }
}

#[derive(Debug)]
struct Dit {
    pace: Duration,
    judge: Judge,
}

/// A worker that takes `pace` for a step.
pub(super) async fn dit(
    name: &'static str,
    (ttl, pace): (Duration, Duration),
    judge: Judge,
) -> turmoil::Result {
    judge.note(format!("{name} starts"));
    let (mut routes, _health) = proto::server::routes(&[names::DIT_WORKER]).await?;
    routes.add_service(DitWorkerServiceServer::new(Dit { pace, judge }));
    let (_joined, served) = tokio::join!(
        hosts::join(name, Role::DitWorker, ttl),
        hosts::serve(routes)
    );
    served
}

#[tonic::async_trait]
impl DitWorkerService for Dit {
    type DenoiseStream = Answers<DenoiseResponse>;

    async fn denoise(
        &self,
        request: Request<DenoiseRequest>,
    ) -> Result<Response<Self::DenoiseStream>, Status> {
        let request = request.into_inner();
        let (tx, rx) = mpsc::channel(8);
        let (pace, judge) = (self.pace, self.judge.clone());
        base::task::Tracker::new().spawn(async move {
            tokio::select! {
                ended = work(&tx, &request, pace, &judge) => if let Err(status) = ended {
                    let _ = tx.send(Err(status)).await;
                },
                () = tx.closed() => {}
            }
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(rx))))
    }
}

/// The worker has to reach the pool that holds the prefix.
async fn fetch(request: &DenoiseRequest) -> Result<u64, Status> {
    let first = request.rows.first().and_then(|row| row.prefix.as_ref());
    let prefix = first.ok_or_else(|| Status::invalid_argument("no prefix"))?;
    let channel = proto::channel::lazy(&prefix.endpoint);
    let channel = channel.map_err(|failure| proto::status::status(&failure))?;
    let mut client = KvTransferServiceClient::new(channel);
    let asked = client.list(ListSlotsRequest::default());
    let answer = tokio::time::timeout(Duration::from_secs(3), asked).await;
    match answer {
        // It is there, and keeps no such list.
        Ok(Err(status)) if status.code() == tonic::Code::Unimplemented => {}
        _ => return Err(Status::unavailable("the pool of the prefix is away")),
    }
    let identity = prefix.identity.first_chunk().copied();
    Ok(u64::from_le_bytes(identity.unwrap_or_default()))
}

async fn work(
    tx: &mpsc::Sender<Result<DenoiseResponse, Status>>,
    request: &DenoiseRequest,
    pace: Duration,
    judge: &Judge,
) -> Result<(), Status> {
    let send = |event| async {
        let _ = tx.send(Ok(DenoiseResponse { event: Some(event) })).await;
    };
    let identity = fetch(request).await?;
    send(Denoised::Started(DenoiseStarted {
        transport: "simulated".to_owned(),
        ..DenoiseStarted::default()
    }))
    .await;
    let (mut latents, mut step) = (mixed(request.seed, identity), 0);
    if let Some(from) = &request.resume {
        let left = from.latents.first_chunk().copied();
        (latents, step) = (u64::from_le_bytes(left.unwrap_or_default()), from.step);
        judge.resumed();
        judge.note(format!("{} resumed at {step}", request.request_id));
    }
    while step < request.steps {
        tokio::time::sleep(pace).await;
        step += 1;
        latents = mixed(latents, step.into());
        let due = request.checkpoint_every > 0 && step % request.checkpoint_every == 0;
        let checkpoint = due.then(|| DenoiseCheckpoint {
            step,
            latents: latents.to_le_bytes().to_vec(),
            crc32c: 0,
        });
        send(Denoised::Step(DenoiseStep {
            step,
            steps: request.steps,
            checkpoint,
        }))
        .await;
    }
    send(Denoised::Image(DenoiseImage {
        width: request.width,
        height: request.height,
        png: latents.to_le_bytes().to_vec(),
    }))
    .await;
    send(Denoised::Done(DenoiseDone::default())).await;
    Ok(())
}
