//! How much work is let in, and who goes first. Pure: bounds on what runs and what waits, a line for each
//! tenant and class, and honest guesses of when something would be done.
//!
//! - **Order.** The most urgent class first; a request counts as one class higher for each
//!   [`Limits::class_wait`] that it has waited, so no class starves. Within a class the tenant that was served
//!   least comes first: what it started, as cost over the weight of its [`Quota`]. Who was idle has saved up
//!   nothing. Within a tenant and a class, in order of arrival.
//! - **Bounds.** Requests running and waiting, cost running, and the same counts of each tenant.
//! - **Deadlines.** A request that clearly cannot be done by its deadline is refused at once, with the time at
//!   which it could be, or as impossible if it could not be even alone.
mod line;
mod speed;

use std::{collections::HashMap, time::Duration};

use schedule::batching::Class;

use self::{
    line::{Lines, Waiting},
    speed::Speed,
};

/// Hints are at least and at most this.
const MIN_RETRY: Duration = Duration::from_millis(100);
const MAX_RETRY: Duration = Duration::from_secs(60);
/// A deadline is hopeless when what is predicted exceeds it by this factor: predictions are not that good.
const HOPELESS: f64 = 1.25;
/// Longest name of a tenant that is kept, in bytes.
pub const MAX_TENANT_BYTES: usize = 128;

/// What one tenant may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Quota {
    /// Requests dispatched at once.
    pub max_running: usize,
    /// Requests that may wait.
    pub max_queued: usize,
    /// Its share of the work, relative to that of others; at least 1.
    pub weight: u32,
}

impl Default for Quota {
    fn default() -> Self {
        Self {
            max_running: usize::MAX,
            max_queued: usize::MAX,
            weight: 1,
        }
    }
}

/// Bounds of a router.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Requests dispatched at once.
    pub max_running: usize,
    /// Requests that may wait.
    pub max_queued: usize,
    /// Cost dispatched at once; a request above it runs alone.
    pub max_cost: u64,
    /// Of a tenant that has none of its own.
    pub tenant: Quota,
    /// Waiting this long counts as being of the next higher class.
    pub class_wait: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            max_running: 64,
            max_queued: 256,
            max_cost: u64::MAX,
            tenant: Quota::default(),
            class_wait: Duration::from_secs(30),
        }
    }
}

/// Names an admitted request.
pub type Ticket = u64;

/// What a request asks for. Times are since an origin that all share.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Ask<'a> {
    /// steps x rows x tokens x images.
    pub cost: u64,
    /// How urgent it is.
    pub class: Class,
    /// Who pays for it; empty: nobody in particular.
    pub tenant: &'a str,
    /// What that one may take; `None`: [`Limits::tenant`].
    pub quota: Option<Quota>,
    /// When it comes.
    pub now: Duration,
    /// When it is of no use any more.
    pub deadline: Option<Duration>,
    /// Seconds that it is predicted to take by itself, where a worker told what its steps cost.
    pub alone: Option<f64>,
}

/// A request that was not let in.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Refused {
    /// The queue is full.
    Queue {
        /// Requests waiting.
        waiting: usize,
        /// When a place may be free.
        retry_after: Duration,
    },
    /// The tenant has as many waiting as it may.
    Tenant {
        /// Its requests waiting.
        waiting: usize,
        /// When one of them may have begun.
        retry_after: Duration,
    },
    /// Not by its deadline, with the work that is ahead of it.
    Late {
        /// How long it would take from now.
        needs: Duration,
        /// When there may be time for it.
        retry_after: Duration,
    },
    /// Not by its deadline even if it were alone.
    Hopeless {
        /// How long it takes alone.
        needs: Duration,
    },
}

/// A place that was taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Placed {
    /// Its name.
    pub ticket: Ticket,
    /// Requests waiting that were there before it.
    pub ahead: usize,
}

#[derive(Debug)]
struct Running {
    cost: u64,
    tenant: Box<str>,
    began: Duration,
}

/// What runs and what waits.
#[derive(Debug)]
pub struct Admission {
    limits: Limits,
    running: HashMap<Ticket, Running>,
    running_cost: u64,
    lines: Lines,
    next: Ticket,
    speed: Speed,
}

impl Admission {
    /// Nothing runs, nothing waits.
    pub fn new(limits: Limits) -> Self {
        Self {
            limits,
            running: HashMap::new(),
            running_cost: 0,
            lines: Lines::default(),
            next: 0,
            speed: Speed::default(),
        }
    }

    /// Takes a request into the queue; [`Admission::start`] says when it may run.
    ///
    /// # Errors
    /// A queue that is full, unless the request could start at once; a deadline that cannot be met.
    pub fn submit(&mut self, ask: Ask<'_>) -> Result<Placed, Refused> {
        let tenant = kept(ask.tenant);
        let mut quota = ask.quota.unwrap_or(self.limits.tenant);
        quota.weight = quota.weight.max(1);
        let (running, queued) = self.lines.of(tenant);
        let at_once = self.lines.is_empty() && self.fits(ask.cost) && running < quota.max_running;
        if !at_once && self.lines.len() >= self.limits.max_queued {
            let waiting = self.lines.len();
            let retry_after = self.hint(self.lines.cost().saturating_add(self.left(ask.now)));
            return Err(Refused::Queue {
                waiting,
                retry_after,
            });
        }
        if !at_once && queued >= quota.max_queued {
            // Its own work only: that of others is not in its way for longer than its share says.
            let retry_after = self.hint(
                self.lines
                    .cost_of(tenant)
                    .saturating_add(self.left_of(tenant)),
            );
            return Err(Refused::Tenant {
                waiting: queued,
                retry_after,
            });
        }
        self.in_time(&ask)?;
        let (ticket, ahead) = (self.next, self.lines.len());
        self.next += 1;
        let waiting = Waiting {
            ticket,
            cost: ask.cost,
            since: ask.now,
        };
        self.lines.push(tenant, quota, ask.class, waiting);
        Ok(Placed { ticket, ahead })
    }

    /// Requests that may run now, in the order in which they begin.
    pub fn start(&mut self, now: Duration) -> Vec<Ticket> {
        let mut started = Vec::new();
        while let Some(next) = self.lines.next(now, self.limits.class_wait) {
            // Who is next keeps the others from taking what is being freed for it.
            if !self.fits(next.cost()) {
                break;
            }
            let (tenant, waiting) = self.lines.take(next);
            let running = Running {
                cost: waiting.cost,
                tenant,
                began: now,
            };
            self.running.insert(waiting.ticket, running);
            self.running_cost = self.running_cost.saturating_add(waiting.cost);
            started.push(waiting.ticket);
        }
        started
    }

    /// A request has ended, wherever it was. `took`: how long it ran, if it ran to its end.
    pub fn leave(&mut self, ticket: Ticket, took: Option<Duration>) {
        let Some(running) = self.running.remove(&ticket) else {
            self.lines.remove(ticket);
            return;
        };
        self.lines.ended(&running.tenant);
        let together = self.running.len() + 1;
        // Not by subtraction: the sum may have saturated.
        let costs = self.running.values().map(|running| running.cost);
        self.running_cost = costs.fold(0, u64::saturating_add);
        if let Some(took) = took {
            self.speed.measure(running.cost, took, together);
        }
    }

    /// Requests waiting.
    pub fn waiting(&self) -> usize {
        self.lines.len()
    }

    /// Requests running.
    pub fn running(&self) -> usize {
        self.running.len()
    }

    /// Tenants that run or wait for something, or have lately been served more than others.
    pub fn tenants(&self) -> usize {
        self.lines.tenants()
    }

    fn fits(&self, cost: u64) -> bool {
        let alone = self.running.is_empty();
        let total = self.running_cost.checked_add(cost);
        let cheap = total.is_some_and(|total| total <= self.limits.max_cost);
        self.running.len() < self.limits.max_running && (cheap || alone)
    }

    /// Refuses what clearly will not be done by its deadline.
    fn in_time(&self, ask: &Ask<'_>) -> Result<(), Refused> {
        let Some(deadline) = ask.deadline else {
            return Ok(());
        };
        let there = deadline.saturating_sub(ask.now).as_secs_f64();
        let alone = ask.alone.filter(|seconds| seconds.is_finite());
        if let Some(alone) = alone.filter(|&alone| alone > there * HOPELESS) {
            let needs = seconds(alone);
            return Err(Refused::Hopeless { needs });
        }
        let Some(speed) = self.speed.known() else {
            return Ok(());
        };
        let ahead = self
            .lines
            .cost_before(ask.class)
            .saturating_add(self.left(ask.now));
        // It shares the machines with what runs, so its own part is done at the speed of all only when alone.
        #[allow(clippy::cast_precision_loss)] // a rate needs no more than 53 bits
        let own = alone.unwrap_or(ask.cost as f64 / speed);
        #[allow(clippy::cast_precision_loss)]
        let wait = if self.lines.is_empty() && self.fits(ask.cost) {
            0.0
        } else {
            ahead as f64 / speed
        };
        if wait + own <= there * HOPELESS {
            return Ok(());
        }
        let needs = seconds(wait + own);
        if wait <= 0.0 {
            return Err(Refused::Hopeless { needs });
        }
        let retry_after = seconds((wait + own - there).min(wait)).clamp(MIN_RETRY, MAX_RETRY);
        Err(Refused::Late { needs, retry_after })
    }

    /// Cost of what runs that is probably still to be done, by the time it has had.
    fn left(&self, now: Duration) -> u64 {
        let together = self.running.len();
        let left = |running: &Running| {
            let had = now.saturating_sub(running.began);
            self.speed.left(running.cost, had, together)
        };
        self.running.values().map(left).fold(0, u64::saturating_add)
    }

    /// Cost of what one tenant runs.
    fn left_of(&self, tenant: &str) -> u64 {
        let own = self
            .running
            .values()
            .filter(|running| *running.tenant == *tenant);
        own.map(|running| running.cost).fold(0, u64::saturating_add)
    }

    /// Time until `cost` is done.
    fn hint(&self, cost: u64) -> Duration {
        let places = self.limits.max_running.max(1);
        let ahead = self.running.len() + self.lines.len();
        let seconds = self.speed.seconds(cost, ahead, places);
        Duration::try_from_secs_f64(seconds)
            .unwrap_or(MAX_RETRY)
            .clamp(MIN_RETRY, MAX_RETRY)
    }
}

/// Names are told apart by their first bytes only, so that nobody can fill the memory with them.
fn kept(tenant: &str) -> &str {
    &tenant[..tenant.floor_char_boundary(MAX_TENANT_BYTES)]
}

/// What is no time at all, or more than can be told, is the longest there is.
fn seconds(seconds: f64) -> Duration {
    Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX)
}

#[cfg(test)]
mod tests;
