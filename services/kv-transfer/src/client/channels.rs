use std::collections::HashMap;
use std::future::Future;
use std::sync::{Arc, Mutex, PoisonError};

use base::{Deadline, clock::SystemClock, limits::CONTROL_DEADLINE};
use proto::v1::kv_transfer_service_client::KvTransferServiceClient;
use tonic::transport::Channel;
use tonic::{Request, Response, Status};

use crate::{TransferError, limits};

/// gRPC connections by endpoint; they connect on first use and reconnect by themselves.
#[derive(Debug, Clone, Default)]
pub(super) struct Channels {
    by_endpoint: Arc<Mutex<HashMap<String, Channel>>>,
}

pub(super) type Stub = KvTransferServiceClient<Channel>;

impl Channels {
    pub(super) fn stub(&self, endpoint: &str) -> Result<Stub, TransferError> {
        let mut channels = self
            .by_endpoint
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if let Some(channel) = channels.get(endpoint) {
            return Ok(Stub::new(channel.clone()));
        }
        let channel = proto::channel::lazy(endpoint)?;
        if channels.len() >= limits::MAX_CHANNELS {
            // Services come and go; calls under way hold their channel themselves.
            channels.clear();
        }
        channels.insert(endpoint.to_owned(), channel.clone());
        Ok(Stub::new(channel))
    }
}

/// Makes one control call, bounded by `deadline` and by the deadline of control calls.
pub(super) async fn call<M, T, F>(
    what: &'static str,
    deadline: Deadline,
    message: M,
    send: impl FnOnce(Request<M>) -> F,
) -> Result<T, TransferError>
where
    F: Future<Output = Result<Response<T>, Status>>,
{
    let deadline = deadline.min_after(&SystemClock, CONTROL_DEADLINE);
    call_until(what, deadline, message, send).await
}

/// Makes one call that may take until `deadline`, because the service waits or moves a payload meanwhile.
pub(super) async fn call_until<M, T, F>(
    what: &'static str,
    deadline: Deadline,
    message: M,
    send: impl FnOnce(Request<M>) -> F,
) -> Result<T, TransferError>
where
    F: Future<Output = Result<Response<T>, Status>>,
{
    let mut request = Request::new(message);
    request.set_timeout(deadline.remaining(&SystemClock));
    telemetry::trace::inject(request.metadata_mut());
    let answer = deadline.bound(what, send(request)).await;
    let response = answer.map_err(|_| TransferError::Deadline { what })??;
    Ok(response.into_inner())
}
