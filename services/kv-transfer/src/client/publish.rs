use std::sync::Arc;

use base::Deadline;
use kv::{KvGeometry, Manifest, PrefixIdentity};
use proto::v1::{self, PrefixHandle};

use super::channels::call;
use super::lease::{Lease, Terms};
use super::{Inner, KvClient};
use crate::{TransferError, wire};

/// A prefix to publish.
#[derive(Debug)]
pub struct PublishRequest {
    /// Request that the prefix belongs to, for operators.
    pub request_id: String,
    /// Which prefix this is.
    pub identity: PrefixIdentity,
    /// Shape of one token.
    pub geometry: KvGeometry,
    /// Tokens in the payload.
    pub tokens: usize,
    /// Bytes in the layout of [`KvGeometry`].
    pub payload: Vec<u8>,
}

/// A published prefix.
#[derive(Debug)]
pub struct Published {
    /// What consumers need, with the number of the producer's lease.
    pub handle: PrefixHandle,
    /// UCX transports that the payload took.
    pub transport: String,
    /// The producer's lease. The slot lives as long as any lease on it; to pass the prefix
    /// on without staying responsible for it, call [`Lease::hand_over`].
    pub lease: Lease,
}

impl KvClient {
    /// Writes a prefix into the pool of the service at `endpoint` (`http://HOST:PORT`) and seals it.
    ///
    /// # Errors
    /// [`TransferError::Manifest`] when the payload does not fit its description,
    /// [`TransferError::Remote`] with the service's refusal (`RESOURCE_EXHAUSTED` with a hint when
    /// the pool is full, `INVALID_ARGUMENT` naming `bytes` when it can never fit),
    /// [`TransferError::PeerLost`], [`TransferError::Deadline`].
    pub async fn publish(
        &self,
        endpoint: &str,
        request: PublishRequest,
    ) -> Result<Published, TransferError> {
        let deadline = self.deadline();
        let inner = &*self.inner;
        check(&request)?;
        let mut stub = inner.channels.stub(endpoint)?;
        let message = v1::ReserveRequest {
            request_id: request.request_id.clone(),
            bytes: request.payload.len() as u64,
            ttl_ms: wire::millis(inner.config.ttl),
        };
        let reserved = call("reserving a slot", deadline, message, |request| {
            stub.reserve(request)
        })
        .await?;
        let terms = Terms {
            endpoint: endpoint.to_owned(),
            slot: reserved.slot,
            generation: reserved.generation,
            lease: reserved.lease,
        };
        let lease = inner.releaser.lease(terms.clone());
        let (manifest, transport) = write(inner, request, reserved, deadline).await?;
        let message = v1::SealRequest {
            slot: terms.slot,
            generation: terms.generation,
            lease: terms.lease,
            manifest: Some(wire::manifest_to_proto(manifest)),
        };
        let sealed = call("sealing a slot", deadline, message, |request| {
            stub.seal(request)
        })
        .await?;
        let handle = sealed
            .handle
            .ok_or_else(|| TransferError::invalid("handle", "is missing in the answer"))?;
        Ok(Published {
            handle,
            transport,
            lease,
        })
    }
}

/// Moves the payload while its checksums are computed.
async fn write(
    inner: &Inner,
    request: PublishRequest,
    reserved: v1::ReserveResponse,
    deadline: Deadline,
) -> Result<(Manifest, String), TransferError> {
    let PublishRequest {
        identity,
        geometry,
        tokens,
        payload,
        ..
    } = request;
    let remote = wire::region_from_proto(reserved.region, payload.len() as u64)?;
    let chunk_bytes = reserved.chunk_bytes as usize;
    let payload = Arc::new(payload);
    let source = Arc::clone(&payload);
    let describe = tokio::task::spawn_blocking(move || {
        Manifest::describe(identity, geometry, tokens, &source, chunk_bytes)
    });
    let landed = inner.engine.put(&remote, payload, deadline).await?;
    let manifest = describe.await.map_err(|_| TransferError::Stopped)?;
    Ok((manifest.map_err(TransferError::Manifest)?, landed.transport))
}

/// Refuses what the service would refuse, before a slot is reserved.
fn check(request: &PublishRequest) -> Result<(), TransferError> {
    wire::check_request_id(&request.request_id)?;
    request
        .geometry
        .validate()
        .map_err(TransferError::Manifest)?;
    let expected = request.geometry.prefix_bytes(request.tokens) as u64;
    let got = request.payload.len() as u64;
    if got != expected || got == 0 {
        let error = kv::KvError::Inconsistent {
            field: "bytes",
            expected,
            got,
        };
        return Err(TransferError::Manifest(error));
    }
    Ok(())
}
