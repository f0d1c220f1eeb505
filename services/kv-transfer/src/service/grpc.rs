//! `omni.v1.KvTransferService` on a [`Service`].
use std::time::Duration;

use proto::v1;
use proto::v1::kv_transfer_service_server::KvTransferService;
use tonic::{Request, Response, Status};

use super::node::Service;
use super::slots::{Grant, LeaseKey};
use crate::{TransferError, wire};

type Answer<T> = Result<Response<T>, Status>;

#[tonic::async_trait]
impl KvTransferService for Service {
    async fn reserve(&self, request: Request<v1::ReserveRequest>) -> Answer<v1::ReserveResponse> {
        answer("reserve", self.do_reserve(request.get_ref()))
    }

    async fn seal(&self, request: Request<v1::SealRequest>) -> Answer<v1::SealResponse> {
        answer("seal", self.do_seal(request.into_inner()).await)
    }

    async fn pull(&self, request: Request<v1::PullRequest>) -> Answer<v1::PullResponse> {
        answer("pull", self.do_pull(request.into_inner()))
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
        Ok(Response::new(v1::ReleaseResponse {}))
    }

    async fn list(&self, _: Request<v1::ListSlotsRequest>) -> Answer<v1::ListSlotsResponse> {
        let mut table = self.node.table();
        table.reap(self.node.now());
        let slots = table
            .list()
            .into_iter()
            .map(|slot| v1::list_slots_response::Slot {
                slot: slot.slot,
                generation: slot.generation,
                bytes: slot.bytes,
                sealed: slot.sealed,
                leases: u32::try_from(slot.leases).unwrap_or(u32::MAX),
                request_id: slot.request_id,
            });
        Ok(Response::new(v1::ListSlotsResponse {
            slots: slots.collect(),
            pool_bytes: table.capacity(),
            used_bytes: table.used(),
        }))
    }
}

impl Service {
    fn do_reserve(&self, wire: &v1::ReserveRequest) -> Result<v1::ReserveResponse, TransferError> {
        wire::check_request_id(&wire.request_id)?;
        let ttl: Duration = wire::ttl_from_proto(wire.ttl_ms)?;
        let node = &self.node;
        let grant = node
            .table()
            .reserve(node.now(), wire.bytes, ttl, &wire.request_id)?;
        Ok(v1::ReserveResponse {
            slot: grant.key.slot,
            generation: grant.key.generation,
            lease: grant.key.lease,
            region: Some(self.region(&grant)),
            chunk_bytes: u32::try_from(node.chunk_bytes).unwrap_or(u32::MAX),
        })
    }

    async fn do_seal(&self, wire: v1::SealRequest) -> Result<v1::SealResponse, TransferError> {
        let key = lease_key(wire.slot, wire.generation, wire.lease);
        let manifest = wire::manifest_from_proto(wire.manifest)?;
        let node = &self.node;
        let offset = node.table().check_seal(node.now(), key, &manifest)?;
        let manifest = node.verify(offset, manifest).await?;
        let handle = v1::PrefixHandle {
            identity: manifest.identity.as_bytes().to_vec(),
            endpoint: node.advertise.clone(),
            generation: key.generation,
            slot: key.slot,
            tokens: u32::try_from(manifest.tokens).unwrap_or(u32::MAX),
            bytes: manifest.bytes,
            lease: key.lease,
        };
        // The lease may have run out meanwhile; then the slot is gone and this says so.
        node.table().seal(node.now(), key, manifest)?;
        Ok(v1::SealResponse {
            handle: Some(handle),
        })
    }

    fn do_pull(&self, wire: v1::PullRequest) -> Result<v1::PullResponse, TransferError> {
        wire::check_request_id(&wire.request_id)?;
        wire::check_receiver(&wire.receiver)?;
        let ttl = wire::ttl_from_proto(wire.ttl_ms)?;
        let handle = wire
            .handle
            .ok_or_else(|| TransferError::invalid("handle", "is required"))?;
        let identity = wire::identity_from_proto(&handle.identity)?;
        let node = &self.node;
        let named = (handle.slot, handle.generation);
        let (grant, manifest) = node.table().pull(node.now(), named, identity, ttl)?;
        Ok(v1::PullResponse {
            lease: grant.key.lease,
            region: Some(self.region(&grant)),
            manifest: Some(wire::manifest_to_proto(manifest)),
        })
    }

    fn region(&self, grant: &Grant) -> v1::RemoteRegion {
        wire::region_to_proto(self.node.region(grant.offset, grant.bytes))
    }
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
