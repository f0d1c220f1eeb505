//! `AdminService`: what operators ask.
use std::{collections::VecDeque, pin::Pin, sync::Arc};

use base::{
    BuildInfo,
    clock::{self, Clock as _},
    limits::{MAX_REMEMBERED_REQUESTS, MAX_REQUEST_BYTES},
};
use futures_util::stream;
use proto::{
    status::status,
    v1::{
        ClusterEvent, CordonRequest, CordonResponse, DrainRequest, DrainResponse,
        GetVersionRequest, GetVersionResponse, ListMembersRequest, ListMembersResponse,
        ListRequestsRequest, ListRequestsResponse, WatchEventsRequest, WatchEventsResponse,
        admin_service_server::{AdminService, AdminServiceServer},
    },
};
use registry::{Registry, Role};
use tokio::sync::watch;
use tokio_stream::Stream;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};

use crate::{RouterError, events::Events, front::Context, placement::role_name};

/// Records of one answer unless a limit is given; each has a few hundred bytes, a full one a few thousand.
const DEFAULT_RECORDS: usize = 256;

/// The service.
#[derive(Debug)]
pub(crate) struct Admin {
    pub(crate) build: BuildInfo,
    pub(crate) context: Arc<Context>,
    /// Drains and cordons go through it, wherever it is.
    pub(crate) registry: Arc<dyn Registry>,
    /// Streams end when it is cancelled, so that they cannot hold up a clean stop.
    pub(crate) stop: CancellationToken,
}

/// Ready to be added to routes.
pub(crate) fn server(admin: Admin) -> AdminServiceServer<Admin> {
    AdminServiceServer::new(admin).max_decoding_message_size(MAX_REQUEST_BYTES)
}

impl Admin {
    /// Work is placed on stages alone: a cordon of anything else would be an empty promise.
    fn takes_work(&self, member_id: &str) -> Result<(), RouterError> {
        let snapshot = self.context.members.snapshots.current();
        // One that is not known here may be known to the registry.
        let role = snapshot.members.get(member_id).map(registry::Member::role);
        match role {
            Some(role @ (Role::Router | Role::KvTransfer)) => Err(RouterError::invalid(
                "member_id",
                format!(
                    "names a {}; work is placed on stages alone",
                    role_name(role)
                ),
            )),
            _ => Ok(()),
        }
    }
}

#[tonic::async_trait]
impl AdminService for Admin {
    async fn get_version(
        &self,
        _request: Request<GetVersionRequest>,
    ) -> Result<Response<GetVersionResponse>, Status> {
        let BuildInfo {
            version,
            git_sha,
            profile,
        } = self.build.clone();
        Ok(Response::new(GetVersionResponse {
            version,
            git_sha,
            profile,
            unix_ms: clock::SystemClock.unix_millis(),
        }))
    }

    async fn list_members(
        &self,
        _request: Request<ListMembersRequest>,
    ) -> Result<Response<ListMembersResponse>, Status> {
        let snapshots = &self.context.members.snapshots;
        let (snapshot, contact) = (snapshots.current(), snapshots.contact());
        Ok(Response::new(ListMembersResponse {
            members: snapshot.members.values().cloned().collect(),
            epoch: snapshot.epoch,
            plans: snapshot.plans.values().cloned().collect(),
            following: contact.following,
            stale_ms: u64::try_from(contact.stale_for().as_millis()).unwrap_or(u64::MAX),
        }))
    }

    async fn drain(
        &self,
        request: Request<DrainRequest>,
    ) -> Result<Response<DrainResponse>, Status> {
        let member_id = request.into_inner().member_id;
        let drained = self.registry.drain(&member_id).await;
        tracing::info!(%member_id, ok = drained.is_ok(), "drain asked for");
        drained.map_err(|error| status(&error))?;
        let object = format!("member/{member_id}");
        let message = "an operator asked it to finish its work and leave".to_owned();
        self.context.events.tell("DrainAsked", object, message);
        Ok(Response::new(DrainResponse {}))
    }

    async fn cordon(
        &self,
        request: Request<CordonRequest>,
    ) -> Result<Response<CordonResponse>, Status> {
        let CordonRequest {
            member_id,
            cordoned,
        } = request.into_inner();
        self.takes_work(&member_id)
            .map_err(|error| status(&error))?;
        let done = self.registry.cordon(&member_id, cordoned).await;
        tracing::info!(%member_id, cordoned, ok = done.is_ok(), "cordon asked for");
        done.map_err(|error| status(&error))?;
        Ok(Response::new(CordonResponse {}))
    }

    async fn list_requests(
        &self,
        request: Request<ListRequestsRequest>,
    ) -> Result<Response<ListRequestsResponse>, Status> {
        let ask = request.into_inner();
        let jobs = &self.context.jobs;
        let limit = match usize::try_from(ask.limit).unwrap_or(usize::MAX) {
            0 => DEFAULT_RECORDS,
            limit => limit.min(MAX_REMEMBERED_REQUESTS),
        };
        let requests = if ask.request_ids.is_empty() {
            jobs.records(limit, ask.full)
        } else {
            let named = ask.request_ids.iter().take(limit);
            let found = named.map(|id| jobs.record(id, ask.full));
            let found: Result<Vec<_>, RouterError> = found.collect();
            found.map_err(|error| status(&error))?
        };
        Ok(Response::new(ListRequestsResponse { requests }))
    }

    type WatchEventsStream =
        Pin<Box<dyn Stream<Item = Result<WatchEventsResponse, Status>> + Send>>;

    async fn watch_events(
        &self,
        request: Request<WatchEventsRequest>,
    ) -> Result<Response<Self::WatchEventsStream>, Status> {
        let WatchEventsRequest { after, follow } = request.into_inner();
        let events = self.context.events.clone();
        let reader = Reader {
            changes: events.changes(),
            events,
            after,
            follow,
            ready: VecDeque::new(),
            stop: self.stop.clone(),
        };
        let told = stream::unfold(reader, |mut reader| async move {
            let event = reader.next().await?;
            let response = WatchEventsResponse { event: Some(event) };
            Some((Ok(response), reader))
        });
        Ok(Response::new(Box::pin(told)))
    }
}

/// Where one watcher of events stands.
struct Reader {
    changes: watch::Receiver<u64>,
    events: Events,
    after: u64,
    follow: bool,
    ready: VecDeque<ClusterEvent>,
    stop: CancellationToken,
}

impl Reader {
    /// The next event. `None`: that was all, or the router stops.
    async fn next(&mut self) -> Option<ClusterEvent> {
        loop {
            if let Some(event) = self.ready.pop_front() {
                return Some(event);
            }
            self.changes.borrow_and_update();
            self.ready = self.events.after(self.after).into();
            match self.ready.back() {
                Some(newest) => self.after = newest.number,
                None if !self.follow => return None,
                None => tokio::select! {
                    changed = self.changes.changed() => changed.ok()?,
                    () = self.stop.cancelled() => return None,
                },
            }
        }
    }
}
