//! `omni.v1.KvTransferService` on a [`Service`].
use std::pin::Pin;

use base::{Deadline, clock::SystemClock, task};
use kv::Manifest;
use proto::v1::kv_transfer_service_server::KvTransferService;
use proto::v1::{self, PrefixHandle};
use telemetry::names;
use tokio::sync::mpsc;
use tokio_stream::{Stream, wrappers::ReceiverStream};
use tonic::{Request, Response, Status};

use super::node::{Node, Service};
use super::slots::{Bearer, CacheTerms, LeaseKey, Reservation, SlotView};
use crate::{TransferError, wire};

type Answer<T> = Result<Response<T>, Status>;

#[tonic::async_trait]
impl KvTransferService for Service {
    async fn reserve(&self, request: Request<v1::ReserveRequest>) -> Answer<v1::ReserveResponse> {
        answer("reserve", self.do_reserve(request.into_inner()).await)
    }

    async fn seal_part(
        &self,
        request: Request<v1::SealPartRequest>,
    ) -> Answer<v1::SealPartResponse> {
        answer("seal part", self.do_seal_part(request.into_inner()).await)
    }

    async fn seal(&self, request: Request<v1::SealRequest>) -> Answer<v1::SealResponse> {
        answer("seal", self.do_seal(request.into_inner()).await)
    }

    async fn grant(&self, request: Request<v1::GrantRequest>) -> Answer<v1::GrantResponse> {
        answer("grant", self.do_grant(request.into_inner()))
    }

    async fn redeem(&self, request: Request<v1::RedeemRequest>) -> Answer<v1::RedeemResponse> {
        answer("redeem", self.do_redeem(request.into_inner()))
    }

    async fn pull(&self, request: Request<v1::PullRequest>) -> Answer<v1::PullResponse> {
        answer("pull", Box::pin(self.do_pull(request.into_inner())).await)
    }

    type FollowStream = Pin<Box<dyn Stream<Item = Result<v1::FollowResponse, Status>> + Send>>;

    async fn follow(&self, request: Request<v1::FollowRequest>) -> Answer<Self::FollowStream> {
        let wire = request.into_inner();
        let key = lease_key(wire.slot, wire.generation, wire.lease);
        let (news, stream) = mpsc::channel(1);
        let service = self.clone();
        let task = task::spawn(async move {
            let told = service.tell(key, wire.known_chunks as usize, &news).await;
            if let Err(error) = told {
                tracing::info!(call = "follow", %error, "refused");
                let _ = news.send(Err(proto::status::status(&error))).await;
            }
        });
        let stream = Told {
            stream: ReceiverStream::new(stream),
            _task: task,
        };
        Ok(Response::new(Box::pin(stream)))
    }

    async fn lookup(&self, request: Request<v1::LookupRequest>) -> Answer<v1::LookupResponse> {
        answer("lookup", self.do_lookup(request.get_ref()))
    }

    async fn renew(&self, request: Request<v1::RenewRequest>) -> Answer<v1::RenewResponse> {
        let wire = request.get_ref();
        let key = lease_key(wire.slot, wire.generation, wire.lease);
        let renew = |ttl| self.node.table().renew(self.node.now(), key, ttl);
        let renewed = wire::ttl_from_proto(wire.ttl_ms).and_then(renew);
        answer("renew", renewed.map(|()| v1::RenewResponse {}))
    }

    async fn release(&self, request: Request<v1::ReleaseRequest>) -> Answer<v1::ReleaseResponse> {
        let wire = request.get_ref();
        let key = lease_key(wire.slot, wire.generation, wire.lease);
        self.node.table().release(self.node.now(), key);
        self.node.changed();
        Ok(Response::new(v1::ReleaseResponse {}))
    }

    async fn list(&self, _: Request<v1::ListSlotsRequest>) -> Answer<v1::ListSlotsResponse> {
        let now = self.node.now();
        let mut table = self.node.table();
        table.reap(now);
        let counts = table.cache_counts();
        Ok(Response::new(v1::ListSlotsResponse {
            slots: table.list(now).into_iter().map(slot_to_proto).collect(),
            pool_bytes: table.capacity(),
            used_bytes: table.used(),
            cached_bytes: table.cached(),
            cache_budget_bytes: table.cache_budget(),
            cache_hits: counts.hits,
            cache_misses: counts.misses,
            cache_evictions: counts.evictions,
            cache_hit_bytes: counts.hit_bytes,
            waiting: narrow(self.node.line.waiting()),
        }))
    }

    async fn pin(&self, request: Request<v1::PinRequest>) -> Answer<v1::PinResponse> {
        let wire = request.get_ref();
        let named = (wire.slot, wire.generation);
        let pinned = self.node.table().pin(self.node.now(), named, wire.pinned);
        answer("pin", pinned.map(|()| v1::PinResponse {}))
    }

    async fn evict(&self, request: Request<v1::EvictRequest>) -> Answer<v1::EvictResponse> {
        let wire = request.get_ref();
        let named = (wire.slot, wire.generation);
        let evicted = self.node.table().evict(self.node.now(), named);
        self.node.changed();
        answer("evict", evicted.map(|()| v1::EvictResponse {}))
    }
}

/// News of a slot; dropping them ends the task that sends them.
struct Told {
    stream: ReceiverStream<Result<v1::FollowResponse, Status>>,
    _task: task::Owned<()>,
}

impl Stream for Told {
    type Item = Result<v1::FollowResponse, Status>;

    fn poll_next(
        mut self: Pin<&mut Self>,
        context: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Option<Self::Item>> {
        Pin::new(&mut self.stream).poll_next(context)
    }
}

impl Service {
    async fn do_reserve(
        &self,
        wire: v1::ReserveRequest,
    ) -> Result<v1::ReserveResponse, TransferError> {
        wire::check_request_id(&wire.request_id)?;
        let node = &self.node;
        let offer = match wire.offer {
            Some(offer) => Some(wire::manifest_from_proto(Some(offer))?),
            None => None,
        };
        let cache = match wire.cache {
            Some(v1::CacheTerms { scope, cost_us }) => {
                wire::check_scope(&scope)?;
                Some(CacheTerms { scope, cost_us })
            }
            None => None,
        };
        let asked = Reservation {
            bytes: wire.bytes,
            ttl: wire::ttl_from_proto(wire.ttl_ms)?,
            request_id: wire.request_id,
            offer: offer.clone(),
            cache,
        };
        let wait = wire::wait_from_proto(wire.wait_ms)?;
        let grant = if wait.is_zero() {
            node.reserve_now(asked)?
        } else {
            let deadline = Deadline::after(&SystemClock, wait);
            node.reserve_in_line(asked, deadline).await?
        };
        Ok(v1::ReserveResponse {
            slot: grant.key.slot,
            generation: grant.key.generation,
            lease: grant.key.lease,
            region: node.region(&grant),
            chunk_bytes: narrow(node.chunk_bytes),
            local: node.local(&grant),
            handle: offer.map(|manifest| handle(node, grant.key, &manifest)),
        })
    }

    async fn do_seal_part(
        &self,
        wire: v1::SealPartRequest,
    ) -> Result<v1::SealPartResponse, TransferError> {
        let key = lease_key(wire.slot, wire.generation, wire.lease);
        let (first, crcs) = (wire.first_chunk as usize, wire.chunk_crc32c);
        let node = &self.node;
        let (offset, manifest) = node.table().check_part(node.now(), key, first, &crcs)?;
        node.verify(offset, manifest, first..first + crcs.len())
            .await?;
        let sealed = node.table().seal_part(node.now(), key, first, &crcs)?;
        node.changed();
        Ok(v1::SealPartResponse {
            sealed_chunks: narrow(sealed),
        })
    }

    async fn do_seal(&self, wire: v1::SealRequest) -> Result<v1::SealResponse, TransferError> {
        let key = lease_key(wire.slot, wire.generation, wire.lease);
        let manifest = wire::sealed_from_proto(wire.manifest)?;
        let node = &self.node;
        let (offset, checked) = node.table().check_seal(node.now(), key, &manifest)?;
        let unchecked = if checked { 0 } else { manifest.crcs.len() };
        let manifest = node.verify(offset, manifest, 0..unchecked).await?;
        let handle = handle(node, key, &manifest);
        // The lease may have run out meanwhile; then the slot is gone and this says so.
        node.table().seal(node.now(), key, manifest)?;
        node.changed();
        Ok(v1::SealResponse {
            handle: Some(handle),
        })
    }

    fn do_grant(&self, wire: v1::GrantRequest) -> Result<v1::GrantResponse, TransferError> {
        let key = lease_key(wire.slot, wire.generation, wire.lease);
        let bearer = bearer(wire.request_id, wire.receiver, wire.epoch)?;
        let replaces = match wire.replaces.is_empty() {
            true => None,
            false => Some(wire::token_from_proto(&wire.replaces)?),
        };
        let node = &self.node;
        let token = node.new_token();
        let made = (token, bearer);
        node.table().grant(node.now(), key, made, replaces)?;
        Ok(v1::GrantResponse {
            token: token.to_vec(),
        })
    }

    fn do_redeem(&self, wire: v1::RedeemRequest) -> Result<v1::RedeemResponse, TransferError> {
        let bearer = bearer(wire.request_id, wire.receiver, wire.epoch)?;
        let shown = wire
            .handle
            .ok_or_else(|| TransferError::invalid("handle", "is required"))?;
        let token = wire::token_from_proto(&shown.pull_token)?;
        let (node, named) = (&self.node, (shown.slot, shown.generation));
        node.table().redeem(node.now(), named, (&token, &bearer))?;
        Ok(v1::RedeemResponse {})
    }

    async fn do_pull(&self, wire: v1::PullRequest) -> Result<v1::PullResponse, TransferError> {
        let bearer = bearer(wire.request_id, wire.receiver, wire.epoch)?;
        let ttl = wire::ttl_from_proto(wire.ttl_ms)?;
        let asked = wire
            .handle
            .ok_or_else(|| TransferError::invalid("handle", "is required"))?;
        let identity = wire::identity_from_proto(&asked.identity)?;
        let node = &self.node;
        let named = if asked.endpoint == node.advertise || asked.endpoint.is_empty() {
            let (named, token) = (
                (asked.slot, asked.generation),
                wire::token_from_proto(&asked.pull_token)?,
            );
            node.table().redeem(node.now(), named, (&token, &bearer))?;
            named
        } else {
            self.relayed(&asked, &bearer).await?
        };
        let what = (identity, wire.follows);
        let (grant, manifest) = node.table().pull(node.now(), named, what, ttl)?;
        Ok(v1::PullResponse {
            lease: grant.key.lease,
            region: node.region(&grant),
            local: node.local(&grant),
            handle: Some(handle(node, grant.key, &manifest)),
            manifest: Some(wire::manifest_to_proto(manifest)),
        })
    }

    fn do_lookup(&self, wire: &v1::LookupRequest) -> Result<v1::LookupResponse, TransferError> {
        wire::check_request_id(&wire.request_id)?;
        wire::check_scope(&wire.scope)?;
        let ttl = wire::ttl_from_proto(wire.ttl_ms)?;
        let identity = wire::identity_from_proto(&wire.identity)?;
        let node = &self.node;
        let found = node
            .table()
            .lookup(node.now(), &wire.scope, identity, ttl)?;
        let outcome = if found.is_some() { "hit" } else { "miss" };
        node.metrics.count(&names::TRANSFER_CACHE, &[outcome]);
        if let Some((grant, _)) = &found {
            node.metrics
                .add(&names::TRANSFER_CACHE_BYTES, &[], grant.bytes);
        }
        let found = found.map(|(grant, manifest)| handle(node, grant.key, &manifest));
        Ok(v1::LookupResponse { handle: found })
    }

    /// Sends the checksums from `known` on as they come.
    async fn tell(
        &self,
        key: LeaseKey,
        mut known: usize,
        news: &mpsc::Sender<Result<v1::FollowResponse, Status>>,
    ) -> Result<(), TransferError> {
        loop {
            let mut changes = self.node.changes();
            let told = self.node.table().news(self.node.now(), key, known);
            let (crcs, last) = told?;
            known += crcs.len();
            if !crcs.is_empty() {
                let message = v1::FollowResponse { chunk_crc32c: crcs };
                if news.send(Ok(message)).await.is_err() {
                    return Ok(());
                }
            }
            if last {
                return Ok(());
            }
            tokio::select! {
                // The reaper makes a change at every turn, so a lease that ran out is seen.
                changed = changes.changed() => changed.map_err(|_| TransferError::Stopped)?,
                () = news.closed() => return Ok(()),
            }
        }
    }
}

fn handle(node: &Node, key: LeaseKey, manifest: &Manifest) -> PrefixHandle {
    PrefixHandle {
        identity: manifest.identity.as_bytes().to_vec(),
        endpoint: node.advertise.clone(),
        generation: key.generation,
        slot: key.slot,
        tokens: narrow(manifest.tokens),
        bytes: manifest.bytes,
        lease: key.lease,
        pull_token: vec![],
    }
}

/// Whom a call names.
fn bearer(request_id: String, receiver: String, epoch: u64) -> Result<Bearer, TransferError> {
    wire::check_request_id(&request_id)?;
    wire::check_receiver(&receiver)?;
    Ok(Bearer {
        request_id,
        receiver,
        epoch,
    })
}

fn slot_to_proto(slot: SlotView) -> v1::list_slots_response::Slot {
    let manifest = slot.manifest.as_ref();
    let kept = slot.kept.as_ref();
    v1::list_slots_response::Slot {
        slot: slot.slot,
        generation: slot.generation,
        bytes: slot.bytes,
        sealed: slot.sealed,
        leases: narrow(slot.leases),
        request_id: slot.request_id,
        identity: manifest.map_or_else(Vec::new, |m| m.identity.as_bytes().to_vec()),
        tokens: manifest.map_or(0, |m| narrow(m.tokens)),
        sealed_chunks: manifest.map_or(0, |m| narrow(m.crcs.len())),
        chunks: manifest.map_or(0, |m| narrow(m.chunks())),
        cached: kept.is_some(),
        pinned: kept.is_some_and(|kept| kept.pinned),
        scope: kept.map_or_else(String::new, |kept| kept.terms.scope.clone()),
        hits: kept.map_or(0, |kept| kept.hits),
        cost_us: kept.map_or(0, |kept| kept.terms.cost_us),
        expires_ms: u64::from(wire::millis(slot.expires)),
        pulls: slot.pulls,
    }
}

fn narrow(value: usize) -> u32 {
    u32::try_from(value).unwrap_or(u32::MAX)
}

fn lease_key(slot: u64, generation: u64, lease: u64) -> LeaseKey {
    LeaseKey {
        slot,
        generation,
        lease,
    }
}

fn answer<T>(call: &str, result: Result<T, TransferError>) -> Answer<T> {
    result.map(Response::new).map_err(|error| {
        tracing::info!(call, %error, "refused");
        proto::status::status(&error)
    })
}
