//! What producers and consumers use: publish a prefix into a node's pool, fetch one or a part of one out of
//! it, look for one in the cache.

mod channels;
mod config;
mod copy;
mod fetch;
mod grant;
mod lease;
mod lookup;
mod publish;
mod pull;
mod reach;
mod read;
mod spare;
mod sums;

use std::sync::Arc;
use std::time::Duration;

use base::Deadline;
use tokio::sync::{Mutex, OwnedMutexGuard};

pub use config::ClientConfig;
pub use fetch::{FetchRequest, Fetched};
pub use lease::Lease;
pub use publish::{CacheTerms, Description, Publication, PublishRequest, Published};
pub use reach::{MAPPED, Place, Reach};
pub use sums::Sums;

use crate::TransferError;
use channels::Channels;
use lease::Releaser;

/// A client of any number of transfer services. Clones share its UCX thread and connections.
#[derive(Debug, Clone)]
pub struct KvClient {
    inner: Arc<Inner>,
    /// Bound of each transfer, when it is shorter than that of the configuration.
    timeout: Option<Duration>,
}

#[derive(Debug)]
struct Inner {
    config: ClientConfig,
    channels: Channels,
    releaser: Releaser,
    reach: Reach,
    turn: Arc<Mutex<()>>,
    spares: spare::Spares,
}

/// The turn of one request to publish; it ends when this is dropped.
#[derive(Debug)]
pub struct Turn {
    _held: OwnedMutexGuard<()>,
}

impl KvClient {
    /// Opens the transports. Needs a tokio runtime, on which leases are released.
    ///
    /// # Errors
    /// [`TransferError::Invalid`] for a bad configuration, [`TransferError::Ucx`] when a transport
    /// cannot be opened.
    pub fn new(config: ClientConfig) -> Result<Self, TransferError> {
        config.validate()?;
        let reach = Reach::open(&config.engine)?;
        let channels = Channels::default();
        let releaser = Releaser::start(channels.clone());
        Ok(Self {
            inner: Arc::new(Inner {
                config,
                channels,
                releaser,
                reach,
                turn: Arc::default(),
                spares: spare::Spares::default(),
            }),
            timeout: None,
        })
    }

    /// The same client for transfers that are to take no longer than `timeout` each.
    #[must_use]
    pub fn within(&self, timeout: Option<Duration>) -> Self {
        Self {
            inner: Arc::clone(&self.inner),
            timeout,
        }
    }

    /// Time to live of its leases.
    #[must_use]
    pub fn ttl(&self) -> Duration {
        self.inner.config.ttl
    }

    /// Waits for this request's turn to publish several prefixes that are useless one by one. Without turns,
    /// requests that each hold a part of a full pool could wait for each other's.
    ///
    /// # Errors
    /// [`TransferError::Deadline`] when the turn does not come by the deadline of this client.
    pub async fn turn(&self) -> Result<Turn, TransferError> {
        let what = "waiting for the turn to publish";
        let turn = Arc::clone(&self.inner.turn).lock_owned();
        let held = self.deadline().bound(what, turn).await;
        let held = held.map_err(|_| TransferError::Deadline { what })?;
        Ok(Turn { _held: held })
    }

    /// Ends a lease now and waits for the answer. Dropping a lease ends it too, in the background.
    ///
    /// # Errors
    /// The service cannot be reached; the lease then ends by its time to live.
    pub async fn release(&self, lease: Lease) -> Result<(), TransferError> {
        let deadline = self.deadline();
        lease::release(&self.inner.channels, lease.dismantle(), deadline).await
    }

    /// Prolongs a lease.
    ///
    /// # Errors
    /// The lease is gone, or the service cannot be reached.
    pub async fn renew(&self, lease: &Lease) -> Result<(), TransferError> {
        let ttl = self.inner.config.ttl;
        match lease.terms() {
            Some(terms) => lease::renew(&self.inner.channels, terms, ttl, self.deadline()).await,
            None => Ok(()),
        }
    }

    /// Deadline of what starts now. It lies before the expiry of any lease taken from now on, so
    /// that no operation is started on memory that is not ours any more.
    fn deadline(&self) -> Deadline {
        self.inner.deadline(self.timeout)
    }
}

impl Inner {
    /// As [`KvClient::deadline`], and no later than after `most`.
    fn deadline(&self, most: Option<Duration>) -> Deadline {
        let own = self.config.deadline.min(self.config.ttl);
        let bound = most.map_or(own, |most| most.min(own));
        Deadline::after(&base::clock::SystemClock, bound)
    }
}
