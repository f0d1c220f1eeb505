use std::sync::Arc;
use std::time::Duration;

use super::channels::call_until;
use super::lease::{Lease, Terms};
use super::pull::Fetch;
use super::reach::{MAPPED, blocking};
use super::spare::Stores;
use super::{KvClient, copy};
use crate::local::Mapped;
use crate::{TransferError, limits, wire};
use base::{Deadline, clock::SystemClock};
use fabric::{Access, Store};
use kv::{KvError, KvGeometry, KvShard, Manifest, ReadPlan};
use proto::v1::{self, PrefixHandle};

/// What to fetch, and for whom.
#[derive(Debug, Clone, Copy)]
pub struct FetchRequest<'a> {
    /// The prefix.
    pub handle: &'a PrefixHandle,
    /// Shape that the receiver needs; any when absent.
    pub expected: Option<&'a KvGeometry>,
    /// Part that the receiver needs, for example the heads of its rank; all of it when absent.
    pub part: Option<&'a KvShard>,
    /// Request that the receiver works on.
    pub request_id: &'a str,
    /// Member id of the receiver.
    pub receiver: &'a str,
    /// Epoch of the cluster that the fetch was decided on; 0 outside of one.
    pub epoch: u64,
    /// Bound of this fetch; never beyond that of the client.
    pub timeout: Option<Duration>,
}

impl<'a> FetchRequest<'a> {
    /// The whole prefix of any shape, outside of a cluster.
    #[must_use]
    pub fn new(handle: &'a PrefixHandle, request_id: &'a str, receiver: &'a str) -> Self {
        Self {
            handle,
            expected: None,
            part: None,
            request_id,
            receiver,
            epoch: 0,
            timeout: None,
        }
    }
}

/// A prefix, or a part of one, within reach of this process.
///
/// Over the wire it has been read and checked. Of a pool that this process maps nothing has been copied: the
/// bytes are checked when [`Self::copy_to`] takes them out, and `lease` must live until then.
#[derive(Debug)]
pub struct Fetched {
    /// Tokens of the prefix.
    pub tokens: usize,
    /// Bytes of the part, in the layout of [`KvGeometry`] with only the part's layers, heads and tokens.
    pub bytes: u64,
    /// Bytes that travelled or will be looked at, repairs not counted.
    pub read_bytes: u64,
    /// How: [`MAPPED`], or UCX transports.
    pub transport: String,
    /// Chunks that had to be read again.
    pub repaired_chunks: usize,
    /// Bytes that [`KvClient::fetch_to`] had copied before the last chunk was sealed.
    pub early_bytes: u64,
    /// Time that passed in waiting for its producer.
    pub waited: Duration,
    /// Time that the checks of what came over the wire took, most of it beside the transfer.
    pub checked: Duration,
    /// The receiver's lease.
    pub lease: Lease,
    pub(super) plan: ReadPlan,
    pub(super) manifest: Arc<Manifest>,
    pub(super) source: Source,
}

/// Where the bytes of a part are.
#[derive(Debug)]
pub(super) enum Source {
    /// Read and checked.
    Here(Stores),
    /// In the pool.
    Pool(Mapped),
    /// With whom [`KvClient::fetch_to`] gave them to.
    Given,
}

impl Fetched {
    /// What the producer sealed.
    #[must_use]
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// The part, checked, in memory of its own.
    ///
    /// # Errors
    /// As [`Self::copy_to`].
    pub fn to_vec(&self) -> Result<Vec<u8>, TransferError> {
        let mut out = room(self.plan.part_bytes())?;
        self.copy_to(&mut out)?;
        Ok(out)
    }

    /// Copies the part to `out`, which has exactly its size. When this returns, every byte there is covered by
    /// a checksum that was found right.
    ///
    /// # Errors
    /// [`TransferError::Invalid`] for an `out` of another size and for a part that [`KvClient::fetch_to`] read over
    /// the wire and gave away, [`TransferError::DataLoss`] when a chunk of
    /// the pool stays damaged after [`limits::MAX_CHUNK_READS`] reads; `out` is not to be used then.
    pub fn copy_to(&self, out: &mut [u8]) -> Result<(), TransferError> {
        if out.len() != self.plan.part_bytes() {
            let message = format!(
                "must hold {} bytes, has {}",
                self.plan.part_bytes(),
                out.len()
            );
            return Err(TransferError::invalid("out", message));
        }
        let Source::Pool(slot) = &self.source else {
            return self.visit(|at, bytes| {
                out[at..at + bytes.len()].copy_from_slice(bytes);
                Ok(())
            });
        };
        copy::part(&self.manifest, &self.plan, slot, out)
    }

    /// Shows the part run by run, checked: `visit(place in the part, bytes)`.
    pub(crate) fn visit(
        &self,
        mut visit: impl FnMut(usize, &[u8]) -> Result<(), TransferError>,
    ) -> Result<(), TransferError> {
        let plan = &self.plan;
        match &self.source {
            Source::Given => Err(TransferError::invalid("out", "was filled already")),
            Source::Here(stores) => plan.scatter(|entry, inside, to| {
                let stores = &stores.stores;
                let after = stores.partition_point(|store| store.entries.start <= entry);
                let store = &stores[after - 1];
                let at = plan.stored(store.entries.start, entry).start;
                visit(to, &store.bytes[at + inside.start..at + inside.end])
            }),
            Source::Pool(slot) => {
                let mut held = None;
                let mut chunk = vec![];
                plan.scatter(|entry, inside, to| {
                    if held != Some(entry) {
                        let index = plan.chunks()[entry];
                        chunk.resize(plan.chunk(index).len(), 0);
                        copy::take(&self.manifest, slot, index, (&mut chunk, Store::Cached))?;
                        held = Some(entry);
                    }
                    visit(to, &chunk[inside])
                })
            }
        }
    }
}

impl KvClient {
    /// Fetches the whole prefix behind `handle` and checks that it is what `handle` and `expected` say.
    /// `receiver` is this process's member id. A prefix that is still being written is followed to its end.
    ///
    /// # Errors
    /// [`TransferError::Mismatch`] for another prefix or shape, [`TransferError::DataLoss`] when a
    /// chunk stays damaged after [`limits::MAX_CHUNK_READS`] reads, [`TransferError::Remote`] with
    /// the service's refusal (`ABORTED` for an old generation, `NOT_FOUND` for a freed slot, `UNAVAILABLE`
    /// when its producer gave it up), [`TransferError::NoPath`], [`TransferError::PeerLost`],
    /// [`TransferError::Deadline`].
    pub async fn fetch(
        &self,
        handle: &PrefixHandle,
        expected: &KvGeometry,
        request_id: &str,
        receiver: &str,
    ) -> Result<Fetched, TransferError> {
        self.fetch_part(FetchRequest {
            expected: Some(expected),
            ..FetchRequest::new(handle, request_id, receiver)
        })
        .await
    }

    /// As [`Self::fetch`], for a part of the prefix: only what covers it is read.
    ///
    /// # Errors
    /// As [`Self::fetch`]; [`TransferError::Mismatch`] for a part that is none.
    pub async fn fetch_part(&self, request: FetchRequest<'_>) -> Result<Fetched, TransferError> {
        let fetched = self.run::<Vec<u8>>(request, None).await?;
        Ok(fetched.0)
    }

    /// As [`Self::fetch_part`], and takes the part out as well: into what `room` gives for its size, checked. Of a
    /// prefix that is still being written each chunk is taken as soon as it is sealed, so that little is left to do
    /// after the last one.
    ///
    /// # Errors
    /// As [`Self::fetch_part`] and [`Fetched::copy_to`].
    pub async fn fetch_to<B: AsMut<[u8]> + Send + 'static>(
        &self,
        request: FetchRequest<'_>,
        room: fn(usize) -> B,
    ) -> Result<(Fetched, B), TransferError> {
        let (fetched, out) = self.run(request, Some(room)).await?;
        let Some((mut out, full)) = out else {
            return Err(TransferError::Stopped);
        };
        if full {
            return Ok((fetched, out));
        }
        let copy = move || fetched.copy_to(out.as_mut()).map(|()| (fetched, out));
        blocking(copy).await?
    }

    async fn run<B: AsMut<[u8]> + Send + 'static>(
        &self,
        request: FetchRequest<'_>,
        room: Option<fn(usize) -> B>,
    ) -> Result<(Fetched, Option<(B, bool)>), TransferError> {
        let deadline = self.inner.deadline(request.timeout.or(self.timeout));
        let inner = &self.inner;
        let handle = request.handle;
        let shown = self.with_token(&request).await?;
        let node = inner.config.node.as_ref();
        let endpoint = node.unwrap_or(&handle.endpoint);
        let mut stub = inner.channels.stub(endpoint)?;
        let message = v1::PullRequest {
            handle: Some(shown),
            request_id: request.request_id.to_owned(),
            receiver: request.receiver.to_owned(),
            ttl_ms: wire::millis(inner.config.ttl),
            follows: true,
            epoch: request.epoch,
        };
        // Through the own node this takes as long as the payload takes to come there.
        let pulled = call_until("pulling a slot", deadline, message, |request| {
            stub.pull(request)
        })
        .await?;
        let slot = pulled.handle.as_ref().unwrap_or(handle);
        let terms = Terms {
            endpoint: endpoint.clone(),
            slot: slot.slot,
            generation: slot.generation,
            lease: pulled.lease,
        };
        let lease = inner.releaser.lease(terms.clone());
        let manifest = wire::manifest_from_proto(pulled.manifest)?;
        check(&manifest, &request)?;
        let whole = KvShard::whole(&manifest.geometry, manifest.tokens);
        let plan = ReadPlan::new(&manifest, request.part.unwrap_or(&whole))
            .map_err(TransferError::Mismatch)?;
        if plan.read_bytes() > inner.config.max_payload_bytes {
            let (needs, max) = (plan.read_bytes(), inner.config.max_payload_bytes);
            let message = format!("needs {needs} bytes, this client takes {max}");
            return Err(TransferError::invalid("bytes", message));
        }
        let access = (manifest.bytes, Access::Read);
        let place = inner
            .reach
            .place(pulled.region, pulled.local, access, deadline)
            .await?;
        let fetch = Fetch {
            inner,
            terms: &terms,
            plan: &plan,
            manifest,
            deadline,
            timeout: request.timeout.or(self.timeout),
            longest: Deadline::after(&SystemClock, limits::MAX_FOLLOW),
            repaired_chunks: 0,
            early_bytes: 0,
            waited: Duration::ZERO,
            checked: Duration::ZERO,
            transport: MAPPED.to_owned(),
        };
        let out = room.map(|room| room(plan.part_bytes()));
        let (done, out) = fetch.run(place, out).await?;
        Ok((done.fetched(plan.clone(), lease), out))
    }
}

/// Checks the service's answer against what the caller knows, before room is made for it.
fn check(manifest: &Manifest, request: &FetchRequest<'_>) -> Result<(), TransferError> {
    let handle = request.handle;
    let identity = wire::identity_from_proto(&handle.identity)?;
    let expected = *request.expected.unwrap_or(&manifest.geometry);
    manifest
        .expect(identity, expected)
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
    same("bytes", handle.bytes, manifest.bytes)
}

/// Zeroed memory, or an error instead of an abort when the system has not enough.
pub(super) fn room(len: usize) -> Result<Vec<u8>, TransferError> {
    // Asks without touching the memory; the allocation below then gets pages that the system has
    // zeroed, instead of writing each byte once more.
    Vec::<u8>::new()
        .try_reserve_exact(len)
        .map_err(|_| TransferError::PoolFull {
            bytes: len as u64,
            retry_after: limits::RETRY_AFTER,
        })?;
    Ok(vec![0; len])
}
