//! What all requests with the same system prompt begin with. It lies in the cache of the node, for every stage there
//! and for those that start later: none of them computes it twice.
use std::{sync::Arc, time::Duration};

use base::task::Tracker;
use kv::PrefixIdentity;
use kv_transfer::{CacheTerms, KvClient, PublishRequest, TransferError};
use model::{PAGE_TOKENS, PrefixKv, RowTokens};
use stage::{Ranks, StageError};

use crate::{
    pools::{Names, Pools, shared_by_all},
    publish::Publisher,
    row::is_ring,
};

/// Longest wait for room in the node's pool: who waits for it keeps rows of requests waiting behind.
const LEAVE_PATIENCE: Duration = Duration::from_secs(1);

/// Whole pages at the start of a request's rows that say nothing about whose it is.
#[derive(Debug, Clone)]
pub(crate) struct Beginning {
    identity: PrefixIdentity,
    tokens: usize,
    names: Names,
}

impl Beginning {
    /// None where it is shorter than a page, and where ranks do not hold whole rows.
    pub(crate) fn of(
        (ranks, pools): (&Ranks, &Pools),
        row: &RowTokens<'_>,
    ) -> Result<Option<Self>, StageError> {
        let shared = shared_by_all(row).min(row.layout.prefix_len().saturating_sub(1));
        let tokens = shared / PAGE_TOKENS * PAGE_TOKENS;
        if tokens == 0 || is_ring(ranks) || pools.pages() == 0 {
            return Ok(None);
        }
        let model = ranks.first();
        Ok(Some(Self {
            identity: model.beginning_identity(row, tokens)?,
            tokens,
            names: Names::new(model, row, "")?.first(tokens / PAGE_TOKENS),
        }))
    }

    pub(crate) fn tokens(&self) -> usize {
        self.tokens
    }

    /// Brings it here out of the cache of the node, unless it is here. True when it is in neither, so that whoever
    /// computes it is to leave it there.
    ///
    /// A cache that fails costs time, nothing else: that is logged, and the tokens are computed.
    pub(crate) async fn bring(
        &self,
        (ranks, pools, tasks): (&Arc<Ranks>, &Pools, &Tracker),
        publisher: &Publisher<'_>,
    ) -> bool {
        if pools.has(&self.names) {
            return false;
        }
        let fetched = self.fetch(ranks, publisher).await;
        let placed = match fetched {
            Ok(None) => return true,
            Ok(Some(bytes)) => self.place((ranks, pools, tasks), bytes).await,
            Err(error) => Err(StageError::of(&error)),
        };
        if let Err(error) = placed {
            tracing::warn!(%error, tokens = self.tokens, "a cached beginning is computed again");
        }
        false
    }

    async fn fetch(
        &self,
        ranks: &Ranks,
        publisher: &Publisher<'_>,
    ) -> Result<Option<Vec<u8>>, TransferError> {
        let Publisher {
            client,
            endpoint,
            request_id,
            ..
        } = publisher;
        let found = client.lookup(endpoint, self.identity, "", request_id);
        // The lease is held until the bytes are here.
        let Some((handle, _lease)) = found.await? else {
            return Ok(None);
        };
        let geometry = &ranks.info().kv;
        let fetched = client
            .fetch(&handle, geometry, request_id, RECEIVER)
            .await?;
        fetched.to_vec().map(Some)
    }

    async fn place(
        &self,
        (ranks, pools, tasks): (&Arc<Ranks>, &Pools, &Tracker),
        bytes: Vec<u8>,
    ) -> Result<(), StageError> {
        let (ranks, pools, beginning) = (Arc::clone(ranks), pools.clone(), self.clone());
        let place = move || {
            let Self {
                tokens, mut names, ..
            } = beginning;
            let prefix = PrefixKv::from_bytes(ranks.info().kv, tokens, &bytes)?;
            pools.place(&ranks, &mut names, &prefix)
        };
        let placed = tasks.spawn_blocking(place).await;
        placed.map_err(|_| StageError::EngineStopped { engine: "pages" })?
    }

    /// Leaves it in the cache of the node, for everybody; `cost_us` is what computing it takes.
    pub(crate) async fn leave(
        self,
        (ranks, pools, tasks): (Arc<Ranks>, Pools, Tracker),
        (client, endpoint): (KvClient, String),
        cost_us: u64,
    ) {
        let Self {
            identity, tokens, ..
        } = self;
        let read = move || pools.read(&ranks, &self.names);
        let Ok(Ok(Some(prefix))) = tasks.spawn_blocking(read).await else {
            // Its pages went meanwhile: whoever computes it again leaves it.
            return;
        };
        let request = PublishRequest {
            request_id: RECEIVER.to_owned(),
            identity,
            geometry: *prefix.geometry(),
            tokens,
            payload: prefix.to_bytes(),
        };
        let terms = CacheTerms {
            scope: String::new(),
            cost_us,
        };
        let client = client.within(Some(LEAVE_PATIENCE));
        match client.publish_cached(&endpoint, request, terms).await {
            // It stays after the lease.
            Ok(left) => drop(left.lease),
            Err(error) => tracing::warn!(%error, tokens, "a beginning is not cached"),
        }
    }
}

/// Who reads and writes beginnings, for operators.
const RECEIVER: &str = "ar-stage";
