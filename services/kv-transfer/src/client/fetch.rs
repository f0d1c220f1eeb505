use base::Deadline;
use kv::{KvError, KvGeometry, Manifest};
use proto::v1::{self, PrefixHandle};

use super::channels::call;
use super::lease::{Lease, Terms};
use super::{Inner, KvClient};
use crate::engine::Remote;
use crate::{TransferError, limits, wire};

/// A prefix in this process, checked.
#[derive(Debug)]
pub struct Fetched {
    /// Bytes in the layout of [`KvGeometry`].
    pub payload: Vec<u8>,
    /// Tokens in the payload.
    pub tokens: usize,
    /// Bytes that were asked for, repairs not counted.
    pub bytes: u64,
    /// UCX transports that the payload took.
    pub transport: String,
    /// Chunks that had to be read again.
    pub repaired_chunks: usize,
    /// The receiver's lease; the payload here does not depend on it.
    pub lease: Lease,
}

impl KvClient {
    /// Reads the prefix behind `handle` and checks that it is what `handle` and `expected` say, and
    /// that every chunk has its checksum. `receiver` is this process's member id.
    ///
    /// # Errors
    /// [`TransferError::Mismatch`] for another prefix or shape, [`TransferError::DataLoss`] when a
    /// chunk stays damaged after [`limits::MAX_CHUNK_READS`] reads, [`TransferError::Remote`] with
    /// the service's refusal (`ABORTED` for an old generation, `NOT_FOUND` for a freed slot),
    /// [`TransferError::PeerLost`], [`TransferError::Deadline`].
    pub async fn fetch(
        &self,
        handle: &PrefixHandle,
        expected: &KvGeometry,
        request_id: &str,
        receiver: &str,
    ) -> Result<Fetched, TransferError> {
        let deadline = self.deadline();
        let inner = &*self.inner;
        let mut stub = inner.channels.stub(&handle.endpoint)?;
        let message = v1::PullRequest {
            handle: Some(handle.clone()),
            request_id: request_id.to_owned(),
            receiver: receiver.to_owned(),
            ttl_ms: wire::millis(inner.config.ttl),
        };
        let pulled = call("pulling a slot", deadline, message, |request| {
            stub.pull(request)
        })
        .await?;
        let lease = inner.releaser.lease(Terms {
            endpoint: handle.endpoint.clone(),
            slot: handle.slot,
            generation: handle.generation,
            lease: pulled.lease,
        });
        let manifest = wire::manifest_from_proto(pulled.manifest)?;
        check(&manifest, handle, expected, inner.config.max_payload_bytes)?;
        let remote = wire::region_from_proto(pulled.region, manifest.bytes)?;
        let (tokens, bytes) = (manifest.tokens, manifest.bytes);
        let read = read(inner, &remote, manifest, deadline).await?;
        let Read {
            payload,
            transport,
            repaired_chunks,
        } = read;
        Ok(Fetched {
            payload,
            tokens,
            bytes,
            transport,
            repaired_chunks,
            lease,
        })
    }
}

struct Read {
    payload: Vec<u8>,
    transport: String,
    repaired_chunks: usize,
}

/// Reads the payload, then again what is damaged, a bounded number of times.
async fn read(
    inner: &Inner,
    remote: &Remote,
    manifest: Manifest,
    deadline: Deadline,
) -> Result<Read, TransferError> {
    let mut payload = room(manifest.bytes)?;
    let whole = 0..payload.len();
    let mut ranges = vec![whole];
    let mut repaired_chunks = 0;
    let manifest = std::sync::Arc::new(manifest);
    for _ in 0..limits::MAX_CHUNK_READS {
        let (buffer, landed) = inner
            .engine
            .get_parts(remote, payload, ranges, deadline)
            .await?;
        let of = std::sync::Arc::clone(&manifest);
        let check = move || (of.bad_chunks(&buffer), buffer);
        let checked = tokio::task::spawn_blocking(check).await;
        let (bad, buffer) = checked.map_err(|_| TransferError::Stopped)?;
        if bad.is_empty() {
            return Ok(Read {
                payload: buffer,
                transport: landed.transport,
                repaired_chunks,
            });
        }
        tracing::warn!(
            chunks = bad.len(),
            "chunks failed their checksum, reading them again"
        );
        repaired_chunks = bad.len();
        let chunk = |&index: &usize| kv::chunk_range(index, buffer.len(), manifest.chunk_bytes);
        ranges = bad.iter().map(chunk).collect();
        payload = buffer;
    }
    let reads = limits::MAX_CHUNK_READS;
    match manifest.verify(&payload) {
        Err(first) => Err(TransferError::DataLoss {
            chunks: ranges.len(),
            reads,
            first,
        }),
        Ok(()) => Err(TransferError::Stopped),
    }
}

/// Checks the service's answer against what the caller knows, before room is made for it.
fn check(
    manifest: &Manifest,
    handle: &PrefixHandle,
    expected: &KvGeometry,
    max_bytes: u64,
) -> Result<(), TransferError> {
    let identity = wire::identity_from_proto(&handle.identity)?;
    manifest
        .expect(identity, *expected)
        .map_err(TransferError::Mismatch)?;
    let same = |field, expected: u64, got: u64| {
        let same = expected == got;
        same.then_some(())
            .ok_or(TransferError::Mismatch(KvError::Inconsistent {
                field,
                expected,
                got,
            }))
    };
    same("tokens", u64::from(handle.tokens), manifest.tokens as u64)?;
    same("bytes", handle.bytes, manifest.bytes)?;
    if manifest.bytes > max_bytes {
        let message = format!(
            "holds {} bytes, this client takes {max_bytes}",
            manifest.bytes
        );
        return Err(TransferError::invalid("bytes", message));
    }
    Ok(())
}

/// Zeroed memory, or an error instead of an abort when the system has not enough.
fn room(bytes: u64) -> Result<Vec<u8>, TransferError> {
    let full = || TransferError::PoolFull {
        bytes,
        retry_after: limits::RETRY_AFTER,
    };
    let len = usize::try_from(bytes).map_err(|_| full())?;
    // Asks without touching the memory; the allocation below then gets pages that the system has
    // zeroed, instead of writing each byte once more.
    Vec::<u8>::new()
        .try_reserve_exact(len)
        .map_err(|_| full())?;
    Ok(vec![0; len])
}
