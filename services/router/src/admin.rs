//! `AdminService`: what operators ask.
use std::sync::Arc;

use base::{BuildInfo, limits::MAX_REQUEST_BYTES};
use proto::{
    status::status,
    v1::{
        DrainRequest, DrainResponse, GetVersionRequest, GetVersionResponse, ListMembersRequest,
        ListMembersResponse,
        admin_service_server::{AdminService, AdminServiceServer},
    },
};
use registry::{Registry, Snapshots};
use tonic::{Request, Response, Status};

/// The service.
#[derive(Debug)]
pub(crate) struct Admin {
    pub(crate) build: BuildInfo,
    pub(crate) snapshots: Snapshots,
    /// Drains go through it, wherever it is.
    pub(crate) registry: Arc<dyn Registry>,
}

/// Ready to be added to routes.
pub(crate) fn server(admin: Admin) -> AdminServiceServer<Admin> {
    AdminServiceServer::new(admin).max_decoding_message_size(MAX_REQUEST_BYTES)
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
        }))
    }

    async fn list_members(
        &self,
        _request: Request<ListMembersRequest>,
    ) -> Result<Response<ListMembersResponse>, Status> {
        let snapshot = self.snapshots.current();
        let members = snapshot.members.values().cloned().collect();
        Ok(Response::new(ListMembersResponse {
            members,
            epoch: snapshot.epoch,
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
        Ok(Response::new(DrainResponse {}))
    }
}
