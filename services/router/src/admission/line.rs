//! Who waits: a line for each tenant and class.
use std::{
    collections::{HashMap, VecDeque},
    time::Duration,
};

use schedule::batching::Class;

use super::{Quota, Ticket};

/// Tenants that are remembered beyond those that have something here.
pub(super) const MAX_TENANTS: usize = 1_024;

/// A request that waits.
#[derive(Debug, Clone, Copy)]
pub(super) struct Waiting {
    pub(super) ticket: Ticket,
    pub(super) cost: u64,
    pub(super) since: Duration,
}

#[derive(Debug, Default)]
struct Tenant {
    quota: Quota,
    running: usize,
    /// By class.
    lines: [VecDeque<Waiting>; 3],
    /// Cost over weight of what has begun, on a scale where an idle tenant starts at the present.
    served: f64,
}

impl Tenant {
    fn queued(&self) -> usize {
        self.lines.iter().map(VecDeque::len).sum()
    }
}

/// All lines.
#[derive(Debug, Default)]
pub(super) struct Lines {
    tenants: HashMap<Box<str>, Tenant>,
    queued: usize,
    /// Cost waiting, by class. Sums of 64-bit costs.
    cost: [u128; 3],
    /// What the tenant that was served last had been served before: the present.
    present: f64,
}

/// The request that is next, by its line.
#[derive(Debug)]
pub(super) struct Next {
    tenant: Box<str>,
    class: usize,
    cost: u64,
}

impl Next {
    pub(super) fn cost(&self) -> u64 {
        self.cost
    }
}

impl Lines {
    pub(super) fn is_empty(&self) -> bool {
        self.queued == 0
    }

    pub(super) fn len(&self) -> usize {
        self.queued
    }

    pub(super) fn tenants(&self) -> usize {
        self.tenants.len()
    }

    /// Requests of a tenant that run and that wait.
    pub(super) fn of(&self, tenant: &str) -> (usize, usize) {
        let found = self.tenants.get(tenant);
        found.map_or((0, 0), |tenant| (tenant.running, tenant.queued()))
    }

    /// Cost of all that waits.
    pub(super) fn cost(&self) -> u64 {
        narrow(self.cost.iter().sum())
    }

    /// Cost of what waits and is as urgent as `class` or more.
    pub(super) fn cost_before(&self, class: Class) -> u64 {
        narrow(self.cost.iter().take(class as usize + 1).sum())
    }

    /// Cost of what a tenant has waiting.
    pub(super) fn cost_of(&self, tenant: &str) -> u64 {
        let lines = self.tenants.get(tenant).map(|tenant| &tenant.lines);
        let waiting = lines.into_iter().flatten().flatten();
        narrow(waiting.map(|waiting| u128::from(waiting.cost)).sum())
    }

    pub(super) fn push(&mut self, name: &str, quota: Quota, class: Class, waiting: Waiting) {
        if !self.tenants.contains_key(name) {
            self.forget();
        }
        let tenant = self.tenants.entry(name.into()).or_default();
        if tenant.running == 0 && tenant.queued() == 0 {
            tenant.served = tenant.served.max(self.present);
        }
        tenant.quota = quota;
        tenant.lines[class as usize].push_back(waiting);
        self.queued += 1;
        self.cost[class as usize] += u128::from(waiting.cost);
    }

    /// Who is next, if anybody may be: tenants at their bound are passed over.
    pub(super) fn next(&self, now: Duration, class_wait: Duration) -> Option<Next> {
        let heads = self.tenants.iter().flat_map(|(name, tenant)| {
            let open = tenant.running < tenant.quota.max_running;
            let lines = tenant.lines.iter().enumerate().filter(move |_| open);
            lines.filter_map(move |(class, line)| {
                let head = line.front()?;
                let rank = rank(class, now.saturating_sub(head.since), class_wait);
                Some((rank, tenant.served, head, name, class))
            })
        });
        // Equal in everything: in order of arrival.
        let least = heads.min_by(|a, b| {
            let served = a.1.total_cmp(&b.1);
            a.0.cmp(&b.0).then(served).then(a.2.ticket.cmp(&b.2.ticket))
        })?;
        let (_, _, head, name, class) = least;
        Some(Next {
            tenant: name.clone(),
            class,
            cost: head.cost,
        })
    }

    /// The next one begins.
    pub(super) fn take(&mut self, next: Next) -> (Box<str>, Waiting) {
        let Next {
            tenant: name,
            class,
            cost,
        } = next;
        // The line is there: nothing has changed since it was found.
        let none = Waiting {
            ticket: Ticket::MAX,
            cost,
            since: Duration::ZERO,
        };
        let Some(tenant) = self.tenants.get_mut(&name) else {
            return (name, none);
        };
        let waiting = tenant.lines[class].pop_front().unwrap_or(none);
        tenant.running += 1;
        self.present = self.present.max(tenant.served);
        #[allow(clippy::cast_precision_loss)] // a share needs no more than 53 bits
        let share = waiting.cost as f64 / f64::from(tenant.quota.weight);
        tenant.served += share;
        self.queued -= 1;
        self.cost[class] -= u128::from(waiting.cost);
        (name, waiting)
    }

    /// A request that waits leaves.
    pub(super) fn remove(&mut self, ticket: Ticket) {
        for tenant in self.tenants.values_mut() {
            for (class, line) in tenant.lines.iter_mut().enumerate() {
                // Tickets of a line grow.
                if let Ok(at) = line.binary_search_by_key(&ticket, |waiting| waiting.ticket)
                    && let Some(waiting) = line.remove(at)
                {
                    self.queued -= 1;
                    self.cost[class] -= u128::from(waiting.cost);
                    return;
                }
            }
        }
    }

    /// A running request of a tenant has ended.
    pub(super) fn ended(&mut self, name: &str) {
        if let Some(tenant) = self.tenants.get_mut(name) {
            tenant.running = tenant.running.saturating_sub(1);
        }
    }

    /// Makes room once [`MAX_TENANTS`] are known: first those go that have nothing here and nothing to make up for,
    /// then, if that was not enough, all that have nothing here.
    fn forget(&mut self) {
        let present = self.present;
        for owed in [true, false] {
            if self.tenants.len() >= MAX_TENANTS {
                self.tenants.retain(|_, tenant| {
                    let here = tenant.running > 0 || tenant.queued() > 0;
                    here || (owed && tenant.served > present)
                });
            }
        }
    }
}

/// Position of a class, one less for each `class_wait` of waiting, but never above the most urgent: among those the
/// tenants' shares decide, and within a tenant the time of arrival.
fn rank(class: usize, waited: Duration, class_wait: Duration) -> usize {
    let promoted = waited.as_nanos() / class_wait.as_nanos().max(1);
    class.saturating_sub(usize::try_from(promoted).unwrap_or(usize::MAX))
}

fn narrow(cost: u128) -> u64 {
    u64::try_from(cost).unwrap_or(u64::MAX)
}
