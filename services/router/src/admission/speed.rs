//! How fast work gets done, as measured.
use std::time::Duration;

/// Weight of the newest finished request in the measured speed.
const SMOOTHING: f64 = 0.2;
/// Seconds a request is taken to need as long as none has finished.
const UNMEASURED_SECONDS: f64 = 1.0;
/// Requests that must have ended before a deadline is refused by what they took.
const ENOUGH: u32 = 8;

/// Cost a second, of all requests together.
#[derive(Debug, Default)]
pub(super) struct Speed {
    rate: Option<f64>,
    samples: u32,
}

impl Speed {
    /// A request of `cost` took this long with `together` requests running, itself included.
    #[allow(clippy::cast_precision_loss)] // a rate needs no more than 53 bits
    pub(super) fn measure(&mut self, cost: u64, took: Duration, together: usize) {
        let sample = cost as f64 * together as f64 / took.as_secs_f64().max(1e-6);
        self.samples = self.samples.saturating_add(1);
        self.rate = Some(match self.rate {
            None => sample,
            Some(rate) => rate + SMOOTHING * (sample - rate),
        });
    }

    /// The speed, once enough requests have ended to say so.
    pub(super) fn known(&self) -> Option<f64> {
        self.rate
            .filter(|rate| self.samples >= ENOUGH && *rate > 0.0)
    }

    /// Of `cost`, what is left of a request that has run for `had` beside others, `together` in all.
    pub(super) fn left(&self, cost: u64, had: Duration, together: usize) -> u64 {
        #[allow(clippy::cast_precision_loss)]
        let done = self.rate.map_or(0.0, |rate| {
            had.as_secs_f64() * rate / together.max(1) as f64
        });
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // saturates
        let done = done as u64;
        cost.saturating_sub(done)
    }

    /// Seconds until `cost`, the work of `ahead` requests, is done; `places` of them run at once.
    #[allow(clippy::cast_precision_loss)]
    pub(super) fn seconds(&self, cost: u64, ahead: usize, places: usize) -> f64 {
        match self.rate {
            Some(rate) => cost as f64 / rate.max(1e-6),
            None => UNMEASURED_SECONDS * ahead as f64 / places as f64,
        }
    }
}
