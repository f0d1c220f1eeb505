//! The seam for time. Code that decides by time takes a [`Clock`]; tests and simulations drive it.
use std::{
    fmt,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

/// A source of time.
pub trait Clock: Send + Sync + fmt::Debug {
    /// Monotonic time.
    fn now(&self) -> Instant;
    /// Milliseconds since the Unix epoch, for people and for epochs that outlive a process.
    fn unix_millis(&self) -> u64;
}

/// The clock of the machine. Inside a tokio runtime with paused time it follows that runtime.
#[derive(Debug, Clone, Copy, Default)]
pub struct SystemClock;

/// Short name of [`SystemClock`].
pub type System = SystemClock;

impl Clock for SystemClock {
    fn now(&self) -> Instant {
        tokio::time::Instant::now().into_std()
    }

    #[allow(clippy::disallowed_methods)] // the one place that reads the wall clock
    fn unix_millis(&self) -> u64 {
        let since = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default();
        u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
    }
}

/// The machine's clock, ready to share.
pub fn system() -> Arc<dyn Clock> {
    Arc::new(SystemClock)
}

/// Monotonic time of the machine, for measurements that decide nothing.
pub fn now() -> Instant {
    SystemClock.now()
}

/// Milliseconds since `start`.
pub fn millis_since(start: Instant) -> f64 {
    now().saturating_duration_since(start).as_secs_f64() * 1e3
}

/// A clock that moves only when told to.
#[derive(Debug, Clone)]
pub struct ManualClock {
    start: Instant,
    offset: Arc<Mutex<Duration>>,
}

impl Default for ManualClock {
    fn default() -> Self {
        Self {
            start: now(),
            offset: Arc::default(),
        }
    }
}

impl ManualClock {
    /// A clock standing still.
    pub fn new() -> Self {
        Self::default()
    }

    /// Moves time forward.
    pub fn advance(&self, by: Duration) {
        *self.offset.lock().unwrap_or_else(PoisonError::into_inner) += by;
    }

    fn offset(&self) -> Duration {
        *self.offset.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Clock for ManualClock {
    fn now(&self) -> Instant {
        self.start + self.offset()
    }

    fn unix_millis(&self) -> u64 {
        u64::try_from(self.offset().as_millis()).unwrap_or(u64::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn manual_clock_moves_only_when_told() {
        let clock = ManualClock::new();
        let start = clock.now();
        assert_eq!(clock.now(), start);
        clock.clone().advance(Duration::from_millis(1500));
        assert_eq!(clock.now() - start, Duration::from_millis(1500));
        assert_eq!(clock.unix_millis(), 1500);
    }

    #[test]
    fn system_clock_is_monotonic_and_past_2020() {
        let start = SystemClock.now();
        assert!(SystemClock.now() >= start);
        assert!(SystemClock.unix_millis() > 1_577_836_800_000);
    }
}
