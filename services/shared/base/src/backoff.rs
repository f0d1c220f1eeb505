//! Bounded exponential waits between retries.
use std::time::Duration;

/// Doubles from `first` to `most`, then stays there; `reset` after a success.
#[derive(Debug, Clone)]
pub struct Backoff {
    first: Duration,
    most: Duration,
    next: Duration,
}

impl Backoff {
    /// Starts at `first`.
    pub fn new(first: Duration, most: Duration) -> Self {
        Self {
            first,
            most,
            next: first,
        }
    }

    /// The wait before the next try.
    pub fn next_delay(&mut self) -> Duration {
        let delay = self.next;
        self.next = (self.next * 2).min(self.most);
        delay
    }

    /// Back to the first wait.
    pub fn reset(&mut self) {
        self.next = self.first;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_double_up_to_the_bound_and_reset() {
        let ms = Duration::from_millis;
        let mut backoff = Backoff::new(ms(50), ms(150));
        assert_eq!(backoff.next_delay(), ms(50));
        assert_eq!(backoff.next_delay(), ms(100));
        assert_eq!(backoff.next_delay(), ms(150));
        assert_eq!(backoff.next_delay(), ms(150));
        backoff.reset();
        assert_eq!(backoff.next_delay(), ms(50));
    }
}
