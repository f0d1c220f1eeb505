use std::time::Duration;

use base::{Deadline, clock::SystemClock, limits::CONTROL_DEADLINE, task};
use proto::v1;
use tokio::sync::mpsc;

use super::channels::{Channels, call};
use crate::{TransferError, limits, wire};

/// A lease on a slot: while it lives, the payload stays where it is. Dropping it releases the slot
/// in the background; if that cannot be sent, the lease ends by its time to live.
#[derive(Debug)]
pub struct Lease {
    /// Taken when the lease is given up.
    terms: Option<Terms>,
    releases: mpsc::Sender<Terms>,
}

/// What names a lease to its service.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Terms {
    pub(super) endpoint: String,
    pub(super) slot: u64,
    pub(super) generation: u64,
    pub(super) lease: u64,
}

impl Lease {
    /// Passes the lease on: from here on whoever holds its number renews and releases it, and if
    /// nobody does, it ends by its time to live.
    pub fn hand_over(mut self) {
        self.terms = None;
    }

    /// Names it, unless it was passed on.
    pub(super) fn terms(&self) -> Option<&Terms> {
        self.terms.as_ref()
    }

    pub(super) fn dismantle(mut self) -> Option<Terms> {
        self.terms.take()
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if let Some(terms) = self.terms.take()
            && self.releases.try_send(terms).is_err()
        {
            tracing::debug!("a lease is left to its time to live");
        }
    }
}

/// Sends the releases of dropped leases.
#[derive(Debug)]
pub(super) struct Releaser {
    releases: mpsc::Sender<Terms>,
    _task: task::Owned<()>,
}

impl Releaser {
    pub(super) fn start(channels: Channels) -> Self {
        let (releases, mut queue) = mpsc::channel(limits::MAX_PENDING_RELEASES);
        let task = task::spawn(async move {
            while let Some(terms) = queue.recv().await {
                let deadline = Deadline::after(&SystemClock, CONTROL_DEADLINE);
                if let Err(error) = release(&channels, Some(terms), deadline).await {
                    tracing::debug!(%error, "a lease is left to its time to live");
                }
            }
        });
        Self {
            releases,
            _task: task,
        }
    }

    pub(super) fn lease(&self, terms: Terms) -> Lease {
        Lease {
            terms: Some(terms),
            releases: self.releases.clone(),
        }
    }
}

pub(super) async fn release(
    channels: &Channels,
    terms: Option<Terms>,
    deadline: Deadline,
) -> Result<(), TransferError> {
    let Some(Terms {
        endpoint,
        slot,
        generation,
        lease,
    }) = terms
    else {
        return Ok(());
    };
    let mut stub = channels.stub(&endpoint)?;
    let message = v1::ReleaseRequest {
        slot,
        generation,
        lease,
    };
    call("releasing a lease", deadline, message, |request| {
        stub.release(request)
    })
    .await?;
    Ok(())
}

pub(super) async fn renew(
    channels: &Channels,
    terms: &Terms,
    ttl: Duration,
    deadline: Deadline,
) -> Result<(), TransferError> {
    let mut stub = channels.stub(&terms.endpoint)?;
    let message = v1::RenewRequest {
        slot: terms.slot,
        generation: terms.generation,
        lease: terms.lease,
        ttl_ms: wire::millis(ttl),
    };
    call("renewing a lease", deadline, message, |request| {
        stub.renew(request)
    })
    .await?;
    Ok(())
}
