//! Prefixes of other nodes: the first receiver of this node makes the service read one over the wire into
//! its own pool, every other receiver of this node then maps that copy. The producer is read once.
use std::collections::HashMap;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use base::{Deadline, clock::SystemClock};
use kv::Manifest;
use proto::v1::PrefixHandle;
use tokio::sync::OnceCell;

use super::node::{Node, Service};
use super::slots::{Bearer, LeaseKey, Reservation};
use crate::client::FetchRequest;
use crate::engine::EngineConfig;
use crate::{ClientConfig, Fetched, KvClient, TransferError, limits};

/// Where a prefix came from: endpoint, slot, generation.
type Origin = (String, u64, u64);
/// Its copy here; empty while it is on its way.
type Copy = Arc<OnceCell<LeaseKey>>;

/// Copies of other nodes' prefixes.
#[derive(Debug)]
pub(super) struct Relay {
    engine: EngineConfig,
    client: OnceLock<KvClient>,
    copies: Mutex<HashMap<Origin, Copy>>,
}

impl Relay {
    pub(super) fn new(engine: EngineConfig) -> Self {
        Self {
            engine,
            client: OnceLock::new(),
            copies: Mutex::default(),
        }
    }

    fn client(&self) -> Result<&KvClient, TransferError> {
        if let Some(client) = self.client.get() {
            return Ok(client);
        }
        let client = KvClient::new(ClientConfig::new(self.engine.clone()))?;
        Ok(self.client.get_or_init(|| client))
    }

    fn copy(&self, origin: &Origin) -> Result<Copy, TransferError> {
        let mut copies = self.copies.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(copy) = copies.get(origin) {
            return Ok(Arc::clone(copy));
        }
        if copies.len() >= limits::MAX_RELAYED {
            // Those that nobody asks for at this moment; their copies go by their leases.
            copies.retain(|_, copy| Arc::strong_count(copy) > 1);
        }
        if copies.len() >= limits::MAX_RELAYED {
            return Err(TransferError::TooMany {
                what: "prefixes of other nodes",
                limit: limits::MAX_RELAYED,
            });
        }
        let copy = Copy::default();
        copies.insert(origin.clone(), Arc::clone(&copy));
        Ok(copy)
    }

    fn forget(&self, origin: &Origin, copy: &Copy) {
        let mut copies = self.copies.lock().unwrap_or_else(PoisonError::into_inner);
        if copies
            .get(origin)
            .is_some_and(|known| Arc::ptr_eq(known, copy))
        {
            copies.remove(origin);
        }
    }
}

impl Service {
    /// The slot of this node that holds the prefix behind a foreign `handle`; reads it first where needed.
    pub(super) async fn relayed(
        &self,
        handle: &PrefixHandle,
        bearer: &Bearer,
    ) -> Result<(u64, u64), TransferError> {
        let request = FetchRequest {
            epoch: bearer.epoch,
            ..FetchRequest::new(handle, &bearer.request_id, &bearer.receiver)
        };
        let relay = &self.node.relay;
        let origin = (handle.endpoint.clone(), handle.slot, handle.generation);
        let copy = relay.copy(&origin)?;
        if let Some(key) = copy.get() {
            let ttl = limits::RELAY_TTL;
            let kept = self.node.table().renew(self.node.now(), *key, ttl);
            if kept.is_ok() {
                relay.client()?.redeem(&request).await?;
                return Ok((key.slot, key.generation));
            }
            // The copy has gone meanwhile: fetch it anew.
            relay.forget(&origin, &copy);
            return Box::pin(self.relayed(handle, bearer)).await;
        }
        // Whoever brings the prefix uses its token up with that; the others have waited, and show theirs now.
        let mut brought = false;
        let bring = || {
            brought = true;
            self.bring(request)
        };
        match copy.get_or_try_init(bring).await {
            Ok(key) => {
                if !brought {
                    relay.client()?.redeem(&request).await?;
                }
                Ok((key.slot, key.generation))
            }
            Err(error) => {
                relay.forget(&origin, &copy);
                Err(error)
            }
        }
    }

    async fn bring(&self, request: FetchRequest<'_>) -> Result<LeaseKey, TransferError> {
        let node = &self.node;
        let client = node.relay.client()?;
        let fetched = client.fetch_part(request).await?;
        let asked = Reservation {
            bytes: fetched.bytes,
            ttl: limits::RELAY_TTL,
            request_id: request.request_id.to_owned(),
            offer: None,
            cache: None,
        };
        let wait = Deadline::after(&SystemClock, limits::DEFAULT_TRANSFER_DEADLINE);
        let grant = node.reserve_in_line(asked, wait).await?;
        let kept = keep(Arc::clone(node), grant.offset, fetched).await;
        let sealed = kept.and_then(|manifest| node.table().seal(node.now(), grant.key, manifest));
        if let Err(error) = sealed {
            node.table().release(node.now(), grant.key);
            return Err(error);
        }
        Ok(grant.key)
    }
}

/// Writes a prefix that was read and checked into the pool.
async fn keep(node: Arc<Node>, offset: u64, fetched: Fetched) -> Result<Manifest, TransferError> {
    let write = move || {
        let outside = || TransferError::invalid("bytes", "the slot reaches past the pool");
        let offset = usize::try_from(offset).map_err(|_| outside())?;
        fetched.visit(|at, bytes| {
            let written = node.memory.write(offset + at, bytes);
            written.then_some(()).ok_or_else(outside)
        })?;
        Ok(fetched.manifest().clone())
    };
    let written = tokio::task::spawn_blocking(write).await;
    written.map_err(|_| TransferError::Stopped)?
}
