//! Two-stage shutdown: the first signal asks for a clean stop, the second one ends it now.
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

use crate::task;

/// Who wants the process to stop, and how urgently. Clones share one state.
#[derive(Debug, Clone, Default)]
pub struct Shutdown {
    graceful: CancellationToken,
    now: CancellationToken,
}

impl Shutdown {
    /// Nobody wants to stop yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Follows SIGTERM and SIGINT. The returned task listens as long as it is held.
    ///
    /// # Errors
    /// The operating system refuses a signal handler.
    pub fn on_signals() -> std::io::Result<(Self, task::Owned<()>)> {
        let shutdown = Self::new();
        let (mut term, mut int) = (
            signal(SignalKind::terminate())?,
            signal(SignalKind::interrupt())?,
        );
        let seen = shutdown.clone();
        let listener = task::spawn(async move {
            loop {
                tokio::select! {
                    _ = term.recv() => {}
                    _ = int.recv() => {}
                }
                seen.signal();
            }
        });
        Ok((shutdown, listener))
    }

    /// One more signal: the first asks for a clean stop, later ones for an end now.
    pub fn signal(&self) {
        if self.graceful.is_cancelled() {
            self.now.cancel();
        } else {
            self.graceful.cancel();
        }
    }

    /// Asks for a clean stop.
    pub fn trigger(&self) {
        self.graceful.cancel();
    }

    /// Asks for an end now.
    pub fn trigger_now(&self) {
        self.graceful.cancel();
        self.now.cancel();
    }

    /// A clean stop was asked for.
    pub fn is_requested(&self) -> bool {
        self.graceful.is_cancelled()
    }

    /// An end now was asked for.
    pub fn is_forced(&self) -> bool {
        self.now.is_cancelled()
    }

    /// Waits until a clean stop is asked for.
    pub async fn requested(&self) {
        self.graceful.cancelled().await;
    }

    /// Waits until an end now is asked for.
    pub async fn forced(&self) {
        self.now.cancelled().await;
    }

    /// The token behind [`Shutdown::requested`], for code that takes one.
    pub fn token(&self) -> &CancellationToken {
        &self.graceful
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn first_signal_is_graceful_second_is_now() {
        let shutdown = Shutdown::new();
        let seen = shutdown.clone();
        assert!(!seen.is_requested());
        shutdown.signal();
        seen.requested().await;
        assert!(!seen.is_forced());
        shutdown.signal();
        seen.forced().await;
        assert!(seen.is_forced());
    }
}
