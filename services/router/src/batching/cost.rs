//! Batching decided by cost.
//!
//! Jobs are ordered by target: the deadline, or without one the time of arrival and [`Rules::stretch`] times what the
//! job would take alone; and each class down counts as [`Rules::class_s`] later. So small jobs come first, the
//! earliest deadline of a class comes first, and as targets do not move while the clock does, none can be overtaken
//! for ever. The first job is in the batch; each one after it joins if
//!
//! - it fits into the limits,
//! - it pays: the time that sharing saves is at least [`Rules::pay`] of the job's own step, and the step still
//!   spends [`Rules::overhead`] of its time on what is paid once a step, and
//! - no job before it that could still meet its target would miss it: neither one in the batch if the batch stayed as
//!   it is, nor any if after this step the rest ran one after the other.
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
    /// Seconds by which the target of a job counts as later than that of one a class above. This is how long a
    /// lower class may be held up by a higher one that is always there.
    pub class_s: f64,
    /// Times its own run that a job without a deadline may take before it counts as late.
    pub stretch: f64,
}

impl Default for Rules {
    fn default() -> Self {
        Self {
            pay: 0.05,
            overhead: 0.02,
            class_s: 30.0,
            stretch: 6.0,
        }
    }
}

/// Order of jobs: the least comes first.
type Key = (Duration, Duration, JobId);

/// A job in the order.
struct Candidate<'a> {
    entry: &'a Entry,
    load: Load,
    target: Duration,
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
    let duration = |seconds| Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX);
    let target = job.deadline.unwrap_or_else(|| {
        // Without the correction: an order that moved with it would park jobs for nothing.
        let alone = predictor.constants.step(load) * f64::from(job.steps);
        job.arrived.saturating_add(duration(alone * rules.stretch))
    });
    let later = duration(rules.class_s * f64::from(job.class as u8));
    Candidate {
        entry,
        load,
        target,
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
    let mut batch = Batch::new(held.map(|entry| entry.job.prefix_bytes).sum());
    // The first job that lacks memory keeps later ones from taking what is being freed for it.
    let mut blocked = false;
    for candidate in order {
        let waiting = candidate.entry.place == Place::Waiting;
        let alone = predictor.step(candidate.load);
        let room = batch.room.with(candidate.entry, &state.limits);
        blocked |= waiting && room.is_none();
        let room = room.filter(|_| !(blocked && waiting));
        match room.filter(|_| batch.accepts(candidate.load, alone, predictor, rules)) {
            Some(room) => batch.take(now, candidate, alone, room),
            None => batch.skip(now, candidate, alone),
        }
    }
    batch.chosen
}

/// A batch that is being chosen.
struct Batch {
    room: Room,
    load: Load,
    chosen: BTreeSet<JobId>,
    /// Seconds that the steps of the chosen jobs would take, each alone.
    apart: f64,
    /// Seconds that all jobs so far need one after the other.
    serial: f64,
    /// Seconds that the step may take.
    longest: f64,
}

impl Batch {
    fn new(held: u64) -> Self {
        Self {
            room: Room::new(held),
            load: Load::default(),
            chosen: BTreeSet::new(),
            apart: 0.0,
            serial: 0.0,
            longest: f64::INFINITY,
        }
    }

    fn take(&mut self, now: Duration, job: &Candidate<'_>, alone: f64, room: Room) {
        self.room = room;
        self.load = self.load + job.load;
        self.chosen.insert(job.entry.job.id);
        self.apart += alone;
        let pace = job.seconds(now) / job.left();
        // Who would be late even alone holds nobody up.
        if pace >= alone {
            self.longest = self.longest.min(pace);
        }
        self.skip(now, job, alone);
    }

    /// The job is considered. If it is in time once those before it and itself have run one after the other, it has
    /// to be so after this step, which takes from that what its jobs would have taken alone.
    fn skip(&mut self, now: Duration, job: &Candidate<'_>, alone: f64) {
        self.serial += alone * job.left();
        let slack = job.seconds(now) - self.serial;
        if slack >= 0.0 {
            self.longest = self.longest.min(slack + self.apart);
        }
    }

    /// Whether a job of `load`, whose step alone takes `alone` seconds, should join.
    fn accepts(&self, load: Load, alone: f64, predictor: &Predictor, rules: &Rules) -> bool {
        if self.chosen.is_empty() {
            return true;
        }
        let with = predictor.step(self.load + load);
        let without = predictor.step(self.load);
        let saved = without + alone - with;
        let overhead = without - predictor.marginal(self.load);
        let pays = saved >= rules.pay * alone && overhead >= rules.overhead * without;
        pays && with <= self.longest
    }
}

impl Candidate<'_> {
    /// Until the target.
    fn seconds(&self, now: Duration) -> f64 {
        self.target.saturating_sub(now).as_secs_f64()
    }

    /// Steps to do.
    fn left(&self) -> f64 {
        f64::from(self.entry.left().max(1))
    }
}
