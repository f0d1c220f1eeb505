//! A point in time by which something must have ended.
use std::{
    future::Future,
    time::{Duration, Instant},
};

use crate::{Code, Fault, clock::Clock};

/// The time is up.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("deadline exceeded while waiting for {what}")]
pub struct DeadlineExceeded {
    what: &'static str,
}

impl Fault for DeadlineExceeded {
    fn code(&self) -> Code {
        Code::DeadlineExceeded
    }
}

/// When a request must have ended. Copies are passed down every hop.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Deadline(Instant);

impl Deadline {
    /// `after` from now.
    pub fn after(clock: &dyn Clock, after: Duration) -> Self {
        Self(clock.now() + after)
    }

    /// At a given instant.
    pub fn at(instant: Instant) -> Self {
        Self(instant)
    }

    /// The instant itself.
    pub fn instant(self) -> Instant {
        self.0
    }

    /// Time left; zero once past.
    pub fn remaining(self, clock: &dyn Clock) -> Duration {
        self.0.saturating_duration_since(clock.now())
    }

    /// It is past.
    pub fn is_past(self, clock: &dyn Clock) -> bool {
        self.remaining(clock).is_zero()
    }

    /// The nearer of this deadline and `after` from now.
    #[must_use]
    pub fn min_after(self, clock: &dyn Clock, after: Duration) -> Self {
        self.min(Self::after(clock, after))
    }

    /// Runs `future` until the deadline. `what` names the wait in the error.
    pub async fn bound<T>(
        self,
        what: &'static str,
        future: impl Future<Output = T>,
    ) -> Result<T, DeadlineExceeded> {
        tokio::time::timeout_at(self.0.into(), future)
            .await
            .map_err(|_| DeadlineExceeded { what })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::ManualClock;

    #[test]
    fn remaining_shrinks_to_zero() {
        let clock = ManualClock::new();
        let deadline = Deadline::after(&clock, Duration::from_secs(2));
        clock.advance(Duration::from_secs(1));
        assert_eq!(deadline.remaining(&clock), Duration::from_secs(1));
        assert!(!deadline.is_past(&clock));
        clock.advance(Duration::from_secs(5));
        assert!(deadline.is_past(&clock));
    }

    #[tokio::test]
    async fn a_wait_without_end_ends_typed() {
        let deadline = Deadline::after(&crate::clock::SystemClock, Duration::from_millis(5));
        let error = deadline
            .bound("the test", std::future::pending::<()>())
            .await
            .unwrap_err();
        assert_eq!(error.code(), Code::DeadlineExceeded);
        assert!(error.to_string().contains("the test"));
    }
}
