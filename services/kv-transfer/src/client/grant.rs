use proto::v1::{self, PrefixHandle};

use super::KvClient;
use super::channels::call;
use super::fetch::FetchRequest;
use crate::TransferError;

impl KvClient {
    /// Makes the token with which `receiver` may pull the prefix behind `handle` once, for `request_id` at
    /// `epoch`. The handle must have the lease that the caller holds; `replaces` is void from here on.
    ///
    /// # Errors
    /// [`TransferError::Remote`] with the service's refusal: `ABORTED` for an epoch older than the slot has seen,
    /// `NOT_FOUND` when the slot or the lease is gone.
    pub async fn grant(
        &self,
        handle: &PrefixHandle,
        (request_id, receiver, epoch): (&str, &str, u64),
        replaces: Option<Vec<u8>>,
    ) -> Result<Vec<u8>, TransferError> {
        let message = v1::GrantRequest {
            slot: handle.slot,
            generation: handle.generation,
            lease: handle.lease,
            request_id: request_id.to_owned(),
            receiver: receiver.to_owned(),
            epoch,
            replaces: replaces.unwrap_or_default(),
        };
        let mut stub = self.inner.channels.stub(&handle.endpoint)?;
        let made = call("making a token", self.deadline(), message, |request| {
            stub.grant(request)
        });
        Ok(made.await?.token)
    }

    /// Uses the token of `request` up, for a receiver that gets the prefix from elsewhere.
    pub(crate) async fn redeem(&self, request: &FetchRequest<'_>) -> Result<(), TransferError> {
        let message = v1::RedeemRequest {
            handle: Some(shown(request.handle)),
            request_id: request.request_id.to_owned(),
            receiver: request.receiver.to_owned(),
            epoch: request.epoch,
        };
        let mut stub = self.inner.channels.stub(&request.handle.endpoint)?;
        let used = call("using a token", self.deadline(), message, |request| {
            stub.redeem(request)
        });
        used.await.map(drop)
    }

    /// The handle of `request` as it is shown to the service: with a token. Who holds the lease of a prefix has
    /// one made for itself.
    pub(super) async fn with_token(
        &self,
        request: &FetchRequest<'_>,
    ) -> Result<PrefixHandle, TransferError> {
        let handle = request.handle;
        let mut shown = shown(handle);
        if handle.pull_token.is_empty() && handle.lease > 0 {
            let bearer = (request.request_id, request.receiver, request.epoch);
            shown.pull_token = self.grant(handle, bearer, None).await?;
        }
        Ok(shown)
    }
}

/// A receiver has no business with the producer's lease.
fn shown(handle: &PrefixHandle) -> PrefixHandle {
    PrefixHandle {
        lease: 0,
        ..handle.clone()
    }
}
