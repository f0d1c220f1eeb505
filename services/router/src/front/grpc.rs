//! `ImageService`.
use std::{pin::Pin, sync::Arc};

use base::limits::MAX_EDIT_BYTES;
use proto::{
    status::status,
    v1::{
        CancelRequest, CancelResponse, GenerateRequest, GenerateResponse, GetRequest, GetResponse,
        image_service_server::{ImageService, ImageServiceServer},
    },
};
use tokio_stream::{Stream, wrappers::ReceiverStream};
use tonic::{Request, Response, Status};

use super::{Caller, Context};

/// The service over a router's context.
#[derive(Debug)]
pub(crate) struct Front(Arc<Context>);

/// Ready to be added to routes.
pub(crate) fn server(context: Arc<Context>) -> ImageServiceServer<Front> {
    ImageServiceServer::new(Front(context)).max_decoding_message_size(MAX_EDIT_BYTES)
}

#[tonic::async_trait]
impl ImageService for Front {
    type GenerateStream = Pin<Box<dyn Stream<Item = Result<GenerateResponse, Status>> + Send>>;

    async fn generate(
        &self,
        request: Request<GenerateRequest>,
    ) -> Result<Response<Self::GenerateStream>, Status> {
        let timeout = proto::deadline::timeout(request.metadata());
        let accepted = Box::pin(
            self.0
                .accept(Caller::default(), request.into_inner(), timeout),
        )
        .await;
        let answers = accepted.map_err(|error| status(&error))?;
        Ok(Response::new(Box::pin(ReceiverStream::new(answers))))
    }

    async fn cancel(
        &self,
        request: Request<CancelRequest>,
    ) -> Result<Response<CancelResponse>, Status> {
        let cancelled = self.0.jobs.cancel(&request.into_inner().request_id);
        let cancelled = cancelled.map_err(|error| status(&error))?;
        Ok(Response::new(CancelResponse { cancelled }))
    }

    async fn get(&self, request: Request<GetRequest>) -> Result<Response<GetResponse>, Status> {
        let found = self.0.jobs.get(&request.into_inner().request_id);
        Ok(Response::new(found.map_err(|error| status(&error))?))
    }
}
