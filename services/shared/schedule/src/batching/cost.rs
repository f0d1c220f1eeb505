//! Batching decided by cost.
//!
//! Jobs are ordered by target: the time of arrival and [`Rules::stretch`] times what the job would take alone, or its
//! deadline if that is sooner; and each class down counts as later, by [`Rules::class_s`] and by
//! [`Rules::class_stretch`] times its own run: among jobs of one size the class decides, and a small job of a low class
//! costs a large one of a high class next to nothing. So small jobs come first, and as targets do not move while the
//! clock does, none can be overtaken for ever. Before them come deadlines that could no longer be met otherwise, the
//! earliest first. The first job is in the batch; each one after it joins if
//!
//! - it fits into the limits,
//! - it pays: the time that sharing saves is at least [`Rules::pay`] of the job's own step, and the step still
//!   spends [`Rules::overhead`] of its time on what is paid once a step, and
//! - it makes nobody late ([`Rules::late`]): no job in the batch that could still be in time, if the batch stayed as it
//!   is, and no deadline that can be met when from now on only jobs with deadlines run, one after the other.
use std::{collections::BTreeSet, time::Duration};

use serde::{Deserialize, Serialize};

use super::{Decision, Entry, JobId, Place, Room, State, has_expired};
use crate::cost::{Load, Predictor};

/// When batching pays.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Rules {
    /// Least saving by sharing, as a share of the job's step alone.
    pub pay: f64,
    /// Least share of a step that is paid whoever is in it, for one more to join.
    pub overhead: f64,
    /// Seconds by which the target of a job counts as later than that of one a class above.
    pub class_s: f64,
    /// Times its own run by which it counts as later still. With `class_s` this is how long a lower class may be held up
    /// by a higher one that is always there.
    pub class_stretch: f64,
    /// Seconds after its target from which a job gives way to no deadline any more.
    pub overdue_s: f64,
    /// Times its own run by which the target of a job is later than its arrival: the larger, the sooner small jobs come.
    pub stretch: f64,
    /// Times its own run that a job may take before it counts as late, and of its own step that a step may take which
    /// a late one is in.
    pub late: f64,
}

impl Default for Rules {
    fn default() -> Self {
        Self {
            pay: 0.05,
            overhead: 0.02,
            class_s: 3.0,
            class_stretch: 6.0,
            overdue_s: 30.0,
            stretch: 16.0,
            late: 3.0,
        }
    }
}

/// Order of jobs: the least comes first.
type Key = (Duration, Duration, JobId);

/// A job in the order.
struct Candidate<'a> {
    entry: &'a Entry,
    load: Load,
    /// When it would be late.
    late: Duration,
    key: Key,
}

/// What to do at the boundary before the next step: whoever is live afterwards is in it.
pub fn step(now: Duration, state: &State, predictor: &Predictor, rules: &Rules) -> Vec<Decision> {
    let mut decisions = state.expired(now);
    let mut order: Vec<Candidate<'_>> = state
        .entries()
        .filter(|entry| !has_expired(entry, now))
        .map(|entry| candidate(entry, predictor, rules))
        .collect();
    order.sort_by_key(|candidate| candidate.key);
    let chosen = choose(now, state, &order, predictor, rules);
    // Room is made before it is taken.
    for candidate in &order {
        let id = candidate.entry.job.id;
        if candidate.entry.place == Place::Live && !chosen.contains(&id) {
            decisions.push(Decision::Park(id));
        }
    }
    for candidate in order.iter().filter(|c| chosen.contains(&c.entry.job.id)) {
        let id = candidate.entry.job.id;
        match candidate.entry.place {
            Place::Live => {}
            Place::Waiting => decisions.push(Decision::Join(id)),
            Place::Parked => decisions.push(Decision::Resume(id)),
        }
    }
    decisions
}

fn candidate<'a>(entry: &'a Entry, predictor: &Predictor, rules: &Rules) -> Candidate<'a> {
    let (job, load) = (&entry.job, entry.job.load());
    // Without the correction: an order that moved with it would park jobs for nothing.
    let alone = predictor.constants.step(load) * f64::from(job.steps);
    let within = |times: f64| {
        let at = job.arrived.saturating_add(duration(alone * times));
        job.deadline.map_or(at, |due| due.min(at))
    };
    let target = within(rules.stretch);
    let later = rules.class_s + rules.class_stretch * alone;
    let later = duration(later * f64::from(job.class as u8));
    Candidate {
        entry,
        load,
        late: within(rules.late),
        key: (target.saturating_add(later), job.arrived, job.id),
    }
}

/// The batch, from jobs in order.
fn choose(
    now: Duration,
    state: &State,
    order: &[Candidate<'_>],
    predictor: &Predictor,
    rules: &Rules,
) -> BTreeSet<JobId> {
    let begun = |entry: &&Entry| entry.place != Place::Waiting && !has_expired(entry, now);
    let held = state.entries().filter(begun);
    let mut batch = Batch {
        room: Room::new(held.map(|entry| entry.job.prefix_bytes).sum()),
        load: Load::default(),
        chosen: BTreeSet::new(),
        longest: f64::INFINITY,
        promises: promises(now, order, predictor),
    };
    let pressing = batch.pressing(now, order, predictor, rules);
    let urgent = |candidate: &&Candidate<'_>| pressing.contains(&candidate.entry.job.id);
    let mut first: Vec<_> = order.iter().filter(urgent).collect();
    first.sort_by_key(|candidate| (candidate.entry.job.deadline, candidate.entry.job.id));
    let rest = order.iter().filter(|candidate| !urgent(candidate));
    // The first job that lacks memory keeps later ones from taking what is being freed for it.
    let mut blocked = false;
    for candidate in first.into_iter().chain(rest) {
        let waiting = candidate.entry.place == Place::Waiting;
        if blocked && waiting {
            continue;
        }
        match batch.room.with(candidate.entry, &state.limits) {
            None => blocked |= waiting,
            Some(room) => {
                if batch.accepts(candidate, predictor, rules) {
                    batch.take(now, candidate, (predictor, rules), room);
                }
            }
        }
    }
    batch.chosen
}

/// A deadline that can be met.
struct Promise {
    id: JobId,
    /// Seconds that are left over if jobs with deadlines run one after the other, the earliest deadline first.
    slack: f64,
    /// Seconds that the batch's step takes off what has to run until this deadline.
    gained: f64,
}

/// Deadlines that can be met, the earliest first.
fn promises(now: Duration, order: &[Candidate<'_>], predictor: &Predictor) -> Vec<Promise> {
    let due = |c: &Candidate<'_>| c.entry.job.deadline;
    let mut candidates: Vec<_> = order.iter().filter(|c| due(c).is_some()).collect();
    candidates.sort_by_key(|c| (due(c), c.entry.job.id));
    let (mut serial, mut promises) = (0.0, Vec::new());
    for candidate in candidates {
        let needed = predictor.step(candidate.load) * candidate.left();
        let there = due(candidate).unwrap_or(now).saturating_sub(now);
        let slack = there.as_secs_f64() - serial - needed;
        // Who cannot be in time takes nothing from those who can.
        if slack >= 0.0 {
            serial += needed;
            promises.push(Promise {
                id: candidate.entry.job.id,
                slack,
                gained: 0.0,
            });
        }
    }
    promises
}

/// A batch that is being chosen.
struct Batch {
    room: Room,
    load: Load,
    chosen: BTreeSet<JobId>,
    /// Seconds that the step may take for none of the chosen jobs to become late.
    longest: f64,
    promises: Vec<Promise>,
}

impl Batch {
    /// Jobs that have to come before all others because a deadline would be missed if the first of `order` ran now.
    /// A job that is long overdue does not give way any more.
    fn pressing(
        &self,
        now: Duration,
        order: &[Candidate<'_>],
        predictor: &Predictor,
        rules: &Rules,
    ) -> BTreeSet<JobId> {
        let Some(first) = order.first() else {
            return BTreeSet::new();
        };
        let overdue = first.key.0.saturating_add(duration(rules.overdue_s)) <= now;
        let alone = predictor.step(first.load);
        let broken = self.broken(first, alone, alone);
        let count = broken.filter(|_| !overdue).map_or(0, |last| last + 1);
        let pressing = self.promises.iter().take(count);
        pressing.map(|promise| promise.id).collect()
    }

    /// The last promise that a step of `seconds` breaks if `job`, which takes `alone` seconds by itself, is in it.
    fn broken(&self, job: &Candidate<'_>, alone: f64, seconds: f64) -> Option<usize> {
        let own = self.promises.iter().position(|p| p.id == job.entry.job.id);
        let breaks = |at: &usize| {
            let promise = &self.promises[*at];
            let own = own.is_some_and(|own| own <= *at);
            seconds > promise.slack + promise.gained + if own { alone } else { 0.0 }
        };
        (0..self.promises.len()).rev().find(breaks)
    }

    fn take(
        &mut self,
        now: Duration,
        job: &Candidate<'_>,
        (predictor, rules): (&Predictor, &Rules),
        room: Room,
    ) {
        let alone = predictor.step(job.load);
        self.room = room;
        self.load = self.load + job.load;
        self.chosen.insert(job.entry.job.id);
        let pace = job.late.saturating_sub(now).as_secs_f64() / job.left();
        // Who would be late even alone is not to become much later.
        let pace = if pace >= alone {
            pace
        } else {
            alone * rules.late
        };
        self.longest = self.longest.min(pace);
        let own = self.promises.iter().position(|p| p.id == job.entry.job.id);
        for promise in self.promises.iter_mut().skip(own.unwrap_or(usize::MAX)) {
            promise.gained += alone;
        }
    }

    /// Whether a job that fits should join.
    fn accepts(&self, job: &Candidate<'_>, predictor: &Predictor, rules: &Rules) -> bool {
        if self.chosen.is_empty() {
            return true;
        }
        let alone = predictor.step(job.load);
        let with = predictor.step(self.load + job.load);
        let without = predictor.step(self.load);
        let saved = without + alone - with;
        let overhead = without - predictor.marginal(self.load);
        let pays = saved >= rules.pay * alone && overhead >= rules.overhead * without;
        pays && with <= self.longest && self.broken(job, alone, with).is_none()
    }
}

impl Candidate<'_> {
    /// Steps to do.
    fn left(&self) -> f64 {
        f64::from(self.entry.left().max(1))
    }
}

/// Seconds that may be too many to be told.
fn duration(seconds: f64) -> Duration {
    Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX)
}
