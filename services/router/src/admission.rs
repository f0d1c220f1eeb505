//! How much work is let in. Pure: a bounded queue in order of arrival, a bound on what runs at
//! once, and an honest guess when to come back.
use std::{
    collections::{HashMap, VecDeque},
    time::Duration,
};

/// Hints are at least and at most this.
const MIN_RETRY: Duration = Duration::from_millis(100);
const MAX_RETRY: Duration = Duration::from_secs(60);
/// Weight of the newest finished request in the measured speed.
const SMOOTHING: f64 = 0.2;
/// Seconds a request is taken to need as long as none has finished.
const UNMEASURED_SECONDS: f64 = 1.0;

/// Bounds of a router.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Requests dispatched at once.
    pub max_running: usize,
    /// Requests that may wait.
    pub max_queued: usize,
    /// Cost dispatched at once; a request above it runs alone.
    pub max_cost: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            max_running: 64,
            max_queued: 256,
            max_cost: u64::MAX,
        }
    }
}

/// Names an admitted request.
pub type Ticket = u64;

/// The queue is full.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Refused {
    /// Requests waiting.
    pub waiting: usize,
    /// When a place may be free.
    pub retry_after: Duration,
}

/// What runs and what waits.
#[derive(Debug)]
pub struct Admission {
    limits: Limits,
    running: HashMap<Ticket, u64>,
    running_cost: u64,
    queue: VecDeque<(Ticket, u64)>,
    queued_cost: u64,
    next: Ticket,
    /// Cost a second, all requests together; `None` until one has finished.
    speed: Option<f64>,
}

impl Admission {
    /// Nothing runs, nothing waits.
    pub fn new(limits: Limits) -> Self {
        Self {
            limits,
            running: HashMap::new(),
            running_cost: 0,
            queue: VecDeque::new(),
            queued_cost: 0,
            next: 0,
            speed: None,
        }
    }

    /// Takes a request into the queue; [`Admission::start`] says when it may run.
    ///
    /// # Errors
    /// The queue is full and the request could not start at once.
    pub fn submit(&mut self, cost: u64) -> Result<(Ticket, usize), Refused> {
        let at_once = self.queue.is_empty() && self.fits(cost);
        if !at_once && self.queue.len() >= self.limits.max_queued {
            let retry_after = self.retry_after();
            return Err(Refused {
                waiting: self.queue.len(),
                retry_after,
            });
        }
        let (ticket, ahead) = (self.next, self.queue.len());
        self.next += 1;
        self.queue.push_back((ticket, cost));
        self.queued_cost = self.queued_cost.saturating_add(cost);
        Ok((ticket, ahead))
    }

    /// Requests that may run now, in order of arrival.
    pub fn start(&mut self) -> Vec<Ticket> {
        let mut started = Vec::new();
        while let Some(&(ticket, cost)) = self.queue.front() {
            if !self.fits(cost) {
                break;
            }
            self.queue.pop_front();
            self.queued_cost = self.queued_cost.saturating_sub(cost);
            self.running.insert(ticket, cost);
            self.running_cost = self.running_cost.saturating_add(cost);
            started.push(ticket);
        }
        started
    }

    /// A request has ended, wherever it was. `took`: how long it ran, if it ran to its end.
    pub fn leave(&mut self, ticket: Ticket, took: Option<Duration>) {
        if let Some(cost) = self.running.remove(&ticket) {
            let together = self.running.len() + 1;
            self.running_cost = self
                .running
                .values()
                .fold(0, |sum, &c| sum.saturating_add(c));
            if let Some(took) = took {
                self.measure(cost, took, together);
            }
        } else if let Some(at) = self.queue.iter().position(|&(queued, _)| queued == ticket) {
            self.queue.remove(at);
            self.queued_cost = self
                .queue
                .iter()
                .fold(0, |sum, &(_, c)| sum.saturating_add(c));
        }
    }

    /// Requests waiting.
    pub fn waiting(&self) -> usize {
        self.queue.len()
    }

    /// Requests running.
    pub fn running(&self) -> usize {
        self.running.len()
    }

    fn fits(&self, cost: u64) -> bool {
        let alone = self.running.is_empty();
        let cheap = self
            .running_cost
            .checked_add(cost)
            .is_some_and(|total| total <= self.limits.max_cost);
        self.running.len() < self.limits.max_running && (cheap || alone)
    }

    fn measure(&mut self, cost: u64, took: Duration, together: usize) {
        #[allow(clippy::cast_precision_loss)] // a rate needs no more than 53 bits
        let sample = cost as f64 * together as f64 / took.as_secs_f64().max(1e-6);
        self.speed = Some(match self.speed {
            None => sample,
            Some(speed) => speed + SMOOTHING * (sample - speed),
        });
    }

    /// Time until everything ahead is done, spread over what may run at once.
    fn retry_after(&self) -> Duration {
        #[allow(clippy::cast_precision_loss)]
        let seconds = match self.speed {
            Some(speed) => {
                self.running_cost.saturating_add(self.queued_cost) as f64 / speed.max(1e-6)
            }
            None => {
                let ahead = (self.running.len() + self.queue.len()) as f64;
                UNMEASURED_SECONDS * ahead / self.limits.max_running.max(1) as f64
            }
        };
        Duration::try_from_secs_f64(seconds)
            .unwrap_or(MAX_RETRY)
            .clamp(MIN_RETRY, MAX_RETRY)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn limits(max_running: usize, max_queued: usize, max_cost: u64) -> Limits {
        Limits {
            max_running,
            max_queued,
            max_cost,
        }
    }

    #[test]
    fn requests_start_in_order_of_arrival() {
        let mut admission = Admission::new(limits(1, 2, u64::MAX));
        assert_eq!(admission.submit(5), Ok((0, 0)));
        assert_eq!(admission.start(), [0]);
        assert_eq!(admission.submit(5), Ok((1, 0)));
        assert_eq!(admission.submit(5), Ok((2, 1)));
        assert!(admission.start().is_empty());
        admission.leave(0, None);
        assert_eq!(admission.start(), [1]);
        admission.leave(1, None);
        assert_eq!(admission.start(), [2]);
    }

    #[test]
    fn a_full_queue_refuses_with_a_hint_that_grows_with_the_work_ahead() {
        let hint = |queued: usize| {
            let mut admission = Admission::new(limits(1, queued, u64::MAX));
            let (first, _) = admission.submit(100).unwrap();
            admission.start();
            admission.leave(first, Some(Duration::from_secs(1)));
            for _ in 0..=queued {
                admission.submit(100).unwrap();
                admission.start();
            }
            let refused = admission.submit(100).unwrap_err();
            assert_eq!(refused.waiting, queued);
            refused.retry_after
        };
        assert_eq!(hint(1), Duration::from_secs(2));
        assert_eq!(hint(9), Duration::from_secs(10));
        assert_eq!(hint(1_000), MAX_RETRY);
    }

    #[test]
    fn a_request_above_the_cost_bound_runs_alone() {
        let mut admission = Admission::new(limits(8, 8, 10));
        admission.submit(6).unwrap();
        admission.submit(100).unwrap();
        admission.submit(1).unwrap();
        assert_eq!(admission.start(), [0]);
        admission.leave(0, None);
        assert_eq!(admission.start(), [1]);
        admission.leave(1, None);
        assert_eq!(admission.start(), [2]);
    }

    #[test]
    fn leaving_the_queue_makes_room() {
        let mut admission = Admission::new(limits(1, 1, u64::MAX));
        admission.submit(1).unwrap();
        admission.start();
        let (waiting, _) = admission.submit(1).unwrap();
        assert!(admission.submit(1).is_err());
        admission.leave(waiting, None);
        assert!(admission.submit(1).is_ok());
    }

    proptest! {
        /// Bounds hold after every step, everything admitted starts in the end, in order.
        #[test]
        fn bounds_always_hold(
            steps in proptest::collection::vec((0..40_u64, any::<bool>(), any::<u8>()), 1..200),
            max_running in 1..5_usize, max_queued in 0..5_usize, max_cost in 1..60_u64,
        ) {
            let bound = limits(max_running, max_queued, max_cost);
            let mut admission = Admission::new(bound);
            let (mut costs, mut running, mut order) = (HashMap::new(), Vec::new(), Vec::new());
            let mut admitted = 0;
            for (cost, submit, pick) in steps {
                if submit {
                    if let Ok((ticket, _)) = admission.submit(cost) {
                        costs.insert(ticket, cost);
                        admitted += 1;
                    }
                } else if !running.is_empty() {
                    let ticket = running.remove(usize::from(pick) % running.len());
                    admission.leave(ticket, Some(Duration::from_millis(u64::from(pick))));
                }
                let started = admission.start();
                order.extend(started.iter().copied());
                running.extend(started);
                let total: u64 = running.iter().map(|ticket| costs[ticket]).sum();
                prop_assert!(running.len() <= max_running);
                prop_assert!(total <= max_cost || running.len() == 1);
                prop_assert!(admission.waiting() <= max_queued);
                prop_assert_eq!(admission.running(), running.len());
            }
            while let Some(ticket) = running.pop() {
                admission.leave(ticket, None);
                let started = admission.start();
                order.extend(started.iter().copied());
                running.extend(started);
            }
            prop_assert_eq!(order, (0..admitted).collect::<Vec<Ticket>>());
        }
    }
}
