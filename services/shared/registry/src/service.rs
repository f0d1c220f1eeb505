//! `RegistryService` over any registry.
use std::{pin::Pin, sync::Arc, time::Duration};

use base::{Code, Failure, limits::MAX_REQUEST_BYTES};
use proto::{
    access::{self, Peer},
    status::status,
    v1::{
        CordonMemberRequest, CordonMemberResponse, DeregisterRequest, DeregisterResponse,
        DrainMemberRequest, DrainMemberResponse, KeepAliveRequest, KeepAliveResponse,
        PublishPlanRequest, PublishPlanResponse, RegisterRequest, RegisterResponse, WatchRequest,
        WatchResponse,
        registry_service_server::{RegistryService, RegistryServiceServer},
    },
};
use tokio_stream::{Stream, StreamExt as _};
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};

use crate::{Beat, Member, Registry, RegistryError, Role};

/// Serves a registry. Watches end when `stop` is cancelled, so that they cannot hold up a clean
/// stop of the server.
#[derive(Debug)]
pub struct Service {
    registry: Arc<dyn Registry>,
    stop: CancellationToken,
}

/// The service, ready to be added to routes.
pub fn server(
    registry: Arc<dyn Registry>,
    stop: CancellationToken,
) -> RegistryServiceServer<Service> {
    RegistryServiceServer::new(Service { registry, stop })
        .max_decoding_message_size(MAX_REQUEST_BYTES)
}

/// Nobody joins in a role that its certificate does not name. A caller in clear has none.
fn own_role(peer: Option<&Peer>, member: &Member) -> Result<(), Failure> {
    let needed = match member.role() {
        Role::Router => access::Role::Router,
        Role::ArStage => access::Role::ArStage,
        Role::KvTransfer => access::Role::KvTransfer,
        Role::DitWorker => access::Role::DitWorker,
        // Refused for itself.
        Role::Unspecified => return Ok(()),
    };
    match peer {
        Some(peer) if !peer.is(needed) => {
            let message = format!("a certificate for {needed} is needed to join as {needed}");
            Err(Failure::new(Code::PermissionDenied, message).with_field("role"))
        }
        _ => Ok(()),
    }
}

#[tonic::async_trait]
impl RegistryService for Service {
    async fn register(
        &self,
        request: Request<RegisterRequest>,
    ) -> Result<Response<RegisterResponse>, Status> {
        let peer = request.extensions().get::<Peer>().cloned();
        let request = request.into_inner();
        let missing = RegistryError::Invalid {
            field: "member",
            reason: "is required".to_owned(),
        };
        let member = request.member.ok_or_else(|| status(&missing))?;
        own_role(peer.as_ref(), &member).map_err(|failure| status(&failure))?;
        let ttl = Duration::from_millis(u64::from(request.ttl_ms));
        let grant = self
            .registry
            .register(member, ttl)
            .await
            .map_err(|error| status(&error))?;
        Ok(Response::new(RegisterResponse {
            lease: grant.lease,
            epoch: grant.epoch,
        }))
    }

    async fn keep_alive(
        &self,
        request: Request<KeepAliveRequest>,
    ) -> Result<Response<KeepAliveResponse>, Status> {
        let request = request.into_inner();
        let beat = Beat {
            state: request.state(),
            load: request.load.unwrap_or_default(),
            member_id: request.member_id,
            lease: request.lease,
        };
        let renewal = self
            .registry
            .keep_alive(beat)
            .await
            .map_err(|error| status(&error))?;
        Ok(Response::new(KeepAliveResponse {
            epoch: renewal.epoch,
            drain: renewal.drain,
        }))
    }

    async fn deregister(
        &self,
        request: Request<DeregisterRequest>,
    ) -> Result<Response<DeregisterResponse>, Status> {
        let request = request.into_inner();
        self.registry
            .deregister(&request.member_id, request.lease)
            .await
            .map_err(|error| status(&error))?;
        Ok(Response::new(DeregisterResponse {}))
    }

    async fn drain_member(
        &self,
        request: Request<DrainMemberRequest>,
    ) -> Result<Response<DrainMemberResponse>, Status> {
        let member_id = request.into_inner().member_id;
        let drained = self.registry.drain(&member_id).await;
        drained.map_err(|error| status(&error))?;
        Ok(Response::new(DrainMemberResponse {}))
    }

    async fn cordon_member(
        &self,
        request: Request<CordonMemberRequest>,
    ) -> Result<Response<CordonMemberResponse>, Status> {
        let CordonMemberRequest {
            member_id,
            cordoned,
        } = request.into_inner();
        let done = self.registry.cordon(&member_id, cordoned).await;
        done.map_err(|error| status(&error))?;
        Ok(Response::new(CordonMemberResponse {}))
    }

    async fn publish_plan(
        &self,
        request: Request<PublishPlanRequest>,
    ) -> Result<Response<PublishPlanResponse>, Status> {
        let missing = RegistryError::Invalid {
            field: "plan",
            reason: "is required".to_owned(),
        };
        let plan = request.into_inner().plan.ok_or_else(|| status(&missing))?;
        let published = self.registry.publish_plan(plan).await;
        let epoch = published.map_err(|error| status(&error))?;
        Ok(Response::new(PublishPlanResponse { epoch }))
    }

    type WatchStream = Pin<Box<dyn Stream<Item = Result<WatchResponse, Status>> + Send>>;

    async fn watch(
        &self,
        _request: Request<WatchRequest>,
    ) -> Result<Response<Self::WatchStream>, Status> {
        let watch = self
            .registry
            .watch()
            .await
            .map_err(|error| status(&error))?;
        let (updates, feeder) = watch.into_parts();
        let stream = updates.map(move |update| {
            // The feeder lives as long as the stream that it feeds.
            let _ = &feeder;
            update
                .map(WatchResponse::from)
                .map_err(|error| status(&error))
        });
        Ok(Response::new(Box::pin(UntilStopped::new(
            stream,
            self.stop.clone(),
        ))))
    }
}

/// Ends a stream when a token is cancelled.
struct UntilStopped<S> {
    stream: Pin<Box<S>>,
    stop: Pin<Box<tokio_util::sync::WaitForCancellationFutureOwned>>,
}

impl<S> UntilStopped<S> {
    fn new(stream: S, stop: CancellationToken) -> Self {
        Self {
            stream: Box::pin(stream),
            stop: Box::pin(stop.cancelled_owned()),
        }
    }
}

impl<S: Stream> Stream for UntilStopped<S> {
    type Item = S::Item;

    fn poll_next(
        mut self: Pin<&mut Self>,
        cx: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Option<S::Item>> {
        if self.stop.as_mut().poll(cx).is_ready() {
            return std::task::Poll::Ready(None);
        }
        self.stream.as_mut().poll_next(cx)
    }
}
