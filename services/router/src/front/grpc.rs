//! `ImageService`.
use std::{pin::Pin, sync::Arc};

use base::limits::MAX_EDIT_BYTES;
use proto::{
    access::Peer,
    status::status,
    v1::{
        CancelRequest, CancelResponse, GenerateRequest, GenerateResponse, GetRequest, GetResponse,
        image_service_server::{ImageService, ImageServiceServer},
    },
};
use telemetry::trace::Parent;
use tokio_stream::{Stream, wrappers::ReceiverStream};
use tonic::{Request, Response, Status};

use super::{Caller, Context};
use crate::RouterError;

/// Header of API keys.
const AUTHORIZATION: &str = "authorization";

/// The service over a router's context.
#[derive(Debug)]
pub(crate) struct Front(Arc<Context>);

/// Ready to be added to routes.
pub(crate) fn server(context: Arc<Context>) -> ImageServiceServer<Front> {
    ImageServiceServer::new(Front(context)).max_decoding_message_size(MAX_EDIT_BYTES)
}

impl Front {
    fn caller<T>(&self, request: &Request<T>) -> Result<Caller, Status> {
        let header = request.metadata().get(AUTHORIZATION);
        let peer = request.extensions().get::<Peer>();
        let caller = self.0.caller(header.map(|header| header.as_bytes()), peer);
        let mut caller = caller.map_err(|error| status(&error))?;
        caller.trace = Parent::of(request.metadata().as_ref());
        Ok(caller)
    }

    /// A request of another tenant is one that is not known.
    fn owned(&self, caller: &Caller, id: &str) -> Result<(), Status> {
        let tenant = self.0.jobs.tenant(id).map_err(|error| status(&error))?;
        if caller.owns(&tenant) {
            return Ok(());
        }
        Err(status(&RouterError::NoRequest(id.to_owned())))
    }
}

#[tonic::async_trait]
impl ImageService for Front {
    type GenerateStream = Pin<Box<dyn Stream<Item = Result<GenerateResponse, Status>> + Send>>;

    async fn generate(
        &self,
        request: Request<GenerateRequest>,
    ) -> Result<Response<Self::GenerateStream>, Status> {
        let timeout = proto::deadline::timeout(request.metadata());
        let caller = self.caller(&request)?;
        let accepted = self.0.accept(caller, request.into_inner(), timeout);
        let accepted = Box::pin(accepted).await;
        let answers = accepted.map_err(|error| status(&error))?;
        Ok(Response::new(Box::pin(ReceiverStream::new(answers))))
    }

    async fn cancel(
        &self,
        request: Request<CancelRequest>,
    ) -> Result<Response<CancelResponse>, Status> {
        let caller = self.caller(&request)?;
        let id = request.into_inner().request_id;
        self.owned(&caller, &id)?;
        let cancelled = self.0.jobs.cancel(&id);
        let cancelled = cancelled.map_err(|error| status(&error))?;
        Ok(Response::new(CancelResponse { cancelled }))
    }

    async fn get(&self, request: Request<GetRequest>) -> Result<Response<GetResponse>, Status> {
        let caller = self.caller(&request)?;
        let id = request.into_inner().request_id;
        self.owned(&caller, &id)?;
        let found = self.0.jobs.get(&id);
        Ok(Response::new(found.map_err(|error| status(&error))?))
    }
}
