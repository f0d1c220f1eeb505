use std::sync::Arc;
use std::time::{Duration, Instant};

use base::{Deadline, clock::SystemClock};
use fabric::Access;
use kv::{KvGeometry, Manifest, PrefixIdentity};
use proto::v1::{self, PrefixHandle};

use super::channels::call_until;
use super::lease::{self, Lease, Terms};
use super::reach::Place;
use super::sums::Sums;
use super::{Inner, KvClient};
use crate::{TransferError, limits, wire};

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

/// What a producer says of a prefix before it writes it.
#[derive(Debug, Clone)]
pub struct Description {
    /// Request that the prefix belongs to, for operators.
    pub request_id: String,
    /// Which prefix this is.
    pub identity: PrefixIdentity,
    /// Shape of one token.
    pub geometry: KvGeometry,
    /// Tokens in the payload.
    pub tokens: usize,
    /// When the prefix is to stay after its last lease.
    pub cache: Option<CacheTerms>,
}

/// How a prefix is cached.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CacheTerms {
    /// Who may find it: a tenant, or everybody when empty.
    pub scope: String,
    /// What computing it again would cost, in microseconds.
    pub cost_us: u64,
}

/// A published prefix.
#[derive(Debug)]
pub struct Published {
    /// What consumers need, with the number of the producer's lease.
    pub handle: PrefixHandle,
    /// How the payload got into the pool: [`crate::MAPPED`], or UCX transports.
    pub transport: String,
    /// The producer's lease. The slot lives as long as any lease on it; to pass the prefix
    /// on without staying responsible for it, call [`Lease::hand_over`].
    pub lease: Lease,
}

/// A prefix that is being written. Dropping it gives the slot up; whoever follows it learns so.
#[derive(Debug)]
pub struct Publication {
    inner: Arc<Inner>,
    terms: Terms,
    lease: Lease,
    place: Place,
    /// With the checksums of what is written.
    manifest: Manifest,
    /// Of what is written.
    sums: Sums,
    /// Present when consumers may follow.
    handle: Option<PrefixHandle>,
    transport: String,
    deadline: Deadline,
    timeout: Option<Duration>,
    /// When the lease was taken or prolonged.
    renewed: Instant,
}

impl KvClient {
    /// Writes a prefix into the pool of the service at `endpoint` (`http://HOST:PORT`) and seals it.
    ///
    /// # Errors
    /// As [`Self::offer`] and [`Publication::write`].
    pub async fn publish(
        &self,
        endpoint: &str,
        request: PublishRequest,
    ) -> Result<Published, TransferError> {
        self.publish_with(endpoint, request, None).await
    }

    /// As [`Self::publish`]; the prefix stays after its last lease as long as the cache has room.
    ///
    /// # Errors
    /// As [`Self::publish`].
    pub async fn publish_cached(
        &self,
        endpoint: &str,
        request: PublishRequest,
        terms: CacheTerms,
    ) -> Result<Published, TransferError> {
        self.publish_with(endpoint, request, Some(terms)).await
    }

    async fn publish_with(
        &self,
        endpoint: &str,
        request: PublishRequest,
        cache: Option<CacheTerms>,
    ) -> Result<Published, TransferError> {
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
        let description = Description {
            request_id: request.request_id,
            identity: request.identity,
            geometry: request.geometry,
            tokens: request.tokens,
            cache,
        };
        let mut publication = self.begin(endpoint, description, false).await?;
        publication.write(request.payload).await?;
        publication.finish().await
    }

    /// Makes room for a prefix that will be written piece by piece. Consumers may pull it by
    /// [`Publication::handle`] at once, and follow.
    ///
    /// When the pool is full, this waits in line until the deadline of this client.
    ///
    /// # Errors
    /// [`TransferError::Manifest`] when the description is not consistent,
    /// [`TransferError::Remote`] with the service's refusal (`RESOURCE_EXHAUSTED` with a hint when
    /// the pool is full, `INVALID_ARGUMENT` naming `bytes` when it can never fit),
    /// [`TransferError::PeerLost`], [`TransferError::Deadline`].
    pub async fn offer(
        &self,
        endpoint: &str,
        description: Description,
    ) -> Result<Publication, TransferError> {
        self.begin(endpoint, description, true).await
    }

    async fn begin(
        &self,
        endpoint: &str,
        description: Description,
        offered: bool,
    ) -> Result<Publication, TransferError> {
        let deadline = self.deadline();
        let inner = &self.inner;
        let manifest = announced(&description, inner.config.chunk_bytes)?;
        let mut stub = inner.channels.stub(endpoint)?;
        // The service's own answer, with its hint, comes before the call is given up.
        let longest = deadline.remaining(&SystemClock);
        let longest = longest.saturating_sub(limits::ANSWER_MARGIN);
        let message = v1::ReserveRequest {
            request_id: description.request_id,
            bytes: manifest.bytes,
            ttl_ms: wire::millis(inner.config.ttl),
            offer: offered.then(|| wire::manifest_to_proto(manifest.clone())),
            wait_ms: wire::millis(inner.config.wait.min(longest)),
            cache: description.cache.map(|terms| v1::CacheTerms {
                scope: terms.scope,
                cost_us: terms.cost_us,
            }),
        };
        let reserved = call_until("reserving a slot", deadline, message, |request| {
            stub.reserve(request)
        })
        .await?;
        // A lease begins when the slot is given out, after the time in line.
        let (deadline, renewed) = (self.deadline(), base::clock::now());
        let terms = Terms {
            endpoint: endpoint.to_owned(),
            slot: reserved.slot,
            generation: reserved.generation,
            lease: reserved.lease,
        };
        let lease = inner.releaser.lease(terms.clone());
        let place = inner
            .reach
            .place(
                reserved.region,
                reserved.local,
                (manifest.bytes, Access::Write),
                deadline,
            )
            .await?;
        Ok(Publication {
            inner: Arc::clone(inner),
            terms,
            lease,
            place,
            sums: Sums::new(manifest.chunk_bytes, manifest.bytes),
            manifest,
            handle: reserved.handle,
            transport: String::new(),
            deadline,
            timeout: self.timeout,
            renewed,
        })
    }
}

impl Publication {
    /// What consumers need to pull and follow the prefix; none for a prefix that is sealed at once.
    #[must_use]
    pub fn handle(&self) -> Option<&PrefixHandle> {
        self.handle.as_ref()
    }

    /// Prolongs the lease of a prefix whose next bytes take long, and gives them a deadline of their own.
    ///
    /// # Errors
    /// The lease is gone, or the service cannot be reached.
    pub async fn renew(&mut self) -> Result<(), TransferError> {
        let (ttl, now) = (self.inner.config.ttl, base::clock::now());
        let deadline = self.inner.deadline(self.timeout);
        lease::renew(&self.inner.channels, &self.terms, ttl, deadline).await?;
        (self.renewed, self.deadline) = (now, deadline);
        Ok(())
    }

    /// Whether the lease should be prolonged before more is written.
    #[must_use]
    pub fn is_old(&self) -> bool {
        let age = base::clock::now().saturating_duration_since(self.renewed);
        age >= self.inner.config.ttl.min(self.inner.config.deadline) / 3
    }

    /// Writes the next bytes of the payload. Chunks that they complete are sealed, and whoever follows
    /// reads them from here on.
    ///
    /// # Errors
    /// [`TransferError::Invalid`] for more bytes than were announced, [`TransferError::Remote`],
    /// [`TransferError::PeerLost`], [`TransferError::Deadline`].
    pub async fn write(&mut self, bytes: Vec<u8>) -> Result<(), TransferError> {
        let at = self.sums.seen();
        let end = at.saturating_add(bytes.len());
        if bytes.is_empty() || end as u64 > self.manifest.bytes {
            let message = format!(
                "{} bytes at {at} are no part of a payload of {}",
                bytes.len(),
                self.manifest.bytes
            );
            return Err(TransferError::invalid("bytes", message));
        }
        let (sums, reach) = (self.sums.clone(), &self.inner.reach);
        let write = reach.write(&self.place, sums, Arc::new(bytes), self.deadline);
        let (transport, mut sums) = write.await?;
        self.transport = transport;
        let first = self.manifest.crcs.len();
        self.manifest.crcs.extend(sums.take());
        self.sums = sums;
        if self.handle.is_some() && self.manifest.crcs.len() > first {
            self.seal_part(first).await?;
        }
        Ok(())
    }

    async fn seal_part(&self, first: usize) -> Result<(), TransferError> {
        let mut stub = self.inner.channels.stub(&self.terms.endpoint)?;
        let message = v1::SealPartRequest {
            slot: self.terms.slot,
            generation: self.terms.generation,
            lease: self.terms.lease,
            first_chunk: u32::try_from(first).unwrap_or(u32::MAX),
            chunk_crc32c: self.manifest.crcs[first..].to_vec(),
        };
        // The service reads the part first: that takes as long as there are bytes.
        call_until("sealing a part", self.deadline, message, |request| {
            stub.seal_part(request)
        })
        .await
        .map(drop)
    }

    /// Seals the whole prefix.
    ///
    /// # Errors
    /// [`TransferError::Manifest`] when bytes are missing, and as [`Self::write`].
    pub async fn finish(self) -> Result<Published, TransferError> {
        self.manifest.validate().map_err(TransferError::Manifest)?;
        let mut stub = self.inner.channels.stub(&self.terms.endpoint)?;
        let message = v1::SealRequest {
            slot: self.terms.slot,
            generation: self.terms.generation,
            lease: self.terms.lease,
            manifest: Some(wire::manifest_to_proto(self.manifest)),
        };
        let sealed = call_until("sealing a slot", self.deadline, message, |request| {
            stub.seal(request)
        })
        .await?;
        let handle = sealed
            .handle
            .ok_or_else(|| TransferError::invalid("handle", "is missing in the answer"))?;
        Ok(Published {
            handle,
            transport: self.transport,
            lease: self.lease,
        })
    }
}

/// Refuses what the service would refuse, before a slot is reserved.
fn announced(description: &Description, chunk_bytes: usize) -> Result<Manifest, TransferError> {
    wire::check_request_id(&description.request_id)?;
    if let Some(terms) = &description.cache {
        wire::check_scope(&terms.scope)?;
    }
    let (geometry, tokens) = (description.geometry, description.tokens);
    let chunk_bytes = kv::digest_bytes(&geometry, tokens, chunk_bytes);
    Manifest::announce(description.identity, geometry, tokens, chunk_bytes)
        .map_err(TransferError::Manifest)
}
