//! Who is in the next step, by what steps cost: the rules that the router plans and simulates with
//! ([`schedule::batching`]), on this worker's own step times.
use std::{
    collections::{BTreeMap, BTreeSet},
    time::{Duration, Instant},
};

use base::clock;
use schedule::{
    batching::{
        Class as Urgency, Decision, Job, JobId, Limits, State,
        cost::{self, Rules},
    },
    cost::{Constants, Predictor, Rows},
};

use crate::batch::{Class, StepLimits, Terms, Weight};

/// How a worker chooses who steps together.
#[derive(Debug, Clone, Copy)]
pub struct Forming {
    /// Bounds of one packed step.
    pub limits: StepLimits,
    /// What a step costs; `None`: within a class everybody who fits steps, in order of arrival.
    pub costs: Option<Constants>,
}

impl From<StepLimits> for Forming {
    fn from(limits: StepLimits) -> Self {
        Self {
            limits,
            costs: None,
        }
    }
}

/// What is still to do, as others may want to know it.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Outlook {
    /// Seconds until everything here is done; 0: nothing to do, or not predicted.
    pub backlog_s: f64,
    /// Measured over predicted step time lately; 0: nothing was measured.
    pub ratio: f64,
}

/// The jobs of a batch, as the rules see them.
#[derive(Debug)]
pub(crate) struct Former {
    state: State,
    predictor: Predictor,
    rules: Rules,
    /// Times are since then.
    origin: Instant,
    measured: bool,
}

/// A job of the batch.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Candidate {
    pub(crate) id: JobId,
    pub(crate) weight: Weight,
    pub(crate) terms: Terms,
    /// Steps done.
    pub(crate) done: usize,
}

impl Former {
    pub(crate) fn new(limits: StepLimits, constants: Constants) -> Self {
        let limits = Limits {
            max_rows: limits.max_rows as u64,
            max_tokens: limits.max_tokens as u64,
            // Memory is the ledger's: who is here has been given its own.
            max_bytes: u64::MAX,
            token_bytes: 0,
        };
        Self {
            state: State::new(limits),
            predictor: Predictor::new(constants),
            rules: Rules::default(),
            origin: clock::now(),
            measured: false,
        }
    }

    /// Who of `jobs` is in the next step; of some, one always is.
    pub(crate) fn choose(&mut self, jobs: &[Candidate]) -> BTreeSet<JobId> {
        self.keep(jobs);
        let now = self.since(clock::now());
        for decision in cost::step(now, &self.state, &self.predictor, &self.rules) {
            // Who is late is ended by its router, which leaves no caller here.
            if !matches!(decision, Decision::Expire(_)) {
                self.state.apply(decision);
            }
        }
        let live: BTreeSet<JobId> = self.state.live().map(|entry| entry.job.id).collect();
        if live.is_empty() {
            // Never by these rules; a batch that stood still would be worse than one job in a wrong order.
            return jobs.first().map(|job| job.id).into_iter().collect();
        }
        live
    }

    /// The chosen jobs took a step of `elapsed`.
    pub(crate) fn stepped(&mut self, elapsed: Duration) {
        self.predictor
            .observe(self.state.load(), elapsed.as_secs_f64());
        self.measured = true;
        self.state.advance();
    }

    /// What is left to do.
    pub(crate) fn outlook(&self) -> Outlook {
        Outlook {
            backlog_s: self.state.backlog(&self.predictor),
            ratio: if self.measured {
                self.predictor.correction.ratio()
            } else {
                0.0
            },
        }
    }

    /// Brings the state in line with the jobs that are there: who left has left, who came, or did not do a step
    /// that was counted, comes in as it stands.
    fn keep(&mut self, jobs: &[Candidate]) {
        let there: BTreeMap<JobId, &Candidate> = jobs.iter().map(|job| (job.id, job)).collect();
        let known: Vec<JobId> = self.state.entries().map(|entry| entry.job.id).collect();
        for id in known.iter().filter(|id| !there.contains_key(id)) {
            self.state.remove(*id);
        }
        for (id, job) in there.iter().filter(|(id, _)| !known.contains(id)) {
            self.state.push(self.job(*id, job));
        }
    }

    fn job(&self, id: JobId, candidate: &Candidate) -> Job {
        let Candidate { weight, terms, .. } = candidate;
        let rows = weight.rows.max(1);
        let left = terms.steps.saturating_sub(candidate.done).max(1);
        Job {
            id,
            class: match terms.class {
                Class::Interactive => Urgency::Interactive,
                Class::Standard => Urgency::Standard,
                Class::Background => Urgency::Background,
            },
            arrived: self.since(terms.arrived),
            deadline: terms.due.map(|due| self.since(due)),
            rows: Rows {
                rows: narrow(rows),
                tokens: narrow(weight.tokens / rows),
                prefix: narrow(terms.prefix),
            },
            edit: false,
            steps: narrow(left),
            prefix_bytes: 0,
        }
    }

    /// Since the origin; what came before it counts as having come then.
    fn since(&self, when: Instant) -> Duration {
        when.saturating_duration_since(self.origin)
    }

    /// Jobs that have begun and wait.
    #[cfg(test)]
    pub(crate) fn parked(&self) -> usize {
        let parked =
            |entry: &&schedule::batching::Entry| entry.place == schedule::batching::Place::Parked;
        self.state.entries().filter(parked).count()
    }
}

fn narrow(value: usize) -> u32 {
    u32::try_from(value).unwrap_or(u32::MAX)
}
