//! Which jobs share the next step of one worker. Pure: a clock reading and the worker's [`State`] come in,
//! [`Decision`]s come out; whoever runs the steps applies them and reports what happened.
//!
//! At every step boundary the batch is chosen anew ([`cost`]). Who is not in it is parked: latents and steps done
//! stay, and so do prefix keys and values, so a parked job goes on where it stopped. [`fifo`] is what cost is compared
//! with.
pub mod cost;
pub mod fifo;

use std::{collections::BTreeMap, time::Duration};

use serde::{Deserialize, Serialize};

use crate::cost::{Load, Predictor, Rows};

/// Names a job.
pub type JobId = u64;

/// How urgent a job is. A lower class waits for a higher one, but not for ever, see [`cost::Rules::class_s`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Class {
    /// Somebody is looking at the screen.
    Interactive,
    /// The default.
    Standard,
    /// Whenever there is room.
    Background,
}

impl Class {
    /// From the most urgent.
    pub const ALL: [Self; 3] = [Self::Interactive, Self::Standard, Self::Background];

    /// As it is written.
    pub fn name(self) -> &'static str {
        match self {
            Self::Interactive => "interactive",
            Self::Standard => "standard",
            Self::Background => "background",
        }
    }
}

/// One image to be denoised. Times are since an origin that all share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Job {
    /// Its name, unique on its worker.
    pub id: JobId,
    /// Its class.
    pub class: Class,
    /// When it came to the worker.
    pub arrived: Duration,
    /// When it is of no use any more.
    pub deadline: Option<Duration>,
    /// What it adds to a step.
    pub rows: Rows,
    /// It edits a picture: part of what [`fifo`] calls the shape.
    pub edit: bool,
    /// All its steps.
    pub steps: u32,
    /// Bytes of its prefixes, held from the first step to the last.
    pub prefix_bytes: u64,
}

impl Job {
    /// What it adds to a step.
    pub fn load(&self) -> Load {
        Load::from(self.rows)
    }

    fn tokens(&self) -> u64 {
        u64::from(self.rows.rows) * u64::from(self.rows.tokens)
    }
}

/// Where a job stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// It has not begun and holds nothing.
    Waiting,
    /// It is in the next step.
    Live,
    /// It has begun and holds its prefixes and latents, but is not in the next step.
    Parked,
}

/// A job and how far it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Entry {
    /// The job.
    pub job: Job,
    /// Where it stands.
    pub place: Place,
    /// Steps done.
    pub done: u32,
}

impl Entry {
    /// Steps to do.
    pub fn left(&self) -> u32 {
        self.job.steps.saturating_sub(self.done)
    }
}

/// Bounds of one step and of what a worker holds. A job beyond them still runs, alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Limits {
    /// Most rows in one step.
    pub max_rows: u64,
    /// Most query tokens in one step.
    pub max_tokens: u64,
    /// Bytes for prefixes of live and parked jobs and for the tokens of a step.
    pub max_bytes: u64,
    /// Bytes that a query token needs in its step.
    pub token_bytes: u64,
}

/// What to do at a step boundary.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Decision {
    /// A waiting job begins.
    Join(JobId),
    /// A parked job goes on.
    Resume(JobId),
    /// A live job makes room.
    Park(JobId),
    /// The deadline of a job has passed; it leaves.
    Expire(JobId),
}

/// The jobs of one worker.
#[derive(Debug, Clone)]
pub struct State {
    limits: Limits,
    entries: BTreeMap<JobId, Entry>,
}

impl State {
    /// No jobs.
    pub fn new(limits: Limits) -> Self {
        Self {
            limits,
            entries: BTreeMap::new(),
        }
    }

    /// The bounds.
    pub fn limits(&self) -> Limits {
        self.limits
    }

    /// A job came. False: one of this name is there, or it has no steps; nothing changed.
    pub fn push(&mut self, job: Job) -> bool {
        if job.steps == 0 || self.entries.contains_key(&job.id) {
            return false;
        }
        let entry = Entry {
            job,
            place: Place::Waiting,
            done: 0,
        };
        self.entries.insert(job.id, entry);
        true
    }

    /// A job leaves for a reason of its own, such as a cancel.
    pub fn remove(&mut self, id: JobId) -> Option<Entry> {
        self.entries.remove(&id)
    }

    /// All jobs, by name.
    pub fn entries(&self) -> impl Iterator<Item = &Entry> {
        self.entries.values()
    }

    /// The jobs of the next step, by name.
    pub fn live(&self) -> impl Iterator<Item = &Entry> {
        self.entries().filter(|entry| entry.place == Place::Live)
    }

    /// What the next step holds.
    pub fn load(&self) -> Load {
        self.live().map(|entry| entry.job.load()).sum()
    }

    /// Does what was decided. False: the job is not where the decision needs it; nothing changed.
    pub fn apply(&mut self, decision: Decision) -> bool {
        let (id, from, to) = match decision {
            Decision::Expire(id) => return self.entries.remove(&id).is_some(),
            Decision::Join(id) => (id, Place::Waiting, Place::Live),
            Decision::Resume(id) => (id, Place::Parked, Place::Live),
            Decision::Park(id) => (id, Place::Live, Place::Parked),
        };
        match self.entries.get_mut(&id) {
            Some(entry) if entry.place == from => {
                entry.place = to;
                true
            }
            _ => false,
        }
    }

    /// A step was run: every live job is one step further. Answers those that are done; they have left.
    pub fn advance(&mut self) -> Vec<Entry> {
        let mut finished = Vec::new();
        for entry in self.entries.values_mut() {
            if entry.place == Place::Live {
                entry.done += 1;
                if entry.left() == 0 {
                    finished.push(*entry);
                }
            }
        }
        for entry in &finished {
            self.entries.remove(&entry.job.id);
        }
        finished
    }

    /// Seconds until everything here is done, as predicted: everybody's own share of its steps, and what is paid
    /// once in as many steps as the longest job has left.
    pub fn backlog(&self, predictor: &Predictor) -> f64 {
        let own = |entry: &Entry| predictor.marginal(entry.job.load()) * f64::from(entry.left());
        let own: f64 = self.entries().map(own).sum();
        let all: Load = self.entries().map(|entry| entry.job.load()).sum();
        let longest = self.entries().map(Entry::left).max().unwrap_or(0);
        let once = (predictor.step(all) - predictor.marginal(all)).max(0.0);
        own + once * f64::from(longest)
    }

    /// Jobs whose deadline has passed, as decisions.
    fn expired(&self, now: Duration) -> Vec<Decision> {
        let late = |entry: &&Entry| has_expired(entry, now);
        let late = self.entries().filter(late);
        late.map(|entry| Decision::Expire(entry.job.id)).collect()
    }
}

fn has_expired(entry: &Entry, now: Duration) -> bool {
    entry.job.deadline.is_some_and(|deadline| deadline <= now)
}

/// What a batch that is being chosen takes of the limits.
#[derive(Debug, Clone, Copy, Default)]
struct Room {
    jobs: usize,
    rows: u64,
    tokens: u64,
    /// Prefixes of everything that has begun, in the batch or not.
    held: u64,
}

impl Room {
    /// `held`: bytes of the prefixes of jobs that have begun.
    fn new(held: u64) -> Self {
        Self {
            held,
            ..Self::default()
        }
    }

    /// The room with `entry` in it; `None`: there is not enough. The first job of a batch always fits into a
    /// step, but one that has not begun must wait for memory that others hold.
    fn with(self, entry: &Entry, limits: &Limits) -> Option<Self> {
        let begins = entry.place == Place::Waiting;
        let fresh = if begins { entry.job.prefix_bytes } else { 0 };
        let more = Self {
            jobs: self.jobs + 1,
            rows: self.rows + u64::from(entry.job.rows.rows),
            tokens: self.tokens + entry.job.tokens(),
            held: self.held.saturating_add(fresh),
        };
        let working = more.tokens.saturating_mul(limits.token_bytes);
        let bytes = more.held.saturating_add(working) <= limits.max_bytes;
        let step = more.rows <= limits.max_rows && more.tokens <= limits.max_tokens && bytes;
        let first = self.jobs == 0 && (bytes || !begins || self.held == 0);
        (step || first).then_some(more)
    }
}

#[cfg(test)]
mod tests;
