//! The line of producers that wait for room. Whoever is at its head gets the next room that is large enough,
//! and nobody passes: a small reservation behind a large one waits for it.
use std::sync::atomic::{AtomicUsize, Ordering};

use base::Deadline;
use tokio::sync::Mutex;

use super::node::Node;
use super::slots::{Grant, Reservation};
use crate::{TransferError, limits};

/// Producers in line.
#[derive(Debug, Default)]
pub(super) struct Line {
    /// Held by the head of the line; the others get it in the order in which they came.
    head: Mutex<()>,
    waiting: AtomicUsize,
}

/// A place in line.
struct Waiter<'a>(&'a Line);

impl Drop for Waiter<'_> {
    fn drop(&mut self) {
        self.0.waiting.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Line {
    /// Producers in line.
    pub(super) fn waiting(&self) -> usize {
        self.waiting.load(Ordering::Acquire)
    }

    fn join(&self) -> Result<Waiter<'_>, TransferError> {
        let before = self.waiting.fetch_add(1, Ordering::AcqRel);
        let waiter = Waiter(self);
        if before >= limits::MAX_WAITING {
            return Err(TransferError::TooMany {
                what: "reservations in line",
                limit: limits::MAX_WAITING,
            });
        }
        Ok(waiter)
    }
}

impl Node {
    /// Reserves now, or turns the caller away.
    pub(super) fn reserve_now(&self, asked: Reservation) -> Result<Grant, TransferError> {
        // Who does not wait does not pass those who do.
        if self.line.waiting() > 0 {
            return Err(TransferError::PoolFull {
                bytes: asked.bytes,
                retry_after: limits::RETRY_AFTER,
            });
        }
        self.table().reserve(self.now(), asked)
    }

    /// Reserves as soon as there is room, in the order of the calls.
    pub(super) async fn reserve_in_line(
        &self,
        asked: Reservation,
        deadline: Deadline,
    ) -> Result<Grant, TransferError> {
        let _waiter = self.line.join()?;
        let full = TransferError::PoolFull {
            bytes: asked.bytes,
            retry_after: limits::RETRY_AFTER,
        };
        let Ok(_head) = deadline
            .bound("waiting in line for room", self.line.head.lock())
            .await
        else {
            return Err(full);
        };
        loop {
            let mut changes = self.changes();
            let reserved = self.table().reserve(self.now(), asked.clone());
            match reserved {
                Err(TransferError::PoolFull { .. } | TransferError::TooMany { .. }) => {}
                answer => return answer,
            }
            let changed = deadline.bound("waiting for room", changes.changed()).await;
            match changed {
                Ok(Ok(())) => {}
                Ok(Err(_)) => return Err(TransferError::Stopped),
                Err(_) => return Err(full),
            }
        }
    }
}
