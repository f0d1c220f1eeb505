use kv::PrefixIdentity;
use proto::v1::{self, PrefixHandle};

use super::KvClient;
use super::channels::call;
use super::lease::{Lease, Terms};
use crate::{TransferError, wire};

impl KvClient {
    /// Takes a lease on the cached prefix of exactly this identity, stored for `scope` or for everybody, if the
    /// service at `endpoint` has one.
    ///
    /// # Errors
    /// The service cannot be reached, or refuses.
    pub async fn lookup(
        &self,
        endpoint: &str,
        identity: PrefixIdentity,
        scope: &str,
        request_id: &str,
    ) -> Result<Option<(PrefixHandle, Lease)>, TransferError> {
        let inner = &*self.inner;
        let mut stub = inner.channels.stub(endpoint)?;
        let message = v1::LookupRequest {
            identity: identity.as_bytes().to_vec(),
            scope: scope.to_owned(),
            request_id: request_id.to_owned(),
            ttl_ms: wire::millis(inner.config.ttl),
        };
        let found = call(
            "looking for a prefix",
            self.deadline(),
            message,
            |request| stub.lookup(request),
        )
        .await?;
        Ok(found.handle.map(|handle| {
            let lease = inner.releaser.lease(Terms {
                endpoint: endpoint.to_owned(),
                slot: handle.slot,
                generation: handle.generation,
                lease: handle.lease,
            });
            (handle, lease)
        }))
    }
}
