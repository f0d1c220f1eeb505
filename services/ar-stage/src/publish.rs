//! Rows on their way into the pool of the node: looked for in its cache, else written layer by layer while they
//! are computed.
use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use futures_util::future::try_join_all;
use kv::PrefixIdentity;
use kv_transfer::{CacheTerms, Description, KvClient, Lease, Publication, TransferError};
use model::PrefixKv;
use proto::v1::{PrefixHandle, prefix_row::Kind};
use stage::StageError;
use tokio::sync::{mpsc, oneshot};

use crate::stream::{BegunRow, Layers, Part};

/// Scope of requests of nobody in particular; no tenant has such a name.
const NOBODY: &str = ":";

/// Rows as the thread that computes has them at the end.
pub(crate) type Rows = Vec<(Kind, PrefixIdentity, PrefixKv)>;

/// A row in the pool.
#[derive(Debug)]
pub(crate) struct Published {
    pub(crate) kind: Kind,
    pub(crate) handle: PrefixHandle,
    pub(crate) lease: Lease,
    /// It lay there already.
    pub(crate) found: bool,
    /// How it got there; empty if it lay there.
    pub(crate) transport: String,
}

/// What computing has cost lately: what a cached row saves.
#[derive(Debug, Default)]
pub(crate) struct Pace {
    ns_per_token: AtomicU64,
}

impl Pace {
    pub(crate) fn learn(&self, tokens: usize, took: Duration) {
        let each = took.as_nanos() / tokens.max(1) as u128;
        let each = u64::try_from(each).unwrap_or(u64::MAX);
        self.ns_per_token.store(each, Ordering::Relaxed);
    }

    pub(crate) fn cost_us(&self, tokens: usize) -> u64 {
        let each = self.ns_per_token.load(Ordering::Relaxed);
        each.saturating_mul(tokens as u64) / 1_000
    }
}

/// Who publishes one request's rows. Either all of them stay in the pool or none: whoever drops what comes of it
/// releases them.
#[derive(Debug)]
pub(crate) struct Publisher<'a> {
    pub(crate) client: KvClient,
    pub(crate) endpoint: &'a str,
    pub(crate) request_id: &'a str,
    /// Whose request it is; empty: nobody's in particular.
    pub(crate) tenant: &'a str,
    /// Pictures are shown: no row of the request is everybody's.
    pub(crate) shows: bool,
    pub(crate) pace: &'a Pace,
}

/// A row whose place in the pool is known.
#[derive(Debug)]
pub(crate) enum Placed {
    /// It lies there.
    Found(Published),
    /// It is being written.
    Open(Box<Open>),
}

/// A row that is being written.
#[derive(Debug)]
pub(crate) struct Open {
    kind: Kind,
    handle: PrefixHandle,
    publication: Publication,
    parts: mpsc::Receiver<Part>,
    layers: Layers,
}

impl Placed {
    /// As receivers find it, with the lease that keeps it.
    pub(crate) fn row(&self) -> (Kind, PrefixHandle) {
        match self {
            Self::Found(row) => (row.kind, row.handle.clone()),
            Self::Open(open) => (open.kind, open.handle.clone()),
        }
    }

    pub(crate) fn is_found(&self) -> bool {
        matches!(self, Self::Found(_))
    }
}

impl Publisher<'_> {
    /// Who may find a cached row: everybody the row without the prompt and without pictures, the tenant all others.
    fn scope(&self, kind: Kind) -> &str {
        match kind {
            Kind::Uncond if !self.shows => "",
            Kind::Uncond | Kind::Cond | Kind::Unspecified => own_scope(self.tenant),
        }
    }

    /// Looks a row up in the cache of the node.
    pub(crate) async fn find(
        &self,
        kind: Kind,
        identity: PrefixIdentity,
    ) -> Result<Option<Published>, TransferError> {
        let found = self
            .client
            .lookup(self.endpoint, identity, self.scope(kind), self.request_id);
        Ok(found.await?.map(|(handle, lease)| Published {
            kind,
            handle,
            lease,
            found: true,
            transport: String::new(),
        }))
    }

    /// A place for every row. Rows that lie in the pool already need not be computed; `known` were found before.
    pub(crate) async fn place(
        &self,
        begun: Vec<BegunRow>,
        mut known: Vec<Published>,
    ) -> Result<Vec<Placed>, TransferError> {
        // One request after the other: two that each hold one row of a full pool would wait for ever.
        let _turn = self.client.turn().await?;
        let mut placed = Vec::new();
        for row in begun {
            let same = |known: &Published| known.kind == row.kind;
            let found = match known.iter().position(same) {
                Some(at) => Some(known.swap_remove(at)),
                None => self.find(row.kind, row.identity).await?,
            };
            if let Some(found) = found {
                row.found.store(true, Ordering::Release);
                placed.push(Placed::Found(found));
                continue;
            }
            // When a later row fails, the earlier ones are dropped and their slots freed.
            placed.push(Placed::Open(Box::new(self.open(row).await?)));
        }
        // A row that was found and not begun at all.
        placed.extend(known.into_iter().map(Placed::Found));
        placed.sort_by_key(|placed| placed.row().0 as i32);
        Ok(placed)
    }

    async fn open(&self, row: BegunRow) -> Result<Open, TransferError> {
        let description = Description {
            request_id: self.request_id.to_owned(),
            identity: row.identity,
            geometry: row.geometry,
            tokens: row.tokens,
            cache: Some(CacheTerms {
                scope: self.scope(row.kind).to_owned(),
                cost_us: self.pace.cost_us(row.tokens),
            }),
        };
        let publication = self.client.offer(self.endpoint, description).await?;
        let handle = publication.handle().cloned();
        Ok(Open {
            kind: row.kind,
            handle: handle.ok_or(TransferError::Stopped)?,
            publication,
            parts: row.parts,
            layers: Layers::new(row.geometry, row.tokens),
        })
    }

    /// Writes every row while it is computed, to the end. `rest` comes when all is computed.
    pub(crate) async fn write(
        &self,
        placed: Vec<Placed>,
        rest: oneshot::Receiver<Rows>,
    ) -> Result<Vec<Published>, StageError> {
        let refused = |error: TransferError| StageError::of(&error);
        let every = self.client.ttl() / 4;
        let follow = async |placed: Placed| match placed {
            Placed::Found(_) => Ok::<_, TransferError>(placed),
            Placed::Open(mut open) => {
                open.follow(every).await?;
                Ok(Placed::Open(open))
            }
        };
        let followed = try_join_all(placed.into_iter().map(follow));
        let followed = followed.await.map_err(refused)?;
        let rest = rest.await.map_err(|_| StageError::Cancelled)?;
        let mut published = Vec::new();
        for placed in followed {
            published.push(match placed {
                Placed::Found(found) => found,
                Placed::Open(open) => open.finish(&rest).await.map_err(refused)?,
            });
        }
        Ok(published)
    }
}

impl Open {
    /// Writes layers as they come, until the last one or until no more come.
    async fn follow(&mut self, every: Duration) -> Result<(), TransferError> {
        loop {
            tokio::select! {
                part = self.parts.recv() => {
                    let Some(part) = part else { return Ok(()) };
                    for layer in self.layers.add(part) {
                        self.write(layer).await?;
                    }
                }
                () = tokio::time::sleep(every) => self.publication.renew().await?,
            }
        }
    }

    async fn write(&mut self, layer: Vec<u8>) -> Result<(), TransferError> {
        if self.publication.is_old() {
            self.publication.renew().await?;
        }
        self.publication.write(layer).await
    }

    /// Writes what did not come layer by layer, and seals.
    async fn finish(mut self: Box<Self>, rest: &Rows) -> Result<Published, TransferError> {
        let computed = rest.iter().find(|(kind, _, _)| *kind == self.kind);
        while let Some((_, _, prefix)) = computed
            && self.layers.next < prefix.geometry().layers
        {
            let layer = prefix.layer_bytes(self.layers.next);
            self.layers.next += 1;
            self.write(layer).await?;
        }
        let sealed = self.publication.finish().await?;
        Ok(Published {
            kind: self.kind,
            handle: sealed.handle,
            lease: sealed.lease,
            found: false,
            transport: sealed.transport,
        })
    }
}

/// Scope of what only the tenant may find.
pub(crate) fn own_scope(tenant: &str) -> &str {
    if tenant.is_empty() { NOBODY } else { tenant }
}

#[cfg(test)]
pub(crate) mod tests;
